"""The choice of the step to restore, and of the source of each rank's shard.

The path of a generation is the history that leads to it: its own steps, and each ancestor's steps up to the branch.

    generation 1:  0 ─ 1 ─ 2 ─ 3 ─ 4 ─ 5✗          a slot (origin g, step s) is on the path if s is at most
                               │                    the last step of g on it: (1, 3) is on the path, (1, 4) is not
    generation 2:              3 ─ 4 ─ 5 ─ 6

Invariant: a base and all its sources are on the path of the newest started generation. Origin generation, step and
digest together identify the content of a slot. The rules are in docs/design.md#restore. The model
`tests/model/step_protocol.py` contains them as `lineage`, `on_path` and `common`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from control_plane.core.observed.steps import NO_GENERATION, NO_STEP, CheckpointRecord, GenerationRecord, RefusedSource
from everstep.protocol.ids import FIRST_STEP, Generation, NodeId, Rank, Step
from everstep.protocol.plan import ObjectReference, ShardSource, SlotRecord, SlotReference

FARTHEST = ("local", "peer", "s3")
"""Kinds of sources, nearest first."""
UNBOUNDED = Step(2**62)

Path = Mapping[Generation, Step]
"""The history that leads to a generation: by origin generation, the last step that belongs to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """The available sources for a restore."""

    owners: Sequence[NodeId]
    """The node of each rank in the new generation, by rank."""
    inventories: Mapping[NodeId, tuple[SlotRecord, ...]]
    """Inventories of the nodes that have promised, as the nodes reported them with the promise."""
    path: Path
    checkpoints: tuple[CheckpointRecord, ...] = ()
    refused: Collection[RefusedSource] = ()
    committed: Step = NO_STEP
    """The newest step known to be committed on the path (`newest_committed`), or -1."""
    slot_count: int = 2
    """Number of slots that a holder has for each shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """The base of a new generation and its sources."""

    base_step: Step
    sources: tuple[tuple[ShardSource, ...], ...]
    """Sources by rank, best first. Every rank has an empty list if the base is 0."""
    keep: Mapping[NodeId, tuple[SlotReference, ...]]
    """Slots that a node must not overwrite before the base is committed, by node."""
    forgotten: tuple[Rank, ...] = ()
    """Ranks whose shard no node holds in memory."""

    @property
    def farthest(self) -> str | None:
        """The farthest kind of source that any rank uses, or None if the base is 0."""
        kinds = [sources[0].kind for sources in self.sources if sources]
        return max(kinds, key=FARTHEST.index) if kinds else None


def path_of(lineage: Iterable[GenerationRecord], generation: Generation) -> Path:
    """Return the path of a generation.

    The path includes all steps of the generation itself, and the steps of each ancestor up to the branching point.

    Args:
        lineage: all generations that have a plan.
        generation: the generation. 0 gives an empty path, because no rank ever ran.

    Returns:
        By generation, its last step on the path.
    """
    known = {record.generation: record for record in lineage}
    path: dict[Generation, Step] = {}
    last = UNBOUNDED
    while generation in known:
        path[generation] = last
        last = min(last, known[generation].base_step)
        generation = known[generation].parent
    return path


def newest_started(lineage: Iterable[GenerationRecord]) -> Generation:
    """Return the newest generation whose ranks may have run, or 0.

    This generation is the parent of the next one.
    """
    return max((record.generation for record in lineage if record.was_started), default=NO_GENERATION)


def is_on_path(path: Path, origin: Generation, step: Step) -> bool:
    """Return whether the state of `step` made by generation `origin` is on the path."""
    return step <= path.get(origin, NO_STEP)


def newest_committed(path: Path, recorded: Step, reported: Iterable[tuple[Generation, Step]]) -> Step:
    """Return the newest committed step that the control plane or a node has recorded.

    The control plane's own record can be too old, because agents report commits about once a second, and only while the
    control plane runs. Nodes that promised report the committed step C from their ranks' pages. Ranks capture a step
    above C only after their agents have received C, so every survivor of that generation reports C.

    Args:
        path: the path of the newest started generation.
        recorded: the control plane's own record.
        reported: generation and C of each report. A C off the path belongs to an abandoned branch and does not count.

    Returns:
        The step, or -1.
    """
    return max([recorded, *(step for generation, step in reported if is_on_path(path, generation, step))])


def choose(survey: Survey) -> Restore:
    """Return the newest step that every rank can get, with its sources.

    If no such step exists, the base is step 0, which needs no source. The job loop calls this function once all members
    have promised. Earlier, the loop calls it to check whether the restore needs a missing member at all.

    Args:
        survey: shards in memory and in S3 that the members can get.

    Returns:
        The base, its sources, and the slots that each node must keep.
    """
    ranks = [Rank(rank) for rank in range(len(survey.owners))]
    found = [_sources_by_step(survey, rank) for rank in ranks]
    common: set[Step] = set(found[0]).intersection(*found[1:]) if found else set()
    base = max(common, default=FIRST_STEP)
    sources = tuple(found[rank][base] for rank in ranks) if base > 0 else ((),) * len(ranks)
    return Restore(
        base_step=base,
        sources=sources,
        keep={node: _keep(survey, node, base) for node in survey.inventories},
        forgotten=tuple(
            rank for rank in ranks if all(source.kind == "s3" for sources in found[rank].values() for source in sources)
        ),
    )


def _sources_by_step(survey: Survey, rank: Rank) -> dict[Step, tuple[ShardSource, ...]]:
    """Return the sources of a rank's shard by step on the path.

    For each step, the sources are sorted: the rank's own node, other nodes, S3.
    """
    refused = {(item.is_object, item.origin_generation, item.step) for item in survey.refused if item.rank == rank}
    owner = survey.owners[rank]
    found: dict[Step, list[ShardSource]] = {}

    def usable(origin: Generation, step: Step, *, is_object: bool) -> bool:
        return step > 0 and is_on_path(survey.path, origin, step) and (is_object, origin, step) not in refused

    for node in sorted(survey.inventories, key=lambda node: (node != owner, node)):
        for slot in survey.inventories[node]:
            if slot.owner_rank == rank and usable(slot.origin_generation, slot.step, is_object=False):
                found.setdefault(slot.step, []).append(
                    ShardSource(
                        kind="local" if node == owner else "peer",
                        origin_generation=slot.origin_generation,
                        step=slot.step,
                        digest=slot.digest,
                        payload_bytes=slot.payload_bytes,
                        node_id=node,
                    )
                )
    for checkpoint in survey.checkpoints:
        if rank >= len(checkpoint.shards) or len(checkpoint.shards) != len(survey.owners):
            continue
        shard = checkpoint.shards[rank]
        if usable(shard.origin_generation, checkpoint.step, is_object=True):
            found.setdefault(checkpoint.step, []).append(
                ShardSource(
                    kind="s3",
                    origin_generation=shard.origin_generation,
                    step=checkpoint.step,
                    digest=bytes.fromhex(shard.payload_digest),
                    payload_bytes=shard.payload_bytes,
                    object=ObjectReference(bucket=checkpoint.bucket, key=shard.key),
                )
            )
    return {step: tuple(sources) for step, sources in found.items()}


def stored_step(survey: Survey, base: Step) -> Step:
    """Return the newest step that a complete checkpoint holds, or 0.

    Only checkpoints on the survey's path count, with a step of at most `base`. `base` is the step that `choose`
    returned.
    """
    leading = (
        checkpoint.step
        for checkpoint in survey.checkpoints
        if checkpoint.step <= base
        and all(is_on_path(survey.path, shard.origin_generation, checkpoint.step) for shard in checkpoint.shards)
    )
    return max(leading, default=FIRST_STEP)


def _keep(survey: Survey, node: NodeId, base: Step) -> tuple[SlotReference, ...]:
    """Return the slots that a node must not overwrite before the base is committed.

    These are the slots on the path up to the base. A node that does not hold the base of a shard needs one free slot to
    receive it. It fills its other slots first with the newest committed step, and then with the newest other steps.
    """
    kept: dict[Rank, list[SlotRecord]] = {}
    for slot in survey.inventories[node]:
        if slot.step <= base and is_on_path(survey.path, slot.origin_generation, slot.step):
            kept.setdefault(slot.owner_rank, []).append(slot)
    for slots in kept.values():
        slots.sort(key=lambda slot: (slot.step == survey.committed, slot.step), reverse=True)
        if base > 0 and all(slot.step != base for slot in slots):
            del slots[survey.slot_count - 1 :]
    return tuple(
        SlotReference(
            owner_rank=slot.owner_rank, origin_generation=slot.origin_generation, step=slot.step, digest=slot.digest
        )
        for rank in sorted(kept)
        for slot in sorted(kept[rank], key=lambda slot: slot.step)
    )


def farther(one: str | None, other: str | None) -> str | None:
    """Return the farther of two kinds of sources. None counts as the nearest kind."""
    known = [kind for kind in (one, other) if kind is not None]
    return max(known, key=FARTHEST.index) if known else None
