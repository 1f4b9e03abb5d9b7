"""What a publication asks of the store when the image is in the cache: nothing, or one HEAD."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from csi.images import MAX_RECENT, put_recent
from csi.kept import KeptVariants
from imgfmt.digest import Digest, digest_of
from imgfmt.image import Image, Member, Variant, Variants
from imgfmt.rules import Rule
from tests.csi.buckets import Bucket, environment, serve
from tests.csi.driver import Caller, Driver
from tests.csi.pods import PodVolume, code_of, ours
from tests.transfer.cache.support import snapshot
from tests.transfer.fixture_store import contents, expected

NODES = snapshot(1, mib=2)
KEYS = {"accessKeyId": "GOOD", "secretAccessKey": "pod-secret-value"}


@pytest.fixture
def bucket(stopped: Driver) -> Iterator[tuple[Bucket, Digest, Digest]]:
    """A bucket with an image `models/one:v1`, and variants `models/any:v1` of which it is one."""
    image = stopped.store.add(NODES)
    other = stopped.store.add_image(
        stopped.store.add_tree(snapshot(2, mib=2)), compat=(Rule.parse("cpu.arch=vax"),)
    )
    variants = stopped.store.add_record(Variants((Variant(other), Variant(image))))
    made = serve(stopped.store, ["GOOD"])
    with made.server:
        made.tag("models/one", image)
        made.tag("models/any", variants)
        stopped.settings = {
            "stores": {"main": {"url": made.url}},
            "policy": {"namespaces": {"team-a": ["models"]}},
        }
        stopped.environment = environment()
        yield made, image, variants


class Asking:
    """Publishes for one Pod after the other, and says what the bucket was asked meanwhile."""

    def __init__(self, driver: Driver, bucket: Bucket) -> None:
        self._driver = driver
        self._bucket = bucket
        self._caller = Caller(driver.socket)
        self._n_pods = 0

    def pod(self, image: str, keys: dict[str, str] | None = None, **given: Any) -> PodVolume:
        """The next Pod."""
        self._n_pods += 1
        attributes = {"image": image, **given.pop("attributes", {})}
        uid = f"p{self._n_pods}"
        return PodVolume(self._driver.kubelet, uid, attributes, secrets=keys or {}, **given)

    def publish(self, image: str, keys: dict[str, str] | None = None, **given: Any) -> list[str]:
        """Methods and first folders of the requests that it took."""
        pod = self.pod(image, keys, **given)
        before = len(self._bucket.server.seen)
        self._caller.call("NodePublishVolume", pod.publish())
        assert contents(pod.target) == expected(NODES)
        asked = [one.request for one in self._bucket.server.seen[before:]]
        return [f"{one.method} {_folder(one.path)}" for one in asked]

    def refused(self, image: str, keys: dict[str, str] | None = None, **given: Any) -> str:
        """The code that a publication fails with."""
        pod = self.pod(image, keys, **given)
        with pytest.raises(grpc.RpcError) as caught:
            self._caller.call("NodePublishVolume", pod.publish())
        assert not ours(pod.folder)
        return code_of(caught.value)

    def close(self) -> None:
        """End it."""
        self._caller.close()


def _folder(path: str) -> str:
    """The first folder of a key; nothing where a bucket is listed."""
    return "".join(path.partition("?")[0].split("/")[2:3])


@pytest.mark.root
def test_a_warm_image_asks_the_store_nothing(
    stopped: Driver, bucket: tuple[Bucket, Digest, Digest]
) -> None:
    served, image, variants = bucket
    asking = Asking(stopped.start(), served)
    for name, digest in (("models/one", image), ("models/any", variants)):
        by_digest = f"{name}@{digest}"
        assert asking.publish(f"{name}:v1") != []
        assert asking.publish(f"{name}:v1") == []
        assert asking.publish(by_digest, persistent=f"pv-{name[-3:]}") == []
        first = asking.publish(by_digest)  # the policy goes by names: this digest had that one?
        assert "GET refs" in first
        assert "GET packs" not in first
        assert asking.publish(by_digest) == []
    stopped.stop()
    stopped.start()
    again = Asking(stopped, served)
    for name in ("models/one:v1", "models/any:v1", f"models/any@{variants}"):
        again._n_pods += 20
        assert again.publish(name) == []
    asking.close()
    again.close()


@pytest.mark.root
def test_warm_variants_are_mounted_while_the_store_is_away(
    stopped: Driver, bucket: tuple[Bucket, Digest, Digest]
) -> None:
    served, _, _ = bucket
    asking = Asking(stopped.start(), served)
    asking.publish("models/any:v1")
    served.objects.allowed.clear()
    assert asking.publish("models/any:v1") == []
    assert asking.refused("models/other:v1") == "PERMISSION_DENIED"
    asking.close()


@pytest.mark.root
def test_with_a_pod_s_own_keys_a_warm_image_costs_one_head_which_has_to_pass(
    stopped: Driver, bucket: tuple[Bucket, Digest, Digest]
) -> None:
    served, image, variants = bucket
    asking = Asking(stopped.start(), served)
    for name, digest in (("models/one", image), ("models/any", variants)):
        for reference in (f"{name}:v1", f"{name}@{digest}"):
            asking.publish(reference, KEYS)
            assert asking.publish(reference, KEYS) == ["HEAD images"]
    served.objects.allowed.discard("GOOD")
    for reference in ("models/one:v1", f"models/any@{variants}"):
        assert asking.refused(reference, KEYS) == "PERMISSION_DENIED"
    asking.close()


@pytest.mark.root
def test_the_policy_is_asked_for_warm_variants_too(
    stopped: Driver, bucket: tuple[Bucket, Digest, Digest]
) -> None:
    served, _, variants = bucket
    asking = Asking(stopped.start(), served)
    asking.publish("models/any:v1")
    for reference in ("models/any:v1", f"models/any@{variants}", str(variants)):
        assert asking.refused(reference, namespace="team-b") == "PERMISSION_DENIED"
    asking.close()


@pytest.mark.root
def test_what_was_noted_of_references_may_be_damaged(
    stopped: Driver, bucket: tuple[Bucket, Digest, Digest]
) -> None:
    served, image, _ = bucket
    asking = Asking(stopped.start(), served)
    asking.publish("models/one:v1")
    asking.close()
    stopped.stop()
    (known,) = (stopped.cache / "csi/known").iterdir()
    known.write_text(known.read_text().replace(str(image), "blake3:rot"))
    asking = Asking(stopped.start(), served)
    asking._n_pods = 20
    assert asking.publish("models/one:v1") != []
    assert asking.publish("models/one:v1") == []
    asking.close()


def test_only_so_many_references_are_remembered_in_memory() -> None:
    found: dict[int, int] = {}
    for number in range(MAX_RECENT + 10):
        put_recent(found, number, number)
    assert list(found) == list(range(10, MAX_RECENT + 10))


def test_kept_variants_are_of_one_domain_and_only_what_has_its_digest(tmp_path: Any) -> None:
    kept = KeptVariants(str(tmp_path))
    images = {}
    for name in ("a", "b"):
        image = Image((Member("main", digest_of(name.encode())),), (), ())
        images[digest_of(image.encode())] = image
    variants = Variants(tuple(map(Variant, images)))
    digest = digest_of(variants.encode())
    assert kept.find("one", digest) is None
    kept.keep("one", digest, variants, images)
    assert kept.find("one", digest) == (variants, images)
    assert kept.find("two", digest) is None
    (tmp_path / "one" / ".new-0123-half").touch()
    kept.sweep()
    assert len(list((tmp_path / "one").iterdir())) == 3
    first, second = images
    (tmp_path / "one" / first.hex).write_bytes(images[second].encode())
    assert kept.find("one", digest) == (variants, {second: images[second]})
    (tmp_path / "one" / digest.hex).write_bytes(b"rot")
    assert kept.find("one", digest) is None
