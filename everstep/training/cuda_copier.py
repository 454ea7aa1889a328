"""Copies of device memory into slots, on a stream of their own.

State exists in GPU time here: what counts is the order of streams.

    training stream  … step k │ E₀ ─────────── forward, backward of k+1 ────────── wait E₁ │ step k+1 …
    copier's stream           └▶ wait E₀ │ piece │ piece │ … │ E₁ ┘
    copier's thread                        enqueues the pieces, waits for an event behind every few of them and says what is there, at last for E₁

Small tensors are brought together on the device, many in one call, in a buffer that is laid out as their places in the
slot are, zeros between them and all; what lies side by side there leaves as one piece. A tensor that is not contiguous
goes the same way, in parts if it is large.

Slots are registered with the driver piece by piece in the background (registered pages are copied as fast as pinned
ones); what is not registered yet goes through a ring of pinned buffers, which the guard waits for. Invariant: behind
that, the training thread waits for the device only where a snapshot is audited or where it would run more than one
boundary ahead; sources are kept alive until their copies are done; nothing is allocated after `__init__`. Checked with
a fake of the few calls it makes; its speed on a device has not been measured.
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

PIECE_BYTES = 32 * 1024 * 1024
"""Long enough for the full rate, short enough that others get the bus in between."""
SMALL_BYTES = 256 * 1024
"""Of a tensor, up to which the bus takes no longer (5 us) than a copy of its own takes to be enqueued and to begin."""
GATHER_BYTES = 8 * 1024 * 1024
"""Of device memory, for each of the two streams: small tensors that are brought together at once."""
RING_BUFFERS = 2
NODE_RING_BYTES = 64 * 1024 * 1024
"""Of pinned memory, for the rings of all ranks of a node together: beside its slots a node is to need no more."""
MARKS = 64
"""Events of one copy at most that tell how far it has come."""
REGISTERED_BYTES = 256 * 1024 * 1024
"""At once: registration holds locks of the driver that launches need too.

No copy lies across the end of such a piece: the driver refuses one of
which it knows a part only, and does not say that two parts known to it by themselves are one to it."""


class Event(Protocol):
    """A point in a stream."""

    def record(self, stream: Any) -> None:
        """Put the event behind what the stream has been given so far."""

    def query(self) -> bool:
        """Say whether the stream has reached the event. Waits for nothing."""

    def synchronize(self) -> None:
        """Block the host until the stream has reached the event."""


class Device(Protocol):
    """What the copier needs of a device: `CudaDevice`, and a fake in tests."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Say whether the tensor lies on this device."""

    def enter_thread(self) -> None:
        """Prepare the calling thread: its device, and a capture mode in which its calls do not spoil a graph that the script captures."""

    def new_stream(self) -> Any:
        """Return a stream."""

    def current_stream(self) -> Any:
        """Return the calling thread's current stream."""

    def is_capturing(self) -> bool:
        """Say whether the script captures a graph on the calling thread's current stream."""

    def new_event(self) -> Event:
        """Return an event without timing."""

    def wait(self, stream: Any, event: Event) -> None:
        """Let a stream wait for an event that has been recorded."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        """Enqueue a copy to registered or pinned host memory."""

    def gather(
        self, memory: torch.Tensor, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], stream: Any
    ) -> None:
        """Enqueue `gather_now`."""

    def buffer(self, size: int) -> torch.Tensor:
        """Return memory of the device, uint8[size]."""

    def pinned(self, size: int) -> torch.Tensor:
        """Return pinned host memory, uint8[size]."""

    def register(self, address: int, size: int) -> bool:
        """Make host pages known to the driver; say whether it took them."""

    def unregister(self, address: int) -> None:
        """Undo `register`."""


_NON_BLOCKING = 1
"""Of a stream: it does not wait for what is given to the default one, nor that for it."""


class CudaDevice:
    """A real device.

    Args:
        index: of the device.
    """

    def __init__(self, index: int) -> None:
        self._index = index

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda and tensor.device.index == self._index

    def enter_thread(self) -> None:
        torch.cuda.set_device(self._index)
        # In the mode of a new thread, any of its calls that a capture forbids would spoil the capture of another
        # thread.
        thread_local = ctypes.c_int(1)
        _runtime().cudaThreadExchangeStreamCaptureMode(ctypes.byref(thread_local))

    def new_stream(self) -> Any:
        # One of its own: torch's come from a pool of 32 and are handed out again, to a group's collectives or to a
        # graph that the script captures.
        handle = ctypes.c_void_p()
        with torch.cuda.device(self._index):
            if status := _runtime().cudaStreamCreateWithFlags(ctypes.byref(handle), ctypes.c_uint(_NON_BLOCKING)):
                raise RuntimeError(
                    f"no stream can be created on CUDA device {self._index}: error {status} of the CUDA runtime"
                )
        return torch.cuda.ExternalStream(handle.value, self._index)  # type: ignore[no-untyped-call]

    def current_stream(self) -> Any:
        return torch.cuda.current_stream(self._index)

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def new_event(self) -> Event:
        return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # else who waits for it keeps a core busy meanwhile

    def wait(self, stream: Any, event: Event) -> None:
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
        return torch.empty(
            size, dtype=torch.uint8, device="cpu", pin_memory=True
        )  # whatever the script has made the default

    def register(self, address: int, size: int) -> bool:
        if int(torch.cuda.cudart().cudaHostRegister(address, size, 0)) == 0:  # type: ignore[no-untyped-call]
            return True
        _runtime().cudaGetLastError()  # takes the refusal back: this thread's next launch would be taken to have failed
        return False

    def unregister(self, address: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


@functools.cache
def _runtime() -> ctypes.CDLL:
    """Return the CUDA runtime that torch has loaded: it is found by its soname, wherever it lies."""
    return ctypes.CDLL(f"libcudart.so.{(torch.version.cuda or '').split('.')[0]}")


@dataclass(slots=True)
class _Buffer:
    """One of the ring."""

    memory: torch.Tensor
    event: Event
    target: torch.Tensor | None = None
    """Where its content goes once the event is reached."""


@dataclass(slots=True)
class _Registered:
    """How far a slot's mapping is registered, from its front."""

    memory: SlotMemory
    end: int
    pieces: list[int] = field(default_factory=list)
    """Addresses."""

    def holds(self, address: int) -> bool:
        """Say whether an address lies in the mapping."""
        begin, size = self.memory.span
        return begin <= address < begin + size

    def piece_end(self, address: int) -> int:
        """Return where the piece ends that an address lies in, whether it is registered or will be."""
        begin, size = self.memory.span
        return min(begin + size, begin + ((address - begin) // REGISTERED_BYTES + 1) * REGISTERED_BYTES)


@dataclass(slots=True)
class _Mark:
    """How far a copy has come where its event is reached."""

    event: Event
    complete_count: int = 0
    piece_bytes: int = 0


@dataclass(slots=True)
class _Run:
    """Bytes of a slot that lie side by side and are copied together: of one tensor, or of several small ones."""

    targets: list[torch.Tensor]
    sources: list[torch.Tensor]
    number: int
    """Of the last tensor among all copies."""
    end: int
    """The address behind its place."""
    complete_count: int
    """Tensors, counted from the first of all copies, that are there once the run is."""
    before_bytes: int = 0
    """Of a tensor that is copied in parts: what lies before this one."""

    @property
    def begin(self) -> int:
        """The address of the first place."""
        return self.targets[0].data_ptr()

    @property
    def size(self) -> int:
        """Bytes, gaps included."""
        return self.end - self.begin

    @property
    def is_gathered(self) -> bool:
        """It goes through the gather buffer."""
        return len(self.sources) > 1 or not self.sources[0].is_contiguous()

    @property
    def place(self) -> torch.Tensor:
        """Where it goes: uint8[size], gaps included."""
        return tensor_bytes(self.targets[0]).as_strided((self.size,), (1,))

    def take(self, other: _Run, limit: int) -> bool:
        """Make `other` a part of this run if it lies right behind it and both are small; say whether it was."""
        if not (
            other.begin == align(self.end) and other.is_small and self.is_small and other.end - self.begin <= limit
        ):
            return False
        if self.targets[0].untyped_storage().data_ptr() != other.targets[0].untyped_storage().data_ptr():
            return False  # neighbours by chance: what lies between them is not the slot's
        self.targets += other.targets
        self.sources += other.sources
        self.number, self.end, self.complete_count = other.number, other.end, other.complete_count
        return True

    @property
    def is_small(self) -> bool:
        """Every tensor in it may be gathered with others; a part of one may not."""
        return self.complete_count > self.number and not self.before_bytes and self.targets[-1].nbytes <= SMALL_BYTES


class _Gather:
    """Brings small tensors together on the device before they are copied.

    One for each stream: what a buffer held has left it, in the stream's order,
    when it is filled again.

    Args:
        device: of the sources.
        size: of the buffer; a multiple of `ALIGNMENT`.
    """

    def __init__(self, device: Device, size: int) -> None:
        assert size % ALIGNMENT == 0
        self._device = device
        self._memory = device.buffer(size)

    def runs(self, copies: Copies, stream: Any) -> Iterator[tuple[_Run, torch.Tensor]]:
        """Enqueue the gathering of what lies on the device; yields each run, in the order of the copies, with its bytes where they are contiguous."""
        batch: list[tuple[_Run, int]] = []
        used = 0
        for run in _runs(copies, self._device, self._memory.numel()):
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
    """A copy on the device.

    Args:
        device: of the sources.
        event: recorded behind the last piece.
    """

    def __init__(self, device: Device, event: Event) -> None:
        super().__init__()
        self._device = device
        self._event = event
        self.enqueued = threading.Event()

    def wait(self) -> None:
        self.enqueued.wait()
        if self._device.is_capturing():
            self.join()  # a wait for what the graph does not contain would spoil it, and is no part of what is replayed
        else:
            self._device.wait(self._device.current_stream(), self._event)

    @property
    def hides_sources(self) -> bool:
        return self._device.is_capturing()


class CudaCopier:
    """Copies from one device. Host tensors among the sources are copied by the host.

    Args:
        device: of the sources.
        piece_bytes: of one copy at most.
        gather_bytes: of small tensors that are brought together at once.
        ring_bytes: of pinned memory, through which goes what is not registered yet.
    """

    is_prompt = False

    def __init__(
        self,
        device: Device,
        piece_bytes: int = PIECE_BYTES,
        gather_bytes: int = GATHER_BYTES,
        ring_bytes: int = NODE_RING_BYTES,
    ) -> None:
        self._device = device
        self._piece_bytes = piece_bytes
        self._gather, self._gather_now = _Gather(device, gather_bytes), _Gather(device, gather_bytes)
        self._stream = device.new_stream()
        self._begin, self._end = device.new_event(), device.new_event()
        self._bounce_bytes = min(piece_bytes, ring_bytes // RING_BUFFERS)
        self._ring = [_Buffer(device.pinned(self._bounce_bytes), device.new_event()) for _ in range(RING_BUFFERS)]
        self._marks = [_Mark(device.new_event()) for _ in range(MARKS)]
        self._turn = 0
        self._last: CudaTicket | None = None
        self._registered: dict[int, _Registered] = {}
        self._thread = CopierThread()
        self._thread.put(device.enter_thread)

    def copy(self, copies: Copies) -> None:
        """Copy on the training stream itself: what it does from here on comes behind, and the next `start` stands behind it too."""
        copy_now(self._of_host(copies))
        stream = self._device.current_stream()
        for run, source in self._gather_now.runs(copies, stream):
            for to, of in self._cut(run.place, source):
                self._device.copy(to, of, stream)

    def start(self, copies: Copies, done: Done, progress: Progress | None = None) -> CopyTicket:
        if self._last is not None:
            self._last.join()  # the host runs at most one boundary ahead, and the events are free again
        self._begin.record(self._device.current_stream())
        self._last = ticket = CudaTicket(self._device, self._end)
        self._thread.put(lambda: self._copy(copies, done, progress, ticket))
        return ticket

    def do_later(self, work: Callable[[], object]) -> None:
        self._thread.put(work)

    def prepare(self, memory: SlotMemory) -> None:
        """Register the slot in the background, a piece between two copies: no copy waits for all of it."""
        self._registered[memory.span[0]] = _Registered(
            memory, memory.span[0]
        )  # known from now on: no copy may lie across what is registered first
        self._thread.put(lambda: self._register(memory))

    def release(self, memory: SlotMemory) -> None:
        self._thread.put(lambda: self._unregister(memory))

    def drain(self, limit_seconds: float) -> bool:
        return self._thread.close(limit_seconds)

    def close(self) -> None:
        self._thread.put(self._unregister_all)
        self._thread.close()

    # -- in the copier's thread

    def _copy(self, copies: Copies, done: Done, progress: Progress | None, ticket: CudaTicket) -> None:
        error: BaseException | None = None
        try:
            self._device.wait(self._stream, self._begin)
            marks = self._enqueue_all(copies, is_marked=progress is not None)
            self._end.record(self._stream)
            copy_now(self._of_host(copies))
            ticket.enqueued.set()
            self._drain()  # what was brought by the ring is in the slot, whichever mark it lies before
            if progress is not None:
                for mark in marks:
                    mark.event.synchronize()
                    progress(mark.complete_count, mark.piece_bytes)
            self._end.synchronize()
        except Exception as caught:
            # what the driver refused, or progress that cannot be told: training waits for the end all the same
            error = caught
            self._finish()
            for buffer in self._ring:
                buffer.target = None  # of a slot that may belong to another step when the ring comes round
        finally:
            ticket.enqueued.set()
        try:
            done(error)
        finally:
            ticket.finish(error)

    def _finish(self) -> None:
        """Wait for what was enqueued before something failed: the slot is somebody else's afterwards, and nothing guards the sources any more."""
        with contextlib.suppress(Exception):  # of a device that has failed nothing writes any more
            self._end.record(self._stream)
            self._end.synchronize()

    def _enqueue_all(self, copies: Copies, *, is_marked: bool) -> list[_Mark]:
        """Enqueue what lies on the device, with a mark behind every few pieces if asked.

        What lies on the host is there before any mark is told.
        """
        apart = max(self._piece_bytes, -(-sum(target.nbytes for target in copies.targets) // MARKS))
        free, marks, passed = iter(self._marks), [], 0
        for run, source in self._gather.runs(copies, self._stream):
            is_one, copied = len(run.targets) == 1, 0
            for to, of in zip(
                torch.split(run.place, self._piece_bytes), torch.split(source, self._piece_bytes), strict=True
            ):
                self._enqueue(to, of)
                copied += to.numel()
                is_out = copied == run.size
                if is_one:
                    passed += to.numel()
                elif is_out:
                    passed += sum(target.nbytes for target in run.targets)  # less than `copied`, which counts gaps
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
            return  # let go between two pieces
        piece = min(begin + size - registered.end, REGISTERED_BYTES)
        # Where locked memory is limited, the ring serves for the rest, slower.
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
        """Yield uint8[n] of both in parts, none of which lies across the end of a registered piece."""
        begin, done = target.data_ptr(), 0
        slot = self._slot_at(begin)
        while done < target.numel():
            end = target.numel() if slot is None else min(target.numel(), slot.piece_end(begin + done) - begin)
            yield target[done:end], source[done:end]
            done = end

    def _slot_at(self, address: int) -> _Registered | None:
        # A copy of the list: the training thread adds slots.
        return next((slot for slot in list(self._registered.values()) if slot.holds(address)), None)

    def _of_host(self, copies: Copies) -> Copies:
        pairs = [pair for pair in zip(copies.targets, copies.sources, strict=True) if not self._device.holds(pair[1])]
        return Copies([source for _, source in pairs], [target for target, _ in pairs])


def _runs(copies: Copies, device: Device, limit: int) -> Iterator[_Run]:
    """Yield what lies on the device in runs, in order; what is gathered has `limit` bytes at most."""
    last: _Run | None = None
    for part in _parts(copies, device, limit):
        if last is None:
            last = part
        elif not last.take(part, limit):
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
    """Yield parts of so many bytes at most, in the target's order, whose places are contiguous."""
    if target.nbytes <= limit:
        yield target, source
    elif (row := target.nbytes // len(target)) > limit:
        for to, of in zip(target, source, strict=True):
            yield from _rows(to, of, limit)
    else:
        yield from zip(torch.split(target, limit // row), torch.split(source, limit // row), strict=True)


def gather_now(memory: torch.Tensor, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Bring tensors together, zeros between them: what is contiguous in one call, as bytes, because torch fuses only what has one dtype.

    Args:
        memory: uint8[n], all of it written.
        targets: places in it, uint8[nbytes] of each source.
        sources: of the same device.
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
