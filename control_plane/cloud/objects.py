"""The Protocol with which the control plane reads and writes S3 objects: sources, manifests, outputs and logs.

Invariant: an object is visible completely or not at all. Calls are synchronous and thread-safe, and raise only
`CloudError`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import BinaryIO, Protocol

from control_plane.cloud.errors import GarbledAnswer, NotFound, ObjectTooLarge
from everstep.protocol.plan import ObjectReference

STREAM_CHUNK_BYTES = 1024 * 1024
SMALL_BYTES = 64 * 1024 * 1024
"""Limit of the objects that the control plane reads whole."""
DELETED_AT_ONCE = 1_000
"""Limit of objects per delete call. Source: S3's DeleteObjects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """Metadata of one object in S3."""

    reference: ObjectReference
    size_bytes: int
    etag: str
    """ETag without quotes."""
    modified_at: datetime


def require_missing(objects: ServiceStore, where: ObjectReference, folder: str) -> None:
    """Check that an object is missing, after a read of it raised `NotFound`.

    A 404 alone is no proof, because the bucket may be another one or invisible to the credentials. The store must also
    list `folder` without the object, and with at least one other object.

    Raises:
        GarbledAnswer: the store lists the object.
        NotFound: the bucket does not exist, or the store lists no object in the folder.
        CloudError: the store did not list its objects.
    """
    if any(info.reference.key == where.key for info in objects.list(where)):
        raise GarbledAnswer(f"S3 lists s3://{where.bucket}/{where.key}, and also answers that it does not exist")
    if next(iter(objects.list(ObjectReference(bucket=where.bucket, key=folder))), None) is None:
        raise NotFound(f"s3://{where.bucket}/{folder} contains no object")


def has_content(objects: ServiceStore, where: ObjectReference, content: bytes) -> bool:
    """Return whether an object exists with this content. Raises CloudError if S3 did not answer."""
    try:
        return objects.get(where, limit_bytes=len(content)) == content
    except (NotFound, ObjectTooLarge):
        return False


def delete_all(objects: ServiceStore, bucket: str, keys: Sequence[str]) -> None:
    """Delete any number of objects in a bucket. A missing object causes no error."""
    for first in range(0, len(keys), DELETED_AT_ONCE):
        objects.delete(bucket, keys[first : first + DELETED_AT_ONCE])


@dataclass(frozen=True, slots=True)
class SignedUpload:
    """A presigned URL that uploads one body. Digest and size of the body are part of the URL."""

    url: str = field(repr=False)
    headers: Mapping[str, str]
    """The upload must contain them."""


class ServiceStore(Protocol):
    """Reads, writes, lists and deletes S3 objects by bucket and key.

    Every method raises `NotFound` if the bucket or an object to read does not exist, and a retryable `CloudError` if S3
    does not answer.
    """

    def put(self, reference: ObjectReference, body: bytes) -> ObjectInfo:
        """Write a small object. Use `put_file` for large objects."""

    def put_if_unchanged(self, reference: ObjectReference, body: bytes, *, etag: str = "") -> ObjectInfo:
        """Write a small object if the stored one still has `etag`; empty means that none may exist. One atomic step.

        Raises ObjectChanged if another object exists. After a lost response, the caller itself may have written that
        object.
        """

    def put_file(self, reference: ObjectReference, file: BinaryIO) -> ObjectInfo:
        """Write an object from a seekable file, from the file's current position to its end."""

    def get(self, reference: ObjectReference, *, limit_bytes: int = SMALL_BYTES) -> bytes:
        """Return a whole object.

        Raises ObjectTooLarge beyond `limit_bytes`, because users can replace objects in their buckets.
        """

    def stream(self, reference: ObjectReference, *, begin: int = 0, end: int | None = None) -> Iterator[bytes]:
        """Yield the bytes `begin` to `end` of an object in pieces of at most `STREAM_CHUNK_BYTES`.

        If `end` is None or beyond the object, the stream ends with the object. Errors occur only from the first `next`
        on.
        """

    def head(self, reference: ObjectReference) -> ObjectInfo:
        """Return an object's metadata, without its content."""

    def list(self, prefix: ObjectReference, *, after: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects whose keys start with a prefix and come after `after`, lazily, in key order.

        An empty prefix selects the whole bucket.
        """

    def sign_upload(
        self, reference: ObjectReference, *, sha256: str, size_bytes: int, seconds: int
    ) -> SignedUpload | None:
        """Return a presigned URL for the upload of one body, or None if clients cannot reach the store.

        Makes no request. `sha256` is hexadecimal. `seconds` limits the URL's validity.
        """

    def delete(self, bucket: str, keys: Sequence[str]) -> None:
        """Delete at most `DELETED_AT_ONCE` objects. A missing object causes no error."""
