"""Records that the database stores: generations, checkpoints, and sources from which a shard failed to load."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from everstep.protocol.agent_messages import Obstacle, RunningUpload
from everstep.protocol.ids import FIRST_STEP, Generation, NodeId, Rank, Step
from everstep.protocol.manifest import ManifestShard
from everstep.protocol.rank_messages import UnkeptCause

NO_GENERATION = Generation(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRecord:
    """One generation in a job's history. Generation 0 is the other job from whose checkpoint this job starts."""

    generation: Generation
    parent: Generation
    base_step: Step
    world_size: int
    """0 if a restored database does not contain this number."""
    was_started: bool
    """Whether the control plane may have ordered agents to start the ranks of this generation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStates:
    """Digests of all ranks' states at one step."""

    step: Step
    digests: bytes
    """uint8[world_size * STATE_DIGEST_BYTES], in rank order. Zeros for a rank that has reported none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedStates:
    """Digests of the steps that the owners of a job's shards have sealed last (`core.repeated_steps`)."""

    generation: Generation = NO_GENERATION
    world_size: int = 0
    newest: tuple[StepStates, ...] = ()
    """Steps of this generation, in increasing order; at most `state_count(world_size)`."""
    earlier: tuple[StepStates, ...] = ()
    """Steps of earlier generations that this generation repeats and has not compared yet."""


def initial_generation(world_size: int) -> GenerationRecord:
    """Return the record of generation 0, for a job whose initial state another job with `world_size` ranks made."""
    return GenerationRecord(
        generation=NO_GENERATION, parent=Generation(-1), base_step=FIRST_STEP, world_size=world_size, was_started=False
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord:
    """A complete checkpoint."""

    generation: Generation
    step: Step
    bucket: str
    shards: tuple[ManifestShard, ...]
    completed_at: float = 0.0
    """Unix seconds of the manifest, or 0 if unknown."""
    is_wrong: bool = False
    """Whether a verification or a restore found damage. No restore uses a damaged checkpoint."""
    verified_at: float | None = None
    """Unix seconds of the last verification."""
    verify_requested_at: float | None = None
    """Unix seconds of the open request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointUpload:
    """The progress of one checkpoint's upload, summed over the shards of all ranks whose agents report an upload."""

    generation: Generation
    step: Step
    stored_bytes: int
    """Bytes of finished and running uploads."""
    total_bytes: int
    """Bytes of all shards whose upload has begun."""
    slowest: RunningUpload
    """The running upload of which S3 has stored the smallest fraction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoubtedCheckpoint:
    """A checkpoint whose content differed from the manifest. One reader causes a verification; two prove damage."""

    generation: Generation
    step: Step
    readers: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedSource:
    """A copy of a shard, in nodes' memory or in S3, that plans do not use (`core.witnesses`)."""

    rank: Rank
    origin_generation: Generation
    step: Step
    is_object: bool = False
    """True for an object in S3. False for a slot in the memory of any node."""
    digest: bytes = b""
    """Digest of the refused content. Empty if all contents are refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRead:
    """One node's report that it could not load a shard from a source."""

    reader: NodeId
    generation: Generation
    at: float
    """Unix seconds of the report's arrival."""
    source: RefusedSource
    is_mismatch: bool
    """True if the content was wrong. False if the source was unreachable."""
    key: str = ""
    """Key of the S3 object. Empty for a source in nodes' memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lapse:
    """The time in which training goes on although the job keeps no further step."""

    cause: UnkeptCause
    generation: Generation
    kept: Step
    """The newest step that the job keeps. A failure repeats all later steps."""
    since: float
    """Unix time at which this step was committed, or at which this generation finished its first step."""
    node_id: NodeId | None = None
    rank: Rank | None = None
    detail: str = ""
    """Text for people: no code reads it."""


class HolderState(StrEnum):
    """The reason why a node lacks the newest committed step. EMPTY: it works for the job, but lacks a part."""

    ENDED = "Ended"
    SILENT = "Silent"
    LEFT = "Left"
    EMPTY = "Empty"


@dataclass(frozen=True, slots=True, kw_only=True)
class LostHolder:
    """A node of the last generation, and why it cannot provide the newest committed step."""

    node_id: NodeId
    state: HolderState


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreListing:
    """The steps of a run's manifests in S3, or the reason why S3 could not be listed."""

    obstacle: Obstacle | None = None
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedWork:
    """A choice that only a person may make: repeat much training, or wait for nodes that may return."""

    base_step: Step
    """The newest step that every rank can restore now. 0: the script's own initial state."""
    newest_step: Step
    """The newest committed step, which is out of reach."""
    after: Generation
    """The newest started generation. A consent is valid only for the recovery after it."""
    seconds: float | None
    """Training time from `base_step` to `newest_step`. None if unknown."""
    since: float
    """Unix time since which the job waits for this choice."""
    holders: tuple[LostHolder, ...] = ()
    wrong_steps: tuple[Step, ...] = ()
    """Damaged checkpoints that are newer than `base_step`."""
    is_stored: bool = False
    listing: StoreListing | None = None

    @property
    def unknown_steps(self) -> tuple[Step, ...]:
        """Undamaged steps after `base_step` that S3 lists, although the job cannot restore them."""
        steps = () if self.listing is None else self.listing.steps
        return tuple(step for step in steps if step > self.base_step and step not in self.wrong_steps)

    @property
    def is_total(self) -> bool:
        """Whether AWS reports that every node has ended, and S3 has no checkpoint, so that only step 0 is left."""
        have_ended = bool(self.holders) and all(each.state is HolderState.ENDED for each in self.holders)
        return self.base_step <= FIRST_STEP and have_ended and self.listing == StoreListing()
