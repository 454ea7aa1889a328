"""Measures how long the transfers of a node use their shared network link, in total and per transfer.

Invariant: time is counted only while at least one transfer has data to send and the process runs. A second that four
transfers share counts as a quarter of a second for each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

# Senders update many times per second. While the process is stopped, the kernel may send an unknown number of bytes.
STANDSTILL_SECONDS = 1.0
"""Gap between two updates, in seconds, that shows that the process was stopped. The gap does not count as link time."""


@dataclass(frozen=True, slots=True)
class LinkUse:
    """Time of use of the node's link until `at_seconds`. Only differences between two values are meaningful."""

    at_seconds: float = 0.0
    """Time of this measurement in monotonic seconds. It does not advance while no transfer has data to send."""
    sender_count: int = 0
    busy_seconds: float = 0.0
    """Total seconds in which at least one transfer had data to send."""
    part_seconds: float = 0.0
    """Accumulated sending time per transfer, in seconds: a second that three transfers share adds 1/3 s."""

    def until(self, now: float) -> LinkUse:
        """Return the measurement with the time up to `now` added. A value before `at_seconds` changes nothing."""
        passed = now - self.at_seconds
        if not self.sender_count or passed <= 0:
            return self
        if passed > STANDSTILL_SECONDS:
            return replace(self, at_seconds=now)
        busy, part = self.busy_seconds + passed, self.part_seconds + passed / self.sender_count
        return replace(self, at_seconds=now, busy_seconds=busy, part_seconds=part)

    def joined(self, now: float) -> LinkUse:
        """Return the measurement until `now` (monotonic seconds), with one more transfer from then on."""
        counted = self.until(now)
        return replace(counted, at_seconds=max(now, counted.at_seconds), sender_count=counted.sender_count + 1)

    def left(self, now: float) -> LinkUse:
        """Return the measurement until `now` (monotonic seconds), with one transfer fewer from then on."""
        counted = self.until(now)
        return replace(counted, sender_count=counted.sender_count - 1)

    def drained(self, since: float, now: float) -> LinkUse:
        """Add the time from `since`, when the kernel accepted the last bytes, until `now`, when they had arrived."""
        counted = self.until(now)
        passed = now - max(since, counted.at_seconds)
        if passed <= 0:
            return counted
        return replace(counted, at_seconds=now, busy_seconds=counted.busy_seconds + passed)
