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
    """The highest boundary that any generation had reached by then.

    It shows later progress.
    """
    last_lines: str = ""
    words: str = ""
    """How the first rank ended and what to do.

    Set if more is known than exit class and code, for example a lack of memory.
    """
    is_hang: bool = False
    """The ranks made no progress, and no process had ended."""
    node_id: NodeId | None = None
    """The node of the first failure. For a hang: the only stuck node, if it is known."""
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
    """local, peer or s3: the farthest source that any rank needed."""
    instance_ids: tuple[NodeId, ...] = ()
    """The nodes that the job left, for any cause."""
    faulted_instance_ids: tuple[NodeId, ...] = ()
    """The nodes where the failure occurred, whether or not the job left them."""
    lost_node_count: int = 0
    """How many of the left nodes failed or were taken by AWS."""
    kept_instance_ids: tuple[NodeId, ...] = ()
    """Nodes that report a fault of their own and still took part in a launch.

    Without them, a committed step would have been lost.
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
    """The job's `node_microseconds` at the failure."""
    idle_node_microseconds: int = 0
    """Idle time of the job's nodes during the incident.

    The decision sets it before storing.
    """
