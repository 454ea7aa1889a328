"""Tests uploads of sources directly to S3.

An object store signs the addresses for the uploads. Its HTTP server fails in the ways that a test chooses.
"""

from __future__ import annotations

import base64
import hashlib
import io
import logging
import secrets
import threading
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from control_plane.api.routes.sources import UPLOAD_SECONDS
from control_plane.cloud.errors import CloudUnavailable
from control_plane.cloud.objects import DELETED_AT_ONCE, SignedUpload
from control_plane.db.tokens import Role
from control_plane.loop.upload_keeper import KEPT, UploadKeeper
from everstep import exchanges, uploads
from everstep.protocol.plan import ObjectReference
from everstep.uploads import UploadOutcome
from tests.fakes.cloud import EPOCH, MemoryObjectStore
from tests.unit.control_plane.api.conftest import BUCKET, Service, refused
from tests.unit.control_plane.api.test_sources import archive, special


class SigningStore(MemoryObjectStore):
    """An in-memory object store with an HTTP server for signed uploads.

    Like S3, the server verifies the length and the checksum of each body.
    """

    def __init__(self) -> None:
        super().__init__(BUCKET)
        self.signed: dict[str, tuple[ObjectReference, str, int]] = {}
        """Object, checksum and length of each signed upload, by the signature in the address."""
        self.answers: list[int | str] = []
        """Results of the next requests, in order. An integer is an HTTP status.

        `cut` ends the connection in the middle of the body. `lost` stores the body but sends no response.
        """
        self.asked: list[dict[str, str]] = []
        self.is_lax = False
        """True if the server accepts bytes that do not match the signed checksum."""
        store = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                store.asked.append({name.lower(): value for name, value in self.headers.items()})
                fault = store.answers.pop(0) if store.answers else 200
                if fault == "cut":
                    self.rfile.read(1)
                    self.close_connection = True
                    return
                body = self.rfile.read(int(self.headers["content-length"]))
                status = (
                    fault
                    if isinstance(fault, int) and fault != 200
                    else store.take(self.path.rpartition("=")[2], body, self.headers)
                )
                if fault == "lost":
                    self.close_connection = True
                    return
                self.send_response(status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = False
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def sign_upload(
        self, reference: ObjectReference, *, sha256: str, size_bytes: int, seconds: int
    ) -> SignedUpload | None:
        assert seconds == UPLOAD_SECONDS
        signature = secrets.token_hex(8)
        checksum = base64.b64encode(bytes.fromhex(sha256)).decode()
        self.signed[signature] = (reference, checksum, size_bytes)
        return SignedUpload(f"{self.url}/{reference.key}?signature={signature}", {"x-amz-checksum-sha256": checksum})

    def take(self, signature: str, body: bytes, headers) -> int:
        if signature not in self.signed:
            return 403
        reference, checksum, size = self.signed[signature]
        if (headers["x-amz-checksum-sha256"], int(headers["content-length"])) != (checksum, size):
            return 403
        if not self.is_lax and base64.b64encode(hashlib.sha256(body).digest()).decode() != checksum:
            return 400
        self.put(reference, body)
        return 200

    def keys(self) -> list[str]:
        return [info.reference.key for info in self.list(ObjectReference(bucket=BUCKET, key=""))]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def store() -> Iterator[SigningStore]:
    with closing(SigningStore()) as made:
        yield made


@pytest.fixture
def service(tmp_path: Path, store: SigningStore) -> Iterator[Service]:
    with Service(tmp_path, objects=store) as running:
        yield running


@pytest.fixture
def client(service: Service, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(uploads, "put", partial(uploads.put, pause=lambda _seconds: None))
    with closing(service.client()) as connected:
        calls: list[str] = []
        connected.meta.events.register("before-call.everstep", lambda model, **_: calls.append(model.name))
        connected.calls = calls
        yield connected


BODY = archive(("train.py", b"print()"))
ID = hashlib.sha256(BODY).hexdigest()
KEY = f"projects/default/sources/{ID}.tar.gz"
UPLOAD = f"uploads/default/{ID}.tar.gz"


@pytest.mark.covers("CreateSource.SourceId", "CreateSource.Bytes", "CompleteSource.SourceId")
def test_an_archive_goes_straight_into_s3_and_only_once(client, store, service) -> None:
    assert client.upload_source(Body=BODY) == {"SourceId": ID}
    assert client.calls == ["CreateSource", "CompleteSource"]
    assert (store.keys(), store.get(ObjectReference(bucket=BUCKET, key=KEY))) == ([KEY], BODY)
    (sent,) = store.asked
    assert "authorization" not in sent, "the token is no business of S3's"
    described = client.describe_source(SourceId=ID)
    assert (described["Bytes"], described["FileCount"]) == (len(BODY), 1)
    client.calls.clear()
    client.upload_source(Body=BODY)
    assert client.calls == ["CreateSource"], "it is there already"
    assert len(store.asked) == 1
    assert list((service.settings.state_directory / "spool").iterdir()) == []


def test_an_address_is_for_one_archive_and_some_minutes(client, store, service) -> None:
    made = client.create_source(SourceId=ID, Bytes=len(BODY))
    assert made["IsStored"] is False
    assert store.signed[made["Upload"]["Url"].rpartition("=")[2]][1:] == (
        base64.b64encode(bytes.fromhex(ID)).decode(),
        len(BODY),
    )
    assert (made["Upload"]["ExpirationTime"] - service.clock()).total_seconds() == UPLOAD_SECONDS


def test_what_was_put_is_no_source_before_it_was_checked(client, store, service) -> None:
    made = client.create_source(SourceId=ID, Bytes=len(BODY))
    assert uploads.put(made["Upload"]["Url"], made["Upload"]["Headers"], io.BytesIO(BODY)) is UploadOutcome.TAKEN
    with refused("ResourceNotFoundException"):
        client.describe_source(SourceId=ID)
    assert store.keys() == [UPLOAD], "what was not checked does not lie where sources do"
    first = client.complete_source(SourceId=ID)
    again = client.complete_source(SourceId=ID)
    assert (first["FileCount"], again["FileCount"]) == (1, 1)
    assert store.keys() == [KEY]


def test_a_service_that_dies_before_it_has_deleted_an_upload_has_lost_nothing(
    client, service, store, monkeypatch
) -> None:
    made = client.create_source(SourceId=ID, Bytes=len(BODY))
    uploads.put(made["Upload"]["Url"], made["Upload"]["Headers"], io.BytesIO(BODY))

    def fail(*_: object) -> None:
        raise CloudUnavailable("S3 does not answer")

    monkeypatch.setattr(store, "delete", fail)
    assert client.complete_source(SourceId=ID)["FileCount"] == 1
    assert store.keys() == [KEY, UPLOAD]
    monkeypatch.undo()
    assert client.complete_source(SourceId=ID)["FileCount"] == 1
    assert keeper(store, service.clock() + KEPT + timedelta(seconds=1)).delete_due() == 1
    assert store.keys() == [KEY]


def test_a_service_that_dies_while_it_stores_a_source_is_asked_again(client, store, monkeypatch) -> None:
    made = client.create_source(SourceId=ID, Bytes=len(BODY))
    uploads.put(made["Upload"]["Url"], made["Upload"]["Headers"], io.BytesIO(BODY))

    def fail(*_: object) -> None:
        raise CloudUnavailable("S3 does not answer")

    with monkeypatch.context() as broken:
        broken.setattr(store, "put_file", fail)
        with refused("ServiceUnavailableException"):
            client.complete_source(SourceId=ID)
    assert store.keys() == [UPLOAD]
    assert client.complete_source(SourceId=ID)["FileCount"] == 1
    assert store.get(ObjectReference(bucket=BUCKET, key=KEY)) == BODY


def test_uploads_that_nobody_completes_go_after_a_day_and_sources_stay(store) -> None:
    for key in (UPLOAD, KEY, *(f"uploads/{number}.tar.gz" for number in range(DELETED_AT_ONCE + 1))):
        store.put(ObjectReference(bucket=BUCKET, key=key), BODY)
    assert keeper(store, EPOCH + KEPT).delete_due() == 0
    assert len(store.keys()) == DELETED_AT_ONCE + 3
    assert keeper(store, EPOCH + KEPT + timedelta(seconds=1)).delete_due() == DELETED_AT_ONCE + 2
    assert store.keys() == [KEY]


def keeper(store, now) -> UploadKeeper:
    return UploadKeeper(store, BUCKET, lambda: now)


def test_what_was_not_put_is_not_taken(client) -> None:
    client.create_source(SourceId=ID, Bytes=len(BODY))
    with refused("ConflictException", "No archive was uploaded for this source yet"):
        client.complete_source(SourceId=ID)


@pytest.mark.parametrize("faults", [[500], [503, 429], ["cut"], ["lost"]], ids=str)
def test_an_upload_that_breaks_is_made_again_from_its_beginning(client, store, faults) -> None:
    store.answers = list(faults)
    client.upload_source(Body=BODY)
    assert client.calls == ["CreateSource", "CompleteSource"]
    assert len(store.asked) == len(faults) + 1


def test_an_address_that_has_expired_is_asked_for_again_once(client, store) -> None:
    store.answers = [403]
    client.upload_source(Body=BODY)
    assert client.calls == ["CreateSource", "CreateSource", "CompleteSource"]
    other = archive(("other.py", b""))
    store.answers = [403, 403]
    client.calls.clear()
    client.upload_source(Body=other)
    assert client.calls == ["CreateSource", "CreateSource", "PutSource"], (
        "a clock that is wrong does not keep anybody from it"
    )


@pytest.mark.parametrize("faults", [[500] * 3, [400], [301], ["cut"] * 3], ids=str)
def test_where_s3_does_not_take_it_the_service_does(client, store, faults) -> None:
    store.answers = list(faults)
    client.upload_source(Body=BODY)
    assert client.calls == ["CreateSource", "PutSource"]
    assert store.keys() == [KEY]


def test_where_s3_cannot_be_reached_the_service_takes_it(client, store) -> None:
    store.url = "http://127.0.0.1:9"
    client.upload_source(Body=BODY)
    assert client.calls == ["CreateSource", "PutSource"]


def test_wrong_bytes_in_a_store_that_does_not_look_are_found(client, store) -> None:
    store.is_lax = True
    made = client.create_source(SourceId=ID, Bytes=len(BODY))
    wrong = BODY[:-1] + bytes([BODY[-1] ^ 1])
    assert uploads.put(made["Upload"]["Url"], made["Upload"]["Headers"], io.BytesIO(wrong)) is UploadOutcome.TAKEN
    with refused("ValidationException", "SHA-256 is"):
        client.complete_source(SourceId=ID)
    assert store.keys() == [UPLOAD], "S3 may have misread it"
    client.upload_source(Body=BODY)
    assert store.keys() == [KEY]


def test_an_upload_that_s3_misreads_stays_and_can_be_completed_later(client, store, monkeypatch) -> None:
    store.put(ObjectReference(bucket=BUCKET, key=UPLOAD), BODY)
    for garbled, code in ((BODY[:-1], "ServiceUnavailableException"), (bytes(len(BODY)), "ValidationException")):
        with monkeypatch.context() as patch, refused(code):
            patch.setattr(store, "stream", lambda _, body=garbled: iter([body]))
            client.complete_source(SourceId=ID)
        assert store.keys() == [UPLOAD]
    client.complete_source(SourceId=ID)
    assert store.keys() == [KEY]


def test_wrong_bytes_do_not_get_into_a_store_that_looks(client, store) -> None:
    made = client.create_source(SourceId=ID, Bytes=len(BODY))
    assert (
        uploads.put(made["Upload"]["Url"], made["Upload"]["Headers"], io.BytesIO(bytes(len(BODY))))
        is UploadOutcome.NOT_TAKEN
    )
    assert (
        uploads.put(made["Upload"]["Url"], made["Upload"]["Headers"], io.BytesIO(BODY + b"x")) is UploadOutcome.EXPIRED
    )
    assert store.keys() == []


def test_what_is_too_large_gets_no_address_and_is_not_read(client, store) -> None:
    with refused("ValidationException", r"larger than 1 MiB \(1048576 bytes\)") as caught:
        client.upload_source(Body=bytes(2**20 + 1))
    assert ".everstepignore" in caught.value.hint
    assert (client.calls, store.asked, store.signed) == (["CreateSource"], [], {})
    store.put(ObjectReference(bucket=BUCKET, key=UPLOAD), bytes(2**20 + 1))
    with refused("ValidationException", r"larger than 1 MiB"):
        client.complete_source(SourceId=ID)
    assert store.keys() == []


def test_uploads_that_the_server_reads_from_s3_count_as_its_disk_too(client, store, service) -> None:
    store.put(ObjectReference(bucket=BUCKET, key=UPLOAD), b"x")
    limit = service.services.source_limits.archive_bytes
    with (
        service.services.spool_room.hold("default", 2 * limit, limit),
        refused("ThrottlingException", "Too many uploads are in progress"),
    ):
        client.complete_source(SourceId=ID)


def test_what_grows_while_it_is_looked_at_is_not_read_to_its_end(client, store, monkeypatch) -> None:
    place = ObjectReference(bucket=BUCKET, key=UPLOAD)
    small = store.put(place, b"x")
    store.put(place, bytes(2**20 + 1))
    monkeypatch.setattr(store, "head", lambda _: small)
    with refused("ValidationException", r"larger than 1 MiB"):
        client.complete_source(SourceId=ID)
    assert store.keys() == []


@pytest.mark.parametrize(
    "body", [b"", b"not gzip at all", archive(special("link", b"2", "/etc/passwd"))], ids=["empty", "no gzip", "link"]
)
def test_an_archive_that_could_hurt_is_refused_and_deleted(client, store, body) -> None:
    with refused("ValidationException", "The source was rejected"):
        client.upload_source(Body=body)
    assert (client.calls, store.keys()) == (["CreateSource", "CompleteSource"], [])


def test_what_came_another_way_meanwhile_is_not_deleted(client, store, service, monkeypatch) -> None:
    store.put(ObjectReference(bucket=BUCKET, key=UPLOAD), b"wrong")
    stream = store.stream

    def overtaken(*given, **options):
        read = list(stream(*given, **options))
        client.put_source(SourceId=ID, Body=BODY)
        return iter(read)

    monkeypatch.setattr(store, "stream", overtaken)
    with refused("ValidationException", "SHA-256 is"):
        client.complete_source(SourceId=ID)
    assert store.get(ObjectReference(bucket=BUCKET, key=KEY)) == BODY


def test_of_two_who_complete_one_upload_at_once_none_fails(client, store, service, monkeypatch) -> None:
    made = client.create_source(SourceId=ID, Bytes=len(BODY))
    uploads.put(made["Upload"]["Url"], made["Upload"]["Headers"], io.BytesIO(BODY))
    head = store.head

    def overtaken(reference):
        monkeypatch.undo()
        with closing(service.client()) as other:
            assert other.complete_source(SourceId=ID)["FileCount"] == 1
        return head(reference)

    monkeypatch.setattr(store, "head", overtaken)
    assert client.complete_source(SourceId=ID)["FileCount"] == 1
    assert store.keys() == [KEY]


@pytest.mark.security
def test_a_project_cannot_complete_the_upload_of_another_project(client, store, service) -> None:
    """A project that knows the digest of another project's source cannot complete its upload.

    The service responds as if the upload did not exist.
    """
    client.create_source(SourceId=ID, Bytes=len(BODY))
    ((reference, _, _),) = store.signed.values()
    store.put(reference, BODY)
    with (
        closing(service.client(service.token(Role.SUBMITTER, "other"))) as stranger,
        refused("ConflictException", "No archive was uploaded"),
    ):
        stranger.complete_source(SourceId=ID)
    assert client.complete_source(SourceId=ID)["SourceId"] == ID


def test_readers_get_no_address(service) -> None:
    with closing(service.client(service.token(Role.VIEWER))) as reader:
        with refused("AccessDeniedException"):
            reader.create_source(SourceId=ID, Bytes=1)
        with refused("AccessDeniedException"):
            reader.complete_source(SourceId=ID)


def test_an_address_is_in_no_log(client, store, caplog) -> None:
    caplog.set_level(logging.DEBUG, logger=exchanges.log.name)
    client.upload_source(Body=BODY)
    assert f"> PUT {store.url}/{UPLOAD}" in caplog.text
    assert not any(signature in caplog.text for signature in store.signed)


def test_nothing_goes_in_the_clear_to_another_machine_and_the_service_takes_it() -> None:
    assert uploads.put("http://10.0.0.1/sources/x", {}, io.BytesIO(b"")) is UploadOutcome.NOT_TAKEN
