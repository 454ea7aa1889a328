"""Emulates EC2's instance metadata service, version 2, at one address per instance. Source: EC2 User Guide (IMDSv2).

The service stores no metadata, but requests it from the callback `facts` for every request.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler
from typing import Any, Final

from infra.local_cloud.signatures import SignedRequest, stray

PREFIX: Final = "/latest/meta-data/"
TOKEN_PATH: Final = "/latest/api/token"
LONGEST_TTL_SECONDS: Final = 21_600
REQUEST_SECONDS: Final = 5.0
MAX_TOKENS: Final = 1000
"""Limit per instance. The oldest tokens are dropped first."""


class MetadataService:
    """Serves the metadata of all instances, with one listening socket per instance.

    `facts` returns an instance's metadata by path below `/latest/meta-data/`, and is called from many threads.
    """

    def __init__(
        self, facts: Callable[[str], Mapping[str, str]], monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._facts = facts
        self._monotonic = monotonic
        self._endpoints: dict[str, socket.socket] = {}

    def open(self, instance_id: str, listening: socket.socket) -> str:
        """Serve an instance's metadata on a listening socket until `close`, and return the URL."""
        self.close(instance_id)
        self._endpoints[instance_id] = listening
        tokens: dict[str, float] = {}
        threading.Thread(
            target=self._accept, args=(instance_id, listening, tokens), name=f"metadata {instance_id}", daemon=True
        ).start()
        host, port = listening.getsockname()
        return f"http://{host}:{port}"

    def close(self, instance_id: str) -> None:
        """Stop serving an instance's metadata. Idempotent."""
        listening = self._endpoints.pop(instance_id, None)
        if listening:
            # shutdown() wakes the thread that waits for connections, which then ends.
            listening.shutdown(socket.SHUT_RDWR)
            listening.close()

    def _accept(self, instance_id: str, listening: socket.socket, tokens: dict[str, float]) -> None:
        while True:
            try:
                connection, peer = listening.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(instance_id, connection, peer, tokens), daemon=True).start()

    def _answer(self, instance_id: str, connection: socket.socket, peer: Any, tokens: dict[str, float]) -> None:
        class Handler(_Handler):
            known, facts, monotonic = (
                tokens,
                staticmethod(lambda: self._facts(instance_id)),
                staticmethod(self._monotonic),
            )

        with connection:
            try:
                Handler(connection, peer, None)  # type: ignore[arg-type]
            except OSError:
                return  # The client has closed the connection.


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = REQUEST_SECONDS
    known: dict[str, float]
    """Issued tokens with their expiry in monotonic seconds."""
    facts: Callable[[], Mapping[str, str]]
    monotonic: Callable[[], float]

    def parse_request(self) -> bool:
        """Parse a request. Refuse requests from web pages and, as AWS does, with X-Forwarded-For."""
        if not super().parse_request():
            return False
        host, port = self.connection.getsockname()[:2]
        request = SignedRequest(method=self.command, target=self.path, headers=tuple(self.headers.items()))
        if stray(request, f"{host}:{port}") or "X-Forwarded-For" in self.headers:
            self._say(403)
            return False
        return True

    def do_PUT(self) -> None:
        seconds = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
        if self.path != TOKEN_PATH:
            self._say(404)
        elif not seconds.isascii() or not seconds.isdigit() or not 1 <= int(seconds) <= LONGEST_TTL_SECONDS:
            self._say(400)
        else:
            token = secrets.token_urlsafe(40)
            while len(self.known) >= MAX_TOKENS:
                self.known.pop(next(iter(self.known)), None)
            self.known[token] = self.monotonic() + int(seconds)
            self._say(200, token, [("X-Aws-Ec2-Metadata-Token-Ttl-Seconds", seconds)])

    def do_GET(self) -> None:
        good_until = self.known.get(self.headers.get("X-aws-ec2-metadata-token", ""))
        if good_until is None or self.monotonic() >= good_until:
            return self._say(401)
        facts = self.facts() if self.path.startswith(PREFIX) or f"{self.path}/" == PREFIX else {}
        path = self.path.removeprefix(PREFIX.rstrip("/")).strip("/")
        if path in facts:
            return self._say(200, facts[path])
        below = sorted({_child(name, path) for name in facts if not path or name.startswith(f"{path}/")})
        return self._say(200, "\n".join(below)) if below else self._say(404)

    def _say(self, status: int, text: str = "", headers: list[tuple[str, str]] | None = None) -> None:
        self.send_response(status)
        for name, value in [
            *(headers or []),
            ("Content-Type", "text/plain"),
            ("Content-Length", str(len(text.encode()))),
        ]:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        """Log nothing, because agents send requests every few seconds."""


def _child(name: str, path: str) -> str:
    """Return `name` in a listing of `path`, with a slash if it has children."""
    first, slash, _ = name.removeprefix(f"{path}/" if path else "").partition("/")
    return first + slash
