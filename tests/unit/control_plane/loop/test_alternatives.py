"""A job that names several fleets starts in the first fleet with capacity for all of its nodes."""

from __future__ import annotations

from typing import Any

import pytest

from control_plane.core.actions import Decision
from control_plane.core.observed.jobs import JobObserved
from control_plane.core.states import JobState
from control_plane.db import fleets
from control_plane.db.leases import Lease
from control_plane.loop.decision_store import DecisionStore
from control_plane.loop.observer import StoredJob
from everstep.protocol.ids import FleetName
from tests.sim.world import FLEET, World

OTHER = FleetName("other")
ZONES = {FLEET: "us-east-1a", OTHER: "us-east-1b"}


def two_fleets(world: World) -> None:
    world.wish(min_node_count=0, spare_count=0)
    world.add_fleet(OTHER, "other-group", ZONES[OTHER], nodes=0)


@pytest.mark.covers("CreateTrainingJob.AlternativeFleetNames")
async def test_a_gang_without_capacity_starts_in_the_next_fleet_that_it_names(world: World) -> None:
    two_fleets(world)
    world.operator.exhausted_zones = {ZONES[FLEET]}
    run = world.submit(nodes=2, fleet_names=[FLEET, OTHER])
    await world.until(lambda: world.job().fleet_name == OTHER)
    assert any("do not have sufficient" in event and "goes to the fleet other" in event for event in world.events())
    await world.running()
    assert world.job().run_id == run
    await world.train(3)
    assert world.job().fleet_name == OTHER
    # The first fleet keeps no nodes for the job, because the job has moved to another fleet.
    assert world.operator.describe_group(world.groups[FLEET]).desired_count == 0


async def test_fleets_without_capacity_are_asked_ever_more_seldom_until_one_has_some(world: World) -> None:
    two_fleets(world)
    world.operator.exhausted_zones = set(ZONES.values())
    world.submit(nodes=2, fleet_names=[FLEET, OTHER])
    for _ in range(3):
        await world.until(lambda: world.job().fleet_name == OTHER)
        await world.until(lambda: world.job().fleet_name == FLEET)
        assert world.job().state == JobState.QUEUED
        assert "stands aside" in world.job().reason or "every fleet that the job names was asked" in world.job().reason
    waits = [event for event in world.events() if "every fleet that the job names was asked" in event]
    assert ["after 30 s" in waits[0], "after 60 s" in waits[1], "after 120 s" in waits[2]] == [True, True, True]
    world.operator.exhausted_zones = set()
    await world.running()


async def test_a_job_that_has_started_stays_where_its_checkpoints_and_peers_are(world: World) -> None:
    two_fleets(world)
    world.submit(nodes=2, fleet_names=[FLEET, OTHER])
    await world.running()
    await world.train(3)
    world.operator.exhausted_zones = {ZONES[FLEET]}
    world.terminate(world.team()[0])
    await world.until(lambda: world.job().state == JobState.PREPARING)
    for _ in range(20):
        await world.tick()
    assert (world.job().fleet_name, world.job().state) == (FLEET, JobState.PREPARING)
    world.operator.exhausted_zones = set()
    await world.running()


async def test_a_fleet_that_takes_nothing_in_is_passed_over(world: World) -> None:
    two_fleets(world)
    world.add_fleet(FleetName("small"), "small-group", "us-east-1c", nodes=0, max_size=1)
    world.operator.exhausted_zones = {ZONES[FLEET]}
    world.submit(nodes=2, fleet_names=[FLEET, "small", "forgotten", OTHER])
    await world.running()
    assert world.job().fleet_name == OTHER


async def test_a_fleet_that_is_deleted_while_a_job_is_sent_there_does_not_get_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A waiting job is about to move to another fleet, and a user deletes this fleet before the move.

    The job does not move, because it would wait forever in a deleted fleet.
    """
    two_fleets(world)
    world.operator.exhausted_zones = {ZONES[FLEET]}
    world.submit(nodes=2, fleet_names=[FLEET, OTHER])
    apply, seen = DecisionStore.apply_job, []

    def late(
        self: DecisionStore, lease: Lease, stored: StoredJob, observed: JobObserved, decision: Decision, *more: Any
    ) -> bool:
        if decision.fleet == OTHER and not seen:
            with world.database.write() as session:
                fleets.request_delete(session, OTHER, world.now)
        if decision.fleet is not None:
            seen.append(decision.fleet)
        return apply(self, lease, stored, observed, decision, *more)

    monkeypatch.setattr(DecisionStore, "apply_job", late)
    await world.until(lambda: bool(seen))
    for _ in range(50):
        await world.tick()
    assert seen == [OTHER]
    assert world.job().fleet_name == FLEET
    world.operator.exhausted_zones = set()
    await world.running()
