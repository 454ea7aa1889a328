"""Loops on a full disk report the disk in the same way as API requests, and resume when the disk has space."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

import pytest
from sqlalchemy import Connection
from sqlalchemy.event import listen, remove
from sqlalchemy.exc import OperationalError

from control_plane.core.full_disk import QUIET_SECONDS
from control_plane.core.states import JobState
from tests.sim.world import World


@pytest.mark.parametrize(("words", "state"), [("database or disk is full", None), ("could not extend file", "53100")])
async def test_a_loop_that_cannot_write_reports_the_full_disk(world: World, words: str, state: str | None) -> None:
    now = [0.0]
    world.database.disk.monotonic = lambda: now[0]
    world.submit()
    await world.running()
    refusal = Exception(words)
    refusal.sqlstate = state  # type: ignore[attr-defined]

    def is_full(connection: Connection) -> None:
        if connection.get_execution_options().get("everstep_writes"):
            raise OperationalError("INSERT", {}, refusal)

    listen(world.database.engine, "begin", is_full)
    world.kill_rank(world.team()[0])
    world.now += timedelta(seconds=4)
    with suppress(OperationalError):  # the decision about the fleet may fail, which ends the round
        await world.runner.fleet_loop.sweep()
    (disk,) = world.database.disk.full()
    assert str(world.database.url.database).startswith(disk.place)
    assert words in disk.words
    assert disk.free_bytes is not None
    remove(world.database.engine, "begin", is_full)
    await world.until(lambda: world.job().generation == 2 and world.job().state == JobState.RUNNING)
    now[0] = QUIET_SECONDS
    assert world.database.disk.full() == ()
