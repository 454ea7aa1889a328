"""Uploads a source archive directly to S3, with a URL that the service signed for this archive.

    CreateSource ──▶ Url, Headers        valid for one object, one SHA-256, one length, some minutes
    PUT Url      ──▶ S3                  without a token, because the signed URL is the permission
    CompleteSource                       the service reads the uploaded object and accepts it

Invariant: the archive is sent only to this machine, or over https to a server whose certificate matches the host of the
signed URL.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, BinaryIO, Final, cast

from botocore.awsrequest import AWSRequest
from botocore.exceptions import ConnectionError as NoConnection
from botocore.exceptions import HTTPClientError
from botocore.httpsession import URLLib3Session
from botocore.utils import get_environ_proxies

from everstep import exchanges
from everstep.host.loopback import is_loopback

ATTEMPTS: Final = 3
CONNECT_SECONDS: Final = 5.0
SILENT_SECONDS: Final = 60.0
PAUSE_SECONDS: Final = 0.5
"""Pause in seconds before the second attempt. Each further pause is twice as long."""
_S3_ERROR_TEXT: Final = re.compile(rb"<(?:Code|Message)>([^<]*)<")
_LATER: Final = (429, 500, 502, 503, 504)
_pause = threading.Event().wait


class UploadOutcome(Enum):
    """The result of an upload with a signed URL.

    - TAKEN: S3 has stored the whole archive.
    - EXPIRED: the URL has expired, and the caller may try a new URL.
    - NOT_TAKEN: this machine cannot upload to S3.
    """

    TAKEN = "taken"
    EXPIRED = "expired"
    NOT_TAKEN = "not taken"


def put(
    url: str, headers: Mapping[str, str], archive: BinaryIO, *, pause: Callable[[float], object] = _pause
) -> UploadOutcome:
    """Upload an archive, with retries after temporary errors.

    If the URL is plain http to another machine, the function sends nothing and returns NOT_TAKEN. After NOT_TAKEN, the
    caller uploads through the service instead.

    Args:
        url: the URL in CreateSource's response.
        headers: the headers in CreateSource's response.
        archive: a seekable file, sent from its beginning.
        pause: function that waits for a number of seconds.

    Returns:
        The result.
    """
    if not (url.startswith("https://") or is_loopback(url)):
        return UploadOutcome.NOT_TAKEN
    session = URLLib3Session(
        # Cast, because botocore's type stubs do not declare a pair of timeouts (for connecting and for reading).
        timeout=cast(Any, (CONNECT_SECONDS, SILENT_SECONDS)),
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
                return UploadOutcome.TAKEN
            if status == 403:
                return UploadOutcome.EXPIRED
            if status is not None and status not in _LATER:
                break
        return UploadOutcome.NOT_TAKEN
    finally:
        session.close()


def _sent(session: URLLib3Session, url: str, headers: Mapping[str, str], archive: BinaryIO) -> int | None:
    """Return the HTTP status of S3's response, or None without a response."""
    # The URL's query contains the signature that permits the upload, so it must not be logged.
    exchanges.log_request("PUT", url.partition("?")[0], headers.items())
    try:
        answer = session.send(AWSRequest(method="PUT", url=url, headers=dict(headers), data=archive).prepare())
    except (NoConnection, HTTPClientError) as error:
        exchanges.log.debug("< nothing: %s", type(error).__name__)
        return None
    exchanges.log_response(str(answer.status_code), answer.headers.items())
    if answer.status_code != 200:  # Log only the error code, because other parts of S3's error repeat the URL.
        exchanges.log.debug(
            "< %s",
            b" ".join(_S3_ERROR_TEXT.findall(answer.content[: exchanges.MAX_LOGGED_CHARACTERS])).decode(
                errors="replace"
            ),
        )
    return int(answer.status_code)
