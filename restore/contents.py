"""Finds what can be loaded in a directory or an image: safetensors files, or GPU payloads."""

from __future__ import annotations

import posixpath
from collections.abc import Awaitable, Callable, Mapping, Sequence
from fnmatch import fnmatchcase

from imgfmt.errors import InvalidInput, NotFound
from restore.payloads import (
    CUSTOM_MANIFEST,
    GMS_MANIFEST,
    MANIFEST_LIMIT_BYTES,
    parse_custom,
    parse_gms,
)
from restore.safetensors import LENGTH_BYTES, SUFFIX, header_length, parse_header
from restore.spec import TensorSpec, octets

ReadBytes = Callable[[str, int, int], Awaitable[bytes]]
"""Path below the root, offset, length; fewer bytes only at the end of the file."""

_FIRST_BYTES = 64 * 1024


async def find_tensors(
    files: Mapping[str, int], read: ReadBytes, *, patterns: Sequence[str] = ()
) -> list[TensorSpec]:
    """All tensors of the files, whose sizes are given; by file and place.

    Those of all safetensors files, or where there are none, of all payload manifests; of files that
    match one of `patterns` if there are any. Raises NotFound, InvalidInput, Unsupported.
    """
    chosen = [path for path in sorted(files) if _fits(path, patterns)]
    weights = [path for path in chosen if path.endswith(SUFFIX)]
    found: list[TensorSpec] = []
    for path in weights:
        found += await _safetensors(path, files[path], read)
    if not weights:
        for path in chosen:
            found += await _payload(path, files, read)
    if not found and not weights:
        raise NotFound(
            f"there is no *{SUFFIX}, {GMS_MANIFEST} of GPU memory or {CUSTOM_MANIFEST} to load"
        )
    _check(found, files)
    return found


def _fits(path: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatchcase(path, pattern) for pattern in patterns)


async def _safetensors(path: str, size_bytes: int, read: ReadBytes) -> list[TensorSpec]:
    first = await read(path, 0, _FIRST_BYTES)
    length = header_length(first, size_bytes, path)
    header = first[LENGTH_BYTES : LENGTH_BYTES + length]
    if len(header) < length:
        at = LENGTH_BYTES + len(header)
        header += await read(path, at, length - len(header))
    return parse_header(header, size_bytes, path)


async def _payload(path: str, files: Mapping[str, int], read: ReadBytes) -> list[TensorSpec]:
    """Ranges that a manifest names; none if `path` is no manifest."""
    folder, name = posixpath.split(path)
    if name not in (GMS_MANIFEST, CUSTOM_MANIFEST):
        return []
    inside = f"{folder}/" if folder else ""
    if name == GMS_MANIFEST and not any(p.startswith(f"{inside}shards/") for p in files):
        return []
    if files[path] > MANIFEST_LIMIT_BYTES:
        raise InvalidInput(f"{path} is larger than {MANIFEST_LIMIT_BYTES} bytes")
    raw = await read(path, 0, files[path])
    if name == GMS_MANIFEST:
        specs = parse_gms(raw, path)
    else:
        devices = parse_custom(raw, path)
        specs = [octets(f"device-{d.index:04d}", d.file, 0, d.n_bytes) for d in devices]
        _check_whole(path, inside, specs, files)
    return [
        TensorSpec(inside + s.name, inside + s.file, s.start, s.end, s.dtype, s.shape)
        for s in specs
    ]


def _check_whole(
    path: str, inside: str, specs: Sequence[TensorSpec], files: Mapping[str, int]
) -> None:
    """A CustomStorage file has exactly the bytes that its manifest says."""
    for spec in specs:
        size = files.get(inside + spec.file)
        if size is not None and size != spec.n_bytes:
            raise InvalidInput(f"{path} gives {spec.file} {spec.n_bytes} bytes, it has {size}")


def _check(specs: Sequence[TensorSpec], files: Mapping[str, int]) -> None:
    homes: dict[str, str] = {}
    for spec in specs:
        if spec.file not in files:
            raise NotFound(f"{spec.file}, which has {spec.name!r}, does not exist")
        if spec.end > files[spec.file]:
            raise InvalidInput(f"{spec.name!r} ends behind the end of {spec.file}")
        if spec.name in homes:
            raise InvalidInput(
                f"{spec.name!r} is in {homes[spec.name]} and in {spec.file}; choose files"
            )
        homes[spec.name] = spec.file
