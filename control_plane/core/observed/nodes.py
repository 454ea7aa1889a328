"""A node as a pass observes it, and what its history says about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from everstep.protocol.agent_messages import MemberReport, NodeFault, NoticeKind
from everstep.protocol.ids import NodeId


class InstanceCondition(StrEnum):
    """What AWS says about an instance.

    PRESENT: pending or running. ENDED: going or gone, or its group is ending it. UNKNOWN: not asked, or no answer.
    """

    PRESENT = "present"
    ENDED = "ended"
    UNKNOWN = "unknown"


class Remedy(StrEnum):
    """What is done about a node, from the mildest to the gravest.

    NONE: it is told. RESTART: ranks start again on the same nodes. RELEASE: it leaves its job and may work for others.
    HOLD: it leaves its job and waits until it is heard again. RETIRE: it leaves its job and waits for a person, because
    nothing that was proven allows to end it. REBOOT: it leaves its job and EC2 is asked to reboot it. REPLACE: it
    leaves its job and is ended; another one comes. LET_GO: as REPLACE, but AWS takes it
    anyway: nothing speaks against it, there is nothing to inspect, and its successor was asked for when this was
    announced.
    """

    NONE = "none"
    RESTART = "restart"
    RELEASE = "release"
    HOLD = "hold"
    RETIRE = "retire"
    REBOOT = "reboot"
    REPLACE = "replace"
    LET_GO = "let_go"


class Cause(StrEnum):
    """Why an incident was opened, from the mildest to the gravest: a graver one found later replaces a milder.

    NOTICE: nothing has failed; ranks leave a node that AWS has announced to take away. REQUESTED: nor here; a person
    wants the node for something else. PAUSE_FAILED: nor here; the job was to pause, and could not. DRILL: a person had
    it done, and all that is found follows from it.
    """

    NOTICE = "notice"
    REQUESTED = "requested"
    PAUSE_FAILED = "pause_failed"
    DRILL = "drill"
    LOAD_FAILED = "load_failed"
    RANK_EXIT = "rank_exit"
    HANG = "hang"
    AGENT_LOST = "agent_lost"
    NODE_UNREACHABLE = "node_unreachable"
    NODE_FAULT = "node_fault"
    INSTANCE_TERMINATED = "instance_terminated"
    GROUP_LOST = "group_lost"

    @property
    def is_failure(self) -> bool:
        """Something failed by itself: what MTTF and MTTR are about."""
        return self not in (Cause.NOTICE, Cause.REQUESTED, Cause.PAUSE_FAILED, Cause.DRILL)

    @property
    def takes_nodes(self) -> bool:
        """A node that is left for this asks for a spare: it failed, or AWS takes it.

        People's wishes say nothing about what comes next.
        """
        return self.is_failure or self is Cause.NOTICE


@dataclass(frozen=True, slots=True, kw_only=True)
class Implication:
    """A node had its part in an incident. A line of the node's history."""

    node_id: NodeId
    incident_id: str
    """Of a job; or `fleet-<fleet>-<Unix seconds>` when no job had the node."""
    at: float
    what: str
    """A cause, or a fault's code with its number: `node_unreachable`, `gpu_xid 79`."""
    evidence: str
    is_own_word: bool = False
    """The node's own live agent reported it: of such a node the instance may be ended."""
    remedy: Remedy = Remedy.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """Something that AWS has announced for an instance."""

    kind: NoticeKind
    message: str
    """AWS's own words."""
    ends_at: float | None = None
    """Unix seconds from which the instance may be gone; None where AWS names no time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeObserved:
    """One node as AWS and its agent show it."""

    node_id: NodeId
    instance: InstanceCondition = InstanceCondition.UNKNOWN
    instance_words: str = ""
    """AWS's own words: `terminated, Client.UserInitiatedShutdown`."""
    complaint: str = ""
    """What AWS finds wrong with an instance that runs; empty: nothing. Healthy ones fail checks, too."""
    is_connected: bool = False
    silent_seconds: float = 0.0
    """How long its control link has been silent.

    Silence before the end of this control plane's own grace after its start does not count.
    """
    heard_at: float | None = None
    """Its last message; None when this control plane has heard none."""
    address: str = ""
    peer_port: int = 0
    has_reported: bool = False
    """This control plane has had a report from the agent that is there now."""
    is_warm: bool = False
    """Its ranks start without importing first."""
    sources: frozenset[str] = frozenset()
    """SHA-256 of the source archives that it holds ready."""
    member: MemberReport | None = None
    """What it last reported to do, whatever the run; None: nothing, or it has not reported."""
    faults: tuple[NodeFault, ...] = ()
    """Of the node itself, in its agent's last report."""
    history: tuple[Implication, ...] = ()
    """Incidents that it had its part in, oldest first, since a person last returned it to service."""
    request_words: str = ""
    """What a person asked to be done with it, in a sentence, while that is not done: its job leaves it first."""
    domain: str | None = None
    """Failure domain, where AWS tells it."""
    notices: tuple[Notice, ...] = ()
    """What AWS has announced for its instance, one of a kind; `control_plane.core.notices` says what counts."""
