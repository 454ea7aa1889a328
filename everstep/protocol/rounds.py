"""Defines the messages of the commit rounds between the agents of one generation (docs/design.md#rounds).

Every `NodeReport` is a node's whole state, and every `Announcement` is the coordinator's whole state. The next message
therefore repairs a lost, late or duplicated message. Agents reject messages of other generations. The agents form a
tree, in which inner agents forward both kinds of messages.

Invariant: (term, sequence) of a node's reports grows throughout a generation, even if its agent restarts. A coordinator
counts only reports of its own term. The *term* is the number of starts of the coordinator's agent.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

from everstep.protocol.codec import Message
from everstep.protocol.ids import Generation, NodeId, Rank, Step
from everstep.protocol.limits import Count, Items, Text
from everstep.protocol.rank_messages import RankStanding, StopState, Vote


class Pacing(IntEnum):
    """Mode in which all nodes of a job send chunks: at once, or only while training does not use the network."""

    AT_ONCE = 0
    TRIED = 1
    """The nodes try the two other modes, by step number (`worker.core.pacing_trial`)."""
    IN_IDLE_SPANS = 2


class RankRound(Message, frozen=True):
    """State of one rank."""

    rank: Rank
    boundary: Step
    """Number of finished steps; -1 before the rank has restored its state."""
    committed: Step
    """The newest committed step that the rank's agent has received; -1: none."""
    proposed: Step
    """The newest proposed step that the rank's agent has received; -1: none."""
    vote: Vote
    standing: RankStanding = RankStanding.MOVING
    echo_step: Step = Step(-1)
    echo: Count = 0
    """Answer for `echo_step`, as `RankHalf.echo`."""
    confirmed_stop: Step = Step(-1)
    """The newest confirmed stop that the rank's agent has received; -1: none."""
    heard_stop: Step = Step(-1)
    """The newest stop that the rank's agent has received, confirmed or only announced."""
    rehearsal_step: Step = Step(-1)
    rehearsal_echo: Count = 0
    """The answer, as `RankHalf.rehearsal_echo`."""
    confirmed_rehearsal: Step = Step(-1)
    heard_rehearsal: Step = Step(-1)
    pinned_steps: Annotated[tuple[Step, ...], Items] = ()
    """Steps that the agent is uploading, so their slots must not be reused; ascending."""
    held_step: Step = Step(-1)
    """Step that an export reads from memory, so its slot must not be reused; -1: none."""
    stored_step: Step = Step(-1)
    """The newest step whose upload by the rank's agent is complete; -1: none."""
    out_of_view: Annotated[tuple[NodeId, ...], Items] = ()
    is_late: bool = False
    """Whether the rank voted ABANDON because it received the proposed step too late."""
    reason: Text = ""
    """Why the agent votes ABANDON, or no longer waits for a holder; else empty."""


class NodeReport(Message, frozen=True):
    """Everything that one node contributes to the commit rounds."""

    node_id: NodeId
    term: Count
    sequence: Count
    ranks: Annotated[tuple[RankRound, ...], Items]


class RoundReport(Message, frozen=True):
    """The changed states of the sender and of the nodes below it; all states first on a new connection."""

    generation: Generation
    nodes: Annotated[tuple[NodeReport, ...], Items]


class Announcement(Message, frozen=True, omit_defaults=True):
    """The coordinator's whole state, sent after every change, and first on a new connection."""

    generation: Generation
    term: Count
    """0: the sender has received no term."""
    sequence: Count
    """Number within the term, set by the coordinator only. Receivers ignore lower numbers."""
    committed: Step
    """-1: none."""
    proposed: Step
    """-1: none."""
    persist_step: Step = Step(-1)
    """A committed step that the agents upload to S3; -1: none."""
    stop_step: Step = Step(-1)
    stop_state: StopState = StopState.NONE
    rehearsal_step: Step = Step(-1)
    rehearsal_state: StopState = StopState.NONE
    rehearsal_steps: Count = 0
    """Number of repeated steps; 0 leaves it unchanged."""
    finished: bool = False
    """Whether training has ended, and no more step can be committed. Ranks then return from `close()`."""
    pacing: Pacing = Pacing.AT_ONCE
    ends_exports: bool = False
    """Whether agents end the export, because a checkpoint needs its slot and an instance is about to end."""
    held: Annotated[tuple[Rank, ...], Items] = ()
    """Ranks whose shard of the restored or a later step is complete, so that nodes that hold none may free it."""
    is_silent: bool = False
    """Whether a restarted coordinator waits for the first report of every node. Then only the term is valid."""
