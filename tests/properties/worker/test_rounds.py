"""Properties that always hold for the coordinator under random reports, and for an owner's shard under random
events.
"""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from everstep.protocol.ids import NodeId, Rank, Step
from everstep.protocol.limits import MAX_RANK_STEP, MAX_STEP
from everstep.protocol.rank_messages import RankStanding, Vote
from everstep.protocol.rounds import RankRound
from worker.core.rounds import NONE, Coordinator, Shard
from worker.core.slots import slots_per_shard

STEPS = st.integers(-1, 12).map(Step)
REPORTS = st.builds(
    RankRound,
    rank=st.integers(0, 2).map(Rank),
    boundary=STEPS,
    committed=STEPS,
    proposed=STEPS,
    vote=st.sampled_from(Vote),
    standing=st.sampled_from(RankStanding),
    echo_step=STEPS,
    echo=st.integers(0, 2),
    confirmed_stop=STEPS,
    rehearsal_step=STEPS,
    rehearsal_echo=st.integers(0, 3),
    confirmed_rehearsal=STEPS,
    heard_rehearsal=STEPS,
    pinned_steps=st.lists(STEPS.filter(lambda step: step >= 0), max_size=2, unique=True).map(
        lambda steps: tuple(sorted(steps))
    ),
    held_step=STEPS,
    is_late=st.booleans(),
)
COMMITTED_AND_STOPPED = [
    RankRound(
        rank=Rank(rank),
        boundary=Step(0),
        committed=Step(committed),
        proposed=Step(0),
        vote=Vote.NONE,
        confirmed_stop=Step(0),
    )
    for rank, committed in ((0, 0), (1, 0), (2, 3))
]
"""Reports to a restarted coordinator: all ranks are at boundary 0, but rank 2 reports that step 3 is committed."""
PEERS = st.sampled_from([NodeId("i-a"), NodeId("i-b"), NodeId("i-c")])


@given(
    st.booleans(),
    st.sampled_from([0, 4]),
    st.lists(st.one_of(REPORTS, st.just("stop"), st.just("end"), st.just("rehearse")), max_size=25),
    st.sampled_from([1, 2]),
)
@example(True, 0, COMMITTED_AND_STOPPED, 2)
def test_c_never_falls_and_proposals_only_rise(
    is_restarted: bool, base: int, news: list[RankRound | str], max_uploads: int
) -> None:
    slot_count = slots_per_shard(has_third_slot=max_uploads > 1, max_uploads=max_uploads)
    new = Coordinator(world_size=3, base=Step(base), every_steps=3, slot_count=slot_count, max_uploads=max_uploads)
    core = new.recover() if is_restarted else new.begin()
    proposed = set[int]()
    for each in news:
        before = core
        match each:
            case RankRound():
                core = core.report(each)
            case "stop":
                core = core.request_stop()
            case "rehearse":
                core = core.request_rehearsal(core.rehearsal.number + 1, 2)
            case _:
                core = core.end_final_round()
        assert core.advance() == core
        assert core.is_recovering or before.is_recovering or core.committed >= before.committed
        assert not core.is_recovering or core.proposed == NONE
        if core.proposed not in (NONE, before.proposed):
            assert core.proposed not in proposed or core.proposed == core.final or core.proposed == base
            assert core.proposed == core.final or core.proposed == base or core.proposed > core.committed
        proposed.add(core.proposed)
        if core.committed not in (before.committed, NONE) and not before.is_recovering:
            votes = {report.rank: report for report in core.ranks}
            assert all(votes[Rank(rank)].vote is Vote.ACKED for rank in range(3))


NEWS = st.one_of(
    st.tuples(st.just("apply_announcement"), STEPS, STEPS),
    st.tuples(st.just("seal"), STEPS, STEPS),
    st.tuples(st.just("forget"), STEPS, STEPS),
    st.tuples(st.just("abandon"), STEPS, STEPS),
    st.tuples(st.just("acknowledge"), PEERS, STEPS),
    st.tuples(st.just("inventory"), PEERS, st.frozensets(STEPS, max_size=2)),
    st.tuples(st.just("answer"), PEERS, STEPS),
    st.tuples(st.just("drop"), PEERS, STEPS),
)


DROPPED_AFTER_ITS_ACKNOWLEDGEMENT: list[tuple[str, object, object]] = [
    ("apply_announcement", -1, 1),
    ("seal", 1, 1),
    ("acknowledge", "i-a", 1),
    ("drop", "i-a", 1),
    ("acknowledge", "i-b", 1),
    ("apply_announcement", 1, 2),
]
"""Events after which a step is committed without a holder that had acknowledged it.

The holder acknowledges step 1, is dropped before the owner votes, and then sends nothing.
"""


@given(st.sampled_from([0, 4]), st.lists(NEWS, max_size=30))
@example(0, DROPPED_AFTER_ITS_ACKNOWLEDGEMENT)
def test_a_shard_acknowledges_only_what_is_held(base: int, news: list[tuple[str, object, object]]) -> None:
    peers = (NodeId("i-a"), NodeId("i-b"))
    shard, heard = Shard.begin(Step(base), peers), {*peers}
    for name, first, second in news:
        before = shard
        match name:
            case "drop":
                heard.discard(first)
            case "acknowledge" | "inventory" | "answer":
                heard.add(first)
        arguments = (
            (first, second)
            if name in ("apply_announcement", "acknowledge", "inventory")
            else (first, "why")
            if name == "abandon"
            else (first,)
        )
        shard = getattr(shard, name)(*arguments)
        assert shard.committed >= before.committed
        assert shard.awaited <= set(peers)
        assert not shard.view & shard.returning
        if shard.vote is Vote.ACKED and (before.vote is not Vote.ACKED or before.proposed != shard.proposed):
            assert shard.proposed in shard.sealed
            assert all((peer, shard.proposed) in shard.held for peer in shard.awaited)
        if before.vote is not Vote.NONE and shard.proposed == before.proposed:
            assert shard.vote is before.vote
        for peer in shard.view - before.view:
            assert shard.vote is Vote.NONE or shard.proposed != before.proposed or before.vote is Vote.NONE
            assert (peer, shard.foundation) in shard.held
            assert peer in heard, "it has said nothing since it was dropped"


@pytest.mark.parametrize(("boundary", "is_proposed"), [(MAX_RANK_STEP - 100, True), (MAX_STEP, False)])
def test_no_step_is_proposed_or_agreed_that_a_message_cannot_carry(boundary: int, is_proposed: bool) -> None:
    core = Coordinator(world_size=3, base=Step(0), every_steps=3, slot_count=2, max_uploads=1).begin()
    for _ in range(3):  # commit the proposed steps
        committed, proposed = core.committed, core.proposed
        for rank in range(3):
            core = core.report(
                RankRound(
                    rank=Rank(rank), boundary=Step(boundary), committed=committed, proposed=proposed, vote=Vote.ACKED
                )
            )
    assert (core.proposed > boundary) == is_proposed
    assert core.request_stop().stop <= MAX_STEP
