"""S3 object store on plain boto3 client calls, with explicit time-outs and without boto3's transfer manager.

On some instance types, boto3's transfer manager selects the CRT client, which ignores the configured endpoint and sends
to AWS itself (boto3 issues #4839, #4689). So this module uses no transfer manager. Every put and every part carries a
CRC32 that S3 verifies. Callers verify the data that they read with their own digests (`checkpoints`, `source`), so
responses carry no checksums.

Large objects use several connections, because one connection has at most 85 to 95 MB/s:

    put_stream   pieces ─▶ parts (references, no copies) ─▶ up to CONNECTIONS parts in flight
    open         reads the first part_bytes; the answer contains the object's length
    read_into    small targets from one stream; large ones in ranges of part_bytes, up to CONNECTIONS at once,
                 all with the ETag of the opened object

Invariant: a put is stored completely or not at all. All bytes read belong to one object. When a call returns, its
threads have ended. `worker.storage.aws` decides the endpoint.

The module has more than 500 lines. Writing in parts and reading in ranges share connections, time-outs and the
translation of errors.
"""

from __future__ import annotations

import base64
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from botocore.exceptions import BotoCoreError, ClientError

from everstep.protocol.plan import ObjectReference
from worker.errors import CorruptCheckpoint, ObjectMissing, StoreRefused, StoreUnavailable
from worker.storage.aws import KeysOf, aws_client, aws_errors
from worker.storage.object_store import ObjectReader, Piece, Span, StoredObject, cut

if TYPE_CHECKING:
    from botocore.client import BaseClient
    from botocore.response import StreamingBody

PART_BYTES = 8 * 1024 * 1024
"""Larger objects are sent in parts of this size, and read in ranges of this size."""
CONNECTIONS = 4
"""Connections per put or read.

Source: Amazon S3 User Guide, performance design patterns: parallel requests for 8 to 16 MiB, one for each 85 to 95
MB/s.
"""
_RANKS = 8
"""Expected maximum ranks per node, which determines the size of the connection pool.

All ranks load or upload at the same time.

With more ranks, some connections are not reused.
"""
MAX_PARTS = 10_000
"""Maximum number of parts of a multipart upload.

Source: Amazon S3 User Guide, multipart upload limits.
"""
_READ_BYTES = 1024 * 1024
"""Bytes of urllib3's read buffer. Each reading connection has its own buffer."""
_GATHERED_BYTES = 256 * 1024
"""Maximum total size of pieces that are joined and sent in one write."""
_CHECKSUM = "CRC32"


def s3_store(environment: Mapping[str, str] = os.environ, keys: KeysOf | None = None) -> S3ObjectStore:
    """Return the store that the environment names: AWS, AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL.

    Args:
        environment: environment of the agent, read for endpoints and local mode.
        keys: returns credentials, and is called again before they expire. None selects the node's own credentials.

    Returns:
        The store. No request has been sent yet.

    Raises:
        ForbiddenEndpoint: EVERSTEP_LOCAL=1, and the endpoint is not on loopback.
    """
    has_endpoint = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
    return S3ObjectStore(
        aws_client(
            "s3",
            environment,
            keys=keys,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            max_pool_connections=(_RANKS + 1) * CONNECTIONS,
            s3={"addressing_style": "path" if has_endpoint else "auto"},
        )
    )


class S3ObjectStore:
    """Implements `ObjectStore` with one client that all threads share."""

    def __init__(self, client: BaseClient, *, part_bytes: int = PART_BYTES) -> None:
        """Create the store.

        Args:
            client: boto3's S3 client.
            part_bytes: size of the parts of a multipart upload. S3 requires at least 5 MiB, except for the last part.
        """
        # botocore creates the client's methods at run time, so type checkers cannot see them.
        self.client = cast(Any, client)
        """boto3's S3 client, which the caller of `s3_store` closes."""
        self._part_bytes = part_bytes

    def put_bytes(self, reference: ObjectReference, data: bytes) -> StoredObject:
        """See `ObjectStore.put_bytes`."""
        return self._put(reference, [data], len(data), connections=1)

    def put_file(self, reference: ObjectReference, path: Path, size: int | None = None) -> StoredObject:
        """See `ObjectStore.put_file`."""
        size = path.stat().st_size if size is None else size
        with path.open("rb") as file:
            return self._put(reference, _file_pieces(file, size), size, connections=1)

    def put_stream(self, reference: ObjectReference, pieces: Iterable[Piece], size: int) -> StoredObject:
        """See `ObjectStore.put_stream`."""
        return self._put(reference, pieces, size, connections=CONNECTIONS)

    def _put(self, reference: ObjectReference, pieces: Iterable[Piece], size: int, *, connections: int) -> StoredObject:
        part_bytes = max(self._part_bytes, -(-size // MAX_PARTS))
        if size <= part_bytes:
            (part,) = list(_parts(pieces, part_bytes, size)) or [_Part()]
            with _errors(reference):
                answer = self.client.put_object(**_place(reference), Body=part, **part.checksum)
            return StoredObject(reference, size, _etag(answer))
        place = _place(reference)
        with _errors(reference):
            upload = {
                **place,
                "UploadId": self.client.create_multipart_upload(**place, ChecksumAlgorithm=_CHECKSUM)["UploadId"],
            }
        is_complete = False
        try:
            sent = self._put_parts(reference, upload, pieces, part_bytes, size, connections)
            stored = self._complete(reference, upload, sent, size)
            is_complete = True
        finally:
            if not is_complete:
                # If the abort fails, the bucket's rule for unfinished uploads removes the parts
                # (docs/operating.md#server).
                with suppress(BotoCoreError, ClientError):
                    self.client.abort_multipart_upload(**upload)
        return stored

    def _complete(
        self, reference: ObjectReference, upload: dict[str, str], sent: list[dict[str, object]], size: int
    ) -> StoredObject:
        """Complete a multipart upload.

        If S3 does not know the upload, either the first answer was lost and botocore retried, or the upload was ended
        meanwhile. The object itself shows which of the two is the case.
        """
        with _errors(reference):
            try:
                answer = self.client.complete_multipart_upload(**upload, MultipartUpload={"Parts": sent})
            except ClientError as error:
                is_unknown = error.response.get("Error", {}).get("Code") == "NoSuchUpload"
                found = self.head(reference) if is_unknown else None
                if found is None or found.bytes != size:
                    raise
                return found
        return StoredObject(reference, size, _etag(answer))

    def _put_parts(
        self,
        reference: ObjectReference,
        upload: dict[str, str],
        pieces: Iterable[Piece],
        part_bytes: int,
        size: int,
        connections: int,
    ) -> list[dict[str, object]]:
        """Send parts concurrently while the next part is assembled."""
        sent: dict[int, dict[str, object]] = {}

        def put(number: int, part: _Part) -> None:
            with _errors(reference):
                answer = self.client.upload_part(**upload, PartNumber=number, Body=part, **part.checksum)
            sent[number] = {"PartNumber": number, "ETag": answer["ETag"], **part.checksum}

        with _side_by_side("s3-put", connections) as (begin, errors):

            def asked() -> Iterator[Piece]:
                for piece in pieces:
                    yield piece
                    if errors:
                        raise errors[0]

            in_flight: set[Future[None]] = set()
            numbers = count(1)  # `enumerate` would keep a reference to the last part
            for part in _parts(asked(), part_bytes, size):
                in_flight.add(begin(partial(put, next(numbers), part)))
                del part
                while len(in_flight) > connections:
                    in_flight = wait(in_flight, return_when=FIRST_COMPLETED).not_done
        return [sent[number] for number in sorted(sent)]

    def get_bytes(self, reference: ObjectReference) -> bytes:
        """See `ObjectStore.get_bytes`."""
        with self.open(reference) as reader:
            data = bytearray(reader.bytes)
            reader.read_into(memoryview(data))
        return bytes(data)

    @contextmanager
    def open(self, reference: ObjectReference, *, etag: str = "") -> Iterator[ObjectReader]:
        """See `ObjectStore.open`."""
        with _errors(reference):
            try:
                answer = self._get(reference, etag, 0, self._part_bytes)
            except ClientError as error:
                if error.response.get("Error", {}).get("Code") != "InvalidRange":
                    raise
                answer = self._get(reference, etag)  # an empty object has no range
        reader = _S3Reader(self, reference, answer)
        try:
            yield reader
        finally:
            reader.close()

    def _get(self, reference: ObjectReference, etag: str, begin: int = 0, end: int = 0) -> Mapping[str, Any]:
        """Request an object, or its bytes from `begin` to `end`. The caller translates botocore's errors."""
        asked = _place(reference)
        if etag:
            asked["IfMatch"] = f'"{etag}"'
        if end:
            asked["Range"] = f"bytes={begin}-{end - 1}"
        return cast(Mapping[str, Any], self.client.get_object(**asked))

    def head(self, reference: ObjectReference) -> StoredObject | None:
        """See `ObjectStore.head`."""
        try:
            with _errors(reference):
                answer = self.client.head_object(**_place(reference))
        except ObjectMissing:
            return None
        return StoredObject(reference, int(answer["ContentLength"]), _etag(answer))

    def list(self, prefix: ObjectReference) -> Iterator[StoredObject]:
        """See `ObjectStore.list`."""
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
    """Reads from the open response until its end, then requests further ranges."""

    def __init__(self, store: S3ObjectStore, reference: ObjectReference, answer: Mapping[str, Any]) -> None:
        self._store = store
        self._reference = reference
        self._etag = _etag(answer)
        self._body: StreamingBody = answer["Body"]
        self._position = 0
        self._body_end, self.bytes = _extent(reference, answer, 0)
        self.md5 = _md5(answer)

    def close(self) -> None:
        self._body.close()

    def read_into(self, target: memoryview, spans: Sequence[Span] | None = None) -> None:
        spans = [(0, len(target))] if spans is None else spans
        wanted = _bytes_of(spans)
        if wanted > (left := self.bytes - self._position):
            raise CorruptCheckpoint(f"{_name(self._reference)} ends {wanted - left} bytes early")
        if wanted > 2 * self._store._part_bytes:
            self._read_side_by_side(target, spans)
        else:
            self._read_on(target, spans)

    def _read_on(self, target: memoryview, spans: Sequence[Span]) -> None:
        for begin, end in spans:
            while begin < end:
                if self._position == self._body_end:
                    self._body.close()
                    self._body, self._body_end = self._range(self._position, self.bytes), self.bytes
                stop = min(end, begin + self._body_end - self._position)
                self._read(self._body, target, [(begin, stop)], ())
                self._position += stop - begin
                begin = stop

    def _read_side_by_side(self, target: memoryview, spans: Sequence[Span]) -> None:
        part_bytes = self._store._part_bytes
        head = self._body_end - self._position
        # Do not use the open response for a large target: its transfer of the remaining object would delay the other
        # ranges.
        if head > part_bytes:
            head = 0
        with _side_by_side("s3-get", CONNECTIONS) as (begin, errors):
            for part in cut(spans, part_bytes, head):
                if head:
                    begin(partial(self._read, self._body, target, part, errors))
                else:
                    begin(partial(self._read_range, self._position, target, part, errors))
                self._position += _bytes_of(part)
                head = 0
        self._body.close()
        self._body_end = self._position

    def _read_range(
        self, begin: int, target: memoryview, spans: Sequence[Span], errors: Sequence[BaseException]
    ) -> None:
        body = self._range(begin, begin + _bytes_of(spans))
        try:
            self._read(body, target, spans, errors)
        finally:
            body.close()

    def _range(self, begin: int, end: int) -> StreamingBody:
        with _errors(self._reference):
            answer = self._store._get(self._reference, self._etag, begin, end)
        body: StreamingBody = answer["Body"]
        if _extent(self._reference, answer, begin) != (end, self.bytes):
            body.close()
            raise _other_range(self._reference, answer, begin)
        return body

    def _read(
        self, body: StreamingBody, target: memoryview, spans: Sequence[Span], errors: Sequence[BaseException]
    ) -> None:
        for begin, end in spans:
            while begin < end:
                if errors:  # Stop, because another range has failed.
                    return
                with _errors(self._reference), target[begin : min(end, begin + _READ_BYTES)] as piece:
                    read = body.readinto(piece)
                if not read:
                    raise CorruptCheckpoint(f"{_name(self._reference)} ends early")
                begin += read


@contextmanager
def _side_by_side(
    name: str, thread_count: int
) -> Iterator[tuple[Callable[[Callable[[], None]], Future[None]], Sequence[BaseException]]]:
    """Run work in threads, which have all ended when the context exits.

    The first error, in a thread or in the block, stops the start of further work and is raised.

    Args:
        name: prefix of the threads' names, for debuggers.
        thread_count: maximum number of pieces of work at one time.

    Yields:
        (a function that starts a piece of work, the errors so far).
    """
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        if errors:
            return
        try:
            work()
        except BaseException as error:
            errors.append(error)

    with ThreadPoolExecutor(thread_count, thread_name_prefix=name) as pool:
        try:
            yield lambda work: pool.submit(guarded, work), errors
        except BaseException as error:
            errors.append(error)
    try:
        if errors:
            raise errors[0]
    finally:
        errors.clear()  # break reference cycles that would keep the parts alive


def _extent(reference: ObjectReference, answer: Mapping[str, Any], begin: int) -> tuple[int, int]:
    """Return the end of the range in a response that starts at `begin`, and the length of the whole object."""
    length, told = int(answer["ContentLength"]), answer.get("ContentRange")
    if told is None and not begin:  # The response contains the whole object.
        return length, length
    found = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", told or "")
    first, last, size = map(int, found.groups()) if found else (0, 0, 0)
    if first != begin or last + 1 - first != length or last >= size:
        answer["Body"].close()
        raise _other_range(reference, answer, begin)
    return last + 1, size


def _other_range(reference: ObjectReference, answer: Mapping[str, Any], begin: int) -> StoreUnavailable:
    came = f"{answer['ContentLength']} bytes as {answer.get('ContentRange')!r}"
    return StoreUnavailable(f"{_name(reference)}: asked for a range that begins at {begin}, {came} came")


def _bytes_of(spans: Iterable[Span]) -> int:
    return sum(end - begin for begin, end in spans)


class _Part:
    """Pieces that are sent as one request body, without copying.

    The object acts as a file for botocore, which reads it to its end, and again for a retry.
    """

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._next = 0
        self._bytes = 0
        self._crc32 = 0

    def append(self, piece: Piece) -> None:
        """Add a piece. If its bytes change before they are sent, S3 rejects the part because of its checksum."""
        self._pieces.append(piece)
        self._bytes += len(piece)
        self._crc32 = zlib.crc32(piece, self._crc32)

    @property
    def checksum(self) -> dict[str, str]:
        """Checksum parameter of the request. Without it, botocore would read the part once more."""
        return {f"Checksum{_CHECKSUM}": base64.b64encode(self._crc32.to_bytes(4, "big")).decode()}

    def __len__(self) -> int:
        return self._bytes

    def read(self, _: int = -1) -> Piece:
        """Return the next piece completely, even if the piece is longer than the requested length.

        HTTP connections allow longer results. Small pieces are joined.
        """
        first, gathered = self._next, 0
        while (
            self._next < len(self._pieces) and (gathered := gathered + len(self._pieces[self._next])) <= _GATHERED_BYTES
        ):
            self._next += 1
        if self._next - first > 1:
            return b"".join(self._pieces[first : self._next])
        if first == len(self._pieces):
            return b""
        self._next = first + 1
        return self._pieces[first]

    def tell(self) -> int:
        """Return the number of bytes that botocore has read from this part."""
        return sum(len(piece) for piece in self._pieces[: self._next])

    def seek(self, offset: int) -> int:
        """Restart from the beginning; `offset` must be 0."""
        assert offset == 0, "parts are read from their beginning"
        self._next = 0
        return 0


def _parts(pieces: Iterable[Piece], part_bytes: int, size: int) -> Iterator[_Part]:
    """Split a stream into parts of equal size; the last part may be smaller."""
    part, left = _Part(), size
    for piece in pieces:
        left -= len(piece)
        if left < 0:
            raise StoreRefused(f"more bytes were given than the {size} of the object")
        view = memoryview(piece)
        while len(view):
            room = part_bytes - len(part)
            part.append(view[:room])
            view = view[room:]
            if len(part) == part_bytes:
                yield part
                part = _Part()
    if left:
        raise StoreRefused(f"{size - left} bytes were given for an object of {size}")
    if part:
        yield part


def _file_pieces(file: IO[bytes], size: int) -> Iterator[bytes]:
    left = size
    while left and (data := file.read(min(_READ_BYTES, left))):
        left -= len(data)
        yield data


def _errors(reference: ObjectReference) -> AbstractContextManager[None]:
    return aws_errors(_name(reference))


def _name(reference: ObjectReference) -> str:
    return f"s3://{reference.bucket}/{reference.key}"


def _place(reference: ObjectReference) -> dict[str, str]:
    return {"Bucket": reference.bucket, "Key": reference.key}


def _etag(answer: Mapping[str, Any]) -> str:
    return str(answer["ETag"]).strip('"')


def _md5(answer: Mapping[str, Any]) -> str:
    """Return an object's MD5 if its ETag is the MD5, otherwise an empty string.

    Source: Amazon S3 API Reference, Object, ETag: the ETag is the MD5 for objects put in one piece, unencrypted or with
    SSE-S3.
    """
    etag = _etag(answer)
    is_plain = answer.get("ServerSideEncryption", "AES256") == "AES256" and "SSECustomerAlgorithm" not in answer
    return etag if is_plain and re.fullmatch("[0-9a-f]{32}", etag) else ""
