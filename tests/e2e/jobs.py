"""Jobs of the end-to-end tests: submission, faults, and the comparison with an undisturbed run.

The tests use the public API and poll it, as users do. Timeouts are long, because no test measures time.

A *moment* `generation:step` is the point after a step of a generation. A test can make all ranks wait there.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from everstep import failures
from everstep.errors import ServiceFailed
from infra.local_cloud import fault_commands
from infra.local_cloud.fault_kinds import EFFECT, Effect, Terminate
from infra.local_cloud.processes import Process, descendants, is_agent, rank_of
from infra.local_cloud.up import LocalCluster
from tests.e2e.reference import References

SCRIPTS = Path(__file__).parent / "scripts"
PATIENCE_SECONDS = 150.0
POLL_SECONDS = 0.1
ENDED = ("Completed", "Stopped", "Failed")

Json = dict[str, Any]


def wait_until(
    what: str,
    arrived: Callable[[], Any],
    tell: Callable[[], object] = lambda: "",
    patience_seconds: float = PATIENCE_SECONDS,
) -> Any:
    """Poll `arrived` until its result is true, and return the result. Fail after `patience_seconds`."""
    deadline = time.monotonic() + patience_seconds
    while not (answer := arrived()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {patience_seconds:.0f} s for {what}; {tell()}")
        threading.Event().wait(POLL_SECONDS)
    return answer


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The size of a job: nodes, ranks per node, and copies of each shard or nodes per parity group."""

    nodes: int
    ranks_per_node: int = 1
    copies: int = 2
    parity_group_size: int | None = None
    """Number of nodes per parity group. None: copies protect the job."""

    @property
    def world(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def protection(self) -> Json:
        """The field Protection of the job's request."""
        return (
            {"Copies": self.copies} if self.parity_group_size is None else {"ParityGroupSize": self.parity_group_size}
        )


SHAPES = {
    2: Shape(nodes=2),
    3: Shape(nodes=3, copies=3),
    4: Shape(nodes=2, ranks_per_node=2),
    5: Shape(nodes=5),  # the control plane forms a group of two nodes and a group of three
}
"""Job sizes, by number of ranks: a pair of nodes, a group of three, two ranks per node, and groups of different sizes.

The nodes of a group hold copies of each other's shards.
"""
MAX_WORLD = 10


@dataclass(frozen=True)
class Workplace:
    """The cluster that tests share, its client, and the results of undisturbed runs."""

    cluster: LocalCluster
    client: Any
    references: References
    directory: Path
    node_count: int
    """Number of the cluster's nodes, spares included."""
    undisturbed: dict[tuple[int, str], list[Json]] = field(default_factory=dict)
    """Results of undisturbed runs, by world size and hyperparameters."""

    def submit(
        self,
        name: str,
        shape: Shape,
        *,
        holds: Iterable[str] = (),
        entry_point: str = "train.py",
        source_dir: Path = SCRIPTS,
        request: Mapping[str, Any] | None = None,
        **given: object,
    ) -> Job:
        """Submit the test script.

        `given` contains its hyperparameters. `holds` contains the moments, `generation:step`, at which its ranks wait.
        """
        gate = self.directory / "gates" / name
        gate.mkdir(parents=True)
        for moment in holds:
            (gate / f"hold {moment}").touch()
        parameters = {key: str(value) for key, value in given.items()}
        source = self.client.upload_source(Directory=source_dir)
        self.client.create_training_job(
            TrainingJobName=name,
            Source=source,
            EntryPoint=entry_point,
            HyperParameters={**parameters, "gate": str(gate)},
            NodeCount=shape.nodes,
            RanksPerNode=shape.ranks_per_node,
            Protection=shape.protection,
            # The tests choose the steps of their faults. test_rehearsal.py has jobs that rehearse.
            **{"Rehearsal": {"Mode": "Off"}, **(request or {})},
        )
        return Job(self, name, shape, parameters, gate)

    def reference(self, shape: Shape, parameters: Mapping[str, str]) -> list[Json]:
        """Return the result of each rank of an undisturbed run.

        Each combination of world size and hyperparameters is run only once.
        """
        own = {
            key: value
            for key, value in parameters.items()
            if key not in ("pace_seconds", "says", "waits_after", "fixed_names")
        }
        key = (shape.world, json.dumps(own, sort_keys=True))
        if key not in self.undisturbed:
            directory = self.directory / "undisturbed" / uuid.uuid4().hex
            self.undisturbed[key] = self.references.start(SCRIPTS / "train.py", shape.world, directory, own).results()
        return self.undisturbed[key]

    def fault(self, *words: object) -> Effect:
        """Inject a fault with the command `everstep local fault WORDS`."""
        return EFFECT.decode(self._told(*words))

    def clear(self, name: str) -> list[str]:
        """Clear lasting faults of one kind with the command `everstep local fault clear`."""
        said: list[str] = json.loads(self._told("clear", name))["Cleared"]
        return said

    def _told(self, *words: object) -> str:
        arguments = [*map(str, words), "--output", "json", "--state-dir", str(self.cluster.state_dir)]
        told = CliRunner().invoke(fault_commands.app, arguments)
        assert told.exit_code == 0, told.output
        return told.stdout

    def wait_all_connected(self, node_ids: Iterable[str]) -> None:
        """Wait until the agent of each node runs and is connected to the control plane.

        Both are checked, because the control plane may still report a killed agent as connected.
        """

        def are_connected() -> bool:
            nodes = {node["NodeId"]: node for node in self.client.list_nodes()["Nodes"]}
            return all(nodes[node_id]["Connected"] for node_id in node_ids) and all(
                self.has_agent(node_id) for node_id in node_ids
            )

        wait_until("agents to be connected", are_connected)

    def has_agent(self, instance_id: str) -> bool:
        """Return True if an agent process runs on the instance."""
        init = self.cluster.instances().get(instance_id)
        return init is not None and any(is_agent(process.pid) for process in descendants(init))

    def agent_pid(self, instance_id: str) -> int:
        """Return the pid of the agent on the instance."""
        (pid,) = [
            process.pid for process in descendants(self.cluster.instances()[instance_id]) if is_agent(process.pid)
        ]
        return pid

    def rank_processes(self) -> list[Process]:
        """Return every rank process of the cluster."""
        ranks = range(MAX_WORLD)
        found = [process for init in self.cluster.instances().values() for process in descendants(init)]
        return [process for process in found if rank_of(process.pid) in ranks]


@dataclass(frozen=True)
class Job:
    """One training job under test."""

    place: Workplace
    name: str
    shape: Shape
    parameters: dict[str, str]
    gate: Path

    def describe(self) -> Json:
        """Return the API's description of the job, or a placeholder while the control plane is down."""
        try:
            with failures.translated():
                seen: Json = self.place.client.describe_training_job(TrainingJobName=self.name)
                return seen
        except ServiceFailed as error:
            if error.code != failures.UNAVAILABLE:
                raise
            return {
                "TrainingJobStatus": "InProgress",
                "SecondaryStatus": "unknown",
                "Reason": "the control plane does not answer",
                "CommittedStep": -1,
            }

    def wait(self, what: str, arrived: Callable[[Json], Any], *, may_end: bool = False) -> Json:
        """Wait until `arrived` accepts the job's description. Fail if the job ends first, unless `may_end`."""

        def look() -> Json | None:
            seen = self.describe()
            if arrived(seen):
                return seen
            assert may_end or seen["TrainingJobStatus"] not in ENDED, (
                f"{self.name} ended while waiting for {what}: {self._told(seen)}"
            )
            return None

        answer: Json = wait_until(f"{what} of {self.name}", look, lambda: self._told(self.describe()))
        return answer

    def committed(self) -> int:
        """Return the newest step that is committed in memory. Wait for the first one, and for the control plane."""
        step: int = self.wait_committed(1)["CommittedStep"]
        return step

    def wait_committed(self, step: int) -> Json:
        """Wait until `step` or a later one is committed in memory."""
        return self.wait(f"committed step {step}", lambda seen: seen["CommittedStep"] >= step)

    def wait_ended(self, status: str = "Completed") -> Json:
        """Wait until the job has ended, and check its status."""
        seen = self.wait("its end", lambda seen: seen["TrainingJobStatus"] in ENDED)
        assert seen["TrainingJobStatus"] == status, self._told(seen)
        return seen

    def wait_standing(self, moment: str) -> None:
        """Wait until every rank waits at the moment `generation:step`."""
        ranks = [self.gate / f"reached {moment} {rank}" for rank in range(self.shape.world)]

        def arrived() -> bool:
            status = self.describe()
            assert status["TrainingJobStatus"] not in ENDED, self._told(status)
            return all(path.exists() for path in ranks)

        wait_until(f"{self.name} to stand at {moment}", arrived, lambda: self._told(self.describe()))

    def wait_standing_committed(self, moment: str, step: int) -> str:
        """Wait until all ranks wait after the same step, and `step` or a later step is committed.

        On a busy machine, `step` may not be committed while the ranks wait at `moment`:

        - Everstep proposes one step at a time, after the newest step that a rank has reported, and so may skip `step`.
        - Everstep audits the first snapshots of a launch: it compares the copy with the live tensors. An audited
          snapshot ends only during the next step, so it cannot be committed while the ranks wait.

        In these cases, the ranks train up to the proposed step, or one step further, and wait again.

        Args:
            moment: the first moment, `generation:step`, at which the ranks wait.
            step: the lowest step that must be committed.

        Returns:
            `moment`, or a later moment of the same generation.
        """
        self.wait_standing(moment)
        generation, finished = map(int, moment.split(":"))

        def answered() -> Json | None:
            seen = self.protection()
            return seen if seen["CommittedStep"] >= step or seen["ProposedStep"] >= finished else None

        seen = wait_until(f"the newest proposal of {self.name}", answered, lambda: self._told(self.describe()))
        if seen["CommittedStep"] >= step:
            return moment
        later = f"{generation}:{max(seen['ProposedStep'], finished + 1)}"
        self.hold(later)
        self.let_go(moment)
        return self.wait_standing_committed(later, step)

    def hold(self, moment: str) -> None:
        """Make the ranks wait at the moment `generation:step`. Call it only while they wait at an earlier moment."""
        (self.gate / f"hold {moment}").touch()

    def let_go(self, moment: str) -> None:
        """Release the ranks that wait at the moment `generation:step`."""
        (self.gate / f"hold {moment}").unlink()

    def node_of(self, rank: int) -> str:
        """Return the instance on which the rank runs."""
        return str(self.describe()["NodeIds"][rank // self.shape.ranks_per_node])

    def kill_rank(self, rank: int) -> int:
        """Kill one rank with SIGKILL, on the instance where it runs."""
        return self.place.cluster.kill_rank(self.node_of(rank), rank)

    def terminate(self, *instance_ids: str) -> None:
        """Terminate instances.

        Several instances are terminated in one call of EC2's API. Otherwise the control plane could see the first loss
        before the second.
        """
        if len(instance_ids) == 1:
            self.place.cluster.inject(Terminate(target=instance_ids[0]))
            return
        with closing(self.place.cluster.aws("ec2")) as ec2:
            ec2.terminate_instances(InstanceIds=list(instance_ids))

    def wait_recovered(self, count: int) -> None:
        """Wait until at least `count` incidents exist and all incidents are closed."""

        def are_over(_: Json) -> bool:
            incidents = self.incidents()
            return len(incidents) >= count and all("ClosedAt" in incident for incident in incidents)

        self.wait(f"the end of incident {count}", are_over)

    def incidents(self) -> list[Json]:
        """Return all incidents of the job, oldest first."""
        return list(
            self.place.client.get_paginator("list_incidents").paginate(TrainingJobName=self.name).search("Incidents[]")
        )

    def events(self) -> list[Json]:
        """Return all events of the job, oldest first."""
        return list(
            self.place.client.get_paginator("list_events").paginate(TrainingJobName=self.name).search("Events[]")
        )

    def protection(self) -> Json:
        """Return the job's protection as the API describes it, with the holders of each shard."""
        seen: Json = self.place.client.describe_protection(TrainingJobName=self.name)
        return seen

    def groups(self) -> list[set[str]]:
        """Return the nodes that hold copies of each rank's shard."""
        return [{holder["NodeId"] for holder in shard["Holders"]} for shard in self.protection()["Shards"]]

    def results(self) -> list[Json]:
        """Download the outputs from S3 and return the result of each rank."""
        directory = self.place.directory / "outputs" / self.name
        self.place.client.download_outputs(TrainingJobName=self.name, Directory=directory)
        return [
            json.loads((directory / f"rank={rank}" / "result.json").read_text()) for rank in range(self.shape.world)
        ]

    def reference(self) -> list[Json]:
        """Return the results of the undisturbed run."""
        return self.place.reference(self.shape, self.parameters)

    def log(self, stream: str, generation: int, rank: int) -> str:
        """Return the printed output of a rank."""
        wanted = {"TrainingJobName": self.name, "Generation": generation, "Rank": rank, "StartFromHead": True}
        page = self.place.client.get_log_events(**wanted)
        events = page["Events"]
        while page["Events"]:
            page = self.place.client.get_log_events(**wanted, NextToken=page["NextForwardToken"])
            events += page["Events"]
        return "".join(f"{event['Message']}\n" for event in events if event["Stream"] == stream)

    def _told(self, seen: Json) -> str:
        words = [
            f"{key}={seen.get(key)}"
            for key in ("TrainingJobStatus", "SecondaryStatus", "Generation", "CommittedStep", "Boundary", "Reason")
        ]
        return ", ".join(words)


@contextmanager
def room_for(place: Workplace, instances: int) -> Iterator[None]:
    """Set the maximum size of the cluster's Auto Scaling group for the duration of the block."""
    with closing(place.cluster.aws("autoscaling")) as auto_scaling:
        (group,) = auto_scaling.describe_auto_scaling_groups(AutoScalingGroupNames=[place.cluster.group])[
            "AutoScalingGroups"
        ]

        def limit(size: int) -> None:
            auto_scaling.update_auto_scaling_group(AutoScalingGroupName=place.cluster.group, MaxSize=size)

            def is_seen() -> bool:
                return bool(place.client.describe_fleet(FleetName="local")["MaxNodeCount"] == size)

            wait_until("the control plane to see the group's new limit", is_seen)

        limit(instances)
        try:
            yield
        finally:
            limit(group["MaxSize"])


def assert_identical(job: Job) -> None:
    """Check that every tensor, loss and random draw of every rank equals that of the undisturbed run."""
    for rank, (found, expected) in enumerate(zip(job.results(), job.reference(), strict=True)):
        assert found["steps"] == expected["steps"]
        assert found["losses"] == expected["losses"], f"rank {rank}"
        assert found["tensors"].keys() == expected["tensors"].keys()
        unequal = [name for name, digest in found["tensors"].items() if expected["tensors"][name] != digest]
        assert not unequal, f"rank {rank}: {unequal}"
        assert found["draw"] == expected["draw"], f"rank {rank}"


def assert_incident(incident: Json, *, cause: str, source: str, committed: int, lost_steps: int | None = None) -> None:
    """Check an incident's cause, from where the job restored its state, and how many steps it lost.

    How many steps the ranks finish after the newest committed one depends on the speed of the machine.

    Args:
        incident: the incident, as the API describes it.
        cause: its expected cause.
        source: the expected source of the restored state.
        committed: a step that was committed before the failure; in S3 if the source is S3. No committed step is lost.
        lost_steps: the highest number of lost steps. None: the ranks ran on until the failure, so there is no limit.
    """
    assert incident["Cause"] == cause, incident
    assert incident["RestoreSource"] == source, incident
    assert incident["FromStep"] >= committed, incident
    assert incident["LostSteps"] >= 0, incident
    assert lost_steps is None or incident["LostSteps"] <= lost_steps, incident
    assert "ClosedAt" in incident, incident
