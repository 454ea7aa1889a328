"""Gathers the facts that `everstep doctor` judges: about this machine, the service and AWS.

Invariant: the module changes nothing. It sends AWS only dry runs, simulations and describe calls. If a query fails, the
returned facts contain the reason.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, cast

from everstep import __version__, failures, sdk
from everstep.doctor.bucket_checks import BucketFacts, bucket_facts
from everstep.doctor.checks import (
    NODE_ACTIONS,
    NODE_OPTIONS,
    SERVER_ACTIONS,
    SERVER_OPTIONS,
    AwsFacts,
    AwsQuota,
    DoctorFacts,
    ServiceFacts,
)
from everstep.doctor.node_facts import node_facts
from everstep.errors import EverstepError, ServiceFailed
from everstep.host.firmware import is_ec2_instance

SHARED_MEMORY: Final = Path("/dev/shm")
AGENT_SETTINGS: Final = Path("/etc/everstep/agent.env")
"""Environment file of the agent's systemd unit (docs/operating.md#nodes)."""
TIMEOUT_SECONDS: Final = 10.0
DRY_RUNS: Final = {
    "ec2:DescribeInstances": "describe_instances",
    "ec2:DescribeInstanceStatus": "describe_instance_status",
    "ec2:DescribeInstanceTopology": "describe_instance_topology",
}
"""EC2 actions whose permission a dry run can check without an instance, each with boto3's method."""
QUOTAS: Final = {"p": "L-417A185B", "g": "L-DB2E81BA", "trn": "L-2C3B7624", "inf": "L-1945791B"}
"""EC2's quotas of running on-demand instances, by the prefix of the instance type.

Source: Amazon EC2 User Guide, On-Demand quotas.
"""
STANDARD_QUOTA: Final = "L-1216C47A"
"""EC2's quota of running on-demand instances whose type begins with a, c, d, h, i, m, r, t or z."""


def gather(
    *,
    is_node: bool,
    with_aws: bool,
    with_service: bool = True,
    instance_type: str | None = None,
    node_count: int | None = 1,
    profile_name: str | None = None,
    region_name: str | None = None,
) -> DoctorFacts:
    """Return the facts about this machine, its service and its AWS account.

    Args:
        is_node: whether the machine is to run ranks.
        with_aws: whether to query AWS; False leaves the facts about the account empty.
        with_service: whether to ask the Everstep service; a node at its boot does not need it.
        instance_type: type whose quota is checked. None: no quota is checked.
        node_count: number of instances of `instance_type` that the user plans to launch. None: in a capacity block,
            whose instances do not count against the quota.
        profile_name: Everstep profile of the service. None: the default.
        region_name: AWS region to query. None: the region of the credentials.

    Returns:
        The facts. If a fact could not be gathered, its field contains the reason.
    """
    free, total, can_write = _shared_memory(SHARED_MEMORY)
    available, memory = _memory(Path("/proc/meminfo"))
    gpus, gpu_error = _gpus()
    return DoctorFacts(
        now=datetime.now(UTC),
        is_node=is_node,
        machine=platform.machine(),
        python=sys.version_info[:2],
        version=__version__,
        packages=_packages(("torch", "deepspeed", "py-spy")),
        service=service_facts(profile_name) if with_service else None,
        shared_memory_free=free,
        shared_memory_total=total,
        can_write_shared_memory=can_write,
        memory_total=memory,
        memory_available=available,
        listen_error=_listen_error(),
        local_ports=_local_ports(Path("/proc/sys/net/ipv4/ip_local_port_range")),
        gpus=gpus,
        gpu_error=gpu_error,
        is_ec2=is_ec2_instance(),
        is_root=os.geteuid() == 0,
        closed_folder=closed_folder(Path(sys.executable).resolve(), Path(sys.prefix, "bin")),
        has_ip=shutil.which("ip") is not None,
        allows_builds=setting("EVERSTEP_ALLOW_BUILDS") == "1",
        hardware=node_facts(
            gpu_count=len(gpus),
            endpoint=os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT"),
        )
        if is_node
        else None,
        aws=aws_facts(
            (*NODE_ACTIONS, *NODE_OPTIONS) if is_node else (*SERVER_ACTIONS, *SERVER_OPTIONS),
            instance_type,
            node_count,
            region_name,
        )
        if with_aws
        else None,
    )


def service_facts(profile_name: str | None = None) -> ServiceFacts:
    """Return the facts about the control plane's API, or the reason why it does not respond."""
    endpoint = ""
    try:
        client: Any = sdk.client(profile_name=profile_name)
        endpoint = client.meta.endpoint_url
        try:
            with failures.translated():
                began, clock = time.monotonic(), time.time()
                identity = client.get_caller_identity()
                took = time.monotonic() - began
        finally:
            client.close()
    except ServiceFailed as error:
        return ServiceFacts(
            endpoint=endpoint, error=error.message, hint=error.hint, is_refused=error.code == "AccessDeniedException"
        )
    except EverstepError as error:
        return ServiceFacts(endpoint=endpoint, error=error.message, hint=error.hint)
    return ServiceFacts(
        endpoint=endpoint,
        version=identity["ServerVersion"],
        role=identity["Role"],
        project=identity.get("Project", ""),
        expires_at=identity.get("ExpirationTime"),
        skew_seconds=clock + took / 2 - identity["ServerTime"].timestamp(),
        # Add a second, because the service's time in the response may have a resolution of one second.
        uncertainty_seconds=took / 2 + 1.0,
    )


def aws_facts(
    actions: Sequence[str], instance_type: str | None, node_count: int | None, region_name: str | None = None
) -> AwsFacts:
    """Return the facts about the account and the permissions of this machine's AWS credentials.

    Changes nothing in AWS.
    """
    import boto3  # pyright: ignore[reportMissingTypeStubs]  its stubs are large, and this is its only use here
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError

    settings = Config(
        connect_timeout=TIMEOUT_SECONDS,
        read_timeout=TIMEOUT_SECONDS,
        retries={"mode": "standard", "total_max_attempts": 2},
    )
    try:
        # Read AWS_REGION here, because boto3 reads only AWS_DEFAULT_REGION.
        session = cast(Any, boto3.Session(region_name=region_name or os.environ.get("AWS_REGION")))
        caller: str = session.client("sts", config=settings).get_caller_identity()["Arn"]
        clients = {name: session.client(name, config=settings) for name in ("ec2", "iam", "service-quotas")}
    except (BotoCoreError, ClientError, ResponseParserError) as error:
        return AwsFacts(error=f"AWS does not respond, or this machine has no valid credentials: {error}")
    of_type: dict[str, Any] = {}
    if instance_type is not None:
        of_type["instance_type"] = instance_type
        try:
            if node_count is not None:
                of_type["quota"] = quota_of(clients["ec2"], clients["service-quotas"], instance_type, node_count)
        except (BotoCoreError, ClientError, ResponseParserError, LookupError) as error:
            of_type["quota_error"] = str(error)
        try:
            of_type["zones"] = zones_of(clients["ec2"], instance_type)
        except (BotoCoreError, ClientError, ResponseParserError) as error:
            of_type["zones_error"] = str(error)
    permissions = permissions_of(caller, clients["ec2"], clients["iam"], actions)
    return AwsFacts(caller=caller, region=session.region_name or "", permissions=permissions, **of_type)


def bucket(name: str, region_name: str | None = None) -> BucketFacts:
    """Return the settings of a bucket that this machine's AWS credentials may read. Changes nothing in AWS."""
    import boto3  # pyright: ignore[reportMissingTypeStubs]  its stubs are large
    from botocore.exceptions import BotoCoreError
    from botocore.parsers import ResponseParserError

    try:
        session = cast(Any, boto3.Session(region_name=region_name or os.environ.get("AWS_REGION")))
        return bucket_facts(session.client("s3"), name)
    except (BotoCoreError, ResponseParserError) as error:
        return BucketFacts(name=name, errors=dict.fromkeys(("versioning", "lifecycle", "encryption"), str(error)))


def permissions_of(caller: str, ec2: Any, iam: Any, actions: Sequence[str]) -> Mapping[str, bool | None]:
    """Return which actions a caller may use.

    The function makes a dry run if AWS offers one, and otherwise simulates the caller's policies. The simulation covers
    all resources. An action that policies allow only for named resources may therefore count as unknown.

    Args:
        caller: ARN of the user or assumed role whose permissions are checked.
        ec2: an EC2 client.
        iam: an IAM client; it simulates the actions that have no dry run.
        actions: IAM action names with their service, such as `ec2:RunInstances`.

    Returns:
        Whether each action is allowed. None: unknown.
    """
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError

    found: dict[str, bool | None] = dict.fromkeys(actions)
    for action in (action for action in actions if action in DRY_RUNS):
        try:
            getattr(ec2, DRY_RUNS[action])(DryRun=True)
        except ClientError as error:
            code = error.response.get("Error", {}).get("Code", "")
            found[action] = {"DryRunOperation": True, "UnauthorizedOperation": False}.get(code)
        except (BotoCoreError, ResponseParserError):
            found[action] = None
    rest = [action for action, is_allowed in found.items() if is_allowed is None]
    try:
        answer: dict[str, Any] = (
            iam.simulate_principal_policy(PolicySourceArn=policy_source(caller), ActionNames=rest)
            if rest
            else {"EvaluationResults": []}
        )
    except (ClientError, BotoCoreError, ResponseParserError):
        return found
    found.update(
        {
            result["EvalActionName"]: _decided(result["EvalActionName"], result["EvalDecision"])
            for result in answer["EvaluationResults"]
        }
    )
    return found


def _decided(action: str, decision: str) -> bool | None:
    if decision == "implicitDeny" and not action.partition(":")[2].startswith("Describe"):
        return None
    return decision == "allowed"


def policy_source(caller: str) -> str:
    """Return the ARN whose policies apply to a caller: the role of an assumed-role session, or the caller itself."""
    parts = re.fullmatch(r"arn:(aws[a-z-]*):sts::(\d{12}):assumed-role/([^/]+)/.+", caller)
    return caller if parts is None else f"arn:{parts[1]}:iam::{parts[2]}:role/{parts[3]}"


def zones_of(ec2: Any, instance_type: str) -> tuple[str, ...]:
    """Return the availability zones of the client's region that offer instances of a type.

    Source: https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_DescribeInstanceTypeOfferings.html
    """
    pages = ec2.get_paginator("describe_instance_type_offerings").paginate(
        LocationType="availability-zone", Filters=[{"Name": "instance-type", "Values": [instance_type]}]
    )
    return tuple(sorted(each["Location"] for page in pages for each in page["InstanceTypeOfferings"]))


def quota_of(ec2: Any, quotas: Any, instance_type: str, node_count: int) -> AwsQuota:
    """Return the EC2 quota that applies to instances of a type.

    Args:
        ec2: an EC2 client.
        quotas: a client of Service Quotas.
        instance_type: EC2's name of the type.
        node_count: number of instances that the user plans to launch.

    Returns:
        The quota, and the vCPUs that these instances need.

    Raises:
        LookupError: EC2 has no such type.
    """
    described = ec2.describe_instance_types(InstanceTypes=[instance_type])["InstanceTypes"]
    if not described:
        raise LookupError(f"EC2 has no instance type {instance_type}")
    letters = re.match(r"[a-z]+", instance_type)
    family = next(
        (family for family in ("trn", "inf", "p", "g") if letters is not None and letters[0].startswith(family)), ""
    )
    quota = quotas.get_service_quota(ServiceCode="ec2", QuotaCode=QUOTAS.get(family, STANDARD_QUOTA))["Quota"]
    needed = described[0]["VCpuInfo"]["DefaultVCpus"] * node_count
    return AwsQuota(
        name=quota["QuotaName"], limit=quota["Value"], needed=needed, instance_type=instance_type, node_count=node_count
    )


def _packages(names: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _shared_memory(path: Path) -> tuple[int | None, int, bool]:
    try:
        figures = os.statvfs(path)
    except OSError:
        return None, 0, False
    return figures.f_bavail * figures.f_frsize, figures.f_blocks * figures.f_frsize, os.access(path, os.W_OK)


def _memory(path: Path) -> tuple[int, int]:
    """Return the available and the total memory in bytes, or zeros if /proc/meminfo is unreadable."""
    try:
        lines = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
        available, total = (int(lines[name].split()[0]) * 1024 for name in ("MemAvailable", "MemTotal"))
        return available, total
    except (OSError, KeyError, ValueError):
        return 0, 0


def _listen_error() -> str:
    try:
        with socket.create_server(("127.0.0.1", 0)):
            return ""
    except OSError as error:
        return str(error)


def _local_ports(path: Path) -> tuple[int, int] | None:
    try:
        first, last = path.read_text().split()
        return int(first), int(last)
    except (OSError, ValueError):
        return None


def closed_folder(*paths: Path) -> str:
    """Return the first parent directory of these paths that some users cannot enter. Return "" if there is none."""
    above = (folder for path in paths for folder in reversed(path.parents))
    return next((str(folder) for folder in above if not folder.stat().st_mode & 0o001), "")


def setting(name: str, *, file: Path = AGENT_SETTINGS, environment: Mapping[str, str] = os.environ) -> str:
    """Return a setting of this machine's agent, as its systemd unit passes the setting.

    Args:
        name: environment variable of the setting.
        file: the environment file of the agent's unit.
        environment: this process's environment. Its variable applies if the file does not contain the variable.

    Returns:
        The value; empty if the setting has none.
    """
    try:
        lines = [line.partition("=") for line in file.read_text().splitlines()]
    except OSError:
        lines = []
    values = {found: value.strip("'\"") for found, mark, value in lines if mark}
    return values.get(name) or environment.get(name, "")


def _gpus() -> tuple[tuple[str, ...], str]:
    """Return the GPU names that nvidia-smi lists, or the reason why it lists none."""
    has_device = Path("/dev/nvidiactl").exists()
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return (), "the machine has an NVIDIA device but no nvidia-smi" if has_device else ""
    try:
        done = subprocess.run(
            [tool, "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return (), f"nvidia-smi does not respond: {error}"
    if done.returncode != 0:
        return (), f"nvidia-smi: {(done.stderr or done.stdout).strip()}"
    return tuple(line.strip() for line in done.stdout.splitlines() if line.strip()), ""
