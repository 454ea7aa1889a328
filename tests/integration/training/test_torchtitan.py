"""A trainer of torchtitan is killed, and resumed in new processes.

Its weights, optimizer, schedule, counters, logged losses and random draws equal those of an undisturbed run bit for
bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.training.kills import check
from tests.warm_parent import WarmParent

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

COMPARED = ("step", "tokens", "history", "draws")


def killed(parent: WarmParent, directory: Path, world: int, commits: int, **options: Any) -> None:
    check(parent, directory, world, commits=commits, script="torchtitan_scripts", compared=COMPARED, **options)


@pytest.mark.parametrize("commits", [2, 3], ids=["after_a_validation", "between_validations"])
def test_one_process(warm_parent: WarmParent, tmp_path: Path, commits: int) -> None:
    killed(warm_parent, tmp_path, 1, commits)
