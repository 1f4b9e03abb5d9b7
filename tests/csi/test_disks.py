"""A driver whose cache has further disks: images lie on all of them, and one may be away."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from csi.config import CacheConfig
from csi.node_cache import open_cache
from imgfmt.errors import InvalidInput
from tests.csi.driver import Caller, Driver
from tests.csi.pods import PodVolume, code_of, leftovers, ours, tagged
from tests.filesystems import Disk, disk
from tests.transfer.cache.several import pages
from tests.transfer.fixture_store import Nodes, contents, expected


@pytest.fixture
def further(stopped: Driver, tmp_path: Path) -> Iterator[Disk]:
    """Another disk, which the driver's configuration names."""
    with disk(tmp_path, "xfs", name="further") as made:
        settings = stopped.configuration()
        settings["cache"]["disks"] = [str(made.root / "part")]
        stopped.settings = settings
        yield made


def published(driver: Driver, name: str, **attributes: str) -> PodVolume:
    """A Pod with the image."""
    pod = PodVolume(driver.kubelet, name, {"image": "models/a:v1", **attributes})
    caller = Caller(driver.socket)
    try:
        caller.call("NodePublishVolume", pod.publish())
    finally:
        caller.close()
    return pod


def unpublished(driver: Driver, *pods: PodVolume) -> None:
    """Without these Pods, and nothing left of them."""
    caller = Caller(driver.socket)
    for pod in pods:
        caller.call("NodeUnpublishVolume", pod.unpublish())
    caller.close()
    assert ours(driver.kubelet) == []
    assert leftovers(driver.cache) == []


def page_files(folder: Path) -> set[str]:
    """Names of page files below a folder."""
    return {path.name for path in folder.rglob("pages-*.img")}


def away_with_its_disk(stopped: Driver, further: Disk) -> tuple[Nodes, Driver]:
    """An image that was published once, and a driver that was stopped before a disk went away."""
    nodes = pages(1)
    tagged(stopped.store, "models/a", stopped.store.add(nodes))
    driver = stopped.start()
    unpublished(driver, published(driver, "u1"))
    driver.stop()
    further.unmount()
    return nodes, driver


def test_a_volume_shows_the_files_of_all_disks(stopped: Driver, further: Disk) -> None:
    nodes = pages(1)
    tagged(stopped.store, "models/a", stopped.store.add(nodes))
    driver = stopped.start()
    pod = published(driver, "u1")
    assert contents(pod.target) == expected(nodes)
    here, there = page_files(driver.cache / "domains"), page_files(further.root)
    assert here | there == {f"pages-{i}.img" for i in range(6)}
    assert here
    assert there
    other = published(driver, "u2", uid="1000", mode="0440")
    assert {os.stat(p).st_uid for p in other.target.rglob("pages-*.img")} == {1000}
    unpublished(driver, pod, other)


def test_a_disk_that_is_away_is_told_of_and_the_image_is_fetched_where_there_is_room(
    stopped: Driver, further: Disk
) -> None:
    nodes, driver = away_with_its_disk(stopped, further)
    try:
        driver.start()
        assert f"{further.root}/part of cache" in driver.log()
        pod = published(driver, "u2")
        assert contents(pod.target) == expected(nodes)
        assert page_files(driver.cache / "domains") == {f"pages-{i}.img" for i in range(6)}
        assert os.listdir(further.root) == []
        unpublished(driver, pod)
    finally:
        further.mount()


def test_an_image_that_was_away_with_its_disk_is_mounted_again_when_that_comes_back(
    stopped: Driver, further: Disk
) -> None:
    nodes, driver = away_with_its_disk(stopped, further)
    driver.start()
    away = stopped.store.root.rename(stopped.store.root.with_name("away"))
    try:
        with pytest.raises(grpc.RpcError) as caught:
            published(driver, "u2")
        assert code_of(caught.value) == "UNAVAILABLE"
        further.mount()
        pod = published(driver, "u2")
        assert contents(pod.target) == expected(nodes)
        unpublished(driver, pod)
    finally:
        away.rename(stopped.store.root)


def test_a_disk_that_comes_back_disturbs_nothing_of_an_image_that_was_fetched_again(
    stopped: Driver, further: Disk
) -> None:
    nodes, driver = away_with_its_disk(stopped, further)
    driver.start()
    pod = published(driver, "u2")
    further.mount()
    driver.stop()
    driver.start()
    other = published(driver, "u3")
    assert contents(pod.target) == contents(other.target) == expected(nodes)
    unpublished(driver, pod, other)


def test_a_bind_of_an_image_on_several_disks_is_refused_and_leaves_nothing(
    stopped: Driver, further: Disk
) -> None:
    tagged(stopped.store, "models/a", stopped.store.add(pages(1)))
    stopped.settings = {**stopped.settings, "mount": {"mode": "bind"}}
    driver = stopped.start()
    with pytest.raises(grpc.RpcError) as caught:
        published(driver, "u1")
    assert code_of(caught.value) == "FAILED_PRECONDITION"
    assert "several disks" in str(caught.value.details())
    assert ours(driver.kubelet) == []
    assert leftovers(driver.cache) == []


def test_a_new_disk_on_the_disk_of_kubelet_is_refused_unless_allowed(
    stopped: Driver, tmp_path: Path
) -> None:
    assert stopped.disk is not None
    path = str(tmp_path / "not-mounted")
    config = CacheConfig(str(stopped.cache), (path,))
    with pytest.raises(InvalidInput, match=r"not-mounted of the cache lies on the disk of kubelet"):
        open_cache(config, str(tmp_path))
    assert not os.path.exists(path)
    allowed = CacheConfig(str(stopped.cache), (path,), allow_root_filesystem=True)
    (found,) = open_cache(allowed, str(tmp_path)).disks
    assert (found.path, found.problem) == (path, "")


def test_a_disk_that_the_cache_has_may_be_away_and_its_folder_lie_on_kubelets_disk(
    stopped: Driver, further: Disk, tmp_path: Path
) -> None:
    config = CacheConfig(str(stopped.cache), (str(further.root / "part"),))
    (found,) = open_cache(config, str(tmp_path)).disks
    assert found.problem == ""
    further.unmount()
    try:
        (found,) = open_cache(config, str(tmp_path)).disks
        assert "is not there" in found.problem
        (further.root / "part").mkdir()
        (found,) = open_cache(config, str(tmp_path)).disks
        assert "not mounted" in found.problem
        (further.root / "part").rmdir()
    finally:
        further.mount()
    (found,) = open_cache(config, str(tmp_path)).disks
    assert found.problem == ""
