"""Manifests of GPU payloads: what is right is read, all else is refused with a reason."""

from __future__ import annotations

import json
from typing import Any

import pytest

from imgfmt.errors import InvalidInput, Unsupported
from restore.payloads import MANIFEST_LIMIT_BYTES, CustomDevice, parse_custom, parse_gms

UUIDS = [f"GPU-0f6ca7a4-1e1d-4f5e-9d3a-00000000000{i}" for i in range(3)]


def allocation(**changed: Any) -> dict[str, Any]:
    return {
        "allocation_id": "a",
        "size": 100,
        "aligned_size": 4096,
        "tag": "weights",
        "tensor_file": "shards/shard_0000.bin",
        "tensor_offset": 0,
        **changed,
    }


def gms(*allocations: Any) -> Any:
    document = {"layout_hash": "x", "device": 0, "allocations": list(allocations)}
    return parse_gms(json.dumps(document).encode(), "manifest.json")


def test_allocations_are_ranges_of_their_shards() -> None:
    found = gms(
        allocation(allocation_id="c", tensor_file="shards/shard_0001.bin"),
        allocation(allocation_id="b", tensor_offset=4096, size=4096),
        allocation(),
    )
    assert [(s.name, s.file[-8:-4], s.start, s.end) for s in found] == [
        ("a", "0000", 0, 100),
        ("b", "0000", 4096, 8192),
        ("c", "0001", 0, 100),
    ]
    assert found[0].shape == (100,)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"tensor_file": "/raid0/shard_0000.bin"}, "no path beside"),
        ({"tensor_file": "../shard"}, "no path beside"),
        ({"tensor_file": "shards//x"}, "no path beside"),
        ({"tensor_file": "shards/\0"}, "no path beside"),
        ({"tensor_file": ""}, "no path beside"),
        ({"tensor_file": 3}, "no path beside"),
        ({"size": -1}, "size"),
        ({"size": 1.0}, "size"),
        ({"size": True}, "size"),
        ({"size": 5000}, "larger than its aligned_size"),
        ({"tensor_offset": None}, "tensor_offset"),
        ({"tensor_offset": 2**60}, "tensor_offset"),
        ({"aligned_size": "4096"}, "aligned_size"),
        ({"allocation_id": ""}, "allocation_id"),
        ({"allocation_id": 1}, "allocation_id"),
    ],
)
def test_a_broken_allocation_is_refused(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        gms(allocation(**changed))


def test_allocations_that_overlap_or_are_there_twice_are_refused() -> None:
    with pytest.raises(InvalidInput, match="overlap"):
        gms(allocation(), allocation(allocation_id="b", tensor_offset=99))
    with pytest.raises(InvalidInput, match="twice"):
        gms(allocation(), allocation(tensor_offset=8192))


@pytest.mark.parametrize(
    "raw",
    [b"", b"[]", b"{}", b'{"allocations": {}}', b'{"allocations": [1]}', b"\xff", b"[" * 100_000],
)
def test_what_is_no_gms_manifest_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidInput):
        parse_gms(raw, "manifest.json")


def custom(text: str) -> list[CustomDevice]:
    return parse_custom(text.encode(), "manifest.txt")


HEAD = "version 4\ndevice_count 2\n"
FIRST = f"device 0 {UUIDS[0]} 4096 device-0000.bin\n"
SECOND = f"device 1 {UUIDS[1]} 0 device-0001.bin\n"


def test_devices_of_a_custom_storage_manifest_are_read() -> None:
    assert custom(HEAD + FIRST + SECOND) == [
        CustomDevice(0, UUIDS[0], 4096, "device-0000.bin"),
        CustomDevice(1, UUIDS[1], 0, "device-0001.bin"),
    ]
    assert custom((HEAD + FIRST + SECOND).removesuffix("\n")) == custom(HEAD + FIRST + SECOND)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "version 4\n",
        "version four\ndevice_count 0\n",
        HEAD + FIRST,
        HEAD + FIRST + SECOND + "\n",
        HEAD + SECOND + FIRST,
        HEAD + FIRST + SECOND.replace("-0001", "-0000"),
        HEAD + FIRST + SECOND.replace(UUIDS[1], UUIDS[0]),
        HEAD + FIRST + SECOND.replace(UUIDS[1], "MIG-1"),
        HEAD + FIRST + SECOND.replace("device-0001.bin", "/device-0001.bin"),
        HEAD + FIRST + SECOND.replace("device-0001.bin", "../x"),
        HEAD + FIRST + SECOND.replace(" 0 ", " 00 "),
        HEAD + FIRST + SECOND.replace(" 0 ", " 9999999999999999 "),
        HEAD + FIRST + SECOND.replace(" 0 ", "  0 "),
        (HEAD + FIRST + SECOND).replace("\n", "\r\n"),
        "version 4\ndevice_count 99999999999\n",
    ],
)
def test_what_is_no_custom_storage_manifest_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        custom(text)


def test_another_version_is_told_apart_from_a_broken_manifest() -> None:
    with pytest.raises(Unsupported, match="version 5"):
        custom("version 5\nanything\n")


def test_manifests_that_are_too_large_are_not_parsed() -> None:
    for parse in (parse_gms, parse_custom):
        with pytest.raises(InvalidInput, match="larger"):
            parse(bytes(MANIFEST_LIMIT_BYTES + 1), "m")
    with pytest.raises(InvalidInput, match="plain text"):
        parse_custom(b"version 4\xff", "m")
