"""The reasons for the states of jobs, and the messages of events, as values."""

from __future__ import annotations

from enum import StrEnum
from typing import TypeAlias

from control_plane.core.observed.causes import Reason
from control_plane.core.observed.facts import AloneStuck, Fact, RanksOnNodes, Recorded, Standstill, Value
from control_plane.core.observed.incidents import (
    AwaitsStore,
    CheckpointWait,
    PausesWithoutNodes,
    Repeated,
    Response,
    Tries,
)
from control_plane.core.observed.rehearsals import RehearsalOutcome
from control_plane.core.observed.steps import NO_GENERATION, Lapse, RepeatedWork
from everstep.protocol.agent_messages import OutputFailure
from everstep.protocol.ids import NO_STEP, Generation, NodeId, Rank, Step
from everstep.protocol.options import KeptOption

JobFact = StrEnum(
    "JobFact",
    """
    GIVES_WAY AWAITS_RETURN_OF_NODES STANDS_ASIDE STANDS_ASIDE_FROM_STORE LACKS_NODES LACKS_NODES_TO_START_SMALLER
    LACKS_NODES_AND_GIVES_BACK LACKS_NODES_AND_CHANGES_FLEET LACKS_NODES_AND_CHANGES_FLEET_LATER
    LACKS_NODES_AND_SHRINKS NEEDS_MORE_NODES CONTINUES_SMALLER PREPARES PREPARES_SMALLER NUMBER_IN_USE
    AWAITS_VERIFICATION AWAITS_AGENTS INITIAL_STATE_LOST RESTORES STARTS_ANEW LOADS LOADED STARTED_EARLIER STARTS_RANKS
    TRAINS REHEARSES MOVES_OFF AGREES_TO_LEAVE AGREES_TO_GROW RETURNS_FOR_JOB RETURNS_ABOVE_LIMIT
    PAUSES_FOR_JOB PAUSES_FOR_USER AWAITS_CHECKPOINT_OF_PAUSE PAUSED PAUSED_FOR_USER IS_PAUSED
    IS_PAUSED_BEFORE_START
    USER_ASKS_TO_STOP MAX_RUNTIME_OVER MAX_PENDING_TIME_OVER MAX_COST_SPENT STOPS KILLS AWAITS_CHECKPOINT_OF_STOP
    AWAITS_RANKS KILLED_AWAITS_CHECKPOINT STOPPED STOPPED_THEN_KILLED KILLED KILLED_EARLY STOPPED_WITHOUT_RANKS
    STOPPED_BEFORE_START STOPPED_WHILE_PAUSED
    AWAITS_LAST_CHECKPOINT COMPLETED CHECK_COMPLETED COMPLETED_WITHOUT_STEPS
    TO_LEAVE TO_LEAVE_FOR TO_GROW TO_RETURN_FOR_JOB TO_RETURN_ABOVE_LIMIT GREW SHRANK SHRANK_BY_RETURN
    SHRANK_TO_LIMIT STARTED_SMALLER STEP_SKIPPED NODE_KEPT CHECKPOINT_DOUBTED CHECKPOINT_DAMAGED PROGRESSES_AGAIN
    KEEPS_STEPS_AGAIN
    """,
)


class RehearsalEnded(Value, frozen=True):
    """A rehearsal of the job's resume has a result."""

    outcome: RehearsalOutcome


class JobNote(Value, frozen=True):
    """A fact about a job or its nodes. `what` decides which fields its sentence contains."""

    what: JobFact
    step: Step = NO_STEP
    committed_step: Step = NO_STEP
    checkpoint_step: Step = NO_STEP
    """The newest checkpoint that the job can restore. At most 0 without one."""
    target_step: Step = NO_STEP
    lost_step_count: int = 0
    """Committed steps that were only in the memory of the job's nodes."""
    generation: Generation = NO_GENERATION
    node_ids: tuple[NodeId, ...] = ()
    takers: tuple[NodeId, ...] = ()
    """The nodes that replace `node_ids`."""
    count: int = 0
    node_count: int = 0
    """Number of nodes that the job requested, or that it had."""
    missing_count: int = 0
    name: str = ""
    """Description of another job or of a checkpoint, a kind of source, or the name of a fleet."""
    seconds: float = 0.0
    at: float = 0.0
    limit: float = 0.0
    because: tuple[Fact, ...] = ()
    lack_reasons: tuple[Reason, ...] = ()
    stop: JobNote | RehearsalEnded | str | None = None


StopReason: TypeAlias = JobNote | RehearsalEnded | str
"""A plain text comes from an earlier version."""


class Starting(Value, frozen=True):
    """Ranks are in a phase before their first new step. `seconds`: for how long, rounded down."""

    phase: str
    node_ids: tuple[NodeId, ...]
    other_count: int = 0
    seconds: int = 0


class Unclear(Value, frozen=True):
    """The job continues although it is unclear whether some of its nodes still work."""

    doing: JobNote | Starting | None
    """None if the ranks start."""
    silent: tuple[NodeId, ...] = ()
    because: tuple[Fact, ...] = ()
    """Set if no node is silent."""


class Observes(Value, frozen=True):
    """Everstep does nothing but observe the job, because a person took it over or paused all automatic actions."""

    pause: str = ""
    """Who paused all automatic actions, and why, in the person's words. Empty if the job was taken over."""
    taken_over_by: str = ""
    impaired: tuple[NodeId, ...] = ()
    lost: tuple[NodeId, ...] = ()
    exits: tuple[Fact, ...] = ()


class AwaitsConsent(Value, frozen=True):
    """The job waits until a person accepts that it repeats much training."""

    choice: RepeatedWork
    job: str
    limit_minutes: int


class Waits(Value, frozen=True):
    """The job waits for nodes, before it can launch its next generation."""

    missing_count: int = 0
    lack_reasons: tuple[Reason, ...] = ()
    late: tuple[NodeId, ...] = ()
    unreachable: tuple[NodeId, ...] = ()
    """Members that may still hold shards of the committed step."""
    consent: AwaitsConsent | None = None
    smaller: JobNote | None = None
    """The number of nodes on which the job would continue, or which it needs."""
    stop: StopReason | None = None
    """A requested stop, which waits until the job trains."""


class AwaitsFirstStep(Value, frozen=True):
    """The ranks have started and have not completed the first step after `step`."""

    step: Step


class Restarts(Value, frozen=True):
    """A fault ended the generation, and Everstep responds."""

    because: Fact
    response: Response


class StandsStill(Value, frozen=True):
    """Ranks made no progress in `phases` for longer than `limit_seconds`."""

    stuck: RanksOnNodes
    phases: tuple[str, ...]
    limit_seconds: float


class WaitsDeliberately(Value, frozen=True):
    """Ranks wait within a limit that the script declared."""

    waiting: RanksOnNodes
    phases: tuple[str, ...]
    limit_seconds: float


class StoppedToLeave(Value, frozen=True):
    """All ranks stopped at a step, so that the job can give up nodes, and the job waits for its checkpoint."""

    step: Step
    wait: CheckpointWait


class GaveUp(Value, frozen=True):
    """The job failed repeatedly, so Everstep gave it up."""

    because: Repeated


class Told(Value, frozen=True):
    """A sentence with facts, as an earlier version stored it: its `parts`, to be joined without spaces."""

    parts: tuple[str | Fact, ...]


JobReason: TypeAlias = (
    str
    | Told
    | JobNote
    | Starting
    | Unclear
    | Observes
    | AwaitsConsent
    | Waits
    | AwaitsFirstStep
    | Restarts
    | StandsStill
    | WaitsDeliberately
    | StoppedToLeave
    | GaveUp
    | PausesWithoutNodes
    | AwaitsStore
    | Recorded
)
"""A plain text comes from an agent, or from an earlier version."""


class Lapsed(Value, frozen=True):
    """Training goes on, and is at step `boundary`, although the job keeps no further step."""

    lapse: Lapse
    boundary: Step


class StateChanged(Value, frozen=True):
    """A job changed its state."""

    before: str
    after: str
    because: JobReason


class GenerationEnded(Value, frozen=True):
    """A generation ended."""

    generation: Generation
    because: tuple[Fact, ...]


class HangFound(Value, frozen=True, tag="Hang"):
    """Agents read the stacks of ranks without progress."""

    fact: Standstill
    alone: AloneStuck | None


class OutputsLost(Value, frozen=True):
    """Output files of ranks are not in S3."""

    outputs: tuple[OutputFailure, ...]
    other_count: int = 0


class RepeatedStepDiffers(Value, frozen=True):
    """A rank repeated a step after a recovery, and its state was not the state before the recovery."""

    step: Step
    rank: Rank


class ReplacedOptions(Value, frozen=True):
    """The script sets options that the restored step has replaced."""

    options: tuple[KeptOption, ...]


class RollEnded(Value, frozen=True):
    """A roll has replaced or rebooted all nodes of the fleet, or has stopped. The event's reason says which."""


Message: TypeAlias = (
    str
    | Told
    | JobNote
    | StateChanged
    | GenerationEnded
    | HangFound
    | Tries
    | OutputsLost
    | Lapsed
    | RepeatedStepDiffers
    | RehearsalEnded
    | ReplacedOptions
    | RollEnded
)
