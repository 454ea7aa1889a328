"""Tests the coordinator of jobs that capture only checkpoints, or nothing, and that wait for uploads."""

from __future__ import annotations

from everstep.protocol.ids import Step
from everstep.protocol.plan import Snapshots
from everstep.protocol.rank_messages import RankStanding, Vote
from tests.unit.worker.core.test_coordinator import both, rank
from worker.core.rounds import NONE, Coordinator


def begun(*, every_steps: int = 0, is_blocking: bool = False, base: int = 0) -> Coordinator:
    return Coordinator(
        world_size=2,
        base=Step(base),
        every_steps=every_steps,
        stored=Step(base),
        snapshots=Snapshots.FOR_CHECKPOINTS,
        is_blocking=is_blocking,
    ).begin()


def stored_one() -> Coordinator:
    """Return a coordinator that has committed step 1, has marked the step for upload, and waits for the upload."""
    return begun(every_steps=1, is_blocking=True).report(*both(1, NONE, 1, Vote.ACKED))


def test_nothing_is_captured_before_a_checkpoint_is_due() -> None:
    core = begun().report(*both(1, NONE, NONE)).report(*both(9, NONE, NONE))
    assert (core.proposed, core.committed, core.persist) == (NONE, NONE, NONE)


def test_a_checkpoint_that_is_due_by_time_is_captured_once_and_uploaded() -> None:
    core = begun().report(*both(4, NONE, NONE)).request_checkpoint(Step(1)).report(*both(5, NONE, NONE))
    step = core.proposed
    assert step > 5
    core = core.report(*both(step, NONE, step, Vote.ACKED))
    assert (core.committed, core.persist, core.proposed) == (step, step, NONE)


def test_a_checkpoint_that_is_due_before_the_ranks_have_their_state_is_of_a_step_after_the_base() -> None:
    core = begun().request_checkpoint(Step(1)).report(*both(NONE, NONE, NONE))
    assert core.proposed == 1


def test_a_step_that_comes_too_late_is_replaced_by_a_later_one() -> None:
    core = begun().request_checkpoint(Step(1)).report(*both(3, NONE, NONE))
    first = core.proposed
    late = core.report(*both(first + 1, NONE, first, Vote.ABANDON, is_late=True))
    assert late.proposed > first + 1


def test_the_next_checkpoint_waits_for_the_upload_of_the_last_one() -> None:
    core = stored_one()
    assert core.persist == 1
    core = core.report(*both(2, 1, NONE, pinned_steps=(Step(1),)))
    assert core.proposed == NONE
    core = core.report(*both(2, 1, NONE, stored_step=Step(1)))
    assert core.proposed > 2


def test_ranks_wait_from_the_commit_until_no_agent_uploads_the_step() -> None:
    core = stored_one()
    assert core.hold == 1, "no agent has heard of the commit yet"
    core = core.report(rank(0, 2, 1, NONE, pinned_steps=(Step(1),)), rank(1, 2, 1, NONE, stored_step=Step(1)))
    assert core.hold == 1, "rank 0 is uploaded"
    assert core.report(*both(2, 1, NONE, stored_step=Step(1))).hold == NONE


def test_a_requested_stop_ends_the_wait() -> None:
    core = stored_one().report(*both(2, 1, NONE, pinned_steps=(Step(1),)))
    assert core.hold == 1
    assert core.request_stop().hold == NONE


def test_a_failed_upload_ends_the_wait() -> None:
    core = stored_one().report(*both(2, 1, NONE, pinned_steps=(Step(1),)))
    assert core.hold == 1
    assert core.report(*both(2, 1, NONE)).hold == NONE


def test_a_strategy_that_does_not_block_lets_ranks_train_during_the_upload() -> None:
    core = begun(every_steps=1).report(*both(1, NONE, 1, Vote.ACKED)).report(*both(2, 1, NONE, pinned_steps=(Step(1),)))
    assert (core.persist, core.hold) == (1, NONE)


def test_a_stopped_job_captures_and_uploads_its_last_step() -> None:
    core = begun(base=3).report(*both(3, NONE, 3, Vote.ACKED)).request_stop()
    core = core.report(*both(6, 3, NONE, standing=RankStanding.CLOSING))
    assert core.proposed == core.final == 6
    core = core.report(*both(6, 3, 6, Vote.ACKED, standing=RankStanding.CLOSING))
    assert (core.is_finished, core.persist) == (True, 6)
    assert core.hold == NONE, "the ranks end without a wait"


def test_a_job_without_snapshots_proposes_nothing_and_ends_at_once() -> None:
    core = Coordinator(world_size=2, base=Step(0), every_steps=0, snapshots=Snapshots.NEVER).begin()
    core = core.request_checkpoint(Step(1)).report(*both(5, NONE, NONE))
    assert core.proposed == NONE
    core = core.report(*both(9, NONE, NONE, standing=RankStanding.CLOSING))
    assert (core.is_finished, core.committed, core.persist) == (True, NONE, NONE)
