"""`snapcask csi volumes`: the references of volumes, and those that nothing uses."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from imgfmt.errors import InvalidInput
from snapcask.commands.options import age, json_option, quiet_option, store_option

if TYPE_CHECKING:
    from csi.unused import Listed, VolumeReference

_CLOCK_NS = 60 * 1_000_000_000
"""How far clocks may differ."""


@click.command("volumes")
@store_option
@click.option(
    "--objects", metavar="FILE", multiple=True, type=click.Path(dir_okay=False, allow_dash=True),
    help="What `kubectl get persistentvolumes -o json` prints; - for standard input. Once for each"
    " cluster that uses the store.",
)  # fmt: skip
@click.option(
    "--snapshots", is_flag=True,
    help="FILE has the VolumeSnapshotContents too: `kubectl get"
    " persistentvolumes,volumesnapshotcontents -o json`.",
)  # fmt: skip
@click.option("--prune", is_flag=True, help="Remove the references that nothing uses.")
@click.option("--none-in-use", is_flag=True, help="Remove them even if FILE has none that is used.")
@click.option(
    "--older-than", "min_age_s", type=age, default="1d", show_default=True, metavar="AGE",
    help="Those that were younger when FILE was written stay: 1d, 12h; at least 2h.",
)  # fmt: skip
@click.option(
    "--driver", default="csi.snapcask.dev", show_default=True, metavar="NAME",
    help="Only what the driver of this name has made.",
)  # fmt: skip
@json_option
@quiet_option
def command(
    store: str,
    objects: tuple[str, ...],
    snapshots: bool,
    prune: bool,
    none_in_use: bool,
    min_age_s: int,
    driver: str,
    as_json: bool,
    quiet: bool,
) -> None:
    """List the references that keep images for volumes, and with --prune remove unused ones.

    CreateVolume makes such a reference and DeleteVolume removes it. One whose PersistentVolume was
    deleted without its driver stays, and keeps its image, until it is removed here.
    """
    from snapcask import render
    from snapcask.running import run

    if prune and not objects:
        raise click.UsageError("--prune needs --objects, to know what is in use")
    if list(objects).count("-") > 1:
        raise click.UsageError("standard input can be one list only")
    listed = [_read(path, snapshots=snapshots) for path in objects]
    found = run(_list(store, listed, driver, min_age_s, prune=prune, none_in_use=none_in_use))
    if as_json:
        render.print_json({"volumes": [_document(one) for one in found]})
    elif not quiet:
        header = ("REFERENCE", "IMAGE", "DIGEST", "AGE", "USE")
        now_ns = time.time_ns()
        rows = [_row(one, now_ns) for one in found]
        render.print_lines(render.table(header, rows, right="   r "))
    problems = [(one.seen.record.name, one.seen.problem) for one in found if one.seen.problem]
    if not quiet:
        render.warn(f"{name}: {problem}" for name, problem in problems)


def _read(path: str, *, snapshots: bool) -> Listed:
    from csi.unused import read_objects
    from transfer.oserrors import printable, translate

    what = "standard input" if path == "-" else printable(path)
    try:
        if path == "-":
            raw, time_ns = sys.stdin.buffer.read(), time.time_ns()
        else:
            with open(path, "rb") as file:
                raw, time_ns = file.read(), os.fstat(file.fileno()).st_mtime_ns
            if time_ns > time.time_ns() + _CLOCK_NS:
                raise InvalidInput(
                    f"{what} is of the future by its modification time; list the objects again"
                )
    except OSError as error:
        raise translate(error, what) from error
    return read_objects(raw, what, time_ns, snapshots=snapshots)


async def _list(
    store: str,
    listed: list[Listed],
    driver: str,
    min_age_s: int,
    *,
    prune: bool,
    none_in_use: bool,
) -> list[VolumeReference]:
    from csi.unused import list_volume_references, remove_unused
    from snapcask.stores import opened

    async with opened(store, write=prune) as catalog:
        found = await list_volume_references(catalog, listed, driver=driver, min_age_s=min_age_s)
        return await remove_unused(catalog, found, none_in_use=none_in_use) if prune else found


def _document(one: VolumeReference) -> dict[str, Any]:
    record = one.seen.record
    return {
        "reference": f"{record.name}:{record.tag}",
        "kind": "snapshot" if one.is_snapshot else "volume",
        "image": one.image,
        "digest": None if record.target is None else str(record.target),
        "time_ns": record.time_ns,
        "use": one.use.value,
        "problem": one.seen.problem,
    }


def _row(one: VolumeReference, now_ns: int) -> tuple[str, ...]:
    from snapcask.render import human_age

    record = one.seen.record
    return (
        f"{record.name}:{record.tag}",
        one.image or "-",
        record.target.short if record.target else "-",
        human_age((now_ns - record.time_ns) / 1e9),
        one.use.value,
    )
