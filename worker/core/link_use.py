"""Measures how long the transfers of a node use their shared network link, in total and per transfer.

A transfer sends one snapshot to one holder. The transfers of all ranks of a node begin at the end of the same step and
share the node's link. The throughput of the link is the bytes of all transfers, divided by the time in which at least
one transfer was active. The rate of one transfer is its bytes divided by its share of this time. A second that four
transfers share counts as a quarter of a second for each transfer.

Every sender updates the measurement many times per second, even without sending. A gap between updates means that the
process was stopped (SIGSTOP, a paused host). The kernel may have sent an unknown number of bytes in the gap.

Invariant: time is counted only while at least one transfer has data to send and the process runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

STANDSTILL_SECONDS = 1.0
"""Minimum gap between two updates, in seconds, that shows that the process was stopped during a transfer.

The gap does not count as link time.
"""


@dataclass(frozen=True, slots=True)
class LinkUse:
    """Time for which the node's network link has been used, accumulated until `at_seconds`.

    Only the difference between two values is meaningful.
    """

    at_seconds: float = 0.0
    """Time of this measurement in monotonic seconds.

    While no transfer has data to send, this value does not advance: it is the time at which the last transfer ended.
    """
    sender_count: int = 0
    """Number of transfers that now have data to send over this node's network link."""
    busy_seconds: float = 0.0
    """Total seconds in which at least one of the node's transfers to holders had data to send."""
    part_seconds: float = 0.0
    """Accumulated sending time per transfer, in seconds.

    A second in which three transfers have data to send adds 1/3 s, because each transfer has a third of the link.
    """

    def until(self, now: float) -> LinkUse:
        """Return the measurement with the time up to `now` added, except time in which the agent's process was stopped.

        A value of `now` before `at_seconds` changes nothing.
        """
        passed = now - self.at_seconds
        if not self.sender_count or passed <= 0:
            return self
        if passed > STANDSTILL_SECONDS:
            return replace(self, at_seconds=now)
        busy, part = self.busy_seconds + passed, self.part_seconds + passed / self.sender_count
        return replace(self, at_seconds=now, busy_seconds=busy, part_seconds=part)

    def joined(self, now: float) -> LinkUse:
        """Return the measurement until `now` (monotonic seconds), with one more transfer on the link from then on."""
        counted = self.until(now)
        return replace(counted, at_seconds=max(now, counted.at_seconds), sender_count=counted.sender_count + 1)

    def left(self, now: float) -> LinkUse:
        """Return the measurement until `now` (monotonic seconds), with one transfer fewer on the link from then on."""
        counted = self.until(now)
        return replace(counted, sender_count=counted.sender_count - 1)

    def drained(self, since: float, now: float) -> LinkUse:
        """Add the time that the network needed for the last bytes of a transfer, after the kernel had accepted them.

        Time that was already counted for another transfer is not counted again.

        Args:
            since: time at which the kernel accepted the last bytes, monotonic seconds.
            now: time at which the holder had received these bytes, monotonic seconds.

        Returns:
            The measurement, with the part of this time that was not counted yet.
        """
        counted = self.until(now)
        passed = now - max(since, counted.at_seconds)
        if passed <= 0:
            return counted
        return replace(counted, at_seconds=now, busy_seconds=counted.busy_seconds + passed)
