"""What goes into which idle span of the network: GEMINI's traffic scheduling (SOSP'23, section 5, Algorithm 2), corrected.

    profile ──IdleSpan──▶ partition ──ScheduledChunk──▶ how much of a snapshot fits, and when each piece leaves
                    └───▶ opening ───when───▶ the pacer, chunk by chunk

Times are offsets from the boundary that begins the iteration. Invariant: every byte is scheduled exactly once, and
nothing is scheduled into the part of a span that its variation may take away.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from everstep.protocol.rank_messages import IdleSpan

MU_RATIO = 0.85
"""Share of a mean span that is used. GEMINI keeps its own to itself; its artifact uses 0.8 of the shortest span."""
MIN_CHUNK_BYTES = 32 * 1024
MAX_CHUNK_BYTES = 4 * 1024 * 1024
CHUNKS_PER_SPAN = 8
"""A span is left unused by up to one chunk at its end: with so many of them that is little."""
UNIFORM_SHARE = 0.8
"""Uniform pacing is done after this part of the iteration, so that digest, votes and commit fit into the rest."""


@dataclass(frozen=True, slots=True)
class Link:
    """The time model of one chunk, f(s) = alpha + s/B (section 5.3)."""

    bandwidth_bytes_per_second: float
    alpha_seconds: float = 0.0

    def seconds(self, bytes_count: int) -> float:
        """Return how long `bytes_count` bytes occupy the link."""
        return self.alpha_seconds + bytes_count / self.bandwidth_bytes_per_second

    def bytes_within(self, seconds: float) -> int:
        """Return how many bytes one chunk can have that takes `seconds`."""
        return max(0, math.floor((seconds - self.alpha_seconds) * self.bandwidth_bytes_per_second))


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """A piece of one copy of a snapshot, and when it leaves."""

    copy: int
    """Which of the copies that are sent, from 0."""
    offset: int
    """Where it begins in the snapshot, bytes."""
    bytes_count: int
    span: int
    """Index into the spans; their number for what does not fit into any."""
    begin_seconds: float
    """After the boundary."""


def usable(span: IdleSpan, mu: float = MU_RATIO) -> IdleSpan:
    """Return the middle of a span: `mu` of its mean, and less where its ends move by more than that from iteration to iteration."""
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

    Four lines of the printed algorithm are changed, each shown by a test: a chunk costs f(its own size); as many copies
    are sent as are asked for; a span too short for a byte ends instead of looping for ever; the unbounded span for what
    does not fit comes after the profiled ones instead of replacing the last.

    Args:
        spans: of one iteration, in order of time, without overlap.
        checkpoint_bytes: of one copy.
        copies: that are sent, m - 1: the owner's own is not.
        buffer_bytes: R, the receiver's buffers together.
        buffers: p, in how many the receiver divides it: a chunk is at most R/p.
        bandwidth_bytes_per_second: B.
        alpha_seconds: the start-up time of a chunk.
        mu: part of a mean span that is used, in (0, 1].

    Returns:
        All chunks in order of time. Those with span `len(spans)` did not fit: they follow the last span and delay what
        comes then.

    Raises:
        ValueError: an argument that describes no link, buffer or span.
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
    """Spread the copies of a snapshot evenly over `UNIFORM_SHARE` of an iteration, whatever training does: what scheduling has to beat.

    Args:
        checkpoint_bytes: of one copy.
        copies: that are sent.
        chunk_bytes: of a chunk; a copy's last one may be smaller.
        iteration_seconds: mean.

    Returns:
        All chunks in order of time, all in span 0, which is the iteration.

    Raises:
        ValueError: chunks of no bytes.
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
    """Return the size of chunk that fits `CHUNKS_PER_SPAN` times into a usual window: the one that the middle byte goes through."""
    half, passed = sum(window.seconds for window in windows) / 2, 0.0
    for length in sorted(window.seconds for window in windows):
        passed += length
        if passed >= half:
            fitting = link.bytes_within(length / CHUNKS_PER_SPAN)
            return min(MAX_CHUNK_BYTES, max(MIN_CHUNK_BYTES, fitting - fitting % 4096))
    return MIN_CHUNK_BYTES


def opening(windows: Sequence[IdleSpan], after_seconds: float, cost_seconds: float) -> float | None:
    """Return when a chunk may leave, or None when nothing of this iteration is left for it.

    A chunk longer than every window goes at the beginning of the longest one: late is worse than a little in the way.

    Args:
        windows: the usable parts of the idle spans, in order of time.
        after_seconds: not before, after the boundary.
        cost_seconds: how long the chunk occupies the link.

    Returns:
        Seconds after the boundary, at least `after_seconds`.
    """
    longest = max((window.seconds for window in windows), default=0.0)
    for window in windows:
        begin = max(after_seconds, window.begin_seconds)
        if begin + cost_seconds <= window.begin_seconds + window.seconds:
            return begin
        if longest < cost_seconds and window.seconds == longest and after_seconds <= window.begin_seconds:
            return begin
    return None
