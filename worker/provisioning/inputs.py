"""Provides a job's input channels on this node: fetches objects from S3, verifies them, and caches them for later jobs.

    <state>/inputs/objects/<sha256 of role, bucket, key, ETag, size>
                                           one read-only file per object, for runs of one role; ranks cannot enter
    <state>/inputs/runs/<run>/<channel>/…  the channel for the ranks: hard links to these files
    <state>/inputs/runs/<run>/<channel>.json
                                           the channel's index, written last

A cached file or folder receives its final name only when it is complete, verified and durable, and a channel's folder
is valid only with its index. A file's link count shows whether a run uses the file, and its ctime shows the last use.
Its mtime is computed from its name: a file with another mtime was changed, and is fetched again.

Invariant: a channel's folder contains the objects that S3 listed when this node first fetched it for the run. Later
generations send no request to S3.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import stat
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from pathlib import Path, PurePosixPath

import msgspec

from everstep.protocol.ids import RunId
from everstep.protocol.plan import InputChannel, ObjectReference
from worker.core.inputs import HeldFile, Misplaced, check_places, make_room, place_of
from worker.errors import CorruptCheckpoint, InputRefused, ObjectChanged, ObjectMissing, StorageError
from worker.node.file_trees import remove_tree
from worker.node.full_disks import full_disk_of
from worker.node.rank_user import RankUser, closed_to, create_traversable_dir, user_of
from worker.node.state_directory import sync
from worker.storage.aws import JobPrincipal
from worker.storage.object_store import ObjectStore, StoredObject

log = logging.getLogger(__name__)

FETCHES_AT_ONCE = 8
MAX_ATTEMPTS = 4
INPUT_RETRY_SECONDS = 1.0
MAX_OBJECTS = 1_000_000
SPARED_PART = 0.05
"""Fraction of the disk that cached input files must leave free, if no limit in bytes is set."""
_READ_BYTES = 4 * 1024 * 1024
_FILE_MODE, _FOLDER_MODE = 0o444, 0o555


class FetchStopped(Exception):
    """Raised in a thread that must stop, because the fetch was cancelled or another of its threads has failed."""


class IndexedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of an input channel, as stored in the channel's index file."""

    place: str
    """Path relative to the folder of the input channel."""
    name: str
    bytes: int


@dataclass(frozen=True, slots=True)
class _Wanted:
    place: PurePosixPath
    object: StoredObject
    reader: str
    """The project and role with which the object was listed and must be read. Others may lack the permission."""

    @property
    def name(self) -> str:
        where, stored_object = self.object.reference, self.object
        return hashlib.sha256(
            "\0".join((self.reader, where.bucket, where.key, stored_object.etag, str(stored_object.bytes))).encode()
        ).hexdigest()


_index = msgspec.json.Decoder(tuple[IndexedFile, ...])


@dataclass(eq=False, repr=False)
class InputCache:
    """The cache of one node's inputs, owned by the agent. Only one fetch runs at a time.

    `limit_bytes` is None for the file system's size minus `SPARED_PART`. Later retries pause for multiples of
    `retry_seconds`.
    """

    state: Path
    limit_bytes: int | None = None
    user: RankUser | None = None
    _: KW_ONLY
    retry_seconds: float = INPUT_RETRY_SECONDS

    def __post_init__(self) -> None:
        self._objects = self.state / "inputs" / "objects"
        self._runs = self.state / "inputs" / "runs"

    def fetch(
        self,
        store: ObjectStore,
        principal: JobPrincipal,
        channels: Sequence[InputChannel],
        cancelled: threading.Event,
    ) -> dict[str, Path]:
        """Fetch all input channels of a run, and return their folders by name. Idempotent. Runs in a thread.

        Files that another reader than `principal` fetched are not used. When `cancelled` is set, the fetch stops before
        the next block; complete files stay.

        Raises InputRefused if a channel cannot be fetched, FetchStopped if `cancelled` was set, and OSError if the disk
        is full.
        """
        found, listed, run = {}, {}, RunId(principal.run)
        if any(channel.prefix is not None for channel in channels):
            for way in (self._runs.parent, self._runs, self._runs / run):
                create_traversable_dir(way, self.user)
        for channel in channels:
            try:
                if channel.prefix is None:
                    found[channel.name] = _present(Path(channel.directory), user_of(run, self.state, self.user))
                    continue
                found[channel.name] = self._runs / run / channel.name
                if not self._is_whole(run, channel):
                    listed[channel.name] = _listed(store, channel.prefix, principal.reader, cancelled)
            except (StorageError, Misplaced, OSError) as error:
                if full_disk_of(error) is not None:
                    raise
                raise _refused(channel.name, error) from error
        if listed:
            self._bring(store, run, listed, cancelled)
        return found

    def forget(self, run: RunId) -> None:
        """Delete a run's folders. Its objects stay cached for later jobs. May be called in any thread."""
        remove_tree(self._runs / run, ignore_errors=True)

    def _bring(
        self, store: ObjectStore, run: RunId, listed: Mapping[str, Sequence[_Wanted]], cancelled: threading.Event
    ) -> None:
        self._objects.mkdir(mode=0o700, parents=True, exist_ok=True)
        begun = time.monotonic()
        for scratch in self._objects.glob("*.new"):  # A killed agent may have left these unfinished files.
            scratch.unlink()
        self._make_room(listed)
        for channel, wanted in listed.items():
            lacking = {
                each.name: each
                for each in wanted
                if not _is_sound(self._objects / each.name, each.name, each.object.bytes)
            }
            try:
                self._fetch_all(store, lacking.values(), cancelled)
                self._link(run, channel, wanted)
            except (StorageError, OSError) as error:
                if full_disk_of(error) is not None:
                    raise
                raise _refused(channel, error) from error
            log.info(
                "channel %s: %d files, %d bytes; %d of them fetched in %.1f s",
                channel,
                len(wanted),
                sum(each.object.bytes for each in wanted),
                len(lacking),
                time.monotonic() - begun,
            )

    def _make_room(self, listed: Mapping[str, Sequence[_Wanted]]) -> None:
        held = []
        for path in self._objects.iterdir():
            status = path.stat()
            held.append(HeldFile(path.name, status.st_size, status.st_ctime, status.st_nlink > 1))
        wanted = {each.name: each.object.bytes for channel in listed.values() for each in channel}
        limit_bytes = self.limit_bytes
        if limit_bytes is None:
            disk = os.statvfs(self._objects)
            limit_bytes = (
                sum(file.bytes for file in held)
                + disk.f_bavail * disk.f_frsize
                - int(SPARED_PART * disk.f_blocks * disk.f_frsize)
            )
        room = make_room(held, wanted, limit_bytes)
        if room.lacking_bytes:
            raise InputRefused(
                f"InputDataConfig: the job's channels have {sum(wanted.values()):,} bytes, which is "
                f"{room.lacking_bytes:,} bytes more than this "
                f"node can store: its limit for inputs is {max(0, limit_bytes):,} bytes"
            )
        for name in room.dropped:
            (self._objects / name).unlink()

    def _fetch_all(self, store: ObjectStore, wanted: Iterable[_Wanted], cancelled: threading.Event) -> None:
        failed = threading.Event()

        def fetch(each: _Wanted) -> None:
            try:
                self._fetch(store, each, cancelled, failed)
            except BaseException:
                failed.set()
                raise

        with ThreadPoolExecutor(FETCHES_AT_ONCE, thread_name_prefix="inputs") as pool:
            errors = [future.exception() for future in [pool.submit(fetch, each) for each in wanted]]
        for error in sorted(
            (error for error in errors if error is not None), key=lambda error: isinstance(error, FetchStopped)
        ):
            raise error  # Raise the cause, not the `FetchStopped` of the threads that it stopped.
        sync(self._objects)

    def _fetch(self, store: ObjectStore, wanted: _Wanted, cancelled: threading.Event, failed: threading.Event) -> None:
        for attempt in range(1, MAX_ATTEMPTS + 1):
            if cancelled.is_set() or failed.is_set():
                raise FetchStopped
            try:
                self._fetch_once(store, wanted, cancelled, failed)
            except StorageError as error:
                if not error.retryable or isinstance(error, ObjectChanged) or attempt == MAX_ATTEMPTS:
                    raise  # A retry cannot succeed after `ObjectChanged`. The next generation lists the channel again.
                log.warning(
                    "s3://%s/%s: attempt %d failed: %s",
                    wanted.object.reference.bucket,
                    wanted.object.reference.key,
                    attempt,
                    error,
                )
                cancelled.wait(self.retry_seconds * attempt)
            else:
                return

    def _fetch_once(
        self, store: ObjectStore, wanted: _Wanted, cancelled: threading.Event, failed: threading.Event
    ) -> None:
        path = self._objects / wanted.name
        scratch = path.with_suffix(".new")
        where = f"s3://{wanted.object.reference.bucket}/{wanted.object.reference.key}"
        hasher = hashlib.md5(usedforsecurity=False)
        with store.open(wanted.object.reference, etag=wanted.object.etag) as reader, scratch.open("wb") as file:
            if reader.bytes != wanted.object.bytes:
                raise ObjectChanged(
                    f"{where} has {reader.bytes} bytes, but was listed with {wanted.object.bytes} bytes"
                )
            piece = memoryview(bytearray(min(_READ_BYTES, reader.bytes)))
            left = reader.bytes
            while left:
                if cancelled.is_set() or failed.is_set():
                    raise FetchStopped
                part = piece[: min(left, len(piece))]
                reader.read_into(part)
                hasher.update(part)
                file.write(part)
                left -= len(part)
            if reader.md5 and reader.md5 != hasher.hexdigest():
                raise CorruptCheckpoint(
                    f"{where} arrived with the MD5 {hasher.hexdigest()}, but its ETag is {reader.md5}"
                )
            file.flush()
            os.fchmod(file.fileno(), _FILE_MODE)
            os.fsync(file.fileno())
        os.utime(scratch, (_time_of(path.name),) * 2)
        scratch.replace(path)

    def _link(self, run: RunId, channel: str, wanted: Sequence[_Wanted]) -> None:
        folder = self._runs / run / channel
        scratch, index = folder.with_name(f"{channel}.new"), folder.with_name(f"{channel}.json")
        index.unlink(missing_ok=True)
        remove_tree(scratch, ignore_errors=True)
        remove_tree(folder, ignore_errors=True)
        scratch.mkdir(parents=True)
        folders = {scratch / parent for each in wanted for parent in each.place.parents}
        for parent in sorted(folders):
            parent.mkdir(exist_ok=True)
        for each in wanted:
            os.link(self._objects / each.name, scratch / each.place)
        for parent in sorted(folders, reverse=True):
            sync(parent)
            parent.chmod(_FOLDER_MODE)
        scratch.rename(folder)
        indexed_files = tuple(
            IndexedFile(place=str(each.place), name=each.name, bytes=each.object.bytes) for each in wanted
        )
        fresh = index.with_suffix(".fresh")
        with fresh.open("wb") as file:
            file.write(msgspec.json.encode(indexed_files))
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(index)
        sync(index.parent)

    def _is_whole(self, run: RunId, channel: InputChannel) -> bool:
        folder = self._runs / run / channel.name
        try:
            files = _index.decode(folder.with_name(f"{channel.name}.json").read_bytes())
        except (FileNotFoundError, msgspec.DecodeError):
            return False
        return all(_is_sound(folder / file.place, file.name, file.bytes) for file in files)


def _listed(
    store: ObjectStore, prefix: ObjectReference, reader: str, cancelled: threading.Event
) -> tuple[_Wanted, ...]:
    """Return the objects of an input channel: one object, or all objects below a key prefix."""
    folder = prefix.key if not prefix.key or prefix.key.endswith("/") else f"{prefix.key}/"
    wanted: list[_Wanted] = []
    for stored_object in store.list(ObjectReference(bucket=prefix.bucket, key=folder)):
        if cancelled.is_set():
            raise FetchStopped
        if len(wanted) == MAX_OBJECTS:
            raise Misplaced(f"there are more than {MAX_OBJECTS:,} objects below s3://{prefix.bucket}/{folder}")
        if (place := place_of(stored_object.reference.key, folder)) is not None:
            wanted.append(_Wanted(place, stored_object, reader))
    if not wanted and folder != prefix.key and (alone := store.head(prefix)) is not None:
        place = place_of(prefix.key, prefix.key[: prefix.key.rfind("/") + 1])
        assert place is not None, "its key does not end with a slash"
        wanted.append(_Wanted(place, alone, reader))
    if not wanted:
        raise ObjectMissing(f"there is no object at or below s3://{prefix.bucket}/{prefix.key}")
    check_places([each.place for each in wanted])
    return tuple(wanted)


def _present(directory: Path, user: RankUser | None) -> Path:
    """Return an input channel's existing directory, after a check that the ranks can read it."""
    with os.scandir(directory):
        pass
    if user is not None and closed_to(user, [directory]):
        raise PermissionError(
            errno.EACCES, f"ranks run as {user.name} (uid {user.uid}), who may not read this directory", str(directory)
        )
    return directory


def _refused(channel: str, error: Exception) -> InputRefused:
    retryable, obstacle = (error.retryable, error.obstacle) if isinstance(error, StorageError) else (False, None)
    words = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
    return InputRefused(f"InputDataConfig, channel {channel!r}: {words}", retryable=retryable, obstacle=obstacle)


def _time_of(name: str) -> int:
    """Return the mtime that a cached input file with this name must have, in Unix seconds below 2^28."""
    return int(name[:7], 16)


def _is_sound(path: Path, name: str, size: int) -> bool:
    try:
        status = path.stat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size == size and status.st_mtime == _time_of(name)
