"""What a pull would move: the same plan and the same checks of the target, and nothing written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from imgfmt.digest import Digest
from transfer.catalog import Catalog, MemberContent
from transfer.config import TransferConfig
from transfer.plan import chunk_table, plan_reads
from transfer.pull import check_names, choose_image, choose_members, n_files, unpacked_bytes
from transfer.pulling.resume import chunks_there
from transfer.pulling.staging import Staging
from transfer.separation import check_target
from transfer.threads import Threads


@dataclass(frozen=True, slots=True)
class PullPlan:
    """What a pull would do now. `digest` is the image's own, where variants were asked for.

    `logical_bytes` counts holes, `zero_bytes` are those holes: they are not moved. `present_bytes`
    are in chunks that an earlier pull left verified. The rest is moved: `chunks` of `plain_bytes`,
    by `requests` ranged reads of `packs` packs, `fetch_bytes` in all.
    """

    digest: Digest
    logical_bytes: int
    zero_bytes: int
    files: int
    present_bytes: int
    chunks: int
    plain_bytes: int
    packs: int
    requests: int
    fetch_bytes: int


async def plan_pull(
    catalog: Catalog,
    digest: Digest,
    target: str,
    *,
    member: str | None = None,
    config: TransferConfig,
    facts: Mapping[str, str],
    resume: bool = False,
) -> PullPlan:
    """What `transfer.pull.pull` with these arguments would move.

    Raises what the pull would raise before it reads a pack: about the image, the target and the
    space there. Takes no lock, so a pull to the same target may be under way; what its journal has
    counts as present. Chunks that an earlier pull left before a restart count too, though the pull
    reads them again first.
    """
    digest, image = await choose_image(catalog, digest, facts)
    members = choose_members(image, digest, member)
    contents = [await catalog.content(m.tree) for m in members]
    with Threads("plan", 1) as threads:
        await threads.run(check_target, catalog.store, target)
        return await threads.run(
            _plan, catalog.record.page_bytes, contents, Staging(target, digest), digest, config,
            resume=resume,
        )  # fmt: skip


def _plan(
    page_bytes: int,
    contents: Sequence[MemberContent],
    staging: Staging,
    digest: Digest,
    config: TransferConfig,
    *,
    resume: bool,
) -> PullPlan:
    trees = [content.tree for content in contents]
    table = chunk_table([(content.tree, content.placement) for content in contents], page_bytes)
    done = np.zeros(len(table), np.bool_)
    if resume:
        done |= chunks_there(staging, trees)
    present_bytes = int(table.plain_bytes[done].sum(dtype=np.uint64))
    check_names(staging, trees)
    staging.check(max(0, unpacked_bytes(trees) - present_bytes), keep=resume)
    plan = plan_reads(table, np.flatnonzero(~done), span_bytes=config.block_bytes)
    return PullPlan(
        digest=digest,
        logical_bytes=sum(tree.logical_bytes for tree in trees),
        zero_bytes=sum(tree.zero_bytes for tree in trees),
        files=n_files(trees),
        present_bytes=present_bytes,
        chunks=plan.n_chunks,
        plain_bytes=plan.plain_bytes,
        packs=len(np.unique(table.pack[plan.numbers])),
        requests=len(plan),
        fetch_bytes=int(plan.op_bytes.sum(dtype=np.uint64)),
    )
