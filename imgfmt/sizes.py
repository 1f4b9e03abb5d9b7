"""How large objects may be (SPEC.md section 12), told before they are read whole. Pure."""

from __future__ import annotations

from imgfmt import layout
from imgfmt.digest import Octets
from imgfmt.errors import InvalidImage
from imgfmt.wire import MAX_RECORD_BYTES, table_bytes

_TABLES = (layout.TREES, layout.PLACEMENTS, layout.INDEX, layout.DOOMED)


def check_size(key: str, size_bytes: int, beginning: Octets, what: str) -> None:
    """Raise InvalidImage if the object `key` can't have this size.

    `beginning` are its first bytes, at least `wire.MAX_RECORD_BYTES` + 16 of them where it has so
    many: the head of a table tells the length of the whole.
    """
    if key.startswith(_TABLES) and not key.endswith(".verdict"):
        claimed_bytes = table_bytes(beginning, what)
        if claimed_bytes != size_bytes:
            raise InvalidImage(f"{what} has {size_bytes} bytes, its head claims {claimed_bytes}")
    elif size_bytes > MAX_RECORD_BYTES:
        raise InvalidImage(
            f"{what} has {size_bytes} bytes, a record has at most {MAX_RECORD_BYTES}"
        )
