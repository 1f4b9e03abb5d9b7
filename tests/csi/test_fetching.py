"""Fetching for Pods: once however many ask, in the background, and never past the caller's time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from imgfmt.digest import Digest
from tests.csi.buckets import Bucket, environment, serve
from tests.csi.driver import Caller, Driver
from tests.csi.pods import PodVolume, code_of, leftovers, ours
from tests.transfer.cache.support import snapshot
from tests.transfer.fixture_store import contents, expected

pytestmark = pytest.mark.root

NODES = snapshot(3, mib=6)
SLOW = 1 << 20


@pytest.fixture
def bucket(stopped: Driver) -> Iterator[Bucket]:
    """A store in a bucket with one image `models/llama:v1`."""
    image = stopped.store.add(NODES)
    made = serve(stopped.store)
    with made.server:
        made.tag("models/llama", image)
        stopped.settings = {"stores": {"main": {"url": made.url}}}
        stopped.environment = environment()
        yield made


def configure(driver: Driver, **fetch: float) -> Driver:
    """Start a driver with other limits."""
    found = driver.configuration()["fetch"]
    driver.settings = {**driver.settings, "fetch": {**found, **fetch}}
    return driver.start()


def pod(driver: Driver, uid: str = "p", **attributes: str) -> PodVolume:
    """A Pod that wants the image."""
    return PodVolume(driver.kubelet, uid, {"image": "models/llama:v1", **attributes})


def failed(caller: Caller, one: PodVolume, timeout_s: float = 30.0) -> tuple[str, str]:
    """Code and text of a publication that fails."""
    with pytest.raises(grpc.RpcError) as caught:
        caller.call("NodePublishVolume", one.publish(), timeout_s)
    assert not ours(one.folder)
    assert not one.target.exists()
    error: Any = caught.value
    return code_of(error), error.details()


def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Wait for something that another process brings about."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_twenty_pods_ask_for_one_cold_image_and_it_is_fetched_once(
    stopped: Driver, bucket: Bucket
) -> None:
    configure(stopped)
    callers = [Caller(stopped.socket) for _ in range(4)]
    pods = [pod(stopped, f"p{i}") for i in range(20)]
    calls = [callers[i % 4].begin("NodePublishVolume", one.publish()) for i, one in enumerate(pods)]
    for call in calls:
        call.result()
    for one in pods:
        assert contents(one.target) == expected(NODES)
    packs = bucket.fetched_packs()
    assert packs
    assert len(packs) == len(set(packs))
    assert stopped.log().count('"message": "fetched"') == 1
    for one in pods:
        callers[0].call("NodeUnpublishVolume", one.unpublish())
    assert leftovers(stopped.cache) == []
    for caller in callers:
        caller.close()


def test_a_long_fetch_answers_aborted_with_its_progress_and_goes_on(
    stopped: Driver, bucket: Bucket
) -> None:
    caller = Caller(configure(stopped, waitLimitSeconds=0.7).socket)
    bucket.bytes_per_s = SLOW
    code, text = failed(caller, pod(stopped))
    assert code == "ABORTED"
    assert "models/llama:v1" in text
    assert "MiB (" in text
    assert "%" in text
    bucket.bytes_per_s = None
    until(lambda: '"message": "fetched"' in stopped.log())  # nobody waited
    n_requests = len(bucket.fetched_packs())
    caller.call("NodePublishVolume", pod(stopped).publish())
    assert contents(pod(stopped).target) == expected(NODES)
    assert len(bucket.fetched_packs()) == n_requests
    caller.close()


def test_it_never_waits_past_the_caller_s_deadline(stopped: Driver, bucket: Bucket) -> None:
    caller = Caller(configure(stopped).socket)
    bucket.bytes_per_s = SLOW
    begun_s = time.monotonic()
    code, text = failed(caller, pod(stopped), timeout_s=2.0)
    assert time.monotonic() - begun_s < 2.0
    assert code in ("ABORTED", "UNAVAILABLE"), text  # whichever it got to: neither is final
    caller.close()


def test_a_caller_that_leaves_does_not_end_the_fetch(stopped: Driver, bucket: Bucket) -> None:
    caller = Caller(configure(stopped).socket)
    bucket.bytes_per_s = SLOW
    call = caller.begin("NodePublishVolume", pod(stopped).publish())
    until(lambda: bool(bucket.fetched_packs()))
    call.cancel()
    until(lambda: '"code": "CANCELLED"' in stopped.log())
    bucket.bytes_per_s = None
    until(lambda: '"message": "fetched"' in stopped.log())
    assert not ours(pod(stopped).folder)
    caller.call("NodeUnpublishVolume", pod(stopped).unpublish())
    assert leftovers(stopped.cache) == []
    caller.close()


def test_a_fetch_that_nobody_waits_for_is_cancelled_after_a_while(
    stopped: Driver, bucket: Bucket
) -> None:
    caller = Caller(configure(stopped, waitLimitSeconds=0.5, idleCancelSeconds=0.2).socket)
    bucket.bytes_per_s = SLOW / 4
    assert failed(caller, pod(stopped))[0] == "ABORTED"
    until(lambda: bucket.server.in_flight == 0)  # its requests were dropped
    assert '"message": "fetched"' not in stopped.log()
    bucket.bytes_per_s = None
    caller.call("NodePublishVolume", pod(stopped).publish())
    assert contents(pod(stopped).target) == expected(NODES)
    caller.close()


def test_a_second_call_meanwhile_is_told_to_come_again(stopped: Driver, bucket: Bucket) -> None:
    caller = Caller(configure(stopped).socket)
    bucket.bytes_per_s = SLOW
    first = caller.begin("NodePublishVolume", pod(stopped).publish())
    until(lambda: bool(bucket.fetched_packs()))
    for method, message in (
        ("NodePublishVolume", pod(stopped).publish()),
        ("NodeUnpublishVolume", pod(stopped).unpublish()),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            caller.call(method, message)
        assert code_of(caught.value) == "ABORTED"
    bucket.bytes_per_s = None
    first.result()
    caller.close()


def test_a_store_that_is_down_is_unavailable_and_a_warm_image_needs_none(
    stopped: Driver, bucket: Bucket
) -> None:
    caller = Caller(configure(stopped).socket)
    caller.call("NodePublishVolume", pod(stopped).publish())
    stopped.kill()
    caller.close()
    bucket.objects.allowed.clear()  # refuses everything
    caller = Caller(stopped.start().socket)
    caller.call("NodePublishVolume", pod(stopped).publish())  # mounted before
    caller.call("NodePublishVolume", pod(stopped, "q").publish())  # in the cache
    assert contents(pod(stopped, "q").target) == expected(NODES)
    code, _ = failed(caller, pod(stopped, "r", pullPolicy="Always"))
    assert code == "PERMISSION_DENIED"
    caller.close()


def test_always_follows_a_tag_and_if_not_present_does_not(stopped: Driver, bucket: Bucket) -> None:
    caller = Caller(configure(stopped).socket)
    caller.call("NodePublishVolume", pod(stopped).publish())
    other = snapshot(9, mib=2)
    newer: Digest = stopped.store.add(other)
    for path in stopped.store.root.rglob("*"):
        key = str(path.relative_to(stopped.store.root))
        if path.is_file() and not key.startswith("refs/"):
            bucket.objects.put(key, path.read_bytes())
    bucket.tag("models/llama", newer)
    caller.call("NodePublishVolume", pod(stopped, "q").publish())
    assert contents(pod(stopped, "q").target) == expected(NODES)
    caller.call("NodePublishVolume", pod(stopped, "r", pullPolicy="Always").publish())
    assert contents(pod(stopped, "r").target) == expected(other)
    caller.close()


def test_an_image_larger_than_the_cache_is_told_before_it_is_fetched(
    stopped: Driver, bucket: Bucket
) -> None:
    stopped.settings = {
        **stopped.settings,
        "cache": {**stopped.configuration()["cache"], "maxBytes": 1 << 20},
    }
    caller = Caller(stopped.start().socket)
    code, text = failed(caller, pod(stopped))
    assert code == "RESOURCE_EXHAUSTED"
    assert "maxBytes" in text
    assert not bucket.fetched_packs()
    caller.close()


def test_a_full_node_is_told_and_recovers(stopped: Driver, bucket: Bucket) -> None:
    assert stopped.disk is not None
    caller = Caller(configure(stopped).socket)
    hog = stopped.disk.root / "hog"
    with hog.open("wb") as file:
        try:
            while True:
                file.write(bytes(1 << 20))
                file.flush()
        except OSError:
            pass
    code, text = failed(caller, pod(stopped))
    assert code == "RESOURCE_EXHAUSTED", text
    hog.unlink()
    caller.call("NodePublishVolume", pod(stopped).publish())
    assert contents(pod(stopped).target) == expected(NODES)
    caller.close()


def test_ending_the_driver_unmounts_nothing_and_cancels_fetches(
    stopped: Driver, bucket: Bucket
) -> None:
    caller = Caller(configure(stopped).socket)
    caller.call("NodePublishVolume", pod(stopped).publish())
    assert stopped.stop() == 0
    assert contents(pod(stopped).target) == expected(NODES)
    assert not stopped.socket.exists() or stopped.socket.is_socket()
    caller.close()
    caller = Caller(stopped.start().socket)
    caller.call("NodePublishVolume", pod(stopped).publish())
    caller.call("NodeUnpublishVolume", pod(stopped).unpublish())
    assert leftovers(stopped.cache) == []
    caller.close()
