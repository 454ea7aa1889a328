"""Whose signature it is, by the word of AWS's Security Token Service: the one of the control plane's own region, and no other host.

Invariant: one request is sent for a question, to a host that the settings name; no redirect is followed, and whatever
is not exactly STS's answer to GetCallerIdentity proves nothing.
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
"""To connect, and to read."""
MAX_ANSWER_BYTES: Final = 16 * 1024
MAX_QUESTIONS: Final = 16
"""At once: who has no token yet can make the server ask."""
_NAMESPACE: Final = "{https://sts.amazonaws.com/doc/2011-06-15/}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attestation:
    """What attesting instances takes; only where the cloud is AWS."""

    sts: RegionalSts
    region: str
    account: Callable[[], str]
    """The control plane's own; asks AWS the first time."""


class RegionalSts:
    """STS of one region. Thread-safe.

    Args:
        region: the control plane's own.
        endpoint_url: another place where that region's STS is, for tests; it is asked as the region's own host all the
            same.
    """

    def __init__(self, region: str, *, endpoint_url: str | None = None) -> None:
        self._host = attestation.sts_host(region)
        self._url = (endpoint_url or f"https://{self._host}") + attestation.PATH
        self._http = URLLib3Session(timeout=TIMEOUTS_SECONDS, max_pool_connections=MAX_QUESTIONS)
        self._room = threading.BoundedSemaphore(MAX_QUESTIONS)

    def whose(self, headers: Mapping[str, str]) -> Principal:
        """Return whom a signature belongs to.

        Args:
            headers: of the signed request, the signature among them.

        Returns:
            The principal.

        Raises:
            AccessDenied: STS says that the signature is none, has expired or is not for this request.
            CloudUnavailable: STS did not answer, or not as it does.
            Throttled: too many are being asked for at once.
        """
        if not self._room.acquire(blocking=False):
            raise Throttled("too many instances ask to join at once")
        try:
            status, body = self._send(headers)
        except (BotocoreHttpError, BotoCoreError, OSError) as error:
            raise CloudUnavailable(f"STS: {error}") from error
        finally:
            self._room.release()
        if status in (400, 403):
            raise AccessDenied("STS does not take the signature")
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
    """Return the principal in STS's answer.

    Args:
        body: of an answer with status 200.

    Returns:
        Whom it names.

    Raises:
        CloudUnavailable: it is not STS's answer to GetCallerIdentity, and proves nothing.
    """
    wrong = CloudUnavailable("what STS answered is not an answer to GetCallerIdentity")
    if len(body) > MAX_ANSWER_BYTES or b"<!" in body:  # no document type, so no entities
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
