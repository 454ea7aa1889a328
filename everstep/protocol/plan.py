"""Defines the plan of a generation, which is one launch of all ranks of a job.

The control plane decides a plan once, and the plan is immutable from then on.

Invariant: the control plane stores a plan in the database before it sends the plan to an agent. To change a plan, it
starts a new generation. Agents identify the snapshot in a slot only by three values: the generation that captured it,
its step and its digest.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from everstep.protocol.codec import Message
from everstep.protocol.fixed_length import Digest
from everstep.protocol.ids import FIRST_STEP, Generation, JobName, NodeId, Rank, RunId, Step
from everstep.protocol.limits import Count, Items, Path
from everstep.protocol.parity import Contribution, Rebuild

DEFAULT_MAX_SLOWDOWN = 0.01
"""Default limit of the time that snapshots may add to an iteration, as a fraction of the mean iteration time."""


SourceKind = Literal["local", "peer", "parity", "s3"]
"""Kind of source from which a node loads a shard: its own slot, another node's slot, shares of several nodes, or S3."""


class SlotRecord(Message, frozen=True, omit_defaults=True):
    """A node's report about one sealed slot: a complete and verified shard or share in its memory."""

    owner_rank: Rank
    """The rank that owns the shard. For a parity share, `parity.share_owner` of the holder's rank."""
    origin_generation: Generation
    step: Step
    payload_bytes: Count
    digest: Digest
    layout_hash: Digest
    contributions: Annotated[tuple[Contribution, ...], Items] = ()
    """The shards that a share contains, in the order of their ranks; empty for a shard.

    Also empty if the index of the share is damaged. Such a share cannot rebuild a shard.
    """


class SlotReference(Message, frozen=True):
    """Identifies the content of a sealed slot: owner rank, generation, step and digest."""

    owner_rank: Rank
    origin_generation: Generation
    step: Step
    digest: Digest


class ObjectReference(Message, frozen=True):
    """Bucket and key of one S3 object, or bucket and key prefix of several objects."""

    bucket: Path
    key: Path


class ShardSource(Message, frozen=True, omit_defaults=True):
    """A source from which a node can load its rank's shard of the step that the generation restores.

    A plan lists the sources of a rank in order of preference.
    """

    kind: SourceKind
    origin_generation: Generation
    step: Step
    digest: Digest
    payload_bytes: int
    node_id: NodeId | None = None
    """The node to fetch the shard from; None if `kind` is parity or s3."""
    object: ObjectReference | None = None
    """The safetensors object to download; None unless `kind` is s3."""
    rebuild: Rebuild | None = None
    """The shards and shares from which the node rebuilds the shard; None unless `kind` is parity.

    Digest and size of `rebuild.lost` equal `digest` and `payload_bytes`.
    """


class PlanNode(Message, frozen=True):
    """One node on which the generation runs, with its ranks."""

    node_id: NodeId
    address: str
    peer_port: int
    ranks: tuple[Rank, ...]
    """Consecutive ranks of this node. A rank's index in this tuple is its LOCAL_RANK."""
    keep: tuple[SlotReference, ...] = ()
    """Shards in the node's memory that the node must not overwrite before the generation's first commit.

    The node may overwrite all other slots of the run.
    """


class RankPlan(Message, frozen=True, omit_defaults=True):
    """The nodes that hold one rank's shard, and the sources from which its restored step can be loaded."""

    rank: Rank
    holders: tuple[NodeId, ...]
    """The owner's node, followed by the nodes that must acknowledge each step.

    With copies, each of these nodes holds a copy of the shard. With parity, the list contains the nodes of the owner's
    group.
    """
    sources: tuple[ShardSource, ...] = ()
    """Sources of this rank's shard of the restored step, in order of preference.

    Empty if training starts at step 0, or if the plan has a `Relayout`.
    """
    stripe: tuple[Rank, ...] = ()
    """The members of the rank's stripe in the order of their ranks, this rank included; empty with copies.

    The members are the ranks with the same LOCAL_RANK on the nodes in `holders`. A rank's position in the stripe is its
    index in this tuple.
    """

    @property
    def copy_nodes(self) -> tuple[NodeId, ...]:
        """The nodes that hold a copy of the whole shard, first the owner's node. With parity, only the owner's node."""
        return self.holders[:1] if self.stripe else self.holders


class Relayout(Message, frozen=True):
    """The shards of a restored step that another job, or a launch with a different number of ranks, saved.

    These shards divide the state differently than the new ranks do. Each new rank therefore fetches the earlier shards
    that contain its own elements.
    """

    world_size: int
    """Number of ranks of the generation that made the restored step."""
    shards: tuple[tuple[ShardSource, ...], ...]
    """Sources of the shard of each rank that made the restored step, by rank, in order of preference.

    The kind is never `local`, because any node of the plan may need any of these shards. If the source is the node
    itself, the node reads its own slot.
    """


class SourceArchive(Message, frozen=True):
    """The user's source tree, a gzipped tar in S3."""

    object: ObjectReference
    sha256: str
    bytes: int


class InputChannel(Message, frozen=True):
    """One input of a job.

    It is either an S3 prefix that every node downloads, or a directory that exists on every node.
    """

    name: str
    prefix: ObjectReference | None = None
    """Key of one object, or a key prefix that ends with a slash; None if the input is a directory."""
    directory: str = ""
    """Absolute path of the directory on the nodes; empty if the input is in S3."""


CHECK_VARIABLE = "EVERSTEP_CHECK_DETERMINISM"
"""Variable of a job's Environment that makes the job a determinism check. Its value is a number of steps."""


def check_steps(value: str) -> int | None:
    """Return a determinism check's number of steps from the value of `CHECK_VARIABLE`; None if it is not valid.

    A check needs at least two steps, because it stores a snapshot of one step and repeats the steps after it.
    """
    steps = int(value) if value.isascii() and value.isdecimal() and len(value) <= 4 else 0
    return steps if 2 <= steps <= 1000 else None


def channel_variable(name: str) -> str:
    """Return the environment variable that holds a channel's path on the nodes.

    The name follows SageMaker's training toolkit.

    For example, channel `train` has the variable `SM_CHANNEL_TRAIN`. Hyphens become underscores.
    """
    return "SM_CHANNEL_" + name.upper().replace("-", "_")


class ScriptPlan(Message, frozen=True):
    """The program that the ranks run, with its inputs and outputs."""

    source: SourceArchive
    entry_point: str
    """Relative path of a Python file in the source tree."""
    hyperparameters: dict[str, str]
    environment: dict[str, str]
    output: ObjectReference
    """Key prefix of the outputs. A rank's files are stored as `<key>gen=<g>/rank=<r>/<path>`.

    Files of `kept_files` have the rank of the node's first rank.
    """
    logs: ObjectReference
    """Key prefix of the log: `<key>gen=<g>/node=<n>/` contains a node's lines (`everstep.protocol.log_chunks`)."""
    role_arn: str = ""
    """IAM role whose short-lived credentials the ranks receive; empty if they receive none."""
    requirements: str = ""
    """Relative path of a requirements file in the source tree; empty if no packages are installed."""
    inputs: tuple[InputChannel, ...] = ()
    project: str = ""
    """The job's project. Empty if the control plane is older than this field."""
    secrets: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """Location of each secret, by environment variable: `secretsmanager:NAME`, `ssm:NAME` or an ARN.

    Only the node reads the values, directly from AWS. No Everstep message contains them.
    """
    arguments: tuple[str, ...] = ()
    """Arguments of the script after those of the hyperparameters. Agents ignore them before `ARGUMENTS_SINCE_MINOR`."""
    module: str = ""
    """Name under which ranks run `entry_point` as `python -m` does; empty: as a script. As old as `arguments`."""
    kept_files: tuple[str, ...] = ()
    """Patterns of files in the source directory that become outputs. As old as `arguments`.

    A pattern is a file, a folder, or has one `*` (or `**`) for any characters.
    """


ARGUMENTS_SINCE_MINOR = 1
"""The minor version of the protocol since which agents know `arguments`, `module` and `kept_files` of `ScriptPlan`."""


class CheckpointPlan(Message, frozen=True):
    """The checkpoint settings of the job."""

    every_steps: int
    """Steps between two checkpoints; 0 disables checkpoints by number of steps."""
    prefix: ObjectReference
    third_slot: bool = False
    max_uploads: int = 1
    """Maximum number of steps that agents upload at the same time. Values above 1 require `third_slot`."""
    stored_step: Step = FIRST_STEP
    """Step of the newest complete checkpoint in the history that this generation continues; 0 if there is none."""
    interval_seconds: float = 0.0
    """Seconds between two checkpoints; 0 disables checkpoints at a fixed interval."""
    max_overhead: float = 0.0
    """Limit of the training time that checkpoints add, as a fraction of the time without checkpoints.

    The coordinator derives an automatic interval from this limit. 0 if the interval is not automatic.
    """
    max_bytes_per_second: float = 0.0
    """Limit of each node's mean upload rate in bytes per second. It applies only to an automatic interval.

    0 means no limit.
    """
    stored_at_seconds: float = 0.0
    """Unix time at which the checkpoint of `stored_step` was complete.

    Without a checkpoint, the time at which the job first started; 0 if it starts now.
    """
    upload_seconds: float = 0.0
    """Duration of the last upload of an earlier generation, in seconds; 0 if none was measured."""


class Timeouts(Message, frozen=True):
    """The timeouts in seconds, all derived from `detection_seconds` (docs/design.md#timeouts)."""

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
    """The complete instructions for the agents of one generation."""

    job: JobName
    run: RunId
    generation: Generation
    parent: Generation
    """The newest earlier generation whose ranks may have run; 0 if there is none.

    `base_step` is a step of that generation, or of a generation that it continued.
    """
    base_step: Step
    nodes: tuple[PlanNode, ...]
    """The nodes of the generation, in the order of GROUP_RANK."""
    ranks: tuple[RankPlan, ...]
    """Holders and sources of each rank's shard, in rank order."""
    coordinator: NodeId
    master_address: str
    master_port: int
    script: ScriptPlan
    checkpoint: CheckpointPlan
    timeouts: Timeouts
    relayout: Relayout | None = None
    """Sources of the restored step if a different number of ranks, or another job, made it.

    Otherwise None. With a relayout, `base_step` is positive and all `RankPlan.sources` are empty.
    """
    max_slowdown: float = DEFAULT_MAX_SLOWDOWN
    """Largest fraction of the mean iteration time by which snapshots may slow training down.

    If a snapshot of every step would cost more than this, ranks take snapshots of fewer steps.
    """
    encrypts_peers: bool = False
    """Whether the nodes use TLS for all connections between them, and refuse connections without TLS."""
    is_elastic: bool = False
    """Whether a later generation may have another number of nodes. False if the control plane is older than this field.
    """

    @property
    def world_size(self) -> int:
        """The number of ranks of the generation."""
        return len(self.ranks)

    @property
    def base_shards(self) -> tuple[tuple[Rank, tuple[ShardSource, ...]], ...]:
        """The rank that owns each shard of the restored step, and the sources of this shard.

        If another job or a different number of ranks saved the step (`relayout`), the owners are ranks of that job or
        launch.
        """
        if self.relayout is not None:
            return tuple((Rank(rank), sources) for rank, sources in enumerate(self.relayout.shards))
        return tuple((rank.rank, rank.sources) for rank in self.ranks)

    def node(self, node_id: NodeId) -> PlanNode:
        """Return the node of this generation with this id.

        Args:
            node_id: id of a node of the generation.

        Returns:
            The node's address, its ranks and the slots that it must keep.

        Raises:
            KeyError: the node does not belong to this generation.
        """
        for node in self.nodes:
            if node.node_id == node_id:
                return node
        raise KeyError(node_id)
