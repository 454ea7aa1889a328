"""Between agents of one generation: the rounds of the step protocol, level-triggered (docs/design.md#rounds).

Every `NodeReport` is a node's whole state and every `Announcement` the coordinator's: a lost, late or doubled message
is repaired by the next one. A report or announcement of another generation is refused. Agents between a node and the
coordinator pass both on.

Invariant: (term, sequence) of a node's reports grows as long as the generation lasts, also when its agent restarts: by
whatever way a report comes, it is known whether a newer one is there. A coordinator counts only what answers its own
term.
"""

from __future__ import annotations

from enum import IntEnum

from everstep.protocol.codec import Message
from everstep.protocol.ids import Generation, NodeId, Rank, Step
from everstep.protocol.rank_messages import Standing, StopState, Vote


class Pacing(IntEnum):
    """How replicas leave, of all nodes alike: one whose chunks are in the way makes everybody's iteration longer."""

    AT_ONCE = 0
    TRIED = 1
    """By the number of the step, one way or the other (`worker.core.pacing_trial`)."""
    IN_IDLE_SPANS = 2


class RankRound(Message, frozen=True):
    """One rank's part of its node's report."""

    rank: Rank
    boundary: Step
    """-1 before the rank has restored."""
    committed: Step
    """The newest C heard, or -1."""
    proposed: Step
    """The newest w heard, or -1."""
    vote: Vote
    """On `proposed`."""
    standing: Standing = Standing.MOVING
    echo_step: Step = Step(-1)
    echo: int = 0
    """1 yes, 2 no, to the stop at `echo_step`."""
    confirmed_stop: Step = Step(-1)
    """The confirmed stop that this rank's agent has heard of."""
    heard_stop: Step = Step(-1)
    """The newest stop that this rank's agent has heard of, whatever became of it."""
    pinned_step: Step = Step(-1)
    """A step whose slot is being uploaded and may not be reused."""
    out_of_view: tuple[NodeId, ...] = ()
    is_late: bool = False
    """The vote is abandon because the rank heard of w too late."""
    reason: str = ""
    """Why the vote is abandon, or why a holder is out of view."""


class NodeReport(Message, frozen=True):
    """One node's state in the rounds."""

    node_id: NodeId
    term: int
    """Of the coordinator that the node has heard."""
    sequence: int
    ranks: tuple[RankRound, ...]


class RoundReport(Message, frozen=True):
    """Sent up the tree: the states of the sender and of nodes below it that changed since the last one; on a new line all that are known."""

    generation: Generation
    nodes: tuple[NodeReport, ...]


class Announcement(Message, frozen=True, omit_defaults=True):
    """The coordinator's state, sent down the tree on change; the first message on every line, at once."""

    generation: Generation
    term: int
    """Which life of the coordinator's agent speaks: it grows when the agent restarts.

    0: the sender has heard of none.
    """
    sequence: int
    """The coordinator's own, in this term: whoever passes it on leaves it as it is, and by whatever way it comes, what was overtaken is not heard."""
    committed: Step
    """C, or -1."""
    proposed: Step
    """w, or -1: nothing is proposed at the moment."""
    persist_step: Step = Step(-1)
    """A committed step that the agents upload to S3, or -1."""
    stop_step: Step = Step(-1)
    stop_state: StopState = StopState.NONE
    finished: bool = False
    """Every rank stands and what could be committed is committed: ranks leave `close()`."""
    pacing: Pacing = Pacing.AT_ONCE
    held: tuple[Rank, ...] = ()
    """Of the shards that nodes keep without being planned holders: those that all planned holders have sealed at the base or later."""
    is_silent: bool = False
    """The coordinator has nothing to announce until every node has reported to it: the term alone counts."""
