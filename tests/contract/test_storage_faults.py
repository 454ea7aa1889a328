"""Faults of S3 during uploads. Each fault has a typed error with advice, and leaves no incomplete object.

The servers are moto and SeaweedFS. Only SeaweedFS refuses credentials, verifies checksums and can be killed.
`test_storage_behind_faults` adds faults that neither server can produce.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest

from control_plane.cloud.connection import CloudMode, CloudSettings, Connection
from control_plane.cloud.errors import CloudUnavailable, ObjectChanged
from control_plane.cloud.s3 import S3ServiceStore as ControlStore
from everstep.host.local_keys import LocalKeys
from everstep.protocol.plan import ObjectReference
from tests.contract.test_object_store import environment
from tests.moto_server import moto_server
from tests.seaweedfs import SeaweedFs
from worker.errors import ObjectMissing, StorageError, StoreDenied, StoreUnavailable
from worker.storage.s3 import S3ObjectStore, s3_store

MIB = 1024 * 1024
PART_BYTES = 5 * MIB
BUCKET = "bucket"
DATA = os.urandom(3 * PART_BYTES + 1)


def reference(key: str = "key", bucket: str = BUCKET) -> ObjectReference:
    return ObjectReference(bucket=bucket, key=key)


def store_of(environment: Mapping[str, str], **changes: str) -> S3ObjectStore:
    return S3ObjectStore(s3_store({**environment, **changes}).client, part_bytes=PART_BYTES)


@pytest.fixture(scope="module")
def server() -> Iterator[SeaweedFs]:
    with SeaweedFs() as made:
        client = made.client()
        client.create_bucket(Bucket=BUCKET)
        client.close()
        yield made


@pytest.fixture(scope="module", params=["moto", "seaweedfs"])
def settings(request: pytest.FixtureRequest) -> Iterator[Mapping[str, str]]:
    """Yield the environment of an agent that uses a server with one bucket."""
    if request.param == "seaweedfs":
        yield request.getfixturevalue("server").environment
        return
    with moto_server() as url:
        made = environment(url)
        client = s3_store(made).client
        client.create_bucket(Bucket=BUCKET)
        client.close()
        yield made


@pytest.fixture
def store(settings: Mapping[str, str]) -> Iterator[S3ObjectStore]:
    made = store_of(settings)
    yield made
    assert not made.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads")
    made.client.close()


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"AWS_ACCESS_KEY_ID": "reader"}, "Allow this call to the node's role"),
        ({"AWS_SECRET_ACCESS_KEY": "other"}, "Check the credentials of the node"),
        ({"AWS_ACCESS_KEY_ID": "nobody"}, "Check the credentials of the node"),
    ],
)
@pytest.mark.parametrize("data", [b"small", DATA])
def test_a_denied_upload_is_not_retried_and_says_what_to_allow(
    server: SeaweedFs, changes: dict[str, str], advice: str, data: bytes
) -> None:
    denied = store_of(server.environment, **changes)
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


MANIFEST = bytes(range(256)) * 4 * 1024


@contextmanager
def killed_after(server: SeaweedFs, byte_count: int) -> Iterator[str]:
    """Yield a URL whose connections lead to the server. Kill the server when it has received `byte_count` bytes."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_server((host, 0)) as listener:

        def forward() -> None:
            with listener.accept()[0] as near, socket.create_connection((host, int(port))) as far:
                received = 0
                while received < byte_count:
                    received += far.send(near.recv(min(65536, byte_count - received)))
                server.kill()
                listener.close()  # The client's next attempts are refused at once.

        url = f"http://{host}:{listener.getsockname()[1]}"
        thread = threading.Thread(target=forward)
        thread.start()
        try:
            yield url
        finally:
            thread.join()


@pytest.mark.parametrize("byte_count", [100, len(MANIFEST) // 2, len(MANIFEST)])
def test_a_server_killed_inside_a_manifest_write_leaves_no_part_of_it(
    server: SeaweedFs, monkeypatch: pytest.MonkeyPatch, byte_count: int
) -> None:
    """A server is killed while it receives a manifest from the control plane. No part of the manifest remains.

    The server has then received a part of the request's headers, or the request up to the middle or near the end of
    its body. The write fails with a retryable error. After the server's restart, no manifest or a whole manifest
    exists. The repeated conditional write stores the manifest, or finds it.
    """
    monkeypatch.setattr("botocore.endpoint.time", SimpleNamespace(sleep=lambda _: None, time=time.time))
    place, keys = reference(f"{byte_count}/manifest.json"), LocalKeys(access_key_id="test", secret_access_key="test")
    try:
        with killed_after(server, byte_count) as url:
            control = ControlStore(Connection(CloudSettings(mode=CloudMode.LOCAL, endpoint_url=url, keys=keys)))
            with pytest.raises(CloudUnavailable) as raised:
                control.put_if_unchanged(place, MANIFEST)
        assert raised.value.retryable
    finally:
        server.start()
    store = store_of(server.environment)
    found = store.head(place)
    assert found is None or store.get_bytes(place) == MANIFEST
    again = ControlStore(Connection(CloudSettings(mode=CloudMode.LOCAL, endpoint_url=server.url, keys=keys)))
    with pytest.raises(ObjectChanged) if found is not None else nullcontext():
        again.put_if_unchanged(place, MANIFEST)
    assert store.get_bytes(place) == MANIFEST
    store.client.close()


def test_of_two_writers_of_one_key_one_whole_object_stays(settings: Mapping[str, str], store: S3ObjectStore) -> None:
    other, contents = store_of(settings), (DATA, DATA[::-1])
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


def test_a_part_that_changes_while_it_is_sent_is_refused(server: SeaweedFs) -> None:
    """A part changes after its checksum was computed and while it is sent. S3 refuses the part.

    The checksum was computed together with the digests of the slot.
    """
    store, data = store_of(server.environment), bytearray(DATA)

    def pieces() -> Iterator[memoryview]:
        yield memoryview(data)[:100]
        data[0] ^= 1
        yield memoryview(data)[100:]

    with pytest.raises(StorageError):
        store.put_stream(reference("changed"), pieces(), len(data))
    assert store.head(reference("changed")) is None
    assert not store.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads")
    store.client.close()
