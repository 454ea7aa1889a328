"""Defines the messages of the commit rounds between the agents of one generation (docs/design.md#rounds).

Every `NodeReport` is a node's whole state, and every `Announcement` is the coordinator's whole state. The next message
therefore repairs a lost, late or duplicated message. Agents reject messages of other generations. The agents form a
tree, in which inner agents forward both kinds of messages.

Invariant: (term, sequence) of a node's reports grows throughout a generation, even if its agent restarts. A receiver
therefore recognizes an outdated report. A coordinator counts only reports of its own term.

The *term* is the number of starts of the coordinator's agent.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

from everstep.protocol.codec import Message
from everstep.protocol.ids import Generation, NodeId, Rank, Step
from everstep.protocol.limits import Count, Items, Text
from everstep.protocol.rank_messages import RankStanding, StopState, Vote


class Pacing(IntEnum):
    """Mode in which nodes send the chunks of their snapshots: at once, or only while training does not use the network.

    All nodes of a job use the same mode: if one node's chunks delay its training traffic, every node's iteration is
    delayed.
    """

    AT_ONCE = 0
    TRIED = 1
    """The nodes try the two other modes. The step number selects the mode of each step (`worker.core.pacing_trial`)."""
    IN_IDLE_SPANS = 2


class RankRound(Message, frozen=True):
    """State of one rank, as its node reports it to the coordinator."""

    rank: Rank
    boundary: Step
    """Number of steps that the rank has finished; -1 before the rank has restored its state."""
    committed: Step
    """The newest committed step that the rank's agent has received; -1 if it has received none."""
    proposed: Step
    """The newest proposed step that the rank's agent has received; -1 if it has received none."""
    vote: Vote
    """The vote of the rank's agent on the step `proposed`."""
    standing: RankStanding = RankStanding.MOVING
    echo_step: Step = Step(-1)
    echo: Count = 0
    """Whether the rank can stop at `echo_step`: 0 no answer, 1 yes, 2 no."""
    confirmed_stop: Step = Step(-1)
    """Step of the newest confirmed stop that the rank's agent has received; -1 if it has received none."""
    heard_stop: Step = Step(-1)
    """Step of the newest stop that the rank's agent has received, whether the stop is confirmed or only announced."""
    rehearsal_step: Step = Step(-1)
    """Step of the announced rehearsal that the rank has answered last."""
    rehearsal_echo: Count = 0
    """Whether the rank can rehearse at `rehearsal_step`: 0 no answer, 1 yes, 2 no (passed), 3 not at all."""
    confirmed_rehearsal: Step = Step(-1)
    """Step of the newest confirmed rehearsal that the rank's agent has received; -1 if it has received none."""
    heard_rehearsal: Step = Step(-1)
    """Step of the newest rehearsal that the rank's agent has received, confirmed or only announced."""
    pinned_steps: Annotated[tuple[Step, ...], Items] = ()
    """Steps whose slots must not be reused, because the agent is uploading them, in increasing order."""
    held_step: Step = Step(-1)
    """Step whose slot must not be reused, because an export reads it from memory; -1 if there is none."""
    stored_step: Step = Step(-1)
    """The newest step of which the rank's agent has uploaded the shard completely; -1 if there is none."""
    out_of_view: Annotated[tuple[NodeId, ...], Items] = ()
    is_late: bool = False
    """True if the rank voted ABANDON because it received the proposed step too late."""
    reason: Text = ""
    """Reason why the rank's agent votes ABANDON, or why it no longer waits for a holder. Empty if neither is the case.
    """


class NodeReport(Message, frozen=True):
    """Everything that one node contributes to the commit rounds, sent to the coordinator through the tree of agents."""

    node_id: NodeId
    term: Count
    """The highest term in any announcement that the node has received from a coordinator."""
    sequence: Count
    ranks: Annotated[tuple[RankRound, ...], Items]


class RoundReport(Message, frozen=True):
    """Node states, sent to the sender's parent in the tree whose root is the coordinator.

    A message contains the changed states of the sender and of the nodes below it. The first message on a new connection
    contains all states.
    """

    generation: Generation
    nodes: Annotated[tuple[NodeReport, ...], Items]


class Announcement(Message, frozen=True, omit_defaults=True):
    """The coordinator's whole state, such as the proposed and the committed step.

    Each agent sends it to its children in the tree of agents after every change, and first on a new connection.
    """

    generation: Generation
    term: Count
    """Number of starts of the coordinator's agent so far. 0: the sender has received no term."""
    sequence: Count
    """Number of the announcement within the term.

    Only the coordinator sets it, and forwarding agents keep it. Receivers ignore an announcement with a lower number.
    """
    committed: Step
    """The committed step; -1 if no step is committed."""
    proposed: Step
    """The proposed step; -1 while no step is proposed."""
    persist_step: Step = Step(-1)
    """A committed step that the agents upload to S3; -1 if there is none."""
    stop_step: Step = Step(-1)
    stop_state: StopState = StopState.NONE
    rehearsal_step: Step = Step(-1)
    """Step after which all ranks rehearse (`everstep.protocol.rehearsals`)."""
    rehearsal_state: StopState = StopState.NONE
    rehearsal_steps: Count = 0
    """Number of steps before `rehearsal_step` that the ranks repeat; 0 leaves the number unchanged."""
    finished: bool = False
    """True if training has ended: every rank has stopped, and every step that could be committed is committed.

    Ranks then return from `close()`.
    """
    pacing: Pacing = Pacing.AT_ONCE
    ends_exports: bool = False
    """True while a checkpoint needs a slot that an export keeps, and AWS has announced the end of a node's instance.

    Agents then end the export.
    """
    held: Annotated[tuple[Rank, ...], Items] = ()
    """Ranks whose shard, of the restored step or a later step, is complete on every holder that the plan names.

    A node that is no holder of such a rank, but still stores a shard of the rank, may free this shard. The coordinator
    lists a rank only if such a node exists.
    """
    is_silent: bool = False
    """True while the coordinator, after its start, waits for the first report of every node.

    During this time, only the term of the announcement is valid.
    """
