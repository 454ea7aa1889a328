"""The intervals at which the control plane polls AWS.

    groups and instances     every second; every five seconds while AWS's events arrive, which cause polls of their own
    after a throttled poll   full jitter: a random part of a limit that doubles with each throttled poll

Invariant: pure. The caller provides random numbers.
Source: AWS Architecture Blog, Exponential Backoff And Jitter.
"""

from __future__ import annotations

from typing import Final

AWS_POLL_SECONDS: Final = 1.0
EVENT_POLL_SECONDS: Final = 5.0
"""Seconds between two polls while AWS's events arrive."""
EVENTS_TRUSTED_SECONDS: Final = 600.0
"""Seconds after an event of AWS in which the control plane trusts that further events arrive, and polls less often."""
LONGEST_BACKOFF_SECONDS: Final = 60.0


def interval_seconds(since_event_seconds: float | None) -> float:
    """Return the pause between two requests to AWS about groups and instances.

    Args:
        since_event_seconds: age of the newest event of AWS. None: no event has arrived since the server's start.

    Returns:
        Seconds. The server polls earlier if an event arrives or the connection of an agent breaks.
    """
    is_trusted = since_event_seconds is not None and since_event_seconds < EVENTS_TRUSTED_SECONDS
    return EVENT_POLL_SECONDS if is_trusted else AWS_POLL_SECONDS


def backoff_seconds(throttled_count: int, jitter: float) -> float:
    """Return how many seconds the control plane waits before it polls a fleet again after AWS throttled a poll.

    Args:
        throttled_count: throttled polls of the fleet in a row, at least 1.
        jitter: random number in [0, 1), so that the servers of an account do not retry at the same time.

    Returns:
        Seconds between `AWS_POLL_SECONDS` and `LONGEST_BACKOFF_SECONDS`.
    """
    limit = min(LONGEST_BACKOFF_SECONDS, AWS_POLL_SECONDS * 2.0 ** min(throttled_count, 16))
    return max(AWS_POLL_SECONDS, jitter * limit)
