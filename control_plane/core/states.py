"""States and transition tables of jobs, nodes and incidents.

Invariant: a stored state changes only through `advance` and its table. The statuses that users see are derived.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

from control_plane.errors import InvalidTransition


class JobState(StrEnum):
    """The states of a job.

    QUEUED: The job waits in the fleet's queue. The job leaves this state when the fleet admits it, when a user stops
        it, or when it exceeds its limit for pending time.
    ALLOCATING: The fleet has admitted the job and assigns its nodes, all together (a gang). The job leaves this state
        when the gang is complete. It returns to QUEUED for a job of higher priority, or when its nodes do not arrive in
        time.
    PREPARING: The job has a new generation number, and its members promise to join that generation. The job leaves this
        state when all members have promised and the plan is stored.
    LOADING: The plan is stored, and the members load their shards. The job leaves this state when every node has
        verified its shards.
    STARTING: The nodes start their ranks. The job leaves this state when all ranks run.
    RUNNING: The ranks train.
    PAUSING: The control plane has requested that all ranks stop at one agreed step, because a job of higher priority
        needs the nodes or a person paused the job. The job returns to QUEUED when a checkpoint holds its last step.
    STOPPING: The control plane has requested that all ranks stop at one agreed step. The job leaves this state when all
        ranks have exited.
    COMPLETED: Every rank exited with success. Final.
    FAILED: The control plane ended the job, because another generation would fail too. Final.
    STOPPED: A user or a limit ended the job. Final.

    A fault in any state from PREPARING to PAUSING returns the job to PREPARING and opens an incident.
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
    """The events that change the state of a job.

    ADMITTED: The fleet has enough nodes for the job.
    SENT_BACK: A job that waits for its nodes returns to the queue: another job has precedence, a person paused the
        job, or its nodes did not arrive in time.
    GANG_ASSIGNED: The fleet has assigned all nodes of the job.
    PLANNED: All members promised to join the generation, and its plan is complete.
    LOADED: Every node has verified its shards.
    STARTED: Ranks run on every node.
    FAULTED: A fault ended the generation, and a new generation starts.
    PAUSE_ASKED: A job of higher priority or a person requests a pause of the running job.
    PAUSED: S3 has a checkpoint of the last step, and the nodes are free.
    STOP_ASKED: A user or a limit requests a stop.
    FINISHED: Every rank exited with success.
    HALTED: The job stopped as requested: every rank has exited, or no rank had started.
    GAVE_UP: The control plane ends the job, because another generation would fail too.
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

    JOINING: EC2 has the instance, and its agent has not connected yet. The node leaves this state when the agent
        connects, when the join limit passes, or when the instance ends.
    SPARE: The agent is connected, and no job uses the node. The node leaves this state when it is assigned, is surplus,
        or has a fault.
    ASSIGNED: One job uses the node. The node leaves this state when the job ends or excludes the node.
    HELD: The fleet neither uses nor terminates the node, because the node is unreachable or distrusted, or kept for
        inspection or at a person's request. An unreachable node leaves this state when its agent reports again. Any
        other node leaves this state when a person decides.
    REBOOTING: EC2 reboots the node for a fault that a reboot can repair. The node leaves this state when its agent
        reports without the fault, or when the reboot limit passes.
    DRAINING: The node is excluded or surplus, and EC2 terminates it. The node leaves this state when EC2 reports the
        end.
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
    """The events that change the state of a node.

    CONNECTED: The node's agent connected.
    ASSIGNED: The fleet assigned the node to a job.
    RELEASED: The node becomes free. Its job ended or gave the node up, its agent reports again, or a person returned
        the node to service.
    EXCLUDED: The node's job has concluded that the node is lost or faulty, a person has excluded the node, or the fleet
        has more nodes than it needs.
    HELD: The fleet keeps the node, but no job may use it.
    REBOOTED: A fault or a person's request requires a reboot.
    ENDED: EC2 reports that the instance is ending or has ended.
    """

    CONNECTED = "connected"
    ASSIGNED = "assigned"
    RELEASED = "released"
    EXCLUDED = "excluded"
    HELD = "held"
    REBOOTED = "rebooted"
    ENDED = "ended"


class IncidentState(StrEnum):
    """The states of an incident. The first three states are phases whose duration Everstep measures.

    REPLACING: Everstep has detected the failure. The phase ends when all nodes have promised to join the new
        generation.
    RESTORING: Members load shards, and ranks start. The phase ends when all ranks have restored the base step, and one
        rank has completed a later step.
    REWORKING: Training repeats lost steps. The phase ends when training reaches the newest step before the failure.
    CLOSED: The incident is over. Final.

    Another failure before CLOSED returns the incident to REPLACING.
    """

    REPLACING = "replacing"
    RESTORING = "restoring"
    REWORKING = "reworking"
    CLOSED = "closed"


class IncidentEvent(StrEnum):
    """The events that change the state of an incident.

    NODES_THERE: All nodes have promised to join the new generation.
    TRAINING_AGAIN: All ranks have restored the base step, and one rank has completed a later step.
    CAUGHT_UP: Training has reached the newest step before the failure.
    FAILED_AGAIN: Another failure occurred before the incident closed.
    JOB_ENDED: The job ended or was paused, or a failure opened the next incident before training had caught up.
    """

    NODES_THERE = "nodes_there"
    TRAINING_AGAIN = "training_again"
    CAUGHT_UP = "caught_up"
    FAILED_AGAIN = "failed_again"
    JOB_ENDED = "job_ended"


class IncidentPhase(StrEnum):
    """The phase of an incident's recovery, as the API reports it.

    Each value corresponds to one `IncidentState`. CLOSED means that the recovery is over.
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
    """Whether a fleet may change its Auto Scaling group and end instances.

    The control plane derives the status from its observations and does not store it.

    - ACTIVE: the fleet takes all actions.
    - FROZEN: the group's settings differ from the registered settings, or most agents are silent at the same time.
      Until this condition ends, the fleet terminates only instances that AWS is ending.
    - DELETING: the fleet terminates its nodes one by one. Then the control plane deletes the fleet.
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
"""States in which a job has a generation. Nodes may then hold the job's state."""
RUNNING_JOBS = frozenset({JobState.RUNNING, JobState.PAUSING, JobState.STOPPING})
HOLDING_JOBS = LAUNCHED_JOBS | {JobState.ALLOCATING}
"""States in which a job's nodes count towards the fleet's desired capacity."""


def advance(table: Mapping[tuple[S, E], S], entity: str, state: S, event: E, story: tuple[str, ...] = ()) -> S:
    """Return the state after `event`, which may equal `state`.

    Raises InvalidTransition, with `entity` and the reasons of earlier transitions (`story`), if the table has no entry.
    """
    try:
        return table[state, event]
    except KeyError:
        raise InvalidTransition(entity, state, event, story) from None


class TrainingJobStatus(StrEnum):
    """The API field `TrainingJobStatus`, with SageMaker's values.

    `training_job_status` derives it.
    """

    IN_PROGRESS = "InProgress"
    COMPLETED = "Completed"
    FAILED = "Failed"
    STOPPING = "Stopping"
    STOPPED = "Stopped"


class ProtectionState(StrEnum):
    """The degree to which copies in the memory of nodes protect a job's training state.

    - PROTECTED: every shard has all its copies of a step of the newest generation.
    - DEGRADED: at least one shard lacks a copy, or ranks skip snapshots.
    - UNPROTECTED: memory holds no complete step, or training goes on and nodes keep no further step (a lapse).
    """

    PROTECTED = "Protected"
    DEGRADED = "Degraded"
    UNPROTECTED = "Unprotected"


class SecondaryStatus(StrEnum):
    """The API field `SecondaryStatus`, with SageMaker's values where SageMaker has such a status.

    `secondary_status` derives it.
    """

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
    COMPLETED_WITH_OLDER_CHECKPOINT = "CompletedWithOlderCheckpoint"
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
    """Return the `TrainingJobStatus` of a job, which shows a requested stop immediately."""
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
    has_older_checkpoint: bool = False,
) -> SecondaryStatus:
    """Return the `SecondaryStatus` of a job, which shows a requested stop or pause immediately."""
    if state is JobState.COMPLETED and has_older_checkpoint:
        return SecondaryStatus.COMPLETED_WITH_OLDER_CHECKPOINT
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
