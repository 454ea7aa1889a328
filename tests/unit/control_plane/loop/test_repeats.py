"""A job repeats much training only with consent: it holds its nodes, says what is lost, and waits for a person."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from control_plane.cloud.errors import AccessDenied, CloudError
from control_plane.cloud.objects import ObjectInfo
from control_plane.core.observed.specs import OnTotalLoss
from control_plane.core.observed.steps import HolderState, RepeatedWork
from control_plane.core.states import JobState, NodeState
from control_plane.db import jobs
from control_plane.loop import memos, records
from everstep.protocol.plan import ObjectReference
from tests.sim.world import BUCKET, World


@pytest.fixture
def world(tmp_path: Path):
    made = World(tmp_path, nodes=4, spares=2)
    yield made
    made.close()


LIMIT_MINUTES = 3


async def train(world: World, minutes: int) -> None:
    """Complete ten steps per minute."""
    for _ in range(2 * minutes):
        world.complete_steps(5)
        for _ in range(3):
            await world.tick(10.0)


async def trained(world: World, minutes: int, **changes: object) -> None:
    """Train a job for some minutes. Its only checkpoint is that of step 10, after the first minute."""
    world.submit(**{"max_repeated_minutes": LIMIT_MINUTES, **changes})  # type: ignore[arg-type]
    await world.running()
    await train(world, 1)
    await world.upload(10)
    await train(world, minutes - 1)


def choice(world: World) -> RepeatedWork | None:
    return memos.repeat_choice_of(world.job())


async def waiting(world: World) -> RepeatedWork:
    """Wait until the job asks for a decision, and check that it then stands."""
    await world.until(lambda: (found := choice(world)) is not None and found.listing is not None)
    found, generation = choice(world), world.job().generation
    for _ in range(40):
        await world.tick(5.0)
    assert choice(world) == found
    assert (world.job().state, world.job().generation) == (JobState.PREPARING, generation)
    assert found is not None
    return found


def accept(world: World, step: int) -> None:
    found = choice(world)
    assert found is not None
    with world.database.write() as session:
        jobs.accept_loss(session, world.job().run_id, step=step, after=found.after, now=world.now)


def assigned(world: World) -> int:
    return sum(node.state == NodeState.ASSIGNED for node in world.nodes().values())


async def test_a_job_waits_before_it_repeats_much_training_and_one_consent_continues_it(world: World) -> None:
    await trained(world, 5)
    lost = [agent.node_id for agent in world.team()[:2]]
    for agent in world.team()[:2]:
        world.terminate(agent)
    found = await waiting(world)
    assert (found.base_step, found.newest_step, found.is_stored) == (10, 49, True)
    assert found.seconds == pytest.approx(4 * 60, rel=0.1)
    assert [each.node_id for each in found.holders if each.state is HolderState.ENDED] == lost
    assert assigned(world) == 4, "the job holds its nodes"
    reason = world.job().reason
    assert "only the checkpoint of step 10 can be restored, which repeats 39 steps, about 4 minutes" in reason
    assert f"{lost[0]} has ended, as AWS reports; {lost[1]} has ended" in reason
    assert "everstep jobs accept-loss gpt --from-step 10" in reason
    accept(world, 10)
    await world.until(lambda: world.job().state == JobState.RUNNING)
    assert (world.plan().base_step, choice(world)) == (10, None)


async def test_a_job_repeats_less_than_the_limit_without_a_person(world: World) -> None:
    await trained(world, 3)
    for agent in world.team()[:2]:
        world.terminate(agent)
    await world.until(lambda: world.job().generation == 2 and world.job().state == JobState.RUNNING)
    assert world.plan().base_step == 10


@pytest.mark.parametrize("limit", [{"on_total_loss": OnTotalLoss.RESTART}, {"max_repeated_minutes": 12}])
async def test_a_job_repeats_much_training_with_the_consent_of_its_configuration(
    world: World, limit: dict[str, object]
) -> None:
    await trained(world, 5, **limit)
    for agent in world.team()[:2]:
        world.terminate(agent)
    await world.until(lambda: world.job().generation == 2 and world.job().state == JobState.RUNNING)
    assert world.plan().base_step == 10


MARK, MANIFEST = "issued=1", "gen=1/step=30/manifest.json"


@pytest.mark.parametrize(
    ("keys", "refusal", "is_total", "words"),
    [
        ((MARK,), None, True, "S3 lists no other checkpoint"),
        ((MARK,), AccessDenied("no"), False, "S3 could not be listed"),
        ((), None, False, "S3 could not be listed"),
        ((MARK, MANIFEST), None, False, "S3 lists a checkpoint of step 30 that the job cannot use"),
    ],
)
async def test_a_total_loss_has_two_witnesses(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    keys: tuple[str, ...],
    refusal: CloudError | None,
    is_total: bool,
    words: str,
) -> None:
    """AWS reports that all nodes have ended. The loss is total only if S3 was listed too, and has no checkpoint."""
    if refusal is not None:

        def refuse(*_: object) -> Iterator[ObjectInfo]:
            raise refusal

        monkeypatch.setattr(world.objects, "list", refuse)
    world.submit(max_repeated_minutes=LIMIT_MINUTES)
    prefix = records.job_spec(world.job()).checkpoint_prefix
    for key in keys:
        place = ObjectReference(bucket=BUCKET, key=f"{prefix.key}run={world.job().run_id}/{key}")
        world.objects.put(place, b"")
    await world.running()
    await train(world, 4)
    for agent in world.team():
        world.terminate(agent)
    found = await waiting(world)
    assert (found.base_step, found.is_total) == (0, is_total)
    assert "only the beginning can be restored" in world.job().reason
    assert words in world.job().reason
    accept(world, 0)
    await world.until(lambda: world.job().generation == 2 and world.job().state == JobState.RUNNING)
    assert world.plan().base_step == 0


async def test_a_silent_node_that_may_hold_the_step_is_not_given_up_and_its_return_ends_the_wait(world: World) -> None:
    await trained(world, 5)
    first, partner = world.team()[:2]
    world.silence(partner)
    world.terminate(first)
    found = await waiting(world)
    assert [each.node_id for each in found.holders if each.state is HolderState.SILENT] == [partner.node_id]
    assert world.nodes()[partner.node_id].state == NodeState.ASSIGNED
    partner.is_deaf = False
    world.cut.discard(partner.node_id)
    await world.until(lambda: world.job().generation == 2 and world.job().state == JobState.RUNNING)
    assert world.plan().base_step >= 49
    assert choice(world) is None


async def test_a_consent_is_valid_for_its_step_and_its_recovery_only(world: World) -> None:
    await trained(world, 5)
    for agent in world.team()[:2]:
        world.terminate(agent)
    await waiting(world)
    accept(world, 11)
    await waiting(world)
    accept(world, 10)
    await world.until(lambda: world.job().generation == 2 and world.job().state == JobState.RUNNING)
    await train(world, 10)
    for agent in world.team()[:2]:
        world.terminate(agent)
    found = await waiting(world)
    assert (found.base_step, found.after) == (10, 2)
