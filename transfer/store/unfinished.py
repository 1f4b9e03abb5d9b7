"""Which keys a writer that was killed may have left unfinished. Nothing else is ever swept away."""

from __future__ import annotations

import re

from imgfmt import layout

_OURS = re.compile(re.escape(layout.TMP) + r"([0-9a-f]{32}|(probe|doctor)-[0-9a-z-]+)")
_IN_PARTS = (layout.PACKS, layout.TREES, layout.PLACEMENTS, layout.INDEX)


def is_temporary(key: str) -> bool:
    """Whether this is a name under `tmp/` that writers, `init` or `doctor` give."""
    return _OURS.fullmatch(key) is not None


def is_in_parts(key: str) -> bool:
    """Whether an object of this key may have been begun as an upload of parts by a writer."""
    return key.startswith(_IN_PARTS)
