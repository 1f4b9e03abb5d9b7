"""The driver against a fake kubelet: its rules one by one, and kill -9 at any moment."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator

import grpc
import pytest

from csi.proto import csi_pb2 as pb
from imgfmt.image import Image, Member
from imgfmt.rules import Rule
from tests.csi.buckets import Bucket, environment, serve
from tests.csi.driver import NODE, Caller, Driver
from tests.csi.kubelet import FakeKubelet, Seen
from tests.csi.launcher import Launcher
from tests.csi.pods import PodVolume, leftovers, ours, tagged
from tests.transfer.cache.support import snapshot
from tests.transfer.fixture_store import Node, contents, expected
from transfer.cache.evict import evict_all
from transfer.cache.layout import CacheRoot

pytestmark = pytest.mark.root

NODES = snapshot(1, mib=2)
HASTE = 50.0
SEEDS = int(os.environ.get("SNAPCASK_CSI_SEEDS", "200"))
A_RUN = 10
"""Seeds of one test: they share a disk and a store."""


def image_of(driver: Driver) -> str:
    """An image in the store."""
    return tagged(driver.store, "models/llama", driver.store.add(NODES))


@pytest.fixture
def kubelet(stopped: Driver) -> Iterator[FakeKubelet]:
    """A kubelet beside a driver that is not started yet."""
    made = FakeKubelet(stopped.socket, haste=HASTE)
    yield made
    made.close()


def test_a_pod_s_life(stopped: Driver, kubelet: FakeKubelet) -> None:
    image = image_of(stopped)
    stopped.start()
    pod = kubelet.add(PodVolume(stopped.kubelet, "p", {"image": image}))
    kubelet.run(kubelet.settled, 20)
    assert pod.calls == ["NodePublishVolume"]
    assert contents(pod.volume.target) == expected(NODES)
    kubelet.restart()  # everything is published once more
    kubelet.run(kubelet.settled, 20)
    assert kubelet.pods["p"].calls == ["NodePublishVolume"]
    assert len(ours(stopped.kubelet)) == 1
    stopped.kill()  # running Pods keep their files, and deleting one waits
    assert contents(pod.volume.target) == expected(NODES)
    kubelet.delete("p")
    with pytest.raises(AssertionError, match="stuck"):
        kubelet.run(lambda: not kubelet.pods, 0.3)
    stopped.start()
    kubelet.reconnect()
    kubelet.run(lambda: not kubelet.pods, 20)
    assert not ours(stopped.kubelet)
    assert os.listdir(stopped.kubelet) == []
    assert leftovers(stopped.cache) == []


def test_after_a_final_code_nothing_is_left_for_an_unpublish_that_never_comes(
    stopped: Driver, kubelet: FakeKubelet
) -> None:
    image_of(stopped)
    stopped.start()
    pod = kubelet.add(PodVolume(stopped.kubelet, "p", {"image": "models/unknown:v1"}))
    kubelet.run(lambda: len(pod.errors) >= 3, 20)
    assert {code for code, _ in pod.errors} == {"NOT_FOUND"}
    assert pod.seen is Seen.NOT_MOUNTED
    kubelet.delete("p")
    kubelet.run(lambda: not kubelet.pods, 5)
    assert "NodeUnpublishVolume" not in pod.calls
    assert os.listdir(stopped.kubelet) == []
    assert leftovers(stopped.cache) == []


@pytest.fixture
def slow(stopped: Driver) -> Iterator[Bucket]:
    """A store that takes several seconds to give the image."""
    image = stopped.store.add(snapshot(2, mib=6))
    made = serve(stopped.store)
    with made.server:
        made.tag("models/llama", image)
        made.bytes_per_s = 1 << 20
        stopped.settings = {
            "stores": {"main": {"url": made.url}},
            "fetch": {"maxMemoryBytes": 16 << 20, "waitLimitSeconds": 0.5},
        }
        stopped.environment = environment()
        yield made


def test_a_pod_that_is_deleted_while_its_image_is_fetched_is_not_held(
    stopped: Driver, slow: Bucket, kubelet: FakeKubelet
) -> None:
    stopped.start()
    pod = kubelet.add(PodVolume(stopped.kubelet, "p", {"image": "models/llama:v1"}))
    kubelet.run(lambda: bool(pod.errors), 20)
    assert pod.errors[0][0] == "ABORTED"
    assert pod.seen is Seen.UNCERTAIN
    kubelet.delete("p")
    begun_s = time.monotonic()
    kubelet.run(lambda: not kubelet.pods, 10)
    assert time.monotonic() - begun_s < 3
    assert pod.calls[-1] == "NodeUnpublishVolume"
    assert leftovers(stopped.cache) == []


def test_a_pod_that_waits_gets_its_image_in_the_end(
    stopped: Driver, slow: Bucket, kubelet: FakeKubelet
) -> None:
    stopped.start()
    pod = kubelet.add(PodVolume(stopped.kubelet, "p", {"image": "models/llama:v1"}))
    kubelet.run(kubelet.settled, 40)
    assert {code for code, _ in pod.errors} == {"ABORTED"}
    assert contents(pod.volume.target) == expected(snapshot(2, mib=6))


def test_the_driver_answers_before_kubelet_gives_up(stopped: Driver, slow: Bucket) -> None:
    stopped.settings = {**stopped.settings, "fetch": {"maxMemoryBytes": 16 << 20}}
    stopped.start()
    kubelet = FakeKubelet(stopped.socket, haste=HASTE, publish_s=2.0)  # its 120 s, in short
    pod = kubelet.add(PodVolume(stopped.kubelet, "p", {"image": "models/llama:v1"}))
    kubelet.run(kubelet.settled, 40)
    codes = {code for code, _ in pod.errors}
    assert "ABORTED" in codes
    assert codes <= {"ABORTED", "UNAVAILABLE"}  # never DEADLINE_EXCEEDED
    kubelet.close()


class Chaos:
    """One seeded run: Pods come and go while the driver, and kubelet, are killed."""

    def __init__(self, driver: Driver, launcher: Launcher, images: dict[str, str]) -> None:
        self._driver = driver
        self._launcher = launcher
        self._images = images
        self._config = driver.root / "config.json"
        self._config.write_text(json.dumps(driver.configuration()))

    def run(self, seed: int) -> None:
        """Raises AssertionError for whatever is left, stuck or wrong in the end."""
        dice = random.Random(seed)
        driver, kubelet = self._driver, FakeKubelet(self._driver.socket, haste=HASTE)
        pid = self._start()
        try:
            for round_number in range(3):
                for i in range(dice.randint(1, 3)):
                    kubelet.add(self._volume(dice, f"{seed}-{round_number}-{i}"))
                for uid in list(kubelet.pods):
                    if dice.random() < 0.3:
                        kubelet.delete(uid)
                most_s = dice.choice((0.0, 0.005, 0.02, 0.06, 0.15))
                end_s = time.monotonic() + most_s * dice.random()
                while time.monotonic() < end_s:
                    kubelet.sync()
                self._launcher.kill(pid)
                if dice.random() < 0.3:
                    kubelet.restart()
                for pod in kubelet.pods.values():
                    if pod.wanted and pod.seen is Seen.MOUNTED:
                        assert os.listdir(pod.volume.target), pod
                pid = self._start()
                kubelet.reconnect()
            kubelet.run(kubelet.settled, 30)
            for pod in kubelet.pods.values():
                assert len([e for e in ours(pod.volume.kubelet)
                            if e.directory == str(pod.volume.target)]) == 1  # fmt: skip
                assert os.listdir(pod.volume.target)
            for uid in list(kubelet.pods):
                kubelet.delete(uid)
            kubelet.run(lambda: not kubelet.pods, 30)
        finally:
            kubelet.close()
            self._launcher.kill(pid)
        assert ours(driver.kubelet) == []
        assert os.listdir(driver.kubelet) == []
        assert leftovers(driver.cache) == []
        cache = CacheRoot(str(driver.cache))
        if dice.random() < 0.5:
            evict_all(cache)  # the next run begins cold
            for path in driver.cache.glob("domains/*/trees/*"):
                raise AssertionError(f"{path} is held by nobody and stays")

    def _start(self) -> int:
        pid = self._launcher.start(self._driver.socket, self._config, NODE)
        end_s = time.monotonic() + 20
        while True:  # kubelet does not wait for it, but a run is to be short
            caller = Caller(self._driver.socket)
            try:
                caller.call("Probe", pb.ProbeRequest(), 1.0)
                return pid
            except grpc.RpcError:
                assert time.monotonic() < end_s, self._driver.log()
            finally:
                caller.close()
            time.sleep(0.005)

    def _volume(self, dice: random.Random, uid: str) -> PodVolume:
        kind = dice.choice(sorted(self._images))
        attributes = {"image": self._images[kind]}
        if kind == "odd":
            attributes["onMismatch"] = "empty"
        elif kind == "plain" and dice.random() < 0.4:
            attributes |= {"uid": "1000", "mode": "0444"}
        bound = kind == "plain" and len(attributes) == 1 and dice.random() < 0.4
        namespace = "bound" if bound else "team-a"
        return PodVolume(self._driver.kubelet, uid, attributes, namespace=namespace)


@pytest.fixture
def chaos(stopped: Driver) -> Iterator[Chaos]:
    """A store with an image of each kind, and a launcher."""
    store = stopped.store
    stopped.settings = {"mount": {"namespaces": {"bound": "bind"}}, "logLevel": "warning"}
    trees = [store.add_tree({b"f": Node(b"%d" % i)}) for i in range(3)]
    members = tuple(Member(f"rank-{i}", tree) for i, tree in enumerate(trees))
    images = {
        "plain": tagged(store, "plain", store.add(NODES)),
        "many": tagged(store, "many", store.add_record(Image(members))),
        "odd": tagged(store, "odd", store.add_image(trees[0], compat=(Rule.parse("cpu.arch=x"),))),
    }
    with Launcher(stopped.log_path) as launcher:
        yield Chaos(stopped, launcher, images)


@pytest.mark.timeout(300)  # a busy disk holds killed drivers up in their last fsync
@pytest.mark.parametrize("first", range(0, SEEDS, A_RUN))
def test_kill_9_at_any_point_leaves_nothing_behind(chaos: Chaos, first: int) -> None:
    for seed in range(first, min(SEEDS, first + A_RUN)):
        try:
            chaos.run(seed)
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {error}") from error
