"""A `Trainer` of transformers and a script with accelerate are killed, and resumed in new processes.

Their weights, optimizer, schedule, logged losses and random draws equal those of an undisturbed run bit for bit.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.integration.training.fake_agent import FakeAgent
from tests.integration.training.test_resume import differences
from tests.warm_parent import Launch, WarmParent

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

MORE_STEPS = 6
_numbers = itertools.count()


def launch(
    parent: WarmParent,
    world: int,
    directory: Path,
    until: int,
    options: dict[str, Any],
    agent: FakeAgent | None = None,
    script: str = "trainer_scripts",
) -> Launch:
    own = directory / f"launch-{next(_numbers)}"
    own.mkdir()
    environment = {"EVERSTEP_FINAL_ROUND_SECONDS": "20"} | (agent.environment if agent is not None else {})
    call = (f"tests.integration.training.{script}:run", str(own), {"until": until, "options": options})
    return parent.fork(*call, world=world, directory=own, environment=environment, result="result-{rank}.json")


def check(
    parent: WarmParent,
    directory: Path,
    world: int,
    *,
    commits: int,
    script: str = "trainer_scripts",
    compared: tuple[str, ...] = ("step", "epoch", "history", "draws"),
    **options: Any,
) -> None:
    """Kill all ranks after some commits, resume them, and compare with an undisturbed run."""
    with FakeAgent(directory, world, first=3, lead=1, commit_target=commits) as first:
        ranks = launch(parent, world, directory, 1_000, options, first, script)
        try:
            assert first.reached.wait(120), f"{first.messages[-20:]}\n{ranks.logs()}"
        finally:
            ranks.kill()
            ranks.wait()
    check_resumed(parent, directory, first, options, script, compared)


def check_resumed(
    parent: WarmParent,
    directory: Path,
    first: FakeAgent,
    options: dict[str, Any],
    script: str = "trainer_scripts",
    compared: tuple[str, ...] = ("step", "epoch", "history", "draws"),
) -> None:
    """Resume the newest step that the first agent has committed, and compare with an undisturbed run."""
    world = len(first.lines)
    base = first.committed
    slots = {rank: first.sealed[rank, base] for rank in range(world)}
    until = base + MORE_STEPS
    with FakeAgent(directory, world, 2, base_step=base, base_slots=slots, commit_target=0) as second:
        resumed = launch(parent, world, directory, until, options, second, script).results()
    undisturbed = launch(parent, world, directory, until, options, script=script).results()
    for found, expected in zip(resumed, undisturbed, strict=True):
        assert (found["begun"], expected["begun"]) == (base, 0)
        for what in compared:
            assert found[what] == expected[what], what
        assert differences(found["digest"], expected["digest"]) == {}


ZERO = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "zero_allow_untested_optimizer": True,
}
FSDP = {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]}}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "commits",
    [
        pytest.param(1, id="inside_an_epoch"),
        pytest.param(9, id="at_and_after_the_end_of_an_epoch"),
        3,
        8,
    ],
)
def test_one_process(warm_parent: WarmParent, tmp_path: Path, commits: int) -> None:
    check(warm_parent, tmp_path, 1, commits=commits, accumulate=2, evaluates=True)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "options", [pytest.param({"workers": 2}, id="workers"), pytest.param({"bf16": True}, id="bf16")]
)
def test_ddp(warm_parent: WarmParent, tmp_path: Path, options: dict[str, Any]) -> None:
    check(warm_parent, tmp_path, 2, commits=2, evaluates=True, **options)


def test_fsdp(warm_parent: WarmParent, tmp_path: Path) -> None:
    check(warm_parent, tmp_path, 2, commits=2, accumulate=2, arguments=FSDP)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stage", [2, 3])
def test_zero(warm_parent: WarmParent, tmp_path: Path, stage: int) -> None:
    config = {**ZERO, "zero_optimization": {**ZERO["zero_optimization"], "stage": stage}}
    check(warm_parent, tmp_path, 2, commits=2, accumulate=2, arguments={"deepspeed": config})


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "zero"])
def test_accelerate(warm_parent: WarmParent, tmp_path: Path, kind: str) -> None:
    compared = ("step", "count", "losses", "draws")
    check(warm_parent, tmp_path, 2, commits=2, script="accelerate_scripts", compared=compared, kind=kind)
