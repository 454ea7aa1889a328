"""Interface of an object store that stores and reads whole objects, in one piece or as a stream.

All methods block. Errors are subtypes of `StorageError`, which show whether to retry. Invariant: `put_*` returns only
when the object is complete and visible under its key, and replaces an existing object. A failed put leaves the
previous object unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from everstep.bulk import Helpers, StoredPart
from everstep.protocol.plan import ObjectReference
from worker.errors import StoreUnavailable

Read = Callable[[int, int], Iterable["Piece"]]
"""Returns the content of an object between two positions (begin, end) in bytes, in pieces."""
Piece = bytes | bytearray | memoryview
Span = tuple[int, int]
"""A range of bytes: (begin, end). The byte at `end` is not part of the range."""
OnStored = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class StoredObject:
    """The store's description of one object."""

    reference: ObjectReference
    bytes: int
    etag: str
    """ETag without quotes. Callers only compare ETags for equality."""
    sha256: str = field(default="", compare=False)
    """Hex SHA-256 of the concatenated SHA-256 digests of the parts. Set by puts; empty otherwise."""
    part_bytes: int = field(default=0, compare=False)
    """Size of the parts that `sha256` covers; the last part may be smaller. Set by puts; 0 otherwise."""
    crc: int | None = field(default=None, compare=False)
    """CRC64NVME of the object, as the store recorded it at the upload. Set by `head`; None if the store has none."""


class UploadShare(Helpers, Protocol):
    """Divides the parts of one upload between this node and the helper nodes, which also hold the shard."""

    def begin(self, upload_id: str, part_bytes: int, part_count: int) -> None:
        """Announce the upload to the helper nodes. Called once, before the first `claim`. Parts are numbered from 1."""

    def end(self) -> None:
        """End the helpers' work, after `begin` and before the upload ends. Blocks until their connections close."""


class ObjectReader(Protocol):
    """Reads the bytes of one object once, in order."""

    bytes: int
    """Length of the whole object."""
    md5: str
    """MD5 of the whole object in hex; empty if the store does not provide it."""

    @property
    def ready_bytes(self) -> int:
        """Number of bytes of the first response that the next reads return without another request."""

    def read_into(self, target: memoryview, spans: Sequence[Span] | None = None) -> None:
        """Fill `target`, or its ranges `spans` one after another, with the next bytes of the object.

        After an error, the content of `target` is undefined and the reader is unusable. Raises CorruptCheckpoint if the
        object ends too early, ObjectChanged if it was replaced, ObjectMissing if it was deleted, and StoreUnavailable
        if the connection broke.
        """


class ObjectStore(Protocol):
    """Interface of an object store. Thread-safe. `tests/contract/test_object_store.py` tests every implementation."""

    def put_bytes(self, reference: ObjectReference, data: bytes) -> StoredObject:
        """Store a small object. Raises StorageError."""

    def put_file(self, reference: ObjectReference, path: Path, size: int | None = None) -> StoredObject:
        """Store the first `size` bytes of a file, which may grow during the call; None for its size at the call.

        Raises StorageError, and StoreRefused if the file is shorter than `size`.
        """

    def put_stream(
        self, reference: ObjectReference, pieces: Iterable[Piece], size: int, *, on_stored: OnStored = lambda _: None
    ) -> StoredObject:
        """Store the `size` bytes of `pieces` without copying them. A piece must not change until the call returns.

        The call stops at the first error of `pieces` or of a part's upload, and raises it. `on_stored` is called in any
        thread with the bytes of each stored part. Raises StorageError, and StoreRefused if the pieces do not have
        `size` bytes.
        """

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
        """Store an object together with helpers: other nodes, which send some of its parts with `put_part`.

        An object of one part is stored without `share`. `read` returns the pieces of a part that no helper has stored.
        Otherwise as `put_stream`. Raises StorageError.
        """

    def put_part(
        self,
        reference: ObjectReference,
        upload_id: str,
        number: int,
        pieces: Iterable[Piece],
        *,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> StoredPart:
        """Store one part, numbered from 1, of an upload that another process began, to help this process.

        A piece must not change until the call returns. The call fails soon after `is_cancelled` returns True. Raises
        StorageError.
        """

    def abort_uploads(self, prefix: ObjectReference, is_abandoned: Callable[[str], bool]) -> int:
        """Abort unfinished uploads that no process continues, and return their number. Raises StorageError."""

    def answers(self, reference: ObjectReference) -> bool:
        """Return whether the store can be read now, by one attempt of a few seconds. A missing object is an answer."""

    def get_bytes(self, reference: ObjectReference) -> bytes:
        """Return the content of a small object. Raises ObjectMissing, or another StorageError."""

    def open(self, reference: ObjectReference, *, etag: str = "") -> AbstractContextManager[ObjectReader]:
        """Open an object for reading, in a context that closes the reader. An empty `etag` permits any ETag.

        Raises ObjectMissing, ObjectChanged if the object has another ETag, or another StorageError.
        """

    def read_range(
        self,
        reference: ObjectReference,
        begin: int,
        target: memoryview,
        spans: Sequence[Span],
        *,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        """Read consecutive bytes of an object, from `begin` on, into ranges of `target` with one request.

        The caller must verify the bytes, because the object may be replaced between two calls. After an error or a
        cancellation, the content is undefined. Raises CorruptCheckpoint if the object ends too early, ObjectMissing, or
        another StorageError.
        """

    def head(self, reference: ObjectReference) -> StoredObject | None:
        """Return the description of an object without reading it, or None if it does not exist. Raises StorageError."""

    def list(self, prefix: ObjectReference) -> Iterator[StoredObject]:
        """Yield the objects whose keys begin with the prefix, in order of keys. Raises StorageError."""


def require_missing(store: ObjectStore, where: ObjectReference) -> None:
    """Check that an object of a run is missing, after `ObjectMissing`. Raises StoreUnavailable without proof."""
    # A status 404 alone may come from another store. The store must also list another object of the run, and not the
    # missing one.
    folder = ObjectReference(bucket=where.bucket, key=where.key[: where.key.rfind("/run=") + 1])
    is_listed = any(each.reference.key == where.key for each in store.list(where))
    if is_listed or next(iter(store.list(folder)), None) is None:
        raise StoreUnavailable(f"s3://{where.bucket}/{where.key}: the store answers that it is missing without proof")


def cut(spans: Iterable[Span], limit: int, first: int = 0) -> Iterator[list[Span]]:
    """Split ranges into lists of `limit` bytes; the first has `first`, if not 0, and the last may have fewer. Pure."""
    taken: list[Span] = []
    room = first or limit
    for begin, end in spans:
        while begin < end:
            stop = min(end, begin + room)
            taken.append((begin, stop))
            room -= stop - begin
            begin = stop
            if not room:
                yield taken
                taken, room = [], limit
    if taken:
        yield taken
