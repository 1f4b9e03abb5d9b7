"""What the verbs that change a reference print."""

from __future__ import annotations

from typing import TYPE_CHECKING

from snapcask import render

if TYPE_CHECKING:
    from transfer.naming import Naming


def print_naming(naming: Naming, *, as_json: bool, quiet: bool) -> None:
    """Print what a reference points to now: the digest, and on a terminal what happened."""
    if as_json:
        document = {
            "reference": naming.reference,
            "digest": str(naming.target),
            "target_kind": naming.target_kind.value,
            "changed": naming.changed,
        }
        render.print_json(document)
        return
    print(naming.target)
    if not quiet and render.on_terminal():
        did = "points to this now" if naming.changed else "pointed to this before"
        print(f"{naming.reference} {did} ({naming.target_kind})")
