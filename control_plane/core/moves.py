"""Members that are to be left while training goes well: who, when, and whether a checkpoint is waited for first (ADR 0016).

    to be left ──▶ another node is lent to the job ──▶ agreed stop ──▶ last step committed, and a checkpoint ──▶ next generation without it
       │  ◀── no longer         or none can be had, and     no way back      where its last copy or AWS's time
       │                        AWS takes it: last moment                    demands one
       ├ announced   AWS takes its instance (`core.notices`)
       ├ requested   a person wants it for something else (`core.requests`)
       ├ impaired    it works and has something wrong: a typed fault that a reboot or other hardware mends, replicas out of view for T_max
       └ lemon       its history speaks against it: it is left at the failure that this came of

A move weakens nothing: a stop that is not agreed upon in time ends in the ordinary recovery. A node that AWS takes is
left whatever that costs once all the time that there was has been given to its last step; any other one stays if
leaving it would cost a committed step.

Invariant: pure, and level-triggered. But for the last moment before AWS takes a node, no job is stopped before there is
a node to move to.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from control_plane.core import faults, notices
from control_plane.core.evidence import Standing, Verdict, is_silent
from control_plane.core.incidents import Fault
from control_plane.core.observed.jobs import Departure
from control_plane.core.observed.nodes import Cause, Implication, InstanceCondition, NodeObserved, Remedy
from everstep.protocol.agent_messages import MemberReport
from everstep.protocol.ids import NodeId
from everstep.protocol.plan import GenerationPlan, Timeouts

UPLOAD_MARGIN = 1.5
"""An upload is expected to take this many times what the last one took: every node of the fleet may be uploading for the same reason."""


# -- who --------------------------------------------------------------------------------------------------------------


def wanted(
    known: Sequence[Departure],
    assigned: Collection[NodeId],
    verdicts: Mapping[NodeId, Verdict],
    nodes: Mapping[NodeId, NodeObserved],
    *,
    now: float,
    not_before: float,
) -> tuple[Departure, ...]:
    """Return which of a job's nodes are to be left.

    Args:
        known: from the pass before.
        assigned: the nodes that the fleet has given to the job.
        verdicts: on them.
        nodes: as observed.
        now: Unix seconds.
        not_before: when the next impaired one may be left; AWS does not wait.

    Returns:
        Those known, unchanged, once a stop was asked for; else one for each, first those that AWS takes, the earliest
        first.
    """
    if asked(known):
        return tuple(known)
    kept = {move.node_id: move for move in known if move.is_history}
    before = {move.node_id: move for move in known}
    found = []
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


def _departure(node: NodeObserved, verdict: Verdict, now: float, not_before: float) -> Departure | None:
    notice = notices.urgent(node, now)
    if notice is not None and node.instance is not InstanceCondition.ENDED:
        return Departure(
            node_id=node.node_id,
            evidence=notices.in_words(node.node_id, notice),
            cause=Cause.NOTICE,
            remedy=Remedy.LET_GO,
            may_terminate=True,
            ends_at=notice.ends_at,
        )
    if now < not_before:
        return None
    if not _is_impaired(verdict):
        words = node.request_words
        return (
            Departure(
                node_id=node.node_id, evidence=words, cause=Cause.REQUESTED, remedy=Remedy.RELEASE, may_terminate=False
            )
            if words
            else None
        )
    return impaired(verdict)


def impaired(verdict: Verdict) -> Departure:
    """Return the departure of a member that is to be left for what a verdict says of it."""
    return Departure(
        node_id=verdict.node_id,
        evidence=verdict.evidence,
        cause=verdict.cause,
        remedy=verdict.remedy or Remedy.HOLD,
        may_terminate=verdict.may_terminate,
        what=verdict.what,
    )


def _is_impaired(verdict: Verdict) -> bool:
    """Say whether a member is to be left with care: it works, or it is gone for its peers alone and may hold what nobody else has."""
    return verdict.standing is Standing.IMPAIRED or (
        verdict.standing is Standing.GONE and verdict.remedy is Remedy.RETIRE
    )


# -- when -------------------------------------------------------------------------------------------------------------


def lent(plan: GenerationPlan, assigned: Sequence[NodeId]) -> list[NodeId]:
    """Return the nodes that a job has been given beyond those that work for it, in the order given."""
    members = {node.node_id for node in plan.nodes}
    return [node_id for node_id in assigned if node_id not in members]


def successors(
    plan: GenerationPlan,
    assigned: Sequence[NodeId],
    nodes: Mapping[NodeId, NodeObserved],
    now: float,
    timeouts: Timeouts,
) -> list[NodeId]:
    """Return those of the nodes lent that could take a member's place now."""
    return [node_id for node_id in lent(plan, assigned) if is_ready(nodes[node_id], now, timeouts)]


def is_ready(node: NodeObserved, now: float, timeouts: Timeouts) -> bool:
    """Say whether a node is there, works for nobody and is to stay: it could be given to a job, or take a member's place, at once.

    Its agent's word proves that it is there, whether AWS answers or not.
    """
    is_there = (
        node.is_connected
        and node.has_reported
        and not is_silent(node, timeouts)
        and node.instance is not InstanceCondition.ENDED
    )
    return is_there and node.member is None and notices.urgent(node, now) is None and not node.request_words


def due(
    known: Sequence[Departure], ready_count: int, upload_seconds: float | None, now: float, timeouts: Timeouts
) -> tuple[Departure, ...]:
    """Return whom a running generation has to leave now: one interruption for all is better than one for each.

    Called in every pass over a running job that has somebody to leave and has not asked for a stop.

    Args:
        known: who is to be left, in order.
        ready_count: nodes that could take a place.
        upload_seconds: what the last checkpoint took to S3, or None.
        now: Unix seconds.
        timeouts: the ladder.

    Returns:
        With a successor for each: all. With one for each that AWS takes: these, and as many of the others as have one.
        Else, when the first is at its last moment, those that are and as many more as have a successor; empty while the
        job may train on.
    """
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
    """Return until when training may go on where nobody can take the node's place: then a stop, its commit and the checkpoint just fit in."""
    return ends_at - timeouts.final_round_seconds - UPLOAD_MARGIN * (upload_seconds or 0.0)


def asked(known: Sequence[Departure]) -> tuple[Departure, ...]:
    """Return those for whom the agreed stop is asked for; empty until it is."""
    return tuple(move for move in known if move.asked_at is not None)


def is_stuck(
    known: Sequence[Departure], progress_at: float, now: float, timeouts: Timeouts, promised_seconds: float
) -> bool:
    """Say whether the stop does not come and no step was made for so long that ending the generation costs nothing more.

    Args:
        known: all departures of the job.
        progress_at: Unix seconds of the last new step; of time in which nobody could have seen one, its end.
        now: Unix seconds.
        timeouts: the ladder.
        promised_seconds: that ranks may stand still on purpose. A node that goes at a certain time is not waited for so
            long.

    Returns:
        Whether nothing is left to be spared.
    """
    asked_at = max((move.asked_at for move in known if move.asked_at is not None), default=now)
    patience = timeouts.blind_wait_seconds + (promised_seconds if all(move.ends_at is None for move in known) else 0.0)
    return now - max(asked_at, progress_at) > patience


def in_words(known: Sequence[Departure]) -> str:
    """Return what a running job says while it trains on although nodes are to be left."""
    names = ", ".join(move.node_id for move in known)
    return f"leaves {names} once another node is there: {'; '.join(move.evidence for move in known)}"


# -- the checkpoint ---------------------------------------------------------------------------------------------------


def is_held_elsewhere(
    plan: GenerationPlan, reports: Mapping[NodeId, MemberReport], leaving: Collection[NodeId]
) -> bool:
    """Say whether every shard's last commit is on some node that stays, by the word of its owner's agent."""
    in_view = {shard.rank: shard.in_view for report in reports.values() for shard in report.protection}
    return all(any(holder not in leaving for holder in in_view.get(rank.rank, ())) for rank in plan.ranks)


def ends_at(leaving: Sequence[Departure], nodes: Mapping[NodeId, NodeObserved], now: float) -> float | None:
    """Return when the first may be gone, by what AWS names now: a terminating hook that is held gives more time, and time may also run out sooner."""
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
) -> tuple[bool, str]:
    """Return whether the stopped job still waits for its checkpoint, and why.

    Called while every rank stands still at the agreed step, its commit is on its way to S3 and not yet a checkpoint.
    Where AWS takes nothing, only the last copy is worth the wait: the node stays if it cannot be saved.

    Args:
        ends_at: when the first of the nodes may be gone; None where nobody says.
        is_announced: AWS takes one of them.
        stopped_at: when the last rank stopped, Unix seconds.
        upload_seconds: what the last checkpoint took, or None.
        is_replaceable: other nodes are there for all that have to be left: waiting is what training pays for the
            checkpoint.
        is_held: nodes that stay hold every shard: no step depends on the checkpoint.
        now: Unix seconds.
        timeouts: the ladder.

    Returns:
        (wait, a clause for the reason).
    """
    patience = timeouts.blind_wait_seconds if is_announced else timeouts.final_round_seconds
    end = stopped_at + patience if ends_at is None else ends_at - timeouts.prepare_deadline_seconds
    if not is_announced and is_held:
        return False, "nodes that stay hold its last step"
    left = end - now
    if left <= 0:
        return False, "there was no time left for its checkpoint"
    if not is_held:
        return (
            True,
            "waits for its checkpoint: only the nodes that it leaves hold its last step, "
            f"{_seconds(end - stopped_at)} were left",
        )
    if not is_replaceable:
        return (
            True,
            f"waits for its checkpoint while no node can take the place, {_seconds(end - stopped_at)} were left",
        )
    expected = timeouts.final_round_seconds if upload_seconds is None else UPLOAD_MARGIN * upload_seconds
    took = "none was measured" if upload_seconds is None else f"the last one took {_seconds(upload_seconds)}"
    if stopped_at + expected > end:
        return False, f"did not wait for its checkpoint: {took}, {_seconds(end - stopped_at)} were left"
    if now >= stopped_at + expected:
        return False, f"waited no longer for its checkpoint: {took}"
    return True, f"waits for its checkpoint: {took}, {_seconds(end - stopped_at)} were left"


def _seconds(seconds: float) -> str:
    return f"{max(0.0, seconds):.0f} s"


# -- what it means for the incident and for the nodes -----------------------------------------------------------------


def verdict(move: Departure) -> Verdict:
    """Return the verdict that a member is left by."""
    return Verdict(
        node_id=move.node_id,
        standing=Standing.GONE,
        evidence=move.evidence,
        cause=move.cause,
        is_final=True,
        may_terminate=move.may_terminate,
        remedy=move.remedy,
        what=move.what,
    )


def fault(move: Departure, at: float, now: float) -> Fault:
    """Return the fault that ends a generation so that a member can be left.

    Args:
        move: who is left, and why.
        at: Unix seconds, when training stopped: nothing failed before.
        now: Unix seconds.

    Returns:
        The fault. A node that may still have to stay is added to the incident when it is really left.
    """
    line = None if move.is_history else faults.implied(verdict(move), now)
    return Fault(
        cause=move.cause,
        evidence=move.evidence,
        at=at,
        node_id=move.node_id if move.is_announced else None,
        seen_on=(move.node_id,),
        implicates=line,
    )


def partner(node_id: NodeId, left: Sequence[Departure], incident: str, now: float) -> Implication:
    """Return the line for a member that stays and was out of view, too: if it loses its next partner, it was the one.

    Args:
        node_id: who stays.
        left: who is left.
        incident: its id.
        now: Unix seconds.

    Returns:
        A line for its history.
    """
    names = ", ".join(move.node_id for move in left)
    words = f"{node_id} and {names} had lost each other's replicas; {names} was left"
    return Implication(
        node_id=node_id,
        incident_id=incident,
        at=now,
        what=Cause.NODE_UNREACHABLE.value,
        evidence=words,
        remedy=Remedy.NONE,
    )
