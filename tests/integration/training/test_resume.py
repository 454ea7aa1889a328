"""Each way to train, killed in mid-run and resumed from a snapshot in fresh processes, ends bit for bit where an undisturbed run ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.training.conftest import WarmParent
from tests.integration.training.fake_agent import FakeAgent

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

MORE_STEPS = 5


def interrupted(
    parent: WarmParent, directory: Path, name: str, world: int, options: dict[str, Any], *, commits: int = 1, first: int = 3
) -> tuple[int, FakeAgent]:
    """Train until a step is committed, kill every rank, and return the step and the agent that holds it."""
    agent = FakeAgent(directory, world, first=first, commit_target=commits)
    with agent:
        ranks = parent.launch(name, world, directory, until=1_000_000, options=options, agent=agent)
        try:
            assert agent.reached.wait(60), f"{agent.messages[-20:]}\n{ranks.logs()}"
        finally:
            ranks.kill()
            statuses = ranks.wait()
        assert statuses == [-9] * world
    return agent.committed, agent


def check(parent: WarmParent, directory: Path, name: str, world: int, *, commits: int = 1, first: int = 3, **options: Any) -> list[dict[str, Any]]:
    base, agent = interrupted(parent, directory, name, world, options, commits=commits, first=first)
    assert base >= first
    slots = {rank: agent.sealed[rank, base] for rank in range(world)}
    until = base + MORE_STEPS
    with FakeAgent(directory, world, 2, base_step=base, base_slots=slots, commit_target=0) as second:
        found = parent.launch(name, world, directory, until=until, options=options, agent=second).results()
    expected = parent.launch(name, world, directory, until=until, options=options).results()
    for one, other in zip(found, expected, strict=True):
        assert one["begun"] == base
        assert other["begun"] == 0
        assert one["losses"] == other["losses"]
        assert {key: value for key, value in one["digest"].items() if other["digest"].get(key) != value} == {}
        assert one["digest"] == other["digest"]
        assert one["draws"] == other["draws"]
    return found


WORLDS = [pytest.param(2), pytest.param(3), pytest.param(4, marks=pytest.mark.full), pytest.param(5, marks=pytest.mark.full)]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", ["plain", "ddp"])
def test_torch(warm_parent: WarmParent, tmp_path: Path, name: str, world: int) -> None:
    check(warm_parent, tmp_path, name, world, commits=5)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_fsdp(warm_parent: WarmParent, tmp_path: Path, dtype: str, world: int) -> None:
    check(warm_parent, tmp_path, "fsdp", world, dtype=dtype)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.full), 2, 3])
def test_zero(warm_parent: WarmParent, tmp_path: Path, stage: int, dtype: str, world: int) -> None:
    check(warm_parent, tmp_path, "zero", world, stage=stage, dtype=dtype)
