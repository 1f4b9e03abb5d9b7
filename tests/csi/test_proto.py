"""The interface: what is generated is what is checked in, and it keeps to its numbers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from csi.proto import csi_pb2 as pb

ROOT = Path(__file__).parents[2]
GENERATED = ("csi_pb2.py", "csi_pb2.pyi")


def test_the_generated_code_is_what_the_make_target_writes(tmp_path: Path) -> None:
    [recipe] = [
        line for line in (ROOT / "Makefile").read_text().splitlines() if "grpc_tools.protoc" in line
    ]
    words = recipe.strip().lstrip("@").split()[1:]
    moved = [word.replace("_out=.", f"_out={tmp_path}") for word in words]
    assert moved != words
    subprocess.run([sys.executable, *moved], cwd=ROOT, check=True, timeout=60)
    for name in GENERATED:
        made = (tmp_path / "csi" / "proto" / name).read_text()
        assert made == (ROOT / "csi" / "proto" / name).read_text(), f"run `make proto`: {name}"


def test_numbers_that_peers_rely_on() -> None:
    assert pb.DESCRIPTOR.package == "csi.v1"
    fields = pb.NodePublishVolumeRequest.DESCRIPTOR.fields_by_name
    assert {name: field.number for name, field in fields.items()} == {
        "volume_id": 1, "publish_context": 2, "staging_target_path": 3, "target_path": 4,
        "volume_capability": 5, "readonly": 6, "secrets": 7, "volume_context": 8,
    }  # fmt: skip
    assert pb.VolumeCapability.AccessMode.MULTI_NODE_READER_ONLY == 3
    assert pb.ControllerServiceCapability.RPC.LIST_SNAPSHOTS == 6


def test_every_field_called_secrets_is_marked_as_such() -> None:
    extension: Any = pb.csi_secret
    for message in pb.DESCRIPTOR.message_types_by_name.values():
        for field in message.fields:
            marked: Any = field.GetOptions().Extensions[extension]
            assert marked == (field.name == "secrets")
