"""A snapshot that contains a change of the next step ("torn") is never reported as captured.

This holds for every order of the events of training, of the copy and of the version checks. Each test splits an
in-place operation into two events: the memory write, and torch's version increment. It also splits the copy into two
halves. The tests run all interleavings of the two sequences with the real `Snapshotter`, `Guard` and `Sources`.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from everstep.protocol.parts import TensorPart
from everstep.protocol.rank_messages import Abandoned, Captured, SlotsGranted
from everstep.protocol.slot import HEADER_BYTES
from everstep.training import pauses
from everstep.training.capture import SlotMemory, StateTensor
from everstep.training.copier import Copies, CopyTicket, Done, Progress, copy_now
from everstep.training.guard import Guard
from everstep.training.snapshots import Snapshotter
from everstep.training.sources import Sources
from everstep.training.state import Observed
from tests.unit.training.test_snapshots import Link

HALF = 4
BESIDE_AN_OPERATION = (
    ("write 0", "write 1", "count", "guard"),
    ("write 1", "write 0", "count", "pause", "guard"),
    ("write 1", "count", "pause", "guard", "write 0", "count"),
    ("pause", "write 0", "write 1", "count", "pause", "guard"),
    ("pause", "write 1", "write 0", "count", "guard"),
)
ORDERLY = (
    ("guard", "write 0", "write 1", "count"),
    ("pause", "guard", "write 1", "write 0", "count"),
)
COPY = ("copy 0", "copy 1", "end", "work")


class Steps(CopyTicket):
    """A copy whose steps the test triggers. If a thread waits for the copy, the remaining steps run at once."""

    def __init__(self, copies: Copies, done: Done, *, is_ahead: bool) -> None:
        super().__init__()
        self._copies = copies
        self._done_with = done
        self._is_ahead = is_ahead
        self.left = list(COPY[:3]) if copies.sources else ["end"]

    def take(self, step: str) -> None:
        if step in self.left:
            self.left.remove(step)
            if step == "end":
                self._done_with(None)
                self.finish()
            else:
                half = slice(int(step[-1]) * HALF, (int(step[-1]) + 1) * HALF)
                for source, target in zip(self._copies.sources, self._copies.targets, strict=True):
                    target[half] = source[half]

    def wait(self) -> None:
        if not self._is_ahead:
            self.join()

    def join(self) -> None:
        for step in self.left[:]:
            self.take(step)


class StepCopier:
    """A copier controlled by the test.

    The test triggers each half of a copy, the work that the copier does later, and the pauses of training.
    """

    is_prompt = True

    def __init__(self, *, is_ahead: bool) -> None:
        self._is_ahead = is_ahead
        self.ticket: Steps | None = None
        self.work: list[Callable[[], None]] = []
        self.waiting: list[Callable[[], None]] = []

    def copy(self, copies: Copies) -> None:
        copy_now(copies)

    def start(self, copies: Copies, done: Done, progress: Progress | None = None) -> CopyTicket:
        self.ticket = Steps(copies, done, is_ahead=self._is_ahead)
        return self.ticket

    def do_later(self, work: Callable[[], None]) -> None:
        self.work.append(work)

    def await_pause(self, notify: Callable[[], None]) -> bool:
        self.waiting.append(notify)
        return True

    def pause(self) -> None:
        while self.waiting:
            self.waiting.pop()()

    def do_work(self) -> None:
        while self.work:
            self.work.pop()()

    def prepare(self, memory: SlotMemory) -> None: ...

    def release(self, memory: SlotMemory) -> None: ...

    def close(self) -> None: ...


class Story:
    """Takes a snapshot and then triggers a sequence of events.

    Args:
        folder: Folder of the slot.
        is_ahead: True if the guard does not wait for the copy, as with device memory. There, the device runs the copy
            before the next step's operations, although Python has not waited for it.
    """

    def __init__(self, folder: Path, *, is_ahead: bool = False) -> None:
        self.weight = torch.zeros(2 * HALF)
        self.wrapper: torch.Tensor | None = None
        self.link, self.guard, self.copier = Link(), Guard(), StepCopier(is_ahead=is_ahead)
        self.guard.is_next_audited = lambda: False  # type: ignore[method-assign]
        self._step = 0
        self._path = folder / "slot"
        self._state = self._observed()
        state = self

        class State:
            layout_hash = b"h" * 16

            def observe(self) -> Observed:
                return state._state

            def parts(self, _tensors: object) -> dict[str, tuple[TensorPart, ...]]:
                return {}

        self.snapshotter = Snapshotter(
            State(),  # type: ignore[arg-type]
            self.link,  # type: ignore[arg-type]
            self.copier,
            self.guard,
            lambda _: None,
            is_crowded=True,
            await_pause=self.copier.await_pause,
        )
        self.snapshotter.prepare()
        capacity = self.link.sent.pop().capacity_bytes  # type: ignore[attr-defined]
        self._path.write_bytes(bytes(HEADER_BYTES + capacity))
        self.link.slots = SlotsGranted(layout_hash=State.layout_hash, capacity_bytes=capacity, paths=(str(self._path),))

    def wrap(self) -> None:
        """Register a wrapper tensor in place of the weight.

        The weight becomes the wrapper's memory, and only the wrapper's version is incremented.
        """
        self.wrapper = torch.zeros(1)
        self._state = self._observed()

    def play(self, events: tuple[str, ...]) -> tuple[list[type], bool]:
        """Take a snapshot when a step ends, and then trigger these events.

        Returns: The types of the messages to the agent, and True if the slot has exactly the state at the end of the
            step.
        """
        self._step += 1
        self.link.sent.clear()
        self.guard.unstable.clear()
        self.weight.numpy()[:] = self._step
        self.snapshotter.capture(self._step, 0)
        assert self.copier.ticket is not None
        for event in events:
            self.happen(event)
        self.copier.ticket.join()
        self.copier.pause()
        self.copier.do_work()
        held = torch.frombuffer(bytearray(self._path.read_bytes()[HEADER_BYTES:]), dtype=torch.float32)[: 2 * HALF]
        return [type(message) for message in self.link.sent], bool((held == self._step).all())

    def happen(self, event: str) -> None:
        assert self.copier.ticket is not None
        match event.split():
            case ["write", half]:
                # write memory without a version increment, as the first half of an operation does
                self.weight.numpy()[int(half) * HALF :][:HALF] = -self._step
            case ["count"]:
                torch.autograd.graph.increment_version(self.weight if self.wrapper is None else self.wrapper)
            case ["pause"]:
                self.copier.pause()
            case ["guard"]:
                self.guard.reach()
            case ["work"]:
                self.copier.do_work()
            case _:
                self.copier.ticket.take(event)

    def _observed(self) -> Observed:
        return Observed([[StateTensor("weight", self.weight, True, self.wrapper)]], [], b"values")


def orders(one: tuple[str, ...], other: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield all interleavings of two sequences of events."""
    for places in itertools.combinations(range(len(one) + len(other)), len(one)):
        rest, first = iter(other), iter(one)
        yield tuple(next(first) if place in places else next(rest) for place in range(len(one) + len(other)))


@pytest.mark.filterwarnings("ignore:weight changed outside:RuntimeWarning")
@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize("training", BESIDE_AN_OPERATION, ids=" ".join)
def test_no_order_of_a_copy_and_an_operation_reports_a_torn_snapshot(
    tmp_path: Path, training: tuple[str, ...], is_wrapped: bool
) -> None:
    story = Story(tmp_path)
    if is_wrapped:
        story.wrap()
    outcomes = {events: story.play(events) for events in orders(training, COPY)}
    assert [events for events, (told, is_whole) in outcomes.items() if told == [Captured] and not is_whole] == []
    assert {tuple(told) for told, _ in outcomes.values()} <= {(Captured,), (Abandoned,)}, (
        "the agent hears one outcome of each"
    )
    assert any(not is_whole for _, is_whole in outcomes.values()), "some of these orders tear the copy"
    assert all(
        told == [Abandoned] for events, (told, _) in outcomes.items() if events.index("end") > events.index("guard")
    ), "counted at the guard"


@pytest.mark.parametrize("training", ORDERLY, ids=" ".join)
def test_a_change_behind_the_guard_costs_no_snapshot(tmp_path: Path, training: tuple[str, ...]) -> None:
    story = Story(tmp_path)
    assert all(story.play(events) == ([Captured], True) for events in orders(training, COPY))


def test_a_pause_behind_the_copy_decides_before_the_guard(tmp_path: Path) -> None:
    story = Story(tmp_path)
    for events in (("copy 0", "copy 1", "end"), ("copy 0", "copy 1", "end", "pause")):
        story.link.sent.clear()
        story.snapshotter.capture(1, 0)
        for event in events:
            story.happen(event)
        story.copier.do_work()
        assert [type(message) for message in story.link.sent] == ([Captured] if "pause" in events else [])
        story.guard.reach()
        assert [type(message) for message in story.link.sent] == [Captured]


@pytest.mark.filterwarnings("ignore:weight changed outside:RuntimeWarning")
def test_what_training_on_a_device_changes_behind_the_guard_comes_behind_the_copy(tmp_path: Path) -> None:
    story = Story(tmp_path, is_ahead=True)
    assert all(story.play(events) == ([Captured], True) for events in orders(("guard", "count"), COPY))
    assert all(story.play(events)[0] == [Abandoned] for events in orders(("count", "guard"), COPY[:2]))


@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize("is_main", [False, True])
def test_pauses_decide_only_where_they_show_every_change(tmp_path: Path, is_main: bool, is_wrapped: bool) -> None:
    """The snapshotter checks a snapshot at a pause only if tensor versions then show every earlier change.

    A pause is a moment when the training thread executes no torch operation. At a pause, versions show every earlier
    change only of plain tensors that the main thread changes. Torch increments the version of a wrapper only after the
    Python code of the wrapper's class.
    """
    story = Story(tmp_path)
    if is_wrapped:
        story.wrap()
    asked: list[bool] = []

    def train() -> None:
        story.snapshotter.capture(1, 0)
        story.happen("copy 0")
        story.happen("copy 1")
        story.happen("end")
        asked.append(bool(story.copier.waiting))
        story.guard.reach()

    thread = threading.Thread(target=train)
    if is_main:
        train()
    else:
        thread.start()
        thread.join()
    assert asked == [is_main and not is_wrapped]
    assert [type(message) for message in story.link.sent] == [Captured]


def test_a_guard_that_cannot_look_gives_the_snapshot_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> list[str]:
        raise KeyboardInterrupt

    story = Story(tmp_path)
    with monkeypatch.context() as broken:
        broken.setattr(Sources, "moved", interrupted)
        story.snapshotter.capture(1, 0)
        with pytest.raises(KeyboardInterrupt):
            story.guard.reach()
    story.copier.pause()
    story.copier.do_work()
    assert [type(message) for message in story.link.sent] == [Abandoned]


def test_a_change_of_a_wrapper_is_a_change_of_the_memory_behind_it() -> None:
    memory, wrapper = torch.ones(2), torch.ones(1)
    watched = Sources([(0, StateTensor("w", memory, True, wrapper)), (1, StateTensor("v", torch.ones(1), True))])
    marks = watched.marks()
    wrapper.add_(1)
    assert watched.moved(marks) == ["w"]


class PauseInside(TorchDispatchMode):
    """A dispatch mode of torch whose Python code runs inside every operation."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self._events = events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert pauses.await_pause(lambda: self._events.append("pause"))
        for _ in range(3):  # the interpreter may run pending calls at these instructions
            len(self._events)
        self._events.append("operation")
        return func(*args, **kwargs or {})


def test_python_code_inside_an_operation_is_no_pause() -> None:
    events: list[str] = []
    with PauseInside(events):
        torch.ones(1).add_(1)
    assert events == ["operation"] * 2
    assert pauses.await_pause(lambda: events.append("pause"))
    for _ in range(3):
        len(events)
    assert events == ["operation"] * 2 + ["pause"]


def test_a_pause_comes_when_the_main_thread_has_left_its_operation() -> None:
    events: list[str] = []
    operation = threading.Lock()
    operation.acquire()

    def meanwhile() -> None:
        assert pauses.await_pause(lambda: events.append(f"pause of {threading.current_thread().name}"))
        events.append("asked")
        operation.release()

    other = threading.Thread(target=meanwhile)
    other.start()
    operation.acquire()  # release the GIL in this call, so that other threads run during the operation
    other.join()
    assert events == ["asked", "pause of MainThread"]


def test_a_full_queue_of_the_interpreter_is_no_pause_and_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    with monkeypatch.context() as full:
        full.setattr(pauses.ctypes, "pythonapi", SimpleNamespace(Py_AddPendingCall=lambda *_: -1))
        assert not pauses.await_pause(lambda: events.append("refused"))
    assert pauses.await_pause(lambda: events.append("pause"))
    for _ in range(3):
        len(events)
    assert events == ["pause"]
