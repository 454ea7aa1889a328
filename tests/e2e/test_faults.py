"""Faults that people inject with `everstep local fault`, in jobs that are training.

Each test checks Everstep's messages, and that the result equals the undisturbed run. Other modules do not cover these
faults: warnings of AWS, a host that dies while EC2 reports it as running, missing launches, and occupied or corrupt
memory. Faults that interrupt no training share one job.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from tests.e2e.jobs import PATIENCE_SECONDS, Job, Shape, Workplace, assert_identical, assert_incident, wait_until

PAIRS = Shape(nodes=4)
STEPS, PACE_SECONDS = 18, 0.1
FIRST, SECOND = "1:6", "2:12"
WIDTH = 680
"""Width of the layers. Each rank has 6 MB of parameters and optimizer state."""
MEMORY_MIB, LEFT_MIB = 128, 4
"""MiB of a node's tmpfs, and MiB of it that stay free during the fault.

The agent makes the tmpfs 64 MiB larger than the memory for slots (`NODE_MEMORY_BYTES`), as a reserve for the ranks'
pages. A page has only 4 KiB, so 4 MiB suffice for all pages, but not for a slot.
"""


@pytest.fixture(autouse=True)
def cleared(place: Workplace) -> Iterator[None]:
    """Clear all lasting faults after the test."""
    yield
    place.cluster.clear_faults()


def in_training(
    place: Workplace, name: str, *holds: str, steps: int = STEPS, least: int = 3, **more: Any
) -> tuple[Job, str]:
    """Submit a job of four nodes, and wait until its ranks wait at FIRST or soon after it.

    Returns:
        The job, with `least` or a later step committed, and the moment `generation:step` at which its ranks wait.
    """
    job = place.submit(
        name, PAIRS, holds=(FIRST, *holds), steps=steps, pace_seconds=PACE_SECONDS, adapter="plain", **more
    )
    job.reference()
    return job, job.wait_standing_committed(FIRST, least)


def fleet(place: Workplace) -> dict[str, Any]:
    return place.client.describe_fleet(FleetName="local")


def events_of(place: Workplace, node_id: str, kind: str) -> list[dict[str, Any]]:
    every = place.client.get_paginator("list_events").paginate(FleetName="local").search("Events[]")
    return [event for event in every if event.get("NodeId") == node_id and event["Type"] == kind]


def spares_of(place: Workplace, job: Job) -> set[str]:
    return place.cluster.instances().keys() - set(job.describe()["NodeIds"])


def test_launches_that_do_not_come_and_advice_that_comes_twice(place: Workplace) -> None:
    """AWS launches no instance, so the job continues on the spare. The fleet's field `Reason` quotes AWS's message.

    Everstep resumes launches that AWS suspended, but not launches that a person suspended. AWS sends the rebalance
    recommendation for one node twice, and Everstep records one event.
    """
    job, first = in_training(place, "held-up", SECOND)
    nodes = job.describe()["NodeIds"]
    advised, victim, spares = nodes[0], nodes[3], spares_of(place, job)
    place.fault("bad-events", "--double", "1", "--delay", '{"kind":"uniform","low_seconds":0.1,"high_seconds":1}')
    place.fault("rebalance", advised)
    place.fault("slow-boot", "--delay", "2")
    place.fault("slots-taken", "--delay", "600")
    place.fault("capacity", "--count", place.node_count)
    before = resumed(place)
    place.fault("suspend-launch", "--administrative")

    job.let_go(first)
    committed = job.committed()
    place.fault("terminate", victim)
    wait_until("AWS's suspension to be lifted", lambda: resumed(place) > before, lambda: fleet(place)["Reason"])
    wait_until(
        "AWS's words", lambda: "do not have sufficient" in fleet(place)["Reason"], lambda: fleet(place)["Reason"]
    )
    job.wait_standing(SECOND)
    place.fault("suspend-launch")
    wait_until(
        "the suspension to be told", lambda: "(User suspended" in fleet(place)["Reason"], lambda: fleet(place)["Reason"]
    )
    assert "resume the process to launch instances" in fleet(place)["Reason"]
    lifted = resumed(place)
    job.let_go(SECOND)
    job.wait_ended()
    assert advised in job.describe()["NodeIds"], "a recommendation interrupts nothing"
    (incident,) = job.incidents()
    assert_incident(incident, cause="instance_terminated", source="peer", committed=committed)
    assert incident["ReplacementInstanceId"] in spares
    told = [event["Message"] for event in events_of(place, advised, "NoticeReceived")]
    assert told == ["EC2 Instance Rebalance Recommendation"], "an event that comes twice is one"

    assert place.clear("capacity") == ["capacity is {} again"]
    assert resumed(place) == lifted, "what a person has suspended is a person's to resume"
    place.clear("suspend-launch")
    newcomers = wait_until("an instance", lambda: place.cluster.instances().keys() - {*nodes, *spares})
    place.wait_all_connected(newcomers)
    wait_until("the advised spare to be replaced", lambda: advised not in place.cluster.instances())
    assert_identical(job)


def resumed(place: Workplace) -> int:
    """Return the number of Everstep's requests to resume launches."""
    return sum(call.action == "ResumeProcesses" for call in place.cluster.calls())


def test_ranks_leave_before_aws_takes_their_instances(place: Workplace) -> None:
    """AWS announces the end of three instances, and the job loses no step.

    The announcements are a retirement, the end of a capacity block, and a termination that a hook delays. All ranks
    stop at an agreed step.
    """
    job, first = in_training(place, "announced", steps=60)
    retired, reserved, ended = (job.node_of(rank) for rank in range(3))
    committed = job.committed()
    place.fault("maintenance", retired, "--after", PATIENCE_SECONDS)
    place.fault("block-end", reserved)
    with closing(place.cluster.aws("autoscaling")) as auto_scaling:
        auto_scaling.terminate_instance_in_auto_scaling_group(InstanceId=ended, ShouldDecrementDesiredCapacity=False)
    job.let_go(first)
    job.wait_ended()
    incidents = job.incidents()
    for incident in incidents:  # the source is S3 if both holders of a shard leave the job together
        source = "s3" if incident["RestoreSource"] == "s3" else "peer"
        assert_incident(incident, cause="notice", source=source, committed=committed, lost_steps=0)
    evidence = " ".join(sentence for incident in incidents for sentence in incident["Evidence"])
    for node, kind in ((retired, "maintenance"), (reserved, "capacity block end"), (ended, "terminating")):
        assert f"AWS announced for {node}: {kind} (" in evidence
    assert sorted(node for incident in incidents for node in incident["InstanceIds"]) == sorted(
        [retired, reserved, ended]
    )
    assert not {retired, reserved, ended} & set(job.describe()["NodeIds"])
    assert_identical(job)


def test_a_host_dies_without_a_word_of_aws(place: Workplace) -> None:
    """A host crashes while EC2 reports it as running. Two kinds of evidence prove the loss, so Everstep replaces the
    node.

    Everstep does not terminate the instance. It keeps the instance out of use until a person decides.
    """
    job, _ = in_training(place, "crashed")
    victim, spares = job.node_of(1), spares_of(place, job)
    committed = job.committed()
    place.fault("crash", victim)  # The other ranks wait between two steps, so no rank notices the loss.
    job.wait_ended()
    (incident,) = job.incidents()
    assert_incident(incident, cause="node_unreachable", source="peer", committed=committed, lost_steps=3)
    assert incident["InstanceId"] == victim
    assert incident["ReplacementInstanceId"] in spares
    assert_identical(job)
    node = place.client.describe_node(NodeId=victim)
    assert (node["NodeStatus"], node["Hold"]) == ("held", "unreachable"), node
    place.client.release_node(NodeId=victim, Terminate=True)


def test_a_holders_replica_is_corrupt_when_it_is_needed(place: Workplace) -> None:
    """The owner's instance is lost, and the digests of the only other copy do not match.

    The job restores the checkpoint from S3, and reads no bytes of the corrupt copy.
    """
    interval = 4
    job, _ = in_training(place, "corrupt", least=interval, request={"CheckpointConfig": {"EverySteps": interval}})
    job.wait("a checkpoint", lambda _: job.protection().get("LastCheckpoint"))
    victim = job.node_of(0)
    (holder,) = next(group for group in job.groups() if victim in group) - {victim}
    effect = place.fault("corrupt-replica", holder, "--rank", 0)
    place.fault("terminate", victim)
    job.wait_ended()
    (incident,) = job.incidents()
    assert_incident(incident, cause="instance_terminated", source="s3", committed=interval, lost_steps=interval + 3)
    corrupt = f"step {effect.facts['step']} of rank 0: peer {holder}: chunks of the shard do not match their digests"
    assert any(corrupt in sentence for sentence in incident["Evidence"]), incident
    assert_identical(job)
