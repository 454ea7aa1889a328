"""The operations on the device that the parts use: `Cuda` is a real GPU, `Host` runs the same code without CUDA.

A part that passes its tests on the host can fail on a GPU only in this module's calls.
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Protocol

import torch

from everstep.training.copier import Copier, CopyTicket, CpuCopier
from everstep.training.cuda_copier import CudaCopier
from everstep.training.cuda_device import CudaDevice

CUDA, HOST = "cuda", "cpu"
SYNCHRONIZING = "synchronizing CUDA operation"
"""Text in torch's warning about a call that waits for the device."""
REGISTRATION_SECONDS = 120.0


class Registration:
    """Records each piece of memory that a copier registers with the GPU driver. The copier's thread adds pieces."""

    def __init__(self) -> None:
        self.pieces: list[tuple[int, float]] = []
        """(bytes, seconds) of each piece."""
        self.refused_bytes = 0
        self._changed = threading.Condition()

    def add(self, size: int, seconds: float, *, is_taken: bool) -> None:
        """Record a registered piece, or a refused one if not `is_taken`."""
        with self._changed:
            if is_taken:
                self.pieces.append((size, seconds))
            else:
                self.refused_bytes += size
            self._changed.notify_all()

    @property
    def registered_bytes(self) -> int:
        return sum(size for size, _ in self.pieces)

    def wait(self, size: int) -> None:
        """Wait until `size` bytes are registered.

        Raises RuntimeError if the driver rejected a piece, or it takes too long.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.refused_bytes or self.registered_bytes >= size, REGISTRATION_SECONDS)
            if self.registered_bytes < size:
                told = f"{self.registered_bytes} of {size} bytes are registered, {self.refused_bytes} were refused"
                raise RuntimeError(f"{told}: is locked memory limited (ulimit -l)?")


class WatchedDevice(CudaDevice):
    """The product's `CudaDevice`, which also records registered memory and calls `gate` before each copy."""

    def __init__(self, index: int, registration: Registration, gate: Callable[[], object]) -> None:
        super().__init__(index)
        self._registration = registration
        self._gate = gate

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._gate()
        super().copy(target, source)

    def register(self, address: int, size: int) -> bool:
        begun = time.perf_counter()
        is_taken = super().register(address, size)
        self._registration.add(size, time.perf_counter() - begun, is_taken=is_taken)
        return is_taken


class Timeline(Protocol):
    """Points in time on the training stream, as CUDA events."""

    def mark(self) -> None:
        """Record a mark at the end of the training stream, without waiting."""

    def seconds(self) -> list[float]:
        """Wait for the device, return the seconds between consecutive marks, and delete the marks."""


class Hardware(Protocol):
    """A device, and the operations on it that the parts need."""

    device: torch.device

    def copier(self, registration: Registration, gate: Callable[[], object] = lambda: None) -> Copier:
        """Return Everstep's copier from this device into slots."""

    def pinned(self, size: int) -> torch.Tensor:
        """Return pinned host memory, uint8[size]."""

    def synchronize(self) -> None:
        """Wait until the device has finished all queued work."""

    def allocation_count(self) -> int:
        """Return this process's allocations of device or pinned memory."""

    def free_bytes(self) -> int:
        """Return the device's free memory."""

    def timeline(self) -> Timeline:
        """Return a new timeline."""

    def synchronizations(self) -> AbstractContextManager[list[str]]:
        """Yield torch's warnings about calls that waited for the device during the `with` block."""

    def graph(self, step: Callable[[], object], during: Callable[[], object], *, warm_up: int) -> Callable[[], object]:
        """Run `step` `warm_up` times, then capture it while `during` runs. Return a function that replays the graph."""

    def fence(self, ticket: CopyTicket) -> None:
        """Make later work of the training stream wait for a copy, as Everstep's guard does."""

    def autocast(self) -> AbstractContextManager[object]:
        """Return the autocast context of the forward pass."""


class _CudaTimeline:
    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []

    def mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def seconds(self) -> list[float]:
        events, self._events = self._events, []
        if events:
            events[-1].synchronize()
        return [earlier.elapsed_time(later) / 1000 for earlier, later in pairwise(events)]


class Cuda:
    """The operations on a real GPU."""

    def __init__(self, index: int = 0) -> None:
        torch.cuda.set_device(index)
        self.device = torch.device("cuda", index)

    def copier(self, registration: Registration, gate: Callable[[], object] = lambda: None) -> Copier:
        return CudaCopier(WatchedDevice(self.device.index, registration, gate))

    def pinned(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def allocation_count(self) -> int:
        stats = torch.cuda.memory_stats(self.device)
        count = int(stats.get("allocation.all.allocated", 0)) + int(stats.get("segment.all.allocated", 0))
        of_host = getattr(torch.cuda, "host_memory_stats", dict)()
        return count + sum(int(of_host.get(name, 0)) for name in ("allocations.allocated", "num_host_alloc"))

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.device)[0])

    def timeline(self) -> Timeline:
        return _CudaTimeline()

    @contextlib.contextmanager
    def synchronizations(self) -> Iterator[list[str]]:
        said: list[str] = []
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield said
            finally:
                torch.cuda.set_sync_debug_mode(before)
                said += [f"{each.filename}:{each.lineno}" for each in caught if SYNCHRONIZING in str(each.message)]

    def graph(self, step: Callable[[], object], during: Callable[[], object], *, warm_up: int) -> Callable[[], object]:
        # Warm up on a side stream, as torch's documentation recommends. Backward keeps using the stream of the warm-up
        # for some of its work. If this were the default stream, the capture could fail.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(warm_up):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
            during()
        return graph.replay

    def fence(self, ticket: CopyTicket) -> None:
        ticket.wait()

    def autocast(self) -> AbstractContextManager[object]:
        return torch.autocast("cuda", dtype=torch.bfloat16)


class _HostTimeline:
    def __init__(self) -> None:
        self._marks: list[float] = []

    def mark(self) -> None:
        self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        marks, self._marks = self._marks, []
        return [later - earlier for earlier, later in pairwise(marks)]


class Host:
    """Host memory in place of a GPU, for tests of the benchmark's own code."""

    def __init__(
        self,
        make_copier: Callable[[Registration, Callable[[], object]], Copier] = lambda _registration, _gate: CpuCopier(),
    ) -> None:
        self.device = torch.device("cpu")
        self._make_copier = make_copier

    def copier(self, registration: Registration, gate: Callable[[], object] = lambda: None) -> Copier:
        return self._make_copier(registration, gate)

    def pinned(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def synchronize(self) -> None: ...

    def allocation_count(self) -> int:
        return 0

    def free_bytes(self) -> int:
        return 1 << 30

    def timeline(self) -> Timeline:
        return _HostTimeline()

    def synchronizations(self) -> AbstractContextManager[list[str]]:
        return contextlib.nullcontext([])

    def graph(self, step: Callable[[], object], during: Callable[[], object], *, warm_up: int) -> Callable[[], object]:
        for _ in range(warm_up):
            step()
        during()
        return step

    def fence(self, ticket: CopyTicket) -> None:
        # Wait for the copy here, because the host has no streams in which later work could wait.
        ticket.join()

    def autocast(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()


def hardware_of(name: str) -> Hardware:
    """Return the hardware named `cuda` or `cpu`. Raises RuntimeError if torch sees no such device."""
    if name == HOST:
        return Host()
    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no CUDA device")
    return Cuda()
