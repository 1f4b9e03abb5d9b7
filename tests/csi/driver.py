"""A real driver as a process of its own, and a client that calls it as kubelet does."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message

from csi.proto import csi_pb2 as pb
from tests.csi.namespaces import make_shared, private_mounts
from tests.filesystems import Disk, disk, skip_unless
from tests.transfer.fixture_store import FixtureStore
from transfer.mounts import mount_table

NODE = "node-1"
_ROOT = Path(__file__).parents[2]
_START_S = 20.0


class Caller:
    """Calls methods of the interface by name."""

    def __init__(self, socket: Path) -> None:
        self._channel = grpc.insecure_channel(
            f"unix://{socket}", options=[("grpc.enable_retries", 0)]
        )

    def call(self, method: str, message: Message, timeout_s: float = 30.0) -> Any:
        """The answer. Raises grpc.RpcError."""
        return self.begin(method, message, timeout_s).result()

    def begin(self, method: str, message: Message, timeout_s: float = 30.0) -> Any:
        """A call under way: a future of the answer."""
        for service in pb.DESCRIPTOR.services_by_name.values():
            if method in service.methods_by_name:
                answer = service.methods_by_name[method].output_type.name
                stub = self._channel.unary_unary(
                    f"/{service.full_name}/{method}",
                    request_serializer=type(message).SerializeToString,
                    response_deserializer=getattr(pb, answer).FromString,
                )
                return stub.future(message, timeout=timeout_s, wait_for_ready=False)
        raise AssertionError(method)

    def close(self) -> None:
        """End the connection."""
        self._channel.close()


@dataclass
class Driver:
    """`snapcask csi` with a store, a cache and a kubelet folder below `root`.

    `settings` are keys of its configuration that go before what is needed, `wrapper` the words
    before its command.
    """

    root: Path
    cache: Path
    store: FixtureStore
    settings: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    wrapper: Sequence[str] = ()
    process: subprocess.Popen[bytes] | None = None
    disk: Disk | None = None
    log_start: int = 0

    @property
    def socket(self) -> Path:
        """Where it listens."""
        return self.root / "csi.sock"

    @property
    def kubelet(self) -> Path:
        """Kubelet's folder."""
        return self.root / "kubelet"

    @property
    def log_path(self) -> Path:
        """Its log."""
        return self.root / "driver.log"

    def configuration(self) -> dict[str, Any]:
        """What its file says."""
        return {
            "stores": {"main": {"url": str(self.store.root)}},
            "kubeletDir": str(self.kubelet),
            "policy": {"singleTenant": True},
            "cache": {
                "path": str(self.cache),
                "beginFree": 0.0,
                "endFree": 0.0,
                "allowRootFilesystem": True,
            },
            "fetch": {"maxMemoryBytes": 16 << 20},
            "logLevel": "debug",
            **self.settings,
        }

    def start(self, *options: str) -> Driver:
        """Start it and wait until it answers."""
        config = self.root / "config.json"
        config.write_text(json.dumps(self.configuration()))
        command = [
            *self.wrapper, sys.executable, "-m", "snapcask", "csi", "--endpoint", f"unix://{self.socket}",
            "--config", str(config), "--node-name", NODE, *options,
        ]  # fmt: skip
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=_ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env={**os.environ, "PYTHONPATH": str(_ROOT), **self.environment},
            )  # fmt: skip
        self.wait_until_up()
        return self

    def wait_until_up(self) -> None:
        """Return when it answers. Raises AssertionError with its log."""
        until_s = time.monotonic() + _START_S
        while True:
            assert self.process is not None
            assert self.process.poll() is None, self.log()
            caller = Caller(self.socket)
            try:
                caller.call("Probe", pb.ProbeRequest(), 2.0)
                return
            except grpc.RpcError:
                assert time.monotonic() < until_s, self.log()
            finally:
                caller.close()
            time.sleep(0.01)

    def log(self) -> str:
        """What it has logged in this test."""
        return self.log_path.read_text()[self.log_start :] if self.log_path.exists() else ""

    def kill(self) -> None:
        """End it without a warning."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def stop(self) -> int:
        """End it as Kubernetes does; its exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout=30)
        self.process = None
        return code


@contextlib.contextmanager
def a_driver(folder: Path) -> Iterator[Driver]:
    """A driver that is not started, on an XFS of its own, in a mount namespace of its own."""
    skip_unless("xfs")
    with private_mounts(), disk(folder, "xfs") as made:
        root = folder / "d"
        root.mkdir()
        store = FixtureStore(folder / "store")
        driver = Driver(root, made.root / "cache", store, disk=made)
        make_shared(driver.kubelet)
        try:
            yield driver
        finally:
            driver.kill()
            unmount_all(driver.kubelet)
            store.close()


def unmount_all(folder: Path) -> None:
    """Take down whatever is mounted below a folder."""
    for entry in reversed([e for e in mount_table() if e.directory.startswith(f"{folder}/")]):
        subprocess.run(["umount", "-l", entry.directory], capture_output=True, check=False)
