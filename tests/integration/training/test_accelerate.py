"""A script of accelerate that keeps its own loop resumes bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.training import kills
from tests.integration.training.faults import FAULTS, Training, check_equal
from tests.warm_parent import WarmParent

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


@pytest.mark.long(keep=1)
@pytest.mark.parametrize("commits", [2, 24], ids=["first_epoch", "second_epoch"])
@pytest.mark.parametrize(("world", "accumulate"), [(1, 1), (2, 1), (2, 2)])
def test_a_loop_over_epochs_continues_behind_the_kept_step(
    warm_parent: WarmParent, tmp_path: Path, world: int, accumulate: int, commits: int
) -> None:
    kills.check(
        warm_parent,
        tmp_path,
        world,
        commits=commits // accumulate,
        script="accelerate_loop_scripts",
        compared=("step", "losses", "draws"),
        accumulate=accumulate,
    )


@pytest.mark.long(keep=1)
@pytest.mark.parametrize("commits", [2, 24], ids=["first_epoch", "second_epoch"])
@pytest.mark.parametrize("kind", ["fsdp", "zero"])
def test_a_loop_over_epochs_with_divided_parameters(
    warm_parent: WarmParent, tmp_path: Path, kind: str, commits: int
) -> None:
    kills.check(
        warm_parent,
        tmp_path,
        2,
        commits=commits,
        script="accelerate_loop_scripts",
        compared=("step", "losses", "draws"),
        kind=kind,
    )


@pytest.mark.long(keep=1)
@pytest.mark.parametrize("fault", FAULTS)
def test_two_copies_of_a_model_divided_between_two_ranks(warm_parent: WarmParent, tmp_path: Path, fault: str) -> None:
    options = {"kind": "fsdp", "copies": 2}
    training = Training(warm_parent, tmp_path, "accelerate_scripts", 4, options)
    check_equal(training.resumed(fault), training.undisturbed())
