"""Checks an agent's identity from its signed request and STS's answer (`everstep.protocol.attestation`).

Invariant: pure and strict. The checks accept only requests in the exact form that Everstep's agents send.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from everstep.protocol import attestation
from everstep.protocol.ids import NodeId

_AUTHORIZATION: Final = re.compile(
    r"AWS4-HMAC-SHA256 Credential=[A-Z0-9]{16,128}/(?P<day>[0-9]{8})/(?P<region>[a-z0-9-]{1,32})"
    r"/(?P<service>[a-z0-9]{1,16})/aws4_request, "
    r"SignedHeaders=(?P<headers>[a-z0-9;-]{1,256}), Signature=[0-9a-f]{64}"
)
_DATE: Final = re.compile(r"[0-9]{8}T[0-9]{6}Z")
_SECURITY_TOKEN: Final = re.compile(r"[A-Za-z0-9+/=_-]{1,4096}")
_ROLE_SESSION: Final = re.compile(
    r"arn:aws(?:-[a-z-]{1,16})?:sts::(?P<account>[0-9]{12}):assumed-role"
    r"/(?P<role>[\w+=,.@-]{1,64})/(?P<session>[\w+=,.@-]{2,64})",
    re.ASCII,
)
_INSTANCE: Final = re.compile(r"i-[0-9a-f]{8,17}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """The parts of a signed STS request that the agent sends. The control plane derives all other parts itself."""

    authorization: str
    amz_date: str
    security_token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """The AWS identity that STS returned for an agent's signed request."""

    account: str
    arn: str


def nonce(key: bytes, random: bytes, now: float) -> str:
    """Return a nonce `<end>.<random>.<seal>` with hexadecimal parts. The seal is a keyed digest of the other two.

    `key` is used for nonces only. `random` is uint8[16], never used before.
    """
    payload = f"{int(now) + attestation.NONCE_SECONDS:x}.{random.hex()}"
    return f"{payload}.{_seal(key, payload)}"


def nonce_end(key: bytes, given: str, now: float) -> int | None:
    """Return the Unix time at which a nonce of this server expires, or None. Only the database detects a second use."""
    payload, _, seal = given.rpartition(".")
    if not hmac.compare_digest(seal.encode(), _seal(key, payload).encode()):
        return None
    end = int(payload.partition(".")[0], 16)
    return end if now < end else None


def refusal_of_signature(signature: Signature, region: str) -> str:
    """Return why an agent's signed request has the wrong form, or an empty string. STS then verifies the signature."""
    parts = _AUTHORIZATION.fullmatch(signature.authorization)
    if (
        parts is None
        or _DATE.fullmatch(signature.amz_date) is None
        or _SECURITY_TOKEN.fullmatch(signature.security_token) is None
    ):
        return "the signature does not have the form of an agent's signature"
    if parts["headers"] != attestation.SIGNED_HEADERS:
        return f"the signed headers are {parts['headers']}, not {attestation.SIGNED_HEADERS}"
    if (parts["region"], parts["service"]) != (region, "sts"):
        return f"the signature is for {parts['service']} in {parts['region']}, not for sts in {region}"
    if parts["day"] != signature.amz_date[:8]:
        return "the signature's day differs from the day of its date"
    return ""


def sts_headers(signature: Signature, *, server_id: str, nonce: str) -> Mapping[str, str]:
    """Return the headers of the request to STS, except `host`. `server_id` excludes signatures for another server."""
    return {
        **attestation.headers(server_id=server_id, nonce=nonce),
        "x-amz-date": signature.amz_date,
        "x-amz-security-token": signature.security_token,
        "authorization": signature.authorization,
    }


def refusal_of_principal(principal: Principal, *, account: str, role_name: str, node_id: NodeId) -> str:
    """Return why an AWS identity is not that of the node that the agent names, or an empty string.

    If the role's trust policy admits only EC2, nobody else can open a session whose name is the instance id.
    """
    parts = _ROLE_SESSION.fullmatch(principal.arn)
    if parts is None:
        return "the signature does not belong to a session of a role"
    if parts["account"] != account or principal.account != account:
        return f"the signature belongs to another account than {account}"
    if parts["role"] != role_name:
        return f"the signature belongs to the role {parts['role']}, not to {role_name}"
    if _INSTANCE.fullmatch(parts["session"]) is None or parts["session"] != node_id:
        return f"the signature belongs to the session {parts['session']}, not to the instance {node_id}"
    return ""


def _seal(key: bytes, payload: str) -> str:
    return hmac.new(key, payload.encode(), hashlib.sha256).hexdigest()
