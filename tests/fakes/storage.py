"""An object store, secrets and roles in memory, for tests and simulators.

Contract tests compare the behaviour of these classes with AWS.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from everstep.bulk import PART_BYTES, Part, StoredPart, crc64, put_parts
from everstep.protocol.manifest import PartsHasher
from everstep.protocol.plan import ObjectReference
from worker.errors import (
    BucketMissing,
    CorruptCheckpoint,
    ObjectChanged,
    ObjectMissing,
    StorageError,
    StoreDenied,
    StoreRefused,
)
from worker.storage.aws import ROLE_SECONDS, JobPrincipal, RoleKeys, SecretPlace
from worker.storage.object_store import (
    ObjectReader,
    ObjectStore,
    OnStored,
    Piece,
    Read,
    Span,
    StoredObject,
    UploadShare,
)


class MemoryObjectStore:
    """`ObjectStore` in memory. The constructor takes the names of the buckets that exist."""

    def __init__(self, *buckets: str, part_bytes: int = PART_BYTES) -> None:
        self.part_bytes = part_bytes
        """Size of the parts of shared uploads."""
        self.parts: dict[str, dict[int, bytes]] = {}
        """Parts that are stored so far, by upload and part number. A completed or aborted upload has no entry."""
        self.objects: dict[str, dict[str, bytes]] = {bucket: {} for bucket in buckets}
        self.unfinished: dict[str, set[str]] = {bucket: set() for bucket in buckets}
        """Keys of uploads that were started and neither completed nor aborted, by bucket. Only tests add keys."""

    def put_bytes(self, reference: ObjectReference, data: bytes) -> StoredObject:
        """Implement `ObjectStore.put_bytes`."""
        self._bucket(reference)[reference.key] = bytes(data)
        return self._described(reference)

    def put_file(self, reference: ObjectReference, path: Path, size: int | None = None) -> StoredObject:
        """Implement `ObjectStore.put_file`."""
        with path.open("rb") as file:
            data = file.read() if size is None else file.read(size)
        if size is not None and len(data) < size:
            raise StoreRefused(f"{path.name} has {len(data)} bytes, not {size}")
        return self.put_bytes(reference, data)

    def put_stream(
        self, reference: ObjectReference, pieces: Iterable[Piece], size: int, *, on_stored: OnStored = lambda _: None
    ) -> StoredObject:
        """Implement `ObjectStore.put_stream`."""
        bucket = self._bucket(reference)
        data = bytearray()
        for piece in pieces:
            data += piece
        if len(data) != size:
            raise StoreRefused(f"{len(data)} bytes were given for an object of {size}")
        bucket[reference.key] = bytes(data)
        on_stored(size)
        hasher = PartsHasher(PART_BYTES)
        hasher.update(data)
        return replace(self._described(reference), sha256=hasher.hexdigest(), part_bytes=PART_BYTES)

    def put_shared(
        self,
        reference: ObjectReference,
        pieces: Iterable[Piece],
        size: int,
        *,
        read: Read,
        share: UploadShare,
        on_stored: OnStored = lambda _: None,
    ) -> StoredObject:
        """Implement `ObjectStore.put_shared`."""
        bucket = self._bucket(reference)
        if size <= self.part_bytes:
            return self.put_stream(reference, pieces, size, on_stored=on_stored)
        upload_id = f"upload-{len(self.parts)}"
        stored = self.parts[upload_id] = {}
        try:
            try:
                share.begin(upload_id, self.part_bytes, -(-size // self.part_bytes))
                parts = put_parts(
                    _Sink(self, reference, upload_id),
                    pieces,
                    size,
                    part_bytes=self.part_bytes,
                    on_part=lambda part: on_stored(part.size),
                    helpers=share,
                    read=read,
                )
            finally:
                share.end()
            for part in parts:
                if hashlib.md5(stored[part.number], usedforsecurity=False).hexdigest() != part.etag:
                    raise StoreRefused(f"part {part.number} has another ETag")
            bucket[reference.key] = b"".join(stored[part.number] for part in parts)
        finally:
            del self.parts[upload_id]
        sha256 = hashlib.sha256(b"".join(part.sha256 for part in parts)).hexdigest()
        return replace(self._described(reference), sha256=sha256, part_bytes=self.part_bytes)

    def put_part(
        self,
        reference: ObjectReference,
        upload_id: str,
        number: int,
        pieces: Iterable[Piece],
        *,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> StoredPart:
        """Implement `ObjectStore.put_part`."""
        part = Part(is_cancelled)
        for piece in pieces:
            part.append(piece)
        return _Sink(self, reference, upload_id).put(number, part)

    def abort_uploads(self, prefix: ObjectReference, is_abandoned: Callable[[str], bool]) -> int:
        """Implement `ObjectStore.abort_uploads`."""
        self._bucket(prefix)
        unfinished = self.unfinished[prefix.bucket]
        aborted = {key for key in unfinished if key.startswith(prefix.key) and is_abandoned(key)}
        unfinished -= aborted
        return len(aborted)

    def answers(self, reference: ObjectReference) -> bool:
        """Implement `ObjectStore.answers`."""
        try:
            self._bucket(reference)
        except StorageError as error:
            return error.obstacle is None
        return True

    def get_bytes(self, reference: ObjectReference) -> bytes:
        """Implement `ObjectStore.get_bytes`."""
        try:
            return self._bucket(reference)[reference.key]
        except KeyError:
            raise ObjectMissing(f"s3://{reference.bucket}/{reference.key} does not exist") from None

    @contextmanager
    def open(self, reference: ObjectReference, *, etag: str = "") -> Iterator[ObjectReader]:
        """Implement `ObjectStore.open`."""
        data = self.get_bytes(reference)
        md5 = hashlib.md5(data, usedforsecurity=False).hexdigest()
        if etag not in ("", md5):
            raise ObjectChanged(f"s3://{reference.bucket}/{reference.key} has the ETag {md5}, not {etag}")
        yield _MemoryReader(data, md5)

    def read_range(
        self,
        reference: ObjectReference,
        begin: int,
        target: memoryview,
        spans: Sequence[Span],
        *,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        """Implement `ObjectStore.read_range`."""
        reader = _MemoryReader(self.get_bytes(reference)[begin:], "")
        for span in spans:
            if is_cancelled():
                return
            reader.read_into(target, [span])

    def head(self, reference: ObjectReference) -> StoredObject | None:
        """Implement `ObjectStore.head`."""
        return self._described(reference) if reference.key in self._bucket(reference) else None

    def list(self, prefix: ObjectReference) -> Iterator[StoredObject]:
        """Implement `ObjectStore.list`."""
        for key in sorted(self._bucket(prefix)):
            if key.startswith(prefix.key):
                yield self._described(ObjectReference(bucket=prefix.bucket, key=key))

    def _bucket(self, reference: ObjectReference) -> dict[str, bytes]:
        try:
            return self.objects[reference.bucket]
        except KeyError:
            raise BucketMissing(f"bucket {reference.bucket} does not exist") from None

    def _described(self, reference: ObjectReference) -> StoredObject:
        data = self.objects[reference.bucket][reference.key]
        etag = hashlib.md5(data, usedforsecurity=False).hexdigest()
        return StoredObject(reference, len(data), etag, crc=crc64(data))


class _Sink:
    """One multipart upload in memory."""

    def __init__(self, store: MemoryObjectStore, reference: ObjectReference, upload_id: str) -> None:
        self._store = store
        self._reference = reference
        self._upload_id = upload_id

    def put(self, number: int, part: Part) -> StoredPart:
        stored = self._store.parts.get(self._upload_id)
        if stored is None:
            raise StoreRefused(f"s3://{self._reference.bucket}/{self._reference.key}: the upload does not exist")
        data = b""
        while piece := part.read():
            data += piece
        stored[number] = data
        etag = hashlib.md5(data, usedforsecurity=False).hexdigest()
        return StoredPart(number, etag, len(data), part.crc, part.sha256)


class MemoryAws:
    """`Aws` in memory. Tests set its secrets and roles through the attributes.

    Args:
        objects: the object store of every role.
        now: returns Unix time in seconds.
    """

    def __init__(self, objects: ObjectStore, *, now: Callable[[], float] = time.time) -> None:
        self.secrets: dict[str, str] = {}
        self.roles: set[str] = set()
        self.assumed_count = 0
        self.principals: list[JobPrincipal] = []
        """The argument of each successful call of `assume_role`."""
        self.used: list[tuple[str, str]] = []
        """For each call of `secret`: the secret's name, and the access key id that the call uses.

        The id is empty for the node's own credentials. For each call of `objects`: "objects", and the new keys' id.
        """
        self._objects = objects
        self._now = now

    def secret(self, reference: str, keys: RoleKeys | None) -> str:
        """Implement `Aws.secret`."""
        self.used.append((reference, keys.access_key_id if keys else ""))
        place = SecretPlace.of(reference)
        try:
            return self.secrets[place.name]
        except KeyError:
            raise ObjectMissing(f"{reference}: there is no such secret") from None

    def assume_role(self, principal: JobPrincipal) -> RoleKeys:
        """Implement `Aws.assume_role`."""
        role_arn = principal.role_arn
        if role_arn not in self.roles:
            raise StoreDenied(f"{role_arn}: {principal.session_name} is not authorized to perform: sts:AssumeRole")
        self.assumed_count += 1
        self.principals.append(principal)
        return RoleKeys(
            access_key_id=f"ASIA{self.assumed_count:016}",
            secret_access_key=f"secret of {role_arn}",
            session_token=f"token {self.assumed_count}",
            expires_at=self._now() + ROLE_SECONDS,
        )

    def objects(self, principal: JobPrincipal) -> ObjectStore:
        """Implement `Aws.objects`."""
        self.used.append(("objects", self.assume_role(principal).access_key_id))
        return self._objects


class _MemoryReader:
    def __init__(self, data: bytes, md5: str) -> None:
        self._data = memoryview(data)
        self.md5 = md5
        self.bytes = len(data)
        self.ready_bytes = 0

    def read_into(self, target: memoryview, spans: Sequence[Span] | None = None) -> None:
        for begin, end in [(0, len(target))] if spans is None else spans:
            count = end - begin
            if len(self._data) < count:
                raise CorruptCheckpoint(f"the object ends {count - len(self._data)} bytes early")
            target[begin:end], self._data = self._data[:count], self._data[count:]
