"""An elastic job on a cluster without capacity: it continues on fewer nodes, and grows back when nodes return."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import workplace
from tests.e2e.jobs import Job, Shape, Workplace
from tests.e2e.reference import References

EXAMPLE = Path(__file__).parents[2] / "examples/char_gpt"


@pytest.fixture(scope="module")
def place(request: pytest.FixtureRequest, references: References) -> Iterator[Workplace]:
    with workplace(request.session, references, nodes=3, spares=0) as own:
        yield own


def test_a_job_continues_on_two_of_three_nodes_and_grows_back(
    place: Workplace, record_testsuite_property: Callable[[str, object], None]
) -> None:
    """A job continues on two of three nodes, and grows back to three.

    The report of the test (`--junitxml`) contains the phases of both incidents in seconds.
    """
    place.client.create_training_job(
        TrainingJobName="elastic",
        Source=place.client.upload_source(Directory=EXAMPLE),
        EntryPoint="train.py",
        HyperParameters={"steps": "100000", "batch": "2", "global_batch": "12"},
        NodeCount=3,
        ElasticConfig={"MinNodeCount": 2, "PatienceInSeconds": 0},
        Rehearsal={"Mode": "Off"},
    )
    job = Job(place, "elastic", Shape(nodes=3), {}, place.directory)
    job.wait_committed(5)
    place.fault("capacity", "--count", 2)
    job.terminate(job.node_of(1))
    job.wait_recovered(1)
    seen = job.describe()
    assert (seen["GenerationNodeCount"], len(seen["NodeIds"])) == (2, 2)
    (shrunk,) = job.incidents()
    assert (shrunk["Cause"], shrunk["RestoreSource"]) == ("shrunk", "peer"), shrunk
    assert (shrunk["NodeCountBefore"], shrunk["NodeCountAfter"]) == (3, 2)
    assert shrunk["FromStep"] >= 5
    assert shrunk["LostSteps"] >= 0
    seen = job.wait_committed(shrunk["FromStep"] + 5)
    assert seen["Reason"].startswith("trains on 2 of 3 nodes from step ")
    assert seen["AccountingSeconds"]["shortage"] > 0
    place.clear("capacity")
    job.wait("growth", lambda seen: seen["GenerationNodeCount"] == 3)
    job.wait_recovered(2)
    grown = job.incidents()[1]
    assert (grown["Cause"], grown["LostSteps"]) == ("grown", 0), grown
    for incident in (shrunk, grown):
        phases = {name: incident.get(f"{name}Seconds") for name in ("Detect", "Replace", "Restore", "Rework")}
        record_testsuite_property(f"seconds of the incident {incident['Cause']}", phases)
    job.wait_committed(grown["FromStep"] + 3)
    place.client.stop_training_job(TrainingJobName="elastic")
    job.wait_ended("Stopped")
