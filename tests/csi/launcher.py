"""Drivers that start in milliseconds: forked from a process that has everything imported.

Run as a program it takes lines of JSON on standard input, each the arguments of one driver, and
answers with its process id.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from csi.config_file import read_config
from csi.endpoint import Endpoint
from csi.server import serve

_ROOT = Path(__file__).parents[2]


class Launcher:
    """Context manager: the process that forks."""

    def __init__(self, log: Path) -> None:
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.csi.launcher"], cwd=_ROOT, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=output, env={**os.environ, "PYTHONPATH": str(_ROOT)},
            )  # fmt: skip

    def start(self, socket: Path, config: Path, node: str) -> int:
        """Start a driver; its process id. It does not answer yet."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = json.dumps([str(socket), str(config), node])
        self._process.stdin.write(f"{line}\n".encode())
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def kill(self, pid: int) -> None:
        """End a driver without a warning, and wait until it is gone."""
        os.kill(pid, signal.SIGKILL)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        assert int(self._process.stdout.readline()) == pid

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


def _main() -> None:
    for line in iter(sys.stdin.readline, ""):
        if line == "\n":
            print(os.wait()[0], flush=True)
            continue
        socket, config, node = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _drive(socket, config, node)
        print(pid, flush=True)


def _drive(socket: str, config: str, node: str) -> Any:
    os.close(0)
    os.dup2(2, 1)
    try:
        endpoint = Endpoint.parse(f"unix://{socket}")
        asyncio.run(serve(read_config(config), endpoint, version="test", node_name=node))
    finally:
        os._exit(1)


if __name__ == "__main__":
    _main()
