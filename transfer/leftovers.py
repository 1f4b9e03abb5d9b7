"""What writers that were killed leave: unfinished files, and uploads that nobody completes.

Neither has a key that anything could refer to, so they are in no collection's way; they only cost
space. A writer at work has begun what it writes after its lease.
"""

from __future__ import annotations

import contextlib
import logging

from imgfmt.errors import ImageError
from transfer.catalog import Catalog
from transfer.leases import WriterLease, live_leases
from transfer.store.base import Sweepable

_SECOND_NS = 1_000_000_000

_log = logging.getLogger(__name__)


async def remove_leftovers(catalog: Catalog, lease: WriterLease) -> int:
    """Remove what no writer at work can have begun; returns how many things that were.

    That is what is older than the longest lease, and than every lease that is not over, by the
    store's clock, which our own `lease` tells. Where the store does not let us, it stays.
    """
    store = catalog.store
    if not isinstance(store, Sweepable):
        return 0
    with contextlib.suppress(ImageError):
        begun = await store.unfinished_since_ns()
        if not begun:
            return 0
        facts = await store.facts(lease.key)
        if facts is None:
            return 0
        now_ns = facts.written_ns
        live = [one.begun_ns for one in await live_leases(catalog, now_ns)]
        before_ns = min([now_ns - catalog.record.lease_ttl_s * _SECOND_NS, *live])
        if min(begun) >= before_ns:
            return 0
        n_removed = await store.remove_unfinished(before_ns)
        _log.info("%d unfinished objects of killed writers were removed", n_removed)
        return n_removed
    return 0
