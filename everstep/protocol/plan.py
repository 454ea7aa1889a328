"""Defines the plan of a generation, which is one launch of all ranks of a job.

Invariant: a plan is immutable, and the control plane stores it in the database before it sends it to an agent. A change
needs a new generation. Agents identify the snapshot in a slot only by the generation that captured it, its step and its
digest.
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
"""Fraction of the mean iteration time."""


SourceKind = Literal["local", "peer", "parity", "s3"]
"""Where a node loads a shard from: its own slot, another node's slot, shares of several nodes, or S3."""


class SlotRecord(Message, frozen=True, omit_defaults=True):
    """A node's report about one sealed slot with a shard or share."""

    owner_rank: Rank
    """A share has `parity.share_owner` of the holder's rank."""
    origin_generation: Generation
    step: Step
    payload_bytes: Count
    digest: Digest
    layout_hash: Digest
    contributions: Annotated[tuple[Contribution, ...], Items] = ()
    """The shards of a share, in rank order; empty for a shard, or if the share's index is damaged and cannot rebuild.
    """


class SlotReference(Message, frozen=True):
    """Identifies the content of a sealed slot."""

    owner_rank: Rank
    origin_generation: Generation
    step: Step
    digest: Digest


class ObjectReference(Message, frozen=True):
    """Bucket and key of one S3 object, or bucket and key prefix of several."""

    bucket: Path
    key: Path


class ShardSource(Message, frozen=True, omit_defaults=True):
    """A source of a rank's shard of the restored step. A plan lists them in order of preference."""

    kind: SourceKind
    origin_generation: Generation
    step: Step
    digest: Digest
    payload_bytes: int
    node_id: NodeId | None = None
    """None if `kind` is parity or s3."""
    object: ObjectReference | None = None
    """The safetensors object; None unless `kind` is s3."""
    rebuild: Rebuild | None = None
    """Set if `kind` is parity. Digest and size of `rebuild.lost` equal `digest` and `payload_bytes`."""


class PlanNode(Message, frozen=True):
    """One node on which the generation runs, with its ranks."""

    node_id: NodeId
    address: str
    peer_port: int
    ranks: tuple[Rank, ...]
    """Consecutive. A rank's index in this tuple is its LOCAL_RANK."""
    keep: tuple[SlotReference, ...] = ()
    """Shards that the node must not overwrite before the generation's first commit."""


class RankPlan(Message, frozen=True, omit_defaults=True):
    """The holders of one rank's shard, and the sources of its restored step."""

    rank: Rank
    holders: tuple[NodeId, ...]
    """The owner's node, then the nodes that must acknowledge each step. With parity, the nodes of the owner's group."""
    sources: tuple[ShardSource, ...] = ()
    """Most preferred first; empty if training starts at step 0, or with a `Relayout`."""
    stripe: tuple[Rank, ...] = ()
    """The stripe's members in rank order, this rank included, on the nodes in `holders`; empty with copies."""

    @property
    def copy_nodes(self) -> tuple[NodeId, ...]:
        """The nodes that hold the whole shard, first the owner's node. With parity, only the owner's node."""
        return self.holders[:1] if self.stripe else self.holders


class Relayout(Message, frozen=True):
    """The shards of a restored step of another layout, from which each rank fetches its own elements."""

    world_size: int
    shards: tuple[tuple[ShardSource, ...], ...]
    """Sources by rank, most preferred first, never `local`. If a node is its own source, it reads its slot."""


class SourceArchive(Message, frozen=True):
    """The user's source tree, a gzipped tar in S3."""

    object: ObjectReference
    sha256: str
    bytes: int


class InputChannel(Message, frozen=True):
    """One input of a job: an S3 prefix that every node downloads, or a directory that exists on every node."""

    name: str
    prefix: ObjectReference | None = None
    """One key, or a key prefix that ends with a slash; None for a directory."""
    directory: str = ""
    """Absolute path on the nodes; empty if the input is in S3."""


CHECK_VARIABLE = "EVERSTEP_CHECK_DETERMINISM"
"""Variable of a job's Environment with a determinism check's number of steps."""


def check_steps(value: str) -> int | None:
    """Return the number of steps in a value of `CHECK_VARIABLE`, at least 2; None if it is not valid."""
    steps = int(value) if value.isascii() and value.isdecimal() and len(value) <= 4 else 0
    return steps if 2 <= steps <= 1000 else None


def channel_variable(name: str) -> str:
    """Return the environment variable with a channel's path, as SageMaker names it: `SM_CHANNEL_A_B` for `a-b`."""
    return "SM_CHANNEL_" + name.upper().replace("-", "_")


class ScriptPlan(Message, frozen=True):
    """The program that the ranks run, with its inputs and outputs."""

    source: SourceArchive
    entry_point: str
    """Relative path of a Python file in the source tree."""
    hyperparameters: dict[str, str]
    environment: dict[str, str]
    output: ObjectReference
    """Key prefix. A rank's files: `<key>gen=<g>/rank=<r>/<path>`. `kept_files` belong to the node's first rank."""
    logs: ObjectReference
    """Key prefix. `<key>gen=<g>/node=<n>/` contains a node's lines (`everstep.protocol.log_chunks`)."""
    role_arn: str = ""
    """Role whose short-lived credentials the ranks receive; empty: none."""
    requirements: str = ""
    """Relative path of a requirements file in the source tree; empty: none."""
    inputs: tuple[InputChannel, ...] = ()
    project: str = ""
    """Project of the job; empty from an older control plane."""
    secrets: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """`secretsmanager:NAME`, `ssm:NAME` or an ARN by variable. No Everstep message contains the values."""
    arguments: tuple[str, ...] = ()
    """Arguments after those of the hyperparameters. Agents ignore them before `ARGUMENTS_SINCE_MINOR`."""
    module: str = ""
    """Name under which ranks run `entry_point`, as `python -m` does; empty: as a script. Older agents ignore it."""
    kept_files: tuple[str, ...] = ()
    """Patterns of source files that become outputs: a file, a folder, or one `*` or `**` for any characters."""


ARGUMENTS_SINCE_MINOR = 1


class CheckpointPlan(Message, frozen=True):
    """The checkpoint settings of the job."""

    every_steps: int
    """0 disables checkpoints by number of steps."""
    prefix: ObjectReference
    third_slot: bool = False
    max_uploads: int = 1
    """Steps that agents upload at the same time. Values above 1 require `third_slot`."""
    stored_step: Step = FIRST_STEP
    """Step of the newest complete checkpoint of this generation's history; 0: none."""
    interval_seconds: float = 0.0
    """0 disables checkpoints at a fixed interval."""
    max_overhead: float = 0.0
    """Training time that checkpoints may add, as a fraction, for an automatic interval; 0: not automatic."""
    max_bytes_per_second: float = 0.0
    """Limit of each node's mean upload rate, for an automatic interval only; 0: no limit."""
    stored_at_seconds: float = 0.0
    """Unix time at which `stored_step` was complete, or else of the job's first start; 0: now."""
    upload_seconds: float = 0.0
    """Duration of the last upload of an earlier generation; 0: not measured."""


class Timeouts(Message, frozen=True):
    """Timeouts in seconds, derived from `detection_seconds` (docs/design.md#timeouts)."""

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
    """The newest earlier generation whose ranks may have run; 0: none. `base_step` belongs to its history."""
    base_step: Step
    nodes: tuple[PlanNode, ...]
    """The order is that of GROUP_RANK."""
    ranks: tuple[RankPlan, ...]
    coordinator: NodeId
    master_address: str
    master_port: int
    script: ScriptPlan
    checkpoint: CheckpointPlan
    timeouts: Timeouts
    relayout: Relayout | None = None
    """Set if another job or number of ranks made the restored step. All `RankPlan.sources` are then empty."""
    max_slowdown: float = DEFAULT_MAX_SLOWDOWN
    """Largest fraction of the mean iteration time that snapshots may add. Above it, ranks snapshot fewer steps."""
    encrypts_peers: bool = False
    is_elastic: bool = False
    """Whether a later generation may have another number of nodes. False from an older control plane."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @property
    def base_shards(self) -> tuple[tuple[Rank, tuple[ShardSource, ...]], ...]:
        """Owner and sources of each shard of the restored step. With a relayout, owners are ranks of that launch."""
        if self.relayout is not None:
            return tuple((Rank(rank), sources) for rank, sources in enumerate(self.relayout.shards))
        return tuple((rank.rank, rank.sources) for rank in self.ranks)

    def node(self, node_id: NodeId) -> PlanNode:
        """Return the node with this id. Raises KeyError if the node does not belong to this generation."""
        for node in self.nodes:
            if node.node_id == node_id:
                return node
        raise KeyError(node_id)
