"""Parsing NVIDIA's `manifest.yaml`: the plain part of YAML that its writer uses, and no more.

Every scalar is text but for null, so no number, date or truth value is guessed. Aliases, merge keys
and tags are refused: a few bytes of them can stand for gigabytes, or for themselves.
"""

from __future__ import annotations

from collections.abc import Mapping

import yaml

from imgfmt.errors import InvalidImage
from imgfmt.nvidia import MANIFEST_FILE

_PLAIN = frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("null", "str", "seq", "map"))


class _PlainLoader(yaml.SafeLoader):
    """A safe loader that knows null, text, lists and mappings."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, pattern) for tag, pattern in found if tag in _PLAIN]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    yaml_constructors = {  # noqa: RUF012
        tag: construct
        for tag, construct in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag in _PLAIN
    }

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose what comes next. Raises ComposerError for an alias."""
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(None, None, "it uses an alias", None)
        node: yaml.Node | None = super().compose_node(parent, index)
        return node


def parse_manifest(raw: bytes) -> Mapping[str, object]:
    """The mapping that a manifest is. Raises InvalidImage."""
    loader = None
    try:
        loader = _PlainLoader(raw)
        manifest = loader.get_single_data()
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InvalidImage(f"{MANIFEST_FILE} is not YAML of the plain kind: {first_line}") from None
    finally:
        if loader is not None:
            loader.dispose()
    if not isinstance(manifest, Mapping):
        raise InvalidImage(f"{MANIFEST_FILE} is not a mapping")
    return manifest
