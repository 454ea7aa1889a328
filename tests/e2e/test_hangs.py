"""Ranks that neither advance nor end. Everstep must detect the hang from their silence and restart them.

A slow link looks similar, but Everstep must restart no rank because of it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from infra.local_cloud import network
from tests.e2e.conftest import MACHINE_NETWORK, workplace
from tests.e2e.jobs import SHAPES, Job, Json, Workplace, assert_identical, assert_incident, wait_until
from tests.e2e.reference import References

pytestmark = pytest.mark.xdist_group(MACHINE_NETWORK)

DETECTION_SECONDS = 0.5
"""With this setting, Everstep suspects a hang after 5 s and declares a fault after 15 s."""
STEPS, PACE_SECONDS = 80, 0.3
OBSTACLE = network.obstacle()
MEGABITS, WIDTH = 40, 680
"""Over the slow link, a shard of 6 MB takes more than a second, and an all-reduce of 2 MB takes less than a second."""


@pytest.fixture(scope="module")
def place(request: pytest.FixtureRequest, references: References) -> Iterator[Workplace]:
    """Start a cluster whose control plane declares a hang within 15 s instead of minutes."""
    with workplace(
        request.session,
        references,
        nodes=2,
        spares=0,
        detection_seconds=DETECTION_SECONDS,
        has_namespaces=OBSTACLE is None,
    ) as own:
        yield own


def test_a_stopped_rank_is_found_and_all_restart_in_place(place: Workplace) -> None:
    # The undisturbed run ends before the job starts. If both ran together, the job's ranks could become so slow that
    # they look stuck.
    place.reference(SHAPES[2], {"steps": str(STEPS)})
    job = place.submit("frozen", SHAPES[2], steps=STEPS, pace_seconds=PACE_SECONDS)
    job.wait_committed(10)
    nodes = job.describe()["NodeIds"]
    place.fault("hang", nodes[1])
    job.wait("a warning", lambda seen: "made no progress" in seen["Reason"] or seen["IncidentCount"])
    job.wait_ended()
    (incident,) = job.incidents()
    assert_incident(incident, cause="hang", source="local", committed=10)
    assert "rank 1 on" in incident["Evidence"][0]
    assert "stopped by a signal" in incident["Evidence"][0]
    assert incident["Evidence"][1] == f"{nodes[1]} alone is stuck: its rank 1 is stopped"
    assert incident["Evidence"][2:], "where each rank stood"
    assert incident["InstanceIds"] == []
    assert job.describe()["NodeIds"] == nodes
    assert {rank for group in stacks_of(job) for rank in group["ranks"]} == {0, 1}
    assert all("MainThread" in group["text"] and "train.py" in group["text"] for group in stacks_of(job))
    assert_identical(job)


def test_a_rank_that_waits_for_ever_is_found_by_stacks_that_do_not_change(place: Workplace) -> None:
    """One rank waits forever, and the other ranks wait for it in a collective. Everstep detects the hang.

    Everstep concludes this from the stacks of all ranks, which stay the same. The test stops no process by a signal.
    """
    shape, steps = SHAPES[4], 20
    place.reference(shape, {"steps": str(steps)})
    first = "1:8"
    job = place.submit("deadlock", shape, steps=steps, pace_seconds=0.1, waits_after=12, holds=(first,))
    job.let_go(job.wait_standing_committed(first, 9))  # the hang after step 12 then costs at most three steps
    job.wait_ended()
    (incident,) = job.incidents()
    assert_incident(incident, cause="hang", source="local", committed=9, lost_steps=3)
    told, odd, *where = incident["Evidence"]
    assert told.startswith("hang: all 4 ranks made no progress in train"), told
    assert told.endswith("no stack changed between two stack dumps, and the ranks used neither CPU nor GPU")
    nodes = job.describe()["NodeIds"]
    assert odd == f"{nodes[0]} alone is stuck: its rank 1 is at another place in the code than the other ranks"
    assert any(sentence.startswith("rank 1: ") and "wait (" in sentence for sentence in where), where
    assert incident["InstanceIds"] == []
    assert job.describe()["Generation"] == 2
    (waiting,) = [group["text"] for group in stacks_of(job) if group["ranks"] == [1]]
    assert "threading.py" in waiting
    assert_identical(job)


@pytest.mark.long
def test_a_rank_that_goes_on_is_not_restarted(place: Workplace) -> None:
    place.reference(SHAPES[2], {"steps": str(STEPS)})
    job = place.submit("thawed", SHAPES[2], steps=STEPS, pace_seconds=PACE_SECONDS)
    job.wait_committed(10)
    stopped = place.fault("hang", job.node_of(1))
    job.wait("a warning", lambda seen: "made no progress" in seen["Reason"])
    assert place.clear("hang") == [f"process {stopped.facts['pid']} goes on"]
    assert job.wait_ended()["Generation"] == 1
    assert [event["Type"] for event in job.events() if event["Type"].startswith("Ranks")] == [
        "RanksStandStill",
        "RanksMoveAgain",
    ]
    assert job.incidents() == []
    assert_identical(job)


@pytest.mark.long
@pytest.mark.skipif(OBSTACLE is not None, reason=f"no network namespaces here: {OBSTACLE}")
def test_a_line_that_carries_little_is_told_and_nobody_is_restarted(place: Workplace) -> None:
    steps, first = 60, "1:6"
    job = place.submit("narrow", SHAPES[2], steps=steps, pace_seconds=0.1, adapter="plain", width=WIDTH, holds=(first,))
    job.reference()
    moment = job.wait_standing_committed(first, 3)
    holder = job.node_of(1)
    place.fault("slow-network", holder, "--megabits", MEGABITS)
    job.let_go(moment)
    out_of_view = [f"{node} is out of view: it does not answer" for node in job.describe()["NodeIds"]]
    told = (*out_of_view, f"{holder} is slow: its link carries ")

    def is_told() -> bool:
        seen = job.protection()
        # On a busy machine, the holder is first behind, and the reason says so.
        return seen["ProtectionState"] == "Degraded" and any(words in seen["Reason"] for words in told)

    wait_until("the line to be told", is_told, lambda: job.protection()["Reason"])
    assert place.clear("slow-network") == [f"the line of {holder} carries what it can"]
    wait_until(
        "protection to be whole again", lambda: job.protection()["ProtectionState"] == "Protected", job.protection
    )
    assert job.wait_ended()["Generation"] == 1
    assert job.incidents() == []
    assert_identical(job)


def stacks_of(job: Job) -> list[Json]:
    """Return the stacks that the event about the job's only hang contains."""
    (hang,) = [event for event in job.events() if event["Type"] == "RanksHang"]
    return list(hang["Detail"]["stacks"])
