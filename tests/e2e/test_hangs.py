"""A rank that does nothing any more and does not end: nobody exits, so it has to be found."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from infra.local_cloud.processes import rank_of
from tests.e2e.conftest import workplace
from tests.e2e.jobs import SHAPES, Workplace, assert_identical, assert_incident
from tests.e2e.reference import References

DETECTION_SECONDS = 0.5
"""A first look after 5 s, a fault after 15 s."""
STEPS, PACE_SECONDS = 80, 0.3


@pytest.fixture(scope="module")
def place(request: pytest.FixtureRequest, references: References) -> Iterator[Workplace]:
    """A cluster that loses patience soon."""
    with workplace(request.session, references, nodes=2, spares=0, detection_seconds=DETECTION_SECONDS) as own:
        yield own


def test_a_stopped_rank_is_found_and_all_restart_in_place(place: Workplace) -> None:
    place.reference(SHAPES[2], {"steps": str(STEPS)})  # before: while it is computed ranks would stand still, which is what is looked for here
    job = place.submit("frozen", SHAPES[2], steps=STEPS, pace_seconds=PACE_SECONDS)
    job.wait_committed(10)
    nodes = job.describe()["NodeIds"]
    (victim,) = [process for process in place.rank_processes() if rank_of(process.pid) == 1]
    os.kill(victim.pid, signal.SIGSTOP)
    job.wait("a warning", lambda seen: "stood still" in seen["Reason"] or seen["IncidentCount"])
    job.wait_ended()
    (incident,) = job.incidents()
    assert_incident(incident, cause="hang", source="local")
    assert "rank 1 on" in incident["Evidence"][0]
    assert "stopped by a signal" in incident["Evidence"][0]
    assert incident["Evidence"][1] == f"{nodes[1]} alone is stuck: its rank 1 is stopped"
    assert incident["Evidence"][2:], "where each rank stood"
    assert incident["InstanceIds"] == []
    assert job.describe()["NodeIds"] == nodes
    events = place.client.list_events(TrainingJobName=job.name)["Events"]
    (hang,) = [event for event in events if event["Type"] == "RanksHang"]
    assert {rank for group in hang["Detail"]["stacks"] for rank in group["ranks"]} == {0, 1}
    assert all("MainThread" in group["text"] and "train.py" in group["text"] for group in hang["Detail"]["stacks"])
    assert_identical(job)
