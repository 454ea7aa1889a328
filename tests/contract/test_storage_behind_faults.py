"""Both S3 clients recover from the broken connections and AWS errors that a proxy causes.

During a short fault, the client repeats its request until it succeeds, and the result is complete. A lasting fault
ends in a typed error with advice, and leaves no object. The servers behind the proxy are moto and SeaweedFS.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from control_plane.cloud.connection import CloudMode, CloudSettings, Connection
from control_plane.cloud.errors import (
    AccessDenied,
    CloudError,
    CloudUnavailable,
    InvalidRequest,
    NotFound,
    ObjectChanged,
    Throttled,
)
from control_plane.cloud.s3 import S3ServiceStore as ControlStore
from everstep import bulk
from everstep.checkpoints.errors import StoreFailure
from everstep.checkpoints.stores import S3
from everstep.host.local_keys import LocalKeys
from everstep.protocol.plan import ObjectReference
from tests.moto_server import moto_server
from tests.s3_proxy import Answer, Asked, Cut, S3Proxy
from tests.seaweedfs import ACCESS_KEY, SECRET_KEY, SeaweedFs
from worker.errors import ObjectMissing, StorageError, StoreDenied, StoreRefused, StoreUnavailable
from worker.storage.s3 import S3ObjectStore, s3_store

BUCKET = "bucket"
PART_BYTES = 5 * 1024 * 1024
SMALL = b"small"
LARGE = os.urandom(2 * PART_BYTES + 1)
SLOW_DOWN = Answer(code="SlowDown", status=503, message="Please reduce your request rate.")


@pytest.fixture(scope="module")
def moto_url() -> Iterator[str]:
    with moto_server() as url:
        yield url


@pytest.fixture(scope="module")
def seaweedfs_url() -> Iterator[str]:
    with SeaweedFs() as server:
        yield server.url


@pytest.fixture(scope="module", params=["moto", "seaweedfs"])
def started(request: pytest.FixtureRequest) -> Iterator[S3Proxy]:
    with S3Proxy(request.getfixturevalue(f"{request.param}_url")) as proxy:
        client = worker_store(proxy).client
        client.create_bucket(Bucket=BUCKET)
        client.close()
        yield proxy


def worker_store(proxy: S3Proxy) -> S3ObjectStore:
    environment = {
        "AWS_ENDPOINT_URL": proxy.url,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_REGION": "us-east-1",
        "EVERSTEP_LOCAL": "1",
    }
    return S3ObjectStore(s3_store(environment).client, part_bytes=PART_BYTES, range_bytes=PART_BYTES)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Skip the pauses before repeated requests, and record their lengths."""
    made: list[float] = []
    monkeypatch.setattr("botocore.endpoint.time", SimpleNamespace(sleep=made.append, time=time.time))
    monkeypatch.setattr(bulk, "pause_seconds", made.append)
    return made


@pytest.fixture
def proxy(started: S3Proxy, pauses: list[float]) -> Iterator[S3Proxy]:
    yield started
    started.clear()
    client = worker_store(started).client
    uploads = client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", ())
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET):
        for entry in page.get("Contents", ()):
            client.delete_object(Bucket=BUCKET, Key=entry["Key"])
    client.close()
    assert not uploads, "an upload is unfinished"


@pytest.fixture
def store(proxy: S3Proxy) -> Iterator[S3ObjectStore]:
    made = worker_store(proxy)
    yield made
    made.client.close()


@pytest.fixture
def control(proxy: S3Proxy) -> ControlStore:
    keys = LocalKeys(access_key_id=ACCESS_KEY, secret_access_key=SECRET_KEY)
    return ControlStore(Connection(CloudSettings(mode=CloudMode.LOCAL, endpoint_url=proxy.url, keys=keys)))


def at(key: str = "key") -> ObjectReference:
    return ObjectReference(bucket=BUCKET, key=key)


def operation(name: str) -> Callable[[Asked], bool]:
    return lambda asked: asked.operation == name


def put(store: S3ObjectStore, data: bytes) -> None:
    store.put_stream(at(), [data], len(data))


SHORT_FAULTS = {
    "SlowDown": (SLOW_DOWN, 2),
    "SlowDown with Retry-After": (Answer(code="SlowDown", status=503, retry_after="1"), 2),
    "InternalError": (Answer(code="InternalError", status=500), 2),
    "RequestTimeout": (Answer(code="RequestTimeout", status=400), 2),
    "the answer is lost": (Cut(answer_bytes=-1), 1),
}
IN_BODIES = {"the request is cut": (Cut(request_bytes=1000), 1)}
WRITES = [
    *((SMALL, "PUT", fault) for fault in [*SHORT_FAULTS, *IN_BODIES]),
    *((LARGE, "POST uploads", fault) for fault in SHORT_FAULTS if fault != "the answer is lost"),
    *((LARGE, "PUT uploadId", fault) for fault in [*SHORT_FAULTS, *IN_BODIES]),
    *((LARGE, "POST uploadId", fault) for fault in [*SHORT_FAULTS, *IN_BODIES]),
]


def fits(name: str, proxy_operations: dict[str, tuple[str, ...]]) -> Callable[[Asked], bool]:
    names = proxy_operations.get(name, (name,))
    return lambda asked: asked.operation in names


PARTS = {"PUT uploadId": ("PUT uploadId", "PUT partNumber")}


@pytest.mark.long(keep=12)
@pytest.mark.parametrize(("data", "name", "fault"), WRITES)
def test_an_upload_outlasts_a_short_fault_of_each_of_its_requests(
    proxy: S3Proxy, store: S3ObjectStore, pauses: list[float], data: bytes, name: str, fault: str
) -> None:
    planned, times = {**SHORT_FAULTS, **IN_BODIES}[fault]
    proxy.plan(planned, fits(name, PARTS), times=times)
    put(store, data)
    assert proxy.met == times
    assert store.get_bytes(at()) == data
    assert len(pauses) >= times


def test_an_error_inside_an_answer_of_status_200_is_no_success(proxy: S3Proxy, store: S3ObjectStore) -> None:
    """The client repeats a CompleteMultipartUpload whose answer has status 200 but contains an error.

    S3 may send the status 200 before it completes the upload, and then fail.
    """
    proxy.plan(Answer(code="InternalError", status=200), operation("POST uploadId"))
    put(store, LARGE)
    assert proxy.met == 1
    assert store.get_bytes(at()) == LARGE


@pytest.mark.long(keep=8)
@pytest.mark.parametrize("fault", [*SHORT_FAULTS, "the answer is cut"])
@pytest.mark.parametrize("data", [SMALL, LARGE], ids=["small", "large"])
def test_a_read_outlasts_a_short_fault(proxy: S3Proxy, store: S3ObjectStore, data: bytes, fault: str) -> None:
    put(store, data)
    planned, times = {**SHORT_FAULTS, "the answer is cut": (Cut(answer_bytes=len(data) // 3), 1)}[fault]
    proxy.plan(planned, operation("GET"), times=times)
    assert store.get_bytes(at()) == data
    assert proxy.met == times
    proxy.plan(planned, operation("GET"), times=times)
    target = bytearray(len(data) - 1)
    store.read_range(at(), 1, memoryview(target), [(0, len(target))])
    assert target == data[1:]
    assert proxy.met == 2 * times


@pytest.mark.parametrize("fault", sorted({*SHORT_FAULTS} - {"RequestTimeout"}))
def test_a_list_and_a_description_outlast_a_short_fault(proxy: S3Proxy, store: S3ObjectStore, fault: str) -> None:
    put(store, SMALL)
    planned, times = SHORT_FAULTS[fault]  # RequestTimeout is left out: an answer to HEAD has no body to name it.
    for name, call in (
        ("GET list-type", lambda: [each.bytes for each in store.list(at(""))]),
        ("HEAD", lambda: [found.bytes if (found := store.head(at())) else None]),
    ):
        proxy.plan(planned, operation(name), times=times)
        assert call() == [len(SMALL)]
    assert proxy.met == 2 * times


LASTING = [
    (SLOW_DOWN, StoreUnavailable, "tries again", Throttled),
    (Answer(code="RequestTimeTooSkewed", status=403), StoreUnavailable, "Synchronize the node's clock", AccessDenied),
    (Answer(code="AccessDenied", status=403), StoreDenied, "Allow this call to the node's role", AccessDenied),
    (Answer(code="ExpiredToken", status=400), StoreDenied, "Check the credentials", AccessDenied),
    (Answer(code="NoSuchBucket", status=404), ObjectMissing, "Create the bucket", NotFound),
    (Answer(code="PermanentRedirect", status=301, region="eu-west-1"), StoreRefused, "another region", InvalidRequest),
    (
        Answer(code="AuthorizationHeaderMalformed", status=400, region="eu-west-1"),
        StoreRefused,
        "another region",
        InvalidRequest,
    ),
    (Answer(code="KMS.DisabledException", status=400), StoreDenied, "KMS key", AccessDenied),
    (Answer(code="KMS.NotFoundException", status=400), StoreDenied, "KMS key", AccessDenied),
    (Answer(code="InternalError", status=500), StoreUnavailable, "See the store's log", CloudUnavailable),
    (Answer(code="XMinioStorageFull", status=507), StoreUnavailable, "no free space. Delete old", CloudUnavailable),
]
LASTING_IDS = [fault.code for fault, *_ in LASTING]


@pytest.mark.long(keep=8)
@pytest.mark.parametrize(("fault", "kind", "advice", "_"), LASTING, ids=LASTING_IDS)
def test_a_lasting_fault_has_a_type_and_advice_for_each_call_of_the_agent(
    proxy: S3Proxy, store: S3ObjectStore, fault: Answer, kind: type[StorageError], advice: str, _: object
) -> None:
    target = bytearray(1)
    calls: list[Callable[[], object]] = [
        lambda: put(store, SMALL),
        lambda: put(store, LARGE),
        lambda: store.put_bytes(at("manifest.json"), b"{}"),
        lambda: store.put_part(at(), "upload", 1, [SMALL]),
        lambda: store.get_bytes(at()),
        lambda: store.read_range(at(), 0, memoryview(target), [(0, 1)]),
        lambda: list(store.list(at(""))),
        lambda: store.abort_uploads(at(""), lambda _: True),
    ]
    for call in calls:
        proxy.plan(fault, times=1000)
        with pytest.raises(kind, match=rf"s3://{BUCKET}/.*{advice}"):
            call()
        assert proxy.met
        proxy.clear()
    assert list(store.list(at(""))) == []


@pytest.mark.parametrize(
    ("fault", "advice"),
    [
        (Answer(code="InternalError", status=500), "the store failed by itself; see its log and its free space"),
        (Answer(code="XMinioStorageFull", status=507), "the store has no free space; delete objects or add space"),
    ],
)
def test_an_export_to_a_store_without_space_says_so(proxy: S3Proxy, fault: Answer, advice: str) -> None:
    client = worker_store(proxy).client
    proxy.plan(fault, lambda asked: asked.method in ("PUT", "POST"), times=1000)
    with pytest.raises(StoreFailure, match=f"s3://{BUCKET}/model.safetensors: {advice}"):
        S3(BUCKET, client).write("model.safetensors", [SMALL], len(SMALL))
    assert proxy.met
    proxy.clear()
    client.close()


@pytest.mark.long(keep=8)
@pytest.mark.parametrize(("fault", "_kind", "_advice", "kind"), LASTING, ids=LASTING_IDS)
def test_a_lasting_fault_has_a_type_for_each_call_of_the_control_plane(
    proxy: S3Proxy, control: ControlStore, fault: Answer, _kind: object, _advice: object, kind: type[CloudError]
) -> None:
    calls: list[Callable[[], object]] = [
        lambda: control.put(at(), SMALL),
        lambda: control.put_if_unchanged(at("manifest.json"), b"{}"),
        lambda: control.get(at()),
        lambda: list(control.list(at(""))),
        lambda: control.delete(BUCKET, ["key"]),
    ]
    for call in calls:
        proxy.plan(fault, times=1000)
        with pytest.raises(kind):
            call()
        assert proxy.met
        proxy.clear()
    assert list(control.list(at(""))) == []


@pytest.mark.parametrize("fault", [*SHORT_FAULTS, *IN_BODIES])
def test_the_control_plane_writes_a_manifest_once_during_a_short_fault(
    proxy: S3Proxy, control: ControlStore, fault: str
) -> None:
    """After a lost answer, the repeated conditional request finds the manifest of the first attempt."""
    planned, _ = {**SHORT_FAULTS, **IN_BODIES}[fault]
    proxy.plan(planned, operation("PUT"))
    with pytest.raises(ObjectChanged) if fault == "the answer is lost" else nullcontext():
        control.put_if_unchanged(at("manifest.json"), b"{}")
    assert proxy.met == 1
    assert control.get(at("manifest.json")) == b"{}"


@pytest.mark.parametrize("name", ["POST uploads", "PUT uploadId", "POST uploadId"])
def test_a_server_that_is_away_ends_an_upload_with_an_error_that_may_be_retried(
    proxy: S3Proxy, store: S3ObjectStore, name: str
) -> None:
    proxy.plan(Cut(request_bytes=0), fits(name, PARTS), times=1000)
    with pytest.raises(StoreUnavailable, match=f"s3://{BUCKET}/key") as raised:
        put(store, LARGE)
    assert raised.value.retryable
    assert store.head(at()) is None


def test_a_control_plane_without_its_server_has_an_error_that_may_be_retried(
    proxy: S3Proxy, control: ControlStore
) -> None:
    proxy.plan(Cut(request_bytes=0), times=1000)
    with pytest.raises(CloudUnavailable) as raised:
        control.put_if_unchanged(at("manifest.json"), b"{}")
    assert raised.value.retryable
