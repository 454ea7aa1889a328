"""Decides what a failed load proves: that a source is wrong, or that the node which read it is at fault.

    one reader, wrong content              the node is a suspect; the control plane verifies the checkpoint
    one reader, twice out of reach         the node is a suspect
    two readers, wrong content             the source is wrong: plans no longer use it
    two readers, out of reach in two loads the source is lost: plans no longer use it
    the verifier then reads it intact      the reports no longer count, and the node is at fault

A *state* is a step of one generation, either in the memory of nodes or in S3. Two readers of two shards of one state
count together, because two faulty nodes at once are less likely than one wrong state.

Invariant: no source is wrong on the word of one reader.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from control_plane.core.observed.nodes import NodeObserved
from control_plane.core.observed.steps import CheckpointRecord, DoubtedCheckpoint, FailedRead, RefusedSource
from everstep.protocol.agent_messages import FaultCode, MemberPhase, MemberReport
from everstep.protocol.ids import Generation, NodeId, Rank, Step
from everstep.protocol.plan import GenerationPlan, ShardSource

SHARD_FAULTS = frozenset({FaultCode.SOURCE_MISMATCH, FaultCode.SOURCE_UNAVAILABLE})
"""Fault codes of a load that failed because of the shards, not because of memory, source archive or node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A node that alone failed to load some state."""

    node_id: NodeId
    step: Step
    is_mismatch: bool
    """False if the node could not reach the sources."""
    load_count: int
    is_refuted: bool
    sources: tuple[RefusedSource, ...]


def failed_reads(
    plan: GenerationPlan, reports: Mapping[NodeId, MemberReport], nodes: Mapping[NodeId, NodeObserved], now: float
) -> tuple[FailedRead, ...]:
    """Return the sources from which members failed to load shards."""
    found: dict[tuple[NodeId, RefusedSource], FailedRead] = {}
    for member in plan.nodes:
        report = reports.get(member.node_id)
        for rank, source, is_mismatch in () if report is None else _unread(plan, member.ranks, report):
            is_object = source.kind == "s3"
            # A source in memory counts if all serving nodes were connected. An outage of S3 proves nothing about a
            # checkpoint.
            if is_mismatch if is_object else _is_there(nodes, source):
                refused = RefusedSource(
                    rank=rank, origin_generation=source.origin_generation, step=source.step, is_object=is_object
                )
                found[member.node_id, refused] = FailedRead(
                    reader=member.node_id,
                    generation=plan.generation,
                    at=now,
                    source=refused,
                    is_mismatch=is_mismatch,
                    key="" if source.object is None else source.object.key,
                )
    return tuple(found.values())


def _unread(
    plan: GenerationPlan, ranks: Sequence[Rank], report: MemberReport
) -> Iterable[tuple[Rank, ShardSource, bool]]:
    """Yield each source from which one node failed to load a shard, and whether the content was wrong."""
    # A store that is out of reach proves nothing about any source.
    faults = [fault for fault in report.faults if fault.code in SHARD_FAULTS and fault.obstacle is None]
    if plan.relayout is not None:
        for fault in faults:
            if fault.shard is not None and fault.shard < plan.relayout.world_size:
                for source in plan.relayout.shards[fault.shard]:
                    yield fault.shard, source, fault.code == FaultCode.SOURCE_MISMATCH
    # Agents name the shard only in a relayout. Otherwise any shard of the node's ranks can be the wrong one.
    if report.phase is MemberPhase.LOAD_FAILED and faults:
        is_mismatch = any(fault.code == FaultCode.SOURCE_MISMATCH for fault in faults)
        for rank in ranks:
            for source in plan.ranks[rank].sources:
                yield rank, source, is_mismatch


def refused(reads: Collection[FailedRead], checkpoints: Iterable[CheckpointRecord]) -> tuple[RefusedSource, ...]:
    """Return the sources that two readers could not load. Plans do not use them."""
    states = (state for state in _by_state(_standing(reads, checkpoints)) if _agree(state))
    return tuple(dict.fromkeys(read.source for state in states for read in state))


def suspects(reads: Collection[FailedRead], checkpoints: Iterable[CheckpointRecord]) -> tuple[Suspect, ...]:
    """Return the nodes that alone failed to load some state, the newest step first."""
    disposition = _standing(reads, checkpoints)
    found = [
        Suspect(
            node_id=state[0].reader,
            step=state[0].source.step,
            is_mismatch=any(read.is_mismatch for read in state),
            load_count=len({read.generation for read in state}),
            is_refuted=any(read not in disposition for read in state),
            sources=tuple(dict.fromkeys(read.source for read in state)),
        )
        for state in _by_state(reads)
        if len({read.reader for read in state}) == 1
    ]
    return tuple(sorted(found, key=lambda each: each.step, reverse=True))


def doubted(reads: Collection[FailedRead], checkpoints: Iterable[CheckpointRecord]) -> tuple[DoubtedCheckpoint, ...]:
    """Return the checkpoints in which nodes read wrong content, except those that are known as damaged."""
    readers: dict[str, dict[NodeId, None]] = defaultdict(dict)
    for read in _standing(reads, checkpoints):
        if read.key and read.is_mismatch:
            readers[read.key][read.reader] = None
    found = (
        (each, tuple(dict.fromkeys(node for shard in each.shards for node in readers.get(shard.key, ()))))
        for each in checkpoints
        if not each.is_wrong
    )
    return tuple(
        DoubtedCheckpoint(generation=each.generation, step=each.step, readers=nodes) for each, nodes in found if nodes
    )


def _standing(reads: Collection[FailedRead], checkpoints: Iterable[CheckpointRecord]) -> list[FailedRead]:
    """Return the reads that no later verification of their checkpoint refuted."""
    intact_at = {
        shard.key: each.verified_at
        for each in checkpoints
        if each.verified_at is not None and not each.is_wrong
        for shard in each.shards
    }
    return [read for read in reads if read.at >= intact_at.get(read.key, read.at)]


def _by_state(reads: Iterable[FailedRead]) -> list[list[FailedRead]]:
    states: dict[tuple[bool, Generation, Step], list[FailedRead]] = {}
    for read in reads:
        source = read.source
        states.setdefault((source.is_object, source.origin_generation, source.step), []).append(read)
    return list(states.values())


def _agree(state: Sequence[FailedRead]) -> bool:
    if len({read.reader for read in state if read.is_mismatch}) > 1:
        return True
    return len({read.reader for read in state}) > 1 and len({read.generation for read in state}) > 1


def _is_there(nodes: Mapping[NodeId, NodeObserved], source: ShardSource) -> bool:
    serving = [source.node_id] if source.rebuild is None else [each.node_id for each in source.rebuild.survivors]
    return all(node_id is not None and node_id in nodes and nodes[node_id].is_connected for node_id in serving)
