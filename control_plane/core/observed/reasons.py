"""The reasons for the states of jobs, and the messages of events, as values.

`control_plane.accounts.jobs` turns a reason into a sentence. A reason is a plain sentence if it has no fact that any
code reads. No code interprets such a sentence.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from control_plane.core.observed.facts import AloneStuck, Fact, RanksOnNodes, Recorded, Standstill, Value
from control_plane.core.observed.incidents import CheckpointWait, PausesWithoutNodes, Repeated, Response, Tries
from everstep.protocol.ids import Generation, NodeId, Step


class Told(Value, frozen=True):
    """A sentence that contains facts. `parts` joined without spaces make the sentence."""

    parts: tuple[str | Fact, ...]


def separated(facts: Iterable[Fact]) -> tuple[str | Fact, ...]:
    """Return facts with semicolons between them, as parts of a sentence."""
    return tuple(part for fact in facts for part in ("; ", fact))[1:]


class Waits(Value, frozen=True):
    """The job waits for nodes, before it can launch its next generation."""

    missing_count: int = 0
    """Number of nodes that the job lacks."""
    text: str = ""
    """AWS's or Everstep's reason for failed instance launches. Empty if no launch fails."""
    late: tuple[NodeId, ...] = ()
    """Members that have not promised to join."""
    unreachable: tuple[NodeId, ...] = ()
    """Members that may still hold shards of the committed step."""
    before: str = ""
    """A clause about the number of nodes on which the job would continue. Empty without such a clause."""
    aim: str = ""
    """A clause about a requested stop. Empty without such a request."""


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


JobReason: TypeAlias = (
    str
    | Told
    | Waits
    | AwaitsFirstStep
    | Restarts
    | StandsStill
    | WaitsDeliberately
    | StoppedToLeave
    | GaveUp
    | PausesWithoutNodes
    | Recorded
)
"""Why a job is in its state, and what it does."""


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


Message: TypeAlias = str | Told | StateChanged | GenerationEnded | HangFound | Tries
"""The message of an event."""
