"""Incidents and failures of a job, as the control plane stores them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from control_plane.core.observed.facts import Fact, Recorded, Value
from control_plane.core.observed.nodes import Cause
from control_plane.core.states import IncidentState
from control_plane.core.verification import Blocked
from everstep.protocol.agent_messages import ExitClass, MemoryEnd
from everstep.protocol.ids import FIRST_STEP, NO_STEP, Generation, NodeId, Rank, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRecord:
    """A failure that the job itself may have caused. The control plane decides from it whether the job retries."""

    generation: Generation
    step: Step
    exit_class: ExitClass | None
    """None if no rank exited, because a load failed or the ranks hung."""
    code: int
    at: float
    max_boundary: Step
    last_lines: str = ""
    error: str | None = None
    """The exception (class and message) at the end of `last_lines`."""
    error_place: str | None = None
    """The line of the job's code in which the exception arose: `train.py:48`."""
    rank: Rank | None = None
    memory: MemoryEnd | None = None
    is_hang: bool = False
    is_node_loss: bool = False
    """Whether the job lost a node for a reason that neither AWS nor the node's own agent names."""
    node_id: NodeId | None = None
    """The node whose rank failed first, or for which all others waited in a hang. None if unclear."""
    base_step: Step = FIRST_STEP


class Change(Value, frozen=True):
    """The one thing that the job changed after repeated failures: its node, or the step from which it restarts."""

    node_id: NodeId | None = None
    """None if the job instead restored an older state than `skipped_step`."""
    skipped_step: Step | None = None


class Repeated(Value, frozen=True):
    """The job failed `count` times in the same way, or without reaching a new step since the Unix time `since`."""

    count: int
    failure: FailureRecord
    tried: tuple[Change, ...] = ()
    since: float | None = None
    """None if all failures are identical."""
    alike_count: int = 0
    """Number of identical failures at the end. Set together with `since`."""
    lost: tuple[NodeId, ...] = ()
    """One per launch. Empty after failures of another kind."""


class CheckpointWaitKind(StrEnum):
    """Whether a job that stopped to give up nodes waits for its checkpoint.

    It waits only for SOLE_HOLDER (only departing nodes hold the last step), NO_REPLACEMENT and IN_TIME.
    """

    NO_STEP = "no_step"
    IN_S3 = "in_s3"
    HELD_ELSEWHERE = "held_elsewhere"
    NO_TIME = "no_time"
    TOO_SLOW = "too_slow"
    GAVE_UP = "gave_up"
    SOLE_HOLDER = "sole_holder"
    NO_REPLACEMENT = "no_replacement"
    IN_TIME = "in_time"


class CheckpointWait(Value, frozen=True):
    """Whether a job that stopped to give up nodes waits for the checkpoint of its last step, and why."""

    why: CheckpointWaitKind
    step: Step | None = None
    remaining_seconds: float = 0.0
    """Time from the stop until the end of the wait."""
    upload_seconds: float | None = None
    """Duration of the previous upload."""

    @property
    def is_awaited(self) -> bool:
        """Whether the job waits."""
        kinds = CheckpointWaitKind
        return self.why in (kinds.SOLE_HOLDER, kinds.NO_REPLACEMENT, kinds.IN_TIME)


class RestartsRanks(Value, frozen=True):
    """Restart all ranks, with other nodes in place of `replaced`."""

    replaced: tuple[NodeId, ...] = ()


class LeavesNodes(Value, frozen=True):
    """Stop all ranks at an agreed step, and continue without some nodes."""

    node_ids: tuple[NodeId, ...]
    is_return: bool = False
    """Whether the nodes return to the fleet without a replacement."""
    wait: CheckpointWait | None = None


class Tries(Value, frozen=True):
    """Change one thing, to find its part in repeated failures."""

    change: Change
    because: Repeated | Recorded


class Shrinks(Value, frozen=True):
    """Continue on `count` of `node_count` nodes."""

    count: int
    node_count: int


class Grows(Value, frozen=True):
    """Stop all ranks at an agreed step, and continue on more than `count` nodes."""

    count: int


class PausesWithoutNodes(Value, frozen=True):
    """Pause the job while it waits for a node."""

    step: Step
    """The step from which the job resumes, or at most 0 without a checkpoint."""
    lost_step_count: int = 0


class StoreWaitStage(StrEnum):
    """The stage of a job that waits for a store. LOADS: nodes repeat their loads. GIVES_UP: it queues again later."""

    LOADS = "loads"
    RETRIES = "retries"
    PAUSES = "pauses"
    GIVES_UP = "gives_up"


class AwaitsStore(Value, frozen=True):
    """S3, IAM or KMS prevents a restore."""

    stage: StoreWaitStage
    wait: Blocked
    until: float | None = None
    """Unix time until which the job keeps its nodes. None if only their memory has the newest step."""
    step: Step = NO_STEP
    """Set for GIVES_UP."""


class GivesUp(Value, frozen=True):
    """Give the job up, after an earlier response."""

    after: Response


Response: TypeAlias = (
    Recorded | RestartsRanks | LeavesNodes | Tries | Shrinks | Grows | PausesWithoutNodes | AwaitsStore | GivesUp
)


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentCourse:
    """A failure and its recovery so far. Times are Unix seconds."""

    cause: Cause
    evidence: tuple[Fact, ...]
    decision: Response
    failed_at: float
    opened_at: float
    generation_after: Generation | None = None
    from_step: Step | None = None
    restore_source: str | None = None
    """The farthest kind of source from which any rank restored its shard, from `local` to `s3`."""
    instance_ids: tuple[NodeId, ...] = ()
    """The nodes that failed, that AWS took, or that the job gave up in this incident."""
    faulted_instance_ids: tuple[NodeId, ...] = ()
    """The nodes on which the failure occurred, whether or not the job gave them up."""
    node_count_before: int = 0
    """0 until the next generation has a plan."""
    node_count_after: int = 0
    """0 until the newest generation of this recovery has a plan."""
    replacement_instance_ids: tuple[NodeId, ...] = ()
    replaced_at: float | None = None
    restored_at: float | None = None
    closed_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentRecord(IncidentCourse):
    """A failure and its recovery, as the control plane stores them."""

    id: str
    state: IncidentState
    generation_before: Generation
    reached_step: Step
    earliest_failure_at: float = 0.0
    """Lower bound of `failed_at`, so that the incidents of a job never overlap."""
    lost_node_count: int = 0
    kept_instance_ids: tuple[NodeId, ...] = ()
    """Faulty nodes that the job kept for the next generation, because it needed their shards."""
    is_given_up: bool = False
    """Whether the job ended or was paused before training had caught up."""
    rank_sources: tuple[tuple[str, int], ...] = ()
    """The source of each rank's shard, run-length encoded: `(("local", 2), ("peer", 1))`. Empty until chosen."""
    node_microseconds_before: int = 0
    """Working time from the job's creation to the failure, summed over nodes."""
    idle_node_microseconds: int = 0
    """Idle time during the incident, summed over nodes."""
