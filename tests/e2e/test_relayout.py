"""Jobs that continue with another number of ranks, from the shards of the earlier ranks.

Agents, ranks and uploads to S3 are real.
"""

from __future__ import annotations

import hashlib

import pytest

from everstep.checkpoints import open_checkpoint
from tests.e2e.jobs import SHAPES, Job, Shape, Workplace

SINGLE = Shape(nodes=1, copies=1)
FOUR, SIX = SHAPES[4], Shape(nodes=3, ranks_per_node=2)


def test_a_job_of_one_node_starts_from_the_checkpoint_of_two_with_equal_parameters(place: Workplace) -> None:
    first = place.submit("relaid-from", SHAPES[2], entry_point="elastic.py", steps=2000, pace_seconds=0.2)
    first.wait_committed(3)
    place.client.stop_training_job(TrainingJobName=first.name)
    first.wait_ended("Stopped")
    stopped, other = first.results()
    assert stopped == other
    steps = stopped["steps"]

    request = {"InitialCheckpoint": {"TrainingJobName": first.name, "Step": steps}}
    restored = place.submit("relaid-to", SINGLE, entry_point="elastic.py", steps=steps, request=request)
    seen = restored.wait_ended()
    assert (seen["BaseStep"], seen["Generation"]) == (steps, 1)
    assert restored.results() == [stopped]

    longer = place.submit("relaid-on", SINGLE, entry_point="elastic.py", steps=steps + 4, request=request)
    assert longer.wait_ended()["BaseStep"] == steps
    (result,) = longer.results()
    assert result["steps"] == steps + 4
    assert result["tensors"] != stopped["tensors"]


def stopped(job: Job, least: int) -> int:
    """Wait until a job has committed a step, stop the job, and return the step of its last checkpoint."""
    job.wait_committed(least)
    job.place.client.stop_training_job(TrainingJobName=job.name)
    job.wait_ended("Stopped")
    return int(job.place.client.list_checkpoints(TrainingJobName=job.name)["Checkpoints"][0]["Step"])


def digests(job: Job, step: int) -> dict[str, str]:
    """Return dtype, shape and digest of each logical tensor of a job's checkpoint, read from S3."""
    described = job.place.client.describe_checkpoint(TrainingJobName=job.name, Step=step)
    with open_checkpoint(described["S3Uri"]) as checkpoint:
        assert len(checkpoint.manifest.shards) == job.shape.world
        assert not checkpoint.incomplete
        return {
            name: f"{tensor.dtype}{list(tensor.shape)} {hashlib.sha256(checkpoint.read(tensor)).hexdigest()}"
            for name, tensor in checkpoint.tensors.items()
        }


@pytest.mark.long
@pytest.mark.parametrize(
    ("source", "target", "shape"),
    [("zero3", "zero3", SHAPES[3]), ("zero3", "zero3", SIX), ("zero3", "fsdp2", FOUR), ("fsdp2", "zero3", SIX)],
    ids=["ZeRO-3 4 to 3", "ZeRO-3 4 to 6", "ZeRO-3 4 to FSDP2 4", "FSDP2 4 to ZeRO-3 6"],
)
def test_a_job_in_another_layout_loads_equal_tensors_from_s3(
    place: Workplace, monkeypatch: pytest.MonkeyPatch, source: str, target: str, shape: Shape
) -> None:
    """A job of 4 ranks trains and stops. A second job in another layout loads its checkpoint.

    The second job makes no optimizer step, but it reports steps as finished. Everstep commits these steps, whose state
    is the loaded state. Both jobs' checkpoints therefore have equal tensors.
    """
    for name, value in place.cluster.environment().items():
        monkeypatch.setenv(name, value)
    label = f"{source}-{target}-{shape.world}"
    first = place.submit(f"from-{label}", FOUR, entry_point="relayout.py", adapter=source)
    begun = stopped(first, 3)
    request = {"InitialCheckpoint": {"TrainingJobName": first.name, "Step": begun}}
    second = place.submit(f"to-{label}", shape, entry_point="relayout.py", request=request, adapter=target, idle=1)
    step = stopped(second, begun + 1)
    assert second.describe()["BaseStep"] == begun
    expected = digests(first, begun)
    assert any(name.startswith("optimizer/") for name in expected)
    assert digests(second, step) == expected
