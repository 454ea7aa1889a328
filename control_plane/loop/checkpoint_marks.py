"""Marks: small S3 objects beside a checkpoint that repeat what the database stores about it.

    …run=<run>/gen=<generation>/step=<step>/pinned     a person has pinned the checkpoint
                                            trashed    the checkpoint is in the trash
                                            due        a server attempts the purge; the object's time is S3's clock
    …run=<run>/trashed                                 the whole job is in the trash
    …run=<run>/issued=<number>                         no generation of the run has a higher number

A database restored from a backup lacks later pins and deletions, which the marks restore. A caller writes a mark
before it changes the database. It removes the mark of a pin after this change, and the mark of the trash before. A
crash in between therefore protects too much, never too little.

Invariant: this module raises `CloudError` if it could not look. Its callers then delete nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec

from control_plane.cloud.errors import NotFound
from control_plane.cloud.objects import ServiceStore, delete_all, has_content
from control_plane.core.checkpoints import DEFAULT_TRASH_HOURS, TrashCause, TrashMark
from control_plane.db.checkpoints import SavedCheckpoint
from everstep.protocol.errors import UNDECODABLE
from everstep.protocol.ids import Generation
from everstep.protocol.plan import ObjectReference

PINNED: Final = "pinned"
TRASHED: Final = "trashed"
DUE: Final = "due"
ISSUED: Final = re.compile(r"issued=(\d{1,10})", re.ASCII)


class PinMark(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the mark `pinned`."""

    pinned_at: datetime


_PIN: Final = msgspec.json.Decoder(PinMark)
_TRASH: Final = msgspec.json.Decoder(TrashMark)


@dataclass(frozen=True, slots=True)
class TrashStanding:
    """The marks that S3 has of a checkpoint in the trash."""

    is_pinned: bool
    trashed_at: datetime | None
    """Time by S3's clock. None without the mark `trashed`."""

    @property
    def may_purge(self) -> bool:
        """Whether S3 agrees with the database that the checkpoint may be deleted for good."""
        return self.trashed_at is not None and not self.is_pinned


def folder_of(checkpoint: SavedCheckpoint) -> ObjectReference:
    """Return the prefix of the keys that belong to this checkpoint only. It ends with a slash."""
    return ObjectReference(bucket=checkpoint.bucket, key=f"{checkpoint.manifest_key.rpartition('/')[0]}/")


def mark_pinned(objects: ServiceStore, checkpoint: SavedCheckpoint, at: datetime) -> None:
    """Write the mark of a pin. The caller then stores the pin in the database."""
    objects.put(_place(folder_of(checkpoint), PINNED), msgspec.json.encode(PinMark(pinned_at=at)))


def mark_trashed(objects: ServiceStore, folder: ObjectReference, mark: TrashMark) -> None:
    """Write the mark of the trash to the folder of a checkpoint or run. The caller then changes the database."""
    objects.put(_place(folder, TRASHED), msgspec.json.encode(mark))


def unmark(objects: ServiceStore, folders: Iterable[ObjectReference], name: str) -> None:
    """Remove the mark `PINNED` or `TRASHED` from folders in one bucket. Idempotent."""
    places = [_place(folder, name) for folder in folders]
    if places:
        delete_all(objects, places[0].bucket, [each.key for each in places])


def standing_of(objects: ServiceStore, checkpoint: SavedCheckpoint) -> TrashStanding:
    """Return the marks of a checkpoint. Raises CloudError if S3 did not list them."""
    folder = folder_of(checkpoint)
    times = {info.reference.key.removeprefix(folder.key): info.modified_at for info in objects.list(folder)}
    return TrashStanding(is_pinned=PINNED in times, trashed_at=times.get(TRASHED))


def is_over(objects: ServiceStore, checkpoint: SavedCheckpoint, disposition: TrashStanding) -> bool:
    """Return whether the time in the trash is also over by S3's clock."""
    if checkpoint.trashed_at is None or checkpoint.purge_at is None or disposition.trashed_at is None:
        return False
    # The server's clock may be wrong.
    now = objects.put(_place(folder_of(checkpoint), DUE), b"").modified_at
    return now - disposition.trashed_at >= checkpoint.purge_at - checkpoint.trashed_at


def is_stored(objects: ServiceStore, checkpoint: SavedCheckpoint) -> bool:
    """Return whether S3 has the manifest and all objects of a complete checkpoint. Raises CloudError if S3 fails."""
    manifest = checkpoint.contents()
    if manifest is None:
        return False
    try:
        where = ObjectReference(bucket=checkpoint.bucket, key=checkpoint.manifest_key)
        if not has_content(objects, where, checkpoint.manifest or b""):
            return False
        sizes = {info.reference.key: info.size_bytes for info in objects.list(folder_of(checkpoint))}
        for each in manifest.frozen:
            sizes[each.key] = objects.head(ObjectReference(bucket=checkpoint.bucket, key=each.key)).size_bytes
    except NotFound:
        return False
    expected = {each.key: each.object_bytes for each in manifest.shards}
    expected |= {each.key: each.object_bytes for each in (*manifest.replicated, *manifest.frozen)}
    return all(sizes.get(key) == size for key, size in expected.items())


def pin_of(body: bytes, seen_at: datetime) -> datetime:
    """Return the time in a mark of a pin, or `seen_at` if the content cannot be decoded. The mark counts anyway."""
    try:
        return _PIN.decode(body).pinned_at.astimezone(UTC)
    except (ValueError, OverflowError, *UNDECODABLE):
        return seen_at


def trash_of(body: bytes, seen_at: datetime) -> TrashMark:
    """Return the content of a mark of the trash. Content that cannot be decoded counts as the work of retention."""
    try:
        return _TRASH.decode(body)
    except (ValueError, OverflowError, *UNDECODABLE):
        purge_at = seen_at + timedelta(hours=DEFAULT_TRASH_HOURS)
        return TrashMark(trashed_at=seen_at, purge_at=purge_at, trash_cause=TrashCause.RETENTION)


def mark_issued(objects: ServiceStore, run_folder: ObjectReference, issued: Generation) -> None:
    """Record the highest generation number of a run, and remove the marks of lower numbers."""
    prefix = ObjectReference(bucket=run_folder.bucket, key=f"{run_folder.key}issued=")
    lower = [info.reference.key for info in objects.list(prefix) if issued_in(info.reference.key) < issued]
    # The number is part of the key, so a late writer never lowers it.
    objects.put(ObjectReference(bucket=prefix.bucket, key=f"{prefix.key}{issued}"), b"")
    if lower:
        objects.delete(prefix.bucket, lower)


def issued_in(key: str) -> int:
    """Return the generation number that the key of a mark contains, or 0 for another key."""
    found = ISSUED.fullmatch(key.rpartition("/")[2])
    return 0 if found is None else int(found[1])


def _place(folder: ObjectReference, name: str) -> ObjectReference:
    return ObjectReference(bucket=folder.bucket, key=f"{folder.key}{name}")
