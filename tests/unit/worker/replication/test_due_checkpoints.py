"""When the interval of checkpoints has passed, the coordinator's server marks the next committed step for upload."""

from __future__ import annotations

from msgspec import structs

from everstep.protocol.ids import Generation, NodeId, Rank, Step
from everstep.protocol.rank_messages import ECHO_YES, StopState, Vote
from everstep.protocol.rounds import NodeReport, RankRound
from worker.core.checkpoint_schedule import CheckpointSchedule
from worker.core.rounds import NONE, Coordinator
from worker.replication.coordinator import RoundServer

UNIX = 5000.0


class Generated:
    """Simulates a generation with one rank, whose agent votes for every proposed step."""

    def __init__(self, schedule: CheckpointSchedule, *, every_steps: int = 0, base: int = 0) -> None:
        self.now = 100.0
        self.server = RoundServer(
            Generation(1),
            Coordinator(world_size=1, base=Step(base), every_steps=every_steps, stored=Step(base)).begin(),
            final_round_seconds=60.0,
            now=lambda: UNIX + self.now,
            clock=lambda: self.now,
            schedule=schedule,
            node_bytes=lambda: 77,
        )
        self.sequence = 0
        self.stored = NONE

    @property
    def persist(self) -> int:
        return self.server.announcement().persist_step

    def step(self, *, pinned: int = NONE, held: int = NONE, **more: object) -> None:
        """Report the proposed step as captured and acknowledged. `more` are other fields of the report."""
        core = self.server.core
        self.sequence += 1
        round_ = RankRound(
            rank=Rank(0),
            boundary=core.proposed,
            committed=core.committed,
            proposed=core.proposed,
            vote=Vote.ACKED,
            pinned_steps=() if pinned == NONE else (Step(pinned),),
            held_step=Step(held),
            stored_step=Step(self.stored),
        )
        round_ = structs.replace(round_, **more)
        report = NodeReport(node_id=NodeId("i-0"), term=self.server.term, sequence=self.sequence, ranks=(round_,))
        self.server.take([report])


async def test_members_hear_that_a_checkpoint_needs_the_slot_of_an_export() -> None:
    job = Generated(CheckpointSchedule(begun_at=100.0))
    job.step()
    job.step(held=1)
    job.server.request_checkpoint(Step(3))
    assert not job.server.announcement().ends_exports
    version = job.server.changed.version
    job.server.request_checkpoint(Step(3), ends_exports=True)
    assert job.server.announcement().ends_exports
    assert job.server.changed.version > version, "members must hear it now"


async def test_the_first_commit_after_the_interval_is_uploaded() -> None:
    job = Generated(CheckpointSchedule(interval_seconds=10.0, begun_at=100.0))
    job.step()
    job.now = 109.0
    job.step()
    assert job.persist == NONE
    assert job.server.status().checkpoints.due_at_seconds == UNIX + 110.0
    job.now = 110.0
    job.step()
    assert job.persist == job.server.core.committed == 3
    assert job.server.status().checkpoints.due_at_seconds == UNIX + 120.0


async def test_a_base_that_is_stored_already_is_not_uploaded_again() -> None:
    job = Generated(CheckpointSchedule(interval_seconds=10.0, begun_at=50.0), base=7)
    job.step()
    assert (job.server.core.committed, job.persist) == (7, NONE)
    job.step()
    assert (job.server.core.committed, job.persist) == (8, 8)


async def test_the_duration_of_an_upload_ends_with_the_last_shard() -> None:
    job = Generated(CheckpointSchedule(max_overhead=0.5, max_bytes_per_second=7.0, begun_at=100.0))
    job.step()
    assert job.persist == 1, "the first upload is the first measurement"
    job.now = 104.0
    job.step(pinned=1)
    assert job.server.status().checkpoints.upload_seconds == 0.0
    job.now, job.stored = 106.0, 1
    job.step()
    pace = job.server.status().checkpoints
    assert (pace.upload_seconds, pace.interval_seconds) == (6.0, 18.0), "6 s · 1.5 / 0.5"
    assert pace.due_at_seconds == UNIX + 118.0


async def test_a_checkpoint_by_number_of_steps_begins_the_interval_anew() -> None:
    job = Generated(CheckpointSchedule(interval_seconds=10.0, begun_at=100.0), every_steps=2)
    assert job.server.status().checkpoints.due_step == 2
    job.now = 108.0
    job.step()
    assert job.persist == 2
    pace = job.server.status().checkpoints
    assert (pace.due_step, pace.due_at_seconds) == (4, UNIX + 118.0)


async def test_the_seconds_of_a_rehearsal_do_not_count_as_training() -> None:
    job = Generated(CheckpointSchedule(begun_at=100.0))
    job.step()
    job.server.request_rehearsal(1, 2)
    step = job.server.announcement().rehearsal_step
    job.step(boundary=step, rehearsal_step=step, rehearsal_echo=ECHO_YES)
    assert job.server.announcement().rehearsal_state is StopState.CONFIRMED
    before = job.server.schedule.undisturbed
    for job.now in (150.0, 200.0):
        job.step(boundary=step)
    job.step(boundary=step + 1)
    assert job.server.announcement().rehearsal_state is StopState.NONE
    job.now = 201.0
    job.step(boundary=step + 2)
    after = job.server.schedule.undisturbed
    assert (after.steps - before.steps, after.seconds - before.seconds) == (1, 1.0)
