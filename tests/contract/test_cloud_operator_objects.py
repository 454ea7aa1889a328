"""`control_plane.cloud.objects.ServiceStore`: the same tests run in memory and with boto3 on the local S3."""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Iterator
from urllib.parse import parse_qs, urlsplit
from uuid import uuid4

import pytest

from control_plane.cloud.connection import CloudMode, CloudSettings, Connection
from control_plane.cloud.errors import NotFound, ObjectChanged, ObjectTooLarge
from control_plane.cloud.objects import STREAM_CHUNK_BYTES, ServiceStore
from control_plane.cloud.s3 import S3ServiceStore
from everstep import uploads
from everstep.protocol.plan import ObjectReference
from tests.fakes.cloud import MemoryObjectStore
from tests.unit.local_cloud.served import ServedAws, served_aws

BUCKET = "store"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedAws]:
    with served_aws(tmp_path_factory.mktemp("aws")) as aws:
        aws.client("s3").create_bucket(Bucket=BUCKET)
        yield aws


@pytest.fixture(params=["memory", "s3"])
def store(request: pytest.FixtureRequest) -> ServiceStore:
    if request.param == "memory":
        return MemoryObjectStore(BUCKET)
    served: ServedAws = request.getfixturevalue("served")
    return S3ServiceStore(served.connection())


@pytest.fixture
def prefix() -> ObjectReference:
    return ObjectReference(bucket=BUCKET, key=f"{uuid4().hex}/")


def below(prefix: ObjectReference, name: str) -> ObjectReference:
    return ObjectReference(bucket=prefix.bucket, key=prefix.key + name)


def test_what_is_put_is_what_is_got(store: ServiceStore, prefix: ObjectReference) -> None:
    reference, body = below(prefix, "a=1/b c+d.json"), b"content"
    info = store.put(reference, body)
    assert (info.reference, info.size_bytes) == (reference, 7)
    assert info.etag == hashlib.md5(body, usedforsecurity=False).hexdigest()
    assert info.modified_at.tzinfo is not None
    assert store.get(reference) == body
    assert store.head(reference) == info
    store.put(reference, b"other")
    assert store.get(reference) == b"other"
    assert store.get(reference, limit_bytes=5) == b"other"
    with pytest.raises(ObjectTooLarge, match="more than 4 bytes"):
        store.get(reference, limit_bytes=4)


def test_of_two_writers_only_the_first_or_the_one_that_read_the_newest_object_writes(
    store: ServiceStore, prefix: ObjectReference
) -> None:
    reference = below(prefix, "manifest.json")
    first = store.put_if_unchanged(reference, b"first")
    with pytest.raises(ObjectChanged):
        store.put_if_unchanged(reference, b"late")
    with pytest.raises(ObjectChanged):
        store.put_if_unchanged(reference, b"late", etag="0" * 32)
    assert store.get(reference) == b"first"
    second = store.put_if_unchanged(reference, b"second", etag=first.etag)
    with pytest.raises(ObjectChanged):
        store.put_if_unchanged(reference, b"late", etag=first.etag)
    assert (store.get(reference), store.head(reference)) == (b"second", second)


def test_the_beginning_of_an_object_is_streamed(store: ServiceStore, prefix: ObjectReference) -> None:
    reference = below(prefix, "log")
    body = bytes(range(256)) * (STREAM_CHUNK_BYTES // 256) * 2 + b"end"
    store.put(reference, body)
    chunks = list(store.stream(reference))
    assert b"".join(chunks) == body
    assert max(map(len, chunks)) <= STREAM_CHUNK_BYTES
    assert b"".join(store.stream(reference, end=20)) == body[:20]
    assert b"".join(store.stream(reference, end=10**9)) == body
    assert b"".join(store.stream(reference, begin=3, end=20)) == body[3:20]
    assert list(store.stream(reference, begin=len(body))) == []
    assert list(store.stream(reference, end=0)) == []


def test_a_stream_may_be_left_early(store: ServiceStore, prefix: ObjectReference) -> None:
    reference = below(prefix, "log")
    store.put(reference, bytes(3 * STREAM_CHUNK_BYTES))
    stream = iter(store.stream(reference))
    assert len(next(stream)) > 0
    stream.close()  # type: ignore[attr-defined]


def test_a_large_file_is_put_and_stays_its_openers(store: ServiceStore, prefix: ObjectReference) -> None:
    reference = below(prefix, "source.tar.gz")
    body = hashlib.sha256(b"seed").digest() * (18 * 1024 * 1024 // 32)
    file = io.BytesIO(b"skipped" + body)
    file.seek(7)
    assert store.put_file(reference, file).size_bytes == len(body)
    assert not file.closed
    assert hashlib.sha256(b"".join(store.stream(reference))).digest() == hashlib.sha256(body).digest()


def test_listing_is_by_prefix_in_key_order(store: ServiceStore, prefix: ObjectReference) -> None:
    for name in ("b", "a/2", "a/1", "c"):
        store.put(below(prefix, name), name.encode())
    assert [info.reference.key.removeprefix(prefix.key) for info in store.list(prefix)] == ["a/1", "a/2", "b", "c"]
    assert [info.size_bytes for info in store.list(below(prefix, "a/"))] == [3, 3]
    assert list(store.list(below(prefix, "none"))) == []


def test_what_is_missing_is_not_found(store: ServiceStore, prefix: ObjectReference) -> None:
    reference = below(prefix, "none")
    for call in (lambda: store.get(reference), lambda: store.head(reference), lambda: list(store.stream(reference))):
        with pytest.raises(NotFound):
            call()
    nowhere = ObjectReference(bucket="no-such-bucket", key="k")
    for call in (lambda: store.put(nowhere, b""), lambda: store.get(nowhere), lambda: list(store.list(nowhere))):
        with pytest.raises(NotFound):
            call()


def test_what_is_deleted_is_gone_and_may_be_deleted_again(store: ServiceStore, prefix: ObjectReference) -> None:
    for name in ("a", "b", "c d+e"):
        store.put(below(prefix, name), b"x")
    store.delete(BUCKET, [below(prefix, "a").key, below(prefix, "c d+e").key, below(prefix, "never").key])
    assert [info.reference for info in store.list(prefix)] == [below(prefix, "b")]
    store.delete(BUCKET, [below(prefix, "a").key])
    store.delete(BUCKET, [])
    with pytest.raises(NotFound):
        store.delete("no-such-bucket", ["a"])


def test_others_may_put_what_was_signed_for(store: ServiceStore, prefix: ObjectReference) -> None:
    reference, body = below(prefix, "a+b.tar.gz"), b"content"
    digest = hashlib.sha256(body)
    signed = store.sign_upload(reference, sha256=digest.hexdigest(), size_bytes=len(body), seconds=900)
    if signed is None:
        assert isinstance(store, MemoryObjectStore), "nobody can reach what is in memory"
        return
    said = parse_qs(urlsplit(signed.url).query)
    assert said["X-Amz-SignedHeaders"] == ["content-length;host;x-amz-checksum-sha256"], (
        "neither other bytes nor more of them"
    )
    assert (said["X-Amz-Algorithm"], said["X-Amz-Expires"]) == (["AWS4-HMAC-SHA256"], ["900"])
    assert signed.headers == {"x-amz-checksum-sha256": base64.b64encode(digest.digest()).decode()}
    assert signed.url not in repr(signed)
    with pytest.raises(NotFound):
        store.head(reference)
    assert uploads.put(signed.url, signed.headers, io.BytesIO(body)) is uploads.UploadOutcome.TAKEN
    assert store.get(reference) == body


@pytest.mark.parametrize("region", ["us-east-1", "eu-central-1"])
def test_addresses_for_others_are_the_regions_own(monkeypatch: pytest.MonkeyPatch, region: str) -> None:
    """A signed address for an upload names the S3 host of the bucket's region.

    S3 redirects some requests from its global host, and a redirect invalidates the signature.
    """
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    store = S3ServiceStore(Connection(CloudSettings(mode=CloudMode.AWS, region=region)))
    signed = store.sign_upload(ObjectReference(bucket="bucket", key="k"), sha256="0" * 64, size_bytes=1, seconds=900)
    assert signed is not None
    assert signed.url.startswith(
        {"us-east-1": "https://bucket.s3.amazonaws.com/k?"}.get(region, f"https://bucket.s3.{region}.amazonaws.com/k?")
    )
