"""Tests when checkpoints are due: at a fixed interval, or at an interval that is computed from measured uploads."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from everstep.protocol.ids import Step
from worker.core.checkpoint_schedule import CheckpointSchedule, Pace, automatic_interval
from worker.core.rounds import NONE

STEP_SECONDS = 1.0


@dataclass
class Training:
    """Simulates a training with checkpoints. While an upload runs, steps take `slowed` times as long."""

    schedule: CheckpointSchedule
    upload_seconds: float = 10.0
    slowed: float = 2.0
    now: float = 1000.0
    step: int = 0
    persist: int = NONE
    stored: int = NONE
    ends_at: float = 0.0
    begun: list[float] = field(default_factory=list)

    def look(self) -> None:
        is_uploading = self.stored < self.persist
        if is_uploading and self.now >= self.ends_at:
            self.stored, is_uploading = self.persist, False
        self.schedule = self.schedule.observe(
            self.now,
            boundary=Step(self.step) if self.step else NONE,
            persist=Step(self.persist),
            is_uploading=is_uploading,
            stored=Step(self.stored),
            node_bytes=1000,
        )

    def train(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += STEP_SECONDS * (self.slowed if self.stored < self.persist else 1.0)
            self.step += 1
            self.look()
            if self.schedule.is_due(self.now) and self.stored == self.persist:
                self.persist, self.ends_at = self.step, self.now + self.upload_seconds
                self.begun.append(self.now)
                self.look()

    @property
    def intervals(self) -> list[float]:
        return [after - before for before, after in zip(self.begun, self.begun[1:], strict=False)]


def test_without_an_interval_time_makes_no_checkpoint_due() -> None:
    schedule = CheckpointSchedule()
    assert (schedule.due_at, schedule.present_interval, schedule.is_due(1e9)) == (None, None, False)


@pytest.mark.covers("CreateTrainingJob.CheckpointConfig.IntervalInSeconds")
def test_a_fixed_interval_counts_from_the_beginning_of_the_newest_checkpoint() -> None:
    training = Training(CheckpointSchedule(interval_seconds=60.0, begun_at=980.0))
    training.train(300.0)
    assert training.begun[0] == 1040.0, "the newest checkpoint of an earlier generation began at 980"
    assert all(60.0 <= interval <= 62.0 for interval in training.intervals)
    assert training.schedule.due_at == training.begun[-1] + 60.0


def test_an_upload_that_outlasts_the_fixed_interval_is_followed_by_the_next_one() -> None:
    training = Training(CheckpointSchedule(interval_seconds=5.0), upload_seconds=30.0)
    training.train(200.0)
    assert all(30.0 <= interval <= 34.0 for interval in training.intervals)


@pytest.mark.covers("CreateTrainingJob.CheckpointConfig.MaxOverhead")
def test_the_automatic_interval_keeps_the_measured_overhead_within_the_bound() -> None:
    training = Training(CheckpointSchedule(max_overhead=0.05))
    training.train(20.0)
    assert training.begun == [1001.0], "nothing is measured yet"
    training.train(2000.0)
    # An upload takes 10 s, and steps take twice as long meanwhile. It therefore costs 5 s, and the interval becomes 5 s
    # · 1.05 / 0.05 = 105 s.
    assert training.schedule.cost_seconds == pytest.approx(5.0, rel=0.15)
    assert all(90.0 <= interval <= 125.0 for interval in training.intervals[1:])
    undisturbed = training.step * STEP_SECONDS
    assert (training.now - 1000.0 - undisturbed) / undisturbed <= 0.055


def test_the_automatic_interval_follows_a_changed_upload_time() -> None:
    training = Training(CheckpointSchedule(max_overhead=0.05))
    training.train(1000.0)
    before = training.schedule.present_interval
    training.upload_seconds *= 4
    training.train(500.0)
    after = training.schedule.present_interval
    assert before is not None
    assert after == pytest.approx(4 * before, rel=0.2)
    training.upload_seconds /= 4
    training.train(2000.0)
    assert training.schedule.present_interval == pytest.approx(before, rel=0.2)


def test_uploads_that_do_not_disturb_training_follow_each_other() -> None:
    training = Training(CheckpointSchedule(max_overhead=0.01), slowed=1.0)
    training.train(1000.0)
    assert training.schedule.cost_seconds == pytest.approx(0.0, abs=0.05)
    assert all(interval <= 16.0 for interval in training.intervals[2:])


@pytest.mark.covers("CreateTrainingJob.CheckpointConfig.MaxUploadBytesPerSecond")
def test_the_bandwidth_budget_lengthens_the_automatic_interval() -> None:
    training = Training(CheckpointSchedule(max_overhead=1.0, max_bytes_per_second=5.0))
    training.train(1000.0)
    assert all(200.0 <= interval <= 203.0 for interval in training.intervals[1:]), "1,000 bytes at 5 per second"


def test_an_upload_of_an_earlier_generation_counts_as_if_it_had_stopped_training() -> None:
    schedule = CheckpointSchedule(max_overhead=0.1, begun_at=1000.0, upload_seconds=20.0)
    assert schedule.cost_seconds == 20.0
    assert schedule.due_at == 1000.0 + automatic_interval(20.0, 20.0, 0, max_overhead=0.1, max_bytes_per_second=0.0)


def test_a_failed_upload_is_not_measured_and_the_next_commit_makes_another_checkpoint() -> None:
    schedule = CheckpointSchedule(max_overhead=0.1)
    for is_uploading in (True, True, False):
        schedule = schedule.observe(
            1000.0, boundary=Step(9), persist=Step(8), is_uploading=is_uploading, stored=NONE, node_bytes=0
        )
        assert schedule.is_due(1001.0) is not is_uploading
    assert schedule.upload_seconds is None


@pytest.mark.parametrize(
    ("undisturbed", "disturbed", "cost"),
    [
        pytest.param(Pace(), Pace(), 10.0, id="nothing measured"),
        pytest.param(Pace(), Pace(3, 6.0), 10.0, id="no step without an upload"),
        pytest.param(Pace(4, 4.0), Pace(), 10.0, id="no step with an upload"),
        pytest.param(Pace(4, 4.0), Pace(3, 6.0), 5.0, id="half the speed"),
        pytest.param(Pace(1, 4.0), Pace(1, 8.0), 5.0, id="half the speed of slow steps"),
        pytest.param(Pace(1, 1.0), Pace(1, 0.5), 0.0, id="faster"),
        pytest.param(Pace(1, 1.0), Pace(0, 0.5), 10.0, id="training stood still"),
    ],
)
def test_an_upload_costs_the_share_of_its_time_by_which_it_slows_training(
    undisturbed: Pace, disturbed: Pace, cost: float
) -> None:
    schedule = CheckpointSchedule(upload_seconds=10.0, undisturbed=undisturbed, disturbed=disturbed)
    assert schedule.cost_seconds == cost
    assert CheckpointSchedule(undisturbed=undisturbed, disturbed=disturbed).cost_seconds == 0.0


@pytest.mark.parametrize(("pace", "speed"), [(Pace(), 0.0), (Pace(3, 0.5), 6.0), (Pace(3, 0.0), 0.0)])
def test_the_speed_of_training_is_0_before_the_first_step(pace: Pace, speed: float) -> None:
    assert pace.steps_per_second == speed


@pytest.mark.parametrize(
    ("fields", "interval"),
    [
        ({}, None),
        ({"interval_seconds": 60.0}, 60.0),
        ({"max_overhead": 0.5}, 0.0),
        ({"max_overhead": 0.5, "upload_seconds": 0.0}, 0.0),
        ({"max_overhead": 0.5, "upload_seconds": 10.0}, 30.0),
    ],
)
def test_the_present_interval(fields: dict[str, float], interval: float | None) -> None:
    schedule = CheckpointSchedule(begun_at=5.0, **fields)
    assert schedule.present_interval == interval
    assert schedule.due_at == (None if interval is None else 5.0 + interval)
