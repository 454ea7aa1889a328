"""How much of a slow link snapshots take: a half, so that what training sends finds no queue before it.

    suspected slow ──▶ limited to a half of what it carried ── after a while ──▶ let go, and looked at ──▶ limited again, for longer, or sound

What is limited says nothing of what the link could carry: so each transfer begins without a limit, and a long one is
let go now and then, soon at first, for a suspicion may be wrong. Seconds are those in which a transfer might send.

Invariant: a link that carries what it should is never limited for longer than `RETRY_SECONDS` of sending.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

ROOM_RATIO = 0.5
"""What snapshots take of a slow link.

At all of it the smallest collective waits behind what the kernel holds: 12 to 30 ms at 12.5 MB/s.
"""
LOOK_SECONDS = 0.2
"""Of sending without a limit, after which it is known whether the link is sound again."""
FIRST_RETRY_SECONDS, RETRY_SECONDS = 0.5, 10.0
"""From a limit to the first look without it, and at most: twice as long each time."""
FASTER_RATIO = 2.0
"""What carries more than so many times what it did is looked at once more before it is limited again: in the first moment without a limit the kernel
still waits for its timers, or fills its buffers."""
HELD_RATIO = 0.8
"""Less than this part of its limit is what a link carries that has become slower still."""
LEAST_BYTES_PER_SECOND = 256 * 1024
"""What carries less stands still: there is nothing to leave to training, and when it goes on it is not to be held up."""


@dataclass(frozen=True, slots=True)
class SlowLink:
    """What a sender knows of its link while that is slow, or may be. One per holder."""

    carries: float = 0.0
    """Bytes per second, when it was found slow; 0: it is not."""
    limit: float | None = None
    """Bytes per second, in force; None: whatever there is."""
    begun: tuple[int, float] = (0, 0.0)
    """Bytes that the transfer under way had sent, and its seconds of sending, when the limit was put or lifted."""
    retry_seconds: float = FIRST_RETRY_SECONDS
    """For how long the limit that is in force, or was last, is kept."""
    is_faster: bool = False
    """At the last look without a limit."""

    def found(self, bytes_per_second: float, sent_bytes: int, seconds: float) -> SlowLink:
        """A transfer without a limit has taken long enough to suspect the link, and carried so much."""
        if self.carries:
            return self
        stands_still = bytes_per_second < LEAST_BYTES_PER_SECOND
        return SlowLink(
            max(bytes_per_second, 1.0), None if stands_still else ROOM_RATIO * bytes_per_second, (sent_bytes, seconds)
        )

    def next_transfer(self) -> SlowLink:
        """Another transfer begins: without a limit."""
        return replace(self, limit=None, begun=(0, 0.0))

    def looked(self, sent_bytes: int, seconds: float, *, sound: float) -> SlowLink:
        """Look at the transfer under way.

        Args:
            sent_bytes: of it.
            seconds: in which it might send.
            sound: bytes per second that a link carries at least that is not slow.

        Returns:
            With the limit for what is sent from now on.
        """
        lasted = seconds - self.begun[1]
        if not self.carries or lasted < (LOOK_SECONDS if self.limit is None else self.retry_seconds):
            return self
        rate = (sent_bytes - self.begun[0]) / lasted
        begun = (sent_bytes, seconds)
        if self.limit is not None:
            is_slower = rate < HELD_RATIO * self.limit
            return replace(
                self, carries=max(rate, 1.0) if is_slower else self.carries, limit=None, begun=begun, is_faster=False
            )
        if rate >= sound:
            return self
        if rate < LEAST_BYTES_PER_SECOND:
            return replace(self, begun=begun)
        is_faster = rate > FASTER_RATIO * self.carries >= FASTER_RATIO * LEAST_BYTES_PER_SECOND
        if is_faster and not self.is_faster:
            return replace(self, begun=begun, is_faster=True)
        carries = rate if is_faster or self.carries < LEAST_BYTES_PER_SECOND else self.carries
        return SlowLink(carries, ROOM_RATIO * carries, begun, min(2 * self.retry_seconds, RETRY_SECONDS))
