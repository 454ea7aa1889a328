"""The states of everything that has a life, and one table of transitions each.

Invariant: a state changes only by `advance` through its table; what a user sees is derived from it and never stored
beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

from control_plane.errors import InvalidTransition


class JobState(StrEnum):
    """The states of a job.

    QUEUED: The job waits for its turn in the fleet. Left when admitted, stopped or pending for too long.
    ALLOCATING: The job is admitted and its gang of nodes is incomplete. Left when the gang is assigned. It returns to
        QUEUED for a job of higher priority, or when its nodes do not come.
    PREPARING: A generation has a number, and its members promise it. Left when all have promised and a plan is stored.
    LOADING: The plan is stored and members fetch shards. Left when every node has verified its shards.
    STARTING: The ranks are being started. Left when all run.
    RUNNING: The ranks train.
    PAUSING: An agreed stop is requested to free the nodes, for a job of higher priority or for a person. Left for
        QUEUED when the step is a checkpoint.
    STOPPING: An agreed stop is requested. Left when all ranks have exited.
    COMPLETED: Every rank ended with success. Final.
    FAILED: No new generation can help. Final.
    STOPPED: A user or a limit ended the job. Final.

    A fault in any state from PREPARING to PAUSING leads back to PREPARING, with an open incident.
    """

    QUEUED = "queued"
    ALLOCATING = "allocating"
    PREPARING = "preparing"
    LOADING = "loading"
    STARTING = "starting"
    RUNNING = "running"
    PAUSING = "pausing"
    STOPPING = "stopping"
    COMPLETED = "completed"
    FAILED = "failed"
    STOPPED = "stopped"


class JobEvent(StrEnum):
    """The events that move a job.

    ADMITTED: The fleet has room for the job.
    SENT_BACK: Another job goes first, a person paused the job, or its nodes do not come.
    GANG_ASSIGNED: All its nodes are assigned.
    PLANNED: All members promised and the plan is made.
    LOADED: Every node has verified its shards.
    STARTED: Ranks run on every node.
    FAULTED: The generation is over and another one begins.
    PAUSE_ASKED: A job of higher priority or a person requests a pause.
    PAUSED: The state is in S3 and the nodes are free.
    STOP_ASKED: A user or a limit requests a stop.
    FINISHED: Every rank exited with success.
    HALTED: Every rank exited after a stop, or none had started.
    GAVE_UP: No new generation can help.
    """

    ADMITTED = "admitted"
    SENT_BACK = "sent_back"
    GANG_ASSIGNED = "gang_assigned"
    PLANNED = "planned"
    LOADED = "loaded"
    STARTED = "started"
    FAULTED = "faulted"
    PAUSE_ASKED = "pause_asked"
    PAUSED = "paused"
    STOP_ASKED = "stop_asked"
    FINISHED = "finished"
    HALTED = "halted"
    GAVE_UP = "gave_up"


class NodeState(StrEnum):
    """The states of a node in its fleet.

    JOINING: EC2 has the instance, and its agent has not connected. Left when it connects or is too late, or the
        instance ends.
    SPARE: The agent is connected and the node is free. Left by assignment, a scale-down or a fault.
    ASSIGNED: The node belongs to one job. Left when the job ends or excludes it.
    HELD: The node is neither used nor ended: unreachable, distrusted, or kept for inspection. An unreachable node is
        left alone until it is heard again, any other until a person decides.
    REBOOTING: EC2 reboots the node for a fault that a reboot repairs. Left when its agent is back without the fault, or
        is too late.
    DRAINING: The node is excluded or surplus, and EC2 ends it. Left when EC2 reports that.
    GONE: The instance has ended. Final.
    """

    JOINING = "joining"
    SPARE = "spare"
    ASSIGNED = "assigned"
    HELD = "held"
    REBOOTING = "rebooting"
    DRAINING = "draining"
    GONE = "gone"


class NodeEvent(StrEnum):
    """The events that move a node.

    CONNECTED: Its agent connected.
    ASSIGNED: The node is assigned to a job.
    RELEASED: Its job ended or left it, its agent is heard again, or a person lets it work again.
    EXCLUDED: A job's verdict, surplus of the fleet, or a person excludes it.
    HELD: The node is to be kept and not used.
    REBOOTED: A verdict calls for a reboot.
    ENDED: EC2 reports that the instance ends or has ended.
    """

    CONNECTED = "connected"
    ASSIGNED = "assigned"
    RELEASED = "released"
    EXCLUDED = "excluded"
    HELD = "held"
    REBOOTED = "rebooted"
    ENDED = "ended"


class IncidentState(StrEnum):
    """The states of an incident; the first three are measured phases.

    REPLACING: The failure is detected. Left when all nodes of the new generation have promised.
    RESTORING: Members load and ranks start. Left when every rank has passed its base.
    REWORKING: Training repeats lost steps. Left when it is where it was before the failure.
    CLOSED: The incident is over. Final.

    Another failure before CLOSED leads back to REPLACING within the same incident.
    """

    REPLACING = "replacing"
    RESTORING = "restoring"
    REWORKING = "reworking"
    CLOSED = "closed"


class IncidentEvent(StrEnum):
    """The events that move an incident.

    NODES_THERE: All nodes of the new generation have promised.
    TRAINING_AGAIN: Every rank has passed its base.
    CAUGHT_UP: Training is where it was before the failure.
    FAILED_AGAIN: Another failure came before the incident was over.
    JOB_ENDED: The job ended.
    """

    NODES_THERE = "nodes_there"
    TRAINING_AGAIN = "training_again"
    CAUGHT_UP = "caught_up"
    FAILED_AGAIN = "failed_again"
    JOB_ENDED = "job_ended"


class IncidentPhase(StrEnum):
    """What of a recovery goes on, as users are told: the same as `IncidentState`, by the measured phase.

    CLOSED: none does any more.
    """

    REPLACE = "replace"
    RESTORE = "restore"
    REWORK = "rework"
    CLOSED = "closed"


INCIDENT_PHASES: Mapping[IncidentState, IncidentPhase] = {
    IncidentState.REPLACING: IncidentPhase.REPLACE,
    IncidentState.RESTORING: IncidentPhase.RESTORE,
    IncidentState.REWORKING: IncidentPhase.REWORK,
    IncidentState.CLOSED: IncidentPhase.CLOSED,
}


class FleetStatus(StrEnum):
    """Whether a fleet may act on its group; derived at every pass from what is observed, so it has no transitions.

    ACTIVE: all actions. FROZEN: the group is not as the contract says, or most agents are silent at once: nothing is
    ended until that passes. DELETING: nodes are ended one by one; then the fleet is forgotten.
    """

    ACTIVE = "active"
    FROZEN = "frozen"
    DELETING = "deleting"


JOB_TRANSITIONS: Mapping[tuple[JobState, JobEvent], JobState] = {
    (JobState.QUEUED, JobEvent.ADMITTED): JobState.ALLOCATING,
    (JobState.QUEUED, JobEvent.HALTED): JobState.STOPPED,
    (JobState.QUEUED, JobEvent.GAVE_UP): JobState.FAILED,
    (JobState.ALLOCATING, JobEvent.GANG_ASSIGNED): JobState.PREPARING,
    (JobState.ALLOCATING, JobEvent.SENT_BACK): JobState.QUEUED,
    (JobState.ALLOCATING, JobEvent.HALTED): JobState.STOPPED,
    (JobState.ALLOCATING, JobEvent.GAVE_UP): JobState.FAILED,
    (JobState.PREPARING, JobEvent.PLANNED): JobState.LOADING,
    (JobState.PREPARING, JobEvent.PAUSED): JobState.QUEUED,
    (JobState.PREPARING, JobEvent.FAULTED): JobState.PREPARING,
    (JobState.PREPARING, JobEvent.HALTED): JobState.STOPPED,
    (JobState.PREPARING, JobEvent.GAVE_UP): JobState.FAILED,
    (JobState.LOADING, JobEvent.LOADED): JobState.STARTING,
    (JobState.LOADING, JobEvent.FAULTED): JobState.PREPARING,
    (JobState.LOADING, JobEvent.HALTED): JobState.STOPPED,
    (JobState.LOADING, JobEvent.GAVE_UP): JobState.FAILED,
    (JobState.STARTING, JobEvent.STARTED): JobState.RUNNING,
    (JobState.STARTING, JobEvent.STOP_ASKED): JobState.STOPPING,
    (JobState.STARTING, JobEvent.FAULTED): JobState.PREPARING,
    (JobState.STARTING, JobEvent.GAVE_UP): JobState.FAILED,
    (JobState.RUNNING, JobEvent.PAUSE_ASKED): JobState.PAUSING,
    (JobState.RUNNING, JobEvent.STOP_ASKED): JobState.STOPPING,
    (JobState.RUNNING, JobEvent.FAULTED): JobState.PREPARING,
    (JobState.RUNNING, JobEvent.FINISHED): JobState.COMPLETED,
    (JobState.RUNNING, JobEvent.GAVE_UP): JobState.FAILED,
    (JobState.PAUSING, JobEvent.PAUSED): JobState.QUEUED,
    (JobState.PAUSING, JobEvent.STOP_ASKED): JobState.STOPPING,
    (JobState.PAUSING, JobEvent.FAULTED): JobState.PREPARING,
    (JobState.PAUSING, JobEvent.FINISHED): JobState.COMPLETED,
    (JobState.PAUSING, JobEvent.GAVE_UP): JobState.FAILED,
    (JobState.STOPPING, JobEvent.HALTED): JobState.STOPPED,
    (JobState.STOPPING, JobEvent.FINISHED): JobState.COMPLETED,
    (JobState.STOPPING, JobEvent.GAVE_UP): JobState.FAILED,
}

NODE_TRANSITIONS: Mapping[tuple[NodeState, NodeEvent], NodeState] = {
    (NodeState.JOINING, NodeEvent.CONNECTED): NodeState.SPARE,
    (NodeState.JOINING, NodeEvent.EXCLUDED): NodeState.DRAINING,
    (NodeState.JOINING, NodeEvent.ENDED): NodeState.GONE,
    (NodeState.SPARE, NodeEvent.ASSIGNED): NodeState.ASSIGNED,
    (NodeState.SPARE, NodeEvent.EXCLUDED): NodeState.DRAINING,
    (NodeState.SPARE, NodeEvent.HELD): NodeState.HELD,
    (NodeState.SPARE, NodeEvent.REBOOTED): NodeState.REBOOTING,
    (NodeState.SPARE, NodeEvent.ENDED): NodeState.GONE,
    (NodeState.ASSIGNED, NodeEvent.RELEASED): NodeState.SPARE,
    (NodeState.ASSIGNED, NodeEvent.EXCLUDED): NodeState.DRAINING,
    (NodeState.ASSIGNED, NodeEvent.HELD): NodeState.HELD,
    (NodeState.ASSIGNED, NodeEvent.REBOOTED): NodeState.REBOOTING,
    (NodeState.ASSIGNED, NodeEvent.ENDED): NodeState.GONE,
    (NodeState.HELD, NodeEvent.RELEASED): NodeState.SPARE,
    (NodeState.HELD, NodeEvent.EXCLUDED): NodeState.DRAINING,
    (NodeState.HELD, NodeEvent.ENDED): NodeState.GONE,
    (NodeState.REBOOTING, NodeEvent.CONNECTED): NodeState.SPARE,
    (NodeState.REBOOTING, NodeEvent.EXCLUDED): NodeState.DRAINING,
    (NodeState.REBOOTING, NodeEvent.HELD): NodeState.HELD,
    (NodeState.REBOOTING, NodeEvent.ENDED): NodeState.GONE,
    (NodeState.DRAINING, NodeEvent.ENDED): NodeState.GONE,
}

INCIDENT_TRANSITIONS: Mapping[tuple[IncidentState, IncidentEvent], IncidentState] = {
    (IncidentState.REPLACING, IncidentEvent.NODES_THERE): IncidentState.RESTORING,
    (IncidentState.REPLACING, IncidentEvent.FAILED_AGAIN): IncidentState.REPLACING,
    (IncidentState.REPLACING, IncidentEvent.JOB_ENDED): IncidentState.CLOSED,
    (IncidentState.RESTORING, IncidentEvent.TRAINING_AGAIN): IncidentState.REWORKING,
    (IncidentState.RESTORING, IncidentEvent.FAILED_AGAIN): IncidentState.REPLACING,
    (IncidentState.RESTORING, IncidentEvent.JOB_ENDED): IncidentState.CLOSED,
    (IncidentState.REWORKING, IncidentEvent.CAUGHT_UP): IncidentState.CLOSED,
    (IncidentState.REWORKING, IncidentEvent.FAILED_AGAIN): IncidentState.REPLACING,
    (IncidentState.REWORKING, IncidentEvent.JOB_ENDED): IncidentState.CLOSED,
}

S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=StrEnum)

ENDED_JOBS = frozenset({JobState.COMPLETED, JobState.FAILED, JobState.STOPPED})
LAUNCHED_JOBS = frozenset(
    {JobState.PREPARING, JobState.LOADING, JobState.STARTING, JobState.RUNNING, JobState.PAUSING, JobState.STOPPING}
)
"""States in which a job has a generation, and so nodes that know of it."""
HOLDING_JOBS = LAUNCHED_JOBS | {JobState.ALLOCATING}
"""States in which a job's nodes count towards the fleet's size."""


def advance(table: Mapping[tuple[S, E], S], entity: str, state: S, event: E, story: tuple[str, ...] = ()) -> S:
    """Return the state after `event`.

    Args:
        table: one of this module's tables.
        entity: what it is about, for the error: `job gpt`.
        state: the state now.
        event: what happened.
        story: how it came here, for the error.

    Returns:
        The next state; it may be the same.

    Raises:
        InvalidTransition: the table has no such pair.
    """
    try:
        return table[state, event]
    except KeyError:
        raise InvalidTransition(entity, state, event, story) from None


class TrainingJobStatus(StrEnum):
    """What the API calls `TrainingJobStatus`; SageMaker's words. Derived by `training_job_status`."""

    IN_PROGRESS = "InProgress"
    COMPLETED = "Completed"
    FAILED = "Failed"
    STOPPING = "Stopping"
    STOPPED = "Stopped"


class ProtectionState(StrEnum):
    """How well a job's state is kept in memory right now.

    PROTECTED: every shard has all its copies. DEGRADED: some shard has fewer, or snapshots are refused. UNPROTECTED: no
    step is kept in memory.
    """

    PROTECTED = "Protected"
    DEGRADED = "Degraded"
    UNPROTECTED = "Unprotected"


class SecondaryStatus(StrEnum):
    """What the API calls `SecondaryStatus`; SageMaker's words where it has one. Derived by `secondary_status`."""

    PENDING = "Pending"
    STARTING = "Starting"
    DOWNLOADING = "Downloading"
    TRAINING = "Training"
    RESTARTING = "Restarting"
    INTERRUPTED = "Interrupted"
    PAUSING = "Pausing"
    PAUSED = "Paused"
    STOPPING = "Stopping"
    COMPLETED = "Completed"
    FAILED = "Failed"
    STOPPED = "Stopped"


_STATUS = {
    JobState.COMPLETED: TrainingJobStatus.COMPLETED,
    JobState.FAILED: TrainingJobStatus.FAILED,
    JobState.STOPPED: TrainingJobStatus.STOPPED,
    JobState.STOPPING: TrainingJobStatus.STOPPING,
}
_SECONDARY = {
    JobState.QUEUED: SecondaryStatus.PENDING,
    JobState.ALLOCATING: SecondaryStatus.STARTING,
    JobState.PREPARING: SecondaryStatus.STARTING,
    JobState.LOADING: SecondaryStatus.DOWNLOADING,
    JobState.STARTING: SecondaryStatus.STARTING,
    JobState.RUNNING: SecondaryStatus.TRAINING,
    JobState.PAUSING: SecondaryStatus.INTERRUPTED,
    JobState.STOPPING: SecondaryStatus.STOPPING,
    JobState.COMPLETED: SecondaryStatus.COMPLETED,
    JobState.FAILED: SecondaryStatus.FAILED,
    JobState.STOPPED: SecondaryStatus.STOPPED,
}


def training_job_status(state: JobState, *, is_stop_requested: bool = False) -> TrainingJobStatus:
    """Return what a user sees of a job.

    Args:
        state: the stored state.
        is_stop_requested: somebody asked it to stop and it has not yet.

    Returns:
        One of SageMaker's words; a request to stop shows at once.
    """
    status = _STATUS.get(state, TrainingJobStatus.IN_PROGRESS)
    return TrainingJobStatus.STOPPING if is_stop_requested and status is TrainingJobStatus.IN_PROGRESS else status


def secondary_status(
    state: JobState,
    *,
    has_started: bool = False,
    has_stepped: bool = False,
    is_stepping: bool = False,
    is_stop_requested: bool = False,
    is_pause_requested: bool = False,
) -> SecondaryStatus:
    """Return the finer status that a user sees of a job.

    Args:
        state: the stored state.
        has_started: the job has had nodes and a launch before.
        has_stepped: a launch of the job has made a step.
        is_stepping: the newest launch has made a new step.
        is_stop_requested: somebody asked it to stop and it has not yet.
        is_pause_requested: a person paused it and has not resumed it since.

    Returns:
        The status. A request to stop or to pause shows at once. A launch counts as training from its first new step on:
        before, it is a start, or a restart of a job that has made steps. A job that waits for nodes again is
        interrupted.
    """
    if state in ENDED_JOBS:
        return _SECONDARY[state]
    if is_stop_requested:
        return SecondaryStatus.STOPPING
    if is_pause_requested:
        return SecondaryStatus.PAUSED if state is JobState.QUEUED else SecondaryStatus.PAUSING
    is_launching = state in (JobState.PREPARING, JobState.LOADING, JobState.STARTING) or (
        state is JobState.RUNNING and not is_stepping
    )
    if is_launching and has_stepped:
        return SecondaryStatus.RESTARTING
    if is_launching and state is JobState.RUNNING:
        return SecondaryStatus.STARTING
    if has_started and state in (JobState.QUEUED, JobState.ALLOCATING):
        return SecondaryStatus.INTERRUPTED
    return _SECONDARY[state]
