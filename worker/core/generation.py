"""What a generation asks of this node: promise, load, start (docs/design.md#generations).

Invariant: the promised generation only grows, and nothing of a lower one is acted on from the moment it is promised.
The machine names what is to be done; the agent does it and says when it is done. `Promised` in particular is told only
after the promise is on disk, every old rank is proven gone and every old stream is closed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from everstep.protocol.agent_messages import MemberPhase
from everstep.protocol.ids import Generation, JobName, RunId


class Event(StrEnum):
    """The events that move a member.

    LOAD: A plan arrived.
    LOADED: Every shard is verified.
    LOAD_FAILED: A shard did not verify or could not be fetched.
    START: Every member of the generation is loaded.
    EXITED: Every rank on this node has exited.
    """

    LOAD = "load"
    LOADED = "loaded"
    LOAD_FAILED = "load_failed"
    START = "start"
    EXITED = "exited"


TRANSITIONS: Mapping[tuple[MemberPhase, Event], MemberPhase] = {
    (MemberPhase.PROMISED, Event.LOAD): MemberPhase.LOADING,
    (MemberPhase.LOADING, Event.LOADED): MemberPhase.LOADED,
    (MemberPhase.LOADING, Event.LOAD_FAILED): MemberPhase.LOAD_FAILED,
    (MemberPhase.LOADED, Event.START): MemberPhase.RUNNING,
    (MemberPhase.RUNNING, Event.EXITED): MemberPhase.EXITED,
}
"""Every phase is also left by a higher Prepare (to PROMISED) and by Release."""


class InvalidTransition(Exception):
    """An event that the member's phase does not allow."""

    def __init__(self, member: Membership, event: Event) -> None:
        super().__init__(f"run {member.run} generation {member.generation}: {event} while {member.phase}")


@dataclass(frozen=True, slots=True)
class Membership:
    """This node's part in the highest generation that it has promised."""

    job: JobName
    run: RunId
    generation: Generation
    phase: MemberPhase

    def on(self, event: Event) -> Membership:
        """Return the membership after `event`.

        Args:
            event: what has happened to this node's part.

        Returns:
            The membership in its next phase; this one stays as it is.

        Raises:
            InvalidTransition: the table has no such pair.
        """
        phase = TRANSITIONS.get((self.phase, event))
        if phase is None:
            raise InvalidTransition(self, event)
        return replace(self, phase=phase)


class Answer(StrEnum):
    """What to do with a Prepare."""

    PROMISE = "promise"
    """New: record it, end everything older, then report."""
    REPEAT = "repeat"
    """The control plane has not seen the report yet: report again."""
    REFUSE = "refuse"
    """Late: of a generation below the promised one."""


def answer_prepare(member: Membership | None, run: RunId, generation: Generation) -> Answer:
    """Say what a Prepare means to a node in this state.

    A Prepare for another run also promises: the fleet's table is the only writer of who works for whom, so the run held
    so far has ended here.
    """
    if member is None or member.run != run or generation > member.generation:
        return Answer.PROMISE
    return Answer.REPEAT if generation == member.generation else Answer.REFUSE


def is_own_run(promised: RunId | None, run: RunId) -> bool:
    """Say whether a session that is refused comes from the run that this node works for: fenced off as stale, or early, but nobody foreign.

    Any of the run's generations will do. Around a restart peers still dial for the one before, or already for the next;
    a node that has taken a lost one's place hears of generations it never was a member of.

    Args:
        promised: the run of the newest promise; None before the first one.
        run: what the session asks for.

    Returns:
        True if there is nothing to warn of.
    """
    return promised == run


def is_current(member: Membership | None, run: RunId, generation: Generation) -> bool:
    """Say whether a command of (run, generation) is for the generation that this node has promised."""
    return member is not None and member.run == run and member.generation == generation
