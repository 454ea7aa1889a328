"""GetReadiness: a server is ready while its loops work and the lease of each fleet has a living holder."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta

from sqlalchemy.event import listen, remove
from sqlalchemy.exc import OperationalError

from control_plane.core.timeouts import grace_seconds
from control_plane.loop.loop_metrics import Loop
from control_plane.loop.readiness import Readiness
from control_plane.loop.runner import Runner
from tests.sim.world import World


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def ready_server(clock: Clock) -> Readiness:
    readiness = Readiness()
    readiness.expect(("job", "fleet"), 9.0, clock)
    readiness.swept("job")
    readiness.swept("fleet")
    return readiness


def test_a_server_without_loops_is_ready() -> None:
    assert Readiness().problems() == ()


def test_a_server_is_ready_after_the_first_sweep_of_every_loop() -> None:
    readiness = Readiness()
    readiness.expect(("job", "fleet"), 9.0, Clock())
    readiness.swept("job")
    assert readiness.problems() == ("the fleet loop has not finished its first sweep",)
    readiness.swept("fleet")
    assert readiness.problems() == ()


def test_a_stuck_loop_makes_the_server_unready() -> None:
    clock = Clock()
    readiness = ready_server(clock)
    clock.now = 9.0
    assert readiness.problems() == ()
    clock.now = 9.5
    readiness.swept("fleet")
    assert readiness.problems() == ("the job loop has not finished a sweep for 10 s",)


def test_a_failed_sweep_counts_until_the_next_success() -> None:
    readiness = ready_server(Clock())
    readiness.failed("job", ZeroDivisionError())
    assert readiness.problems() == ("the last sweep of the job loop failed with ZeroDivisionError",)
    readiness.swept("job")
    assert readiness.problems() == ()


def test_the_problem_names_three_fleets_without_a_holder() -> None:
    readiness = ready_server(Clock())
    readiness.settle(["a", "b", "c", "d", "e"])
    assert readiness.problems() == ("no server holds the lease of the fleets a, b, c and 2 more",)
    readiness.settle([])
    assert readiness.problems() == ()


async def sweep_once(runner: Runner) -> None:
    """Run one iteration of both loops, with their record of success or failure."""
    loops: tuple[tuple[Loop, Callable[[], Awaitable[None]]], ...] = (
        ("fleet", runner.fleet_loop.sweep),
        ("job", runner.job_loop.sweep),
    )
    for loop, sweep in loops:
        stop = asyncio.Event()

        async def sweep_and_stop(sweep=sweep, stop=stop) -> None:
            stop.set()
            await sweep()

        await runner.sweep_repeatedly(stop, sweep_and_stop, loop)


async def test_a_second_server_is_ready_once_it_has_seen_the_holder_renew_its_leases(world: World) -> None:
    holder, readiness = world.runner, world.context.readiness
    await world.tick()
    await sweep_once(holder)
    assert readiness.problems() == ()
    world.start_server()
    second, of_second = world.runner, world.context.readiness
    assert of_second is not readiness
    await sweep_once(second)
    assert of_second.problems() == ("no server holds the lease of the fleets main",)
    world.now += timedelta(seconds=grace_seconds(world.timeouts) / 2)
    await sweep_once(holder)
    await sweep_once(second)
    assert of_second.problems() == ()


async def test_a_server_that_cannot_reach_the_database_is_not_ready(world: World) -> None:
    readiness = world.context.readiness
    await world.tick()
    await sweep_once(world.runner)

    def is_away(_: object) -> None:
        raise OperationalError("BEGIN", {}, Exception("no route to the database"))

    world.now += timedelta(seconds=grace_seconds(world.timeouts))
    listen(world.database.engine, "begin", is_away)
    await sweep_once(world.runner)
    remove(world.database.engine, "begin", is_away)
    assert readiness.problems() == (
        "the last sweep of the job loop failed with OperationalError",
        "the last sweep of the fleet loop failed with OperationalError",
        "no server holds the lease of the fleets main",
    )
    await sweep_once(world.runner)
    assert readiness.problems() == ()
