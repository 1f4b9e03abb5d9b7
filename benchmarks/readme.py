"""The table of figures in README.md, from the JSON of one run of the suite.

Prints it as Markdown, or with `--write` puts it between the two marks of a file. Each row has one
quantity of one case, beside it that of peers and what limits it, and the command of the case.
Run: `make bench-report README=1`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.documents import read_reports, said_of_run
from benchmarks.picking import Reports, value_of
from benchmarks.report import HERE, OUTPUT_FOLDER

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
LEGEND = (
    "In bold: where a peer is faster, smaller or cheaper than snapcask. "
    "Limits are what a bare loop, an ideal cut or the machine does, checks and all else left out."
)


@dataclass(frozen=True, slots=True)
class Line:
    """One row. Peers and limits are rows of the case by the names they are shown with.

    With `suffixes` each row stands for several, of which all values are shown and summed to be
    compared.
    """

    what: str
    case: str
    quantity: str
    unit: str
    ours: str
    peers: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, str] = field(default_factory=dict)
    suffixes: tuple[str, ...] = ("",)
    more_is_better: bool = False


BY_PEER = {name: f"{name}: " for name in ("restic", "borg", "casync", "cp", "tar | zstd -1")}
CUTS = {
    "fixed 64 KiB": "fixed 64 KiB: ",
    "fixed 1 MiB": "fixed 1 MiB: ",
    "FastCDC, not at page boundaries": "FastCDC, 256 KiB: ",
}
PAGES = {"single pages": "single pages (the bound): "}
CRIU = ("x-replica-0", "x-replica-1", "y-replica-0")
DEDUPLICATING = {name: f"{name}, stored: all" for name in ("restic", "borg", "casync")}
LINK = "100 ms, 1 Gbit/s: "
CLIENTS = ("s5cmd", "aws s3 cp", "boto3", "aiobotocore", "obstore")
RECEIVERS = ("obstore", "boto3", "aiobotocore", "s5cmd")

LINES = (
    Line(
        "new bytes of three CRIU snapshots of one model, in order", "chunking", "new_mb", "MB",
        "page-CDC: ", {"fixed 64 KiB": CUTS["fixed 64 KiB"]}, PAGES, CRIU,
    ),
    Line(
        "new bytes of ten live processes: replicas, other orders, a fine-tune, other models",
        "dedup", "new_mb", "MB", "page-CDC: ", CUTS, PAGES, ("all",),
    ),
    Line(
        "the same, stored, with metadata", "dedup", "new_mb", "MB", "snapcask, stored: all",
        DEDUPLICATING,
    ),
    Line(
        "cutting and finding zero pages", "chunking", "gb_per_cpu_s", "GB/s a core", "cut, random",
        limits={"BLAKE3": "limit: BLAKE3", "memory copy": "limit: memory copy"},
        more_is_better=True,
    ),
    *(
        Line(
            f"push of {kind} data", "push", quantity, unit, f"push, {kind}",
            limits={"bare loop": f"bare loop, {kind}"},
        )
        for kind in ("new", "known")
        for quantity, unit in (("cpu_s_per_gb", "CPU-seconds a GB"), ("wall_s", "s"))
    ),
    *(
        Line(f"{verb}, start-up included", "peers", quantity, unit, "snapcask: ", BY_PEER,
             suffixes=(row,))
        for verb, row in (("push of new data", "first"), ("pull to disk", "pull"))
        for quantity, unit in (("cpu_s", "CPU-seconds"), ("wall_s", "s"))
    ),
    Line(
        "verified pull from SeaweedFS, to disk", "s3", "cpu_s_per_gb", "CPU-seconds a GB",
        "snapcask pull, 128 MiB of buffers", {"s5cmd cp, which checks nothing": "s5cmd cp"},
    ),
    Line(
        "the same", "s3", "wall_s", "s", "snapcask pull, 128 MiB of buffers",
        {"s5cmd cp": "s5cmd cp"},
    ),
    *(
        Line(
            f"{verb} over a link of 100 ms and 1 Gbit/s", "link", "wall_s", "s",
            f"{LINK}{verb}, snapcask", {name: f"{LINK}{verb}, {name}" for name in CLIENTS},
        )
        for verb in ("pull", "push")
    ),
    *(
        Line(
            f"receiving bodies over {scheme.upper()}", "receive", "gb_per_cpu_s",
            "GB per CPU-second", f"{scheme}, zero_copy",
            {name: f"{scheme}, {name}" for name in RECEIVERS}, more_is_better=True,
        )
        for scheme in ("http", "https")
    ),
    *(
        Line(
            f"into the node cache, {shared} % of it there already", "cache", "wall_s", "s",
            f"warm direct, {shared} % shared", {"cp": "cp"},
        )
        for shared in (0, 90, 98)
    ),
    Line(
        "from nothing on the node until weights are loaded", "ready", "total_s", "s",
        "nothing on the node", {"s5cmd cp, then load": "s5cmd cp, then load"},
    ),
    Line(
        "from the tree on the node's disk", "ready", "total_s", "s", "tree on the disk",
        limits={"tree in memory": "tree in memory"},
    ),
    Line(
        "metadata of a replica with 26 % new chunks", "metadata", "written_b_per_chunk",
        "bytes a chunk", "replica of it",
        limits={"digest and length": "limit: digest and length"},
    ),
    Line("memory of a push, 0.3 TB listed and not there", "scale", "peak_mb", "MB",
         "push, all chunks new"),
    Line(
        "opening its tree", "scale", "wall_s", "s", "open: all of it",
        limits={"hashing it": "limit: BLAKE3 of tree and placement"},
    ),
)  # fmt: skip

MACHINE_LIMITS = {
    "memory copy": "memory copy", "BLAKE3": "BLAKE3", "disk read": "read, O_DIRECT",
    "disk write": "write, O_DIRECT", "loopback": "loopback",
}  # fmt: skip


def values_of(reports: Reports, line: Line, row: str) -> list[float]:
    """What one way took; empty where any of it was not measured."""
    found = [value_of(reports, line.case, row + end, line.quantity) for end in line.suffixes]
    return [value for value in found if value is not None] if None not in found else []


def row_of(reports: Reports, line: Line) -> str:
    """The row of a line; "" where snapcask was not measured."""
    ours = values_of(reports, line, line.ours)
    if not ours:
        return ""
    beside = []
    for name, row in line.peers.items():
        theirs = values_of(reports, line, row)
        is_better = theirs and (sum(theirs) > sum(ours)) == line.more_is_better
        shown = f"{name} {_shown(theirs)}" if theirs else f"{name} not measured"
        beside.append(f"**{shown}**" if is_better and sum(theirs) != sum(ours) else shown)
    for name, row in line.limits.items():
        if of_limit := values_of(reports, line, row):
            beside.append(f"limit: {name} {_shown(of_limit)}")
    cells = [line.what, f"{_shown(ours)} {line.unit}", ", ".join(beside)]
    command = f"`{reports[line.case].command}`"
    return "| " + " | ".join([*(cell.replace("|", r"\|") for cell in cells), command]) + " |"


def _shown(values: Sequence[float]) -> str:
    return " + ".join(f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in values)


def figures(path: Path) -> str:
    """The machine, its limits and the table."""
    reports = read_reports(path)
    rows = [row for line in LINES if (row := row_of(reports, line))]
    if not rows:
        raise SystemExit(f"{path} has none of the cases of the table")
    machine = next(iter(reports.values())).machine
    facts = (
        f"{machine['cpu_model']}, {machine['n_cores']} cores, "
        f"{machine['memory_bytes'] / 1e9:.0f} GB, {machine['filesystem'].partition(' ')[0]}, "
        f"Linux {machine['kernel']}, Python {machine['python']}, "
        f"commit {machine['git_commit'][:12]}"
    )
    rates = {n: value_of(reports, "push", row, "gb_s") for n, row in MACHINE_LIMITS.items()}
    limits = ", ".join(f"{n} {_shown([rate])}" for n, rate in rates.items() if rate is not None)
    return "\n".join(
        [
            f"Measured in one run ({said_of_run(path)}) on {facts}.",
            *([f"The machine's limits in it, GB/s: {limits}."] if limits else []),
            LEGEND,
            "",
            "| what | figure | beside it | command |",
            "|---|---|---|---|",
            *rows,
        ]
    )


def replaced(text: str, made: str) -> str:
    """The text with what stands between the marks replaced."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"no {BEGIN} with {END} after it")
    return f"{before}{BEGIN}\n{made}\n{END}{after}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print, or replace in place."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, nargs="?", default=OUTPUT_FOLDER / "full.json")
    parser.add_argument("--write", action="store_true", help="put it into the page, print nothing")
    parser.add_argument("--page", type=Path, default=HERE.parent / "README.md")
    options = parser.parse_args(arguments)
    if not options.file.exists():
        raise SystemExit(f"{options.file} is not there: run `make bench` first")
    made = figures(options.file)
    if not options.write:
        print(made)
        return
    text = options.page.read_text(encoding="utf-8")
    options.page.write_text(replaced(text, made), encoding="utf-8")
    print(f"written: {options.page}, from {options.file}")


if __name__ == "__main__":
    main()
