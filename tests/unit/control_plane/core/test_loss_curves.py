"""Tests which metric counts as a job's loss, and which points its curve has."""

from __future__ import annotations

from itertools import pairwise

import pytest

from control_plane.core.loss_curves import loss_name, newest_at, sampled_steps


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["lr", "loss", "eval/loss"], "loss"),
        (["eval/loss", "train/loss"], "train/loss"),
        (["eval_loss", "Loss"], "Loss"),
        (["validation_loss", "aux_loss"], "aux_loss"),
        (["everstep/loss_scale", "lr"], None),
        ([], None),
    ],
)
def test_the_training_loss_is_found_by_its_name(names: list[str], expected: str | None) -> None:
    assert loss_name(names) == expected
    assert loss_name(reversed(names)) == expected


@pytest.mark.parametrize(("first", "last", "limit"), [(0, 0, 40), (3, 4, 40), (0, 39, 40), (0, 40, 40), (7, 9999, 40)])
def test_sampled_steps_have_both_ends_and_equal_distances(first: int, last: int, limit: int) -> None:
    steps = sampled_steps(first, last, limit)
    assert (steps[0], steps[-1], len(steps)) == (first, last, min(limit, last - first + 1))
    distances = {after - before for before, after in pairwise(steps)}
    assert all(distance > 0 for distance in distances)
    assert max(distances, default=0) - min(distances, default=0) <= 1


def test_the_newest_step_at_a_step_is_not_after_it() -> None:
    assert [newest_at((2, 5, 9), step) for step in (1, 2, 4, 9, 10)] == [None, 0, 0, 2, 2]
