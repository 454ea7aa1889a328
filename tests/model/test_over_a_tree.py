"""The step protocol holds over a tree of agents that remember, restart and are passed over; both bugs that a tree invites are found."""

from __future__ import annotations

import pytest

from everstep.protocol.rank_messages import Vote
from tests.model.explore import Driver, Event, Found
from tests.model.over_a_tree import TreeModel, TreeWorld, follow
from tests.model.step_protocol import NONE, SLOWLY, Model, steady
from tests.model.world import Shape

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize(("nodes", "copies", "arity"), [(3, 1, 1), (3, 2, 1), (4, 2, 2)])
def test_random_walks(nodes: int, copies: int, arity: int) -> None:
    seen = follow(Shape(nodes, copies, 8, 6), range(25), arity=arity, length=300)
    assert {"up", "down", "report", "hear", "restart", "obstacle"} <= set(seen)


@pytest.mark.full
@pytest.mark.parametrize(("nodes", "copies", "arity"), [(3, 1, 1), (3, 2, 1), (4, 2, 1), (4, 2, 2), (5, 2, 2)])
def test_many_random_walks(nodes: int, copies: int, arity: int) -> None:
    follow(Shape(nodes, copies, 12, 8), range(1000, 1500), arity=arity, length=500)


def ahead_of_its_parent(bug: str | None) -> tuple[Driver[TreeWorld], int]:
    """Lead node 2 of a chain past its parent: it alone has heard of a new step, from the coordinator itself. Return the driver and that step."""
    start = steady(3, 1)
    steps = 8 + max(process.boundary for process in start.processes)
    driver = Driver(TreeModel.of(Model(Shape(3, 1, steps, 9), is_fine=True, start=start), bug=bug), weights=SLOWLY)
    first = driver.world.world.coordinator.proposed

    def all_know_and_nobody_captures(world: TreeWorld) -> bool:
        inner = world.world
        knows = [world.relays[0].known.newest.get(f"{seat}") for seat in range(3)]  # type: ignore[call-overload]
        return all(knows) and {shard.proposed for shard in inner.shards} == {inner.coordinator.proposed} != {NONE, first}

    driver.until(lambda world: all_know_and_nobody_captures(world) and all(shard.vote is Vote.NONE for shard in world.world.shards))
    old = driver.world.world.coordinator.proposed

    def newer_is_told(event: Event) -> bool:
        return event[0] in ("hear", "down") and driver.world.world.coordinator.proposed != old

    driver.until(
        lambda world: world.world.processes[0].boundary == old - 1 and world.world.granted[0] != NONE, without=lambda event: event[0] == "up"
    )
    driver.do("obstacle", 0)
    driver.until(lambda world: world.world.coordinator.proposed not in (old, NONE), without=newer_is_told)
    new = driver.world.world.coordinator.proposed
    driver.do("down", 0, 2)
    assert [shard.proposed for shard in driver.world.world.shards] == [old, old, new]
    return driver, new


def until_proposed_again(driver: Driver[TreeWorld], *, without_seat: int | None) -> None:
    """Restart the coordinator; all but one node answer it, and it goes on."""
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
