"""When a set of uploaded shards becomes a checkpoint.

Invariant: a manifest is put only for a step of which every rank's shard is complete in S3, was reported in the newest
generation, and lies on its path. It is put last, and named by (generation, step), so the same set never makes two. The
newest checkpoint and what is needed are never surplus.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from control_plane.core import recovery
from control_plane.core.actions import PutManifest
from control_plane.core.observed.steps import NO_STEP, CheckpointRecord, GenerationRecord
from everstep.protocol.agent_messages import MemberReport, UploadedShard
from everstep.protocol.ids import Generation, NodeId, Rank, Step
from everstep.protocol.manifest import CheckpointManifest, ManifestShard
from everstep.protocol.plan import GenerationPlan, ObjectReference


class CheckpointStatus(StrEnum):
    """Where a checkpoint stands.

    UPLOADING: shards of it are in S3, not all. COMPLETE: its manifest is, too. DELETING: nobody restores from it, its
    objects are being deleted. DELETED: they are gone.
    """

    UPLOADING = "Uploading"
    COMPLETE = "Complete"
    DELETING = "Deleting"
    DELETED = "Deleted"


class Verification(StrEnum):
    """What is known of a checkpoint's objects by reading them back. VERIFYING: they are being read."""

    NOT_VERIFIED = "NotVerified"
    VERIFYING = "Verifying"
    INTACT = "Intact"
    DAMAGED = "Damaged"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptCheckpoint:
    """A complete checkpoint, as far as it matters for whether it stays."""

    generation: int
    step: int
    completed_at: float
    """Unix time."""
    is_needed: bool
    """Pinned, being read back, or what the job would be restored from."""
    is_counted: bool
    """Among those that a job keeps by number; pinned ones are kept besides."""


def surplus(
    kept: Sequence[KeptCheckpoint], max_count: int | None, max_age_seconds: int | None, now: float
) -> tuple[tuple[int, int], ...]:
    """Return what a job keeps no longer.

    Args:
        kept: its complete checkpoints.
        max_count: the newest so many stay; None: any number.
        max_age_seconds: older ones go; None: none for its age.
        now: Unix seconds.

    Returns:
        Generation and step of each, the oldest step first; never the newest.
    """
    newest_first = sorted(kept, key=lambda each: (each.step, each.generation), reverse=True)
    counted = [each for each in newest_first if each.is_counted]
    beyond = set(counted[max_count:]) if max_count is not None else set()
    going = [
        each
        for each in newest_first[1:]
        if not each.is_needed
        and (each in beyond or (max_age_seconds is not None and now - each.completed_at > max_age_seconds))
    ]
    return tuple((each.generation, each.step) for each in reversed(going))


def due(
    plan: GenerationPlan,
    reports: Mapping[NodeId, MemberReport],
    lineage: Iterable[GenerationRecord],
    known: Iterable[CheckpointRecord],
    dropped: Collection[tuple[Generation, Step]] = (),
) -> tuple[PutManifest, ...]:
    """Return the manifests to put now.

    Args:
        plan: of the newest generation.
        reports: of its members, of that generation.
        lineage: all generations with a plan.
        known: the complete checkpoints.
        dropped: generation and step of those that a person has deleted: agents report their shards all the same.

    Returns:
        One for each step whose shards are all there and on the path, oldest step first; none that is known already.
    """
    lineage = tuple(lineage)
    path = recovery.path_of(lineage, plan.generation)
    done = {(checkpoint.generation, checkpoint.step) for checkpoint in known} | {*dropped}
    manifests = []
    for step, shards in sorted(_by_step(reports).items()):
        complete = all(Rank(rank) in shards for rank in range(plan.world_size))
        if not complete or (plan.generation, step) in done:
            continue
        if all(recovery.is_on_path(path, shard.origin_generation, step) for shard in shards.values()):
            manifests.append(PutManifest(at=_key(plan, step), manifest=_manifest(plan, step, shards, lineage)))
    return tuple(manifests)


def newest_restorable(
    known: Iterable[CheckpointRecord], lineage: Iterable[GenerationRecord], generation: Generation
) -> CheckpointRecord | None:
    """Return the newest checkpoint that a generation's job could go on from, or None.

    Args:
        known: the complete checkpoints.
        lineage: all generations with a plan.
        generation: the newest of them.

    Returns:
        The newest whose every shard lies on the path that led to that generation.
    """
    path = recovery.path_of(lineage, generation)
    found = [
        each
        for each in known
        if all(recovery.is_on_path(path, shard.origin_generation, each.step) for shard in each.shards)
    ]
    return max(found, key=lambda each: (each.step, each.generation), default=None)


def upload_seconds(reports: Mapping[NodeId, MemberReport]) -> float | None:
    """Return how long the slowest shard of the newest uploaded step took, or None where none was measured."""
    timed = [upload for report in reports.values() for upload in report.uploads if upload.upload_seconds > 0]
    newest = max((upload.step for upload in timed), default=NO_STEP)
    return max((upload.upload_seconds for upload in timed if upload.step == newest), default=None)


def _by_step(reports: Mapping[NodeId, MemberReport]) -> dict[Step, dict[Rank, UploadedShard]]:
    by_step: dict[Step, dict[Rank, UploadedShard]] = {}
    for report in reports.values():
        for upload in report.uploads:
            by_step.setdefault(upload.step, {})[upload.rank] = upload
    return by_step


def _key(plan: GenerationPlan, step: Step) -> ObjectReference:
    prefix = plan.checkpoint.prefix
    return ObjectReference(
        bucket=prefix.bucket, key=f"{prefix.key}run={plan.run}/gen={plan.generation}/step={step}/manifest.json"
    )


def _manifest(
    plan: GenerationPlan, step: Step, shards: Mapping[Rank, UploadedShard], lineage: tuple[GenerationRecord, ...]
) -> CheckpointManifest:
    return CheckpointManifest(
        version=1,
        job=plan.job,
        run=plan.run,
        generation=plan.generation,
        parent_chain=_chain(lineage, plan.generation),
        step=step,
        shards=tuple(
            ManifestShard(
                rank=rank,
                key=shards[rank].object.key,
                object_bytes=shards[rank].object_bytes,
                etag=shards[rank].etag,
                payload_bytes=shards[rank].payload_bytes,
                payload_digest=shards[rank].payload_digest.hex(),
                layout_hash=shards[rank].layout_hash.hex(),
                origin_generation=shards[rank].origin_generation,
            )
            for rank in sorted(shards)
        ),
    )


def _chain(lineage: tuple[GenerationRecord, ...], generation: Generation) -> tuple[tuple[Generation, Step], ...]:
    known = {record.generation: record for record in lineage}
    chain = []
    while generation in known:
        chain.append((generation, known[generation].base_step))
        generation = known[generation].parent
    return tuple(chain)
