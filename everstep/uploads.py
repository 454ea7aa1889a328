"""A source archive on its way straight into S3, to an address that the service has signed for these very bytes.

    CreateSource ──▶ Url, Headers        good for one object, one SHA-256, one length, some minutes
    PUT Url      ──▶ S3                  nothing of ours is sent along: the address itself is the permission
    CompleteSource                       the service reads back what is there and takes it

Invariant: an archive goes over https, or to this machine, and to nobody who has not proven by a certificate to be whom
the service named.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from enum import Enum
from typing import BinaryIO, Final

from botocore.awsrequest import AWSRequest
from botocore.exceptions import ConnectionError as NoConnection
from botocore.exceptions import HTTPClientError
from botocore.httpsession import URLLib3Session
from botocore.utils import get_environ_proxies

from everstep import exchanges
from everstep.protocol.loopback import is_loopback

ATTEMPTS: Final = 3
CONNECT_SECONDS: Final = 5.0
SILENT_SECONDS: Final = 60.0
PAUSE_SECONDS: Final = 0.5
"""Before the second attempt; twice as long before every further one."""
_SAID: Final = re.compile(rb"<(?:Code|Message)>([^<]*)<")
_LATER: Final = (429, 500, 502, 503, 504)
_pause = threading.Event().wait


class Outcome(Enum):
    """What became of an upload.

    TAKEN: S3 has all of it. EXPIRED: the address is good no longer; another one may be. NOT_TAKEN: it cannot be brought
    there from here.
    """

    TAKEN = "taken"
    EXPIRED = "expired"
    NOT_TAKEN = "not taken"


def put(
    url: str, headers: Mapping[str, str], archive: BinaryIO, *, pause: Callable[[float], object] = _pause
) -> Outcome:
    """Send an archive to where it is to be, and again where that may help.

    Args:
        url: as CreateSource answered it.
        headers: likewise.
        archive: a seekable file, sent from its beginning.
        pause: waits for so many seconds.

    Returns:
        What became of it. What would go to another machine in the clear is not sent: the service takes it then.
    """
    if not (url.startswith("https://") or is_loopback(url)):
        return Outcome.NOT_TAKEN
    session = URLLib3Session(
        timeout=(CONNECT_SECONDS, SILENT_SECONDS),
        proxies={} if is_loopback(url) else get_environ_proxies(url),
        max_pool_connections=1,
    )
    try:
        for attempt in range(ATTEMPTS):
            if attempt:
                pause(PAUSE_SECONDS * 2 ** (attempt - 1))
            archive.seek(0)
            status = _sent(session, url, headers, archive)
            if status == 200:
                return Outcome.TAKEN
            if status == 403:
                return Outcome.EXPIRED
            if status is not None and status not in _LATER:
                break
        return Outcome.NOT_TAKEN
    finally:
        session.close()


def _sent(session: URLLib3Session, url: str, headers: Mapping[str, str], archive: BinaryIO) -> int | None:
    """Return what S3 says, or None where it says nothing."""
    exchanges.told_request("PUT", url.partition("?")[0], headers.items())  # the rest of the address is the permission
    try:
        answer = session.send(AWSRequest(method="PUT", url=url, headers=dict(headers), data=archive).prepare())
    except (NoConnection, HTTPClientError) as error:
        exchanges.log.debug("< nothing: %s", type(error).__name__)
        return None
    exchanges.told_answer(str(answer.status_code), answer.headers.items())
    if answer.status_code != 200:  # the rest of what S3 says repeats the address
        exchanges.log.debug(
            "< %s", b" ".join(_SAID.findall(answer.content[: exchanges.TOLD_LENGTH])).decode(errors="replace")
        )
    return int(answer.status_code)
