"""A pull with one slow connection of many, and from a server that takes few requests at a time."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from imgfmt.digest import Digest
from tests.transfer.s3.support import store_at
from tests.transfer.s3.test_transfers import push_directory, run, same
from transfer import execute
from transfer.catalog import open_catalog
from transfer.config import TransferConfig
from transfer.hedge import HedgeConfig, Hedger
from transfer.pull import pull
from transfer.store.s3.config import MIB
from transfer.store.s3.policy import RetryConfig
from transfer.store.s3.store import S3Store
from transfer.testing.fault_server import FaultServer
from transfer.testing.faults import Manners, Seen
from transfer.testing.little_s3 import LittleS3

pytestmark = pytest.mark.slow

BLOCK_BYTES = 2 * MIB
N_RANGES = 64
SLOW_CONNECTION = 9  # the first ones read metadata
USUAL_BYTES_S = 2_500_000
NO_HEDGING = HedgeConfig(most_percent=0.0, few=0)


def config_of(n_connections: int) -> TransferConfig:
    """So many ranges at once, and one buffer for a second read."""
    return TransferConfig(
        block_bytes=BLOCK_BYTES, max_memory_bytes=(n_connections + 1) * BLOCK_BYTES, fsync=False
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that is read in `N_RANGES` ranges or a few more."""
    folder = tmp_path_factory.mktemp("source")
    content = np.random.default_rng(3).bytes(N_RANGES * BLOCK_BYTES)
    (folder / "pages.img").write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def pushed(source: Path) -> tuple[LittleS3, Digest]:
    """The objects of a store that has the directory."""
    with pytest.MonkeyPatch.context() as environment, FaultServer() as server:
        environment.setenv("AWS_ACCESS_KEY_ID", "key")
        environment.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        digest = run(push_directory(store_at(server.endpoint), source, pack_bytes=64 * MIB))
        return server.objects, digest


async def timed_pull(store: S3Store, digest: Digest, target: Path, n_connections: int) -> float:
    """The seconds that a pull takes from its first range on."""
    catalog = await open_catalog(store)
    config = config_of(n_connections)
    begun_s = time.monotonic()
    await pull(catalog, digest, str(target), config=config, facts={})
    return time.monotonic() - begun_s


def ranges_of(server: FaultServer) -> list[Seen]:
    """The ranged reads of packs, in order."""
    return [seen for seen in server.seen if "/packs/" in seen.request.path]


def test_one_slow_connection_of_sixteen_costs_little_thanks_to_hedging(
    pushed: tuple[LittleS3, Digest], source: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    objects, digest = pushed

    def pulled(name: str, slow_connection: int, limit_s: float) -> float:
        def speed(number: int) -> float:
            return USUAL_BYTES_S / 100 if number == slow_connection else USUAL_BYTES_S

        with FaultServer(objects, manners=Manners(speed=speed)) as server:
            took_s = run(
                timed_pull(store_at(server.endpoint), digest, tmp_path / name, 16), limit_s
            )
            used = {seen.connection for seen in ranges_of(server)}
            assert len(used) >= 16
            assert slow_connection in used or slow_connection < 0
        assert same(source, tmp_path / name)
        return took_s

    clean_s = pulled("clean", -1, 60)
    hedged_s = pulled("hedged", SLOW_CONNECTION, 60)
    assert hedged_s < 1.5 * clean_s
    monkeypatch.setattr(execute, "Hedger", partial(Hedger, config=NO_HEDGING))
    with pytest.raises(TimeoutError):  # its range alone takes 80 s
        pulled("alone", SLOW_CONNECTION, 2.5 * clean_s)
    assert not (tmp_path / "alone").exists()


def test_a_pull_settles_at_what_a_throttling_server_takes(
    pushed: tuple[LittleS3, Digest], source: Path, tmp_path: Path
) -> None:
    objects, digest = pushed
    with FaultServer(objects, manners=Manners(most_in_flight=8, latency_s=0.1)) as server:
        store = store_at(server.endpoint, retry=RetryConfig(base_s=0.01))

        async def work() -> int:
            await timed_pull(store, digest, tmp_path / "out", 24)
            return store.limit.limit

        limit = run(work())
        seen = ranges_of(server)
    assert same(source, tmp_path / "out")
    assert [one.status for one in seen].count(206) >= N_RANGES
    assert max(one.in_flight for one in seen) > 8  # it began with more
    late = seen[-N_RANGES // 2 :]
    assert [one.status for one in late].count(503) <= 4
    in_flight = sorted(one.in_flight for one in late)
    assert 3 <= in_flight[len(in_flight) // 2] <= 8
    assert 3 <= limit <= 8
