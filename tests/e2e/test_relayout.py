"""Jobs that continue with another number of ranks, from the shards of the earlier ranks.

Agents, ranks and uploads to S3 are real.
"""

from __future__ import annotations

from tests.e2e.jobs import SHAPES, Shape, Workplace

SINGLE = Shape(nodes=1, copies=1)


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
