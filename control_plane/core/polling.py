"""The intervals at which the control plane polls AWS. Pure: the caller provides random numbers.

    groups and instances     every second; every five seconds while AWS's events arrive, which cause polls of their own
    after a throttled poll   full jitter: a random part of a limit that doubles with each throttled poll

Source: AWS Architecture Blog, Exponential Backoff And Jitter.
"""

from __future__ import annotations

from typing import Final

AWS_POLL_SECONDS: Final = 1.0
EVENT_POLL_SECONDS: Final = 5.0
EVENTS_TRUSTED_SECONDS: Final = 600.0
"""Time after an event of AWS in which the control plane trusts that further events arrive."""
LONGEST_BACKOFF_SECONDS: Final = 60.0


def interval_seconds(since_event_seconds: float | None) -> float:
    """Return the pause between two polls. `since_event_seconds` is None before the first event of AWS."""
    is_trusted = since_event_seconds is not None and since_event_seconds < EVENTS_TRUSTED_SECONDS
    return EVENT_POLL_SECONDS if is_trusted else AWS_POLL_SECONDS


def backoff_seconds(throttled_count: int, jitter: float) -> float:
    """Return the pause after `throttled_count` throttled polls in a row. `jitter` is a random number in [0, 1)."""
    limit = min(LONGEST_BACKOFF_SECONDS, AWS_POLL_SECONDS * 2.0 ** min(throttled_count, 16))
    return max(AWS_POLL_SECONDS, jitter * limit)
