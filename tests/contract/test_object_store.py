"""The contract of every object store: the same tests run in memory, against moto's S3 and against SeaweedFS.

`memory_s3` is the product's store over a client in memory, so the tests compare this client with real servers.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from everstep.bulk import PartDigest, SendCancelled, StoredPart, crc64
from everstep.protocol.manifest import PartsHasher
from everstep.protocol.plan import ObjectReference
from tests.fakes.s3_client import MemoryS3, MemoryS3Client
from tests.fakes.storage import MemoryObjectStore
from tests.moto_server import moto_server
from tests.seaweedfs import SeaweedFs
from worker.errors import (
    CorruptCheckpoint,
    ForbiddenEndpoint,
    ObjectChanged,
    ObjectMissing,
    StorageError,
    StoreRefused,
    StoreUnavailable,
)
from worker.storage.object_store import ObjectStore
from worker.storage.s3 import S3ObjectStore, s3_store

if TYPE_CHECKING:
    from botocore.client import BaseClient

BUCKET = "bucket"
MIB = 1024 * 1024
PART_BYTES = 5 * MIB
"""Size of the smallest part that S3 accepts in a multipart upload."""


def reference(key: str) -> ObjectReference:
    return ObjectReference(bucket=BUCKET, key=key)


def environment(url: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "EVERSTEP_LOCAL": "1",
    }


@pytest.fixture(scope="module")
def s3_url() -> Iterator[str]:
    with moto_server() as url:
        yield url


@pytest.fixture(scope="module")
def s3(s3_url: str) -> Iterator[S3ObjectStore]:
    made = S3ObjectStore(s3_store(environment(s3_url)).client, part_bytes=PART_BYTES)
    yield made
    made.client.close()


@pytest.fixture(scope="module")
def seaweedfs() -> Iterator[SeaweedFs]:
    with SeaweedFs() as server:
        yield server


@pytest.fixture(scope="module")
def seaweedfs_store(seaweedfs: SeaweedFs) -> Iterator[S3ObjectStore]:
    made = S3ObjectStore(s3_store(seaweedfs.environment).client, part_bytes=PART_BYTES)
    yield made
    made.client.close()


@pytest.fixture(params=["memory", "memory_s3", "s3", "seaweedfs_store"])
def store(request: pytest.FixtureRequest) -> Iterator[ObjectStore]:
    if request.param == "memory":
        yield MemoryObjectStore(BUCKET, part_bytes=PART_BYTES)
        return
    if request.param == "memory_s3":
        s3 = MemoryS3(BUCKET, lambda: datetime.now(UTC))
        yield S3ObjectStore(cast("BaseClient", MemoryS3Client(s3, "agent")), part_bytes=PART_BYTES)
        assert not s3.uploads, "an upload that failed was left unfinished"
        return
    made: S3ObjectStore = request.getfixturevalue(request.param)
    client = made.client
    client.create_bucket(Bucket=BUCKET)
    yield made
    for entry in client.list_objects_v2(Bucket=BUCKET).get("Contents", ()):
        client.delete_object(Bucket=BUCKET, Key=entry["Key"])
    assert not client.list_multipart_uploads(Bucket=BUCKET).get("Uploads"), "an upload that failed was left unfinished"
    client.delete_bucket(Bucket=BUCKET)


def read_all(store: ObjectStore, key: str) -> bytes:
    with store.open(reference(key)) as reader:
        data = bytearray(reader.bytes)
        view = memoryview(data)
        for start in range(0, len(data), 3 * MIB):
            reader.read_into(view[start : start + 3 * MIB])
        return bytes(data)


def test_an_object_is_read_by_its_etag_or_not_at_all(store: ObjectStore) -> None:
    first = store.put_bytes(reference("a"), b"first")
    with store.open(reference("a"), etag=first.etag) as reader:
        assert (reader.bytes, reader.md5) == (5, hashlib.md5(b"first", usedforsecurity=False).hexdigest())
    second = store.put_bytes(reference("a"), b"second")
    assert second.etag != first.etag
    with pytest.raises(ObjectChanged), store.open(reference("a"), etag=first.etag):
        pass


def test_no_md5_is_told_where_an_etag_is_none(s3: S3ObjectStore) -> None:
    client = s3.client
    client.create_bucket(Bucket="etags")
    place = ObjectReference(bucket="etags", key="large")
    s3.put_stream(place, [bytes(PART_BYTES), b"x"], PART_BYTES + 1)
    with s3.open(place) as reader:
        assert reader.md5 == ""
    client.put_object(Bucket="etags", Key="encrypted", Body=b"x", ServerSideEncryption="aws:kms")
    with s3.open(ObjectReference(bucket="etags", key="encrypted")) as reader:
        assert reader.md5 == ""


def test_bytes_come_back(store: ObjectStore) -> None:
    stored = store.put_bytes(reference("a/b"), b"hello")
    assert (stored.bytes, stored.reference) == (5, reference("a/b"))
    assert store.get_bytes(reference("a/b")) == b"hello"
    assert store.head(reference("a/b")) == stored


def test_an_empty_object_is_an_object(store: ObjectStore) -> None:
    store.put_stream(reference("empty"), [], 0)
    assert store.get_bytes(reference("empty")) == b""


@pytest.mark.parametrize(
    "size", [1, PART_BYTES, PART_BYTES + 1, 2 * PART_BYTES, 2 * PART_BYTES + 12_345, 7 * PART_BYTES + 1]
)
def test_a_stream_of_any_size_comes_back(store: ObjectStore, size: int) -> None:
    data = os.urandom(size)
    view = memoryview(data)
    piece = 777_777
    stored = store.put_stream(
        reference("stream"), (view[start : start + piece] for start in range(0, size, piece)), size
    )
    assert stored.bytes == size
    hasher = PartsHasher(stored.part_bytes)
    hasher.update(data)
    assert stored.sha256 == hasher.hexdigest()
    assert read_all(store, "stream") == data
    assert store.get_bytes(reference("stream")) == data
    found = store.head(reference("stream"))
    assert found is not None
    assert found == stored
    # moto stores no checksum of an object that it received in one request.
    assert found.crc == crc64(data) or (found.crc is None and size <= PART_BYTES)


class ScriptedShare:
    """A holder that helps with an upload.

    Before the owner sends its first part, the holder sends all parts with even numbers, except the last of them.
    """

    def __init__(self, store: ObjectStore, key: str, data: bytes) -> None:
        self.store = store
        self.where = reference(key)
        self.data = data
        self.parts: list[StoredPart] = []
        self.upload_id = ""
        self.own: list[int] = []
        self.parts_at_end = 0
        self._missing: list[int] = []

    def begin(self, upload_id: str, part_bytes: int, part_count: int) -> None:
        *sent, missing = range(2, part_count + 1, 2)
        self.upload_id = upload_id
        self._missing = [missing]
        for number in sent:
            view = memoryview(self.data)[(number - 1) * part_bytes : number * part_bytes]
            pieces = [view[: MIB + 1], view[MIB + 1 :]]
            self.parts.append(self.store.put_part(self.where, upload_id, number, pieces))

    def claim(self, number: int) -> bool:
        return bool(number % 2)

    def sent(self, number: int) -> None:
        self.own.append(number)

    def next_missing(self, expected: Mapping[int, PartDigest], has_failed: Callable[[], bool]) -> int | None:
        assert not has_failed()
        assert {part.number: (part.size, part.crc, part.sha256) for part in self.parts}.items() <= expected.items()
        return self._missing.pop() if self._missing else None

    def stored(self) -> Sequence[StoredPart]:
        return self.parts

    def end(self) -> None:
        """Check that the store calls this method before it completes or aborts the upload.

        The check sends part 2 again: the store accepts a part only while the upload is open.
        """
        self.parts_at_end = len(self.parts)
        self.store.put_part(self.where, self.upload_id, 2, [self.data[PART_BYTES : 2 * PART_BYTES]])


@pytest.mark.parametrize("size", [7 * PART_BYTES + 1, 6 * PART_BYTES])
def test_a_helper_sends_parts_of_an_upload(store: ObjectStore, size: int) -> None:
    data = os.urandom(size)
    share, own = ScriptedShare(store, "shared", data), list[int]()
    stored = store.put_shared(
        reference("shared"),
        [data],
        size,
        read=lambda begin, end: [data[begin:end]],
        share=share,
        on_stored=own.append,
    )
    assert store.get_bytes(reference("shared")) == data
    hasher = PartsHasher(stored.part_bytes)
    hasher.update(data)
    assert (stored.bytes, stored.sha256) == (size, hasher.hexdigest())
    assert share.parts
    assert share.parts_at_end == len(share.parts)
    count = -(-size // PART_BYTES)
    assert sorted(share.own) == sorted({*range(1, count + 1)} - {part.number for part in share.parts})
    assert sum(own) + sum(part.size for part in share.parts) == size
    with pytest.raises(StorageError):
        store.put_part(reference("shared"), share.upload_id, 2, [data[: 5 * MIB]])


def test_helpers_end_before_a_failed_upload_is_aborted(store: ObjectStore) -> None:
    class Broken(Exception):
        pass

    def pieces() -> Iterator[bytes]:
        yield data[:PART_BYTES]
        raise Broken

    data = os.urandom(4 * PART_BYTES)
    share = ScriptedShare(store, "failed", data)
    with pytest.raises(Broken):
        store.put_shared(reference("failed"), pieces(), len(data), read=lambda *_: [], share=share)
    assert share.parts_at_end == len(share.parts) == 1
    with pytest.raises(StorageError):
        store.put_part(reference("failed"), share.upload_id, 2, [data[: 5 * MIB]])


def test_an_object_of_one_part_is_stored_without_helpers(store: ObjectStore) -> None:
    share = ScriptedShare(store, "small", b"small")
    store.put_shared(reference("small"), [b"small"], 5, read=lambda *_: [], share=share)
    assert store.get_bytes(reference("small")) == b"small"
    assert share.upload_id == ""


def test_a_part_whose_sender_is_cancelled_is_not_stored(store: ObjectStore) -> None:
    class Cancelled(ScriptedShare):
        def begin(self, upload_id: str, part_bytes: int, part_count: int) -> None:
            self.upload_id = upload_id
            with pytest.raises((StoreUnavailable, SendCancelled)):
                store.put_part(self.where, upload_id, 2, [bytes(part_bytes)], is_cancelled=lambda: True)
            self._missing = [*range(2, part_count + 1, 2)]

    data = os.urandom(2 * PART_BYTES)
    share = Cancelled(store, "cancelled", data)
    store.put_shared(reference("cancelled"), [data], len(data), read=lambda begin, end: [data[begin:end]], share=share)
    assert store.get_bytes(reference("cancelled")) == data


def test_a_stream_that_fails_leaves_what_was_there(store: ObjectStore) -> None:
    class Broken(Exception):
        pass

    def pieces() -> Iterator[bytes]:
        yield bytes(11 * MIB)
        raise Broken

    store.put_bytes(reference("kept"), b"before")
    with pytest.raises(Broken):
        store.put_stream(reference("kept"), pieces(), 20 * MIB)
    assert store.get_bytes(reference("kept")) == b"before"


@pytest.mark.parametrize("given", [9, 11, 12 * MIB])
def test_a_stream_of_another_length_is_refused(store: ObjectStore, given: int) -> None:
    with pytest.raises(StoreRefused):
        store.put_stream(reference("wrong"), [bytes(given)], 10)
    with pytest.raises(StoreRefused):
        store.put_stream(reference("wrong"), [bytes(given)], 11 * MIB)
    assert store.head(reference("wrong")) is None


def test_of_a_growing_file_the_first_bytes_are_sent(store: ObjectStore, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"first line\nsecond")
    store.put_file(reference("log"), path, 11)
    assert store.get_bytes(reference("log")) == b"first line\n"
    store.put_file(reference("log"), path)
    assert store.get_bytes(reference("log")) == b"first line\nsecond"
    with pytest.raises(StoreRefused):
        store.put_file(reference("log"), path, 1000)


def test_a_missing_object_is_missing(store: ObjectStore) -> None:
    assert store.head(reference("none")) is None
    with pytest.raises(ObjectMissing):
        store.get_bytes(reference("none"))
    with pytest.raises(ObjectMissing), store.open(reference("none")):
        pass
    with pytest.raises(ObjectMissing):
        store.put_bytes(ObjectReference(bucket="other", key="key"), b"")


def test_reading_beyond_the_end_is_an_error(store: ObjectStore) -> None:
    store.put_bytes(reference("short"), b"12345")
    with store.open(reference("short")) as reader, pytest.raises(CorruptCheckpoint):
        reader.read_into(memoryview(bytearray(6)))


def test_spans_of_a_target_are_filled_in_order(store: ObjectStore) -> None:
    data = os.urandom(4 * PART_BYTES)
    store.put_stream(reference("spans"), [data], len(data))
    target = bytearray(5 * PART_BYTES)
    spans = [(0, 100), (128, 4 * PART_BYTES), (4 * PART_BYTES + 64, 4 * PART_BYTES + 64 + 20)]
    with store.open(reference("spans")) as reader, memoryview(target) as view:
        reader.read_into(view, spans)
        reader.read_into(view[-8:])
    assert b"".join(target[begin:end] for begin, end in [*spans, (len(target) - 8, len(target))]) == data
    assert not any(target[100:128])
    assert not any(target[4 * PART_BYTES + 84 : -8])


def test_a_range_is_read_with_one_request(store: ObjectStore) -> None:
    data = os.urandom(1000)
    store.put_bytes(reference("range"), data)
    target = bytearray(600)
    with memoryview(target) as view:
        store.read_range(reference("range"), 100, view, [(10, 20), (100, 500)])
        assert bytes(view[10:20]) + bytes(view[100:500]) == data[100:510]
        assert not any(view[20:100])
        store.read_range(reference("range"), 0, view, [(0, 600)], is_cancelled=lambda: True)
        for begin in (900, 1000, 2000):
            with pytest.raises(CorruptCheckpoint):
                store.read_range(reference("range"), begin, view, [(0, 600)])
        with pytest.raises(ObjectMissing):
            store.read_range(reference("none"), 0, view, [(0, 600)])


def test_a_reader_says_what_needs_no_further_request(store: ObjectStore) -> None:
    data = os.urandom(1000)
    store.put_bytes(reference("ready"), data)
    with store.open(reference("ready")) as reader:
        ready = reader.ready_bytes
        assert ready in (0, len(data)), "the fake store sends nothing ahead"
        reader.read_into(memoryview(bytearray(100)))
        assert reader.ready_bytes == max(0, ready - 100)


@pytest.mark.parametrize("is_deleted", [False, True])
def test_what_is_read_is_of_one_object(store: ObjectStore, is_deleted: bool) -> None:
    """An object is deleted or replaced while a reader reads it. The reader never mixes bytes of two objects.

    A store may still return the rest of the old object.
    """
    first, second = bytes(4 * PART_BYTES), b"\xff" * (4 * PART_BYTES)
    store.put_bytes(reference("changing"), first)
    target = bytearray(len(first))
    with store.open(reference("changing")) as reader, memoryview(target) as view:
        reader.read_into(view[:10])
        if is_deleted:
            delete(store, "changing")
        else:
            store.put_bytes(reference("changing"), second)
        try:
            reader.read_into(view[10:])
        except ObjectMissing:
            assert is_deleted
        except ObjectChanged:
            assert not is_deleted
        else:
            assert target == first


def delete(store: ObjectStore, key: str) -> None:
    if isinstance(store, MemoryObjectStore):
        del store.objects[BUCKET][key]
    else:
        assert isinstance(store, S3ObjectStore)
        store.client.delete_object(Bucket=BUCKET, Key=key)


def test_abandoned_uploads_are_aborted_and_others_stay(store: ObjectStore) -> None:
    keys = {"p/left", "p/running", "q/left"}
    if isinstance(store, MemoryObjectStore):
        store.unfinished[BUCKET] |= keys
    else:
        assert isinstance(store, S3ObjectStore)
        for key in keys:
            begun = store.client.create_multipart_upload(Bucket=BUCKET, Key=key)
            store.client.upload_part(Bucket=BUCKET, Key=key, UploadId=begun["UploadId"], PartNumber=1, Body=b"x")
    assert store.abort_uploads(reference("p/"), lambda key: key.endswith("left")) == 1
    assert store.abort_uploads(reference("p/"), lambda key: key.endswith("left")) == 0
    assert store.abort_uploads(reference(""), lambda _: True) == 2


def test_objects_are_listed_by_key(store: ObjectStore) -> None:
    for key in ("p/b", "p/a", "q", "p/c/d"):
        store.put_bytes(reference(key), key.encode())
    listed = list(store.list(reference("p/")))
    assert [found.reference.key for found in listed] == ["p/a", "p/b", "p/c/d"]
    assert [found.bytes for found in listed] == [3, 3, 5]
    assert all(store.head(found.reference) == found for found in listed)
    assert list(store.list(reference("nothing"))) == []


def test_odd_keys_come_back(store: ObjectStore, request: pytest.FixtureRequest) -> None:
    plain, dots = "gen=1/rank=0/a b+c%20/ü.txt", "x/../y"
    # SeaweedFS refuses dots in keys, unlike S3
    is_seaweedfs = request.node.callspec.params["store"] == "seaweedfs_store"
    for key in (plain,) if is_seaweedfs else (plain, dots):
        store.put_bytes(reference(key), b"odd")
        assert store.get_bytes(reference(key)) == b"odd"


def test_many_threads_share_a_store(store: ObjectStore) -> None:
    def work(number: int) -> None:
        store.put_bytes(reference(f"thread/{number}"), bytes([number]))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [store.get_bytes(found.reference) for found in store.list(reference("thread/"))] == [
        bytes([number]) for number in range(8)
    ]


def test_a_probe_of_a_store_that_answers_succeeds(store: ObjectStore) -> None:
    store.put_bytes(reference("there"), b"hello")
    assert store.answers(reference("there"))
    assert store.answers(reference("missing"))


def test_a_probe_of_a_server_that_does_not_listen_fails() -> None:
    assert not s3_store(environment("http://127.255.255.254:9")).answers(reference("key"))


def test_nobody_listening_is_worth_another_try() -> None:
    """If no server listens at the store's address, the error states that a retry may succeed.

    The test uses port 9 of loopback, on which no process listens.
    """
    with pytest.raises(StoreUnavailable) as raised:
        s3_store(environment("http://127.255.255.254:9")).get_bytes(reference("key"))
    assert raised.value.retryable


@pytest.mark.parametrize(
    "url",
    [
        "",
        "https://s3.amazonaws.com",
        "http://10.0.0.1:9000",
        "http://127.0.0.1.example.com",
        "http://[::2]:1",
        "http://[",
    ],
)
def test_local_mode_reaches_loopback_only(url: str) -> None:
    with pytest.raises(ForbiddenEndpoint):
        s3_store(environment(url))


def test_a_poisoned_configuration_changes_nothing(s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Local mode ignores the user's AWS configuration, here with other credentials, another endpoint and a proxy."""
    config = tmp_path / "config"
    config.write_text(
        "[profile real]\nregion = eu-west-1\nendpoint_url = http://198.51.100.1\n[default]\nendpoint_url = "
        "http://198.51.100.1\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_PROFILE", "real")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://198.51.100.1")
    monkeypatch.setenv("HTTP_PROXY", "http://198.51.100.1:3128")
    monkeypatch.setenv("http_proxy", "http://198.51.100.1:3128")
    made = s3_store(environment(s3_url))
    assert made.client.meta.endpoint_url == s3_url
    assert made.client.meta.region_name == "us-east-1"
    assert made.head(reference("key")) is None
    made.client.close()


def test_errors_say_what_can_be_done(s3_url: str) -> None:
    made = s3_store(environment(s3_url))
    with pytest.raises(StorageError) as raised:
        made.put_bytes(ObjectReference(bucket="no such bucket!", key="k"), b"")
    assert not raised.value.retryable
    made.client.close()


def test_a_store_of_an_instance_without_keys_has_them_when_they_come(
    s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    made = s3_store({name: value for name, value in environment(s3_url).items() if "KEY" not in name})
    with pytest.raises(StoreUnavailable, match="Unable to locate credentials") as raised:
        made.head(reference("key"))
    assert raised.value.retryable, "the same call may find them"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    assert made.head(reference("key")) is None
    made.client.close()


def test_aws_without_an_endpoint_needs_no_network_to_be_named() -> None:
    made = s3_store({"AWS_REGION": "us-east-1", "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y"})
    assert made.client.meta.endpoint_url == "https://s3.amazonaws.com"
    made.client.close()
