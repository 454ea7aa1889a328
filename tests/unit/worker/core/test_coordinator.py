"""Tests how the coordinator proposes, commits and abandons steps, and how it recovers, stops and closes."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from everstep.protocol.ids import NodeId, Rank, Step
from everstep.protocol.rank_messages import ECHO_NO, ECHO_UNABLE, ECHO_YES, RankStanding, StopState, Vote
from everstep.protocol.rounds import RankRound
from worker.core.rehearsal import RehearsalAgreement
from worker.core.rounds import NONE, Coordinator


def rank(
    number: int, boundary: int, committed: int, proposed: int, vote: Vote = Vote.NONE, **more: object
) -> RankRound:
    """Return the report of the rank with this number."""
    return RankRound(
        rank=Rank(number),
        boundary=Step(boundary),
        committed=Step(committed),
        proposed=Step(proposed),
        vote=vote,
        **more,  # type: ignore[arg-type]
    )


def both(
    boundary: int, committed: int, proposed: int, vote: Vote = Vote.NONE, **more: object
) -> tuple[RankRound, RankRound]:
    """Return the report that two ranks send when they have the same state."""
    return rank(0, boundary, committed, proposed, vote, **more), rank(1, boundary, committed, proposed, vote, **more)


def begun(base: int = 0, **more: object) -> Coordinator:
    return Coordinator(world_size=2, base=Step(base), every_steps=0, **more).begin()  # type: ignore[arg-type]


def running() -> Coordinator:
    """Return a coordinator that has committed step 1 and proposes step 2."""
    return begun().report(*both(1, NONE, 1, Vote.ACKED))


def test_a_first_generation_proposes_its_first_step() -> None:
    assert (begun().committed, begun().proposed) == (NONE, 1)


def test_a_generation_with_a_base_proposes_the_base_and_nothing_newer_before_it_is_committed() -> None:
    core = begun(base=5)
    assert (core.committed, core.proposed) == (NONE, 5)
    core = core.report(*both(9, NONE, 5))
    assert core.proposed == 5
    core = core.report(*both(9, NONE, 5, Vote.ACKED))
    assert (core.committed, core.proposed) == (5, 10)


def test_after_a_relayout_the_first_proposal_is_a_step_of_the_new_generation() -> None:
    core = begun(base=5, is_relayout=True)
    assert (core.committed, core.proposed) == (NONE, 6)
    assert core.report(*both(6, NONE, 6, Vote.ACKED)).committed == 6


def test_a_base_of_another_layout_is_not_uploaded_when_the_job_stops() -> None:
    asked = begun(base=5, is_relayout=True).request_stop()
    ended = asked.report(*both(5, NONE, 6, standing=RankStanding.CLOSED)).halt()
    assert (ended.is_finished, ended.persist) == (True, NONE)


def test_a_strayed_shard_is_held_once_all_its_planned_holders_have_the_base() -> None:
    core = begun(base=5, misplaced_ranks=frozenset({Rank(1)}))
    away = (NodeId("b"),)
    assert core.report(*both(5, NONE, 5)).held == ()
    assert core.report(rank(0, 5, NONE, 5, Vote.ACKED), rank(1, 5, NONE, 5)).held == (), "rank 0 is not misplaced_ranks"
    assert core.report(rank(0, 5, NONE, 5), rank(1, 5, NONE, 5, Vote.ACKED)).held == (1,), (
        "before the base is committed"
    )
    degraded = core.report(rank(0, 5, NONE, 5, Vote.ACKED), rank(1, 5, NONE, 5, Vote.ACKED, out_of_view=away))
    assert (degraded.committed, degraded.held) == (5, ()), "a holder is missing"
    assert degraded.report(rank(1, 6, 5, 7)).held == (1,), "it has returned"


def test_the_base_cannot_be_abandoned() -> None:
    """The coordinator ignores a report that a rank abandons the generation's start step. No correct agent sends it."""
    core = begun(base=5).report(*both(5, NONE, 5, Vote.ABANDON, is_late=True))
    assert (core.committed, core.proposed, core.lead.steps) == (NONE, 5, 1)


def test_all_must_acknowledge_the_proposed_step() -> None:
    core = begun().report(rank(0, 1, NONE, 1, Vote.ACKED))
    assert core.committed == NONE
    core = core.report(rank(1, 1, NONE, 0, Vote.ACKED))
    assert core.committed == NONE
    core = core.report(rank(1, 1, NONE, 1, Vote.ACKED))
    assert (core.committed, core.proposed) == (1, 2)


@pytest.mark.parametrize("late", [True, False])
def test_any_abandon_drops_the_step_for_all(late: bool) -> None:
    core = running().report(rank(0, 2, 1, 2, Vote.ACKED), rank(1, 4, 1, 2, Vote.ABANDON, is_late=late))
    assert core.committed == 1
    assert core.lead.steps == 1 + late
    assert core.proposed == 4 + core.lead.steps


def test_an_abandon_of_an_older_step_means_nothing() -> None:
    core = running()
    assert core.report(rank(1, 2, 1, 1, Vote.ABANDON)).proposed == 2


def test_a_step_is_never_proposed_twice() -> None:
    core = running()
    for _ in range(5):
        before = core.proposed
        core = core.report(rank(0, 1, 1, core.proposed, Vote.ABANDON))
        assert core.proposed > before


def test_after_one_late_round_every_step_is_proposed_again_soon() -> None:
    """After one late round, the coordinator proposes steps two steps ahead, but only for a few rounds.

    If it did so for longer, a short training would commit only every second step.
    """
    core = begun().report(*both(2, NONE, 1, Vote.ABANDON, is_late=True))
    proposed = [core.proposed]
    while core.committed < 20:
        core = core.report(*both(core.proposed, core.committed, core.proposed, Vote.ACKED))
        proposed.append(core.proposed)
    assert proposed == [4, 6, *range(7, 22)]


def test_nothing_follows_twice() -> None:
    core = running()
    assert core.advance() == core
    assert core.report(*core.ranks) == core


@pytest.mark.covers("CreateTrainingJob.CheckpointConfig.EverySteps")
def test_steps_fall_on_the_interval_of_checkpoints_and_each_is_persisted_once() -> None:
    core = Coordinator(world_size=1, base=Step(0), every_steps=5).begin()
    persisted = []
    for _ in range(30):
        core = core.report(rank(0, core.proposed, core.committed, core.proposed, Vote.ACKED))
        persisted.append(core.persist)
    found = sorted({step for step in persisted if step != NONE})
    assert found == list(range(5, found[-1] + 1, 5))
    assert found[-1] >= 30


@pytest.mark.parametrize(
    ("base", "stored", "persisted"),
    [
        (7, 0, [7, 10, 15]),  # the checkpoint of step 5 was lost together with its generation
        (13, 5, [13, 15, 20]),
        (10, 5, [10, 15, 20]),
        # step 10 needs no new checkpoint, because the generation was restored from its checkpoint
        (10, 10, [15, 20, 25]),
        (9, 5, [10, 15, 20]),
        (0, 0, [5, 10, 15]),
    ],
)
def test_what_an_earlier_generation_did_not_store_is_made_up_for_at_once(
    base: int, stored: int, persisted: list[int]
) -> None:
    core = Coordinator(world_size=1, base=Step(base), every_steps=5, stored=Step(stored)).begin()
    found: list[int] = []
    while len(found) < len(persisted):
        boundary = max(core.proposed, base)
        core = core.report(rank(0, boundary, core.committed, core.proposed, Vote.ACKED))
        if core.persist not in (NONE, *found):
            found.append(core.persist)
        assert core.committed < 100
    assert found == persisted


def test_no_second_upload_begins_while_one_is_under_way() -> None:
    core = Coordinator(world_size=1, base=Step(0), every_steps=2, slot_count=3).begin()
    core = core.report(rank(0, 2, NONE, 1, Vote.ACKED))
    while core.persist == NONE:
        core = core.report(rank(0, core.proposed, core.committed, core.proposed, Vote.ACKED))
    first = core.persist
    for _ in range(4):
        core = core.report(rank(0, core.proposed, core.committed, core.proposed, Vote.ACKED, pinned_steps=(first,)))
    assert core.persist == first


def test_a_due_checkpoint_does_not_wait_for_an_upload_if_two_may_run() -> None:
    core = Coordinator(world_size=1, base=Step(0), every_steps=2, slot_count=4, max_uploads=2).begin()
    marked: list[Step] = []
    while core.committed < 12:
        core = core.report(
            rank(0, core.proposed, core.committed, core.proposed, Vote.ACKED, pinned_steps=tuple(marked[:2]))
        )
        if core.persist not in (NONE, *marked):
            marked.append(core.persist)
    assert marked == [2, 4], "the third checkpoint waits for the end of an upload"
    core = core.report(rank(0, core.proposed, core.committed, core.proposed, Vote.ACKED, pinned_steps=(Step(2),)))
    assert core.persist == core.committed > 12, "the newest step replaces the steps that were due meanwhile"


def test_a_checkpoint_waits_for_an_upload_that_all_later_ones_have_passed() -> None:
    core = Coordinator(world_size=1, base=Step(0), every_steps=2, slot_count=4, max_uploads=2).begin()
    slow: tuple[Step, ...] = ()
    marked: list[Step] = []
    while core.committed < 20:
        core = core.report(rank(0, core.proposed, core.committed, core.proposed, Vote.ACKED, pinned_steps=slow))
        if core.persist not in (NONE, *marked):
            marked.append(core.persist)
            slow = (marked[0],)
    assert marked == [2, 4, 6], "the agents still report the first checkpoint, which a rank uploads slowly"
    core = core.report(rank(0, core.proposed, core.committed, core.proposed, Vote.ACKED))
    assert core.persist == core.committed


def test_a_restarted_coordinator_waits_for_uploads_that_it_has_not_marked() -> None:
    core = Coordinator(world_size=1, base=Step(0), every_steps=2, slot_count=4, max_uploads=2).recover()
    core = core.report(rank(0, 9, 8, 9, Vote.ACKED, pinned_steps=(Step(4),)))
    assert (core.committed, core.persist) == (9, 9)
    for _ in range(4):
        core = core.report(rank(0, core.proposed, core.committed, core.proposed, Vote.ACKED, pinned_steps=(Step(4),)))
    assert core.persist == 9
    assert core.report(rank(0, core.proposed, core.committed, core.proposed, Vote.ACKED)).persist > 9


def test_a_rank_without_a_free_slot_captures_nothing_whatever_the_number_of_slots() -> None:
    core = begun(slot_count=4, max_uploads=3).report(*both(1, NONE, 1, Vote.ACKED))
    for step in (2, 3, 4):
        core = core.report(*both(step, step - 1, step, Vote.ACKED))
    pinned = tuple(Step(step) for step in (1, 2, 3))
    core = core.report(rank(0, 5, 4, 5, Vote.ACKED), rank(1, 5, 4, 5, Vote.ACKED, pinned_steps=pinned))
    assert (core.committed, core.proposed) == (5, NONE)
    assert core.report(rank(1, 5, 5, NONE, pinned_steps=pinned[1:])).proposed != NONE


@pytest.mark.parametrize(("slot_count", "goes_on"), [(2, False), (3, True)])
def test_while_a_slot_is_pinned_and_the_other_holds_c_nothing_is_proposed(slot_count: int, goes_on: bool) -> None:
    core = begun(slot_count=slot_count).report(*both(1, NONE, 1, Vote.ACKED))
    core = core.report(*both(2, 1, 2, Vote.ACKED, pinned_steps=(Step(1),)))
    assert core.committed == 2
    assert (core.proposed != NONE) is goes_on
    assert core.report(*both(2, 2, NONE)).proposed != NONE


class TestFinalStepDuringAnUpload:
    """Tests the final round if the final step, 60, is proposed while both slots are in use.

    One slot has step 1, which is being uploaded, and the other has the committed step 2.
    """

    def stopped(self, *, has_stop: bool) -> Coordinator:
        core = running()
        core = core.report(*both(2, 1, 2, Vote.ACKED, pinned_steps=(Step(1),)))
        core = core.report(*both(60, 2, NONE, pinned_steps=(Step(1),)))
        assert (core.committed, core.proposed) == (2, NONE)
        core = core.request_stop() if has_stop else core
        return core.report(*self.standing(2, NONE, pinned_steps=(Step(1),)))

    @staticmethod
    def standing(committed: int, proposed: int, vote: Vote = Vote.NONE, **more: object) -> tuple[RankRound, ...]:
        return both(60, committed, proposed, vote, standing=RankStanding.CLOSING, **more)

    @pytest.mark.parametrize("has_stop", [True, False], ids=["agreed stop", "end of the script"])
    def test_the_final_step_is_proposed_and_replaces_the_upload(self, has_stop: bool) -> None:
        core = self.stopped(has_stop=has_stop)
        assert (core.proposed, core.persist) == (60, 60)
        core = core.report(*self.standing(2, 60, Vote.ACKED))
        assert (core.committed, core.persist, core.is_finished) == (60, 60, True)

    @pytest.mark.parametrize("has_stop", [True, False], ids=["agreed stop", "end of the script"])
    def test_a_final_step_that_is_not_committed_leaves_the_newest_commit_to_be_uploaded(self, has_stop: bool) -> None:
        assert self.stopped(has_stop=has_stop).end_final_round().persist == 2
        refused = self.stopped(has_stop=has_stop).report(*self.standing(2, 60, Vote.ABANDON))
        assert (refused.is_finished, refused.persist) == (True, 2)

    def test_an_upload_of_the_committed_step_goes_on_beside_the_final_step(self) -> None:
        core = Coordinator(world_size=2, base=Step(0), every_steps=1).begin().report(*both(1, NONE, 1, Vote.ACKED))
        core = core.report(*both(60, 1, core.proposed, Vote.ABANDON, is_late=True, pinned_steps=(Step(1),)))
        core = core.report(*self.standing(1, core.proposed, Vote.ABANDON, is_late=True, pinned_steps=(Step(1),)))
        assert (core.committed, core.proposed, core.persist) == (1, 60, 1)


class TestFinalStepDuringAnExport:
    """Tests proposals, checkpoints and the final round while an export uses one of the two slots.

    The export holds step 1, and the other slot has the committed step 2.
    """

    @staticmethod
    def standing(proposed: int, vote: Vote = Vote.NONE, held: int = 1) -> tuple[RankRound, ...]:
        return both(60, 2, proposed, vote, standing=RankStanding.CLOSING, held_step=Step(held))

    def test_no_step_is_proposed_during_the_export(self) -> None:
        core = running().report(*both(2, 1, 2, Vote.ACKED, held_step=Step(1)))
        assert (core.committed, core.proposed) == (2, NONE)
        assert core.report(*both(2, 2, NONE)).proposed != NONE

    def test_an_export_of_the_committed_step_delays_no_proposal(self) -> None:
        core = running().report(*both(2, 1, 2, Vote.ACKED, held_step=Step(2)))
        assert core.proposed > core.committed == 2

    def test_a_checkpoint_before_the_end_of_a_node_ends_the_export(self) -> None:
        full = running().report(*both(2, 1, 2, Vote.ACKED, held_step=Step(1)))
        wanted = full.request_checkpoint(Step(3))
        assert not wanted.ends_exports, "a checkpoint on a user's request waits for the export"
        urgent = full.request_checkpoint(Step(3), ends_exports=True)
        assert urgent.ends_exports
        free = urgent.report(*both(2, 2, NONE))
        assert not free.ends_exports
        stored = free.report(*both(free.proposed, 2, free.proposed, Vote.ACKED))
        assert stored.persist == stored.committed == free.proposed >= 3
        again = stored.report(*both(stored.committed, stored.committed, stored.proposed, held_step=Step(2)))
        assert not again.ends_exports, "the required checkpoint is marked"

    def test_a_checkpoint_with_a_free_slot_ends_no_export(self) -> None:
        core = running().report(*both(2, 1, 2, Vote.ACKED, held_step=Step(2)))
        assert not core.request_checkpoint(Step(3), ends_exports=True).ends_exports

    def test_the_final_step_ends_the_export(self) -> None:
        core = running().report(*both(2, 1, 2, Vote.ACKED, held_step=Step(1)))
        core = core.report(*self.standing(NONE))
        assert (core.proposed, core.persist) == (60, 60)
        core = core.report(*self.standing(60, Vote.ACKED, held=NONE))
        assert (core.committed, core.is_finished) == (60, True)

    def test_an_export_that_begins_after_the_proposal_of_the_final_step_ends_too(self) -> None:
        core = running().report(*both(2, 1, 2, Vote.ACKED))
        core = core.report(*self.standing(core.proposed, held=NONE))
        assert (core.proposed, core.persist) == (60, NONE)
        core = core.report(*self.standing(60, held=1))
        assert (core.proposed, core.persist) == (60, 60)


class TestRestart:
    """Tests a coordinator that recovers after a restart."""

    @staticmethod
    def recovered(*rounds: RankRound, base: int = 0) -> Coordinator:
        return Coordinator(world_size=2, base=Step(base), every_steps=0).recover().report(*rounds)

    def test_it_proposes_nothing_until_all_have_reported(self) -> None:
        core = self.recovered(rank(0, 9, 7, 8, Vote.ACKED))
        assert core.is_recovering
        assert (core.committed, core.proposed) == (NONE, NONE)

    def test_c_is_the_newest_that_all_acknowledged(self) -> None:
        core = self.recovered(*both(9, 7, 8, Vote.ACKED))
        assert (core.committed, core.proposed) == (8, 10)

    def test_c_is_the_highest_heard_when_somebody_has_not(self) -> None:
        core = self.recovered(rank(0, 8, 7, 9, Vote.ACKED), rank(1, 8, 8, 9, Vote.NONE))
        assert core.committed == 8
        assert core.proposed == 10

    def test_acknowledgements_of_different_steps_commit_nothing(self) -> None:
        core = self.recovered(rank(0, 9, 7, 9, Vote.ACKED), rank(1, 9, 7, 8, Vote.ACKED))
        assert core.committed == 7

    @pytest.mark.parametrize(("boundary", "proposed"), [(20, 9), (9, 20)])
    def test_the_next_step_is_above_everything(self, boundary: int, proposed: int) -> None:
        assert self.recovered(rank(0, boundary, 7, proposed), rank(1, 9, 7, 9)).proposed == 21

    def test_the_round_of_the_base_goes_on(self) -> None:
        core = self.recovered(rank(0, 5, NONE, 5, Vote.ACKED), rank(1, 5, NONE, 5), base=5)
        assert (core.committed, core.proposed) == (NONE, 5)
        assert core.report(rank(1, 5, NONE, 5, Vote.ACKED)).committed == 5

    def test_a_confirmed_stop_that_somebody_heard_of_stands(self) -> None:
        core = self.recovered(rank(0, 9, 7, 8, confirmed_stop=Step(10)), rank(1, 9, 7, 8))
        assert (core.stop, core.stop_state) == (10, StopState.CONFIRMED)
        assert core.request_stop().stop == 10

    def test_a_stop_that_was_only_announced_is_withdrawn_and_its_number_is_not_used_again(self) -> None:
        """Both ranks have agreed to stop at step 10, but the coordinator restarts before it confirms the stop.

        The next stop gets another step, 11. If the coordinator announced step 10 again, it would count the earlier
        agreement of a rank that may have passed step 10 meanwhile.
        """
        answer = {"heard_stop": Step(10), "echo_step": Step(10), "echo": 1}
        core = self.recovered(*both(9, 7, 8, **answer))
        assert core.stop_state is StopState.NONE
        core = core.request_stop()
        assert (core.stop, core.stop_state) == (11, StopState.ANNOUNCED)

    @pytest.mark.parametrize(("every_steps", "persist"), [(0, NONE), (100, 7)])
    def test_what_may_have_been_marked_for_upload_is_marked_again_where_there_are_checkpoints(
        self, every_steps: int, persist: int
    ) -> None:
        core = Coordinator(world_size=2, base=Step(0), every_steps=every_steps).recover()
        assert core.report(*both(9, 7, 8)).persist == persist


class TestStop:
    """Tests how the ranks agree on the step at which all of them stop."""

    @staticmethod
    def announced() -> Coordinator:
        return running().report(rank(0, 4, 1, 2), rank(1, 3, 1, 2)).request_stop()

    def test_it_is_above_every_boundary(self) -> None:
        core = self.announced()
        assert (core.stop, core.stop_state) == (5, StopState.ANNOUNCED)
        assert core.request_stop() == core

    def test_all_must_say_yes(self) -> None:
        core = self.announced().report(rank(0, 4, 1, 2, echo_step=Step(5), echo=1))
        assert core.stop_state is StopState.ANNOUNCED
        assert core.report(rank(1, 4, 1, 2, echo_step=Step(5), echo=1)).stop_state is StopState.CONFIRMED

    def test_an_answer_to_another_stop_is_none(self) -> None:
        core = self.announced().report(
            rank(0, 4, 1, 2, echo_step=Step(5), echo=1), rank(1, 4, 1, 2, echo_step=Step(4), echo=1)
        )
        assert core.stop_state is StopState.ANNOUNCED

    def test_any_no_withdraws_it_and_a_later_one_is_announced(self) -> None:
        core = self.announced().report(
            rank(0, 4, 1, 2, echo_step=Step(5), echo=1), rank(1, 6, 1, 2, echo_step=Step(5), echo=2)
        )
        assert core.stop_state is StopState.ANNOUNCED
        assert core.stop > 6

    def test_a_confirmed_stop_is_never_withdrawn(self) -> None:
        core = self.announced().report(*both(4, 1, 2, echo_step=Step(5), echo=1))
        assert core.report(*both(5, 1, 2, echo_step=Step(5), echo=2)).stop_state is StopState.CONFIRMED

    def test_nothing_is_announced_before_all_have_restored(self) -> None:
        core = begun().report(rank(0, -1, NONE, 1), rank(1, 0, NONE, 1)).request_stop()
        assert core.stop_state is StopState.NONE

    def test_nothing_is_announced_when_ranks_are_closing_anyway(self) -> None:
        core = running().report(rank(0, 4, 1, 2, standing=RankStanding.CLOSING), rank(1, 4, 1, 2)).request_stop()
        assert core.stop_state is StopState.NONE


class TestRehearsal:
    """Tests how the ranks agree on a step after which all of them rehearse.

    The rehearsal repeats 2 steps. The highest boundary is 4, so the announced step is 4 + 1 (the lead) + 2 = 7, and
    ranks can answer until boundary 5.
    """

    STEP = Step(7)

    @staticmethod
    def announced() -> Coordinator:
        return running().report(rank(0, 4, 1, 2), rank(1, 3, 1, 2)).request_rehearsal(1, 2)

    @classmethod
    def answers(cls, boundary: int, echo: int, **more: object) -> dict[str, object]:
        return {"boundary": boundary, "rehearsal_step": cls.STEP, "rehearsal_echo": echo, **more}

    @classmethod
    def told(cls, core: Coordinator, *reports: dict[str, object]) -> Coordinator:
        rounds = (rank(number, 0, 1, 2) for number in range(len(reports)))
        return core.report(*(msgspec.structs.replace(each, **more) for each, more in zip(rounds, reports, strict=True)))

    @classmethod
    def confirmed(cls) -> Coordinator:
        return cls.told(cls.announced(), cls.answers(7, ECHO_YES), cls.answers(7, ECHO_YES))

    def test_its_first_repeated_step_is_above_every_boundary(self) -> None:
        rehearsal = self.announced().rehearsal
        assert (rehearsal.step, rehearsal.state, rehearsal.number) == (self.STEP, StopState.ANNOUNCED, 1)

    def test_it_is_confirmed_when_every_rank_waits_there(self) -> None:
        core = self.told(self.announced(), self.answers(5, ECHO_YES), self.answers(5, ECHO_YES))
        assert core.rehearsal.state is StopState.ANNOUNCED
        core = self.told(core, self.answers(7, ECHO_YES), self.answers(6, ECHO_YES))
        assert core.rehearsal.state is StopState.ANNOUNCED
        core = self.told(core, self.answers(7, ECHO_YES), self.answers(7, ECHO_YES))
        assert (core.rehearsal.step, core.rehearsal.state) == (self.STEP, StopState.CONFIRMED)

    def test_it_is_over_when_every_rank_has_passed_it(self) -> None:
        core = self.told(self.confirmed(), self.answers(8, ECHO_YES), self.answers(7, ECHO_YES))
        assert core.rehearsal.state is StopState.CONFIRMED
        core = self.told(core, self.answers(8, ECHO_YES), self.answers(8, ECHO_YES))
        assert core.rehearsal.state is StopState.NONE
        assert core.request_rehearsal(1, 2).rehearsal.state is StopState.NONE, "a repeated order changes nothing"
        later = core.request_rehearsal(2, 2).rehearsal
        assert (later.number, later.step, later.state) == (2, 8 + core.lead.steps + 2, StopState.ANNOUNCED)

    def test_it_is_over_when_the_script_has_ended_there(self) -> None:
        ended = self.answers(7, ECHO_YES, standing=RankStanding.CLOSED)
        assert self.told(self.confirmed(), ended, ended).rehearsal.state is StopState.NONE

    @pytest.mark.parametrize(
        "late",
        [
            {"boundary": 6, "rehearsal_step": Step(7), "rehearsal_echo": ECHO_NO},
            {"boundary": 6},
            {"boundary": 6, "rehearsal_step": Step(6), "rehearsal_echo": ECHO_YES},
            {"boundary": 8, "rehearsal_step": Step(7), "rehearsal_echo": ECHO_YES},
        ],
        ids=["no", "a rank of an earlier release", "an answer to another rehearsal", "a rank that did not wait"],
    )
    def test_a_rank_that_missed_it_gets_a_later_step(self, late: dict[str, object]) -> None:
        core = self.told(self.announced(), self.answers(5, ECHO_YES), late)
        assert core.rehearsal.state is StopState.ANNOUNCED
        assert core.rehearsal.step == max(7, int(str(late["boundary"]))) + 1 + 2

    def test_an_answer_at_the_last_moment_counts(self) -> None:
        core = self.told(self.announced(), {"boundary": 5}, self.answers(5, ECHO_YES))
        assert core.rehearsal == self.announced().rehearsal

    def test_an_order_ends_after_three_announcements(self) -> None:
        core = self.announced()
        steps = [core.rehearsal.step]
        while core.rehearsal.state is StopState.ANNOUNCED:
            core = self.told(core, *2 * [{"boundary": core.rehearsal.step}])
            steps.append(core.rehearsal.step)
        assert steps == [7, 10, 13, 13]
        assert core.rehearsal.number == 1
        assert self.told(core, {"boundary": 99}, {"boundary": 99}).rehearsal.state is StopState.NONE
        assert core.request_rehearsal(2, 2).rehearsal.state is StopState.ANNOUNCED

    def test_a_rank_that_cannot_rehearse_ends_the_order(self) -> None:
        core = self.told(self.announced(), self.answers(5, ECHO_YES), self.answers(4, ECHO_UNABLE))
        assert (core.rehearsal.step, core.rehearsal.state) == (7, StopState.NONE)
        assert self.told(core, {"boundary": 20}, {"boundary": 20}).rehearsal.state is StopState.NONE

    def test_a_requested_stop_ends_the_order_and_never_a_confirmed_rehearsal(self) -> None:
        assert self.announced().request_stop().rehearsal.state is StopState.NONE
        assert self.announced().request_stop().request_rehearsal(2, 2).rehearsal.state is StopState.NONE
        core = self.confirmed().request_stop()
        assert (core.stop, core.stop_state) == (8, StopState.ANNOUNCED)
        assert core.rehearsal.state is StopState.CONFIRMED

    def test_a_rank_that_closes_ends_the_order(self) -> None:
        closed = self.answers(5, ECHO_YES, standing=RankStanding.CLOSING)
        assert self.told(self.announced(), self.answers(5, ECHO_YES), closed).rehearsal.state is StopState.NONE

    def test_nothing_is_announced_before_all_have_restored(self) -> None:
        core = begun().report(rank(0, -1, NONE, 1), rank(1, 0, NONE, 1)).request_rehearsal(1, 5)
        assert core.rehearsal.state is StopState.NONE
        assert core.report(rank(0, 0, NONE, 1)).rehearsal.step == 6

    def test_an_order_during_a_rehearsal_begins_no_other(self) -> None:
        for core in (self.announced(), self.confirmed()):
            again = core.request_rehearsal(2, 9)
            assert again.rehearsal == replace(core.rehearsal, number=2)

    @pytest.mark.parametrize("is_asked_first", [True, False])
    def test_a_restarted_coordinator_continues_a_confirmed_rehearsal_that_an_agent_has_heard_of(
        self, is_asked_first: bool
    ) -> None:
        """Agent 0 has heard the confirmation, agent 1 only the announcement. The control plane repeats its order."""
        core = Coordinator(world_size=2, base=Step(0), every_steps=0).recover()
        core = core.request_rehearsal(1, 9) if is_asked_first else core
        heard = {"heard_rehearsal": self.STEP}
        core = self.told(core, self.answers(7, ECHO_YES, confirmed_rehearsal=self.STEP, **heard), heard)
        core = core if is_asked_first else core.request_rehearsal(1, 9)
        assert core.rehearsal == RehearsalAgreement(number=1, step=self.STEP, state=StopState.CONFIRMED)
        core = self.told(core, {"boundary": 8}, {"boundary": 8})
        assert core.rehearsal.state is StopState.NONE, "the order is over, too"

    def test_a_restarted_coordinator_withdraws_an_announced_rehearsal_and_never_uses_its_step_again(self) -> None:
        core = Coordinator(world_size=2, base=Step(0), every_steps=0).recover()
        core = self.told(core, *2 * [self.answers(5, ECHO_YES, heard_rehearsal=self.STEP)])
        assert core.rehearsal.state is StopState.NONE
        assert core.request_rehearsal(1, 2).rehearsal.step > self.STEP

    def test_a_restart_without_a_rehearsal_recovers_none(self) -> None:
        core = Coordinator(world_size=2, base=Step(0), every_steps=0).recover()
        core = self.told(core, {"boundary": NONE}, {"boundary": NONE})
        assert core.rehearsal == RehearsalAgreement()

    def test_an_order_without_steps_and_an_order_after_a_recovered_stop_announce_nothing(self) -> None:
        core = running().report(rank(0, 4, 1, 2), rank(1, 3, 1, 2))
        assert core.request_rehearsal(1, 0) == core
        stopping = Coordinator(world_size=2, base=Step(0), every_steps=0).recover()
        stopping = self.told(stopping, *2 * [{"boundary": 4, "confirmed_stop": Step(9), "heard_stop": Step(9)}])
        assert stopping.request_rehearsal(1, 2).rehearsal.state is StopState.NONE

    def test_a_confirmation_of_an_earlier_rehearsal_is_over_after_a_restart(self) -> None:
        core = Coordinator(world_size=2, base=Step(0), every_steps=0).recover()
        earlier = {"boundary": 9, "heard_rehearsal": Step(7), "confirmed_rehearsal": Step(7)}
        core = self.told(core, earlier, {"boundary": 9, "heard_rehearsal": Step(12)})
        assert (core.rehearsal.step, core.rehearsal.state) == (12, StopState.NONE)


class TestEnd:
    """In the final round, the coordinator commits the last step, which all ranks have finished."""

    @staticmethod
    def closing(
        boundary: int, committed: int, proposed: int, vote: Vote = Vote.NONE, **more: object
    ) -> tuple[RankRound, RankRound]:
        return both(boundary, committed, proposed, vote, standing=RankStanding.CLOSING, **more)

    def test_the_boundary_that_all_stand_at_is_committed_and_then_all_leave(self) -> None:
        core = running().report(*self.closing(9, 1, 2))
        core = core.report(*self.closing(9, 1, 2, Vote.ABANDON)) if core.proposed == 2 else core
        assert (core.proposed, core.is_finished) == (9, False)
        core = core.report(*self.closing(9, 1, 9, Vote.ACKED))
        assert (core.committed, core.is_finished, core.proposed) == (9, True, NONE)

    def test_one_who_still_moves_is_waited_for(self) -> None:
        core = running().report(rank(0, 9, 1, 2, standing=RankStanding.CLOSED), rank(1, 9, 1, 2))
        assert core.final == NONE

    def test_what_is_committed_already_is_not_committed_again(self) -> None:
        assert running().report(*self.closing(1, 1, 2)).is_finished

    def test_a_generation_that_made_no_step_ends_at_once(self) -> None:
        core = begun(base=5).report(*self.closing(5, NONE, 5))
        assert core.is_finished

    def test_what_cannot_be_captured_ends_it(self) -> None:
        core = running().report(*self.closing(9, 1, 2, Vote.ABANDON))
        core = core.report(rank(0, 9, 1, 9, Vote.ABANDON, standing=RankStanding.CLOSING))
        assert core.is_finished
        assert core.committed == 1

    def test_it_can_be_given_up_once_it_has_begun(self) -> None:
        assert not running().end_final_round().is_finished
        core = running().report(*self.closing(9, 1, 2, Vote.ABANDON))
        assert core.end_final_round().is_finished

    def test_ranks_that_stand_apart_leave_without_a_commit(self) -> None:
        core = running().report(
            rank(0, 9, 1, 2, standing=RankStanding.CLOSED), rank(1, 8, 1, 2, standing=RankStanding.CLOSED)
        )
        assert core.is_finished
        assert core.proposed == NONE

    def test_the_last_step_of_a_stop_is_uploaded(self) -> None:
        core = running().request_stop().report(*self.closing(1, 1, 2))
        assert core.persist == 1

    def test_the_last_step_of_a_script_that_ends_is_uploaded(self) -> None:
        assert running().report(*self.closing(1, 1, 2)).persist == 1
        core = running().report(*self.closing(9, 1, 2, Vote.ABANDON))
        assert (core.final, core.persist) == (9, NONE)
        assert core.report(*self.closing(9, 1, 9, Vote.ACKED)).persist == 9

    def test_without_a_stop_the_control_plane_cannot_halt_the_rounds(self) -> None:
        assert running().halt() == running()

    def test_a_stop_that_is_asked_for_too_late_has_the_last_step_uploaded_too(self) -> None:
        assert running().report(*self.closing(1, 1, 2)).request_stop().persist == 1

    def test_a_final_round_that_is_given_up_after_a_stop_has_the_newest_commit_uploaded(self) -> None:
        core = running().request_stop().report(*self.closing(9, 1, 2, Vote.ABANDON))
        assert (core.final, core.persist) == (9, NONE)
        core = core.end_final_round()
        assert (core.is_finished, core.persist) == (True, 1)
        core = core.report(*self.closing(9, 1, 9, Vote.ACKED))  # the last vote arrives late
        assert (core.committed, core.persist) == (9, 9)

    def test_ranks_that_are_ended_during_a_stop_leave_the_newest_commit(self) -> None:
        """A script hangs before the agreed stop, and the control plane orders the agents to kill its ranks.

        The newest commit is still uploaded.
        """
        core = running().request_stop().halt()
        assert (core.is_finished, core.proposed, core.persist) == (True, NONE, 1)

    def test_ranks_that_are_ended_before_the_base_was_committed_leave_the_base(self) -> None:
        core = begun(base=5).report(*both(5, NONE, 5)).request_stop().halt()
        assert (core.committed, core.persist) == (NONE, 5)

    def test_a_restarted_coordinator_has_the_last_step_of_a_confirmed_stop_uploaded(self) -> None:
        """A coordinator that restarts after it has confirmed a stop still requests the upload of the last step.

        Nobody repeats the stop request, which the coordinator received before the restart.
        """
        core = Coordinator(world_size=2, base=Step(0), every_steps=0).recover()
        assert core.report(*self.closing(9, 9, 9, Vote.ACKED, confirmed_stop=Step(9))).persist == 9

    def test_a_final_step_that_was_proposed_before_waits_until_all_have_forgotten_it(self) -> None:
        core = running().report(rank(0, 5, 1, 2, Vote.ABANDON, is_late=True), rank(1, 5, 1, 2))
        seven = core.proposed
        assert seven == 7
        dropped = core.report(rank(0, 7, 1, seven, Vote.ABANDON, is_late=True), rank(1, 7, 1, seven))
        standing = dropped.report(*both(7, 1, seven, standing=RankStanding.CLOSING))
        while standing.proposed not in (NONE, 7):
            abandoned = [
                msgspec.structs.replace(each, proposed=standing.proposed, vote=Vote.ABANDON)
                for each in standing.ranks[:1]
            ]
            standing = standing.report(*abandoned)
        if standing.proposed == NONE:
            standing = standing.report(*self.closing(7, 1, NONE))
        assert standing.proposed == 7

    def test_a_final_step_that_a_rank_passed_unheard_is_proposed_again(self) -> None:
        """A rank finishes the last step before it reads that the step is proposed, and then waits in `close`.

        The coordinator proposes the step again, because the rank can still capture it.
        """
        core = running().report(rank(0, 5, 1, 2, Vote.ABANDON, is_late=True), rank(1, 5, 1, 2))
        core = core.report(*self.closing(7, 1, NONE))
        assert (core.proposed, core.final) == (7, 7)
        passed = rank(0, 7, 1, 7, Vote.ABANDON, is_late=True, standing=RankStanding.CLOSING)
        core = core.report(passed, rank(1, 7, 1, 7, standing=RankStanding.CLOSING))
        assert (core.proposed, core.is_finished) == (NONE, False)
        core = core.report(*self.closing(7, 1, NONE))
        assert (core.proposed, core.is_finished) == (7, False)
        core = core.report(*self.closing(7, 1, 7, Vote.ACKED))
        assert (core.committed, core.is_finished) == (7, True)


def test_steps_are_proposed_as_far_apart_as_the_budget_wants() -> None:
    core = running().keep_distance(10)
    assert core.proposed == 2  # the new distance applies only from the next proposal on
    core = core.report(*both(2, 1, 2, Vote.ACKED))
    assert (core.committed, core.proposed) == (2, 12)
    core = core.keep_distance(1).report(*both(12, 2, 12, Vote.ACKED))
    assert core.proposed == 13


def test_an_abandoned_step_has_cost_nothing_the_next_one_comes_soon() -> None:
    core = running().keep_distance(10).report(*both(2, 1, 2, Vote.ACKED))
    core = core.report(*both(12, 2, 12, Vote.ABANDON, reason="late", is_late=True))
    assert core.proposed == 14  # the coordinator now proposes two steps ahead


def test_a_distance_leaves_no_checkpoint_out() -> None:
    core = Coordinator(world_size=2, base=Step(0), every_steps=4).begin().keep_distance(10)
    found = []
    for _ in range(4):
        core = core.report(*both(core.proposed, core.committed, core.proposed, Vote.ACKED))
        found.append(core.proposed)
    assert found == [4, 8, 12, 16]


def test_a_gap_in_commits_does_not_leave_all_steps_before_the_next_checkpoint_alone() -> None:
    core = Coordinator(world_size=2, base=Step(0), every_steps=100).begin().report(*both(1, NONE, 1, Vote.ACKED))
    core = core.report(*both(61, 1, 2, Vote.ACKED))  # this round takes 60 steps, for example because of an upload
    assert (core.committed, core.proposed) == (2, 62)
    core = core.report(*both(62, 2, 62, Vote.ACKED))
    assert (core.committed, core.proposed) == (62, 63)


def test_a_wanted_checkpoint_is_the_next_commit_and_asked_for_once() -> None:
    core = begun().report(*both(1, NONE, 1, Vote.ACKED))
    asked = core.request_checkpoint(Step(1))
    assert (asked.committed, asked.persist) == (1, NONE), (
        "what is committed already may be overwritten before every member has heard of it"
    )
    after = asked.report(*both(2, 1, 2, Vote.ACKED))
    assert (after.committed, after.persist) == (2, 2)
    again = after.request_checkpoint(Step(1)).report(*both(3, 2, 3, Vote.ACKED))
    assert (again.committed, again.persist) == (3, 2), "there is one of step 1 or later"
    more = again.request_checkpoint(Step(3)).report(*both(4, 3, 4, Vote.ACKED))
    assert more.persist == 4


def test_a_wanted_checkpoint_waits_until_the_one_before_is_uploaded() -> None:
    core = begun().report(*both(1, NONE, 1, Vote.ACKED)).request_checkpoint(Step(1))
    busy = core.report(*both(2, 1, 2, Vote.ACKED, pinned_steps=(Step(1),)))
    assert (busy.committed, busy.persist) == (2, NONE)
    free = busy.report(*both(2, 2, 2))
    done = free.report(*both(3, 2, 3, Vote.ACKED))
    assert (done.committed, done.persist) == (3, 3)


def test_a_wanted_checkpoint_does_not_shift_the_interval() -> None:
    core = Coordinator(world_size=2, base=Step(0), every_steps=4).begin().request_checkpoint(Step(1))
    persisted = []
    while core.committed < 8:
        core = core.report(*both(core.proposed, core.committed, core.proposed, Vote.ACKED))
        persisted.append(core.persist)
    assert sorted({*persisted}) == [1, 4, 8]
