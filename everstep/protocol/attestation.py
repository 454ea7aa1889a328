"""How an agent on EC2 shows which instance it is: the request that it signs and never sends, the same for who signs and who sends it.

    agent                                          control plane                              STS of the control plane's own region
    POST /v1/agents/nonce             ──▶
                                      ◀──          Nonce, good for `NONCE_SECONDS`, once
    signs the request below with its instance's role
    POST /v1/agents/session           ──▶          builds the request anew, adds the signature    ──▶
      Authorization, X-Amz-Date, X-Amz-Security-Token                                             ◀──   whose signature it is
                                      ◀──          a session token for that instance

    POST https://sts.<region>.amazonaws.com/
    content-type, host, x-amz-date, x-amz-security-token, x-everstep-nonce, x-everstep-server-id       all of them signed
    Action=GetCallerIdentity&Version=2011-06-15

Who holds such a signature can do nothing with it but ask STS whose it is, and show it to the one server that it names,
once, within a minute.

Invariant: method, host, path, body and the names of the signed headers are constants of this module, never anything
that was received.
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
"""In SigV4's order. The credentials of an instance's role always come with a security token."""


def sts_host(region: str) -> str:
    """Return the host of a region's own STS."""
    return f"sts.{region}.amazonaws.com{'.cn' if region.startswith('cn-') else ''}"


def headers(*, server_id: str, nonce: str) -> Mapping[str, str]:
    """Return the headers that are signed besides those that SigV4 adds itself.

    Args:
        server_id: of the control plane that the signature is for.
        nonce: of this attempt.

    Returns:
        Values by name.
    """
    return {"content-type": CONTENT_TYPE, SERVER_ID_HEADER: server_id, NONCE_HEADER: nonce}
