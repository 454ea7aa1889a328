"""Members that are to be left while training goes well, and nothing lost by it (ADR 0014).

    impaired ──▶ another node is lent to the job ──▶ an agreed stop is asked for ──▶ the next generation goes on without it
       │  ◀── it is well again                            no way back from here

Invariant: a job is never stopped for a move before there is a node to move to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from control_plane.core import faults
from control_plane.core.evidence import Standing, Verdict
from control_plane.core.incidents import Fault
from control_plane.core.observed import Cause, Departure, Implication, Remedy
from everstep.protocol.ids import NodeId
from everstep.protocol.plan import GenerationPlan, Timeouts


def wanted(known: Sequence[Departure], verdicts: Mapping[NodeId, Verdict], now: float, not_before: float) -> tuple[Departure, ...]:
    """Return the members that are to be left.

    Args:
        known: from the pass before.
        verdicts: on the members and on the nodes lent.
        now: Unix seconds.
        not_before: when the next one may be left.

    Returns:
        Those known and asked for, unchanged; else one for each impaired member, and those that their history speaks against.
    """
    if is_asked(known):
        return tuple(known)
    before = {move.node_id: move for move in known}
    kept = [move for move in known if move.is_history]
    impaired = [verdict for verdict in verdicts.values() if _is_to_be_left(verdict)] if now >= not_before else []
    fresh = [
        Departure(
            node_id=verdict.node_id,
            evidence=before[verdict.node_id].evidence if verdict.node_id in before else verdict.evidence,
            cause=verdict.cause,
            remedy=verdict.remedy or Remedy.HOLD,
            may_terminate=verdict.may_terminate,
            what=verdict.what,
        )
        for verdict in impaired
        if all(move.node_id != verdict.node_id for move in kept)
    ]
    return (*kept, *fresh)


def _is_to_be_left(verdict: Verdict) -> bool:
    """Say whether a member is to be left with care: it works, or it is gone for its peers alone and may hold what nobody else has."""
    return verdict.standing is Standing.IMPAIRED or (verdict.standing is Standing.GONE and verdict.remedy is Remedy.RETIRE)


def is_asked(moves: Sequence[Departure]) -> bool:
    """Say whether the agreed stop is asked for."""
    return any(move.asked_at is not None for move in moves)


def is_stuck(moves: Sequence[Departure], progress_at: float, now: float, timeouts: Timeouts) -> bool:
    """Say whether the stop does not come and no step was made for so long that ending the generation costs nothing more."""
    asked_at = max((move.asked_at for move in moves if move.asked_at is not None), default=now)
    return now - max(asked_at, progress_at) > timeouts.blind_wait_seconds


def lent(plan: GenerationPlan, assigned: Sequence[NodeId]) -> list[NodeId]:
    """Return the nodes that a job has been given beyond those that work for it, in the order given."""
    members = {node.node_id for node in plan.nodes}
    return [node_id for node_id in assigned if node_id not in members]


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


def fault(move: Departure, now: float) -> Fault:
    """Return the fault that ends a generation so that a member can be left. Nothing failed before: the interruption begins now.

    Args:
        move: who is left, and why.
        now: Unix seconds.

    Returns:
        The fault; its node is added to the incident when it is really left.
    """
    line = None if move.is_history else faults.implied(verdict(move), now)
    return Fault(cause=move.cause, evidence=move.evidence, at=now, implicates=line)


def partner(node_id: NodeId, moves: Sequence[Departure], incident: str, now: float) -> Implication:
    """Return the line for a member that stays and was out of view, too: if it loses its next partner, it was the one.

    Args:
        node_id: who stays.
        moves: who is left.
        incident: its id.
        now: Unix seconds.

    Returns:
        A line for its history.
    """
    left = ", ".join(move.node_id for move in moves)
    words = f"{node_id} and {left} had lost each other's replicas; {left} was left"
    return Implication(node_id=node_id, incident_id=incident, at=now, what=Cause.NODE_UNREACHABLE.value, evidence=words, remedy=Remedy.NONE)
