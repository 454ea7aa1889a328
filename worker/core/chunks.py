"""Places the chunks of a snapshot in the idle spans of the network.

    profile ──IdleSpan──▶ partition ──ScheduledChunk──▶ how much of a snapshot fits, and when each piece is sent
                    └───▶ opening ──the time at which a chunk may be sent──▶ the pacer, chunk by chunk

The module implements GEMINI's traffic scheduling (SOSP'23, section 5, Algorithm 2) with corrections. Times are offsets
from the boundary at which the iteration begins. Invariant: every byte is scheduled exactly once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from everstep.protocol.rank_messages import IdleSpan

# GEMINI's paper does not state the fraction. Its published code uses 0.8 of the shortest span.
MU_RATIO = 0.85
"""Fraction of an idle span's mean length in which chunks may be sent."""
MIN_CHUNK_BYTES = 32 * 1024
MAX_CHUNK_BYTES = 4 * 1024 * 1024
# The end of a span that is too short for another chunk stays unused. Small chunks keep this loss small.
CHUNKS_PER_SPAN = 8
UNIFORM_SHARE = 0.8
"""Share of the iteration in which uniform pacing sends all copies; the rest is for digests and votes."""


@dataclass(frozen=True, slots=True)
class Link:
    """Time model of a network link: a chunk of s bytes takes alpha + s/B seconds (GEMINI, section 5.3)."""

    bandwidth_bytes_per_second: float
    alpha_seconds: float = 0.0

    def seconds(self, bytes_count: int) -> float:
        """Return the seconds for which a chunk of `bytes_count` bytes occupies the link."""
        return self.alpha_seconds + bytes_count / self.bandwidth_bytes_per_second

    def bytes_within(self, seconds: float) -> int:
        """Return the largest chunk, in bytes, that the link sends within `seconds`."""
        return max(0, math.floor((seconds - self.alpha_seconds) * self.bandwidth_bytes_per_second))


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """One chunk of a snapshot for one holder, and the time at which the sender should send it."""

    copy: int
    """Index of the copy, from 0. Each copy goes to another holder."""
    offset: int
    bytes_count: int
    span: int
    """Index of the idle span. For a chunk that fits into no span, the number of spans."""
    begin_seconds: float
    """Seconds from the boundary to the start of the chunk."""


def usable(span: IdleSpan, mu: float = MU_RATIO) -> IdleSpan:
    """Return the part of an idle span in which chunks may be sent.

    The margin at each end is (1 - `mu`) / 2 of the span's mean length, or the standard deviation of its ends if larger.
    """
    # The start and end of a span vary from iteration to iteration.
    margin = min(max(span.seconds * (1 - mu) / 2, span.deviation_seconds), span.seconds / 2)
    return IdleSpan(span.begin_seconds + margin, span.seconds - 2 * margin)


def partition(
    spans: Sequence[IdleSpan],
    checkpoint_bytes: int,
    copies: int,
    *,
    buffer_bytes: int,
    buffers: int,
    bandwidth_bytes_per_second: float,
    alpha_seconds: float,
    mu: float,
) -> tuple[ScheduledChunk, ...]:
    """Fit the copies of a snapshot into the idle spans of one iteration, chunk by chunk.

    Four points differ from Algorithm 2 of the GEMINI paper, each with a test:

    - The cost of a chunk depends on the chunk's own size (`Link.seconds`).
    - The number of copies is a parameter.
    - A span that is too short for one byte is skipped. The paper's algorithm loops for ever.
    - The unbounded span for the remaining chunks follows the last profiled span instead of replacing it.

    Args:
        spans: idle spans of one iteration, in order of time, without overlap.
        checkpoint_bytes: size of one copy.
        copies: number of copies to send, m - 1; the owner's own copy is not sent.
        buffer_bytes: R, total size of the receiver's buffers.
        buffers: p, number of the receiver's buffers; a chunk has at most R/p bytes.
        bandwidth_bytes_per_second: B, rate of the link.
        alpha_seconds: start-up time of a chunk.
        mu: fraction of an idle span's mean length in which chunks may be sent, in (0, 1].

    Returns all chunks in order of time. Chunks with span `len(spans)` follow the last span and delay training. Raises
    ValueError if an argument describes no valid link, buffer or span.
    """
    largest = buffer_bytes // buffers if buffers > 0 else 0
    if largest < 1 or bandwidth_bytes_per_second <= 0 or alpha_seconds < 0 or not 0 < mu <= 1:
        raise ValueError("needs buffers of at least a byte, a positive bandwidth, and mu in (0, 1]")
    link = Link(bandwidth_bytes_per_second, alpha_seconds)
    windows = [usable(span, mu) for span in spans]
    end = max((span.begin_seconds + span.seconds for span in spans), default=0.0)
    chunks: list[ScheduledChunk] = []
    copy, offset = 0, 0
    for index, window in enumerate((*windows, IdleSpan(end, math.inf))):
        at, left = window.begin_seconds, window.seconds
        while copy < copies and checkpoint_bytes > 0:
            size = min(largest if left >= link.seconds(largest) else link.bytes_within(left), checkpoint_bytes - offset)
            if size == 0:
                break
            chunks.append(ScheduledChunk(copy, offset, size, index, at))
            at, left = at + link.seconds(size), left - link.seconds(size)
            offset += size
            if offset == checkpoint_bytes:
                copy, offset = copy + 1, 0
    return tuple(chunks)


def uniform(
    checkpoint_bytes: int, copies: int, *, chunk_bytes: int, iteration_seconds: float
) -> tuple[ScheduledChunk, ...]:
    """Spread the copies of a snapshot evenly over `UNIFORM_SHARE` of an iteration: the baseline for `partition`.

    Returns the chunks in order of time, all in span 0. Raises ValueError if `chunk_bytes` is below 1.
    """
    if chunk_bytes < 1:
        raise ValueError("chunks of no bytes")
    per_byte = UNIFORM_SHARE * iteration_seconds / max(1, checkpoint_bytes * copies)
    return tuple(
        ScheduledChunk(
            copy, offset, min(chunk_bytes, checkpoint_bytes - offset), 0, (copy * checkpoint_bytes + offset) * per_byte
        )
        for copy in range(copies)
        for offset in range(0, checkpoint_bytes, chunk_bytes)
    )


def chunk_bytes_for(windows: Sequence[IdleSpan], link: Link) -> int:
    """Return the chunk size in bytes of which `CHUNKS_PER_SPAN` fit into a typical window (`usable`).

    The typical window is the weighted median: windows of at most this length contain half of the total window time.
    """
    half, passed = sum(window.seconds for window in windows) / 2, 0.0
    for length in sorted(window.seconds for window in windows):
        passed += length
        if passed >= half:
            fitting = link.bytes_within(length / CHUNKS_PER_SPAN)
            return min(MAX_CHUNK_BYTES, max(MIN_CHUNK_BYTES, fitting - fitting % 4096))
    return MIN_CHUNK_BYTES


def opening(windows: Sequence[IdleSpan], after_seconds: float, cost_seconds: float) -> float | None:
    """Return when a chunk may be sent, in seconds after the start of the iteration; None for the next iteration.

    The chunk is sent `after_seconds` (from the same start) or later, and occupies the link for `cost_seconds`.
    """
    longest = max((window.seconds for window in windows), default=0.0)
    for window in windows:
        begin = max(after_seconds, window.begin_seconds)
        if begin + cost_seconds <= window.begin_seconds + window.seconds:
            return begin
        # No window has room. Some contention with training is better than a late snapshot.
        if longest < cost_seconds and window.seconds == longest and after_seconds <= window.begin_seconds:
            return begin
    return None
