"""Every rank stops or rehearses after the same step, every rank closes, and no process waits forever.

The tests explore all interleavings of small clusters and long random walks.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from everstep.protocol.rank_messages import StopState
from tests.model.explore import Driver, Found, walk
from tests.model.stop_agreement import BUGS, RARELY, FewSnapshots, Mode, Model, Options, World, explore, main
from tests.model.world import NONE
from worker.core.proposal_lead import Lead
from worker.core.rounds import Coordinator

pytestmark = pytest.mark.timeout(600)


@pytest.mark.long(keep=4)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(Options(2, 1), id="stop"),
        pytest.param(Options(2, 1, restarts=1, may_stop=False), id="end, coordinator restarts"),
        pytest.param(Options(2, 2, may_stop=False), id="end"),
        pytest.param(Options(2, 2, every_steps=1, may_stop=False), id="uploads pin slots"),
        pytest.param(
            Options(2, 3, every_steps=1, may_stop=False, has_slow_uploads=True), id="uploads outlast training"
        ),
        pytest.param(Options(2, 2, every_steps=1, slot_count=3, may_stop=False), id="uploads, a third slot"),
        pytest.param(Options(2, 1, may_stop=False, may_hurry=True), id="given up"),
        pytest.param(Options(2, 1, has_uploads=True), id="stop, what is left behind"),
        pytest.param(Options(2, 2, may_stop=False, has_uploads=True), id="end, what is left behind"),
    ],
)
def test_every_interleaving(options: Options) -> None:
    assert explore(options).states > 300


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(Options(2, 2), id="stop"),
        pytest.param(Options(2, 1, restarts=1), id="stop, coordinator restarts"),
        pytest.param(Options(2, 1, every_steps=1), id="stop, uploads"),
        pytest.param(Options(2, 1, may_hurry=True), id="stop, given up"),
        pytest.param(Options(2, 1, may_hurry=True, may_hang=True, has_uploads=True), id="stop, hangs"),
        pytest.param(Options(2, 1, may_stop=False, is_fine=True), id="messages travel"),
        pytest.param(Options(3, 1, may_stop=False), id="three ranks"),
        pytest.param(
            Options(2, 2, may_stop=False, rehearsed_steps=1, may_refuse=True, coordinator=FewSnapshots),
            id="rehearsal, refused",
        ),
        pytest.param(
            Options(2, 2, restarts=1, may_stop=False, rehearsed_steps=1, coordinator=FewSnapshots),
            id="rehearsal, coordinator restarts",
        ),
    ],
)
def test_every_interleaving_of_more(options: Options) -> None:
    explore(options)


def follow(options: Options, seeds: range) -> None:
    for seed in seeds:
        model = Model(options)
        world, seen = walk(model, random.Random(seed), 4000, weights=RARELY)
        assert model.is_done(world), f"seed {seed}: after {seen.states} events somebody is still there: {world}"


@pytest.mark.long(keep=1)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("every", [0, 2])
def test_random_walks_with_messages_on_their_way(ranks: int, every: int) -> None:
    follow(Options(ranks, 6, restarts=2, every_steps=every, is_fine=True), range(40))
    follow(Options(ranks, 6, restarts=1, every_steps=every, may_hurry=True, is_fine=True), range(15))
    follow(Options(ranks, 6, restarts=1, every_steps=every, has_slow_uploads=True, is_fine=True), range(15))
    follow(
        Options(ranks, 6, restarts=1, every_steps=every, may_hurry=True, may_hang=True, has_uploads=True, is_fine=True),
        range(25),
    )
    follow(Options(ranks, 6, restarts=1, every_steps=every, may_stop=False, rehearsed_steps=1, is_fine=True), range(15))
    follow(Options(ranks, 6, rehearsed_steps=2, may_refuse=True, may_hurry=True, is_fine=True), range(15))


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_many_random_walks(ranks: int) -> None:
    follow(Options(ranks, 10, restarts=4, every_steps=3, may_hurry=True, is_fine=True), range(1000, 2000))
    follow(Options(ranks, 10, restarts=4, every_steps=3, slot_count=3, is_fine=True), range(2000, 3000))


BY_WALK = {
    "forgets-confirmed",
    "forgets-mark",
    "leaves-nothing",
    "forgets-cancelled",
    "rehearses-early",
    "rehearses-with-one",
    "never-withdraws-rehearsal",
    "captures-again",
}
OF_THREE_STEPS = {"uploads-first"}
BY_STORY = {"reuses-number", "reuses-rehearsal", "forgets-rehearsal", "forgets-steps"}


@pytest.mark.long(keep=2)
@pytest.mark.parametrize("bug", sorted(set(BUGS) - BY_WALK - BY_STORY))
def test_planted_bugs_are_found(bug: str) -> None:
    with pytest.raises(Found):
        explore(replace(Options(2, 3 if bug in OF_THREE_STEPS else 2), **BUGS[bug]))  # type: ignore[arg-type]


@pytest.mark.long(keep=1)
@pytest.mark.parametrize("bug", sorted(BY_WALK))
def test_random_walks_find_planted(bug: str) -> None:
    with pytest.raises(Found):
        follow(replace(Options(2, 6, is_fine=True), **BUGS[bug]), range(500))  # type: ignore[arg-type]


def test_an_answer_to_an_earlier_stop_does_not_confirm_a_later_stop() -> None:
    """A rank's answer to an earlier stop must not confirm a later stop.

    An answer names the step of its stop. The coordinator therefore announces a later stop at another step than every
    earlier stop.

    The coordinator's agent restarts while a stop at step 1 is announced. Both ranks have accepted that stop. They learn
    that it no longer exists, and continue. Then the control plane requests a stop again, and the coordinator announces
    step 2. With the planted bug, it announces step 1 again.
    """

    def tell(bug: dict[str, object]) -> Coordinator:
        story = Driver(Model(replace(Options(2, 3, restarts=1), **bug)), weights={})  # type: ignore[arg-type]
        reports, hears, go = [("report", 0), ("report", 1)], [("hear", 0), ("hear", 1)], [("go", 0), ("go", 1)]
        asked = [*reports, *go, ("ask",), ("request stop",), *hears, ("restart",), *reports]
        for event in (
            *asked,
            ("boundary", 0, 1),
            ("boundary", 1, 1),
            *hears,
            *go,
            ("request stop",),
            *reports,
            ("boundary", 0, 2),
        ):
            story.do(*event)
        return story.world.coordinator

    announced = tell({})
    assert (announced.stop, announced.stop_state) == (2, StopState.ANNOUNCED)
    with pytest.raises(Found, match="passes 2 although a stop at 1 is confirmed"):
        tell(BUGS["reuses-number"])


REPORTS, HEARS, GO = ([(name, 0), (name, 1)] for name in ("report", "hear", "go"))
"""Both ranks' reports to the coordinator, its announcements to both agents, and both ranks' next step."""


def rehearsing(bug: str = "", *, lead: int = 1) -> Driver[World]:
    """Return a scenario in which both ranks are in their first step, and a rehearsal of one step is announced."""
    options = replace(Options(2, 9, restarts=1, may_stop=False, rehearsed_steps=1), coordinator=FewSnapshots)
    story = Driver(Model(replace(options, **BUGS.get(bug, {}))), weights={})  # type: ignore[arg-type]
    story.world = story.world._replace(coordinator=replace(story.world.coordinator, lead=Lead(lead)))
    play(story, *REPORTS, *GO, ("order",), ("request rehearsal",), *HEARS)
    return story


def play(story: Driver[World], *events: tuple[object, ...]) -> None:
    for event in events:
        story.do(*event)


def boundary(step: int) -> list[tuple[object, ...]]:
    return [("boundary", 0, step), ("boundary", 1, step)]


def confirmed_rehearsal(bug: str) -> Driver[World]:
    """Return a scenario in which both ranks wait for the rehearsal after step 2, and only rank 0 begins it.

    The coordinator's agent restarts before agent 1 has received the confirmation.
    """
    story = rehearsing(bug)
    play(story, *boundary(1), *GO, *boundary(2), *REPORTS, ("hear", 0), ("restart",), *REPORTS, ("hear", 1))
    return story


def test_a_restarted_coordinator_continues_a_confirmed_rehearsal() -> None:
    story = confirmed_rehearsal("")
    assert [process.mode for process in story.world.processes] == [Mode.REHEARSING] * 2
    story.until(lambda world: all(process.boundary == 3 for process in world.processes))
    assert [process.rehearsed for process in story.world.processes] == [2, 2]
    assert story.world.coordinator.final == NONE


@pytest.mark.parametrize(
    ("bug", "what"),
    [
        ("forgets-rehearsal", "rank 1 is missing from the rehearsal at 2"),
        ("forgets-steps", "a rank repeats 0 steps"),
    ],
)
def test_a_restart_in_a_rehearsal_finds_planted(bug: str, what: str) -> None:
    with pytest.raises(Found, match=what):
        confirmed_rehearsal(bug)


def test_an_answer_to_an_earlier_rehearsal_does_not_confirm_a_later_one() -> None:
    """Both ranks agree to a rehearsal after step 3, before the coordinator's agent restarts and withdraws it.

    The ranks then pass step 2 without a copy of their state. The control plane repeats its order before the next
    reports. With the planted bug, the coordinator announces step 3 again.
    """

    def tell(bug: str) -> Driver[World]:
        story = rehearsing(bug, lead=2)
        assert story.world.coordinator.rehearsal.step == 3
        play(story, *boundary(1), ("restart",), *REPORTS, *HEARS, *GO, *boundary(2), *GO)
        play(story, ("request rehearsal",), *HEARS, *boundary(3))
        return story

    assert tell("").world.coordinator.rehearsal.step == 5
    story = tell("reuses-rehearsal")
    play(story, *REPORTS)
    with pytest.raises(Found, match="a rank repeats 1 steps from -1"):
        story.do("hear", 0)


def test_the_last_step_is_committed_although_it_was_captured_for_its_first_proposal() -> None:
    """The last step is committed, although a rank captured it for an earlier proposal.

    The coordinator's agent restarts after one rank captured the last step, before the rank's agent received the
    capture. The coordinator then proposes the step again.
    """
    story = Driver(Model(Options(2, 1, restarts=1, may_stop=False, is_fine=True)), weights={})
    both = ["send report", "report", "announce", "hear"]
    for name in ("go", "boundary", "close", *both, "grant"):
        for rank in (0, 1):
            story.do(name, rank)
    story.do("look", 1)
    story.do("restart")
    for name in both:
        for rank in (0, 1):
            story.do(name, rank)
    assert [agent.shard.proposed for agent in story.world.agents] == [NONE, NONE]
    story.do("deliver", 1)
    for name in both:
        for rank in (0, 1):
            story.do(name, rank)
    story.until(story.model.is_done, limit=200)
    assert story.world.coordinator.committed == 1


def test_an_upload_of_the_committed_step_continues_when_the_final_step_needs_a_slot() -> None:
    """To free a slot for the final step, an agent cancels the upload of an older step, but never of the committed step.

    Each agent has two slots. Both agents upload step 1 when step 2 is committed and the coordinator's agent (agent 0)
    restarts. Agent 0 loses its upload of step 1 and begins to upload the committed step 2. Agent 1 still uploads step
    1, so its slots of steps 1 and 2 are both in use, and it has no slot for the final step 3.

    The coordinator therefore marks step 3 for upload. Agent 1 then cancels its upload of step 1. Agent 0 continues its
    upload of step 2, because the slot of the committed step must stay anyway.

    The ranks do not commit step 3. Both agents have uploaded step 2 at the end.
    """
    story = Driver(Model(Options(2, 3, restarts=1, every_steps=1, may_hurry=True)), weights={})

    def do(*names: str) -> None:
        for name in names:
            for rank in (0, 1):
                story.do(name, rank)

    do("hear", "go", "boundary", "report", "hear", "go", "boundary", "report")
    assert [agent.pinned for agent in story.world.agents] == [1, 1]
    story.do("ask")
    story.do("restart")
    do("report", "hear")
    assert [agent.pinned for agent in story.world.agents] == [2, 1]
    do("go", "boundary", "close", "report")
    story.do("request stop")
    assert (story.world.coordinator.proposed, story.world.coordinator.persist) == (3, 3)
    story.do("hear", 0)
    assert not story.can("cancelled", 0)
    story.do("hear", 1)
    story.do("cancelled", 1)
    story.do("end final round")
    do("hear", "uploaded")
    assert [agent.uploaded for agent in story.world.agents] == [2, 2]


def test_stopping_in_one_phase_deadlocks() -> None:
    with pytest.raises(Found) as found:
        explore(replace(Options(2, 2), **BUGS["one-phase"]))  # type: ignore[arg-type]
    assert "confirmed" in found.value.what or "can happen" in found.value.what


def test_runs_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["2", "1", "0", "--no-stop"]) == 0
    assert main(["2", "2", "0", "--bug", "rank-alone"]) == 1
    assert "stop" in capsys.readouterr().out
