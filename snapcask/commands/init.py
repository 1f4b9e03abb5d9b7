"""`snapcask init`: create a store."""

from __future__ import annotations

import click

from snapcask.commands.options import byte_size, json_option, quiet_option


@click.command()
@click.argument("store")
@click.option(
    "--page-bytes", type=byte_size, metavar="SIZE",
    help="Page size that new trees are cut at: 4KiB, 16KiB or 64KiB.  [default: 4KiB]",
)  # fmt: skip
@click.option(
    "--pack-bytes", type=byte_size, metavar="SIZE",
    help="Where a pack is closed.  [default: 128MiB]",
)  # fmt: skip
@click.option(
    "--codec", type=click.Choice(["raw", "zstd", "auto"]),
    help="How new chunks are stored; auto is zstd where a sample gains 1.4 times.  [default: raw in"
    " a directory, auto in a bucket]",
)  # fmt: skip
@click.option(
    "--allow-non-empty", is_flag=True,
    help="Make STORE a store although it holds other things, which stay.",
)  # fmt: skip
@json_option
@quiet_option
def command(
    store: str,
    page_bytes: int | None,
    pack_bytes: int | None,
    codec: str | None,
    allow_non_empty: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Make the directory or bucket STORE a store; a directory need not exist.

    How trees are cut is recorded and stays. What is a store already, lies in one or is not empty is
    refused.
    """
    from snapcask import api, render

    record = api.init_store(
        store,
        page_bytes=page_bytes,
        pack_bytes=pack_bytes,
        codec=codec,
        allow_non_empty=allow_non_empty,
    )
    if as_json:
        document = {
            "store": store,
            "uuid": record.uuid.hex(),
            "page_bytes": record.page_bytes,
            "pack_bytes": record.pack_bytes,
            "codec": record.codec.value,
        }
        render.print_json(document)
    elif not quiet:
        page, pack = map(render.human_bytes, (record.page_bytes, record.pack_bytes))
        print(
            f"{render.one_line(store)} is a store now: pages of {page}, packs of {pack},"
            f" codec {record.codec}"
        )
