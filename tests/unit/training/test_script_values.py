"""Tests of the values that a rehearsal finds in a script."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import cast

import pytest
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler

from everstep.training.data.streams import DataStream
from everstep.training.determinism.script_values import MAX_VALUES, OF_LIBRARY, values_of_script


def test_values_inside_an_object_of_a_package_are_told_apart_from_those_of_the_script() -> None:
    steps = {"made": 3}
    sampler = BatchSampler(SequentialSampler(range(4)), batch_size=2, drop_last=False)
    names = {name.partition(".")[2]: kind.partition(" ")[0] for name, kind in values_of_script([]).items()}
    assert (names["steps.made"], steps["made"]) == ("int", 3)
    assert (names["sampler.batch_size"], sampler.batch_size) == (OF_LIBRARY, 2)


def test_a_script_with_many_globals_does_not_hide_the_variables_of_its_running_functions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    crowded = ModuleType("crowded")
    vars(crowded).update({"__file__": __file__, **{f"part_{i}": object() for i in range(MAX_VALUES)}})
    monkeypatch.setitem(sys.modules, "crowded", crowded)
    steps = {"made": 3}
    assert any(name.endswith(".steps.made") for name in values_of_script([]))
    assert steps


def cycle(loader: Iterable[object]) -> Iterator[object]:
    while True:
        yield from loader


def test_an_iterator_over_a_loader_has_a_position_unless_the_session_keeps_it() -> None:
    loader: DataLoader[int] = DataLoader(cast("Dataset[int]", [1, 2, 3, 4]))
    generator, iterator, kept = cycle(loader), iter(loader), cycle(DataStream("data", loader, 0))
    before = values_of_script([], with_tensors=False)
    for each in (generator, iterator, kept):
        next(each)
    after = values_of_script([], with_tensors=False)
    variables = {"generator", "iterator", "kept"}
    names = {name.partition(".")[2] for name in after if after[name] != before.get(name)}
    assert names & variables == {"generator", "iterator"}
