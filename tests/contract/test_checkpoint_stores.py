"""Checkpoints are read from S3 and exported to S3. Errors name the object and a remedy."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pytest
import torch
from botocore.exceptions import ResponseStreamingError
from botocore.response import StreamingBody
from safetensors.numpy import load

from everstep import bulk
from everstep.checkpoints import open_checkpoint
from everstep.checkpoints.dcp_export import export_dcp
from everstep.checkpoints.errors import StoreFailure
from everstep.checkpoints.export import Exported, export_safetensors
from everstep.checkpoints.stores import PART_BYTES, S3
from everstep.checkpoints.universal import export_universal
from everstep.protocol.manifest import encode_manifest
from tests.moto_server import moto_server
from tests.seaweedfs import SeaweedFs
from tests.unit.everstep.checkpoints.stored import FOLDER, Stored, store
from tests.unit.worker.storage.frozen_nodes import BASES, Node, manifest_of
from worker.storage.s3 import s3_store

BUCKET = "bucket"
WEIGHT = np.arange(20, dtype=np.float32).reshape(4, 5)


@pytest.fixture(scope="module", params=["moto", "seaweedfs"])
def service(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """Yield the environment of a client of an S3 service."""
    if request.param == "seaweedfs":
        with SeaweedFs() as weed:
            yield weed.environment
        return
    with moto_server() as url:
        yield {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
        }


@pytest.fixture
def s3(service: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield a client of an S3 service with one empty bucket.

    The environment variables of boto3 select the same service.
    """
    for name, value in {**service, "AWS_DEFAULT_REGION": service["AWS_REGION"]}.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3")
    client.create_bucket(Bucket=BUCKET)
    yield client
    for entry in client.list_objects_v2(Bucket=BUCKET).get("Contents", ()):
        client.delete_object(Bucket=BUCKET, Key=entry["Key"])
    assert not client.list_multipart_uploads(Bucket=BUCKET).get("Uploads"), "an upload was left unfinished"
    client.delete_bucket(Bucket=BUCKET)
    client.close()


@pytest.fixture
def manifest(s3: Any, tmp_path: Path) -> str:
    """Store a checkpoint in the bucket and return the URI of its manifest."""
    store(tmp_path, {0: [Stored("model/w", WEIGHT)]})
    for path in tmp_path.rglob("*"):
        if path.is_file():
            s3.put_object(Bucket=BUCKET, Key=str(path.relative_to(tmp_path)), Body=path.read_bytes())
    return f"s3://{BUCKET}/jobs/job/checkpoints/{FOLDER}manifest.json"


def test_a_checkpoint_in_s3_is_exported_to_s3(s3: Any, manifest: str) -> None:
    with open_checkpoint(manifest) as checkpoint:
        export_safetensors(checkpoint, f"s3://{BUCKET}/exports/one/")
    found = s3.get_object(Bucket=BUCKET, Key="exports/one/model.safetensors")["Body"].read()
    assert np.array_equal(load(found)["w"], WEIGHT)


@pytest.mark.parametrize("export", [export_dcp, export_universal])
def test_an_export_to_s3_has_the_files_of_an_export_to_a_folder(
    s3: Any, manifest: str, tmp_path: Path, export: Callable[..., Exported]
) -> None:
    with open_checkpoint(manifest) as checkpoint:
        files = export(checkpoint, f"s3://{BUCKET}/exports/two").files
        assert export(checkpoint, str(tmp_path / "to")).files == files
    for file in files:
        found = s3.get_object(Bucket=BUCKET, Key=f"exports/two/{file}")["Body"].read()
        assert len(found) == (tmp_path / "to" / file).stat().st_size
        if file.endswith((".distcp", ".pt")):
            (tmp_path / "found").write_bytes(found)
            torch.load(tmp_path / "found", weights_only=True)


async def test_boto3_and_safetensors_alone_read_two_checkpoints_that_share_frozen_objects(
    s3: Any, service: dict[str, str], tmp_path: Path
) -> None:
    """Plain boto3 and safetensors read two checkpoints that share frozen objects.

    Two ranks upload two steps. The bucket holds each frozen tensor once, and the manifests name its object.
    """
    objects = s3_store(service)
    nodes = [Node.of(tmp_path / str(rank), rank) for rank in range(2)]
    try:
        manifests = [manifest_of([await node.upload(objects, step) for node in nodes], step) for step in (1, 2)]
    finally:
        objects.client.close()
        for node in nodes:
            node.store.close()
    for manifest in manifests:
        s3.put_object(Bucket=BUCKET, Key=f"manifest{manifest.step}.json", Body=encode_manifest(manifest))

    def read(key: str) -> dict[str, bytes]:
        body = s3.get_object(Bucket=BUCKET, Key=key)["Body"].read()
        return {name: tensor.tobytes() for name, tensor in load(body).items()}

    keys = {entry["Key"] for entry in s3.list_objects_v2(Bucket=BUCKET)["Contents"]}
    assert len([key for key in keys if "/frozen/" in key]) == 2
    for step in (1, 2):
        facts = json.loads(s3.get_object(Bucket=BUCKET, Key=f"manifest{step}.json")["Body"].read())
        shared = {name: data for named in facts["frozen"] for name, data in read(named["key"]).items()}
        assert shared == BASES
        for named in facts["frozen"]:
            body = s3.get_object(Bucket=BUCKET, Key=named["key"])["Body"].read()
            assert (hashlib.sha256(body).hexdigest(), len(body)) == (named["sha256"], named["object_bytes"])
        for rank, shard in enumerate(facts["shards"]):
            assert read(shard["key"]) == {"lora": bytes([rank, step]) * 50, "head": b"abc"}


def test_an_object_of_several_parts_is_written_whole_or_not_at_all(s3: Any) -> None:
    data = bytes(range(256)) * (PART_BYTES // 256 * 5 // 2)
    S3(BUCKET, s3).write("large", [data[:100], data[100:]], len(data))
    assert s3.get_object(Bucket=BUCKET, Key="large")["Body"].read() == data

    def broken() -> Iterator[bytes]:
        yield data[: PART_BYTES + 1024 * 1024]
        raise RuntimeError("the source failed")

    with pytest.raises(RuntimeError, match="the source failed"):
        S3(BUCKET, s3).write("other", broken(), len(data))
    assert [entry["Key"] for entry in s3.list_objects_v2(Bucket=BUCKET)["Contents"]] == ["large"]


def test_an_object_that_was_replaced_is_not_read_on(s3: Any) -> None:
    s3.put_object(Bucket=BUCKET, Key="key", Body=b"first")
    stored = S3(BUCKET, s3).open("key")
    assert stored.read(1, 3) == b"ir"
    s3.put_object(Bucket=BUCKET, Key="key", Body=b"other")
    with pytest.raises(StoreFailure, match=f"s3://{BUCKET}/key: the object was replaced while it was read"):
        stored.read(1, 3)


def test_a_range_whose_body_breaks_off_is_requested_again(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    s3.put_object(Bucket=BUCKET, Key="key", Body=b"content")
    read, broken, pauses = StreamingBody.readinto, [True, True], list[float]()

    def breaks_off(body: StreamingBody, target: memoryview) -> int:
        if broken:
            broken.pop()
            raise ResponseStreamingError(error="reset by peer")
        return read(body, target)

    monkeypatch.setattr(StreamingBody, "readinto", breaks_off)
    monkeypatch.setattr(bulk, "pause_seconds", pauses.append)
    assert S3(BUCKET, s3).open("key").read(3, 7) == b"tent"
    assert len(pauses) == 2
    broken.extend([True] * bulk.READ_ATTEMPTS)
    with pytest.raises(StoreFailure, match=f"s3://{BUCKET}/key: .*reset by peer"):
        S3(BUCKET, s3).open("key").read(3, 7)


def test_what_is_missing_is_named(s3: Any) -> None:
    with pytest.raises(StoreFailure, match=f"s3://{BUCKET}/nothing: the object does not exist"):
        S3(BUCKET, s3).open("nothing")
    with pytest.raises(StoreFailure, match="s3://elsewhere/key: the bucket does not exist"):
        S3("elsewhere", s3).write("key", [b"1"], 1)
