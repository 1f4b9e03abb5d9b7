"""What the bare machine can do is measured without a trace, and says what it cannot measure."""

import errno
import os
from pathlib import Path

import pytest

from benchmarks import limits
from benchmarks.limits import ProbeConfig, probe_limits, shared_limits
from benchmarks.report import Samples

MIB = 1024 * 1024
TINY = ProbeConfig(
    n_repeats=2, memory_bytes=MIB, piece_bytes=MIB // 4, file_bytes=MIB, block_bytes=MIB // 4
)


def test_probes_report_a_rate_for_each_limit_and_leave_no_file(tmp_path: Path) -> None:
    rows = probe_limits(tmp_path, TINY)
    assert [row.case for row in rows] == [
        "memory copy",
        "BLAKE3",
        "write",
        "read, cold",
        "read, cached",
        "read, O_DIRECT",
        "write, O_DIRECT",
        "loopback",
    ]
    for row in rows:
        rate = row.values["gb_s"]
        if isinstance(rate, Samples):
            assert len(rate.values) == 2
            assert min(rate.values) > 0
        else:
            assert (rate, "O_DIRECT" in row.case) == ("unsupported", True)
    assert list(tmp_path.iterdir()) == []


def refuse(monkeypatch: pytest.MonkeyPatch, refused_flags: int) -> None:
    """Let os.open fail as a file system does that lacks what the flags ask for."""
    really_open = os.open

    def open_or_refuse(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & refused_flags:
            raise OSError(errno.EINVAL, "refused", path)
        return really_open(path, flags, mode)

    monkeypatch.setattr(os, "open", open_or_refuse)


def test_probes_say_where_o_direct_is_unsupported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, os.O_DIRECT)
    rates = {row.case: row.values["gb_s"] for row in probe_limits(tmp_path, TINY)}
    assert rates["read, O_DIRECT"] == rates["write, O_DIRECT"] == "unsupported"
    assert isinstance(rates["write"], Samples)


def test_probes_raise_when_a_buffered_write_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, os.O_WRONLY)
    with pytest.raises(OSError, match="refused"):
        probe_limits(tmp_path, TINY)


def test_probes_raise_other_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        probe_limits(tmp_path / "missing", TINY)


def test_what_one_script_of_the_quick_suite_found_is_given_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BENCH_LIMITS", str(tmp_path / "limits.json"))
    found = shared_limits(tmp_path, TINY)
    monkeypatch.setattr(limits, "probe_limits", None)  # whoever probes again fails
    assert shared_limits(tmp_path, TINY) == found


def test_without_the_suite_every_script_probes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BENCH_LIMITS", raising=False)
    rows = shared_limits(tmp_path, TINY)
    assert len(rows) == 8
    assert list(tmp_path.iterdir()) == []
