"""Facts: the evidence of verdicts, departures and incidents, as values.

No code interprets `text` and `note`, which contain words of AWS, an agent or a person. The database stores a fact as
JSON with its class as `kind`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeAlias

import msgspec

from control_plane.core.observed.drills import DrillKind
from everstep.protocol.agent_messages import ExitClass, MemoryEnd, NoticeKind
from everstep.protocol.codec import resolve
from everstep.protocol.ids import Generation, NodeId, Rank, Step


class Value(msgspec.Struct, frozen=True, tag=True, tag_field="kind", kw_only=True, omit_defaults=True):
    """Base of all facts and reasons: immutable, and tagged with its class name."""


class Recorded(Value, frozen=True):
    """A sentence that an earlier version of Everstep stored."""

    text: str = ""


class InstanceEnded(Value, frozen=True):
    """AWS reports that the instance of a node has ended or is ending."""

    node_id: NodeId
    state: str
    """EC2's state, for example `terminated`, or a clause about the lifecycle state in the Auto Scaling group."""
    code: str = ""
    """EC2's code of the state reason, for example `Client.UserInitiatedShutdown`, or empty."""
    text: str = ""


class NodeRemoved(Value, frozen=True):
    """The fleet has removed the node, which a job still uses."""

    node_id: NodeId


class Faulty(Value, frozen=True):
    """The node's own agent reports a fault of the node."""

    code: str
    text: str
    xid: int | None = None
    device: str = ""
    """`gpu 3`, `eth0`. Empty if the fault concerns the whole node."""
    is_repeated: bool = False
    """Whether the same fault already caused a reboot of the node."""

    @property
    def gpu(self) -> str | None:
        """The index of the faulty GPU, or None."""
        kind, _, index = self.device.partition(" ")
        return index if kind == "gpu" else None


class SlowNode(Value, frozen=True):
    """The node is much slower in a test than other nodes of its fleet. Rates are in bytes or operations per second."""

    test: str
    rate: int
    median_rate: int
    other_count: int


class NodeFaulty(Value, frozen=True):
    """The agent of the node reports a fault that makes the node unusable."""

    node_id: NodeId
    fault: Faulty


class Involvement(msgspec.Struct, frozen=True):
    """One incident that involved a node, and its cause or fault code."""

    what: str
    incident_id: str


class Lemon(Value, frozen=True):
    """The node was involved in too many incidents within `hours`, so jobs do not use it again."""

    node_id: NodeId
    involvements: tuple[Involvement, ...]
    hours: float


class Announced(Value, frozen=True):
    """AWS announced that it will end or interrupt the node's instance. `text` is AWS's announcement."""

    node_id: NodeId
    notice: NoticeKind
    text: str


class NodeRequest(StrEnum):
    """A request for a node.

    If a job uses the node, the job first gives it up at an agreed stop, a step after which all ranks stop.

    - DRAIN: the fleet holds the node, that is, keeps it unused until a person decides.
    - REPLACE: the fleet terminates the instance and launches another one.
    - REBOOT: EC2 reboots the node, and the node returns to service.
    - HOLD: the fleet holds a node that works for no job.
    """

    DRAIN = "drain"
    REPLACE = "replace"
    REBOOT = "reboot"
    HOLD = "hold"


class Requested(Value, frozen=True):
    """A person, or a roll that a person started, requested something for the node. `note` is the person's reason."""

    request: NodeRequest
    node_id: NodeId
    by: str
    note: str = ""
    is_roll: bool = False


class SilenceProof(StrEnum):
    """The circumstance of a node's silence that decides what the silence proves.

    - BLIND: most of the fleet is silent, so the silence proves nothing.
    - PEERS: other nodes do not reach the node.
    - CHECK: a status check of EC2 fails. `AgentSilent.text` describes the check.
    - LIMIT: the silence exceeds `AgentSilent.limit_seconds`, and no step advanced.
    - COORDINATOR: the agent is the coordinator, and no step was committed.
    """

    NONE = "none"
    BLIND = "blind"
    PEERS = "peers"
    CHECK = "check"
    LIMIT = "limit"
    LAUNCH = "launch"
    COORDINATOR = "coordinator"


class AgentSilent(Value, frozen=True):
    """The control plane received no message from the node's agent for `seconds`."""

    node_id: NodeId
    seconds: float
    proof: SilenceProof = SilenceProof.NONE
    limit_seconds: float = 0.0
    text: str = ""


class OutOfView(Value, frozen=True):
    """The node does not answer other members, although its agent reports, for longer than `limit_seconds` if set."""

    node_id: NodeId
    seconds: float
    limit_seconds: float | None = None
    is_accuser: bool = False
    """Whether the node itself accuses others, for the second time, and no other member confirms it."""


class Absence(StrEnum):
    """The way in which a member failed to join. UNREACHABLE: silent, although the job waited longer for its shards."""

    LATE = "late"
    SILENT = "silent"
    UNREACHABLE = "unreachable"


class NotPrepared(Value, frozen=True):
    """The node did not promise to join the next generation within `seconds`."""

    node_id: NodeId
    how: Absence
    seconds: float
    restorable_step: Step | None = None
    """The newest step without the node. None if the job loses no committed step."""
    committed_step: Step | None = None


class CutOff(Value, frozen=True):
    """Members report that they do not reach the coordinator. `texts` are their messages."""

    texts: tuple[str, ...]


class AgentRestarted(Value, frozen=True):
    """The agent of the node has restarted, or it reports another generation than the newest."""

    node_id: NodeId
    generation: Generation
    reported_generation: Generation | None = None
    """None if the agent has no state of the job."""


class RankEnded(Value, frozen=True):
    """A rank ended without success."""

    rank: Rank
    node_id: NodeId
    exit_class: ExitClass
    code: int
    """The exit code, or the negated signal number."""
    memory: MemoryEnd | None = None


class RankLoadFailed(Value, frozen=True, tag="LoadFailed"):
    """The node failed to load its shards. `text` is the agent's message."""

    node_id: NodeId
    text: str


class ShardDiffers(Value, frozen=True):
    """A node restored a shard, and its state is not the one that the shard's former owner sealed."""

    node_id: NodeId
    rank: Rank
    step: Step
    source: str
    """The node with the copy. Empty for S3 and a rebuild by parity."""


class AloneFailedToLoad(Value, frozen=True):
    """The node alone could not load a step."""

    node_id: NodeId
    step: Step


class ShardLoss(StrEnum):
    """The way in which shards were lost. MEMORY: earlier losses were not repaired before the next one."""

    HOLDERS = "holders"
    PARITY = "parity"
    MEMORY = "memory"


class ShardsLost(Value, frozen=True):
    """No remaining node holds the shards of these ranks, or can rebuild them."""

    ranks: tuple[Rank, ...]
    how: ShardLoss


class HangProof(StrEnum):
    """The way in which stacks prove that ranks cannot continue by themselves.

    - ASLEEP: no stack changed, and the ranks used neither CPU nor GPU.
    - LEFT_BEHIND: the ranks sleep while other ranks reached a later step.
    - UNCHANGED: no stack changed up to the last limit, although ranks use CPU or GPU.
    """

    STOPPED = "stopped"
    ASLEEP = "asleep"
    LEFT_BEHIND = "left_behind"
    UNCHANGED = "unchanged"


class RanksOnNodes(msgspec.Struct, frozen=True):
    """Ranks of a job, and the nodes on which they run."""

    ranks: tuple[Rank, ...]
    node_ids: tuple[NodeId, ...]
    are_all: bool = False
    """Whether these are all ranks of the job, of which there is more than one."""


class Standstill(Value, frozen=True):
    """Ranks made no progress in `phases` for longer than `limit_seconds`. Without `proof`, nothing proves a hang."""

    stuck: RanksOnNodes
    phases: tuple[str, ...]
    limit_seconds: float
    seconds: float
    proof: HangProof | None = None
    proven: RanksOnNodes | None = None
    reached_step: Step | None = None
    last_limit_seconds: float | None = None


class Oddity(StrEnum):
    """The property that distinguishes the ranks of a stuck node from all other ranks."""

    STOPPED = "stopped"
    BEHIND = "behind"
    ELSEWHERE = "elsewhere"


class AloneStuck(Value, frozen=True):
    """All other nodes wait for one node."""

    node_id: NodeId
    ranks: tuple[Rank, ...]
    how: Oddity


class SameStack(Value, frozen=True):
    """Several ranks have the same stack. `text` is the stack of their main threads, or why it was not read."""

    ranks: tuple[Rank, ...]
    text: str


class ControlPlaneAbsent(Value, frozen=True):
    """No control plane was running for `seconds`, until the Unix time `until`."""

    seconds: float
    until: float


class DrillOrdered(Value, frozen=True):
    """A person ordered a drill, which caused the faults."""

    drill_id: str
    by: str
    drill: DrillKind
    node_id: NodeId
    rank: Rank | None = None


class NodesReady(Value, frozen=True):
    """Nodes of the fleet are ready, so the job can grow."""

    node_ids: tuple[NodeId, ...]


class Returned(Value, frozen=True):
    """The job returns a node to its fleet."""

    node_id: NodeId
    to: str = ""
    """Empty if MaxNodeCount requires the return."""
    max_node_count: int = 0
    besides: Fact | None = None


class NotStopped(Value, frozen=True):
    """The ranks of a job that stops made no step in time, or did not end after their last step (`is_over`)."""

    seconds: float
    is_over: bool


class NotPaused(Value, frozen=True):
    """The job was not paused within `seconds`: the ranks did not stop, or a step did not become a checkpoint."""

    seconds: float
    step: Step | None = None
    """None if the ranks did not stop."""


class NoReplacement(Value, frozen=True):
    """No node replaced a lost node within `seconds`."""

    seconds: float


class FailedAlike(Value, frozen=True):
    """Ranks failed alike on the node after a step, and passed that step without the node."""

    node_id: NodeId
    step: Step


class LostEachOther(Value, frozen=True):
    """The node and departing nodes lost each other's replicas."""

    node_id: NodeId
    departed: tuple[NodeId, ...]


Fact: TypeAlias = (
    Recorded
    | InstanceEnded
    | NodeRemoved
    | Faulty
    | SlowNode
    | NodeFaulty
    | Lemon
    | Announced
    | Requested
    | AgentSilent
    | OutOfView
    | NotPrepared
    | CutOff
    | AgentRestarted
    | RankEnded
    | RankLoadFailed
    | ShardDiffers
    | AloneFailedToLoad
    | ShardsLost
    | Standstill
    | AloneStuck
    | SameStack
    | ControlPlaneAbsent
    | DrillOrdered
    | NodesReady
    | Returned
    | NotPaused
    | NotStopped
    | NoReplacement
    | FailedAlike
    | LostEachOther
)


def nodes_of(fact: Fact) -> tuple[NodeId, ...]:
    """Return the nodes that a fact is about. Empty if it is about no particular node."""
    match fact:
        case Standstill():
            return fact.stuck.node_ids
        case NodesReady():
            return fact.node_ids
        case LostEachOther():
            return (fact.node_id, *fact.departed)
        case _:
            node_id: NodeId | None = getattr(fact, "node_id", None)
            return () if node_id is None else (node_id,)


def ranks_of(fact: Fact) -> tuple[Rank, ...]:
    """Return the ranks that a fact is about. Empty if it is about no particular rank."""
    match fact:
        case RankEnded() | DrillOrdered():
            return () if fact.rank is None else (fact.rank,)
        case Standstill():
            return fact.stuck.ranks
        case ShardsLost() | AloneStuck() | SameStack():
            return fact.ranks
        case _:
            return ()


NOTHING = Recorded()

resolve(Fact)
