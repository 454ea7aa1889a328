"""Tests how ranks load a state that another number of ranks has saved.

The tests cover the order in which shards are read, the parts that each rank loads, and every refusal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from everstep.protocol.ids import Generation, JobName, Rank, RunId, Step
from everstep.protocol.parts import TensorPart, whole
from everstep.protocol.slot import HEADER_BYTES, SlotHeader, SlotState, pack_header, payload_digest
from everstep.training import relayout
from everstep.training.adapters.plain import PlainAdapter
from everstep.training.capture import CapturePlan, SlotMemory
from everstep.training.copier import Copies
from everstep.training.data import DataStream
from everstep.training.earlier import EarlierTensors, LoadTarget, fetch_order, map_shard, values_rank
from everstep.training.errors import CannotRelayout, RestoreMismatch
from everstep.training.host_copy import copy_into_live
from everstep.training.relayout import (
    Relaid,
    RelaidTensors,
    _Cover,
    _others,
    _Piece,
    _Values,
    read_earlier,
)
from everstep.training.restore import Expected
from everstep.training.script import Environment
from everstep.training.state import RankState

RUN = RunId("ab" * 16)
STEP = Step(7)


class Scheduler:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def environment(rank: int, world_size: int) -> Environment:
    return Environment.read({"RANK": str(rank), "WORLD_SIZE": str(world_size)})


def state_of(
    rank: int = 0,
    world_size: int = 1,
    *,
    model: nn.Module | None = None,
    kind: type[torch.optim.Optimizer] = torch.optim.AdamW,
    steps: int = 0,
    objects: Sequence[str] = ("scheduler",),
    data: Callable[[int, int], Any] | None = None,
    **options: Any,
) -> RankState:
    model = nn.Linear(3, 2) if model is None else model
    optimizer = kind(model.parameters(), **{"lr": 0.1, **options})
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, 3, dtype=next(model.parameters()).dtype)).sum().backward()
        optimizer.step()
    streams = {} if data is None else {"data": DataStream("data", data(rank, world_size), 0)}
    return RankState(
        [PlainAdapter({"": model}, {"": optimizer})],
        {name: Scheduler() for name in objects},
        streams,
        environment(rank, world_size),
    )


class Folder:
    """Implements `EarlierShards` with shards that are files in a folder."""

    def __init__(self, path: Path, here: Sequence[int] = ()) -> None:
        self.path = path
        self.here = [Rank(rank) for rank in here]
        self.world_size = 0
        self.fetched: list[int] = []

    def add(self, saved: RankState, **changes: Any) -> None:
        """Write the slot of the next rank."""
        observed = saved.observe()
        plan = CapturePlan.make(observed.tensors, saved.parts(observed.tensors))
        path, capacity = self.path / str(self.world_size), plan.capacity_bytes(observed.values)
        with path.open("wb") as file:
            file.truncate(HEADER_BYTES + capacity)
        memory = SlotMemory(path, capacity)
        for view, item in zip(memory.views(plan), observed.tensors, strict=True):
            view.copy_(item.tensor.detach())
        index_bytes = memory.write_values(plan, observed.values)
        payload = bytes(memory.bytes_at(0, plan.index_offset + index_bytes))
        fields: dict[str, Any] = {
            "job": JobName("job"),
            "run": RUN,
            "owner_rank": Rank(self.world_size),
            "origin_generation": Generation(1),
            "step": STEP,
            "state": SlotState.SEALED,
            "capacity_bytes": capacity,
            "payload_bytes": len(payload),
            "index_offset": plan.index_offset,
            "index_bytes": index_bytes,
            "payload_digest": payload_digest(payload),
            "layout_hash": saved.layout_hash,
        }
        with path.open("r+b") as file:
            file.write(pack_header(SlotHeader(**{**fields, **changes})))
        self.world_size += 1

    def fetch(self, rank: Rank) -> Path:
        self.fetched.append(rank)
        return self.path / str(rank)


def read(folder: Folder, state: RankState, rank: int = 0, world_size: int = 1) -> Relaid:
    return read_earlier(folder, state, Expected(RUN, Rank(rank), STEP, state.facts), world_size)


def load(folder: Folder, state: RankState, rank: int = 0, world_size: int = 1) -> None:
    relaid = read(folder, state, rank, world_size)
    state.load(relaid)
    state.complete(relaid)


def contents(state: RankState) -> dict[str, torch.Tensor]:
    return {item.name: item.tensor.detach().clone() for item in state.observe().tensors}


@pytest.mark.parametrize(
    ("here", "rank", "world_size", "expected"),
    [
        ([], 0, 3, [0, 1, 2, 3]),
        ([], 1, 3, [1, 2, 0, 3]),
        ([], 2, 3, [2, 3, 1, 0]),
        ([3], 1, 3, [1, 3, 2, 0]),
        ([], 4, 6, [2, 3, 1, 0]),
        ([], 5, 6, [3, 2, 1, 0]),
        ([0, 2], 3, 4, [3, 2, 0, 1]),
    ],
)
def test_a_rank_maps_its_own_values_then_shards_of_its_node_then_near_shards(
    here: list[int], rank: int, world_size: int, expected: list[int]
) -> None:
    first = values_rank(4, Rank(rank), world_size, 1)
    assert fetch_order(4, [Rank(each) for each in here], Rank(rank), world_size, first) == expected


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 8))
def test_a_further_rank_loads_the_values_of_its_local_rank_on_a_node_whose_part_it_needs(
    per_node: int, earlier_nodes: int, nodes: int
) -> None:
    for rank in range(nodes * per_node):
        found = values_rank(earlier_nodes * per_node, Rank(rank), nodes * per_node, per_node)
        assert found % per_node == rank % per_node
        if rank < earlier_nodes * per_node:
            assert found == rank
        else:
            node, earlier_node = rank // per_node, found // per_node
            assert earlier_node * nodes <= node * earlier_nodes < (earlier_node + 1) * nodes


def test_a_further_rank_loads_values_by_its_number_if_earlier_ranks_filled_no_whole_nodes() -> None:
    assert [values_rank(3, Rank(rank), 8, 4) for rank in range(8)] == [0, 1, 2, 0, 1, 2, 0, 1]


def test_a_fresh_rank_gets_lazily_created_state_from_one_shard(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    source = state_of(0, 2, steps=3)
    source.objects["scheduler"].count = 3  # type: ignore[attr-defined]
    for _ in range(2):
        folder.add(source)
    target = state_of(0, 1)
    assert not any(name.startswith("optimizer/") for name in contents(target))
    load(folder, target)
    assert folder.fetched == [0, 1], "the second one to compare its copies"
    expected, found = contents(source), contents(target)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert target.objects["scheduler"].count == 3  # type: ignore[attr-defined]


def test_two_boxes_have_the_elements_in_common_that_both_hold() -> None:
    whole = torch.arange(20).view(4, 5)
    part = TensorPart("weight", (4, 5), (1, 0), (3, 4), 0)
    piece = _Piece.of((0, 2), (2, 3), whole[0:2, 2:5], part)
    assert piece is not None
    assert piece.source.tolist() == [[7, 8]]
    assert piece.offsets == (0, 2)
    assert _Piece.of((0, 0), (1, 5), whole[:1], part) is None, "the boxes touch in row 1"
    scalar = _Piece.of((), (), torch.tensor(3), TensorPart("step", (), (), (), 0))
    assert scalar is not None
    assert scalar.source.item() == 3


def test_counters_that_are_read_at_once_leave_the_other_copies_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder(tmp_path)
    folder.add(state_of(steps=2))
    calls: list[int] = []

    def count(copies: Copies) -> None:
        calls.append(len(copies.sources))
        copy_into_live(copies)

    monkeypatch.setattr(relayout, "copy_into_live", count)
    fresh = state_of()
    load(folder, fresh)
    # A new optimizer has no step counters, so the counter of each parameter is copied in a call of its own. One more
    # call copies the two parameters and their four moments.
    assert sorted(calls) == [1, 1, 6]


def test_two_sets_of_random_numbers_do_not_repeat_and_are_the_same_after_every_load(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    source = state_of(0, 1, steps=1)
    torch.manual_seed(5)
    folder.add(source)
    undisturbed = torch.rand(3).tolist()
    draws = []
    for rank in (0, 1, 2, 2):
        load(folder, state_of(rank, 3), rank, 3)
        draws.append(torch.rand(3).tolist())
    assert draws[0] == undisturbed, "the earlier rank's own stream continues"
    assert draws[2] == draws[3]
    assert len({tuple(each) for each in draws}) == 3


def named(**layers: nn.Module) -> nn.Module:
    model = nn.Sequential()
    for name, layer in layers.items():
        model.add_module(name, layer)
    return model


def biased(shape: int) -> nn.Module:
    return named(one=nn.Linear(3, 2), two=nn.Linear(2, shape))


def buffered(dtype: torch.dtype, name: str = "seen") -> nn.Module:
    model = nn.Linear(3, 2)
    model.register_buffer(name, torch.zeros(1, dtype=dtype))
    return model


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            {"model": biased(4)},
            {"model": biased(5)},
            r"model/two.weight: was float32\[4, 2\] on 2 ranks, is float32\[5, 2\]. Build the model",
        ),
        (
            {"model": nn.Linear(3, 2).bfloat16()},
            {},
            r"model/weight: was bfloat16\[2, 3\] on 2 ranks, is float32\[2, 3\]",
        ),
        ({}, {"model": biased(4)}, r"model: it had 2 parameters and has 4|optimizer  group 0"),
        ({}, {"kind": torch.optim.SGD}, r"optimizer: was torch.optim.adamw.AdamW, is torch.optim.sgd.SGD"),
        ({"objects": ()}, {}, r"scheduler: the earlier launch registered \[\], this one \['scheduler'\]"),
        ({"model": buffered(torch.float32)}, {}, r"buffer model/seen: was seen, is absent"),
        (
            {"model": buffered(torch.float32)},
            {"model": buffered(torch.bfloat16)},
            r"model/seen: this buffer was float32\[1\] and is bfloat16\[1\]",
        ),
    ],
    ids=["shape", "dtype", "parameters", "optimizer", "object", "missing buffer", "buffer's dtype"],
)
def test_what_cannot_be_mapped_is_refused_by_name_before_anything_is_written(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any], message: str
) -> None:
    folder = Folder(tmp_path)
    for rank in range(2):
        folder.add(state_of(rank, 2, steps=1, **before))
    target = state_of(**after)
    untouched = contents(target)
    with pytest.raises(CannotRelayout, match=message):
        read(folder, target)
    assert all(torch.equal(tensor, untouched[name]) for name, tensor in contents(target).items())


def test_a_tensor_that_this_model_lacks_is_refused(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    model = named(one=nn.Linear(3, 2), extra=nn.Linear(2, 2))
    model[1].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[0].parameters())
    adapter = PlainAdapter({"": model}, {"": optimizer})
    folder.add(RankState([adapter], {"scheduler": Scheduler()}, {}, environment(0, 1)))
    with pytest.raises(CannotRelayout, match=r"model/extra.weight: was float32\[2, 2\], and this model has no such"):
        read(folder, state_of(model=named(one=nn.Linear(3, 2))))


@pytest.mark.parametrize(("second", "is_refused"), [(3, False), (2, True)])
def test_parameters_with_other_step_counts_do_not_share_one_count(
    tmp_path: Path, second: int, is_refused: bool
) -> None:
    folder = Folder(tmp_path)
    source = state_of(steps=3)
    steps = [item.tensor for item in source.observe().tensors if item.name.endswith("/step")]
    steps[1].fill_(second)
    folder.add(source)
    earlier = EarlierTensors()
    earlier.add(map_shard(folder.path / "0", RUN, Rank(0), STEP), is_own=True)
    parts = (whole("optimizer/weight/step", ()), whole("optimizer/bias/step", ()))
    target = LoadTarget("optimizer/master0/step", (), torch.float32, parts)
    with (
        pytest.raises(CannotRelayout, match=r"weight/step is 3.0 and .*bias/step is 2.0")
        if is_refused
        else nullcontext()
    ):
        assert _Cover(earlier, 1).add_all([target]) == []


def test_a_target_that_no_earlier_shard_fills_is_named(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.add(state_of(steps=1))
    earlier = EarlierTensors()
    earlier.add(map_shard(folder.path / "0", RUN, Rank(0), STEP), is_own=True)
    cover = _Cover(earlier, 1)
    absent = LoadTarget("model/extra", (2,), torch.float32, (whole("model/extra", (2,)),))
    assert cover.explain(absent)[0] == "model/extra"
    assert cover.explain(absent)[1].startswith("is float32[2], and none of the 1 earlier shards holds it")
    larger = LoadTarget("model/weight", (4, 3), torch.float32, (whole("model/weight", (4, 3)),))
    assert "hold boxes of float32[2, 3] that do not fit together, for float32[4, 3]" in cover.explain(larger)[1]


def test_a_plain_model_takes_over_the_scheduler_of_an_engine() -> None:
    engine: Any = SimpleNamespace(is_of_engine=True, scheduler=lambda: {"count": 4})
    state = state_of()
    saved = {"objects": {}, "modes": [None] * len(state.modules()), "data": {}, "generators": []}
    values = _Values(state, [engine], saved)
    assert _others(values, state, Rank(0), earlier_size=1, world_size=1)["objects"] == {"scheduler": {"count": 4}}


def test_padding_becomes_zeros(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    source = state_of(steps=1)
    folder.add(source)
    weight = source.parameters()["model/weight"].detach().flatten()
    earlier = EarlierTensors()
    earlier.add(map_shard(folder.path / "0", RUN, Rank(0), STEP), is_own=True)
    parts = (whole("model/weight", tuple(source.parameters()["model/weight"].shape)),)
    padded = LoadTarget("master", (weight.numel() + 3,), torch.float32, parts, is_padded=True)
    cover = _Cover(earlier, 1)
    assert cover.add_all([padded]) == []
    tensors, live = RelaidTensors(cover, earlier), torch.full((weight.numel() + 3,), 9.0)
    tensors.bring("master", live)
    tensors.finish()
    assert torch.equal(live, torch.cat([weight, torch.zeros(3)]))


def test_gradients_that_each_rank_accumulates_are_refused(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    model = nn.Linear(3, 2)
    source = state_of(0, 1, model=model, steps=1)
    source.end_step()
    model(torch.ones(1, 3)).sum().backward()
    source.end_step()
    folder.add(source)
    with pytest.raises(CannotRelayout, match="gradient/weight: the script accumulates it"):
        read(folder, state_of(0, 2), 0, 2)


@pytest.mark.parametrize(
    "change", [{"step": Step(6)}, {"run": RunId("cd" * 16)}, {"owner_rank": Rank(3)}, {"state": SlotState.WRITING}]
)
def test_a_slot_of_something_else_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = Folder(tmp_path)
    folder.add(state_of(steps=1), **change)
    with pytest.raises(RestoreMismatch, match="expected"):
        read(folder, state_of())


def test_a_slot_with_other_facts_than_its_header_says_is_refused(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.add(state_of(steps=1), layout_hash=bytes(16))
    with pytest.raises(RestoreMismatch, match="layout hash"):
        read(folder, state_of())


def numbers(count: int, batch: int, **options: Any) -> Callable[[int, int], Any]:
    def make(rank: int, world_size: int) -> Any:
        dataset = TensorDataset(torch.arange(count))
        sampler: DistributedSampler[Any] = DistributedSampler(
            dataset, num_replicas=world_size, rank=rank, seed=3, **options
        )
        return DataLoader(dataset, batch_size=batch, sampler=sampler)

    return make


class Ranks:
    """Runs the data loaders of all ranks of one launch."""

    def __init__(self, world_size: int, count: int, batch: int, accumulate: int) -> None:
        make = numbers(count, batch)
        self.streams = [DataStream("data", make(rank, world_size), 0) for rank in range(world_size)]
        self.accumulate = accumulate
        for stream in self.streams:
            stream.batches_per_step = accumulate

    def step(self) -> list[int]:
        """Return the samples that all ranks read for the next optimizer step, in the order of a single rank."""
        rows: list[Any] = []
        for _ in range(self.accumulate):
            batches = [stream.next()[0].tolist() for stream in self.streams]  # type: ignore[index]
            rows += [sample for dealt in zip(*batches, strict=True) for sample in dealt]
        return rows

    def resume(self, earlier: Ranks) -> Ranks:
        for rank, stream in enumerate(self.streams):
            stream.load_state_dict(
                stream.relaid(earlier.streams[rank % len(earlier.streams)].state_dict(), is_same_rank=False)
            )
            stream.check_step()
        return self

    def again(self, earlier: Ranks) -> Ranks:
        """Restore the loaders from an earlier launch with the same number of ranks, as after a failure."""
        for stream, before in zip(self.streams, earlier.streams, strict=True):
            stream.load_state_dict(before.state_dict())
        return self


@pytest.mark.parametrize("first", [1, 2, 3, 4, 5, 9])
def test_the_samples_of_a_shrunk_job_are_those_of_an_undisturbed_one(first: int) -> None:
    undisturbed = Ranks(4, 96, 3, 2)
    expected = [undisturbed.step() for _ in range(first + 9)]
    found: list[list[int]] = []
    ranks = Ranks(4, 96, 3, 2)
    found += [ranks.step() for _ in range(first)]
    ranks = Ranks(3, 96, 4, 2).resume(ranks)
    found += [ranks.step() for _ in range(2)]
    ranks = Ranks(3, 96, 4, 2).again(ranks)
    found += [ranks.step() for _ in range(2)]
    ranks = Ranks(4, 96, 3, 2).resume(ranks)
    found += [ranks.step() for _ in range(5)]
    assert found == expected, "the same samples in the same order, step by step"
    assert sorted(sample for step in expected[:4] for sample in step) == list(range(96)), "an epoch has four steps"


def test_an_epochs_rest_that_its_ranks_do_not_divide_is_shared_equally() -> None:
    ranks = Ranks(4, 51, 2, 1)
    seen = ranks.step()
    assert len(seen) % 3, "the rest begins with another rank than the first"
    rest = Ranks(3, 51, 2, 1)
    for rank, stream in enumerate(rest.streams):
        stream.load_state_dict(stream.relaid(ranks.streams[rank].state_dict(), is_same_rank=False))
    batches: list[list[Any]] = [list(stream) for stream in rest.streams]
    assert {len(each) for each in batches} == {8}, "15 samples in batches of 2"
    seen += [sample for each in batches for batch in each for sample in batch[0].tolist()]
    assert set(seen) == set(range(51))
    assert len(seen) == 53, "two samples are repeated, because 3 ranks do not divide the rest of 43"


def test_ranks_that_now_read_the_same_samples_continue_the_order() -> None:
    earlier, dataset = Ranks(4, 96, 3, 1), TensorDataset(torch.arange(96))
    expected = [earlier.step() for _ in range(3)]
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, num_replicas=1, rank=0, seed=3)
    whole = DataStream("data", DataLoader(dataset, batch_size=12, sampler=sampler), 0)
    fresh = Ranks(4, 96, 3, 1)
    fresh.step()
    whole.load_state_dict(whole.relaid(fresh.streams[2].state_dict(), is_same_rank=True))
    rest: list[Any] = [whole.next(), whole.next()]
    assert [batch[0].tolist() for batch in rest] == expected[1:]


def test_a_loader_of_the_same_ranks_keeps_its_own_position() -> None:
    stream = DataStream("data", [1, 2, 3], 0)
    stream.next()
    fresh = DataStream("data", [1, 2, 3], 0)
    position = stream.state_dict()
    assert fresh.relaid(position, is_same_rank=True) is position


def test_another_global_batch_is_refused() -> None:
    shrunk = Ranks(3, 96, 3, 2)
    with pytest.raises(CannotRelayout, match=r"used 24 samples and would now use 18.*accumulation\(24, 3\)"):
        shrunk.resume(Ranks(4, 96, 3, 2))


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (numbers(96, 4), numbers(95, 4), "samples was 96, is 95"),
        (numbers(96, 4), numbers(96, 4, shuffle=False), "shuffle was True, is False"),
        (lambda *_: [1, 2, 3], lambda *_: [1, 2, 3], "no order over all ranks. Use DataLoader"),
    ],
)
def test_a_loader_without_the_same_order_is_refused_by_name(
    tmp_path: Path, before: Callable[[int, int], Any], after: Callable[[int, int], Any], message: str
) -> None:
    folder = Folder(tmp_path)
    for rank in range(2):
        folder.add(state_of(rank, 2, steps=1, data=before))
    with pytest.raises(CannotRelayout, match=f"data: .*{message}"):
        read(folder, state_of(0, 1, data=after))
