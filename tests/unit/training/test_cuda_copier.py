"""Tests the copier of device memory on a fake device that works with delays.

A fake stream is a list of operations. The fake device executes them as late as possible: when a caller waits for them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from everstep.protocol.slot import HEADER_BYTES
from everstep.training import cuda_copier, cuda_device, registration
from everstep.training.capture import CapturePlan, SlotMemory, StateTensor
from everstep.training.copier import Copies
from everstep.training.cuda_copier import CopySizes, CudaCopier
from everstep.training.cuda_device import CudaDevice
from everstep.training.script import Environment
from everstep.training.transfer_plan import Gathering, TransferPlan

PIECE = 64
SMALL_PIECES = CopySizes(piece_bytes=PIECE)


class Stream:
    def __init__(self) -> None:
        self.work: deque[Callable[[], object]] = deque()

    def run_until(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            self.work.popleft()()


class Marker:
    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.is_reached = False


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.marker: Marker | None = None

    def record(self, stream: Any) -> None:
        marker = self.marker = Marker(stream)
        self.device.do(stream, "record", lambda: setattr(marker, "is_reached", True))

    def query(self) -> bool:
        assert self.marker is not None, "an event that was never recorded is always reached"
        return self.marker.is_reached

    def synchronize(self) -> None:
        assert self.marker is not None, "an event that was never recorded holds nobody up"
        with self.device.lock:
            self.device.calls.append(("synchronize", threading.current_thread().name))
            self.marker.stream.run_until(lambda: self.marker is not None and self.marker.is_reached)


class FakeDevice:
    def __init__(self, *, host: tuple[torch.Tensor, ...] = ()) -> None:
        self.lock = threading.RLock()
        self.training = Stream()
        self.calls: list[tuple[str, Any]] = []
        self.host = host
        self.registered: dict[int, int] = {}
        self.limit = 1 << 40
        self.entered: list[str] = []
        self.streams: dict[int, Stream] = {}
        self.is_capturing_now = False
        self.gathered: list[tuple[torch.Tensor, int]] = []
        """For each gather call: the memory that it wrote, and the number of tensors."""

    def copies(self) -> int:
        return [name for name, _ in self.calls].count("copy")

    def do(self, stream: Stream, name: str, work: Callable[[], object]) -> None:
        with self.lock:
            self.calls.append((name, "training" if stream is self.training else "copier"))
            stream.work.append(work)

    def holds(self, tensor: torch.Tensor) -> bool:
        return all(tensor is not each for each in self.host)

    def enter_thread(self, stream: Any) -> None:
        self.entered.append(threading.current_thread().name)
        self.streams[threading.get_ident()] = stream

    def new_stream(self) -> Any:
        return Stream()

    def current_stream(self) -> Any:
        return self.streams.get(threading.get_ident(), self.training)

    def is_capturing(self) -> bool:
        return self.is_capturing_now

    def new_event(self) -> FakeEvent:
        return FakeEvent(self)

    def wait(self, stream: Any, event: Any) -> None:
        marker = event.marker
        assert marker is not None, "a wait for an event that was never recorded does nothing"
        self.do(stream, "wait", lambda: marker.stream.run_until(lambda: marker.is_reached))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        begin, end = target.data_ptr(), target.data_ptr() + target.nbytes
        known = [(at, at + size) for at, size in list(self.registered.items()) if at < end and begin < at + size]
        if known and not (len(known) == 1 and known[0][0] <= begin and end <= known[0][1]):
            # The CUDA driver reports this error for a range that is only partly registered.
            raise RuntimeError("CUDA error: invalid argument")
        self.do(self.current_stream(), "copy", lambda: target.copy_(source))

    def gather(self, gathering: Gathering) -> None:
        self.gathered.append((gathering.memory, len(gathering)))
        self.do(self.current_stream(), "gather", gathering.run)

    def buffer(self, size: int) -> torch.Tensor:
        self.calls.append(("buffer", size))
        return torch.full((size,), 0xAB, dtype=torch.uint8)

    def pinned(self, size: int) -> torch.Tensor:
        self.calls.append(("pinned", size))
        return torch.zeros(size, dtype=torch.uint8)

    def register(self, address: int, size: int) -> bool:
        if sum(self.registered.values()) + size > self.limit:
            return False
        self.registered[address] = size
        return True

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def change_behind_what_is_queued(self, tensor: torch.Tensor) -> None:
        """Queue an optimizer step that changes the tensor, as the training thread does.

        The fake device executes the step only when a caller waits for it or for a later operation.
        """
        self.do(self.training, "step", lambda: tensor.fill_(-1))

    def catch_up(self) -> None:
        with self.lock:
            self.training.run_until(lambda: not self.training.work)


@pytest.fixture
def tensors() -> list[torch.Tensor]:
    return [torch.arange(100.0), torch.arange(7), torch.tensor(3.5), torch.arange(12.0).view(3, 4).t(), torch.zeros(0)]


@pytest.fixture
def memory(tmp_path: Path, tensors: list[torch.Tensor]) -> tuple[SlotMemory, list[torch.Tensor]]:
    plan = CapturePlan.make([StateTensor(str(number), tensor, True) for number, tensor in enumerate(tensors)])
    path = tmp_path / "slot"
    path.write_bytes(bytes(HEADER_BYTES + plan.capacity_bytes(b"")))
    slot = SlotMemory(path, plan.capacity_bytes(b""))
    return slot, slot.views(plan)


def settle(copier: CudaCopier) -> None:
    """Wait until the copier's thread has finished its requests and the work that they started."""
    for _ in range(20):
        done = threading.Event()
        copier.do_later(done.set)
        done.wait()


@pytest.mark.parametrize("registration", ["all", "some", "none"])
def test_the_slot_gets_the_state_of_the_boundary_whatever_the_device_does_when(
    memory: tuple[SlotMemory, list[torch.Tensor]],
    tensors: list[torch.Tensor],
    registration: str,
) -> None:
    slot, views = memory
    device = FakeDevice()
    device.limit = {"all": 1 << 40, "some": HEADER_BYTES + 128, "none": 0}[registration]
    copier = CudaCopier(device, CopySizes(piece_bytes=PIECE, registered_bytes=HEADER_BYTES + 128))
    copier.prepare(slot)
    settle(copier)
    before = [tensor.clone() for tensor in tensors]
    errors: list[BaseException | None] = []
    ticket = copier.start(Copies(tensors, views), errors.append)
    ticket.wait()
    for tensor in tensors:
        device.change_behind_what_is_queued(tensor)
    device.catch_up()
    ticket.join()
    assert errors == [None]
    assert all(torch.equal(view, was) for view, was in zip(views, before, strict=True))
    assert all((tensor == -1).all() for tensor in tensors)
    copier.close()
    assert device.registered == {}


@pytest.mark.parametrize("registration", ["all", "some", "none"])
@pytest.mark.parametrize("host", [(), (1,)])
def test_what_is_said_to_be_there_is_there_and_the_rest_may_not_be(
    memory: tuple[SlotMemory, list[torch.Tensor]],
    tensors: list[torch.Tensor],
    host: tuple[int, ...],
    registration: str,
) -> None:
    slot, views = memory
    device = FakeDevice(host=tuple(tensors[number] for number in host))
    device.limit = {"all": 1 << 40, "some": HEADER_BYTES + 128, "none": 0}[registration]
    copier = CudaCopier(device, CopySizes(piece_bytes=PIECE, small_bytes=100, registered_bytes=HEADER_BYTES + 128))
    copier.prepare(slot)
    settle(copier)
    told: list[tuple[int, int]] = []
    lacking: list[bool] = []

    def progress(complete_count: int, piece_bytes: int) -> None:
        told.append((complete_count, piece_bytes))
        for view, tensor in list(zip(views, tensors, strict=True))[:complete_count]:
            assert torch.equal(view, tensor)
        if piece_bytes:
            count = piece_bytes // views[complete_count].element_size()
            assert torch.equal(views[complete_count].reshape(-1)[:count], tensors[complete_count].reshape(-1)[:count])
        lacking.append(not all(torch.equal(view, tensor) for view, tensor in zip(views, tensors, strict=True)))

    errors: list[BaseException | None] = []
    copier.start(Copies(tensors, views), errors.append, progress).join()
    assert errors == [None]
    assert told == [*((0, PIECE * number) for number in range(1, 7)), (4, 0)], "what is gathered is there all at once"
    assert lacking[0] is (registration == "all"), (
        "it is told while the device still copies; what the ring brings is waited for first"
    )
    copier.start(Copies(tensors, views), errors.append).join()
    assert len(told) == len(lacking), "who does not ask is not told"
    copier.close()


def test_a_large_copy_has_no_more_marks_than_there_are_events() -> None:
    source, target = torch.arange(1000.0), torch.zeros(1000)
    copier = CudaCopier(FakeDevice(), CopySizes(piece_bytes=PIECE, mark_count=3))
    told: list[tuple[int, int]] = []
    copier.start(Copies([source], [target]), lambda _error: None, lambda *progress: told.append(progress)).join()
    assert told == [(0, 1344), (0, 2688)]
    copier.close()


def test_the_training_thread_waits_for_no_event_on_the_host(
    memory: tuple[SlotMemory, list[torch.Tensor]], tensors: list[torch.Tensor]
) -> None:
    slot, views = memory
    device = FakeDevice()
    copier = CudaCopier(device, SMALL_PIECES)
    copier.prepare(slot)
    settle(copier)
    ticket = copier.start(Copies(tensors, views), lambda _error: None)
    ticket.wait()
    ticket.join()
    assert {thread for name, thread in device.calls if name == "synchronize"} == {"everstep-copier"}
    order = [call for call in device.calls if call[0] in ("record", "wait", "copy")]
    assert order[:2] == [("record", "training"), ("wait", "copier")]
    last_copy = max(number for number, call in enumerate(order) if call[0] == "copy")
    assert order.index(("record", "copier")) > last_copy
    assert order.index(("wait", "training")) > order.index(("record", "copier")), (
        "a wait for an event not yet recorded does nothing"
    )
    copier.close()


def test_what_changes_any_time_is_copied_in_the_training_streams_own_order(
    memory: tuple[SlotMemory, list[torch.Tensor]], tensors: list[torch.Tensor]
) -> None:
    _, views = memory
    host = tensors[1]
    device = FakeDevice(host=(host,))
    copier = CudaCopier(device, SMALL_PIECES)
    copier.copy(Copies(tensors[:2], views[:2]))
    assert torch.equal(views[1], host), "of the host: at once"
    device.change_behind_what_is_queued(tensors[0])
    ticket = copier.start(Copies((), ()), lambda _error: None)
    ticket.join()
    assert torch.equal(views[0], torch.arange(100.0)), "joined: what the boundary copied is there"
    copier.close()


def test_nothing_is_allocated_after_the_start_and_the_ring_goes_round(
    memory: tuple[SlotMemory, list[torch.Tensor]], tensors: list[torch.Tensor]
) -> None:
    _, views = memory
    device = FakeDevice()
    copier = CudaCopier(device, SMALL_PIECES)
    made = [call for call in device.calls if call[0] in ("pinned", "buffer")]
    for _ in range(3):
        copier.copy(Copies(tensors, views))
        copier.start(Copies(tensors, views), lambda _error: None).join()
    assert [call for call in device.calls if call[0] in ("pinned", "buffer")] == made
    sizes = CopySizes()
    assert sorted(made) == [
        ("buffer", sizes.staging_bytes),
        *[("buffer", sizes.gather_bytes)] * 2,
        *[("pinned", PIECE)] * cuda_copier.RING_BUFFERS,
        ("pinned", sizes.staging_bytes),
    ]
    assert torch.equal(views[0], torch.arange(100.0))
    assert device.entered == ["everstep-copier"]
    copier.close()


def test_what_is_not_registered_goes_through_as_little_pinned_memory_as_there_is(
    memory: tuple[SlotMemory, list[torch.Tensor]], tensors: list[torch.Tensor]
) -> None:
    _, views = memory
    device = FakeDevice()
    copier = CudaCopier(
        device, CopySizes(piece_bytes=PIECE, ring_bytes=cuda_copier.RING_BUFFERS * PIECE // 4, staging_bytes=PIECE)
    )
    before = [tensor.clone() for tensor in tensors]
    copier.start(Copies(tensors, views), lambda _error: None).join()
    assert sorted(size for call, size in device.calls if call == "pinned") == [
        *[PIECE // 4] * cuda_copier.RING_BUFFERS,
        PIECE,
    ]
    assert all(torch.equal(view, was) for view, was in zip(views, before, strict=True))
    copier.close()


def test_the_rings_of_a_node_share_what_it_has_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    rings: list[int] = []
    monkeypatch.setattr(cuda_device, "CudaDevice", lambda _number: FakeDevice())
    monkeypatch.setattr(cuda_copier, "CudaCopier", lambda _device, sizes: rings.append(sizes.ring_bytes))
    for ranks in ("1", "8"):
        registration.make_copier({0}, Environment.read({"LOCAL_WORLD_SIZE": ranks}))
    assert rings == [64 * 1024**2, 8 * 1024**2]


def test_the_host_runs_at_most_one_boundary_ahead(
    memory: tuple[SlotMemory, list[torch.Tensor]], tensors: list[torch.Tensor]
) -> None:
    _, views = memory
    device = FakeDevice()
    copier = CudaCopier(device, SMALL_PIECES)
    is_begun, overtaken = threading.Event(), []

    def slow(_error: BaseException | None) -> None:
        overtaken.append(is_begun.wait(0.2))

    copier.start(Copies(tensors[:1], views[:1]), slow).wait()
    copier.start(Copies(tensors[:1], views[:1]), lambda _error: None)
    is_begun.set()
    copier.close()
    assert overtaken == [False]


def test_what_the_driver_refuses_is_told_and_holds_nobody_up(
    memory: tuple[SlotMemory, list[torch.Tensor]], tensors: list[torch.Tensor]
) -> None:
    _, views = memory
    device = FakeDevice()
    copier = CudaCopier(device, SMALL_PIECES)

    def refuse(*_: object) -> None:
        raise RuntimeError("CUDA error: invalid argument")

    device.copy = refuse  # type: ignore[method-assign]
    errors: list[BaseException | None] = []
    ticket = copier.start(Copies(tensors, views), errors.append)
    ticket.join()
    assert [type(error) for error in errors] == [RuntimeError]
    assert ticket.error is errors[0]
    copier.close()


def test_a_copy_that_fails_in_the_middle_has_stopped_before_it_is_said_to_have_failed(
    memory: tuple[SlotMemory, list[torch.Tensor]], tensors: list[torch.Tensor]
) -> None:
    """If a copy fails, the device finishes all its started work before the copier reports the failure.

    The report frees the slot, so no operation may write the slot afterwards.
    """
    _, views = memory
    device = FakeDevice()
    copier = CudaCopier(device, SMALL_PIECES)
    copy, left = device.copy, iter(range(3))

    def refuse_the_fourth(*arguments: Any) -> None:
        if next(left, None) is None:
            raise RuntimeError("CUDA error: invalid argument")
        copy(*arguments)

    device.copy = refuse_the_fourth  # type: ignore[method-assign]
    waiting: list[int] = []
    copier.start(
        Copies(tensors, views), lambda error: waiting.append(len(copier._stream.work) if error is not None else -1)
    ).join()
    assert waiting == [0]
    copier.close()


def test_whatever_goes_wrong_beside_a_copy_the_next_one_is_made(
    memory: tuple[SlotMemory, list[torch.Tensor]], tensors: list[torch.Tensor]
) -> None:
    _, views = memory
    copier = CudaCopier(FakeDevice(), SMALL_PIECES)

    def fail(*_: object) -> None:
        raise LookupError("a bug")

    errors: list[BaseException | None] = []
    copier.start(Copies(tensors, views), errors.append, fail).join()
    assert [type(error) for error in errors] == [LookupError]
    copier.start(Copies(tensors, views), fail).join()
    copier.start(Copies(tensors, views), errors.append).join()
    copier.close()
    assert errors[1:] == [None]
    assert all(torch.equal(view, tensor) for view, tensor in zip(views, tensors, strict=True))


def test_a_slot_that_is_let_go_is_not_registered_any_more(memory: tuple[SlotMemory, list[torch.Tensor]]) -> None:
    slot, _ = memory
    device = FakeDevice()
    copier = CudaCopier(device, SMALL_PIECES)
    copier.prepare(slot)
    settle(copier)
    assert device.registered
    assert min(device.registered) == slot.span[0]
    copier.release(slot)
    settle(copier)
    assert device.registered == {}
    copier.close()


@pytest.mark.parametrize("piece_bytes", [HEADER_BYTES + 100, HEADER_BYTES + 200, 4096 + 300])
@pytest.mark.parametrize("limit", [0, HEADER_BYTES + 250, 1 << 40])
def test_no_copy_lies_across_what_is_registered_by_itself(
    memory: tuple[SlotMemory, list[torch.Tensor]],
    tensors: list[torch.Tensor],
    piece_bytes: int,
    limit: int,
) -> None:
    slot, views = memory
    device = FakeDevice()
    device.limit = limit
    copier = CudaCopier(device, CopySizes(registered_bytes=piece_bytes))
    copier.prepare(slot)
    settle(copier)
    assert len(device.registered) >= 1 or limit < piece_bytes
    errors: list[BaseException | None] = []
    copier.copy(Copies(tensors, views))
    device.catch_up()
    assert all(torch.equal(view, tensor) for view, tensor in zip(views, tensors, strict=True))
    slot.payload[: views[0].nbytes] = 0
    copier.start(Copies(tensors, views), errors.append).join()
    assert errors == [None]
    assert all(torch.equal(view, tensor) for view, tensor in zip(views, tensors, strict=True))
    copier.close()


def test_what_the_boundary_copies_is_cut_before_the_first_piece_is_registered(
    memory: tuple[SlotMemory, list[torch.Tensor]], tensors: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copier divides the state before it registers any memory with the CUDA driver.

    The training thread copies one part of the state at the boundary, and the copier copies the other part later. The
    copier registers the memory piece by piece. Because the part is already chosen, each piece is either entirely inside
    the part or entirely outside.
    """
    slot, views = memory
    device = FakeDevice()
    copier = CudaCopier(device, CopySizes(registered_bytes=HEADER_BYTES + 100))
    is_free = threading.Event()
    copier.do_later(lambda: is_free.wait() and None)
    copier.prepare(slot)
    assert device.registered == {}
    copier.copy(Copies(tensors[:1], views[:1]))
    assert device.copies() == 2
    is_free.set()
    copier.close()


def test_the_training_thread_copies_nothing_while_the_driver_registers(
    memory: tuple[SlotMemory, list[torch.Tensor]], tensors: list[torch.Tensor]
) -> None:
    """A GPU's driver rejected a copy into memory whose registration had begun in another thread."""
    slot, views = memory
    device = FakeDevice()
    copier = CudaCopier(device, CopySizes(registered_bytes=HEADER_BYTES + 100))
    is_registering, has_copied, overlapped = threading.Event(), threading.Event(), []
    register, copy = device.register, device.copy

    def registering(address: int, size: int) -> bool:
        is_registering.set()
        overlapped.append(has_copied.wait(0.2))
        return register(address, size)

    def copying(target: torch.Tensor, source: torch.Tensor) -> None:
        has_copied.set()
        copy(target, source)

    device.register, device.copy = registering, copying  # type: ignore[method-assign]
    copier.prepare(slot)
    assert is_registering.wait(30)
    copier.copy(Copies(tensors, views))
    assert overlapped[0] is False
    device.catch_up()
    assert all(torch.equal(view, tensor) for view, tensor in zip(views, tensors, strict=True))
    copier.close()


def test_a_slot_that_is_let_go_between_two_pieces_is_not_registered_again(
    memory: tuple[SlotMemory, list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    slot, _ = memory
    device = FakeDevice()
    copier = CudaCopier(device, CopySizes(piece_bytes=PIECE, registered_bytes=4096))
    register = device.register

    def let_go_meanwhile(address: int, size: int) -> bool:
        if len(device.registered) == 1:
            copier.release(slot)
        return register(address, size)

    device.register = let_go_meanwhile  # type: ignore[method-assign]
    copier.prepare(slot)
    settle(copier)
    assert device.registered == {}
    copier.close()


def test_a_graph_that_the_script_captures_is_not_made_to_wait(
    memory: tuple[SlotMemory, list[torch.Tensor]], tensors: list[torch.Tensor]
) -> None:
    _, views = memory
    device = FakeDevice()
    copier = CudaCopier(device, SMALL_PIECES)
    device.is_capturing_now = True
    ticket = copier.start(Copies(tensors, views), lambda _error: None)
    ticket.wait()
    assert all(torch.equal(view, tensor) for view, tensor in zip(views, tensors, strict=True)), (
        "the host has waited instead"
    )
    assert ("wait", "training") not in device.calls
    copier.close()


class Runtime:
    """A fake of the CUDA runtime. It has the calls that can fail and the call that returns the last error."""

    def __init__(self, answer: int) -> None:
        self.answer = answer
        self.last_error = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.last_error = self.answer or self.last_error
        return self.answer

    def cudaGetLastError(self) -> int:
        last, self.last_error = self.last_error, 0
        return last


@pytest.mark.parametrize("answer", [0, 2])
def test_a_refused_registration_leaves_no_error_for_the_next_launch(
    answer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = Runtime(answer)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(cuda_device, "cuda_runtime", lambda: runtime)
    assert CudaDevice(0).register(4096, 4096) is (answer == 0)
    assert runtime.last_error == 0


@pytest.mark.parametrize("status", [0, 2])
def test_the_copiers_stream_is_no_other_librarys(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copier creates its own stream. Torch's pool would return a stream that another library may use.

    Torch's pool has 32 streams and returns each of them again and again.
    """
    current: list[int] = []
    runtime = SimpleNamespace(
        cudaStreamCreateWithFlags=lambda handle, flags: (setattr(handle._obj, "value", 64 + flags.value), status)[1]
    )
    monkeypatch.setattr(cuda_device, "cuda_runtime", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext(current.append(index)))
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, index: (handle, index))
    with pytest.raises(RuntimeError, match="device 3: error 2") if status else nullcontext():
        assert CudaDevice(3).new_stream() == (65, 3)
    assert current == [3]


# -- tests of small and non-contiguous tensors


def one_slot(
    tmp_path: Path, tensors: list[torch.Tensor]
) -> tuple[SlotMemory, list[torch.Tensor], list[tuple[int, int]]]:
    """Return a slot for these tensors, their offsets, and the gaps between them."""
    plan = CapturePlan.make([StateTensor(str(number), tensor, True) for number, tensor in enumerate(tensors)])
    path = tmp_path / "slot"
    path.write_bytes(bytes(HEADER_BYTES + plan.capacity_bytes(b"")))
    slot = SlotMemory(path, plan.capacity_bytes(b""))
    return slot, slot.views(plan), list(plan.gaps)


def small_tensors(count: int) -> list[torch.Tensor]:
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
    return [torch.arange(1, 4 + number).to(dtypes[number % len(dtypes)]) for number in range(count)]


@pytest.mark.parametrize("is_registered", [True, False])
def test_small_tensors_leave_the_device_as_one_piece_with_zeros_between_them(
    tmp_path: Path, is_registered: bool
) -> None:
    tensors = [*small_tensors(40), torch.arange(12.0).view(3, 4).t()]
    slot, views, gaps = one_slot(tmp_path, tensors)
    device = FakeDevice()
    copier = CudaCopier(device)
    if is_registered:
        copier.prepare(slot)
        settle(copier)
    for first in (1, 0):  # in the second step, tensors occupy the offsets that were gaps in the first step
        copier.start(Copies(tensors[first:], views[first:]), lambda _error: None).join()
    assert (len(device.gathered), device.copies()) == (2, 2)
    assert all(torch.equal(view, tensor) for view, tensor in zip(views, tensors, strict=True))
    assert gaps
    assert not any(slot.payload[begin:end].any() for begin, end in gaps)
    copier.close()


def test_what_is_fused_is_one_call_whatever_the_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    fused: list[set[torch.dtype]] = []
    real = torch._foreach_copy_

    def call(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        fused.append({tensor.dtype for tensor in (*targets, *sources)})
        real(targets, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", call)
    sources = [*small_tensors(8), torch.arange(6.0).view(2, 3).t()]
    memory = torch.full((128 * len(sources),), 0xAB, dtype=torch.uint8)
    targets = [memory[128 * number :][: source.nbytes] for number, source in enumerate(sources)]
    gathering = Gathering(memory)
    for target, source in zip(targets, sources, strict=True):
        gathering.add(target, source)
    gathering.run()
    assert fused == [{torch.uint8}]
    assert all(
        torch.equal(target.view(source.dtype).view(source.shape), source)
        for target, source in zip(targets, sources, strict=True)
    )


def test_more_small_tensors_than_the_buffer_holds_are_gathered_in_turns(tmp_path: Path) -> None:
    tensors = small_tensors(40)
    _, views, _ = one_slot(tmp_path, tensors)
    device = FakeDevice()
    copier = CudaCopier(device, CopySizes(gather_bytes=512))
    told: list[tuple[int, int]] = []
    copier.start(Copies(tensors, views), lambda _error: None, lambda *progress: told.append(progress)).join()
    assert all(torch.equal(view, tensor) for view, tensor in zip(views, tensors, strict=True))
    assert sum(count for _, count in device.gathered) == len(tensors)
    assert 1 < len(device.gathered) == device.copies() < len(tensors) / 2
    assert all(memory.numel() <= 512 for memory, _ in device.gathered)
    copier.close()


def test_what_lies_between_two_runs_is_not_written_over(tmp_path: Path) -> None:
    """One call copies all small tensors. It does not change the bytes between them in the slot.

    These bytes belong to large tensors and to tensors in host memory.
    """
    small, (first, second) = small_tensors(6), (torch.full((20,), 7.0), torch.full((30,), 8.0))
    tensors = [*small[:2], first, *small[2:4], torch.arange(1000.0), *small[4:], second]
    slot, views, gaps = one_slot(tmp_path, tensors)
    device = FakeDevice(host=(first, second))
    copier = CudaCopier(device, CopySizes(small_bytes=1024))
    copier.prepare(slot)
    settle(copier)
    copier.copy(Copies(tensors, views))
    device.catch_up()
    assert all(torch.equal(view, tensor) for view, tensor in zip(views, tensors, strict=True))
    copier.start(Copies(tensors, views), lambda _error: None).join()
    assert all(torch.equal(view, tensor) for view, tensor in zip(views, tensors, strict=True))
    assert not any(slot.payload[begin:end].any() for begin, end in gaps)
    assert [count for _, count in device.gathered] == [6, 6]
    assert device.copies() == 2 * 4
    copier.close()


@pytest.mark.parametrize("room", [0, 1, 2, 3])
def test_scalars_of_the_host_do_not_divide_the_small_tensors_of_the_device(tmp_path: Path, room: int) -> None:
    scalars = [torch.tensor(7.0), torch.tensor(8, dtype=torch.int64)]
    tensors = [torch.ones(9), scalars[0], torch.full((5,), 2.0), scalars[1], torch.full((3,), 3.0), torch.zeros(0)]
    slot, views, gaps = one_slot(tmp_path, tensors)
    device = FakeDevice(host=(*scalars, tensors[-1]))
    copier = CudaCopier(device, CopySizes(staging_bytes=64 * room))
    copier.prepare(slot)
    settle(copier)
    for value in (10, 20):
        for scalar in scalars:
            scalar.fill_(value)
        before = [tensor.clone() for tensor in tensors]
        ticket = copier.start(Copies(tensors, views), lambda _error: None)
        ticket.wait()
        for tensor in tensors:
            tensor.fill_(-1) if any(tensor is scalar for scalar in scalars) else device.change_behind_what_is_queued(
                tensor
            )
        device.catch_up()
        ticket.join()
        assert all(torch.equal(view, was) for view, was in zip(views, before, strict=True))
        assert not any(slot.payload[begin:end].any() for begin, end in gaps)
    staged = min(room, len(scalars))
    assert device.copies() == 2 * (3 - staged + bool(staged))
    copier.close()


def test_neighbours_that_are_no_part_of_one_slot_are_copied_one_by_one() -> None:
    memory = bytearray(b"x" * 256)
    at = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % 64
    targets = [torch.frombuffer(memory, dtype=torch.uint8, offset=at + 64 * number, count=10) for number in range(2)]
    device = FakeDevice()
    copier = CudaCopier(device)
    copier.start(Copies([torch.zeros(10, dtype=torch.uint8)] * 2, targets), lambda _error: None).join()
    assert (len(device.gathered), device.copies()) == (0, 2)
    assert bytes(memory[at + 10 : at + 64]) == b"x" * 54
    copier.close()


@pytest.mark.parametrize("shape", [(90, 7), (3, 50, 40), (1, 5000)])
def test_a_large_tensor_that_is_not_contiguous_goes_through_the_buffer_in_parts(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    plain = torch.arange(2.0 * torch.Size(shape).numel()).view(*shape, 2)
    tensor = plain[..., 0]
    _, views, _ = one_slot(tmp_path, [torch.ones(5), tensor, torch.ones(3)])
    assert not tensor.is_contiguous()
    device = FakeDevice()
    copier = CudaCopier(device, CopySizes(piece_bytes=1024, gather_bytes=1024))
    told: list[tuple[int, int]] = []

    def progress(complete_count: int, piece_bytes: int) -> None:
        told.append((complete_count, piece_bytes))
        assert torch.equal(views[1].reshape(-1)[: piece_bytes // 4], tensor.reshape(-1)[: piece_bytes // 4])

    copies = Copies([torch.ones(5), tensor, torch.ones(3)], views)
    copier.start(copies, lambda _error: None, progress).join()
    assert all(torch.equal(view, source) for view, source in zip(views, copies.sources, strict=True))
    assert len(device.gathered) > 1
    assert all(memory.numel() <= 1024 for memory, _ in device.gathered)
    assert told == sorted(set(told))
    assert {complete for complete, size in told if size} == {1}
    copier.close()


def test_gaps_do_not_count_as_copied_bytes(tmp_path: Path) -> None:
    """The progress of a copy excludes the gaps between small tensors, although the device also copies the gaps."""
    tensors = [torch.tensor(float(number)) for number in range(300)]
    _, views, _ = one_slot(tmp_path, tensors)
    copier = CudaCopier(FakeDevice(), CopySizes(piece_bytes=PIECE, gather_bytes=256, mark_count=3))
    told: list[tuple[int, int]] = []
    errors: list[BaseException | None] = []
    copier.start(Copies(tensors, views), errors.append, lambda *progress: told.append(progress)).join()
    assert errors == [None]
    assert 1 < len(told) <= 3
    copier.close()


def test_what_the_boundary_gathers_does_not_share_memory_with_the_copier(tmp_path: Path) -> None:
    tensors = small_tensors(4)
    _, views, _ = one_slot(tmp_path, tensors)
    device = FakeDevice()
    copier = CudaCopier(device)
    copier.copy(Copies(tensors[:2], views[:2]))
    copier.start(Copies(tensors[2:], views[2:]), lambda _error: None).join()
    (now, _), (later, _) = device.gathered
    assert now.untyped_storage().data_ptr() != later.untyped_storage().data_ptr()
    assert all(torch.equal(view, tensor) for view, tensor in zip(views, tensors, strict=True))
    copier.close()


# -- tests of plans


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tensors of each plan that was made."""
    counts: list[int] = []
    make = TransferPlan.make

    def count(copies: Copies, *arguments: Any) -> TransferPlan:
        counts.append(len(copies.sources))
        return make(copies, *arguments)

    monkeypatch.setattr(TransferPlan, "make", count)
    return counts


def test_the_next_slot_needs_no_new_plan(tmp_path: Path, planned: list[int]) -> None:
    tensors = [
        torch.zeros(0),
        *small_tensors(9),
        torch.zeros(0),
        torch.arange(1000.0),
        torch.arange(12.0).view(3, 4).t(),
    ]
    slots = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        slots.append(one_slot(tmp_path / name, tensors))
    device = FakeDevice(host=(tensors[2],))
    copier = CudaCopier(device, CopySizes(small_bytes=1024))
    for _ in range(2):
        for _, views, _ in slots:
            for tensor in tensors:
                tensor.add_(1) if tensor.dtype is not torch.bool else tensor.logical_not_()
            # The session passes the same tensor objects again, the benchmark passes new ones with the same memory.
            copier.start(Copies([tensor.detach() for tensor in tensors[3:]], views[3:]), lambda _error: None).join()
            copier.start(Copies((), ()), lambda _error: None).join()
            copier.copy(Copies(tensors[:3], views[:3]))
            device.catch_up()
            assert all(torch.equal(view, tensor) for view, tensor in zip(views, tensors, strict=True))
    assert sorted(planned) == [3, len(tensors) - 3]
    copier.close()


@pytest.mark.parametrize("change", ["memory", "dtype", "shape", "stride", "place", "count"])
def test_other_sources_or_places_need_a_new_plan(tmp_path: Path, planned: list[int], change: str) -> None:
    memory = torch.arange(64.0)
    before = [memory[:32].view(4, 8), memory[32:]]
    after = {
        "memory": [memory[:32].view(4, 8), torch.ones(32)],
        "dtype": [memory[:32].view(4, 8), memory[32:].view(torch.int32)],
        "shape": [memory[:32].view(8, 4), memory[32:]],
        "stride": [memory[:32].view(8, 4).t(), memory[32:]],
        "place": before,
        "count": before[:1],
    }[change]
    device = FakeDevice()
    copier = CudaCopier(device)
    for number, (tensors, ahead) in enumerate([(before, []), (after, [torch.zeros(40)] if change == "place" else [])]):
        (tmp_path / str(number)).mkdir()
        _, views, _ = one_slot(tmp_path / str(number), [tensors[0], *ahead, *tensors[1:]])
        del views[1 : 1 + len(ahead)]
        copier.start(Copies(tensors, views), lambda _error: None).join()
        assert all(torch.equal(view, tensor) for view, tensor in zip(views, tensors, strict=True))
    assert len(planned) == 2
    copier.close()
