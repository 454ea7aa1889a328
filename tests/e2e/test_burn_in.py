"""Unfit nodes never work for a job: a wrong product on one node, a slow disk or a slow loopback on another one.

A node whose all-reduces have wrong sums is held, because two partners have right sums with each other.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.local_cloud.fault_kinds import Unfit
from tests.e2e.conftest import workplace
from tests.e2e.jobs import Json, Shape, Workplace, assert_identical, wait_until
from tests.e2e.reference import References

HEALTHY = 3
SHORT_IDLE = Path(__file__).parent / "short_idle"


@pytest.fixture(scope="module")
def place(request: pytest.FixtureRequest, references: References) -> Iterator[Workplace]:
    """Yield a cluster of three healthy nodes and two nodes for the faults."""
    with workplace(request.session, references, nodes=HEALTHY, spares=2) as own:
        yield own


def test_a_node_that_fails_its_burn_in_joins_no_job_and_healthy_nodes_do(place: Workplace) -> None:
    nodes = [node["NodeId"] for node in place.client.list_nodes(FleetName="local")["Nodes"]]
    for id in nodes:
        wait_until(
            f"the tests of {id}", lambda id=id: "BurnIn" in described(place, id), lambda id=id: described(place, id)
        )
    # A fleet of this size holds at most one node for slowness at a time (`MOST_SLOW_SHARE`).
    planted = dict(zip(nodes, ("matmul", random.choice(("disk-write", "loopback"))), strict=False))
    for id, test in planted.items():
        place.cluster.inject(Unfit(target=id, test=test))
        place.client.reboot_node(NodeId=id)
    # One node more than healthy ones: the job waits for a new instance rather than use an unfit node.
    job = place.submit("fit", Shape(nodes=HEALTHY + 1), adapter="plain", steps=10)
    job.wait_ended()
    assert set(job.describe()["NodeIds"]).isdisjoint(planted)
    assert_identical(job)

    for id, test in planted.items():
        code = "burn_in_failed" if test == "matmul" else "node_slow"
        wait_until(
            f"the fault {code} of {id}",
            lambda id=id, code=code: code in {line["Cause"] for line in described(place, id)["Incidents"]},
            lambda id=id: described(place, id),
        )
        if code == "node_slow":
            node = described(place, id)
            assert (node["NodeStatus"], node["Hold"]) == ("held", "distrusted")
            assert test in node["Reason"]
    changes = place.client.get_paginator("list_events").paginate(FleetName="local").search("Events[]")
    assigned = {event["NodeId"] for event in changes if event["Message"].startswith("spare → assigned")}
    assert assigned
    assert assigned.isdisjoint(planted)


def test_a_node_that_spoils_all_reduces_is_held_and_joins_no_job(
    request: pytest.FixtureRequest, references: References
) -> None:
    patched = {"PYTHONPATH": str(SHORT_IDLE)}
    with workplace(request.session, references, nodes=2, spares=1, control_plane_environment=patched) as place:
        bad, *others = [node["NodeId"] for node in place.client.list_nodes(FleetName="local")["Nodes"]]
        place.cluster.inject(Unfit(target=bad, test="all-reduce"))
        place.client.reboot_node(NodeId=bad)  # Its tests begin again, also if it already has a result.
        held = wait_until(
            f"the hold of {bad}",
            lambda: (node := described(place, bad))["NodeStatus"] == "held" and node,
            lambda: [described(place, id) for id in (bad, *others)],
            patience_seconds=300.0,  # Two pairs, each with a first import of torch.
        )
        assert (held["Hold"], held["Reason"].split()[0]) == ("distrusted", "all-reduce")
        sums = {test["Text"]: test["Outcome"] for test in held["BurnIn"]["Tests"] if test["Name"] == "all-reduce"}
        assert sums == {f"the sum is wrong (with {id})": "failed" for id in others}
        job = place.submit("pair", Shape(nodes=2), adapter="plain", steps=10)
        job.wait_ended()
        assert bad not in job.describe()["NodeIds"]
        assert_identical(job)


def described(place: Workplace, node_id: str) -> Json:
    return place.client.describe_node(NodeId=node_id)
