"""Watches for some twenty iterations when this rank uses the network, then stays out of the way until iterations take another time.

torch's profiler sees what hooks and patched calls miss: DDP's and FSDP's own collectives. It is asked for ranges alone,
not for operators: that costs microseconds an iteration. Invariant: trouble with profiling ends the profile, never
training, and a profiler that the script begins itself always wins.
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
    DeviceType,
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

WARM_UP_ITERATIONS = 8
"""Before a profile: the first iterations of a launch compile, allocate, rebuild buckets and are audited."""
PROFILED_ITERATIONS = 20
"""As many as GEMINI's."""
WATCHED_ITERATIONS = 64
"""Between two looks at whether iterations still take the time that was profiled."""
DRIFT_RATIO = 0.1
BOUNDARY = "everstep:boundary"

logger = logging.getLogger("everstep.training")
Read = Callable[[], tuple[list[Interval], list[float]]]
"""Reads a recording: when the network was in use, and the boundaries that were marked, on one clock."""


class Trace(Protocol):
    """What records the use of the network."""

    def begin(self) -> bool:
        """Begin to record; False where that is not possible now."""

    def mark(self) -> bool:
        """Record a boundary; False when the recording was ended by somebody else."""

    def end(self) -> Read:
        """End the recording, and return what reads it."""


class NetworkProfiler:
    """One rank's; every method on its training thread.

    Args:
        report: takes the median iteration and the spans found.
        trace: what records.
    """

    def __init__(self, report: Callable[[float, tuple[IdleSpan, ...]], None], trace: Trace) -> None:
        self._report = report
        self._trace = trace
        self._iterations: list[float] = []
        self._last: float | None = None
        self._wait = WARM_UP_ITERATIONS
        self._profiled_seconds: float | None = None
        self._is_recording = False
        self._unread: Read | None = None

    def boundary(self, at_seconds: float) -> None:
        """Take note of a boundary: begins, marks and ends the recording when it is time, and reads it at the next one.

        Once an iteration.

        To end a recording and to read it take milliseconds each, which the script waits for: not for both at once.

        Args:
            at_seconds: monotonic.
        """
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
        """End a recording that is under way.

        Nobody reads it: that a device which has failed does not give it is no trouble.
        """
        if self._is_recording:
            self._is_recording = False
            with contextlib.suppress(RuntimeError):  # torch's word for what the driver says
                self._trace.end()

    def _look(self) -> None:
        """Enough iterations have passed: begin a profile, the first or one that is needed again."""
        usual = statistics.median(self._iterations)
        self._iterations.clear()
        self._wait = WATCHED_ITERATIONS
        known = self._profiled_seconds
        if known is None or abs(usual / known - 1) > DRIFT_RATIO:
            self._is_recording = self._trace.begin() and self._trace.mark()

    def _record(self) -> None:
        if not self._trace.mark():
            logger.debug("another profiler runs: when the network is idle is looked at later")
            self._is_recording = False
        elif len(self._iterations) >= PROFILED_ITERATIONS:
            self._is_recording = False
            self._profiled_seconds = statistics.median(self._iterations)
            self._unread = self._trace.end()
        else:
            return
        self._iterations.clear()

    def _evaluate(self, read: Read) -> None:
        usual, spans = self._profiled_seconds, idle_spans(*read())
        assert usual is not None  # noted when the recording ended
        idle = sum(span.seconds for span in spans)
        logger.info("an iteration of %.3f s leaves the network idle for %.3f s in %d spans", usual, idle, len(spans))
        self._report(usual, spans)


class TorchTrace:
    """torch's profiler, for ranges alone: gloo's collectives on their own threads, NCCL's kernels on the device."""

    def begin(self) -> bool:
        """Begin, unless a profiler runs (see `Trace`)."""
        if _is_somebody_profiling() or _profiler_enabled():
            return False
        try:
            wanted = profile(use_device="cuda" if torch.cuda.is_available() and torch.cuda.is_initialized() else None)  # type: ignore[no-untyped-call]
            config = wanted.config()  # type: ignore[no-untyped-call]
            _prepare_profiler(config, wanted.kineto_activities)
            _enable_profiler(config, wanted.kineto_activities, {RecordScope.USER_SCOPE})  # type: ignore[call-arg]
        except (RuntimeError, TypeError, AttributeError) as error:  # a torch whose profiler is another one
            logger.info("when the network is idle cannot be profiled: %s", error)
            return False
        return True

    def mark(self) -> bool:
        """Leave a range of no length in the recording (see `Trace`)."""
        if _is_somebody_profiling() or not _profiler_enabled():
            return False
        with torch.profiler.record_function(BOUNDARY):
            return True

    def end(self) -> Read:
        """End the recording (see `Trace`)."""
        if _is_somebody_profiling() or not _profiler_enabled():
            return lambda: ([], [])
        return partial(_read, _disable_profiler())


def _read(result: _ProfilerResult) -> tuple[list[Interval], list[float]]:
    busy, boundaries = [], []
    for event in result.events():
        begin = event.start_ns() / 1e9
        if event.name() == BOUNDARY:
            boundaries.append(begin)
        elif is_network(event.name(), is_device=event.device_type() != DeviceType.CPU):
            busy.append((begin, begin + event.duration_ns() / 1e9))
    return busy, sorted(boundaries)


def is_network(name: str, *, is_device: bool) -> bool:
    """Say whether a range is the network in use.

    gloo's ranges last as long as the collective. NCCL's ranges on the CPU end when the kernel is launched: its kernels
    on the device count instead.

    Args:
        name: of the range or kernel.
        is_device: it ran on the device.

    Returns:
        Whether bytes travel while it lasts.
    """
    return name.startswith(("ncclDevKernel", "ncclKernel")) if is_device else name.startswith("gloo:")


def _is_somebody_profiling() -> bool:
    """Say whether the script runs a profiler of its own: torch's sets this flag, ours does not."""
    return bool(torch.autograd.profiler._is_profiler_enabled)
