"""Files and S3 objects, addressed by path or by `s3://bucket/key`.

    reading    ranges of an object; all reads return bytes of the version that was opened
    writing    an object from a stream of pieces; the store keeps the whole object or nothing of it

Invariant: a reader never mixes two versions of an object. Each request to S3 requires the ETag of the opened object.
"""

from __future__ import annotations

import errno
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Protocol, cast

import boto3  # pyright: ignore[reportMissingTypeStubs]
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError

from everstep import bulk
from everstep.checkpoints.errors import StoreFailure

PART_BYTES: Final = 8 * 1024 * 1024
"""Minimum size of an upload's parts to S3, in bytes.

`S3.write` holds two parts in memory: it assembles one part while it sends another part.
"""
CONNECTIONS: Final = 8
"""Maximum number of open connections of one S3 client. Eight connections suit about 700 MB/s.

Source: Amazon S3 User Guide, which recommends one parallel request per 85 to 95 MB/s of bandwidth.
"""

NO_SPACE_STATUS: Final = 507
"""HTTP status of a store without free space. Source: RFC 4918, section 11.5. AWS S3 never answers it."""


class StoredObject(ABC):
    """An object that was opened for reading. Its owner calls `close` at the end.

    Args:
        name: path or S3 URI, for messages.
        size: length of the object in bytes.
    """

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size

    def read(self, begin: int, end: int) -> bytearray:
        """Return a range of the object. Raises the errors of `read_into`.

        Args:
            begin: first byte of the range.
            end: end of the range, exclusive.

        Returns:
            uint8[end - begin].
        """
        data = bytearray(end - begin)
        with memoryview(data) as target:
            self.read_into(begin, target)
        return data

    @abstractmethod
    def read_into(self, begin: int, target: memoryview) -> None:
        """Fill memory with a range of the object. Safe from several threads at once.

        Args:
            begin: first byte of the range.
            target: uint8 memory, as long as the range.

        Raises:
            StoreFailure: the object cannot be read, has changed since it was opened, or ends too early.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the open file or connection. Idempotent."""


class Objects(Protocol):
    """A place from which checkpoint objects are read by key: a folder, an S3 bucket, or the nodes of a running job."""

    def open(self, key: str) -> StoredObject:
        """Open an object for reading.

        Args:
            key: name of the object within the store.

        Returns:
            The opened object; the caller closes it.

        Raises:
            StoreFailure: the object does not exist or cannot be read.
        """
        ...


class Store(Objects, Protocol):
    """A place that stores objects under names: a folder or an S3 prefix."""

    def exists(self, key: str) -> bool:
        """Return whether the store has an object with this key.

        Raises StoreFailure if the store does not answer.
        """
        ...

    def write(self, key: str, pieces: Iterable[bytes | bytearray | memoryview], size: int) -> None:
        """Store an object, and replace an earlier object with the same key.

        Args:
            key: name of the object within the store.
            pieces: the content in order. The iterator may produce each piece on demand.
            size: size of the whole content in bytes.

        Raises:
            StoreFailure: the object cannot be written. The store then contains no part of it.
        """


def store_of(uri: str) -> tuple[Store, str]:
    """Return the store of a path or an S3 URI, and the key within the store.

    Args:
        uri: `s3://bucket/key`, or a path of the file system.

    Returns:
        The store, and the object's key within the store. The key of a file is its path.

    Raises:
        StoreFailure: the URI has an unknown scheme or no bucket.
    """
    scheme, found, rest = uri.partition("://")
    if not found:
        return Files(), uri
    bucket, _, key = rest.partition("/")
    if scheme != "s3" or not bucket:
        raise StoreFailure(f"{uri} is neither a path nor s3://bucket/key")
    return S3(bucket), key


class Files:
    """A store whose objects are files. Keys are paths in the file system."""

    def open(self, key: str) -> StoredObject:
        try:
            return _File(key)
        except OSError as error:
            raise StoreFailure(f"{key}: {error.strerror}") from error

    def exists(self, key: str) -> bool:
        return Path(key).exists()

    def write(self, key: str, pieces: Iterable[bytes | bytearray | memoryview], size: int) -> None:
        path = Path(key)
        unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with unfinished.open("wb") as file:
                for piece in pieces:
                    file.write(piece)
                    # Delete the variable, because it would keep the memory of this piece alive while the source
                    # produces the next piece.
                    del piece
                file.flush()
                os.fsync(file.fileno())
            assert unfinished.stat().st_size == size, "the pieces have the announced size"
            unfinished.replace(path)
        except OSError as error:
            advice = "; free space, or name another folder" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
            raise StoreFailure(f"{key}: {error.strerror}{advice}") from error
        finally:
            with suppress(OSError):
                # Delete the unfinished file after an error. After a success, `replace` has renamed it.
                unfinished.unlink()


class _File(StoredObject):
    def __init__(self, path: str) -> None:
        self._file = Path(path).open("rb")  # noqa: SIM115
        super().__init__(path, os.fstat(self._file.fileno()).st_size)

    def read_into(self, begin: int, target: memoryview) -> None:
        position, end = begin, begin + len(target)
        while position < end:
            count = os.preadv(self._file.fileno(), [target[position - begin :]], position)
            if not count:
                raise StoreFailure(
                    f"{self.name} ends at byte {position}, before the end of the requested range at byte {end}"
                )
            position += count

    def close(self) -> None:
        self._file.close()


class S3:
    """Objects of one bucket. boto3 reads the endpoint, the region and the access keys from its usual sources.

    Args:
        bucket: name of the bucket, without `s3://` and without a key.
        client: boto3 client for S3. None: a new client.
    """

    def __init__(self, bucket: str, client: Any = None) -> None:
        options = Config(max_pool_connections=CONNECTIONS, retries={"mode": "standard", "max_attempts": 5})
        self._bucket = bucket
        # boto3 creates the methods of its clients at run time, so they have no types.
        self._client: Any = client if client is not None else cast(Any, boto3).client("s3", config=options)
        bulk.sign_bodies(self._client)

    def exists(self, key: str) -> bool:
        try:
            self._client.head_object(Bucket=self._bucket, Key=key)
        except ClientError as error:
            if error.response.get("Error", {}).get("Code") in ("404", "NoSuchKey"):
                return False
            with _failures(f"s3://{self._bucket}/{key}"):
                raise
        return True

    def open(self, key: str) -> StoredObject:
        name = f"s3://{self._bucket}/{key}"
        with _failures(name):
            head = self._client.head_object(Bucket=self._bucket, Key=key)
        return _S3Object(
            name,
            head["ContentLength"],
            self._client,
            {
                "Bucket": self._bucket,
                "Key": key,
            },
            head["ETag"].strip('"'),
        )

    def write(self, key: str, pieces: Iterable[bytes | bytearray | memoryview], size: int) -> None:
        with _failures(f"s3://{self._bucket}/{key}"):
            bulk.put(
                self._client,
                {"Bucket": self._bucket, "Key": key},
                pieces,
                size,
                part_bytes=bulk.part_bytes_of(size, PART_BYTES),
                connections=1,
            )


class _S3Object(StoredObject):
    def __init__(self, name: str, size: int, client: Any, place: dict[str, str], etag: str) -> None:
        super().__init__(name, size)
        self._client = client
        self._place = place
        self._etag = etag

    def read_into(self, begin: int, target: memoryview) -> None:
        end = begin + len(target)
        if end > self.size:
            raise StoreFailure(f"{self.name} ends at byte {self.size}")
        reader = bulk.RangeReader(self._client, self._place, begin, end, etag=self._etag, object_bytes=self.size)
        try:
            with _failures(self.name):
                reader.fill(target)
        finally:
            reader.close()

    def close(self) -> None:
        pass


@contextmanager
def _failures(name: str) -> Generator[None]:
    """Convert boto3's errors into `StoreFailure`. The message names the object and the remedy."""
    try:
        yield
    except ClientError as error:
        code = str(error.response.get("Error", {}).get("Code", ""))
        advice = {
            "404": "the object does not exist",
            "NoSuchKey": "the object does not exist",
            "NoSuchBucket": "the bucket does not exist",
            "403": "access is denied; the caller needs s3:GetObject here, and kms:Decrypt if it is encrypted",
            "AccessDenied": "access is denied; check the caller's policy and the bucket's",
            "301": "the bucket is in another region; set AWS_REGION to its region",
            "PermanentRedirect": "the bucket is in another region; set AWS_REGION to its region",
            "InternalError": "the store failed by itself; see its log and its free space, then start again",
            "412": "the object was replaced while it was read; start again",
            "PreconditionFailed": "the object was replaced while it was read; start again",
        }.get(code, f"{error.response.get('Error', {}).get('Message', '')} ({code})")
        if error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") == NO_SPACE_STATUS:
            advice = "the store has no free space; delete objects or add space, then start again"
        raise StoreFailure(f"{name}: {advice}") from error
    except (BotoCoreError, ResponseParserError, bulk.WrongLength, bulk.EndedEarly, bulk.OtherRange) as error:
        raise StoreFailure(f"{name}: {error}") from error
