"""How the command fails: an exit code for each kind of error, and one line that says what to do."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from imgfmt.errors import (
    AccessDenied,
    Conflict,
    CorruptData,
    DoesNotFit,
    ErrorKind,
    ImageError,
    Internal,
    InvalidImage,
    InvalidInput,
    NotFound,
    OutOfResources,
    StoreUnavailable,
    Unsupported,
)
from imgfmt.store_record import StoreRecord
from snapcask import api
from snapcask.exitcodes import exit_code_of
from tests.snapcask.conftest import Call
from tests.snapcask.support import Outcome, command, command_line, make_snapshot

NOBODY = 65534

EXIT_CODES: list[tuple[type[ImageError], int]] = [
    (Internal, 1),
    (InvalidInput, 2),
    (NotFound, 4),
    (StoreUnavailable, 5),
    (CorruptData, 6),
    (InvalidImage, 6),
    (AccessDenied, 7),
    (OutOfResources, 8),
    (Conflict, 9),
    (Unsupported, 10),
    (DoesNotFit, 11),
]


def assert_one_line(failed: Outcome, code: int, *parts: str) -> None:
    """The command failed with this code and one line on standard error that has all `parts`."""
    assert failed.code == code, failed
    assert failed.out == ""
    assert failed.err.startswith("snapcask: error: ")
    assert failed.err.count("\n") == 1
    assert "Traceback" not in failed.err
    for part in parts:
        assert part in failed.err


def test_every_kind_of_error_has_an_exit_code() -> None:
    assert {error.kind: code for error, code in EXIT_CODES} == {
        kind: exit_code_of(kind) for kind in ErrorKind
    }


@pytest.mark.parametrize(("error", "code"), EXIT_CODES)
def test_an_error_becomes_one_line_and_its_exit_code(
    call: Call, store: Path, monkeypatch: pytest.MonkeyPatch, error: type[ImageError], code: int
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error("the thing: it is\nbroken\x1b[31m")

    monkeypatch.setattr(api, "pull", fail)
    for more in ((), ("--json",)):
        assert_one_line(call("pull", "a:1", "out", *more), code, r"the thing: it is broken\x1b[31m")


def test_a_fault_of_ours_is_one_line_and_more_for_those_who_ask(
    call: Call, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(api, "pull", fail)
    assert_one_line(call("pull", "a:1", "out"), 1, "internal error: ZeroDivisionError: oops")
    monkeypatch.setenv("SNAPCASK_DEBUG", "1")
    assert "Traceback" in call("pull", "a:1", "out").err


@pytest.mark.parametrize(
    "arguments",
    [
        ["frobnicate"],
        ["push"],
        ["push", "dir"],
        ["push", "--member", "x=dir", "dir", "a:1"],
        ["push", "--member", "x", "a:1"],
        ["push", "--member", "x=dir", "--member", "x=other", "a:1"],
        ["push", "--member", "x=dir", "--role", "y=rank", "a:1"],
        ["push", "--max-memory", "lots", "dir", "a:1"],
        ["push", "--max-memory", "1M", "dir", "a:1"],
        ["push", "--require", "nonsense", "dir", "a:1"],
        ["push", "--annotation", "k", "dir", "a:1"],
        ["push", "dir", "UPPER:1"],
        ["push", "dir", "_reserved:1"],
        ["push", "dir", "blake3:0123456789abcdef"],
        ["push", "--member", "Bad=dir", "a:1"],
        ["push", "--mount-path", "main=relative", "dir", "a:1"],
        ["pull", "a:1"],
        ["pull", "blake3:0123", "out"],
        ["ls", "--frob"],
        ["verify"],
        ["verify", "--all", "a:1"],
        ["variants", "a:1"],
        ["index"],
        ["tag", "a:1", "a@blake3:0123456789abcdef"],
        ["rm", "_volumes/x:1"],
        ["init", "https://example.org/store"],
        ["init", "store2", "--page-bytes", "5000"],
        ["init", "store2", "--codec", "lz4"],
    ],
)
def test_wrong_arguments_are_refused(
    call: Call, store: Path, snapshot: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.chdir(snapshot.parent)
    (snapshot.parent / "dir").mkdir()
    assert_one_line(call(*arguments), 2)


def test_without_a_store_the_command_says_how_to_name_one(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SNAPCASK_STORE", "")
    assert_one_line(call("ls"), 2, "--store", "SNAPCASK_STORE")


def test_what_is_not_there_is_not_found(call: Call, store: Path, tmp_path: Path) -> None:
    assert_one_line(call("ls", "--store", tmp_path), 4, str(tmp_path), "snapcask init")
    assert_one_line(call("push", tmp_path / "no", "a:1"), 4, "no")
    assert_one_line(call("pull", "a:1", tmp_path / "out"), 4, "a:1", "snapcask ls")
    assert_one_line(call("pull", "blake3:0123456789", tmp_path / "out"), 4, "blake3:0123456789")
    assert_one_line(call("inspect", "./no"), 4, "./no")
    assert_one_line(call("tag", "a:1", "b:1"), 4, "a:1")


def test_a_member_that_is_not_there_is_not_found(
    call: Call, store: Path, snapshot: Path, tmp_path: Path
) -> None:
    call("push", snapshot, "a:1")
    assert_one_line(call("pull", "a:1", tmp_path / "o", "--member", "x"), 4, "'x'", "main")


def test_a_damaged_image_is_corrupt(
    call: Call, store: Path, snapshot: Path, tmp_path: Path
) -> None:
    digest = call("push", snapshot, "a:1").out.strip()
    record = store / "images" / digest.removeprefix("blake3:")
    record.write_bytes(record.read_bytes()[:-1] + b"x")
    assert_one_line(call("inspect", "a:1"), 6, digest[:19], str(store))
    assert_one_line(call("pull", "a:1", tmp_path / "out"), 6)
    assert not (tmp_path / "out").exists()


def test_a_store_of_a_newer_version_is_not_touched(call: Call, store: Path, snapshot: Path) -> None:
    record = StoreRecord.decode((store / "store.msgpack").read_bytes(), "store")
    newer = StoreRecord(uuid=record.uuid, concurrent_writers=True, read=("encrypt-1",))
    (store / "store.msgpack").write_bytes(newer.encode())
    before = sorted(store.rglob("*"))
    assert_one_line(call("push", snapshot, "a:1"), 10, "encrypt-1")
    assert_one_line(call("ls"), 10, "encrypt-1")
    assert sorted(store.rglob("*")) == before


def test_a_store_that_may_not_be_read_is_denied(store: Path) -> None:
    store.chmod(0)
    become = "import os, snapcask.commands.ls, snapcask.render, snapcask.stores, transfer.naming\n"
    become += f"if os.geteuid() == 0: os.setuid({NOBODY})"
    try:
        assert_one_line(command("ls", prelude=become), 7, str(store), "permission denied")
    finally:
        store.chmod(0o755)


def test_no_room_in_the_store_is_out_of_resources(store: Path, snapshot: Path) -> None:
    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    failed = command("push", snapshot, "a:1", preexec_fn=limit)
    assert_one_line(failed, 8, str(store))
    assert not list((store / "tmp").iterdir())
    assert not list((store / "leases").iterdir())


def test_a_file_that_changes_while_it_is_pushed_is_a_conflict(store: Path, snapshot: Path) -> None:
    change = f"""
import os, transfer.push
real = transfer.push.check_unchanged
def check(listing):
    os.utime({str(snapshot / "small.img")!r})
    return real(listing)
transfer.push.check_unchanged = check
"""
    assert_one_line(command("push", snapshot, "a:1", prelude=change), 9, "small.img")
    assert not (store / "refs").exists()
    assert not list((store / "leases").iterdir())


def test_of_pushes_to_one_tag_at_once_one_wins_and_the_others_are_told(
    call: Call, store: Path, tmp_path: Path
) -> None:
    sources = [make_snapshot(tmp_path / f"s{n}", n) for n in range(4)]
    gate = tmp_path / "gate"
    wait = f"""
import os, time, transfer.push
real = transfer.push.check_unchanged
def check(listing):
    open({str(tmp_path)!r} + f"/ready-{{os.getpid()}}", "w").close()
    while not os.path.exists({str(gate)!r}):
        time.sleep(0.005)
    return real(listing)
transfer.push.check_unchanged = check
"""
    lines = [command_line("push", source, "a:1", prelude=wait) for source in sources]
    pushes = [
        subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for line in lines
    ]
    while len(list(tmp_path.glob("ready-*"))) < len(pushes):
        assert all(push.poll() is None for push in pushes)
    gate.touch()
    outcomes = [(*push.communicate(timeout=60), push.returncode) for push in pushes]
    won = [out.strip() for out, _, code in outcomes if code == 0]
    assert len(won) == 1
    assert call("inspect", "a:1", "--json").document["digest"] == won[0]
    for out, err, code in outcomes:
        if code != 0:
            assert_one_line(Outcome(code, out, err), 9, "a:1", "snapcask tag")
            digest = err.partition("snapcask tag ")[2].split()[0]
            assert call("verify", digest).code == 0
            assert call("tag", digest, "mine:1").code == 0
    assert not list((store / "leases").iterdir())


def test_a_reader_that_goes_away_is_no_error_of_ours(store: Path, snapshot: Path) -> None:
    process = subprocess.Popen(
        command_line("inspect", snapshot, "--json"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": ""},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(60) == 141


def test_a_full_disk_under_standard_output_is_told(store: Path) -> None:
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    with open("/dev/full", "w") as full:
        failed = subprocess.run(
            command_line("ls"), stdout=full, stderr=subprocess.PIPE, text=True, env=buffered,
            check=False,
        )  # fmt: skip
    assert_one_line(Outcome(failed.returncode, "", failed.stderr), 8, "standard output")
