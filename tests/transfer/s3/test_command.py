"""The command over a real S3 server: verbs that move bytes, and what they say if they can't."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.transfer.pushes import MIB, noise, write_files
from tests.transfer.s3.servers import READER, Server

FILES = {"pages-1.img": noise(20 * MIB), "small.img": b"small", "text": b"words " * 50_000}


def run(*arguments: str, code: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "snapcask", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=90
    )
    assert done.returncode == code, done.stderr
    return done


def document(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(*arguments, "--json").stdout)
    return found


def url_of(server: Server, prefix: str, bucket: str = "bucket") -> str:
    return f"s3://{bucket}/{prefix}?endpoint={server.endpoint}"


@pytest.fixture
def store(seaweedfs: Server, request: pytest.FixtureRequest) -> str:
    """A new store under a prefix of its own."""
    url = url_of(seaweedfs, f"commands/{request.node.name}")
    run("init", url)
    return url


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_files(tmp_path / "dir", FILES)


def same_files(left: Path, right: Path) -> bool:
    return all((left / name).read_bytes() == (right / name).read_bytes() for name in FILES)


@pytest.mark.parametrize("transport", ["zero-copy", "portable"])
def test_what_is_pushed_comes_back(
    store: str, folder: Path, tmp_path: Path, transport: str
) -> None:
    url = f"{store}&transport={transport}"
    pushed = document("push", str(folder), "snap:v1", "--store", url)
    pulled = document("pull", "snap:v1", str(tmp_path / "back"), "--store", url)
    assert pulled["digest"] == pushed["digest"]
    assert same_files(folder, tmp_path / "back")
    assert document("verify", "--all", "--store", url)["sound"]


def test_a_second_push_sends_nothing(store: str, folder: Path) -> None:
    document("push", str(folder), "snap:v1", "--store", store)
    again = document("push", str(folder), "snap:v2", "--store", store)
    assert (again["new_bytes"], again["stored_bytes"]) == (0, 0)


def test_an_image_is_copied_between_a_bucket_and_a_directory(
    store: str, folder: Path, tmp_path: Path
) -> None:
    local = str(tmp_path / "local")
    run("init", local)
    digest = document("push", str(folder), "snap:v1", "--store", store)["digest"]
    there = document("cp", "snap:v1", "--store", store, "--to", local)
    back = document("cp", "snap:v1", "again:v1", "--store", local, "--to", store)
    assert there["digest"] == back["digest"] == digest
    assert there["packs_moved"] > 0
    assert back["packs_moved"] == 0
    run("pull", "snap:v1", str(tmp_path / "back"), "--store", local)
    assert same_files(folder, tmp_path / "back")


def test_the_bandwidth_limit_holds(store: str, folder: Path, tmp_path: Path) -> None:
    run("push", str(folder), "snap:v1", "--store", store)
    limited = ("--store", store, "--bwlimit", "8MB")
    seconds = document("pull", "snap:v1", str(tmp_path / "slow"), *limited)["seconds"]["fetch"]
    assert seconds > 0.5 * 20 * MIB / 8e6


def test_doctor_finds_a_bucket_sound_and_leaves_nothing(store: str) -> None:
    found = document("doctor", "--store", store)
    assert found["healthy"]
    assert {f["check"] for f in found["findings"]} >= {"conditional writes", "clock", "throughput"}
    assert document("store", "--store", store)["holds"]["tmp"]["objects"] == 0


def test_errors_differ_and_name_the_object(
    seaweedfs: Server, store: str, folder: Path, tmp_path: Path
) -> None:
    target = str(tmp_path / "none")
    absent = run("pull", "snap:v9", target, "--store", store, code=4)
    assert "snap:v9" in absent.stderr
    bucket = run("ls", "--store", url_of(seaweedfs, "x", "no-such-bucket"), code=4)
    assert "no-such-bucket" in bucket.stderr
    nobody = run("ls", "--store", "s3://bucket/x?endpoint=http://127.0.0.1:9", code=5)
    assert "127.0.0.1:9" in nobody.stderr
    denied = run("push", str(folder), "snap:v1", "--store", store, code=7, **READER.environment())
    assert "denied" in denied.stderr
    wrong = run("ls", "--store", f"{store}&colour=blue", code=2)
    assert "colour" in wrong.stderr
    for done in (absent, bucket, nobody, denied, wrong):
        assert done.stderr.count("\n") == 1
        assert "Traceback" not in done.stderr


def test_a_prefix_that_holds_other_things_or_lies_in_a_store_is_refused(seaweedfs: Server) -> None:
    seaweedfs.client().put_object(Bucket="bucket", Key="places/mine", Body=b"precious")
    failed = run("init", url_of(seaweedfs, "places"), code=2)
    assert "s3://bucket/places is not empty, it holds mine" in failed.stderr
    run("init", url_of(seaweedfs, "places/inner"))
    run("init", url_of(seaweedfs, "places"), "--allow-non-empty")
    run("init", url_of(seaweedfs, "places/inner/most"))
    for place, around in {"inner/packs": "places/inner", "refs/x": "places"}.items():
        failed = run("init", url_of(seaweedfs, f"places/{place}"), code=2)
        assert f"lies in the store s3://bucket/{around};" in failed.stderr
