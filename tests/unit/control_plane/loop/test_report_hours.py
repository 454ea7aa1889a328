"""The loops store the ledgers of jobs and fleets at full hours, and a report over them has exact figures."""

from __future__ import annotations

from datetime import timedelta

import pytest

from control_plane.core import reports
from control_plane.core.reports import ReportPeriod
from control_plane.core.states import JobState
from control_plane.db import fleets
from control_plane.db import reports as db_reports
from control_plane.db.reports import ReportFilter
from tests.postgresql import BOTH_ENGINES
from tests.sim.world import START, World

pytestmark = pytest.mark.parametrize("engine", BOTH_ENGINES)

SECOND = 1_000_000
HOUR = timedelta(hours=1)


def report(world: World, hours: int = 2) -> reports.Report:
    bounds = reports.bounds(START, START + hours * HOUR, ReportPeriod.HOUR)
    with world.database.read() as session:
        rows = db_reports.read(session, ReportFilter(), bounds)
    return reports.report(
        bounds,
        jobs=rows.jobs,
        fleets=rows.fleets,
        incidents=rows.incidents,
        now=round(world.now.timestamp() * SECOND),
        max_jobs=10,
    )


async def test_both_sides_of_a_full_hour_have_their_own_time(world: World) -> None:
    world.now += timedelta(minutes=59, seconds=44)
    world.submit(nodes=2)
    await world.running()
    while world.now < START + HOUR + timedelta(seconds=3):
        await world.train(1)
    created, job, found = world.job().created_at, world.job(), report(world)
    first, second = (bucket.figures for bucket in found.buckets)
    assert sum(first.spent.values()) == (START + HOUR - created) // timedelta(microseconds=1)
    assert sum(second.spent.values()) == (job.accounted_until - START - HOUR) // timedelta(microseconds=1)
    assert second.spent == {"train": sum(second.spent.values())}
    assert second.node_microseconds == 2 * sum(second.spent.values())
    assert found.total.spent == dict(job.accounting)
    assert found.total.node_microseconds == job.node_microseconds
    with world.database.read() as session:
        fleet = fleets.get(session, "main")
    assert fleet.idle_until >= START + HOUR, "a new hour is charged at once"
    assert first.idle_microseconds["spare"] > 0
    assert found.total.idle_microseconds == {name: amount for name, amount in fleet.idle_microseconds.items() if amount}


async def test_the_time_before_a_detection_belongs_to_the_hour_of_the_failure(world: World) -> None:
    world.now += timedelta(minutes=59, seconds=44)
    world.submit(nodes=2)
    await world.running()
    while world.now < START + HOUR - timedelta(seconds=1):
        await world.train(1)
    world.silence(world.team()[1])
    await world.until(lambda: world.job().state == JobState.RUNNING and world.job().generation == 2)
    await world.train(5)
    await world.until(lambda: world.incidents()[0].closed_at is not None)
    (incident,) = world.incidents()
    assert incident.failed_at < START + HOUR < incident.opened_at
    found = report(world)
    for bucket in found.buckets:
        assert all(amount >= 0 for amount in bucket.figures.spent.values())
    phases = ("detect", "replace", "restore", "rework")
    assert found.buckets[0].figures.spent["detect"] == (START + HOUR - incident.failed_at) // timedelta(microseconds=1)
    lost = sum(found.total.spent.get(phase, 0) for phase in phases)
    assert lost == (incident.closed_at - incident.failed_at) // timedelta(microseconds=1)
