"""`snapcask doctor`: what a store and this machine can do, and what limits a transfer."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from snapcask.commands.options import json_option, store_option

if TYPE_CHECKING:
    from restore.device_paths import DevicePaths, Place
    from transfer.doctor import Diagnosis, Finding
    from transfer.store.base import Store


@click.command()
@store_option
@click.option(
    "--directory", metavar="DIR", default=".", show_default=True, help="Where pulls write."
)
@click.option(
    "--load-from", metavar="DIR", multiple=True,
    help="Where else loads to a GPU read files, such as a cache or a mounted image; several times.",
)  # fmt: skip
@json_option
def command(store: str, directory: str, load_from: tuple[str, ...], as_json: bool) -> None:
    """Check the store and this machine by using them, and say what limits a transfer.

    Looks at access, conditional writes, clock, range reads, throughput, unfinished uploads, local
    disk, memory and hashing. Writes 64 MiB to the store and removes them again. Where snapcask[gpu]
    is installed, it also tells for each GPU which disks it can read files from itself (GPUDirect),
    and why not from others: of DIR, a store that is a directory, and what --load-from names.
    """
    from snapcask.running import run

    found, devices = run(_diagnose(store, directory, load_from))
    _print(found, devices, as_json=as_json)
    if not found.healthy:
        sys.exit(_unhealthy())


async def _diagnose(
    url: str, directory: str, load_from: tuple[str, ...]
) -> tuple[Diagnosis, list[DevicePaths]]:
    from dataclasses import replace

    from transfer.doctor import diagnose
    from transfer.store.url import open_store
    from transfer.threads import Threads

    store = open_store(url)
    try:
        found = await diagnose(store, directory)
        with Threads("doctor", 1) as threads:
            places = await threads.run(_places, store, (directory, *load_from))
            devices, findings = await threads.run(_look_at_gpus, places)
    finally:
        store.close()
    return replace(found, findings=(*found.findings, *findings)), devices


def _places(store: Store, directories: tuple[str, ...]) -> list[Place]:
    """Where loads read files from; of a store, one of its packs is tried."""
    from glob import iglob
    from os.path import join

    from imgfmt.layout import PACKS
    from restore.device_paths import Place
    from transfer.store.posix import PosixStore

    places = [Place(name) for name in directories]
    if isinstance(store, PosixStore):
        pack = next(iglob(join(store.root, PACKS, "*", "*")), None)
        places += [Place(store.root, pack)] if pack is not None else []
    return places


def _look_at_gpus(places: list[Place]) -> tuple[list[DevicePaths], list[Finding]]:
    """What each GPU can read itself; a line of each, none where snapcask[gpu] is not installed."""
    from imgfmt.errors import Unsupported
    from restore.device_paths import paths_here
    from transfer.doctor import Finding, Health

    try:
        devices = paths_here(places) or []
    except Unsupported as error:
        return [], [Finding("gpu", Health.GOOD, str(error))]
    findings = []
    for device in devices:
        if device.problem:
            findings.append(Finding(device.device, Health.BAD, device.problem))
            continue
        by_reason: dict[str, list[str]] = {}
        for disk in device.disks:
            shown = f"{disk.directory} ({disk.filesystem})" if disk.filesystem else disk.directory
            by_reason.setdefault(disk.why_not_direct, []).append(shown)
        for why, shown_disks in by_reason.items():
            way = f"through page-locked host memory: {why}" if why else "by GPUDirect"
            detail = f"{device.name} gets files of {', '.join(shown_disks)} {way}"
            findings.append(Finding(device.device, Health.GOOD, detail))
    return devices, findings


def _unhealthy() -> int:
    from imgfmt.errors import ErrorKind
    from snapcask.exitcodes import exit_code_of

    return exit_code_of(ErrorKind.UNAVAILABLE)


def _print(found: Diagnosis, devices: list[DevicePaths], *, as_json: bool) -> None:
    from snapcask import render

    if as_json:
        document = {
            "healthy": found.healthy,
            "findings": [
                {"check": f.check, "health": f.health.value, "detail": f.detail}
                for f in found.findings
            ],
            "rates_gb_s": {name: round(rate, 3) for name, rate in found.rates_gb_s.items()},
            "limited_by": found.limited_by,
            "gpus": [_document(device) for device in devices],
        }
        render.print_json(document)
        return
    rows = [[f.health.value, f.check, render.sentence(f.detail)] for f in found.findings]
    render.print_lines(render.table((), rows))
    if found.limited_by is not None:
        rate = found.rates_gb_s[found.limited_by]
        print(f"a pull is limited by: {found.limited_by}, {rate:.2f} GB/s")


def _document(device: DevicePaths) -> dict[str, object]:
    return {
        "device": device.device,
        "name": device.name,
        "problem": device.problem,
        "disks": [
            {
                "directory": disk.directory,
                "filesystem": disk.filesystem,
                "gpudirect": not disk.why_not_direct,
                "why_not": disk.why_not_direct,
            }
            for disk in device.disks
        ],
    }
