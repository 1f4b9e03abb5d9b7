"""Stores that earlier versions wrote are read by this one, for ever."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from imgfmt import placement
from imgfmt.digest import Digest
from imgfmt.image import Image
from imgfmt.reference import parse_reference
from tests.golden.make import describe
from transfer.catalog import open_catalog
from transfer.config import TransferConfig
from transfer.pull import pull
from transfer.store.posix import PosixStore
from transfer.verify import verify_all

VERSIONS = sorted(path for path in Path(__file__).parent.glob("v*") if path.is_dir())
STORES = [store for version in VERSIONS for store in sorted(version.iterdir()) if store.is_dir()]


@pytest.fixture(params=STORES, ids=lambda path: f"{path.parent.name}-{path.name}")
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of one golden store, so that a test can't change it."""
    source: Path = request.param
    return Path(shutil.copytree(source, tmp_path / source.parent.name / source.name))


def expected_of(request: pytest.FixtureRequest) -> dict[str, Any]:
    path: Path = request.node.callspec.params["golden"]
    found: dict[str, Any] = json.loads((path.parent / "expected.json").read_text())
    return found


def test_a_golden_image_is_pulled_as_it_was_pushed(
    golden: Path, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    expected = expected_of(request)

    async def run() -> Digest:
        store = PosixStore(str(golden))
        catalog = await open_catalog(store)
        digest = await catalog.resolve(parse_reference("golden/image:v1"))
        await pull(catalog, digest, str(tmp_path / "back"), config=TransferConfig(), facts={})
        store.close()
        return digest

    assert str(asyncio.run(run())) == expected["digests"][golden.name]
    assert describe(tmp_path / "back") == expected["entries"]


def test_a_golden_store_verifies(golden: Path) -> None:
    async def run() -> list[Any]:
        store = PosixStore(str(golden))
        report = await verify_all(await open_catalog(store), config=TransferConfig())
        store.close()
        return list(report.damages)

    assert asyncio.run(run()) == []


def test_golden_objects_are_encoded_again_to_the_same_bytes(golden: Path) -> None:
    """So nothing that this version writes for the same content differs in its digest."""

    async def run() -> None:
        store = PosixStore(str(golden))
        catalog = await open_catalog(store)
        digest = await catalog.resolve(parse_reference("golden/image:v1"))
        image = await catalog.image(digest)
        assert isinstance(image, Image)
        assert image.encode() == bytes(await store.get(f"images/{digest.hex}"))
        tree = image.members[0].tree
        content = await catalog.content(tree)
        raw = b"".join(placement.encode(content.placement))
        assert raw == bytes(await store.get(f"placements/{tree.hex}"))
        store.close()

    asyncio.run(run())
