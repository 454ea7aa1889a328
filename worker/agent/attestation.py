"""Joins without a token: a signed STS request proves to the control plane on which EC2 instance the agent runs.

Invariant: this process never sends the role's credentials, only a signature. The signature is valid for one server, one
nonce and one kind of STS request (`everstep.protocol.attestation`).
"""

from __future__ import annotations

import http.client
import json
import ssl
from dataclasses import dataclass
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

import botocore.session
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest

from everstep.protocol import attestation
from everstep.protocol.ids import NodeId
from worker.errors import AttestationFailed

TIMEOUT_SECONDS: Final = 15.0
MAX_ANSWER_BYTES: Final = 64 * 1024


class AwsCredentials(Protocol):
    """Short-lived AWS credentials of a role, with botocore's attribute names."""

    access_key: str
    secret_key: str
    token: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The identity that an agent proves, and the server that verifies the proof."""

    node_id: NodeId
    fleet: str
    region: str
    server_id: str
    """Id of the control plane for which the agent signs. The operator configures it; a server cannot change it."""


def sign(claim: Claim, credentials: AwsCredentials, nonce: str) -> dict[str, str]:
    """Return the headers of the signed STS request. Raises AttestationFailed without credentials of a role."""
    if not credentials.token:
        raise AttestationFailed(
            "the AWS credentials of this process have no session token, so they do not belong to the instance's role"
        )
    request = AWSRequest(
        method=attestation.METHOD,
        url=f"https://{attestation.sts_host(claim.region)}{attestation.PATH}",
        headers=dict(attestation.headers(server_id=claim.server_id, nonce=nonce)),
        data=attestation.BODY,
    )
    SigV4Auth(credentials, "sts", claim.region).add_auth(request)
    return {name: request.headers[name] for name in ("Authorization", "X-Amz-Date", "X-Amz-Security-Token")}


def join(url: str, claim: Claim, tls: ssl.SSLContext | None) -> str:
    """Obtain a session token from the control plane, which opens new connections for one hour. Blocks.

    Raises AttestationFailed if the instance has no AWS credentials, or if the control plane rejects the signature or
    does not answer.
    """
    found = botocore.session.Session().get_credentials()
    if found is None:
        raise AttestationFailed("this instance has no AWS credentials. Attach an instance profile.")
    nonce = _post(url, "/v1/agents/nonce", {}, tls).get("Nonce", "")
    signature = sign(claim, found.get_frozen_credentials(), str(nonce))
    answer = _post(
        url,
        "/v1/agents/session",
        {
            "FleetName": claim.fleet,
            "NodeId": claim.node_id,
            "Nonce": nonce,
            "Authorization": signature["Authorization"],
            "AmzDate": signature["X-Amz-Date"],
            "SecurityToken": signature["X-Amz-Security-Token"],
        },
        tls,
    )
    return str(answer.get("SessionToken", ""))


def _post(url: str, path: str, body: dict[str, Any], tls: ssl.SSLContext | None) -> dict[str, Any]:
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme == "https":
        line: http.client.HTTPConnection = http.client.HTTPSConnection(
            host, parts.port, timeout=TIMEOUT_SECONDS, context=tls
        )
    else:
        line = http.client.HTTPConnection(host, parts.port, timeout=TIMEOUT_SECONDS)
    try:
        line.request("POST", path, body=json.dumps(body), headers={"content-type": "application/json"})
        answer = line.getresponse()
        reply = json.loads(answer.read(MAX_ANSWER_BYTES))
    except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
        raise AttestationFailed(f"the control plane at {url} did not answer: {error}") from error
    finally:
        line.close()
    if not isinstance(reply, dict) or answer.status not in (200, 201):
        words = reply.get("Message", "") if isinstance(reply, dict) else ""
        raise AttestationFailed(f"the control plane rejects this instance ({answer.status}): {words}")
    return reply
