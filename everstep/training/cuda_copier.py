"""Copies CUDA device memory into slots on a separate stream.

In the diagram, E₀ and E₁ are CUDA events, and k is the number of the step.

    training stream  … step k │ E₀ ─────────── forward, backward of k+1 ────────── wait E₁ │ step k+1 …
    copier's stream           └▶ wait E₀ │ piece │ piece │ … │ E₁ ┘
    copier's thread              enqueues the pieces, waits for an event after every few pieces, reports progress, waits
                                 for E₁

Small and non-contiguous tensors pass through a buffer on the device (`transfer_plan`). The copier's thread registers
the memory of slots with the driver, piece by piece. Copies to unregistered pages pass through a ring of pinned buffers.

Invariant: once the slots are registered, the training thread waits for the device in three cases only: for an audited
snapshot (`everstep.training.guard`), if the host would run more than one boundary ahead of the device, and if the
script captures a CUDA graph during a copy. Sources stay alive until their copies have ended. `__init__` allocates all
memory.

Tests run this module with a fake device (`cuda_device`). `make bench-device` measures it on a GPU.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from everstep.protocol.pages import populate
from everstep.protocol.slot import ALIGNMENT
from everstep.training.capture import SlotMemory
from everstep.training.copier import CopierThread, Copies, CopyTicket, Done, Progress, copy_now
from everstep.training.cuda_device import CudaEvent, Device
from everstep.training.transfer_plan import Staging, TransferBatch, TransferPlan

RING_BUFFERS = 2
NODE_RING_BYTES = 64 * 1024 * 1024
"""Pinned memory for the rings of all ranks of a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopySizes:
    """Sizes in which a `CudaCopier` copies, gathers and registers memory."""

    piece_bytes: int = 32 * 1024 * 1024
    """Maximum bytes of one copy: enough for the full transfer rate, with room for other transfers in between."""
    small_bytes: int = 256 * 1024
    """Maximum size of a tensor that shares a transfer with others. A separate copy takes 5 us to start."""
    gather_bytes: int = 8 * 1024 * 1024
    """Device memory per stream, in which small tensors are joined for one transfer."""
    ring_bytes: int = NODE_RING_BYTES
    staging_bytes: int = 512 * 1024
    """Memory through which scalars of the host pass to the device, 64 bytes per scalar."""
    mark_count: int = 64
    # Larger pieces would hold the driver's locks, which kernel launches need, for longer. The driver rejects a copy to
    # a partly registered target, and does not document that adjacent pieces count as one.
    registered_bytes: int = 256 * 1024 * 1024
    """Pieces of a slot that the copier registers with the driver. No copy may cross the end of a piece."""


SIZES = CopySizes()


@dataclass(slots=True)
class _Buffer:
    """A pinned buffer of the ring, and the copy that fills it."""

    memory: torch.Tensor
    event: CudaEvent
    target: torch.Tensor | None = None
    """The range of the slot that receives the content. None if the buffer is free."""


@dataclass(slots=True)
class _Registered:
    """A mapped slot, whose first pages the copier has registered with the driver."""

    memory: SlotMemory
    end: int
    piece_bytes: int
    pieces: list[int] = field(default_factory=list)

    def holds(self, address: int) -> bool:
        begin, size = self.memory.span
        return begin <= address < begin + size

    def piece_end(self, address: int) -> int:
        """Return the end of the piece that contains `address`."""
        begin, size = self.memory.span
        return min(begin + size, begin + ((address - begin) // self.piece_bytes + 1) * self.piece_bytes)


@dataclass(slots=True)
class _Mark:
    """An event in the copier's stream, and the progress at this event."""

    event: CudaEvent
    complete_count: int = 0
    piece_bytes: int = 0


class _Planner:
    def __init__(self, device: Device, sizes: CopySizes, staging: Staging | None = None) -> None:
        assert sizes.gather_bytes % ALIGNMENT == 0
        self._device = device
        self._small_bytes = sizes.small_bytes
        self._buffer = device.buffer(sizes.gather_bytes)
        self._staging = staging
        self._plan: TransferPlan | None = None

    def plan(self, copies: Copies) -> TransferPlan:
        """Return the newest plan if it fits, else a new one."""
        if not copies.sources:
            return NOTHING
        if self._plan is None or not self._plan.fits(copies):
            # Release the earlier plan first, because it keeps the memory of its sources allocated.
            self._plan = None
            self._plan = TransferPlan.make(copies, self._device.holds, self._buffer, self._small_bytes, self._staging)
        return self._plan


NOTHING = TransferPlan((), (), (), (), Copies((), ()), 0, ())


class CudaTicket(CopyTicket):
    """A ticket of a copy on a GPU. `event` follows its last piece."""

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
    """Copies the tensors of one device into slots. The host copies tensors in host memory, except staged scalars."""

    is_prompt = False

    def __init__(self, device: Device, sizes: CopySizes = SIZES) -> None:
        self._device = device
        self._sizes = sizes
        self._staging = Staging(device.pinned(sizes.staging_bytes), device.buffer(sizes.staging_bytes))
        self._planner, self._planner_now = _Planner(device, sizes, self._staging), _Planner(device, sizes)
        self._stream = device.new_stream()
        self._begin, self._end = device.new_event(), device.new_event()
        self._bounce_bytes = min(sizes.piece_bytes, sizes.ring_bytes // RING_BUFFERS)
        self._ring = [_Buffer(device.pinned(self._bounce_bytes), device.new_event()) for _ in range(RING_BUFFERS)]
        self._marks = [_Mark(device.new_event()) for _ in range(sizes.mark_count)]
        self._turn = 0
        self._last: CudaTicket | None = None
        self._registered: dict[int, _Registered] = {}
        # The driver can reject a copy into a piece that is being registered with `cudaErrorInvalidValue`.
        self._registering = threading.Lock()
        """Held while a thread registers, unregisters, or enqueues a copy."""
        self._thread = CopierThread()
        self._thread.put(lambda: device.enter_thread(self._stream))

    def copy(self, copies: Copies) -> None:
        """Copy tensors on the training thread's own stream. Its later work and later copies run after this copy."""
        plan = self._planner_now.plan(copies)
        copy_now(_on_host(copies, plan))
        for batch in plan.batches:
            self._gather(batch)
            for run in batch.runs:
                place = run.place(copies)
                for part in _cut(place, self._slot_at(place)):
                    with self._registering:
                        self._device.copy(place[part], run.source[part])

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
        """Register the slot's memory in the background, piece by piece, so that a copy waits for one piece at most."""
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

    # The methods below run in the copier's thread. `copy` also calls `_gather` and `_slot_at`.

    def _copy(self, copies: Copies, done: Done, progress: Progress | None, ticket: CudaTicket) -> None:
        error: BaseException | None = None
        try:
            self._device.wait(self._stream, self._begin)
            plan = self._planner.plan(copies)
            marks = self._enqueue_all(copies, plan, is_marked=progress is not None)
            self._end.record(self._stream)
            copy_now(_on_host(copies, plan))
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
        """Wait for copies from before an error, which could otherwise write into the slot of another step."""
        with contextlib.suppress(Exception):
            # Ignore errors of the driver: they mean that the device failed, so it writes nothing more into the slot.
            self._end.record(self._stream)
            self._end.synchronize()

    def _enqueue_all(self, copies: Copies, plan: TransferPlan, *, is_marked: bool) -> list[_Mark]:
        """Enqueue the copies on the GPU. With `is_marked`, record an event after every few pieces."""
        piece_bytes = self._sizes.piece_bytes
        apart = max(piece_bytes, -(-sum(target.nbytes for target in copies.targets) // self._sizes.mark_count))
        free, marks, passed = iter(self._marks), [], 0
        if used := plan.staged_bytes:
            copy_now(plan.staged)
            self._device.copy(self._staging.device[:used], self._staging.host[:used])
        for batch in plan.batches:
            self._gather(batch)
            for run in batch.runs:
                copied, place = 0, run.place(copies)
                slot = self._slot_at(place)
                for to, of in zip(torch.split(place, piece_bytes), torch.split(run.source, piece_bytes), strict=True):
                    self._enqueue(to, of, slot)
                    copied += to.numel()
                    is_out = copied == place.numel()
                    if run.first == run.last:
                        passed += to.numel()
                    elif is_out:
                        # Count only the bytes of tensors. `copied` also counts the zeros between tensors.
                        passed += run.tensors_bytes
                    if is_marked and passed >= apart:
                        mark, passed = next(free), 0
                        mark.event.record(self._stream)
                        is_complete = is_out and run.complete_count > run.last
                        mark.complete_count, mark.piece_bytes = (
                            run.last + is_complete,
                            0 if is_complete else run.before_bytes + copied,
                        )
                        marks.append(mark)
        return marks

    def _gather(self, batch: TransferBatch) -> None:
        if len(batch.gathering):
            self._device.gather(batch.gathering)

    def _enqueue(self, target: torch.Tensor, source: torch.Tensor, slot: _Registered | None) -> None:
        for part in _cut(target, slot):
            to, of = target[part], source[part]
            if slot is not None and to.data_ptr() + to.numel() <= slot.end:
                self._device.copy(to, of)
            else:
                for pair in zip(torch.split(to, self._bounce_bytes), torch.split(of, self._bounce_bytes), strict=True):
                    self._bounce(*pair)

    def _bounce(self, target: torch.Tensor, source: torch.Tensor) -> None:
        buffer = self._ring[self._turn]
        self._turn = (self._turn + 1) % len(self._ring)
        self._empty(buffer)
        self._device.copy(buffer.memory[: source.numel()], source)
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
        if piece <= 0:
            return
        # Allocate the pages first. Otherwise the driver would allocate them under its locks, for ten times as long.
        populate(registered.end, piece, is_written=True)
        with self._registering:
            is_taken = self._device.register(registered.end, piece)
        # The driver rejects a piece beyond the limit of locked memory. Copies to the remaining pages then pass through
        # the ring, which is slower.
        if is_taken:
            registered.pieces.append(registered.end)
            registered.end += piece
            self._thread.put(lambda: self._register(memory))

    def _unregister(self, memory: SlotMemory) -> None:
        registered = self._registered.pop(memory.span[0], None)
        for address in registered.pieces if registered is not None else ():
            with self._registering:
                self._device.unregister(address)

    def _unregister_all(self) -> None:
        for registered in list(self._registered.values()):
            self._unregister(registered.memory)

    def _slot_at(self, place: torch.Tensor) -> _Registered | None:
        # Iterate over a copy, because the other thread may add or remove slots meanwhile.
        address = place.data_ptr()
        return next((slot for slot in list(self._registered.values()) if slot.holds(address)), None)


def _cut(target: torch.Tensor, slot: _Registered | None) -> Iterator[slice]:
    begin, done = target.data_ptr(), 0
    while done < target.numel():
        end = target.numel() if slot is None else min(target.numel(), slot.piece_end(begin + done) - begin)
        yield slice(done, end)
        done = end


def _on_host(copies: Copies, plan: TransferPlan) -> Copies:
    return Copies(
        [copies.sources[number] for number in plan.on_host], [copies.targets[number] for number in plan.on_host]
    )
