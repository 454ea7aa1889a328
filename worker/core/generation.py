"""State machine of this node's part in a generation: promise to join, load, start (docs/design.md#generations).

Invariant: the promised generation only grows, and the node acts on no message of a lower generation. Before the agent
reports PROMISED, the promise is on disk, all older ranks have exited, and all older streams are closed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from everstep.protocol.agent_messages import MemberPhase
from everstep.protocol.ids import Generation, JobName, RunId


class MemberEvent(StrEnum):
    """The events that change a node's phase in a generation (promise, load, start, exit).

    LOAD: A plan arrived.
    LOADED: Every shard of this node's ranks is verified.
    LOAD_FAILED: A shard failed verification or could not be fetched.
    START: Every node of the generation has loaded its shards.
    EXITED: Every rank on this node has exited.
    """

    LOAD = "load"
    LOADED = "loaded"
    LOAD_FAILED = "load_failed"
    START = "start"
    EXITED = "exited"


TRANSITIONS: Mapping[tuple[MemberPhase, MemberEvent], MemberPhase] = {
    (MemberPhase.PROMISED, MemberEvent.LOAD): MemberPhase.LOADING,
    (MemberPhase.LOADING, MemberEvent.LOADED): MemberPhase.LOADED,
    (MemberPhase.LOADING, MemberEvent.LOAD_FAILED): MemberPhase.LOAD_FAILED,
    (MemberPhase.LOADED, MemberEvent.START): MemberPhase.RUNNING,
    (MemberPhase.RUNNING, MemberEvent.EXITED): MemberPhase.EXITED,
}
"""The next phase, for each current phase and event.

Prepare for a higher generation moves every phase to PROMISED, and Release ends every phase.
"""


class InvalidMemberTransition(Exception):
    """Raised if `TRANSITIONS` has no entry for an event in the current phase."""

    def __init__(self, member: Membership, event: MemberEvent) -> None:
        super().__init__(f"run {member.run} generation {member.generation}: {event} while {member.phase}")


@dataclass(frozen=True, slots=True)
class Membership:
    """The newest generation that this node has promised to join."""

    job: JobName
    run: RunId
    generation: Generation
    phase: MemberPhase

    def on(self, event: MemberEvent) -> Membership:
        """Return the membership in the phase after `event`. Raises InvalidMemberTransition if there is none."""
        phase = TRANSITIONS.get((self.phase, event))
        if phase is None:
            raise InvalidMemberTransition(self, event)
        return replace(self, phase=phase)


class MemberAnswer(StrEnum):
    """The agent's reaction to Prepare."""

    PROMISE = "promise"
    """The Prepare is new. The agent ends older ranks and streams before it reports the promise."""
    REPEAT = "repeat"
    """The node has already promised this generation. The agent sends its report again, which may be lost."""
    REFUSE = "refuse"


def answer_prepare(member: Membership | None, run: RunId, generation: Generation) -> MemberAnswer:
    """Return how a node answers a Prepare."""
    # Any generation of another run is new: the control plane alone decides which run a node works for.
    if member is None or member.run != run or generation > member.generation:
        return MemberAnswer.PROMISE
    return MemberAnswer.REPEAT if generation == member.generation else MemberAnswer.REFUSE


def is_own_run(promised: RunId | None, run: RunId) -> bool:
    """Return whether `run`, named by a connection for the wrong generation, is the promised run."""
    # The agent logs no warning then: around a restart, peers may still use the previous generation, or already the
    # next.
    return promised == run


def is_current(member: Membership | None, run: RunId, generation: Generation) -> bool:
    """Return whether a command for `run` and `generation` matches this node's newest promise."""
    return member is not None and member.run == run and member.generation == generation


def may_load(member: Membership | None, run: RunId, generation: Generation) -> bool:
    """Return whether a `Load` command is for the promised generation and the node has not begun to load for it."""
    return is_current(member, run, generation) and member is not None and member.phase is MemberPhase.PROMISED
