"""Chooses the step to restore (the base), and the sources of each rank's shard.

    generation 1:  0 ─ 1 ─ 2 ─ 3 ─ 4 ─ 5✗          a slot (origin g, step s) is on the path if s is at most
                               │                    the last step of g on it: (1, 3) is on the path, (1, 4) is not
    generation 2:              3 ─ 4 ─ 5 ─ 6

If the new generation has a different number of ranks than the base, or another job made the base, the restore is a
relayout: ranks must divide the state anew.

Invariant: a base and all its sources are on the path of the newest started generation. All sources of a base come from
generations with equal numbers of ranks. Origin generation, step and digest together identify the content of a slot
(docs/design.md#restore).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from control_plane.core import rebuilding
from control_plane.core.observed.steps import NO_GENERATION, CheckpointRecord, GenerationRecord, RefusedSource
from everstep.protocol.ids import FIRST_STEP, NO_STEP, Generation, NodeId, Rank, Step
from everstep.protocol.parity import Rebuild, holder_of, is_share
from everstep.protocol.plan import ObjectReference, Relayout, ShardSource, SlotRecord, SlotReference

FARTHEST = ("local", "peer", "parity", "s3")
"""Kinds of sources from which a rank can restore its shard, nearest first."""
UNBOUNDED = Step(2**62)

_Content = tuple[Rank, Generation, Step]
Path = Mapping[Generation, Step]
"""The last step that belongs to the history, for each origin generation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """All sources from which the members of a new generation could restore shards."""

    owners: Sequence[NodeId]
    """The node of each rank in the new generation, by rank."""
    inventories: Mapping[NodeId, tuple[SlotRecord, ...]]
    """The slots of each node that has promised to join the new generation."""
    path: Path
    worlds: Mapping[Generation, int]
    checkpoints: tuple[CheckpointRecord, ...] = ()
    refused: Collection[RefusedSource] = ()
    committed: Step = NO_STEP
    """The newest committed step on `path` (`newest_committed`), or -1."""
    slot_count: int = 2
    """Number of slots that a node reserves for each shard that it owns or holds."""
    former_owners: Mapping[Rank, NodeId] = field(default_factory=dict[Rank, NodeId])
    """The node of each rank in the newest generation with a plan."""
    supported: Step = UNBOUNDED
    """The highest step that two nodes name (`core.claims`). A later one needs the consent of each shard's owner."""
    limit: Step = UNBOUNDED
    """The highest step that the job can have reached, whatever one node claims."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """The step that a new generation restores, and where each shard of this step is."""

    base_step: Step
    sources: tuple[tuple[ShardSource, ...], ...]
    """The sources by rank, best first. Empty if the ranks start from step 0, or if `relayout` contains the sources."""
    keep: Mapping[NodeId, tuple[SlotReference, ...]]
    """Slots that a node must not overwrite before the generation commits the base, or any step in a relayout."""
    relayout: Relayout | None = None
    """Set if another number of ranks or another job made the base."""
    forgotten: tuple[Rank, ...] = ()
    """Ranks, of the generation that made the base, whose shards no node's memory has or can rebuild."""

    @property
    def farthest(self) -> str | None:
        """The slowest kind of source, by `FARTHEST`. None if the ranks start from step 0."""
        shards = self.sources if self.relayout is None else self.relayout.shards
        kinds = [sources[0].kind for sources in shards if sources]
        return max(kinds, key=FARTHEST.index) if kinds else None


def path_of(lineage: Iterable[GenerationRecord], generation: Generation) -> Path:
    """Return the last step of each generation on the path. Generation 0 has an empty path."""
    known = {record.generation: record for record in lineage}
    path: dict[Generation, Step] = {}
    last = UNBOUNDED
    while generation in known:
        path[generation] = last
        last = min(last, known[generation].base_step)
        generation = known[generation].parent
    return path


def worlds_of(lineage: Iterable[GenerationRecord]) -> Mapping[Generation, int]:
    """Return the number of ranks of each generation that has a plan."""
    return {record.generation: record.world_size for record in lineage}


def newest_started(lineage: Iterable[GenerationRecord]) -> Generation:
    """Return the newest generation whose ranks may have run, or 0. It is the parent of the next generation."""
    return max((record.generation for record in lineage if record.was_started), default=NO_GENERATION)


def is_on_path(path: Path, origin: Generation, step: Step) -> bool:
    """Return whether the state after `step`, made by generation `origin`, belongs to `path`."""
    return step <= path.get(origin, NO_STEP)


def newest_committed(path: Path, recorded: Step, reported: Iterable[tuple[Generation, Step]]) -> Step:
    """Return the newest committed step on the path, by the control plane's own record and the reports, or -1."""
    # The own record can be too old: agents report once a second, and only to a running control plane. An agent stores
    # the committed step C before its ranks may start the next snapshot, so each node with a snapshot after C also
    # reports C.
    return max([recorded, *(step for generation, step in reported if is_on_path(path, generation, step))])


def choose(survey: Survey) -> Restore:
    """Return the newest step for which every rank that made it has a source, or else step 0."""
    new_world = len(survey.owners)
    found = _sources_by_state(survey)
    states = [state for state, shards in found.items() if len(shards) == state.world_size]
    if not states:
        return Restore(
            base_step=FIRST_STEP,
            sources=((),) * new_world,
            keep={node: _keep(survey, node, FIRST_STEP) for node in survey.inventories},
            forgotten=_forgotten(found, new_world),
        )
    base = max(states, key=lambda state: (state.step, state.world_size == new_world))
    if base.world_size != new_world:
        base = _shared_state(survey, base, {state: found[state] for state in states})
    _add_rebuilds(survey, base, found[base])
    shards = tuple(tuple(found[base][Rank(rank)]) for rank in range(base.world_size))
    # A checkpoint of another job (NO_GENERATION) may divide the state differently among the same number of ranks.
    is_relayout = base.world_size != new_world or shards[0][0].origin_generation == NO_GENERATION
    return Restore(
        base_step=base.step,
        sources=((),) * new_world if is_relayout else shards,
        relayout=Relayout(world_size=base.world_size, shards=shards) if is_relayout else None,
        keep={node: _keep(survey, node, base.step, is_relayout=is_relayout) for node in survey.inventories},
        forgotten=_forgotten(found, base.world_size),
    )


@dataclass(frozen=True, slots=True)
class _State:
    step: Step
    world_size: int


def _shared_state(
    survey: Survey, newest: _State, found: Mapping[_State, Mapping[Rank, Sequence[ShardSource]]]
) -> _State:
    """Return the base of a relayout: the newest step with all parity shares in memory, or the committed step."""
    # Until the first commit, nodes keep only the shards and shares of the base. Without all shares, one more lost node
    # would lose the step.
    shares = {
        (holder_of(slot.owner_rank), slot.origin_generation, slot.step)
        for inventory in survey.inventories.values()
        for slot in inventory
        if is_share(slot.owner_rank)
    }
    if not shares:
        return newest

    def is_shared(state: _State) -> bool:
        return all(
            (rank, sources[0].origin_generation, state.step) in shares
            for rank, sources in found[state].items()
            if sources[0].kind in ("local", "peer")
        )

    states = (each for each in found if each.world_size == newest.world_size and each.step >= survey.committed)
    protected = (each for each in states if each.step == survey.committed or is_shared(each))
    return max(protected, key=lambda state: state.step, default=newest)


def _sources_by_state(survey: Survey) -> dict[_State, dict[Rank, list[ShardSource]]]:
    """Return all usable sources of each shard, by state and owner rank: own node, other nodes, parity, S3."""
    found: defaultdict[_State, defaultdict[Rank, list[ShardSource]]] = defaultdict(lambda: defaultdict(list))
    new_world, usable = len(survey.owners), _usable(survey)
    slots = _usable_slots(survey)
    for node, slot in slots:
        rank, world_size = slot.owner_rank, survey.worlds.get(slot.origin_generation, 0)
        if not is_share(rank) and 0 <= rank < world_size:
            is_own = slot.origin_generation != NO_GENERATION
            is_local = is_own and world_size == new_world and node == survey.owners[rank]
            source = ShardSource(
                kind="local" if is_local else "peer",
                origin_generation=slot.origin_generation,
                step=slot.step,
                digest=slot.digest,
                payload_bytes=slot.payload_bytes,
                node_id=node,
            )
            sources = found[_State(slot.step, world_size)][rank]
            sources.insert(0 if is_local else len(sources), source)
    for (origin, step), rebuild in rebuilding.rebuilds(slots, survey.worlds):
        lost, world_size = rebuild.lost, survey.worlds[origin]
        if origin != NO_GENERATION and usable(lost.rank, origin, step, lost.digest, is_object=False):
            found[_State(step, world_size)][lost.rank].append(_parity_source(origin, step, rebuild))
    for checkpoint in survey.checkpoints:
        for shard in checkpoint.shards:
            digest = bytes.fromhex(shard.payload_digest)
            if usable(shard.rank, shard.origin_generation, checkpoint.step, digest, is_object=True):
                found[_State(checkpoint.step, len(checkpoint.shards))][shard.rank].append(
                    ShardSource(
                        kind="s3",
                        origin_generation=shard.origin_generation,
                        step=checkpoint.step,
                        digest=digest,
                        payload_bytes=shard.payload_bytes,
                        object=ObjectReference(bucket=checkpoint.bucket, key=shard.key),
                    )
                )
    return {state: dict(shards) for state, shards in found.items()}


def _usable(survey: Survey) -> Callable[..., bool]:
    """Return a function that returns whether a restore may use a copy: it is on the path and not refused."""
    refused = {(item.rank, item.is_object, item.origin_generation, item.step, item.digest) for item in survey.refused}

    def usable(rank: Rank, origin: Generation, step: Step, digest: bytes = b"", *, is_object: bool) -> bool:
        is_refused = any((rank, is_object, origin, step, each) in refused for each in (b"", digest))
        # The control plane itself has written the checkpoints in S3, and another job the initial one.
        is_possible = is_object or step <= survey.limit
        return step > 0 and is_possible and is_on_path(survey.path, origin, step) and not is_refused

    return usable


def _usable_slots(survey: Survey) -> list[tuple[NodeId, SlotRecord]]:
    usable = _usable(survey)
    slots = [
        (node, slot)
        for node in sorted(survey.inventories)
        for slot in survey.inventories[node]
        if usable(holder_of(slot.owner_rank), slot.origin_generation, slot.step, slot.digest, is_object=False)
    ]
    copies: defaultdict[_Content, dict[NodeId, bytes]] = defaultdict(dict)
    for node, slot in slots:
        copies[_content(slot)][node] = slot.digest
    contents = {content: _believed(survey, content, copies[content]) for content in copies}
    return [
        (node, slot) for node, slot in slots if is_share(slot.owner_rank) or contents[_content(slot)] == slot.digest
    ]


def _content(slot: SlotRecord) -> _Content:
    return slot.owner_rank, slot.origin_generation, slot.step


def _believed(survey: Survey, content: _Content, copies: Mapping[NodeId, bytes]) -> bytes | None:
    """Return the digest of a shard whose copies may differ: its owner's, else that of most copies.

    None if the owner has promised but does not list a step that only one node names.
    """
    rank, origin, step = content
    owner = survey.former_owners.get(rank)
    if owner is not None and owner in survey.inventories and survey.worlds.get(origin) == len(survey.former_owners):
        if owner in copies:
            return copies[owner]
        if step > survey.supported:
            return None
    count = Counter(copies.values())
    return max(count, key=lambda digest: (count[digest], digest))


def _add_rebuilds(survey: Survey, base: _State, shards: Mapping[Rank, list[ShardSource]]) -> None:
    """Add rebuilds by parity, ahead of S3, for nodes whose own slot turns out to be damaged or lost."""
    contents = {(source.origin_generation, base.step) for sources in shards.values() for source in sources}
    for (origin, step), rebuild in rebuilding.rebuilds(_usable_slots(survey), survey.worlds, existing=contents):
        sources = shards.get(rebuild.lost.rank, [])
        is_source = any(source.kind in ("local", "peer") and source.digest == rebuild.lost.digest for source in sources)
        if is_source and (origin, step) in contents and survey.worlds[origin] == base.world_size:
            place = next((index for index, source in enumerate(sources) if source.kind == "s3"), len(sources))
            sources.insert(place, _parity_source(origin, step, rebuild))


def _parity_source(origin: Generation, step: Step, rebuild: Rebuild) -> ShardSource:
    return ShardSource(
        kind="parity",
        origin_generation=origin,
        step=step,
        digest=rebuild.lost.digest,
        payload_bytes=rebuild.lost.payload_bytes,
        rebuild=rebuild,
    )


def _forgotten(found: Mapping[_State, Mapping[Rank, Sequence[ShardSource]]], world_size: int) -> tuple[Rank, ...]:
    held = {
        rank
        for state, shards in found.items()
        if state.world_size == world_size
        for rank, sources in shards.items()
        if any(source.kind != "s3" for source in sources)
    }
    return tuple(rank for rank in map(Rank, range(world_size)) if rank not in held)


def stored(survey: Survey, base: Step) -> CheckpointRecord | None:
    """Return the newest complete checkpoint on the path that is not newer than the base, or None."""
    leading = (
        checkpoint
        for checkpoint in survey.checkpoints
        if checkpoint.step <= base
        and all(is_on_path(survey.path, shard.origin_generation, checkpoint.step) for shard in checkpoint.shards)
    )
    return max(leading, key=lambda checkpoint: checkpoint.step, default=None)


def _keep(survey: Survey, node: NodeId, base: Step, *, is_relayout: bool = False) -> tuple[SlotReference, ...]:
    """Return the slots that a node must not overwrite before the new generation commits."""
    kept: dict[Rank, list[SlotRecord]] = {}
    for slot in survey.inventories[node]:
        if slot.step <= base and is_on_path(survey.path, slot.origin_generation, slot.step):
            kept.setdefault(slot.owner_rank, []).append(slot)
    for slots in kept.values():
        slots.sort(
            key=lambda slot: (is_relayout and slot.step == base, slot.step == survey.committed, slot.step), reverse=True
        )
        # One slot must be free: for the missing shard of the base, or in a relayout for the first new step.
        if is_relayout or (base > 0 and all(slot.step != base for slot in slots)):
            del slots[survey.slot_count - 1 :]
    return tuple(
        SlotReference(
            owner_rank=slot.owner_rank, origin_generation=slot.origin_generation, step=slot.step, digest=slot.digest
        )
        for rank in sorted(kept)
        for slot in sorted(kept[rank], key=lambda slot: slot.step)
    )


def farther(one: str | None, other: str | None) -> str | None:
    """Return the farther of two kinds of sources by `FARTHEST`. None counts as the nearest kind."""
    known = [kind for kind in (one, other) if kind is not None]
    return max(known, key=FARTHEST.index) if known else None
