"""Measures when processes end. The kernel reports the end of a process through a pidfd."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Collection, Iterator


@contextlib.contextmanager
def watched(pids: Collection[int]) -> Iterator[list[int]]:
    """Open pidfds of running processes for the `with` block; processes that have ended are skipped.

    Yields:
        The pidfds.
    """
    descriptors = []
    try:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                descriptors.append(os.pidfd_open(pid))
        yield descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def last_gone_at(descriptors: Collection[int], *, timeout_seconds: float) -> float | None:
    """Wait until all processes have ended to which these pidfds refer.

    Returns:
        Monotonic seconds at which the last process ended; None if a process still runs after `timeout_seconds`.
    """
    poll, left = select.poll(), set(descriptors)
    for descriptor in left:
        poll.register(descriptor, select.POLLIN)
    deadline = time.monotonic() + timeout_seconds
    while left:
        ended = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        if not ended:
            return None
        for descriptor, _ in ended:
            poll.unregister(descriptor)
            left.discard(descriptor)
    return time.monotonic()
