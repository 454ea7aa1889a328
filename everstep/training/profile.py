"""Records when this rank uses the network, for about twenty iterations.

The profiler records again only when the duration of iterations has changed. It uses torch's profiler, which also
records the collectives of DDP and FSDP. Hooks and patched calls would miss them. A recording contains the time spans of
collectives and no operators, so it costs microseconds per iteration.

Invariant: if profiling fails, the recording ends and training continues. If the script starts its own profiler,
Everstep's recording ends without a result.
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
"""Number of iterations before the first recording.

The first iterations are not typical: torch compiles, allocates memory and rebuilds buckets, and Everstep audits
snapshots.
"""
PROFILED_ITERATIONS = 20
"""Number of recorded iterations, as in the paper GEMINI (Wang et al., SOSP '23)."""
WATCHED_ITERATIONS = 64
"""Number of iterations between two checks whether the iteration time still equals that of the recording."""
DRIFT_RATIO = 0.1
BOUNDARY = "everstep:boundary"

logger = logging.getLogger("everstep.training")
Read = Callable[[], tuple[list[Interval], list[float]]]
"""Function that reads a recording.

It returns the intervals of network use and the marked ends of iterations, on one clock.
"""


class ProfileTrace(Protocol):
    """Interface of a recorder that records when this rank uses the network."""

    def begin(self) -> bool:
        """Start the profiler. Return False if it cannot start now, for example while another profiler runs."""
        ...

    def mark(self) -> bool:
        """Mark the end of an iteration in the recording. Return False if other code has ended the recording."""
        ...

    def end(self) -> Read:
        """End the recording, and return a function that reads its intervals of network use from the profiler."""
        ...


class NetworkProfiler:
    """Profiles the network use of one rank. Only the training thread calls it.

    Args:
        report: receives the median duration of an iteration, in seconds, and the idle spans.
        trace: records the use of the network.
    """

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
        """Record the end of an iteration, and start, end or read a recording if it is due.

        Called once per iteration. Ending a recording and reading it each take milliseconds, for which the script waits.
        The profiler therefore ends and reads a recording after different iterations.

        Args:
            at_seconds: end of the iteration on the monotonic clock.
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
        """Stop a running recording of the profiler, and discard what it recorded.

        The method ignores the driver's error if the GPU has failed.
        """
        if self._is_recording:
            self._is_recording = False
            with contextlib.suppress(RuntimeError):  # Ignore the driver's error: the recording is not needed any more.
                self._trace.end()

    def _look(self) -> None:
        """Start to profile iterations if no profile exists, or if their duration has changed since the profile."""
        usual = statistics.median(self._iterations)
        self._iterations.clear()
        self._wait = WATCHED_ITERATIONS
        known = self._profiled_seconds
        if known is None or abs(usual / known - 1) > DRIFT_RATIO:
            self._is_recording = self._trace.begin() and self._trace.mark()

    def _record(self) -> None:
        if not self._trace.mark():
            logger.debug("another profiler is active: Everstep measures idle network time later")
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
        assert usual is not None
        idle = sum(span.seconds for span in spans)
        logger.info("an iteration of %.3f s leaves the network idle for %.3f s in %d spans", usual, idle, len(spans))
        self._report(usual, spans)


class TorchTrace:
    """Records time ranges with torch's profiler.

    The ranges are gloo's collectives, on the threads of gloo, and NCCL's kernels, on the device.
    """

    def begin(self) -> bool:
        """Start to record, unless the script runs its own profiler (see `ProfileTrace.begin`)."""
        if _is_somebody_profiling() or _profiler_enabled():
            return False
        try:
            has_device = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
            wanted = profile(use_device="cuda" if has_device else None)
            config = wanted.config()  # type: ignore[no-untyped-call]
            _prepare_profiler(config, wanted.kineto_activities)
            _enable_profiler(config, wanted.kineto_activities, {RecordScope.USER_SCOPE})  # type: ignore[call-arg]
        except (RuntimeError, TypeError, AttributeError) as error:
            # Train without a profile, because this version of torch has a different profiler interface.
            logger.info("Everstep cannot measure idle network time: %s", error)
            return False
        return True

    def mark(self) -> bool:
        """Mark the end of an iteration by an empty event in the profiler's recording (see `ProfileTrace.mark`)."""
        if _is_somebody_profiling() or not _profiler_enabled():
            return False
        with torch.profiler.record_function(BOUNDARY):
            return True

    def end(self) -> Read:
        """End torch's profiler, and return a function that reads the recording (see `ProfileTrace.end`)."""
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
    """Return whether a range (a time span that the profiler recorded) is a use of the network.

    A range of gloo lasts as long as its collective. A range of NCCL on the CPU already ends at the kernel launch, so
    only NCCL's kernels on the device count as network use.

    Args:
        name: name of the range or kernel.
        is_device: True if it ran on the device.

    Returns:
        True if the range is a network transfer.
    """
    return name.startswith(("ncclDevKernel", "ncclKernel")) if is_device else name.startswith("gloo:")


def _is_somebody_profiling() -> bool:
    """Return whether the script runs its own profiler.

    `torch.profiler` sets torch's flag `_is_profiler_enabled`; `TorchTrace` uses a lower layer and does not set it.
    """
    return bool(torch.autograd.profiler._is_profiler_enabled)
