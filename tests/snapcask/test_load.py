"""Loading by the API and the command, to the device `cpu`."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3

import snapcask
from snapcask import CorruptData, Digest, InvalidInput, NotFound, Unsupported
from tests.filesystems import disk
from tests.restore.loading import Content, model
from tests.snapcask.conftest import Call


@pytest.fixture
def weights(tmp_path: Path) -> tuple[Path, Content]:
    return tmp_path / "model", model(tmp_path / "model")


def held(tensors: snapcask.Tensors) -> Content:
    return {name: np.from_dlpack(tensor).tobytes() for name, tensor in tensors.items()}


def test_a_directory_an_image_and_a_directory_compared_with_it_give_the_same_tensors(
    store: Path, weights: tuple[Path, Content]
) -> None:
    root, content = weights
    snapcask.push(root, "m:1", store=store)
    plain = snapcask.load(root, device="cpu")
    image = snapcask.load("m:1", device="cpu", store=store)
    checked = snapcask.load(root, device="cpu", image="m:1", store=store)
    assert held(plain) == held(image) == held(checked) == content
    assert list(plain) == list(image) == list(content)
    assert [t.report.verified for t in (plain, image, checked)] == [False, True, True]
    with pytest.raises(KeyError):
        _ = plain["absent"]


def test_tensors_can_be_had_one_after_the_other(weights: tuple[Path, Content]) -> None:
    root, content = weights
    found = {t.name: t.to_bytes() for t in snapcask.iter_tensors(root, device="cpu")}
    assert found == content
    some = snapcask.iter_tensors(root, device="cpu", names=lambda name: name.startswith("small"))
    assert next(some).name.startswith("small")
    some.close()  # type: ignore[attr-defined]
    with pytest.raises(NotFound):
        next(snapcask.iter_tensors(root / "absent", device="cpu", store=root.parent / "none"))


def test_ranges_go_to_memory_of_the_caller(store: Path, weights: tuple[Path, Content]) -> None:
    root, _ = weights
    snapcask.push(root, "m:1", store=store)
    buffer = np.zeros(1000, np.uint8)
    wanted = [snapcask.FileRange("model-1.safetensors", 5, 900, buffer.ctypes.data)]
    report = snapcask.load_ranges("m:1", wanted, device="cpu", store=store)
    assert report.verified
    raw = (root / "model-1.safetensors").read_bytes()
    assert buffer.tobytes() == raw[5:905] + bytes(100)


def test_a_range_of_chunks_goes_to_memory_of_the_caller(
    store: Path, weights: tuple[Path, Content]
) -> None:
    root, _ = weights
    snapcask.push(root, "m:1", store=store)
    file = "model-1.safetensors"
    raw = (root / file).read_bytes()
    with snapcask.open_image("m:1", store=store) as image:
        chunks = image.chunks(file)
        with pytest.raises(NotFound, match="absent"):
            image.chunks("absent")
        with pytest.raises(InvalidInput, match="not a regular file"):
            image.chunks("")
    for chunk in chunks:
        piece = raw[chunk.offset : chunk.offset + chunk.n_bytes]
        assert Digest(blake3(piece).digest()) == chunk.digest
    between = raw[: chunks[0].offset] + b"".join(
        raw[one.offset + one.n_bytes : other.offset] for one, other in pairwise(chunks)
    )
    assert not any(between)
    first, last = chunks[3], chunks[7]
    buffer = np.zeros(last.offset + last.n_bytes - first.offset, np.uint8)
    wanted = [snapcask.FileRange(file, first.offset, len(buffer), buffer.ctypes.data)]
    assert snapcask.load_ranges("m:1", wanted, device="cpu", store=store).verified
    assert buffer.tobytes() == raw[first.offset : last.offset + last.n_bytes]


def test_a_directory_that_differs_from_its_image_is_not_loaded(
    store: Path, weights: tuple[Path, Content]
) -> None:
    root, _ = weights
    snapcask.push(root, "m:1", store=store)
    file = root / "model-2.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    with pytest.raises(CorruptData, match="'last' is lost"):
        snapcask.load(root, device="cpu", image="m:1", store=store)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"device": "gpu"}, InvalidInput),
        ({"device": "cuda:x"}, InvalidInput),
        ({"device": "cpu", "verify": "never"}, InvalidInput),
        ({"device": "cpu", "verify": "device"}, InvalidInput),
        ({"device": "cpu", "n_threads": 0}, InvalidInput),
        ({"device": "cpu", "max_pinned_bytes": 1000}, InvalidInput),
        ({"device": "cpu", "member": "x"}, InvalidInput),
        ({"device": "cpu", "max_pinned_bytes": 7 << 20}, None),
    ],
)
def test_arguments_are_checked(
    weights: tuple[Path, Content], given: dict[str, object], error: type[Exception] | None
) -> None:
    root, content = weights
    if error is None:
        assert held(snapcask.load(root, **given)) == content  # type: ignore[arg-type]
        return
    with pytest.raises(error):
        snapcask.load(root, **given)  # type: ignore[arg-type]


def test_where_there_is_no_gpu_that_is_said(
    weights: tuple[Path, Content], monkeypatch: pytest.MonkeyPatch
) -> None:
    from restore import cuda_driver

    monkeypatch.setattr(cuda_driver, "cuda", None)
    cuda_driver.cuda_driver.cache_clear()
    with pytest.raises(Unsupported, match="cuda-python"):
        snapcask.load(weights[0])


def test_the_command_reports_what_it_loaded(
    call: Call, store: Path, weights: tuple[Path, Content]
) -> None:
    root, content = weights
    assert call("push", root, "m:1").code == 0
    shown = call("load", "m:1", "--device", "cpu")
    assert shown.code == 0
    assert f"{len(content)} tensors" in shown.out
    document = call("load", "m:1", "--device", "cpu", "--json").document
    assert document["tensors"] == len(content)
    assert document["verified"] is True
    assert document["cpu_checked_bytes"] > 0
    assert document["gb_per_s"]["load"] > 0
    compared = call("load", root, "--device", "cpu", "--image", "m:1", "--verify", "cpu", "--json")
    assert compared.document["verified"] is True
    assert call("load", root, "--device", "gpu").code == 2
    assert call("load", "m:2", "--device", "cpu").code == 4
    chosen = call("load", root, "--device", "cpu", "--file", "*-2.safetensors", "--json").document
    assert chosen["tensors"] == 301


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache, which the environment names."""
    monkeypatch.setenv("SNAPCASK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SNAPCASK_ALLOW_ROOT_FILESYSTEM", "1")
    return tmp_path / "cache"


def test_an_image_that_is_in_the_nodes_cache_is_loaded_from_there(
    call: Call, store: Path, cache: Path, weights: tuple[Path, Content]
) -> None:
    root, content = weights
    digest = call("push", root, "m:1").out.strip()
    cold = call("load", "m:1", "--device", "cpu", "--json").document
    assert cold["from_cache"] is False
    assert not cache.exists()
    assert call("prefetch", "m:1").code == 0
    warm = call("load", "m:1", "--device", "cpu", "--json").document
    assert (warm["from_cache"], warm["verified"]) == (True, True)
    assert (
        call("load", "m:1", "--device", "cpu", "--no-cache", "--json").document["from_cache"]
        is False
    )
    found = snapcask.load("m:1", device="cpu", store=store, cache=cache)
    assert found.report.from_cache
    assert held(found) == content
    assert not snapcask.load("m:1", device="cpu", store=store, cache=None).report.from_cache
    store.rename(store.parent / "elsewhere")
    offline = call("load", digest, "--device", "cpu", "--json")
    assert offline.document["from_cache"] is True
    assert call("load", "m:1", "--device", "cpu").code == 4
    assert call("load", digest, "--device", "cpu", "--no-cache").code == 4


@pytest.mark.root
def test_an_image_that_lies_on_two_disks_of_the_cache_is_loaded_from_both(
    call: Call, store: Path, weights: tuple[Path, Content], tmp_path: Path
) -> None:
    root, content = weights
    assert call("push", root, "m:1").code == 0
    with disk(tmp_path, "xfs", name="one") as main:
        cache = main.root / "cache"
        with disk(tmp_path, "xfs", name="two") as further:
            more = further.root / "more"
            assert call("prefetch", "m:1", "--cache", cache, "--disk", more).code == 0
            assert list(cache.glob("domains/*/trees/*/*.safetensors"))
            assert list(more.glob("domains/*/trees/*/*.safetensors"))
            found = snapcask.load("m:1", device="cpu", store=store, cache=cache)
            assert found.report.from_cache
            assert held(found) == content
        missing = snapcask.load("m:1", device="cpu", store=store, cache=cache)
        assert not missing.report.from_cache
        assert held(missing) == content


def test_an_image_of_the_cache_must_fit_too(
    call: Call, store: Path, cache: Path, weights: tuple[Path, Content]
) -> None:
    digest = call("push", weights[0], "m:1", "--require", "node.kind=moon").out.strip()
    assert call("prefetch", "m:1").code == 0
    line = ["--device", "cpu", "--fact", "node.kind=earth"]
    assert call("load", "m:1", *line).code == 11
    store.rename(store.parent / "elsewhere")
    assert call("load", digest, *line).code == 11
    assert call("load", digest, *line, "--override", "node.kind").code == 0


def test_damage_in_the_cache_is_warned_of_and_the_store_is_read(
    call: Call, store: Path, cache: Path, weights: tuple[Path, Content]
) -> None:
    root, content = weights
    assert call("push", root, "m:1").code == 0
    assert call("prefetch", "m:1").code == 0
    (file,) = cache.glob("domains/*/trees/*/model-1.safetensors")
    raw = bytearray(file.read_bytes())
    raw[raw.index(content["tail"])] ^= 1
    file.chmod(0o644)
    file.write_bytes(raw)
    shown = call("load", "m:1", "--device", "cpu")
    assert shown.code == 0
    assert "prefetch" in shown.err
    again = call("load", "m:1", "--device", "cpu", "--json").document
    assert (again["from_cache"], again["warnings"]) == (False, [])
    assert call("prefetch", "m:1").code == 0
    assert call("load", "m:1", "--device", "cpu", "--json").document["from_cache"] is True


def test_tensors_go_by_their_names_to_memory_of_the_caller(
    store: Path, weights: tuple[Path, Content]
) -> None:
    root, content = weights
    snapcask.push(root, "m:1", store=store)
    buffer = np.zeros(len(content["tail"]) + len(content["last"]), np.uint8)
    tail = snapcask.TensorTarget("tail", len(content["tail"]), buffer.ctypes.data)
    behind = buffer.ctypes.data + tail.n_bytes
    last = snapcask.TensorTarget("last", len(content["last"]), behind)
    report = snapcask.load_ranges("m:1", [last, tail], device="cpu", store=store)
    assert buffer.tobytes() == content["tail"] + content["last"]
    assert (report.verified, report.tensors) == (True, 2)
    larger = snapcask.TensorTarget("tail", tail.n_bytes + 1, tail.pointer)
    with pytest.raises(InvalidInput, match=f"has {tail.n_bytes} bytes"):
        snapcask.load_ranges("m:1", [larger], device="cpu", store=store)
    absent = snapcask.TensorTarget("absent", 1, tail.pointer)
    with pytest.raises(NotFound, match="no tensor 'absent'"):
        snapcask.load_ranges("m:1", [absent], device="cpu", store=store)
