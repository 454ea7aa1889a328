"""Jobs that stop, fail, wait in the queue, pause, or are rejected.

The tests also check the messages, logs and outputs of these jobs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.jobs import SHAPES, Shape, Workplace, assert_identical, room_for

PAIR = SHAPES[2]
PAIRS = Shape(nodes=4)


def test_a_stop_is_agreed_and_kept(place: Workplace) -> None:
    first = "1:6"
    job = place.submit("stopped", PAIRS, steps=200, holds=(first,), pace_seconds=0.02)
    first = job.wait_standing_committed(first, 1)
    place.client.stop_training_job(TrainingJobName=job.name)
    job.let_go(first)
    seen = job.wait_ended("Stopped")
    results = job.results()
    (steps,) = {result["steps"] for result in results}
    assert 6 <= steps < 200
    checkpoint = place.client.list_checkpoints(TrainingJobName=job.name)["Checkpoints"][0]
    assert checkpoint["Step"] == steps
    assert str(steps) in seen["Reason"]
    assert job.incidents() == []
    undisturbed = place.reference(job.shape, {**job.parameters, "steps": str(steps)})
    assert [result["tensors"] for result in results] == [result["tensors"] for result in undisturbed]


def test_a_script_that_ends_at_once(place: Workplace) -> None:
    job = place.submit("broken", PAIR, entry_point="broken.py", request={"RetryStrategy": {"MaxAttempts": 2}})
    seen = job.wait_ended("Failed")
    assert "the tokenizer /data/vocabulary.json is missing" in seen["FailureReason"]
    assert attempts_at("before its first step", seen) in (2, 3), (
        "MaxAttempts, and one more if it was the same node's rank that ended first"
    )


def test_a_script_that_always_ends_at_the_same_step(place: Workplace) -> None:
    first = "1:2"
    job = place.submit("bad-data", PAIR, steps=20, crash_after=5, pace_seconds=0.2, holds=(first,))
    job.let_go(job.wait_standing_committed(first, 1))
    seen = job.wait_ended("Failed")
    assert "the data of step 6 are bad" in seen["FailureReason"]
    assert attempts_at("after step 5", seen) in (3, 4, 5), (
        "MaxAttempts, and one more on another node and from an older state each"
    )
    assert seen["BaseStep"] > 0, "the last attempt went on from memory"


def attempts_at(place: str, seen: dict[str, Any]) -> int:
    """Return the number of launches that a job's failure reason states.

    Check that the job's generation equals this number.
    """
    told = re.search(rf"the same failure occurred (\d+) times {place}", seen["FailureReason"])
    assert told is not None, seen["FailureReason"]
    assert seen["Generation"] == int(told[1])
    return int(told[1])


def test_state_that_does_not_fit(place: Workplace) -> None:
    job = place.submit("too-large", PAIR, adapter="plain", steps=20, ballast_bytes=40_000_000)
    seen = job.wait_ended("Failed")
    for words in (
        "Protection.Copies",
        "2 slots · 2 copies · ",
        "bytes of shards per node",
        "of host memory per node",
        f"{64 * 1024**2:,} are available",
    ):
        assert words in seen["FailureReason"]


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("EntryPoint", {"EntryPoint": "trian.py"}),
        ("Protection.Copies", {"Protection": {"Copies": 3}}),
    ],
)
def test_what_is_refused_creates_nothing(place: Workplace, field: str, wrong: dict[str, object]) -> None:
    source = place.client.upload_source(Directory=Path(__file__).parent / "scripts")
    request = {"TrainingJobName": "refused", "Source": source, "EntryPoint": "train.py", "NodeCount": 2, **wrong}
    with pytest.raises(place.client.exceptions.ValidationException) as refused:
        place.client.create_training_job(**request)
    assert [error["Field"] for error in refused.value.response["Fields"]] == [field]
    with pytest.raises(place.client.exceptions.ResourceNotFoundException, match="refused"):
        place.client.describe_training_job(TrainingJobName="refused")


def test_jobs_wait_for_each_other_in_order(place: Workplace) -> None:
    """Jobs start in the order of their submission. The group has room for six instances, and a running job uses five.

    Three more jobs wait in the queue. The second of them is stopped. The third waits until the first has ended, because
    both do not fit together.
    """
    with room_for(place, 6):
        first = place.submit("queue-first", SHAPES[5], adapter="plain", steps=10, holds=("1:4",))
        first.wait_standing("1:4")
        second = place.submit("queue-second", SHAPES[3], adapter="plain", steps=10)
        third = place.submit("queue-third", PAIR, adapter="plain", steps=10)
        fourth = place.submit("queue-fourth", PAIRS, adapter="plain", steps=10)
        for job in (second, third, fourth):
            job.wait("its place in the queue", lambda seen: "queue" in seen["Reason"])
        place.client.stop_training_job(TrainingJobName=third.name)
        assert "before it started" in third.wait_ended("Stopped")["Reason"]
        assert third.describe()["Generation"] == 0
        first.let_go("1:4")
        started = [job.wait_ended()["TrainingStartTime"] for job in (first, second, fourth)]
        assert started == sorted(started)
        for job in (first, second, fourth):
            assert job.incidents() == []
            assert_identical(job)


def test_a_paused_job_lends_its_nodes_and_ends_where_an_undisturbed_one_does(place: Workplace) -> None:
    """A paused job lends its nodes to another job. It then resumes, with the same result as an undisturbed run.

    The group has room for six instances, and each of the two jobs needs four.
    """
    with room_for(place, 6):
        job = place.submit("paused", PAIRS, steps=18, holds=("1:6",), pace_seconds=0.05)
        job.reference()
        first = job.wait_standing_committed("1:6", 1)
        nodes = set(job.describe()["NodeIds"])
        other = place.submit("in-between", PAIRS, adapter="plain", steps=10)
        place.client.pause_training_job(TrainingJobName=job.name)
        job.let_go(first)
        paused = job.wait("its pause", lambda seen: seen["SecondaryStatus"] == "Paused")
        assert paused["NodeIds"] == []
        checkpoint = place.client.list_checkpoints(TrainingJobName=job.name)["Checkpoints"][0]
        assert 6 <= checkpoint["Step"] < 18
        lent = set(other.wait("its nodes", lambda seen: seen["NodeIds"], may_end=True)["NodeIds"])
        assert len(nodes & lent) >= 2, "four of six: at least two worked for the paused job before"
        other.wait_ended()
        assert job.describe()["SecondaryStatus"] == "Paused"
        place.client.resume_training_job(TrainingJobName=job.name)
        ended = job.wait_ended()
        assert (ended["Generation"], ended["BaseStep"]) == (2, checkpoint["Step"])
        assert job.incidents() == other.incidents() == []
        assert_identical(job)
        assert_identical(other)


def test_logs_and_outputs_come_back_by_the_command_line(place: Workplace, tmp_path: Path) -> None:
    first, last = "1:5", "1:10"
    job = place.submit("talkative", PAIR, adapter="plain", steps=12, holds=(first, last), says="says hello")
    job.wait_standing(first)
    job.let_go(first)
    job.kill_rank(1)
    job.wait_ended()
    printed = everstep(
        place, "jobs", "logs", job.name, "--rank", "0", "--stream", "stdout", "-o", "text", "--query", "Message"
    )
    assert printed.stdout.splitlines() == [f"rank 0 of 2, generation {generation} says hello" for generation in (1, 2)]
    assert [job.log("stdout", 1, rank).strip() for rank in range(2)] == [
        f"rank {rank} of 2, generation 1 says hello" for rank in range(2)
    ]
    told = everstep(place, "jobs", "output", job.name, "--to", str(tmp_path / "out"))
    assert "2 files" in told.stdout
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.json")) == [
        f"out/rank={rank}/result.json" for rank in range(2)
    ]
    assert_identical(job)


def everstep(place: Workplace, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the command line against the cluster."""
    command = [str(Path(sys.executable).parent / "everstep"), *words]
    told = subprocess.run(
        command,
        env={**os.environ, **place.cluster.environment()},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert told.returncode == 0, told.stderr
    return told
