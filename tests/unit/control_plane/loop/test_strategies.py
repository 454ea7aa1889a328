"""Runs the real loops on jobs with each checkpoint strategy. Tests their plans and restores."""

from __future__ import annotations

from pathlib import Path

import pytest

from control_plane.core.job.ending import PAUSE_PATIENCE_TIMES
from control_plane.core.states import JobState
from control_plane.core.strategies import STRATEGIES, Strategy, StrategySchedule, completed
from everstep.protocol.agent_messages import FaultCode, NodeFault, NoticeKind, TakeCheckpoint
from everstep.protocol.plan import Snapshots
from tests.unit.control_plane.loop.training import TICK_SECONDS, Training
from tests.unit.control_plane.loop.world import World


@pytest.fixture
def world(tmp_path: Path):
    made = World(tmp_path, nodes=2, spares=0, max_size=2)
    yield made
    made.close()


@pytest.fixture
def spared(tmp_path: Path):
    """Yield a simulated cluster whose fleet has a spare for a job of two nodes."""
    made = World(tmp_path, nodes=2, spares=1, max_size=4)
    yield made
    made.close()


async def trained(world: World, strategy: Strategy, **changes: object) -> None:
    """Train a job of two nodes for 8 steps. Step 5 is stored, unless the strategy stores nothing."""
    schedule = completed(strategy, StrategySchedule())
    world.submit(
        nodes=2,
        copies=2 if strategy is Strategy.EVERSTEP else 1,
        checkpoint_strategy=strategy,
        checkpoint_every_steps=schedule.every_steps,
        checkpoint_interval_seconds=schedule.interval_seconds,
        checkpoint_max_overhead=schedule.max_overhead,
        **changes,
    )
    await world.running()
    await world.train(5)
    if strategy is not Strategy.NONE:
        await world.upload(5)
    await world.train(3)


@pytest.mark.parametrize(
    ("strategy", "base"),
    [
        (Strategy.EVERSTEP, 8),
        (Strategy.NONE, 0),
        (Strategy.STRAWMAN, 5),
        (Strategy.HIGH_FREQ, 5),
        (Strategy.CHECK_FREQ, 5),
    ],
)
async def test_after_a_failure_only_everstep_restores_from_memory(world: World, strategy: Strategy, base: int) -> None:
    await trained(world, strategy)
    world.kill_rank(world.team()[0])
    await world.until(lambda: world.job().generation == 2 and world.job().state == JobState.RUNNING)
    plan = world.plan()
    assert plan.base_step == base
    kinds = {sources[0].kind for sources in (rank.sources for rank in plan.ranks) if sources}
    assert kinds == {Strategy.EVERSTEP: {"local"}, Strategy.NONE: set()}.get(strategy, {"s3"})
    (incident,) = world.incidents()
    assert incident.from_step == base


@pytest.mark.parametrize("strategy", Strategy)
async def test_the_plan_contains_the_rules_of_the_strategy(world: World, strategy: Strategy) -> None:
    await trained(world, strategy)
    plan, rules = world.plan(), STRATEGIES[strategy]
    assert plan.checkpoint.snapshots is rules.snapshots
    assert plan.checkpoint.is_blocking is rules.is_blocking
    assert (plan.checkpoint.snapshots is Snapshots.NEVER) == (strategy is Strategy.NONE)
    assert {len(rank.holders) for rank in plan.ranks} == {2 if strategy is Strategy.EVERSTEP else 1}


@pytest.mark.parametrize("strategy", [Strategy.NONE, Strategy.STRAWMAN])
async def test_a_strategy_without_memory_does_not_wait_for_the_memory_of_a_silent_node(
    spared: World, strategy: Strategy
) -> None:
    world = spared
    await trained(world, strategy)
    lost, other = world.team()
    world.silence(lost)
    world.kill_rank(other)
    await world.until(lambda: world.job().state == JobState.PREPARING)
    began = world.now
    await world.until(lambda: world.job().generation == 2 and world.job().state == JobState.RUNNING)
    assert lost.node_id not in {node.node_id for node in world.plan().nodes}
    waited = (world.now - began).total_seconds()
    assert world.timeouts.prepare_deadline_seconds < waited < world.timeouts.blind_wait_seconds / 2


async def train_until_stop(world: World) -> int:
    """Train until the control plane requests an agreed stop. Return the step after which all ranks end."""
    world.is_stopped = False
    for _ in range(60):
        await world.train(1)
        if world.is_stopped:
            world.finish()
            await world.tick()
            return world.job().boundary
    raise AssertionError(world.job().reason)


async def test_a_job_that_restores_from_s3_grows_only_once_its_last_step_is_a_checkpoint(spared: World) -> None:
    spared.operator.capacity = 2
    await trained(spared, Strategy.STRAWMAN, max_node_count=3)
    spared.operator.capacity = None
    last = await train_until_stop(spared)
    for _ in range(20):
        await spared.tick()
    assert (spared.job().generation, spared.job().committed_step) == (1, last)
    assert spared.job().reason.endswith("waits for its checkpoint")
    await spared.upload(last)
    await spared.until(lambda: spared.job().generation == 2 and spared.job().state == JobState.RUNNING)
    assert (len(spared.plan().nodes), spared.plan().base_step) == (3, last)


async def test_a_job_that_restores_from_s3_leaves_a_node_only_once_its_last_step_is_a_checkpoint(
    spared: World,
) -> None:
    await trained(spared, Strategy.CHECK_FREQ)
    left = spared.team()[1]
    left.node_faults = (NodeFault(code=FaultCode.GPU_ECC, message="rows are to be remapped", is_permanent=False),)
    last = await train_until_stop(spared)
    for _ in range(100):
        await spared.tick()
    assert (spared.job().generation, spared.job().committed_step) == (1, last)
    await spared.upload(last)
    await spared.until(lambda: spared.job().generation == 2 and spared.job().state == JobState.RUNNING)
    assert spared.plan().base_step == last
    assert left.node_id not in {node.node_id for node in spared.plan().nodes}


async def test_a_job_that_restores_from_s3_grows_without_its_last_step_if_the_upload_takes_too_long(
    spared: World,
) -> None:
    spared.operator.capacity = 2
    await trained(spared, Strategy.STRAWMAN, max_node_count=3)
    spared.operator.capacity = None
    await train_until_stop(spared)
    patience = int(PAUSE_PATIENCE_TIMES * spared.timeouts.blind_wait_seconds)
    for _ in range(patience // 5 + 2):
        await spared.tick(5.0)
    await spared.until(lambda: spared.job().generation == 2 and spared.job().state == JobState.RUNNING)
    assert spared.plan().base_step == 5


async def test_a_notice_makes_a_checkpoint_due_also_if_only_checkpoints_are_committed(world: World) -> None:
    await trained(world, Strategy.CHECK_FREQ)
    world.announce(world.team()[1], NoticeKind.SPOT_INTERRUPTION, 300.0)
    await world.tick()
    boundary = world.job().boundary
    await world.tick()
    wanted = {message.step for _, message in world.said if isinstance(message, TakeCheckpoint)}
    assert wanted == {boundary + 1}


async def training(world: World, strategy: Strategy, **options: float) -> Training:
    """Return a training that follows the plan which the real loops made for a job with this strategy."""
    await trained(world, strategy)
    return Training(world.plan(), **options)  # type: ignore[arg-type]


async def test_strawman_stores_one_checkpoint_each_three_hours_and_waits_for_it(world: World) -> None:
    run = await training(world, Strategy.STRAWMAN, upload_seconds=600)
    run.train(10 * 3600)
    assert [round(at / 3600) for at, _ in run.uploads] == [3, 6, 9]
    assert run.intervals == pytest.approx([3 * 3600] * 2, abs=60)
    assert run.waited_seconds == pytest.approx(3 * 600, abs=60)
    assert run.steps == pytest.approx((10 * 3600 - run.waited_seconds) / TICK_SECONDS), "an upload stops all steps"


async def test_highfreq_stores_one_checkpoint_after_the_other_and_waits_for_each(world: World) -> None:
    run = await training(world, Strategy.HIGH_FREQ, upload_seconds=600)
    run.train(10 * 3600)
    assert 50 <= len(run.uploads) <= 60
    assert all(600 <= each <= 690 for each in run.intervals)
    assert run.waited_seconds >= 600 * (len(run.uploads) - 1)


@pytest.mark.parametrize("slowed", [1.25, 2.0])
async def test_checkfreq_keeps_training_and_spaces_uploads_by_their_measured_cost(world: World, slowed: float) -> None:
    upload, bound, seconds = 600, 0.05, 30 * 3600
    run = await training(world, Strategy.CHECK_FREQ, upload_seconds=upload, slowed=slowed)
    run.train(seconds)
    cost = upload * (1 - 1 / slowed)
    interval = max(upload, cost * (1 + bound) / bound)
    assert run.waited_seconds == 0
    assert run.intervals[-5:] == pytest.approx([interval] * 5, rel=0.1)
    assert len(run.uploads) == pytest.approx(seconds / interval, rel=0.2)
    added = seconds / TICK_SECONDS - run.steps
    assert added / run.steps < 1.1 * bound, "all uploads together cost at most the bound"


async def test_none_stores_nothing_and_never_waits(world: World) -> None:
    run = await training(world, Strategy.NONE, upload_seconds=600)
    run.train(10 * 3600)
    assert (run.uploads, run.waited_seconds, run.steps) == ([], 0, 3600)
