"""S3 object store on plain boto3 client calls, with explicit time-outs and without boto3's transfer manager.

On some instance types, boto3's transfer manager selects the CRT client, which ignores the configured endpoint and sends
to AWS itself (boto3 issues #4839, #4689). Responses contain no checksums, because callers verify the data with their
own digests. Large objects use several connections, because one transfers at most 85 to 95 MB/s.

Invariant: a put is stored completely or not at all. All bytes read belong to one object. When a call returns, its
threads have ended.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from botocore.exceptions import ClientError

from everstep import bulk
from everstep.bulk import CONNECTIONS, PART_BYTES, RangeReader
from everstep.protocol.plan import ObjectReference
from worker.errors import CorruptCheckpoint, ObjectMissing, StorageError, StoreRefused, StoreUnavailable
from worker.storage.aws import KeysOf, aws_client, aws_errors
from worker.storage.object_store import ObjectReader, OnStored, Piece, Read, Span, StoredObject, UploadShare, cut

if TYPE_CHECKING:
    from botocore.client import BaseClient

RANGE_BYTES = 8 * 1024 * 1024
"""Size of the ranges of a large read. Source: Amazon S3 User Guide, performance design patterns: 8 to 16 MiB."""
FILE_PART_BYTES = 8 * 1024 * 1024
"""Minimum size of a file's parts. It is below `PART_BYTES`, because the store buffers a file's parts in memory."""
_RANKS = 8
"""Expected ranks per node, for the size of the connection pool. With more, some connections open anew per request."""
_READ_BYTES = 1024 * 1024


def s3_store(environment: Mapping[str, str] = os.environ, keys: KeysOf | None = None) -> S3ObjectStore:
    """Return the object store at AWS_ENDPOINT_URL_S3, else at AWS_ENDPOINT_URL, else in AWS, without a request.

    botocore calls `keys` again before the credentials expire; None for the node's own. Raises ForbiddenEndpoint if
    EVERSTEP_LOCAL=1 and the endpoint is not on loopback.
    """
    has_endpoint = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
    client = partial(
        aws_client,
        "s3",
        environment,
        keys=keys,
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        max_pool_connections=(_RANKS + 1) * CONNECTIONS,
        s3={"addressing_style": "path" if has_endpoint else "auto"},
    )
    return S3ObjectStore(client(), probe=partial(client, is_probe=True))


class S3ObjectStore:
    """Implements `ObjectStore` with one client that all threads share."""

    def __init__(
        self,
        client: BaseClient,
        *,
        part_bytes: int = PART_BYTES,
        range_bytes: int = RANGE_BYTES,
        probe: Callable[[], Any] | None = None,
    ) -> None:
        """Create the store on boto3's S3 client.

        `part_bytes` is the least size of parts; S3 requires 5 MiB, except for the last one. `probe` returns a client
        for `answers`; None for `client`.
        """
        self._probe = cache(probe or (lambda: self.client))
        # botocore creates the client's methods at run time, so type checkers cannot see them.
        self.client = cast(Any, client)
        """boto3's S3 client. The caller of `s3_store` must close the client."""
        bulk.sign_bodies(self.client)
        self.part_bytes = part_bytes
        self.range_bytes = range_bytes

    def put_bytes(self, reference: ObjectReference, data: bytes) -> StoredObject:
        return self._put(reference, [data], len(data), part_bytes=self.part_bytes, connections=1)

    def put_file(self, reference: ObjectReference, path: Path, size: int | None = None) -> StoredObject:
        size = path.stat().st_size if size is None else size
        with path.open("rb") as file:
            return self._put(
                reference,
                _file_pieces(file, size),
                size,
                part_bytes=min(self.part_bytes, FILE_PART_BYTES),
                connections=1,
            )

    def put_stream(
        self, reference: ObjectReference, pieces: Iterable[Piece], size: int, *, on_stored: OnStored = lambda _: None
    ) -> StoredObject:
        return self._put(
            reference, pieces, size, part_bytes=self.part_bytes, connections=CONNECTIONS, on_stored=on_stored
        )

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
        part_bytes = bulk.part_bytes_of(size, self.part_bytes)
        if size <= part_bytes:
            return self.put_stream(reference, pieces, size, on_stored=on_stored)
        with _errors(reference), bulk.begun(self.client, _place(reference)) as upload:
            try:
                share.begin(upload.upload_id, part_bytes, -(-size // part_bytes))
                parts = bulk.put_parts(
                    upload,
                    pieces,
                    size,
                    part_bytes=part_bytes,
                    on_part=lambda part: on_stored(part.size),
                    helpers=share,
                    read=read,
                )
            finally:
                share.end()
            stored = upload.complete(parts)
        return _stored(reference, size, stored)

    def put_part(
        self,
        reference: ObjectReference,
        upload_id: str,
        number: int,
        pieces: Iterable[Piece],
        *,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> bulk.StoredPart:
        part = bulk.Part(is_cancelled)
        for piece in pieces:
            part.append(piece)
        with _errors(reference):
            return bulk.Multipart(self.client, _place(reference), upload_id).put(number, part)

    def abort_uploads(self, prefix: ObjectReference, is_abandoned: Callable[[str], bool]) -> int:
        aborted = 0
        with _errors(prefix):
            pages = self.client.get_paginator("list_multipart_uploads").paginate(
                Bucket=prefix.bucket, Prefix=prefix.key
            )
            for upload in [upload for page in pages for upload in page.get("Uploads", ())]:
                key = upload["Key"]
                if key.startswith(prefix.key) and is_abandoned(key):
                    self.client.abort_multipart_upload(Bucket=prefix.bucket, Key=key, UploadId=upload["UploadId"])
                    aborted += 1
        return aborted

    def _put(
        self,
        reference: ObjectReference,
        pieces: Iterable[Piece],
        size: int,
        *,
        part_bytes: int,
        connections: int,
        on_stored: OnStored = lambda _: None,
    ) -> StoredObject:
        part_bytes = bulk.part_bytes_of(size, part_bytes)
        with _errors(reference):
            stored = bulk.put(
                self.client,
                _place(reference),
                pieces,
                size,
                part_bytes=part_bytes,
                connections=connections,
                on_stored=on_stored,
            )
        return _stored(reference, size, stored)

    def answers(self, reference: ObjectReference) -> bool:
        try:
            with _errors(reference):
                self._probe().get_object(**_place(reference), Range="bytes=0-0")["Body"].read()
        except StorageError as error:
            return error.obstacle is None
        return True

    def get_bytes(self, reference: ObjectReference) -> bytes:
        with self.open(reference) as reader:
            data = bytearray(reader.bytes)
            reader.read_into(memoryview(data))
        return bytes(data)

    @contextmanager
    def open(self, reference: ObjectReference, *, etag: str = "") -> Iterator[ObjectReader]:
        with _errors(reference):
            try:
                answer = self._get(reference, etag, 0, self.range_bytes)
            except ClientError as error:
                if _code(error) != "InvalidRange":
                    raise
                answer = self._get(reference, etag)  # S3 rejects every range of an empty object
        reader = _S3Reader(self, reference, answer)
        try:
            yield reader
        finally:
            reader.close()

    def _get(self, reference: ObjectReference, etag: str, begin: int = 0, end: int = 0) -> Mapping[str, Any]:
        asked = _place(reference)
        if etag:
            asked["IfMatch"] = f'"{etag}"'
        if end:
            asked["Range"] = f"bytes={begin}-{end - 1}"
        return cast(Mapping[str, Any], self.client.get_object(**asked))

    def read_range(
        self,
        reference: ObjectReference,
        begin: int,
        target: memoryview,
        spans: Sequence[Span],
        *,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        reader = RangeReader(self.client, _place(reference), begin, begin + _bytes_of(spans))
        try:
            for start, stop in spans:
                while start < stop and not is_cancelled():
                    with _errors(reference), target[start:stop] as piece:
                        start += reader.readinto(piece)
        except (StoreRefused, StoreUnavailable) as error:
            cause = error.__cause__
            if isinstance(cause, bulk.ObjectEnds) or (
                isinstance(cause, ClientError) and _code(cause) == "InvalidRange"
            ):
                raise CorruptCheckpoint(f"{_name(reference)} ends before byte {reader.end}") from error
            raise
        finally:
            reader.close()

    def head(self, reference: ObjectReference) -> StoredObject | None:
        try:
            with _errors(reference):
                answer = self.client.head_object(**_place(reference), ChecksumMode="ENABLED")
        except ObjectMissing:
            return None
        return StoredObject(reference, int(answer["ContentLength"]), _etag(answer), crc=bulk.stored_crc(answer))

    def list(self, prefix: ObjectReference) -> Iterator[StoredObject]:
        pages = iter(self.client.get_paginator("list_objects_v2").paginate(Bucket=prefix.bucket, Prefix=prefix.key))
        while True:
            with _errors(prefix):
                page = next(pages, None)
            if page is None:
                return
            for entry in page.get("Contents", ()):
                yield StoredObject(
                    ObjectReference(bucket=prefix.bucket, key=entry["Key"]), int(entry["Size"]), _etag(entry)
                )


class _S3Reader:
    """Reads an object in order: first from the response that `open` received, then from further range requests."""

    def __init__(self, store: S3ObjectStore, reference: ObjectReference, answer: Mapping[str, Any]) -> None:
        self._store = store
        self._reference = reference
        self._etag = _etag(answer)
        self._position = 0
        with _errors(reference):
            end, self.bytes = bulk.extent(answer, 0)
        self._open = self._range(0, end, answer)
        self.md5 = _md5(answer)

    @property
    def ready_bytes(self) -> int:
        return self._open.end - self._position

    def close(self) -> None:
        self._open.close()

    def read_into(self, target: memoryview, spans: Sequence[Span] | None = None) -> None:
        spans = [(0, len(target))] if spans is None else spans
        wanted = _bytes_of(spans)
        if wanted > (left := self.bytes - self._position):
            raise CorruptCheckpoint(f"{_name(self._reference)} ends {wanted - left} bytes early")
        if wanted > 2 * self._store.range_bytes:
            self._read_side_by_side(target, spans)
        else:
            self._read_on(target, spans)

    def _read_on(self, target: memoryview, spans: Sequence[Span]) -> None:
        for begin, end in spans:
            while begin < end:
                if self._position == self._open.end:
                    self._open.close()
                    self._open = self._range(self._position, self.bytes)
                stop = min(end, begin + self._open.end - self._position)
                self._read(self._open, target, [(begin, stop)], ())
                self._position += stop - begin
                begin = stop

    def _read_side_by_side(self, target: memoryview, spans: Sequence[Span]) -> None:
        range_bytes = self._store.range_bytes
        head = self._open.end - self._position
        # If the open response covers more than one range, its one connection would be slower than several. Request all
        # ranges anew.
        if head > range_bytes:
            head = 0
        with bulk.side_by_side("s3-get", CONNECTIONS) as (begin, errors):
            for part in cut(spans, range_bytes, head):
                if head:
                    begin(partial(self._read, self._open, target, part, errors))
                else:
                    begin(partial(self._read_range, self._position, target, part, errors))
                self._position += _bytes_of(part)
                head = 0
        self._open.close()
        self._open = self._range(self._position, self._position)

    def _read_range(
        self, begin: int, target: memoryview, spans: Sequence[Span], errors: Sequence[BaseException]
    ) -> None:
        reader = self._range(begin, begin + _bytes_of(spans))
        try:
            self._read(reader, target, spans, errors)
        finally:
            reader.close()

    def _range(self, begin: int, end: int, answer: Mapping[str, Any] | None = None) -> RangeReader:
        return RangeReader(
            self._store.client,
            _place(self._reference),
            begin,
            end,
            etag=self._etag,
            object_bytes=self.bytes,
            answer=answer,
        )

    def _read(
        self, reader: RangeReader, target: memoryview, spans: Sequence[Span], errors: Sequence[BaseException]
    ) -> None:
        for begin, end in spans:
            while begin < end:
                if errors:  # A thread has failed to read another range of the object.
                    return
                with _errors(self._reference), target[begin:end] as piece:
                    begin += reader.readinto(piece)


def _bytes_of(spans: Iterable[Span]) -> int:
    return sum(end - begin for begin, end in spans)


def _file_pieces(file: IO[bytes], size: int) -> Iterator[bytes]:
    left = size
    while left and (data := file.read(min(_READ_BYTES, left))):
        left -= len(data)
        yield data


@contextmanager
def _errors(reference: ObjectReference) -> Iterator[None]:
    """Translate the errors of botocore and of `everstep.bulk` into subtypes of `StorageError`."""
    name = _name(reference)
    try:
        with aws_errors(name):
            yield
    except bulk.SendCancelled as error:
        raise StoreUnavailable(f"{name}: the upload of a part was cancelled") from error
    except bulk.WrongLength as error:
        raise StoreRefused(f"{name}: {error}") from error
    except (bulk.OtherRange, bulk.EndedEarly) as error:  # A cut answer says nothing about the object.
        raise StoreUnavailable(f"{name}: {error}") from error


def _stored(reference: ObjectReference, size: int, stored: bulk.Stored) -> StoredObject:
    return StoredObject(reference, size, stored.etag, sha256=stored.sha256, part_bytes=stored.part_bytes)


def _name(reference: ObjectReference) -> str:
    return f"s3://{reference.bucket}/{reference.key}"


def _place(reference: ObjectReference) -> dict[str, str]:
    return {"Bucket": reference.bucket, "Key": reference.key}


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _etag(answer: Mapping[str, Any]) -> str:
    return str(answer["ETag"]).strip('"')


def _md5(answer: Mapping[str, Any]) -> str:
    """Return an object's MD5 if its ETag is the MD5, otherwise an empty string.

    Source: Amazon S3 API Reference, Object, ETag: the MD5 of objects put in one piece, unencrypted or with SSE-S3.
    """
    etag = _etag(answer)
    is_plain = answer.get("ServerSideEncryption", "AES256") == "AES256" and "SSECustomerAlgorithm" not in answer
    return etag if is_plain and re.fullmatch("[0-9a-f]{32}", etag) else ""
