"""Objects in S3 as the control plane sees them: sources, manifests, outputs and logs.

Invariant: an object is visible whole or not at all, and `put(if_absent=True)` has exactly one winner. Calls are
synchronous and thread-safe and raise `CloudError` alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import BinaryIO, Protocol

from everstep.protocol.plan import ObjectReference

STREAM_CHUNK_BYTES = 1024 * 1024
DELETED_AT_ONCE = 1_000
"""Objects that one call deletes at the most. Source: S3's DeleteObjects."""
LISTED_AT_ONCE = 1_000
"""Objects that one call lists at the most. Source: S3's ListObjectsV2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """What S3 says about one object."""

    reference: ObjectReference
    size_bytes: int
    etag: str
    """Without quotes."""
    modified_at: datetime


@dataclass(frozen=True, slots=True)
class SignedUpload:
    """Where anybody who has it may put one certain body."""

    url: str = field(repr=False)
    headers: Mapping[str, str]
    """To be sent along."""


class ObjectStore(Protocol):
    """Objects by bucket and key.

    Every method raises `NotFound` for a missing bucket or (where it reads) object, and the retryable kinds of
    `CloudError`.
    """

    def put(self, reference: ObjectReference, body: bytes, *, if_absent: bool = False) -> ObjectInfo:
        """Write a small object.

        Args:
            reference: where.
            body: all of it; for large bodies use `put_file`.
            if_absent: write only if no object of that key exists, else raise `PreconditionFailed`.

        Returns:
            What was written.
        """

    def put_file(self, reference: ObjectReference, file: BinaryIO) -> ObjectInfo:
        """Write an object from a seekable file, in parts where it is large; read from its current position to its end."""

    def get(self, reference: ObjectReference) -> bytes:
        """Return a small object, whole."""

    def stream(self, reference: ObjectReference, *, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        """Yield the bytes `start` … `end - 1` of an object in chunks; errors come from the first `next` on.

        Args:
            reference: which.
            start: first byte; at or past the end yields nothing.
            end: one past the last byte, or None for all.

        Returns:
            An iterator that reads as it is asked, at most `STREAM_CHUNK_BYTES` at a time.
        """

    def head(self, reference: ObjectReference) -> ObjectInfo:
        """Return what S3 knows about an object, without its bytes."""

    def list(self, prefix: ObjectReference, *, after: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects whose key begins with the prefix's key and comes after another, in key order.

        Args:
            prefix: bucket and beginning of the keys.
            after: a whole key, there or not; empty: from the first.

        Returns:
            An iterator that asks S3 as it is read, once for every `LISTED_AT_ONCE` objects.
        """

    def sign_upload(
        self, reference: ObjectReference, *, sha256: str, size_bytes: int, seconds: int
    ) -> SignedUpload | None:
        """Sign an address where others may put an object, these very bytes and no others. Calls nobody.

        Args:
            reference: which object.
            sha256: of the body, hexadecimal.
            size_bytes: of the body.
            seconds: how long the address is good.

        Returns:
            The address, or None where the store has none for others.
        """

    def delete(self, bucket: str, keys: Sequence[str]) -> None:
        """Delete objects; one that is not there is deleted already.

        Args:
            bucket: of all of them.
            keys: at most `DELETED_AT_ONCE`.
        """
