from __future__ import annotations

import random
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
    assert [type(item) for item in found] == [np.random.Generator, random.Random, torch.Generator]
