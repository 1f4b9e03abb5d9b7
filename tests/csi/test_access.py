"""Who may mount what: the policy of namespaces, and the store's own word for each Pod's keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from csi.config import PolicyConfig
from csi.logs import without_secrets
from csi.policy import check_allowed, needs_proof
from csi.proto import csi_pb2 as pb
from csi.requests import read_credentials
from imgfmt.digest import Digest
from imgfmt.errors import AccessDenied
from imgfmt.reference import parse_reference
from tests.csi.buckets import Bucket, environment, serve
from tests.csi.driver import Caller, Driver
from tests.csi.pods import PodVolume, code_of, ours, tagged
from tests.transfer.cache.support import snapshot
from tests.transfer.fixture_store import contents, expected

NODES = snapshot(1, mib=2)
DIGEST = f"blake3:{'ab' * 32}"
POLICY = PolicyConfig(
    namespaces={
        "team-a": ("models/llama", "shared/*", "other:v1"),
        "team-b": ("models/llama-70b", "base-*"),
        "admins": ("*",),
        "*": ("public",),
    }
)


@pytest.mark.parametrize(
    ("namespace", "reference", "allowed"),
    [
        ("team-a", "models/llama:v3", True),
        ("team-a", "models/llama", True),
        ("team-a", "models/llama/7b:v1", True),
        ("team-a", f"models/llama@{DIGEST}", True),
        ("team-a", "models/llama-70b:v3", False),
        ("team-a", "models", False),
        ("team-a", "shared/x/y:1", True),
        ("team-a", "shared:1", False),
        ("team-a", "other:v1", True),
        ("team-a", "other:v2", False),
        ("team-a", "other", False),
        ("team-a", f"other@{DIGEST}", False),
        ("team-a", DIGEST, False),
        ("team-a", "public:v1", True),
        ("team-b", "models/llama:v3", False),
        ("team-b", "models/llama-70b:v3", True),
        ("team-b", "base-1:x", True),
        ("team-b", "base:x", False),
        ("nobody", "models/llama:v3", False),
        ("nobody", "public", True),
        ("admins", DIGEST, True),
        ("admins", "anything:x", True),
        (None, "public", False),
        ("*", "models/llama", False),
    ],
)
def test_the_policy_is_what_is_listed(namespace: str | None, reference: str, allowed: bool) -> None:
    parsed = parse_reference(reference)
    if allowed:
        check_allowed(POLICY, namespace, parsed)
        return
    with pytest.raises(AccessDenied) as caught:
        check_allowed(POLICY, namespace, parsed)
    assert reference.partition(":")[0] in str(caught.value)


def test_a_single_tenant_has_no_policy_and_needs_no_proof() -> None:
    single = PolicyConfig(single_tenant=True)
    check_allowed(single, None, parse_reference(DIGEST))
    assert not needs_proof(single, None, parse_reference(DIGEST))
    named = parse_reference(f"models/llama@{DIGEST}")
    assert needs_proof(POLICY, "team-a", named)
    assert not needs_proof(POLICY, "admins", named)
    assert not needs_proof(POLICY, "team-a", parse_reference("models/llama:v1"))


@pytest.fixture
def policed(stopped: Driver) -> Driver:
    """A driver with a policy."""
    stopped.settings = {
        "policy": {"namespaces": {"team-a": ["models/a"], "team-b": ["models/b"], "admins": ["*"]}}
    }
    return stopped


@pytest.mark.root
def test_a_namespace_is_refused_another_s_warm_image(policed: Driver) -> None:
    image = policed.store.add(NODES)
    name = tagged(policed.store, "models/a", image)
    mine = tagged(policed.store, "models/b", policed.store.add(snapshot(2, mib=2)))
    caller = Caller(policed.start().socket)
    first = PodVolume(policed.kubelet, "a", {"image": name}, namespace="team-a")
    caller.call("NodePublishVolume", first.publish())
    for_all = {"image": f"models/b@{image}", "pullPolicy": "Always"}  # needs to prove no name
    admin = PodVolume(policed.kubelet, "x", for_all, namespace="admins")
    caller.call("NodePublishVolume", admin.publish())
    forged = {"csi.storage.k8s.io/pod.namespace": "team-a"}
    hexed = str(image)
    for attributes in (
        {"image": name},
        {"image": name, **forged},
        {"image": hexed},
        {"image": f"models/a@{hexed}"},
        {"image": f"models/b@{hexed}"},  # an allowed name for somebody else's bytes
    ):
        pod = PodVolume(policed.kubelet, "b", attributes, namespace="team-b")
        with pytest.raises(grpc.RpcError) as caught:
            caller.call("NodePublishVolume", pod.publish())
        assert code_of(caught.value) == "PERMISSION_DENIED", attributes
        assert not ours(pod.folder)
    own = PodVolume(policed.kubelet, "b", {"image": mine}, namespace="team-b")
    caller.call("NodePublishVolume", own.publish())
    by_digest = PodVolume(policed.kubelet, "a2", {"image": f"models/a@{hexed}"}, namespace="team-a")
    caller.call("NodePublishVolume", by_digest.publish())
    assert contents(by_digest.target) == expected(NODES)
    caller.close()


def secret(key: str, value: str = "pod-secret-value") -> dict[str, str]:
    """A Secret."""
    return {"accessKeyId": key, "secretAccessKey": value}


@pytest.fixture
def bucket(stopped: Driver) -> Iterator[tuple[Bucket, Digest]]:
    """A store in a bucket that knows the keys GOOD and ALSO, with one image `models/llama:v1`."""
    image = stopped.store.add(NODES)
    made = serve(stopped.store, ["GOOD", "ALSO"])
    with made.server:
        made.tag("models/llama", image)
        stopped.settings = {"stores": {"main": {"url": made.url}}}
        stopped.environment = environment()
        yield made, image


def failed(caller: Caller, pod: PodVolume) -> tuple[str, str]:
    """Code and text of a refused publication."""
    with pytest.raises(grpc.RpcError) as caught:
        caller.call("NodePublishVolume", pod.publish())
    assert not ours(pod.folder)
    error: Any = caught.value
    return code_of(error), error.details()


@pytest.mark.root
def test_a_pod_s_good_keys_serve_no_other_pod_and_bad_ones_harm_none(
    stopped: Driver, bucket: tuple[Bucket, Digest]
) -> None:
    served, _ = bucket
    caller = Caller(stopped.start().socket)
    given = {"image": "models/llama:v1"}

    def pod(uid: str, keys: dict[str, str]) -> PodVolume:
        return PodVolume(stopped.kubelet, uid, given, secrets=keys)

    good = pod("good", secret("GOOD"))
    caller.call("NodePublishVolume", good.publish())
    assert contents(good.target) == expected(NODES)
    once = len(served.fetched_packs())
    assert once
    code, text = failed(caller, pod("bad", secret("BAD")))  # though it is warm
    assert code == "PERMISSION_DENIED"
    assert "pod-secret-value" not in text
    caller.call("NodePublishVolume", pod("same", secret("GOOD")).publish())
    assert len(served.fetched_packs()) == once
    caller.call("NodePublishVolume", pod("also", secret("ALSO")).publish())
    assert len(served.fetched_packs()) == 2 * once  # another domain
    caller.call("NodePublishVolume", pod("own", {}).publish())
    assert len(served.fetched_packs()) == 3 * once
    # the same key id with another secret is another domain too
    caller.call("NodePublishVolume", pod("guess", secret("GOOD", "a-guess")).publish())
    assert len(served.fetched_packs()) == 4 * once
    served.objects.allowed.discard("GOOD")  # taken away: each publish asks anew
    assert failed(caller, pod("later", secret("GOOD")))[0] == "PERMISSION_DENIED"
    caller.call("NodePublishVolume", good.publish())  # what is mounted stays, and asks nobody
    log = stopped.log()
    for hidden in ("pod-secret-value", "a-guess", "driver-secret-value"):
        assert hidden not in log
    assert '"secrets": ' not in log
    assert "'secrets': '***'" in log
    caller.close()


@pytest.mark.root
def test_secrets_that_are_none_are_told_without_quoting_them(
    stopped: Driver, bucket: tuple[Bucket, Digest]
) -> None:
    caller = Caller(stopped.start().socket)
    for keys in (
        {"accessKeyId": "GOOD"}, {"password": "hunter2"}, {**secret("GOOD"), "extra": "hunter2"},
        {"accessKeyId": "", "secretAccessKey": "hunter2"},
    ):  # fmt: skip
        pod = PodVolume(stopped.kubelet, "p", {"image": "models/llama:v1"}, secrets=keys)
        code, text = failed(caller, pod)
        assert code == "UNAUTHENTICATED"
        assert "hunter2" not in text + stopped.log()
    caller.close()


@pytest.mark.root
def test_pods_name_stores_of_their_own_only_where_that_is_allowed(
    stopped: Driver, bucket: tuple[Bucket, Digest]
) -> None:
    served, _ = bucket
    stopped.settings = {**stopped.settings, "allowPodStores": True}
    caller = Caller(stopped.start().socket)
    url = f"s3://bucket?endpoint={served.server.endpoint}"

    def pod(uid: str, store: str, keys: dict[str, str]) -> PodVolume:
        return PodVolume(
            stopped.kubelet, uid, {"image": "models/llama:v1", "store": store}, secrets=keys
        )

    caller.call("NodePublishVolume", pod("good", url, secret("GOOD")).publish())
    for store, keys in (
        (url, {}),  # the driver's own identity is not lent
        (f"{url}&ca-bundle=/etc/passwd", secret("GOOD")),
        (f"{url}&profile=admin", secret("GOOD")),
        (f"file://{stopped.store.root}", {}),
        (str(stopped.store.root), {}),
    ):
        assert failed(caller, pod("bad", store, keys))[0] in (
            "PERMISSION_DENIED", "INVALID_ARGUMENT",
        )  # fmt: skip
    persistent = PodVolume(
        stopped.kubelet, "pv", {"image": "models/llama:v1", "store": url},
        secrets=secret("GOOD"), persistent="pv-1",
    )  # fmt: skip
    assert failed(caller, persistent)[0] == "PERMISSION_DENIED"
    caller.close()


def test_keys_are_not_in_what_is_printed_of_them() -> None:
    found = read_credentials({"accessKeyId": "id", "secretAccessKey": "hidden-1",
                              "sessionToken": "hidden-2"})  # fmt: skip
    assert found is not None
    assert "hidden" not in repr(found)
    assert "hidden" not in found.scope
    other = read_credentials({"accessKeyId": "id", "secretAccessKey": "hidden-3"})
    assert other is not None
    assert other.scope != found.scope


def test_every_field_of_the_interface_that_holds_secrets_is_replaced() -> None:
    hidden = "very-secret"
    for message_type in pb.DESCRIPTOR.message_types_by_name.values():
        if "secrets" not in message_type.fields_by_name:
            continue
        message: Any = getattr(pb, message_type.name)(secrets={"key": hidden})
        assert without_secrets(message) == {"secrets": "***"}
        assert hidden not in str(without_secrets(message))
