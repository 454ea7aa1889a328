"""S3 through boto3: plain client calls, explicit time-outs, no transfer manager.

boto3's CRT transfer client ignores a client's endpoint and goes to real AWS (boto3 issues #4839, #4689), and picks itself on some instance
types; so there is no transfer manager here at all. Every put and part carries a CRC32 that S3 verifies; what is read is verified
by its own digest (`checkpoints`, `source`), end to end, so checksums of answers are not asked for.

Invariant: in local mode no byte leaves for an address that is not loopback; this is checked on the endpoint that botocore has resolved,
before the first call.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import boto3
import botocore.session
from botocore.config import Config
from botocore.configprovider import ConstantProvider
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
    ReadTimeoutError,
    ResponseStreamingError,
)

from everstep.protocol.loopback import is_loopback
from everstep.protocol.plan import ObjectReference
from worker.errors import (
    CorruptCheckpoint,
    ForbiddenEndpoint,
    ObjectChanged,
    ObjectMissing,
    StorageError,
    StoreDenied,
    StoreRefused,
    StoreUnavailable,
)
from worker.storage.object_store import ObjectReader, Piece, StoredObject

if TYPE_CHECKING:
    from botocore.client import BaseClient
    from botocore.response import StreamingBody

PART_BYTES = 16 * 1024 * 1024
"""Objects beyond this are sent in parts of it."""
MAX_PARTS = 10_000
"""Source: Amazon S3 User Guide, multipart upload limits."""
_READ_BYTES = 4 * 1024 * 1024
_CONNECT_TIMEOUT_SECONDS = 5
_READ_TIMEOUT_SECONDS = 30
_MAX_ATTEMPTS = 4
_CHECKSUM = "CRC32"
_MISSING = frozenset({"NoSuchKey", "NoSuchBucket", "404", "NotFound"})
_CHANGED = frozenset({"PreconditionFailed", "412"})
_DENIED = frozenset({"AccessDenied", "403", "Forbidden", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken"})
_BUSY = frozenset({"SlowDown", "RequestTimeout", "RequestTimeTooSkewed", "Throttling", "ThrottlingException", "ServiceUnavailable", "InternalError"})


def s3_store(environment: Mapping[str, str] = os.environ) -> S3ObjectStore:
    """Connect to the store that the environment names: AWS's, or the one at AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL.

    Called once, when the agent starts. With EVERSTEP_LOCAL=1, or against any endpoint on loopback, the user's own AWS configuration files are
    not read.

    Args:
        environment: the agent's.

    Returns:
        The store; nothing has been sent yet.

    Raises:
        ForbiddenEndpoint: EVERSTEP_LOCAL=1, and the endpoint is not on loopback.
    """
    endpoint = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL", "")
    is_local = environment.get("EVERSTEP_LOCAL") == "1"
    if is_local and not is_loopback(endpoint):
        raise ForbiddenEndpoint(f"local mode speaks to loopback only, and the S3 endpoint is {endpoint or 'that of AWS'}")
    session = botocore.session.Session()
    if is_local or is_loopback(endpoint):
        for variable in ("config_file", "credentials_file"):
            session.set_config_variable(variable, os.devnull)
        session.get_component("config_store").set_config_provider("profile", ConstantProvider(None))  # AWS_PROFILE names one of the files
    client = boto3.Session(
        botocore_session=session,
        aws_access_key_id=environment.get("AWS_ACCESS_KEY_ID"),
        aws_secret_access_key=environment.get("AWS_SECRET_ACCESS_KEY"),
        aws_session_token=environment.get("AWS_SESSION_TOKEN"),
        region_name=environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION"),
    ).client(
        "s3",
        endpoint_url=endpoint or None,
        config=Config(
            connect_timeout=_CONNECT_TIMEOUT_SECONDS,
            read_timeout=_READ_TIMEOUT_SECONDS,
            retries={"mode": "standard", "total_max_attempts": _MAX_ATTEMPTS},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            proxies={} if is_loopback(endpoint) else None,
            s3={"addressing_style": "path" if endpoint else "auto"},
            user_agent_extra="everstep",
        ),
    )
    if is_local and not is_loopback(client.meta.endpoint_url):
        raise ForbiddenEndpoint(f"local mode speaks to loopback only, and botocore has resolved {client.meta.endpoint_url}")
    return S3ObjectStore(client)


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


@contextmanager
def _errors(reference: ObjectReference) -> Iterator[None]:
    """Turn what boto3 raises into what the caller can act on."""
    try:
        yield
    except ClientError as error:
        code = str(error.response.get("Error", {}).get("Code", ""))
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        raise _kind(code, status)(f"s3://{reference.bucket}/{reference.key}: {error}") from error
    except (NoCredentialsError, PartialCredentialsError) as error:
        raise StoreDenied(f"s3://{reference.bucket}/{reference.key}: {error}") from error
    except (ConnectionError, HTTPClientError, IncompleteReadError, ReadTimeoutError, ResponseStreamingError) as error:
        raise StoreUnavailable(f"s3://{reference.bucket}/{reference.key}: {error}") from error
    except BotoCoreError as error:
        raise StoreRefused(f"s3://{reference.bucket}/{reference.key}: {error}") from error


def _kind(code: str, status: int) -> type[StorageError]:
    if code in _MISSING:
        return ObjectMissing
    if code in _CHANGED:
        return ObjectChanged
    if code in _DENIED:
        return StoreDenied
    return StoreUnavailable if code in _BUSY or status >= 500 or status == 429 else StoreRefused


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
