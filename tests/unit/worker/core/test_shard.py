"""Tests the state of a shard at its owner's agent.

The state determines the owner's votes, the holders that count, and the steps to send to each holder.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from everstep.protocol.ids import NodeId, Step
from everstep.protocol.rank_messages import RankHalf, RankStanding, StopState, Vote
from worker.core.rounds import NONE, REASON_BYTES, Shard, echo_of

A, B = NodeId("i-a"), NodeId("i-b")


def step(number: int) -> Step:
    return Step(number)


def committed(at: int = 7, proposed: int = 8) -> Shard:
    """Return an owner's shard in the middle of training.

    Both holders have the committed step 7, and step 8 is proposed.
    """
    shard = Shard.begin(step(0), (A, B)).apply_announcement(NONE, step(at)).seal(step(at))
    shard = shard.acknowledge(A, step(at)).acknowledge(B, step(at))
    return shard.apply_announcement(step(at), step(proposed))


def test_it_votes_when_its_own_slot_and_all_holders_in_view_have_sealed() -> None:
    shard = committed().seal(step(8)).acknowledge(A, step(8))
    assert shard.vote is Vote.NONE
    assert shard.acknowledge(B, step(8)).vote is Vote.ACKED


def test_holders_alone_are_not_enough() -> None:
    shard = committed().acknowledge(A, step(8)).acknowledge(B, step(8))
    assert shard.vote is Vote.NONE
    assert shard.seal(step(8)).vote is Vote.ACKED


def test_without_peers_the_own_slot_is_enough() -> None:
    assert Shard.begin(step(0), ()).apply_announcement(NONE, step(1)).seal(step(1)).vote is Vote.ACKED


def test_a_vote_on_another_step_is_not_a_vote() -> None:
    shard = committed().seal(step(8)).acknowledge(A, step(9)).acknowledge(B, step(9))
    assert shard.vote is Vote.NONE


@pytest.mark.parametrize(
    ("boundary", "standing", "is_capturable"),
    [
        (7, RankStanding.MOVING, True),
        (8, RankStanding.MOVING, False),
        (8, RankStanding.CLOSING, True),
        (9, RankStanding.MOVING, False),
        (9, RankStanding.CLOSING, False),
    ],
)
def test_a_step_is_captured_at_its_boundary_only(boundary: int, standing: RankStanding, is_capturable: bool) -> None:
    half = RankHalf(1, boundary=boundary, standing=standing)
    assert committed().is_capturable(half) is is_capturable
    assert not committed().seal(step(8)).is_capturable(half), "it is captured once"
    assert not Shard.begin(step(0), (A,)).is_capturable(half), "nothing is proposed"


def test_a_lower_c_is_refused_whole() -> None:
    shard = committed()
    assert shard.apply_announcement(step(6), step(9)) is shard


def test_hearing_the_same_again_keeps_the_vote() -> None:
    shard = committed().seal(step(8)).acknowledge(A, step(8)).acknowledge(B, step(8))
    assert shard.apply_announcement(step(7), step(8)).vote is Vote.ACKED


def test_hearing_of_the_next_step_forgets_the_vote_and_older_acknowledgements() -> None:
    shard = (
        committed().seal(step(8)).acknowledge(A, step(8)).acknowledge(B, step(8)).apply_announcement(step(8), step(9))
    )
    assert shard.vote is Vote.NONE
    assert shard.held == {(A, 8), (B, 8)}


@pytest.mark.parametrize("late", [True, False])
def test_what_cannot_be_captured_is_abandoned_once(late: bool) -> None:
    shard = committed().abandon(step(8), "no room", late=late)
    assert (shard.vote, shard.reason, shard.is_late) == (Vote.ABANDON, "no room", late)
    assert shard.abandon(step(8), "again") is shard
    assert shard.seal(step(8)).vote is Vote.ABANDON
    assert shard.apply_announcement(step(7), step(9)).reason == ""


def test_nothing_but_the_proposed_step_is_abandoned() -> None:
    shard = committed()
    assert shard.abandon(step(9), "") is shard
    assert shard.seal(step(8)).abandon(step(8), "").vote is Vote.NONE
    base = Shard.begin(step(5), (A,)).apply_announcement(NONE, step(5))
    assert base.abandon(step(5), "") is base
    spoiled = Shard.adopt(step(5), (A,), committed=NONE, proposed=step(5), vote=Vote.NONE, sealed=frozenset())
    # Here the owner has lost the slot of the generation's start step. The shard ignores `abandon`, because no rank
    # captures the start step.
    assert spoiled.abandon(step(5), "") is spoiled


def test_a_dropped_holder_does_not_count_and_commits_go_on() -> None:
    shard = committed().seal(step(8)).acknowledge(A, step(8)).drop(B)
    assert shard.vote is Vote.ACKED
    assert shard.view == {A}


def test_a_dropped_holder_returns_with_c_before_the_vote() -> None:
    shard = replace(committed(), held=frozenset({(A, step(7))})).drop(B)
    # the holder needs the committed step too, not only the proposed step
    assert shard.acknowledge(B, step(8)).view == {A}
    assert shard.acknowledge(B, step(7)).view == {A, B}


def test_a_dropped_holder_does_not_return_after_the_vote() -> None:
    shard = committed().seal(step(8)).acknowledge(A, step(8)).drop(B).acknowledge(B, step(8))
    assert shard.vote is Vote.ACKED
    assert shard.view == {A}
    # the holder has step 8, which is now committed, so it counts again
    assert shard.apply_announcement(step(8), step(9)).view == {A, B}


def test_a_dropped_holder_does_not_return_by_what_it_acknowledged_before() -> None:
    """A holder acknowledges the proposed step and falls silent, and the owner drops it. Then the step is committed.

    The owner does not wait for the silent holder, although the holder has the committed step. Otherwise, the vote on
    the next step would wait until the holder's deadline again.
    """
    dropped = (
        committed()
        .seal(step(8))
        .acknowledge(A, step(8))
        .acknowledge(B, step(8))
        .drop(B)
        .apply_announcement(step(8), step(9))
    )
    assert dropped.awaited == {A}
    assert dropped.seal(step(9)).acknowledge(A, step(9)).vote is Vote.ACKED
    assert dropped.inventory(B, frozenset({step(8)})).view == {A, B}
    answered = dropped.answer(B)
    assert answered.awaited == {A, B}
    assert answered.acknowledge(B, step(9)).view == {A, B}


def test_a_dropped_holder_that_has_not_got_the_new_c_stays_out() -> None:
    shard = committed().seal(step(8)).acknowledge(A, step(8)).drop(B)
    assert shard.apply_announcement(step(8), step(9)).view == {A}
    # no new step is committed, and what B acknowledged before the drop does not count
    assert shard.apply_announcement(step(7), step(9)).view == {A}


def test_somebody_who_is_no_holder_never_counts() -> None:
    stranger = NodeId("i-z")
    assert stranger not in committed().acknowledge(stranger, step(7)).view
    assert stranger not in committed().inventory(stranger, frozenset({step(7)})).view


def test_an_inventory_revokes_what_it_does_not_list() -> None:
    shard = committed().seal(step(8)).acknowledge(A, step(8)).inventory(A, frozenset({step(7)}))
    assert (A, 8) not in shard.held
    assert shard.acknowledge(B, step(8)).vote is Vote.NONE
    assert shard.view == {A, B}


def test_a_holder_that_has_lost_c_leaves_the_view() -> None:
    shard = committed().inventory(A, frozenset())
    assert shard.view == {B}
    assert shard.wanted(A) == 7


@pytest.mark.parametrize("base", [0, 7])
def test_an_empty_inventory_before_the_first_commit_leaves_a_holder_in_the_view(base: int) -> None:
    """At a launch, no holder has the generation's start step yet. The holders still count.

    Otherwise, every new generation would be reported as degraded.
    """
    shard = Shard.begin(step(base), (A, B)).inventory(A, frozenset())
    assert (shard.view, shard.returning) == ({A, B}, frozenset())


def test_an_inventory_of_others_leaves_the_rest_alone() -> None:
    assert (B, 7) in committed().inventory(A, frozenset()).held


def test_an_inventory_brings_a_dropped_holder_back() -> None:
    shard = committed().drop(A).inventory(A, frozenset({step(7)}))
    assert shard.view == {A, B}


def test_who_answers_again_is_waited_for_until_it_has_returned() -> None:
    """A dropped holder answers again. The owner's votes then wait until the holder has the committed step.

    Without this wait, each commit would free the slot whose content is being sent to the holder. A slow holder would
    then never count again.
    """
    back = committed().drop(B).acknowledge(A, step(8)).answer(B).inventory(B, frozenset())
    waiting = back.seal(step(8))
    assert (waiting.view, waiting.returning, waiting.vote) == ({A}, {B}, Vote.NONE)
    returned = waiting.acknowledge(B, step(7))
    assert (returned.view, returned.returning, returned.vote) == ({A, B}, frozenset(), Vote.NONE)
    assert returned.acknowledge(B, step(8)).vote is Vote.ACKED


def test_who_answers_again_and_falls_silent_again_is_not_waited_for() -> None:
    waiting = committed().drop(B).acknowledge(A, step(8)).answer(B).inventory(B, frozenset()).seal(step(8))
    dropped = waiting.drop(B)
    assert (dropped.view, dropped.returning, dropped.vote) == ({A}, frozenset(), Vote.ACKED)


def test_a_snapshot_is_under_way_until_all_shards_of_the_job_are_with_their_holders() -> None:
    """A snapshot is under way until all owners of the job have sent their shards, not only this owner.

    Until then, iterations count as slowed down by a snapshot.
    """
    quiet = committed().acknowledge(A, step(7)).acknowledge(B, step(7))
    sending = quiet.seal(step(8)).acknowledge(A, step(8))
    sent = sending.acknowledge(B, step(8))
    assert [each.is_under_way for each in (quiet, sending, sent, sent.apply_announcement(step(8), step(12)))] == [
        False,
        True,
        True,
        False,
    ]


def test_what_is_sent_to_who_is_out_of_view_is_under_way_when_it_answers() -> None:
    gone = replace(committed().drop(B), held=frozenset({(A, step(7))}))
    assert [gone.is_under_way, gone.answer(B).is_under_way] == [False, True]


def test_who_takes_what_it_is_sent_again_over_a_line_that_stood_is_waited_for() -> None:
    waiting = committed().drop(B).answer(B).seal(step(8)).acknowledge(A, step(8))
    assert (waiting.returning, waiting.vote) == ({B}, Vote.NONE)
    assert waiting.acknowledge(B, step(8)).view == {A, B}, "it had C all the time"
    assert committed().answer(B) == committed(), "it counts already"
    assert committed().answer(NodeId("i-z")) == committed(), "it is no holder"


def test_a_holder_that_has_lost_c_is_waited_for() -> None:
    assert committed().seal(step(8)).acknowledge(B, step(8)).inventory(A, frozenset()).vote is Vote.NONE


@pytest.mark.parametrize(
    ("sealed", "held", "owed"),
    [
        ((7,), (), 7),
        ((7, 8), (), 7),
        ((7, 8), (7,), 8),
        ((7, 8), (7, 8), NONE),
        ((8,), (), 8),
        ((), (), NONE),
    ],
)
def test_a_holder_is_owed_c_first_and_only_what_is_sealed(
    sealed: tuple[int, ...], held: tuple[int, ...], owed: int
) -> None:
    shard = replace(committed(), sealed=frozenset(map(step, sealed)), held=frozenset((A, step(each)) for each in held))
    assert shard.wanted(A) == owed


def test_before_the_first_commit_the_base_is_owed() -> None:
    shard = Shard.begin(step(5), (A,)).apply_announcement(NONE, step(5))
    assert shard.wanted(A) == 5
    assert shard.acknowledge(A, step(5)).vote is Vote.ACKED


def test_a_first_generation_stands_on_nothing() -> None:
    shard = Shard.begin(step(0), (A,))
    assert shard.sealed == frozenset()
    assert shard.foundation == NONE
    assert shard.drop(A).acknowledge(A, step(0)).view == frozenset()


def test_a_new_generation_has_every_planned_holder_in_view() -> None:
    assert Shard.begin(step(5), (A, B)).view == {A, B}


def test_a_restarted_agent_keeps_its_word() -> None:
    shard = Shard.adopt(
        step(0), (A, B), committed=step(7), proposed=step(8), vote=Vote.ABANDON, sealed=frozenset({step(7), step(8)})
    )
    assert shard.view == {A, B}
    assert shard.acknowledge(A, step(8)).acknowledge(B, step(8)).vote is Vote.ABANDON
    undecided = Shard.adopt(
        step(0), (A,), committed=step(7), proposed=step(8), vote=Vote.NONE, sealed=frozenset({step(8)})
    )
    assert undecided.vote is Vote.NONE
    assert undecided.inventory(A, frozenset({step(7), step(8)})).vote is Vote.ACKED


def test_a_forgotten_slot_is_not_sent() -> None:
    assert committed().seal(step(8)).forget(step(7)).wanted(A) == 8


def test_what_is_captured_a_second_time_is_acknowledged_a_second_time() -> None:
    """A rank may capture the last step of a training twice.

    Only acknowledgements of the second capture count.
    """
    # the step is committed late, as if another rank had voted late
    first = committed().seal(step(8)).acknowledge(A, step(8)).apply_announcement(step(7), NONE)
    again = (
        first.apply_announcement(step(7), step(9))
        .forget(step(8))
        .apply_announcement(step(7), step(8))
        .seal(step(8))
        .acknowledge(B, step(8))
    )
    assert (again.vote, again.wanted(A)) == (Vote.NONE, 8)
    assert again.acknowledge(A, step(8)).vote is Vote.ACKED


def test_what_stands_is_held_by_others_whatever_became_of_the_own_slot() -> None:
    assert (A, 7) in committed().forget(step(7)).held


@pytest.mark.parametrize("reason", ["x" * 200_000, "é" * 200_000, "\ud800" * 200_000])
def test_a_reason_is_cut_to_what_a_report_can_take(reason: str) -> None:
    said = committed().abandon(step(8), reason).reason
    assert len(said.encode()) <= REASON_BYTES
    assert said.endswith("…")
    assert committed().abandon(step(8), "x" * REASON_BYTES).reason == "x" * REASON_BYTES


@pytest.mark.parametrize(
    ("boundary", "echo_step", "echo", "stop", "state", "answer"),
    [
        (4, 5, 1, 5, StopState.ANNOUNCED, (5, 1)),
        (5, 5, 1, 5, StopState.ANNOUNCED, (5, 1)),
        (4, -1, 0, 5, StopState.ANNOUNCED, (-1, 0)),
        (5, -1, 0, 5, StopState.ANNOUNCED, (5, 2)),
        (6, 3, 1, 5, StopState.ANNOUNCED, (5, 2)),
        (6, 3, 1, 5, StopState.CONFIRMED, (3, 1)),
        (6, 3, 1, 5, StopState.NONE, (3, 1)),
    ],
)
def test_an_agent_says_no_for_a_rank_that_has_passed(
    boundary: int, echo_step: int, echo: int, stop: int, state: StopState, answer: tuple[int, int]
) -> None:
    assert echo_of(RankHalf(1, boundary, echo_step=echo_step, echo=echo), step(stop), state) == answer


class TestCapturing:
    """The owner may send a step while its rank still captures it.

    The step counts as captured only when it is sealed.
    """

    def test_a_holder_that_has_the_foundation_may_be_sent_what_is_being_captured(self) -> None:
        shard = replace(committed(), held=frozenset({(A, step(7))})).capture(step(8))
        assert shard.wanted(A) == 8
        assert shard.wanted(B) == 7

    def test_it_is_not_voted_on_whoever_acknowledges_it_before_it_is_sealed(self) -> None:
        shard = committed().capture(step(8)).drop(A).drop(B)
        assert shard.vote is Vote.NONE
        shard = committed().capture(step(8)).acknowledge(A, step(8)).acknowledge(B, step(8))
        assert shard.vote is Vote.NONE
        assert shard.seal(step(8)).vote is Vote.ACKED

    def test_it_is_over_when_it_is_sealed_or_given_up_or_no_longer_proposed(self) -> None:
        shard = committed().capture(step(8))
        assert shard.seal(step(8)).capturing == NONE
        assert shard.abandon(step(8), "changed").wanted(A) == NONE
        dropped = shard.apply_announcement(step(7), NONE)
        assert dropped.apply_announcement(step(7), step(8)).wanted(A) == NONE

    def test_only_the_proposed_step_is_captured_and_the_base_never(self) -> None:
        shard = committed()
        assert shard.capture(step(9)) == shard
        assert shard.abandon(step(8), "late").capture(step(8)).capturing == NONE
        based = Shard.begin(step(5), (A,)).apply_announcement(NONE, step(5)).forget(step(5))
        assert based.capture(step(5)) == based
        sealed = shard.seal(step(8))
        assert sealed.capture(step(8)) == sealed


def test_a_holder_of_parity_receives_a_step_only_after_its_seal() -> None:
    shard = replace(committed(), has_parity=True).capture(step(8))
    assert replace(shard, has_parity=False).wanted(A) == step(8)
    assert shard.wanted(A) == NONE
    assert shard.seal(step(8)).wanted(A) == step(8)
