"""The verbs about references: ls, tag, rm, diff and variants."""

from __future__ import annotations

from pathlib import Path

from tests.snapcask.conftest import Call
from tests.snapcask.support import make_snapshot


def test_ls_shows_references_and_all_of_them_with_all(
    call: Call, store: Path, snapshot: Path
) -> None:
    digest = call("push", snapshot, "b:1").out.strip()
    call("push", snapshot, "a/x:2")
    call("push", snapshot, "gone:1")
    call("rm", "gone:1")
    listed = call("ls", "--json").document["references"]
    assert [one["reference"] for one in listed] == ["a/x:2", "b:1"]
    assert listed[1]["digest"] == digest
    assert listed[1]["target_kind"] == "image"
    assert listed[1]["members"] == 1
    assert listed[1]["logical_bytes"] > 2 << 20
    everything = call("ls", "--all", "--json").document["references"]
    assert [one["target_kind"] for one in everything] == ["image", "image", "none"]
    text = call("ls").out.splitlines()
    assert text[0].split() == ["REFERENCE", "DIGEST", "KIND", "AGE", "SIZE", "ZEROS"]
    assert text[1].startswith("a/x:2")


def test_ls_goes_on_where_an_image_is_lost(call: Call, store: Path, snapshot: Path) -> None:
    digest = call("push", snapshot, "a:1").out.strip()
    (store / "images" / digest.removeprefix("blake3:")).unlink()
    listed = call("ls")
    assert listed.code == 0
    assert "a:1" in listed.out
    assert "does not exist" in listed.err
    assert call("ls", "--json").document["references"][0]["problem"]


def test_tag_points_a_second_reference_at_an_image(call: Call, store: Path, snapshot: Path) -> None:
    digest = call("push", snapshot, "a:1").out.strip()
    done = call("tag", "a:1", "b/c:prod", "--json").document
    assert done == {
        "reference": "b/c:prod",
        "digest": digest,
        "target_kind": "image",
        "changed": True,
    }
    assert call("tag", digest[:20], "b/c:prod", "--json").document["changed"] is False
    assert call("inspect", "b/c:prod", "--json").document["digest"] == digest


def test_rm_deletes_the_reference_says_that_it_frees_nothing_and_keeps_the_image(
    call: Call, store: Path, snapshot: Path
) -> None:
    digest = call("push", snapshot, "a:1").out.strip()
    removed = call("rm", "a:1")
    assert removed.code == 0
    assert "frees no bytes" in removed.out
    assert digest in removed.out
    assert call("inspect", "a:1").code == 4
    assert call("rm", "a:1").code == 4
    assert call("tag", digest, "a:1").code == 0
    assert call("rm", "a:1", "--json").document == {
        "reference": "a:1",
        "digest": digest,
        "target_kind": "image",
        "freed_bytes": 0,
    }


def test_diff_names_the_files_that_changed_and_the_bytes_that_are_shared(
    call: Call, store: Path, snapshot: Path, tmp_path: Path
) -> None:
    call("push", snapshot, "a:1")
    (snapshot / "sub" / "more").write_bytes(b"less")
    (snapshot / "small.img").chmod(0o600)
    (snapshot / "new").write_bytes(b"new")
    (snapshot / "empty").unlink()
    call("push", snapshot, "a:2")
    found = call("diff", "a:1", "a:2", "--json").document
    changes = {one["path"]: one["change"] for one in found["changes"]}
    assert changes.pop("", "metadata") == "metadata"
    assert changes == {
        "sub/more": "content",
        "small.img": "metadata",
        "sub/small-again": "metadata",
        "new": "added",
        "empty": "removed",
    }
    assert (found["only_before_bytes"], found["only_after_bytes"]) == (4, 7)
    assert found["shared_bytes"] > 2 << 20
    lines = call("diff", "a:1", "a:2").out.splitlines()
    assert "M sub/more (4 B)" in lines
    assert "+ new (3 B)" in lines
    same = call("diff", "a:1", "a:1", "--json").document
    assert same["changes"] == []
    assert same["only_before_bytes"] == same["only_after_bytes"] == 0


def test_variants_choose_the_first_image_that_fits_the_machine(
    call: Call, store: Path, snapshot: Path, tmp_path: Path
) -> None:
    other = make_snapshot(tmp_path / "other", 2)
    call("push", snapshot, "m:h100", "--require", "gpu.products=H100")
    b200 = call("push", other, "m:b200", "--require", "gpu.products=B200").out
    listed = call("variants", "m:any", "m:h100", "m:b200", "--json").document
    assert listed["target_kind"] == "variants"
    assert call("pull", "m:any", tmp_path / "o", "--fact", "gpu.products=B200").out == b200
    nothing = call("pull", "m:any", tmp_path / "p", "--fact", "gpu.products=A100")
    assert nothing.code == 11
    assert "A100" in nothing.err
    assert not (tmp_path / "p").exists()
    found = call("inspect", "m:any", "--json").document
    assert found["kind"] == "variants"
    assert [one["digest"] for one in found["images"]][1] == b200.strip()
    assert call("ls", "--json").document["references"][0]["variants"] == 2
    assert call("tag", "m:any", "n:1", "--json").document["target_kind"] == "variants"
    assert call("variants", "m:2", "m:any").code == 2
    assert call("variants", "m:2", "m:b200", "m:b200").code == 2
