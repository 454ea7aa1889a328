"""A trainer of torchtitan is killed, and resumed in new processes.

Its weights, optimizer, schedule, counters, logged losses and random draws equal those of an undisturbed run bit for
bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.training.faults import FAULTS, Training, check_equal
from tests.integration.training.kills import check
from tests.warm_parent import WarmParent

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

COMPARED = ("step", "tokens", "history", "draws")


def killed(parent: WarmParent, directory: Path, world: int, commits: int, **options: Any) -> None:
    check(parent, directory, world, commits=commits, script="torchtitan_scripts", compared=COMPARED, **options)


@pytest.mark.parametrize("commits", [2, 3], ids=["after_a_validation", "between_validations"])
def test_one_process(warm_parent: WarmParent, tmp_path: Path, commits: int) -> None:
    killed(warm_parent, tmp_path, 1, commits)


PARALLELISM: dict[str, dict[str, Any]] = {
    "hsdp": {"data_parallel_replicate_degree": 2},
    "tensor": {"tensor_parallel_degree": 2},
    "context": {"context_parallel_degree": 2, "context_parallel_load_balancer": None},
    "expert": {"expert_parallel_degree": 2},
    "pipeline": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "1F1B"},
    "looped_pipeline": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "Interleaved1F1B"},
}
"""torchtitan's options for each kind of parallelism. FSDP2 divides the parameters among the remaining ranks."""
OTHERS: dict[str, dict[str, Any]] = {"expert": {"experts": True}, "looped_pipeline": {"layers": 4, "batch": 4}}


@pytest.mark.long(keep=2)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", PARALLELISM)
def test_four_ranks(warm_parent: WarmParent, tmp_path: Path, kind: str, fault: str) -> None:
    options = {"parallelism": PARALLELISM[kind], "validates": False, **OTHERS.get(kind, {})}
    training = Training(warm_parent, tmp_path, "torchtitan_scripts", 4, options)
    check_equal(training.resumed(fault), training.undisturbed())
