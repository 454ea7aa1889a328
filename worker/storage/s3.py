"""S3 through boto3: plain client calls, explicit time-outs, no transfer manager.

boto3's CRT transfer client ignores a client's endpoint and goes to real AWS (boto3 issues #4839, #4689), and picks itself on some instance
types; so there is no transfer manager here at all. Every put and part carries a CRC32 that S3 verifies; what is read is verified
by its own digest (`checkpoints`, `source`), end to end, so checksums of answers are not asked for.

Invariant: a put has happened whole or not at all; where the client leads is `aws`'s matter.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from botocore.exceptions import BotoCoreError, ClientError

from everstep.protocol.plan import ObjectReference
from worker.errors import CorruptCheckpoint, ObjectMissing, StoreRefused
from worker.storage.aws import KeysOf, aws_client, aws_errors
from worker.storage.object_store import ObjectReader, Piece, StoredObject

if TYPE_CHECKING:
    from botocore.client import BaseClient
    from botocore.response import StreamingBody

PART_BYTES = 16 * 1024 * 1024
"""Objects beyond this are sent in parts of it."""
MAX_PARTS = 10_000
"""Source: Amazon S3 User Guide, multipart upload limits."""
_READ_BYTES = 4 * 1024 * 1024
_CHECKSUM = "CRC32"


def s3_store(environment: Mapping[str, str] = os.environ, keys: KeysOf | None = None) -> S3ObjectStore:
    """Connect to the store that the environment names: AWS's, or the one at AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL.

    Args:
        environment: the agent's.
        keys: gives them, and again before they end; None: the node's own.

    Returns:
        The store; nothing has been sent yet.

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
            s3={"addressing_style": "path" if has_endpoint else "auto"},
        )
    )


class S3ObjectStore:
    """See `ObjectStore`. One client, shared by threads."""

    def __init__(self, client: BaseClient, *, part_bytes: int = PART_BYTES) -> None:
        """Take a client.

        Args:
            client: boto3's for S3.
            part_bytes: of a multipart upload; S3 takes none below 5 MiB but the last.
        """
        # botocore makes its clients' methods at run time: no type checker knows them.
        self._client = cast(Any, client)
        self._part_bytes = part_bytes

    def put_bytes(self, reference: ObjectReference, data: bytes) -> StoredObject:
        """See `ObjectStore.put_bytes`."""
        with _errors(reference):
            answer = self._client.put_object(**_place(reference), Body=data, ChecksumAlgorithm=_CHECKSUM)
        return StoredObject(reference, len(data), _etag(answer))

    def put_file(self, reference: ObjectReference, path: Path, size: int | None = None) -> StoredObject:
        """See `ObjectStore.put_file`."""
        size = path.stat().st_size if size is None else size
        with path.open("rb") as file:
            return self.put_stream(reference, _file_pieces(file, size), size)

    def put_stream(self, reference: ObjectReference, pieces: Iterable[Piece], size: int) -> StoredObject:
        """See `ObjectStore.put_stream`."""
        parts = _parts(pieces, max(self._part_bytes, -(-size // MAX_PARTS)), size)
        if size <= self._part_bytes:
            return self.put_bytes(reference, bytes(b"".join(parts)))
        place = _place(reference)
        with _errors(reference):
            upload = {**place, "UploadId": self._client.create_multipart_upload(**place, ChecksumAlgorithm=_CHECKSUM)["UploadId"]}
        is_complete = False
        try:
            sent = [self._put_part(reference, upload, number, part) for number, part in enumerate(parts, start=1)]
            with _errors(reference):
                answer = self._client.complete_multipart_upload(**upload, MultipartUpload={"Parts": sent})
            is_complete = True
        finally:
            if not is_complete:
                # What cannot be aborted now is removed by the bucket's own rule for unfinished uploads.
                with suppress(BotoCoreError, ClientError):
                    self._client.abort_multipart_upload(**upload)
        return StoredObject(reference, size, _etag(answer))

    def _put_part(self, reference: ObjectReference, upload: dict[str, str], number: int, part: bytearray) -> dict[str, object]:
        with _errors(reference):
            answer = self._client.upload_part(**upload, PartNumber=number, Body=bytes(part), ChecksumAlgorithm=_CHECKSUM)
        checksum = {name: value for name, value in answer.items() if name == f"Checksum{_CHECKSUM}"}
        return {"PartNumber": number, "ETag": answer["ETag"], **checksum}

    def get_bytes(self, reference: ObjectReference) -> bytes:
        """See `ObjectStore.get_bytes`."""
        with self.open(reference) as reader:
            data = bytearray(reader.bytes)
            reader.read_into(memoryview(data))
        return bytes(data)

    @contextmanager
    def open(self, reference: ObjectReference, *, etag: str = "") -> Iterator[ObjectReader]:
        """See `ObjectStore.open`."""
        condition = {"IfMatch": f'"{etag}"'} if etag else {}
        with _errors(reference):
            answer = self._client.get_object(**_place(reference), **condition)
        body: StreamingBody = answer["Body"]
        try:
            yield _S3Reader(reference, body, int(answer["ContentLength"]), _md5(answer))
        finally:
            body.close()

    def head(self, reference: ObjectReference) -> StoredObject | None:
        """See `ObjectStore.head`."""
        try:
            with _errors(reference):
                answer = self._client.head_object(**_place(reference))
        except ObjectMissing:
            return None
        return StoredObject(reference, int(answer["ContentLength"]), _etag(answer))

    def list(self, prefix: ObjectReference) -> Iterator[StoredObject]:
        """See `ObjectStore.list`."""
        pages = iter(self._client.get_paginator("list_objects_v2").paginate(Bucket=prefix.bucket, Prefix=prefix.key))
        while True:
            with _errors(prefix):
                page = next(pages, None)
            if page is None:
                return
            for entry in page.get("Contents", ()):
                yield StoredObject(ObjectReference(bucket=prefix.bucket, key=entry["Key"]), int(entry["Size"]), _etag(entry))


class _S3Reader:
    def __init__(self, reference: ObjectReference, body: StreamingBody, size: int, md5: str) -> None:
        self.md5 = md5
        self._reference = reference
        self._body = body
        self.bytes = size

    def read_into(self, target: memoryview) -> None:
        position = 0
        while position < len(target):
            with _errors(self._reference):
                data = self._body.read(min(_READ_BYTES, len(target) - position))
            if not data:
                raise CorruptCheckpoint(f"s3://{self._reference.bucket}/{self._reference.key} ends {len(target) - position} bytes early")
            target[position : position + len(data)] = data
            position += len(data)


def _parts(pieces: Iterable[Piece], part_bytes: int, size: int) -> Iterator[bytearray]:
    """Cut a stream into parts of equal size; the last takes the rest."""
    part, left = bytearray(), size
    for piece in pieces:
        left -= len(piece)
        if left < 0:
            raise StoreRefused(f"more bytes were given than the {size} of the object")
        view = memoryview(piece)
        while len(view):
            room = part_bytes - len(part)
            part += view[:room]
            view = view[room:]
            if len(part) == part_bytes:
                yield part
                part = bytearray()
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
    return aws_errors(f"s3://{reference.bucket}/{reference.key}")


def _place(reference: ObjectReference) -> dict[str, str]:
    return {"Bucket": reference.bucket, "Key": reference.key}


def _etag(answer: Mapping[str, Any]) -> str:
    return str(answer["ETag"]).strip('"')


def _md5(answer: Mapping[str, Any]) -> str:
    """Return an object's MD5 where its ETag is that.

    Source: Amazon S3 API Reference, Object, ETag: of objects put in one piece, in plain text or with SSE-S3.
    """
    etag = _etag(answer)
    is_plain = answer.get("ServerSideEncryption", "AES256") == "AES256" and "SSECustomerAlgorithm" not in answer
    return etag if is_plain and re.fullmatch("[0-9a-f]{32}", etag) else ""
