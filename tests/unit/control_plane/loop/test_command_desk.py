"""Tests commands that users run on a node beside its ranks.

The control plane sends each command once, returns its answer to all waiting callers, and limits the number of commands.
"""

from __future__ import annotations

import asyncio

import pytest

from control_plane.loop import command_desk
from control_plane.loop.command_desk import CommandDesk, NotAnswered, NotAsked, TooManyCommands
from everstep.protocol.agent_messages import CommandEnded, RunCommand
from everstep.protocol.ids import Generation, NodeId, Rank, RunId

NODE = NodeId("i-1")


class World:
    def __init__(self) -> None:
        self.now = 0.0
        self.sent: list[RunCommand] = []
        self.is_connected = True
        self.desk = CommandDesk(self.send, lambda: self.now)

    def send(self, node_id: NodeId, command: RunCommand) -> bool:
        if self.is_connected:
            self.sent.append(command)
        return self.is_connected

    def ask(self, name: str = "a") -> asyncio.Task[CommandEnded]:
        command = RunCommand(
            run=RunId("r"), generation=Generation(1), command_id=name, rank=Rank(0), argv=("x",), timeout_seconds=10.0
        )
        return asyncio.create_task(self.desk.run(NODE, command))


async def test_who_asks_again_waits_for_the_same_answer() -> None:
    world = World()
    asking = [world.ask(), world.ask()]
    await asyncio.sleep(0)
    answer = CommandEnded(command_id="a", exit_code=0)
    world.desk.ended(NodeId("i-2"), answer)
    assert not any(task.done() for task in asking), "another node's word is nobody's answer"
    world.desk.ended(NODE, answer)
    world.desk.ended(NODE, CommandEnded(command_id="a", exit_code=1))
    world.desk.ended(NODE, CommandEnded(command_id="unasked"))
    assert [await task for task in (*asking, world.ask())] == [answer] * 3
    assert len(world.sent) == 1


async def test_who_stops_waiting_takes_the_answer_from_nobody() -> None:
    world = World()
    leaving, staying = world.ask(), world.ask()
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.sleep(0)
    world.desk.ended(NODE, CommandEnded(command_id="a", exit_code=0))
    assert (await staying).exit_code == 0


async def test_nothing_is_waited_for_longer_than_it_may_take() -> None:
    world = World()
    first = world.ask()
    await asyncio.sleep(0)
    world.now = 10.0 + command_desk.ANSWER_SECONDS
    with pytest.raises(NotAnswered):
        await world.ask()
    first.cancel()


async def test_a_node_that_is_not_connected_is_not_waited_for() -> None:
    world = World()
    world.is_connected = False
    with pytest.raises(NotAsked):
        await world.ask()
    assert not world.desk.is_known("a")


async def test_as_many_as_may_be_are_under_way_and_those_that_are_over_count_no_more() -> None:
    world = World()
    waiting = [world.ask(str(number)) for number in range(command_desk.MAX_WAITING)]
    await asyncio.sleep(0)
    with pytest.raises(TooManyCommands):
        await world.ask("one more")
    world.desk.ended(NODE, CommandEnded(command_id="0"))
    await waiting[0]
    another = world.ask("one more")
    await asyncio.sleep(0)
    world.now = 100.0
    for number in range(command_desk.MAX_KEPT):
        task = world.ask(f"later {number}")
        await asyncio.sleep(0)
        world.desk.ended(NODE, CommandEnded(command_id=f"later {number}"))
        await task
    assert not world.desk.is_known("1")
    for task in (*waiting, another):
        task.cancel()


async def test_an_answer_that_takes_long_is_not_lost_to_those_that_many_others_were_given() -> None:
    world = World()
    slow = world.ask("slow")
    await asyncio.sleep(0)
    for number in range(2 * command_desk.MAX_KEPT):
        task = world.ask(str(number))
        await asyncio.sleep(0)
        world.desk.ended(NODE, CommandEnded(command_id=str(number)))
        await task
    world.desk.ended(NODE, CommandEnded(command_id="slow", exit_code=3))
    assert (await slow).exit_code == 3
    assert not world.desk.is_known("0")
