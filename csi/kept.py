"""Records of variants that this node has chosen among: with them a warm volume asks no store.

They are objects of a store under their own digests, read back with a check, and kept apart for
each security domain. Losing them costs a question to the store. All of it blocks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from imgfmt.digest import Digest, digest_of
from imgfmt.errors import ImageError
from imgfmt.image import Image, Variants, decode_image, decode_variants
from transfer.cache.durable import read_file, remove_half_written, replace_file


class KeptVariants:
    """Those below one folder."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def keep(
        self, domain: str, digest: Digest, variants: Variants, images: Mapping[Digest, Image]
    ) -> None:
        """Keep variants and those of their images that are there."""
        os.makedirs(os.path.join(self._folder, domain), mode=0o700, exist_ok=True)
        for of_image, image in images.items():
            self._write(domain, of_image, image.encode())
        self._write(domain, digest, variants.encode())

    def find(self, domain: str, digest: Digest) -> tuple[Variants, dict[Digest, Image]] | None:
        """What was kept of these variants, if anything was."""
        raw = self._read(domain, digest)
        if raw is None:
            return None
        images = {}
        try:
            variants = decode_variants(raw, f"variants {digest.short}")
            for variant in variants.images:
                found = self._read(domain, variant.digest)
                if found is not None:
                    images[variant.digest] = decode_image(found, f"image {variant.digest.short}")
        except ImageError:
            return None
        return variants, images

    def sweep(self) -> None:
        """Remove what writers that were killed left half written. Nobody may be writing."""
        for folder, _, _ in os.walk(self._folder):
            remove_half_written(folder)

    def _path(self, domain: str, digest: Digest) -> str:
        return os.path.join(self._folder, domain, digest.hex)

    def _write(self, domain: str, digest: Digest, raw: bytes) -> None:
        path = self._path(domain, digest)
        if read_file(path) != raw:
            replace_file(path, [raw], fsync=False)

    def _read(self, domain: str, digest: Digest) -> bytes | None:
        raw = read_file(self._path(domain, digest))
        return raw if raw is not None and digest_of(raw) == digest else None
