"""Prevents torch's profiler from writing to freed memory when an operation outlives a recording.

At the end of a recording, torch frees the record of an asynchronous operation that still runs, and writes to it when
the operation ends, which can cause SIGSEGV. `RecordedCalls` therefore observes the calls while a recording runs:

    send, receive   not recorded: they end when the script calls `wait`, perhaps never
    collectives     recorded until `stop`; the recording may end when every recorded collective has ended (`are_over`)

It cannot observe collectives that start in C++. DDP waits for its own before the backward pass ends, but a functional
collective (such as DTensor's) that runs at the end of a recording is not protected.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final

import torch.distributed as dist
from torch._C._autograd import _enable_record_function

POINT_TO_POINT: Final = ("send", "recv", "recv_anysource")
COLLECTIVES: Final = (
    "_end_coalescing",
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
)
"""Methods of `ProcessGroup` that return a `Work`. `begin` skips those that this version of torch lacks."""
COMPLETION_POLL_SECONDS: Final = 0.005


class RecordedCalls:
    """Observes the script's calls of `torch.distributed` while a recording runs. One object serves all recordings."""

    def __init__(self) -> None:
        self._originals: dict[str, Callable[..., Any]] = {}
        self._running: list[Any] = []
        self._lock = threading.Lock()
        """Protects `_running`, because several threads of the script may call collectives."""
        self._is_stopped = False

    def begin(self) -> None:
        """Begin to observe calls. `end` must follow."""
        self._is_stopped = False
        for name in (*POINT_TO_POINT, *COLLECTIVES):
            # Keep the entry of the class's dict for `end`. If `end` set the function that `getattr` returns, calls
            # would not bind `self`.
            if (original := vars(dist.ProcessGroup).get(name)) is not None:
                self._originals[name] = original
                setattr(dist.ProcessGroup, name, self._observed(name, getattr(dist.ProcessGroup, name)))

    def stop(self) -> None:
        """Exclude further calls from the recording. Earlier calls stay observed until `end`."""
        self._is_stopped = True

    def wait(self, limit_seconds: float) -> bool:
        """Return whether every recorded operation ends within the limit."""
        deadline = time.monotonic() + limit_seconds
        while not self.are_over():
            if time.monotonic() > deadline:
                return False
            threading.Event().wait(COMPLETION_POLL_SECONDS)
        return True

    def are_over(self) -> bool:
        """Return whether every recorded operation has ended."""
        with self._lock:
            self._running = [work for work in self._running if not work.is_completed()]
            return not self._running

    def end(self) -> None:
        """End the observation. Idempotent."""
        for name, original in self._originals.items():
            setattr(dist.ProcessGroup, name, original)
        self._originals.clear()
        with self._lock:
            self._running.clear()

    def _observed(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if self._is_stopped or name in POINT_TO_POINT:
                _enable_record_function(False)
                try:
                    return original(*arguments, **named)
                finally:
                    _enable_record_function(True)
            work = original(*arguments, **named)
            self.are_over()  # Release the operations that have ended, because each of them keeps its tensors allocated.
            if work is not None:
                with self._lock:
                    self._running.append(work)
            return work

        return call
