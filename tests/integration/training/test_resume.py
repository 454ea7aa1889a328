"""Every kind of training is killed, and resumed from a snapshot in new processes.

Its result equals the undisturbed run bit for bit.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from everstep.protocol.rank_messages import Abandoned
from tests.integration.training.conftest import Scenarios
from tests.integration.training.fake_agent import FakeAgent
from worker.ranks.environment import node_environment

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

MORE_STEPS = 5


def interrupted(
    scenarios: Scenarios,
    directory: Path,
    name: str,
    world: int,
    options: dict[str, Any],
    *,
    commits: int = 1,
    first: int = 3,
    lead: int = 2,
) -> tuple[int, FakeAgent]:
    """Train until enough steps are committed, kill every rank, and return the newest committed step and its agent."""
    agent = FakeAgent(directory, world, first=first, lead=lead, commit_target=commits)
    with agent:
        ranks = scenarios.launch(name, world, directory, until=1_000_000, options=options, agent=agent)
        try:
            assert agent.reached.wait(60), f"{agent.messages[-20:]}\n{ranks.logs()}"
        finally:
            ranks.kill()
            statuses = ranks.wait()
        assert statuses == [-9] * world
    return agent.committed, agent


def check(
    scenarios: Scenarios,
    directory: Path,
    name: str,
    world: int,
    *,
    commits: int = 1,
    first: int = 3,
    lead: int = 2,
    **options: Any,
) -> list[dict[str, Any]]:
    base, agent = interrupted(scenarios, directory, name, world, options, commits=commits, first=first, lead=lead)
    assert base >= first
    slots = {rank: agent.sealed[rank, base] for rank in range(world)}
    until = base + MORE_STEPS
    # In a run with two ranks, the agent receives the state to restore only after the ranks have connected. In larger
    # runs, the agent has the state before.
    with FakeAgent(
        directory, world, 2, base_step=base, base_slots=slots, commit_target=0, arrives=world == 2
    ) as second:
        found = scenarios.launch(name, world, directory, until=until, options=options, agent=second).results()
    expected = scenarios.launch(name, world, directory, until=until, options=options).results()
    for one, other in zip(found, expected, strict=True):
        assert one["begun"] == base
        assert other["begun"] == 0
        assert one["losses"] == other["losses"]
        assert differences(one["digest"], other["digest"]) == {}
        assert one["draws"] == other["draws"]
    return found


def differences(one: dict[str, str], other: dict[str, str]) -> dict[str, tuple[str | None, str | None]]:
    """Return the items that differ between two digests.

    A run with snapshots also lists the gradients that were accumulating at a snapshot. If only one of the digests has
    such an entry, this is no difference.
    """
    names = {
        name
        for name in one.keys() | other.keys()
        if not (name.startswith("gradient/") and (name in one) != (name in other))
    }
    return {name: (one.get(name), other.get(name)) for name in names if one.get(name) != other.get(name)}


WORLDS = [
    pytest.param(2),
    pytest.param(3),
    pytest.param(4, marks=pytest.mark.long),
    pytest.param(5, marks=pytest.mark.long),
]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", ["plain", "ddp", "ddp_unused"])
def test_torch(scenarios: Scenarios, tmp_path: Path, name: str, world: int) -> None:
    check(scenarios, tmp_path, name, world, commits=5)


@pytest.mark.parametrize("first", [3, 4, 5, 7])  # before the first growth, at it, between both, and after both
@pytest.mark.parametrize("kind", ["plain", "ddp", "fsdp"])
@pytest.mark.parametrize("adds", [True, False])
def test_an_optimizer_that_grows(scenarios: Scenarios, tmp_path: Path, adds: bool, kind: str, first: int) -> None:
    check(scenarios, tmp_path, "growing", 2, first=first, lead=0, kind=kind, adds=adds)


@pytest.mark.parametrize("first", [4, 5])
def test_ranks_whose_optimizers_grow_at_different_steps(scenarios: Scenarios, tmp_path: Path, first: int) -> None:
    check(scenarios, tmp_path, "growing", 2, first=first, lead=0, delay=2)


def test_a_layer_that_ddp_does_not_average_ends_the_snapshots_by_name(scenarios: Scenarios, tmp_path: Path) -> None:
    options = {"kind": "ddp", "freezes_first": True}

    def reasons() -> set[str]:
        return {message.reason for _, message in agent.of_kind(Abandoned) if "DDP" in message.reason}  # type: ignore[attr-defined]

    with FakeAgent(tmp_path, 2, first=4, lead=0, commit_target=1_000) as agent:
        ranks = scenarios.launch("growing", 2, tmp_path, until=1_000_000, options=options, agent=agent)
        try:
            agent.wait_for(reasons)
        finally:
            ranks.kill()
            ranks.wait()
    assert {reason.partition(":")[0] for reason in reasons()} <= {"model/4.weight", "model/0.weight"}
    assert agent.committed < 4


def test_ddp_with_a_static_graph(scenarios: Scenarios, tmp_path: Path) -> None:
    check(scenarios, tmp_path, "ddp", 2, static_graph=True)


@pytest.mark.parametrize(
    ("world", "option", "reason"),
    [
        (3, "static_graph", "static_graph=True over three or more ranks"),
        (2, "compress", "a DDP communication hook has its own state"),
    ],
)
def test_what_ddp_would_not_bring_back_is_refused(
    scenarios: Scenarios, tmp_path: Path, world: int, option: str, reason: str
) -> None:
    ranks = scenarios.launch("ddp", world, tmp_path, until=1, options={option: True})
    assert ranks.wait(until_one_fails=False) == [1] * world
    assert all(reason in ranks.log(rank) for rank in range(world)), ranks.logs()


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_fsdp(scenarios: Scenarios, tmp_path: Path, dtype: str, world: int) -> None:
    check(scenarios, tmp_path, "fsdp", world, dtype=dtype)


def test_two_copies_of_a_model_divided_between_two_ranks(scenarios: Scenarios, tmp_path: Path) -> None:
    check(scenarios, tmp_path, "fsdp", 4, copies=2)


@pytest.mark.parametrize("world", WORLDS)
def test_tensor_parallel(scenarios: Scenarios, tmp_path: Path, world: int) -> None:
    found = check(scenarios, tmp_path, "tensor_parallel", world, commits=4)
    assert (
        found[0]["digest"]["optimizer/parts/up.weight/exp_avg"]
        != found[1]["digest"]["optimizer/parts/up.weight/exp_avg"]
    ), "each has a part"


def test_tensor_parallel_under_ddp_is_refused(scenarios: Scenarios, tmp_path: Path) -> None:
    ranks = scenarios.launch("tensor_parallel", 2, tmp_path, until=1, options={"wraps": True})
    assert ranks.wait(until_one_fails=False) == [1, 1]
    assert all("DDP with fully_shard or tensor parallel parameters" in ranks.log(rank) for rank in range(2)), (
        ranks.logs()
    )


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.long), 2, 3])
def test_zero(scenarios: Scenarios, tmp_path: Path, stage: int, dtype: str, world: int) -> None:
    check(scenarios, tmp_path, "zero", world, stage=stage, dtype=dtype)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["batch_norm", "two_optimizers", "scaler", "kept_gradients", "accumulated"])
def test_traits(scenarios: Scenarios, tmp_path: Path, name: str, world: int) -> None:
    check(scenarios, tmp_path, name, world, commits=4)


@pytest.mark.parametrize("name", ["max_norm", "momentum_encoder"])
def test_the_audit_finds_what_changes_outside_the_step(scenarios: Scenarios, tmp_path: Path, name: str) -> None:
    _, agent = interrupted(scenarios, tmp_path, name, 2, {}, commits=2)
    reasons = {message.reason for _, message in agent.of_kind(Abandoned)}  # type: ignore[attr-defined]
    found = "model/table.weight" if name == "max_norm" else "model/target."
    assert any(reason.startswith(found) and "outside an optimizer step" in reason for reason in reasons)
    (tmp_path / "resume").mkdir()
    check(scenarios, tmp_path / "resume", name, 2, commits=2)


def test_frozen_parameters_under_zero(scenarios: Scenarios, tmp_path: Path) -> None:
    check(scenarios, tmp_path, "zero", 2, stage=3, freeze=True)


@pytest.mark.parametrize("stage", [1, 2])
def test_frozen_parameters_under_the_other_stages(scenarios: Scenarios, tmp_path: Path, stage: int) -> None:
    check(scenarios, tmp_path, "zero", 2, stage=stage, dtype="bf16", freeze=True, accumulate=1)


@pytest.mark.parametrize("stage", [2, 3])
def test_parameters_that_no_group_holds_under_zero(scenarios: Scenarios, tmp_path: Path, stage: int) -> None:
    check(scenarios, tmp_path, "zero", 2, stage=stage, leave=True)


@pytest.mark.long
@pytest.mark.timeout(600)  # DeepSpeed compiles the optimizer when a test first uses it
@pytest.mark.parametrize("stage", [2, 3])
def test_zero_with_the_optimizer_in_host_memory(
    scenarios: Scenarios, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    from deepspeed.ops.op_builder import CPUAdamBuilder

    # Compile it where the ranks look for it, and with their ninja: another version would compile it again, which takes
    # longer than the test waits for the ranks.
    environment = node_environment(os.environ, "")
    for name in ("TORCH_EXTENSIONS_DIR", "PATH"):
        monkeypatch.setenv(name, environment[name])
    CPUAdamBuilder().load()
    check(scenarios, tmp_path, "zero", 2, stage=stage, offload=True)


# The run resumes once in the middle of an epoch of four batches, and once at its end.
@pytest.mark.long(keep=8)
@pytest.mark.parametrize("first", [3, 4])
@pytest.mark.parametrize(
    ("kind", "workers", "persistent"),
    [
        ("plain", 0, False),
        ("plain", 2, False),
        ("plain", 2, True),
        ("random", 0, False),
        ("random", 2, False),
        ("random", 2, True),
        ("generator", 0, False),
        ("generator", 2, False),
        ("stateful", 0, False),
        ("stateful", 2, False),
        ("iterable", 0, False),
        ("list", 0, False),
        ("positioned", 0, False),
        ("positioned", 2, False),
        ("files", 0, False),
        ("files", 2, True),
        ("seeded", 2, False),
        ("streaming", 0, False),
        ("streaming", 2, False),
    ],
)
def test_data(scenarios: Scenarios, tmp_path: Path, kind: str, workers: int, persistent: bool, first: int) -> None:
    options: dict[str, Any] = {"kind": kind, "workers": workers, "persistent": persistent}
    check(scenarios, tmp_path, "data", 2, first=first, lead=1, **options)


def test_one_rank_that_cannot_restore_holds_back_all(scenarios: Scenarios, tmp_path: Path) -> None:
    base, agent = interrupted(scenarios, tmp_path, "plain", 2, {})
    with FakeAgent(tmp_path, 2, 2, base_step=base, base_slots={0: agent.sealed[0, base]}) as second:
        ranks = scenarios.launch("plain", 2, tmp_path, until=base + 1, agent=second)
        assert ranks.wait(until_one_fails=False) == [1, 1], ranks.logs()
        assert "another rank cannot restore its shard" in ranks.log(0)
        assert "no slot that holds it" in ranks.log(1)
        second.wait_for(lambda: len(second.faults()) == 2)
