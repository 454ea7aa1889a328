"""Incidents and failures of a job, as stored."""

from __future__ import annotations

from dataclasses import dataclass

from control_plane.core.observed.nodes import Cause
from control_plane.core.states import IncidentState
from everstep.protocol.agent_messages import ExitClass
from everstep.protocol.ids import FIRST_STEP, Generation, NodeId, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRecord:
    """A failure that counts as the job's own. The breakers remember it."""

    generation: Generation
    step: Step
    exit_class: ExitClass | None
    """Kind of the exit of the rank. None if no rank exited: a load failed, or the ranks hung."""
    code: int
    at: float
    max_boundary: Step
    """The highest boundary that any generation had reached before this failure.

    The breakers compare later progress with this boundary.
    """
    last_lines: str = ""
    words: str = ""
    """A sentence about the first rank's end, with advice.

    The sentence is set after a lack of memory, for example. It is empty if only exit class and code are known.
    """
    is_hang: bool = False
    """Whether the failure was a hang: the ranks made no progress, and no process had ended."""
    node_id: NodeId | None = None
    """The node whose rank failed first. For a hang: the only stuck node, or None if no single node is identified."""
    base_step: Step = FIRST_STEP
    """The step that the generation was restored from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentRecord:
    """A failure and its recovery, as stored."""

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
    """The highest boundary before the failure."""
    generation_after: Generation | None = None
    from_step: Step | None = None
    """The base step from which training resumed."""
    restore_source: str | None = None
    """The farthest kind of source that any rank needed, nearest first: `local`, `peer` or `s3`."""
    instance_ids: tuple[NodeId, ...] = ()
    """The nodes that the job gave up or lost, for any cause."""
    faulted_instance_ids: tuple[NodeId, ...] = ()
    """The nodes where the failure occurred, whether or not the job gave them up."""
    lost_node_count: int = 0
    """Number of nodes in `instance_ids` that failed or that AWS reclaimed."""
    node_count_before: int = 0
    """Number of nodes of the generation that failed or stopped. 0 until the next generation has a plan."""
    node_count_after: int = 0
    """Number of nodes of the newest generation of this recovery. 0 until that generation has a plan."""
    kept_instance_ids: tuple[NodeId, ...] = ()
    """Nodes that reported a fault of their own but took part in a launch.

    The job kept them because a committed step would otherwise have been lost.
    """
    replacement_instance_ids: tuple[NodeId, ...] = ()
    replaced_at: float | None = None
    restored_at: float | None = None
    closed_at: float | None = None
    rank_sources: tuple[tuple[str, int], ...] = ()
    """The source of each rank's shard, by rank, run-length encoded: `(("local", 2), ("peer", 1))`.

    Empty until the sources are chosen.
    """
    node_microseconds_before: int = 0
    """The job's `node_microseconds` at the time of the failure."""
    idle_node_microseconds: int = 0
    """Idle time of the job's nodes during the incident, in microseconds.

    Each pass sets it before it stores the incident.
    """
