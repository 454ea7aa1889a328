"""Tasks end together, and their ends are not cut short."""

from __future__ import annotations

import asyncio

import pytest

from worker.tasks import end, first_of


async def test_an_end_that_is_cancelled_lets_the_task_finish_what_it_does_at_its_end() -> None:
    begun, gate, done = asyncio.Event(), asyncio.Event(), []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            begun.set()
            await gate.wait()
            done.append("tidied")

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    ending = asyncio.create_task(end(task))
    await begun.wait()
    ending.cancel()
    await asyncio.sleep(0)
    assert not ending.done()
    gate.set()
    await asyncio.wait([ending])
    assert ending.cancelled()
    assert done == ["tidied"]


async def test_what_ends_first_ends_the_others_and_its_error_is_raised() -> None:
    others_ended = []

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            others_ended.append(True)

    async def fails() -> None:
        raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        await first_of(waits(), fails())
    assert others_ended == [True]
