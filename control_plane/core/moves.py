"""Moves: a job gives up some nodes at an agreed stop (all ranks stop at one step), and continues on others (ADR 0016).

    departure     ──▶ another node assigned ──▶ agreed stop ──▶ last step committed ──▶ next generation without the node
       ├ announced   AWS reclaims the instance (`core.notices`)
       ├ requested   a person wants the node for something else (`core.requests`)
       ├ impaired    the node works with a fault, or has not answered other members for T_max (`exclude_seconds`)
       └ lemon       the node had too many incidents: the job gives it up in the recovery from the newest

A job keeps a node whose departure would lose a committed step, unless AWS reclaims the node. Invariant: no job stops
before another node is available, except at the last moment before AWS reclaims a node.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from control_plane.core import faults, notices
from control_plane.core.evidence import NodeDisposition, NodeVerdict, is_silent
from control_plane.core.incidents import Fault
from control_plane.core.observed.facts import LostEachOther
from control_plane.core.observed.incidents import CheckpointWait, CheckpointWaitKind
from control_plane.core.observed.jobs import Departure
from control_plane.core.observed.nodes import Cause, Implication, InstanceCondition, NodeObserved, Remedy
from everstep.protocol.agent_messages import FaultCode, MemberReport
from everstep.protocol.ids import NodeId
from everstep.protocol.plan import GenerationPlan, RankPlan, Timeouts

UPLOAD_MARGIN = 1.5
"""An upload may take longer than the previous one by this factor, because several nodes upload at once."""


def wanted(
    known: Sequence[Departure],
    assigned: Collection[NodeId],
    verdicts: Mapping[NodeId, NodeVerdict],
    nodes: Mapping[NodeId, NodeObserved],
    *,
    now: float,
    not_before: float,
) -> tuple[Departure, ...]:
    """Return the departures of a job, announced ones first by their ends, or `known` once the stop is requested.

    `not_before` (Unix seconds) delays new departures that AWS did not announce.
    """
    if asked(known):
        return tuple(known)
    kept = {move.node_id: move for move in known if move.is_history}
    before = {move.node_id: move for move in known}
    found: list[Departure] = []
    for node_id in assigned:
        move = kept.get(node_id) or _departure(nodes[node_id], verdicts[node_id], now, not_before)
        if move is not None:
            earlier = before.get(node_id)
            found.append(
                earlier
                if earlier is not None and (earlier.cause, earlier.ends_at) == (move.cause, move.ends_at)
                else move
            )
    return tuple(sorted(found, key=lambda move: (not move.is_announced, move.ends_at is None, move.ends_at or 0.0)))


def _departure(node: NodeObserved, verdict: NodeVerdict, now: float, not_before: float) -> Departure | None:
    notice = notices.urgent(node, now)
    if notice is not None and node.instance is not InstanceCondition.ENDED:
        return Departure(
            node_id=node.node_id,
            evidence=notices.announced(node.node_id, notice),
            cause=Cause.NOTICE,
            remedy=Remedy.TERMINATE,
            may_terminate=True,
            ends_at=notice.ends_at,
        )
    if now < not_before:
        return None
    if not _is_impaired(verdict):
        if node.request is None:
            return None
        return Departure(
            node_id=node.node_id,
            evidence=node.request,
            cause=Cause.REQUESTED,
            remedy=Remedy.RELEASE,
            may_terminate=False,
        )
    return impaired(verdict)


def impaired(verdict: NodeVerdict) -> Departure:
    """Return the departure of a member that trains with a fault."""
    return Departure(
        node_id=verdict.node_id,
        evidence=verdict.evidence,
        cause=verdict.cause,
        remedy=verdict.remedy or Remedy.HOLD,
        may_terminate=verdict.may_terminate,
        what=verdict.what,
    )


def _is_impaired(verdict: NodeVerdict) -> bool:
    return verdict.disposition is NodeDisposition.IMPAIRED or (
        verdict.disposition is NodeDisposition.GONE and verdict.remedy is Remedy.RETIRE
    )


def lent(plan: GenerationPlan, assigned: Sequence[NodeId]) -> list[NodeId]:
    """Return the nodes that the fleet has assigned to the job and that the plan does not use, in this order."""
    members = {node.node_id for node in plan.nodes}
    return [node_id for node_id in assigned if node_id not in members]


def successors(
    plan: GenerationPlan,
    assigned: Sequence[NodeId],
    nodes: Mapping[NodeId, NodeObserved],
    now: float,
    timeouts: Timeouts,
) -> list[NodeId]:
    """Return the ready nodes that can replace members: assigned to the job, but not used by its plan."""
    return [node_id for node_id in lent(plan, assigned) if is_ready(nodes[node_id], now, timeouts)]


def is_ready(node: NodeObserved, now: float, timeouts: Timeouts) -> bool:
    """Return whether a job can use a node immediately: in service, idle, and without a pending request."""
    return is_in_service(node, now, timeouts) and node.member is None and node.request is None


def is_in_service(node: NodeObserved, now: float, timeouts: Timeouts) -> bool:
    """Return whether a job's ranks can run on a node: its agent reports, all older ranks have ended, and AWS does
    not end the instance.
    """
    return (
        node.is_connected
        and node.has_reported
        and not is_silent(node, timeouts)
        and node.instance is not InstanceCondition.ENDED
        and notices.urgent(node, now) is None
        and all(fault.code != FaultCode.RANKS_NOT_GONE for fault in node.faults)
    )


def due(
    known: Sequence[Departure], ready_count: int, upload_seconds: float | None, now: float, timeouts: Timeouts
) -> tuple[Departure, ...]:
    """Return the departures for which the job should stop now, because nodes are ready or announced ends are close."""
    # One stop for several departures costs less than several stops.
    if ready_count >= len(known):
        return tuple(known)
    announced = sum(move.is_announced for move in known)
    if 0 < announced <= ready_count:
        return tuple(known[:ready_count])
    late = sum(
        move.ends_at is not None and now >= last_moment(move.ends_at, upload_seconds, timeouts) for move in known
    )
    return tuple(known[: max(late, ready_count)]) if late else ()


def last_moment(ends_at: float, upload_seconds: float | None, timeouts: Timeouts) -> float:
    """Return the Unix time until which training may continue before AWS ends a node that has no replacement."""
    return ends_at - timeouts.final_round_seconds - UPLOAD_MARGIN * (upload_seconds or 0.0)


def asked(known: Sequence[Departure]) -> tuple[Departure, ...]:
    """Return the departures for which the job loop has requested the stop."""
    return tuple(move for move in known if move.asked_at is not None)


def is_stuck(
    known: Sequence[Departure], progress_at: float, now: float, timeouts: Timeouts, promised_seconds: float
) -> bool:
    """Return whether the ranks cannot reach the requested stop, because training makes no progress."""
    asked_at = max((move.asked_at for move in known if move.asked_at is not None), default=now)
    # The script's longest declared wait does not count if AWS ends a node at a fixed time.
    patience = timeouts.blind_wait_seconds + (promised_seconds if all(move.ends_at is None for move in known) else 0.0)
    return now - max(asked_at, progress_at) > patience


def is_held_elsewhere(
    plan: GenerationPlan, reports: Mapping[NodeId, MemberReport], leaving: Collection[NodeId]
) -> bool:
    """Return whether the nodes that stay hold, or can rebuild, every shard of the last committed step."""
    in_view = {shard.rank: shard.in_view for report in reports.values() for shard in report.protection}

    def is_held(rank: RankPlan) -> bool:
        staying = {holder for holder in in_view.get(rank.rank, ()) if holder not in leaving}
        # With parity, a shard whose owner leaves needs the shares of all other members of its stripe.
        owner, *peers = rank.holders
        return owner in staying or staying.issuperset(peers) if rank.stripe else bool(staying)

    return all(map(is_held, plan.ranks))


def ends_at(leaving: Sequence[Departure], nodes: Mapping[NodeId, NodeObserved], now: float) -> float | None:
    """Return when AWS may end the first of the departing nodes, by its newest notices."""
    found = [
        notice.ends_at
        for move in leaving
        if move.node_id in nodes and (notice := notices.urgent(nodes[move.node_id], now)) is not None
    ]
    times = [moment for moment in found if moment is not None] or [
        move.ends_at for move in leaving if move.ends_at is not None
    ]
    return min(times, default=None)


def checkpoint_wait(
    ends_at: float | None,
    *,
    is_announced: bool,
    stopped_at: float,
    upload_seconds: float | None,
    is_replaceable: bool,
    is_held: bool,
    now: float,
    timeouts: Timeouts,
) -> CheckpointWait:
    """Return whether a job whose ranks have all stopped to give up nodes still waits for its checkpoint, and why.

    If AWS reclaims no node, the job waits only unless `is_held` (all shards of the last step remain). Otherwise it
    waits until a deadline `prepare_deadline_seconds` before `ends_at`, or only for the expected upload if `is_held` and
    `is_replaceable` (each departing node has a ready replacement).
    """
    patience = timeouts.blind_wait_seconds if is_announced else timeouts.final_round_seconds
    end = stopped_at + patience if ends_at is None else ends_at - timeouts.prepare_deadline_seconds
    left = end - now

    def wait(why: CheckpointWaitKind) -> CheckpointWait:
        return CheckpointWait(why=why, remaining_seconds=end - stopped_at, upload_seconds=upload_seconds)

    if not is_announced and is_held:
        return wait(CheckpointWaitKind.HELD_ELSEWHERE)
    if left <= 0:
        return wait(CheckpointWaitKind.NO_TIME)
    if not is_held:
        return wait(CheckpointWaitKind.SOLE_HOLDER)
    if not is_replaceable:
        return wait(CheckpointWaitKind.NO_REPLACEMENT)
    expected = timeouts.final_round_seconds if upload_seconds is None else UPLOAD_MARGIN * upload_seconds
    if stopped_at + expected > end:
        return wait(CheckpointWaitKind.TOO_SLOW)
    return wait(CheckpointWaitKind.GAVE_UP if now >= stopped_at + expected else CheckpointWaitKind.IN_TIME)


def verdict(move: Departure) -> NodeVerdict:
    """Return the verdict that a member is lost, because the job gives it up as planned."""
    return NodeVerdict(
        node_id=move.node_id,
        disposition=NodeDisposition.GONE,
        evidence=move.evidence,
        cause=move.cause,
        is_final=True,
        may_terminate=move.may_terminate,
        remedy=move.remedy,
        what=move.what,
    )


def fault(move: Departure, at: float, now: float) -> Fault:
    """Return the fault that ends a generation, after all ranks have stopped at `at` (Unix seconds), for a departure."""
    line = None if move.is_history else faults.implied(verdict(move), now)
    return Fault(
        cause=move.cause,
        evidence=move.evidence,
        at=at,
        # Other nodes still exist, and the job keeps a node that holds the last copy of a shard.
        node_id=move.node_id if move.is_announced else None,
        seen_on=(move.node_id,),
        implicates=line,
    )


def partner(node_id: NodeId, left: Sequence[Departure], incident: str, now: float) -> Implication:
    """Return the history entry for a remaining member that could not reach a departing member."""
    return Implication(
        node_id=node_id,
        incident_id=incident,
        at=now,
        what=Cause.NODE_UNREACHABLE.value,
        evidence=LostEachOther(node_id=node_id, departed=tuple(move.node_id for move in left)),
        remedy=Remedy.NONE,
    )
