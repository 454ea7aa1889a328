"""Rolls: replace or reboot all nodes of a fleet, a few at a time.

    StartFleetRoll ──▶ next node ──▶ request ──▶ agreed stop, if a job uses the node ──▶ replaced or rebooted ─┐
                          ▲                            (`core.requests`, `core.moves`)                        │
                          └───────────── the next time at which each job has its full protection ◀────────────┘

A roll makes the requests that a person could make with ReplaceNode or RebootNode. It begins with the next node only
while each job of the fleet has its full protection (no open incident, and a copy on every holder). It begins with no
node if more than `max_unavailable` nodes would then be out of service. The roll begins with spares, so that jobs later
move to nodes that were already replaced or rebooted. A node has one request per roll: if a person cancels the request,
the roll does not repeat it.

The database stores the roll and its progress, so a roll continues after a restart of the control plane.

Invariant: pure and level-triggered. A second decision on the result of the first one changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from control_plane.core.observed.fleets import FleetJob, NodeRecord, NodeRequest
from control_plane.core.observed.nodes import NodeObserved
from control_plane.core.observed.rolls import FleetRoll, RollProgress, RollStatus
from control_plane.core.states import LAUNCHED_JOBS, JobState, NodeState
from everstep.protocol.ids import NodeId

_WORKING = (NodeState.SPARE, NodeState.ASSIGNED)
_ENDING = (NodeState.DRAINING, NodeState.HELD, NodeState.GONE)
_PREFIX = "the roll of the fleet "


@dataclass(frozen=True, slots=True, kw_only=True)
class RollStep:
    """The result of `decide`: what the fleet loop does now to replace or reboot all nodes of a fleet (a roll)."""

    progress: RollProgress
    """The progress to store. Equals the stored progress if nothing changed."""
    begun: tuple[NodeId, ...] = ()
    """Nodes whose replacement or reboot begins now: the fleet loop stores a request in the row of each."""
    cancelled: tuple[NodeId, ...] = ()
    """Nodes whose pending request the roll withdraws, because a person has stopped the roll."""
    has_ended: bool = False
    """Whether the roll ends now: all nodes are finished, or a person has stopped it."""


def decide(
    now: float,
    roll: FleetRoll,
    stored: RollProgress | None,
    rows: Mapping[NodeId, NodeRecord],
    *,
    unavailable_count: int,
    obstacle: str,
    refusal: Callable[[NodeRecord], str],
) -> RollStep:
    """Return which nodes a roll begins to replace or reboot now, and the roll's progress.

    Args:
        now: Unix seconds.
        roll: the newest request of a person for a roll, which may have ended.
        stored: the progress that the previous decision stored. Progress of an earlier roll is ignored.
        rows: the fleet's nodes that have not ended.
        unavailable_count: number of nodes that the fleet needs and that are not in service.
        obstacle: reason why the roll must wait, for example a job without full protection. Empty without a reason.
        refusal: returns the reason why the fleet cannot fulfil the roll's request for a node, or an empty string.

    Returns:
        The progress, and the nodes to replace or reboot now: at most `roll.max_unavailable`.
    """
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
        words = f"stopped after {len(finished)} of {len(roll.node_ids)} nodes"
        return RollStep(progress=replace(known, ended_at=now, reason=words), cancelled=cancelled, has_ended=True)
    left = [node_id for node_id in roll.node_ids if node_id not in finished and node_id not in known.requested]
    if not left and not known.current:
        words = f"all {len(roll.node_ids)} nodes are {_done(roll)}"
        return RollStep(progress=replace(known, ended_at=now, reason=words), has_ended=True)
    begun, words = _next(roll, known, [rows[node_id] for node_id in left], unavailable_count, obstacle, refusal)
    return RollStep(progress=replace(known, requested=(*known.requested, *begun), reason=words), begun=begun)


def _next(
    roll: FleetRoll,
    known: RollProgress,
    left: Sequence[NodeRecord],
    unavailable_count: int,
    obstacle: str,
    refusal: Callable[[NodeRecord], str],
) -> tuple[tuple[NodeId, ...], str]:
    """Return the nodes that a roll replaces or reboots now, and a clause that says what it does or waits for."""
    current = ", ".join(known.current)
    verb = _verb(roll)
    if not left:
        return (), f"{verb} {current}"
    if roll.is_paused:
        return (), f"paused; {verb} {current}" if current else "paused"
    room = roll.max_unavailable - max(len(known.current), unavailable_count)
    if room <= 0 and current:
        return (), f"{verb} {current}"
    if obstacle:
        return (), f"waits: {obstacle}"
    if room <= 0:
        return (), f"waits: unavailable nodes: {unavailable_count}, MaxUnavailable: {roll.max_unavailable}"
    working = [row for row in left if row.state in _WORKING and row.request is None]
    if not working:
        return (), f"waits until {left[0].node_id} is in service; it is {left[0].state}"
    in_order = sorted(working, key=lambda row: (row.state is not NodeState.SPARE, row.created_at, row.node_id))
    refusals = {row.node_id: refusal(row) for row in in_order}
    begun = tuple(node_id for node_id, words in refusals.items() if not words)[:room]
    if not begun:
        return (), f"waits: {next(iter(refusals.values()))}"
    return begun, f"{verb} {', '.join((*known.current, *begun))}"


def _is_finished(row: NodeRecord | None, *, is_requested: bool) -> bool:
    """Return whether the roll needs no more work on a node: the node was replaced or rebooted, or the roll skips it."""
    if row is None or row.state is NodeState.GONE:
        return True
    if is_requested:
        return row.state is NodeState.HELD or (row.state in _WORKING and row.request is None)
    return row.state in _ENDING


def status(roll: FleetRoll, progress: RollProgress) -> RollStatus:
    """Return the status of a roll (replacement or reboot of all nodes of a fleet), as the API shows it."""
    if progress.ended_at is not None:
        return RollStatus.COMPLETED if set(roll.node_ids) <= set(progress.finished) else RollStatus.STOPPED
    if roll.is_stopped:
        return RollStatus.STOPPED
    return RollStatus.PAUSED if roll.is_paused else RollStatus.IN_PROGRESS


def request_of(roll: FleetRoll) -> NodeRequest:
    """Return the request (REBOOT or REPLACE) that a roll, which covers all nodes of a fleet, makes for each node."""
    return NodeRequest.REBOOT if roll.reboots else NodeRequest.REPLACE


def in_words(roll: FleetRoll, node_id: NodeId) -> str:
    """Return a clause that says that a roll reboots or replaces a node, for reason texts and incidents."""
    why = f": {roll.reason}" if roll.reason else ""
    return f"{_PREFIX}{_verb(roll)} {node_id} ({roll.requested_by}){why}"


def is_rolled(row: NodeRecord) -> bool:
    """Return whether the fleet terminates a node because a roll replaces its instance.

    The hourly limit of replacements does not count such terminations.
    """
    return row.state is NodeState.DRAINING and row.reason.startswith(_PREFIX)


def _has_request(row: NodeRecord) -> bool:
    return row.state in _WORKING and row.request is not None and row.request_words.startswith(_PREFIX)


def _verb(roll: FleetRoll) -> str:
    return "reboots" if roll.reboots else "replaces"


def _done(roll: FleetRoll) -> str:
    return "rebooted" if roll.reboots else "replaced"


def obstacle_of(job: FleetJob, nodes: Sequence[NodeObserved]) -> str:
    """Return why a job's state forbids to replace or reboot another node of its fleet now, or an empty string.

    Args:
        job: a job of the fleet, in any state.
        nodes: the nodes that are assigned to the job, with their agents' reports.

    Returns:
        A clause, or an empty string if the job was never launched, or if it trains without an open incident and every
        holder has its copies.
    """
    if job.state not in LAUNCHED_JOBS:
        return ""
    if job.state is not JobState.RUNNING:
        return f"{job.job} is {job.state}"
    if not job.is_settled:
        return f"{job.job} has an open incident, or has committed no step since its last launch"
    for node in nodes:
        for shard in node.member.protection if node.member is not None else ():
            missing = [holder for holder in shard.holders if holder not in shard.in_view]
            if missing or shard.reason:
                why = shard.reason or f"{', '.join(missing)} does not hold it"
                return f"the shard of rank {shard.rank} of {job.job} is not fully protected: {why}"
    return ""
