"""A proxy in front of an S3 server, which adds the faults that a test plans.

    client ──HTTP──▶ S3Proxy ──HTTP──▶ moto or SeaweedFS
                      └ the first planned fault that fits a request changes its answer or breaks its connection

Signatures stay valid, because the proxy forwards the client's Host header.
"""

from __future__ import annotations

import http.client
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

_BLOCK_BYTES = 64 * 1024
_HOP_HEADERS = frozenset({"connection", "expect", "transfer-encoding", "content-length"})


@dataclass(frozen=True, slots=True)
class Asked:
    """One request to S3."""

    method: str
    target: str
    """Path and query."""

    @property
    def operation(self) -> str:
        """The method and the query's first name, such as `POST uploads`; the method alone without a query."""
        return f"{self.method} {urlsplit(self.target).query.split('=')[0].split('&')[0]}".strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A fault: S3 refuses the request with an error document."""

    code: str
    status: int
    message: str = "no"
    retry_after: str = ""
    region: str = ""
    """Region of the bucket, which S3 names in its answer to a request of another region."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A fault: the connection breaks."""

    request_bytes: int | None = None
    """The connection breaks after this many bytes of the request's body, and the server never receives the request."""
    answer_bytes: int | None = None
    """The server executes the request, and the connection breaks after this many bytes of the answer's body.

    -1: the connection breaks before the answer's first line, so that the client does not learn the outcome.
    """


@dataclass(slots=True, kw_only=True)
class Planned:
    """A fault for the next requests of one operation."""

    fits: Callable[[Asked], bool]
    fault: Answer | Cut
    left: int
    """Number of further requests that the fault will affect."""


class S3Proxy:
    """A proxy on loopback. `plan` adds faults, and `met` counts the requests that a fault affected."""

    def __init__(self, url: str) -> None:
        """Start the proxy.

        Args:
            url: base URL of the S3 server.
        """
        self._server_at = urlsplit(url).netloc
        self._lock = threading.Lock()
        self._planned: list[Planned] = []
        self.met = 0
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                try:
                    super().handle_one_request()
                except OSError:  # The client has closed the connection.
                    self.close_connection = True

            def log_message(self, *_: object) -> None: ...

            def _serve(self) -> None:
                proxy.serve(self)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    def plan(self, fault: Answer | Cut, fits: Callable[[Asked], bool] = lambda _: True, *, times: int = 1) -> None:
        """Add a fault for the next `times` requests that fit."""
        with self._lock:
            self._planned.append(Planned(fits=fits, fault=fault, left=times))

    def clear(self) -> None:
        """Remove all planned faults, and set the counts to zero."""
        with self._lock:
            self._planned.clear()
            self.met = 0

    def _fault_of(self, asked: Asked) -> Answer | Cut | None:
        with self._lock:
            for planned in self._planned:
                if planned.left and planned.fits(asked):
                    planned.left -= 1
                    self.met += 1
                    return planned.fault
        return None

    def serve(self, handler: BaseHTTPRequestHandler) -> None:
        """Answer one request of a client."""
        fault = self._fault_of(Asked(handler.command, handler.path))
        size = int(handler.headers.get("Content-Length", 0))
        if isinstance(fault, Cut) and fault.request_bytes is not None:
            handler.rfile.read(min(size, fault.request_bytes))
            _reset(handler)
            return
        body = handler.rfile.read(size)
        if isinstance(fault, Answer):
            _refuse(handler, fault)
            return
        upstream = http.client.HTTPConnection(self._server_at)
        try:
            upstream.putrequest(handler.command, handler.path, skip_host=True, skip_accept_encoding=True)
            for name, value in handler.headers.items():
                if name.lower() not in _HOP_HEADERS:
                    upstream.putheader(name, value)
            upstream.putheader("Content-Length", str(len(body)))
            upstream.endheaders(body)
            self._pass_on(handler, upstream.getresponse(), None if fault is None else fault.answer_bytes)
        finally:
            upstream.close()

    def _pass_on(
        self, handler: BaseHTTPRequestHandler, answer: http.client.HTTPResponse, answer_bytes: int | None
    ) -> None:
        body = b"" if handler.command == "HEAD" else answer.read()
        if answer_bytes == -1:
            _reset(handler)
            return
        handler.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in _HOP_HEADERS:
                handler.send_header(name, value)
        length = answer.headers.get("Content-Length") if handler.command == "HEAD" else str(len(body))
        if length is not None and answer.status != 204:
            handler.send_header("Content-Length", length)
        handler.end_headers()
        handler.wfile.write(body if answer_bytes is None else body[:answer_bytes])
        if answer_bytes is not None:
            _reset(handler)


def _refuse(handler: BaseHTTPRequestHandler, answer: Answer) -> None:
    text = f"<Error><Code>{answer.code}</Code><Message>{answer.message}</Message></Error>"
    body = b"" if handler.command == "HEAD" else f'<?xml version="1.0" encoding="UTF-8"?>\n{text}'.encode()
    handler.send_response(answer.status)
    handler.send_header("Content-Type", "application/xml")
    handler.send_header("Content-Length", str(len(body)))
    if answer.retry_after:
        handler.send_header("Retry-After", answer.retry_after)
    if answer.region:
        handler.send_header("x-amz-bucket-region", answer.region)
    handler.end_headers()
    handler.wfile.write(body)


def _reset(handler: BaseHTTPRequestHandler) -> None:
    """Break the connection, so that the client's next read or write fails at once."""
    handler.wfile.flush()
    handler.close_connection = True
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()
