"""How `snapcask inspect` shows what it found: documents for programs, lines for people."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from typing import Any

from imgfmt.criu import CriuSummary
from imgfmt.digest import Digest
from imgfmt.image import Variants
from imgfmt.tree import EntryType
from snapcask.render import facts, human_bytes, one_line, path_fields, share, table
from transfer.inspect import (
    ContentFacts,
    DirectoryReport,
    EntryFacts,
    ImageFacts,
    MemberFacts,
    summarise_types,
)
from transfer.oserrors import printable

N_LARGEST = 20

_TYPE_BITS = {
    EntryType.DIRECTORY: stat.S_IFDIR,
    EntryType.FILE: stat.S_IFREG,
    EntryType.SYMLINK: stat.S_IFLNK,
}

Stored = ImageFacts | tuple[Digest, Variants]


def directory_document(path: str, report: DirectoryReport) -> dict[str, Any]:
    """The JSON document for a directory."""
    return {
        "kind": "directory",
        **path_fields(os.fsencode(path)),
        **_content_document(report.content),
        "entry_counts": summarise_types(report.entries),
        "entries": [_entry_document(entry) for entry in report.entries],
        "facts": report.facts,
        "criu": None if report.criu is None else _criu_document(report.criu),
        "warnings": report.warnings,
    }


def directory_lines(path: str, report: DirectoryReport, *, all_entries: bool) -> list[str]:
    """The text for a directory."""
    lines = facts(
        [
            ("directory", one_line(path)),
            *_content_facts(report.content),
            ("entries", _counted(report.entries)),
            *_criu_facts(report.criu),
            *sorted(report.facts.items()),
        ]
    )
    return [
        *lines,
        *_histogram(report.content),
        *_entry_table(report.entries, all_entries=all_entries),
    ]


def stored_document(reference: str, found: Stored) -> dict[str, Any]:
    """The JSON document for an image, or for variants."""
    if isinstance(found, tuple):
        digest, variants = found
        images = [
            {"digest": str(v.digest), "when": [str(rule) for rule in v.when]}
            for v in variants.images
        ]
        return {
            "kind": "variants",
            "reference": reference,
            "digest": str(digest),
            "images": images,
        }
    return {
        "kind": "image",
        "reference": reference,
        "digest": str(found.digest),
        **_content_document(found.content),
        "annotations": dict(found.image.annotations),
        "require": [str(rule) for rule in found.image.compat],
        "members": [_member_document(member) for member in found.members],
    }


def stored_lines(reference: str, found: Stored, *, all_entries: bool) -> list[str]:
    """The text for an image, or for variants."""
    if isinstance(found, tuple):
        digest, variants = found
        head = facts([("variants", reference), ("digest", str(digest))])
        return [*head, *(f"  {variant.digest}" for variant in variants.images)]
    lines = facts(
        [
            ("image", reference),
            ("digest", str(found.digest)),
            *_content_facts(found.content),
            *(("requires", str(rule)) for rule in found.image.compat),
            *(
                (f"annotation {printable(key)}", printable(value))
                for key, value in found.image.annotations
            ),
        ]
    )
    lines += _histogram(found.content)
    for member in found.members:
        lines += ["", *_member_lines(member, all_entries=all_entries)]
    return lines


def _member_document(found: MemberFacts) -> dict[str, Any]:
    return {
        "name": found.member.name,
        "role": found.member.role,
        "mount_path": found.member.mount_path,
        "tree": str(found.member.tree),
        "provenance": dict(found.member.provenance),
        **_content_document(found.content),
        "packs": found.packs,
        "runs": found.runs,
        "encoded_chunks": found.encoded_chunks,
        "stored_bytes": found.stored_bytes,
        "tree_bytes": found.tree_bytes,
        "placement_bytes": found.placement_bytes,
        "entry_counts": summarise_types(found.entries),
        "entries": [_entry_document(entry) for entry in found.entries],
    }


def _member_lines(found: MemberFacts, *, all_entries: bool) -> list[str]:
    member = found.member
    stored = (
        f"{human_bytes(found.stored_bytes)} in {found.packs} packs, {found.runs} runs;"
        f" tree {human_bytes(found.tree_bytes)}, placement {human_bytes(found.placement_bytes)}"
    )
    lines = facts(
        [
            ("member", member.name + (f" ({member.role})" if member.role else "")),
            *([("mount path", one_line(member.mount_path))] if member.mount_path else []),
            ("tree", str(member.tree)),
            *_content_facts(found.content),
            ("entries", _counted(found.entries)),
            ("stored", stored),
            *((printable(key), printable(value)) for key, value in member.provenance),
        ]
    )
    return [*lines, *_entry_table(found.entries, all_entries=all_entries)]


def _content_document(content: ContentFacts) -> dict[str, Any]:
    return {
        "logical_bytes": content.logical_bytes,
        "zero_bytes": content.zero_bytes,
        "chunks": content.chunks,
        "distinct_chunks": content.distinct_chunks,
        "distinct_bytes": content.distinct_bytes,
        "chunk_histogram": [
            {"from_bytes": b.from_bytes, "chunks": b.chunks, "plain_bytes": b.plain_bytes}
            for b in content.histogram
        ],
    }


def _content_facts(content: ContentFacts) -> list[tuple[str, str]]:
    whole, zero = content.logical_bytes, content.zero_bytes
    repeated = whole - zero - content.distinct_bytes
    return [
        ("size", human_bytes(whole)),
        ("zeros", f"{human_bytes(zero)} ({share(zero, whole)})"),
        ("repeated", f"{human_bytes(repeated)} ({share(repeated, whole)})"),
        ("chunks", f"{content.chunks}, {content.distinct_chunks} of them different"),
    ]


def _histogram(content: ContentFacts) -> list[str]:
    rows = [
        (
            f"from {human_bytes(bucket.from_bytes)}",
            str(bucket.chunks),
            human_bytes(bucket.plain_bytes),
        )
        for bucket in content.histogram
        if bucket.chunks
    ]
    return ["", *table(("CHUNKS OF", "NUMBER", "BYTES"), rows, right="rrr")] if rows else []


def _entry_document(entry: EntryFacts) -> dict[str, Any]:
    document: dict[str, Any] = {
        **path_fields(entry.path),
        "type": entry.type.name.lower(),
        "mode": f"{entry.mode:04o}",
        "size_bytes": entry.size_bytes,
        "data_bytes": entry.data_bytes,
        "chunks": entry.chunks,
    }
    if entry.type is EntryType.SYMLINK:
        document |= path_fields(entry.target, "target")
    return document


def _entry_table(entries: Sequence[EntryFacts], *, all_entries: bool) -> list[str]:
    shown = list(entries)
    if not all_entries:
        files = [entry for entry in entries if entry.type is EntryType.FILE]
        shown = sorted(files, key=lambda entry: (-entry.size_bytes, entry.path))[:N_LARGEST]
    rows = [
        (
            stat.filemode(_TYPE_BITS[entry.type] | entry.mode),
            human_bytes(entry.size_bytes),
            share(entry.size_bytes - entry.data_bytes, entry.size_bytes),
            one_line(entry.path),
        )
        for entry in shown
    ]
    lines = table(("MODE", "SIZE", "ZEROS", "PATH"), rows, right="rrr")
    left_out = len(entries) - len(shown)
    more = [f"and {left_out} smaller or other entries (--entries lists all)"] if left_out else []
    return ["", *lines, *more] if rows else more


def _counted(entries: Iterable[EntryFacts]) -> str:
    counts = summarise_types(entries)
    return f"{counts['file']} files, {counts['directory']} directories, {counts['symlink']} links"


def _criu_document(summary: CriuSummary) -> dict[str, Any]:
    return {
        "processes": [
            {"pid": p.pid, "ppid": p.ppid, "threads": len(p.threads)} for p in summary.processes
        ],
        "pagemap_entries": summary.pagemap_entries,
        "present_pages": summary.present_pages,
        "pages_files": summary.pages_files,
        "pages_bytes": summary.pages_bytes,
        "criu_version": summary.criu_version,
        "compressed": summary.compressed,
        "parent_chain": summary.parent_chain,
        "warnings": list(summary.warnings),
    }


def _criu_facts(summary: CriuSummary | None) -> list[tuple[str, str]]:
    if summary is None:
        return []
    n_threads = sum(len(process.threads) for process in summary.processes)
    version = summary.criu_version or "of unknown version"
    return [
        ("CRIU dump", f"CRIU {version}"),
        ("processes", f"{len(summary.processes)}, {n_threads} threads"),
        ("pages", f"{summary.pages_files} files, {human_bytes(summary.pages_bytes)}"),
        ("pagemap", f"{summary.pagemap_entries} entries, {summary.present_pages} pages"),
        ("compressed", "yes" if summary.compressed else "no"),
        ("parent dump", "needed" if summary.parent_chain else "none"),
    ]
