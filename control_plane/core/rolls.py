"""Rolls: replace or reboot all nodes of a fleet, a few at a time.

    StartFleetRoll ──▶ next node ──▶ request ──▶ agreed stop, if a job uses the node ──▶ replaced or rebooted ─┐
                          ▲                            (`core.requests`, `core.moves`)                        │
                          └───────────── the next time at which each job has its full protection ◀────────────┘

A roll begins with spares, so that jobs move to finished nodes. A node has one request per roll: if a person cancels the
request, the roll does not repeat it.

Invariant: pure and level-triggered. A second decision on the result of the first one changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from control_plane.core.observed import causes
from control_plane.core.observed.facts import NodeRequest, Requested
from control_plane.core.observed.fleets import FleetJob, NodeRecord
from control_plane.core.observed.nodes import NodeObserved
from control_plane.core.observed.rolls import FleetRoll, RollProgress, RollStatus
from control_plane.core.states import LAUNCHED_JOBS, JobState, NodeState
from everstep.protocol.ids import NodeId

_WORKING = (NodeState.SPARE, NodeState.ASSIGNED)
_ENDING = (NodeState.DRAINING, NodeState.HELD, NodeState.GONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RollStep:
    """The next actions of the fleet loop for a roll."""

    progress: RollProgress
    """Equals the stored progress if nothing changed."""
    begun: tuple[NodeId, ...] = ()
    cancelled: tuple[NodeId, ...] = ()
    """Nodes whose requests the fleet withdraws, because a person has stopped the roll."""
    has_ended: bool = False


def decide(
    now: float,
    roll: FleetRoll,
    stored: RollProgress | None,
    rows: Mapping[NodeId, NodeRecord],
    *,
    unavailable_count: int,
    obstacle: causes.Obstacle | None,
    refusal: Callable[[NodeRecord], causes.Obstacle | None],
) -> RollStep:
    """Return the roll's progress, and the nodes that it begins to replace or reboot now."""
    known = stored if stored is not None and stored.roll_id == roll.roll_id else RollProgress(roll_id=roll.roll_id)
    if known.ended_at is not None:
        return RollStep(progress=known)
    finished = tuple(
        node_id
        for node_id in roll.node_ids
        if node_id in known.finished or _is_finished(rows.get(node_id), is_requested=node_id in known.requested)
    )
    known = replace(known, finished=finished)
    if roll.is_stopped:
        cancelled = tuple(node_id for node_id in known.current if _has_request(rows[node_id]))
        why = causes.RollStopped(finished_count=len(finished), node_count=len(roll.node_ids))
        return RollStep(progress=replace(known, ended_at=now, reason=why), cancelled=cancelled, has_ended=True)
    left = [node_id for node_id in roll.node_ids if node_id not in finished and node_id not in known.requested]
    if not left and not known.current:
        done = causes.RollDone(reboots=roll.reboots, node_count=len(roll.node_ids))
        return RollStep(progress=replace(known, ended_at=now, reason=done), has_ended=True)
    begun, reason = _next(roll, known, [rows[node_id] for node_id in left], unavailable_count, obstacle, refusal)
    return RollStep(progress=replace(known, requested=(*known.requested, *begun), reason=reason), begun=begun)


def _next(
    roll: FleetRoll,
    known: RollProgress,
    left: Sequence[NodeRecord],
    unavailable_count: int,
    obstacle: causes.Obstacle | None,
    refusal: Callable[[NodeRecord], causes.Obstacle | None],
) -> tuple[tuple[NodeId, ...], causes.Reason]:
    room = roll.max_unavailable - max(len(known.current), unavailable_count)
    if not left or roll.is_paused or (room <= 0 and known.current):
        return (), causes.Rolls(reboots=roll.reboots, node_ids=known.current, is_paused=roll.is_paused and bool(left))
    if obstacle is not None:
        return (), causes.RollWaits(because=obstacle)
    if room <= 0:
        few = causes.TooFewAvailable(unavailable_count=unavailable_count, max_unavailable=roll.max_unavailable)
        return (), causes.RollWaits(because=few)
    working = [row for row in left if row.state in _WORKING and row.request is None]
    if not working:
        return (), causes.RollWaits(because=causes.NotInService(node_id=left[0].node_id, state=left[0].state))
    in_order = sorted(working, key=lambda row: (row.state is not NodeState.SPARE, row.created_at, row.node_id))
    refusals = {row.node_id: refusal(row) for row in in_order}
    begun = tuple(node_id for node_id, refused in refusals.items() if refused is None)[:room]
    refused = next(iter(refusals.values()))
    if not begun and refused is not None:
        return (), causes.RollWaits(because=refused)
    return begun, causes.Rolls(reboots=roll.reboots, node_ids=(*known.current, *begun))


def _is_finished(row: NodeRecord | None, *, is_requested: bool) -> bool:
    """Return whether the roll needs no more work on a node: it was replaced or rebooted, or the roll skips it."""
    if row is None or row.state is NodeState.GONE:
        return True
    if is_requested:
        return row.state is NodeState.HELD or (row.state in _WORKING and row.request is None)
    return row.state in _ENDING


def status(roll: FleetRoll, progress: RollProgress) -> RollStatus:
    """Return the status of a roll, as the API shows it."""
    if progress.ended_at is not None:
        return RollStatus.COMPLETED if set(roll.node_ids) <= set(progress.finished) else RollStatus.STOPPED
    if roll.is_stopped:
        return RollStatus.STOPPED
    return RollStatus.PAUSED if roll.is_paused else RollStatus.IN_PROGRESS


def request_of(roll: FleetRoll, node_id: NodeId) -> Requested:
    """Return the request (REBOOT or REPLACE) that a roll makes for a node."""
    kind = NodeRequest.REBOOT if roll.reboots else NodeRequest.REPLACE
    return Requested(request=kind, node_id=node_id, by=roll.requested_by, note=roll.reason, is_roll=True)


def is_rolled(row: NodeRecord) -> bool:
    """Return whether a roll replaces the instance of a node. The hourly limit does not count it."""
    return row.state is NodeState.DRAINING and isinstance(row.reason, Requested) and row.reason.is_roll


def _has_request(row: NodeRecord) -> bool:
    return row.state in _WORKING and row.request is not None and row.request.is_roll


def obstacle_of(job: FleetJob, nodes: Sequence[NodeObserved]) -> causes.Obstacle | None:
    """Return why a job's state forbids to replace or reboot another node of its fleet now, or None."""
    if job.state not in LAUNCHED_JOBS:
        return None
    if job.state is not JobState.RUNNING:
        return causes.JobBusy(job=job.job, state=job.state)
    if not job.is_settled:
        return causes.JobUnsettled(job=job.job)
    for node in nodes:
        for shard in node.member.protection if node.member is not None else ():
            in_view = {*shard.in_view}
            missing = tuple(holder for holder in shard.holders if holder not in in_view)
            if missing or shard.reason:
                return causes.ShardUnprotected(job=job.job, rank=shard.rank, missing=missing, text=shard.reason)
    return None
