"""What operators see of a driver: figures, probes, log lines; and what it holds while it idles."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest

from csi.config import MountMode
from csi.proto import csi_pb2 as pb
from csi.trial import why_no_mounts
from tests.csi.driver import Caller, Driver
from tests.csi.pods import PodVolume, code_of, tagged
from tests.transfer.cache.support import snapshot
from tests.transfer.s3.servers import free_ports
from transfer.mounts import bind_tree, mount_table

pytestmark = pytest.mark.root

IDLE_LIMIT_BYTES = 120_000_000
ROOT = Path(__file__).parents[2]


def get(port: int, path: str) -> tuple[int, str]:
    """Status and body of a page."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return int(answer.status), answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_figures_and_probes(stopped: Driver) -> None:
    [port] = free_ports(1)
    stopped.settings = {"metricsAddress": f"127.0.0.1:{port}"}
    image = tagged(stopped.store, "models/llama", stopped.store.add(snapshot(1, mib=2)))
    caller = Caller(stopped.start().socket)
    caller.call("NodePublishVolume", PodVolume(stopped.kubelet, "p", {"image": image}).publish())
    assert get(port, "/healthz") == (200, "ok\n")
    assert get(port, "/readyz") == (200, "ok\n")
    assert get(port, "/nope")[0] == 404
    status, text = get(port, "/metrics")
    assert status == 200
    found = dict(re.findall(r"^(\w+(?:\{[^}]*\})?) ([0-9.e+]+)$", text, re.MULTILINE))
    assert found['snapcask_csi_operations_total{code="OK",method="NodePublishVolume"}'] == "1.0"
    assert float(found['snapcask_cache_bytes_moved_total{how="fetched"}']) > 2 << 20
    assert float(found['snapcask_cache_bytes_moved_total{how="evicted"}']) == 0
    assert float(found["snapcask_cache_bytes"]) > 2 << 20
    assert float(found["snapcask_cache_free_bytes"]) > 0
    assert float(found["snapcask_csi_volumes"]) == 1
    assert float(found["snapcask_fetches_running"]) == 0
    assert float(found["snapcask_fetches_queued"]) == 0
    assert 'snapcask_fetch_seconds_count{phase="fill"}' in found
    caller.close()


def test_it_is_not_ready_while_its_mounts_stay_inside(stopped: Driver) -> None:
    [port] = free_ports(1)
    stopped.settings = {"metricsAddress": f"127.0.0.1:{port}"}
    subprocess.run(["mount", "--make-private", stopped.kubelet], check=True)
    stopped.start()
    status, text = get(port, "/readyz")
    assert status == 503
    assert "Bidirectional" in text
    assert get(port, "/healthz")[0] == 200


@pytest.mark.parametrize("mode", ["overlay", "bind"])
def test_it_is_not_ready_while_it_may_not_mount(stopped: Driver, mode: str) -> None:
    [port] = free_ports(1)
    stopped.settings = {"metricsAddress": f"127.0.0.1:{port}", "mount": {"mode": mode}}
    stopped.wrapper = ("setpriv", "--inh-caps", "-sys_admin", "--bounding-set", "-sys_admin")
    image = tagged(stopped.store, "models/llama", stopped.store.add(snapshot(1, mib=2)))
    caller = Caller(stopped.start().socket)
    assert not caller.call("Probe", pb.ProbeRequest()).ready.value
    pod = PodVolume(stopped.kubelet, "p", {"image": image})
    with pytest.raises(grpc.RpcError) as caught:
        caller.call("NodePublishVolume", pod.publish())
    assert code_of(caught.value) == "UNAVAILABLE"
    status, text = get(port, "/readyz")
    assert status == 503
    assert "privileged: true" in text
    assert get(port, "/healthz")[0] == 200
    caller.close()


def test_trying_out_leaves_nothing_and_mends_what_a_killed_trial_left(stopped: Driver) -> None:
    folder = stopped.disk.root / "trial"  # type: ignore[union-attr]
    (folder / "at").mkdir(parents=True)
    bind_tree(str(folder), str(folder / "at"))
    assert why_no_mounts(str(folder), list(MountMode)) == ""
    assert not folder.exists()
    (folder.parent / "file").touch()
    assert "not a directory" in why_no_mounts(str(folder.parent / "file" / "x"), list(MountMode))
    full = folder.parent / "full"
    full.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "nr_inodes=1", "full", full], check=True)
    assert why_no_mounts(str(full / "trial"), list(MountMode)) == ""
    subprocess.run(["umount", full], check=True)
    stopped.start()
    assert not (stopped.cache / "csi" / "trial").exists()
    assert not [e for e in mount_table() if e.directory.startswith(f"{stopped.cache}/")]


def test_every_log_line_is_json_with_the_volume_and_the_pod(driver: Driver, caller: Caller) -> None:
    image = tagged(driver.store, "models/llama", driver.store.add(snapshot(1, mib=2)))
    pod = PodVolume(driver.kubelet, "p", {"image": image})
    caller.call("NodePublishVolume", pod.publish())
    lines = [json.loads(line) for line in driver.log().splitlines()]
    [line] = [one for one in lines if one.get("method") == "NodePublishVolume"
              and one["message"] == "done"]  # fmt: skip
    assert line["volume"] == pod.volume_id
    assert (line["pod_namespace"], line["pod"], line["code"]) == ("team-a", "pod-p", "OK")
    assert all({"time", "level", "message"} <= set(one) for one in lines)
    times = [datetime.fromisoformat(one["time"]) for one in lines]
    assert all(time.utcoffset() == timedelta(0) for time in times)
    assert times == sorted(times)
    assert abs(datetime.now(UTC) - times[-1]) < timedelta(minutes=5)


def test_every_package_below_the_driver_logs_at_the_level_of_the_configuration() -> None:
    script = """
import logging
from csi import logs
from csi.config import LogLevel
logs.start(LogLevel.DEBUG)
for name in ("csi", "imgfmt", "restore", "snapcask", "transfer", "grpc"):
    logging.getLogger(f"{name}.part").debug("said")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    told = {json.loads(line)["logger"] for line in done.stderr.splitlines()}
    assert told == {f"{name}.part" for name in ("csi", "imgfmt", "restore", "snapcask", "transfer")}


def test_the_idle_driver_is_small_and_holds_no_gpu(stopped: Driver) -> None:
    stopped.start()
    assert stopped.process is not None
    folder = Path(f"/proc/{stopped.process.pid}")
    found = re.search(r"VmRSS:\s+(\d+) kB", (folder / "status").read_text())
    assert found is not None
    assert int(found[1]) * 1024 < IDLE_LIMIT_BYTES
    held = []
    for link in (folder / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            held.append(os.readlink(link))
    assert len(held) > 3
    assert not [path for path in held if "nvidia" in path]
    maps = (folder / "maps").read_text()
    assert "libcuda" not in maps
    assert "torch" not in maps
