"""Faults of S3 during uploads to SeaweedFS. Each fault has a typed error with advice, and leaves no incomplete object.

`test_storage_behind_faults` adds faults that SeaweedFS itself cannot produce.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from everstep.protocol.plan import ObjectReference
from tests.seaweedfs import SeaweedFs
from worker.errors import ObjectMissing, StorageError, StoreDenied, StoreUnavailable
from worker.storage.s3 import S3ObjectStore, s3_store

MIB = 1024 * 1024
PART_BYTES = 5 * MIB
BUCKET = "bucket"
DATA = os.urandom(3 * PART_BYTES + 1)


def reference(key: str = "key", bucket: str = BUCKET) -> ObjectReference:
    return ObjectReference(bucket=bucket, key=key)


def store_of(server: SeaweedFs, **environment: str) -> S3ObjectStore:
    return S3ObjectStore(s3_store({**server.environment, **environment}).client, part_bytes=PART_BYTES)


@pytest.fixture(scope="module")
def server() -> Iterator[SeaweedFs]:
    with SeaweedFs() as made:
        client = made.client()
        client.create_bucket(Bucket=BUCKET)
        client.close()
        yield made


@pytest.fixture
def store(server: SeaweedFs) -> Iterator[S3ObjectStore]:
    made = store_of(server)
    yield made
    assert not made.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads")
    made.client.close()


@pytest.mark.parametrize(
    ("environment", "advice"),
    [
        ({"AWS_ACCESS_KEY_ID": "reader"}, "Allow this call to the node's role"),
        ({"AWS_SECRET_ACCESS_KEY": "other"}, "Check the credentials of the node"),
        ({"AWS_ACCESS_KEY_ID": "nobody"}, "Check the credentials of the node"),
    ],
)
@pytest.mark.parametrize("data", [b"small", DATA])
def test_a_denied_upload_is_not_retried_and_says_what_to_allow(
    server: SeaweedFs, environment: dict[str, str], advice: str, data: bytes
) -> None:
    denied = store_of(server, **environment)
    with pytest.raises(StoreDenied, match=advice) as raised:
        denied.put_stream(reference("denied"), [data], len(data))
    assert not raised.value.retryable
    denied.client.close()


def test_a_missing_bucket_is_named(store: S3ObjectStore) -> None:
    for data in (b"small", DATA):
        with pytest.raises(ObjectMissing, match=r"s3://nowhere/key: .*Create the bucket"):
            store.put_stream(reference(bucket="nowhere"), [data], len(data))


@pytest.mark.parametrize("kind", ["versioned", "encrypted"])
def test_versioned_and_encrypted_buckets_store_and_return_the_newest_object(store: S3ObjectStore, kind: str) -> None:
    store.client.create_bucket(Bucket=kind)
    if kind == "versioned":
        store.client.put_bucket_versioning(Bucket=kind, VersioningConfiguration={"Status": "Enabled"})
    else:
        rule = {"ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": "AES256"}}
        store.client.put_bucket_encryption(Bucket=kind, ServerSideEncryptionConfiguration={"Rules": [rule]})
    for data in (DATA, DATA[::-1]):
        stored = store.put_stream(reference(bucket=kind), [data], len(data))
        with store.open(reference(bucket=kind), etag=stored.etag) as reader:
            found = bytearray(reader.bytes)
            reader.read_into(memoryview(found))
        assert found == data


def test_a_server_killed_inside_an_upload_leaves_no_object_and_a_later_upload_succeeds(server: SeaweedFs) -> None:
    impatient = S3ObjectStore(server.client(), part_bytes=PART_BYTES)

    def pieces() -> Iterator[bytes]:
        yield DATA[: 2 * PART_BYTES]
        server.kill()
        yield DATA[2 * PART_BYTES :]

    try:
        with pytest.raises(StoreUnavailable) as raised:
            impatient.put_stream(reference("killed"), pieces(), len(DATA))
        with pytest.raises(StoreUnavailable):
            impatient.put_bytes(reference("manifest.json"), b"{}")
    finally:
        server.start()
    assert raised.value.retryable
    assert impatient.head(reference("killed")) is None
    assert impatient.head(reference("manifest.json")) is None
    impatient.abort_uploads(reference(""), lambda _: True)
    impatient.put_stream(reference("killed"), [DATA], len(DATA))
    assert impatient.get_bytes(reference("killed")) == DATA
    impatient.client.close()


def test_of_two_writers_of_one_key_one_whole_object_stays(server: SeaweedFs, store: S3ObjectStore) -> None:
    other, contents = store_of(server), (DATA, DATA[::-1])
    threads = [
        threading.Thread(target=writer.put_stream, args=(reference("both"), [data], len(data)))
        for writer, data in zip((store, other), contents, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.get_bytes(reference("both")) in contents
    other.client.close()


def test_a_part_that_changes_while_it_is_sent_is_refused(store: S3ObjectStore) -> None:
    """A part changes after its checksum was computed and while it is sent. S3 refuses the part.

    The checksum was computed together with the digests of the slot.
    """
    data = bytearray(DATA)

    def pieces() -> Iterator[memoryview]:
        yield memoryview(data)[:100]
        data[0] ^= 1
        yield memoryview(data)[100:]

    with pytest.raises(StorageError):
        store.put_stream(reference("changed"), pieces(), len(data))
    assert store.head(reference("changed")) is None
