"""Decides which numbers a restored database must not issue again, and which rows it lacks according to S3.

    generation      each job's next number is above `first_number`, so no number and no key derived from it is reused
    event           the next event has at least the id `first_event_id`, so no reader skips or repeats events
    checkpoint      manifests in S3 add the generations and checkpoints that the backup lacks (`reconcile`)
    pin, trash      marks in S3 pin checkpoints, and move them to the trash or out of it

Invariant: pure. Source of these rules: docs/design/database-restore.md.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from control_plane.core.observed.steps import NO_GENERATION, GenerationRecord
from control_plane.errors import ImplausibleClock
from everstep.protocol.ids import Generation, Step
from everstep.protocol.manifest import CheckpointManifest

NUMBERS_END = 2**32
"""Generation numbers are lower than this. Source: `origin_generation` of a slot's header has 4 bytes."""
MAX_CLOCK_BEHIND_SECONDS = 60.0
"""Seconds by which the clock of the machine that restores may be behind the newest time in the backup."""


def first_number(now: float, newest_time: float) -> Generation:
    """Return the Unix time of the restore, as a generation number that is higher than every number issued before.

    Raises ImplausibleClock if the clock shows a time before the backup, or beyond the range of generation numbers.
    """
    if now < newest_time - MAX_CLOCK_BEHIND_SECONDS:
        raise ImplausibleClock(
            f"the clock of this machine is {newest_time - now:.0f} s behind the newest time in the backup. A restore "
            "derives new generation numbers from the clock. Synchronise the clock, then restore again"
        )
    if now >= NUMBERS_END:
        raise ImplausibleClock(f"the clock of this machine shows Unix time {now:.0f}, which is after 2106. Set it")
    # A job launches less than once a second, so all numbers issued after an earlier restore are lower. A database that
    # was never restored counts from 1.
    return Generation(int(now))


def issued_number(issued: Generation, first: Generation) -> Generation:
    """Return the highest generation number of a job that counts as issued after the restore."""
    return max(issued, first)


def first_event_id(newest: int, now: float) -> int:
    """Return the id of the event that records a restore, after `newest` in the backup (or 0)."""
    # Fewer than 1,000 events a second are recorded, so the ids of all events since the backup are lower.
    return max(newest + 1, int(now * 1_000))


Place = tuple[Generation, Step]


class DifferenceKind(StrEnum):
    """A fact that a restored database and S3 do not share. The restore adapts the database, except for the last two.

    - FOUND: the backup lacks the checkpoint.
    - MISSING: S3 lacks the manifest of a checkpoint that the backup has.
    - PINNED, TRASHED, UNDELETED: the checkpoint was pinned, or moved to the trash or out of it, after the backup.
    - UNREADABLE: the backup lacks the checkpoint, and its manifest is invalid or names objects of another run.
    - NOT_SEEN: S3 was not asked about the run, or did not answer.
    """

    FOUND = "Found"
    MISSING = "Missing"
    PINNED = "Pinned"
    TRASHED = "Trashed"
    UNDELETED = "Undeleted"
    UNREADABLE = "Unreadable"
    NOT_SEEN = "NotSeen"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A fact about one checkpoint, or about all checkpoints of a run."""

    kind: DifferenceKind
    job_name: str
    run_id: str
    generation: int | None = None
    step: int | None = None
    """None for NOT_SEEN."""

    @staticmethod
    def of(stored: Mapping[str, Any]) -> Difference:
        """Return the difference that a row of the database contains."""
        return replace(Difference(**stored), kind=DifferenceKind(stored["kind"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class BackedUpRun:
    """One run's checkpoints in the backup."""

    generations: Collection[Generation]
    complete: AbstractSet[Place]
    """The set includes checkpoints in the trash."""
    deleted: AbstractSet[Place] = frozenset()
    """The set includes checkpoints whose deletion is under way."""
    pinned: AbstractSet[Place] = frozenset()
    trashed: AbstractSet[Place] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """One run's checkpoints in S3."""

    manifests: Collection[CheckpointManifest]
    """The valid manifests of the checkpoints that the backup lacks."""
    present: AbstractSet[Place]
    """Checkpoints that have a manifest, valid or not."""
    pinned: AbstractSet[Place] = frozenset()
    trashed: AbstractSet[Place] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciliation:
    """The differences between one run's rows in a restored database and the run's objects in S3."""

    generations: tuple[GenerationRecord, ...]
    """Oldest first. `world_size` is 0 if S3 names a generation only in a parent chain; its shards are not restored."""
    checkpoints: tuple[CheckpointManifest, ...]
    """Checkpoints that the backup lacks or has as incomplete."""
    missing: tuple[Place, ...]
    """Complete checkpoints of the backup whose manifest is no longer in S3."""
    pinned: tuple[Place, ...] = ()
    """A pin of the backup stays, even without a mark: an older version of Everstep wrote none."""
    trashed: tuple[Place, ...] = ()
    """A pinned checkpoint stays outside the trash, whatever its other mark says."""
    undeleted: tuple[Place, ...] = ()
    unreadable: tuple[Place, ...] = ()

    def differences(self, job_name: str, run_id: str) -> tuple[Difference, ...]:
        """Return each difference of the run's checkpoints, for a person."""
        places = {
            DifferenceKind.FOUND: tuple((each.generation, each.step) for each in self.checkpoints),
            DifferenceKind.MISSING: self.missing,
            DifferenceKind.PINNED: self.pinned,
            DifferenceKind.TRASHED: self.trashed,
            DifferenceKind.UNDELETED: self.undeleted,
            DifferenceKind.UNREADABLE: self.unreadable,
        }
        return tuple(
            Difference(kind=kind, job_name=job_name, run_id=run_id, generation=generation, step=step)
            for kind, some in places.items()
            for generation, step in some
        )


def is_in_place(manifest: CheckpointManifest, folder: str, key: str) -> bool:
    """Return whether a manifest has the key that its content implies, and names only objects of its own run.

    Agents may write to S3, and the control plane reads and deletes the named objects. `folder` ends with `run=<run>/`.
    """
    step = f"{folder}gen={manifest.generation}/step={manifest.step}/"
    return (
        folder.endswith(f"run={manifest.run}/")
        and key == f"{step}manifest.json"
        and 0 < manifest.generation < NUMBERS_END
        and all(shard.key.startswith(step) for shard in manifest.shards)
        and all(shared.key.startswith(f"{step}replicated/") for shared in manifest.replicated)
        and all(shared.key.startswith(f"{folder}frozen/") for shared in manifest.frozen)
    )


def reconcile(stored: StoredRun, backup: BackedUpRun) -> Reconciliation:
    """Return the differences between a run's objects in S3 and its generations and checkpoints in the backup.

    Checkpoints that the backup has as deleted stay deleted. An unreadable manifest is not missing.
    """
    found = {(each.generation, each.step): each for each in stored.manifests}
    worlds = {each.generation: len(each.shards) for each in found.values()}
    unknown: dict[Generation, GenerationRecord] = {}
    for manifest in found.values():
        chain = manifest.parent_chain
        for place, (number, base_step) in enumerate(chain):
            if number not in backup.generations and number != NO_GENERATION:
                unknown[number] = GenerationRecord(
                    generation=number,
                    parent=chain[place + 1][0] if place + 1 < len(chain) else NO_GENERATION,
                    base_step=base_step,
                    world_size=worlds.get(number, 0),
                    was_started=True,
                )
    known = backup.complete | backup.deleted
    added = found.keys() - known
    usable = (backup.complete & stored.present) | added
    pinned = (stored.pinned & usable) - backup.pinned
    trashed = (stored.trashed & usable) - stored.pinned - backup.pinned
    return Reconciliation(
        generations=tuple(unknown[number] for number in sorted(unknown)),
        checkpoints=tuple(found[place] for place in sorted(added)),
        missing=tuple(sorted(backup.complete - stored.present)),
        pinned=tuple(sorted(pinned)),
        trashed=tuple(sorted(trashed - backup.trashed)),
        undeleted=tuple(sorted((backup.trashed & usable) - trashed)),
        unreadable=tuple(sorted(stored.present - known - added)),
    )
