"""Each verb of the command: what it does, what it prints, and its JSON document."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from imgfmt.errors import InvalidInput
from snapcask import api
from tests.snapcask.conftest import Call
from tests.snapcask.support import command, contents, make_snapshot

CONTENT_KEYS = {
    "logical_bytes", "zero_bytes", "chunks", "distinct_chunks", "distinct_bytes", "chunk_histogram",
}  # fmt: skip


def test_a_snapshot_that_is_pushed_and_pulled_is_the_same(
    call: Call, store: Path, snapshot: Path, tmp_path: Path
) -> None:
    pushed = call("push", snapshot, "team/model:v1")
    assert pushed.code == 0
    assert pushed.err == ""
    digest = pushed.out.strip()
    assert digest.startswith("blake3:")
    assert len(digest) == 71
    pulled = call("pull", "team/model:v1", tmp_path / "out")
    assert (pulled.code, pulled.out.strip()) == (0, digest)
    assert contents(tmp_path / "out") == contents(snapshot)


def test_init_records_how_trees_are_cut(call: Call, tmp_path: Path) -> None:
    made = call(
        "init", tmp_path / "s", "--page-bytes", "16K", "--pack-bytes", "8MiB", "--codec", "auto",
        "--json",
    )  # fmt: skip
    assert made.document.keys() == {"store", "uuid", "page_bytes", "pack_bytes", "codec"}
    shown = call("store", "--store", tmp_path / "s", "--json").document
    for key in ("uuid", "page_bytes", "pack_bytes", "codec"):
        assert shown[key] == made.document[key]
    assert (shown["page_bytes"], shown["pack_bytes"], shown["codec"]) == (16384, 8 << 20, "auto")


def test_init_keeps_chunks_raw_by_default(call: Call, store: Path) -> None:
    assert call("store", "--json").document["codec"] == "raw"


def test_a_second_init_is_refused_and_changes_nothing(call: Call, store: Path) -> None:
    before = (store / "store.msgpack").read_bytes()
    again = call("init", store, "--page-bytes", "64K")
    assert again.code == 2
    assert "already" in again.err
    assert (store / "store.msgpack").read_bytes() == before


def test_push_reports_what_is_new_and_what_is_reused(
    call: Call, store: Path, snapshot: Path, tmp_path: Path
) -> None:
    first = call("push", snapshot, "a:1", "--json").document
    assert first.keys() >= {
        "digest", "reference", "logical_bytes", "zero_bytes", "chunks", "new_bytes",
        "reused_bytes", "stored_bytes", "metadata_bytes", "seconds", "warnings",
    }  # fmt: skip
    assert first["logical_bytes"] == (snapshot / "pages.img").stat().st_size + 100 + len("more")
    assert first["new_bytes"] == first["logical_bytes"] - first["zero_bytes"]
    assert first["reused_bytes"] == 0
    assert first["stored_bytes"] == first["new_bytes"]
    assert first["zero_bytes"] >= 39 * 4096
    assert sum(v for k, v in first["seconds"].items() if k != "total") == pytest.approx(
        first["seconds"]["total"], abs=1e-4
    )
    again = call("push", snapshot, "a:2", "--json").document
    assert again["digest"] == first["digest"]
    assert (again["new_bytes"], again["stored_bytes"], again["metadata_bytes"]) == (0, 0, 0)
    other = call("push", make_snapshot(tmp_path / "other", 2), "b:1", "--json").document
    assert 0 < other["new_bytes"] < other["reused_bytes"]


def test_members_come_from_directories_and_from_the_store(
    call: Call, store: Path, snapshot: Path, tmp_path: Path
) -> None:
    other = make_snapshot(tmp_path / "other", 2)
    assert call("push", snapshot, "one:1", "--fact", "gpu.count=8").code == 0
    two = call("push", "--member", f"x={snapshot}", "--member", f"y={other}", "two:1")
    assert two.code == 0
    made = call(
        "push", "all:1", "--member", "r0=@one:1", "--member", "r1=@two:1#y", "--member",
        f"r2={other}", "--role", "r0=rank", "--mount-path", "r1=/data", "--json",
    )  # fmt: skip
    assert made.document["new_bytes"] == 0
    assert "image, 3 members" in call("ls").out
    members = call("inspect", "all:1", "--json").document["members"]
    assert [m["name"] for m in members] == ["r0", "r1", "r2"]
    assert members[0]["role"] == "rank"
    assert members[0]["provenance"] == {"gpu.count": "8"}
    assert members[1]["mount_path"] == "/data"
    assert members[1]["tree"] == members[2]["tree"] != members[0]["tree"]
    assert call("pull", "all:1", tmp_path / "out").code == 0
    assert contents(tmp_path / "out" / "r0") == contents(snapshot)
    assert call("pull", "all:1", tmp_path / "r1", "--member", "r1").code == 0
    assert contents(tmp_path / "r1") == contents(other)


def test_an_image_of_several_members_is_no_member_itself(
    call: Call, store: Path, snapshot: Path
) -> None:
    call("push", "two:1", "--member", f"x={snapshot}", "--member", f"y={snapshot}")
    made = call("push", "all:1", "--member", "r0=@two:1")
    assert made.code == 2
    assert "x, y" in made.err


def test_annotations_rules_and_host_facts_are_recorded(
    call: Call, store: Path, snapshot: Path
) -> None:
    plain = call("push", snapshot, "a:1").out
    call("push", snapshot, "a:2", "--annotation", "k=a=b", "--require", "gpu.driver>=580.1")
    found = call("inspect", "a:2", "--json").document
    assert found["annotations"] == {"k": "a=b"}
    assert found["require"] == ["gpu.driver>=580.1"]
    assert call("push", snapshot, "a:3", "--record-host").out != plain
    provenance = call("inspect", "a:3", "--json").document["members"][0]["provenance"]
    assert provenance.keys() >= {"cpu.arch", "kernel.release"}


def test_special_files_are_refused_by_name_or_skipped_with_a_warning(
    call: Call, store: Path, snapshot: Path
) -> None:
    os.mkfifo(snapshot / "pipe")
    refused = call("push", snapshot, "a:1")
    assert refused.code == 2
    assert "pipe" in refused.err
    assert call("ls", "--json").document == {"references": []}
    skipped = call("push", snapshot, "a:1", "--skip-special")
    assert skipped.code == 0
    assert "fifo" in skipped.err
    assert call("push", snapshot, "a:1", "--skip-special", "-q").err == ""
    assert call("push", snapshot, "a:1", "--skip-special", "--json").document["warnings"]


def test_pull_reports_what_it_fetched(
    call: Call, store: Path, snapshot: Path, tmp_path: Path
) -> None:
    pushed = call("push", snapshot, "a:1", "--json").document
    found = call("pull", "a:1", tmp_path / "out", "--json", "--no-fsync").document
    assert found.keys() >= {"digest", "logical_bytes", "fetched_bytes", "seconds"}
    assert found["digest"] == pushed["digest"]
    assert found["logical_bytes"] == pushed["logical_bytes"]
    assert found["fetched_bytes"] >= pushed["new_bytes"]


def test_a_dry_run_says_what_a_pull_moves_and_writes_nothing(
    call: Call, store: Path, snapshot: Path, tmp_path: Path
) -> None:
    pushed = call("push", snapshot, "a:1", "--json").document
    target = tmp_path / "home" / "out"
    target.parent.mkdir()
    planned = call("pull", "a:1", target, "--dry-run", "--json").document
    text = call("pull", "a:1", target, "--dry-run")
    assert list(target.parent.iterdir()) == []
    assert planned["dry_run"] is True
    assert planned["directory"] == str(target)
    assert planned["zero_bytes"] == pushed["zero_bytes"] > 0
    assert planned["plain_bytes"] == pushed["new_bytes"] + pushed["reused_bytes"]
    assert planned["packs"] == 1
    assert planned["requests"] >= 1
    assert text.out.splitlines()[0] == pushed["digest"]
    assert f"{planned['requests']} reads of 1 packs" in text.out
    pulled = call("pull", "a:1", target, "--json").document
    assert planned["fetch_bytes"] == pulled["fetched_bytes"]
    for key in ("digest", "logical_bytes", "chunks", "files"):
        assert planned[key] == pulled[key]


@pytest.mark.parametrize(("options", "resume"), [([], True), (["--no-resume"], False)])
def test_a_dry_run_asks_for_what_the_pull_would_do(
    call: Call, store: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], resume: bool
) -> None:
    asked: list[dict[str, object]] = []

    def plan_pull(*_: object, **given: object) -> None:
        asked.append(given)
        raise InvalidInput("seen")

    monkeypatch.setattr(api, "plan_pull", plan_pull)
    line = ["pull", "a:1", "out", "--dry-run", "--member", "m", "--fact", "k=v", *options]
    assert call(*line, "--max-memory", "16MiB").code == 2
    limit = {"max_memory_bytes": 16 << 20}
    wanted = {"store": str(store), "member": "m", "facts": {"k": "v"}, "resume": resume} | limit
    assert asked == [wanted]


def test_a_dry_run_fails_as_the_pull_would(
    call: Call, store: Path, snapshot: Path, tmp_path: Path
) -> None:
    call("push", snapshot, "a:1")
    for reference, target, code in (
        ("a:2", tmp_path / "out", 4),
        ("a:1", snapshot, 2),
        ("a:1", snapshot / "small.img", 2),
        ("a:1", tmp_path / "no" / "out", 2),
    ):
        planned = call("pull", reference, target, "--dry-run")
        pulled = call("pull", reference, target)
        assert planned.code == pulled.code == code
        assert planned.err == pulled.err


def test_images_are_named_by_tag_digest_and_beginning_of_a_digest(
    call: Call, store: Path, snapshot: Path
) -> None:
    digest = call("push", snapshot, "a").out.strip()
    for reference in ("a", "a:latest", digest, f"a@{digest}", digest[:15]):
        assert call("inspect", reference, "--json").document["digest"] == digest


def test_inspect_of_an_image_tells_how_it_is_stored(
    call: Call, store: Path, snapshot: Path
) -> None:
    pushed = call("push", snapshot, "a:1", "--json").document
    found = call("inspect", "a:1", "--json").document
    assert found["kind"] == "image"
    assert found.keys() >= CONTENT_KEYS
    for key in ("digest", "logical_bytes", "zero_bytes", "chunks"):
        assert found[key] == pushed[key]
    assert sum(b["chunks"] for b in found["chunk_histogram"]) == found["chunks"]
    (member,) = found["members"]
    assert member["name"] == "main"
    assert member["packs"] == 1
    assert member["stored_bytes"] == pushed["stored_bytes"]
    assert member["entry_counts"] == {"directory": 1, "file": 5, "symlink": 1}
    by_path = {entry["path"]: entry for entry in member["entries"]}
    assert by_path["link"]["target"] == "sub/more"
    assert by_path["pages.img"]["size_bytes"] == (snapshot / "pages.img").stat().st_size
    assert by_path["pages.img"]["data_bytes"] == found["distinct_bytes"] - 104
    text = call("inspect", "a:1")
    assert text.code == 0
    assert "pages.img" in text.out


def test_inspect_of_a_directory_sees_what_a_push_would(
    call: Call, store: Path, snapshot: Path
) -> None:
    found = call("inspect", snapshot, "--json").document
    assert found["kind"] == "directory"
    assert found["criu"] is None
    pushed = call("push", snapshot, "a:1", "--json").document
    stored = call("inspect", "a:1", "--json").document
    assert {key: found[key] for key in CONTENT_KEYS} == {key: stored[key] for key in CONTENT_KEYS}
    assert found["entries"] == stored["members"][0]["entries"]
    assert found["logical_bytes"] == pushed["logical_bytes"]


def test_inspect_of_a_directory_needs_no_store(
    call: Call, snapshot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SNAPCASK_STORE", raising=False)
    assert call("inspect", snapshot).code == 0
    assert call("inspect", "a:1").code == 2


def test_verify_of_a_sound_store_reads_everything_back(
    call: Call, store: Path, snapshot: Path
) -> None:
    pushed = call("push", snapshot, "a:1", "--json").document
    found = call("verify", "--all", "--json")
    assert found.code == 0
    assert found.document["sound"] is True
    assert found.document["chunks"] == pushed["chunks"]
    assert call("verify", "a:1").out.startswith("all is well")


def test_verify_names_the_damaged_chunk_and_the_file_that_is_lost(
    call: Call, store: Path, snapshot: Path
) -> None:
    call("push", snapshot, "a:1")
    (pack,) = (store / "packs").glob("*/*")
    with pack.open("r+b") as file:
        file.seek(1 << 20)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    found = call("verify", "a:1", "--json")
    assert found.code == 6
    (damage,) = found.document["damages"]
    assert damage["kind"] == "chunk"
    assert damage["pack"] == pack.name
    assert damage["files"]
    text = call("verify", "--all")
    assert text.code == 6
    assert damage["files"][0]["path"] in text.out


def test_index_rebuild_finds_all_chunks_again(call: Call, store: Path, snapshot: Path) -> None:
    call("push", snapshot, "a:1")
    for segment in (store / "index").iterdir():
        segment.unlink()
    rebuilt = call("index", "rebuild", "--json").document
    assert rebuilt["packs"] == 1
    assert rebuilt["unreadable"] == []
    assert call("push", snapshot, "a:2", "--json").document["new_bytes"] == 0


def test_the_whole_job_works_in_processes_of_their_own(tmp_path: Path) -> None:
    snapshot, store = make_snapshot(tmp_path / "s"), str(tmp_path / "store")
    environment = {"SNAPCASK_STORE": store}
    assert command("init", f"file://{store}").code == 0
    pushed = command("push", snapshot, "a:1", env=environment)
    assert pushed.code == 0
    assert pushed.err == ""
    pulled = command("pull", "a:1", "out", "--json", env=environment, cwd=tmp_path)
    assert pulled.document["digest"] == pushed.out.strip()
    assert contents(tmp_path / "out") == contents(snapshot)
