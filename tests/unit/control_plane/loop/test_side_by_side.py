"""The job loop decides about several jobs at the same time.

A *pass* is one decision about one job, from its reads to its writes. The tests show which rows passes share, and what
ends a pass.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import update

from control_plane.core.actions import Decision
from control_plane.core.states import JobState
from control_plane.core.timeouts import grace_seconds
from control_plane.db import jobs
from control_plane.db.models import FleetRow
from control_plane.loop.decision_store import DecisionStore
from control_plane.loop.fleet_rows import FleetRows, SharedRows
from control_plane.loop.job_loop import PASS_LIMIT
from control_plane.loop.observer import Observer, StoredJob
from everstep.protocol.ids import FleetName, RunId
from tests.sim.world import FLEET, World


class Gate:
    """Blocks decisions of the job loop (passes) until a test opens it."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.opened = asyncio.Event()

    async def wait(self) -> None:
        self.reached.set()
        await self.opened.wait()


def hold_passes(world: World, monkeypatch: pytest.MonkeyPatch, *runs: RunId) -> Gate:
    """Block the job loop's decisions about the given jobs (passes) before they read anything."""
    gate, loop = Gate(), world.runner.job_loop
    make_pass = loop.make_pass

    async def gated(run: RunId) -> Decision | None:
        if run in runs:
            await gate.wait()
        return await make_pass(run)

    monkeypatch.setattr(loop, "make_pass", gated)
    return gate


def hold_after_read(world: World, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Block the next pass (decision about a job) after it has read the rows that passes share."""
    gate, get = Gate(), SharedRows.get
    held: list[FleetName] = []

    async def gated(shared: SharedRows, name: FleetName) -> Any:
        rows = await get(shared, name)
        if not held:
            held.append(name)
            await gate.wait()
        return rows

    monkeypatch.setattr(SharedRows, "get", gated)
    return gate


def count_passes(observer: Observer, monkeypatch: pytest.MonkeyPatch) -> list[RunId]:
    passes: list[RunId] = []
    observe_job = observer.observe_job

    def counted(stored: StoredJob, now: float) -> Any:
        passes.append(RunId(stored.job.run_id))
        return observe_job(stored, now)

    monkeypatch.setattr(observer, "observe_job", counted)
    return passes


async def test_a_job_that_waits_does_not_hold_up_the_recovery_of_another(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = world.submit("slow", nodes=2)
    world.submit("other", nodes=2)
    await world.running("slow")
    await world.running("other")
    gate, loop = hold_passes(world, monkeypatch, slow), world.runner.job_loop
    monkeypatch.setattr(loop, "idle", nothing)  # otherwise, the simulated cluster would wait for the slow job
    world.kill_rank(world.team("other")[0])
    world.kill_rank(world.team("slow")[0])
    await world.until(lambda: (world.job("other").state, world.job("other").generation) == (JobState.RUNNING, 2))
    assert (world.job("slow").state, world.job("slow").generation) == (JobState.RUNNING, 1)
    gate.opened.set()
    monkeypatch.undo()
    await world.until(lambda: (world.job("slow").state, world.job("slow").generation) == (JobState.RUNNING, 2))


async def nothing() -> None:
    """Return immediately. Replaces a coroutine that would wait."""


async def test_a_row_that_is_read_slowly_holds_up_its_own_job_only(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = world.submit("slow", nodes=2)
    other = world.submit("other", nodes=2)
    await world.running("slow")
    await world.running("other")
    passes, observer = count_passes(world.runner.observer, monkeypatch), world.runner.observer
    read_job, answers = observer.read_job, threading.Event()

    def read_slowly(run: RunId, *more: Any) -> StoredJob:
        assert run != slow or answers.wait(30)
        return read_job(run, *more)

    monkeypatch.setattr(observer, "read_job", read_slowly)
    with ThreadPoolExecutor(4) as threads:
        asyncio.get_running_loop().set_default_executor(threads)
        while passes.count(other) < 3:
            await world.runner.job_loop.sweep()
        assert slow not in passes
        answers.set()
        await world.runner.job_loop.idle()
        assert slow in passes


async def test_a_wake_up_during_a_pass_makes_another_pass(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    run = world.submit(nodes=2)
    await world.running()
    passes = count_passes(world.runner.observer, monkeypatch)
    gate = hold_after_read(world, monkeypatch)
    sweep = asyncio.create_task(world.runner.job_loop.sweep())
    await gate.reached.wait()
    with world.database.write() as session:
        jobs.request_stop(session, jobs.get(session, "gpt").run_id, world.now)
    await asyncio.gather(sweep, world.runner.job_loop.sweep())
    assert passes == [], "the second sweep begins no second pass"
    gate.opened.set()
    await world.runner.job_loop.idle()
    assert passes.count(run) >= 2
    assert world.job().state == JobState.STOPPING


async def test_no_more_passes_than_the_limit_run_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [world.submit(f"job-{number}", nodes=1) for number in range(PASS_LIMIT + 3)]
    await world.tick()
    began: list[RunId] = []
    full, opened = asyncio.Event(), asyncio.Event()

    async def wait(run: RunId) -> None:
        began.append(run)
        if len(began) == PASS_LIMIT:
            full.set()
        await opened.wait()

    monkeypatch.setattr(world.runner.job_loop, "make_pass", wait)
    sweep = asyncio.create_task(world.runner.job_loop.sweep())
    await full.wait()
    assert len(began) == PASS_LIMIT
    opened.set()
    await sweep
    await world.runner.job_loop.idle()
    assert sorted(began) == sorted(runs)


async def test_passes_stop_before_their_next_write_when_the_fleets_lease_is_lost(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.submit(nodes=2)
    await world.running()
    world.kill_rank(world.team()[0])
    before, loop = world.job(), world.runner.job_loop
    for agent in world.agents.values():
        agent.report()
    said = len(world.said)
    gate = hold_after_read(world, monkeypatch)
    sweep = asyncio.create_task(loop.sweep())
    await gate.reached.wait()
    world.runner.fleet_leases.lose(FLEET)
    gate.opened.set()
    await sweep
    await loop.idle()
    assert world.job() == before
    assert len(world.said) == said
    await world.until(lambda: world.job().generation == 2)


def lapse(world: World) -> None:
    """Advance the server's clock until its lease on the fleet has expired."""
    world.now += timedelta(seconds=2 * grace_seconds(world.timeouts))


def rob(world: World) -> None:
    """Store another server as the owner of the fleet's lease.

    The first server does not notice the loss, because its clock shows that its own lease is still valid.
    """
    with world.database.write() as session:
        session.execute(update(FleetRow).where(FleetRow.name == FLEET).values(lease_owner="server2"))


@pytest.mark.parametrize("end_lease", [lapse, rob])
async def test_a_lease_that_ends_between_a_decision_and_its_write_stores_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch, end_lease: Callable[[World], None]
) -> None:
    world.submit(nodes=2)
    await world.running()
    world.kill_rank(world.team()[0])
    for agent in world.agents.values():
        agent.report()
    before, apply_job = world.job(), DecisionStore.apply_job

    def end_and_apply(*given: Any) -> bool:
        monkeypatch.undo()
        end_lease(world)
        return apply_job(*given)

    monkeypatch.setattr(DecisionStore, "apply_job", end_and_apply)
    await world.runner.job_loop.sweep()
    await world.runner.job_loop.idle()
    assert world.job() == before


async def test_a_decision_that_is_never_stored_is_not_returned(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.submit(nodes=2)
    await world.running()
    world.kill_rank(world.team()[0])
    for agent in world.agents.values():
        agent.report()
    monkeypatch.setattr(DecisionStore, "apply_job", lambda *_: False)
    assert await world.runner.job_loop.make_pass(RunId(world.job().run_id)) is None


async def test_a_server_without_the_fleets_lease_does_not_claim_its_jobs(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = world.submit(nodes=2)
    await world.running()
    gate = hold_passes(world, monkeypatch, run)
    sweep = asyncio.create_task(world.runner.job_loop.sweep())
    await gate.reached.wait()
    world.runner.fleet_leases.lose(FLEET)
    world.runner.job_leases.lose(run)
    with world.database.read() as session:
        before = jobs.get_run(session, run)
    gate.opened.set()
    await sweep
    await world.runner.job_loop.idle()
    with world.database.read() as session:
        assert jobs.get_run(session, run) == before
    assert not world.runner.job_leases.holds(run)


async def test_two_jobs_that_each_saw_the_last_free_nodes_are_not_both_admitted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.tick()
    world.submit("low", nodes=15)  # the job fits, because the fleet may have 20 nodes
    gate = hold_after_read(world, monkeypatch)
    loop = world.runner.job_loop
    sweep = asyncio.create_task(loop.sweep())
    await gate.reached.wait()  # wait until the pass has read a database in which the job may start
    world.submit("high", nodes=15, priority=9)
    await asyncio.gather(sweep, loop.sweep())
    assert [world.job(name).state for name in ("low", "high")] == [JobState.QUEUED, JobState.ALLOCATING]
    gate.opened.set()
    await loop.idle()
    assert [world.job(name).state for name in ("low", "high")] == [JobState.QUEUED, JobState.ALLOCATING]
    assert world.job("low").reason.startswith("place 1 of 1 in the queue"), "the pass was repeated with new rows"


async def test_a_pass_that_fails_does_not_stop_other_jobs_and_is_made_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = world.submit("bad", nodes=2)
    world.submit("other", nodes=2)
    read_job, failures = world.runner.observer.read_job, []

    def fail(run: RunId, *more: Any) -> StoredJob:
        if run == bad:
            failures.append(run)
            raise ValueError("a row cannot be read")
        return read_job(run, *more)

    monkeypatch.setattr(world.runner.observer, "read_job", fail)
    await world.running("other")
    assert world.job("bad").state == JobState.QUEUED
    assert len(failures) > 1
    monkeypatch.undo()
    await world.running("bad")


async def test_a_server_that_stops_ends_its_passes_before_it_releases_their_leases(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = world.submit(nodes=2)
    await world.running()
    gate, stop = hold_passes(world, monkeypatch, run), asyncio.Event()
    running = asyncio.create_task(world.runner.run(stop))
    await gate.reached.wait()
    passes, close = count_passes(world.runner.observer, monkeypatch), world.runner.job_loop.close

    async def open_then_close() -> None:
        assert world.runner.job_leases.holds(run)
        gate.opened.set()
        await close()

    monkeypatch.setattr(world.runner.job_loop, "close", open_then_close)
    stop.set()
    await running
    assert run in passes, "the pass in progress was completed"
    assert not world.runner.job_leases.holds(run)
    with world.database.read() as session:
        assert jobs.get_run(session, run).state == JobState.RUNNING


async def test_a_server_that_is_cancelled_leaves_no_pass_behind(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    run = world.submit(nodes=2)
    await world.running()
    gate = hold_passes(world, monkeypatch, run)
    running = asyncio.create_task(world.runner.run(asyncio.Event()))
    await gate.reached.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await world.runner.job_loop.idle()


async def test_protection_that_has_not_changed_is_not_stored_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.submit(nodes=2)
    await world.running()
    await world.train(3)
    loop, stored = world.runner.job_loop, []
    apply_job = DecisionStore.apply_job

    def noted(store: DecisionStore, *given: Any) -> bool:
        stored.append(given[4])
        return apply_job(store, *given)

    monkeypatch.setattr(DecisionStore, "apply_job", noted)
    world.now += timedelta(seconds=2)
    await world.train(1)
    assert any(stored)
    stored.clear()
    for _ in range(2):
        await loop.sweep()
        await loop.idle()
    assert not any(stored)


async def test_shared_rows_that_could_not_be_read_are_read_again() -> None:
    reads: list[FleetName] = []
    rows = FleetRows(name=FLEET, fleets={}, jobs=(), nodes={}, notices={}, implications={})

    def read(name: FleetName) -> FleetRows:
        reads.append(name)
        if len(reads) == 1:
            raise ValueError("the database is away")
        return rows

    shared = SharedRows(read)
    with pytest.raises(ValueError, match="away"):
        await shared.get(FLEET)
    assert await shared.get(FLEET) is rows
    assert await shared.get(FLEET) is rows
    assert len(reads) == 2
