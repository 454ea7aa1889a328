"""People reboot or replace nodes of a job in training, submit a job of higher priority, or change the server's secret.

Such a request costs the job no step. Only a failure may cost steps. One test checks the data, packages, secrets and
role that a job requests for its ranks.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from infra.local_cloud.fault_kinds import KillAgent, Xid
from infra.local_cloud.up import BUCKET
from tests.e2e.jobs import SCRIPTS, Shape, Workplace, assert_identical, assert_incident, room_for, wait_until
from tests.wheels import make_wheel

PAIRS = Shape(nodes=4)
STEPS = 100
"""Number of steps. They last long enough for two agreed stops, each of which takes about a second."""
MECHANICAL = 79
"""Xid (error number of NVIDIA's driver) of a GPU that has fallen off the bus. Everstep replaces such an instance."""


def test_a_node_is_rebooted_and_a_failed_one_is_kept_with_its_evidence(place: Workplace) -> None:
    """A person reboots one node of a job, then the GPU of another node falls off the bus.

    The rebooted node becomes a spare. The failed node is kept for inspection.
    """
    place.client.update_fleet(FleetName="local", HoldFailedInstances=True)
    try:
        job = place.submit("operated", PAIRS, steps=STEPS, holds=("1:6", "2:40"), pace_seconds=0.05)
        job.reference()
        job.wait_standing("1:6")
        rebooted, committed = job.node_of(1), job.committed()
        place.client.reboot_node(NodeId=rebooted)
        job.let_go("1:6")
        later = job.wait_standing_committed("2:40", 38)
        assert rebooted not in job.describe()["NodeIds"]
        wait_until(
            "the rebooted node to be a spare",
            lambda: node_of(place, rebooted)["NodeStatus"] == "spare",
            lambda: node_of(place, rebooted),
        )

        failed = job.node_of(2)
        place.cluster.inject(Xid(target=failed, code=MECHANICAL))
        job.let_go(later)
        job.wait_ended()
        incidents = job.incidents()
        by_cause = {incident["Cause"]: incident for incident in incidents}
        assert by_cause.keys() == {"requested", "node_fault"}, incidents
        assert_incident(by_cause["requested"], cause="requested", source="peer", committed=committed, lost_steps=0)
        assert_incident(by_cause["node_fault"], cause="node_fault", source="peer", committed=38)
        assert by_cause["node_fault"]["InstanceIds"] == [failed]
        assert_identical(job)

        wait_until(
            "the failed node to be kept",
            lambda: "kept for inspection" in node_of(place, failed)["Reason"],
            lambda: node_of(place, failed),
        )
        assert failed in place.cluster.instances(), "a person has to be able to look at it"
        s3 = place.cluster.aws("s3")
        wait_until(
            "its evidence",
            lambda: {"agent.log", "shim.log"} <= evidence(s3, failed),
            lambda: evidence(s3, failed),
        )
        place.client.release_node(NodeId=failed, Terminate=True)
        wait_until("its end", lambda: failed not in place.cluster.instances(), lambda: node_of(place, failed))
    finally:
        place.client.update_fleet(FleetName="local", HoldFailedInstances=False)
        place.cluster.clear_faults()


def test_a_job_of_higher_priority_takes_the_nodes_of_a_preemptible_one(place: Workplace) -> None:
    """A job of higher priority takes the nodes of a running job that may be preempted. The group has room for six
    instances.

    Each of the two jobs needs four nodes, so the preempted job waits, and continues later.
    """
    with room_for(place, 6):
        humble = place.submit(
            "humble", PAIRS, steps=40, holds=("1:6",), pace_seconds=0.05, request={"Preemptible": True}
        )
        humble.reference()
        first = humble.wait_standing_committed("1:6", 1)
        urgent = place.submit("urgent", PAIRS, adapter="plain", steps=10, request={"Priority": 5})
        urgent.wait("its place in the queue", lambda seen: seen["SecondaryStatus"] == "Pending")
        humble.let_go(first)
        # The job's reason names the other job only until the ranks have stopped. The event stays.
        humble.wait("its interruption", lambda seen: seen["SecondaryStatus"] == "Interrupted")
        changes = [event["Message"] for event in humble.events() if event["Type"] == "JobStateChanged"]
        assert any("pausing" in change and "urgent (priority 5)" in change for change in changes), changes
        urgent.wait_ended()
        humble.wait_ended()
        assert [job.incidents() for job in (humble, urgent)] == [[], []]
        assert urgent.describe()["TrainingEndTime"] < humble.describe()["TrainingEndTime"]
        for job in (humble, urgent):
            assert_identical(job)


def test_ranks_have_the_data_packages_secrets_and_role_that_were_asked_for(place: Workplace, tmp_path: Path) -> None:
    """A rank on each node receives the data, package, secret and role that the job requested.

    Unit tests cover the details.
    """
    source = tmp_path / "source"
    make_wheel(source / "wheels", "everstep_example", "1.5")
    (source / "requirements.txt").write_text("--no-index\n--find-links ./wheels\neverstep_example\n")
    shutil.copy(SCRIPTS / "supplied.py", source)
    (tmp_path / "mounted").mkdir()
    (tmp_path / "mounted" / "vocabulary.txt").write_text("a b c")
    objects = {"part-0.txt": "zero", "more/part-1.txt": "one"}
    with closing(place.cluster.aws("s3")) as s3, closing(place.cluster.aws("secretsmanager")) as vault:
        for key, text in objects.items():
            s3.put_object(Bucket=BUCKET, Key=f"data/{key}", Body=text.encode())
        vault.create_secret(Name="database", SecretString="hunter2")
    request = {
        "Requirements": "requirements.txt",
        "InputDataConfig": [
            {"ChannelName": "fetched", "DataSource": {"S3DataSource": {"S3Uri": f"s3://{BUCKET}/data/"}}},
            {
                "ChannelName": "mounted",
                "DataSource": {"FileSystemDataSource": {"DirectoryPath": str(tmp_path / "mounted")}},
            },
        ],
        "Secrets": {"DATABASE_PASSWORD": "secretsmanager:database"},
        "RoleArn": "arn:aws:iam::123456789012:role/training",
    }
    job = place.submit("supplied", Shape(nodes=2), entry_point="supplied.py", source_dir=source, request=request)
    seen = job.wait_ended()
    first, second = job.results()
    assert first == second
    role = first.pop("role")
    assert first == {"fetched": objects, "mounted": {"vocabulary.txt": "a b c"}, "package": "1.5", "secret": "hunter2"}
    assert role.startswith("arn:aws:sts::123456789012:assumed-role/training/"), role
    assert "hunter2" not in json.dumps(seen, default=str)


@pytest.mark.long
def test_a_roll_replaces_every_node_one_by_one_and_its_job_loses_no_step(place: Workplace, reader: Path) -> None:
    """`everstep fleets roll` replaces the nodes of a running job and the spares."""
    job = place.submit("rolled", Shape(nodes=2), steps=400, pace_seconds=0.1)
    job.reference()
    job.wait_committed(2)
    before = set(place.cluster.instances())
    command = ["everstep", "fleets", "roll", "local", "--max-unavailable", "1", "--reason", "a new image", "--yes"]
    subprocess.run(command, check=True, capture_output=True)

    def is_complete() -> bool:
        roll = place.client.describe_fleet(FleetName="local")["Roll"]
        assert len(roll["CurrentNodeIds"]) <= 1, roll
        return bool(roll["RollStatus"] == "Completed")

    wait_until("the end of the roll", is_complete, lambda: place.client.describe_fleet(FleetName="local")["Roll"])
    wait_until("the end of the replaced nodes", lambda: not before & set(place.cluster.instances()))
    job.wait_ended()
    incidents = job.incidents()
    assert {(incident["Cause"], incident["LostSteps"]) for incident in incidents} == {("requested", 0)}, incidents
    assert_identical(job)


def test_with_a_new_server_secret_jobs_train_on_and_no_agent_needs_new_settings(place: Workplace) -> None:
    """A job trains on without an incident while the server restarts with another secret, and then an agent restarts."""
    job = place.submit("rotated", Shape(nodes=2), steps=40, holds=("1:6",))
    job.reference()
    moment = job.wait_standing_committed("1:6", 5)
    before = set(place.cluster.instances())
    (place.cluster.state_dir / "control-plane" / "server_secret").write_text("cd" * 32 + "\n")
    place.cluster.restart_control_plane()
    place.wait_all_connected(before)
    place.cluster.inject(KillAgent(target=job.node_of(1)))
    job.let_go(moment)
    place.wait_all_connected(before)
    job.wait_ended()
    assert set(place.cluster.instances()) == before
    assert (job.describe()["Generation"], job.incidents()) == (1, [])
    assert_identical(job)


def node_of(place: Workplace, node_id: str) -> dict[str, Any]:
    return place.client.describe_node(NodeId=node_id)


def evidence(s3: Any, node_id: str) -> set[str]:
    prefix = f"evidence/{node_id}/"
    return {
        entry["Key"].removeprefix(prefix)
        for entry in s3.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", [])
    }
