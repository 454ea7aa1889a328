"""Limits snapshots on a slow link to half of the link's rate, so that training traffic does not queue behind them.

    suspected slow ──▶ limited to half of its rate ──▶ limit lifted, rate measured ─┬─▶ limited again for longer
                                                                                   └─▶ sound

The rate of a limited transfer does not show the full rate of the link. Each transfer therefore begins without a limit.
In a long transfer, the limit is lifted periodically. The first limit lasts only a short time, because the link may not
be slow after all. All durations count only the time in which the transfer was allowed to send.

docs/benchmarks-faults.md measures training beside a transfer with and without the limit (*a link at 1 %*).

Invariant: after at most `LONGEST_LIMIT_SECONDS` of sending with a limit, the link is measured again without the limit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

ROOM_RATIO = 0.5
"""Fraction of a slow link's rate that snapshots may use.

If snapshots used the full rate, even the smallest collective operation would wait behind the kernel's send buffer: 12
to 30 ms at 12.5 MB/s.
"""
FULL_RATE_SECONDS = 0.2
"""Duration of a measurement of the link's full rate (without a limit), in seconds of sending."""
FIRST_LIMIT_SECONDS, LONGEST_LIMIT_SECONDS = 0.5, 10.0
"""Durations of the first limit and of the longest limit, in seconds of sending.

Each limit lasts twice as long as the previous one.
"""
FASTER_RATIO = 2.0
"""Factor by which a new rate without a limit must exceed the last measured rate, so that the link counts as faster.

The sender then measures once more, because right after a limit is lifted, the kernel's buffers distort the rate.
"""
HELD_RATIO = 0.8
"""Fraction of the rate limit that a limited transfer should reach. A lower rate shows that the link became slower."""
LEAST_BYTES_PER_SECOND = 256 * 1024
"""Rate below which a link counts as stopped. Snapshots on such a link are sent without a limit.

Training could not use the rate that a limit would leave free.
"""


@dataclass(frozen=True, slots=True)
class SlowLink:
    """State of the link to one holder: the last measured rate if it is slow, and the rate limit for snapshots on it.

    Each sender has one instance.
    """

    carries: float = 0.0
    """Rate of the slow link in bytes per second, as last measured; 0 while the link does not count as slow."""
    limit: float | None = None
    """Rate limit for snapshots on this link, in bytes per second; None if snapshots are sent without a limit."""
    begun: tuple[int, float] = (0, 0.0)
    """(bytes sent, seconds of sending) of the running transfer at the moment when the limit was last set or lifted."""
    retry_seconds: float = FIRST_LIMIT_SECONDS
    """Duration of the current or last limit of the link's rate, in seconds of sending."""
    is_faster: bool = False
    """True if the last measurement without a limit showed a much higher rate than the measurement before it."""

    def found(self, bytes_per_second: float, sent_bytes: int, seconds: float) -> SlowLink:
        """Record that the link is slow, and set the first limit for the rate of snapshots on it.

        The caller has measured `bytes_per_second` over a sufficient time without a limit.
        """
        if self.carries:
            return self
        stands_still = bytes_per_second < LEAST_BYTES_PER_SECOND
        return SlowLink(
            max(bytes_per_second, 1.0), None if stands_still else ROOM_RATIO * bytes_per_second, (sent_bytes, seconds)
        )

    def next_transfer(self) -> SlowLink:
        """Return the link's state at the start of the next transfer, without the last transfer's rate limit."""
        return replace(self, limit=None, begun=(0, 0.0))

    def measured(self, sent_bytes: int, seconds: float, *, sound: float) -> SlowLink:
        """Measure the rate of the running transfer, and set or lift the rate limit for snapshots on this link.

        Args:
            sent_bytes: bytes that the transfer has sent.
            seconds: time in which the transfer was allowed to send.
            sound: rate in bytes per second from which a link does not count as slow.

        Returns:
            The new state. Its `limit` applies to the bytes that are sent from now on.
        """
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
        if is_faster and not self.is_faster:
            return replace(self, begun=begun, is_faster=True)
        carries = rate if is_faster or self.carries < LEAST_BYTES_PER_SECOND else self.carries
        return SlowLink(carries, ROOM_RATIO * carries, begun, min(2 * self.retry_seconds, LONGEST_LIMIT_SECONDS))
