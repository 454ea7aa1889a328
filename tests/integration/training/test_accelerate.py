"""A script of accelerate that keeps its own loop resumes bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.training import kills
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
