"""Messages reach a webhook signed, at the address that was checked, and follow no redirect."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from control_plane.cloud.errors import AccessDenied, CloudUnavailable
from control_plane.cloud.sinks import SinkEntry
from control_plane.cloud.webhooks import WebhookSink
from control_plane.core.webhooks import WebhookTarget, allowed, signed_headers

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
KEY = b"k" * 24
LOOPBACK = allowed(["receiver.test", "127.0.0.0/8"])


class Receiver(ThreadingHTTPServer):
    """An HTTP server that answers with `statuses` in turn, then with 204."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.statuses: list[int] = []
        self.taken: list[tuple[str, dict[str, str], bytes]] = []


class Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.taken.append((self.path, headers, body))
        self.send_response(self.server.statuses.pop(0) if self.server.statuses else 204)
        self.send_header("location", "/elsewhere")
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def sink(receiver: Receiver, *, receivers=LOOPBACK, resolve=lambda *_: ["127.0.0.1"], is_secure=False) -> WebhookSink:
    target = WebhookTarget(host="receiver.test", port=receiver.server_port, path="/hook?a=b", is_secure=is_secure)
    return WebhookSink(target, receivers, [KEY], lambda: NOW, resolve=resolve)


def entries(*numbers: int) -> list[SinkEntry]:
    return [
        SinkEntry(
            event_id=n, at=NOW, type="JobStateChanged", job_name=f"j{n}", project="", detail=json.dumps({"EventId": n})
        )
        for n in numbers
    ]


def test_each_event_is_one_signed_message(receiver: Receiver) -> None:
    assert sink(receiver).put(entries(1, 2)) is None
    assert [(path, body) for path, _, body in receiver.taken] == [
        ("/hook?a=b", b'{"EventId": 1}'),
        ("/hook?a=b", b'{"EventId": 2}'),
    ]
    _, headers, body = receiver.taken[1]
    assert signed_headers([KEY], "event-2", int(NOW.timestamp()), body).items() <= headers.items()
    assert (headers["host"], headers["content-type"]) == (f"receiver.test:{receiver.server_port}", "application/json")


@pytest.mark.security
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_refused_and_not_followed(receiver: Receiver, status: int) -> None:
    receiver.statuses = [status]
    with pytest.raises(AccessDenied, match="redirect"):
        sink(receiver).put(entries(1))
    assert len(receiver.taken) == 1


def test_an_error_of_the_receiver_ends_the_call_and_is_retryable(receiver: Receiver) -> None:
    receiver.statuses = [204, 500]
    with pytest.raises(CloudUnavailable, match="status 500"):
        sink(receiver).put(entries(1, 2, 3))
    assert len(receiver.taken) == 2


@pytest.mark.security
def test_the_name_is_resolved_once_and_the_checked_address_is_used(receiver: Receiver) -> None:
    answers = [["127.0.0.1"], ["169.254.169.254"]]
    with pytest.raises(AccessDenied, match=r"receiver\.test resolves to 169\.254\.169\.254"):
        sink(receiver, resolve=lambda *_: answers.pop(0)).put(entries(1, 2))
    assert [body for _, _, body in receiver.taken] == [b'{"EventId": 1}']


@pytest.mark.security
def test_an_address_that_is_not_allowed_gets_no_connection(receiver: Receiver) -> None:
    with pytest.raises(AccessDenied, match="not a public address"):
        sink(receiver, receivers=allowed(["receiver.test"])).put(entries(1))
    assert receiver.taken == []


def test_a_receiver_without_a_valid_certificate_is_not_trusted(receiver: Receiver) -> None:
    with pytest.raises(CloudUnavailable, match="does not answer"):
        sink(receiver, is_secure=True).put(entries(1))
    assert receiver.taken == []


def test_a_name_that_does_not_resolve_is_retryable(receiver: Receiver) -> None:
    def fail(*_: object) -> list[str]:
        raise OSError("no such name")

    with pytest.raises(CloudUnavailable, match="no such name"):
        sink(receiver, resolve=fail).put(entries(1))
