from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch

from everstep.training import rng


def draws() -> list[float]:
    return [
        *torch.rand(3).tolist(),
        torch.randn(()).item(),
        *np.random.randn(3).tolist(),
        random.gauss(0, 1),
        random.random(),
    ]


def test_draws_are_repeated_in_the_middle_of_pairs() -> None:
    # numpy draws normal numbers in pairs, so the state now contains the second number of a pair
    np.random.randn()
    random.gauss(0, 1)
    state = rng.observe()
    expected = draws()
    rng.seed(3)
    rng.restore(state)
    assert draws() == expected


def test_observing_draws_nothing() -> None:
    rng.seed(5)
    expected = draws()
    rng.seed(5)
    rng.restore(rng.observe())
    assert draws() == expected


@pytest.mark.parametrize(
    ("make", "draw"),
    [
        (lambda: torch.Generator().manual_seed(1), lambda g: torch.rand(2, generator=g).tolist()),
        (lambda: np.random.default_rng(1), lambda g: g.random(2).tolist()),
        (lambda: np.random.Generator(np.random.Philox(1)), lambda g: g.random(2).tolist()),
        (lambda: np.random.RandomState(1), lambda g: g.rand(2).tolist()),
        (lambda: random.Random(1), lambda g: [g.random()]),
    ],
)
def test_generators_of_all_kinds(make: Any, draw: Any) -> None:
    generator = make()
    draw(generator)
    state = rng.generator_state(generator)
    expected = draw(generator)
    other = make()
    rng.set_generator_state(other, state)
    assert draw(other) == expected
    rng.seed_generator(generator, 2**63 + 9)
    rng.seed_generator(other, 2**63 + 9)
    assert draw(generator) == draw(other)


def test_generators_are_found_where_transforms_keep_them() -> None:
    class Holder:
        pass

    deep, shared = Holder(), random.Random(2)
    deep.rng = np.random.default_rng(1)  # type: ignore[attr-defined]
    root = Holder()
    root.transforms = [deep, shared, {"g": torch.Generator()}]  # type: ignore[attr-defined]
    root.samples = [random.Random(number) for number in range(1000)]  # type: ignore[attr-defined]
    root.itself = root  # type: ignore[attr-defined]
    found = rng.find_generators([root, shared])
    assert [type(item) for item in found] == [random.Random, np.random.Generator, torch.Generator]


def test_generators_are_found_in_modules_slots_and_the_scripts_classes_and_far_inside() -> None:
    class Slotted:
        __slots__ = ("empty", "rng")

    class Noise(torch.nn.Module):
        of_class = random.Random(1)

        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator()

    slotted = Slotted()
    slotted.rng = np.random.default_rng(1)
    far: object = np.random.RandomState(1)
    for _ in range(8):
        far = {"inner": [far]}[next(iter({"inner"}))]
    roots = [torch.nn.Sequential(torch.nn.Sequential(Noise())), slotted, deque([far])]
    assert {type(each) for each in rng.find_generators(roots)} == {
        torch.Generator,
        random.Random,
        np.random.Generator,
        np.random.RandomState,
    }


def test_a_search_ends_although_objects_make_further_objects() -> None:
    class Endless:
        def __getattr__(self, name: str) -> object:
            raise AttributeError(name)

        @property
        def further(self) -> Endless:
            return Endless()

    inner: dict[str, object] = {}
    inner["itself"] = inner
    assert rng.find_generators([Endless(), inner]) == []
