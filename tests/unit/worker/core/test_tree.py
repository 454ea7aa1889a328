from __future__ import annotations

import msgspec
import pytest

from everstep.protocol.codec import encode
from everstep.protocol.ids import Generation, NodeId, Rank, Step
from everstep.protocol.peer_messages import MAX_PEER_MESSAGE_BYTES
from everstep.protocol.rank_messages import RankStanding, Vote
from everstep.protocol.rounds import NodeReport, RankRound, RoundReport
from worker.core.rounds import REASON_BYTES
from worker.core.tree import ARITY, RANKS_PER_MESSAGE, RoundTree, TreeReports, messages


def tree(count: int, arity: int = ARITY) -> RoundTree:
    return RoundTree.of(NodeId("i-2"), {NodeId(f"i-{i}"): [Rank(i)] for i in range(count)}, arity=arity)


def report(node: int, *, sequence: int = 1, term: int = 1, **fields: object) -> NodeReport:
    state = RankRound(rank=Rank(node), boundary=Step(7), committed=Step(6), proposed=Step(8), vote=Vote.NONE)
    return NodeReport(
        node_id=NodeId(f"i-{node}"), term=term, sequence=sequence, ranks=(msgspec.structs.replace(state, **fields),)
    )


def all_voted(count: int, **fields: object) -> list[NodeReport]:
    return [report(node, sequence=2, vote=Vote.ACKED, **fields) for node in range(count)]


# -- tests of the parent and the children of each node


def test_up_to_seventeen_nodes_everybody_dials_the_coordinator() -> None:
    flat = tree(ARITY + 1)
    assert all(flat.ancestors(node) == ("i-2",) for node in flat.order[1:])
    assert flat.ancestors(NodeId("i-2")) == ()
    assert tree(ARITY + 2).ancestors(NodeId("i-17")) == ("i-0", "i-2")


@pytest.mark.parametrize("arity", [1, 2, 3, 16])
@pytest.mark.parametrize("count", [3, 4, 5, 9, 40])
def test_whoever_has_a_node_above_is_below_that_node(count: int, arity: int) -> None:
    made = tree(count, arity)
    above = {node: set(made.ancestors(node)) for node in made.order}
    for node in made.order:
        assert made.below(node) == {node} | {other for other in made.order if node in above[other]}
    parents = [made.ancestors(node)[0] for node in made.order[1:]]
    assert max(map(parents.count, parents)) <= arity
    assert made.below(NodeId("i-2")) == set(made.order)


def test_a_stranger_speaks_for_nobody() -> None:
    assert tree(5).below(NodeId("i-9")) == frozenset()


def test_ten_thousand_nodes_are_four_lines_from_the_coordinator_at_most() -> None:
    assert len(tree(10_000).ancestors(NodeId("i-9999"))) == 4


# -- tests of the newest reports that a node stores


def test_of_each_node_the_newest_report_counts_whatever_comes_last() -> None:
    known = TreeReports().take(report(1, sequence=5, boundary=50), report(2))
    assert known.take(report(1, sequence=4, boundary=40)).newest == known.newest
    assert known.take(report(1, sequence=5, boundary=60)).newest == known.newest
    assert known.take(report(1, sequence=6, boundary=60)).newest["i-1"].ranks[0].boundary == 60  # type: ignore[index]


def test_a_new_term_forgets_what_was_said_to_the_coordinators_earlier_life() -> None:
    known = TreeReports().take(report(1, sequence=9, term=3), report(2, term=3))
    assert known.term == 3
    assert known.take(report(1, sequence=99, term=2)).newest == known.newest
    later = known.take(report(1, sequence=1, term=4))
    assert (later.term, set(later.newest)) == (4, {"i-1"})
    assert known.begin_term(4).newest == {}
    assert known.begin_term(3) is known.begin_term(2) is known
    together = known.take(report(1, term=4), report(2, term=5), report(3, term=4))
    assert (together.term, set(together.newest)) == (5, {"i-2"})


def test_only_what_is_not_told_yet_is_told() -> None:
    told = TreeReports().take(report(1), report(2))
    assert told.since(TreeReports()) == (report(1), report(2))
    assert told.take(report(2, sequence=2, boundary=8)).since(told) == (report(2, sequence=2, boundary=8),)
    assert told.begin_term(2).take(report(1, term=2)).since(told) == (report(1, term=2),)


# -- tests of urgent reports, which a node forwards at once


MEMBERS = frozenset(NodeId(f"i-{i}") for i in range(3))
TOLD = TreeReports().take(*(report(node) for node in range(3)))


@pytest.mark.parametrize(
    "fields",
    [{"boundary": 8}, {"vote": Vote.ACKED}, {"committed": 8, "proposed": 9}, {"out_of_view": ("i-9",)}],
    ids=["a step made", "one vote of three", "a step heard of", "a holder dropped"],
)
def test_what_moves_nothing_by_itself_waits(fields: dict[str, object]) -> None:
    assert not TOLD.take(report(1, sequence=2, **fields)).is_pressing(TOLD, MEMBERS)


@pytest.mark.parametrize(
    "fields",
    [
        {"vote": Vote.ABANDON},
        {"standing": RankStanding.CLOSING},
        {"echo_step": 9, "echo": 1},
        {"rehearsal_step": 9, "rehearsal_echo": 1},
        {"heard_rehearsal": 9, "boundary": 9},
        {"pinned_steps": (6,)},
    ],
    ids=["abandoned", "standing", "an answer to a stop", "an answer to a rehearsal", "at the rehearsal", "pinned"],
)
def test_what_moves_the_coordinator_presses(fields: dict[str, object]) -> None:
    assert TOLD.take(report(1, sequence=2, **fields)).is_pressing(TOLD, MEMBERS)


MADE = {"boundary": 8, "committed": 7, "proposed": 9, "heard_stop": 11}


def test_steps_that_were_made_and_heard_of_are_mere_progress() -> None:
    assert TOLD.take(report(1, sequence=2, **MADE), report(2, sequence=2, boundary=8)).is_progress(TOLD)
    voted = TOLD.take(report(1, sequence=2, vote=Vote.ACKED))
    assert voted.take(report(1, sequence=3, vote=Vote.ACKED, boundary=8)).is_progress(voted), "the vote was told"


@pytest.mark.parametrize(
    "fields",
    [
        {"vote": Vote.ACKED},
        {"vote": Vote.ABANDON},
        {"proposed": -1},
        {"out_of_view": ("i-9",)},
        {"standing": RankStanding.CLOSING},
        {"echo_step": 9, "echo": 1},
        {"rehearsal_step": 9, "rehearsal_echo": 1},
        {"heard_rehearsal": 8},
        {"pinned_steps": (6,)},
    ],
    ids=[
        "a vote",
        "abandoned",
        "a step forgotten",
        "a holder dropped",
        "standing",
        "an answer to a stop",
        "an answer to a rehearsal",
        "at the rehearsal",
        "pinned",
    ],
)
def test_what_the_coordinator_may_wait_for_is_more_than_progress(fields: dict[str, object]) -> None:
    assert not TOLD.take(report(1, sequence=2, **MADE | fields), report(2, sequence=2, boundary=8)).is_progress(TOLD)


def test_one_rank_of_a_node_presses_for_all_of_them() -> None:
    (first,), (second,) = report(1).ranks, report(5).ranks
    two = TreeReports().take(msgspec.structs.replace(report(1), ranks=(first, second)))
    closing = msgspec.structs.replace(second, standing=RankStanding.CLOSING)
    for ranks, presses in (((first, closing), True), ((first, msgspec.structs.replace(second, boundary=8)), False)):
        later = two.take(msgspec.structs.replace(report(1, sequence=2), ranks=ranks))
        assert later.is_pressing(two, frozenset({NodeId("i-1"), NodeId("i-9")})) is presses
        assert later.is_progress(two) is not presses


def test_the_proposal_of_the_first_step_is_progress() -> None:
    assert TOLD.take(report(1, sequence=2, proposed=0)).is_progress(TOLD)


def test_a_node_that_was_not_heard_before_is_more_than_progress() -> None:
    assert not TOLD.take(report(7)).is_progress(TOLD)
    two = report(1, sequence=2)
    assert not TOLD.take(msgspec.structs.replace(two, ranks=(*two.ranks, *report(5).ranks))).is_progress(TOLD)


def test_the_last_vote_presses_once() -> None:
    two = TOLD.take(*all_voted(2))
    assert not two.is_pressing(TOLD, MEMBERS)
    three = TOLD.take(*all_voted(3))
    assert three.is_pressing(two, MEMBERS)
    assert not three.take(report(0, sequence=3, vote=Vote.ACKED, boundary=9)).is_pressing(three, MEMBERS)
    assert three.take(*all_voted(3, proposed=9)) == three, "of the same number: nothing new"
    assert not TOLD.take(*all_voted(3)).is_pressing(TOLD, MEMBERS | {NodeId("i-9")}), "somebody has not reported"


def test_the_same_abandoned_step_presses_once_and_the_next_one_again() -> None:
    once = TOLD.take(report(1, sequence=2, vote=Vote.ABANDON))
    assert not once.take(report(1, sequence=3, vote=Vote.ABANDON, boundary=8)).is_pressing(once, MEMBERS)
    assert once.take(report(1, sequence=3, vote=Vote.ABANDON, proposed=9)).is_pressing(once, MEMBERS)


def test_a_node_that_was_not_heard_before_presses() -> None:
    assert TOLD.take(report(7)).is_pressing(TOLD, MEMBERS)


# -- tests of the division of reports into messages


def test_no_message_is_too_long_however_many_ranks_complain() -> None:
    reports = [report(node, reason="x" * REASON_BYTES, out_of_view=("i-" + "0" * 17,) * 3) for node in range(2500)]
    groups = list(messages(reports))
    assert [each for group in groups for each in group] == reports
    assert all(len(group) <= RANKS_PER_MESSAGE for group in groups)
    assert (
        max(len(encode(RoundReport(generation=Generation(1), nodes=group))) for group in groups)
        < MAX_PEER_MESSAGE_BYTES
    )
    assert list(messages([])) == []


def test_messages_are_filled_up_to_their_limit() -> None:
    sizes = [RANKS_PER_MESSAGE - 1, 1, 1, RANKS_PER_MESSAGE, RANKS_PER_MESSAGE + 1, 1]
    reports = [
        msgspec.structs.replace(report(node), ranks=report(node).ranks * count) for node, count in enumerate(sizes)
    ]
    assert [[each.node_id for each in group] for group in messages(reports)] == [
        ["i-0", "i-1"],
        ["i-2"],
        ["i-3"],
        ["i-4"],
        ["i-5"],
    ]
