"""A bucket server in the test's own process: it knows keys, and can be slow."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from imgfmt.digest import Digest
from tests.csi.pods import point
from tests.transfer.fixture_store import FixtureStore
from transfer.store.s3.config import Credentials, S3Config
from transfer.store.s3.store import S3Store
from transfer.testing.fault_server import FaultServer
from transfer.testing.faults import Manners
from transfer.testing.little_s3 import Answer, LittleS3, Request, refusal

BUCKET = "bucket"
OWN = Credentials("DRIVERKEY", "driver-secret-value")
_KEY = re.compile(r"Credential=([^/]+)/")


class KeyedS3(LittleS3):
    """Lets in those whose key id is one of `allowed`."""

    def __init__(self, allowed: Iterable[str]) -> None:
        super().__init__(BUCKET)
        self.allowed = set(allowed)

    def answer(self, request: Request) -> Answer:
        """Do what a request says, if its sender may."""
        found = _KEY.search(request.headers.get("authorization", ""))
        if found is None or found[1] not in self.allowed:
            return refusal("AccessDenied", 403, head=request.method == "HEAD")
        return super().answer(request)


@dataclass
class Bucket:
    """A served store. `bytes_per_s` is what each connection gets; None is all it can take."""

    server: FaultServer
    objects: KeyedS3
    bytes_per_s: float | None = None

    @property
    def url(self) -> str:
        """What a configuration says."""
        return f"s3://{BUCKET}?endpoint={self.server.endpoint}&connections=2"

    def fetched_packs(self) -> list[tuple[str, tuple[int, int] | None]]:
        """Ranges of packs that were asked for."""
        return [
            (one.request.path, one.request.span)
            for one in self.server.seen
            if "/packs/" in one.request.path and one.request.method == "GET"
        ]

    def tag(self, name: str, image: Digest, tag: str = "v1") -> str:
        """Give an image a name; returns the reference."""
        config = S3Config(BUCKET, endpoint=self.server.endpoint, credentials=OWN)
        store = S3Store(config)
        point(store, name, tag, image)
        return f"{name}:{tag}"


def serve(store: FixtureStore, allowed: Iterable[str] = ()) -> Bucket:
    """A bucket with all objects of a store but its references. Its server is to be entered."""
    objects = KeyedS3({OWN.access_key_id, *allowed})
    for path in sorted(store.root.rglob("*")):
        key = str(path.relative_to(store.root))
        if path.is_file() and not key.startswith("refs/"):
            objects.put(key, path.read_bytes())
    bucket = Bucket(FaultServer(objects), objects)
    bucket.server.manners = Manners(speed=lambda number: bucket.bytes_per_s)
    return bucket


def environment(who: Credentials = OWN) -> dict[str, str]:
    """The driver's own identity."""
    return {
        "AWS_ACCESS_KEY_ID": who.access_key_id,
        "AWS_SECRET_ACCESS_KEY": who.secret_access_key,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/nonexistent",
        "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
    }
