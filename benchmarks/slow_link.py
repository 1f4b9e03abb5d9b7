"""A network link with latency and bandwidth, between clients and a server on this machine.

    with slow_link(server_port, Link(rtt_s=0.1, bits_per_s=1e9), folder) as link:
        ...  # clients connect to 127.0.0.1:link.port

Needs no root and nothing of the kernel, unlike netem, which many kernels lack. A process of its
own passes on what it gets, so its CPU time counts for nobody. All connections share the bandwidth
of each direction, in turns of at most PIECE_BYTES. Each pays a round trip to connect, starts with
the initial window of TCP and doubles it with each round trip, up to `window_bytes`. Nothing is
lost on the way, no window shrinks again, and TLS would come on top.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import mmap
import signal
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PIECE_BYTES = 64 * 1024
QUEUE_S = 0.02
"""Pieces wait their turn outside the link while it has this much to send: it never runs dry."""

FIRST_WINDOW_BYTES = 10 * 1460
"""What TCP sends before the first acknowledgement (RFC 6928)."""

_COUNTS = struct.Struct("<QQ")


@dataclass(frozen=True, slots=True)
class Link:
    """What a link is like. `window_bytes`: of one connection; Linux lets it grow to some 3 MB."""

    rtt_s: float
    bits_per_s: float
    window_bytes: int = 3_000_000

    @property
    def bytes_per_s(self) -> float:
        """Of each direction."""
        return self.bits_per_s / 8

    def __str__(self) -> str:
        return f"{self.rtt_s * 1000:g} ms, {self.bits_per_s / 1e9:g} Gbit/s"


@dataclass(frozen=True, slots=True)
class Passed:
    """Bytes that went over a link, by direction as clients see it."""

    sent_bytes: int
    received_bytes: int

    def since(self, before: Passed) -> Passed:
        """What was added."""
        return Passed(
            self.sent_bytes - before.sent_bytes, self.received_bytes - before.received_bytes
        )


class _Wire:
    """One direction of a link: a queue that all connections share."""

    def __init__(self, link: Link, counts: mmap.mmap, index: int) -> None:
        self.link = link
        self._counts = counts
        self._index = index
        self._free_at_s = 0.0  # when all that was taken so far will have left
        self._turn = asyncio.Lock()  # wakes waiters in order

    async def take(self, n_bytes: int) -> float:
        """Send a piece in turn. Returns when it will have left, on the loop's clock."""
        now = asyncio.get_running_loop().time
        async with self._turn:
            if (wait_s := self._free_at_s - QUEUE_S - now()) > 0:
                await asyncio.sleep(wait_s)
            self._free_at_s = max(self._free_at_s, now()) + n_bytes / self.link.bytes_per_s
        counts = list(_COUNTS.unpack_from(self._counts))
        counts[self._index] += n_bytes
        _COUNTS.pack_into(self._counts, 0, *counts)
        return self._free_at_s


class _Window:
    """What one connection may have under way in one direction: slow start, then a fixed window."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._bytes = min(FIRST_WINDOW_BYTES, link.window_bytes)
        self._in_flight: deque[tuple[float, int]] = deque()  # acknowledged when, how many
        self._in_flight_bytes = 0

    async def room(self) -> int:
        """Wait until something may be sent; how many bytes."""
        now = asyncio.get_running_loop().time
        while True:
            while self._in_flight and self._in_flight[0][0] <= now():
                n_bytes = self._in_flight.popleft()[1]
                self._in_flight_bytes -= n_bytes
                self._bytes = min(self._bytes + n_bytes, self._link.window_bytes)
            if self._in_flight_bytes < self._bytes:
                return self._bytes - self._in_flight_bytes
            await asyncio.sleep(self._in_flight[0][0] - now())

    def sent(self, left_at_s: float, n_bytes: int) -> None:
        """So much left then."""
        self._in_flight.append((left_at_s + self._link.rtt_s, n_bytes))
        self._in_flight_bytes += n_bytes


async def _pass_on(
    source: asyncio.StreamReader, target: asyncio.StreamWriter, wire: _Wire, first_at_s: float
) -> None:
    """One direction of a connection, until the source ends; nothing arrives before `first_at_s`."""
    window, under_way = _Window(wire.link), asyncio.Queue[tuple[float, bytes]]()
    now = asyncio.get_running_loop().time

    async def arrive() -> None:
        while True:
            at_s, piece = await under_way.get()
            if (wait_s := at_s - now()) > 0:
                await asyncio.sleep(wait_s)
            if not piece:
                target.write_eof()
                return
            target.write(piece)
            await target.drain()

    async with asyncio.TaskGroup() as group:
        group.create_task(arrive())
        piece = b"begin"
        while piece:
            piece = await source.read(min(PIECE_BYTES, await window.room()))
            left_at_s = max(await wire.take(len(piece)), first_at_s)
            window.sent(left_at_s, len(piece))
            under_way.put_nowait((left_at_s + wire.link.rtt_s / 2, piece))


class _Relay:
    """Passes connections on to a port."""

    def __init__(self, to_port: int, link: Link, counts: mmap.mmap) -> None:
        self._to_port = to_port
        self._link = link
        self._wires = _Wire(link, counts, 0), _Wire(link, counts, 1)

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection from a client, until both sides have ended or one of them is gone."""
        with contextlib.ExitStack() as ends:
            ends.callback(writer.transport.abort)
            try:
                first_at_s = asyncio.get_running_loop().time() + self._link.rtt_s  # a handshake
                back, there = await asyncio.open_connection("127.0.0.1", self._to_port)
                ends.callback(there.transport.abort)
                async with asyncio.TaskGroup() as group:
                    group.create_task(_pass_on(reader, there, self._wires[0], first_at_s))
                    group.create_task(_pass_on(back, writer, self._wires[1], 0))
            except* OSError:
                pass


async def _serve(to_port: int, link: Link, counts: mmap.mmap) -> None:
    relay, stop = _Relay(to_port, link, counts), asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_reader(sys.stdin.fileno(), stop.set)  # its end: who started this is gone
    server = await asyncio.start_server(relay.connected, "127.0.0.1", 0, backlog=512)
    print(server.sockets[0].getsockname()[1], flush=True)
    await stop.wait()
    server.close()
    loop.set_exception_handler(lambda *_: None)  # connections are cut off: no news


class RunningLink:
    """A link that clients may use."""

    def __init__(self, link: Link, port: int, counts: mmap.mmap) -> None:
        self.link = link
        self.port = port
        self._counts = counts

    @property
    def endpoint(self) -> str:
        """URL of the server behind it."""
        return f"http://127.0.0.1:{self.port}"

    def passed(self) -> Passed:
        """What went over it so far."""
        return Passed(*_COUNTS.unpack_from(self._counts))


@contextlib.contextmanager
def slow_link(to_port: int, link: Link, folder: Path) -> Iterator[RunningLink]:
    """Run a link to a port until the block ends; a file of counts lies in `folder` meanwhile."""
    path = folder / f"link-{to_port}"
    path.write_bytes(bytes(_COUNTS.size))
    command = [
        sys.executable, "-m", "benchmarks.slow_link", str(to_port), str(path),
        f"--rtt-s={link.rtt_s}", f"--bits-per-s={link.bits_per_s}",
        f"--window-bytes={link.window_bytes}",
    ]  # fmt: skip
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        port = process.stdout.readline()
        if not port:
            raise RuntimeError(f"the link did not start, it ended with {process.wait()}")
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as counts:
            yield RunningLink(link, int(port), counts)
    finally:
        process.terminate()
        process.communicate()
        path.unlink()


def main() -> None:
    """Be a link; prints its port."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("to_port", type=int)
    parser.add_argument("counts", type=Path)
    parser.add_argument("--rtt-s", type=float, required=True)
    parser.add_argument("--bits-per-s", type=float, required=True)
    parser.add_argument("--window-bytes", type=int, required=True)
    options = parser.parse_args()
    link = Link(options.rtt_s, options.bits_per_s, options.window_bytes)
    with options.counts.open("r+b") as file, mmap.mmap(file.fileno(), 0) as counts:
        asyncio.run(_serve(options.to_port, link, counts))


if __name__ == "__main__":
    main()
