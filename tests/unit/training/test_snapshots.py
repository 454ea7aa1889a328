"""What goes wrong at a boundary costs a snapshot, and training goes on: the agent is told, the script is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from everstep.protocol.ids import Generation
from everstep.protocol.rank_messages import NONE, Abandoned, Captured, SlotsGranted, SlotsRefused, SlotsRequest
from everstep.protocol.slot import HEADER_BYTES
from everstep.training.capture import StateTensor
from everstep.training.copier import Copies, CopyTicket, CpuCopier, Done, Progress
from everstep.training.guard import Guard
from everstep.training.snapshots import ASK_AGAIN_BOUNDARIES, Snapshotter
from everstep.training.state import Observed


class Refusing(CpuCopier):
    """A copier whose driver refuses what the boundary asks for, as often as is said."""

    def __init__(self, told: list[object]) -> None:
        super().__init__()
        self.times = 0
        self._told = told

    def copy(self, copies: Copies) -> None:
        if self.times and copies.sources:
            self.times -= 1
            raise RuntimeError("CUDA error: invalid argument")
        super().copy(copies)

    def start(self, copies: Copies, done: Done, progress: Progress | None = None) -> CopyTicket:
        def ended(error: BaseException | None) -> None:
            self._told.append("ended")
            done(error)

        return super().start(copies, ended, progress)


class State:
    layout_hash = b"h" * 16

    def __init__(self) -> None:
        self.lists = [[StateTensor("weight", torch.arange(8.0), True)]]

    def observe(self) -> Observed:
        return Observed(self.lists, [], b"values")


class Link:
    generation = Generation(1)
    slots: Any = None

    def __init__(self) -> None:
        self.sent: list[object] = []

    def send(self, message: object) -> None:
        self.sent.append(message)

    def let_go(self) -> None: ...


@pytest.mark.parametrize("times", [1, 2])
def test_a_copy_that_the_driver_refuses_at_the_boundary_is_an_abandoned_snapshot(tmp_path: Path, times: int) -> None:
    link, guard, told = Link(), Guard(), list[object]()
    copier = Refusing(told)
    snapshotter = Snapshotter(State(), link, copier, guard, told.append, is_crowded=True)  # type: ignore[arg-type]
    snapshotter.prepare()
    capacity = link.sent.pop().capacity_bytes  # type: ignore[attr-defined]
    (tmp_path / "slot").write_bytes(bytes(HEADER_BYTES + capacity))
    link.slots = SlotsGranted(layout_hash=State.layout_hash, capacity_bytes=capacity, paths=(str(tmp_path / "slot"),))
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
    for _ in range(ASK_AGAIN_BOUNDARIES):
        snapshotter.prepare()
    first, second = link.sent
    assert isinstance(first, SlotsRequest)
    assert isinstance(second, SlotsRequest)
    assert second.capacity_bytes < first.capacity_bytes
    snapshotter.close()
