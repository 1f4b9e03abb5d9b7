"""CRIU's image files: what a dump holds, read from its small files; and those a capture writes.

Reads only what snapcask reports. No page is looked at, and nothing here can restore a process.
An image file is one or two 32-bit magic numbers, then records: a 32-bit length and a protobuf
message. `pages-N.img` is the exception: no header, only pages in the order of the pagemap's
entries. CRIU writes its own version into none of the images: only `dump.log` tells it, and
`inventory.img` tells the version of the image format.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum, IntFlag

from imgfmt.digest import Octets
from imgfmt.errors import InvalidImage, InvalidInput
from imgfmt.protowire import Message, put_bytes, put_number

PAGE_BYTES = 4096
INVENTORY_FILE = "inventory.img"
PSTREE_FILE = "pstree.img"
CPUINFO_FILE = "cpuinfo.img"
LOG_FILE = "dump.log"
IMAGE_VERSION = 2
"""Of images whose pages are stored as they are; 3 came with compression."""

_PLUGIN_FIELD = 12
_U32 = struct.Struct("<I")
_ADDRESS_END = 1 << 64
_PAGE_SIZES = (PAGE_BYTES, 16384, 65536)
_PAGEMAP_NAME = re.compile(r"pagemap-(shmem-)?[0-9]+\.img")
_PAGES_NAME = re.compile(r"pages-[0-9]+\.img")
_LOG_VERSION = re.compile(rb"Version: ([0-9A-Za-z][!-'*-~]{0,63}) \(gitid ")
_BLOCK_FIELDS = (6, 7, 8)
"""Of a pagemap entry, for compressed pages: a message in 6, or plain numbers in early versions."""

_COMPRESSED = (
    "the pages are compressed (LZ4), so hardly any of them are found again in other snapshots and"
    " deduplication is lost: dump without --compress, the push compresses what is worth it"
)
_PARENT_CHAIN = (
    "some pages are in a parent dump, so this directory is not self-contained and can't be"
    " restored alone: dump once more without --prev-images-dir"
)
_PRE_DUMP = f"there is no {PSTREE_FILE}: a pre-dump or an unfinished dump, which can't be restored"


class Magic(IntEnum):
    """The numbers that open an image file."""

    COMMON = 0x54564319
    CORE = 0x55053847
    INVENTORY = 0x58313116
    PSTREE = 0x50273030
    PAGEMAP = 0x56084025
    CPUINFO = 0x61404013


class PageFlags(IntFlag):
    """Where the pages of a pagemap entry are. Bits that are not known here are kept."""

    PARENT = 1
    LAZY = 2
    PRESENT = 4
    PAYLOAD_ALIGNED = 8


@dataclass(frozen=True, slots=True)
class Inventory:
    """`inventory.img`. `run_id` names the run of CRIU that wrote the dump; empty if not told.

    `plugins` are those of CRIU that were at work, such as "cuda_plugin".
    """

    image_version: int = IMAGE_VERSION
    run_id: str = ""
    compressed: bool = False
    plugins: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Process:
    """One process of `pstree.img`, with ids as it saw them; `ppid` 0 is the root of the dump."""

    pid: int
    ppid: int
    pgid: int
    sid: int
    threads: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PagemapEntry:
    """`n_pages` pages from address `vaddr`. `compressed`: stored as LZ4 blocks, not as pages.

    Raises InvalidImage for what can't be a run of pages.
    """

    vaddr: int
    n_pages: int
    flags: PageFlags = PageFlags.PRESENT
    compressed: bool = False

    def __post_init__(self) -> None:
        if self.n_pages < 1 or self.vaddr < 0 or self.vaddr % PAGE_BYTES:
            raise InvalidImage(f"{self.n_pages} pages at {self.vaddr:#x} are not a run of pages")
        if self.end > _ADDRESS_END:
            raise InvalidImage(f"{self.n_pages} pages at {self.vaddr:#x} pass the last address")
        if self.present and self.in_parent:
            raise InvalidImage(f"pages at {self.vaddr:#x} are both present and in the parent")

    @property
    def end(self) -> int:
        """The address after the last page, if pages have 4 KiB; not above it if they are larger."""
        return self.vaddr + self.n_pages * PAGE_BYTES

    @property
    def present(self) -> bool:
        """Whether the pages file of this dump holds the pages."""
        return PageFlags.PRESENT in self.flags

    @property
    def in_parent(self) -> bool:
        """Whether the pages must be looked up in the parent dump."""
        return PageFlags.PARENT in self.flags


@dataclass(frozen=True, slots=True)
class Pagemap:
    """One `pagemap-*.img`, for the pages in `pages-<pages_id>.img`.

    Entries ascend and don't overlap, else InvalidImage. The pages file holds the pages of the
    present entries only, in this order and with nothing between them.
    """

    pages_id: int
    entries: tuple[PagemapEntry, ...]

    def __post_init__(self) -> None:
        end = 0
        for entry in self.entries:
            if entry.vaddr < end:
                raise InvalidImage(f"pages at {entry.vaddr:#x} overlap or are out of order")
            end = entry.end

    @property
    def present_pages(self) -> int:
        """How many pages the pages file holds for this pagemap."""
        return sum(entry.n_pages for entry in self.entries if entry.present)


@dataclass(frozen=True, slots=True)
class CriuSummary:
    """What a dump holds. `pages_bytes` is the size of its `pages_files` pages files together."""

    processes: tuple[Process, ...]
    pagemap_entries: int
    present_pages: int
    pages_files: int
    pages_bytes: int
    criu_version: str | None
    compressed: bool
    parent_chain: bool
    warnings: tuple[str, ...]


def is_pages_file(name: str) -> bool:
    """Whether a file of this name holds raw pages: count its bytes, don't read it whole."""
    return _PAGES_NAME.fullmatch(name) is not None


def is_summary_file(name: str) -> bool:
    """Whether `summarise` or `criu_facts.facts_of` use the content of a file of this name."""
    known = name in (INVENTORY_FILE, PSTREE_FILE, CPUINFO_FILE, LOG_FILE)
    return known or _PAGEMAP_NAME.fullmatch(name) is not None


def is_criu_directory(names: Iterable[str]) -> bool:
    """Whether a directory of these names is a dump: an inventory, and processes or pagemaps."""
    found = set(names)
    return INVENTORY_FILE in found and (
        PSTREE_FILE in found or any(_PAGEMAP_NAME.fullmatch(name) for name in found)
    )


def summarise(
    small_files: Mapping[str, Octets], *, pages_file_bytes: Mapping[str, int], has_parent_link: bool
) -> CriuSummary:
    """What the dump holds whose files of `is_summary_file` are given, by name.

    `pages_file_bytes` are the sizes of its pages files, by name; of `dump.log` the beginning is
    enough. Raises InvalidImage if a file is not what its name says or there is no inventory.
    """
    inventory = inventory_in(small_files)
    pagemaps = [
        decode_pagemap(raw, name)
        for name, raw in sorted(small_files.items())
        if _PAGEMAP_NAME.fullmatch(name)
    ]
    pstree = small_files.get(PSTREE_FILE)
    entries = [entry for pagemap in pagemaps for entry in pagemap.entries]
    compressed = inventory.compressed or any(entry.compressed for entry in entries)
    parent_chain = has_parent_link or any(entry.in_parent for entry in entries)
    log_version = _LOG_VERSION.search(small_files.get(LOG_FILE, b""))
    warnings = [
        *([_COMPRESSED] if compressed else _size_warnings(pagemaps, pages_file_bytes)),
        *([_PARENT_CHAIN] if parent_chain else []),
        *([_PRE_DUMP] if pstree is None else []),
    ]
    return CriuSummary(
        processes=() if pstree is None else decode_pstree(pstree),
        pagemap_entries=len(entries),
        present_pages=sum(pagemap.present_pages for pagemap in pagemaps),
        pages_files=len(pages_file_bytes),
        pages_bytes=sum(pages_file_bytes.values()),
        criu_version=None if log_version is None else log_version[1].decode("ascii"),
        compressed=compressed,
        parent_chain=parent_chain,
        warnings=tuple(warnings),
    )


def decode_inventory(raw: Octets) -> Inventory:
    """Read `inventory.img`. Raises InvalidImage."""
    with reading(INVENTORY_FILE):
        message = first(records(raw, Magic.INVENTORY))
        version = message.integer(1)
        compressed = version > IMAGE_VERSION or message.integer(15, 0) > 0
        return Inventory(version, message.text(13), compressed, _plugins(message.octets(12)))


def encode_inventory(inventory: Inventory) -> bytes:
    """The smallest `inventory.img` that says the same. Raises InvalidInput if compressed."""
    if inventory.compressed:
        raise InvalidInput("a dump of compressed pages can't be written")
    plugins = b"".join(put_bytes(_PLUGIN_FIELD, name.encode()) for name in inventory.plugins)
    message = put_number(1, inventory.image_version)
    if plugins:
        message += put_bytes(12, plugins)
    if inventory.run_id:
        text = inventory.run_id.encode()
        message += put_bytes(13, text)
    return _image([message], Magic.INVENTORY)


def decode_pstree(raw: Octets) -> tuple[Process, ...]:
    """Read `pstree.img`. Raises InvalidImage."""
    with reading(PSTREE_FILE):
        return tuple(
            Process(
                pid=message.integer(1),
                ppid=message.integer(2),
                pgid=message.integer(3),
                sid=message.integer(4),
                threads=message.integers(5),
            )
            for message in records(raw, Magic.COMMON, Magic.PSTREE)
        )


def encode_pstree(processes: Iterable[Process]) -> bytes:
    """`pstree.img` of these processes, parents first."""
    messages = []
    for one in processes:
        ids = (
            put_number(1, one.pid)
            + put_number(2, one.ppid)
            + put_number(3, one.pgid)
            + put_number(4, one.sid)
        )
        messages.append(ids + b"".join(put_number(5, thread) for thread in one.threads))
    return _image(messages, Magic.COMMON, Magic.PSTREE)


def decode_pagemap(raw: Octets, what: str) -> Pagemap:
    """Read one `pagemap-*.img`. Raises InvalidImage, naming `what`."""
    with reading(what):
        messages = records(raw, Magic.COMMON, Magic.PAGEMAP)
        head = first(messages)
        return Pagemap(head.integer(1), tuple(_pagemap_entry(message) for message in messages))


def encode_pagemap(pagemap: Pagemap) -> bytes:
    """`pagemap-*.img` as CRIU 4.2 writes it: the count of pages in field 5, and 0 in field 2.

    Raises InvalidInput for compressed pages: a pagemap does not hold the sizes of their blocks.
    """
    if any(entry.compressed for entry in pagemap.entries):
        raise InvalidInput("a pagemap of compressed pages can't be written")
    messages = [
        put_number(1, entry.vaddr)
        + put_number(2, 0)
        + put_number(4, entry.flags)
        + put_number(5, entry.n_pages)
        for entry in pagemap.entries
    ]
    return _image([put_number(1, pagemap.pages_id), *messages], Magic.COMMON, Magic.PAGEMAP)


def _plugins(raw: memoryview) -> tuple[str, ...]:
    """The names in the only field of a message; none where it is empty, as without plugins."""
    message = Message.parse(raw)
    names = (text for number in message.values for text in message.texts(number))
    return tuple(sorted(set(names)))


def _pagemap_entry(message: Message) -> PagemapEntry:
    # Before 4.2 the count of pages was in field 2 and field 5 did not exist; since then field 2
    # is written as 0. Before `flags`, what was not in the parent was present.
    n_pages = message.integer(5) if 5 in message.values else message.integer(2)
    flags = PageFlags(message.integer(4, 0))
    if message.integer(3, 0):
        flags |= PageFlags.PARENT
    elif 4 not in message.values:
        flags = PageFlags.PRESENT
    compressed = any(number in message.values for number in _BLOCK_FIELDS)
    return PagemapEntry(message.integer(1), n_pages, flags, compressed)


def inventory_in(small_files: Mapping[str, Octets]) -> Inventory:
    if INVENTORY_FILE not in small_files:
        raise InvalidImage(f"there is no {INVENTORY_FILE}: not a CRIU dump")
    return decode_inventory(small_files[INVENTORY_FILE])


def _size_warnings(pagemaps: Iterable[Pagemap], sizes_bytes: Mapping[str, int]) -> list[str]:
    n_pages: dict[str, int] = dict.fromkeys(sizes_bytes, 0)
    for pagemap in pagemaps:
        name = f"pages-{pagemap.pages_id}.img"
        n_pages[name] = n_pages.get(name, 0) + pagemap.present_pages
    return [
        f"{name} has {sizes_bytes.get(name, 0)} bytes, but the pagemaps describe {count} pages in"
        " it: the dump is damaged or unfinished"
        for name, count in sorted(n_pages.items())
        if sizes_bytes.get(name, 0) not in [count * page_bytes for page_bytes in _PAGE_SIZES]
    ]


@contextmanager
def reading(what: str) -> Iterator[None]:
    try:
        yield
    except InvalidImage as error:
        raise InvalidImage(f"{what}: {error}") from None


def records(raw: Octets, *magics: Magic) -> Iterator[Message]:
    """The records of an image file that opens with `magics`. Copies nothing."""
    view = memoryview(raw)
    at = len(magics) * _U32.size
    if view[:at] != b"".join(_U32.pack(magic) for magic in magics):
        raise InvalidImage(f"does not begin as a CRIU image of kind {magics[-1].name}")
    while at < len(view):
        if len(view) - at < _U32.size:
            raise InvalidImage(f"ends inside the length of a record at byte {at}")
        (size_bytes,) = _U32.unpack_from(view, at)
        at += _U32.size
        if size_bytes > len(view) - at:
            raise InvalidImage(f"a record at byte {at} has {size_bytes} bytes, more than are left")
        yield Message.parse(view[at : at + size_bytes])
        at += size_bytes


def first(messages: Iterator[Message]) -> Message:
    message = next(messages, None)
    if message is None:
        raise InvalidImage("has no records")
    return message


def _image(messages: Sequence[bytes], *magics: Magic) -> bytes:
    records = [_U32.pack(len(message)) + message for message in messages]
    return b"".join([*(_U32.pack(magic) for magic in magics), *records])
