"""Taking publications down: whole ones, and what calls that were killed left of theirs.

Works from the record and the mount table, whichever of them is there. All of it blocks.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable, Sequence

from csi.recognise import below_target, is_bind, is_complete, is_left_bind, is_overlay
from csi.records import PublicationRecord, Records
from csi.targets import remove_target
from imgfmt.errors import Conflict, CorruptData, ImageError, NotFound
from transfer.cache.durable import remove_half_written
from transfer.cache.layout import CacheRoot, DomainPaths, digest_named
from transfer.cache.usage import MOUNT_PIN, remove_pin
from transfer.mounts import MountEntry, mount_table, unmount

_BUSY_TRIES = 20
_BUSY_PAUSE_S = 0.05


class Removal:
    """Takes down publications of one cache."""

    def __init__(self, cache: CacheRoot, records: Records) -> None:
        self._cache = cache
        self._records = records

    def take_down(
        self,
        name: str,
        target: str,
        record: PublicationRecord | None,
        entries: Sequence[MountEntry],
    ) -> None:
        """Unmount, unpin and remove all of a publication, then its record."""
        pins = {(m.name, m.tree) for m in record.mounts} if record else self._pins_of(name)
        ours = [
            entry
            for entry in entries
            if is_overlay(entry, name)
            or is_bind(entry, record)
            or (record is None and is_left_bind(entry, name, pins))
        ]
        for entry in reversed(ours):
            _unmount(entry.directory)
        for entry in ours:
            if is_overlay(entry, name):
                _, _, volume, tree = entry.source.split(":", 3)
                pins.add((volume, tree))
        self._unpin(pins, record.domain if record is not None else None)
        shutil.rmtree(self._records.parts(name), ignore_errors=True)
        remove_target(target)
        self._records.remove(name)

    def is_left(self, name: str, target: str, entries: Sequence[MountEntry]) -> bool:
        """Whether what is at a target is a bind mount of a publication whose record was lost."""
        upper = [entry for entry in entries if entry.directory == target][-1:]
        return any(is_left_bind(entry, name, self._pins_of(name)) for entry in upper)

    def _pins_of(self, name: str) -> set[tuple[str, str]]:
        """Mount names and trees of a publication, by its pins."""
        found = set()
        for paths, _ in self._cache.domains():
            for tree in paths.listed("pins"):
                for pin in os.listdir(paths.pins(tree)):
                    mounted = pin.removeprefix(MOUNT_PIN)
                    if pin != mounted and (mounted == name or mounted.startswith(f"{name}.m")):
                        found.add((mounted, tree.hex))
        return found

    def _unpin(self, pins: Iterable[tuple[str, str]], domain: str | None) -> None:
        if domain is not None:
            domains = [DomainPaths(self._cache.path, domain)]
        else:
            domains = [paths for paths, _ in self._cache.domains()]
        for volume, tree_name in pins:
            tree = digest_named(tree_name)
            for paths in domains if tree is not None else ():
                assert tree is not None
                remove_pin(paths, tree, MOUNT_PIN + volume)

    def _sweep_pins(self, record: PublicationRecord) -> None:
        """Remove pins of a publication that were only half written."""
        paths = DomainPaths(self._cache.path, record.domain)
        for mount in record.mounts:
            tree = digest_named(mount.tree)
            if tree is not None:
                remove_half_written(paths.pins(tree), MOUNT_PIN + mount.name)

    def reconcile(self) -> list[str]:
        """Take down what calls that were killed left behind; returns a line for each."""
        told: list[str] = []
        table = list(mount_table())
        self._records.sweep()
        for name in list(self._records.names()):
            try:
                record = self._records.read(name)
            except CorruptData as error:
                told.append(f"{error}")
                self._records.remove(name)
                continue
            if record is None:
                continue
            self._sweep_pins(record)
            entries = list(below_target(record.target, table))
            if is_complete(record, entries):
                continue
            try:
                self.take_down(name, record.target, record, entries)
                told.append(f"volume {name} was not published to its end; taken down")
            except ImageError as error:
                told.append(f"volume {name} can't be taken down: {error}")
        named = set(self._records.names())
        for name in self._records.part_names():
            used = (is_overlay(entry, name) or is_left_bind(entry, name, ()) for entry in table)
            if name not in named and not any(used):
                shutil.rmtree(self._records.parts(name), ignore_errors=True)
        return told


def _unmount(directory: str) -> None:
    for _ in range(_BUSY_TRIES):
        try:
            unmount(directory)
            return
        except NotFound:
            return
        except Conflict:
            time.sleep(_BUSY_PAUSE_S)
    unmount(directory, detach=True)
