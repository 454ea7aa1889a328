"""Between agents of one generation: the rounds of the step protocol (design §3), level-triggered.

Every `RoundReport` is a node's whole state and every `Announcement` the coordinator's: a lost, late or doubled message is repaired by
the next one. A report or announcement of another generation is refused.

Invariant: sequences grow within one connection; a lower one is late and is dropped.
"""

from __future__ import annotations

from everstep.protocol.codec import Message
from everstep.protocol.ids import Generation, NodeId, Rank, Step
from everstep.protocol.rank_messages import Standing, StopState, Vote


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
    pinned_step: Step = Step(-1)
    """A step whose slot is being uploaded and may not be reused."""
    out_of_view: tuple[NodeId, ...] = ()
    is_late: bool = False
    """The vote is abandon because the rank heard of w too late."""
    reason: str = ""
    """Why the vote is abandon, or why a holder is out of view."""


class RoundReport(Message, frozen=True):
    """A node's state in the rounds, sent up the tree on change."""

    generation: Generation
    node_id: NodeId
    sequence: int
    ranks: tuple[RankRound, ...]


class Announcement(Message, frozen=True):
    """The coordinator's state, sent down the tree on change."""

    generation: Generation
    sequence: int
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
