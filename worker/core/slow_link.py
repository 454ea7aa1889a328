"""How much of a slow link snapshots take: a half, so that what training sends finds no queue before it.

    found slow ──▶ limited to a half of what it carried ── every RETRY_SECONDS ──▶ let go, and looked at ──▶ limited again, or sound

What is limited says nothing of what the link could carry: so each transfer begins without a limit, and a long one is let go now and then. Seconds
are those in which a transfer might send.

Invariant: a link that carries what it should is never limited for longer than `RETRY_SECONDS` of sending.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

ROOM_RATIO = 0.5
"""What snapshots take of a slow link. At all of it the smallest collective waits behind what the kernel holds: 12 to 30 ms at 12.5 MB/s."""
LOOK_SECONDS = 0.2
"""Of sending without a limit, after which it is known whether the link is sound again."""
RETRY_SECONDS = 10.0
HELD_RATIO = 0.8
"""Less than this part of its limit is what a link carries that has become slower still."""


@dataclass(frozen=True, slots=True)
class SlowLink:
    """What a sender knows of its link while that is slow. One per holder."""

    carries: float = 0.0
    """Bytes per second, when it was found slow; 0: it is not."""
    limit: float | None = None
    """Bytes per second, in force; None: whatever there is."""
    begun: tuple[int, float] = (0, 0.0)
    """Bytes that the transfer under way had sent, and its seconds of sending, when the limit was put or lifted."""

    def found(self, bytes_per_second: float, sent_bytes: int, seconds: float) -> SlowLink:
        """A transfer without a limit has taken long enough to call the link slow, and carried so much."""
        if self.carries:
            return self
        return SlowLink(bytes_per_second, ROOM_RATIO * bytes_per_second, (sent_bytes, seconds))

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
        if not self.carries or lasted < (LOOK_SECONDS if self.limit is None else RETRY_SECONDS):
            return self
        rate = (sent_bytes - self.begun[0]) / lasted
        begun = (sent_bytes, seconds)
        if self.limit is not None:
            is_slower = rate < HELD_RATIO * self.limit
            return SlowLink(max(rate, 1.0) if is_slower else self.carries, None, begun)
        return self if rate >= sound else replace(self, limit=ROOM_RATIO * self.carries, begun=begun)
