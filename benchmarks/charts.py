"""Which charts the reports give: pure selection of rows, no drawing.

A chart is left out where its report is not there, so that a part of the suite draws too.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from benchmarks.bench_dedup import FASTCDC
from benchmarks.charts_s3 import direct, linked, pulling, ready, receiving
from benchmarks.documents import middle
from benchmarks.picking import Picture, Reports, bars_of, limits_of, value_of
from benchmarks.plots import Bar, Bars, Line, Lines
from transfer.dedup import BOUND, PAGE_CDC

MEAN_CHUNK_BYTES = 260 * 1024
WAYS_SHOWN = (PAGE_CDC.name, "fixed 64 KiB", "fixed 256 KiB", "fixed 1 MiB", BOUND.name)

VERBS_SHOWN = (
    "push, new data",
    "push, known data",
    "pull",
    "resume, after half a pull",
    "verify",
    "cp to another store",
)


def pictures(reports: Reports) -> list[Picture]:
    """All charts that these reports give."""
    makers = (
        dedup, live, synthetic, starting, pushing, verbs, pulling, direct, linked, ready,
        receiving, push_cpu, peers_cpu, peers_pull, verbs_memory, memory, growth,
    )  # fmt: skip
    return [picture for make in makers if (picture := make(reports)) is not None]


def dedup(reports: Reports) -> Picture | None:
    """What a store holds after each CRIU snapshot, by way of cutting."""
    title = "What a store holds after each CRIU snapshot"
    return _dedup(reports, "chunking", "dedup", title, WAYS_SHOWN)


def live(reports: Reports) -> Picture | None:
    """The same of captured live processes, with FastCDC."""
    ways = (*WAYS_SHOWN[:-1], FASTCDC, BOUND.name)
    return _dedup(reports, "dedup", "live", "The same of live processes of several models", ways)


def synthetic(reports: Reports) -> Picture | None:
    """The same of synthetic snapshots."""
    ways = (*WAYS_SHOWN[:-1], FASTCDC, BOUND.name)
    title = "The same of large synthetic snapshots"
    return _dedup(reports, "dedup-synthetic", "synthetic", title, ways)


def _dedup(
    reports: Reports, case: str, name: str, title: str, ways: Sequence[str]
) -> Picture | None:
    report = reports.get(case)
    if report is None:
        return None
    lines = []
    for way in ways:
        added = {
            row.removeprefix(f"{way}: "): middle(values.get("new_mb")) or 0.0
            for row, values in report.rows.items()
            if row.startswith(f"{way}: ") and not row.endswith(": all")
        }
        if added:
            totals = tuple(accumulate(added.values()))
            lines.append(Line(way, tuple(added), totals, of_bound=way == BOUND.name))
    if not lines:
        return None
    last = {line.label: line.ys[-1] for line in lines}
    says = (
        f"{len(lines[0].xs)} snapshots pushed in order take {last[PAGE_CDC.name]:.0f} MB with "
        f"page-CDC. No cut at page boundaries can do with less than {last[BOUND.name]:.0f} MB."
    )
    return Picture(name, title, says, case, Lines("", "stored, MB", tuple(lines)))


def starting(reports: Reports) -> Picture | None:
    """What a second replica adds, by how both were started."""
    report = reports.get("advice")
    if report is None:
        return None
    rows = {row: row for row, values in report.rows.items() if "second_mb" in values}
    bars = tuple(
        Bar(bar.label, bar.value, ours=bar.value == least)
        for bars in [bars_of(reports, "advice", rows, "second_mb")]
        for least in [min(bar.value for bar in bars)]
        for bar in bars
    )
    best = min(bars, key=lambda bar: bar.value)
    says = f"The second of two live replicas adds least ({best.value:.3g} MB) with: {best.label}."
    title = "What a second replica adds, by how it was started"
    return Picture("advice", title, says, "advice", Bars("MB that are new", bars))


def pushing(reports: Reports) -> Picture | None:
    """Throughput of a push, beside the disk."""
    rows = {
        "push, new": "snapcask, new data",
        "bare loop, new": "bare loop, new data",
        "push, known": "snapcask, known data",
        "bare loop, known": "bare loop, known data",
    }
    bars = bars_of(reports, "push", rows, "gb_s")
    limits = {"write, O_DIRECT": "disk write", "BLAKE3": "BLAKE3, one core"}
    if not bars:
        return None
    found = limits_of(reports, "push", limits)
    says = "Red: what the disk and one core could do in the same run."
    disk_gb_s = dict(found).get("disk write", float("inf"))
    if any(bar.value > disk_gb_s for bar in bars if "new" in bar.label):
        says += " New data went faster than that: other work slowed the measurement of the limit."
    chart = Bars("GB/s", bars, found)
    return Picture("push", "Push into a directory", says, "push", chart)


def verbs(reports: Reports) -> Picture | None:
    """Throughput of the verbs on a local disk."""
    rows = {name: f"snapcask {name}" for name in VERBS_SHOWN} | {"cp -r": "cp -r, checks nothing"}
    bars = bars_of(reports, "verbs", rows, "gb_s")
    limits = {"write, O_DIRECT": "disk write", "BLAKE3": "BLAKE3, one core"}
    if not bars:
        return None
    says = "Each as a user runs it, start-up included; red: the disk and one core in the same run."
    chart = Bars("GB/s", bars, limits_of(reports, "verbs", limits))
    return Picture("verbs", "The verbs on a local disk", says, "verbs", chart)


def verbs_memory(reports: Reports) -> Picture | None:
    """Peak memory of the verbs."""
    rows = {name: f"snapcask {name}" for name in VERBS_SHOWN} | {"cp -r": "cp -r"}
    bars = bars_of(reports, "verbs", rows, "peak_rss_mb")
    if not bars:
        return None
    says = "Resident at most, interpreter and libraries included."
    return Picture("rss", "Memory of the verbs", says, "verbs", Bars("MB", bars))


def push_cpu(reports: Reports) -> Picture | None:
    """CPU of a push beside a bare loop's."""
    rows = {
        "push, new": "snapcask, new data",
        "bare loop, new": "bare loop, new data",
        "push, known": "snapcask, known data",
        "bare loop, known": "bare loop, known data",
    }
    bars = bars_of(reports, "push", rows, "cpu_s_per_gb")
    if not bars:
        return None
    ratio = value_of(reports, "push", "push : bare loop, new", "ratio")
    says = "The bare loop does only what cannot be left out: read, fingerprint, hash, write."
    says += f" A push of new data takes {ratio:.2f} times its CPU time." if ratio else ""
    chart = Bars("CPU-seconds per GB", bars)
    return Picture("cpu", "CPU time of a push", says, "push", chart)


def peers_cpu(reports: Reports) -> Picture | None:
    """CPU of what others would take."""
    report = reports.get("peers")
    if report is None:
        return None
    rows = {
        row: row.removesuffix(": first")
        for row, values in report.rows.items()
        if row.endswith(": first") and "cpu_s" in values
    }
    bars = bars_of(reports, "peers", rows, "cpu_s")
    says = "One push of the same bytes as each program does it, start-up included: less is better."
    missing = [row for row, values in report.rows.items() if values.get("note")]
    says += f" Not installed here: {', '.join(missing)}." if missing else ""
    chart = Bars("CPU-seconds", bars)
    return Picture("peers", "CPU time beside other programs", says, "peers", chart)


def peers_pull(reports: Reports) -> Picture | None:
    """How long others take to bring a snapshot back."""
    report = reports.get("peers")
    if report is None:
        return None
    rows = {row: row.removesuffix(": pull") for row in report.rows if row.endswith(": pull")}
    bars = bars_of(reports, "peers", rows, "wall_s")
    if not bars:
        return None
    says = "The last snapshot, start-up included, on disk in the end. cp and tar check nothing."
    title = "Bringing a snapshot back, beside other programs"
    return Picture("peers-pull", title, says, "peers", Bars("seconds", bars))


def _scales(reports: Reports, row: str, quantity: str) -> tuple[list[float], list[float]]:
    """Terabytes of data, and the quantity, of all sizes that were measured; smallest first."""
    points = []
    for case in SCALES:
        chunks = value_of(reports, case, "push, all chunks new", "n_chunks")
        value = value_of(reports, case, row, quantity)
        if chunks is not None and value is not None:
            points.append((chunks * MEAN_CHUNK_BYTES / 1e12, value))
    points.sort()
    return [x for x, _ in points], [y for _, y in points]


SCALES = ("scale", "scale-tenth", "scale-hundredth")
PUSHED = ("push, all chunks new", "push, all chunks known", "push, replica, 26 % new")


def _largest(reports: Reports) -> str:
    return next(case for case in SCALES if case in reports)


def memory(reports: Reports) -> Picture | None:
    """Peak memory by size."""
    rows = {**dict.fromkeys(PUSHED, "peak_mb"), "open: all of it": "peak_mb"}
    lines = []
    for row, quantity in rows.items():
        xs, ys = _scales(reports, row, quantity)
        if len(xs) > 1:
            lines.append(Line(row, tuple(xs), tuple(ys)))
    if not lines:
        return None
    most = max(max(line.ys) for line in lines)
    largest = max(max(line.xs) for line in lines if isinstance(line.xs[-1], float))
    says = f"Peak memory, at most {most:.0f} MB for {float(largest):.2g} TB: a few bytes a chunk."
    chart = Lines("TB of data", "peak memory, MB", tuple(lines))
    return Picture("memory", "Memory grows with chunks, slowly", says, _largest(reports), chart)


def growth(reports: Reports) -> Picture | None:
    """CPU seconds that are not reading, hashing and storing payload, by size."""
    lines, per_chunk = [], []
    for row in PUSHED:
        xs, micros = _scales(reports, row, "cpu_us_per_chunk")
        if len(xs) > 1:
            ys = [us * x * 1e12 / MEAN_CHUNK_BYTES / 1e6 for x, us in zip(xs, micros, strict=True)]
            lines.append(Line(row, tuple(xs), tuple(ys)))
            per_chunk.append((micros[0], micros[-1]))
    if not lines:
        return None
    small, large = (max(ends) for ends in zip(*per_chunk, strict=True))
    says = (
        "All that a push does but read, hash and store payload: at most "
        f"{small:.0f} µs a chunk at the smaller size and {large:.0f} µs at the larger."
    )
    chart = Lines("TB of data", "CPU-seconds", tuple(lines))
    return Picture(
        "growth", "Everything else grows with the number of chunks", says, _largest(reports), chart
    )
