"""S3 servers for tests: SeaweedFS and moto, each a process of its own on 127.0.0.1."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config

BUCKET = "bucket"
START_S = 60.0


@dataclass(frozen=True)
class Credentials:
    """One identity of a server."""

    access_key: str
    secret_key: str

    def environment(self) -> dict[str, str]:
        """The variables that the SDK reads."""
        return {"AWS_ACCESS_KEY_ID": self.access_key, "AWS_SECRET_ACCESS_KEY": self.secret_key}


ADMIN = Credentials("admin", "admin-secret")
READER = Credentials("reader", "reader-secret")
STRANGER = Credentials("stranger", "stranger-secret")


@dataclass(frozen=True)
class Server:
    """A running server that has the bucket `BUCKET`."""

    kind: str
    endpoint: str

    def client(self, who: Credentials = ADMIN) -> Any:
        """A plain boto3 client, for looking and meddling behind the store's back."""
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=who.access_key,
            aws_secret_access_key=who.secret_key,
            config=Config(
                s3={"addressing_style": "path"},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )


def free_ports(count: int) -> list[int]:
    """Ports that nobody uses now, all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def tool(name: str) -> Path | None:
    """A program that a package has put beside the interpreter."""
    path = Path(sys.executable).parent / name
    return path if path.is_file() else None


@contextlib.contextmanager
def running(command: Sequence[str], endpoint: str, log: Path, ready: int) -> Iterator[None]:
    """Run a server until the block ends. It is up when it answers with the status `ready`."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, cwd=log.parent
        )
        try:
            _wait_until_up(process, endpoint, log, ready)
            yield
        finally:
            process.kill()  # what it keeps is thrown away: no need to let it tidy up
            process.wait()


def _wait_until_up(process: subprocess.Popen[bytes], endpoint: str, log: Path, ready: int) -> None:
    end_s = time.monotonic() + START_S
    while _status(endpoint) != ready:
        if process.poll() is not None or time.monotonic() > end_s:
            tail = log.read_text("utf-8", "replace")[-2000:]
            raise RuntimeError(f"{process.args!r} does not come up:\n{tail}")
        time.sleep(0.01)


def _status(url: str) -> int:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code
    except OSError:
        return 0


@contextlib.contextmanager
def seaweedfs(folder: Path) -> Iterator[Server]:
    """SeaweedFS: master, volumes, filer and S3 in one process."""
    program = tool("weed")
    assert program is not None
    identities = [
        (ADMIN, ["Admin", "Read", "Write", "List", "Tagging"]),
        (READER, [f"Read:{BUCKET}", f"List:{BUCKET}"]),
        (STRANGER, [f"Write:{BUCKET}", f"List:{BUCKET}"]),
    ]
    config = folder / "s3.json"
    config.write_text(json.dumps({"identities": [_identity(*one) for one in identities]}))
    data = folder / "data"
    data.mkdir()
    names = ("s3", "master", "filer", "volume")
    ports = free_ports(2 * len(names))
    options = [
        f"-{name}.port{kind}={port}"
        for (name, kind), port in zip(
            [(name, kind) for name in names for kind in ("", ".grpc")], ports, strict=True
        )
    ]
    command = [
        str(program), "-logtostderr", "server", f"-dir={data}", "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1", "-master.telemetry=false", "-master.volumeSizeLimitMB=1024",
        "-volume.max=40", "-filer", f"-filer.localSocket={folder}/f.sock", "-s3",
        f"-s3.config={config}", f"-s3.localSocket={folder}/s.sock", "-s3.port.iceberg=0",
        "-s3.port.lance=0", *options,
    ]  # fmt: skip
    server = Server("seaweedfs", f"http://127.0.0.1:{ports[0]}")
    try:
        with running(command, server.endpoint, folder / "weed.log", ready=403):
            server.client().create_bucket(Bucket=BUCKET)
            yield server
    finally:
        for name, port in zip(names, ports[1::2], strict=True):
            Path(f"/tmp/seaweedfs-{name}-grpc-{port}.sock").unlink(missing_ok=True)


def _identity(who: Credentials, actions: list[str]) -> dict[str, Any]:
    keys = {"accessKey": who.access_key, "secretKey": who.secret_key}
    return {"name": who.access_key, "credentials": [keys], "actions": actions}


@contextlib.contextmanager
def moto(folder: Path) -> Iterator[Server]:
    """moto's server: another make, which keeps objects in memory and checks no credentials."""
    [port] = free_ports(1)
    endpoint = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with running(command, f"{endpoint}/moto-api/", folder / "moto.log", ready=200):
        server = Server("moto", endpoint)
        server.client().create_bucket(Bucket=BUCKET)
        yield server


def aws_variables() -> list[str]:
    """Names of variables that may point at somebody's account, or through a proxy."""
    proxies = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
    return [n for n in os.environ if n.startswith("AWS_") or n.lower() in proxies]
