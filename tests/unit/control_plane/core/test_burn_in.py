"""When a spare is tested, and what its results mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from msgspec import structs

from control_plane.core import burn_in, fleets
from control_plane.core.actions import FleetDecision, Send, TerminateMember
from control_plane.core.burn_in import (
    BOOT_SECONDS,
    IDLE_SECONDS,
    LEAST_OTHERS,
    REPEAT_COUNT,
    RETEST_SECONDS,
    SHARES,
    failure,
    follow,
    is_fit,
    order,
    renewed,
    slow_test,
    slowness,
)
from control_plane.core.observed.facts import NOTHING, SlowNode
from control_plane.core.observed.fleets import FleetJob, Hold, HoldRelease, NodeRecord
from control_plane.core.observed.nodes import BurnIn, Implication, NodeObserved, Remedy
from control_plane.core.states import JobState, NodeState
from everstep.protocol.agent_messages import BurnInOutcome, BurnInResult, BurnInTest, FaultCode, RunBurnIn
from everstep.protocol.ids import JobName, NodeId, RunId
from tests.unit.control_plane.core.test_fleets import POLICY, row, seen
from tests.unit.control_plane.core.test_fleets import SPEC as FLEET

NOW = 1_000_000.0
NODE = NodeObserved(node_id=NodeId("i-1"), is_connected=True, has_reported=True, protocol_minor=RunBurnIn.since_minor)
OLDER = replace(NODE, protocol_minor=RunBurnIn.since_minor - 1)
FAILED, PASSED, UNKNOWN = BurnInOutcome.FAILED, BurnInOutcome.PASSED, BurnInOutcome.UNKNOWN


def result(
    rate: int | None = 100,
    *,
    number: int = 1,
    level: int = 1,
    name: str = "disk-write",
    outcome: BurnInOutcome = PASSED,
) -> BurnInResult:
    test = BurnInTest(name=name, outcome=outcome, rate=rate, text="words" if outcome is not PASSED else "")
    return BurnInResult(number=number, level=level, seconds=1.0, tests=(test,))


def record(given: BurnInResult | None = None, **changes: object) -> BurnIn:
    ordered = BurnIn(number=1, level=1, ordered_at=NOW - 10, result=given, ended_at=0.0 if given is None else NOW)
    return replace(ordered, **changes)  # type: ignore[arg-type]


def followed(
    before: BurnIn | None, *, node: NodeObserved = NODE, others: Sequence[BurnInResult] = (), **times: float
) -> BurnIn | None:
    return follow(before, node, others, **{"since": NOW, "now": NOW, **times})


def test_a_new_node_is_tested_at_level_1_and_no_job_uses_it_meanwhile() -> None:
    first = followed(None)
    assert first == BurnIn(number=1, level=1, ordered_at=NOW)
    assert order(first, NODE, since=NOW, now=NOW) == RunBurnIn(number=1, level=1)
    assert not is_fit(None, NODE, NOW)
    assert not is_fit(first, NODE, NOW + BOOT_SECONDS)
    assert is_fit(first, NODE, NOW + BOOT_SECONDS + 1), "a job waits for a test no longer"


def test_a_result_ends_the_order_and_frees_the_node() -> None:
    ended = followed(record(), node=replace(NODE, burn_in=result()))
    assert ended == record(result())
    assert is_fit(ended, NODE, NOW)
    assert order(ended, NODE, since=NOW, now=NOW) is None
    assert followed(ended, node=NODE) == ended, "a restarted agent has no result, and the node stays tested"


def test_the_result_of_another_order_changes_nothing() -> None:
    assert followed(record(), node=replace(NODE, burn_in=result(number=7))) == record()


def test_an_agent_of_an_earlier_release_is_not_tested_and_jobs_use_its_node() -> None:
    assert followed(None, node=OLDER) is None
    assert is_fit(None, OLDER, NOW)
    assert is_fit(record(), OLDER, NOW)
    assert order(record(), OLDER, since=NOW, now=NOW) is None


def test_an_idle_spare_is_tested_at_level_3_and_again_after_a_day() -> None:
    tested = record(result())
    assert followed(tested, now=NOW + IDLE_SECONDS - 1) == tested
    idle = followed(tested, now=NOW + IDLE_SECONDS)
    assert idle == replace(tested, number=2, level=3, ordered_at=NOW + IDLE_SECONDS)
    assert is_fit(idle, NODE, NOW + IDLE_SECONDS), "jobs may use the node during a test of level 3"
    later = replace(idle, result=result(number=2, level=3), ended_at=NOW)
    assert followed(later, now=NOW + RETEST_SECONDS - 1) == later
    again = followed(later, now=NOW + RETEST_SECONDS)
    assert again is not None
    assert (again.number, again.level, again.is_pending) == (3, 3, True)


def test_an_order_of_level_3_waits_until_the_spare_is_idle() -> None:
    pending = record(result(), number=2, level=3)
    assert order(pending, NODE, since=NOW, now=NOW + IDLE_SECONDS - 1) is None
    assert order(pending, NODE, since=NOW, now=NOW + IDLE_SECONDS) == RunBurnIn(number=2, level=3)


def test_a_node_in_a_new_incident_is_tested_before_its_next_job() -> None:
    line = Implication(node_id=NODE.node_id, incident_id="inc-1", at=NOW + 5, what="agent_lost", evidence=NOTHING)
    suspect = followed(record(result()), node=replace(NODE, history=(line,)), now=NOW + 6)
    assert suspect == BurnIn(number=2, level=1, ordered_at=NOW + 6)
    earlier = replace(line, at=NOW - 5)
    assert followed(record(result()), node=replace(NODE, history=(earlier,))) == record(result())


def test_a_node_is_tested_once_after_an_incident_that_lies_in_the_future_because_the_clock_stepped_back() -> None:
    line = Implication(node_id=NODE.node_id, incident_id="inc-1", at=NOW + 3600, what="agent_lost", evidence=NOTHING)
    node = replace(NODE, history=(line,))
    suspect = followed(record(result()), node=node, now=NOW + 6)
    assert suspect is not None
    assert suspect.number == 2
    tested = followed(suspect, node=replace(node, burn_in=result(number=2)), now=NOW + 7)
    assert tested is not None
    assert tested.result is not None
    assert followed(tested, node=replace(node, burn_in=result(number=2)), now=NOW + 8) == tested


def test_a_node_that_returns_to_service_is_untested() -> None:
    assert renewed(record(result()), NOW) == BurnIn(number=2, level=1, ordered_at=NOW)
    assert renewed(None, NOW) is None


@pytest.mark.parametrize(("outcome", "is_failure"), [(PASSED, False), (UNKNOWN, False), (FAILED, True)])
def test_only_a_failed_test_is_a_fault(outcome: BurnInOutcome, is_failure: bool) -> None:
    fault = failure(record(result(None, name="matmul", outcome=outcome)))
    assert (fault is not None) == is_failure
    if fault is not None:
        assert (fault.code, fault.message) == (FaultCode.BURN_IN_FAILED, "matmul: words")


def test_an_untested_node_has_no_fault() -> None:
    assert failure(None) is failure(record()) is None
    assert slowness(None, ()) is slowness(record(), ()) is None


@pytest.mark.parametrize("name", ["disk-write", "gpu-matmul-3"])
def test_a_rate_below_a_share_of_the_median_of_others_is_slow(name: str) -> None:
    others = [result(rate, name=name) for rate in (800, 1000, 9000)]
    limit = int(1000 * SHARES[name.removesuffix("-3")])
    assert slow_test(result(limit, name=name), others) is None
    expected = SlowNode(test=name, rate=limit - 1, median_rate=1000, other_count=3)
    assert slow_test(result(limit - 1, name=name), others) == expected


def test_too_few_others_another_test_or_no_rate_prove_nothing() -> None:
    others = [result(1000)] * LEAST_OTHERS
    assert slow_test(result(1), others) is not None
    assert slow_test(result(1), others[1:]) is None
    assert slow_test(result(1), [*others[1:], result(1000, name="disk-read"), result(None)]) is None
    assert slow_test(result(None), others) is None
    assert slow_test(result(1, name="matmul"), [result(1000, name="matmul")] * 3) is None


def test_a_slow_result_counts_after_repetitions_in_a_row() -> None:
    others = [result(1000)] * LEAST_OTHERS
    now: BurnIn | None = record(result(1))
    for count in range(1, REPEAT_COUNT + 1):
        assert slowness(now, others) is None
        now = followed(now, others=others)
        assert now is not None
        assert (now.number, now.repeat_count, now.result) == (count + 1, count, None)
        now = followed(now, node=replace(NODE, burn_in=result(1, number=count + 1)))
    assert slowness(now, others) == SlowNode(test="disk-write", rate=1, median_rate=1000, other_count=3)
    assert followed(now, others=others) == now, "the node is not tested once more"
    assert slowness(now, [result(2)] * LEAST_OTHERS) is None


def test_a_repetition_that_is_fast_clears_the_node() -> None:
    others = [result(1000)] * LEAST_OTHERS
    doubted = followed(record(result(1)), others=others)
    cleared = followed(doubted, node=replace(NODE, burn_in=result(900, number=2)), others=others)
    assert is_fit(cleared, NODE, NOW)
    assert slowness(cleared, others) is None


def test_a_node_with_state_of_a_job_gets_no_order() -> None:
    busy = replace(NODE, member=object())  # type: ignore[arg-type]
    assert order(record(), busy, since=NOW, now=NOW) is None
    assert burn_in.can_test(busy)


def decided(
    spare: BurnIn, *others: BurnIn, reported: BurnInResult | None = None, history: tuple[Implication, ...] = ()
) -> FleetDecision:
    """Decide about a fleet with a job that needs one more node than the tested ones, whose other spare is `spare`."""
    records = [record_of("i1", spare), *(record_of(f"i{at}", other) for at, other in enumerate(others, 2))]
    job = FleetJob(
        job=JobName("job"),
        run=RunId("run"),
        state=JobState.ALLOCATING,
        node_count=1 + len(others),
        priority=0,
        created_at=0.0,
    )
    observed = seen(records, [job], desired=len(records))
    nodes = {id: replace(node, protocol_minor=RunBurnIn.since_minor) for id, node in observed.nodes.items()}
    nodes[NodeId("i1")] = replace(nodes[NodeId("i1")], burn_in=reported, history=history)
    return fleets.decide(NOW, FLEET, replace(observed, nodes=nodes), POLICY)


def record_of(name: str, tests: BurnIn) -> NodeRecord:
    return row(name, burn_in=tests, since=NOW)


def test_a_job_starts_only_when_its_nodes_are_tested() -> None:
    waiting = decided(record(), record(result()))
    assert Send(NodeId("i1"), RunBurnIn(number=1, level=1)) in waiting.actions
    assert not [each for each in waiting.records if each.state is NodeState.ASSIGNED]
    tested = decided(record(), record(result()), reported=result())
    assert {each.state for each in tested.records} == {NodeState.ASSIGNED}


def test_a_failed_test_reboots_the_node_and_a_second_one_replaces_it() -> None:
    failed = result(None, name="matmul", outcome=FAILED)
    first = decided(record(), record(result()), reported=failed)
    (rebooted,) = (each for each in first.records if each.node_id == "i1")
    assert rebooted.state is NodeState.REBOOTING
    (line,) = first.implications
    assert (line.what, line.remedy, line.is_own_word) == ("burn_in_failed", Remedy.REBOOT, True)
    second = decided(record(), record(result()), reported=failed, history=(replace(line, at=NOW - 60),))
    assert [each.state for each in second.records if each.node_id == "i1"] == [NodeState.DRAINING]
    assert not [each for each in (*first.records, *second.records) if each.state is NodeState.ASSIGNED]


def test_a_slow_node_is_held_for_a_person_and_never_terminated() -> None:
    slow = decided(record(repeat_count=REPEAT_COUNT), *[record(result(1000))] * LEAST_OTHERS, reported=result(1))
    (held,) = (each for each in slow.records if each.node_id == "i1")
    assert (held.state, held.hold) == (NodeState.HELD, Hold.DISTRUSTED)
    assert held.reason == SlowNode(test="disk-write", rate=1, median_rate=1000, other_count=3)
    (line,) = slow.implications
    assert (line.what, line.remedy, line.is_own_word) == ("node_slow", Remedy.RETIRE, False)
    assert not [each for each in slow.actions if isinstance(each, TerminateMember)]


def test_a_node_that_reports_many_rates_counts_once() -> None:
    others = [result(1)] * (LEAST_OTHERS - 1)
    liar = BurnInResult(number=1, level=1, seconds=1.0, tests=result(10**15).tests * 60)
    assert slow_test(result(1), [*others, liar]) is None
    assert slow_test(result(1), [liar]) is None
    modest = structs.replace(liar, tests=(*liar.tests, *result(2).tests))
    assert slow_test(result(1), [modest] * LEAST_OTHERS) is None, "its lowest rate counts"


@pytest.mark.parametrize(("fleet_size", "held_count"), [(7, 1), (16, 2)])
def test_few_nodes_of_a_fleet_are_held_for_slowness_at_once(fleet_size: int, held_count: int) -> None:
    slow = record(result(1), repeat_count=REPEAT_COUNT)
    fast = record(result(1000))
    records = [record_of(f"i{number}", slow if number < 3 else fast) for number in range(fleet_size)]
    observed = seen(records, [], desired=fleet_size)
    nodes = {id: replace(node, protocol_minor=RunBurnIn.since_minor) for id, node in observed.nodes.items()}
    decision = fleets.decide(NOW, FLEET, replace(observed, nodes=nodes), POLICY)
    assert sum(isinstance(each.reason, SlowNode) for each in decision.records) == held_count


def test_a_released_node_is_tested_again() -> None:
    held = row("i1", NodeState.HELD, hold=Hold.DISTRUSTED, release=HoldRelease.RETURN, burn_in=record(result(1)))
    observed = seen([held], [], desired=1)
    nodes = {id: replace(node, protocol_minor=RunBurnIn.since_minor) for id, node in observed.nodes.items()}
    decision = fleets.decide(NOW, FLEET, replace(observed, nodes=nodes), POLICY)
    (back,) = decision.records
    assert (back.state, back.burn_in) == (NodeState.SPARE, BurnIn(number=2, level=1, ordered_at=NOW))
    assert Send(NodeId("i1"), RunBurnIn(number=2, level=1)) in decision.actions


def test_a_result_is_compared_only_if_another_node_is_much_faster() -> None:
    fast, slow = (
        BurnInResult(
            number=1,
            level=1,
            seconds=1.0,
            tests=(
                BurnInTest(name="disk-read", outcome=BurnInOutcome.PASSED, rate=rate),
                BurnInTest(name="matmul", outcome=BurnInOutcome.PASSED, rate=1),
            ),
        )
        for rate in (1000, 49)
    )
    best = burn_in.best_rates([fast, slow])
    assert best == {"disk-read": 1000, "matmul": 1}
    assert burn_in.may_be_slow(slow, best)
    assert not burn_in.may_be_slow(fast, best)
    assert not burn_in.may_be_slow(structs.replace(slow, tests=slow.tests[1:]), best), "this rate is not compared"
