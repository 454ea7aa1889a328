"""Authenticates requests to the local AWS by their SigV4 signatures. Pure: the caller passes the time.

    stray(...)    is the request addressed to another server, or sent by a web page?
    verify(...)   which key signed the request, and does the signature cover the whole request?

`verify` computes the expected signature with botocore's own signer. It accepts the Authorization header and presigned
URLs, version 4. A digest covers the body; for S3 only, UNSIGNED-PAYLOAD or an unsigned trailer can replace it. SigV2,
SigV4A and signed chunks are refused. Source: AWS Signature Version 4 in the IAM User Guide and the S3 API reference.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.compat import HTTPHeaders
from botocore.credentials import Credentials

from everstep.host.local_keys import LocalKeys

ALGORITHM: Final = "AWS4-HMAC-SHA256"
SKEW: Final = timedelta(minutes=15)
"""Largest difference between the clocks of caller and server, as on AWS."""
LONGEST_EXPIRY_SECONDS: Final = 7 * 24 * 3600
ADMIN_SERVICE: Final = "everstep"
"""Service name of requests below `/_everstep/`."""
UNSIGNED_PAYLOADS: Final = frozenset({"UNSIGNED-PAYLOAD", "STREAMING-UNSIGNED-PAYLOAD-TRAILER"})
SIGNATURE_PARAMETERS: Final = (
    "X-Amz-Algorithm",
    "X-Amz-Credential",
    "X-Amz-Date",
    "X-Amz-Expires",
    "X-Amz-SignedHeaders",
    "X-Amz-Signature",
)
_AUTHORIZATION: Final = re.compile(
    rf"{ALGORITHM} +Credential=(?P<credential>[^, ]+), *SignedHeaders=(?P<headers>[^, ]+), "
    r"*Signature=(?P<signature>[0-9a-f]{64})"
)
_CREDENTIAL: Final = re.compile(
    r"(?P<key>[^/]{1,128})/(?P<date>[0-9]{8})/(?P<region>[^/]+)/(?P<service>[^/]+)/aws4_request"
)
_TIMESTAMP: Final = "%Y%m%dT%H%M%SZ"
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


class Denial(StrEnum):
    """Reason to refuse a request."""

    MISSING = "missing"
    """No signature, or a form that the local cloud does not accept."""
    UNKNOWN_KEY = "unknown_key"
    MISMATCH = "mismatch"
    """The signature or the body's digest does not match."""
    EXPIRED = "expired"
    """The signature or the session has expired or is not yet valid."""


class Denied(Exception):
    """The server refuses a request because of its signature. `message` contains no secrets."""

    def __init__(self, denial: Denial, message: str) -> None:
        super().__init__(message)
        self.denial = denial


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuedKey:
    """An access key that the local cloud issued."""

    secret_access_key: str = field(repr=False)
    session_token: str = field(default="", repr=False)
    """Token of a role's session. Empty for the cluster's own key."""
    expires_at: datetime | None = None
    is_owner: bool = False
    """True for the cluster's own key, the only one that may use `/_everstep/`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedRequest:
    """The request line and headers of a request, unparsed."""

    method: str
    target: str
    """Path and query, still percent-encoded."""
    headers: Sequence[tuple[str, str]]
    """Headers in the order of arrival."""

    def header(self, name: str) -> str:
        """Return a header's values joined by commas; empty if missing."""
        return ",".join(value for given, value in self.headers if given.lower() == name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Signer:
    """The key that signed a request, and the service that the signature names."""

    access_key_id: str
    service: str
    is_owner: bool


def stray(request: SignedRequest, host: str) -> str:
    """Return why a request does not come from a program on this machine; empty if it may.

    `host` is the local cloud's address and port.
    """
    # A web page can reach loopback through a browser, which sends `Origin`, `Sec-Fetch-Site`, and another `Host`
    # after DNS rebinding.
    for name, _ in request.headers:
        if name.lower() == "origin" or name.lower().startswith("sec-fetch-"):
            return f"{name}: requests of web pages are refused"
    if request.header("host") != host or not request.target.startswith("/"):
        return f"Host: this server answers as {host} only"
    return ""


def verify(
    request: SignedRequest, read_body: Callable[[], bytes], issued: Callable[[str], IssuedKey | None], now: datetime
) -> Signer:
    """Check the signature of a request and return its signer.

    `read_body` is called at most once, and for S3 only after the signature was found valid. `issued` returns None for
    an unknown access key id. Raises Denied if the signature is missing, invalid or expired.
    """
    query = dict(parse_qsl(urlsplit(f"http://host{request.target}").query, keep_blank_values=True))
    is_presigned = "X-Amz-Signature" in query
    signature = _of_query(query) if is_presigned else _of_header(request.header("authorization"))
    if is_presigned and request.header("authorization"):
        raise Denied(
            Denial.MISSING, "The request has two signatures: an Authorization header and query parameters. Send one."
        )
    key = issued(signature.access_key_id)
    if key is None:
        raise Denied(
            Denial.UNKNOWN_KEY,
            f'The access key {signature.access_key_id} is not one of this cluster: eval "$(everstep local env)".',
        )
    timestamp = signature.timestamp or request.header("x-amz-date")
    _check_time(timestamp, signature, now)
    token = query.get("X-Amz-Security-Token", "") if is_presigned else request.header("x-amz-security-token")
    if not hmac.compare_digest(token.encode(), key.session_token.encode()):
        raise Denied(Denial.UNKNOWN_KEY, "The session token does not belong to the access key.")
    if key.expires_at is not None and now >= key.expires_at:
        raise Denied(Denial.EXPIRED, "The session of the access key has expired.")
    is_s3 = signature.service == "s3"
    claimed = request.header("x-amz-content-sha256") or ("UNSIGNED-PAYLOAD" if is_presigned else "")
    digest = claimed if is_s3 else hashlib.sha256(read_body()).hexdigest()
    if is_s3 and digest not in UNSIGNED_PAYLOADS and not _DIGEST.fullmatch(digest):
        raise Denied(
            Denial.MISSING,
            f"x-amz-content-sha256 {digest[:64]!r} is not supported here: send a digest or UNSIGNED-PAYLOAD.",
        )
    expected = _expected(request, signature, key, timestamp, digest)
    if not hmac.compare_digest(expected.encode(), signature.value.encode()):
        raise Denied(Denial.MISMATCH, "The request signature we calculated does not match the signature you provided.")
    if (
        is_s3
        and digest not in UNSIGNED_PAYLOADS
        and not hmac.compare_digest(hashlib.sha256(read_body()).hexdigest(), digest)
    ):
        raise Denied(Denial.MISMATCH, "The provided x-amz-content-sha256 header does not match what was computed.")
    return Signer(access_key_id=signature.access_key_id, service=signature.service, is_owner=key.is_owner)


def signed_headers(method: str, url: str, content: bytes, keys: LocalKeys) -> dict[str, str]:
    """Return the headers of a signed request below `/_everstep/`."""
    request = AWSRequest(method=method, url=url, data=content)
    SigV4Auth(Credentials(keys.access_key_id, keys.secret_access_key), ADMIN_SERVICE, "us-east-1").add_auth(request)
    return dict(request.headers.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Signature:
    """The parts of a request's signature."""

    access_key_id: str
    date: str
    region: str
    service: str
    names: tuple[str, ...]
    """Covered headers, in lower case."""
    value: str
    timestamp: str = ""
    """Time of a presigned URL. Empty if the header x-amz-date contains the time."""
    expiry: timedelta | None = None
    """Lifetime of a presigned URL, else None."""


def _of_header(authorization: str) -> _Signature:
    found = _AUTHORIZATION.fullmatch(authorization.strip())
    if found is None:
        raise Denied(
            Denial.MISSING,
            f"The request has no {ALGORITHM} signature, and this cloud accepts no other. Sign it with the keys "
            "of `everstep local env`.",
        )
    return _signature(found["credential"], found["headers"], found["signature"])


def _of_query(query: Mapping[str, str]) -> _Signature:
    if not all(name in query for name in SIGNATURE_PARAMETERS) or query["X-Amz-Algorithm"] != ALGORITHM:
        raise Denied(
            Denial.MISSING, f"A presigned URL needs {', '.join(SIGNATURE_PARAMETERS)}, the algorithm {ALGORITHM}."
        )
    seconds = query["X-Amz-Expires"]
    if not seconds.isascii() or not seconds.isdigit() or not 1 <= int(seconds[:9]) <= LONGEST_EXPIRY_SECONDS:
        raise Denied(Denial.MISSING, f"X-Amz-Expires must be between 1 and {LONGEST_EXPIRY_SECONDS} seconds.")
    found = _signature(query["X-Amz-Credential"], query["X-Amz-SignedHeaders"], query["X-Amz-Signature"])
    return replace(found, timestamp=query["X-Amz-Date"], expiry=timedelta(seconds=int(seconds[:9])))


def _signature(credential: str, names: str, value: str) -> _Signature:
    scope = _CREDENTIAL.fullmatch(credential)
    if scope is None:
        raise Denied(Denial.MISSING, "The credential must be KEY/DATE/REGION/SERVICE/aws4_request.")
    return _Signature(
        access_key_id=scope["key"],
        date=scope["date"],
        region=scope["region"],
        service=scope["service"],
        names=tuple(names.lower().split(";")),
        value=value,
    )


def _check_time(timestamp: str, signature: _Signature, now: datetime) -> None:
    try:
        at = datetime.strptime(timestamp, _TIMESTAMP).replace(tzinfo=UTC)
    except ValueError:
        raise Denied(Denial.MISSING, "X-Amz-Date must be a time as 20260131T120000Z.") from None
    if timestamp[:8] != signature.date:
        raise Denied(Denial.MISMATCH, "The date of the credential is not that of X-Amz-Date.")
    if not at - SKEW <= now <= at + (SKEW if signature.expiry is None else signature.expiry):
        raise Denied(
            Denial.EXPIRED,
            f"Request has expired: it was signed at {timestamp}, and this server's time is {now:{_TIMESTAMP}}.",
        )


def _expected(request: SignedRequest, signature: _Signature, key: IssuedKey, timestamp: str, digest: str) -> str:
    """Compute the signature that the key's owner would send. Raise `Denied` if required headers are not signed."""
    present = {name.lower() for name, _ in request.headers}
    must = {"host", *(name for name in present if name.startswith("x-amz-"))}
    names = set(signature.names)
    if not must <= names <= present:
        wrong = sorted((must - names) | (names - present))
        raise Denied(
            Denial.MISMATCH,
            "There were headers present in the request which were not signed, or the reverse: "
            f"{', '.join(wrong)[:200]}",
        )
    signed = HTTPHeaders()
    for name, value in request.headers:
        if name.lower() in names:
            signed.add_header(name.lower(), value)
    path, mark, query = request.target.partition("?")
    query = "&".join(pair for pair in query.split("&") if not pair.startswith("X-Amz-Signature=")) if mark else ""
    made = AWSRequest(method=request.method, url=f"http://{request.header('host')}{path}{mark and '?'}{query}")
    made.context["timestamp"] = timestamp
    signer = _Recomputed(Credentials("", key.secret_access_key), signature.service, signature.region)
    signer.signed, signer.digest = signed, digest
    expected: str = signer.signature(signer.string_to_sign(made, signer.canonical_request(made)), made)
    return expected


class _Recomputed(SigV4Auth):  # type: ignore[misc]  # botocore has no type annotations
    """botocore's signer with exactly the headers and the digest that the caller signed."""

    signed: HTTPHeaders
    digest: str

    def headers_to_sign(self, request: Any) -> HTTPHeaders:  # noqa: ARG002
        return self.signed

    def payload(self, request: Any) -> str:  # noqa: ARG002
        return self.digest

    def _normalize_url_path(self, path: str) -> str:
        normalized: str = path if self._service_name == "s3" else super()._normalize_url_path(path)
        return normalized
