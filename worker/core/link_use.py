"""How much of a link's time transfers have had that share it: all of them together, and each its part.

The ranks of a node send at the same boundary, each to each of its holders. What their link carries is what they sent
together by the time in which any of them did. Whether one of them is slow is told by its part of that time: a second
that it shared with three others was a quarter of one.

Whoever sends counts, many times a second, also when nothing leaves. So when nobody has for a while the process stood
still (SIGSTOP, a host that was paused), and what its kernel sent meanwhile nobody knows.

Invariant: time passes here only while somebody sends, and can.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

STANDSTILL_SECONDS = 1.0
"""Between two counts while somebody sends: as long as that a process that runs is never silent."""


@dataclass(frozen=True, slots=True)
class LinkUse:
    """What has been counted until a moment. Differences of two mean something, the numbers themselves do not."""

    at_seconds: float = 0.0
    """That moment; while nobody sends, when the last one stopped."""
    sender_count: int = 0
    """Transfers that have something to send."""
    busy_seconds: float = 0.0
    """In which there was at least one."""
    part_seconds: float = 0.0
    """What each of them had, if all had the same: a second in which three send is a third of one."""

    def until(self, now: float) -> LinkUse:
        """Return what is counted `now`; a moment before the last one changes nothing, and a standstill is left out."""
        passed = now - self.at_seconds
        if not self.sender_count or passed <= 0:
            return self
        if passed > STANDSTILL_SECONDS:
            return replace(self, at_seconds=now)
        busy, part = self.busy_seconds + passed, self.part_seconds + passed / self.sender_count
        return replace(self, at_seconds=now, busy_seconds=busy, part_seconds=part)

    def joined(self, now: float) -> LinkUse:
        """Another transfer has something to send."""
        counted = self.until(now)
        return replace(counted, at_seconds=max(now, counted.at_seconds), sender_count=counted.sender_count + 1)

    def left(self, now: float) -> LinkUse:
        """One has nothing to send any more, or not now."""
        counted = self.until(now)
        return replace(counted, sender_count=counted.sender_count - 1)

    def drained(self, since: float, now: float) -> LinkUse:
        """Count the time that the last bytes took from the kernel to the holder, where nobody else was sending in it.

        Args:
            since: when the kernel took them.
            now: when the holder had them.

        Returns:
            With the time that was not counted yet.
        """
        counted = self.until(now)  # with it, where somebody sends
        passed = now - max(since, counted.at_seconds)
        if passed <= 0:
            return counted
        return replace(counted, at_seconds=now, busy_seconds=counted.busy_seconds + passed)
