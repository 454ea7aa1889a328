"""Tests groups of tasks that end together. If a group is cancelled, each of its tasks still completes its cleanup."""

from __future__ import annotations

import asyncio
import gc

import pytest

from worker.tasks import end, first_of, together


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


async def test_of_several_that_fail_at_once_the_first_in_order_is_raised_and_none_is_left_unheard() -> None:
    gate, complaints = asyncio.Event(), []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context["message"]))

    async def fails(number: int) -> None:
        await gate.wait()
        raise ValueError(str(number))

    async def open_gate() -> None:
        gate.set()

    with pytest.raises(ValueError, match="1"):
        await together(*(fails(number) for number in range(1, 9)), open_gate())
    gc.collect()
    assert complaints == []
    await together()
