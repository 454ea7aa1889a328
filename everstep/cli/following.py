"""Following something that the service sends as it comes, through connections that break.

Invariant: what a connection has given is given on once; the next one is asked to go on behind it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Final, Protocol, TypeVar

from everstep.cli.waiting import UNANSWERED_SECONDS
from everstep.errors import ServiceFailed

RETRY_SECONDS: Final = 1.0

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


class Stream(Protocol[T_co]):
    """One connection."""

    def __iter__(self) -> Iterator[T_co]: ...

    def close(self) -> None:
        """End it."""


def kept_up(
    connect: Callable[[], Stream[T]],
    *,
    is_over: Callable[[], bool],
    pause: Callable[[float], object] = threading.Event().wait,
    monotonic: Callable[[], float] = time.monotonic,
) -> Iterator[T]:
    """Yield what one connection after the other gives.

    Args:
        connect: makes one; called again after one has ended or broken, so it knows itself where to go on.
        is_over: whether nothing follows a connection that has ended well: a server that stops ends it, too.
        pause: waits for so many seconds.
        monotonic: seconds of a clock that never jumps.

    Yields:
        As they come.

    Raises:
        ServiceFailed: the service refuses, or nobody has answered for a minute.
    """
    from urllib3.exceptions import HTTPError  # with botocore, which no --help needs

    from everstep import failures

    heard_at = monotonic()
    while True:
        try:
            with failures.translated():
                stream = connect()
                try:
                    for said in stream:
                        heard_at = monotonic()
                        yield said
                finally:
                    stream.close()
                if is_over():
                    return
        except HTTPError as error:
            if monotonic() - heard_at >= UNANSWERED_SECONDS:
                raise ServiceFailed(f"The connection broke off: {error}", code=failures.UNAVAILABLE) from error
        except ServiceFailed as error:
            if error.code != failures.UNAVAILABLE or monotonic() - heard_at >= UNANSWERED_SECONDS:
                raise
        pause(RETRY_SECONDS)
