"""The step protocol and the agreed stop stay correct if their messages travel over a tree of agents.

In the model, agents store messages, restart, and bypass their parents. The tests also find bugs that only a tree can
cause.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from everstep.protocol.rank_messages import StopState, Vote
from tests.model import stop_agreement
from tests.model.explore import Driver, Event, Found
from tests.model.over_a_tree import StepRounds, StopRounds, TreeModel, TreeWorld, follow, follow_stop, main
from tests.model.step_protocol import NONE, SLOWLY, steady
from tests.model.stop_agreement import Mode, Options
from tests.model.world import Shape, World

pytestmark = pytest.mark.timeout(600)


@pytest.mark.long(keep=1)
@pytest.mark.parametrize(("nodes", "copies", "arity"), [(3, 1, 1), (3, 2, 1), (4, 2, 2)])
def test_random_walks(nodes: int, copies: int, arity: int) -> None:
    seen = follow(Shape(nodes, copies, 8, 6), range(25), arity=arity, length=300)
    assert {"up", "down", "report", "hear", "restart", "obstacle"} <= set(seen)


@pytest.mark.long
@pytest.mark.parametrize(("nodes", "copies", "arity"), [(3, 1, 1), (3, 2, 1), (4, 2, 1), (4, 2, 2), (5, 2, 2)])
def test_many_random_walks(nodes: int, copies: int, arity: int) -> None:
    follow(Shape(nodes, copies, 12, 8), range(1000, 1500), arity=arity, length=500)


def ahead_of_its_parent(bug: str | None) -> tuple[Driver[TreeWorld[World]], int]:
    """Let node 2 of a chain receive a new step directly from the coordinator, before the node's parent does. Return the
    driver and the step.
    """
    start = steady(3, 1)
    steps = 8 + max(process.boundary for process in start.processes)
    driver = Driver(TreeModel.of(StepRounds(Shape(3, 1, steps, 9), is_fine=True, start=start), bug=bug), weights=SLOWLY)
    first = driver.world.world.coordinator.proposed

    def all_know_and_nobody_captures(world: TreeWorld[World]) -> bool:
        inner = world.world
        knows = [world.relays[0].known.newest.get(f"{seat}") for seat in range(3)]  # type: ignore[call-overload]
        return all(knows) and {shard.proposed for shard in inner.shards} == {inner.coordinator.proposed} != {
            NONE,
            first,
        }

    driver.until(
        lambda world: (
            all_know_and_nobody_captures(world) and all(shard.vote is Vote.NONE for shard in world.world.shards)
        )
    )
    old = driver.world.world.coordinator.proposed

    def newer_is_told(event: Event) -> bool:
        return event[0] in ("hear", "down") and driver.world.world.coordinator.proposed != old

    driver.until(
        lambda world: world.world.processes[0].boundary == old - 1 and world.world.granted[0] != NONE,
        without=lambda event: event[0] == "up",
    )
    driver.do("obstacle", 0)
    driver.until(lambda world: world.world.coordinator.proposed not in (old, NONE), without=newer_is_told)
    new = driver.world.world.coordinator.proposed
    driver.do("down", 0, 2)
    assert [shard.proposed for shard in driver.world.world.shards] == [old, old, new]
    return driver, new


def until_proposed_again(driver: Driver[TreeWorld[World]], *, without_seat: int | None) -> None:
    """Restart the coordinator, let all nodes except one answer, and run until the coordinator continues."""
    driver.do("restart", 0)
    driver.until(
        lambda world: not world.world.coordinator.is_recovering,
        without=lambda event: event[0] == "boundary" or (event[0] in ("up", "down") and without_seat in event),
        limit=300,
    )


def test_a_node_that_heard_more_than_its_parent_does_not_go_back() -> None:
    driver, _ = ahead_of_its_parent(None)
    assert not driver.can("down", 1, 2)
    bugged, new = ahead_of_its_parent("hears-all")
    bugged.do("down", 1, 2)
    with pytest.raises(Found, match=f"step {new} is proposed twice"):
        until_proposed_again(bugged, without_seat=None)


def test_what_a_node_between_remembers_is_no_answer_to_a_restarted_coordinator() -> None:
    driver, _ = ahead_of_its_parent(None)
    with pytest.raises(Found, match="the end is not reached"):
        until_proposed_again(driver, without_seat=2)
    driver.until(lambda world: not world.world.coordinator.is_recovering)
    bugged, new = ahead_of_its_parent("any-term")
    with pytest.raises(Found, match=f"step {new} is proposed twice"):
        until_proposed_again(bugged, without_seat=2)


# -- tests of the agreed stop over a tree of agents


@pytest.mark.long(keep=1)
@pytest.mark.parametrize(("ranks", "arity"), [(3, 1), (4, 2)])
@pytest.mark.parametrize("every", [0, 2])
def test_random_walks_to_the_stop(ranks: int, arity: int, every: int) -> None:
    job = Options(ranks, 6, restarts=2, every_steps=every)
    seen = follow_stop(job, range(20), arity=arity)
    seen += follow_stop(replace(job, may_hurry=True), range(100, 110), arity=arity)
    seen += follow_stop(replace(job, may_hurry=True, may_hang=True, has_uploads=True), range(200, 215), arity=arity)
    assert {"up", "down", "report", "hear", "restart", "request stop", "uploaded", "end final round", "halt"} <= set(
        seen
    )


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "arity"), [(3, 1), (4, 1), (4, 2), (5, 2)])
def test_many_random_walks_to_the_stop(ranks: int, arity: int) -> None:
    follow_stop(Options(ranks, 10, restarts=4, every_steps=3, may_hurry=True), range(1000, 1500), arity=arity)


@pytest.mark.parametrize("bug", ["forgets-confirmed", "most-echoes", "rank-alone"])
def test_random_walks_to_the_stop_find_planted(bug: str) -> None:
    with pytest.raises(Found):
        follow_stop(replace(Options(3, 6), **stop_agreement.BUGS[bug]), range(200))  # type: ignore[arg-type]


def only_the_last_has_heard(bug: str | None) -> tuple[Driver[TreeWorld[stop_agreement.World]], int]:
    """Let node 2 of a chain receive a confirmed stop directly from the coordinator, then restart the coordinator.

    Node 2's parent still stores an earlier report of node 2, in which node 2 has agreed to the stop but not received
    its confirmation. Return the driver and the step of the stop.
    """
    weights = {"boundary": 0.05, **dict.fromkeys(("ask", "restart", "close"), 0.0)}
    driver = Driver(TreeModel.of(StopRounds(Options(3, 9, restarts=1, is_fine=True)), bug=bug), weights=weights)
    driver.do("ask")
    driver.until(
        lambda world: world.world.coordinator.stop_state is StopState.CONFIRMED,
        without=lambda event: event == ("up", 2, 0),
    )
    driver.do("down", 0, 2)
    assert [agent.word.stop_state is StopState.CONFIRMED for agent in driver.world.world.agents] == [False, False, True]
    stop = driver.world.world.coordinator.stop
    driver.do("restart")
    return driver, stop


def until_answered(driver: Driver[TreeWorld[stop_agreement.World]], *, without_seat: int | None) -> None:
    """Let all nodes except one answer the restarted coordinator, and run until the coordinator continues."""
    driver.until(
        lambda world: not world.world.coordinator.is_recovering,
        without=lambda event: event[0] == "boundary" or (event[0] in ("up", "down") and without_seat in event),
        limit=300,
    )


def until_stopped(driver: Driver[TreeWorld[stop_agreement.World]], stop: int) -> None:
    driver.until(
        lambda world: all((each.mode, each.boundary) == (Mode.STOPPED, stop) for each in world.world.processes),
        limit=2000,
    )


def test_a_stop_that_only_one_has_heard_confirmed_is_not_forgotten_for_what_a_node_between_remembers() -> None:
    driver, stop = only_the_last_has_heard(None)
    with pytest.raises(Found, match="the end is not reached"):
        until_answered(driver, without_seat=2)
    until_answered(driver, without_seat=None)
    until_stopped(driver, stop)
    bugged, stop = only_the_last_has_heard("any-term")
    until_answered(bugged, without_seat=2)
    assert bugged.world.world.coordinator.stop_state is not StopState.CONFIRMED
    with pytest.raises(Found):
        until_stopped(bugged, stop)


def test_runs_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["3", "1", "2", "1", "--walks", "2"]) == 0
    assert main(["3", "0", "3", "1", "--walks", "2", "--stop"]) == 0
    assert "request stop" in capsys.readouterr().out
