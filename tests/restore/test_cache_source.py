"""Loading from the node's cache: what is complete and sound there, and the store for all else."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from imgfmt.digest import Digest
from imgfmt.errors import CorruptData, InvalidInput, NotFound
from restore.cache_source import CachedSource, open_cache, open_warm
from restore.image_source import ImageSource
from restore.load import Devices, Loaded, load
from restore.load_config import LoadConfig, Verify
from restore.sources import Source
from restore.testing.fake_driver import FakeDriver
from tests.restore.loading import CONFIG, MIB, Content, content_of, held, model, noise, pushed
from transfer.cache.domains import domain_of, domain_to_read
from transfer.cache.layout import CacheRoot, DomainPaths
from transfer.cache.locks import lock
from transfer.cache.owners import is_sound
from transfer.cache.usage import used_ns
from transfer.cache.warm import WarmConfig, warm
from transfer.catalog import open_catalog
from transfer.config import TransferConfig
from transfer.store.posix import PosixStore
from transfer.threads import Threads


@dataclass(frozen=True)
class Node:
    """A store with a model, and a cache that has it."""

    content: Content
    store: PosixStore
    cache: CacheRoot
    paths: DomainPaths
    tree: Digest

    @property
    def files(self) -> Path:
        """Where the tree's files are."""
        return Path(self.paths.tree(self.tree))


async def _warm(store: PosixStore, cache: CacheRoot) -> tuple[DomainPaths, Digest]:
    catalog = await open_catalog(store)
    state = await store.read_reference("m", "v1")
    assert state is not None
    assert state.record.target is not None
    paths = domain_of(cache, catalog)
    done = await warm(
        cache, paths, catalog, state.record.target, config=WarmConfig(direct=False), facts={}
    )
    return paths, done.members[0].tree


@pytest.fixture
def node(tmp_path: Path) -> Node:
    content = model(tmp_path / "model")
    store = asyncio.run(pushed(tmp_path / "model", tmp_path / "store"))
    cache = CacheRoot(str(tmp_path / "cache"), allow_root_filesystem=True)
    return Node(content, store, cache, *asyncio.run(_warm(store, cache)))


def load_cached(
    node: Node,
    driver: FakeDriver,
    warnings: list[str],
    *,
    with_store: bool = False,
    config: LoadConfig = CONFIG,
    deliver: Callable[[str], None] | None = None,
) -> Loaded:
    """Load the model from the cache; what is damaged there from the store if that is there."""

    async def work() -> Loaded:
        with Threads("test", 4) as threads:

            async def stored() -> Source:
                if not with_store:
                    raise NotFound("there is no store")
                catalog = await open_catalog(node.store)
                content = await content_of(node.store)
                return ImageSource(catalog, content, threads, TransferConfig())

            found = open_warm(node.cache, node.paths, node.tree)
            assert found is not None
            with found.lock:
                source = CachedSource(found, threads, stored, warnings.append)
                return await load(
                    source, Devices(driver, (0,)), threads, config,
                    deliver=(lambda tensors: deliver(tensors[0].name)) if deliver else None,
                )  # fmt: skip

    return asyncio.run(work())


def damage(node: Node, name: str, at: int) -> None:
    """Change a byte of a tensor in the cache's file."""
    file = node.files / "model-1.safetensors"
    raw = bytearray(file.read_bytes())
    raw[raw.index(node.content[name]) + at] ^= 1
    file.chmod(0o644)
    file.write_bytes(raw)


@pytest.mark.parametrize("verify", [Verify.AUTO, Verify.CPU, Verify.DEVICE])
def test_an_image_is_loaded_from_the_files_of_the_cache_and_verified(
    node: Node, verify: Verify
) -> None:
    driver, warnings = FakeDriver(), list[str]()
    loaded = load_cached(node, driver, warnings, config=replace(CONFIG, verify=verify))
    assert held(loaded) == node.content
    assert (loaded.report.verified, loaded.report.from_cache) == (True, True)
    assert warnings == []
    with pytest.raises(InvalidInput, match="always verified"):
        load_cached(node, driver, warnings, config=replace(CONFIG, verify=Verify.OFF))
    del loaded
    gc.collect()
    assert driver.leaks == []


@pytest.mark.parametrize("verify", [Verify.CPU, Verify.DEVICE])
def test_a_damaged_chunk_comes_from_the_store_and_is_written_down(
    node: Node, verify: Verify
) -> None:
    damage(node, "big", 3 * MIB)
    driver, warnings, handed = FakeDriver(), list[str](), list[str]()
    loaded = load_cached(
        node, driver, warnings, with_store=True,
        config=replace(CONFIG, verify=verify), deliver=handed.append,
    )  # fmt: skip
    assert held(loaded) == node.content
    assert sorted(handed) == sorted(node.content)  # each once
    assert not loaded.report.from_cache
    (warning,) = warnings
    assert "'big' is lost" in warning
    assert "prefetch" in warning
    assert not is_sound(node.paths, node.tree, node.cache.session)
    assert open_warm(node.cache, node.paths, node.tree) is None
    asyncio.run(_warm(node.store, node.cache))
    assert held(load_cached(node, driver, [])) == node.content  # mended
    del loaded
    gc.collect()
    assert driver.leaks == []


def test_a_damaged_header_comes_from_the_store_too(node: Node) -> None:
    file = node.files / "model-2.safetensors"
    raw = file.read_bytes()
    file.chmod(0o644)
    file.write_bytes(raw.replace(b'"small.0"', b'"small.x"'))
    loaded = load_cached(node, FakeDriver(), [], with_store=True)
    assert held(loaded) == node.content
    assert not loaded.report.from_cache


def test_a_file_that_is_gone_comes_from_the_store(node: Node) -> None:
    (node.files / "model-1.safetensors").unlink()
    warnings: list[str] = []
    loaded = load_cached(node, FakeDriver(), warnings, with_store=True)
    assert held(loaded) == node.content
    assert len(warnings) == 1
    assert not is_sound(node.paths, node.tree, node.cache.session)
    assert asyncio.run(_warm(node.store, node.cache))[1] == node.tree  # as the warning advises
    assert is_sound(node.paths, node.tree, node.cache.session)
    assert (node.files / "model-1.safetensors").exists()


def test_without_a_store_damage_is_the_error(node: Node) -> None:
    damage(node, "tail", 5)
    driver = FakeDriver()
    with pytest.raises(CorruptData, match="'tail' is lost"):
        load_cached(node, driver, [])
    gc.collect()
    assert driver.leaks == []


def test_a_tree_that_is_loaded_is_locked_and_counts_as_used(node: Node) -> None:
    before = used_ns(node.paths, node.tree)
    found = open_warm(node.cache, node.paths, node.tree)
    assert found is not None
    assert used_ns(node.paths, node.tree) > before
    assert lock(node.paths.lock(node.tree), wait=False) is None
    found.lock.close()
    held = lock(node.paths.lock(node.tree), wait=False)
    assert held is not None
    with held:
        assert open_warm(node.cache, node.paths, node.tree) is None


@pytest.mark.parametrize("lost", ["mark", "object"])
def test_a_tree_that_is_not_complete_is_not_warm(node: Node, lost: str) -> None:
    os.unlink(getattr(node.paths, lost)(node.tree))
    assert open_warm(node.cache, node.paths, node.tree) is None
    held = lock(node.paths.lock(node.tree), wait=False)
    assert held is not None
    held.close()


def test_another_store_has_another_domain_which_is_not_made(node: Node, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m/x").write_bytes(noise(10, 1))
    same = asyncio.run(open_catalog(node.store))
    assert domain_to_read(node.cache, same) == node.paths
    same.store.credential_scope = "somebody else"  # type: ignore[attr-defined]
    other = domain_to_read(node.cache, same)
    assert other != node.paths
    assert open_warm(node.cache, other, node.tree) is None
    assert not os.path.exists(other.folder)


def test_a_directory_without_a_cache_is_left_as_it_is(tmp_path: Path) -> None:
    assert open_cache(str(tmp_path)) is None
    assert open_cache(str(tmp_path / "absent")) is None
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_others_can_write_to_is_not_used(node: Node) -> None:
    assert open_cache(node.cache.path) is not None
    os.chmod(node.cache.path, 0o777)
    assert open_cache(node.cache.path) is None
