"""Defines the signed request with which an agent on EC2 proves the identity of its instance.

The agent signs the request but does not send it. The control plane builds the same request and sends it to STS.

    agent                                          control plane                       STS of the control plane's region
    POST /v1/agents/nonce             ──▶
                                      ◀──          nonce, valid once, for `NONCE_SECONDS`
    signs the request below with its instance's role
    POST /v1/agents/session           ──▶          builds the request, adds the signature    ──▶
      Authorization, X-Amz-Date, X-Amz-Security-Token                                        ◀──   the signer's identity
                                      ◀──          a session token for that instance

    POST https://sts.<region>.amazonaws.com/
    content-type, host, x-amz-date, x-amz-security-token, x-everstep-nonce, x-everstep-server-id     all of them signed
    Action=GetCallerIdentity&Version=2011-06-15

With a stolen signature, a thief can only ask STS for the signer's identity, and present the signature to the named
server once, within a minute.

Invariant: method, host, path, body and the names of the signed headers are constants, never received data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

NONCE_SECONDS: Final = 60
SERVER_ID_PATTERN: Final = r"^[0-9a-f]{32}$"
METHOD: Final = "POST"
PATH: Final = "/"
BODY: Final = b"Action=GetCallerIdentity&Version=2011-06-15"
CONTENT_TYPE: Final = "application/x-www-form-urlencoded; charset=utf-8"
NONCE_HEADER: Final = "x-everstep-nonce"
SERVER_ID_HEADER: Final = "x-everstep-server-id"
SIGNED_HEADERS: Final = "content-type;host;x-amz-date;x-amz-security-token;x-everstep-nonce;x-everstep-server-id"
"""Names in SigV4's order. Credentials of an instance role always contain a security token."""


def sts_host(region: str) -> str:
    """Return the host name of a region's STS endpoint."""
    return f"sts.{region}.amazonaws.com{'.cn' if region.startswith('cn-') else ''}"


def headers(*, server_id: str, nonce: str) -> Mapping[str, str]:
    """Return the headers to sign in addition to those of SigV4. Only the server `server_id` may use them."""
    return {"content-type": CONTENT_TYPE, SERVER_ID_HEADER: server_id, NONCE_HEADER: nonce}
