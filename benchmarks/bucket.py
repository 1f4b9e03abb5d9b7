"""The S3 server that benchmarks use: SeaweedFS on 127.0.0.1, their own or the suite's.

The suite's quick mode starts one for all its cases, which keep apart by the names of their stores,
and says so through the environment (BENCH_S3, its endpoint).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from tests.transfer.s3 import servers


@contextlib.contextmanager
def bucket_server(folder: Path) -> Iterator[servers.Server]:
    """The suite's server, or one that is started and ends with the block, its files in `folder`."""
    if endpoint := os.environ.get("BENCH_S3"):
        yield servers.Server("seaweedfs", endpoint)
        return
    folder.mkdir()
    with servers.seaweedfs(folder) as server:
        yield server
