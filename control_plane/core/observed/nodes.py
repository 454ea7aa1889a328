"""A node as AWS and its agent report it, and the node's history of incidents."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from control_plane.core.observed.facts import Fact, InstanceEnded, Requested
from everstep.protocol.agent_messages import (
    BurnInPartner,
    BurnInResult,
    BurnInTest,
    MemberReport,
    NodeFault,
    NoticeKind,
)
from everstep.protocol.ids import NodeId


class InstanceCondition(StrEnum):
    """The condition of an instance, as AWS reports it.

    - ENDED: the instance is shutting down or terminated, or its group is terminating it.
    - ABSENT: two answers of EC2 in a row did not list the instance, which proves nothing by itself (`core.absence`).
    - UNKNOWN: the control plane has not polled AWS yet, or AWS did not answer.
    """

    PRESENT = "present"
    ENDED = "ended"
    ABSENT = "absent"
    UNKNOWN = "unknown"


class Remedy(StrEnum):
    """The action for a faulty or unwanted node, from the mildest to the most severe.

    - NONE: the fault is only reported.
    - RESTART: the ranks restart on the same nodes.
    - RELEASE: the job gives up the node, which may work for other jobs.
    - HOLD: the job gives up the node, which waits until its agent reports again.
    - RETIRE: the job gives up the node, which waits for a person, because no evidence permits its termination.
    - REBOOT: the job gives up the node, and EC2 reboots it.
    - REPLACE: the job gives up the node, and the fleet terminates it. Another instance replaces it.
    - TERMINATE: like REPLACE, but for a healthy node whose end AWS announced. The node needs no inspection, and the
    fleet
      has already requested its replacement.
    """

    NONE = "none"
    RESTART = "restart"
    RELEASE = "release"
    HOLD = "hold"
    RETIRE = "retire"
    REBOOT = "reboot"
    REPLACE = "replace"
    TERMINATE = "let_go"


class Cause(StrEnum):
    """The cause of an incident, from the mildest to the most severe.

    An incident with several causes stores the most severe cause. The first six causes do not count as failures:

    - NOTICE: the job gives up a node because AWS announced the end of its instance.
    - REQUESTED: the job gives up a node because a person requested to drain, reboot or replace it.
    - GROWN: the job stopped at an agreed step to continue on more nodes.
    - RETURNED: the job stopped at an agreed step to return nodes to its fleet.
    - PAUSE_FAILED: the ranks did not stop in time for a pause, or the last step did not become a checkpoint.
    - DRILL: a person ordered the fault, and all other faults are its consequences.

    SHRUNK replaces the cause of a failure if no other node was available and the job continues on fewer nodes.
    GROUP_LOST (all nodes that held a shard were lost) takes precedence over SHRUNK.
    """

    NOTICE = "notice"
    REQUESTED = "requested"
    GROWN = "grown"
    RETURNED = "returned"
    PAUSE_FAILED = "pause_failed"
    DRILL = "drill"
    LOAD_FAILED = "load_failed"
    RANK_EXIT = "rank_exit"
    HANG = "hang"
    AGENT_LOST = "agent_lost"
    NODE_UNREACHABLE = "node_unreachable"
    NODE_FAULT = "node_fault"
    INSTANCE_TERMINATED = "instance_terminated"
    SHRUNK = "shrunk"
    GROUP_LOST = "group_lost"

    @property
    def is_failure(self) -> bool:
        """Whether incidents with this cause are failures. MTTF and MTTR count only failures."""
        return not self.is_planned and self not in (Cause.PAUSE_FAILED, Cause.DRILL)

    @property
    def is_planned(self) -> bool:
        """Whether the job stopped on purpose, with all ranks at one agreed step, so that it lost no step."""
        return self in (Cause.NOTICE, Cause.REQUESTED, Cause.GROWN, Cause.RETURNED)

    @property
    def takes_nodes(self) -> bool:
        """Whether a lost node counts for the spares. A person's request does not predict further losses."""
        return self.is_failure or self is Cause.NOTICE


@dataclass(frozen=True, slots=True, kw_only=True)
class Implication:
    """One entry of a node's fault history: the node was involved in an incident."""

    node_id: NodeId
    incident_id: str
    """Id of a job's incident, or `fleet-<fleet>-<Unix seconds>` if the node worked for no job."""
    at: float
    what: str
    """The incident's cause or the code of a fault, for example `node_unreachable` or `gpu_xid 79`."""
    evidence: Fact
    is_own_word: bool = False
    """Whether the node's own live agent reported the fault. Only then may the fleet terminate a node for it."""
    remedy: Remedy = Remedy.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """An announcement by AWS that an instance will or may end, or will or may be interrupted."""

    kind: NoticeKind
    message: str
    ends_at: float | None = None
    """Unix seconds, or None if AWS names no time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTest:
    """An all-reduce with another node. Both nodes store it with the same time of the order, in Unix seconds."""

    at: float
    partner: BurnInPartner
    test: BurnInTest | None = None
    """This node's result. None while it is pending, and after an interruption, for example by a job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BurnIn:
    """The newest order to test a node, and the newest result. Times are Unix seconds."""

    number: int
    level: int
    ordered_at: float
    repeat_count: int = 0
    """Number of earlier slow results in a row."""
    result: BurnInResult | None = None
    """None while the node is untested. While a further test is pending, the result of an earlier order."""
    ended_at: float = 0.0
    """Arrival of the result."""
    pairs: tuple[PairTest, ...] = ()
    """The newest all-reduce with each partner, oldest first. `result` has only the node's own tests."""

    @property
    def pending_pair(self) -> PairTest | None:
        """The pending all-reduce, or None."""
        return next((pair for pair in self.pairs if self.is_pending and pair.at == self.ordered_at), None)

    @property
    def is_pending(self) -> bool:
        """Whether the result of the newest order is missing."""
        return self.result is None or self.result.number != self.number


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeObserved:
    """A node as AWS and its agent report it."""

    node_id: NodeId
    instance: InstanceCondition = InstanceCondition.UNKNOWN
    ended: InstanceEnded | None = None
    failed_status_check: str = ""
    """The failing EC2 status check, or empty. A check can also fail on a healthy instance."""
    is_connected: bool = False
    silent_seconds: float = 0.0
    """The grace period after the start of this control plane does not count."""
    heard_at: float | None = None
    """Unix time of the agent's last message to this control plane."""
    address: str = ""
    peer_port: int = 0
    protocol_minor: int | None = None
    has_reported: bool = False
    """Whether the connected agent has sent this control plane a report."""
    is_warm: bool = False
    """Whether the node can start a rank without importing the rank's modules first."""
    sources: frozenset[str] = frozenset()
    """SHA-256 of each held archive."""
    member: MemberReport | None = None
    """The agent's newest report about the node's job."""
    faults: tuple[NodeFault, ...] = ()
    burn_in: BurnInResult | None = None
    history: tuple[Implication, ...] = ()
    """Incidents since a person last returned the node to service, oldest first."""
    request: Requested | None = None
    """The fleet fulfils the request after the job has given the node up."""
    domain: str | None = None
    """The network node in EC2 to which the instance is attached."""
    notices: tuple[Notice, ...] = ()
    """Each kind has at most one notice."""
