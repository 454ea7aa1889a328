"""Tests transfers over several connections to S3.

The tests cover the parts of each connection, the memory in use, and the cleanup after a failure.
"""

from __future__ import annotations

import base64
import hashlib
import io
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from awscrt.checksums import crc64nvme
from botocore.exceptions import ClientError
from botocore.parsers import ResponseParserError
from botocore.response import StreamingBody
from urllib3.exceptions import ProtocolError

from everstep import bulk
from everstep.protocol.plan import ObjectReference
from worker.errors import ObjectChanged, StorageError, StoreRefused, StoreUnavailable
from worker.storage.aws import aws_errors
from worker.storage.object_store import Span, cut
from worker.storage.s3 import CONNECTIONS, S3ObjectStore

WHERE = ObjectReference(bucket="bucket", key="key")
PART = 1000
DATA = bytes(number * 7 % 251 for number in range(11 * PART + 123))


def refusal(code: str, status: int) -> ClientError:
    return ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "call")  # type: ignore[typeddict-item]


class Raw(io.BytesIO):
    """The bytes of one connection, which may break after `breaks_after` bytes."""

    breaks_after: int | None = None

    def readinto(self, buffer: Any) -> int:
        if self.breaks_after is not None and self.tell() + len(buffer) > self.breaks_after:
            raise ProtocolError("reset by peer")
        return super().readinto(buffer)


class FakeS3:
    """A fake of the S3 operations for one object. `on_part` and `on_get` run code of the test during a call."""

    def __init__(self, data: bytes = b"", etag: str = "first") -> None:
        self.data, self.etag = data, etag
        self.parts: dict[int, bytes] = {}
        self.begun: list[int] = []
        self.completed: list[dict[str, Any]] = []
        self.aborted_count = 0
        self.in_flight = self.most_in_flight = 0
        self.gets: list[dict[str, str]] = []
        self.raws: list[Raw] = []
        self.on_part: Callable[[int], None] = lambda number: None
        self.on_body: Callable[[Any], object] = lambda body: None
        self.on_get: Callable[[int, dict[str, Any]], None] = lambda begin, answer: None
        self._lock = threading.Lock()
        self.meta = SimpleNamespace(events=SimpleNamespace(register_first=lambda *_, **__: None))

    def create_multipart_upload(self, **_: object) -> dict[str, str]:
        return {"UploadId": "upload"}

    def upload_part(self, *, PartNumber: int, Body: Any, ChecksumCRC64NVME: str, **_: object) -> dict[str, str]:
        with self._lock:
            self.begun.append(PartNumber)
            self.in_flight += 1
            self.most_in_flight = max(self.in_flight, self.most_in_flight)
        try:
            self.on_part(PartNumber)
            sent = as_sent(Body)
            Body.seek(0)
            self.on_body(Body)
            assert base64.b64decode(ChecksumCRC64NVME) == crc64nvme(sent).to_bytes(8, "big")
            assert Body.sha256 == hashlib.sha256(sent).digest()
            self.parts[PartNumber] = sent
        finally:
            with self._lock:
                self.in_flight -= 1
        return {"ETag": f'"{PartNumber}"'}

    def put_object(self, *, Body: Any, ChecksumCRC64NVME: str, **_: object) -> dict[str, str]:
        self.upload_part(PartNumber=1, Body=Body, ChecksumCRC64NVME=ChecksumCRC64NVME)
        return {"ETag": '"whole"'}

    def complete_multipart_upload(self, *, MultipartUpload: dict[str, Any], **_: object) -> dict[str, str]:
        self.completed = MultipartUpload["Parts"]
        return {"ETag": '"whole-12"'}

    def abort_multipart_upload(self, **_: object) -> None:
        assert self.in_flight == 0, "a part that arrives after the abort is kept, and paid for"
        self.aborted_count += 1

    def get_object(self, *, Range: str = "", IfMatch: str = "", **_: object) -> dict[str, Any]:
        with self._lock:
            self.gets.append({"Range": Range, "IfMatch": IfMatch})
        if IfMatch not in ("", f'"{self.etag}"'):
            raise refusal("PreconditionFailed", 412)
        begin, end = 0, len(self.data)
        answer: dict[str, Any] = {"ETag": f'"{self.etag}"'}
        if Range:
            begin, last = map(int, Range.removeprefix("bytes=").split("-"))
            if begin >= end:
                raise refusal("InvalidRange", 416)
            end = min(end, last + 1)
            answer["ContentRange"] = f"bytes {begin}-{end - 1}/{len(self.data)}"
        raw = Raw(self.data[begin:end])
        answer |= {"ContentLength": end - begin, "Body": StreamingBody(raw, end - begin)}
        self.on_get(begin, answer)
        self.raws.append(answer["Body"]._raw_stream)
        return answer

    @property
    def ranges(self) -> list[Span]:
        asked = [each["Range"].removeprefix("bytes=").split("-") for each in self.gets]
        return sorted((int(first), min(int(last) + 1, len(self.data))) for first, last in asked)


def as_sent(body: Any) -> bytes:
    """Read a request body as botocore does: once to sign it, and once to send it."""
    length, first = len(body), b"".join(iter(body.read, b""))
    body.seek(0)
    assert b"".join(iter(body.read, b"")) == first
    assert (len(first), body.tell()) == (length, length)
    return first


def store_of(client: FakeS3, part_bytes: int = PART) -> S3ObjectStore:
    return S3ObjectStore(client, part_bytes=part_bytes, range_bytes=part_bytes)  # type: ignore[arg-type]


def pieces_of(data: bytes, size: int = 300) -> Iterator[bytes]:
    return (data[start : start + size] for start in range(0, len(data), size))


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("s3-")]


class Forgetful(FakeS3):
    """A fake of S3 whose answer to the last call of an upload is lost. botocore repeats the call and finds no
    upload.
    """

    found: dict[str, Any] | None = None

    def complete_multipart_upload(self, **_: object) -> dict[str, str]:
        raise refusal("NoSuchUpload", 404)

    def head_object(self, **_: object) -> dict[str, Any]:
        if self.found is None:
            raise refusal("404", 404)
        return self.found


# -- tests of puts: uploads of one object


def test_an_upload_that_was_completed_before_its_answer_was_lost_is_there() -> None:
    client = Forgetful()
    checksum = base64.b64encode(crc64nvme(DATA).to_bytes(8, "big")).decode()
    client.found = {"ContentLength": len(DATA), "ETag": '"whole-12"', "ChecksumCRC64NVME": checksum}
    stored = store_of(client).put_stream(WHERE, pieces_of(DATA), len(DATA))
    assert (stored.bytes, stored.etag) == (len(DATA), "whole-12")
    assert client.aborted_count == 0
    other = base64.b64encode(crc64nvme(DATA[::-1]).to_bytes(8, "big")).decode()
    for found in (
        None,
        {"ContentLength": 1, "ETag": '"other"', "ChecksumCRC64NVME": checksum},
        {"ContentLength": len(DATA), "ETag": '"other"', "ChecksumCRC64NVME": other},
        {"ContentLength": len(DATA), "ETag": '"other"', "ChecksumCRC64NVME": checksum, "ChecksumType": "COMPOSITE"},
        {"ContentLength": len(DATA), "ETag": '"other"'},
    ):
        client.found = found
        with pytest.raises(StoreUnavailable, match="NoSuchUpload"):
            store_of(client).put_stream(WHERE, pieces_of(DATA), len(DATA))


def test_parts_go_side_by_side_and_are_named_in_order() -> None:
    client, together, second = FakeS3(), threading.Barrier(CONNECTIONS), threading.Event()

    def on_part(number: int) -> None:
        assert threading.current_thread().name.startswith("s3-put")
        if number <= CONNECTIONS:
            together.wait(timeout=10)
        if number == 2:
            second.set()
        if number == 1:
            assert_set(second)

    client.on_part = on_part
    stored = store_of(client).put_stream(WHERE, pieces_of(DATA), len(DATA))
    assert [part["PartNumber"] for part in client.completed] == list(range(1, 13))
    assert [part["ETag"] for part in client.completed] == [f'"{number}"' for number in range(1, 13)]
    assert b"".join(client.parts[number] for number in range(1, 13)) == DATA
    assert (client.most_in_flight, client.aborted_count, stored.etag) == (CONNECTIONS, 0, "whole-12")


def test_an_upload_has_at_most_so_many_parts_as_s3_allows() -> None:
    client, data = FakeS3(), bytes(range(200)) * (2 * bulk.MOST_PARTS // 200)
    store_of(client, 1).put_stream(WHERE, pieces_of(data), len(data))
    assert (len(client.parts), {len(part) for part in client.parts.values()}) == (bulk.MOST_PARTS, {2})
    assert b"".join(client.parts[number] for number in sorted(client.parts)) == data


@pytest.mark.parametrize("part_bytes", [PART, 2 * PART, 6 * PART])
def test_no_more_is_digested_than_is_sent_soon(monkeypatch: pytest.MonkeyPatch, part_bytes: int) -> None:
    """An upload reads only the pieces of the parts that its connections send, and of one part that waits.

    The fake S3 answers no request until the upload itself waits for an answer. Without this delay, parts would end
    quickly, and the test would not notice an upload that reads too far ahead.
    """
    client, go, data = FakeS3(), threading.Event(), bytes(12 * PART)
    beyond: list[int] = []

    def wait(parts: Any, **options: Any) -> Any:
        go.set()
        return futures.wait(parts, **options)

    monkeypatch.setattr(bulk, "wait", wait)
    client.on_part = lambda number: assert_set(go)

    def pieces() -> Iterator[bytes]:
        for start in range(0, len(data), PART):
            if (unsent := start + PART - len(client.parts) * part_bytes) > (CONNECTIONS + 1) * part_bytes:
                beyond.append(unsent)
            if start + PART == len(data) or beyond:
                go.set()
            yield data[start : start + PART]

    store_of(client, part_bytes).put_stream(WHERE, pieces(), len(data))
    assert not beyond
    assert b"".join(client.parts[number] for number in sorted(client.parts)) == data
    assert {len(part) for part in client.parts.values()} == {part_bytes}


@pytest.mark.parametrize("size", [1, 3 * PART // 2, len(DATA)])
def test_pieces_are_sent_from_where_they_lie(size: int) -> None:
    client, data = FakeS3(), bytearray(DATA[:size])
    seen: list[Any] = []
    client.on_body = seen.append

    store_of(client).put_stream(WHERE, [memoryview(data)], size)
    assert seen
    for body in seen:
        piece = body.read()
        assert isinstance(piece, memoryview)
        assert piece.obj is data


def test_small_pieces_come_together() -> None:
    client = FakeS3()
    seen: list[Any] = []
    client.on_body = seen.append
    store_of(client).put_stream(WHERE, pieces_of(DATA, 7), len(DATA))
    for body in seen:
        assert len(body.read()) == len(body)


def assert_set(event: threading.Event) -> None:
    assert event.wait(timeout=10)


def test_nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload sends a part without copying its bytes.

    All ranks of a node upload at the same time. Copies of their parts would need more memory than the rest of the
    agent.
    """
    size = 1 << 20
    client, buffer = FakeS3(), memoryview(bytes(size))
    monkeypatch.setattr(FakeS3, "upload_part", lambda self, **_: {"ETag": '"1"'})
    store = store_of(client, size)
    tracemalloc.start()
    try:
        store.put_stream(WHERE, (buffer for _ in range(24)), 24 * size)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(client.completed) == 24
    assert peak < size / 4


def test_of_a_file_three_parts_are_held_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most three parts of a file are in memory: one is sent, one waits, and one is read."""
    size, path = 1 << 20, tmp_path / "log"
    path.write_bytes(bytes(12 * size))
    client = FakeS3()
    monkeypatch.setattr(FakeS3, "upload_part", lambda self, **_: {"ETag": '"1"'})
    tracemalloc.start()
    try:
        store_of(client, size).put_file(WHERE, path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(client.completed) == 12
    assert peak < 3.5 * size


def test_a_part_that_fails_ends_the_put(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a part fails, the upload starts no further part, waits for the running parts, and fails with the first error.

    In the test, the second of four simultaneous parts fails first. The fifth part waits and never starts.
    """
    client, together, is_waiting, has_waited = (
        FakeS3(),
        threading.Barrier(CONNECTIONS),
        threading.Event(),
        threading.Event(),
    )

    def wait(parts: Any, **options: Any) -> Any:
        is_waiting.set()
        found = futures.wait(parts, **options)
        has_waited.set()
        return found

    def on_part(number: int) -> None:
        together.wait(timeout=10)
        if number == 2:
            assert_set(is_waiting)
            raise refusal("SlowDown", 503)
        assert_set(has_waited)
        raise refusal("AccessDenied", 403)

    monkeypatch.setattr(bulk, "wait", wait)
    client.on_part = on_part
    with pytest.raises(StoreUnavailable, match="SlowDown"):
        store_of(client).put_stream(WHERE, pieces_of(DATA), len(DATA))
    assert sorted(client.begun) == [1, 2, 3, 4]
    assert (client.in_flight, client.aborted_count, client.completed) == (0, 1, [])


def test_an_answer_that_botocore_cannot_parse_is_tried_again() -> None:
    with pytest.raises(StoreUnavailable, match="a page of HTML"), aws_errors("s3://bucket/key"):
        raise ResponseParserError("a page of HTML")


class InTurn(ThreadPoolExecutor):
    """An executor that waits for each call before it accepts the next."""

    def submit(self, *work: Any, **options: Any) -> Any:
        begun = super().submit(*work, **options)
        futures.wait([begun])
        return begun


def test_nothing_is_asked_for_after_a_part_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "ThreadPoolExecutor", InTurn)
    client, asked = FakeS3(), []

    def on_part(number: int) -> None:
        raise refusal("AccessDenied", 403)

    def pieces() -> Iterator[bytes]:
        for number in range(12):
            asked.append(number)
            yield bytes(PART)

    client.on_part = on_part
    with pytest.raises(StorageError, match="AccessDenied"):
        store_of(client, 6 * PART).put_stream(WHERE, pieces(), 12 * PART)
    assert asked == list(range(6))
    assert client.aborted_count == 1


def test_pieces_that_fail_end_the_put_when_its_parts_have_ended() -> None:
    client, begun, go = FakeS3(), threading.Barrier(3), threading.Event()

    class Broken(Exception):
        pass

    def on_part(number: int) -> None:
        begun.wait(timeout=10)
        assert_set(go)

    def pieces() -> Iterator[bytes]:
        yield from pieces_of(DATA[: 2 * PART], PART)
        begun.wait(timeout=10)
        go.set()
        raise Broken

    client.on_part = on_part
    with pytest.raises(Broken):
        store_of(client).put_stream(WHERE, pieces(), len(DATA))
    assert sorted(client.parts) == [1, 2]
    assert (client.aborted_count, client.completed) == (1, [])


def test_a_last_part_that_fails_is_not_left_out() -> None:
    client = FakeS3()

    def on_part(number: int) -> None:
        if number == 12:
            raise refusal("InternalError", 500)

    client.on_part = on_part
    with pytest.raises(StoreUnavailable):
        store_of(client).put_stream(WHERE, pieces_of(DATA), len(DATA))
    assert (client.aborted_count, client.completed) == (1, [])


@pytest.mark.parametrize("off", [-1, 1])
def test_another_length_is_refused_when_parts_are_under_way(off: int) -> None:
    client = FakeS3()
    with pytest.raises(StoreRefused):
        store_of(client).put_stream(WHERE, pieces_of(DATA), len(DATA) + off)
    assert (client.aborted_count, client.completed) == (1, [])


# -- tests of reads: downloads of parts of one object


@pytest.mark.parametrize("size", [1, PART])
def test_a_small_object_is_one_request(size: int) -> None:
    client = FakeS3(DATA[:size])
    assert store_of(client).get_bytes(WHERE) == DATA[:size]
    assert len(client.gets) == 1


def test_an_empty_object_has_no_range() -> None:
    client = FakeS3()
    assert store_of(client).get_bytes(WHERE) == b""
    assert [each["Range"] for each in client.gets] == [f"bytes=0-{PART - 1}", ""]


def test_ranges_cover_an_object_exactly_and_come_side_by_side() -> None:
    client, together = FakeS3(DATA), threading.Barrier(CONNECTIONS)

    def on_get(begin: int, answer: dict[str, Any]) -> None:
        if PART <= begin < (1 + 2 * CONNECTIONS) * PART:
            assert threading.current_thread().name.startswith("s3-get")
            together.wait(timeout=10)

    client.on_get = on_get
    target = bytearray(len(DATA))
    with store_of(client).open(WHERE) as reader, memoryview(target) as view:
        assert reader.bytes == len(DATA)
        reader.read_into(view[:8])
        reader.read_into(view[8:])
    assert target == DATA
    assert client.ranges == [(start, min(len(DATA), start + PART)) for start in range(0, len(DATA), PART)]
    assert [each["IfMatch"] for each in client.gets] == ["", *['"first"'] * 11]
    assert all(raw.closed for raw in client.raws)


def test_spans_are_filled_in_order_and_nothing_between_them() -> None:
    client = FakeS3(DATA)
    spans = [(5, 1700), (1700, 1701), (1800, 9000), (9001, 9001 + len(DATA) - 8896)]
    target = bytearray(b"\xaa" * 20_000)
    with store_of(client).open(WHERE) as reader, memoryview(target) as view:
        reader.read_into(view, spans)
    assert b"".join(target[begin:end] for begin, end in spans) == DATA
    assert target[:5] + target[1701:1800] + target[9000:9001] + target[spans[-1][1] :] == b"\xaa" * (
        len(target) - len(DATA)
    )


def test_small_targets_share_a_stream_which_a_large_one_leaves() -> None:
    client, target = FakeS3(DATA), bytearray(len(DATA))
    with store_of(client).open(WHERE) as reader, memoryview(target) as view:
        for start in range(0, 2500, 100):
            reader.read_into(view[start : start + 100])
        assert client.ranges == [(0, PART), (PART, len(DATA))]
        reader.read_into(view[2500:7000])
        assert client.ranges[2:] == [(2500, 3500), (3500, 4500), (4500, 5500), (5500, 6500), (6500, 7000)]
        for start in range(7000, len(DATA), 100):
            reader.read_into(view[start : start + 100])
    assert target == DATA
    assert client.ranges[-1] == (7000, len(DATA))
    assert len(client.gets) == 8
    assert all(raw.closed for raw in client.raws)


def read_all(client: FakeS3) -> None:
    try:
        store_of(client).get_bytes(WHERE)
    finally:
        assert all(raw.closed for raw in client.raws)


def test_an_object_that_changes_between_two_ranges_is_not_mixed() -> None:
    client, has_changed = FakeS3(DATA), threading.Event()

    def on_get(begin: int, answer: dict[str, Any]) -> None:
        if begin == 2 * PART:
            client.data, client.etag = bytes(len(DATA)), "second"
            has_changed.set()
        elif begin > 2 * PART:
            assert_set(has_changed)

    client.on_get = on_get
    with pytest.raises(ObjectChanged):
        read_all(client)
    assert len(client.gets) < 12, "ranges are asked for after one has failed"


@pytest.mark.parametrize(
    "told",
    [
        None,
        "bytes 3001-4000/11123",
        "bytes 3000-3998/11123",
        "bytes 3000-3999/11124",
        "bytes 3000-3999/*",
        "bytes 3000-3999/3999",
    ],
)
def test_another_range_than_the_one_asked_for_is_refused(told: str | None) -> None:
    client = FakeS3(DATA)

    def on_get(begin: int, answer: dict[str, Any]) -> None:
        if begin == 3 * PART:
            answer["ContentRange"] = told

    client.on_get = on_get
    with pytest.raises(StoreUnavailable, match="3000"):
        read_all(client)


def test_a_range_that_is_shorter_than_what_was_asked_for_is_refused() -> None:
    client = FakeS3(DATA)

    def on_get(begin: int, answer: dict[str, Any]) -> None:
        if begin == 3 * PART:
            answer |= {
                "ContentLength": 10,
                "ContentRange": f"bytes 3000-3009/{len(DATA)}",
                "Body": StreamingBody(Raw(bytes(10)), 10),
            }

    client.on_get = on_get
    with pytest.raises(StoreUnavailable, match="3000"):
        read_all(client)


@pytest.mark.parametrize("told", ["bytes 1-1000/11123", "bytes 0-998/11123", "bytes 0-999/999", "nothing"])
def test_a_first_range_that_is_another_is_refused(told: str) -> None:
    client = FakeS3(DATA)
    client.on_get = lambda begin, answer: answer.update(ContentRange=told)
    with pytest.raises(StoreUnavailable), store_of(client).open(WHERE):
        pass
    assert client.raws[0].closed


@pytest.mark.parametrize("how", ["reset", "short"])
@pytest.mark.parametrize("where", [0, 5 * PART])
@pytest.mark.parametrize("is_lasting", [False, True])
def test_a_body_that_breaks_off_continues_after_a_pause(
    how: str, where: int, is_lasting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, pauses = FakeS3(DATA), list[float]()
    monkeypatch.setattr(bulk, "pause_seconds", pauses.append)

    def on_get(begin: int, answer: dict[str, Any]) -> None:
        if where <= begin < where + PART and (is_lasting or not pauses):
            data = DATA[begin : where + PART]
            raw = Raw(data if how == "reset" else data[:10])
            raw.breaks_after = 10 if how == "reset" else None
            answer["Body"] = StreamingBody(raw, len(data))

    client.on_get = on_get
    if is_lasting:
        with pytest.raises(StoreUnavailable):
            read_all(client)
    else:
        read_all(client)
    assert len(pauses) == (bulk.READ_ATTEMPTS - 1 if is_lasting else 1)
    assert all(0 <= pause <= bulk.full_jitter(number, lambda: 1.0) for number, pause in enumerate(pauses, 1))


def test_spans_are_cut_to_a_limit() -> None:
    assert list(cut([(0, 5), (5, 5), (7, 12)], 4)) == [[(0, 4)], [(4, 5), (7, 10)], [(10, 12)]]
    assert list(cut([(0, 5), (7, 12)], 4, first=6)) == [[(0, 5), (7, 8)], [(8, 12)]]
    assert list(cut([(0, 0)], 4)) == list(cut([], 4)) == []
