"""How far a job's nodes can have trained, if one of them may be wrong.

A *claim* is a step that a node names: of its ranks, its commits, its coordinator's rounds or its slots.

Invariant: no step far above what two nodes name, or above what the time since the record permits, rests on one node's
claim. Nodes that tell the truth are never limited.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import ceil

from control_plane.core import accounting
from control_plane.core.observed.jobs import JobObserved, JobRecord
from control_plane.core.observed.specs import JobSpec
from control_plane.core.recovery import Path, is_on_path
from everstep.protocol.agent_messages import MemberReport
from everstep.protocol.ids import NO_STEP, Generation, NodeId, Step

MOST_STEPS_PER_SECOND = 1000
"""No training step is shorter."""
LEAST_LEAD = 64
LEAD_SECONDS = 8
"""The newest reports of two nodes are at most some seconds apart. Until then, one of them has made further steps."""


def second(claims: Iterable[Step]) -> Step:
    """Return the highest step that two nodes name, or -1."""
    return sorted([NO_STEP, NO_STEP, *claims])[-2]


def of_nodes(spec: JobSpec, seen: JobObserved, path: Path) -> Mapping[NodeId, Step]:
    """Return the highest step on a path that each node of a job names."""
    return {
        node_id: max(
            (step for origin, step in _of_member(node.member) if is_on_path(path, origin, step)), default=NO_STEP
        )
        for node_id, node in seen.nodes.items()
        if node.member is not None and node.member.run == spec.run
    }


def _of_member(member: MemberReport) -> Iterable[tuple[Generation, Step]]:
    yield from ((commit.generation, commit.step) for commit in member.commits)
    yield from ((member.generation, shard.committed) for shard in member.protection)
    yield from ((member.generation, rank.boundary) for rank in member.ranks)
    yield from ((slot.origin_generation, slot.step) for slot in member.inventory)
    if member.round is not None:
        yield from ((member.generation, step) for step in (member.round.committed, member.round.boundary))


def supported(seen: JobObserved, record: JobRecord, claims: Mapping[NodeId, Step]) -> Step:
    """Return the highest step that two nodes name, or one node if the job has no other, or that the record contains."""
    named = second(claims.values()) if _has_witnesses(seen) else max(claims.values(), default=NO_STEP)
    return max(record.max_boundary, record.base_step, named)


def limit(seen: JobObserved, record: JobRecord, claims: Mapping[NodeId, Step], now: float) -> Step:
    """Return the highest step that a job can have reached at the Unix time `now`, whatever one node claims."""
    seconds = max(0, ceil(now - accounting.accounted_until(record))) + 1
    return Step(supported(seen, record, claims) + MOST_STEPS_PER_SECOND * seconds)


def reached(seen: JobObserved, record: JobRecord, claims: Mapping[NodeId, Step], now: float) -> Step:
    """Return the newest step that a rank of the newest generation has finished, by the claims of its members.

    The claim of one node counts up to some seconds of steps above that of the next node.
    """
    top = max(claims.values(), default=NO_STEP)
    if not _has_witnesses(seen):
        return top
    if len(claims) < 2:
        # The others are silent. Progress can still prove that they work, but it does not raise the highest step.
        return min(top, limit(seen, record, claims, now))
    next_one = max(second(claims.values()), record.base_step)
    seconds = 1.0 if record.stepped_at is None else max(1.0, now - record.stepped_at)
    lead = LEAST_LEAD + ceil(LEAD_SECONDS * (next_one - record.base_step) / seconds)
    return min(top, Step(next_one + lead))


def are_witnessed(seen: JobObserved, claims: Mapping[NodeId, Step]) -> bool:
    """Return whether `reached` compares the claims of several nodes, or the job has only one node."""
    return len(claims) > 1 or not _has_witnesses(seen)


def _has_witnesses(seen: JobObserved) -> bool:
    return seen.plan is not None and len(seen.plan.nodes) > 1


def of_reports(reports: Mapping[NodeId, MemberReport]) -> Mapping[NodeId, Step]:
    """Return the newest step that any rank of each node, ended or not, has finished."""
    return {node_id: max(_finished(report), default=NO_STEP) for node_id, report in reports.items()}


def _finished(report: MemberReport) -> Iterable[Step]:
    yield from (rank.boundary for rank in report.ranks)
    yield from (rank.exit.boundary for rank in report.ranks if rank.exit is not None)
    if report.round is not None:
        yield report.round.boundary
