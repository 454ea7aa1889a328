"""Tests the comparison of repeated steps with the same steps before a recovery."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from control_plane.core.actions import EventDraft
from control_plane.core.observed.steps import SealedStates
from control_plane.core.repeated_steps import followed, wrong_bases
from everstep.protocol.agent_messages import MemberPhase, MemberReport, ShardProtection, state_count
from everstep.protocol.ids import Generation, JobName, NodeId, Rank, Step
from everstep.protocol.plan import GenerationPlan, Relayout, ShardSource
from everstep.protocol.slot import STATE_DIGEST_BYTES
from tests.unit.worker.rank_plans import RUN, rank_plan

Sealed = Mapping[int, Mapping[int, int]]
"""By rank and step: the number that stands for the state's digest."""
BEFORE: Sealed = {0: {11: 1, 12: 2, 13: 3}, 1: {11: 5, 12: 6}}


def plan(generation: int = 1, base: int = 0, *, nodes: int = 2, **changes: Any) -> GenerationPlan:
    made = rank_plan(addresses=tuple("abcd"[:nodes]), generation=generation)
    return msgspec.structs.replace(made, base_step=Step(base), **changes)


def digest(number: int) -> bytes:
    return number.to_bytes(STATE_DIGEST_BYTES, "big")


def reports(sealed: Sealed) -> dict[NodeId, MemberReport]:
    return {
        NodeId(f"i-{rank}"): MemberReport(
            job=JobName("job"),
            run=RUN,
            generation=Generation(1),
            phase=MemberPhase.RUNNING,
            protection=(
                ShardProtection(
                    rank=Rank(rank),
                    holders=(),
                    in_view=(),
                    committed=Step(10),
                    payload_bytes=1,
                    states=tuple((Step(step), digest(number)) for step, number in sorted(of_rank.items())),
                ),
            ),
        )
        for rank, of_rank in sealed.items()
    }


def found(
    *passes: tuple[GenerationPlan, Sealed], before: SealedStates | None = None
) -> tuple[SealedStates, list[EventDraft]]:
    """Return the digests after several reports, each with the plan of its generation, and all events."""
    states, events = before or SealedStates(), list[EventDraft]()
    for of_generation, sealed in passes:
        states, more = followed(states, of_generation, reports(sealed))
        assert followed(states, of_generation, reports(sealed)) == (states, ())
        events += more
    return states, events


def test_a_step_that_is_repeated_with_another_state_is_reported_once_with_step_and_rank() -> None:
    again = {0: {11: 1, 12: 9, 13: 9}, 1: {11: 5, 12: 7}}
    _, (event,) = found((plan(), BEFORE), (plan(2, base=10), again), (plan(2, base=10), {0: {13: 9, 14: 9}}))
    assert event.type == "RepeatedStepDiffers"
    assert event.detail == {"Step": 12, "Rank": 0, "Before": digest(2).hex(), "After": digest(9).hex()}


def test_the_digests_of_several_reports_are_compared_when_all_ranks_of_before_have_died() -> None:
    passes = [(plan(2, base=10), {1: {step: number}}) for step, number in ((11, 5), (12, 7))]
    _, (event,) = found((plan(), {0: BEFORE[0]}), (plan(), {1: BEFORE[1]}), *passes)
    assert (event.detail["Step"], event.detail["Rank"]) == (12, 1)


@pytest.mark.parametrize(
    ("of_plan", "again"),
    [
        pytest.param(plan(2, base=10), BEFORE, id="equal"),
        pytest.param(plan(2, base=10), {0: {14: 9}, 1: {13: 9}}, id="steps that were not sealed before"),
        pytest.param(plan(2, base=10), {}, id="agents that report no digest"),
        pytest.param(plan(2, base=12), {0: {12: 9}}, id="the base was not repeated"),
        pytest.param(plan(2, base=10, nodes=3), {0: {12: 9}}, id="another number of ranks"),
        pytest.param(plan(2, base=10, relayout=Relayout(world_size=2, shards=())), {0: {12: 9}}, id="another layout"),
        pytest.param(plan(1), {0: {12: 9}}, id="the final step of the same generation is captured twice"),
        pytest.param(plan(2, base=10), {2: {12: 9}}, id="a rank that does not exist"),
    ],
)
def test_without_two_digests_of_a_repeated_step_nothing_is_reported(of_plan: GenerationPlan, again: Sealed) -> None:
    assert found((plan(), BEFORE), (of_plan, again))[1] == []


def test_a_rank_that_does_not_exist_hides_no_difference_of_another() -> None:
    _, (event,) = found((plan(), BEFORE), (plan(2, base=10), {2: {12: 9}, 0: {12: 9}}))
    assert (event.detail["Step"], event.detail["Rank"]) == (12, 0)


def test_a_step_is_compared_as_long_as_a_rank_can_still_report_it() -> None:
    _, (event,) = found((plan(), BEFORE), (plan(2, base=10), {0: {12: 2}}), (plan(2, base=10), {1: {12: 7}}))
    assert (event.detail["Step"], event.detail["Rank"]) == (12, 1)


def test_digests_of_a_generation_that_ended_before_it_repeated_a_step_still_count() -> None:
    short = {0: {11: 1}}
    _, (event,) = found((plan(), BEFORE), (plan(2, base=10), short), (plan(3, base=10), {0: {13: 9}}))
    assert event.detail["Step"] == 13


def test_only_the_newest_steps_are_kept_and_older_ones_are_compared_no_more() -> None:
    count = state_count(2)
    states, _ = found(*((plan(), {0: {step: step}}) for step in range(1, 2 * count)))
    assert [each.step for each in states.newest] == list(range(count, 2 * count))
    later = ((plan(2, base=count), {0: {step: step}}) for step in range(2 * count, 3 * count))
    assert found(*later, before=states)[0].earlier == ()


def test_the_digests_of_1024_ranks_take_little_room() -> None:
    many = msgspec.structs.replace(plan(), ranks=plan().ranks * 512)
    sealed = {rank: {step: step for step in range(1, 9)} for rank in range(1024)}
    states, _ = followed(SealedStates(), many, reports(sealed))
    assert len(msgspec.json.encode(states)) < 25_000


def restored(origin: int, base: int, *, nodes: int = 2, **changes: Any) -> GenerationPlan:
    """Return a plan that restores a step which generation `origin` made."""
    made = plan(2, base, nodes=nodes, **changes)
    source = ShardSource(
        kind="peer", origin_generation=Generation(origin), step=Step(base), digest=bytes(16), payload_bytes=1
    )
    ranks = tuple(msgspec.structs.replace(rank, sources=(source,)) for rank in made.ranks)
    return msgspec.structs.replace(made, ranks=ranks)


def test_a_restored_state_that_the_former_owner_did_not_seal_is_wrong() -> None:
    states, _ = found((plan(), BEFORE))
    assert wrong_bases(states, restored(1, 12), reports({0: {12: 9}, 1: {12: 6}})) == {0: "i-0"}
    assert wrong_bases(states, restored(1, 12), reports({0: {12: 2}, 1: {12: 7}})) == {1: "i-1"}


@pytest.mark.parametrize(
    ("of_plan", "loaded"),
    [
        pytest.param(restored(1, 12), {0: {12: 2}, 1: {12: 6}}, id="equal"),
        pytest.param(restored(1, 12), {0: {}}, id="agents that report no digest"),
        pytest.param(restored(1, 14), {0: {14: 9}}, id="a step that the owner has not reported"),
        pytest.param(restored(1, 13), {1: {13: 9}}, id="a step that this rank has not reported"),
        pytest.param(restored(0, 12), {0: {12: 9}}, id="another generation made the base"),
        pytest.param(restored(1, 12, nodes=3), {0: {12: 9}}, id="another number of ranks"),
        pytest.param(restored(1, 12, relayout=Relayout(world_size=2, shards=())), {0: {12: 9}}, id="another layout"),
        pytest.param(restored(1, 12), {2: {12: 9}}, id="a rank that does not exist"),
    ],
)
def test_without_the_owners_digest_no_restored_state_is_wrong(of_plan: GenerationPlan, loaded: Sealed) -> None:
    states, _ = found((plan(), BEFORE))
    assert wrong_bases(states, of_plan, reports(loaded)) == {}
