"""The slow link passes on what it gets, counts it, and is never faster than it says.

Only least times are asserted: a busy machine can make it slower, and nothing can make it faster.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.slow_link import FIRST_WINDOW_BYTES, Link, Passed, slow_link

FAST = Link(rtt_s=0.0, bits_per_s=1e10)


@contextlib.contextmanager
def an_echo() -> Iterator[int]:
    """A server that sends back all it gets, once the client has said that this was all."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            got = bytearray()
            while piece := connection.recv(1 << 16):
                got += piece
            connection.sendall(got)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=accept, name="echo", daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def echoed(port: int, said: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), 30) as connection:
        connection.sendall(said)
        connection.shutdown(socket.SHUT_WR)
        got = bytearray()
        while piece := connection.recv(1 << 16):
            got += piece
        return bytes(got)


def test_every_byte_arrives_in_order_and_is_counted(tmp_path: Path) -> None:
    said = [os.urandom(n) for n in (1, 70_000, 3_000_000)]
    with an_echo() as port, slow_link(port, FAST, tmp_path) as link:
        threads = [threading.Thread(target=lambda: echoed(link.port, said[1])) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert link.passed() == Passed(4 * len(said[1]), 4 * len(said[1]))
        before = link.passed()
        assert [echoed(link.port, one) for one in said] == said
        n_bytes = sum(map(len, said))
        assert link.passed().since(before) == Passed(n_bytes, n_bytes)
    assert list(tmp_path.iterdir()) == []


def test_an_answer_takes_a_round_trip_to_connect_and_one_to_ask(tmp_path: Path) -> None:
    with an_echo() as port, slow_link(port, Link(0.05, 1e9), tmp_path) as link:
        begun_s = time.monotonic()
        assert echoed(link.port, b"ping") == b"ping"
        assert time.monotonic() - begun_s >= 2 * 0.05


def test_all_connections_share_the_bandwidth(tmp_path: Path) -> None:
    with an_echo() as port, slow_link(port, Link(0.0, 8e6), tmp_path) as link:
        said = os.urandom(100_000)
        threads = [threading.Thread(target=echoed, args=(link.port, said)) for _ in range(3)]
        begun_s = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert time.monotonic() - begun_s >= 3 * len(said) / 1e6


def test_a_new_connection_starts_slowly(tmp_path: Path) -> None:
    said = os.urandom(FIRST_WINDOW_BYTES * 7)  # 1 + 2 + 4 windows: three round trips
    with an_echo() as port, slow_link(port, Link(0.04, 1e10), tmp_path) as link:
        begun_s = time.monotonic()
        assert echoed(link.port, said) == said
        assert time.monotonic() - begun_s >= 0.04 + 2 * (2 * 0.04 + 0.02)


def test_a_server_that_is_not_there_ends_the_connection(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with slow_link(port, FAST, tmp_path) as link, contextlib.suppress(OSError):  # or reset
        assert echoed(link.port, b"hello") == b""


def test_an_open_connection_ends_with_the_link(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with an_echo() as port:
        with slow_link(port, FAST, tmp_path) as link:
            connection = socket.create_connection(("127.0.0.1", link.port), 30)
            connection.sendall(b"x")
            while link.passed().sent_bytes == 0:
                time.sleep(0.001)
        with connection, contextlib.suppress(ConnectionResetError):
            assert connection.recv(10) == b""
    assert "Traceback" not in capfd.readouterr().err


def test_a_link_does_not_outlive_who_started_it(tmp_path: Path) -> None:
    code = f"""
import time
from pathlib import Path
from benchmarks.slow_link import Link, slow_link
with slow_link(1, Link(0.0, 1e9), Path({str(tmp_path)!r})) as link:
    print(link.port, flush=True)
    time.sleep(100)
"""
    starter = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    port = int(starter.stdout.readline())
    socket.create_connection(("127.0.0.1", port), 30).close()
    starter.kill()
    starter.communicate()
    assert is_refused_soon(port)


def is_refused_soon(port: int) -> bool:
    end_s = time.monotonic() + 30
    while time.monotonic() < end_s:
        try:
            socket.create_connection(("127.0.0.1", port), 30).close()
        except ConnectionRefusedError:
            return True
        time.sleep(0.005)
    return False


def test_a_link_says_what_it_is_like() -> None:
    assert str(Link(0.1, 1e9)) == "100 ms, 1 Gbit/s"
    assert Link(0.1, 1e9).bytes_per_s == 125e6
