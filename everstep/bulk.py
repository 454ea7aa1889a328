"""Transfers large objects between memory and S3 with multipart uploads and ranged reads, through boto3.

`make bench-durable` compares the module with boto3's transfer manager, awscrt and obstore (docs/benchmarks-durable.md).

    upload      pieces ─▶ parts (references, no copies) ─▶ up to `connections` parts in flight
                other processes may send parts of the same upload (`Helpers`)
    read        range ─▶ the caller's memory; after a broken connection, the read continues from its position

The client sends the CRC64NVME checksum of every part, and S3 verifies it. S3 also verifies the checksum of the whole
object when the client completes the upload.

Invariant: S3 stores an upload completely or not at all. When a call returns, its threads have ended. A call raises
botocore's errors or the error types of this module.

The module has more than 500 lines. It is not divided, because uploads and reads share error types, retry pauses and
thread pools.
"""

from __future__ import annotations

import base64
import hashlib
import random
import re
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Final, Protocol, cast

from awscrt import checksums  # pyright: ignore[reportMissingTypeStubs]
from botocore.auth import AUTH_TYPE_MAPS, S3SigV4Auth
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    HTTPClientError,
    IncompleteReadError,
    ResponseStreamingError,
)
from botocore.parsers import ResponseParserError

Piece = bytes | bytearray | memoryview

PART_BYTES: Final = 32 * 1024 * 1024
"""Minimum size of an upload's parts, in bytes. The last part may be smaller."""
MOST_PARTS: Final = 9_000
"""Maximum number of parts of an upload, with a margin below S3's limit.

Source: S3 allows 10,000 parts (Amazon S3 User Guide, multipart upload limits).
"""
CONNECTIONS: Final = 4
"""Connections per upload or read.

Four connections suit about 360 MB/s of network bandwidth.

Source: Amazon S3 User Guide, which recommends one parallel request per 85 to 95 MB/s of bandwidth.
"""
READ_ATTEMPTS: Final = 5
"""Maximum number of requests for one range. If the connection breaks during the last request, the read fails."""
_READ_BYTES: Final = 1024 * 1024
_GATHERED_BYTES: Final = 256 * 1024
"""Maximum bytes that `Part.read` joins from several small pieces, so that the HTTP client sends them in one write.

Joining copies the pieces. `Part.read` returns a piece above this limit alone, without a copy.
"""
_PAUSE_SECONDS: Final = 0.2
_MOST_PAUSE_SECONDS: Final = 20.0
_CHECKSUM: Final = "CRC64NVME"
_BREAKS: Final = (HTTPClientError, IncompleteReadError, ResponseStreamingError)
"""botocore's errors for a connection that breaks while the client reads a response body."""


class WrongLength(Exception):
    """The pieces of an upload have more or fewer bytes than the caller announced."""


class EndedEarly(Exception):
    """S3 ended a response body before the end of the requested range, without an error."""


class OtherRange(Exception):
    """S3 returned a different range than the client requested."""


class ObjectEnds(OtherRange):
    """S3 returned fewer bytes than the client requested, because the object ends inside the range."""


class SendCancelled(Exception):
    """The caller cancelled the upload of a part while the HTTP client was reading the part."""


def part_bytes_of(size: int, least: int = PART_BYTES) -> int:
    """Return the part size with which an object needs at most `MOST_PARTS` parts.

    Args:
        size: bytes of the object.
        least: minimum size of a part in bytes. S3 requires at least 5 MiB.

    Returns:
        Bytes of a part.
    """
    return max(least, -(-size // MOST_PARTS))


def full_jitter(attempt: int, draw: Callable[[], float] = random.random) -> float:
    """Return a random pause in seconds before the next attempt.

    The largest possible pause doubles with each failed attempt, up to a fixed limit. Source: AWS Architecture Blog,
    Exponential Backoff And Jitter ("full jitter").

    Args:
        attempt: number of failed attempts, at least 1.
        draw: returns a random number from 0 to 1.

    Returns:
        Seconds.
    """
    return draw() * min(_MOST_PAUSE_SECONDS, _PAUSE_SECONDS * 2.0**attempt)


PartDigest = tuple[int, int, bytes]
"""Size in bytes, CRC64NVME and SHA-256 of one part of an upload."""


class Part:
    """One part of an upload: pieces of memory that are sent as one request body without copying.

    botocore uses a `Part` like a file: it reads the part to the end, and reads it again for each retry.
    """

    def __init__(self, is_cancelled: Callable[[], bool] = lambda: False) -> None:
        """Create a part of an upload; the caller then appends its pieces.

        Args:
            is_cancelled: returns True when the part must no longer be read; then `read` raises `SendCancelled`.
        """
        self._is_cancelled = is_cancelled
        self._pieces: list[Piece] = []
        self._next = 0
        self._bytes = 0
        self._sha256 = b""
        self.crc = 0
        """CRC64NVME of those pieces of this upload part that were appended so far."""

    def append(self, piece: Piece) -> None:
        """Add a piece without copying. If its bytes change before the upload, S3 rejects the part by its checksum."""
        self._pieces.append(piece)
        self._bytes += len(piece)
        self.crc = crc64(piece, self.crc)

    @property
    def sha256(self) -> bytes:
        """SHA-256 of this part of the upload. The first access computes it."""
        if not self._sha256:
            digest = hashlib.sha256()
            for piece in self._pieces:
                digest.update(piece)
            self._sha256 = digest.digest()
        return self._sha256

    def __len__(self) -> int:
        return self._bytes

    def read(self, _: int = -1) -> Piece:
        """Return the next piece, or several small pieces joined to at most `_GATHERED_BYTES` bytes.

        The method ignores the requested length, because the HTTP client also sends a longer result in full.

        Returns:
            The bytes; empty at the end of the part.

        Raises:
            SendCancelled: the sender was cancelled.
        """
        if self._is_cancelled():
            raise SendCancelled
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
        """Return the number of bytes that botocore has read from this part of the upload."""
        return sum(len(piece) for piece in self._pieces[: self._next])

    def seek(self, offset: int) -> int:
        """Make the next `read` start at the beginning of the part; `offset` must be 0."""
        assert offset == 0, "parts are read from their beginning"
        self._next = 0
        return 0


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A part of an upload that S3 has stored."""

    number: int
    etag: str
    size: int
    """Bytes of the part."""
    crc: int
    """CRC64NVME of the part."""
    sha256: bytes


class PartSink(Protocol):
    """Receives the parts of one upload. `Multipart` implements it."""

    def put(self, number: int, part: Part) -> StoredPart:
        """Send one part of the upload to S3 (see `Multipart.put`)."""
        ...


class Helpers(Protocol):
    """Processes on other nodes that send some parts of a multipart upload in place of the uploading process.

    The thread that calls `put_parts` (the caller) calls every method except `sent`.
    """

    def claim(self, number: int) -> bool:
        """Return True if the caller must send a part of the multipart upload, or False if a helper process sends it.

        Args:
            number: number of the part. The caller asks for every part once, in ascending order from 1.

        Returns:
            False if a helper process sends the part.
        """
        ...

    def sent(self, number: int) -> None:
        """Record that the caller has sent a part of the upload, or failed to send it. Called in the sending thread."""

    def next_missing(self, expected: Mapping[int, PartDigest], has_failed: Callable[[], bool]) -> int | None:
        """Wait for the helpers, and return the number of a part that the caller must send because no helper stored it.

        Called after the last `claim`, until the result is None.

        Args:
            expected: digest of each part that the caller left to the helpers, computed from the caller's own bytes.
            has_failed: returns True when one of the caller's own parts has failed. The method checks it while it waits.

        Returns:
            Number of a part that no helper has stored with the expected digest. None when S3 has all parts of the
            helpers, or when the upload has failed.
        """

    def stored(self) -> Sequence[StoredPart]:
        """Return the parts of this upload that helpers (other processes) have stored with the expected digests.

        The upload calls this once, after it has stored its own last part.
        """
        ...


@dataclass(frozen=True, slots=True)
class Stored:
    """An object that an upload has stored in S3."""

    etag: str
    """ETag without quotes."""
    sha256: str
    """Hex SHA-256 of the concatenated SHA-256 digests of the parts."""
    part_bytes: int
    """Size of the parts that `sha256` covers; the last part may be smaller."""


def sign_bodies(client: Any) -> None:
    """Configure a client to sign a `Part` body with the SHA-256 that the part already computed.

    Call this function once per client, before the first upload. Idempotent. Without this call, botocore uses the signer
    of awscrt where awscrt is installed, and that signer copies the whole body through Python. S3 rejects a body that
    does not match its SHA-256.
    """
    client.meta.events.register_first("choose-signer.s3", _choose_signer, unique_id="everstep-bodies")


class _BodySigner(S3SigV4Auth):  # type: ignore[misc]  # botocore has no type annotations
    """botocore's S3 signer, except that it uses `Part.sha256` instead of hashing the body of a `Part`."""

    def payload(self, request: Any) -> str:
        if isinstance(request.body, Part):
            return request.body.sha256.hex()
        return str(super().payload(request))


_SIGNER: Final = "everstep-s3v4"
AUTH_TYPE_MAPS[_SIGNER] = _BodySigner


def _choose_signer(signature_version: Any, **_: object) -> str | None:
    return _SIGNER if signature_version in ("v4", "s3v4") else None


class Multipart:
    """One multipart upload. Several processes can send parts of it if they use the same upload id."""

    def __init__(self, client: Any, place: Mapping[str, str], upload_id: str) -> None:
        """Use a multipart upload that S3 already created.

        Args:
            client: boto3 client for S3, prepared by `sign_bodies`.
            place: `Bucket` and `Key` of the object.
            upload_id: S3's id of the upload.
        """
        self.client = client
        self.place = dict(place)
        self.upload_id = upload_id

    @classmethod
    def begin(cls, client: Any, place: Mapping[str, str]) -> Multipart:
        """Create a multipart upload in S3. The caller must complete or abort it."""
        answer = client.create_multipart_upload(**place, ChecksumAlgorithm=_CHECKSUM, ChecksumType="FULL_OBJECT")
        return cls(client, place, answer["UploadId"])

    def put(self, number: int, part: Part) -> StoredPart:
        """Send one part. S3 replaces an earlier part with the same number.

        Args:
            number: position of the part in the object, 1 to 10,000.
            part: content of the part; botocore may read it several times.

        Returns:
            The stored part, as `complete` requires it.
        """
        answer = self.client.upload_part(
            **self.place,
            UploadId=self.upload_id,
            PartNumber=number,
            Body=part,
            **{f"Checksum{_CHECKSUM}": _text(part.crc)},
        )
        return StoredPart(number, answer["ETag"], len(part), part.crc, part.sha256)

    def complete(self, parts: Sequence[StoredPart]) -> Stored:
        """Complete the upload.

        S3 answers `NoSuchUpload` if an earlier request completed the upload and its answer was lost, or if the upload
        was aborted, for example by the bucket's rule for unfinished uploads. If S3 then has an object of the expected
        size and with the expected checksum, the method counts the upload as complete. Otherwise it raises the error.

        Args:
            parts: all parts of the object in the order of their numbers, without a gap.

        Returns:
            ETag and digest of the stored object, and the size of its parts.
        """
        crc = 0
        for part in parts:
            crc = checksums.combine_crc64nvme(crc, part.crc, part.size)
        size = sum(part.size for part in parts)
        try:
            answer = self.client.complete_multipart_upload(
                **self.place,
                UploadId=self.upload_id,
                MultipartUpload={
                    "Parts": [
                        {"PartNumber": part.number, "ETag": part.etag, f"Checksum{_CHECKSUM}": _text(part.crc)}
                        for part in parts
                    ]
                },
                ChecksumType="FULL_OBJECT",
                **{f"Checksum{_CHECKSUM}": _text(crc)},
            )
        except ClientError as error:
            if error.response.get("Error", {}).get("Code") != "NoSuchUpload":
                raise
            try:
                answer = self.client.head_object(**self.place, ChecksumMode="ENABLED")
            except ClientError:
                raise error from None
            if int(answer["ContentLength"]) != size or stored_crc(answer) != crc:
                raise
        return Stored(_etag(answer), _tree(part.sha256 for part in parts), parts[0].size)

    def abort(self) -> None:
        """Abort the upload in S3, which removes its parts.

        The method ignores errors. After an error, S3 stores the parts until the control plane deletes the leftovers of
        ended generations, or until the bucket's rule for unfinished uploads removes them (docs/operating.md#server).
        """
        with suppress(BotoCoreError, ClientError, ResponseParserError):
            self.client.abort_multipart_upload(**self.place, UploadId=self.upload_id)


def put(
    client: Any,
    place: Mapping[str, str],
    pieces: Iterable[Piece],
    size: int,
    *,
    part_bytes: int,
    connections: int = CONNECTIONS,
    on_stored: Callable[[int], None] = lambda _: None,
) -> Stored:
    """Store an object in S3. The function does not copy the pieces of the object's content.

    Args:
        client: boto3 client for S3, prepared by `sign_bodies`.
        place: `Bucket` and `Key`.
        pieces: content of the object in order, iterated in the calling thread until the first error. A piece must not
            change until the call returns.
        size: announced total of the bytes of all pieces.
        part_bytes: size of a part. An object of at most this size is sent in one request.
        connections: maximum number of parts in flight. The calling thread assembles one more part meanwhile.
        on_stored: called with the size in bytes of each part that S3 has stored, in the thread that sent the part. Not
            called for an object that is sent in one request.

    Returns:
        ETag and digest of the stored object, and the size of its parts.

    Raises:
        WrongLength: the pieces do not have `size` bytes.
    """
    if size <= part_bytes:
        (part,) = list(parts_of(pieces, part_bytes, size)) or [Part()]
        answer = client.put_object(**place, Body=part, **{f"Checksum{_CHECKSUM}": _text(part.crc)})
        return Stored(_etag(answer), _tree([part.sha256]), part_bytes)
    with begun(client, place) as upload:
        return upload.complete(
            put_parts(
                upload,
                pieces,
                size,
                part_bytes=part_bytes,
                connections=connections,
                on_part=lambda part: on_stored(part.size),
            )
        )


@contextmanager
def begun(client: Any, place: Mapping[str, str]) -> Generator[Multipart]:
    """Begin a multipart upload, and abort it if the `with` block raises an error.

    Args:
        client: boto3 client for S3, prepared by `sign_bodies`.
        place: `Bucket` and `Key`.

    Yields:
        The upload, which the block completes.
    """
    upload = Multipart.begin(client, place)
    is_complete = False
    try:
        yield upload
        is_complete = True
    finally:
        if not is_complete:
            upload.abort()


def put_parts(
    upload: PartSink,
    pieces: Iterable[Piece],
    size: int,
    *,
    part_bytes: int,
    connections: int = CONNECTIONS,
    on_part: Callable[[StoredPart], None] = lambda _: None,
    helpers: Helpers | None = None,
    read: Callable[[int, int], Iterable[Piece]] = lambda _begin, _end: (),
) -> list[StoredPart]:
    """Send the parts of an upload concurrently while the next part is assembled.

    Args:
        upload: an upload that is neither completed nor aborted.
        pieces: content of the parts, iterated in the calling thread until the first error.
        size: announced total of the bytes of all pieces.
        part_bytes: size of a part; only the last part may be smaller.
        connections: maximum number of parts in flight. The calling thread assembles one more part meanwhile.
        on_part: called with each part that S3 has stored, in the thread that sent the part. Not called for the parts of
            helpers.
        helpers: other processes that send parts of the upload; None if the caller sends all parts.
        read: returns the pieces between two positions of the object again. Needed only with helpers: the caller sends
            each part that no helper has stored.

    Returns:
        The stored parts in the order of their numbers.

    Raises:
        WrongLength: the pieces do not have `size` bytes.
    """
    sent: dict[int, StoredPart] = {}
    expected: dict[int, PartDigest] = {}

    def send(number: int, part: Part) -> None:
        try:
            sent[number] = upload.put(number, part)
        finally:
            if helpers is not None:
                helpers.sent(number)
        on_part(sent[number])

    with side_by_side("s3-put", connections) as (begin, errors):

        def until_error() -> Iterator[Piece]:
            for piece in pieces:
                yield piece
                del piece
                if errors:
                    raise errors[0]

        in_flight: set[Future[None]] = set()
        numbers = count(1)  # Do not use `enumerate`: it would keep each part in memory until the next part exists.
        for part in parts_of(until_error(), part_bytes, size):
            number = next(numbers)
            if helpers is not None and not helpers.claim(number):
                expected[number] = len(part), part.crc, part.sha256
                del part
                continue
            in_flight.add(begin(partial(send, number, part)))
            del part
            while len(in_flight) > connections:
                in_flight = wait(in_flight, return_when=FIRST_COMPLETED).not_done
        while helpers is not None and not errors:
            missing = helpers.next_missing(expected, lambda: bool(errors))
            if missing is None:
                break
            first = (missing - 1) * part_bytes
            last = min(size, first + part_bytes)
            (part,) = parts_of(read(first, last), part_bytes, last - first)
            in_flight.add(begin(partial(send, missing, part)))
            del part
            while len(in_flight) > connections:
                in_flight = wait(in_flight, return_when=FIRST_COMPLETED).not_done
    if helpers is not None:
        sent |= {part.number: part for part in helpers.stored() if part.number not in sent}
    return [sent[number] for number in sorted(sent)]


def parts_of(pieces: Iterable[Piece], part_bytes: int, size: int) -> Iterator[Part]:
    """Split an object's content into upload parts of equal size; the last part may be smaller.

    Args:
        pieces: content of the object, in order; not copied.
        part_bytes: bytes of each part; only the last part may be smaller.
        size: announced total of the bytes of all pieces.

    Yields:
        The parts, in order; none is empty.

    Raises:
        WrongLength: the pieces do not have `size` bytes.
    """
    part, left = Part(), size
    for piece in pieces:
        left -= len(piece)
        if left < 0:
            raise WrongLength(f"the pieces exceed the announced size of {size} bytes")
        view = memoryview(piece)
        while len(view):
            room = part_bytes - len(part)
            part.append(view[:room])
            view = view[room:]
            if len(part) == part_bytes:
                yield part
                part = Part()
        view = memoryview(b"")
        # Delete the variable, because it would keep the memory of this piece alive while the source produces the next
        # piece.
        del piece
    if left:
        raise WrongLength(f"the pieces have {size - left} bytes, the announced size is {size} bytes")
    if part:
        yield part


class RangeReader:
    """Reads one range of an object into the caller's memory, from its beginning.

    After a broken connection, the reader pauses and then requests the rest of the range.
    """

    def __init__(
        self,
        client: Any,
        place: Mapping[str, str],
        begin: int,
        end: int,
        *,
        etag: str = "",
        object_bytes: int | None = None,
        answer: Mapping[str, Any] | None = None,
        pause: Callable[[float], object] | None = None,
    ) -> None:
        """Prepare the reader. The first read sends the request to S3.

        Args:
            client: boto3 client for S3.
            place: `Bucket` and `Key`.
            begin: first byte.
            end: end of the range, exclusive; within the object.
            etag: required ETag without quotes; empty for any ETag.
            object_bytes: length of the whole object; None if it is unknown.
            answer: answer of a `GetObject` request for this range, whose body is still unread. None: the first read
                sends a request.
            pause: function that waits for a number of seconds. None: `pause_seconds`.
        """
        self.position = begin
        self.end = end
        self._client = client
        self._place = dict(place)
        self._etag = etag
        self._object_bytes = object_bytes
        self._pause = pause or pause_seconds
        self._body: Any = None if answer is None else answer["Body"]
        self._attempts = 1

    def readinto(self, target: memoryview) -> int:
        """Read the next bytes of the range, at least one.

        Args:
            target: uint8, at most as long as the rest of the range.

        Returns:
            Number of bytes read.

        Raises:
            EndedEarly: the response body ended before the range did.
            OtherRange: S3 returned a different range.
        """
        while True:
            try:
                if self._body is None:
                    self._body = self._open()
                read: int = self._body.readinto(target[:_READ_BYTES])
            except _BREAKS:
                self.close()
                if self._attempts == READ_ATTEMPTS:
                    raise
                self._pause(full_jitter(self._attempts))
                self._attempts += 1
                continue
            if not read:
                raise EndedEarly(
                    f"S3 ended the response body at byte {self.position}, the range ends at byte {self.end}"
                )
            self.position += read
            return read

    def fill(self, target: memoryview) -> None:
        """Fill `target` with the next bytes of the range. Raises the errors of `readinto`."""
        begin = 0
        while begin < len(target):
            begin += self.readinto(target[begin:])

    def close(self) -> None:
        """Close the open response body. Idempotent. A later read requests the rest of the range."""
        if self._body is not None:
            self._body.close()
            self._body = None

    def _open(self) -> Any:
        options = {"IfMatch": f'"{self._etag}"'} if self._etag else {}
        answer = self._client.get_object(**self._place, **options, Range=f"bytes={self.position}-{self.end - 1}")
        end, size = extent(answer, self.position)
        if end != self.end or size != (self._object_bytes or size):
            answer["Body"].close()
            raise _other_range(answer, self.position, ObjectEnds if end == size < self.end else OtherRange)
        return answer["Body"]


def extent(answer: Mapping[str, Any], begin: int) -> tuple[int, int]:
    """Return where the range in an answer of S3 ends, and the size of the whole object.

    Args:
        answer: answer of a `GetObject`.
        begin: first byte of the requested range.

    Returns:
        (end of the range, exclusive; size of the whole object), in bytes.

    Raises:
        OtherRange: the answer contains a different range. The function has closed its body.
    """
    length, described = int(answer["ContentLength"]), answer.get("ContentRange")
    if described is None and not begin:  # Without ContentRange, S3's answer contains the whole object.
        return length, length
    found = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", described or "")
    first, last, size = map(int, found.groups()) if found else (0, 0, 0)
    if first != begin or last + 1 - first != length or last >= size:
        answer["Body"].close()
        raise _other_range(answer, begin)
    return last + 1, size


def crc64(data: Piece, crc: int = 0) -> int:
    """Return the CRC64NVME of bytes.

    Args:
        data: the bytes.
        crc: CRC64NVME of the bytes before `data`.

    Returns:
        CRC64NVME of those bytes and `data`.
    """
    return cast(int, cast(Any, checksums).crc64nvme(data, crc))


def stored_crc(answer: Mapping[str, Any]) -> int | None:
    """Return the checksum that S3 stores for a whole object.

    Args:
        answer: answer of a `HeadObject` with `ChecksumMode="ENABLED"`.

    Returns:
        CRC64NVME of the object; None if S3 stores no such checksum.
    """
    text = answer.get(f"Checksum{_CHECKSUM}")
    if text is None or answer.get("ChecksumType", "FULL_OBJECT") != "FULL_OBJECT":
        return None
    return int.from_bytes(base64.b64decode(text), "big")


def pause_seconds(seconds: float) -> None:
    """Block the calling thread of a transfer for a number of seconds."""
    threading.Event().wait(seconds)


@contextmanager
def side_by_side(
    name: str, thread_count: int
) -> Generator[tuple[Callable[[Callable[[], None]], Future[None]], Sequence[BaseException]]]:
    """Provide a thread pool for a `with` block. All its threads have ended when the block exits.

    After the first error in a thread or in the block, no further work starts. The context then raises this error.

    Args:
        name: prefix of the threads' names, for debuggers.
        thread_count: maximum number of pieces of work that run at the same time.

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
        # Each error references its stack frames, and these frames reference `errors`. Clear the list, because this
        # cycle would keep the parts in memory.
        errors.clear()


def _other_range(answer: Mapping[str, Any], begin: int, kind: type[OtherRange] = OtherRange) -> OtherRange:
    received = f"{answer['ContentLength']} bytes with Content-Range {answer.get('ContentRange')!r}"
    return kind(f"requested a range that begins at byte {begin}, S3 returned {received}")


def _etag(answer: Mapping[str, Any]) -> str:
    return str(answer["ETag"]).strip('"')


def _tree(digests: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _text(crc: int) -> str:
    return base64.b64encode(crc.to_bytes(8, "big")).decode()
