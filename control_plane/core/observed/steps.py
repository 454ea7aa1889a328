"""Steps and generations as the control plane stores them: lineage, checkpoints, sources that failed."""

from __future__ import annotations

from dataclasses import dataclass

from everstep.protocol.ids import Generation, Rank, Step
from everstep.protocol.manifest import ManifestShard

NO_STEP = Step(-1)
NO_GENERATION = Generation(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRecord:
    """One link of a job's lineage."""

    generation: Generation
    parent: Generation
    base_step: Step
    was_started: bool
    """Its Start may have been sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord:
    """A complete checkpoint."""

    generation: Generation
    step: Step
    bucket: str
    shards: tuple[ManifestShard, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedSource:
    """A shard of a step that could not be had verified; a later plan does not ask for it again."""

    rank: Rank
    origin_generation: Generation
    step: Step
    is_object: bool = False
    """The object in S3; else the slots in memory."""
