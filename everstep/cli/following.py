"""Following something that the service sends as it comes, through connections that break.

Invariant: what a connection has given is given on once; the next one is asked to go on behind it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Protocol, TypeVar

from everstep.cli.output import Json
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


def events(service: Any, query: Mapping[str, object], *, pause: Callable[[float], object] = threading.Event().wait) -> Iterator[Json]:
    """Yield what happens, without an end, through connections that break: each goes on behind the last event that was read.

    Args:
        service: the client.
        query: of `follow_events`.
        pause: waits for so many seconds.

    Yields:
        Events, as ListEvents has them.

    Raises:
        ServiceFailed: the service refuses, or nobody has answered for a minute.
    """
    place = dict(query)
    streams: list[Any] = []

    def connect() -> Any:
        last = streams.pop().last_event_id if streams else None
        if last is not None:
            place["AfterEventId"] = last
        streams.append(service.follow_events(**place))
        return streams[0]

    yield from kept_up(connect, is_over=lambda: False, pause=pause)


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
                    yield from stream
                finally:
                    stream.close()
                    heard_at = monotonic()  # somebody was there until now, also where there was nothing to say
                if is_over():
                    return
        except HTTPError as error:
            if monotonic() - heard_at >= UNANSWERED_SECONDS:
                raise ServiceFailed(f"The connection broke off: {error}", code=failures.UNAVAILABLE) from error
        except ServiceFailed as error:
            if error.code != failures.UNAVAILABLE or monotonic() - heard_at >= UNANSWERED_SECONDS:
                raise
        pause(RETRY_SECONDS)
