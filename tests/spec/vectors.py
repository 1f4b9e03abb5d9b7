"""The examples of SPEC.md, made from their stated inputs. Run as a script, it prints them.

A block of SPEC.md that is fenced with `vector` begins with the name of a function here and holds
what that function returns; `test_spec.py` compares them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from blake3 import blake3

from imgfmt import index, pack, placement
from imgfmt.chunking import MAX_CHUNK_BYTES, Cutter, Profile, constants, fingerprints, page_marks
from imgfmt.digest import Digest
from imgfmt.image import Image, Member
from imgfmt.reference import ReferenceRecord, TargetKind
from imgfmt.tree import EncodedTree, Entry, EntryType, FileContent, build_tree

PAGE = 4096
PACK_NAME = bytes(range(16))
CONTENT = b"hello"
MEAN_CHUNK_BYTES = 260 * 1024
PACK_BYTES = 128 * 1024 * 1024
RANGE_BYTES = 8 * 1024 * 1024


def chunking_constants() -> list[str]:
    """Four of the 58 constants."""
    return [f"c[{j}] = {constants()[j]:#018x}" for j in (0, 1, 56, 57)]


def chunking_fingerprints() -> list[str]:
    """Fingerprints of three pages of 4096 bytes."""
    pages = {
        "all bytes 0x00": bytes(PAGE),
        "all bytes 0xff": b"\xff" * PAGE,
        "byte i is i mod 251": bytes(i % 251 for i in range(PAGE)),
    }
    return [f"{what}: {fingerprints(raw, Profile())[0]:#018x}" for what, raw in pages.items()]


def chunking_file() -> bytes:
    """1,500,000 bytes of BLAKE3's extended output, 70,000 zero bytes, 300,001 more of it."""
    stream = blake3(b"snapcask page-cdc-1 file").digest(length=1_800_001)
    return stream[:1_500_000] + bytes(70_000) + stream[1_500_000:]


def chunking_cuts() -> list[str]:
    """Chunks and holes of `chunking_file` in file order, by first page and number of pages."""
    raw = chunking_file()
    cutter = Cutter(Profile(), len(raw))
    cuts = cutter.feed(page_marks(raw + bytes(-len(raw) % PAGE), Profile())), cutter.finish()
    runs = [("chunk", run) for c in cuts for run in c.chunks]
    runs += [("hole", run) for c in cuts for run in c.holes]
    assert all(run.pages * PAGE <= MAX_CHUNK_BYTES for kind, run in runs if kind == "chunk")
    ordered = sorted(runs, key=lambda item: item[1].start)
    return [f"{kind} page {run.start} pages {run.pages}" for kind, run in ordered]


def example_tree() -> EncodedTree:
    """A directory with the file `a` that holds `hello` and the symbolic link `b` to it."""
    digest = np.frombuffer(blake3(CONTENT).digest(), np.uint8).reshape(1, 32)
    ones = np.ones(1, np.uint32)
    content = FileContent(digest, ones, ones, np.zeros(1, np.uint64))
    entries = [
        Entry(0, b"", EntryType.DIRECTORY, 0o755, 0, 0, 1_700_000_000, 0, 0, 0),
        Entry(0, b"a", EntryType.FILE, 0o644, 0, 0, 1_700_000_000, 5, len(CONTENT), 1),
        Entry(0, b"b", EntryType.SYMLINK, 0o777, 0, 0, 1_700_000_000, 0, 1, 2, b"a"),
    ]
    return build_tree(entries, {1: content}, Profile())


def tree() -> list[str]:
    """The bytes of the example's tree and their digest."""
    encoded = example_tree()
    return [*_hex(b"".join(encoded.pieces)), f"digest {encoded.digest}"]


def image() -> list[str]:
    """The bytes of an image with that tree as its one member `main`."""
    raw = Image((Member("main", example_tree().digest),)).encode()
    return [*_hex(raw), f"digest {Digest(blake3(raw).digest())}"]


def example_pack() -> pack.PackTable:
    """The table of a pack that holds the chunk `hello`, raw."""
    names = np.frombuffer(blake3(CONTENT).digest(), np.uint8).reshape(1, 32)
    none4, none1 = np.zeros(0, np.uint32), np.zeros(0, np.uint8)
    length = np.array([len(CONTENT)], np.uint32)
    return pack.PackTable(PACK_NAME, PAGE, names, length, none4, none1, none4)


def pack_header() -> list[str]:
    """The first 32 bytes of the pack; zero bytes follow to the end of the page."""
    return _hex(pack.encode_header(PACK_NAME, PAGE)[:32])


def pack_table() -> list[str]:
    """The table, which begins at byte 8192: header 4096, chunk 5, zero bytes to the page's end."""
    return _hex(_tail()[:-64].rstrip(b"\0") + b"\0" * (-len(_tail()[:-64].rstrip(b"\0")) % 8))


def pack_footer() -> list[str]:
    """The last 64 bytes of the pack, which has 12288."""
    return _hex(_tail()[-64:])


def _tail() -> bytes:
    table = example_pack()
    return pack.encode_tail(table, table.payload_end)


def placement_example() -> list[str]:
    """The placement of the tree."""
    table = example_pack()
    one = np.zeros(1, np.uint32)
    names = np.frombuffer(PACK_NAME, np.uint8).reshape(1, 16)
    placed = placement.build(
        example_tree().digest, names, one, table.offsets, table.stored_bytes, one, table.names, PAGE
    )
    return _hex(b"".join(placement.encode(placed)))


def index_segment() -> list[str]:
    """The index segment of the pack."""
    return _hex(b"".join(index.encode(index.build([example_pack()]))))


def reference() -> list[str]:
    """The first generation of `demo:v1`, pointing to the image."""
    raw_image = Image((Member("main", example_tree().digest),)).encode()
    target = Digest(blake3(raw_image).digest())
    record = ReferenceRecord(
        "demo",
        "v1",
        TargetKind.IMAGE,
        target,
        bytes(range(16, 32)),
        1_700_000_000_000_000_000,
        "me",
    )
    return _hex(record.encode())


def cost() -> list[str]:
    """What the format costs beside the chunks, for unique incompressible data stored once."""
    rows = ["data", "chunks", "packs", "trees MB", "pack tables MB", "placements MB", "index MB"]
    lines = [" | ".join([*rows, "requests to push", "requests to pull"])]
    for name, data_bytes in (("100 GB", 10**11), ("1 TB", 10**12), ("1 PB", 10**15)):
        chunks, packs = data_bytes // MEAN_CHUNK_BYTES, -(-data_bytes // PACK_BYTES)
        trees, tables = 33 * chunks, 36 * chunks + (PAGE + 1024) * packs
        placements, segments = (24 + 12) * packs, 14 * chunks + 16 * packs
        megabytes = [f"{value / 1e6:,.1f}" for value in (trees, tables, placements, segments)]
        pushed, pulled = packs + packs // 8 + 4, -(-data_bytes // RANGE_BYTES) + 3
        counts = [f"{pushed:,}", f"{pulled:,}"]
        lines.append(" | ".join([name, f"{chunks:,}", f"{packs:,}", *megabytes, *counts]))
    return lines


def _hex(raw: bytes) -> list[str]:
    return [raw[i : i + 32].hex() for i in range(0, len(raw), 32)]


VECTORS: dict[str, Callable[[], list[str]]] = {
    "constants": chunking_constants,
    "fingerprints": chunking_fingerprints,
    "cuts": chunking_cuts,
    "tree": tree,
    "image": image,
    "pack-header": pack_header,
    "pack-table": pack_table,
    "pack-footer": pack_footer,
    "placement": placement_example,
    "index": index_segment,
    "reference": reference,
    "cost": cost,
}


def block(name: str) -> str:
    """The fenced block of one vector."""
    return "\n".join(["```vector", name, *VECTORS[name](), "```"])


if __name__ == "__main__":
    print("\n\n".join(block(name) for name in VECTORS))
