"""`snapcask diff`: show how two images differ, and what they share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from snapcask.commands.options import facts_option, json_option, store_option

if TYPE_CHECKING:
    from transfer.compare import Comparison, EntryChange

_SIGNS = {"added": "+", "removed": "-", "content": "M", "metadata": "m"}


@click.command()
@click.argument("before", metavar="A")
@click.argument("after", metavar="B")
@store_option
@facts_option("A fact of the machine, to choose among variants.")
@json_option
def command(
    before: str, after: str, store: str, facts: tuple[tuple[str, str], ...], as_json: bool
) -> None:
    """Show which files differ between the images A and B, and how many bytes they share.

    + is only in B, - only in A, M has other content, m differs in mode, owner, time or attributes.
    """
    from snapcask import render
    from snapcask.running import run

    found = run(_compare(before, after, store, dict(facts)))
    if as_json:
        render.print_json(_document(found))
    else:
        render.print_lines(_lines(found))


async def _compare(before: str, after: str, store: str, facts: dict[str, str]) -> Comparison:
    from imgfmt.reference import parse_reference
    from restore.host_facts import MachineFacts
    from snapcask.stores import opened
    from transfer.compare import compare
    from transfer.pull import choose_image

    here = MachineFacts(facts)
    async with opened(store) as catalog:
        one, other = [
            await choose_image(catalog, await catalog.resolve(parse_reference(text)), here)
            for text in (before, after)
        ]
        return await compare(catalog, one, other)


def _document(found: Comparison) -> dict[str, Any]:
    from snapcask.render import path_fields

    return {
        "before": str(found.before),
        "after": str(found.after),
        "shared_bytes": found.shared_bytes,
        "only_before_bytes": found.only_before_bytes,
        "only_after_bytes": found.only_after_bytes,
        "same_profile": found.same_profile,
        "unchanged": found.unchanged,
        "changes": [
            {
                "member": change.member,
                **path_fields(change.path),
                "change": change.change.value,
                "before_bytes": change.before_bytes,
                "after_bytes": change.after_bytes,
            }
            for change in found.changes
        ],
    }


def _lines(found: Comparison) -> list[str]:
    from snapcask.render import facts, human_bytes, share

    several = len({change.member for change in found.changes}) > 1
    lines = [_line(change, several=several) for change in found.changes]
    union = found.shared_bytes + found.only_before_bytes + found.only_after_bytes
    sums = (
        ("shared", found.shared_bytes),
        ("only in A", found.only_before_bytes),
        ("only in B", found.only_after_bytes),
    )
    lines += facts((name, f"{human_bytes(n)} ({share(n, union)})") for name, n in sums)
    if not found.same_profile:
        lines.append("They were cut by different profiles: only small files can be shared.")
    return lines


def _line(change: EntryChange, *, several: bool) -> str:
    from snapcask.render import human_bytes, one_line

    sizes = [human_bytes(n) for n in (change.before_bytes, change.after_bytes) if n is not None]
    if len(set(sizes)) == 1:
        del sizes[1:]
    path = f"{change.member}: {one_line(change.path)}" if several else one_line(change.path)
    return f"{_SIGNS[change.change]} {path}" + (f" ({' -> '.join(sizes)})" if sizes else "")
