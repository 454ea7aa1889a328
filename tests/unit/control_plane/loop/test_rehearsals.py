"""Runs the real loops on jobs that rehearse their resume, with agents that answer late, twice or never."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from control_plane.api import views
from control_plane.core.actions import Decision
from control_plane.core.observed.jobs import JobObserved
from control_plane.core.observed.rehearsals import NoResult, Rehearsals
from control_plane.core.observed.specs import OnDifference, RehearsalMode
from control_plane.core.rehearsal import REPORT_SECONDS
from control_plane.core.states import JobState
from control_plane.db import events, jobs
from control_plane.db.errors import StaleLease
from control_plane.db.leases import Lease
from control_plane.loop import disposition
from control_plane.loop.decision_store import DecisionStore
from control_plane.loop.memos import rehearsal_of
from control_plane.loop.observer import StoredJob
from everstep.protocol.agent_messages import FaultCode, NodeFault, Rehearse
from everstep.protocol.plan import CHECK_VARIABLE
from everstep.protocol.rehearsals import RehearsalVerdict
from tests.sim.world import World

PROVEN, UNPROVEN, DIFFERS, UNSTABLE, REFUSED = RehearsalVerdict


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path, nodes=2, spares=1)
    yield made
    made.close()


def orders(world: World) -> list[tuple[str, int, int, int]]:
    """Return the orders that agents received: node, generation, number and steps, each once."""
    told = [
        (node_id, message.generation, message.number, message.steps)
        for node_id, message in world.said
        if isinstance(message, Rehearse)
    ]
    return list(dict.fromkeys(told))


def told(world: World) -> Rehearsals:
    return rehearsal_of(world.job())


def story(world: World) -> list[str]:
    """Return the types of the job's events about rehearsals, oldest first."""
    with world.database.read() as session:
        found = events.page(session, events.EventFilter(job_name="gpt"), limit=1_000)
    return [each.type for each in found if "Rehears" in each.type or "Resume" in each.type]


def ask(world: World) -> None:
    with world.database.write() as session:
        jobs.request_rehearsal(session, world.job().run_id, world.now)


async def train_for(world: World, seconds: float) -> None:
    for _ in range(round(2 * seconds)):
        await world.train(1)


async def rehearsing(world: World, **spec: object) -> None:
    """Let a job train until its coordinator has an order to rehearse."""
    world.submit(nodes=2, **{"rehearsal_mode": RehearsalMode.ON, **spec})
    await world.running()
    await world.train(21)
    await world.until(lambda: world.agents[world.plan().coordinator].rehearsal_number > 0)
    await world.tick()


async def test_a_job_is_ordered_once_and_stores_the_result_of_all_ranks(world: World) -> None:
    await rehearsing(world, rehearsal_steps=7)
    assert orders(world) == [(world.plan().coordinator, 1, 1, 7)]
    world.begin_rehearsal()
    await world.tick()
    assert "repeats steps" in world.job().reason
    world.end_rehearsal(PROVEN, None)
    await world.tick()
    assert (told(world).is_open, story(world)) == (True, [])
    world.end_rehearsal(PROVEN, PROVEN, seconds=2.0)
    world.said.clear()
    await world.train(30)
    assert story(world) == ["ResumeProven"]
    result = told(world).result
    assert result is not None
    assert (result.verdict, result.steps, result.seconds, result.rank) == (PROVEN, 5, 2.0, None)
    for _ in range(5):
        await world.train(30)
    assert orders(world) == [], "a job that does not change rehearses only if a person asks"


async def test_a_job_that_changes_rehearses_again_within_its_limit(world: World) -> None:
    await rehearsing(world)
    for number in (1, 2, 3):
        world.begin_rehearsal()
        await world.tick()
        world.end_rehearsal(PROVEN, PROVEN)
        await train_for(world, 2)
        assert [each[2] for each in orders(world)] == list(range(1, number + 1))
        world.team()[1].resume_revision += 1
        await train_for(world, 2)
    assert story(world) == ["ResumeProven"] * 3
    assert [each[2] for each in orders(world)] == [1, 2, 3]
    ask(world)
    await train_for(world, 2)
    assert [each[2] for each in orders(world)] == [1, 2, 3, 4]


async def test_a_late_coordinator_receives_the_same_order_until_it_has_taken_it(world: World) -> None:
    world.submit(nodes=2, rehearsal_mode=RehearsalMode.ON)
    await world.running()
    coordinator = world.agents[world.plan().coordinator]
    coordinator.is_slow_to_rehearse = True
    await world.train(21)
    for _ in range(10):
        await world.train(1)
    sent = [message for _, message in world.said if isinstance(message, Rehearse)]
    assert len(sent) > 5
    assert orders(world) == [(coordinator.node_id, 1, 1, 5)]
    coordinator.is_slow_to_rehearse = False
    await world.train(1)
    await world.train(1)
    world.said.clear()
    await world.train(5)
    assert orders(world) == []
    coordinator.rehearsal_number = 0  # Its agent has restarted.
    await world.train(1)
    await world.train(1)
    assert orders(world) == [(coordinator.node_id, 1, 1, 5)]


async def test_no_job_rehearses_while_an_agent_of_an_earlier_release_forwards_its_messages(world: World) -> None:
    world.submit(nodes=2, rehearsal_mode=RehearsalMode.ON)
    await world.running()
    coordinator = world.agents[world.plan().coordinator]
    inner = next(world.agents[node.node_id] for node in world.plan().nodes if node.node_id != coordinator.node_id)
    inner.protocol_minor = Rehearse.since_minor - 1
    inner.connect()
    await world.train(21)
    await train_for(world, 5)
    assert (orders(world), story(world), told(world).number) == ([], [], 0)
    ask(world)
    await train_for(world, 2)
    result = told(world).result
    assert result is not None
    assert (result.verdict, result.rank) == (REFUSED, min(inner.boundary))
    assert (result.unanswered, result.node_id) == (NoResult.EARLIER_AGENT, inner.node_id)
    assert (orders(world), story(world)) == ([], ["RehearsalRefused"])
    inner.protocol_minor = Rehearse.since_minor
    inner.connect()
    ask(world)
    await train_for(world, 2)
    assert orders(world) == [(coordinator.node_id, 1, 1, 5)]


async def test_a_request_waits_for_an_agent_that_is_not_connected(world: World) -> None:
    world.submit(nodes=2, rehearsal_mode=RehearsalMode.AUTO)
    await world.running()
    await world.train(5)
    coordinator = world.plan().coordinator
    inner = next(world.agents[node.node_id] for node in world.plan().nodes if node.node_id != coordinator)
    inner.disconnect()
    ask(world)
    await world.train(1)
    assert (orders(world), told(world).result) == ([], None)
    inner.connect()
    await train_for(world, 2)
    assert orders(world) == [(coordinator, 1, 1, 5)]


async def test_an_order_that_is_not_stored_reaches_no_agent(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    apply_job = DecisionStore.apply_job

    def fails(
        self: DecisionStore, lease: Lease, stored: StoredJob, observed: JobObserved, decision: Decision, *rest: Any
    ):
        if decision.record.rehearsal.is_open:
            raise StaleLease("another server took the lease over")
        return apply_job(self, lease, stored, observed, decision, *rest)

    monkeypatch.setattr(DecisionStore, "apply_job", fails)
    world.submit(nodes=2, rehearsal_mode=RehearsalMode.ON)
    await world.running()
    for _ in range(5):
        await world.train(10)
    assert (orders(world), told(world).number) == ([], 0)
    monkeypatch.undo()
    await world.until(lambda: bool(orders(world)))


async def test_a_restarted_server_repeats_the_order_and_stores_one_result(world: World) -> None:
    world.submit(nodes=2, rehearsal_mode=RehearsalMode.ON)
    await world.running()
    world.agents[world.plan().coordinator].is_slow_to_rehearse = True
    await world.train(21)
    await world.until(lambda: bool(orders(world)))
    world.start_server()
    await world.until(lambda: world.agents[world.plan().coordinator].connection is not None)
    world.said.clear()
    await world.until(lambda: bool(orders(world)))
    assert [number for _, _, number, _ in orders(world)] == [1]
    world.end_rehearsal(PROVEN, PROVEN)
    await world.tick()
    world.start_server()
    for _ in range(20):
        await world.tick()
    assert story(world) == ["ResumeProven"]


async def test_a_generation_that_ends_in_a_rehearsal_lets_the_job_rehearse_once_more(world: World) -> None:
    await rehearsing(world)
    for number in (1, 2, 3):
        world.begin_rehearsal()
        await world.tick()
        world.kill_rank(world.team()[0])
        world.end_rehearsal()
        await world.until(lambda number=number: world.job().generation == number + 1)
        await world.running()
        for _ in range(8):
            await world.train(10)
    assert [(generation, number) for _, generation, number, _ in orders(world)] == [(1, 1), (2, 2)]
    result = told(world).result
    assert result is not None
    assert (told(world).unanswered_count, result.verdict, result.rank) == (2, REFUSED, None)
    assert story(world) == ["RehearsalRefused"]
    world.said.clear()
    ask(world)
    await world.train(1)
    await world.train(1)
    assert [(generation, number) for _, generation, number, _ in orders(world)] == [(4, 3)]


async def test_an_order_that_the_ranks_never_answer_is_repeated_once(world: World) -> None:
    """Ranks of an older release answer no announcement, so the coordinator ends the order."""
    await rehearsing(world)
    await train_for(world, 2 * REPORT_SECONDS)
    assert told(world).is_open, "the rehearsal is announced and not over"
    for _ in range(2):
        world.end_rehearsal(PROVEN, None)
        await train_for(world, REPORT_SECONDS)
        assert told(world).is_open
        await train_for(world, 5)
    world.end_rehearsal(None, None)
    await train_for(world, 2 * REPORT_SECONDS)
    assert [number for _, _, number, _ in orders(world)] == [1, 2]
    result = told(world).result
    assert result is not None
    assert (told(world).unanswered_count, told(world).is_open, result.verdict) == (2, False, REFUSED)
    assert result.unanswered is NoResult.NOT_REPORTED


async def test_a_job_that_ends_during_its_rehearsal_says_so(world: World) -> None:
    await rehearsing(world)
    world.begin_rehearsal()
    await world.tick()
    with world.database.write() as session:
        jobs.request_stop(session, world.job().run_id, world.now)
    await world.tick()
    world.end_rehearsal()
    await world.until(lambda: world.job().ended_at is not None)
    result = told(world).result
    assert result is not None
    assert (told(world).is_open, result.verdict, result.rank) == (False, REFUSED, None)
    assert story(world) == ["RehearsalRefused"]


async def test_a_person_repeats_a_rehearsal(world: World) -> None:
    await rehearsing(world)
    ask(world)
    await world.tick()
    world.end_rehearsal(REFUSED)
    await world.tick()
    for _ in range(5):
        await world.train(5)
    assert story(world) == ["RehearsalRefused"]
    assert len(orders(world)) == 1, "the request during the rehearsal is served by it, and a refusal is not repeated"
    ask(world)
    await world.train(10)
    await world.train(1)
    assert [number for _, _, number, _ in orders(world)] == [1, 2]
    assert told(world).is_open, "the earlier reports do not answer the new order"
    world.end_rehearsal(PROVEN, PROVEN)
    await world.tick()
    assert story(world) == ["RehearsalRefused", "ResumeProven"]


async def test_a_difference_is_an_event_a_condition_and_a_duty_until_it_is_proven(world: World) -> None:
    await rehearsing(world)
    world.end_rehearsal(PROVEN, DIFFERS)
    await world.tick()
    assert story(world) == ["ResumeDiffers"]
    (condition,) = views.job_conditions(world.job(), (), {}, ())
    assert (condition.type, condition.node_id) == ("ResumeDiffers", None)
    assert (
        condition.message == "A restart from step 16 does not repeat its steps: rank 1: the loss differs. Register it."
    )
    assert world.job().state == JobState.RUNNING
    ask(world)
    await world.train(10)
    await world.train(1)
    world.end_rehearsal(PROVEN, PROVEN)
    await world.tick()
    assert views.job_conditions(world.job(), (), {}, ()) == []


async def test_lost_values_are_an_event_and_a_condition_of_their_own(world: World) -> None:
    await rehearsing(world)
    world.end_rehearsal(PROVEN, UNPROVEN)
    await world.tick()
    assert story(world) == ["ResumeUnproven"]
    (condition,) = views.job_conditions(world.job(), (), {}, ())
    assert condition.type == "ResumeUnproven"
    assert condition.message.startswith("A restart from step 16 loses values of the script: rank 1: ")


@pytest.mark.parametrize("verdict", [DIFFERS, UNSTABLE])
async def test_a_difference_stops_a_job_that_asks_for_it_with_its_last_step_stored(
    world: World, verdict: RehearsalVerdict
) -> None:
    await rehearsing(world, rehearsal_on_difference=OnDifference.STOP)
    world.end_rehearsal(verdict, verdict)
    await world.until(lambda: world.is_stopped)
    world.finish()
    await world.tick()
    await world.upload(world.job().committed_step)
    await world.until(lambda: world.job().state == JobState.STOPPED)
    assert "rank 0: the loss differs (Rehearsal.OnDifference is Stop)" in world.job().reason
    assert [each.state for each in world.checkpoints()] == ["complete"]


async def test_the_time_of_a_rehearsal_has_its_own_bucket(world: World) -> None:
    await rehearsing(world)
    world.begin_rehearsal()
    for _ in range(300):
        await world.tick()
    assert "repeats steps" in world.job().reason, "the script does not wait on purpose"
    world.end_rehearsal(PROVEN, PROVEN, seconds=150.0)
    await world.tick()
    await world.train(1)
    job = world.job()
    assert job.accounting["rehearsal"] == pytest.approx(150e6, abs=1.1e6)
    assert job.accounted_until is not None
    assert sum(job.accounting.values()) == (job.accounted_until - job.created_at) // timedelta(microseconds=1)


async def test_a_long_rehearsal_is_neither_a_hang_nor_a_loss_of_a_faulty_node(world: World) -> None:
    """A lost GPU makes the second node impaired. The job would give the node up if training completed no step."""
    await rehearsing(world)
    world.begin_rehearsal(limit_seconds=600.0)
    world.team()[1].node_faults = (NodeFault(code=FaultCode.GPU_LOST, message="x", is_permanent=False),)
    seconds = world.timeouts.exclude_seconds + 120.0
    for _ in range(round(2 * seconds)):
        await world.tick()
    assert (world.job().state, world.job().generation) == (JobState.RUNNING, 1)
    assert world.job().accounting.get("stall", 0) == 0
    with world.database.read() as session:
        agents = world.registry.connected()
        found = disposition.of_jobs(session, [world.job()], agents, world.now.timestamp())[world.job().run_id]
    assert found.duty.kind != "Stalled"


async def test_a_rehearsal_beyond_its_limit_is_a_hang(world: World) -> None:
    await rehearsing(world)
    world.begin_rehearsal(limit_seconds=60.0)
    await world.until(lambda: "made no progress in rehearse" in world.job().reason)
    await world.until(lambda: world.job().generation == 2)


async def test_a_job_that_moves_stops_or_takes_no_orders_does_not_rehearse(world: World) -> None:
    world.submit(nodes=2, rehearsal_mode=RehearsalMode.ON, environment={CHECK_VARIABLE: "8"})
    await world.running()
    for _ in range(10):
        await world.train(10)
    with world.database.write() as session:
        jobs.request_stop(session, world.job().run_id, world.now)
    await world.train(1)
    assert orders(world) == []


async def test_a_job_rehearses_only_after_a_recovery(world: World) -> None:
    """The ranks had finished 30 more steps than their agents reported. The job first repeats these steps."""
    world.submit(nodes=2, rehearsal_mode=RehearsalMode.ON, rehearsal_at_step=13)
    await world.running()
    await world.train(12)
    for agent in world.team():
        agent.unheard = 30
    world.kill_rank(world.team()[0])
    await world.until(lambda: world.job().generation == 2)
    await world.running()
    for _ in range(5):
        await world.train(5)
    assert world.job().committed_step > 30
    assert orders(world) == []
    for _ in range(5):
        await world.train(5)
    assert [(generation, number) for _, generation, number, _ in orders(world)] == [(2, 1)]


async def test_a_stop_waits_for_the_end_of_a_rehearsal(world: World) -> None:
    await rehearsing(world)
    world.begin_rehearsal(limit_seconds=600.0)
    await world.tick()
    with world.database.write() as session:
        jobs.request_stop(session, world.job().run_id, world.now)
    for _ in range(round(2 * world.timeouts.blind_wait_seconds) + 60):
        await world.tick()
    assert not any(agent.exits for agent in world.team())
    world.end_rehearsal(PROVEN, PROVEN)
    world.finish()
    await world.until(lambda: world.job().state == JobState.STOPPED)
    assert story(world) == ["ResumeProven"]


async def test_an_agent_of_an_older_release_receives_no_order(world: World) -> None:
    world.submit(nodes=2, rehearsal_mode=RehearsalMode.ON)
    await world.running()
    for agent in world.team():
        assert agent.connection is not None
        agent.connection.protocol_minor = 0
    for _ in range(5):
        await world.train(10)
    assert (orders(world), told(world).number) == ([], 1)


async def test_auto_rehearses_on_a_local_cluster_and_not_where_it_costs_too_much(world: World) -> None:
    world.submit(nodes=2)
    await world.running()
    await world.train(30)
    await world.train(30)
    assert orders(world) == []
    world.is_local = True
    world.start_server()
    await world.until(lambda: bool(orders(world)))


async def test_two_servers_give_a_job_one_order_and_store_one_result(world: World) -> None:
    """The first server loses its agents and its leases, and still sweeps after the second server took over."""
    await rehearsing(world)
    first = world.runner
    world.start_server()
    await world.until(lambda: world.runner.job_loop.leases.holds(world.job().run_id))
    world.end_rehearsal(PROVEN, PROVEN)
    await world.until(lambda: not told(world).is_open)
    await first.job_loop.sweep()
    await first.job_loop.idle()
    assert (story(world), told(world).number) == (["ResumeProven"], 1)
