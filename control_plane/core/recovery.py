"""Which step to go on from, and where each rank's shard of it comes from.

    generation 1:  0 ─ 1 ─ 2 ─ 3 ─ 4 ─ 5✗          a slot (origin g, step s) is on the path of a generation iff s is not beyond the last
                               │                    step of g that the path still goes through: here (1, 3) is, (1, 4) is not
    generation 2:              3 ─ 4 ─ 5 ─ 6

Invariant: a base and all its sources lie on the path of the newest started generation; a slot is named by origin, step
and digest, never by step alone. The rules: docs/design.md#restore. `tests/model/step_protocol.py` has them as
`lineage`, `on_path` and `common`.
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
"""By origin generation: the last step of it that is still on the path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What is left to restore from."""

    owners: Sequence[NodeId]
    """The node of each rank in the new generation, by rank."""
    inventories: Mapping[NodeId, tuple[SlotRecord, ...]]
    """Frozen inventories of the nodes that promised."""
    path: Path
    checkpoints: tuple[CheckpointRecord, ...] = ()
    refused: Collection[RefusedSource] = ()
    committed: Step = NO_STEP
    """The newest step known to be committed on the path (`newest_committed`); -1: none is."""
    slot_count: int = 2
    """Slots per shard on a holder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """The base of a new generation."""

    base_step: Step
    sources: tuple[tuple[ShardSource, ...], ...]
    """By rank, best first; all empty when the base is 0."""
    keep: Mapping[NodeId, tuple[SlotReference, ...]]
    """By node: what must not be overwritten before the base is committed."""
    forgotten: tuple[Rank, ...] = ()
    """Ranks whose shard is in no node's memory any more."""

    @property
    def farthest(self) -> str | None:
        """The farthest kind of source that a rank has to use, or None when nothing is restored."""
        kinds = [sources[0].kind for sources in self.sources if sources]
        return max(kinds, key=FARTHEST.index) if kinds else None


def path_of(lineage: Iterable[GenerationRecord], generation: Generation) -> Path:
    """Return the path of a generation: its own steps without bound, its ancestors' up to where it branched off.

    Args:
        lineage: all generations that have a plan.
        generation: whose path; 0 gives an empty one (nothing ever ran).

    Returns:
        By generation, the last step of it that the path still goes through.
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
    """Return the newest generation whose ranks may have run, or 0: the parent of the next one."""
    return max((record.generation for record in lineage if record.was_started), default=NO_GENERATION)


def is_on_path(path: Path, origin: Generation, step: Step) -> bool:
    """Say whether the state of `step` that generation `origin` made belongs to the path's history."""
    return step <= path.get(origin, NO_STEP)


def newest_committed(path: Path, recorded: Step, reported: Iterable[tuple[Generation, Step]]) -> Step:
    """Return the newest committed step that the control plane or a node knows of.

    The control plane's own record lags: it hears of commits about once a second, and of none while it is down. The
    promised nodes report the C on their pages. A base above C was captured by ranks whose agents had heard C, so every
    survivor of that generation reports C.

    Args:
        path: of the newest started generation.
        recorded: the control plane's own record.
        reported: generation and C of each report. A C off the path was committed on a branch that was given up, and
            does not count.

    Returns:
        The step; -1: none is known.
    """
    return max([recorded, *(step for generation, step in reported if is_on_path(path, generation, step))])


def choose(survey: Survey) -> Restore:
    """Return the newest step that every rank can get from somewhere, with its sources; step 0, which needs none, if there is nothing else.

    Called by the job's decide once all members have promised, and before that to ask whether a member is needed at all.

    Args:
        survey: what is left.

    Returns:
        The base, its sources and what every node has to keep.
    """
    ranks = [Rank(rank) for rank in range(len(survey.owners))]
    found = [_sources_by_step(survey, rank) for rank in ranks]
    common = set.intersection(*(set(steps) for steps in found)) if found else set()
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
    """List where a rank's shard of each step on the path can come from: the owner's own node, peers, S3."""
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
    """Find the newest step on the way to the base that a complete checkpoint holds.

    Args:
        survey: of the plan to be made.
        base: that was chosen.

    Returns:
        The step; 0: none does.
    """
    leading = (
        checkpoint.step
        for checkpoint in survey.checkpoints
        if checkpoint.step <= base
        and all(is_on_path(survey.path, shard.origin_generation, checkpoint.step) for shard in checkpoint.shards)
    )
    return max(leading, default=FIRST_STEP)


def _keep(survey: Survey, node: NodeId, base: Step) -> tuple[SlotReference, ...]:
    """Return the slots that a node must not overwrite before the base is committed: all on the path up to the base.

    The node may lack a shard's base, and then needs one slot to receive it. It keeps the newest committed step, then
    the newest others.
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
    """Return the farther of two kinds of sources."""
    known = [kind for kind in (one, other) if kind is not None]
    return max(known, key=FARTHEST.index) if known else None
