"""Verifies the identity of instances from signed requests, with AWS's Security Token Service (STS).

Each verification sends one request, only to the configured host, and follows no redirects. Any answer other than STS's
answer to GetCallerIdentity fails the verification.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from xml.etree import ElementTree

from botocore.awsrequest import AWSRequest
from botocore.exceptions import BotoCoreError
from botocore.exceptions import HTTPClientError as BotocoreHttpError
from botocore.httpsession import URLLib3Session

from control_plane.cloud.errors import AccessDenied, CloudUnavailable, Throttled
from control_plane.core.attestation import Principal
from everstep.protocol import attestation

TIMEOUTS_SECONDS: Final = (3.0, 5.0)
"""Connect timeout and read timeout."""
MAX_ANSWER_BYTES: Final = 16 * 1024
MAX_QUESTIONS: Final = 16
"""Limit of concurrent requests to STS, because an agent sends its signature before it has a token."""
_NAMESPACE: Final = "{https://sts.amazonaws.com/doc/2011-06-15/}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attestation:
    """The STS client, region and account with which a server verifies instances. Exists only if the cloud is AWS."""

    sts: RegionalSts
    region: str
    account: Callable[[], str]


class OwnAccount:
    """The control plane's own AWS account. Concurrent calls send one request.

    A failed request is repeated by the next call.
    """

    def __init__(self, ask: Callable[[], str]) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self._account = ""

    def __call__(self) -> str:
        """Return the account."""
        with self._lock:
            self._account = self._account or self._ask()
            return self._account


class RegionalSts:
    """STS of one region. Thread-safe.

    `endpoint_url` replaces STS's URL in tests; the `host` header still names the region's own host.
    """

    def __init__(self, region: str, *, endpoint_url: str | None = None) -> None:
        self._host = attestation.sts_host(region)
        self._url = (endpoint_url or f"https://{self._host}") + attestation.PATH
        self._http = URLLib3Session(timeout=TIMEOUTS_SECONDS, max_pool_connections=MAX_QUESTIONS)
        self._room = threading.BoundedSemaphore(MAX_QUESTIONS)

    def whose(self, headers: Mapping[str, str]) -> Principal:
        """Return the principal (the AWS identity) that made a signature.

        Raises:
            AccessDenied: STS rejects the signature as invalid, expired, or made for another request.
            CloudUnavailable: STS did not answer, or its answer does not have the documented form.
            Throttled: too many verifications are in progress.
        """
        if not self._room.acquire(blocking=False):
            raise Throttled("too many instances request to join at the same time; retry")
        try:
            status, body = self._send(headers)
        except (BotocoreHttpError, BotoCoreError, OSError) as error:
            raise CloudUnavailable(f"STS: {error}") from error
        finally:
            self._room.release()
        if status in (400, 403):
            raise AccessDenied("STS rejected the signature")
        if status != 200:
            raise CloudUnavailable(f"STS answered {status}")
        return principal_in(body)

    def _send(self, headers: Mapping[str, str]) -> tuple[int, bytes]:
        request = AWSRequest(
            method=attestation.METHOD,
            url=self._url,
            headers={**headers, "host": self._host},
            data=attestation.BODY,
            stream_output=True,
        )
        answer: Any = self._http.send(request.prepare())
        try:
            return answer.status_code, answer.raw.read(MAX_ANSWER_BYTES + 1)
        finally:
            answer.raw.release_conn()


def principal_in(body: bytes) -> Principal:
    """Return the principal in the body of an answer with status 200.

    Raises CloudUnavailable if it is not STS's answer.
    """
    wrong = CloudUnavailable("what STS answered is not an answer to GetCallerIdentity")
    # Reject document types (`<!DOCTYPE`), because they can define entities that expand to a huge text.
    if len(body) > MAX_ANSWER_BYTES or b"<!" in body:
        raise wrong
    try:
        root = ElementTree.fromstring(body)
    except ElementTree.ParseError as error:
        raise wrong from error
    results = (
        root.findall(f"{_NAMESPACE}GetCallerIdentityResult")
        if root.tag == f"{_NAMESPACE}GetCallerIdentityResponse"
        else []
    )
    if len(results) != 1:
        raise wrong
    arns, accounts = results[0].findall(f"{_NAMESPACE}Arn"), results[0].findall(f"{_NAMESPACE}Account")
    if len(arns) != 1 or len(accounts) != 1:
        raise wrong
    return Principal(account=accounts[0].text or "", arn=arns[0].text or "")
