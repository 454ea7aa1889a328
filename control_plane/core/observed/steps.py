"""Steps and generations as stored: lineage, checkpoints, refused sources."""

from __future__ import annotations

from dataclasses import dataclass

from everstep.protocol.ids import FIRST_STEP, Generation, Rank, Step
from everstep.protocol.manifest import ManifestShard

NO_STEP = Step(-1)
NO_GENERATION = Generation(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRecord:
    """One generation in a job's lineage.

    Generation 0 stands for another job whose checkpoint is the initial state (`initial_generation`).
    """

    generation: Generation
    parent: Generation
    base_step: Step
    world_size: int
    """Number of ranks."""
    was_started: bool
    """Whether the control plane may have sent Start for this generation."""


def initial_generation(world_size: int) -> GenerationRecord:
    """Return the record of generation 0: another job with `world_size` ranks made the initial state."""
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
    """When the manifest was written, in Unix seconds; 0 if it is not recorded."""
    damage: str = ""
    """What a verification or a restore found wrong; empty if nothing. No restore uses a damaged checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DamagedCheckpoint:
    """A checkpoint whose objects failed verification in a restore."""

    generation: Generation
    step: Step
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedSource:
    """A source of a shard that failed verification or was unreachable.

    Later plans do not use it.
    """

    rank: Rank
    origin_generation: Generation
    step: Step
    is_object: bool = False
    """True if the source is the object in S3. False if it is the slots in a node's memory."""
