"""Starts and ends a complete Everstep on one machine: the local AWS, a control plane, and a fleet of connected nodes.

Each cluster has its own state directory, ports from the kernel and loopback addresses, so several can run at the same
time. A command finds all processes of a cluster from the state directory alone.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import os
import random
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, TypeVar
from urllib.parse import urlencode

import httpx
import msgspec

from everstep import aws_models, failures, sdk
from everstep.config import ClientConfig
from everstep.errors import EverstepError
from everstep.host.local_keys import LocalKeys, UnusableKeys
from infra.local_cloud import network, preflight, roles
from infra.local_cloud.aws_options import AwsOptions
from infra.local_cloud.calls import CALLS, RecordedCall
from infra.local_cloud.environment import REGION, ask, aws_variables, local_client, process_environment
from infra.local_cloud.errors import FaultRefused, NotUp, PreflightFailed, StartFailed
from infra.local_cloud.fault_kinds import (
    EFFECT,
    EFFECTS,
    AnyFault,
    Effect,
    KillAgent,
    KillControlPlane,
    KillRank,
    name_of,
)
from infra.local_cloud.faults import CONDITIONS, Conditions
from infra.local_cloud.guardian import Guardian
from infra.local_cloud.instance_init import remove_memory, remove_tree
from infra.local_cloud.parts import Parts, tail, write_private
from infra.local_cloud.processes import end, kill_descendants, marked_with, proportional_bytes, wait_gone

if TYPE_CHECKING:
    from everstep.service import EverstepClient

AWS, CONTROL_PLANE, STANDBY = "aws", "control-plane", "standby"
BUCKET: Final = "everstep-local"
FLEET: Final = "local"
GROUP: Final = f"everstep-{FLEET}"
FLEET_TAG: Final = "everstep:fleet"
AVAILABILITY_ZONE: Final = "us-east-1a"
INSTANCE_TYPE: Final = "c7i.2xlarge"
"""Type that the nodes report, although they are processes without GPU."""
IMAGE: Final = "ami-12c6146b"
"""A launch needs an image, here a predefined one of moto, but only the user data runs."""
MAX_NODES: Final = 64
EVENTS: Final = "everstep-events"
"""Queue that receives AWS's events, and rule that sends them."""
EVENT_PATTERN: Final = {"source": ["aws.ec2", "aws.autoscaling", "aws.health"]}
USER_DATA: Final = """\
#!/bin/sh
# Like systemd on a real node (Restart=on-failure): restart after a crash, unless the crashes are too frequent.
export EVERSTEP_JOIN_TOKEN={token}{variables}
quick=0
while [ $quick -lt 3 ]; do
    begun=$(date +%s)
    {agent} && exit 0
    code=$?
    if [ $(($(date +%s) - begun)) -lt 10 ]; then quick=$((quick + 1)); else quick=0; fi
done
exit $code
"""
START_SECONDS: Final = 120.0
"""Limit for the start of a part. On an overloaded machine, its imports take most of a minute."""
NODES_POLL_SECONDS: Final = 0.1
T = TypeVar("T")


class StartProgress(Protocol):
    """Receives the steps of `up` to show them to the user."""

    def step(self, title: str) -> AbstractContextManager[None]:
        """Return a context manager that is open while the step runs."""


class NoProgress:
    """Receives the progress of `up`, and shows nothing."""

    def step(self, title: str) -> AbstractContextManager[None]:  # noqa: ARG002
        return contextlib.nullcontext()


class Installation(Protocol):
    """Creates a cluster's AWS resources in place of `LocalCluster`. Only a test implements it, with Terraform."""

    def create(self, aws_url: str, keys: LocalKeys) -> str:
        """Create all resources, and an empty group `everstep-local`. Return the URL of the queue for AWS's events."""
        ...

    def set_node_script(self, user_data: str) -> None:
        """Replace the user data of nodes that the group launches from now on."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """Options for the start of a cluster."""

    nodes: int = 4
    spares: int = 1
    max_nodes: int | None = None
    """MaxSize of the fleet's group. None: `nodes` and `spares` together."""
    conditions: Conditions = field(default_factory=lambda: Conditions(api_rate_share=1.0))
    node_memory_bytes: int | None = None
    """Memory for the slots of one node. None: an equal part of half the available memory."""
    detection_seconds: float | None = None
    connect_seconds: float = 120.0
    """Limit until all nodes have connected."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the instances."""
    control_plane_environment: Mapping[str, str] = field(default_factory=dict)
    """Additional variables of the control plane."""
    has_standby: bool = False
    """Whether to start a second server at another address. Agents receive both addresses."""
    start_balancer: Callable[[Sequence[str], str, int], str] | None = None
    """Starts a load balancer for the servers' URLs at an address and port (0: any), and returns its URL. None: no
    balancer.
    """
    start_storage: Callable[[LocalKeys, str, int], str] | None = None
    """Starts an S3 server at an address and port (0: any), and returns its URL. None: the local AWS serves S3."""
    installation: Installation | None = None
    """Creates queue, launch template and group. None: the cluster creates them."""
    has_namespaces: bool = False
    """Whether each instance has a network namespace, so that faults can cut and slow its link."""
    seed: int | None = None
    """Seed of all randomness in the local AWS. None: random."""
    aws_answers: Path | None = None
    """File of `everstep aws-conformance`. None: the newest stored answers, if any."""

    @property
    def most_nodes(self) -> int:
        """The greatest number of nodes that the fleet can have."""
        return max(self.max_nodes or 0, self.nodes + self.spares, 1)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers that a cluster may use of this machine."""

    max_nodes: int
    node_memory_bytes: int
    """Memory for the slots of one node."""


class ClusterFile(msgspec.Struct, frozen=True, kw_only=True):
    """File that describes a running cluster."""

    detection_seconds: float | None
    events_queue_url: str = ""
    standby_url: str = ""
    balancer_url: str = ""
    """Empty without a load balancer."""
    storage_url: str = ""
    """Empty if the local AWS serves S3."""
    control_plane_environment: dict[str, str] = {}
    limits: Limits


_CLUSTER_FILE = msgspec.json.Decoder(ClusterFile)
_PIDS = msgspec.json.Decoder(dict[str, int])
_SENTENCES = msgspec.json.Decoder(list[str])
_COUNTERS = msgspec.json.Decoder(dict[str, dict[str, int]])


@dataclass(frozen=True, slots=True, kw_only=True)
class PartStatus:
    """The status of one part."""

    name: str
    pid: int
    is_alive: bool
    url: str
    log: str


class LocalCluster:
    """One cluster: a local AWS, a control plane, and a fleet whose nodes are processes of this machine.

    As a context manager, the object ends the whole cluster at the end of the block. A guardian process does so if this
    process is killed. Only the user can read `state_dir`.
    """

    group: Final = GROUP

    def __init__(self, state_dir: Path, *, progress: StartProgress | None = None) -> None:
        self.state_dir = state_dir.resolve()
        self.logs = self.state_dir / "logs"
        self.nodes_directory = self.state_dir / "nodes"
        self._local = self.state_dir / "local"
        self._models = self._local / "models"
        self._parts = Parts(self._local, self.logs)
        self._progress = progress or NoProgress()
        self.run_id = secrets.token_hex(8)
        """Distinguishes successive clusters in the same directory."""
        self._guardian: Guardian | None = None

    def __enter__(self) -> Self:
        self._guardian = Guardian(self.state_dir, self.run_id)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # End only the cluster that this object started. `up` fails if another cluster is up in the same directory.
        self.down(of_run=self.run_id)
        if self._guardian is not None:
            self._guardian.dismiss()

    def up(self, options: ClusterOptions | None = None) -> None:
        """Start the whole cluster without stored state, and wait until all nodes have connected.

        Raises:
            PreflightFailed: this machine cannot run the cluster, or the cluster already runs. Nothing was started.
            StartFailed: a part did not start. All started parts have been ended; their logs are kept.
        """
        options = options or ClusterOptions()
        with self._progress.step("checking this machine"):
            preflight.check(options.nodes + options.spares, has_namespaces=options.has_namespaces)
            self._prepare_directory()
        with self._locked():
            if self._parts.is_alive(AWS) or self._parts.is_alive(CONTROL_PLANE):
                raise PreflightFailed(
                    f"a local cloud is up already in {self.state_dir}: use it, or `everstep local down` first"
                )
            # End the processes and remove the files that an earlier, crashed run has left.
            self._end_all()
            write_private(self._run_file, self.run_id.encode())
            try:
                self._start(options)
            except BaseException:
                self._end_all()
                raise

    def down(self, *, of_run: str = "") -> None:
        """End all processes of this cluster, also after a crash. Logs and databases are kept. Idempotent.

        `of_run` ends only the cluster of the `LocalCluster` with this `run_id`. Empty: any. Raises PreflightFailed if
        another `up` or `down` is in progress.
        """
        if self.state_dir.exists():
            with self._locked():
                if not of_run or not self._run_file.exists() or self._run_file.read_text() == of_run:
                    self._end_all()
        # The state directory was removed while the cluster ran. End the processes whose environment names it.
        else:
            self._end_marked()
            network.remove(network.network_name(self.state_dir))
            for part in (STANDBY, CONTROL_PLANE, AWS):
                # Wait for the processes that this object started as children, so that no zombies remain.
                self._parts.end(part)

    def limits(self) -> Limits:
        """Return what the running cluster can use of this machine."""
        return self._description().limits

    def memory_bytes(self) -> int:
        """Return the memory of the cluster's processes and snapshots. Shared pages count once."""
        return sum(map(proportional_bytes, marked_with("EVERSTEP_LOCAL_CLUSTER", str(self.state_dir))))

    def status(self) -> tuple[PartStatus, ...]:
        """Return the status of each recorded process."""
        records = [record for name in (AWS, CONTROL_PLANE, STANDBY) if (record := self._parts.record(name))]
        return tuple(
            PartStatus(
                name=record.name,
                pid=record.pid,
                is_alive=record.process.is_alive,
                url=(self._parts.ready(record.name) or {}).get("url", ""),
                log=record.log,
            )
            for record in records
        )

    def instances(self) -> dict[str, int]:
        """Return the pid of every instance's init process, by instance id.

        Raises NotUp if the local AWS does not run.
        """
        return self._get("instances", _PIDS)

    def conditions(self) -> Conditions:
        """Return the emulated behaviour of the local AWS: delays, capacity, throttling.

        Raises NotUp if the local AWS does not run.
        """
        return self._get("config", CONDITIONS)

    def set_conditions(self, conditions: Conditions) -> None:
        """Replace the conditions of the local AWS; fields that are not set have defaults.

        Raises NotUp if it does not run.
        """
        self._admin("PUT", "config", content=msgspec.json.encode(conditions)).raise_for_status()

    @property
    def aws_url(self) -> str:
        """URL of the local AWS. Raises NotUp if the cluster is not up."""
        return self._ready(AWS)["url"]

    @property
    def endpoint_url(self) -> str:
        """URL of the control plane, or of the load balancer in front of its servers.

        Raises NotUp if the cluster is not up.
        """
        return self._description().balancer_url or self._ready(CONTROL_PLANE)["url"]

    @property
    def token(self) -> str:
        """The control plane's admin token. Raises NotUp if the cluster is not up."""
        return self.token_file.read_text().strip()

    @property
    def token_file(self) -> Path:
        """Path of the admin token's file, which only its owner can read. Raises NotUp if the cluster is not up."""
        ready = self._parts.ready(CONTROL_PLANE)
        if ready is None:
            raise NotUp(f"no control plane runs in {self.state_dir}: everstep local up")
        return Path(ready["admin_token_path"])

    @property
    def keys(self) -> LocalKeys:
        """The access key of this cluster's AWS, generated by `up`. Raises NotUp if the cluster is not up."""
        try:
            return LocalKeys.read(self._keys_file)
        except UnusableKeys as error:
            raise NotUp(str(error)) from error

    def client(self) -> EverstepClient:
        """Return a client with the admin token."""
        return sdk.client(self.endpoint_url, self.token)

    def aws(self, service: str) -> Any:
        """Return a boto3 client of this cluster's local AWS."""
        other = self._description().storage_url if service == "s3" else ""
        return local_client(service, other or self.aws_url, self.keys)

    def environment(self) -> dict[str, str]:
        """Return the variables that direct the command line, the SDK and any AWS tool to this cluster."""
        storage = self._description().storage_url
        return {
            **({"AWS_ENDPOINT_URL_S3": storage} if storage else {}),
            "EVERSTEP_ENDPOINT_URL": self.endpoint_url,
            "EVERSTEP_TOKEN": self.token,
            "AWS_DATA_PATH": str(self._models),
            "AWS_ENDPOINT_URL_EVERSTEP": self.endpoint_url,
            **aws_variables(self.aws_url, self.keys),
        }

    def kill_control_plane(self, part: str = CONTROL_PLANE) -> None:
        """SIGKILL `CONTROL_PLANE` or `STANDBY`."""
        record = self._parts.record(part)
        if record:
            record.process.send(signal.SIGKILL)
            wait_gone([record.process], timeout_seconds=10)

    def inject(self, fault: AnyFault) -> Effect:
        """Inject a fault and return its effect.

        Raises:
            FaultRefused: the fault is impossible in this cloud or for this target. Nothing has changed.
            NotUp: the local AWS does not run.
            StartFailed: the killed control plane did not start again.
        """
        if isinstance(fault, KillControlPlane):
            return self._replace_control_plane(fault)
        answer = _accepted(self._admin("POST", "faults", content=msgspec.json.encode(fault)))
        return EFFECT.decode(answer.content)

    def training_jobs(self) -> list[roles.RoleJob]:
        """Return the nodes and shards of running jobs, which roles can name.

        Raises NotUp if the control plane does not answer.
        """
        try:
            with contextlib.closing(self.client()) as client, failures.translated():
                pages = client.get_paginator("list_training_jobs").paginate(StatusEquals=roles.TRAINS)
                run_ids = [job["RunId"] for page in pages for job in page["TrainingJobSummaries"]]
                return [
                    roles.training_job(
                        client.describe_training_job(TrainingJobName=run_id),
                        client.describe_protection(TrainingJobName=run_id),
                    )
                    for run_id in run_ids
                ]
        except EverstepError as error:
            raise NotUp(f"the control plane of {self.state_dir} does not list the training jobs: {error}") from error

    def aim(self) -> roles.Aim:
        """Return an object that resolves targets such as `job 0 node 2` to instances of this cluster."""
        return roles.Aim(self.training_jobs, self.instances)

    def injected(self) -> list[Effect]:
        """Return the effects of the newest thousand faults, oldest first.

        Raises NotUp if the local AWS does not run.
        """
        return self._get("faults", EFFECTS)

    def clear_faults(self, name: str = "", *, target: str = "") -> list[str]:
        """Clear lasting faults of one kind (empty: all) for one target (empty: all). Return one sentence per effect.

        Raises:
            FaultRefused: the fault is not a lasting fault, or cannot be cleared for a single target.
            NotUp: the local AWS does not run.
        """
        query = urlencode({"name": name, "target": target})
        return _SENTENCES.decode(_accepted(self._admin("DELETE", f"faults?{query}")).content)

    def calls(self) -> list[RecordedCall]:
        """Return the newest twenty thousand calls of EC2 and Auto Scaling that are not read-only, oldest first.

        Raises NotUp if the local AWS does not run.
        """
        return self._get("calls", CALLS)

    def wrong_calls(self) -> list[str]:
        """Return calls with undocumented parameters, one sentence each, oldest first.

        Raises NotUp if the local AWS does not run.
        """
        return self._get("wrong-calls", _SENTENCES)

    def links(self) -> dict[str, dict[str, int]]:
        """Return the kernel's counters of every link by instance; empty without namespaces.

        Raises NotUp if the local AWS does not run.
        """
        return self._get("links", _COUNTERS)

    @property
    def seed(self) -> int:
        """Seed of all randomness in the local AWS. Raises NotUp if the local AWS does not run."""
        return int(self._ready(AWS)["seed"])

    def kill_rank(self, instance_id: str, rank: int) -> int:
        """Kill one rank of an instance, and return the pid."""
        return int(self.inject(KillRank(target=instance_id, rank=rank)).facts["pid"])

    def kill_agent(self, instance_id: str) -> int:
        """Kill the agent of an instance, and return the pid."""
        return int(self.inject(KillAgent(target=instance_id)).facts["pid"])

    def _replace_control_plane(self, fault: KillControlPlane) -> Effect:
        record = self._parts.record(fault.server)
        if record is None or not record.process.is_alive:
            raise FaultRefused(f"kill-control-plane: the server {fault.server} does not run")
        self.kill_control_plane(fault.server)
        _pause(fault.down)
        self.restart_control_plane(fault.server)
        after = self._parts.record(fault.server)
        facts = {"pid": record.pid, "new_pid": after.pid if after else None}
        return Effect(
            fault=name_of(fault),
            target="",
            did=f"the {fault.server}, pid {record.pid}, was killed and started again",
            facts=facts,
        )

    def restart_control_plane(self, part: str = CONTROL_PLANE) -> None:
        """End `CONTROL_PLANE` or `STANDBY` if it runs, and start it again at the same address.

        Raises:
            StartFailed: the control plane did not start again.
            NotUp: the cluster is not up.
        """
        url = httpx.URL(self._ready(part)["url"])
        self._parts.end(part)
        start = self._start_control_plane if part == CONTROL_PLANE else partial(self._start_replica, part)
        start(self._description(), host=url.host, port=url.port or 0)

    def wait_for_nodes(self, count: int, *, timeout_seconds: float) -> None:
        """Wait until `count` nodes, spares included, are connected.

        Raises StartFailed, with the names of the logs, after the timeout, or if an agent has ended.
        """
        deadline = time.monotonic() + timeout_seconds
        connected: set[str] = set()
        urls = [url for url in (self.endpoint_url, self._description().standby_url) if url]
        with contextlib.ExitStack() as clients:
            replicas = [clients.enter_context(contextlib.closing(sdk.client(url, self.token))) for url in urls]
            while time.monotonic() < deadline:
                try:
                    with failures.translated():
                        connected = {
                            node["NodeId"]
                            for client in replicas
                            for node in client.list_nodes(FleetName=FLEET)["Nodes"]
                            if node["Connected"]
                        }
                except EverstepError:
                    if not self._parts.is_alive(CONTROL_PLANE):
                        break
                if len(connected) >= count:
                    return
                if any(self.nodes_directory.glob("*/user-data.exit")):
                    break  # The boot script of an instance, which runs the agent, has ended.
                _pause(NODES_POLL_SECONDS)
        raise StartFailed(
            f"{len(connected)} of {count} nodes connected; see {self.nodes_directory}/*/console.log and "
            f"{self.logs}/*.log{self._last_console()}"
        )

    def _last_console(self) -> str:
        consoles = sorted(self.nodes_directory.glob("*/console.log"), key=lambda console: console.stat().st_mtime)
        return (
            f"; the console of {consoles[-1].parent.name} ends with:\n{tail(consoles[-1])}"
            if consoles
            else "; no instance has run"
        )

    # The methods below start the cluster.

    def _start(self, options: ClusterOptions) -> None:
        total = options.nodes + options.spares
        description = ClusterFile(
            detection_seconds=options.detection_seconds,
            control_plane_environment=dict(options.control_plane_environment),
            limits=Limits(
                max_nodes=options.most_nodes,
                node_memory_bytes=options.node_memory_bytes or preflight.memory_bytes_per_node(options.most_nodes),
            ),
        )
        self._describe(description)
        for stale in (self.nodes_directory, self.state_dir / CONTROL_PLANE):
            # Remove files about instances of an earlier local AWS, because a new local AWS has other instances.
            remove_tree(stale)
            stale.mkdir(mode=0o700)
        with self._progress.step("starting the local AWS"):
            ready = self._start_aws(options, description.limits.node_memory_bytes)
            if options.start_storage is not None:
                url = options.start_storage(self.keys, *_place(ready["storage"]))
                description = self._describe(description, storage_url=url)
            self.aws("s3").create_bucket(Bucket=BUCKET)
            installation = options.installation
            queue = installation.create(self.aws_url, self.keys) if installation else self._create_event_queue()
            description = self._describe(description, events_queue_url=queue)
        with self._progress.step("starting the control plane"):
            first, second = map(_place, ready["control_planes"].split())
            self._start_control_plane(description, host=first[0], port=first[1])
            if options.has_standby:
                url = self._start_replica(STANDBY, description, host=second[0], port=second[1])
                description = self._describe(description, standby_url=url)
            urls = [url for url in (self.endpoint_url, description.standby_url) if url]
            if options.start_balancer is not None:
                urls = [options.start_balancer(urls, *_place(ready["balancer"]))]
                description = self._describe(description, balancer_url=urls[0])
        with self._progress.step(f"creating a fleet of {options.nodes} nodes and {options.spares} spares"):
            self._create_fleet(urls, options)
        with self._progress.step(f"waiting for {total} nodes to connect"):
            self.wait_for_nodes(total, timeout_seconds=options.connect_seconds)

    def _start_aws(self, options: ClusterOptions, node_memory_bytes: int) -> dict[str, str]:
        instance_environment = {
            # Run ranks as this user and not as a separate user, because this is the user's own machine.
            "EVERSTEP_RANK_USER": str(os.getuid()),
            **options.environment,
            "EVERSTEP_NODE_MEMORY_BYTES": str(node_memory_bytes),
        }
        write_private(self._keys_file, LocalKeys.random().encoded())
        aws_options = AwsOptions(
            nodes_directory=str(self.nodes_directory),
            ready_file=str(self._parts.ready_file(AWS)),
            keys_file=str(self._keys_file),
            conditions=options.conditions,
            instance_environment=instance_environment,
            seed=random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed,
            network_name=network.network_name(self.state_dir) if options.has_namespaces else "",
            aws_answers=str(options.aws_answers.resolve()) if options.aws_answers else None,
        )
        words = ["serve", msgspec.json.encode(aws_options).decode()]
        record = self._parts.start(AWS, "infra.local_cloud", words, process_environment(str(self.state_dir)))
        return self._parts.wait_ready(record, timeout_seconds=START_SECONDS)

    def _create_event_queue(self) -> str:
        """Create the queue and the rule for AWS's events, as an operator does in a real account.

        Return the queue's URL.
        """
        queue: str = self.aws("sqs").create_queue(QueueName=EVENTS)["QueueUrl"]
        arn = self.aws("sqs").get_queue_attributes(QueueUrl=queue, AttributeNames=["QueueArn"])["Attributes"][
            "QueueArn"
        ]
        events = self.aws("events")
        events.put_rule(Name=EVENTS, EventPattern=msgspec.json.encode(EVENT_PATTERN).decode())
        events.put_targets(Rule=EVENTS, Targets=[{"Id": "queue", "Arn": arn}])
        return queue

    def _start_control_plane(self, description: ClusterFile, *, host: str, port: int) -> None:
        self._start_replica(CONTROL_PLANE, description, host=host, port=port)
        aws_models.install(self._models, ClientConfig(self.endpoint_url, self.token))

    def _start_replica(self, part: str, description: ClusterFile, *, host: str, port: int) -> str:
        arguments = {
            "--state-dir": str(self.state_dir / CONTROL_PLANE),
            "--host": host,
            "--port": str(port),
            "--mode": "local",
            "--aws-endpoint-url": self.aws_url,
            "--region": REGION,
            "--bucket": BUCKET,
            "--ready-file": str(self._parts.ready_file(part)),
        }
        if description.detection_seconds is not None:
            arguments["--detection-seconds"] = str(description.detection_seconds)
        if description.storage_url:
            arguments["--aws-s3-endpoint-url"] = description.storage_url
        flat = [word for pair in arguments.items() for word in pair]
        environment = {
            **process_environment(str(self.state_dir)),
            "EVERSTEP_AWS_KEYS_FILE": str(self._keys_file),
            "EVERSTEP_EVENTS_QUEUE_URL": description.events_queue_url,
            **description.control_plane_environment,
        }
        record = self._parts.start(part, "control_plane", ["--migrate", *flat], environment)
        return self._parts.wait_ready(record, timeout_seconds=START_SECONDS)["url"]

    def _create_fleet(self, urls: list[str], options: ClusterOptions) -> None:
        with contextlib.closing(self.client()) as client, failures.translated():
            join_token = client.create_join_token(FleetName=FLEET)["JoinToken"]
            if options.installation is not None:
                options.installation.set_node_script(self._user_data(join_token, urls))
            else:
                self.create_group(GROUP, join_token, urls, max_size=options.most_nodes)
            try:
                with failures.translated():
                    client.create_fleet(
                        FleetName=FLEET,
                        AutoScalingGroupName=GROUP,
                        MinNodeCount=options.nodes,
                        SpareCount=options.spares,
                    )
            except EverstepError as error:
                raise StartFailed(
                    f"the control plane did not accept the fleet: {error}; see {self.logs}/{CONTROL_PLANE}.log"
                ) from error

    def create_group(self, group: str, join_token: str, urls: list[str], *, max_size: int = MAX_NODES) -> None:
        """Create a group whose instances run agents that join with this token."""
        ec2, auto_scaling = self.aws("ec2"), self.aws("autoscaling")
        user_data = self._user_data(join_token, urls)
        (subnet,) = ec2.describe_subnets(Filters=[{"Name": "availability-zone", "Values": [AVAILABILITY_ZONE]}])[
            "Subnets"
        ]
        template = ec2.create_launch_template(
            LaunchTemplateName=group,
            LaunchTemplateData={
                "ImageId": IMAGE,
                "InstanceType": INSTANCE_TYPE,
                "UserData": base64.b64encode(user_data.encode()).decode(),
            },
        )["LaunchTemplate"]["LaunchTemplateId"]
        auto_scaling.create_auto_scaling_group(
            AutoScalingGroupName=group,
            LaunchTemplate={"LaunchTemplateId": template, "Version": "$Latest"},
            MinSize=0,
            MaxSize=max_size,
            DesiredCapacity=0,
            VPCZoneIdentifier=subnet["SubnetId"],
            NewInstancesProtectedFromScaleIn=True,
            Tags=[{"Key": FLEET_TAG, "Value": FLEET, "PropagateAtLaunch": True}],
        )

    def _user_data(self, join_token: str, urls: list[str]) -> str:
        agent = " ".join(["everstep agent", *(f"--control-plane-url {url}" for url in urls)])
        storage = self._description().storage_url
        variables = f" AWS_ENDPOINT_URL_S3={storage}" if storage else ""
        return USER_DATA.format(token=join_token, agent=agent, variables=variables)

    # The methods below end the cluster.

    def _end_all(self) -> None:
        """End all processes of the cluster: first those with a record, then those that only have the marker."""
        # The control plane ends first, so that it does not react to the end of its fleet. The marker, an
        # environment variable with the state directory, finds processes without a record.
        for part in (STANDBY, CONTROL_PLANE, AWS):
            self._parts.end(part)
        self._end_marked()
        network.remove(network.network_name(self.state_dir))
        for directory in self.nodes_directory.glob("*/"):
            remove_memory(directory.name)
        for file in (self._local / "cluster.json", self._keys_file):
            file.unlink(missing_ok=True)

    def _end_marked(self) -> None:
        """End all remaining processes whose environment names the state directory.

        Kill an instance after two seconds.
        """
        for process in marked_with("EVERSTEP_LOCAL_CLUSTER", str(self.state_dir)):
            end(process, grace_seconds=2.0)
            kill_descendants(process.pid)

    @property
    def _run_file(self) -> Path:
        return self._local / "run"

    @property
    def _keys_file(self) -> Path:
        return self._local / "keys.json"

    def _prepare_directory(self) -> None:
        for directory in (self.state_dir, self.logs, self.nodes_directory, self._local):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.state_dir.chmod(0o700)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self._local.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(os.open(self._local / "lock", os.O_RDWR | os.O_CREAT, 0o600), "rb+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise PreflightFailed(
                    f"another `everstep local up` or `down` is running in {self.state_dir}; wait for its end"
                ) from error
            yield

    def _describe(self, description: ClusterFile, **changes: str) -> ClusterFile:
        """Store the description of the cluster with changes, and return it."""
        description = msgspec.structs.replace(description, **changes)
        write_private(self._local / "cluster.json", msgspec.json.encode(description))
        return description

    def _description(self) -> ClusterFile:
        try:
            return _CLUSTER_FILE.decode((self._local / "cluster.json").read_bytes())
        except FileNotFoundError:
            raise NotUp(f"no local cloud is up in {self.state_dir}: everstep local up") from None

    def _ready(self, part: str) -> dict[str, str]:
        ready = self._parts.ready(part)
        if ready is None:
            raise NotUp(f"no local cloud is up in {self.state_dir}: everstep local up")
        return ready

    def _get(self, path: str, decoder: msgspec.json.Decoder[T]) -> T:
        return decoder.decode(self._admin("GET", path).content)

    def _admin(self, method: str, path: str, *, content: bytes = b"") -> httpx.Response:
        try:
            return ask(method, f"{self.aws_url}/_everstep/{path}", content, self.keys)
        except httpx.TransportError as error:
            raise NotUp(f"the local AWS of {self.state_dir} does not answer: {error}") from error


def _accepted(answer: httpx.Response) -> httpx.Response:
    if answer.status_code == httpx.codes.CONFLICT:
        raise FaultRefused(answer.json()["Message"])
    return answer.raise_for_status()


def _place(text: str) -> tuple[str, int]:
    address, _, port = text.rpartition(":")
    return address, int(port)


def _pause(seconds: float) -> None:
    """Wait between two polls of a state whose changes cause no notification."""
    threading.Event().wait(seconds)
