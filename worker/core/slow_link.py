"""Limits snapshots on a slow link to half of the link's rate, so that training traffic does not queue behind them.

    suspected slow ──▶ limited to half of its rate ──▶ limit lifted, rate measured ─┬─▶ limited again for longer
                                                                                   └─▶ sound

Durations count only the time in which the transfer was allowed to send. Invariant: after at most
`LONGEST_LIMIT_SECONDS` of sending with a limit, the link is measured again without the limit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

# At the full rate, even the smallest collective waits behind the kernel's send buffer: 12 to 30 ms at 12.5 MB/s.
ROOM_RATIO = 0.5
"""Fraction of a slow link's rate that snapshots may use."""
FULL_RATE_SECONDS = 0.2
"""Duration of a measurement without a limit, in seconds of sending."""
FIRST_LIMIT_SECONDS, LONGEST_LIMIT_SECONDS = 0.5, 10.0
"""Durations of the first and the longest limit, in seconds of sending. Each limit lasts twice as long as the last."""
FASTER_RATIO = 2.0
"""Factor by which a new rate must exceed the last measured rate, so that the link counts as faster."""
HELD_RATIO = 0.8
"""Fraction of the limit that a limited transfer should reach. A lower rate shows that the link became slower."""
# Such a link has no limit, because training could not use the rate that a limit would leave free.
LEAST_BYTES_PER_SECOND = 256 * 1024
"""Rate below which a link counts as stopped."""


@dataclass(frozen=True, slots=True)
class SlowLink:
    """State of the link to one holder: its rate if it is slow, and the limit for snapshots on it."""

    carries: float = 0.0
    """Last measured rate of the slow link in bytes per second; 0 while the link does not count as slow."""
    limit: float | None = None
    """Bytes per second; None if snapshots are sent without a limit."""
    begun: tuple[int, float] = (0, 0.0)
    """(bytes sent, seconds of sending) of the transfer when the limit was last set or lifted."""
    retry_seconds: float = FIRST_LIMIT_SECONDS
    is_faster: bool = False
    """True if the last measurement without a limit showed a much higher rate than the one before it."""

    def found(self, bytes_per_second: float, sent_bytes: int, seconds: float) -> SlowLink:
        """Record that the link is slow, as measured over a sufficient time without a limit, and set the first limit."""
        if self.carries:
            return self
        stands_still = bytes_per_second < LEAST_BYTES_PER_SECOND
        return SlowLink(
            max(bytes_per_second, 1.0), None if stands_still else ROOM_RATIO * bytes_per_second, (sent_bytes, seconds)
        )

    def next_transfer(self) -> SlowLink:
        """Return the state at the start of the next transfer, without a limit."""
        return replace(self, limit=None, begun=(0, 0.0))

    def measured(self, sent_bytes: int, seconds: float, *, sound: float) -> SlowLink:
        """Measure the rate over `seconds` of sending, and set or lift the limit. A link of rate `sound` is not slow."""
        lasted = seconds - self.begun[1]
        if not self.carries or lasted < (FULL_RATE_SECONDS if self.limit is None else self.retry_seconds):
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
        # Measure once more: right after a limit is lifted, the kernel's buffers distort the rate.
        if is_faster and not self.is_faster:
            return replace(self, begun=begun, is_faster=True)
        carries = rate if is_faster or self.carries < LEAST_BYTES_PER_SECOND else self.carries
        return SlowLink(carries, ROOM_RATIO * carries, begun, min(2 * self.retry_seconds, LONGEST_LIMIT_SECONDS))
