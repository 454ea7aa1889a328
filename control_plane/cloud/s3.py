"""Implements `ServiceStore` with boto3, for S3 and for the local cloud's S3."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any, BinaryIO, Final

from boto3.s3.transfer import TransferConfig
from botocore.exceptions import ClientError

from control_plane.cloud.connection import Connection, translated
from control_plane.cloud.errors import GarbledAnswer, NotFound, ObjectTooLarge
from control_plane.cloud.objects import SMALL_BYTES, STREAM_CHUNK_BYTES, ObjectInfo, SignedUpload
from everstep.protocol.plan import ObjectReference

_TRANSFER: Final = TransferConfig(
    multipart_threshold=16 * 1024 * 1024,
    multipart_chunksize=16 * 1024 * 1024,
    max_concurrency=4,
    # The CRT client ignores endpoint_url and connects to real AWS (boto3 issue 4839).
    preferred_transfer_client="classic",
)


class S3ServiceStore:
    """Implements `ServiceStore` with boto3. Thread-safe."""

    def __init__(self, connection: Connection) -> None:
        self._s3 = connection.client("s3")

    def put(self, reference: ObjectReference, body: bytes) -> ObjectInfo:
        with translated():
            self._s3.put_object(Bucket=reference.bucket, Key=reference.key, Body=body)
        return self.head(reference)

    def put_if_unchanged(self, reference: ObjectReference, body: bytes, *, etag: str = "") -> ObjectInfo:
        condition = {"IfMatch": f'"{etag}"'} if etag else {"IfNoneMatch": "*"}
        with translated():
            self._s3.put_object(Bucket=reference.bucket, Key=reference.key, Body=body, **condition)
        return self.head(reference)

    def put_file(self, reference: ObjectReference, file: BinaryIO) -> ObjectInfo:
        with translated():
            self._s3.upload_fileobj(_Unclosed(file), reference.bucket, reference.key, Config=_TRANSFER)
        return self.head(reference)

    def get(self, reference: ObjectReference, *, limit_bytes: int = SMALL_BYTES) -> bytes:
        with translated():
            stream = self._s3.get_object(Bucket=reference.bucket, Key=reference.key)["Body"]
            with closing(stream):
                body = bytearray()
                # The last, empty read makes botocore compare the length with the one that S3 announced.
                while len(body) <= limit_bytes and (piece := stream.read(limit_bytes + 1 - len(body))):
                    body += piece
        if len(body) > limit_bytes:
            raise ObjectTooLarge(f"s3://{reference.bucket}/{reference.key} has more than {limit_bytes:,} bytes")
        return bytes(body)

    def stream(self, reference: ObjectReference, *, begin: int = 0, end: int | None = None) -> Iterator[bytes]:
        size = self.head(reference).size_bytes
        stop = size if end is None else min(end, size)
        if stop <= begin:
            return  # S3 rejects a request for an empty range with status 416.
        span = f"bytes={begin}-{stop - 1}"
        with translated():
            body = self._s3.get_object(Bucket=reference.bucket, Key=reference.key, Range=span)["Body"]
            try:
                yield from body.iter_chunks(STREAM_CHUNK_BYTES)
            finally:
                body.close()

    def head(self, reference: ObjectReference) -> ObjectInfo:
        try:
            with translated():
                answer = self._s3.head_object(Bucket=reference.bucket, Key=reference.key)
        except NotFound as error:
            # S3's response to HEAD has no body, so it does not state whether the bucket or the object is missing.
            raise NotFound(f"s3://{reference.bucket}/{reference.key} does not exist", code=error.code) from error
        return _info(reference, answer, "ContentLength")

    def list(self, prefix: ObjectReference, *, after: str = "") -> Iterator[ObjectInfo]:
        with translated():
            for page in self._s3.get_paginator("list_objects_v2").paginate(
                Bucket=prefix.bucket, Prefix=prefix.key, StartAfter=after
            ):
                for entry in page.get("Contents", ()):
                    yield _info(ObjectReference(bucket=prefix.bucket, key=entry["Key"]), entry, "Size")

    def sign_upload(
        self, reference: ObjectReference, *, sha256: str, size_bytes: int, seconds: int
    ) -> SignedUpload | None:
        checksum = base64.b64encode(bytes.fromhex(sha256)).decode()
        asked = {
            "Bucket": reference.bucket,
            "Key": reference.key,
            "ContentLength": size_bytes,
            "ChecksumSHA256": checksum,
        }
        with translated():  # To sign, botocore may have to fetch credentials, and this request can fail.
            url: str = self._s3.generate_presigned_url("put_object", Params=asked, ExpiresIn=seconds)
        return SignedUpload(url, {"x-amz-checksum-sha256": checksum})

    def delete(self, bucket: str, keys: Sequence[str]) -> None:
        if not keys:
            return
        with translated():
            answer = self._s3.delete_objects(
                Bucket=bucket, Delete={"Objects": [{"Key": key} for key in keys], "Quiet": True}
            )
            refused = answer.get("Errors", ())
            if refused:  # The call succeeds even if S3 refuses to delete some of the objects.
                error = {
                    "Code": refused[0].get("Code", ""),
                    "Message": f"{len(refused)} objects, {refused[0].get('Key')}: {refused[0].get('Message')}",
                }
                raise ClientError({"Error": error}, "DeleteObjects")


class _Unclosed:
    """A file whose `close` does nothing, because s3transfer closes files that the caller of `put_file` still uses."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def read(self, size: int = -1) -> bytes:
        return self._file.read(size)

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        """Do nothing."""


def _info(reference: ObjectReference, answer: dict[str, Any], size: str) -> ObjectInfo:
    try:
        return ObjectInfo(
            reference=reference,
            size_bytes=answer[size],
            etag=answer["ETag"].strip('"'),
            modified_at=answer["LastModified"],
        )
    except KeyError as error:
        raise GarbledAnswer(f"S3's answer about s3://{reference.bucket}/{reference.key} lacks {error}") from error
