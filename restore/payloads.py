"""GPU payloads of checkpoints in the field, by their manifests, read strictly. Pure.

Neither format has checksums: only loading from an image verifies these bytes.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from imgfmt.errors import InvalidInput, Unsupported
from restore.spec import TensorSpec, octets

MANIFEST_LIMIT_BYTES = 64 << 20
MAX_ALLOCATIONS = 1_000_000
MAX_DEVICES = 1024
_MAX_BYTES = 2**48

GMS_MANIFEST = "manifest.json"
"""Of one device's directory of the GPU Memory Service, beside `shards/`."""

CUSTOM_MANIFEST = "manifest.txt"
"""Of a CUDA CustomStorage checkpoint, beside `device-0000.bin` and so on."""

CUSTOM_VERSION = 4
_DEVICE = re.compile(
    r"device (0|[1-9][0-9]{0,3}) (GPU-[0-9a-fA-F-]{1,64}) (0|[1-9][0-9]{0,15}) (\S{1,255})"
)


@dataclass(frozen=True, slots=True)
class CustomDevice:
    """One line of a CustomStorage manifest: the memory of one GPU, in one file."""

    index: int
    uuid: str
    n_bytes: int
    file: str


def parse_gms(raw: bytes, what: str) -> list[TensorSpec]:
    """Allocations of a GMS manifest, named by their ids, as ranges of shards; by file and place.

    Paths are relative to the manifest. Raises InvalidInput, also for absolute paths, which sharding
    over several disks writes: such a directory can't be moved, nor loaded from an image.
    """
    document = _json(raw, what)
    allocations = document.get("allocations")
    if not isinstance(allocations, list) or len(allocations) > MAX_ALLOCATIONS:
        raise InvalidInput(f"{what} has no list of up to {MAX_ALLOCATIONS} allocations")
    found = [_allocation(fields, what) for fields in allocations]
    if len({spec.name for spec in found}) != len(found):
        raise InvalidInput(f"{what} has an allocation_id twice")
    found.sort(key=lambda spec: (spec.file, spec.start, spec.end))
    for before, after in pairwise(found):
        if before.file == after.file and after.start < before.end:
            raise InvalidInput(f"{what}: allocations {before.name} and {after.name} overlap")
    return found


def _allocation(fields: object, what: str) -> TensorSpec:
    if not isinstance(fields, dict):
        raise InvalidInput(f"{what} has an allocation that is no map")
    name, file = fields.get("allocation_id"), fields.get("tensor_file")
    if not isinstance(name, str) or not 0 < len(name) <= 255:
        raise InvalidInput(f"{what} has an allocation without an allocation_id")
    if not isinstance(file, str) or not is_inside(file):
        raise InvalidInput(
            f"{what}: allocation {name!r} is in {str(file)[:80]!r}, which is no path beside it"
        )
    numbers = {key: fields.get(key) for key in ("size", "aligned_size", "tensor_offset")}
    for key, number in numbers.items():
        if type(number) is not int or not 0 <= number <= _MAX_BYTES:
            raise InvalidInput(f"{what}: allocation {name!r} has no valid {key}")
    size, aligned, offset = (int(number or 0) for number in numbers.values())
    if size > aligned:
        raise InvalidInput(f"{what}: allocation {name!r} is larger than its aligned_size")
    return octets(name, file, offset, size)


def _json(raw: bytes, what: str) -> dict[str, Any]:
    if len(raw) > MANIFEST_LIMIT_BYTES:
        raise InvalidInput(f"{what} is larger than {MANIFEST_LIMIT_BYTES} bytes")
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{what} is not JSON ({error})") from None
    if not isinstance(document, dict):
        raise InvalidInput(f"{what} is no map")
    return document


def is_inside(path: str) -> bool:
    """Whether a relative path stays where it begins, and is written in the one usual way."""
    parts = path.split("/")
    return "\0" not in path and not {"", ".", ".."} & set(parts)


def parse_custom(raw: bytes, what: str) -> list[CustomDevice]:
    """The devices of a CustomStorage `manifest.txt`. Raises InvalidInput, Unsupported (version)."""
    if len(raw) > MANIFEST_LIMIT_BYTES:
        raise InvalidInput(f"{what} is larger than {MANIFEST_LIMIT_BYTES} bytes")
    try:
        lines = raw.decode("ascii").split("\n")
    except UnicodeDecodeError:
        raise InvalidInput(f"{what} is not plain text") from None
    if lines and not lines[-1]:
        lines.pop()
    version = _number(lines, 0, "version", what)
    if version != CUSTOM_VERSION:
        raise Unsupported(f"{what} is of version {version}, known is {CUSTOM_VERSION}")
    n_devices = _number(lines, 1, "device_count", what)
    if n_devices != len(lines) - 2 or n_devices > MAX_DEVICES:
        raise InvalidInput(f"{what} lists {len(lines) - 2} devices and counts {n_devices}")
    found = [_custom_device(line, index, what) for index, line in enumerate(lines[2:])]
    for column in ({d.uuid.lower() for d in found}, {d.file for d in found}):
        if len(column) != len(found):
            raise InvalidInput(f"{what} lists a GPU or a file twice")
    return found


def _number(lines: list[str], index: int, key: str, what: str) -> int:
    words = lines[index].split(" ") if index < len(lines) else []
    if len(words) != 2 or words[0] != key or not words[1].isdecimal() or len(words[1]) > 9:
        raise InvalidInput(f"{what}: line {index + 1} is not `{key} N`")
    return int(words[1])


def _custom_device(line: str, index: int, what: str) -> CustomDevice:
    found = _DEVICE.fullmatch(line)
    if found is None or int(found[1]) != index or int(found[3]) > _MAX_BYTES:
        raise InvalidInput(f"{what}: line {index + 3} is not `device {index} GPU-UUID BYTES FILE`")
    if not is_inside(found[4]):
        raise InvalidInput(f"{what}: {found[4]!r} is no path beside it")
    return CustomDevice(index, found[2], int(found[3]), found[4])
