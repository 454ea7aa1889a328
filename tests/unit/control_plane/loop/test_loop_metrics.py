"""Tests the metrics that the loops record about their own work."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from control_plane.core.observed.nodes import Cause
from control_plane.core.states import JobState
from control_plane.db.leases import Leaser
from control_plane.loop.loop_metrics import PHASES, LoopMetrics
from everstep.protocol.ids import RunId
from tests.sim.world import FLEET, World


class Scrape:
    """Reads the loops' metrics in the text form that Prometheus scrapes."""

    def __init__(self, loop_metrics: LoopMetrics) -> None:
        self._registry = CollectorRegistry()
        for collector in loop_metrics.collectors:
            self._registry.register(collector)

    def __call__(self, name: str, **labels: str) -> float:
        value = self._registry.get_sample_value(f"everstep_{name}", labels)
        assert value is not None, f"there is no {name} {labels}"
        return value


def scrape(world: World) -> Scrape:
    return Scrape(world.context.loop_metrics)


def take(world: World, kind: str, key: str) -> None:
    """Let another server claim the lease of a job or a fleet."""
    with world.database.write() as session:
        assert Leaser("another", 1.0, world.monotonic).claim(session, kind, key, at_once=True) is not None  # type: ignore[arg-type]


async def test_a_recovery_is_counted_once_by_phase_with_what_its_incident_says(world: World) -> None:
    world.submit()
    await world.running()
    await world.train(10)
    loop_metrics = scrape(world)
    world.terminate(world.team()[1])
    await world.until(lambda: world.job().state == JobState.RUNNING and world.job().generation == 2)
    assert loop_metrics("recovery_phase_seconds_count", phase="rework") == 0, "it is not over"
    await world.train(3)
    for _ in range(3):
        await world.tick()
    (incident,) = world.incidents()
    assert incident.phase == "closed"
    for phase in PHASES:
        assert loop_metrics("recovery_phase_seconds_count", phase=phase) == 1
        assert loop_metrics("recovery_phase_seconds_sum", phase=phase) == pytest.approx(
            getattr(incident, f"{phase}_seconds")
        )


async def test_what_was_no_failure_is_no_recovery(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cause, "is_failure", property(lambda _: False))
    world.submit()
    await world.running()
    await world.train(10)
    world.kill_rank(world.team()[2])
    await world.until(lambda: world.job().state == JobState.RUNNING and world.job().generation == 2)
    await world.train(3)
    await world.tick()
    assert world.incidents()[0].phase == "closed"
    assert scrape(world)("recovery_phase_seconds_count", phase="detect") == 0


async def test_passes_are_counted_with_the_time_they_took(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    run = world.submit()
    await world.running()
    loop_metrics = scrape(world)
    fleets, jobs = (loop_metrics("reconcile_seconds_count", loop=loop) for loop in ("fleet", "job"))
    took = loop_metrics("reconcile_seconds_sum", loop="job")
    read_job = world.runner.observer.read_job

    def slow(of: RunId, *more: Any):
        world.now += timedelta(seconds=0.25)
        return read_job(of, *more)

    monkeypatch.setattr(world.runner.observer, "read_job", slow)
    await world.runner.job_loop.make_pass(run)
    await world.runner.fleet_loop.make_pass(FLEET)
    assert loop_metrics("reconcile_seconds_count", loop="job") == jobs + 1
    assert loop_metrics("reconcile_seconds_sum", loop="job") == pytest.approx(took + 0.25)
    assert loop_metrics("reconcile_seconds_count", loop="fleet") == fleets + 1


async def test_a_pass_that_comes_too_late_is_counted_and_its_lease_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.submit()
    await world.running()
    loop_metrics = scrape(world)
    read_job, passes = world.runner.observer.read_job, loop_metrics("reconcile_seconds_count", loop="job")

    def overtaken(of: RunId, *more: Any):
        stored = read_job(of, *more)
        take(world, "job", of)
        return stored

    monkeypatch.setattr(world.runner.observer, "read_job", overtaken)
    world.kill_rank(world.team()[0])
    generation = world.job().generation
    await world.runner.job_loop.sweep()
    await world.runner.job_loop.idle()
    assert (
        loop_metrics("reconcile_stale_applies_total", loop="job"),
        loop_metrics("lease_lost_total", kind="job"),
    ) == (1, 1)
    assert loop_metrics("reconcile_seconds_count", loop="job") == passes + 1, "it took its time, too"
    assert world.job().generation == generation, "nothing of it was stored"
    assert (
        loop_metrics("reconcile_stale_applies_total", loop="fleet"),
        loop_metrics("lease_lost_total", kind="fleet"),
    ) == (0, 0)


async def test_a_lease_that_another_server_has_when_it_is_renewed_is_counted_once(world: World) -> None:
    world.submit()
    await world.running()
    loop_metrics = scrape(world)
    take(world, "fleet", FLEET)
    for _ in range(20):
        world.now += timedelta(seconds=0.2)
        with world.database.write() as session:  # the other server renews its lease
            Leaser("another", 1.0, world.monotonic).claim(session, "fleet", FLEET)
        await world.runner.fleet_loop.sweep()
    assert (
        loop_metrics("lease_lost_total", kind="fleet"),
        loop_metrics("reconcile_stale_applies_total", loop="fleet"),
    ) == (1, 0)


async def test_a_lease_that_is_let_go_was_not_lost(world: World) -> None:
    world.submit()
    await world.running()
    world.finish()
    await world.until(lambda: world.job().state == JobState.COMPLETED)
    await world.tick()
    world.runner.job_leases.release_all()
    world.runner.fleet_leases.release_all()
    assert [scrape(world)("lease_lost_total", kind=kind) for kind in ("job", "fleet")] == [0, 0]
