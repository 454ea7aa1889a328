"""The stores of the agents and of the server work in a bucket with versioning and with default encryption by KMS.

The local cloud refuses signatures other than SigV4, as S3 does for KMS. Its ETag of an object that KMS encrypts is not
the MD5 of the content.
"""

from __future__ import annotations

import hashlib
import io
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from control_plane.cloud.errors import NotFound, ObjectChanged
from control_plane.cloud.s3 import S3ServiceStore as ServerStore
from everstep import uploads
from everstep.doctor.bucket_checks import bucket_facts
from everstep.protocol.manifest import PartsHasher
from everstep.protocol.plan import InputChannel, ObjectReference
from infra.local_cloud.environment import aws_variables
from tests.contract.test_object_store import PART_BYTES, ScriptedShare
from tests.unit.local_cloud.served import ServedAws, served_aws
from worker.errors import ObjectChanged as ObjectOfAgentChanged
from worker.provisioning.inputs import InputCache
from worker.storage.aws import JobPrincipal
from worker.storage.s3 import S3ObjectStore, s3_store

BUCKET = "versioned-and-encrypted"
KEY_ARN = "arn:aws:kms:us-east-1:123456789012:key/0123abcd-0123-0123-0123-0123456789ab"
DATA = os.urandom(3 * PART_BYTES + 1)
"""Content of an object that is uploaded in four parts.

In the test of a shared upload, `ScriptedShare` plays a holder that helps the owner. The owner sends parts 1 and 3, and
the holder sends part 2. Part 4 is then still missing, so the owner sends it, too.
"""


def reference(key: str) -> ObjectReference:
    return ObjectReference(bucket=BUCKET, key=key)


@pytest.fixture(scope="module")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedAws]:
    with served_aws(tmp_path_factory.mktemp("aws")) as served:
        s3 = served.client("s3")
        s3.create_bucket(Bucket=BUCKET)
        s3.put_bucket_versioning(Bucket=BUCKET, VersioningConfiguration={"Status": "Enabled"})
        rule = {
            "ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": "aws:kms", "KMSMasterKeyID": KEY_ARN},
            "BucketKeyEnabled": True,
        }
        s3.put_bucket_encryption(Bucket=BUCKET, ServerSideEncryptionConfiguration={"Rules": [rule]})
        yield served
        for version in s3.list_object_versions(Bucket=BUCKET).get("Versions", ()):
            found = s3.head_object(Bucket=BUCKET, Key=version["Key"], VersionId=version["VersionId"])
            assert (found["ServerSideEncryption"], found["SSEKMSKeyId"]) == ("aws:kms", KEY_ARN), version["Key"]


@pytest.fixture
def s3(aws: ServedAws) -> Any:
    return aws.client("s3")


@pytest.fixture
def agent(aws: ServedAws) -> Iterator[S3ObjectStore]:
    environment = {**aws_variables(aws.url, aws.keys), "EVERSTEP_LOCAL": "1"}
    made = S3ObjectStore(s3_store(environment).client, part_bytes=PART_BYTES)
    yield made
    assert not made.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads")
    made.client.close()


@pytest.fixture
def server(aws: ServedAws) -> ServerStore:
    return ServerStore(aws.connection())


def versions(s3: Any, key: str) -> int:
    return len(s3.list_object_versions(Bucket=BUCKET, Prefix=key).get("Versions", ()))


@pytest.mark.parametrize("size", [5, len(DATA)], ids=["one request", "several parts"])
def test_an_agent_stores_and_reads_the_newest_version(agent: S3ObjectStore, s3: Any, size: int) -> None:
    where = reference(f"agent/{size}")
    for data in (DATA[:size], DATA[:size][::-1]):
        stored = agent.put_stream(where, [data], size)
        hasher = PartsHasher(stored.part_bytes)
        hasher.update(data)
        assert stored.sha256 == hasher.hexdigest()
        assert agent.head(where) == stored
        with agent.open(where, etag=stored.etag) as reader:
            found = bytearray(reader.bytes)
            reader.read_into(memoryview(found))
            assert found == data
            assert reader.md5 == "", "the ETag of an object that KMS encrypts is no MD5"
        assert stored.etag != hashlib.md5(data, usedforsecurity=False).hexdigest()
    assert versions(s3, where.key) == 2
    old = s3.list_object_versions(Bucket=BUCKET, Prefix=where.key)["Versions"][-1]
    assert not old["IsLatest"]
    with pytest.raises(ObjectOfAgentChanged), agent.open(where, etag=old["ETag"].strip('"')):
        pass


def test_another_node_sends_parts_of_an_upload(agent: S3ObjectStore, s3: Any) -> None:
    share = ScriptedShare(agent, "shared", DATA)
    share.where = reference("shared")
    stored = agent.put_shared(share.where, [DATA], len(DATA), read=lambda begin, end: [DATA[begin:end]], share=share)
    assert share.parts
    assert agent.get_bytes(share.where) == DATA
    assert agent.head(share.where) == stored
    assert versions(s3, share.where.key) == 1


def test_an_input_channel_arrives_although_no_etag_is_its_digest(agent: S3ObjectStore, tmp_path: Path) -> None:
    for key, data in (("set/small", b"small"), ("set/large", DATA)):
        agent.put_stream(reference(key), [data], len(data))
    channel = InputChannel(name="train", prefix=reference("set"))
    principal = JobPrincipal(project="a", job="gpt", run="ab" * 16)
    folder = InputCache(tmp_path, 1 << 30).fetch(agent, principal, [channel], threading.Event())["train"]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"small": b"small", "large": DATA}


def test_conditional_writes_see_the_newest_version_only(server: ServerStore, s3: Any) -> None:
    where = reference("manifest.json")
    first = server.put_if_unchanged(where, b"first")
    assert first.etag != hashlib.md5(b"first", usedforsecurity=False).hexdigest()
    with pytest.raises(ObjectChanged):
        server.put_if_unchanged(where, b"late")
    second = server.put_if_unchanged(where, b"second", etag=first.etag)
    with pytest.raises(ObjectChanged):
        server.put_if_unchanged(where, b"late", etag=first.etag)
    assert (server.get(where), server.head(where), versions(s3, where.key)) == (b"second", second, 2)
    server.delete(BUCKET, [where.key])
    with pytest.raises(NotFound):
        server.head(where)
    assert list(server.list(where)) == []
    assert server.put_if_unchanged(where, b"third") == server.head(where)
    assert (server.get(where), versions(s3, where.key)) == (b"third", 3)


def test_the_server_stores_large_files_and_lets_others_upload(server: ServerStore) -> None:
    data = DATA + DATA[: 2 * PART_BYTES]
    stored = server.put_file(reference("source.tar.gz"), io.BytesIO(data))
    assert (stored.size_bytes, "-" in stored.etag) == (len(data), True), "a file of several parts"
    assert b"".join(server.stream(reference("source.tar.gz"))) == data
    assert b"".join(server.stream(reference("source.tar.gz"), begin=3, end=20)) == data[3:20]
    digest = hashlib.sha256(b"content").hexdigest()
    signed = server.sign_upload(reference("signed"), sha256=digest, size_bytes=7, seconds=900)
    assert signed is not None
    assert uploads.put(signed.url, signed.headers, io.BytesIO(b"content")) is uploads.UploadOutcome.TAKEN
    assert server.get(reference("signed")) == b"content"


def test_the_doctor_reads_these_settings(s3: Any) -> None:
    facts = bucket_facts(s3, BUCKET)
    assert (facts.versioning, facts.kms_key, facts.has_bucket_key) == ("Enabled", KEY_ARN, True)
    assert facts.errors == {}
