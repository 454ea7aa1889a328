"""A fake STS of one region. It verifies the AWS Signature Version 4 of each request.

Moto's STS accepts every signature. This server holds a few credentials and computes the signature of each request. It
answers GetCallerIdentity only if the signature matches. It records every request, so that a test can check which
requests arrived.
"""

from __future__ import annotations

import hashlib
import hmac
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs

REGION = "eu-west-1"
HOST = f"sts.{REGION}.amazonaws.com"
ACCOUNT = "123456789012"
IDENTITY = """<GetCallerIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">
  <GetCallerIdentityResult><Arn>{arn}</Arn><UserId>AROA:x</UserId><Account>{account}</Account></GetCallerIdentityResult>
  <ResponseMetadata><RequestId>1</RequestId></ResponseMetadata>
</GetCallerIdentityResponse>"""


@dataclass(frozen=True)
class Keys:
    """Temporary credentials of a role, which both the client and the fake STS know."""

    access_key: str
    secret_key: str
    token: str
    arn: str
    account: str = ACCOUNT


def keys_of(instance: str, *, role: str = "trainer", account: str = ACCOUNT, number: int = 0) -> Keys:
    return Keys(
        f"ASIA{number:016d}",
        f"secret{number}",
        f"token{number}",
        f"arn:aws:sts::{account}:assumed-role/{role}/{instance}",
        account,
    )


@dataclass
class Sts:
    """The credentials that the fake STS accepts, and its recorded requests."""

    known: dict[str, Keys] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)
    """Path and Host header of every request, in order."""
    answer: tuple[int, str, dict[str, str]] | None = None
    """Status, body and headers that replace the correct answer."""
    url: str = ""

    def knows(self, *keys: Keys) -> None:
        self.known.update({each.access_key: each for each in keys})


def signature(
    method: str, path: str, query: str, headers: dict[str, str], signed: list[str], body: bytes, secret: str, scope: str
) -> str:
    """Return the signature of a request, computed as AWS documents Signature Version 4."""
    canonical = "\n".join(
        [
            method,
            path,
            query,
            *(f"{name}:{' '.join(headers[name].split())}" for name in signed),
            "",
            ";".join(signed),
            hashlib.sha256(body).hexdigest(),
        ]
    )
    to_sign = "\n".join(
        ["AWS4-HMAC-SHA256", headers["x-amz-date"], scope, hashlib.sha256(canonical.encode()).hexdigest()]
    )
    key = f"AWS4{secret}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    return hmac.new(key, to_sign.encode(), "sha256").hexdigest()


def verified(sts: Sts, method: str, path: str, headers: dict[str, str], body: bytes) -> Keys | None:
    """Return the credentials that signed a request, or None if the signature is wrong."""
    algorithm, _, rest = headers.get("authorization", "").partition(" ")
    parts = dict(part.strip().split("=", 1) for part in rest.split(",") if "=" in part)
    if algorithm != "AWS4-HMAC-SHA256" or not {"Credential", "SignedHeaders", "Signature"} <= parts.keys():
        return None
    access_key, _, scope = parts["Credential"].partition("/")
    signed = parts["SignedHeaders"].split(";")
    keys = sts.known.get(access_key)
    is_whole = keys is not None and "host" in signed and all(name in headers for name in [*signed, "x-amz-date"])
    if (
        not is_whole
        or headers.get("x-amz-security-token") != keys.token
        or scope != f"{headers['x-amz-date'][:8]}/{REGION}/sts/aws4_request"
    ):
        return None
    bare, _, query = path.partition("?")
    fits = signature(method, bare, query, headers, signed, body, keys.secret_key, scope)
    return keys if hmac.compare_digest(fits, parts["Signature"]) else None


@contextmanager
def serve() -> Iterator[Sts]:
    sts = Sts()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            headers = {name.lower(): value for name, value in self.headers.items()}
            sts.asked.append((self.path, headers["host"]))
            status, text, more = sts.answer or self._true_answer(headers, body)
            self.send_response(status)
            for name, value in {**more, "content-length": str(len(text.encode()))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_POST

        def _true_answer(self, headers: dict[str, str], body: bytes) -> tuple[int, str, dict[str, str]]:
            keys = verified(sts, self.command, self.path, headers, body)
            if keys is None or headers["host"] != HOST:
                return 403, "<ErrorResponse><Error><Code>SignatureDoesNotMatch</Code></Error></ErrorResponse>", {}
            if parse_qs(body.decode()) != {"Action": ["GetCallerIdentity"], "Version": ["2011-06-15"]}:
                return 200, "<AnotherResponse/>", {}
            return 200, IDENTITY.format(arn=keys.arn, account=keys.account), {}

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    sts.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield sts
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
