"""Copies CUDA device memory into slots on a separate stream.

The copier enqueues copies on its own CUDA stream. The order of work on the two streams determines which state a copy
reads. In the diagram, E₀ and E₁ are CUDA events, and k is the number of the step.

    training stream  … step k │ E₀ ─────────── forward, backward of k+1 ────────── wait E₁ │ step k+1 …
    copier's stream           └▶ wait E₀ │ piece │ piece │ … │ E₁ ┘
    copier's thread              enqueues the pieces, waits for an event after every few pieces, reports progress, waits
                                 for E₁

Small tensors are first copied into one buffer on the device, the gather buffer. Its layout equals the layout of the
slot's range, with zeros between tensors. One copy then transfers many neighbouring tensors to the slot. Non-contiguous
tensors pass through the gather buffer, too.

The copier's thread registers the memory of slots with the driver, piece by piece. Copies to registered pages are as
fast as copies to pinned pages. Copies to unregistered pages pass through a few pinned buffers that are reused in turn
(the ring).

Invariant: apart from copies through the ring, the training thread waits for the device in two cases only: for an
audited snapshot (`everstep.training.guard`), and if the host would run more than one boundary ahead of the device.
Sources stay alive until their copies have ended. `__init__` allocates all memory.

Tests run this module with a fake of the few device calls that it makes. Its speed on a GPU has not been measured.

The module has more than 500 lines. It is not divided, because gather buffer, ring and registration depend on the order
of work on one stream.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from everstep.protocol.slot import ALIGNMENT, align
from everstep.training.capture import SlotMemory
from everstep.training.copier import CopierThread, Copies, CopyTicket, Done, Progress, copy_now
from everstep.training.state_tree import tensor_bytes

RING_BUFFERS = 2
NODE_RING_BYTES = 64 * 1024 * 1024
"""Total bytes of pinned memory for the rings (buffers that are reused in turn) of all ranks of a node.

The copiers of a node need no other pinned memory except their slots.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopySizes:
    """Sizes in which a `CudaCopier` copies, gathers and registers memory."""

    piece_bytes: int = 32 * 1024 * 1024
    """Maximum number of bytes that one copy on the copier's stream transfers.

    The size is large enough for the full transfer rate. Between two copies, other transfers can use the bus.
    """
    small_bytes: int = 256 * 1024
    """Maximum size in bytes of a tensor that shares one transfer with other tensors.

    A separate copy takes about 5 us to start, as long as the transfer of such a tensor.
    """
    gather_bytes: int = 8 * 1024 * 1024
    """Size in bytes of each stream's gather buffer, the device memory in which small tensors are joined for one
    transfer."""
    ring_bytes: int = NODE_RING_BYTES
    """Size in bytes of the ring: pinned buffers, reused in turn, through which copies to unregistered pages pass."""
    mark_count: int = 64
    """Maximum number of CUDA events that mark the progress of one copy."""
    registered_bytes: int = 256 * 1024 * 1024
    """Size in bytes of the pieces of a slot that the copier registers with the driver.

    Registering a larger piece would hold the driver's locks for longer, and kernel launches need these locks too. No
    copy may cross the end of a piece: the driver rejects a copy whose target is only partly registered, and its
    documentation does not guarantee that two adjacent pieces count as one.
    """


SIZES = CopySizes()


class CudaEvent(Protocol):
    """A mark in a CUDA stream. The stream reaches the mark after all work that was enqueued earlier."""

    def record(self, stream: Any) -> None:
        """Place this event in `stream`, after all work that was enqueued so far."""

    def query(self) -> bool:
        """Return whether the stream has reached the event. Never waits."""
        ...

    def synchronize(self) -> None:
        """Block the host until the stream has reached the event."""


class Device(Protocol):
    """Device calls that the copier needs. `CudaDevice` implements them; tests use a fake."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor is on this device."""
        ...

    def enter_thread(self) -> None:
        """Prepare the calling thread for device calls.

        The method selects the device. It also selects a mode in which the thread's calls do not invalidate a graph that
        the script captures.
        """

    def new_stream(self) -> Any:
        """Return a new stream of this device."""

    def current_stream(self) -> Any:
        """Return the calling thread's current stream."""

    def is_capturing(self) -> bool:
        """Return whether the script captures a CUDA graph on the calling thread's current stream."""
        ...

    def new_event(self) -> CudaEvent:
        """Return a new CUDA event that records no times."""
        ...

    def wait(self, stream: Any, event: CudaEvent) -> None:
        """Make a stream wait for an event that has been recorded."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        """Enqueue a copy from the device to registered or pinned host memory."""

    def gather(
        self, memory: torch.Tensor, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], stream: Any
    ) -> None:
        """Enqueue copies of tensors into the device buffer `memory` on the given stream, as `gather_now` describes."""

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
"""Flag for a stream that runs independently of the default stream."""


class CudaDevice:
    """A CUDA device.

    `index` is the device's index in `torch.cuda`.
    """

    def __init__(self, index: int) -> None:
        self._index = index

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda and tensor.device.index == self._index

    def enter_thread(self) -> None:
        torch.cuda.set_device(self._index)
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

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        with torch.cuda.stream(stream), torch.no_grad():
            target.copy_(source, non_blocking=True)

    def gather(
        self, memory: torch.Tensor, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], stream: Any
    ) -> None:
        with torch.cuda.stream(stream):
            gather_now(memory, targets, sources)

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
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


@functools.cache
def cuda_runtime() -> ctypes.CDLL:
    """Return the CUDA runtime that torch has loaded.

    The dynamic loader finds the library by its soname, independent of its path.
    """
    return ctypes.CDLL(f"libcudart.so.{(torch.version.cuda or '').split('.')[0]}")


@dataclass(slots=True)
class _Buffer:
    """One pinned host buffer of the ring (buffers that are reused in turn), and the copy that fills it."""

    memory: torch.Tensor
    event: CudaEvent
    target: torch.Tensor | None = None
    """The range of the slot into which the host copies the buffer's content when the copy from the device has ended.

    None if the buffer is free.
    """


@dataclass(slots=True)
class _Registered:
    """A mapped slot, whose first pages the copier has registered with the driver, so that copies to them are fast."""

    memory: SlotMemory
    end: int
    piece_bytes: int
    """Size in bytes of each piece that the copier registers in one call of the driver."""
    pieces: list[int] = field(default_factory=list)
    """Addresses of the pieces that are registered so far."""

    def holds(self, address: int) -> bool:
        begin, size = self.memory.span
        return begin <= address < begin + size

    def piece_end(self, address: int) -> int:
        """Return the end of the piece of the slot that contains `address`. Each piece has `piece_bytes` bytes."""
        begin, size = self.memory.span
        return min(begin + size, begin + ((address - begin) // self.piece_bytes + 1) * self.piece_bytes)


@dataclass(slots=True)
class _Mark:
    """An event in the copier's stream, and the progress that the copy has made when the stream reaches the event."""

    event: CudaEvent
    complete_count: int = 0
    piece_bytes: int = 0


@dataclass(slots=True)
class _Run:
    """A contiguous range of a slot that one transfer fills, from one tensor or from several small tensors."""

    targets: list[torch.Tensor]
    sources: list[torch.Tensor]
    number: int
    """Index, in the list of copies, of the last tensor in this range of the slot."""
    end: int
    """Address after the last byte of the range."""
    complete_count: int
    """Number of tensors, from the start of the list of copies, that are complete after the transfer of this range."""
    before_bytes: int = 0
    """Bytes of the tensor that precede this range; 0 unless the tensor is divided into several ranges."""

    @property
    def begin(self) -> int:
        return self.targets[0].data_ptr()

    @property
    def size(self) -> int:
        """Size of the range in bytes, including the zeros between its tensors."""
        return self.end - self.begin

    @property
    def is_gathered(self) -> bool:
        """True if the range passes through the gather buffer, device memory in which small tensors are joined."""
        return len(self.sources) > 1 or not self.sources[0].is_contiguous()

    @property
    def place(self) -> torch.Tensor:
        """The bytes of this range of the slot, uint8[size], including the zeros between its tensors."""
        return tensor_bytes(self.targets[0]).as_strided((self.size,), (1,))

    def take(self, other: _Run, limit: int, small_bytes: int) -> bool:
        """Append the tensors of the range `other` to this range of the slot. Return whether they were appended.

        They are appended if `other` directly follows this range in the slot, and both ranges have small tensors.
        """
        if not (
            other.begin == align(self.end)
            and other.is_small(small_bytes)
            and self.is_small(small_bytes)
            and other.end - self.begin <= limit
        ):
            return False
        if self.targets[0].untyped_storage().data_ptr() != other.targets[0].untyped_storage().data_ptr():
            # The two ranges belong to two slots that happen to be mapped next to each other. The gap between them is no
            # part of a slot, so it must not be filled with zeros.
            return False
        self.targets += other.targets
        self.sources += other.sources
        self.number, self.end, self.complete_count = other.number, other.end, other.complete_count
        return True

    def is_small(self, small_bytes: int) -> bool:
        """Return whether every tensor of this range is small enough to share a transfer with other tensors.

        Return False if the range contains only a part of a tensor.
        """
        return self.complete_count > self.number and not self.before_bytes and self.targets[-1].nbytes <= small_bytes


class _Gather:
    """Gathers small tensors in a buffer on the device, so that one transfer copies them to the slot.

    Each stream has its own `_Gather`. The order of the stream guarantees that the buffer's content is copied before the
    buffer is filled again.

    Args:
        device: CUDA device that holds the sources and the buffer.
        sizes: size of the buffer, a multiple of `ALIGNMENT`, and maximum size of a small tensor.
    """

    def __init__(self, device: Device, sizes: CopySizes) -> None:
        size = sizes.gather_bytes
        assert size % ALIGNMENT == 0
        self._small_bytes = sizes.small_bytes
        self._device = device
        self._memory = device.buffer(size)

    def runs(self, copies: Copies, stream: Any) -> Iterator[tuple[_Run, torch.Tensor]]:
        """Enqueue the copies of small tensors into the gather buffer, the device memory in which they are joined.

        The method yields each run (a range of the slot that one transfer fills) together with its contiguous bytes on
        the device, in the order of the copies.
        """
        batch: list[tuple[_Run, int]] = []
        used = 0
        for run in _runs(copies, self._device, self._memory.numel(), self._small_bytes):
            size = align(run.size) if run.is_gathered else 0
            if used + size > self._memory.numel():
                yield from self._bring(batch, used, stream)
                batch, used = [], 0
            batch.append((run, used))
            used += size
        yield from self._bring(batch, used, stream)

    def _bring(self, batch: Sequence[tuple[_Run, int]], used: int, stream: Any) -> Iterator[tuple[_Run, torch.Tensor]]:
        places: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for run, offset in batch:
            if run.is_gathered:
                begins = (offset + target.data_ptr() - run.begin for target in run.targets)
                places += (
                    self._memory[begin : begin + target.nbytes]
                    for begin, target in zip(begins, run.targets, strict=True)
                )
                sources += run.sources
        if sources:
            self._device.gather(self._memory[:used], places, sources, stream)
        for run, offset in batch:
            yield run, self._memory[offset : offset + run.size] if run.is_gathered else tensor_bytes(run.sources[0])


class CudaTicket(CopyTicket):
    """An object with which the code that started a copy on a GPU waits for the end of this copy.

    Args:
        device: CUDA device on which the event was recorded.
        event: CUDA event that follows the last piece of the copy in the copier's stream.
    """

    def __init__(self, device: Device, event: CudaEvent) -> None:
        super().__init__()
        self._device = device
        self._event = event
        self.enqueued = threading.Event()

    def wait(self) -> None:
        self.enqueued.wait()
        if self._device.is_capturing():
            # Wait in the host, because a stream that captures a graph must not wait for an event outside the graph.
            self.join()
        else:
            self._device.wait(self._device.current_stream(), self._event)

    @property
    def hides_sources(self) -> bool:
        return self._device.is_capturing()


class CudaCopier:
    """Copies tensors of one device. Sources in host memory are copied by the host.

    Args:
        device: CUDA device that holds the sources.
        sizes: sizes in which the copier copies, gathers and registers memory.
    """

    is_prompt = False

    def __init__(self, device: Device, sizes: CopySizes = SIZES) -> None:
        self._device = device
        self._sizes = sizes
        self._gather, self._gather_now = _Gather(device, sizes), _Gather(device, sizes)
        self._stream = device.new_stream()
        self._begin, self._end = device.new_event(), device.new_event()
        self._bounce_bytes = min(sizes.piece_bytes, sizes.ring_bytes // RING_BUFFERS)
        self._ring = [_Buffer(device.pinned(self._bounce_bytes), device.new_event()) for _ in range(RING_BUFFERS)]
        self._marks = [_Mark(device.new_event()) for _ in range(sizes.mark_count)]
        self._turn = 0
        self._last: CudaTicket | None = None
        self._registered: dict[int, _Registered] = {}
        self._thread = CopierThread()
        self._thread.put(device.enter_thread)

    def copy(self, copies: Copies) -> None:
        """Copy tensors on the training thread's own stream, instead of the copier's stream.

        Later work of this stream, and the copies of the next `start`, run after this copy.
        """
        copy_now(self._of_host(copies))
        stream = self._device.current_stream()
        for run, source in self._gather_now.runs(copies, stream):
            for to, of in self._cut(run.place, source):
                self._device.copy(to, of, stream)

    def start(self, copies: Copies, done: Done, progress: Progress | None = None) -> CopyTicket:
        if self._last is not None:
            # Wait for the previous copy, so that the host runs at most one step ahead of the device and the events can
            # be reused.
            self._last.join()
        self._begin.record(self._device.current_stream())
        self._last = ticket = CudaTicket(self._device, self._end)
        self._thread.put(lambda: self._copy(copies, done, progress, ticket))
        return ticket

    def do_later(self, work: Callable[[], object]) -> None:
        self._thread.put(work)

    def prepare(self, memory: SlotMemory) -> None:
        """Register the slot's memory with the CUDA driver in the background, so that copies to it are fast.

        The copier's thread registers one piece at a time, so a copy waits for one piece at most.
        """
        # The driver registers the slot in pieces. Add the slot to the table first, so that `_cut` divides every later
        # copy at the ends of these pieces.
        self._registered[memory.span[0]] = _Registered(memory, memory.span[0], self._sizes.registered_bytes)
        self._thread.put(lambda: self._register(memory))

    def release(self, memory: SlotMemory) -> None:
        self._thread.put(lambda: self._unregister(memory))

    def drain(self, limit_seconds: float) -> bool:
        return self._thread.close(limit_seconds)

    def close(self) -> None:
        self._thread.put(self._unregister_all)
        self._thread.close()

    # The methods below run in the copier's thread.

    def _copy(self, copies: Copies, done: Done, progress: Progress | None, ticket: CudaTicket) -> None:
        error: BaseException | None = None
        try:
            self._device.wait(self._stream, self._begin)
            marks = self._enqueue_all(copies, is_marked=progress is not None)
            self._end.record(self._stream)
            copy_now(self._of_host(copies))
            ticket.enqueued.set()
            self._drain()  # Copy the pinned buffers into the slot before `progress` reports their bytes as copied.
            if progress is not None:
                for mark in marks:
                    mark.event.synchronize()
                    progress(mark.complete_count, mark.piece_bytes)
            self._end.synchronize()
        except Exception as caught:
            # The driver or the progress callback failed. Pass the error to the ticket, the handle on which training
            # waits for this copy.
            error = caught
            self._finish()
            for buffer in self._ring:
                # Forget where to copy this buffer's content: when the copier uses the buffer again, the slot may
                # already contain another step.
                buffer.target = None
        finally:
            ticket.enqueued.set()
        try:
            done(error)
        finally:
            ticket.finish(error)

    def _finish(self) -> None:
        """Wait for copies that were enqueued before an error.

        Without this wait, a copy could write after the error was reported. By then, the slot may receive another step,
        and the guard no longer protects the sources.
        """
        with contextlib.suppress(Exception):
            # Ignore errors of the driver: they mean that the device failed, so it writes nothing more into the slot.
            self._end.record(self._stream)
            self._end.synchronize()

    def _enqueue_all(self, copies: Copies, *, is_marked: bool) -> list[_Mark]:
        """Enqueue the copies of the tensors on the GPU, and copy the tensors in host memory.

        If `is_marked`, the method records a CUDA event after every few pieces, which marks the progress. It copies the
        host tensors before any progress is reported.
        """
        piece_bytes = self._sizes.piece_bytes
        apart = max(piece_bytes, -(-sum(target.nbytes for target in copies.targets) // self._sizes.mark_count))
        free, marks, passed = iter(self._marks), [], 0
        for run, source in self._gather.runs(copies, self._stream):
            is_one, copied = len(run.targets) == 1, 0
            for to, of in zip(torch.split(run.place, piece_bytes), torch.split(source, piece_bytes), strict=True):
                self._enqueue(to, of)
                copied += to.numel()
                is_out = copied == run.size
                if is_one:
                    passed += to.numel()
                elif is_out:
                    # Count only the bytes of tensors. `copied` also counts the zeros between tensors.
                    passed += sum(target.nbytes for target in run.targets)
                if is_marked and passed >= apart:
                    mark, passed = next(free), 0
                    mark.event.record(self._stream)
                    is_complete = is_out and run.complete_count > run.number
                    mark.complete_count, mark.piece_bytes = (
                        run.number + is_complete,
                        0 if is_complete else run.before_bytes + copied,
                    )
                    marks.append(mark)
        return marks

    def _enqueue(self, target: torch.Tensor, source: torch.Tensor) -> None:
        for to, of in self._cut(target, source):
            if self._is_registered(to):
                self._device.copy(to, of, self._stream)
            else:
                for part in zip(torch.split(to, self._bounce_bytes), torch.split(of, self._bounce_bytes), strict=True):
                    self._bounce(*part)

    def _bounce(self, target: torch.Tensor, source: torch.Tensor) -> None:
        buffer = self._ring[self._turn]
        self._turn = (self._turn + 1) % len(self._ring)
        self._empty(buffer)
        self._device.copy(buffer.memory[: source.numel()], source, self._stream)
        buffer.event.record(self._stream)
        buffer.target = target

    def _drain(self) -> None:
        for buffer in self._ring:
            self._empty(buffer)

    @staticmethod
    def _empty(buffer: _Buffer) -> None:
        if buffer.target is not None:
            buffer.event.synchronize()
            buffer.target.copy_(buffer.memory[: buffer.target.numel()])
            buffer.target = None

    def _register(self, memory: SlotMemory) -> None:
        begin, size = memory.span
        registered = self._registered.get(begin)
        if registered is None:
            return  # The slot was released while this copier registered its pieces with the driver.
        piece = min(begin + size - registered.end, registered.piece_bytes)
        # The driver does not pin the next piece of the slot if the limit of locked memory is reached. Copies to the
        # remaining pages then pass through the copier's own pinned buffers, which is slower.
        if piece > 0 and self._device.register(registered.end, piece):
            registered.pieces.append(registered.end)
            registered.end += piece
            self._thread.put(lambda: self._register(memory))

    def _unregister(self, memory: SlotMemory) -> None:
        registered = self._registered.pop(memory.span[0], None)
        for address in registered.pieces if registered is not None else ():
            self._device.unregister(address)

    def _unregister_all(self) -> None:
        for registered in list(self._registered.values()):
            self._unregister(registered.memory)

    def _is_registered(self, piece: torch.Tensor) -> bool:
        slot = self._slot_at(piece.data_ptr())
        return slot is not None and piece.data_ptr() + piece.numel() <= slot.end

    def _cut(self, target: torch.Tensor, source: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Divide a copy into pieces, and yield each piece's target and source.

        Each piece lies within one of the ranges of the slot that the copier registers with the driver one by one.
        """
        begin, done = target.data_ptr(), 0
        slot = self._slot_at(begin)
        while done < target.numel():
            end = target.numel() if slot is None else min(target.numel(), slot.piece_end(begin + done) - begin)
            yield target[done:end], source[done:end]
            done = end

    def _slot_at(self, address: int) -> _Registered | None:
        # Iterate over a copy of the list, because the training thread may add slots meanwhile.
        return next((slot for slot in list(self._registered.values()) if slot.holds(address)), None)

    def _of_host(self, copies: Copies) -> Copies:
        pairs = [pair for pair in zip(copies.targets, copies.sources, strict=True) if not self._device.holds(pair[1])]
        return Copies([source for _, source in pairs], [target for target, _ in pairs])


def _runs(copies: Copies, device: Device, limit: int, small_bytes: int) -> Iterator[_Run]:
    """Yield the device's tensors in runs (ranges of the slot that one transfer fills), in order.

    A run of several small tensors has at most `limit` bytes.
    """
    last: _Run | None = None
    for part in _parts(copies, device, limit):
        if last is None:
            last = part
        elif not last.take(part, limit, small_bytes):
            yield last
            last = part
    if last is not None:
        yield last


def _parts(copies: Copies, device: Device, limit: int) -> Iterator[_Run]:
    for number, (target, source) in enumerate(zip(copies.targets, copies.sources, strict=True)):
        if not target.nbytes or not device.holds(source):
            continue
        before = 0
        for to, of in [(target, source)] if source.is_contiguous() else _rows(target, source, limit):
            is_last = before + to.nbytes == target.nbytes
            yield _Run([to], [of], number, to.data_ptr() + to.nbytes, number + is_last, before)
            before += to.nbytes


def _rows(target: torch.Tensor, source: torch.Tensor, limit: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Split a tensor by rows into pieces of at most `limit` bytes; yield each piece as (target, source).

    Pieces are in the target's order. The target of each piece is contiguous.
    """
    if target.nbytes <= limit:
        yield target, source
    elif (row := target.nbytes // len(target)) > limit:
        for to, of in zip(target, source, strict=True):
            yield from _rows(to, of, limit)
    else:
        yield from zip(torch.split(target, limit // row), torch.split(source, limit // row), strict=True)


def gather_now(memory: torch.Tensor, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy tensors into one buffer, with zeros in the gaps between them.

    Contiguous tensors are copied in one call, as bytes, because torch fuses only tensors of one dtype.

    Args:
        memory: uint8[n]. Every byte is written.
        targets: for each source, its range of `memory`, uint8[nbytes].
        sources: tensors of the same device.
    """
    with torch.no_grad():
        memory.zero_()
        flat = [number for number, source in enumerate(sources) if source.is_contiguous()]
        if flat:
            torch._foreach_copy_(
                [targets[number] for number in flat], [tensor_bytes(sources[number]) for number in flat]
            )
        for target, source in zip(targets, sources, strict=True):
            if not source.is_contiguous():
                target.view(source.dtype).view(source.shape).copy_(source)
