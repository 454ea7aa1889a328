"""Records when this rank uses the network, for about twenty iterations, and again when their duration changes.

`TorchTrace` uses torch's profiler, because patched Python calls would miss the collectives that DDP calls from C++. A
recording contains no operators, so it costs microseconds per iteration. On a GPU, it would lack NCCL's transfers.

Invariant: if profiling fails, or the script starts its own profiler, the recording ends and training continues. A
recording ends after the operations that it observes (`recorded_calls`).
"""

from __future__ import annotations

import contextlib
import logging
import statistics
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch._C._autograd import (
    _disable_profiler,
    _enable_profiler,
    _prepare_profiler,
    _profiler_enabled,
    _ProfilerResult,
)
from torch._C._profiler import RecordScope
from torch.autograd.profiler import profile

from everstep.protocol.rank_messages import IdleSpan
from everstep.training.idle_spans import Interval, idle_spans
from everstep.training.recorded_calls import RecordedCalls

WARM_UP_ITERATIONS = 8
"""Iterations before the first recording: torch compiles and rebuilds buckets, and Everstep audits snapshots."""
PROFILED_ITERATIONS = 20
"""The paper GEMINI (Wang et al., SOSP '23) uses this number."""
WATCHED_ITERATIONS = 64
"""Iterations between two checks of the iteration time."""
DRIFT_RATIO = 0.1
CLOSE_SECONDS = 1.0
"""Longest wait for recorded operations when the session ends during a recording."""
BOUNDARY = "everstep:boundary"

logger = logging.getLogger("everstep.training")
Read = Callable[[], tuple[list[Interval], list[float]]]
"""Returns the intervals of network use and the ends of iterations, on one clock."""


class ProfileTrace(Protocol):
    """Records when this rank uses the network."""

    def begin(self) -> bool:
        """Start the profiler. Return False if it cannot start now, for example while another profiler runs."""
        ...

    def is_ours(self) -> bool:
        """Return whether the recording still runs. Other code may have ended it."""
        ...

    def stop(self) -> None:
        """Exclude operations that the script starts from now on."""

    def is_settled(self, limit_seconds: float = 0.0) -> bool:
        """Return whether `end` is safe within the limit, because all recorded operations have ended."""
        ...

    def mark(self) -> bool:
        """Mark the end of an iteration. Return False if other code has ended the recording."""
        ...

    def end(self) -> Read:
        """End the recording, and return a function that reads it."""
        ...


class NetworkProfiler:
    """Profiles the network use of one rank, in the training thread. `report` gets medians in seconds."""

    def __init__(self, report: Callable[[float, tuple[IdleSpan, ...]], None], trace: ProfileTrace) -> None:
        self._report = report
        self._trace = trace
        self._iterations: list[float] = []
        self._last: float | None = None
        self._wait = WARM_UP_ITERATIONS
        self._profiled_seconds: float | None = None
        self._is_recording = False
        self._unread: Read | None = None

    def boundary(self, at_seconds: float) -> None:
        """Record the end of an iteration, at monotonic time, and start, end or read a recording if it is due."""
        if self._last is not None:
            self._iterations.append(at_seconds - self._last)
        self._last = at_seconds
        if self._unread is not None:
            self._evaluate(self._unread)
            self._unread = None
        elif self._is_recording:
            self._record()
        elif len(self._iterations) >= self._wait:
            self._look()

    def close(self) -> None:
        """Discard a running recording, after at most `CLOSE_SECONDS`."""
        # A process that exits during a recording ends with SIGSEGV, so it ends even if an operation still runs.
        if self._is_recording:
            self._is_recording = False
            self._trace.stop()
            self._trace.is_settled(CLOSE_SECONDS)
            with contextlib.suppress(RuntimeError):  # Ignore torch's error: the recording is not needed any more.
                self._trace.end()

    def _look(self) -> None:
        usual = statistics.median(self._iterations)
        self._iterations.clear()
        self._wait = WATCHED_ITERATIONS
        known = self._profiled_seconds
        if known is None or abs(usual / known - 1) > DRIFT_RATIO:
            self._is_recording = self._trace.begin() and self._trace.mark()

    def _record(self) -> None:
        count = len(self._iterations)
        if not (self._trace.mark() if count <= PROFILED_ITERATIONS else self._trace.is_ours()):
            logger.debug("another profiler is active: Everstep measures idle network time later")
            self._is_recording = False
            self._iterations.clear()
            return
        if count == PROFILED_ITERATIONS:
            self._trace.stop()
        # If a recorded operation still runs, end the recording after a later iteration.
        if count >= PROFILED_ITERATIONS and self._trace.is_settled():
            self._is_recording = False
            self._profiled_seconds = statistics.median(self._iterations[:PROFILED_ITERATIONS])
            self._unread = self._trace.end()
            self._iterations.clear()

    def _evaluate(self, read: Read) -> None:
        usual, spans = self._profiled_seconds, idle_spans(*read())
        assert usual is not None
        idle = sum(span.seconds for span in spans)
        logger.info("an iteration of %.3f s leaves the network idle for %.3f s in %d spans", usual, idle, len(spans))
        self._report(usual, spans)


class TorchTrace:
    """Records the time ranges of gloo's collectives with torch's profiler."""

    def __init__(self) -> None:
        self._calls = RecordedCalls()

    def begin(self) -> bool:
        has_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if has_gpu or _is_somebody_profiling() or _profiler_enabled():
            return False
        try:
            wanted = profile()
            config = wanted.config()  # type: ignore[no-untyped-call]
            _prepare_profiler(config, wanted.kineto_activities)
            _enable_profiler(config, wanted.kineto_activities, {RecordScope.USER_SCOPE})  # type: ignore[call-arg]
        except (RuntimeError, TypeError, AttributeError) as error:
            # Train without a profile, because this version of torch has a different profiler interface.
            logger.info("Everstep cannot measure idle network time: %s", error)
            return False
        self._calls.begin()
        return True

    def mark(self) -> bool:
        if not self.is_ours():
            return False
        with torch.profiler.record_function(BOUNDARY):
            return True

    def is_ours(self) -> bool:
        if _is_somebody_profiling() or not _profiler_enabled():
            self._calls.end()
            return False
        return True

    def stop(self) -> None:
        self._calls.stop()

    def is_settled(self, limit_seconds: float = 0.0) -> bool:
        return self._calls.wait(limit_seconds)

    def end(self) -> Read:
        if not self.is_ours():
            return lambda: ([], [])
        self._calls.end()
        return partial(_read, _disable_profiler())


def _read(result: _ProfilerResult) -> tuple[list[Interval], list[float]]:
    busy, boundaries = [], []
    for event in result.events():
        begin = event.start_ns() / 1e9
        if event.name() == BOUNDARY:
            boundaries.append(begin)
        elif event.name().startswith("gloo:"):
            busy.append((begin, begin + event.duration_ns() / 1e9))
    return busy, sorted(boundaries)


def _is_somebody_profiling() -> bool:
    """Return whether the script runs its own profiler."""
    # `torch.profiler` sets this flag; `TorchTrace` uses a lower layer and does not set it.
    return bool(torch.autograd.profiler._is_profiler_enabled)
