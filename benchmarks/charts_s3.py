"""Charts of what goes to a bucket and comes from it, and of starts on a node."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.picking import Picture, Reports, bars_of, limits_of, value_of
from benchmarks.plots import Bar, Bars, Stack, Stacks


def pulling(reports: Reports) -> Picture | None:
    """Throughput of a pull from a bucket, beside s5cmd."""
    rows = {
        "snapcask pull, 128 MiB of buffers": "snapcask, 128 MiB of buffers",
        "snapcask pull, 512 MiB of buffers": "snapcask, 512 MiB of buffers",
        "s5cmd cp": "s5cmd cp, checks nothing",
    }
    bars = bars_of(reports, "s3", rows, "gb_s")
    if not bars:
        return None
    limits = {"write, O_DIRECT": "disk write", "loopback": "one connection"}
    says = "The server runs on the same machine and takes part of it; both sides end with a sync."
    chart = Bars("GB/s", bars, limits_of(reports, "s3", limits))
    return Picture("s3", "Pull from a bucket", says, "s3", chart)


def receiving(reports: Reports) -> Picture | None:
    """What a CPU-second receives, by client."""
    report = reports.get("receive")
    if report is None:
        return None
    names = {"zero_copy": "snapcask", "portable": "snapcask, without the fast path"}
    rows = {
        row: names.get(client := row.removeprefix("http, "), client)
        for row, values in report.rows.items()
        if row.startswith("http, ") and "gb_s" in values
    }
    bars = bars_of(reports, "receive", rows, "gb_per_cpu_s")
    says = "How much each client receives over HTTP with one second of CPU time: more is better."
    chart = Bars("GB per CPU-second", bars)
    return Picture("receive", "Receiving from S3", says, "receive", chart) if bars else None


def linked(reports: Reports) -> Picture | None:
    """Throughput over the link with the longest round trip, beside what it can do."""
    report = reports.get("link")
    if report is None:
        return None
    links = {row.partition(": ")[0] for row, values in report.rows.items() if "of_limit" in values}
    if not links:
        return None
    link = max(links, key=lambda name: float(name.partition(" ms")[0]))
    bandwidth = value_of(reports, "link", f"{link}: limit: bandwidth", "gb_s")
    limits = () if bandwidth is None else (("bandwidth", bandwidth),)
    title = f"Pull and push over a link of {link}"
    return _clients(reports, link, Bars("GB/s", (), limits), "link", title)


def direct(reports: Reports) -> Picture | None:
    """The same without a link: the server on the same machine."""
    limits = limits_of(reports, "link", {"write, O_DIRECT": "disk write", "loopback": "loopback"})
    title = "Pull and push, the server on the same machine"
    return _clients(reports, "direct", Bars("GB/s", (), limits), "direct", title)


def _clients(reports: Reports, where: str, empty: Bars, name: str, title: str) -> Picture | None:
    """Bars of all clients, in a chart that has none yet."""
    rows = reports["link"].rows if "link" in reports else {}
    bars = tuple(
        Bar(f"{client}: {verb}", value, ours=client == "snapcask")
        for verb in ("push", "pull")
        for row in rows
        if row.startswith(f"{where}: {verb}, ")
        for client in [row.removeprefix(f"{where}: {verb}, ")]
        for value in [value_of(reports, "link", row, "gb_s")]
        if value is not None
    )
    says = (
        "Each as a process, start-up included, with all on disk in the end; only snapcask checks."
    )
    return Picture(name, title, says, "link", replace(empty, bars=bars)) if bars else None


PHASES_SHOWN = {
    "startup_s": "start-up",
    "resolve_s": "resolve",
    "fetch_s": "fetch, verify, write",
    "mount_s": "mount",
    "memory_s": "memory",
    "load_s": "load",
}


def ready(reports: Reports) -> Picture | None:
    """Seconds of a start by phase."""
    report = reports.get("ready")
    if report is None:
        return None
    stacks = []
    for row in report.rows:
        parts = [value_of(reports, "ready", row, phase) for phase in PHASES_SHOWN]
        found = tuple(part for part in parts if part is not None)
        if len(found) == len(PHASES_SHOWN):
            stacks.append(Stack(row, found))
    if not stacks:
        return None
    says = "Prefetch, mount, load, each a process; where the bytes came from is checked each time."
    chart = Stacks("seconds", tuple(PHASES_SHOWN.values()), tuple(stacks))
    return Picture("ready", "Until the weights are loaded", says, "ready", chart)
