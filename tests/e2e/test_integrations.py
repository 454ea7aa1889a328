"""The documented script of an integration survives a killed rank and a terminated instance.

Its model equals the model of an undisturbed run byte for byte.
"""

from __future__ import annotations

from pathlib import Path

from tests.e2e.jobs import Job, Shape, Workplace, assert_incident

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "trainer"
STEPS = 300
"""Number of steps. Both faults happen within the first 100 steps, so that the job cannot end before them."""


def test_a_trainer_of_transformers_loses_a_rank_and_an_instance(place: Workplace) -> None:
    shape, name = Shape(nodes=2), "trainer"
    parameters = {"steps": str(STEPS)}
    place.client.create_training_job(
        TrainingJobName=name,
        Source=place.client.upload_source(Directory=EXAMPLE),
        EntryPoint="train.py",
        HyperParameters=parameters,
        NodeCount=shape.nodes,
        Protection=shape.protection,
    )
    job = Job(place, name, shape, parameters, place.directory)
    job.wait_committed(5)
    job.kill_rank(1)
    job.wait_recovered(1)
    job.terminate(job.node_of(0))
    job.wait_ended()
    killed, terminated = job.incidents()
    assert_incident(killed, cause="rank_exit", source="local")
    assert_incident(terminated, cause="instance_terminated", source="peer")
    undisturbed = place.directory / "undisturbed" / name
    launch = place.references.start(EXAMPLE / "train.py", shape.world, undisturbed, parameters)
    assert launch.wait() == [0] * shape.world, launch.logs()
    outputs = place.directory / "outputs" / name
    place.client.download_outputs(TrainingJobName=name, Directory=outputs)
    model = Path("rank=0") / "model" / "model.safetensors"
    assert (outputs / model).read_bytes() == (undisturbed / model).read_bytes()
