"""Every part is transferred exactly once when a shared upload or load ends, even if helpers fail."""

from __future__ import annotations

from collections import Counter
from typing import Literal

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from everstep.protocol.ids import Generation, NodeId, Rank, Step
from everstep.protocol.plan import Relayout, ShardSource
from tests.unit.worker.rank_plans import rank_plan
from worker.core.shared_parts import LATE_SECONDS, MAX_LOAD_HELPERS, MAX_WINDOW, SharedParts, home_of, load_helpers

HELPERS = (NodeId("i-1"), NodeId("i-2"), NodeId("i-3"))
A = HELPERS[0]
EVENTS = ("claim", "assign", "store", "store twice", "store another's", "lose", "late")


def states_of(state: SharedParts, sent: set[int]) -> list[int]:
    """Return the numbers of all parts. A part occurs once for each state that it has.

    A part may be sent by the owner, outstanding or stored at a helper, or missing. The test checks that each part has
    one state.
    """
    own = {*range(1, state.lowest), *sent}
    return sorted([*own, *state.outstanding, *state.finished, *state.missing])


@given(st.data(), st.integers(1, 12))
def test_each_part_has_one_state_and_the_owner_sends_what_helpers_do_not(data: st.DataObject, part_count: int) -> None:
    state = SharedParts.begin(part_count, HELPERS[: data.draw(st.integers(0, 3))], 0.0)
    walked, now, sent, wrong = 0, 0.0, set[int](), set[int]()
    asked = set(state.outstanding)
    for event in data.draw(st.lists(st.sampled_from(EVENTS), max_size=60)):
        helper = data.draw(st.sampled_from(HELPERS))
        if event == "claim" and walked < part_count:
            walked += 1
            state, is_own = state.claim(walked)
            sent |= {walked} if is_own else set()
        elif event == "assign":
            before = state
            state, number = state.assign(helper, now)
            if number is not None:
                assert helper not in before.excluded
                assert number not in sent | asked, "no part is sent by two nodes that are in time"
                asked.add(number)
            assert not (state.is_over(helper) and number is not None)
            assert sum(part.helper == helper for part in state.outstanding.values()) <= state.window <= MAX_WINDOW
        elif event.startswith("store") and state.outstanding:
            number = data.draw(st.sampled_from(sorted(state.outstanding)))
            owner = state.outstanding[number].helper
            if event == "store another's":
                stranger = next(each for each in HELPERS if each != owner)
                assert state.finish(stranger, number) is state
                assert state.finish(owner, part_count + 1) is state
                continue
            state = state.finish(owner, number)
            wrong |= {number} if data.draw(st.booleans()) else set()
            if event == "store twice":
                assert state.finish(owner, number) is state
        elif event == "lose":
            state = state.exclude(helper)
            assert state.is_over(helper)
            assert state.assign(helper, now)[1] is None
        elif event == "late":
            now += LATE_SECONDS / 2
            state = state.exclude_late(now, 0.0)
            assert all(now - part.since <= LATE_SECONDS for part in state.outstanding.values())
        assert states_of(state, sent) == list(range(1, part_count + 1))
    for number in range(walked + 1, part_count + 1):
        state, is_own = state.claim(number)
        sent |= {number} if is_own else set()
    rounds = 0
    while True:
        rounds += 1
        assert rounds <= 3 * part_count + 3, "the owner waits for ever"
        for number in set(state.finished) & wrong:
            wrong.discard(number)
            state = state.reject(number)
        state, missing = state.take_missing()
        if missing is not None:
            assert missing not in sent
            sent.add(missing)
        elif state.is_settled:
            break
        else:
            now += LATE_SECONDS + 1
            state = state.exclude_late(now, 0.0)
    assert sent | set(state.finished) == set(range(1, part_count + 1))
    assert not sent & set(state.finished)


def test_two_nodes_meet_in_the_middle() -> None:
    state = SharedParts.begin(6)
    order = []
    for number in range(1, 4):
        state, is_own = state.claim(number)
        state, helped = state.assign(A, 0.0)
        assert helped is not None
        state = state.finish(A, helped)
        order.append((number, is_own, helped))
    assert order == [(1, True, 6), (2, True, 5), (3, True, 4)]
    assert state.assign(A, 0.0)[1] is None
    assert [state.claim(number)[1] for number in (4, 5, 6)] == [False] * 3
    assert state.is_settled


def test_an_owner_that_is_slow_itself_waits_longer_for_its_helpers() -> None:
    state, number = SharedParts.begin(2).assign(A, 0.0)
    assert number == 2
    assert state.exclude_late(LATE_SECONDS + 1, LATE_SECONDS).outstanding
    assert state.exclude_late(LATE_SECONDS + 1, 0.0).missing == {2}
    for slowest, limit in ((0.0, LATE_SECONDS), (LATE_SECONDS, 2 * LATE_SECONDS)):
        assert state.late(limit, slowest) == set()
        assert state.late(limit + 1, slowest) == {A}
    later, _ = SharedParts.begin(2).assign(A, 5.0)
    assert later.late(5.0 + LATE_SECONDS, 0.0) == set()


def test_a_helper_is_over_once_the_owner_has_met_it() -> None:
    state = SharedParts.begin(3).assign(A, 0.0)[0].finish(A, 3)
    assert [state.claim(1)[0].is_over(A), state.claim(1)[0].claim(2)[0].is_over(A)] == [False, True]


def test_the_owner_takes_the_lowest_missing_part_first() -> None:
    state = SharedParts.begin(8, HELPERS, 0.0).exclude(A)
    state, number = state.take_missing()
    assert (number, state.missing) == (7, {8})


def test_a_helper_of_an_object_with_few_parts_transfers_one_at_a_time() -> None:
    state, number = SharedParts.begin(3, HELPERS, 0.0).assign(A, 0.0)
    assert (number, state.assign(A, 0.0)[1]) == (3, None)


def test_a_small_object_is_divided_evenly() -> None:
    state = SharedParts.begin(8, HELPERS, 0.0)
    assert [state.owed(helper) for helper in HELPERS] == [[8, 7], [6, 5], [4, 3]]
    assert state.assign(A, 0.0)[1] is None, "the owner sends the other parts meanwhile"
    assert state.finish(A, 8).assign(A, 0.0)[1] == 2
    assert [state.claim(number)[1] for number in (1, 2, 3)] == [True, True, False]
    assert SharedParts.begin(3, HELPERS, 0.0).outstanding == {}
    assert [len(SharedParts.begin(100, HELPERS, 0.0).owed(helper)) for helper in HELPERS] == [MAX_WINDOW] * 3


@given(node_count=st.integers(1, 6), per_node=st.integers(1, 3), loading=st.sets(st.integers(0, 5)), data=st.data())
def test_nodes_that_load_nothing_from_s3_help_first(
    node_count: int, per_node: int, loading: set[int], data: st.DataObject
) -> None:
    plan = rank_plan(addresses=("127.0.0.1",) * node_count, ranks_per_node=per_node)

    def source(kind: Literal["local", "s3"]) -> ShardSource:
        return ShardSource(kind=kind, origin_generation=Generation(1), step=Step(1), digest=b"", payload_bytes=1)

    ranks = tuple(
        structs.replace(rank, sources=(source("s3" if rank.rank // per_node in loading else "local"),))
        for rank in plan.ranks
    )
    plan = structs.replace(plan, ranks=ranks)
    rank = data.draw(st.sampled_from(plan.ranks)).rank
    owner = NodeId(f"i-{rank // per_node}")
    helpers = load_helpers(plan, rank, owner)
    assert owner not in helpers
    assert len(set(helpers)) == len(helpers) == min(MAX_LOAD_HELPERS, node_count - 1)
    is_busy = [int(helper.removeprefix("i-")) in loading for helper in helpers]
    assert is_busy == sorted(is_busy)
    idle_count = sum(index not in loading for index in range(node_count) if f"i-{index}" != owner)
    assert is_busy.count(False) == min(len(helpers), idle_count)


def test_owners_of_several_shards_ask_different_nodes() -> None:
    plan = rank_plan(addresses=("127.0.0.1",) * 9)
    asked = [set(load_helpers(plan, Rank(rank), NodeId("i-8"))) for rank in (0, 1)]
    assert not asked[0] & asked[1]


@given(node_count=st.integers(1, 8), world_size=st.integers(1, 40))
def test_earlier_shards_are_divided_evenly_among_their_homes(node_count: int, world_size: int) -> None:
    plan = rank_plan(addresses=("127.0.0.1",) * node_count)
    relayout = Relayout(world_size=world_size, shards=((),) * world_size)
    plan = structs.replace(plan, relayout=relayout)
    homes = Counter(home_of(plan, Rank(rank)) for rank in range(world_size))
    assert set(homes) <= {node.node_id for node in plan.nodes}
    assert max(homes.values()) - min(homes[node.node_id] for node in plan.nodes) <= 1


def test_an_earlier_shard_in_memory_has_no_home() -> None:
    plan = rank_plan(addresses=("127.0.0.1",) * 2)
    source = ShardSource(
        kind="peer",
        origin_generation=Generation(1),
        step=Step(7),
        digest=bytes(16),
        payload_bytes=1,
        node_id=NodeId("i-0"),
    )
    relayout = Relayout(world_size=2, shards=((source, structs.replace(source, kind="parity", node_id=None)), ()))
    plan = structs.replace(plan, relayout=relayout)
    assert [home_of(plan, Rank(rank)) for rank in (0, 1)] == [None, NodeId("i-1")]
