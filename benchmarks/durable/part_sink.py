"""An S3 server that discards the parts of multipart uploads. It uses little CPU time.

    client ── parts, at a limited rate ──▶ discarded
           ── other objects ─────────────▶ memory ──▶ reads, copies, lists

On two cores, a complete S3 server would slow training more than its client does; in production, it runs on other
machines. It checks no signatures and checksums. A completed multipart upload is an empty object, an unknown request
gets 501.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from benchmarks.durable.token_bucket import TokenBucket

PIECE_BYTES = 1024**2
"""Piece that a thread receives at once."""
ETAG = '"0"'
MISSING = "<Error><Code>NoSuchKey</Code></Error>"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_REGION": "us-east-1"}


class PartSink(ThreadingHTTPServer):
    """The server on a loopback port, with every bucket name. `bytes_per_second` limits parts over all connections."""

    request_queue_size = 128
    """With Python's default of 5, connections that a client opens at once could wait a second for a retransmission."""

    def __init__(self, bytes_per_second: float) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.part_limit = TokenBucket(bytes_per_second)
        self.objects: dict[str, bytes] = {}
        """Objects by path /bucket/key."""


class _Request(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: PartSink

    def do_PUT(self) -> None:
        """Receive a part and discard it, or store the body or a copy of another object."""
        source = self.headers.get("x-amz-copy-source")
        if source is None and "partNumber" in self._query:
            if self._discard():
                self._answer(ETag=ETAG)
            return
        body = self._body()
        if source is None:
            self.server.objects[self._path] = body
            self._answer(ETag=ETAG)
        elif "partNumber" in self._query:
            self._answer(status=HTTPStatus.NOT_IMPLEMENTED)
        elif (content := self.server.objects.get("/" + unquote(source).lstrip("/"))) is not None:
            self.server.objects[self._path] = content
            self._answer(f"<CopyObjectResult><ETag>{ETAG}</ETag></CopyObjectResult>")
        else:
            self._answer(MISSING, HTTPStatus.NOT_FOUND)

    def do_POST(self) -> None:
        """Begin or complete a multipart upload."""
        self._body()
        if "uploads" in self._query:
            upload_id = f"<UploadId>{time.monotonic_ns()}</UploadId>"
            self._answer(f"<InitiateMultipartUploadResult>{upload_id}</InitiateMultipartUploadResult>")
        elif "uploadId" in self._query:
            self.server.objects[self._path] = b""
            self._answer(f"<CompleteMultipartUploadResult><ETag>{ETAG}</ETag></CompleteMultipartUploadResult>")
        else:
            self._answer(status=HTTPStatus.NOT_IMPLEMENTED)

    def do_GET(self) -> None:
        """Return an object, keys with a prefix, or an empty list of unfinished uploads."""
        if "uploads" in self._query:
            self._answer("<ListMultipartUploadsResult/>")
        elif "list-type" in self._query:
            self._answer(_listing(self.server.objects, self._path.rstrip("/") + "/", self._query.get("prefix", "")))
        elif (content := self.server.objects.get(self._path)) is not None:
            self._answer(content, ETag=ETAG)
        else:
            self._answer(MISSING, HTTPStatus.NOT_FOUND)

    def do_DELETE(self) -> None:
        """Delete an object. An aborted multipart upload has stored nothing."""
        if "uploadId" not in self._query:
            self.server.objects.pop(self._path, None)
        self._answer(status=HTTPStatus.NO_CONTENT)

    def log_message(self, *_: object) -> None:
        pass

    @property
    def _path(self) -> str:
        return unquote(urlsplit(self.path).path)

    @property
    def _query(self) -> dict[str, str]:
        return {name: values[0] for name, values in parse_qs(urlsplit(self.path).query, keep_blank_values=True).items()}

    @property
    def _length(self) -> int:
        return int(self.headers.get("Content-Length", 0))

    def _body(self) -> bytes:
        return self.rfile.read(self._length)

    def _discard(self) -> bool:
        """Receive the body at the server's rate. Return False if the client closed the connection first."""
        left, target = self._length, memoryview(bytearray(PIECE_BYTES))
        while left:
            self.server.part_limit.spend(min(left, PIECE_BYTES))
            taken = self.rfile.readinto(target[: min(left, PIECE_BYTES)])  # type: ignore[attr-defined]
            if not taken:
                return False
            left -= taken
        return True

    def _answer(self, body: bytes | str = b"", status: HTTPStatus = HTTPStatus.OK, **headers: str) -> None:
        data = body.encode() if isinstance(body, str) else body
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if status is not HTTPStatus.NO_CONTENT:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _listing(objects: Mapping[str, bytes], bucket: str, prefix: str) -> str:
    found = [(path, content) for path, content in sorted(objects.items()) if path.startswith(bucket + prefix)]
    entries = "".join(
        f"<Contents><Key>{escape(path.removeprefix(bucket))}</Key><Size>{len(content)}</Size><ETag>{ETAG}</ETag>"
        "</Contents>"
        for path, content in found
    )
    return f"<ListBucketResult><KeyCount>{len(found)}</KeyCount>{entries}</ListBucketResult>"


@contextmanager
def running_part_sink(bytes_per_second: float) -> Iterator[dict[str, str]]:
    """Run a `PartSink` while the `with` block runs. Yield variables with address, keys and region for clients."""
    with PartSink(bytes_per_second) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield {**CREDENTIALS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}"}
        finally:
            server.shutdown()
            thread.join()
