"""The plan of a generation: one launch of all ranks, decided once by the control plane and immutable from then on.

Invariant: a plan is in the database before the first agent hears of it; any change is a new generation. Agents compare
what it names for equality (origin generation, step, digest) and never reason about lineage.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from everstep.protocol.codec import Message
from everstep.protocol.ids import FIRST_STEP, Generation, JobName, NodeId, Rank, RunId, Step

DEFAULT_MAX_SLOWDOWN = 0.01
"""What snapshots may cost training unless a job says otherwise, as a part of the mean iteration."""


class SlotRecord(Message, frozen=True):
    """One sealed slot of a node's inventory."""

    owner_rank: Rank
    origin_generation: Generation
    step: Step
    payload_bytes: int
    digest: bytes
    layout_hash: bytes


class SlotReference(Message, frozen=True):
    """Names one sealed content exactly."""

    owner_rank: Rank
    origin_generation: Generation
    step: Step
    digest: bytes


class ObjectReference(Message, frozen=True):
    """One S3 object."""

    bucket: str
    key: str


class ShardSource(Message, frozen=True):
    """Where the owner's node gets its rank's shard of the base step from, best first in the plan."""

    kind: Literal["local", "peer", "s3"]
    origin_generation: Generation
    step: Step
    digest: bytes
    payload_bytes: int
    node_id: NodeId | None = None
    """The holder to fetch from; None for s3."""
    object: ObjectReference | None = None
    """The safetensors object; None for local and peer."""


class PlanNode(Message, frozen=True):
    """One member of the generation."""

    node_id: NodeId
    address: str
    peer_port: int
    ranks: tuple[Rank, ...]
    """Consecutive; LOCAL_RANK is the position in here."""
    keep: tuple[SlotReference, ...] = ()
    """Sealed slots that stay untouched until the base is committed; all others of the run are free."""


class RankPlan(Message, frozen=True):
    """One rank: who holds its shard, and where its base comes from."""

    rank: Rank
    holders: tuple[NodeId, ...]
    """The owner's node first, then the peers; as many as there are copies."""
    sources: tuple[ShardSource, ...] = ()
    """Empty exactly when the base step is 0."""


class SourceArchive(Message, frozen=True):
    """The user's source tree: a gzipped tar in S3."""

    object: ObjectReference
    sha256: str
    bytes: int


class InputChannel(Message, frozen=True):
    """One of a job's inputs: what lies below a prefix of S3, fetched to every node, or a directory that every node has."""

    name: str
    prefix: ObjectReference | None = None
    """Key of one object, or the beginning of the keys of many up to a slash; None: it is a directory."""
    directory: str = ""
    """Absolute path on the nodes."""


def channel_variable(name: str) -> str:
    """Return the variable that tells a rank where a channel lies, as SageMaker's training toolkit names it.

    Args:
        name: of the channel.

    Returns:
        `SM_CHANNEL_TRAIN` for `train`; what a shell takes for no part of a name is an underscore.
    """
    return "SM_CHANNEL_" + name.upper().replace("-", "_")


class ScriptPlan(Message, frozen=True):
    """What the ranks run."""

    source: SourceArchive
    entry_point: str
    """Relative path of a Python file in the source tree."""
    hyperparameters: dict[str, str]
    environment: dict[str, str]
    output: ObjectReference
    """Key prefix; a rank's output directory goes to `<key>gen=<g>/rank=<r>/<path>`."""
    logs: ObjectReference
    """Key prefix; a rank's streams go to `<key>gen=<g>/rank=<r>.stdout` and `.stderr`."""
    role_arn: str = ""
    """Whose short-lived keys ranks have; empty: nobody's."""
    requirements: str = ""
    """Relative path of a requirements file in the source tree; empty: nothing is installed."""
    inputs: tuple[InputChannel, ...] = ()
    project: str = ""
    """The job's; empty where the control plane is older than this field."""
    secrets: dict[str, str] = msgspec.field(default_factory=dict)
    """By variable, where its value is: `secretsmanager:NAME`, `ssm:NAME` or an ARN.

    Values are on no wire but that from AWS to the node.
    """


class CheckpointPlan(Message, frozen=True):
    """The durable tier of this job."""

    every_steps: int
    """0: only at an agreed stop."""
    prefix: ObjectReference
    third_slot: bool = False
    stored_step: Step = FIRST_STEP
    """The newest complete checkpoint that leads to the base; 0: there is none."""


class Timeouts(Message, frozen=True):
    """The ladder of timeouts in seconds, all derived from `detection_seconds` (docs/design.md#timeouts)."""

    detection_seconds: float
    lease_seconds: float
    holder_deadline_seconds: float
    prepare_deadline_seconds: float
    gone_seconds: float
    coordinator_deadline_seconds: float
    final_round_seconds: float
    welcome_seconds: float
    stall_seconds: float
    exclude_seconds: float
    hang_seconds: float
    blind_wait_seconds: float
    new_phase_seconds: float


class GenerationPlan(Message, frozen=True):
    """Everything that the agents of one generation need."""

    job: JobName
    run: RunId
    generation: Generation
    parent: Generation
    """The generation that the base comes from; 0 for the first."""
    base_step: Step
    nodes: tuple[PlanNode, ...]
    """By GROUP_RANK."""
    ranks: tuple[RankPlan, ...]
    """By rank."""
    coordinator: NodeId
    master_address: str
    master_port: int
    script: ScriptPlan
    checkpoint: CheckpointPlan
    timeouts: Timeouts
    max_slowdown: float = DEFAULT_MAX_SLOWDOWN
    """What snapshots may cost training, as a part of the mean iteration: above it they are taken less often."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    def node(self, node_id: NodeId) -> PlanNode:
        """Return the member with this id.

        Args:
            node_id: of a member.

        Returns:
            Its address, its ranks and what it has to keep.

        Raises:
            KeyError: it is not a member of this generation.
        """
        for node in self.nodes:
            if node.node_id == node_id:
                return node
        raise KeyError(node_id)
