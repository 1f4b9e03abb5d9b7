"""Putting an image at a target and taking it away, so that a crash at any point can be mended.

Order: record, target, pins and mounts, check. Taking down goes the other way, the record last.
So whatever is mounted, pinned or made has a record, or is a mount whose source names it. All of it
blocks; calls for one publication never overlap. `csi.removal` takes down.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from csi.config import MountMode
from csi.errors import AlreadyExists, Unmet
from csi.mountable import check_modes, check_one_member, no_directory
from csi.ownership import AS_STORED, OPTIONS, Owner, make_layer
from csi.recognise import NO_TREE, is_complete, is_ours
from csi.records import MountRecord, PublicationRecord, Records, mount_name
from csi.removal import Removal
from csi.targets import KubeletFolder, TargetState, look, make_target
from imgfmt.digest import Digest
from imgfmt.errors import CorruptData, Internal
from imgfmt.image import Member
from transfer.cache.layout import CacheRoot, DomainPaths, digest_named
from transfer.cache.owners import read_mark
from transfer.cache.publish import mount_one
from transfer.mounts import (
    MountEntry,
    Options,
    bind_tree,
    mount_layers,
    mount_table,
    source_of,
)
from transfer.oserrors import printable

STATUS_FILE = "snapcask-status.json"
_CHECKED_NAMES = 8
_TURN_S = 1.0
"""How long a mount waits for its turn: one that hangs must not stop all others."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be seen at a target. With `status` that text alone, else `members` of the image.

    `target` is as the mount table has it.
    """

    volume_id: str
    target: str
    fingerprint: str
    mode: MountMode
    image: Digest
    paths: DomainPaths
    members: Sequence[Member]
    sub_path: str = ""
    owner: Owner = AS_STORED
    options: Options = ()
    status: bytes | None = None
    namespace: str | None = None
    pod: str | None = None

    def check(self) -> None:
        """Raise InvalidInput for what can't be together."""
        check_modes({self.mode}, as_stored=not self.options and self.owner == AS_STORED)
        check_one_member(self.sub_path, self.members)


class Mounter:
    """Mounts from one cache, below one kubelet folder.

    Volumes are mounted one at a time: the kernel has one lock for a mount table, and threads that
    fight for Python's cost half as much again. Nobody waits for a layer, or long for a slow disk.
    """

    def __init__(self, cache: CacheRoot, records: Records, kubelet: KubeletFolder) -> None:
        self._cache = cache
        self._removal = Removal(cache, records)
        self._turn = threading.Lock()
        self.records = records
        self.kubelet = kubelet

    def find(self, volume_id: str, target: str) -> PublicationRecord | None:
        """The record of a publication; None if it has none or a damaged one."""
        try:
            return self.records.read(mount_name(volume_id, target))
        except CorruptData:
            return None

    def is_published(self, volume_id: str, target: str, fingerprint: str) -> bool:
        """Whether just this is at the target. What a killed call left half done is taken down.

        Raises AlreadyExists if it was published otherwise, Unmet if someone else mounted there.
        """
        if look(target) is not TargetState.MOUNTED:
            return False
        name = mount_name(volume_id, target)
        record = self.find(volume_id, target)
        entries = list(mount_table(below=target))
        if not self._is_ours(name, record, target, entries):
            self._refuse_foreign(target, entries)
        if record is not None and record.fingerprint != fingerprint:
            raise AlreadyExists(
                f"volume {volume_id} is at {printable(target)} with other attributes; unpublish it"
                " first"
            )
        if record is not None and not is_complete(record, entries):
            self._removal.take_down(name, target, record, entries)
            return False
        return True

    def publish(self, plan: Plan) -> PublicationRecord:
        """Mount it and see that it is there; where this fails, nothing of it stays."""
        plan.check()
        in_turn = plan.owner == AS_STORED and self._turn.acquire(timeout=_TURN_S)
        try:
            return self._publish(plan)
        finally:
            if in_turn:
                self._turn.release()

    def _publish(self, plan: Plan) -> PublicationRecord:
        name = mount_name(plan.volume_id, plan.target)
        record = self._record(name, plan)
        self.records.write(record)
        try:
            make_target(plan.target)
        except BaseException:
            self.records.remove(name)
            raise
        try:
            self._mount_all(record, plan)
            self._check(record, plan)
        except BaseException:
            self._removal.take_down(name, plan.target, record, list(mount_table(below=plan.target)))
            raise
        return record

    def unpublish(self, volume_id: str, target: str) -> None:
        """Undo it, as far as there is anything. Raises Unmet if someone else mounted there."""
        name = mount_name(volume_id, target)
        record = self.find(volume_id, target)
        entries = list(mount_table(below=target))
        at_target = [entry for entry in entries if entry.directory == target]
        if at_target and not self._is_ours(name, record, target, entries):
            self._refuse_foreign(target, entries)
        self._removal.take_down(name, target, record, entries)

    def _record(self, name: str, plan: Plan) -> PublicationRecord:
        mounts = [MountRecord(name, "", NO_TREE)]
        if plan.status is None and len(plan.members) == 1:
            mounts = [MountRecord(name, "", plan.members[0].tree.hex)]
        elif plan.status is None:
            mounts += [
                MountRecord(f"{name}.m{i}", member.name.replace("/", "+"), member.tree.hex)
                for i, member in enumerate(plan.members)
            ]
        marks = [read_mark(plan.paths, member.tree) for member in plan.members]
        size = sum(mark.logical_bytes for mark in marks if mark is not None)
        return PublicationRecord(
            volume_id=plan.volume_id,
            target=plan.target,
            name=name,
            fingerprint=plan.fingerprint,
            mode=plan.mode,
            image=str(plan.image),
            domain=plan.paths.name,
            mounts=tuple(mounts),
            size_bytes=size if plan.status is None else len(plan.status),
            namespace=plan.namespace,
            pod=plan.pod,
        )

    def _mount_all(self, record: PublicationRecord, plan: Plan) -> None:
        for mount in record.mounts:
            directory = record.directory(mount)
            if mount.tree == NO_TREE:
                self._mount(self._own_folder(record, plan), mount, directory, plan, AS_STORED)
                continue
            tree = digest_named(mount.tree)
            assert tree is not None
            mount_one(
                self._cache,
                plan.paths,
                tree,
                directory,
                mount.name,
                mount=lambda folder, m=mount, d=directory: self._mount(  # type: ignore[misc]
                    _beneath(folder, plan.sub_path), m, d, plan, plan.owner
                ),
                in_table=plan.mode is not MountMode.BIND,
            )

    def _mount(
        self, folder: str, mount: MountRecord, directory: str, plan: Plan, owner: Owner
    ) -> None:
        if plan.mode is MountMode.BIND:
            bind_tree(folder, directory)
            return
        layers, options = [folder, self._cache.empty], list(plan.options)
        if owner != AS_STORED:
            layer = os.path.join(self.records.parts(mount.name.partition(".m")[0]), mount.name)
            make_layer(folder, layer, owner)
            layers.insert(0, layer)
            options += OPTIONS
        mount_layers(layers, source_of(mount.name, mount.tree), directory, options)

    def _own_folder(self, record: PublicationRecord, plan: Plan) -> str:
        """The folder below the members, or the one of an empty volume."""
        folder = os.path.join(self.records.parts(record.name), "root")
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder, mode=0o755)
        for mount in record.mounts[1:]:
            os.mkdir(os.path.join(folder, mount.below), 0o755)
        if plan.status is not None:
            path = os.path.join(folder, STATUS_FILE)
            with open(path, "wb") as file:
                file.write(plan.status)
            os.chmod(path, 0o444)
        os.chmod(folder, 0o755)
        plan.owner.apply(folder, os.lstat(folder))
        return folder

    def _check(self, record: PublicationRecord, plan: Plan) -> None:
        """Raise Internal unless each mount is there, read-only, and has what it should have."""
        for mount in record.mounts:
            directory = record.directory(mount)
            what = f"volume {record.volume_id} at {printable(directory)}"
            if look(directory) is not TargetState.MOUNTED:
                raise Internal(f"{what}: the kernel mounted nothing; it was undone")
            if not os.statvfs(directory).f_flag & os.ST_RDONLY:
                raise Internal(f"{what} is not read-only; it was undone")
            if mount.tree == NO_TREE:
                continue
            tree = digest_named(mount.tree)
            assert tree is not None
            wanted = _beneath(plan.paths.tree(tree), plan.sub_path)
            with os.scandir(wanted) as found:
                for entry in itertools.islice(found, _CHECKED_NAMES):
                    if not os.path.lexists(os.path.join(directory, entry.name)):
                        name = printable(entry.name)
                        raise Internal(f"{what} does not show {name}; it was undone")

    def reconcile(self) -> list[str]:
        """Take down what calls that were killed left behind; returns a line for each."""
        return self._removal.reconcile()

    def _is_ours(
        self,
        name: str,
        record: PublicationRecord | None,
        target: str,
        entries: Sequence[MountEntry],
    ) -> bool:
        if is_ours(name, record, target, entries):
            return True
        return record is None and self._removal.is_left(name, target, entries)

    def _refuse_foreign(self, target: str, entries: Sequence[MountEntry]) -> None:
        source = next((e.source for e in reversed(entries) if e.directory == target), "unknown")
        raise Unmet(
            f"target {printable(target)} is mounted already, by someone else"
            f" ({printable(source)}); unmount it"
        )


def _beneath(folder: str, sub_path: str) -> str:
    """A directory in a tree, reached without following a link. Raises NotFound."""
    at = folder
    for part in sub_path.split("/") if sub_path else ():
        at = os.path.join(at, part)
        with contextlib.suppress(OSError):
            if not os.path.islink(at) and os.path.isdir(at):
                continue
        raise no_directory(sub_path)
    return at
