"""The verbs of the cache, as users call them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapcask.exitcodes import ExitCode
from tests.filesystems import Disk, disk, run
from tests.snapcask.conftest import Call
from tests.snapcask.support import contents, make_snapshot
from tests.snapcask.test_docs import WORDS, keys_of


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache, which the environment names."""
    root = tmp_path / "cache"
    monkeypatch.setenv("SNAPCASK_CACHE", str(root))
    monkeypatch.setenv("SNAPCASK_ALLOW_ROOT_FILESYSTEM", "1")
    return root


@pytest.fixture
def pushed(call: Call, store: Path, snapshot: Path) -> str:
    """The digest of `a:1`."""
    assert call("push", snapshot, "a:1").code == 0
    return call("tag", "a:1", "b:1").out.strip()


@pytest.fixture
def xfs(tmp_path: Path) -> Iterator[Disk]:
    """An XFS."""
    with disk(tmp_path, "xfs") as made:
        yield made


def test_prefetch_fetches_once_and_warm_is_the_same(call: Call, cache: Path, pushed: str) -> None:
    first = call("prefetch", "a:1", "--json").document
    assert (first["digest"], first["built"]) == (pushed, 1)
    assert first["fetched_bytes"] > 2 << 20
    again = call("cache", "warm", "b:1", "--json").document
    assert (again["built"], again["fetched_bytes"]) == (0, 0)
    assert call("prefetch", "a:1").out == f"{pushed}\n"


def test_the_root_filesystem_is_refused_by_default(
    call: Call, cache: Path, pushed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.stat(cache.parent).st_dev != os.stat("/").st_dev:
        pytest.skip("the tests' folder is not on the root filesystem")
    monkeypatch.delenv("SNAPCASK_ALLOW_ROOT_FILESYSTEM")
    outcome = call("prefetch", "a:1")
    assert outcome.code == ExitCode.INVALID_INPUT
    assert "--allow-root-filesystem" in outcome.err
    assert call("prefetch", "a:1", "--allow-root-filesystem").code == 0


@pytest.mark.root
def test_an_image_is_mounted_and_unmounted_also_without_its_store(
    call: Call, xfs: Disk, pushed: str, snapshot: Path, store: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("SNAPCASK_CACHE", str(xfs.root / "cache"))
    at = xfs.root / "at"
    at.mkdir()
    missing = call("mount", "a:1", at)
    assert (missing.code, "prefetch" in missing.err) == (ExitCode.NOT_FOUND, True), missing
    assert call("prefetch", "a:1").code == 0
    mounted = call("mount", "a:1", at, "--volume", "v1", "--json").document
    assert mounted["mounts"][0]["volume"] == "v1"
    assert contents(at) == contents(snapshot)
    assert call("umount", at).code == 0
    shutil.rmtree(store)
    assert call("mount", "a:1", at).code == ExitCode.NOT_FOUND
    assert call("mount", pushed, at).code == 0
    assert contents(at) == contents(snapshot)
    assert call("cache", "prune", "--all", "--json").document["removed"] == []
    assert call("umount", at, "--json").document == {"unmounted": [str(at)]}
    assert call("umount", at).code == ExitCode.NOT_FOUND
    assert len(call("cache", "prune", "--all", "--json").document["removed"]) == 1


@pytest.mark.root
def test_a_disk_is_added_used_listed_and_forgotten(
    call: Call, xfs: Disk, pushed: str, snapshot: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("SNAPCASK_CACHE", str(xfs.root / "cache"))
    at = xfs.root / "at"
    at.mkdir()
    with disk(tmp_path, "xfs", name="other") as other:
        part = other.root / "part"
        same = call("prefetch", "a:1", "--disk", xfs.root / "part")
        assert (same.code, "same filesystem" in same.err) == (ExitCode.INVALID_INPUT, True)
        run("fallocate", "-l", "100M", xfs.root / "ballast")  # the other has more free then
        monkeypatch.setenv("SNAPCASK_CACHE_DISKS", str(part))
        assert call("prefetch", "a:1").code == 0
        monkeypatch.delenv("SNAPCASK_CACHE_DISKS")
        (listed,) = call("cache", "ls", "--json").document["disks"]
        assert (listed["path"], listed["problem"]) == (str(part), "")
        assert listed["size_bytes"] > 0
        assert f"{part}: " in call("cache", "ls").out
        assert set(keys_of(call("cache", "ls", "--json").document)) <= {
            w for p in WORDS for w in p.split()
        }
        assert call("mount", pushed, at).code == 0
        assert contents(at) == contents(snapshot)
        assert call("umount", at).code == 0
        other.unmount()
        missing = call("mount", pushed, at)
        assert missing.code == ExitCode.NOT_FOUND
        assert "is not there" in missing.err
        assert "which is not there; mount the disk" in missing.err
        assert "missing" in call("cache", "ls").out
        assert call("cache", "forget", part, "--json").document == {"forgotten": str(part)}
        assert call("cache", "forget", part).code == ExitCode.NOT_FOUND
        assert call("prefetch", "a:1", "--json").document["built"] == 1
        assert call("mount", pushed, at).code == 0
        assert contents(at) == contents(snapshot)
        assert call("umount", at).code == 0


def test_another_user_s_scope_sees_no_hit(
    call: Call, cache: Path, pushed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call("prefetch", "a:1").code == 0
    monkeypatch.setattr("transfer.cache.domains.credential_scope", lambda store: "another")
    assert call("prefetch", "a:1", "--json").document["fetched_bytes"] > 2 << 20
    assert len(call("cache", "ls", "--json").document["images"]) == 2


def test_pins_keep_an_image_until_it_is_unpinned(call: Call, cache: Path, pushed: str) -> None:
    call("prefetch", "a:1")
    assert len(call("cache", "pin", pushed[:20], "--json").document["pinned"]) == 1
    assert call("cache", "rm", "a:1").code == ExitCode.CONFLICT
    assert call("cache", "unpin", "a:1").code == 0
    assert len(call("cache", "rm", "a:1", "--json").document["removed"]) == 1
    listed = call("cache", "ls", "--json").document
    assert (listed["images"], listed["trees"]) == ([], [])


def test_rm_keeps_trees_that_another_image_has(
    call: Call, cache: Path, store: Path, tmp_path: Path
) -> None:
    one, two = (make_snapshot(tmp_path / name, seed) for name, seed in (("1", 1), ("2", 2)))
    call("push", one, "one:1")
    call("push", "--member", "a=@one:1", "--member", f"b={two}", "both:1")
    call("prefetch", "one:1")
    call("prefetch", "both:1")
    assert len(call("cache", "rm", "both:1", "--json").document["removed"]) == 1
    assert call("prefetch", "one:1", "--json").document["built"] == 0


def test_verify_finds_and_mends(call: Call, cache: Path, pushed: str, snapshot: Path) -> None:
    call("prefetch", "a:1")
    assert call("cache", "verify").code == 0
    (path,) = cache.glob("domains/*/trees/*/pages.img")
    with path.open("r+b") as file:
        file.seek(100)
        file.write(b"rot")
    bad = call("cache", "verify", pushed, "--no-mend", "--json")
    assert (bad.code, bad.document["sound"]) == (ExitCode.CORRUPT, False)
    assert call("cache", "ls", "--json").document["trees"][0]["state"] == "damaged"
    assert call("cache", "verify").code == 0
    assert path.read_bytes() == (snapshot / "pages.img").read_bytes()


@pytest.mark.parametrize(
    "line",
    [("cache", "ls"), ("cache", "verify"), ("cache", "prune"), ("cache", "rm", "a:1"),
     ("mount", "a:1", ".")],
)  # fmt: skip
def test_verbs_that_only_look_make_no_cache(
    call: Call, cache: Path, pushed: str, line: tuple[str, ...]
) -> None:
    found = call(*line)
    assert found.code == ExitCode.NOT_FOUND
    assert f"there is no cache at {cache}; `snapcask prefetch` makes one" in found.err
    assert not cache.exists()


def test_rm_refuses_a_pinned_image_and_says_how_to_unpin_it(
    call: Call, cache: Path, pushed: str
) -> None:
    call("prefetch", "a:1")
    call("cache", "pin", "a:1", "--id", "ci")
    refused = call("cache", "rm", "a:1")
    assert refused.code == ExitCode.CONFLICT
    assert "pinned by ci; `snapcask cache unpin --id ci` first" in refused.err
    call("cache", "unpin", "a:1", "--id", "ci")
    assert call("cache", "rm", "a:1").code == 0


@pytest.mark.root
def test_umount_needs_no_cache(call: Call, cache: Path, pushed: str, tmp_path: Path) -> None:
    call("prefetch", "a:1")
    at = tmp_path / "at"
    at.mkdir()
    assert call("mount", "a:1", at).code == 0
    cache.rename(tmp_path / "moved")
    found = call("umount", at)
    assert (found.code, found.out) == (0, f"{at}\n")
    assert "stays in the cache until the machine starts again" in found.err
    assert not at.is_mount()


def test_what_is_not_there_is_told(call: Call, cache: Path, pushed: str) -> None:
    call("prefetch", "a:1")
    for verb in ("pin", "unpin", "rm", "verify"):
        outcome = call("cache", verb, "blake3:0123456789")
        assert outcome.code == ExitCode.NOT_FOUND, verb
        assert "cache ls" in outcome.err


def test_every_key_of_every_document_is_documented(call: Call, cache: Path, pushed: str) -> None:
    names = {word for phrase in WORDS for word in phrase.split()}
    for line in (
        ("prefetch", "a:1"), ("cache", "ls"), ("cache", "pin", "a:1"), ("cache", "unpin", "a:1"),
        ("cache", "verify"), ("cache", "rm", "a:1"), ("cache", "prune"),
    ):  # fmt: skip
        for key in keys_of(call(*line, "--json").document):
            assert key in names, (line, key)


def test_listings_for_people_have_a_line_for_each(call: Call, cache: Path, pushed: str) -> None:
    call("prefetch", "a:1")
    lines = call("cache", "ls").out.splitlines()
    assert lines[0].startswith(str(cache))
    assert sum(line.startswith("blake3:") for line in lines) == 2
