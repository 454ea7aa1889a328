"""Follows an endless stream of the service and reconnects after each broken connection.

Invariant: each item is yielded once, because every new connection resumes after the last item. If the service sends
neither items nor heartbeats for a minute, `kept_up` raises `ServiceFailed`, even if the service still accepts
connections.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, Final, Protocol, TypeVar

from everstep.cli.output import Json
from everstep.cli.waiting import UNANSWERED_SECONDS
from everstep.errors import ServiceFailed

STREAM_RETRY_SECONDS: Final = 1.0
_HELD_BACK: Final = "Does a proxy buffer complete responses? A stream never completes."

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


class FollowedStream(Protocol[T_co]):
    """One connection to a stream of the service."""

    def __iter__(self) -> Iterator[T_co]: ...

    def close(self) -> None:
        """Close the connection."""


def events(
    service: Any,
    query: Mapping[str, object],
    *,
    pause: Callable[[float], object] = threading.Event().wait,
    monotonic: Callable[[], float] = time.monotonic,
) -> Generator[Json]:
    """Yield events without an end. After a broken connection, resume after the last event.

    Args:
        service: botocore client of this service.
        query: the arguments of `follow_events`, such as `FleetName`.
        pause: sleeps for a number of seconds.
        monotonic: returns the seconds of a monotonic clock.

    Yields:
        Events in the shape of ListEvents.

    Raises:
        ServiceFailed: the service refuses the request or has sent nothing for a minute.
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
        # The service sends an event id at the start of each connection, so an id proves that the service responds.
        return streams[0].last_event_id is not None

    yield from kept_up(connect, is_over=lambda: False, has_spoken=has_spoken, pause=pause, monotonic=monotonic)


def kept_up(
    connect: Callable[[], FollowedStream[T]],
    *,
    is_over: Callable[[], bool],
    has_spoken: Callable[[], bool] = lambda: False,
    pause: Callable[[float], object] = threading.Event().wait,
    monotonic: Callable[[], float] = time.monotonic,
) -> Iterator[T]:
    """Yield the items of a stream, and open a new connection whenever a connection ends or breaks.

    Args:
        connect: opens a connection. Called again after a connection ends or breaks. Each new connection must resume
            after the last received item.
        is_over: returns True if the stream is complete after a connection that ended without an error. A connection
            also ends without an error when the server shuts down.
        has_spoken: returns True if the newest connection received data that is not an item, such as a heartbeat. An
            open connection without data does not prove that the service responds: a proxy may have accepted the
            connection.
        pause: sleeps for a number of seconds.
        monotonic: returns the seconds of a monotonic clock.

    Yields:
        Items in the order of their arrival.

    Raises:
        ServiceFailed: the service refuses the request or has sent nothing for a minute.
    """
    from urllib3.exceptions import HTTPError  # Import here to keep `--help` fast.

    from everstep import failures

    last_data_at = monotonic()
    while True:
        trouble: Exception | None = None
        try:
            with failures.translated():
                stream, has_given = connect(), False
                try:
                    for item in stream:
                        has_given = True
                        yield item
                finally:
                    stream.close()
                    if has_given or has_spoken():
                        # The service sent data on this connection, so the timeout `UNANSWERED_SECONDS` restarts.
                        last_data_at = monotonic()
                if is_over():
                    return
        except HTTPError as error:
            trouble = error
        except ServiceFailed as error:
            if error.code != failures.UNAVAILABLE:
                raise
            trouble = error
        if monotonic() - last_data_at >= UNANSWERED_SECONDS:
            if isinstance(trouble, ServiceFailed):
                raise trouble
            silence = f"The service accepts connections but has sent nothing for {UNANSWERED_SECONDS:.0f} s"
            raise ServiceFailed(
                f"{silence}: {trouble or 'it closes them'}", hint=_HELD_BACK, code=failures.UNAVAILABLE
            ) from trouble
        pause(STREAM_RETRY_SECONDS)
