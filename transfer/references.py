"""New states of references, and who writes them."""

from __future__ import annotations

import getpass
import os
import platform
import secrets
import time

from imgfmt.digest import Digest
from imgfmt.reference import ReferenceRecord, TargetKind
from transfer.store.base import Store, StoredReference


def next_record(
    name: str,
    tag: str,
    seen: StoredReference | None,
    kind: TargetKind,
    target: Digest | None,
    who: str | None = None,
) -> ReferenceRecord:
    """The record that follows `seen`, made now and by us unless `who` says more."""
    write_id, now_ns = secrets.token_bytes(16), time.time_ns()
    who = who or whoami()
    if seen is None:
        return ReferenceRecord(name, tag, kind, target, write_id, now_ns, who)
    return seen.record.replaced_by(kind, target, write_id, now_ns, who)


async def take_back(
    store: Store, name: str, tag: str, target: Digest, seen: StoredReference | None
) -> None:
    """Let a reference point to what it did when it was `seen`, if it points to `target` now."""
    now = await store.read_reference(name, tag)
    if now is not None and now.record.target == target:
        kind = seen.record.target_kind if seen else TargetKind.NONE
        before = seen.record.target if seen else None
        await store.change_reference(next_record(name, tag, now, kind, before), now)


def whoami() -> str:
    """The user and host that leases and references name."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{platform.node()}"
