"""Incidents and failures of a job, as the control plane stores them."""

from __future__ import annotations

from dataclasses import dataclass

from control_plane.core.observed.nodes import Cause
from control_plane.core.states import IncidentState
from everstep.protocol.agent_messages import ExitClass
from everstep.protocol.ids import FIRST_STEP, Generation, NodeId, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRecord:
    """A failure that the job itself may have caused.

    The control plane decides from these records whether the job retries.
    """

    generation: Generation
    step: Step
    exit_class: ExitClass | None
    """How the rank exited. None if no rank exited, because a load failed or the ranks hung."""
    code: int
    at: float
    max_boundary: Step
    """The newest step that any generation had finished before this failure."""
    last_lines: str = ""
    words: str = ""
    """A sentence about how the first failed rank ended, with advice, for example to use less memory.

    Empty if the control plane knows only exit class and code.
    """
    is_hang: bool = False
    """Whether the failure was a hang: the ranks made no progress, but no process ended."""
    node_id: NodeId | None = None
    """The node whose rank failed first.

    After a hang, the node for which all other nodes waited, or None if this node is unclear.
    """
    base_step: Step = FIRST_STEP
    """The step from which the failed generation started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentRecord:
    """A failure and its recovery, as the control plane stores them."""

    id: str
    state: IncidentState
    cause: Cause
    evidence: tuple[str, ...]
    decision: str
    reason: str
    generation_before: Generation
    failed_at: float
    opened_at: float
    reached_step: Step
    """The newest step that training had finished before the failure."""
    earliest_failure_at: float = 0.0
    """Lower bound of `failed_at` in Unix seconds: the end of the job's previous incident, or the start of the job.

    The incidents of a job therefore never overlap.
    """
    generation_after: Generation | None = None
    from_step: Step | None = None
    """The step from which training resumed."""
    restore_source: str | None = None
    """The farthest kind of source from which any rank restored its shard, from `local` to `s3`."""
    instance_ids: tuple[NodeId, ...] = ()
    """The nodes that failed, that AWS took, or that the job gave up in this incident."""
    faulted_instance_ids: tuple[NodeId, ...] = ()
    """The nodes on which the failure occurred, whether or not the job gave these nodes up."""
    lost_node_count: int = 0
    """Number of nodes in `instance_ids` that failed or that AWS reclaimed."""
    node_count_before: int = 0
    """Number of nodes of the generation that the incident ended. 0 until the next generation has a plan."""
    node_count_after: int = 0
    """Number of nodes of the newest generation of this recovery. 0 until that generation has a plan."""
    kept_instance_ids: tuple[NodeId, ...] = ()
    """Faulty nodes that the job kept for the next generation.

    Without them, the job would have lost a committed step.
    """
    replacement_instance_ids: tuple[NodeId, ...] = ()
    replaced_at: float | None = None
    restored_at: float | None = None
    closed_at: float | None = None
    is_given_up: bool = False
    """Whether the job ended or was paused before training had caught up, so this recovery was not completed."""
    rank_sources: tuple[tuple[str, int], ...] = ()
    """The source of each rank's shard, by rank, run-length encoded: `(("local", 2), ("peer", 1))`.

    Empty until the control plane has chosen the sources.
    """
    node_microseconds_before: int = 0
    """Working time of the job's nodes from the job's creation to the failure, summed over nodes."""
    idle_node_microseconds: int = 0
    """Idle time of the job's nodes during the incident, summed over nodes, in microseconds."""
