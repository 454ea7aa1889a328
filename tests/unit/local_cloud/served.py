"""Runs the local AWS in a process of its own, for every test that needs AWS."""

from __future__ import annotations

import base64
import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
import msgspec

from control_plane.cloud.connection import CloudMode, CloudSettings, Connection
from everstep.host.local_keys import LocalKeys
from infra.local_cloud import aws_answers
from infra.local_cloud.aws_answers import AwsAnswers, RecordedAnswers
from infra.local_cloud.aws_options import AwsOptions
from infra.local_cloud.environment import ask, local_client, process_environment
from infra.local_cloud.errors import FaultRefused
from infra.local_cloud.fault_kinds import AnyFault, Effect
from infra.local_cloud.faults import Conditions
from infra.local_cloud.parts import write_private

QUICK = Conditions(boot_delay_seconds=0.05, launch_retry_seconds=0.1)
ANSWER_SECONDS = 30.0
"""Time limit of one answer, the same as in `eventually`. A busy machine answers late."""
START_SECONDS = 120.0
"""Time limit for the start of a local AWS. It includes the imports on an overloaded machine."""
_numbers = itertools.count()


def eventually(check: Callable[[], Any], *, timeout_seconds: float = 30.0) -> Any:
    """Poll `check` and return its first true result.

    Tests observe the local AWS over HTTP, which has no event to wait for.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        answer = check()
        if answer:
            return answer
        assert time.monotonic() < deadline, f"{check} is still {answer!r} after {timeout_seconds} s"
        threading.Event().wait(0.02)


@dataclass
class ServedAws:
    """A running local AWS."""

    url: str
    nodes_directory: Path
    process: subprocess.Popen[bytes]
    keys: LocalKeys
    _clients: dict[str, Any] = field(default_factory=dict)

    def client(self, service: str) -> Any:
        if service not in self._clients:
            self._clients[service] = local_client(service, self.url, self.keys)
        return self._clients[service]

    def set_conditions(self, conditions: Conditions) -> None:
        self._ask("PUT", "config", content=msgspec.json.encode(conditions)).raise_for_status()

    def inject(self, fault: AnyFault) -> Effect:
        answer = self._ask("POST", "faults", content=msgspec.json.encode(fault))
        if answer.status_code == httpx.codes.CONFLICT:
            raise FaultRefused(answer.json()["Message"])
        return msgspec.json.decode(answer.raise_for_status().content, type=Effect)

    def clear(self, name: str = "", target: str = "") -> list[str]:
        answer = self._ask("DELETE", "faults", params={"name": name, "target": target})
        said: list[str] = answer.raise_for_status().json()
        return said

    def links(self) -> dict[str, dict[str, int]]:
        counters: dict[str, dict[str, int]] = self._ask("GET", "links").json()
        return counters

    def take_wrong_calls(self) -> list[str]:
        """Return the undocumented calls that the local AWS has refused, and forget them."""
        wrong: list[str] = self._ask("DELETE", "wrong-calls").raise_for_status().json()
        return wrong

    def close(self) -> None:
        """Close all clients."""
        for client in self._clients.values():
            client.close()

    def pids(self) -> dict[str, int]:
        answer: dict[str, int] = self._ask("GET", "instances").json()
        return answer

    def _ask(
        self, method: str, what: str, content: bytes = b"", params: dict[str, str] | None = None
    ) -> httpx.Response:
        return self.ask(method, f"/_everstep/{what}{'?' + urlencode(params) if params else ''}", content)

    def ask(self, method: str, path: str, content: bytes = b"") -> httpx.Response:
        """Send a request that is signed with the cluster's credentials."""
        return ask(method, self.url + path, content, self.keys, timeout_seconds=ANSWER_SECONDS)

    def connection(self) -> Connection:
        """Return a control plane's connection to this AWS."""
        return Connection(CloudSettings(mode=CloudMode.LOCAL, endpoint_url=self.url, keys=self.keys))

    def console(self, instance_id: str) -> str:
        """Return the console output of an instance.

        The output may still be empty when the instance is already in service.
        """
        path = self.nodes_directory / instance_id / "console.log"
        return path.read_text() if path.exists() else ""

    def make_group(
        self,
        *,
        desired: int = 0,
        min_size: int = 0,
        max_size: int = 20,
        tag: str | None = "everstep:fleet",
        user_data: str = "#!/bin/sh\nexec sleep 1000\n",
        instance_type: str | None = None,
        **more: Any,
    ) -> str:
        """Create an Auto Scaling group with its own launch template and instance type, and return its name."""
        name = f"group-{next(_numbers)}"
        data = {
            "ImageId": "ami-12c6146b",
            "InstanceType": instance_type or f"c7i.{name}",
            "UserData": encoded(user_data),
        }
        template = self.client("ec2").create_launch_template(LaunchTemplateName=name, LaunchTemplateData=data)[
            "LaunchTemplate"
        ]
        self.client("autoscaling").create_auto_scaling_group(
            **{
                "AutoScalingGroupName": name,
                "LaunchTemplate": {"LaunchTemplateId": template["LaunchTemplateId"], "Version": "$Latest"},
                "MinSize": min_size,
                "MaxSize": max_size,
                "DesiredCapacity": desired,
                "AvailabilityZones": ["us-east-1a"],
                "Tags": [{"Key": tag, "Value": "f", "PropagateAtLaunch": True}] if tag else [],
                **more,
            }
        )
        return name

    def group(self, name: str) -> dict[str, Any]:
        groups: list[dict[str, Any]] = self.client("autoscaling").describe_auto_scaling_groups(
            AutoScalingGroupNames=[name]
        )["AutoScalingGroups"]
        return groups[0]

    def members(self, name: str, state: str | None = None) -> list[str]:
        return [
            member["InstanceId"]
            for member in self.group(name)["Instances"]
            if state in (None, member["LifecycleState"])
        ]

    def in_service(self, name: str, count: int) -> list[str]:
        """Wait until the group has exactly `count` members, all in service, and return their ids."""
        eventually(
            lambda: [member["LifecycleState"] for member in self.group(name)["Instances"]] == ["InService"] * count
        )
        return self.members(name)

    def instance(self, instance_id: str) -> dict[str, Any]:
        (reservation,) = self.client("ec2").describe_instances(InstanceIds=[instance_id])["Reservations"]
        (instance,) = reservation["Instances"]
        found: dict[str, Any] = instance
        return found


def encoded(user_data: str) -> str:
    return base64.b64encode(user_data.encode()).decode()


@contextmanager
def served_aws(
    directory: Path,
    conditions: Conditions = QUICK,
    *,
    network_name: str = "",
    seed: int = 0,
    answers: AwsAnswers | None = None,
) -> Iterator[ServedAws]:
    """Serve a local AWS until the block ends. Then require that no process sent it an undocumented call.

    A test that sends such a call on purpose calls `take_wrong_calls`.
    """
    ready, log = directory / "ready.json", directory / "aws.log"
    keys = LocalKeys.random()
    write_private(directory / "keys.json", keys.encoded())
    options = AwsOptions(
        nodes_directory=str(directory / "nodes"),
        ready_file=str(ready),
        keys_file=str(directory / "keys.json"),
        conditions=conditions,
        seed=seed,
        network_name=network_name,
    )
    if answers is not None:
        recorded = RecordedAnswers(asked_at="", region="us-east-1", instance_type="t3.nano", answers=answers)
        (directory / "answers.json").write_bytes(aws_answers.encode(recorded))
        options = msgspec.structs.replace(options, aws_answers=str(directory / "answers.json"))
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "infra.local_cloud", "serve", msgspec.json.encode(options).decode()],
            env=process_environment(str(directory)),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    aws = None
    try:
        eventually(lambda: ready.exists() or process.poll() is not None, timeout_seconds=START_SECONDS)
        assert process.poll() is None, log.read_text()
        aws = ServedAws(json.loads(ready.read_text())["url"], directory / "nodes", process, keys)
        yield aws
        if process.poll() is None:
            assert aws.take_wrong_calls() == [], "AWS would refuse these calls"
    finally:
        if aws is not None:
            aws.close()
        process.terminate()
        process.wait(20)
