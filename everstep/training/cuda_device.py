"""Wraps the CUDA calls that copies of tensors need. Tests replace a `CudaDevice` by a fake."""

from __future__ import annotations

import ctypes
import functools
from typing import Any, Protocol

import torch

from everstep.training.transfer_plan import Gathering


class CudaEvent(Protocol):
    """A mark in a CUDA stream."""

    def record(self, stream: Any) -> None:
        """Place this event in `stream`, after all work that was enqueued so far."""

    def query(self) -> bool:
        """Return whether the stream has reached the event. Never waits."""
        ...

    def synchronize(self) -> None:
        """Block the host until the stream has reached the event."""


class Device(Protocol):
    """Device calls that the copier needs."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor is on this device."""
        ...

    def enter_thread(self, stream: Any) -> None:
        """Select the device and the thread's stream. Later calls do not invalidate a graph that the script captures."""

    def new_stream(self) -> Any:
        """Return a new stream of this device."""

    def current_stream(self) -> Any:
        """Return the calling thread's current stream."""

    def is_capturing(self) -> bool:
        """Return whether the script captures a CUDA graph on the calling thread's current stream."""
        ...

    def new_event(self) -> CudaEvent:
        """Return a new event that records no times."""
        ...

    def wait(self, stream: Any, event: CudaEvent) -> None:
        """Make a stream wait for an event that has been recorded."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue a copy between device and host. If the host memory is not pinned, return after the copy."""

    def gather(self, gathering: Gathering) -> None:
        """Enqueue the copies into the gather buffer on the thread's current stream."""

    def buffer(self, size: int) -> torch.Tensor:
        """Allocate device memory, uint8[size]."""
        ...

    def pinned(self, size: int) -> torch.Tensor:
        """Allocate pinned host memory, uint8[size]."""
        ...

    def register(self, address: int, size: int) -> bool:
        """Register host memory with the driver, which makes copies faster. Return whether the driver accepted it."""
        ...

    def unregister(self, address: int) -> None:
        """Unregister memory that `register` registered."""


_NON_BLOCKING = 1


class CudaDevice:
    """The CUDA device with this index in `torch.cuda`."""

    def __init__(self, index: int) -> None:
        self._index = index

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda and tensor.device.index == self._index

    def enter_thread(self, stream: Any) -> None:
        torch.cuda.set_device(self._index)
        torch.cuda.set_stream(stream)
        # Select the thread-local mode. In the default mode, some calls of this thread would invalidate a graph that
        # another thread captures.
        thread_local = ctypes.c_int(1)
        cuda_runtime().cudaThreadExchangeStreamCaptureMode(ctypes.byref(thread_local))

    def new_stream(self) -> Any:
        # Do not use torch's streams. They come from a pool of 32, so collectives or a captured graph may use the same
        # stream.
        handle = ctypes.c_void_p()
        with torch.cuda.device(self._index):
            if status := cuda_runtime().cudaStreamCreateWithFlags(ctypes.byref(handle), ctypes.c_uint(_NON_BLOCKING)):
                raise RuntimeError(
                    f"cannot create a stream on CUDA device {self._index}: error {status} of the CUDA runtime"
                )
        return torch.cuda.ExternalStream(handle.value, self._index)  # type: ignore[no-untyped-call]

    def current_stream(self) -> Any:
        return torch.cuda.current_stream(self._index)

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def new_event(self) -> CudaEvent:
        return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # With False, waiting would spin.

    def wait(self, stream: Any, event: CudaEvent) -> None:
        stream.wait_event(event)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.no_grad():
            target.copy_(source, non_blocking=True)

    def gather(self, gathering: Gathering) -> None:
        gathering.run()

    def buffer(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", self._index))

    def pinned(self, size: int) -> torch.Tensor:
        # Name the device, because the script may have changed torch's default device.
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def register(self, address: int, size: int) -> bool:
        if int(torch.cuda.cudart().cudaHostRegister(address, size, 0)) == 0:  # type: ignore[no-untyped-call]
            return True
        # Clear the error of the failed registration. Otherwise this thread's next kernel launch would report it.
        cuda_runtime().cudaGetLastError()
        return False

    def unregister(self, address: int) -> None:
        if int(torch.cuda.cudart().cudaHostUnregister(address)):  # type: ignore[no-untyped-call]
            cuda_runtime().cudaGetLastError()  # Clear the error, as in `register`.


@functools.cache
def cuda_runtime() -> ctypes.CDLL:
    """Return the CUDA runtime that torch has loaded. The dynamic loader finds it by its soname."""
    return ctypes.CDLL(f"libcudart.so.{(torch.version.cuda or '').split('.')[0]}")
