"""S3 in memory, behind the methods of boto3's client, for tests of uploads that are killed at any request.

    worker's S3ObjectStore ────────▶ MemoryS3Client("i-0") ─┐
    control plane's S3ObjectStore ─▶ MemoryS3Client("…") ───┴▶ MemoryS3: objects and unfinished uploads

Like S3, it checks the CRC of each part, the ETags of a completed upload, and the conditions of a put.
`tests/contract/test_object_store.py` compares it with real servers.
"""

from __future__ import annotations

import base64
import hashlib
import io
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from types import SimpleNamespace
from typing import Any, cast

from awscrt import checksums
from botocore.exceptions import ClientError, EndpointConnectionError
from botocore.response import StreamingBody


@dataclass(frozen=True, slots=True)
class Request:
    """One request to S3."""

    client: str
    """Name of the client that sends the request."""
    operation: str
    """Name of the client's method, such as `upload_part`."""
    key: str
    part: int = 0
    """Number of the part; 0 for other requests."""


OnRequest = Callable[[Request, bool], None]
"""Function that S3 calls before it executes a request (with False) and afterwards (with True).

It may raise the error that the client receives.
"""


@dataclass(slots=True)
class Upload:
    """A multipart upload that is neither completed nor aborted."""

    key: str
    parts: dict[int, bytes] = field(default_factory=dict[int, bytes])


class MemoryS3:
    """One bucket."""

    def __init__(self, bucket: str, now: Callable[[], datetime]) -> None:
        """Create an empty bucket.

        Args:
            bucket: name of the bucket. Only puts check the name.
            now: returns the time for `LastModified`, in UTC.
        """
        self.bucket = bucket
        self.objects: dict[str, bytes] = {}
        self.uploads: dict[str, Upload] = {}
        """Unfinished multipart uploads, by upload id."""
        self.on_request: OnRequest = lambda _request, _is_after: None
        self.dead: dict[str, BaseException] = {}
        """The error that each request of a dead client raises, by the client's name.

        S3 does not execute the request.
        """
        self.is_down = False
        """True while the server does not run. Objects and unfinished uploads remain for its next start."""
        self.lock = threading.RLock()
        self._now = now
        self._written: dict[str, tuple[str, datetime]] = {}
        self._count = 0

    def write(self, key: str, data: bytes, etag: str = "") -> dict[str, Any]:
        """Store an object, and return S3's answer."""
        etag = etag or hashlib.md5(data, usedforsecurity=False).hexdigest()
        self.objects[key] = data
        self._written[key] = etag, self._now()
        return {"ETag": f'"{etag}"'}

    def describe(self, key: str, operation: str) -> dict[str, Any]:
        """Return the answer to HeadObject. Raise ClientError if the object does not exist."""
        if key not in self.objects:
            raise refusal("404" if operation == "HeadObject" else "NoSuchKey", 404, operation)
        etag, at = self._written[key]
        return {"ETag": f'"{etag}"', "ContentLength": len(self.objects[key]), "LastModified": at}

    def begin(self, key: str) -> str:
        """Begin a multipart upload, and return its id."""
        self._count += 1
        self.uploads[f"upload-{self._count}"] = Upload(key)
        return f"upload-{self._count}"


class MemoryS3Client:
    """The client of one process. Implements the methods of boto3's S3 client that the product uses."""

    def __init__(self, s3: MemoryS3, name: str) -> None:
        """Create the client.

        Args:
            s3: the bucket.
            name: name of the process, for `MemoryS3.on_request` and `MemoryS3.dead`.
        """
        self.name = name
        self.meta = SimpleNamespace(events=SimpleNamespace(register_first=lambda *_, **__: None))
        self._s3 = s3

    def client(self, _: str) -> MemoryS3Client:
        """Return this client. The control plane's store gets its client from this method of `Connection`."""
        return self

    def put_object(
        self,
        *,
        Bucket: str,
        Key: str,
        Body: Any,
        IfMatch: str = "",
        IfNoneMatch: str = "",
        ChecksumCRC64NVME: str = "",
        **_: Any,
    ) -> dict[str, Any]:
        def put() -> dict[str, Any]:
            if Bucket != self._s3.bucket:
                raise refusal("NoSuchBucket", 404, "PutObject")
            data = _content(Body, ChecksumCRC64NVME, "PutObject")
            found = self._s3.describe(Key, "PutObject")["ETag"] if Key in self._s3.objects else ""
            if (IfNoneMatch and found) or (IfMatch and found != IfMatch):
                raise refusal("PreconditionFailed", 412, "PutObject")
            return self._s3.write(Key, data)

        return self._execute(Request(self.name, "put_object", Key), put)

    def create_multipart_upload(self, *, Key: str, **_: Any) -> dict[str, Any]:
        return self._execute(
            Request(self.name, "create_multipart_upload", Key), lambda: {"UploadId": self._s3.begin(Key)}
        )

    def upload_part(
        self, *, Key: str, UploadId: str, PartNumber: int, Body: Any, ChecksumCRC64NVME: str = "", **_: Any
    ) -> dict[str, Any]:
        def put() -> dict[str, Any]:
            data = _content(Body, ChecksumCRC64NVME, "UploadPart")
            self._upload(UploadId, "UploadPart").parts[PartNumber] = data
            return {"ETag": f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'}

        return self._execute(Request(self.name, "upload_part", Key, PartNumber), put)

    def complete_multipart_upload(
        self, *, Key: str, UploadId: str, MultipartUpload: dict[str, Any], **_: Any
    ) -> dict[str, Any]:
        def complete() -> dict[str, Any]:
            stored = self._upload(UploadId, "CompleteMultipartUpload").parts
            parts = []
            for each in MultipartUpload["Parts"]:
                data = stored.get(each["PartNumber"], b"")
                if hashlib.md5(data, usedforsecurity=False).hexdigest() != each["ETag"].strip('"'):
                    raise refusal("InvalidPart", 400, "CompleteMultipartUpload")
                parts.append(data)
            del self._s3.uploads[UploadId]
            whole = hashlib.md5(b"".join(parts), usedforsecurity=False).hexdigest()
            return self._s3.write(Key, b"".join(parts), f"{whole}-{len(parts)}")

        return self._execute(Request(self.name, "complete_multipart_upload", Key), complete)

    def abort_multipart_upload(self, *, Key: str, UploadId: str, **_: Any) -> dict[str, Any]:
        def abort() -> dict[str, Any]:
            self._upload(UploadId, "AbortMultipartUpload")
            del self._s3.uploads[UploadId]
            return {}

        return self._execute(Request(self.name, "abort_multipart_upload", Key), abort)

    def head_object(self, *, Key: str, **_: Any) -> dict[str, Any]:
        def head() -> dict[str, Any]:
            answer = self._s3.describe(Key, "HeadObject")
            crc = cast(Any, checksums).crc64nvme(self._s3.objects[Key])
            return {**answer, "ChecksumCRC64NVME": base64.b64encode(crc.to_bytes(8, "big")).decode()}

        return self._execute(Request(self.name, "head_object", Key), head)

    def get_object(self, *, Key: str, Range: str = "", IfMatch: str = "", **_: Any) -> dict[str, Any]:
        def get() -> dict[str, Any]:
            answer = self._s3.describe(Key, "GetObject")
            if IfMatch not in ("", answer["ETag"]):
                raise refusal("PreconditionFailed", 412, "GetObject")
            data = self._s3.objects[Key]
            if Range:
                begin, last = map(int, Range.removeprefix("bytes=").split("-"))
                if begin >= len(data):
                    raise refusal("InvalidRange", 416, "GetObject")
                end = min(len(data), last + 1)
                answer["ContentRange"] = f"bytes {begin}-{end - 1}/{len(data)}"
                data = data[begin:end]
            body = StreamingBody(cast(Any, io.BytesIO(data)), len(data))
            return answer | {"ContentLength": len(data), "Body": body}

        return self._execute(Request(self.name, "get_object", Key), get)

    def delete_object(self, *, Key: str, **_: Any) -> dict[str, Any]:
        return self.delete_objects(Delete={"Objects": [{"Key": Key}]})

    def delete_objects(self, *, Delete: dict[str, Any], **_: Any) -> dict[str, Any]:
        keys = [each["Key"] for each in Delete["Objects"]]

        def delete() -> dict[str, Any]:
            for key in keys:
                self._s3.objects.pop(key, None)
            return {}

        return self._execute(Request(self.name, "delete_objects", keys[0]), delete)

    def get_paginator(self, name: str) -> SimpleNamespace:
        def paginate(*, Prefix: str, StartAfter: str = "", **_: Any) -> Iterator[dict[str, Any]]:
            yield self._execute(Request(self.name, name, Prefix), lambda: self._page(name, Prefix, StartAfter))

        return SimpleNamespace(paginate=paginate)

    def _page(self, name: str, prefix: str, after: str) -> dict[str, Any]:
        if name == "list_multipart_uploads":
            found = [(each.key, upload_id) for upload_id, each in self._s3.uploads.items()]
            return {"Uploads": [{"Key": key, "UploadId": each} for key, each in found if key.startswith(prefix)]}
        assert name == "list_objects_v2", name
        keys = sorted(key for key in self._s3.objects if key.startswith(prefix) and key > after)
        described = {key: self._s3.describe(key, "ListObjectsV2") for key in keys}
        return {
            "Contents": [{"Key": key, "Size": each.pop("ContentLength"), **each} for key, each in described.items()]
        }

    def _upload(self, upload_id: str, operation: str) -> Upload:
        if upload_id not in self._s3.uploads:
            raise refusal("NoSuchUpload", 404, operation)
        return self._s3.uploads[upload_id]

    def _execute(self, request: Request, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        self._require_life()
        self._s3.on_request(request, False)
        self._require_life()
        with self._s3.lock:
            answer = work()
        self._s3.on_request(request, True)
        self._require_life()
        return answer

    def _require_life(self) -> None:
        if self.name in self._s3.dead:
            raise self._s3.dead[self.name]
        if self._s3.is_down:
            raise EndpointConnectionError(endpoint_url="http://s3")


def refusal(code: str, status: int, operation: str) -> ClientError:
    """Return the error that boto3 raises for an error document of S3."""
    return ClientError(
        {"Error": {"Code": code, "Message": "no"}, "ResponseMetadata": cast(Any, {"HTTPStatusCode": status})},
        operation,
    )


def _content(body: Any, crc: str, operation: str) -> bytes:
    data = bytes(body) if isinstance(body, bytes) else b"".join(bytes(piece) for piece in iter(body.read, b""))
    if crc and base64.b64decode(crc) != cast(Any, checksums).crc64nvme(data).to_bytes(8, "big"):
        raise refusal("BadDigest", 400, operation)
    return data
