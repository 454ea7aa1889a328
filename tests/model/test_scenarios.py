"""Scenarios of several faults in a fixed order that the step protocol must survive.

All other events occur in a fair random order between the events of a scenario.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from everstep.protocol.ids import Generation, NodeId, Step
from everstep.protocol.rank_messages import Vote
from everstep.protocol.slot import SlotState
from tests.model.explore import Driver, Event, Found
from tests.model.planted import BUGS
from tests.model.step_protocol import SLOWLY, Model, Rules, steady
from tests.model.world import Phase, Shape, Stream, World, empty_pair
from worker.core.slots import Content, SlotView

pytestmark = pytest.mark.timeout(300)
SEEDS = range(3)
Drive = Callable[..., Driver[World]]


def drive(
    nodes: int, copies: int, *, seed: int = 0, faults: int = 9, rules: Rules | None = None, start: World | None = None
) -> Driver[World]:
    """Return a driver for a scenario that starts in the middle of training."""
    start = start or steady(nodes, copies, seed=seed)
    return Driver(
        Model(Shape(nodes, copies, 10_000, faults), rules, is_fine=True, start=start), seed=seed, weights=SLOWLY
    )


def commits(
    driver: Driver[World], count: int, *, without: Callable[[Event], bool] = lambda event: False, limit: int = 40_000
) -> None:
    """Train until `count` more steps are committed and every agent has received the newest committed step."""
    for _ in range(count):
        goal = driver.world.best + 1
        driver.until(
            lambda world: world.restore is None and world.coordinator.committed >= goal,  # noqa: B023
            without=without,
            limit=limit,
        )
    driver.until(
        lambda world: all(shard.committed == world.coordinator.committed for shard in world.shards), without=without
    )


def touches(holder: int) -> Callable[[Event], bool]:
    """Return a predicate for the events of streams to this holder.

    A scenario that excludes these events silences the holder.
    """
    return lambda event: event[0] in ("connect", "begin", "take", "sent", "store", "acknowledge") and event[2] == holder


@pytest.mark.parametrize("seed", [0, 1])
def test_a_holder_that_never_answers_for_100_steps_holds_nobody_up(seed: int) -> None:
    story = drive(3, 2, seed=seed)
    silent = 1
    rank = next(rank for rank in range(3) if silent in story.model.holders[rank][1:])  # type: ignore[attr-defined]
    story.until(lambda world: story.can("drop", rank, silent), without=touches(silent))
    story.do("drop", rank, silent)
    begun = story.world.processes[rank].boundary
    story.until(lambda world: world.processes[rank].boundary >= begun + 100, without=touches(silent), limit=60_000)
    assert story.world.shards[rank].committed >= begun + 90
    assert story.world.shards[rank].view == frozenset()
    # the owner counts the holder again once the holder answers
    story.until(lambda world: world.shards[rank].view == {NodeId(f"{silent}")})


@pytest.mark.parametrize("seed", SEEDS)
def test_a_holder_returns_however_many_steps_are_made_while_it_is_sent_one(seed: int) -> None:
    story = drive(2, 2, seed=seed)
    story.until(lambda world: story.can("drop", 0, 1), without=touches(1))
    story.do("drop", 0, 1)
    commits(story, 3, without=touches(1))
    story.do("break", 0, 1)
    story.do("connect", 0, 1)
    for phase in (Phase.TAKEN, Phase.SENT, Phase.SEALED):
        story.until(lambda world: world.streams[0][1].phase is phase, without=lambda event: event[0] == "boundary")  # noqa: B023
        begun = story.world.processes[0].boundary
        story.until(lambda world: world.processes[0].boundary >= begun + 20, without=touches(1))  # noqa: B023
    story.do("acknowledge", 0, 1)
    assert story.world.shards[0].view == {NodeId("1")}
    commits(story, 3)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_stale_stream_arrives_late(seed: int) -> None:
    """A complete replica is in the holder's socket when its owner's node dies.

    Whether or not the holder seals the replica, the next generation starts from the newest commit or later.
    """
    story = drive(2, 2, seed=seed)
    story.until(lambda world: world.streams[0][1].phase is Phase.SENT)
    stale = story.world.streams[0][1].step
    story.do("lose", 0)
    assert story.world.streams[0][1].phase is Phase.SENT
    story.do("store", 0, 1, stale)
    best = story.world.best
    story.until(lambda world: world.restore is None)
    assert story.world.base >= best
    commits(story, 3)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_stale_stream_meets_a_promise(seed: int) -> None:
    """A holder has unread data of the old generation in its socket when it promises to join a new one.

    It discards the data.
    """
    story = drive(2, 2, seed=seed)
    story.until(lambda world: world.streams[0][1].phase is Phase.SENT)
    story.do("lose", 0)
    story.do("promise", 1)
    assert story.world.streams[0][1].phase is Phase.OFF
    assert all(view.state is not SlotState.WRITING for view in story.world.slots[0][1])
    story.until(lambda world: world.restore is None)
    commits(story, 3)


@pytest.mark.long(keep=4)
@pytest.mark.parametrize("second", [(), (0,), (1,), (2,)])
@pytest.mark.parametrize("moment", ["promised", "planned", "half loaded", "loaded"])
def test_a_second_failure_between_prepare_and_start(moment: str, second: tuple[int, ...]) -> None:
    story = drive(3, 3)
    story.do("lose", 1)
    reached: dict[str, Callable[[World], bool]] = {
        "promised": lambda world: world.restore is not None and world.restore.inventories[0] is not None,
        "planned": lambda world: world.restore is not None and world.restore.plan is not None,
        "half loaded": lambda world: world.restore is not None and any(world.restore.loaded),
        "loaded": lambda world: (
            world.restore is not None and world.restore.plan is not None and all(world.restore.loaded)
        ),
    }
    best = story.world.best
    story.until(reached[moment], without=lambda event: event[0] == "start")
    if second == (1,) and moment == "promised":
        second = ()  # the node is already lost
    story.do("lose again", *second)
    story.until(lambda world: world.restore is None)
    assert story.world.base >= best
    assert story.world.generation == story.world.issued
    commits(story, 2)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_mismatch_walks_back(seed: int) -> None:
    """One node's copy of the start step fails verification.

    A new generation starts from the previous step, which the plan made all nodes keep.
    """
    story = drive(2, 2, seed=seed)
    commits(story, 2)
    before = story.world.best
    story.until(lambda world: all(steps_at_owner(world, rank) > {before} for rank in range(2)))
    story.do("lose")
    story.until(lambda world: world.restore is not None and world.restore.plan is not None)
    assert story.world.restore is not None
    assert story.world.restore.plan is not None
    base = story.world.restore.plan.base
    story.do("mismatch", 1)
    story.until(lambda world: world.restore is None)
    assert 0 < story.world.base < base
    commits(story, 3)


def steps_at_owner(world: World, rank: int) -> set[int]:
    """Return the steps that the owner of a rank's shard has sealed in its own slots."""
    return {
        view.content.step
        for view in world.slots[rank][0]
        if view.state is SlotState.SEALED and view.content is not None
    }


def states(nodes: int, copies: int) -> list[World]:
    """Return states from a few rounds of training, one for each combination of facts that `_state_of` distinguishes.

    The states differ, for example, in the votes of the shards and in the phases of the streams.
    """
    story = drive(nodes, copies)
    found: dict[object, World] = {}
    for _ in range(250):
        world = story.world
        found.setdefault(tuple(_state_of(world, seat) for seat in range(nodes)), world)
        now = story.world
        story.until(lambda world: world is not now)  # noqa: B023
    return list(found.values())


def _state_of(world: World, seat: int) -> tuple[object, ...]:
    shard, process = world.shards[seat], world.processes[seat]
    return (
        shard.vote,
        shard.proposed in shard.sealed,
        shard.committed == world.coordinator.committed,
        shard.proposed == world.coordinator.proposed,
        world.granted[seat] >= 0,
        process.copying is not None,
        process.outcome is not None and process.outcome.is_heard,
        tuple(stream.phase for stream in world.streams[seat]),
    )


@pytest.mark.parametrize("seat", [0, 1], ids=["coordinator", "member"])
def test_an_agent_restarts_in_every_state(seat: int) -> None:
    worlds = states(2, 2)
    assert len(worlds) > 40
    assert {world.shards[seat].vote for world in worlds} >= {Vote.NONE, Vote.ACKED}
    for world in worlds:
        story = drive(2, 2, start=world)
        story.do("restart", seat)
        heard = story.world.shards[seat].committed
        commits(story, 1)
        assert story.world.shards[seat].committed > heard >= 0
        assert story.world.shards[seat].view


@pytest.mark.parametrize("seat", [0, 1], ids=["coordinator", "member"])
def test_a_node_is_lost_in_every_state(seat: int) -> None:
    for world in states(2, 2):
        story = drive(2, 2, start=world)
        story.do("lose", seat)
        story.until(lambda world: world.restore is None)
        assert story.world.base >= world.best
        commits(story, 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_inventories_of_a_node_that_was_only_unreachable(seed: int) -> None:
    """A node that was unreachable returns, and its inventory lists steps of an abandoned history.

    The plan uses none of them.
    """
    story = drive(2, 2, seed=seed)
    story.until(lambda world: len(steps_at_owner(world, 1)) == 2)
    story.do("part", 1)
    held = {view.content for _, pair in story.world.limbo[1] or () for view in pair}
    assert held
    story.until(lambda world: world.restore is None, without=lambda event: event == ("plan", 1))
    commits(story, 2)
    story.do("lose", 1)
    base = story.world.best
    story.until(lambda world: story.can("plan", 1), without=lambda event: event[0] == "plan")
    story.do("plan", 1)
    story.until(lambda world: world.restore is None)
    assert story.world.base >= base
    for rank in range(2):
        for pair in story.world.slots[rank]:
            assert all(view.content.step <= story.world.base for view in pair if view.content is not None)
    commits(story, 3)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_late_announcement_makes_a_rank_abandon(seed: int) -> None:
    story = drive(2, 2, seed=seed)
    deaf: Callable[[Event], bool] = lambda event: event[:2] == ("hear", 1)  # noqa: E731
    story.until(
        lambda world: world.processes[1].boundary > world.coordinator.proposed > world.shards[1].proposed,
        without=deaf,
        limit=60_000,
    )
    late, lead = story.world.coordinator.proposed, story.world.coordinator.lead.steps
    story.do("hear", 1)
    story.until(lambda world: world.shards[1].vote is Vote.ABANDON or world.coordinator.proposed != late)
    assert story.world.shards[1].is_late
    story.until(lambda world: world.coordinator.proposed > late)
    assert story.world.coordinator.lead.steps == lead + 1
    assert story.world.coordinator.committed < late
    commits(story, 2)


def test_a_plan_that_does_not_know_the_highest_c_loses_it() -> None:
    """The control plane must use the highest committed step C that nodes report, because its own record can be older.

    Node 1 holds steps 8 and 9 of rank 0's shard, C is 9, and rank 0 has step 10. With C=8, a plan to start from step 10
    keeps step 8 on node 1 and discards step 9. Step 9 is then lost if node 0 is lost before the new generation has
    committed step 10.
    """
    told = _second_loss(Rules())
    told.until(lambda world: world.restore is None)
    with pytest.raises(Found, match="was committed"):
        _second_loss(BUGS["stale-floor"])


def _second_loss(rules: Rules) -> Driver[World]:
    """Lose the owner of the newest step while the other node loads the start step of the next generation."""
    begun = drive(2, 2)
    begun.do("lose")
    begun.until(lambda world: world.restore is None)
    commits(begun, 1)
    world = begun.world
    base, committed = world.base, world.best
    assert committed > base > 0
    mine, other = Content(Generation(world.generation), Step(committed)), Content(Generation(world.origin), Step(base))
    newer = Content(Generation(world.generation), Step(committed + 1))

    def pair(*contents: Content) -> tuple[SlotView, ...]:
        return tuple(SlotView(SlotState.SEALED, content) for content in contents)

    # Rank 0's owner no longer counts node 1 as a holder, and only the owner has sealed the next step. Both nodes have
    # the next step of rank 1's shard.
    laid = world._replace(
        slots=((pair(mine, newer), pair(other, mine)), (pair(mine, newer), pair(mine, newer))),
        dropped=world.dropped | {(0, 1)},
        streams=tuple(tuple(stream._replace(phase=Phase.OFF) for stream in row) for row in world.streams),
        shards=tuple(replace(shard, committed=Step(committed)) for shard in world.shards),
    )
    story = drive(2, 2, start=laid, rules=rules)
    story.do("lose")
    slow: Callable[[Event], bool] = lambda event: event[0] in ("load", "record")  # noqa: E731
    story.until(lambda world: world.restore is not None and world.restore.plan is not None, without=slow)
    story.do("load", 1)
    story.do("lose again", 0)
    return story


def test_a_holder_that_is_not_told_c_overwrites_it() -> None:
    """A holder that receives C only from the coordinator may overwrite the committed step.

    The coordinator's message can arrive later than a transfer. The transfer's first message must therefore contain C.
    """

    def tell(rules: Rules) -> None:
        story = drive(2, 2, rules=rules)
        deaf: Callable[[Event], bool] = lambda event: event[:2] == ("hear", 1)  # noqa: E731
        commits(story, 1)
        c = story.world.best
        story.until(lambda world: world.coordinator.committed > c, without=deaf)
        story.until(
            lambda world: world.streams[0][1].phase is Phase.TAKEN and world.streams[0][1].step > world.best > c,
            without=deaf,
        )

    tell(Rules())
    with pytest.raises(Found):
        tell(BUGS["untold"])


def _lay(world: World, rows: tuple[tuple[tuple[int, ...], ...], ...]) -> World:
    """Replace all slots by sealed slots with exactly these steps of the running generation, and close all
    connections.
    """

    def pair(steps: tuple[int, ...]) -> tuple[SlotView, ...]:
        full = [SlotView(SlotState.SEALED, Content(Generation(world.generation), Step(step))) for step in steps]
        return (*full, *empty_pair(2 - len(full)))

    return world._replace(
        slots=tuple(tuple(pair(steps) for steps in row) for row in rows),
        streams=tuple(tuple(Stream() for _ in row) for row in world.streams),
    )


def _crashed_with_an_uncommitted_step(rules: Rules) -> Driver[World]:
    """Return a driver after a crash of all ranks, at which one of two holders lacked the newest step c + 1.

    The committed step is c. The next generation starts from step c + 1, which is not committed yet.
    """
    world = steady(2, 2)
    c = world.best
    laid = _lay(world, (((c, c + 1), (c, c + 1)), ((c, c + 1), (c,))))
    story = drive(2, 2, rules=rules, start=laid)
    story.do("lose")
    story.until(lambda world: world.restore is None)
    assert story.world.base == c + 1 > story.world.best
    return story


def test_a_base_that_counts_as_committed_from_the_start_loses_the_step_before() -> None:
    unfilled: Callable[[Event], bool] = lambda event: event[0] == "connect" and event[1] == 1  # noqa: E731
    good = _crashed_with_an_uncommitted_step(Rules())
    # Rank 1's owner never connects to its holder here, so the start step is never committed. Without this commit, no
    # rank may capture a newer step, and the walk reaches its limit.
    with pytest.raises(Found, match="the end is not reached"):
        good.until(lambda world: world.best > 0 and world.granted[0] >= 0, without=unfilled, limit=3000)
    bad = _crashed_with_an_uncommitted_step(BUGS["base-committed"])
    with pytest.raises(Found, match="was committed"):
        bad.until(lambda world: world.granted[0] >= 0, without=unfilled, limit=3000)


def test_a_keep_list_that_is_forgotten_loses_the_step_before() -> None:
    _crashed_with_an_uncommitted_step(Rules())
    with pytest.raises(Found, match="was committed"):
        _crashed_with_an_uncommitted_step(BUGS["keep-base-only"])


def test_a_new_generation_begins_with_every_planned_holder_in_view() -> None:
    for bug, what in ((None, "the end is not reached"), ("owners-only", "never dropped")):
        story = drive(2, 2, rules=BUGS.get(bug or ""))
        story.do("lose")
        story.until(lambda world: world.restore is None)
        begun = story.world.best
        with pytest.raises(Found, match=what):  # without replicas, no step may be committed
            story.until(
                lambda world: world.best > begun + 1,  # noqa: B023
                without=lambda event: event[0] in ("connect", "begin"),
                limit=3000,
            )


@pytest.mark.parametrize("bug", [None, "never-revokes"])
def test_a_holder_that_lost_a_slot_revokes_its_acknowledgement(bug: str | None) -> None:
    story = drive(3, 3, rules=BUGS.get(bug or ""))
    first, second = (int(peer) for peer in story.world.shards[0].peers)
    late: Callable[[Event], bool] = lambda event: event[0] == "take" and event[1:3] == (0, second)  # noqa: E731

    def has_acknowledged(world: World) -> bool:
        shard = world.shards[0]
        is_held = shard.proposed in shard.sealed and (NodeId(f"{first}"), shard.proposed) in shard.held
        return is_held and shard.vote is Vote.NONE and world.shards[first].vote is Vote.ACKED

    story.until(has_acknowledged, without=late)
    step = story.world.shards[0].proposed
    index = next(
        i for i, view in enumerate(story.world.slots[0][1]) if view.content is not None and view.content.step == step
    )
    story.do("spoil", 0, first, index)
    story.do("connect", 0, first)
    if bug is None:
        commits(story, 2)
    else:
        with pytest.raises(Found, match="was committed"):
            commits(story, 1)


def _returns_with_a_history_given_up(seed: int, rules: Rules) -> None:
    """Let node 1 return with a step that only it had when it became unreachable, and check the next commit.

    Meanwhile, training has resumed from an earlier step and has made that step again. The plan must not mix the two
    histories.
    """
    story = drive(2, 2, seed=seed, rules=rules)
    story.until(lambda world: world.streams[1][1].phase is Phase.BEGUN and world.streams[1][1].step > world.best)
    story.do("part", 1)
    story.until(lambda world: world.restore is None, without=lambda event: event == ("plan", 1))
    story.until(lambda world: max(steps_at_owner(world, 0)) > world.base)
    story.do("lose", 1)
    story.until(lambda world: story.can("plan", 1), without=lambda event: event[0] == "plan")
    story.do("plan", 1)
    story.until(lambda world: world.restore is None)
    commits(story, 1)


def test_a_history_that_was_given_up_is_never_mixed_in() -> None:
    for seed in range(12):
        _returns_with_a_history_given_up(seed, Rules())

    def without_lineage() -> None:
        for seed in range(12):
            _returns_with_a_history_given_up(seed, BUGS["no-lineage"])

    with pytest.raises(Found, match="as captured by generations"):
        without_lineage()
