"""Who an agent is, by what it signed and what STS says of the signature (`everstep.protocol.attestation`).

Invariant: pure, and strict: what is not exactly of the one form that our own agents send is refused, in a sentence.
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
    r"AWS4-HMAC-SHA256 Credential=[A-Z0-9]{16,128}/(?P<day>[0-9]{8})/(?P<region>[a-z0-9-]{1,32})/(?P<service>[a-z0-9]{1,16})/aws4_request, "
    r"SignedHeaders=(?P<headers>[a-z0-9;-]{1,256}), Signature=[0-9a-f]{64}"
)
_DATE: Final = re.compile(r"[0-9]{8}T[0-9]{6}Z")
_SECURITY_TOKEN: Final = re.compile(r"[A-Za-z0-9+/=_-]{1,4096}")
_ROLE_SESSION: Final = re.compile(
    r"arn:aws(?:-[a-z-]{1,16})?:sts::(?P<account>[0-9]{12}):assumed-role/(?P<role>[\w+=,.@-]{1,64})/(?P<session>[\w+=,.@-]{2,64})",
    re.ASCII,
)
_INSTANCE: Final = re.compile(r"i-[0-9a-f]{8,17}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """What an agent sends of the request that it has signed: nothing but what the signature adds to it."""

    authorization: str
    amz_date: str
    security_token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """Whom STS says that a signature belongs to."""

    account: str
    arn: str


def nonce(key: bytes, random: bytes, now: float) -> str:
    """Return a nonce that this server knows again without having stored it.

    Args:
        key: the server's, for nonces alone.
        random: uint8[16], never used before.
        now: Unix seconds.

    Returns:
        `<end>.<random>.<seal>`, hexadecimal.
    """
    said = f"{int(now) + attestation.NONCE_SECONDS:x}.{random.hex()}"
    return f"{said}.{_seal(key, said)}"


def nonce_end(key: bytes, given: str, now: float) -> int | None:
    """Return when a nonce ends, Unix seconds, or None where it is not ours or has ended.

    Whether it was used is the database's to say.
    """
    said, _, seal = given.rpartition(".")
    if not hmac.compare_digest(seal.encode(), _seal(key, said).encode()):
        return None
    end = int(said.partition(".")[0], 16)
    return end if now < end else None


def refusal_of_signature(signature: Signature, region: str) -> str:
    """Return why a signature is not even shown to STS, or nothing.

    Args:
        signature: as received.
        region: the control plane's own.

    Returns:
        A sentence; empty where its form is right. Whether it is genuine is STS's to say.
    """
    parts = _AUTHORIZATION.fullmatch(signature.authorization)
    if (
        parts is None
        or _DATE.fullmatch(signature.amz_date) is None
        or _SECURITY_TOKEN.fullmatch(signature.security_token) is None
    ):
        return "the signature is not of the form that an agent's has"
    if parts["headers"] != attestation.SIGNED_HEADERS:
        return f"the signed headers are {parts['headers']}, not {attestation.SIGNED_HEADERS}"
    if (parts["region"], parts["service"]) != (region, "sts"):
        return f"the signature is for {parts['service']} in {parts['region']}, not for sts in {region}"
    if parts["day"] != signature.amz_date[:8]:
        return "the signature's day is not that of its date"
    return ""


def sts_headers(signature: Signature, *, server_id: str, nonce: str) -> Mapping[str, str]:
    """Return the headers that the request goes to STS with; host is added by who sends it.

    Args:
        signature: its form was checked.
        server_id: of this server, whatever the agent has signed.
        nonce: that this attempt was made with.

    Returns:
        Values by name.
    """
    return {
        **attestation.headers(server_id=server_id, nonce=nonce),
        "x-amz-date": signature.amz_date,
        "x-amz-security-token": signature.security_token,
        "authorization": signature.authorization,
    }


def refusal_of_principal(principal: Principal, *, account: str, role_name: str, node_id: NodeId) -> str:
    """Return why a principal is not the node that it says, or nothing.

    An instance's role calls its session by the instance's id, and EC2 alone can open such a session unless the role's
    trust policy lets others in.

    Args:
        principal: by STS's word.
        account: the control plane's own.
        role_name: of the fleet's nodes.
        node_id: who the agent says it is.

    Returns:
        A sentence; empty where all is as it should be.
    """
    parts = _ROLE_SESSION.fullmatch(principal.arn)
    if parts is None:
        return "the signature is not that of a role's session"
    if parts["account"] != account or principal.account != account:
        return f"the signature is of another account than {account}"
    if parts["role"] != role_name:
        return f"the signature is of the role {parts['role']}, not of {role_name}"
    if _INSTANCE.fullmatch(parts["session"]) is None or parts["session"] != node_id:
        return f"the signature is of the session {parts['session']}, not of the instance {node_id}"
    return ""


def _seal(key: bytes, said: str) -> str:
    return hmac.new(key, said.encode(), hashlib.sha256).hexdigest()
