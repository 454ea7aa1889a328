"""A failed snapshot is skipped, and training continues.

The rank reports the failure to its agent, and the script gets no error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from everstep.protocol.ids import Generation, Step
from everstep.protocol.parts import TensorPart
from everstep.protocol.rank_messages import (
    NONE,
    Abandoned,
    Captured,
    SlotsGranted,
    SlotsRefused,
    SlotsRequest,
    UnkeptCause,
)
from everstep.protocol.slot import HEADER_BYTES
from everstep.training.capture import StateTensor
from everstep.training.copier import Copies, CopyTicket, CpuCopier, Done, Progress
from everstep.training.errors import CannotResume
from everstep.training.guard import Flight, Guard
from everstep.training.snapshots import ASK_AGAIN_BOUNDARIES, Snapshotter
from everstep.training.state import Observed


class Refusing(CpuCopier):
    """A copier whose first copies at the end of a step fail with a driver error. `times` is their number."""

    def __init__(self, told: list[object]) -> None:
        super().__init__()
        self.times = 0
        self.error: BaseException = RuntimeError("CUDA error: invalid argument")
        self._told = told

    def copy(self, copies: Copies) -> None:
        if self.times and copies.sources:
            self.times -= 1
            raise self.error
        super().copy(copies)

    def start(self, copies: Copies, done: Done, progress: Progress | None = None) -> CopyTicket:
        def ended(error: BaseException | None) -> None:
            self._told.append("ended")
            done(error)

        return super().start(copies, ended, progress)


class Held(CpuCopier):
    """A copier that can delay the next copy until the copy after it is requested."""

    def __init__(self) -> None:
        super().__init__()
        self.is_held = False
        self._may_go_on = threading.Event()

    def start(self, copies: Copies, done: Done, progress: Progress | None = None) -> CopyTicket:
        if self.is_held:
            self._thread.put(lambda: self._may_go_on.wait() and None)
            self.is_held = False
        else:
            self._may_go_on.set()
        return super().start(copies, done, progress)


class Late(CopyTicket):
    """A copy that ends only when it is joined. `wait` returns at once, so that training continues during the copy."""

    def __init__(self, end: Callable[[], None]) -> None:
        super().__init__()
        self._end: Callable[[], None] | None = end

    def wait(self) -> None: ...

    def join(self) -> None:
        end, self._end = self._end, None
        if end is not None:
            end()
            self.finish()


class Behind(CpuCopier):
    """A fake copier of device memory. Each copy ends only when the next copy starts."""

    is_prompt = False

    def __init__(self) -> None:
        super().__init__()
        self.error: RuntimeError | None = None
        self.last: Late | None = None

    def start(self, copies: Copies, done: Done, progress: Progress | None = None) -> CopyTicket:
        if self.last is not None:
            self.last.join()
        self.last = Late(partial(done, self.error))
        return self.last


class State:
    layout_hash = b"h" * 16

    def __init__(self) -> None:
        self.lists = [[StateTensor("weight", torch.arange(8.0), True)]]
        self.error: BaseException | None = None

    def observe(self) -> Observed:
        if self.error is not None:
            raise self.error
        return Observed(self.lists, [], b"values")

    forecast = observe

    def parts(self, _tensors: object) -> dict[str, tuple[TensorPart, ...]]:
        return {}


class Link:
    generation = Generation(1)
    slots: Any = None

    def __init__(self) -> None:
        self.sent: list[object] = []

    def send(self, message: object) -> None:
        self.sent.append(message)

    def let_go(self) -> None: ...

    def wait(self, seconds: float) -> None: ...


class Unplannable(torch.Tensor):
    """A tensor for which the planning of a snapshot raises an unexpected error, as for some sharded tensors."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.is_set_to:
            raise NotImplementedError("Operator aten.is_set_to.default does not have a sharding strategy registered.")
        return super().__torch_function__(func, types, args, kwargs or {})


def granted(
    tmp_path: Path, state: State, link: Link, copier: CpuCopier, guard: Guard, told: list[object]
) -> Snapshotter:
    """Return a snapshotter whose slots the agent has granted."""
    never = lambda _: False  # noqa: E731
    snapshotter = Snapshotter(state, link, copier, guard, told.append, is_crowded=True, await_pause=never)  # type: ignore[arg-type]
    snapshotter.prepare()
    capacity = link.sent.pop().capacity_bytes  # type: ignore[attr-defined]
    (tmp_path / "slot").write_bytes(bytes(HEADER_BYTES + capacity))
    link.slots = SlotsGranted(layout_hash=State.layout_hash, capacity_bytes=capacity, paths=(str(tmp_path / "slot"),))
    return snapshotter


def test_a_state_that_cannot_be_observed_is_an_abandoned_snapshot(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state, link, guard = State(), Link(), Guard()
    state.error = KeyError("average")
    ahead = Snapshotter(state, link, CpuCopier(), guard, lambda _: None, is_crowded=True)  # type: ignore[arg-type]
    ahead.forecast()
    ahead.prepare()
    assert ahead.obstacle == "KeyError: 'average'"
    ahead.close()
    state.error = None
    snapshotter = granted(tmp_path, state, link, CpuCopier(), guard, [])
    for step, error in enumerate(
        (KeyError("average"), CannotResume("extra/ema", "a callback"), RuntimeError("no memory")), start=1
    ):
        state.error = error
        snapshotter.capture(step, 0)
        abandoned = link.sent[-1]
        assert isinstance(abandoned, Abandoned)
        assert abandoned.step == snapshotter.settled == step
        assert abandoned.reason.endswith(str(error))
        assert abandoned.cause is (UnkeptCause.STATE if isinstance(error, CannotResume) else UnkeptCause.CAPTURE)
        assert abandoned.reason in caplog.text
    state.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        snapshotter.capture(5, 0)
    state.error = None
    snapshotter.capture(6, 0)
    guard.reach()
    assert isinstance(link.sent[-1], Captured), "the next one is taken"
    snapshotter.close()


def test_tensors_that_cannot_be_planned_or_copied_are_an_abandoned_snapshot(tmp_path: Path) -> None:
    state, link, guard, told = State(), Link(), Guard(), list[object]()
    snapshotter = granted(tmp_path, state, link, CpuCopier(), guard, told)
    usual, state.lists = state.lists, [[StateTensor("weight", torch.arange(8.0).as_subclass(Unplannable), True)]]
    for step in (1, 2):
        snapshotter.capture(step, 0)
        guard.reach()
    assert isinstance(link.sent[-1], Abandoned)
    assert link.sent[-1].reason.startswith("NotImplementedError: Operator aten.is_set_to")
    state.lists = usual
    snapshotter.capture(3, 0)
    guard.reach()
    assert isinstance(link.sent[-1], Captured), "the next one is taken"
    assert told[-1] == NONE
    snapshotter.close()


def test_a_copier_that_does_not_start_is_an_abandoned_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link, guard, told = Link(), Guard(), list[object]()
    copier = CpuCopier()
    snapshotter = granted(tmp_path, State(), link, copier, guard, told)
    monkeypatch.setattr(guard, "is_next_audited", lambda: False)
    with monkeypatch.context() as broken:
        broken.setattr(copier, "start", lambda *_: torch.ones(2).view(3))
        snapshotter.capture(1, 0)
    assert isinstance(link.sent[-1], Abandoned)
    assert "invalid for input of size" in link.sent[-1].reason
    assert told == [1, NONE]
    assert snapshotter.telling == NONE, "there is no copier's thread to let the boundary's word go"
    snapshotter.capture(2, 0)
    guard.reach()
    assert isinstance(link.sent[-1], Captured), "the next one is taken"
    snapshotter.close()


@pytest.mark.parametrize("times", [1, 2])
def test_a_copy_that_the_driver_refuses_at_the_boundary_is_an_abandoned_snapshot(tmp_path: Path, times: int) -> None:
    link, guard, told = Link(), Guard(), list[object]()
    copier = Refusing(told)
    snapshotter = granted(tmp_path, State(), link, copier, guard, told)
    copier.times = times
    for step in range(1, times + 1):
        snapshotter.capture(step, 0)
        assert isinstance(link.sent[-1], Abandoned)
        assert "invalid argument" in link.sent[-1].reason
        assert told[-3:] == [step, "ended", NONE], "what was asked for before the refusal may have been on its way"
        assert snapshotter.settled == step
        guard.reach()
    snapshotter.capture(times + 1, 0)
    guard.reach()
    assert isinstance(link.sent[-1], Captured), "the next one is taken"
    snapshotter.close()


def test_a_copy_that_a_signal_breaks_off_at_the_boundary_is_an_abandoned_snapshot(tmp_path: Path) -> None:
    link, guard, told = Link(), Guard(), list[object]()
    copier = Refusing(told)
    snapshotter = granted(tmp_path, State(), link, copier, guard, told)
    copier.times, copier.error = 1, KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        snapshotter.capture(1, 0)
    assert link.sent == [
        Abandoned(
            generation=Generation(1),
            step=Step(1),
            reason="the copy was cancelled: KeyboardInterrupt",
            cause=UnkeptCause.CAPTURE,
        )
    ]
    assert told == [1, "ended", NONE], "the page says that nobody is at the slot"
    assert snapshotter.settled == 1
    guard.reach()
    snapshotter.capture(2, 0)
    guard.reach()
    assert isinstance(link.sent[-1], Captured), "the next one is taken"
    snapshotter.close()


@pytest.mark.parametrize("is_armed", [True, False])
@pytest.mark.parametrize("is_audited", [True, False])
def test_a_copy_that_a_signal_keeps_from_the_guard_has_ended_and_is_told_of_once(
    tmp_path: Path, is_audited: bool, is_armed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, guard, told, copier = Link(), Guard(), list[object](), Held()
    snapshotter = granted(tmp_path, State(), link, copier, guard, told)
    monkeypatch.setattr(guard, "is_next_audited", lambda: is_audited)
    arm = guard.arm

    def interrupted(flight: Flight) -> None:
        if is_armed:
            arm(flight)
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(guard, "arm", interrupted)
        copier.is_held = True
        with pytest.raises(KeyboardInterrupt):
            snapshotter.capture(1, 0)
    assert told[0] == 1
    assert told[-1] == NONE, "nobody is at the slot, nor at the tensors, any more"
    guard.reach()
    assert [type(message) for message in link.sent] == [Abandoned], (
        "no look at a pause or at the guard has shown that it is whole"
    )
    snapshotter.capture(2, 0)
    guard.reach()
    assert isinstance(link.sent[-1], Captured), "the next one is taken"
    snapshotter.close()


def test_a_copy_that_training_is_ahead_of_ends_before_anything_is_said_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, guard, told, copier = Link(), Guard(), list[object](), Behind()
    snapshotter = granted(tmp_path, State(), link, copier, guard, told)
    monkeypatch.setattr(guard, "is_next_audited", lambda: False)
    for step in (1, 2):
        snapshotter.capture(step, 0)
        guard.reach()
    assert told == [1, NONE, 2], "else the page says of the second that nobody copies it"
    snapshotter.close()


def test_a_copy_that_training_is_ahead_of_unsettles_no_later_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, guard, copier = Link(), Guard(), Behind()
    snapshotter = granted(tmp_path, State(), link, copier, guard, [])
    monkeypatch.setattr(guard, "is_next_audited", lambda: False)
    copier.error = RuntimeError("CUDA error: an illegal memory access was encountered")
    snapshotter.capture(1, 0)
    guard.reach()
    snapshotter.abandon(2, UnkeptCause.LATE, "late")
    assert copier.last is not None
    copier.last.join()
    assert [message.step for message in link.sent if isinstance(message, Abandoned)] == [2, 1]
    assert snapshotter.settled == 2
    snapshotter.close()


def test_a_refused_state_that_cannot_be_looked_at_again_ends_no_training(caplog: pytest.LogCaptureFixture) -> None:
    link, state = Link(), State()
    snapshotter = Snapshotter(state, link, CpuCopier(), Guard(), lambda _: None, is_crowded=True)  # type: ignore[arg-type]
    small, state.lists = state.lists, [[*state.lists[0], StateTensor("gradient", torch.zeros(1000), False)]]
    snapshotter.prepare()
    link.slots = SlotsRefused(layout_hash=State.layout_hash, reason="does not fit")
    state.lists, state.error = small, RuntimeError("no average yet")
    for _ in range(ASK_AGAIN_BOUNDARIES):
        snapshotter.prepare()
    assert "RuntimeError: no average yet" in caplog.text
    assert len(link.sent) == 1
    state.error = None
    for _ in range(ASK_AGAIN_BOUNDARIES):
        snapshotter.prepare()
    assert len(link.sent) == 2, "it is looked at once more"
    snapshotter.close()


def test_a_state_that_shrinks_again_is_asked_slots_for() -> None:
    link, state = Link(), State()
    snapshotter = Snapshotter(state, link, CpuCopier(), Guard(), lambda _: None, is_crowded=True)  # type: ignore[arg-type]
    small, large = state.lists, [[*state.lists[0], StateTensor("gradient", torch.zeros(1000), False)]]
    state.lists = large
    snapshotter.prepare()
    link.slots = SlotsRefused(layout_hash=State.layout_hash, reason="does not fit")
    for _ in range(2 * ASK_AGAIN_BOUNDARIES):
        snapshotter.prepare()
    assert len(link.sent) == 1, "nobody asks again for what was refused"
    state.lists = small
    for _ in range(ASK_AGAIN_BOUNDARIES - 1):
        snapshotter.prepare()
    assert len(link.sent) == 1, "the rank observes a refused state rarely, because this takes time"
    snapshotter.prepare()
    first, second = link.sent
    assert isinstance(first, SlotsRequest)
    assert isinstance(second, SlotsRequest)
    assert second.capacity_bytes < first.capacity_bytes
    snapshotter.close()


def grow_and_capture(snapshotter: Snapshotter, state: State, step: int) -> None:
    """Finish a step after which the state has a further tensor, as with the history of LBFGS."""
    state.lists = [[*state.lists[0], StateTensor(f"history.{step}", torch.zeros(20_000), False)]]
    snapshotter.capture(step, 0)
    snapshotter.prepare()


def test_a_state_that_grows_at_each_step_gets_slots_with_spare_room(tmp_path: Path) -> None:
    link, state, captured = Link(), State(), 0
    snapshotter = granted(tmp_path, state, link, CpuCopier(), Guard(), [])
    for step in range(1, 61):
        grow_and_capture(snapshotter, state, step)
        wanted = [message for message in link.sent if isinstance(message, SlotsRequest)]
        captured += not wanted
        if wanted:
            (tmp_path / "slot").write_bytes(bytes(HEADER_BYTES + wanted[-1].capacity_bytes))
            link.slots = msgspec.structs.replace(link.slots, capacity_bytes=wanted[-1].capacity_bytes)
        link.sent.clear()
    assert captured > 48
    snapshotter.close()


def test_without_memory_for_spare_room_a_rank_asks_for_what_it_needs(tmp_path: Path) -> None:
    link, state = Link(), State()
    snapshotter = granted(tmp_path, state, link, CpuCopier(), Guard(), [])
    while len(requests := [each for each in link.sent if isinstance(each, SlotsRequest)]) < 2:
        grow_and_capture(snapshotter, state, len(link.sent) + 1)
    link.slots = SlotsRefused(layout_hash=State.layout_hash, reason="does not fit")
    for _ in range(3):
        snapshotter.prepare()
    exact = link.sent[-1]
    assert isinstance(exact, SlotsRequest)
    assert exact.capacity_bytes < requests[-1].capacity_bytes
    assert exact.capacity_bytes > requests[0].capacity_bytes
    assert sum(isinstance(each, SlotsRequest) for each in link.sent) == 3, "it asks once"
    snapshotter.close()


def test_draining_waits_for_the_mapping_and_the_copy_for_at_most_the_limit_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copier, limits = CpuCopier(), list[float]()
    snapshotter = Snapshotter(State(), Link(), copier, Guard(), lambda _: None, is_crowded=True)  # type: ignore[arg-type]
    monkeypatch.setattr(copier, "drain", lambda limit_seconds: limits.append(limit_seconds) or True)
    for limit_seconds in (5.0, 1.0):
        clock = SimpleNamespace(monotonic=iter((100.0, 102.0)).__next__)  # The wait for the mapping takes 2 s.
        monkeypatch.setattr("everstep.training.snapshots.time", clock)
        snapshotter.drain(limit_seconds)
    assert limits == [3.0, 0.0]
    snapshotter.close()
