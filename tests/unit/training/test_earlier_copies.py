"""Tests that a relayout compares what earlier ranks hold, and refuses copies that differ."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from everstep.protocol.ids import Rank
from everstep.training.earlier_copies import Digests, check_copies
from everstep.training.errors import CannotRelayout, RestoreMismatch
from tests.unit.training.test_relayout import Folder, contents, load, numbers, state_of


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


def saved(path: Path, seeds: Sequence[int], steps: Sequence[int] = (2, 2, 2, 2)) -> Folder:
    folder = Folder(path)
    for rank, seed in enumerate(seeds):
        model = net(seed).eval()
        folder.add(state_of(rank, len(seeds), model=model, steps=steps[rank]))
    return folder


@pytest.mark.parametrize("world_size", [1, 3, 6])
def test_parameters_of_each_rank_are_refused_by_name(tmp_path: Path, world_size: int) -> None:
    folder = saved(tmp_path, [0, 0, 0, 1])
    for rank in range(world_size):
        with pytest.raises(CannotRelayout, match=r"^model/0.weight: earlier ranks 0 and 3 hold different values"):
            load(folder, state_of(rank, world_size, model=net(7)), rank, world_size)


def test_another_optimizer_state_is_refused_by_name(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    for rank in range(2):
        state = state_of(rank, 2, model=net(0).eval(), steps=2)
        for optimizer in state.optimizers():
            for held in optimizer.state.values():
                held["exp_avg"] += rank
        folder.add(state)
    with pytest.raises(CannotRelayout, match=r"^optimizer/0.weight/exp_avg: earlier ranks 0 and 1 hold different"):
        load(folder, state_of(model=net(7)))


def test_equal_copies_load_and_each_rank_keeps_its_own_buffers(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    for rank in range(2):
        model: Any = net(0).eval()
        state = state_of(rank, 2, model=model, steps=2)
        model[1].running_mean += rank
        folder.add(state)
    target = state_of(model=net(7))
    load(folder, target)
    assert torch.equal(contents(target)["model/1.running_mean"], torch.zeros(2))


def test_ranks_at_different_positions_in_the_data_are_refused_by_name(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    for rank in range(2):
        torch.manual_seed(0)
        state = state_of(rank, 2, steps=2, data=numbers(96, 3))
        for _ in range(1 + rank):
            state.streams["data"].next()
        folder.add(state)
    with pytest.raises(CannotRelayout, match=r"^data: earlier ranks 0 and 1 were at different positions in the data"):
        load(folder, state_of(data=numbers(96, 6)))


class Ranks:
    """Runs `check_copies` on several ranks, which exchange values."""

    def __init__(self, held: Sequence[dict[int, Digests] | None], here: Sequence[Sequence[int]], earlier_size: int):
        self.reads: list[list[int]] = [[] for _ in held]
        self.errors: list[RestoreMismatch | None] = [None for _ in held]
        self._values: list[Any] = [None for _ in held]
        self._barrier = threading.Barrier(len(held), timeout=30)
        self._held, self._here, self._size = held, here, earlier_size

    def run(self, missing: dict[int, Digests]) -> None:
        threads = [threading.Thread(target=self._check, args=(rank, missing)) for rank in range(len(self._held))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _check(self, rank: int, missing: dict[int, Digests]) -> None:
        def gather(value: Any) -> Sequence[Any]:
            self._values[rank] = value
            self._barrier.wait()
            values = list(self._values)
            self._barrier.wait()
            return values

        def read(other: Rank) -> Digests:
            self.reads[rank].append(other)
            if other not in missing:
                raise RestoreMismatch("no source")
            return missing[other]

        own: Any = self._held[rank]
        here: Any = self._here[rank]
        try:
            check_copies(Rank(rank), own, self._size, here, read, gather)
        except RestoreMismatch as error:
            self.errors[rank] = error


PIECE = ("model/weight", (0,), (2,))


@given(st.integers(1, 4), st.integers(1, 9), st.data())
def test_all_ranks_together_read_each_earlier_shard_and_find_any_difference(
    world: int, size: int, data: st.DataObject
) -> None:
    contents = {rank: {PIECE: data.draw(st.sampled_from([b"a", b"b"]))} for rank in range(size)}
    held: Any = [{rank: contents[rank]} if rank < size else {0: contents[0]} for rank in range(world)]
    ranks = Ranks(held, [[] for _ in range(world)], size)
    ranks.run(contents)
    assert sorted(rank for each in ranks.reads for rank in each) == list(range(world, size)), "each once"
    assert max(map(len, ranks.reads)) - min(map(len, ranks.reads)) <= 1, "the ranks share the reads"
    differs = len({digests[PIECE] for digests in contents.values()}) > 1
    assert [isinstance(error, CannotRelayout) for error in ranks.errors] == [differs] * world


def test_a_shard_is_compared_by_a_rank_whose_node_holds_it() -> None:
    same: Digests = {PIECE: b"a"}
    ranks = Ranks([{0: same}, {1: same}, {2: same}], [[], [], [3, 4]], 5)
    ranks.run({3: same, 4: same})
    assert ranks.reads == [[], [], [3, 4]]
    assert ranks.errors == [None, None, None]


def test_a_rank_that_cannot_load_keeps_no_other_rank_waiting() -> None:
    same: Digests = {PIECE: b"a"}
    ranks = Ranks([{0: same}, None], [[], []], 3)
    ranks.run({})
    assert (ranks.reads, ranks.errors) == ([[], []], [None, None])
    ranks = Ranks([{0: same}, {1: same}], [[], []], 3)
    ranks.run({})
    assert [str(error) for error in ranks.errors] == ["no source", "None"]
