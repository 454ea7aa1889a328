"""Checkpoints: when the control plane writes their manifests, and which checkpoints it deletes.

Invariant: the control plane writes a manifest only after all shards of the step are complete in S3. The job's limits
never delete a checkpoint that is the newest, is pinned, is being verified, is the source of the next restore, or has no
later verified checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from control_plane.core import recovery
from control_plane.core.actions import PutManifest
from control_plane.core.observed.steps import (
    NO_GENERATION,
    CheckpointRecord,
    CheckpointUpload,
    GenerationRecord,
)
from everstep.protocol.agent_messages import MemberReport, UploadedShard
from everstep.protocol.ids import NO_STEP, Generation, NodeId, Rank, Step
from everstep.protocol.manifest import MANIFEST_VERSION, CheckpointManifest, ManifestShard, SharedObject
from everstep.protocol.plan import GenerationPlan, ObjectReference

DEFAULT_TRASH_HOURS = 24


class CheckpointStatus(StrEnum):
    """The status of a checkpoint.

    - UPLOADING: some of the shards are in S3.
    - COMPLETE: all shards and the manifest are in S3.
    - TRASHED: all objects stay in S3 until the purge time. No job restores from the checkpoint, unless a person
      undeletes it.
    - DELETING: the control plane deletes the objects. No job may restore from the checkpoint.
    - DELETED: the objects no longer exist.
    """

    UPLOADING = "Uploading"
    COMPLETE = "Complete"
    TRASHED = "Trashed"
    DELETING = "Deleting"
    DELETED = "Deleted"


class TrashCause(StrEnum):
    """The reason for which a checkpoint is in the trash.

    - RETENTION: the checkpoint exceeds the job's limits. Its purge needs a later verified checkpoint.
    - PERSON: a person deleted the checkpoint, or the job with its checkpoints.
    """

    RETENTION = "Retention"
    PERSON = "Person"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrashMark:
    """The times and the cause of a checkpoint in the trash. The database and S3 both store them."""

    trashed_at: datetime
    purge_at: datetime
    trash_cause: TrashCause


class Verification(StrEnum):
    """The result of a checkpoint's last verification. A verification reads all objects of the checkpoint from S3.

    - VERIFYING: a verification is requested or in progress.
    - WAITING: a verification is requested, but S3 cannot be read. Everstep tries again, and concludes nothing.
    """

    NOT_VERIFIED = "NotVerified"
    VERIFYING = "Verifying"
    WAITING = "Waiting"
    INTACT = "Intact"
    DAMAGED = "Damaged"


def contradictions(
    *,
    every_steps: int,
    interval_seconds: int | None,
    max_overhead: float | None,
    max_bytes_per_second: int | None,
    max_uploads: int = 1,
    has_third_slot: bool = False,
) -> tuple[tuple[str, str], ...]:
    """Return the settings of a checkpoint policy that contradict each other, as names of API fields with messages."""
    found: list[tuple[str, str]] = []
    fixed = {"EverySteps": every_steps, "IntervalInSeconds": interval_seconds}
    if max_overhead is not None and (names := [name for name, value in fixed.items() if value]):
        message = f"chooses the interval itself; remove {' and '.join(names)}"
        found.append(("CheckpointConfig.MaxOverhead", message))
    if max_bytes_per_second is not None and max_overhead is None:
        message = "limits the automatic interval only; set MaxOverhead, too"
        found.append(("CheckpointConfig.MaxUploadBytesPerSecond", message))
    if max_uploads > 1 and not has_third_slot:
        message = f"{max_uploads} uploads need a memory slot each; set ThirdSlot, too"
        found.append(("CheckpointConfig.MaxUploadsInFlight", message))
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptCheckpoint:
    """A complete checkpoint, with the facts from which `surplus` decides whether the control plane may delete it."""

    generation: int
    step: int
    completed_at: float
    """Unix seconds of the manifest."""
    is_needed: bool = False
    """Whether the checkpoint is pinned, is being verified, or is the source of the job's next restore."""
    is_counted: bool = True
    """False for pinned checkpoints, which do not count towards `CheckpointRetention.max_count`."""
    is_restorable: bool = True
    """Whether no damage is known, and the newest generation continues the checkpoint's history."""
    is_verified: bool = False

    @property
    def key(self) -> tuple[int, int]:
        """Generation and step, which together identify the checkpoint."""
        return self.generation, self.step


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRetention:
    """The limits of a job's checkpoints. None means no limit."""

    max_count: int | None = None
    keep_every_steps: int | None = None
    """The job also keeps the first checkpoint at or after each multiple of this number of steps."""
    max_age_seconds: int | None = None

    @property
    def is_limited(self) -> bool:
        """Whether a limit that can delete a checkpoint (number or age) is set."""
        return self.max_count is not None or self.max_age_seconds is not None


def surplus(kept: Sequence[KeptCheckpoint], limits: CheckpointRetention, now: float) -> tuple[tuple[int, int], ...]:
    """Return generation and step of the checkpoints that may be deleted, oldest step first, before `newest_safe`."""
    safe = newest_safe(kept)
    return () if safe is None else tuple(each.key for each in _excess(kept, limits, now) if each.step < safe.step)


def newest_safe(kept: Iterable[KeptCheckpoint]) -> KeptCheckpoint | None:
    """Return the newest verified checkpoint that the job can restore, or None. Only older checkpoints may be purged."""
    return max((each for each in kept if each.is_verified and each.is_restorable), key=_by_age, default=None)


def to_verify(
    kept: Sequence[KeptCheckpoint], limits: CheckpointRetention, now: float, waiting: Collection[int] = ()
) -> tuple[int, int] | None:
    """Return the checkpoint to verify so that more checkpoints may be deleted, or None.

    `waiting` contains the steps of checkpoints in the trash whose purge time has passed.
    """
    newest = max((each for each in kept if each.is_restorable), key=_by_age, default=None)
    if newest is None or newest.is_verified:
        return None
    safe = newest_safe(kept)
    steps = [*(each.step for each in _excess(kept, limits, now)), *waiting]
    return newest.key if any((NO_STEP if safe is None else safe.step) <= step < newest.step for step in steps) else None


def _excess(kept: Sequence[KeptCheckpoint], limits: CheckpointRetention, now: float) -> list[KeptCheckpoint]:
    """Return the checkpoints that exceed the limits, oldest step first, even without a later verified checkpoint."""
    newest_first = sorted(kept, key=_by_age, reverse=True)
    counted = [each for each in newest_first if each.is_counted and each.is_restorable]
    beyond: set[tuple[int, int]] = set()
    if limits.max_count is not None:
        beyond |= {each.key for each in kept} - {each.key for each in counted[: limits.max_count]}
    beyond |= {
        each.key
        for each in newest_first
        if limits.max_age_seconds is not None and now - each.completed_at > limits.max_age_seconds
    }
    exempt = {each.key for each in _spaced(counted, limits.keep_every_steps)}
    going = [each for each in newest_first if each.key in beyond and each.key not in exempt and not each.is_needed]
    return going[::-1] if limits.is_limited else []


def _by_age(checkpoint: KeptCheckpoint) -> tuple[int, int]:
    return checkpoint.step, checkpoint.generation


def _spaced(newest_first: Sequence[KeptCheckpoint], every_steps: int | None) -> Iterable[KeptCheckpoint]:
    first = {each.step // every_steps: each for each in newest_first} if every_steps else {}
    return [each for multiple, each in first.items() if multiple > 0]


def due(
    plan: GenerationPlan,
    reports: Mapping[NodeId, MemberReport],
    lineage: Iterable[GenerationRecord],
    known: Iterable[CheckpointRecord],
    dropped: Collection[tuple[Generation, Step]] = (),
    *,
    committed: Step,
) -> tuple[PutManifest, ...]:
    """Return the manifests that the control plane must write now, oldest step first: one per complete step.

    Each shard was captured on the newest generation's path, by a generation with as many ranks. `dropped` contains
    checkpoints that a person has deleted, but whose shards agents still report. `committed` is the job's newest
    committed step, and the base of the generation counts as one. Of more steps than agents report, the newest count.
    """
    lineage = tuple(lineage)
    path = recovery.path_of(lineage, plan.generation)
    other_sizes = {each.generation for each in lineage if each.world_size not in (0, plan.world_size)}
    done = {(checkpoint.generation, checkpoint.step) for checkpoint in known} | {*dropped}
    newest = max(committed, plan.base_step)
    by_step = _by_step(
        upload
        for report in reports.values()
        for upload in report.uploads
        if upload.step <= newest and _is_in_place(plan, upload)
    )
    complete = sorted(step for step, shards in by_step.items() if len(shards) == plan.world_size)
    manifests: list[PutManifest] = []
    for step in complete[-(plan.checkpoint.max_uploads + 2) :]:
        shards = by_step[step]
        origins = {shard.origin_generation for shard in shards.values()}
        is_ours = origins.isdisjoint(other_sizes) and all(recovery.is_on_path(path, origin, step) for origin in origins)
        if is_ours and (plan.generation, step) not in done:
            manifests.append(PutManifest(at=_key(plan, step), manifest=_manifest(plan, step, shards, lineage)))
    return tuple(manifests)


def newest_restorable(
    known: Iterable[CheckpointRecord], lineage: Iterable[GenerationRecord], generation: Generation
) -> CheckpointRecord | None:
    """Return the newest undamaged checkpoint whose shards all belong to the history of `generation`, or None."""
    found = restorable(known, lineage, generation)
    return max(found, key=lambda each: (each.step, each.generation), default=None)


def restorable(
    known: Iterable[CheckpointRecord], lineage: Iterable[GenerationRecord], generation: Generation
) -> tuple[CheckpointRecord, ...]:
    """Return all undamaged checkpoints whose shards all belong to the history of `generation`."""
    path = recovery.path_of(lineage, generation)
    return tuple(
        each
        for each in known
        if not each.is_wrong
        and all(recovery.is_on_path(path, shard.origin_generation, each.step) for shard in each.shards)
    )


def upload_seconds(reports: Mapping[NodeId, MemberReport]) -> float | None:
    """Return the upload time of the slowest shard of the newest uploaded step, in seconds, or None."""
    timed = [upload for report in reports.values() for upload in report.uploads if upload.upload_seconds > 0]
    newest = max((upload.step for upload in timed), default=NO_STEP)
    return max((upload.upload_seconds for upload in timed if upload.step == newest), default=None)


def uploading(generation: Generation, reports: Mapping[NodeId, MemberReport]) -> CheckpointUpload | None:
    """Return the progress of the newest checkpoint that is being uploaded, or None."""
    running = [upload for report in reports.values() for upload in report.running_uploads]
    step = max((upload.step for upload in running), default=NO_STEP)
    running = [upload for upload in running if upload.step == step]
    if not running:
        return None
    uploads = (upload for report in reports.values() for upload in report.uploads)
    finished = sum(shard.object_bytes for shard in _by_step(uploads).get(step, {}).values())
    return CheckpointUpload(
        generation=generation,
        step=step,
        stored_bytes=finished + sum(upload.stored_bytes for upload in running),
        total_bytes=finished + sum(upload.object_bytes for upload in running),
        slowest=min(running, key=lambda upload: (upload.stored_bytes / max(upload.object_bytes, 1), upload.rank)),
    )


def _by_step(uploads: Iterable[UploadedShard]) -> dict[Step, dict[Rank, UploadedShard]]:
    by_step: dict[Step, dict[Rank, UploadedShard]] = {}
    for upload in uploads:
        by_step.setdefault(upload.step, {})[upload.rank] = upload
    return by_step


def _run_folder(plan: GenerationPlan) -> str:
    return f"{plan.checkpoint.prefix.key}run={plan.run}/"


def _step_folder(plan: GenerationPlan, step: Step) -> str:
    return f"{_run_folder(plan)}gen={plan.generation}/step={step}/"


def _key(plan: GenerationPlan, step: Step) -> ObjectReference:
    return ObjectReference(bucket=plan.checkpoint.prefix.bucket, key=f"{_step_folder(plan, step)}manifest.json")


def _is_in_place(plan: GenerationPlan, upload: UploadedShard) -> bool:
    """Return whether an uploaded object belongs to a rank of the plan and is in the folder of its step."""
    # The control plane later reads these objects with its own permissions, and does not trust keys that agents report.
    folder = _step_folder(plan, upload.step)
    return (
        upload.object.bucket == plan.checkpoint.prefix.bucket
        and upload.object.key.startswith(folder)
        and re.fullmatch(rf"\w+/rank={upload.rank}\.safetensors", upload.object.key[len(folder) :], re.ASCII)
        is not None
        and upload.rank in range(plan.world_size)
    )


def _manifest(
    plan: GenerationPlan, step: Step, shards: Mapping[Rank, UploadedShard], lineage: tuple[GenerationRecord, ...]
) -> CheckpointManifest:
    # The control plane later deletes these objects by key. It computes the keys itself, because it does not trust keys
    # that agents report.
    frozen = _shared(f"{_run_folder(plan)}frozen/", (shard.frozen for shard in shards.values()))
    replicated = _shared(f"{_step_folder(plan, step)}replicated/", (shard.replicated for shard in shards.values()))
    return CheckpointManifest(
        version=MANIFEST_VERSION,
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
                sha256=shards[rank].sha256,
                part_bytes=shards[rank].part_bytes,
            )
            for rank in sorted(shards)
        ),
        frozen=frozen,
        replicated=replicated,
    )


def _shared(folder: str, reported: Iterable[tuple[SharedObject, ...]]) -> tuple[SharedObject, ...]:
    # The shards of a node often share one list (`everstep.protocol.shared_lists`).
    lists = {id(each): each for each in reported}.values()
    sizes = {each.sha256: each.object_bytes for some in lists for each in some}
    return tuple(
        SharedObject(key=f"{folder}{sha256}.safetensors", object_bytes=sizes[sha256], sha256=sha256)
        for sha256 in sorted(sizes)
    )


def _chain(lineage: tuple[GenerationRecord, ...], generation: Generation) -> tuple[tuple[Generation, Step], ...]:
    known = {record.generation: record for record in lineage}
    chain: list[tuple[Generation, Step]] = []
    while generation in known and generation > NO_GENERATION:
        chain.append((generation, known[generation].base_step))
        generation = known[generation].parent
    return tuple(chain)
