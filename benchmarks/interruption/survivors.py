"""Measures when processes end. The kernel reports the end of a process through a pidfd."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Collection, Iterator


@contextlib.contextmanager
def watched(pids: Collection[int]) -> Iterator[list[int]]:
    """Yield pidfds of those processes that still run, for the `with` block."""
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
    """Return the monotonic time at which the last process ended; None if one still runs after `timeout_seconds`."""
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
