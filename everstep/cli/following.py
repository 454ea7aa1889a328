"""Following something that the service sends as it comes, through connections that break.

Invariant: what a connection has given is given on once; the next one is asked to go on behind it. A minute in which the
service has said nothing, not even that it is there, is the end, whether or not it takes connections.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, Final, Protocol, TypeVar

from everstep.cli.output import Json
from everstep.cli.waiting import UNANSWERED_SECONDS
from everstep.errors import ServiceFailed

RETRY_SECONDS: Final = 1.0
_HELD_BACK: Final = "Does a proxy hold its answers back until they are whole? A stream has no end."

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


class Stream(Protocol[T_co]):
    """One connection."""

    def __iter__(self) -> Iterator[T_co]: ...

    def close(self) -> None:
        """End it."""


def events(
    service: Any,
    query: Mapping[str, object],
    *,
    pause: Callable[[float], object] = threading.Event().wait,
    monotonic: Callable[[], float] = time.monotonic,
) -> Generator[Json]:
    """Yield what happens, without an end, through connections that break: each goes on behind the last event that was read.

    Args:
        service: the client.
        query: of `follow_events`.
        pause: waits for so many seconds.
        monotonic: seconds of a clock that never jumps.

    Yields:
        Events, as ListEvents has them.

    Raises:
        ServiceFailed: the service refuses, or has said nothing for a minute.
    """
    place = dict(query)
    streams: list[Any] = []

    def connect() -> Any:
        last = streams.pop().last_event_id if streams else None
        if last is not None:
            place["AfterEventId"] = last
        streams.append(service.follow_events(**place))
        return streams[0]

    def has_spoken() -> bool:
        return streams[0].last_event_id is not None  # the first thing that the service says is where the reader is

    yield from kept_up(connect, is_over=lambda: False, has_spoken=has_spoken, pause=pause, monotonic=monotonic)


def kept_up(
    connect: Callable[[], Stream[T]],
    *,
    is_over: Callable[[], bool],
    has_spoken: Callable[[], bool] = lambda: False,
    pause: Callable[[float], object] = threading.Event().wait,
    monotonic: Callable[[], float] = time.monotonic,
) -> Iterator[T]:
    """Yield what one connection after the other gives.

    Args:
        connect: makes one; called again after one has ended or broken, so it knows itself where to go on.
        is_over: whether nothing follows a connection that has ended well: a server that stops ends it, too.
        has_spoken: whether the newest connection has said anything that it did not give. One that was only opened is no
            sign of life: what stands between here and the service opens it as well.
        pause: waits for so many seconds.
        monotonic: seconds of a clock that never jumps.

    Yields:
        As they come.

    Raises:
        ServiceFailed: the service refuses, or has said nothing for a minute.
    """
    from urllib3.exceptions import HTTPError  # with botocore, which no --help needs

    from everstep import failures

    heard_at = monotonic()
    while True:
        trouble: Exception | None = None
        try:
            with failures.translated():
                stream, has_given = connect(), False
                try:
                    for said in stream:
                        has_given = True
                        yield said
                finally:
                    stream.close()
                    if has_given or has_spoken():
                        heard_at = monotonic()  # somebody was there until now, also where there was nothing to say
                if is_over():
                    return
        except HTTPError as error:
            trouble = error
        except ServiceFailed as error:
            if error.code != failures.UNAVAILABLE:
                raise
            trouble = error
        if monotonic() - heard_at >= UNANSWERED_SECONDS:
            if isinstance(trouble, ServiceFailed):
                raise trouble
            told = f"The service has said nothing for {UNANSWERED_SECONDS:.0f} s on the connections that it takes"
            raise ServiceFailed(
                f"{told}: {trouble or 'it ends them'}", hint=_HELD_BACK, code=failures.UNAVAILABLE
            ) from trouble
        pause(RETRY_SECONDS)
