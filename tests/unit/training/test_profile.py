"""Tests when the profiler of network use records, and when it stays off because a script's own profiler runs."""

from __future__ import annotations

import itertools
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from everstep.protocol.rank_messages import IdleSpan
from everstep.training import recorded_calls
from everstep.training.idle_spans import Interval
from everstep.training.profile import (
    CLOSE_SECONDS,
    PROFILED_ITERATIONS,
    WARM_UP_ITERATIONS,
    WATCHED_ITERATIONS,
    NetworkProfiler,
    Read,
    TorchTrace,
)


class Recorder:
    """A fake profiler: the network is busy for the first half of every iteration."""

    def __init__(self) -> None:
        self.begun = self.stopped = self.ended = self.was_read = 0
        self.is_possible = self.is_alone = self.is_quiet = True
        self.now = 0.0
        self.waits: list[float] = []
        self.marks: list[float] = []

    def begin(self) -> bool:
        self.begun += self.is_possible
        self.marks = []
        return self.is_possible

    def mark(self) -> bool:
        self.marks.append(self.now)
        return self.is_alone

    def is_ours(self) -> bool:
        return self.is_alone

    def stop(self) -> None:
        self.stopped += 1

    def is_settled(self, limit_seconds: float = 0.0) -> bool:
        self.waits.append(limit_seconds)
        return self.is_quiet

    def end(self) -> Read:
        self.ended += 1
        return self.read

    def read(self) -> tuple[list[Interval], list[float]]:
        self.was_read += 1
        return [(one, (one + other) / 2) for one, other in itertools.pairwise(self.marks)], self.marks


class Job:
    def __init__(self) -> None:
        self.trace = Recorder()
        self.reports: list[tuple[float, tuple[IdleSpan, ...]]] = []
        self.profiler = NetworkProfiler(lambda seconds, spans: self.reports.append((seconds, spans)), self.trace)
        self.pass_boundary()

    def pass_boundary(self) -> None:
        self.profiler.boundary(self.trace.now)

    def iterate(self, count: int, seconds: float = 1.0) -> None:
        for _ in range(count):
            self.trace.now += seconds
            self.pass_boundary()


def test_twenty_iterations_are_profiled_and_then_none_while_nothing_changes() -> None:
    job = Job()
    job.iterate(WARM_UP_ITERATIONS - 1)
    assert job.trace.begun == 0
    job.iterate(1 + PROFILED_ITERATIONS)
    assert (job.trace.ended, job.trace.was_read, job.reports) == (1, 0, []), "no boundary holds the script for both"
    job.iterate(1)
    assert job.reports == [(1.0, (IdleSpan(0.5, 0.5, 0.0),))]
    assert len(job.trace.marks) == PROFILED_ITERATIONS + 1
    job.iterate(10 * WATCHED_ITERATIONS, 1.05)
    assert (job.trace.begun, job.trace.ended) == (1, 1)
    # the profiler marked no iteration after the last one that it had to record
    assert len(job.trace.marks) == PROFILED_ITERATIONS + 1


@pytest.mark.parametrize("seconds", [0.8, 1.2])
def test_iterations_of_another_length_are_profiled_again(seconds: float) -> None:
    job = Job()
    job.iterate(WARM_UP_ITERATIONS + PROFILED_ITERATIONS)
    job.iterate(WATCHED_ITERATIONS + PROFILED_ITERATIONS + 1, seconds)
    assert [round(length, 6) for length, _ in job.reports] == [1.0, seconds]
    job.iterate(3 * WATCHED_ITERATIONS, seconds)
    assert job.trace.begun == 2


def test_an_evaluation_now_and_then_is_no_drift() -> None:
    job = Job()
    job.iterate(WARM_UP_ITERATIONS + PROFILED_ITERATIONS)
    for _ in range(4):
        job.iterate(WATCHED_ITERATIONS - 1)
        job.iterate(1, 500.0)
    assert job.trace.begun == 1


def test_a_profiler_of_the_script_comes_first_and_ours_tries_again_later() -> None:
    job = Job()
    job.trace.is_possible = False
    job.iterate(WARM_UP_ITERATIONS + 10)
    assert job.trace.begun == 0
    job.trace.is_possible = True
    job.iterate(WATCHED_ITERATIONS)
    assert job.trace.begun == 1
    job.trace.is_alone = False  # from now on, the script's own profiler runs instead
    job.iterate(1)
    job.trace.is_alone = True
    job.iterate(PROFILED_ITERATIONS)
    assert (job.trace.ended, job.reports) == (0, [])
    job.iterate(WATCHED_ITERATIONS + PROFILED_ITERATIONS + 1)
    assert len(job.reports) == 1


def test_the_end_of_a_session_ends_a_recording() -> None:
    job = Job()
    job.iterate(WARM_UP_ITERATIONS + 3)
    job.trace.is_quiet = False  # a recorded operation waits for a rank that has failed
    job.profiler.close()
    job.profiler.close()
    assert (job.trace.stopped, job.trace.waits, job.trace.ended) == (1, [CLOSE_SECONDS], 1)
    assert job.reports == []


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_recording_ends_after_the_operations_that_it_records(is_alone: bool) -> None:
    job = Job()
    job.trace.is_quiet = False
    job.iterate(WARM_UP_ITERATIONS + PROFILED_ITERATIONS)
    job.iterate(5, 3.0)
    assert (job.trace.stopped, job.trace.ended) == (1, 0)
    job.trace.is_quiet, job.trace.is_alone = True, is_alone
    job.iterate(2)
    assert job.trace.ended == is_alone
    assert [seconds for seconds, _ in job.reports] == [1.0] * is_alone, "of the recorded iterations only"
    assert len(job.trace.marks) == PROFILED_ITERATIONS + 1


def gloo_group() -> list[dist.ProcessGroup]:
    """Start a gloo group of two ranks in this process, because a group of one rank never uses the network."""
    store = dist.HashStore()
    groups: dict[int, dist.ProcessGroup] = {}

    def connect(rank: int) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
        options._timeout = timedelta(seconds=30)
        backend, kind = dist.ProcessGroupGloo(store, rank, 2, options), dist.ProcessGroup.BackendType.GLOO
        groups[rank] = dist.ProcessGroup(store, rank, 2)
        groups[rank]._set_default_backend(kind)
        groups[rank]._register_backend(torch.device("cpu"), kind, backend)

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [groups[rank] for rank in range(2)]


def test_torch_records_collectives_between_boundaries() -> None:
    ranks, trace = gloo_group(), TorchTrace()
    assert trace.begin()
    assert not TorchTrace().begin()  # Everstep's profiler does not start, because torch allows one profiler at a time
    assert trace.mark()
    for _ in range(3):
        for work in [rank.allreduce([torch.ones(4)]) for rank in ranks]:
            work.wait()
        torch.ones(4) + 1
        assert trace.mark()
    read = trace.end()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        torch.ones(4) + 1  # the script's own profiler recorded this operation, so Everstep's trace must not contain it
    busy, boundaries = read()
    assert len(boundaries) == 4
    assert boundaries == sorted(boundaries)
    for one, other in itertools.pairwise(boundaries):
        assert len([begin for begin, end in busy if one <= begin <= end <= other]) == 2
    assert len(busy) == 6  # the trace contains the network operations only, not the additions of tensors
    assert trace.end()() == ([], [])
    assert not trace.mark()


def test_an_operation_that_outlives_the_recording_is_not_recorded_or_holds_its_end_up() -> None:
    """Torch would write to freed memory when such an operation ends."""
    (one, other), trace = gloo_group(), TorchTrace()
    originals = dict(vars(dist.ProcessGroup))
    assert trace.begin()
    assert trace.mark()
    sent = one.send([torch.ones(4)], 1, 0)
    assert trace.is_settled(), "what is sent is not recorded"
    reduced = one.allreduce([torch.ones(4)])
    assert not trace.is_settled(0.02)
    trace.stop()
    late = one.broadcast([torch.ones(4)], dist.BroadcastOptions())
    other.allreduce([torch.ones(4)]).wait()
    assert trace.is_settled(30), "what begins later is not recorded"
    reduced.wait()
    busy, _ = trace.end()()
    assert len(busy) == 1
    assert dict(vars(dist.ProcessGroup)) == originals
    other.broadcast([torch.ones(4)], dist.BroadcastOptions()).wait()
    late.wait()
    other.recv([torch.ones(4)], 0, 0).wait()
    sent.wait()


def test_every_call_that_starts_an_operation_is_observed() -> None:
    """If a new version of torch has a further such call, `RecordedCalls` must observe it, too."""
    starts = {
        name for name in dir(dist.ProcessGroup) if "-> c10d::Work" in (getattr(dist.ProcessGroup, name).__doc__ or "")
    }
    assert starts <= {*recorded_calls.POINT_TO_POINT, *recorded_calls.COLLECTIVES}
    assert len(starts) > 15


def test_a_script_s_own_profiler_wins_and_sees_everything() -> None:
    trace = TorchTrace()
    assert trace.begin()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
        torch.ones(4) + 1
        assert not trace.mark()
        assert trace.end()() == ([], [])
        assert not trace.begin()
    assert any(event.name == "aten::add" for event in own.events())
    assert trace.begin()
    trace.end()


def test_a_recording_that_a_failed_device_does_not_give_is_ended_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    job.iterate(WARM_UP_ITERATIONS + 3)

    def fail() -> None:
        job.trace.ended += 1
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(job.trace, "end", fail)
    job.profiler.close()
    job.profiler.close()
    assert job.trace.ended == 1
