"""No allowed loss destroys a commit under the step protocol, in all interleavings of small clusters and in long walks.

The model finds every planted bug.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from everstep.protocol.ids import Step
from tests.model.explore import Driver, Event, Explored, Found, every_interleaving, walk
from tests.model.planted import BUGS
from tests.model.step_protocol import SLOWLY, WEIGHTS, Model, Rules, Violation, main, steady
from tests.model.world import NONE, Shape, World

pytestmark = pytest.mark.timeout(600)


def later(world: World, steps: int) -> int:
    """Return a step that is `steps` after the newest step that any rank has finished."""
    return max(process.boundary for process in world.processes) + steps


@pytest.mark.parametrize(("nodes", "copies", "steps", "faults"), [(2, 2, 1, 0), (2, 1, 1, 0)])
def test_every_interleaving_of_a_beginning(nodes: int, copies: int, steps: int, faults: int) -> None:
    seen = every_interleaving(Model(Shape(nodes, copies, steps, faults)))
    assert seen.states > 500


@pytest.mark.parametrize(("nodes", "copies", "steps", "faults"), [(2, 2, 1, 1), (2, 1, 0, 1)])
def test_every_interleaving_in_mid_training(nodes: int, copies: int, steps: int, faults: int) -> None:
    start = steady(nodes, copies)
    seen = every_interleaving(Model(Shape(nodes, copies, later(start, steps), faults), start=start))
    assert {"lose", "restart", "promise", "plan", "load", "start"} <= set(seen)


@pytest.mark.long
@pytest.mark.parametrize(("nodes", "copies", "steps", "faults"), [(2, 2, 1, 1), (2, 1, 2, 1), (2, 2, 2, 0)])
def test_every_interleaving_of_a_longer_beginning(nodes: int, copies: int, steps: int, faults: int) -> None:
    every_interleaving(Model(Shape(nodes, copies, steps, faults)))


@pytest.mark.long
@pytest.mark.parametrize(
    ("nodes", "copies", "steps", "faults"), [(2, 2, 2, 1), (2, 1, 1, 1), (2, 1, 0, 2), (3, 2, 0, 1)]
)
def test_every_interleaving_of_more_in_mid_training(nodes: int, copies: int, steps: int, faults: int) -> None:
    start = steady(nodes, copies)
    every_interleaving(Model(Shape(nodes, copies, later(start, steps), faults), start=start))


def follow(shape: Shape, seeds: range, *, is_steady: bool, length: int = 250) -> Explored:
    """Walk at random, then run without faults.

    Every dropped holder must count again, and a newer step must be committed.
    """
    seen = Explored()
    for seed in seeds:
        start = (
            steady(shape.nodes, shape.copies, seed=seed % 7, ranks_per_node=shape.ranks_per_node) if is_steady else None
        )
        steps = shape.steps + (later(start, 0) if start is not None else 0)
        world, walked = walk(
            Model(replace(shape, steps=steps), is_fine=True, start=start), random.Random(seed), length, weights=WEIGHTS
        )
        seen.update(walked)
        if seed % 5 == 0 and not has_lost_its_base(shape, world):
            settle(shape, world, seed)
    return seen


def has_lost_its_base(shape: Shape, world: World) -> bool:
    """Return whether all holders of a shard lost the start step before it was committed again.

    In this case, no step is committed until the next generation.
    """
    model, base = Model(shape), Step(world.base)
    is_at_stake = world.restore is None and world.base and world.coordinator.committed == NONE
    content = model.content(world, base)
    return bool(is_at_stake) and not all(
        any(model.has(world, rank, holder, content) for holder in range(len(row)))
        for rank, row in enumerate(model.holders)
    )


def settle(shape: Shape, world: World, seed: int) -> None:
    goal = later(world, 1)

    def is_well(world: World) -> bool:
        is_whole = all(len(shard.view) == shape.copies - 1 for shard in world.shards)
        return world.restore is None and is_whole and world.coordinator.committed >= min(goal, later(world, 0)) > 0

    model = Model(replace(shape, steps=goal + 30, faults=0), is_fine=True, start=world)
    settled, _ = walk(model, random.Random(seed), 6000, weights=SLOWLY, until=is_well, is_checked=False)
    assert is_well(settled), f"seed {seed}: it does not settle: {settled}"


@pytest.mark.long(keep=3)
@pytest.mark.parametrize(("nodes", "copies"), [(2, 2), (3, 2), (3, 3), (4, 2)])
@pytest.mark.parametrize("is_steady", [False, True])
def test_random_walks(nodes: int, copies: int, is_steady: bool) -> None:
    seen = follow(Shape(nodes, copies, 6, 4), range(40), is_steady=is_steady)
    assert {"restart", "drop", "break", "lose", "part", "lose again"} <= set(seen)


@pytest.mark.long(keep=1)
@pytest.mark.parametrize("nodes", [2, 3])
def test_random_walks_of_nodes_with_two_ranks(nodes: int) -> None:
    seen = follow(Shape(nodes, 2, 6, 4, ranks_per_node=2), range(12), is_steady=True)
    assert {"restart", "lose", "plan"} <= set(seen)


def test_every_interleaving_of_nodes_with_two_ranks() -> None:
    """Explore two ranks per node without replicas.

    With replicas there are too many interleavings, so random walks cover them.
    """
    start = steady(2, 1, ranks_per_node=2)
    seen = every_interleaving(Model(Shape(2, 1, later(start, 0), 1, ranks_per_node=2), start=start))
    assert {"lose", "restart", "promise", "plan", "load", "start"} <= set(seen)


@pytest.mark.long
def test_every_interleaving_of_a_beginning_with_two_ranks() -> None:
    every_interleaving(Model(Shape(2, 1, 1, 0, ranks_per_node=2)))


def test_every_interleaving_with_uploads_reaches_the_end() -> None:
    seen = every_interleaving(Model(Shape(2, 1, 1, 0, every_steps=1)), must_end=True)
    assert {"close", "look", "uploaded"} <= set(seen)


@pytest.mark.long
def test_every_interleaving_of_a_fault_during_uploads() -> None:
    start = steady(2, 2)
    seen = every_interleaving(Model(Shape(2, 2, later(start, 0), 1, every_steps=1), start=start))
    assert {"close", "lose", "uploaded"} <= set(seen)


def walk_with_uploads(shape: Shape, seeds: range, rules: Rules | None = None) -> Explored:
    """Walk until the final round has ended and no upload runs.

    On the way, uploads pin slots and fail, and nodes are lost during uploads.
    """
    seen = Explored()
    for seed in seeds:
        world, walked = walk(Model(shape, rules, is_fine=True), random.Random(seed), 4000, weights=WEIGHTS)
        seen.update(walked)
        assert Model(shape).is_done(world), f"seed {seed}: the final round does not end: {world}"
    return seen


@pytest.mark.parametrize(
    ("shape", "count"),
    [
        pytest.param(Shape(2, 2, 5, 4, every_steps=1), 60, id="every step"),
        pytest.param(Shape(2, 2, 6, 4, ranks_per_node=2, every_steps=2), 25, id="two ranks per node"),
        pytest.param(Shape(3, 3, 6, 3, every_steps=1, has_slow_uploads=True), 40, id="uploads outlast training"),
        pytest.param(Shape(2, 2, 6, 4, every_steps=1, max_uploads=2), 40, id="two uploads"),
        pytest.param(Shape(2, 2, 7, 3, every_steps=1, max_uploads=3), 25, id="three uploads"),
    ],
)
def test_random_walks_with_uploads(shape: Shape, count: int) -> None:
    seen = walk_with_uploads(shape, range(count))
    assert {"uploaded", "help", "helped", "close", "lose"} <= set(seen)


def test_an_upload_fails_or_ends_with_its_node() -> None:
    """The final step is committed after an upload failed and after an uploading node was lost. In both cases, the
    upload's slot becomes free.
    """
    for fault in ("upload fails", "lose"):
        driver = Driver(Model(Shape(2, 2, 6, 1, every_steps=1), is_fine=True), weights={**SLOWLY, "uploaded": 0.0})
        driver.until(lambda world: driver.model.pinned(world, 1) != NONE)  # type: ignore[attr-defined]  # noqa: B023
        pinned = driver.model.pinned(driver.world, 1)  # type: ignore[attr-defined]
        driver.do(fault, 1)
        assert driver.model.pinned(driver.world, 1) == NONE  # type: ignore[attr-defined]
        driver.until(driver.model.is_done)
        assert driver.world.coordinator.committed == 6 > pinned


@pytest.mark.long
@pytest.mark.parametrize("ranks_per_node", [1, 2])
@pytest.mark.parametrize("has_slow_uploads", [False, True])
def test_many_random_walks_with_uploads(ranks_per_node: int, has_slow_uploads: bool) -> None:
    walk_with_uploads(
        Shape(2, 2, 6, 5, ranks_per_node, every_steps=1, has_slow_uploads=has_slow_uploads), range(1000, 1600)
    )
    walk_with_uploads(
        Shape(3, 2, 6, 5, ranks_per_node, every_steps=2, has_slow_uploads=has_slow_uploads), range(1000, 1300)
    )


@pytest.mark.long
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(("nodes", "copies"), [(2, 2), (3, 2), (3, 3), (4, 2), (5, 2), (5, 3)])
@pytest.mark.parametrize("is_steady", [False, True])
def test_many_random_walks(nodes: int, copies: int, is_steady: bool) -> None:
    follow(Shape(nodes, copies, 10, 6), range(1000, 2000), is_steady=is_steady, length=500)


class UntilStarted(Model):
    """A model of a restore that ends when the next generation starts."""

    def moves(self, world: World) -> Iterator[tuple[Event, World]]:
        return super().moves(world) if world.restore is not None else iter(())

    def is_done(self, world: World) -> bool:
        return world.restore is None


def partly_sealed(nodes: int) -> World:
    """Return a state in which all ranks have just crashed, while one holder still lacks the proposed step.

    Every owner has sealed the proposed step. That holder has only the committed step and the step before it.
    """

    def is_partly_sealed(world: World) -> bool:
        step = world.coordinator.proposed
        if not world.best < step or any(shard.committed != world.best for shard in world.shards):
            return False
        held = [
            [{view.content.step for view in pair if view.content is not None} for pair in row] for row in world.slots
        ]
        is_lagging = any(
            world.best in pair and min(pair) < world.best and step not in pair for row in held for pair in row[1:]
        )
        return is_lagging and all(step in shard.sealed for shard in world.shards)

    driver = Driver(Model(Shape(nodes, 2, 99, 0)), weights=SLOWLY)
    driver.until(lambda world: world.best >= 2 and is_partly_sealed(world))
    crashed = Driver(Model(Shape(nodes, 2, 99, 1), start=driver.world), weights=SLOWLY)
    crashed.do("lose")
    return crashed.world


def test_a_loss_during_a_restore_with_a_control_plane_that_lags() -> None:
    """Nodes are lost at every moment of a restore, while the control plane's record of C is any number of commits old.

    No loss destroys the newest commit.
    """
    start = partly_sealed(2)
    shape = Shape(2, 2, later(start, 0), start.faults + 1)
    seen = every_interleaving(UntilStarted(shape, start=start))
    assert {"record", "lose again", "plan", "load", "start"} <= set(seen)
    with pytest.raises(Found, match="was committed"):
        every_interleaving(UntilStarted(shape, BUGS["stale-floor"], start=start))


BREADTH_FIRST = {"early-recycle", "coordinator-forgets"}
RESTORING = {"stale-floor"}
OF_UPLOADS = {"uploads-first", "overwrites-pinned", "unpinned-helpers", "helps-for-ever"}
OF_SEVERAL_UPLOADS = {"unpins-all-uploads", "uploads-without-limit"}
"""Planted bugs that only tests with several uploads at the same time find."""
BY_STORY = {
    "owners-only",
    "base-committed",
    "keep-base-only",
    "never-revokes",
    "no-lineage",
    "untold",
}
"""Planted bugs that only `test_scenarios` finds, because they show only after several faults in a fixed order."""


@pytest.mark.parametrize("bug", sorted(BREADTH_FIRST))
def test_every_interleaving_finds_planted(bug: str) -> None:
    start = steady(2, 2)
    with pytest.raises(Found):
        every_interleaving(Model(Shape(2, 2, later(start, 1), 1), BUGS[bug], start=start))


FIRST_SEEDS = {"counts-captures": 249, "no-promise": 82}
"""The first seed whose walk finds a planted bug, for bugs that few walks find. The other searches begin with seed 0.

After a change of the model, a search may need more seeds.
"""


@pytest.mark.parametrize(
    "bug", sorted(set(BUGS) - BREADTH_FIRST - RESTORING - BY_STORY - OF_UPLOADS - OF_SEVERAL_UPLOADS)
)
def test_random_walks_find_planted(bug: str) -> None:
    starts = {nodes: steady(nodes, 2) for nodes in (2, 3)}

    def search() -> None:
        for seed in range(FIRST_SEEDS.get(bug, 0), 3000):
            for nodes, start in starts.items():
                model = Model(Shape(nodes, 2, later(start, 4), 3), BUGS[bug], is_fine=True, start=start)
                walk(model, random.Random(seed), 150, weights=WEIGHTS)

    with pytest.raises(Found):
        search()


@pytest.mark.parametrize("bug", sorted(OF_UPLOADS))
def test_random_walks_with_uploads_find_planted(bug: str) -> None:
    shape = Shape(2, 2, 5, 0, every_steps=1, has_slow_uploads=True)
    walk_with_uploads(shape, range(30))
    with pytest.raises((Found, AssertionError), match=r"nothing can happen|does not end|being uploaded|sends to S3"):
        walk_with_uploads(shape, range(30), BUGS[bug])


@pytest.mark.parametrize("bug", [None, "uploads-without-limit"])
def test_two_uploads_run_at_the_same_time_and_a_third_one_waits(bug: str | None) -> None:
    """With `max_uploads=2`, a second due upload starts while the first one runs, and a third one waits.

    Training commits further steps meanwhile.
    """
    shape = Shape(2, 2, 8, 0, every_steps=1, max_uploads=2)
    model = Model(shape, BUGS[bug] if bug else None, is_fine=True)
    driver = Driver(model, weights={**SLOWLY, "uploaded": 0.0})
    driver.until(lambda world: all(len(Model.pins(world, rank)) == 2 for rank in range(2)))
    pins = Model.pins(driver.world, 0)
    assert pins == Model.pins(driver.world, 1)
    if bug:
        with pytest.raises((Found, Violation), match="at the same time"):
            driver.until(lambda world: world.coordinator.committed >= pins[1] + 2)
    else:
        driver.until(lambda world: world.coordinator.committed >= pins[1] + 2)
        assert Model.pins(driver.world, 0) == pins


@pytest.mark.parametrize("bug", [None, "unpins-all-uploads"])
def test_the_end_of_an_upload_leaves_the_slot_of_the_other_one(bug: str | None) -> None:
    """When the older of two uploads of rank 0 ends, the slot of the newer upload stays pinned.

    The newer upload outlasts training.
    """
    shape = Shape(2, 2, 8, 0, every_steps=1, max_uploads=2)
    driver = Driver(Model(shape, BUGS[bug] if bug else None, is_fine=True), weights={**SLOWLY, "uploaded": 0.0})
    driver.until(lambda world: len(Model.pins(world, 0)) == 2)
    older, newer = Model.pins(driver.world, 0)
    driver.do("uploaded", 0, older)
    if bug:
        with pytest.raises((Found, Violation), match="being uploaded"):
            driver.until(lambda world: world.coordinator.committed >= newer + 4)
    else:
        driver.until(lambda world: world.coordinator.committed >= newer + 2)
        assert newer in Model.pins(driver.world, 0)


def test_runs_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["2", "2", "1", "0"]) == 0
    assert main(["2", "2", "1", "1", "--steady", "--bug", "majority"]) == 1
    assert "committed" in capsys.readouterr().out
