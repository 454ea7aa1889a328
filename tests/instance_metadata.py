"""A server on loopback that answers like the EC2 instance metadata service."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

SPOT = '{"action": "terminate", "time": "2017-09-18T08:22:00Z"}'


class Service(HTTPServer):
    """IMDSv2: clients first request a token, then read paths. Undefined paths return 404."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.says: dict[str, str] = {}
        self.status: int | None = None
        self.tokens: set[str] = set()
        self.made = 0
        self.token_suffix = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Service

    def do_PUT(self) -> None:
        if self.path != "/latest/api/token" or not self.headers["X-aws-ec2-metadata-token-ttl-seconds"].isdecimal():
            return self.answer(400, "")
        self.server.made += 1
        token = f"token-{self.server.made}{self.server.token_suffix}"
        self.server.tokens.add(token)
        return self.answer(self.server.status or 200, token)

    def do_GET(self) -> None:
        if self.headers["X-aws-ec2-metadata-token"] not in self.server.tokens:
            return self.answer(401, "")
        body = self.server.says.get(self.path.removeprefix("/latest/meta-data/"))
        if self.server.status is not None:
            return self.answer(self.server.status, "")
        return self.answer(404, "<html>") if body is None else self.answer(200, body)

    def answer(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served() -> Iterator[Service]:
    """Run a metadata server for the duration of the block."""
    service = Service()
    thread = threading.Thread(target=service.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield service
    finally:
        service.shutdown()
        thread.join()
        service.server_close()
