"""What a caller asks a push for, checked before a byte is read: hours may lie between."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from imgfmt.digest import DIGEST_BYTES, Digest
from imgfmt.errors import InvalidInput
from imgfmt.image import Image, Member, Rule, pairs
from imgfmt.reference import parse_reference
from transfer.catalog import Catalog
from transfer.pull import choose_image, choose_members
from transfer.push import DirectorySource, PushRequest
from transfer.pushing.provenance import DirectoryFacts, describe_directory
from transfer.threads import Threads

MAIN = "main"
"""Name of the member that a push of one directory makes."""

PathName = str | os.PathLike[str]

_NO_TREE = Digest(bytes(DIGEST_BYTES))


@dataclass(frozen=True, slots=True)
class MemberSource:
    """Where one member of an image comes from: either `directory`, or `image` in the store.

    Of an image with several members, `image_member` names one. `role` and `mount_path` (absolute)
    are recorded; of a stored member they replace what it has. `facts` are of a directory only.
    """

    directory: PathName | None = None
    image: str | None = None
    image_member: str | None = None
    role: str = ""
    mount_path: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.directory is None) == (self.image is None):
            raise InvalidInput("a member comes from a directory or from an image: give one of them")
        if self.image is None and self.image_member is not None:
            raise InvalidInput("image_member needs an image")
        if self.image is not None and self.facts:
            raise InvalidInput("the facts of a member that is stored already can't be changed")
        _check_facts(self.facts)


def parse_name_tag(text: str) -> tuple[str, str]:
    """Name and tag of a reference that is to be changed. Raises InvalidInput for a digest."""
    reference = parse_reference(text)
    if reference.name is None or reference.by_digest:
        raise InvalidInput(f"{text!r} can't be pointed anywhere; use NAME:TAG")
    if reference.name.startswith("_"):
        raise InvalidInput(f"{text!r}: names that begin with _ are reserved")
    return reference.name, reference.effective_tag


async def push_request(
    catalog: Catalog,
    *,
    directory: PathName | None,
    reference: str | None,
    members: Mapping[str, PathName | MemberSource],
    annotations: Mapping[str, str],
    require: Sequence[str],
    facts: Mapping[str, str],
    record_host: bool,
    skip_special: bool,
) -> tuple[PushRequest, list[str]]:
    """The request, and warnings about what its directories tell of themselves."""
    sources = _sources(directory, members)
    _check_facts(facts)
    described, host = await _describe(sources, record_host=record_host)
    stored = [
        await _stored(catalog, name, source)
        for name, source in sources.items()
        if source.image is not None
    ]
    request = PushRequest(
        [_from_directory(name, sources[name], host, described[name], facts) for name in described],
        stored,
        None if reference is None else parse_name_tag(reference),
        dict(annotations),
        tuple(sorted({Rule.parse(text) for text in require})),
        skip_special,
    )
    _check(request)
    return request, [text for found in described.values() for text in found.warnings]


def _sources(
    directory: PathName | None, members: Mapping[str, PathName | MemberSource]
) -> dict[str, MemberSource]:
    if (directory is None) == (not members):
        raise InvalidInput("a push takes one directory, or members: give one of them")
    if directory is not None:
        return {MAIN: MemberSource(directory)}
    return {
        name: source if isinstance(source, MemberSource) else MemberSource(source)
        for name, source in members.items()
    }


def _check_facts(facts: Mapping[str, str]) -> None:
    """Raise InvalidInput for facts that say nothing; flags of an engine may be none."""
    for fact, value in facts.items():
        if not fact or (not value and fact != "engine.flags"):
            raise InvalidInput(f"the fact {fact!r} is empty; give a value, or leave it out")


async def _describe(
    sources: Mapping[str, MemberSource], *, record_host: bool
) -> tuple[dict[str, DirectoryFacts], dict[str, str]]:
    """What the directories tell, and this machine if that is wanted."""
    described: dict[str, DirectoryFacts] = {}
    with Threads("facts", 1) as threads:
        for name, source in sources.items():
            if source.directory is not None:
                described[name] = await threads.run(describe_directory, os.fspath(source.directory))
        host = await threads.run(_host) if record_host else {}
    return described, host


def _host() -> dict[str, str]:
    """What is recorded of this machine. Blocks, for seconds even."""
    from restore.host_facts import MachineFacts

    return MachineFacts().recordable()


def _from_directory(
    name: str,
    source: MemberSource,
    host: Mapping[str, str],
    described: DirectoryFacts,
    facts: Mapping[str, str],
) -> DirectorySource:
    """Facts: those of the host, of the directory itself, given for all and for this one."""
    assert source.directory is not None
    known = {**_of_host(host, described.facts), **described.facts, **facts, **source.facts}
    path = os.fspath(source.directory)
    return DirectorySource(name, path, source.role, source.mount_path, known)


def _of_host(host: Mapping[str, str], described: Mapping[str, str]) -> dict[str, str]:
    """Facts of the host, without how many GPUs it has where a snapshot tells how many it used."""
    if described.keys() & {"gpu.count", "gpu.products"}:
        left_out = {"gpu.count", "gpu.products", "gpu.mig_profiles"}
        return {fact: value for fact, value in host.items() if fact not in left_out}
    return dict(host)


async def _stored(catalog: Catalog, name: str, source: MemberSource) -> Member:
    """The member of an image that is in the store, under its new name."""
    from restore.host_facts import MachineFacts

    assert source.image is not None
    digest = await catalog.resolve(parse_reference(source.image))
    digest, image = await choose_image(catalog, digest, MachineFacts())
    chosen = choose_members(image, digest, source.image_member)
    if len(chosen) > 1:
        names = ", ".join(member.name for member in chosen)
        raise InvalidInput(f"{source.image} has several members, name one of {names}")
    (member,) = chosen
    return Member(
        name,
        member.tree,
        source.role or member.role,
        source.mount_path or member.mount_path,
        member.provenance,
    )


def _check(request: PushRequest) -> None:
    """Raise InvalidInput for all that the image could not record, whatever its trees are."""
    planned = [
        Member(source.name, _NO_TREE, source.role, source.mount_path, pairs(source.provenance))
        for source in request.directories
    ]
    members = sorted([*planned, *request.stored], key=lambda member: member.name)
    Image(tuple(members), request.compat, pairs(request.annotations)).encode()
