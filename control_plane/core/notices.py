"""What follows from what AWS announces: which nodes ranks have to leave, when, and whether a checkpoint is still worth the time.

    notice ──▶ a node can take the place ──▶ agreed stop ─▶ last step committed ─▶ checkpoint, if time allows ─▶ new generation without the node
          └──▶ none can ──▶ trains on ──▶ last moment ──┘                                                        (waits for capacity if it must)

A notice never weakens anything: if the stop is not agreed upon in time, AWS's word that the instance has ended opens the ordinary recovery.

Invariant: pure, and level-triggered: a notice that comes twice, late or in another order gives the same decision.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from control_plane.core.evidence import is_silent
from control_plane.core.observed import InstanceCondition, Move, NodeObserved, Notice
from everstep.protocol.agent_messages import MemberReport, NoticeKind
from everstep.protocol.ids import NodeId
from everstep.protocol.plan import GenerationPlan, Timeouts

MAINTENANCE_LEAD_SECONDS = 3600.0
"""Maintenance is announced days ahead. From this long before its window a running job moves; until then the node is left when it is idle."""
OVER_SECONDS = 600.0
"""An instance that is still there so long after it was to be interrupted is not going to be: the event was late, or AWS has changed its mind."""
UPLOAD_MARGIN = 1.5
"""An upload is expected to take this many times what the last one took: every node of the fleet may be uploading for the same reason."""
ENDING = frozenset({NoticeKind.SPOT_INTERRUPTION, NoticeKind.MAINTENANCE, NoticeKind.CAPACITY_BLOCK_END, NoticeKind.TERMINATING})
"""Kinds after which the instance is gone. The other one, a rebalance recommendation, is advice: it never interrupts anything."""


def merged(notices: Iterable[Notice]) -> tuple[Notice, ...]:
    """Return one notice of each kind: several sources tell of the same thing, and the earliest time that any of them names counts."""
    by_kind: dict[NoticeKind, Notice] = {}
    for notice in sorted(notices, key=lambda notice: (notice.ends_at is None, notice.ends_at or 0.0, notice.message)):
        by_kind.setdefault(notice.kind, notice)
    return tuple(by_kind[kind] for kind in NoticeKind if kind in by_kind)


def urgent(node: NodeObserved, now: float) -> Notice | None:
    """Return the notice for which this node is given to nobody and running ranks leave it, or None: far maintenance is not urgent yet."""
    found = [notice for notice in node.notices if notice.kind in ENDING and not _is_far(notice, now) and not _is_over(notice, now)]
    return min(found, key=lambda notice: (notice.ends_at is None, notice.ends_at or 0.0), default=None)


def replacements(
    plan: GenerationPlan, assigned: Collection[NodeId], nodes: Mapping[NodeId, NodeObserved], now: float, timeouts: Timeouts
) -> tuple[NodeId, ...]:
    """Return the nodes that the fleet has given to the job beyond its members, and that could take a member's place now."""
    members = {node.node_id for node in plan.nodes}
    return tuple(node_id for node_id in assigned if node_id not in members and _is_ready(nodes[node_id], now, timeouts))


def move_of(
    plan: GenerationPlan,
    assigned: Collection[NodeId],
    nodes: Mapping[NodeId, NodeObserved],
    *,
    upload_seconds: float | None,
    now: float,
    timeouts: Timeouts,
) -> Move | None:
    """Return the move that a running generation has to make now, or None while it may train on.

    Called in every pass over a running job. With a replacement for every node that has to be left, now; else when the first of them is at its last
    moment: one interruption for all is better than one for each.

    Args:
        plan: of the generation.
        assigned: the nodes that the fleet has given to the job, replacements included.
        nodes: as observed.
        upload_seconds: what the last checkpoint took to S3, or None.
        now: Unix seconds.
        timeouts: the ladder.

    Returns:
        Which nodes to leave and why, the one that goes first before the others.
    """
    leaving = sorted(
        ((node.node_id, notice) for node in plan.nodes if (notice := urgent(nodes[node.node_id], now)) is not None),
        key=lambda item: (item[1].ends_at is None, item[1].ends_at or 0.0),
    )
    ready = len(replacements(plan, assigned, nodes, now, timeouts))
    if ready < len(leaving):
        due = sum(notice.ends_at is not None and now >= last_moment(notice, upload_seconds, timeouts) for _, notice in leaving)
        if not due:
            return None
        leaving = leaving[: max(due, ready)]
    if not leaving:
        return None
    return Move(
        node_ids=tuple(node_id for node_id, _ in leaving),
        evidence=tuple(in_words(node_id, notice) for node_id, notice in leaving),
        asked_at=now,
        ends_at=leaving[0][1].ends_at,
    )


def last_moment(notice: Notice, upload_seconds: float | None, timeouts: Timeouts) -> float:
    """Return until when training may go on where nobody can take the node's place: then a stop, its commit and the checkpoint just fit in."""
    assert notice.ends_at is not None  # the caller has none to compute for a notice without a time
    return notice.ends_at - timeouts.final_round_seconds - UPLOAD_MARGIN * (upload_seconds or 0.0)


def as_announced(move: Move, nodes: Mapping[NodeId, NodeObserved], now: float) -> Move:
    """Return the move with the time that AWS names now: a terminating hook that is held gives more, and time may also run out sooner."""
    found = [notice.ends_at for node_id in move.node_ids if node_id in nodes and (notice := urgent(nodes[node_id], now)) is not None]
    times = [ends_at for ends_at in found if ends_at is not None]
    return replace(move, ends_at=min(times)) if times else move


def waits(nodes: Mapping[NodeId, NodeObserved], members: Iterable[NodeId], now: float) -> str:
    """Return what a running job says while it trains on although nodes are to be left, or nothing."""
    told = [in_words(node_id, notice) for node_id in members if (notice := urgent(nodes[node_id], now)) is not None]
    return f"{'; '.join(told)}; no node can take the place yet" if told else ""


def is_held_elsewhere(plan: GenerationPlan, reports: Mapping[NodeId, MemberReport], leaving: Collection[NodeId]) -> bool:
    """Say whether every shard's last commit is on some node that stays, by the word of its owner's agent."""
    in_view = {shard.rank: shard.in_view for report in reports.values() for shard in report.protection}
    return all(any(holder not in leaving for holder in in_view.get(rank.rank, ())) for rank in plan.ranks)


def checkpoint_wait(
    move: Move,
    *,
    stopped_at: float,
    upload_seconds: float | None,
    is_replaceable: bool,
    is_held: bool,
    now: float,
    timeouts: Timeouts,
) -> tuple[bool, str]:
    """Return whether the stopped job still waits for its checkpoint, and why.

    Called while every rank stands still at the agreed step, its commit is on its way to S3 and not yet a checkpoint.

    Args:
        move: under way.
        stopped_at: when the last rank stopped, Unix seconds.
        upload_seconds: what the last checkpoint took, or None.
        is_replaceable: other nodes are there for all that have to be left: waiting is what training pays for the checkpoint.
        is_held: nodes that stay hold every shard: no step depends on the checkpoint.
        now: Unix seconds.
        timeouts: the ladder.

    Returns:
        (wait, a clause for the reason).
    """
    end = stopped_at + timeouts.blind_wait_seconds if move.ends_at is None else move.ends_at - timeouts.prepare_deadline_seconds
    left = end - now
    if left <= 0:
        return False, "there was no time left for its checkpoint"
    if not is_held:
        return True, f"waits for its checkpoint: only the nodes that it leaves hold its last step, {_seconds(end - stopped_at)} were left"
    if not is_replaceable:
        return True, f"waits for its checkpoint while no node can take the place, {_seconds(end - stopped_at)} were left"
    expected = timeouts.final_round_seconds if upload_seconds is None else UPLOAD_MARGIN * upload_seconds
    took = "none was measured" if upload_seconds is None else f"the last one took {_seconds(upload_seconds)}"
    if stopped_at + expected > end:
        return False, f"did not wait for its checkpoint: {took}, {_seconds(end - stopped_at)} were left"
    if now >= stopped_at + expected:
        return False, f"waited no longer for its checkpoint: {took}"
    return True, f"waits for its checkpoint: {took}, {_seconds(end - stopped_at)} were left"


def in_words(node_id: NodeId, notice: Notice) -> str:
    """Return a sentence of evidence in AWS's words; without a running clock: it is stored, and told, when it changes."""
    return f"AWS announced for {node_id}: {notice.kind.value.replace('_', ' ')} ({notice.message})"


def _is_far(notice: Notice, now: float) -> bool:
    return notice.kind is NoticeKind.MAINTENANCE and notice.ends_at is not None and notice.ends_at - now > MAINTENANCE_LEAD_SECONDS


def _is_over(notice: Notice, now: float) -> bool:
    """Say whether a warning that is given once has not come true: the instance is still there long after its time."""
    return notice.kind in (NoticeKind.SPOT_INTERRUPTION, NoticeKind.CAPACITY_BLOCK_END) and now - (notice.ends_at or now) > OVER_SECONDS


def _is_ready(node: NodeObserved, now: float, timeouts: Timeouts) -> bool:
    is_there = node.is_connected and node.has_reported and not is_silent(node, timeouts) and node.instance is InstanceCondition.PRESENT
    return is_there and node.member is None and urgent(node, now) is None


def _seconds(seconds: float) -> str:
    return f"{max(0.0, seconds):.0f} s"
