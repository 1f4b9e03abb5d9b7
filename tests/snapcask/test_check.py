"""`check`, and how `push`, `load`, `mount`, `pull` and `prefetch` treat the rules of an image."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import snapcask
from snapcask.declared import normalised_flags
from snapcask.exitcodes import ExitCode
from tests.filesystems import disk
from tests.snapcask.conftest import Call
from tests.snapcask.test_docs import WORDS, keys_of

SHA = "sha256:" + "0a" * 32
WRONG = "cpu.arch=pdp11"


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A directory with one safetensors file of one tensor."""
    root = tmp_path / "weights"
    root.mkdir()
    header = b'{"w":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}'.ljust(56)
    raw = len(header).to_bytes(8, "little") + header + bytes(range(8))
    (root / "model.safetensors").write_bytes(raw)
    return root


def provenance(call: Call, reference: str) -> Any:
    return call("inspect", reference, "--json").document["members"][0]["provenance"]


def test_an_image_without_rules_is_for_every_machine(
    call: Call, store: Path, snapshot: Path
) -> None:
    call("push", snapshot, "a:1")
    shown = call("check", "a:1")
    assert (shown.code, shown.err) == (0, "")
    assert "no rules" in shown.out
    assert call("check", "a:1", "-q").out == ""


def test_each_rule_is_shown_with_both_values_and_the_verdict(
    call: Call, store: Path, snapshot: Path
) -> None:
    call(
        "push", snapshot, "a:1", "--fact", "gpu.driver_version=580.65.06", "--fact",
        "kernel.release=1.2.3-none", "--require", "pool~=fast",
    )  # fmt: skip
    here = ("--fact", "gpu.driver_version=580.65.6")
    shown = call("check", "a:1", *here)
    assert shown.code == ExitCode.MISMATCH
    rows = {line.split()[0]: line.split() for line in shown.out.splitlines() if line}
    assert rows["gpu.driver_version"][1:] == ["equal", "580.65.06", "580.65.6", "fits"]
    assert rows["kernel.release"][1:3] == ["equal", "1.2.3-none"]
    assert rows["kernel.release"][-1] == "differs"
    assert rows["pool"][1:] == ["subset", "fast", "-", "unknown"]
    assert "does not fit this machine: kernel.release" in shown.out
    fits = call("check", "a:1", *here, "--override", "kernel.release")
    assert fits.code == 0
    assert "differs, overridden" in fits.out
    document = call("check", "a:1", "--json").document
    assert not document["fits"]
    assert {key for key in keys_of(document) if key not in WORDS_OF_PAGE} == set()
    (pool,) = [rule for rule in document["rules"] if rule["rule"] == "pool"]
    assert pool == {
        "rule": "pool", "op": "subset", "source": "fast", "target": None, "verdict": "unknown",
        "missing": [], "overridden": False, "origin": "required", "members": [],
    }  # fmt: skip


WORDS_OF_PAGE = {word for phrase in WORDS for word in phrase.split()}


def test_of_variants_the_one_that_a_prefetch_takes_is_named(
    call: Call, store: Path, snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SNAPCASK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SNAPCASK_ALLOW_ROOT_FILESYSTEM", "1")
    digests = [
        call("push", snapshot, f"i:{n}", "--fact", f"gpu.products={product}").out.strip()
        for n, product in enumerate(["NVIDIA B200", "NVIDIA H100 80GB HBM3"])
    ]
    call("variants", "v:1", "i:0", "i:1")
    here = ("--fact", "gpu.products=NVIDIA-H100-80GB-HBM3")
    shown = call("check", "v:1", *here)
    assert shown.code == 0
    assert f"{digests[1]} (2 of 2 variants: the first that fits)" in shown.out
    assert "gpu.products: the image wants subset 'NVIDIA B200'" in shown.out
    assert call("prefetch", "v:1", *here).out.strip() == digests[1]
    neither = call("check", "v:1", "--fact", "gpu.products=NVIDIA L4", "--json")
    assert neither.code == ExitCode.MISMATCH
    assert len(neither.document["rejected"]) == 2
    assert {key for key in keys_of(neither.document) if key not in WORDS_OF_PAGE} == set()
    pulled = call("pull", "v:1", tmp_path / "out", "--fact", "gpu.products=NVIDIA L4")
    assert pulled.code == ExitCode.MISMATCH
    assert "none of the variants fits" in pulled.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("nothing:1",), ExitCode.NOT_FOUND, "nothing:1"),
        (("a:1", "--member", "b"), ExitCode.NOT_FOUND, "it has main"),
        (("a:1", "--override", "kernel"), ExitCode.INVALID_INPUT, "no rule 'kernel'"),
        (("a:1", "--fact", "kernel"), ExitCode.INVALID_INPUT, "FACT=VALUE"),
    ],
)
def test_a_check_that_can_not_be_made_is_told_apart_from_one_that_fails(
    call: Call, store: Path, snapshot: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    call("push", snapshot, "a:1")
    outcome = call("check", *arguments)
    assert (outcome.code, outcome.out) == (code, "")
    assert message in outcome.err


def test_what_is_declared_is_recorded(call: Call, store: Path, snapshot: Path) -> None:
    declared = (
        "--engine",
        "vllm:0.20.1",
        "--model",
        "meta/llama",
        "--container-image",
        f"r/a@{SHA}",
    )
    first = call("push", snapshot, "a:1", *declared, "--engine-flags", "--tp 2 --dtype=bf16 -q")
    other = call("push", snapshot, "a:2", *declared, "--engine-flags=-q  --dtype bf16 --tp=2")
    assert first.out == other.out
    assert provenance(call, "a:1") == {
        "engine": "vllm",
        "engine.version": "0.20.1",
        "engine.flags": "--dtype=bf16 --tp=2 -q",
        "model": "meta/llama",
        "container.image_id": f"r/a@{SHA}",
    }
    same = call("check", "a:1", "--fact", f"container.image_id=docker://{SHA}", "--json").document
    (image,) = [rule for rule in same["rules"] if rule["rule"] == "container.image_id"]
    assert image["verdict"] == "fits"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--container-image", "r/a:latest"), "has no digest"),
        (("--container-image", "sha256:00"), "has no digest"),
        (("--engine", ":1"), "engine is empty"),
        (("--model", ""), "model is empty"),
        (("--engine-flags", "'--a"), "No closing quotation"),
        (("--model", "a", "--fact", "model=b"), "model is given twice"),
    ],
)
def test_what_can_not_be_declared_is_refused(
    call: Call, store: Path, snapshot: Path, arguments: tuple[str, ...], message: str
) -> None:
    outcome = call("push", snapshot, "a:1", *arguments)
    assert outcome.code == ExitCode.INVALID_INPUT
    assert message in outcome.err
    assert call("ls", "--json").document == {"references": []}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", ""),
        ("serve model --b 1 --a", "serve model --a --b=1"),
        ("--x=1 --a --x=0", "--a --x=1 --x=0"),
        ("--temp -1.5", "--temp=-1.5"),
        ("--names a b --z", "--names=a b --z"),
        ("--c '{\"k\": 1}'", "'--c={\"k\": 1}'"),
    ],
)
def test_flags_have_one_order_and_one_form(given: str, expected: str) -> None:
    assert normalised_flags(given) == expected
    assert normalised_flags(expected) == expected


def test_a_host_that_is_recorded_fits_and_gives_way_to_the_snapshot(
    call: Call, store: Path, snapshot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from restore import host_facts

    host = {
        "gpu.count": "8", "gpu.driver_version": "590.1", "gpu.products": "H200,B200",
        "kernel.release": "6.1",
    }  # fmt: skip
    monkeypatch.setattr(host_facts.MachineFacts, "recordable", lambda _: host)
    call("push", snapshot, "a:1", "--record-host")
    assert provenance(call, "a:1") == host
    manifest = "cudaRestore: {sourceDriverVersion: '580.1', sourceGpuUuids: [GPU-1]}\n"
    (snapshot / "manifest.yaml").write_text(manifest)
    call("push", snapshot, "a:2", "--record-host", "--fact", "kernel.release=6.2")
    assert provenance(call, "a:2") == {
        "gpu.count": "1", "gpu.driver_version": "580.1", "kernel.release": "6.2",
    }  # fmt: skip


def test_a_load_refuses_warns_or_ignores(call: Call, store: Path, weights: Path) -> None:
    call("push", weights, "w:1", "--fact", WRONG, "--fact", "kernel.release=1.2.3-none")
    load = ("load", "w:1", "--device", "cpu")
    refused = call(*load)
    assert (refused.code, refused.out) == (ExitCode.MISMATCH, "")
    for part in ("cpu.arch", "'pdp11'", "--override cpu.arch", "--on-mismatch warn"):
        assert part in refused.err
    assert "kernel.release" not in refused.err  # no process is restored
    warned = call(*load, "--on-mismatch", "warn")
    assert (warned.code, "warning" in warned.err, "pdp11" in warned.err) == (0, True, True)
    assert call(*load, "--on-mismatch", "warn", "-q").err == ""
    assert call(*load, "--on-mismatch", "warn", "--json").document["warnings"]
    for way in (("--on-mismatch", "ignore"), ("--override", "cpu.arch"), ("--fact", WRONG)):
        done = call(*load, *way, "--json")
        assert (done.code, done.document["warnings"]) == (0, [])
    assert call(*load, "--on-mismatch", "never").code == ExitCode.INVALID_INPUT
    assert call(*load, "--override", "cpu").code == ExitCode.INVALID_INPUT


def test_the_api_checks_before_it_loads(store: Path, weights: Path) -> None:
    snapcask.push(weights, "w:1", store=store, require=["pool=fast"])
    facts = {"pool": "slow"}
    with pytest.raises(snapcask.DoesNotFit, match="pool"):
        snapcask.load("w:1", device="cpu", store=store, facts=facts)
    with pytest.raises(snapcask.DoesNotFit, match="pool"):
        list(snapcask.iter_tensors("w:1", device="cpu", store=store, facts=facts))
    found = snapcask.load("w:1", device="cpu", store=store, facts=facts, on_mismatch="warn")
    assert np.from_dlpack(found["w"]).tolist() == list(range(8))
    assert "pool" in found.report.warnings[0]
    assert snapcask.load("w:1", device="cpu", store=store).report.warnings == ()
    with pytest.raises(snapcask.InvalidInput, match="on-mismatch"):
        snapcask.load("w:1", device="cpu", store=store, on_mismatch="no")
    report = snapcask.check("w:1", store=store, facts=facts)
    assert [check.verdict for check in report.checks] == [snapcask.Verdict.DIFFERS]


@pytest.mark.root
def test_a_mount_refuses_warns_or_ignores_also_without_its_store(
    call: Call, store: Path, snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with disk(tmp_path, "ext4") as made:
        monkeypatch.setenv("SNAPCASK_CACHE", str(made.root / "cache"))
        at = made.root / "at"
        at.mkdir()
        digest = call("push", snapshot, "a:1", "--fact", WRONG).out.strip()
        assert call("prefetch", "a:1").code == 0
        for reference in ("a:1", digest, "without its store"):
            if reference == "without its store":
                store.rename(tmp_path / "elsewhere")
                reference = digest
            refused = call("mount", reference, at)
            assert refused.code == ExitCode.MISMATCH
            assert "pdp11" in refused.err
            assert os.listdir(at) == []
        (tmp_path / "elsewhere").rename(store)
        warned = call("mount", "a:1", at, "--on-mismatch", "warn")
        assert (warned.code, "pdp11" in warned.err) == (0, True)
        assert call("umount", at).code == 0
        for way in (("--on-mismatch", "ignore"), ("--override", "cpu.arch"), ("--fact", WRONG)):
            done = call("mount", "a:1", at, *way, "--json")
            assert (done.code, done.document["warnings"]) == (0, [])
            assert call("umount", at).code == 0


@pytest.mark.root
def test_a_mount_of_variants_takes_the_one_that_fits(
    call: Call, store: Path, snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with disk(tmp_path, "ext4") as made:
        monkeypatch.setenv("SNAPCASK_CACHE", str(made.root / "cache"))
        at = made.root / "at"
        at.mkdir()
        call("push", snapshot, "i:0", "--require", "pool=fast")
        slow = call("push", snapshot, "i:1", "--require", "pool=slow").out.strip()
        call("variants", "v:1", "i:0", "i:1")
        here = ("--fact", "pool=slow")
        assert call("prefetch", "v:1", *here).code == 0
        assert call("mount", "v:1", at, *here, "--json").document["digest"] == slow
        assert call("umount", at).code == 0
        assert call("mount", "v:1", at, "--fact", "pool=none").code == ExitCode.MISMATCH


def test_gpus_are_not_looked_at_without_rules_about_them(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from restore import gpu_facts, host_facts
from snapcask.__main__ import main
def never(*_, **__):
    raise AssertionError("a GPU is looked at")
gpu_facts.subprocess.run = host_facts.subprocess.run = never
host_facts.proc_facts = host_facts.has_driver = never
root = {str(tmp_path)!r}
store = ["--store", root + "/store"]
Path(root, "d").mkdir()
assert main(["init", root + "/store"]) == 0
assert main(["push", root + "/d", "a:1", "--fact", "kernel.release=1", *store]) == 0
assert main(["check", "a:1", *store]) == 11
assert main(["variants", "v:1", "a:1", *store]) == 0
assert main(["pull", "v:1", root + "/out", "--fact", "kernel.release=1", *store]) == 0
assert not {{"pynvml", "cuda"}} & set(sys.modules), "a GPU library is loaded"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
