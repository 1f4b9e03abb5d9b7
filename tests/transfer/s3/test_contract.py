"""The contract of all stores, on two makes of server and over both transports."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.transfer.s3.servers import BUCKET, STRANGER, Server
from transfer.store.base import Store
from transfer.store.s3.config import S3Config, Transport
from transfer.store.s3.store import S3Store
from transfer.testing.contract import StoreContract, run

pytestmark = pytest.mark.s3


def store_of(place: str) -> S3Store:
    """The store at a place: transport, endpoint and prefix, joined by blanks."""
    transport, endpoint, prefix = place.split()
    config = S3Config(BUCKET, prefix, endpoint=endpoint, transport=Transport(transport))
    return S3Store(config)


class S3Contract(StoreContract):
    """What the makes have in common."""

    @staticmethod
    def open_store(place: str) -> Store:
        return store_of(place)

    def truncate(self, place: str, key: str, size_bytes: int) -> None:
        client, full = self.server.client(), place.split()[2] + key
        body = client.get_object(Bucket=BUCKET, Key=full)["Body"].read()
        client.put_object(Bucket=BUCKET, Key=full, Body=body[:size_bytes])

    @contextmanager
    def denied(self, place: str, key: str) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in STRANGER.environment().items():
                patch.setenv(name, value)
            yield

    def unfinished(self, place: str) -> Sequence[str]:
        async def work() -> list[str]:
            return [upload.key for upload in await store_of(place).list_unfinished()]

        return run(work())

    server: Server

    @pytest.fixture(params=[Transport.ZERO_COPY, Transport.PORTABLE])
    def transport(self, request: pytest.FixtureRequest) -> Transport:
        return Transport(request.param)

    def place_on(self, server: Server, transport: Transport, folder: Path) -> str:
        self.server = server
        return f"{transport} {server.endpoint} {hashlib.sha256(bytes(folder)).hexdigest()[:16]}/"


class TestSeaweedFS(S3Contract):
    @pytest.fixture
    def place(self, seaweedfs: Server, transport: Transport, tmp_path: Path) -> str:
        return self.place_on(seaweedfs, transport, tmp_path)


class TestMoto(S3Contract):
    @pytest.fixture
    def place(self, moto: Server, transport: Transport, tmp_path: Path) -> str:
        return self.place_on(moto, transport, tmp_path)

    @pytest.mark.skip(reason="moto checks no credentials")
    def test_an_object_that_may_not_be_read_is_denied(self, store: Store, place: str) -> None: ...
