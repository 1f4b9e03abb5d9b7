"""`snapcask load`: bring tensors to a device, and say how fast each stage was."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from snapcask.commands import display
from snapcask.commands.options import (
    byte_size,
    facts_option,
    json_option,
    mismatch_options,
    optional_store_option,
    quiet_option,
)

if TYPE_CHECKING:
    from restore.load_job import LoadReport


@click.command()
@click.argument("source", metavar="REF|DIR")
@optional_store_option
@click.option(
    "--device", "devices", metavar="DEVICE", multiple=True, default=("cuda:0",), show_default=True,
    help="Where to load to: cuda:N, several times to load to each, or cpu.",
)  # fmt: skip
@click.option(
    "--cache", metavar="DIR", envvar="SNAPCASK_CACHE", show_envvar=True,
    default="/var/lib/snapcask", show_default=True,
    help="The cache of this node: REF is read there if it is complete there.",
)  # fmt: skip
@click.option("--no-cache", is_flag=True, help="Read REF from the store all the same.")
@click.option("--image", metavar="REF", help="Compare the bytes of DIR with this image.")
@click.option("--member", metavar="NAME", help="Member of the image, if it has several.")
@facts_option("A fact of the machine that the image is for, before what is found here.")
@mismatch_options
@click.option("--file", "files", metavar="PATTERN", multiple=True, help="Load these files only.")
@click.option(
    "--verify", type=click.Choice(["auto", "cpu", "device", "off"]), default="auto",
    show_default=True, help="Where bytes are compared with their digests.",
)  # fmt: skip
@click.option(
    "--max-pinned", "max_pinned_bytes", type=byte_size, metavar="SIZE",
    help="Limit of page-locked host memory.  [default: 160MiB]",
)  # fmt: skip
@click.option("--threads", "n_threads", type=int, metavar="N", help="Threads that read and verify.")
@click.option(
    "--gpudirect", is_flag=True, help="Let the device read files, where that is proven to work."
)
@json_option
@quiet_option
def command(
    source: str,
    store: str | None,
    devices: tuple[str, ...],
    cache: str,
    no_cache: bool,
    image: str | None,
    member: str | None,
    facts: tuple[tuple[str, str], ...],
    on_mismatch: str,
    override: tuple[str, ...],
    files: tuple[str, ...],
    verify: str,
    max_pinned_bytes: int | None,
    n_threads: int | None,
    gpudirect: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Load the tensors of an image or a directory to a device, and report GB/s by stage.

    A trial of `snapcask.load`: what was loaded is dropped at the end.
    """
    from snapcask import api_loading

    with display.progress(quiet=quiet) as progress:
        loaded = api_loading.load_replicas(
            source, devices=devices, store=store, cache=None if no_cache else cache, image=image,
            member=member, facts=dict(facts), on_mismatch=on_mismatch, override=override,
            files=files, verify=verify, max_pinned_bytes=max_pinned_bytes,
            n_threads=n_threads, gpudirect=gpudirect, progress=progress,
        )  # fmt: skip
    _print(loaded[0].report, devices, as_json=as_json, quiet=quiet)


def _print(report: LoadReport, devices: tuple[str, ...], *, as_json: bool, quiet: bool) -> None:
    from snapcask import render

    rates = stage_rates(report)
    if as_json:
        document = {
            "devices": list(devices),
            "tensors": report.tensors,
            "loaded_bytes": report.n_bytes,
            "read_bytes": report.read_bytes,
            "direct_bytes": report.direct_bytes,
            "gpudirect_bytes": report.gpudirect_bytes,
            "from_cache": report.from_cache,
            "verified": report.verified,
            "cpu_checked_bytes": report.cpu_checked_bytes,
            "device_checked_bytes": report.device_checked_bytes,
            "pinned_bytes": report.pinned_bytes,
            "threads": report.n_threads,
            "gb_per_s": {name: round(rate, 3) for name, rate in rates.items()},
            "seconds": render.rounded(report.seconds),
            "warnings": list(report.warnings),
        }
        render.print_json(document)
        return
    if not quiet:
        render.warn(report.warnings)
    shown = ", ".join(f"{name} {rate:.1f}" for name, rate in rates.items())
    checked = "no"
    if report.verified:
        on_device, on_cpu = report.device_checked_bytes, report.cpu_checked_bytes
        checked = (
            f"{render.human_bytes(on_cpu)} by the CPU, {render.human_bytes(on_device)} by GPUs"
        )
    pairs = [
        ("loaded", f"{report.tensors} tensors, {render.human_bytes(report.n_bytes)}"),
        ("from the node's cache", "yes" if report.from_cache else "no"),
        ("verified", checked),
        ("past the page cache", render.human_bytes(report.direct_bytes)),
        ("by GPUDirect", render.human_bytes(report.gpudirect_bytes)),
        ("GB/s", shown),
        ("time", render.seconds_text(report.seconds)),
    ]
    render.print_lines(render.facts(pairs))


def stage_rates(report: LoadReport) -> dict[str, float]:
    """GB/s of the whole, and what each stage would reach if its threads did nothing else.

    A stage that took no time has no rate.
    """
    rates = {"load": report.n_bytes / max(report.seconds["load"], 1e-9) / 1e9}
    n_threads = max(1, report.n_threads)
    amounts = {
        "read": (report.read_bytes, report.stages.read_s / n_threads),
        "hash": (report.cpu_checked_bytes, report.stages.hash_s / n_threads),
        "send": (report.n_bytes, report.stages.send_s),  # by one thread
    }
    for name, (n_bytes, seconds) in amounts.items():
        if n_bytes and seconds:
            rates[name] = n_bytes / seconds / 1e9
    return rates
