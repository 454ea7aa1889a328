"""State machine of this node's part in a generation: promise to join, load, start (docs/design.md#generations).

The machine selects the next phase. The agent does the phase's work and passes the outcome to the machine as an event.

Invariant: the promised generation only grows. From the moment of the promise, the node acts on no message of a lower
generation. Before the agent reports PROMISED to the control plane, three conditions hold: the promise is on disk, all
older ranks have provably exited, and all older streams (data connections between agents) are closed.
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

Two commands are not in the table: a Prepare for a higher generation moves every phase to PROMISED, and Release ends
every phase.
"""


class InvalidMemberTransition(Exception):
    """Raised if `TRANSITIONS` has no entry for an event in the current phase of this node's generation."""

    def __init__(self, member: Membership, event: MemberEvent) -> None:
        super().__init__(f"run {member.run} generation {member.generation}: {event} while {member.phase}")


@dataclass(frozen=True, slots=True)
class Membership:
    """The run, number and phase of the newest generation that this node has promised to join."""

    job: JobName
    run: RunId
    generation: Generation
    phase: MemberPhase

    def on(self, event: MemberEvent) -> Membership:
        """Return this node's membership of its generation, in the phase that follows `event`.

        Args:
            event: the event that has occurred on this node.

        Returns:
            A membership with the same run and generation.

        Raises:
            InvalidMemberTransition: `TRANSITIONS` has no entry for this phase and event.
        """
        phase = TRANSITIONS.get((self.phase, event))
        if phase is None:
            raise InvalidMemberTransition(self, event)
        return replace(self, phase=phase)


class MemberAnswer(StrEnum):
    """The agent's reaction to Prepare, the command to promise a generation."""

    PROMISE = "promise"
    """The Prepare is new.

    The agent stores the promise, ends all ranks of older generations and their connections to other nodes, and then
    reports the promise.
    """
    REPEAT = "repeat"
    """The node has already promised this generation.

    The control plane has not received the report of the promise, so the agent sends the report again.
    """
    REFUSE = "refuse"
    """The Prepare is late: its generation is below the promised generation."""


def answer_prepare(member: Membership | None, run: RunId, generation: Generation) -> MemberAnswer:
    """Return how a node answers a Prepare: it promises the generation, repeats its promise, or refuses.

    If a Prepare names a different run than the promise, the node accepts any generation, because the control plane
    alone decides which run a node works for.
    """
    if member is None or member.run != run or generation > member.generation:
        return MemberAnswer.PROMISE
    return MemberAnswer.REPEAT if generation == member.generation else MemberAnswer.REFUSE


def is_own_run(promised: RunId | None, run: RunId) -> bool:
    """Return whether a connection that a peer opened for the wrong generation belongs to this node's run.

    Around a restart of the ranks, peers may still connect for the previous generation of the run, or already for the
    next one. The agent then rejects the connection, but logs no warning.

    Args:
        promised: the run of the newest promise; None before the first promise.
        run: the run that the peer names.

    Returns:
        True if both runs are the same, so that the agent logs no warning.
    """
    return promised == run


def is_current(member: Membership | None, run: RunId, generation: Generation) -> bool:
    """Return whether a command for `run` and `generation` matches this node's newest promise."""
    return member is not None and member.run == run and member.generation == generation


def may_load(member: Membership | None, run: RunId, generation: Generation) -> bool:
    """Return whether this node begins to load shards for a `Load` command of the control plane.

    The node must have promised to join the command's generation, and must not have begun to load for it.
    """
    return is_current(member, run, generation) and member is not None and member.phase is MemberPhase.PROMISED
