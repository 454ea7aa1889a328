"""All-reduces between idle spares: which spares are paired, and which nodes are held for the results.

paired          A ─ B      C ─ D      E
one bad node    A ─ x, B ─ x and A ─ B: x is held. With A alone, nothing is decided
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import pytest
from msgspec import structs

from control_plane.core import fleets
from control_plane.core.actions import FleetDecision, Send, TerminateMember
from control_plane.core.burn_in import IDLE_SECONDS, RETEST_SECONDS, renewed
from control_plane.core.observed.facts import SlowNode
from control_plane.core.observed.fleets import FleetJob, Hold, HoldRelease
from control_plane.core.observed.nodes import BurnIn
from control_plane.core.pair_tests import LIMIT_SECONDS, MOST_PARTNERS, SHARE, Rates, rates_of, slowness
from control_plane.core.states import JobState, NodeState
from everstep.protocol.agent_messages import BurnInOutcome, BurnInPartner, BurnInResult, BurnInTest, RunBurnIn
from everstep.protocol.ids import JobName, NodeId, RunId
from tests.unit.control_plane.core.test_fleets import POLICY, row, seen
from tests.unit.control_plane.core.test_fleets import SPEC as FLEET

NOW = 1_000_000.0
RATE = 1_000_000
FAILED, PASSED, UNKNOWN = BurnInOutcome.FAILED, BurnInOutcome.PASSED, BurnInOutcome.UNKNOWN
OWN = BurnInResult(number=2, level=3, seconds=1.0, tests=(BurnInTest(name="matmul", outcome=PASSED),))
TESTED = BurnIn(number=2, level=3, ordered_at=NOW, result=OWN, ended_at=NOW)
Words = Callable[["Fleet", str, str], BurnInTest | None]
"""The result that a node reports for its all-reduce with a partner. None if it reports none."""


def all_reduce(outcome: BurnInOutcome = PASSED, rate: int | None = RATE) -> BurnInTest:
    return BurnInTest(name="all-reduce", outcome=outcome, rate=rate if outcome is PASSED else None)


def of_bad_nodes(fleet: Fleet, node: str, partner: str) -> BurnInTest | None:
    """Return what an honest node reports: a pair with a bad node has a wrong sum."""
    return all_reduce(FAILED if {node, partner} & fleet.bad else PASSED)


@dataclass
class Fleet:
    """Spares that have been idle for some time, whose agents answer the orders of `fleets.decide`."""

    names: Sequence[str]
    bad: frozenset[str] = frozenset()
    words: Words = of_bad_nodes
    minor: int = BurnInPartner.since_minor
    now: float = NOW
    jobs: list[FleetJob] = field(default_factory=list)
    pairs: list[frozenset[str]] = field(default_factory=list)
    """The pairs that were tested, in their order."""

    def __post_init__(self) -> None:
        self.rows = {NodeId(name): row(name, burn_in=TESTED, since=self.now - IDLE_SECONDS) for name in self.names}
        self.reported: dict[NodeId, BurnInResult] = {}

    def decide(self) -> FleetDecision:
        """Make one decision, and store its records."""
        observed = seen(list(self.rows.values()), self.jobs, desired=len(self.rows), max_size=100)
        nodes = {
            id: replace(node, protocol_minor=self.minor, address=f"a-{id}", burn_in=self.reported.get(id))
            for id, node in observed.nodes.items()
        }
        spec = replace(FLEET, min_node_count=len(self.rows), spare_count=0)
        decision = fleets.decide(self.now, spec, replace(observed, nodes=nodes), POLICY)
        assert not [each for each in decision.actions if isinstance(each, TerminateMember)]
        self.rows |= {record.node_id: record for record in decision.records}
        return decision

    def run(self, passes: int = 12) -> None:
        """Make decisions, and let the agents answer them."""
        for _ in range(passes):
            orders = orders_of(self.decide())
            pairs = {frozenset((str(id), str(to.node_id))): None for id, (_, to) in orders.items()}
            self.pairs += [pair for pair in pairs if pair not in self.pairs[-len(self.names) :]]
            for id, (number, to) in orders.items():
                if (test := self.words(self, id, to.node_id)) is not None:
                    self.reported[id] = BurnInResult(number=number, level=3, seconds=1.0, tests=(test,))
            self.now += 10

    def held(self) -> dict[str, SlowNode]:
        assert all(row.hold is Hold.DISTRUSTED for row in self.rows.values() if row.state is NodeState.HELD)
        return {str(row.node_id): row.reason for row in self.rows.values() if isinstance(row.reason, SlowNode)}


def orders_of(decision: FleetDecision) -> dict[NodeId, tuple[int, BurnInPartner]]:
    return {
        action.node_id: (action.message.number, action.message.partner)
        for action in decision.actions
        if isinstance(action, Send) and isinstance(action.message, RunBurnIn) and action.message.partner is not None
    }


def test_two_idle_spares_receive_orders_for_the_same_all_reduce_once_a_day() -> None:
    fleet = Fleet(("i1", "i2", "i3"))
    orders = orders_of(fleet.decide())
    assert {id: (number, to.node_id, to.place) for id, (number, to) in orders.items()} == {
        "i1": (3, "i2", 0),
        "i2": (3, "i1", 1),
    }
    assert {to.address for _, to in orders.values()} == {"a-i1", "a-i2"}
    assert len({to.port for _, to in orders.values()}) == 1
    assert orders_of(fleet.decide()) == orders, "orders are repeated until both have reported"
    fleet.run()
    assert len(fleet.pairs) == len(set(fleet.pairs)) == 2, "the third spare has a partner too"
    fleet.now += RETEST_SECONDS - LIMIT_SECONDS
    assert not orders_of(fleet.decide())
    fleet.now += LIMIT_SECONDS
    fleet.rows = {
        node_id: replace(row, burn_in=replace(row.burn_in, ended_at=fleet.now)) for node_id, row in fleet.rows.items()
    }  # type: ignore[type-var]
    assert orders_of(fleet.decide())


def test_an_agent_of_an_earlier_release_receives_no_partner() -> None:
    earlier = Fleet(("i1", "i2"), minor=BurnInPartner.since_minor - 1)
    earlier.run()
    assert earlier.pairs == []


@pytest.mark.parametrize(
    "change",
    [
        {"since": NOW - IDLE_SECONDS + 1},
        {"burn_in": BurnIn(number=2, level=1, ordered_at=NOW)},
        {"burn_in": None},
        {"state": NodeState.HELD, "hold": Hold.PERSON},
    ],
)
def test_only_idle_and_tested_spares_are_paired(change: dict[str, object]) -> None:
    fleet = Fleet(("i1", "i2"))
    fleet.rows[NodeId("i2")] = replace(fleet.rows[NodeId("i2")], **change)  # type: ignore[arg-type]
    assert not orders_of(fleet.decide())


@pytest.mark.parametrize("names", [("i1", "i2", "i3"), ("i1", "i2", "i3", "i4"), tuple(f"i{n}" for n in range(1, 20))])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_node_that_fails_with_two_partners_is_held(names: Sequence[str], is_first: bool) -> None:
    bad = names[0] if is_first else names[-1]
    fleet = Fleet(names, frozenset({bad}))
    fleet.run()
    assert fleet.held() == {bad: SlowNode(test="all-reduce", rate=0, median_rate=RATE, other_count=2)}
    assert sum(bad in pair for pair in fleet.pairs) <= MOST_PARTNERS
    assert len(fleet.pairs) <= len(names), "healthy nodes are hardly tested again"


def test_two_nodes_alone_decide_nothing() -> None:
    fleet = Fleet(("i1", "i2"), frozenset({"i2"}))
    fleet.run()
    assert (fleet.held(), fleet.pairs) == ({}, [frozenset({"i1", "i2"})])
    (pair,) = fleet.rows[NodeId("i1")].burn_in.pairs  # type: ignore[union-attr]
    assert pair.test is not None
    assert (pair.test.outcome, pair.test.text) == (FAILED, "(with i2)"), "a person sees it"


@pytest.mark.parametrize("bad", [("i1", "i2"), ("i1", "i6"), ("i3", "i4")])
def test_one_of_two_bad_nodes_is_held_and_a_healthy_node_never(bad: tuple[str, str]) -> None:
    fleet = Fleet([f"i{number}" for number in range(1, 7)], frozenset(bad))
    fleet.run(30)
    assert len(fleet.held()) == 1, "few nodes of a fleet are held at once"
    assert fleet.held().keys() <= fleet.bad
    larger = Fleet([f"i{number}" for number in range(1, 19)], frozenset(bad))
    larger.run(30)
    assert larger.held().keys() == larger.bad


def test_a_node_that_lies_about_all_its_pairs_is_held_and_no_other_node() -> None:
    def words(fleet: Fleet, node: str, partner: str) -> BurnInTest:
        return structs.replace(all_reduce(), outcome=FAILED if node == "i2" else PASSED)

    fleet = Fleet([f"i{number}" for number in range(1, 6)], words=words)
    fleet.run()
    assert fleet.held().keys() == {"i2"}


def test_a_node_cannot_raise_a_rate_alone() -> None:
    def words(fleet: Fleet, node: str, partner: str) -> BurnInTest:
        return all_reduce(rate=10**15 if node == "i2" else RATE)

    fleet = Fleet([f"i{number}" for number in range(1, 6)], words=words)
    fleet.run()
    assert fleet.held() == {}
    assert {rate for pairs in rates_of(list(fleet.rows.values()), fleet.now).values() for rate in pairs.values()} == {
        RATE
    }


@pytest.mark.parametrize(("rate", "is_held"), [(int(SHARE * RATE) - 1, True), (int(SHARE * RATE) + 1, False)])
def test_a_node_that_is_slow_with_two_partners_is_held(rate: int, is_held: bool) -> None:
    def words(fleet: Fleet, node: str, partner: str) -> BurnInTest:
        return all_reduce(rate=rate if "i3" in (node, partner) else RATE)

    fleet = Fleet([f"i{number}" for number in range(1, 6)], words=words)
    fleet.run()
    expected = SlowNode(test="all-reduce", rate=rate, median_rate=RATE, other_count=2)
    assert fleet.held() == ({"i3": expected} if is_held else {})


@pytest.mark.parametrize("good", [True, False])
def test_failures_do_not_count_against_a_node_with_a_good_partner(good: bool) -> None:
    rates = {
        "i1": {"i2": RATE if good else 0, "i3": 0, "i4": 0},
        "i2": {"i1": RATE if good else 0},
        "i3": {"i1": 0, "i5": RATE},
        "i4": {"i1": 0, "i5": RATE},
        "i5": {"i3": RATE, "i4": RATE},
    }
    found = slowness(NodeId("i1"), cast(Rates, rates))
    assert (found is None) == good


@pytest.mark.parametrize("silent_word", [None, all_reduce(UNKNOWN)])
def test_a_pair_without_two_results_is_no_evidence(silent_word: BurnInTest | None) -> None:
    """A partner that dies reports nothing, and the other node a sum that did not end."""

    def words(fleet: Fleet, node: str, partner: str) -> BurnInTest | None:
        return silent_word if node == "i2" else all_reduce(FAILED if partner == "i2" else PASSED)

    fleet = Fleet([f"i{number}" for number in range(1, 6)], words=words)
    fleet.run(200)
    assert fleet.held() == {}
    record = fleet.rows[NodeId("i2")].burn_in
    assert record is not None
    assert record.number == 2 + MOST_PARTNERS, "the test is not repeated without end"


def test_a_job_receives_a_node_whose_all_reduce_is_pending() -> None:
    fleet = Fleet(("i1", "i2"))
    assert orders_of(fleet.decide())
    fleet.jobs = [
        FleetJob(
            job=JobName("job"),
            run=RunId("run"),
            state=JobState.ALLOCATING,
            node_count=1,
            priority=0,
            created_at=0.0,
        )
    ]
    fleet.decide()
    (busy,) = (id for id, row in fleet.rows.items() if row.state is NodeState.ASSIGNED)
    (idle,) = fleet.rows.keys() - {busy}
    number = fleet.rows[idle].burn_in.number  # type: ignore[union-attr]
    fleet.reported[idle] = BurnInResult(number=number, level=3, seconds=1.0, tests=(all_reduce(FAILED),))
    fleet.jobs = []
    fleet.now += 60
    fleet.decide()
    assert fleet.rows[busy].state is NodeState.SPARE
    fleet.decide()
    pending = {id: row.burn_in.is_pending for id, row in fleet.rows.items() if row.burn_in is not None}
    assert pending == {busy: False, idle: False}, "the interrupted test has ended without a result"
    assert rates_of(list(fleet.rows.values()), fleet.now) == {busy: {idle: None}, idle: {busy: None}}


def test_a_node_that_returns_is_tested_with_the_same_partners_again() -> None:
    fleet = Fleet(("i1", "i2", "i3"), frozenset({"i3"}))
    fleet.run()
    held = fleet.rows[NodeId("i3")]
    released = replace(held, release=HoldRelease.RETURN)
    fleet.rows[held.node_id], fleet.bad = released, frozenset()
    fleet.decide()
    back = fleet.rows[held.node_id]
    assert (back.state, back.burn_in) == (NodeState.SPARE, renewed(held.burn_in, fleet.now))
    assert rates_of(list(fleet.rows.values()), fleet.now)[NodeId("i1")] == {"i2": RATE}
    tested = replace(TESTED, number=9, result=structs.replace(OWN, number=9))
    fleet.rows[held.node_id] = replace(back, burn_in=tested, since=fleet.now - IDLE_SECONDS)
    fleet.run()
    assert fleet.held() == {}
    assert len(rates_of(list(fleet.rows.values()), fleet.now)[NodeId("i3")]) == 1


def test_own_results_stay_beside_the_all_reduce() -> None:
    fleet = Fleet(("i1", "i2"))
    fleet.run()
    record = fleet.rows[NodeId("i1")].burn_in
    assert record is not None
    assert record.result is not None
    assert ([test.name for test in record.result.tests], record.is_pending) == (["matmul"], False)
    assert [pair.test for pair in record.pairs] == [structs.replace(all_reduce(), text="(with i2)")]
