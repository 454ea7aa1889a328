"""Incidents and failures of a job, as stored."""

from __future__ import annotations

from dataclasses import dataclass

from control_plane.core.observed.nodes import Cause
from control_plane.core.states import IncidentState
from everstep.protocol.agent_messages import ExitClass
from everstep.protocol.ids import FIRST_STEP, Generation, NodeId, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRecord:
    """A failure of the job's own making; what the breaker remembers."""

    generation: Generation
    step: Step
    exit_class: ExitClass | None
    """None: not a rank's exit, but a load that failed, or a hang."""
    code: int
    at: float
    max_boundary: Step
    """The highest boundary that any generation had reached: has there been progress since?"""
    last_lines: str = ""
    words: str = ""
    """How the first rank ended and what to do, where more is known than its class and code: it ran out of memory."""
    is_hang: bool = False
    """Nothing ended: its ranks stood still."""
    node_id: NodeId | None = None
    """Where it happened first; of a hang, who alone was stuck, if it could be told."""
    base_step: Step = FIRST_STEP
    """The state that its generation began with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentRecord:
    """A failure and its recovery, as it is stored."""

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
    """The base that training went on from."""
    restore_source: str | None = None
    """local, peer or s3: the farthest that any rank needed."""
    instance_ids: tuple[NodeId, ...] = ()
    """The nodes that were left, for whatever cause."""
    faulted_instance_ids: tuple[NodeId, ...] = ()
    """The nodes where it happened, lost by it or not."""
    lost_node_count: int = 0
    """Of those that were left, how many failed or were taken by AWS."""
    kept_instance_ids: tuple[NodeId, ...] = ()
    """The nodes that a launch was tried with although they report a fault of their own: a committed step was to be saved."""
    replacement_instance_ids: tuple[NodeId, ...] = ()
    replaced_at: float | None = None
    restored_at: float | None = None
    closed_at: float | None = None
    rank_sources: tuple[tuple[str, int], ...] = ()
    """Where each rank's shard came from, by rank, run-length encoded: `(("local", 2), ("peer", 1))`.

    Empty before that is known.
    """
    node_microseconds_before: int = 0
    """The job's `node_microseconds` when it failed."""
    idle_node_microseconds: int = 0
    """Of the job's nodes during the incident; set in what a decision stores of it."""
