"""Implements the checks of `everstep doctor`: turns facts about a laptop or a node into findings with advice.

`everstep.doctor.facts` gathers the facts.

Invariant: the module is pure. If a fact could not be gathered, the check of this fact reports a finding. A finding is
WRONG only if the fault stops Everstep, or a feature of it, from working.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from everstep.doctor.findings import Finding, Level
from everstep.doctor.node_checks import NodeFacts, judge_node
from everstep.protocol.rank_messages import unordered_machine

GIB: Final = 1024**3
OLDEST_PYTHON: Final = (3, 11)
SKEW_WARNING_SECONDS: Final = 2.0
SKEW_WRONG_SECONDS: Final = 60.0
"""Minimum clock skew for a WRONG finding. From `SKEW_WARNING_SECONDS` on, the finding is a WARNING.

The limit is a minute, because the nonce with which an agent proves its identity is valid for one minute. AWS rejects
signatures that are five minutes off. A smaller skew distorts the durations of incident phases, because their timestamps
come from several machines.
"""
LEAST_SHARED_MEMORY_BYTES: Final = GIB
LEAST_MEMORY_BYTES: Final = 2 * GIB
RENDEZVOUS_PORTS: Final = (20_000, 31_999)
"""Port range of torch's rendezvous (docs/reference/settings.md#ports)."""
EXPIRY_WARNING: Final = timedelta(days=7)
SERVER_ACTIONS: Final = (
    "autoscaling:CompleteLifecycleAction",
    "autoscaling:DescribeAutoScalingGroups",
    "autoscaling:DescribeAutoScalingInstances",
    "autoscaling:DescribeLifecycleHooks",
    "autoscaling:DescribePolicies",
    "autoscaling:DescribeScalingActivities",
    "autoscaling:PutLifecycleHook",
    "autoscaling:RecordLifecycleActionHeartbeat",
    "autoscaling:ResumeProcesses",
    "autoscaling:SetDesiredCapacity",
    "autoscaling:SetInstanceProtection",
    "autoscaling:SuspendProcesses",
    "autoscaling:TerminateInstanceInAutoScalingGroup",
    "autoscaling:UpdateAutoScalingGroup",
    "ec2:DescribeInstanceStatus",
    "ec2:DescribeInstanceTopology",
    "ec2:DescribeInstances",
    "ec2:DescribeLaunchTemplateVersions",
    "ec2:RebootInstances",
    "ec2:TerminateInstances",
    "s3:AbortMultipartUpload",
    "s3:DeleteObject",
    "s3:GetObject",
    "s3:ListBucket",
    "s3:PutObject",
)
"""IAM actions that every control plane needs."""
SERVER_OPTIONS: Final = {
    "autoscaling:LaunchInstances": "launches whose instances and errors arrive at once",
    "ec2:CreateFleet": "launches whose instances and errors arrive at once",
    "ec2:CreateTags": "tags of jobs and projects on nodes",
    "ec2:DeleteTags": "tags of jobs and projects on nodes",
    "ec2:DescribeImages": "the age of the images of nodes",
    "ec2:DescribeInstanceTypes": "fleets with several instance types, and `ReplicaEncryption` with `Auto`",
    "ec2:GetConsoleOutput": "console output of nodes, stored before their end",
    "events:PutEvents": "events to EventBridge",
    "secretsmanager:GetSecretValue": "secrets in AWS Secrets Manager",
    "secretsmanager:PutSecretValue": "secrets in AWS Secrets Manager",
    "sqs:DeleteMessage": "AWS's notices from a queue",
    "sqs:ReceiveMessage": "AWS's notices from a queue",
}
"""IAM actions that the control plane needs only for an optional feature, each with the name of the feature."""
NODE_ACTIONS: Final = ("s3:AbortMultipartUpload", "s3:GetObject", "s3:PutObject")
"""IAM actions that every agent needs."""
NODE_OPTIONS: Final = {
    "ec2:DescribeInstanceTypes": "the comparison of a node with its instance type",
    "s3:ListBucket": "InputDataConfig",
    "s3:ListBucketMultipartUploads": "CheckpointConfig, to remove what killed agents left",
    "secretsmanager:GetSecretValue": "Secrets",
    "ssm:GetParameter": "Secrets",
    "sts:AssumeRole": "RoleArn",
    "sts:TagSession": "RoleArn",
}
"""IAM actions that an agent needs only for jobs with an optional request field, each with the name of the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceFacts:
    """Facts about the Everstep service: whether it responds, its version, the token's role, and the clock skew."""

    endpoint: str = ""
    error: str = ""
    """Reason why the service has no configured endpoint or does not respond. Empty if it responded."""
    hint: str = ""
    is_refused: bool = False
    """True if the service responded, but did not accept the token."""
    version: str = ""
    role: str = ""
    project: str = ""
    expires_at: datetime | None = None
    skew_seconds: float | None = None
    """Seconds by which this machine's clock is ahead of the service's; None without a response.

    The value may be wrong by `uncertainty_seconds`, because the request itself takes time.
    """
    uncertainty_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsQuota:
    """An EC2 quota in vCPUs, and the vCPUs that the planned launch needs."""

    name: str
    limit: float
    needed: int
    instance_type: str
    node_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsFacts:
    """Whether AWS responds to this machine, and which actions it permits."""

    error: str = ""
    """Reason why the doctor could not query AWS at all. Empty otherwise."""
    caller: str = ""
    region: str = ""
    permissions: Mapping[str, bool | None] = field(default_factory=dict[str, bool | None])
    """Whether the caller may use each IAM action. None if it is unknown."""
    quota: AwsQuota | None = None
    quota_error: str = ""
    instance_type: str = ""
    """The instance type that the user plans to launch. Empty without one."""
    zones: tuple[str, ...] | None = None
    """Availability zones of the region that offer it. None if they are unknown."""
    zones_error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorFacts:
    """All facts that the doctor has gathered about this machine, the service and AWS."""

    now: datetime
    is_node: bool
    """True if the machine will run ranks. The checks of a node are stricter."""
    machine: str
    """The processor, as reported by `platform.machine()`."""
    python: tuple[int, int]
    version: str
    packages: Mapping[str, str] = field(default_factory=dict[str, str])
    """Versions of the packages that training uses. A package that is not installed has no entry."""
    service: ServiceFacts | None = ServiceFacts()
    """Facts about the Everstep service. None: the doctor did not query the service."""
    shared_memory_free: int | None = None
    """Free bytes of /dev/shm. None: /dev/shm does not exist."""
    shared_memory_total: int = 0
    can_write_shared_memory: bool = False
    memory_total: int = 0
    memory_available: int = 0
    listen_error: str = ""
    """Reason why the process cannot listen on a port. Empty if it can listen."""
    local_ports: tuple[int, int] | None = None
    """The kernel's port range for outgoing connections. None: unknown."""
    gpus: tuple[str, ...] = ()
    gpu_error: str = ""
    """Reason why the GPU driver does not respond. Empty if it responds, or on a machine without a GPU."""
    is_ec2: bool = False
    """True if the firmware identifies the machine as an EC2 instance."""
    is_root: bool = False
    closed_folder: str = ""
    """A parent directory of this Python that other users, such as a rank's user, cannot enter. Empty if none exists."""
    has_ip: bool = True
    """True if iproute2, the package with the command `ip`, is installed."""
    allows_builds: bool = False
    """True if the agent's settings permit pip to build packages."""
    hardware: NodeFacts | None = None
    """Facts about the node's hardware and limits. None: the machine is not a node."""
    aws: AwsFacts | None = None
    """Facts about AWS. None: AWS was not queried."""


def judge(facts: DoctorFacts) -> tuple[Finding, ...]:
    """Return the findings of all checks, in the order of the printed report: packages first, AWS last.

    `facts` comes from `gather`. Checks that do not apply to this machine produce no finding.
    """
    return tuple(
        finding
        for look in (_versions, _service, _clock, _token, _memory, _ports, _gpus, _hardware, _isolation, _aws)
        for finding in look(facts)
    )


def is_wrong(findings: tuple[Finding, ...]) -> bool:
    """Return whether any finding is WRONG."""
    return any(finding.level is Level.WRONG for finding in findings)


def _versions(facts: DoctorFacts) -> Iterator[Finding]:
    python = ".".join(str(part) for part in facts.python)
    if facts.python < OLDEST_PYTHON:
        yield Finding(
            "python", Level.WRONG, f"Python {python} is too old", "Install Python 3.11 or newer, and Everstep with it."
        )
    else:
        yield Finding("python", Level.OK, f"Python {python}")
    theirs = facts.service.version if facts.service is not None else ""
    if theirs and theirs != facts.version:
        words = f"Everstep {facts.version} here, {theirs} at the service"
        yield Finding(
            "version", Level.WARNING, words, f"Install the version of the service: pip install everstep=={theirs}"
        )
    else:
        yield Finding("version", Level.OK, f"Everstep {facts.version}")
    if not facts.is_node:
        return
    if obstacle := unordered_machine(facts.machine):
        yield Finding("processor", Level.WRONG, obstacle.partition(": ")[0], "Choose another instance type.")
    else:
        yield Finding("processor", Level.OK, facts.machine)
    for package, what_for in (("torch", "ranks train with it"), ("py-spy", "it shows where hung ranks are")):
        if package not in facts.packages:
            level = Level.WRONG if package == "torch" else Level.WARNING
            advice = f"pip install {package}, into the environment of the agent."
            yield Finding("packages", level, f"{package} is not installed: {what_for}", advice)
        else:
            yield Finding("packages", Level.OK, f"{package} {facts.packages[package]}")


def _service(facts: DoctorFacts) -> Iterator[Finding]:
    service = facts.service
    if service is None:
        return
    if service.error and not service.is_refused:
        advice = (
            service.hint
            or "Run everstep configure. Then check that the server runs and that this machine can reach it."
        )
        yield Finding("endpoint", Level.WRONG, service.error, advice)
    else:
        yield Finding("endpoint", Level.OK, f"{service.endpoint} answers")


def _clock(facts: DoctorFacts) -> Iterator[Finding]:
    if facts.service is None or (skew := facts.service.skew_seconds) is None:
        return
    off = max(0.0, abs(skew) - facts.service.uncertainty_seconds)
    words = f"the clock of this machine is {off:.1f} s {'ahead of' if skew > 0 else 'behind'} the clock of the service"
    advice = "Synchronize it with chrony or systemd-timesyncd; on EC2 use 169.254.169.123."
    if off > SKEW_WRONG_SECONDS:
        yield Finding("clock", Level.WRONG, words, advice)
    elif off > SKEW_WARNING_SECONDS:
        yield Finding("clock", Level.WARNING, words, advice)
    else:
        yield Finding("clock", Level.OK, "the clock of this machine agrees with the service")


def _token(facts: DoctorFacts) -> Iterator[Finding]:
    service = facts.service
    if service is None:
        return
    if service.is_refused:
        advice = "Ask an administrator: everstep tokens create --role submitter; then everstep configure."
        yield Finding("token", Level.WRONG, service.error, advice)
    elif service.role:
        scope = f"the project {service.project}" if service.project else "every project"
        if service.expires_at is not None and service.expires_at - facts.now < EXPIRY_WARNING:
            words = f"the token ({service.role} of {scope}) expires at {service.expires_at:%Y-%m-%d %H:%M} UTC"
            yield Finding("token", Level.WARNING, words, "Ask an administrator for a new token: everstep tokens create")
        else:
            yield Finding("token", Level.OK, f"{service.role} of {scope}")


def _memory(facts: DoctorFacts) -> Iterator[Finding]:
    least, level = (LEAST_MEMORY_BYTES, Level.WRONG) if facts.is_node else (LEAST_MEMORY_BYTES // 2, Level.WARNING)
    words = f"{_size(facts.memory_available)} of {_size(facts.memory_total)} of memory are available"
    if facts.memory_available < least:
        advice = f"Free at least {_size(least)}, plus two slots for every shard that the node holds."
        yield Finding("memory", level, words, advice)
    else:
        yield Finding("memory", Level.OK, words)
    if facts.shared_memory_free is None:
        advice = "Mount a tmpfs: mount -t tmpfs tmpfs /dev/shm. In a container: --shm-size, or --tmpfs /dev/shm."
        yield Finding(
            "tmpfs",
            level,
            "/dev/shm is not a tmpfs; sockets and the batches of DataLoader workers are there",
            advice,
        )
        return
    free = f"/dev/shm has {_size(facts.shared_memory_free)}"
    if not facts.can_write_shared_memory:
        yield Finding("tmpfs", Level.WRONG, "this user cannot write to /dev/shm", "chmod 1777 /dev/shm")
    elif facts.shared_memory_free < LEAST_SHARED_MEMORY_BYTES:
        advice = "mount -o remount,size=50% /dev/shm. In a container: --shm-size."
        yield Finding("tmpfs", level, f"{free} free", advice)
    else:
        yield Finding("tmpfs", Level.OK, f"{free} of {_size(facts.shared_memory_total)} free")


def _ports(facts: DoctorFacts) -> Iterator[Finding]:
    if facts.listen_error:
        words = f"this machine cannot listen on a port: {facts.listen_error}"
        yield Finding("ports", Level.WRONG, words, "Check this machine for a firewall or a sandbox that blocks ports.")
        return
    first, last = RENDEZVOUS_PORTS
    lowest, highest = facts.local_ports or (last + 1, last + 1)
    if facts.is_node and lowest <= last and highest >= first:
        words = (
            f"the kernel uses ports {lowest} to {highest} for outgoing connections; ranks need ports {first} to {last}"
        )
        yield Finding("ports", Level.WARNING, words, "sysctl -w net.ipv4.ip_local_port_range='32768 60999'")
    else:
        yield Finding("ports", Level.OK, "this machine can listen on ports")


def _gpus(facts: DoctorFacts) -> Iterator[Finding]:
    if facts.gpu_error:
        advice = "Install the NVIDIA driver for this instance type (see its AMI), then check with `nvidia-smi`."
        yield Finding("gpu", Level.WRONG if facts.is_node else Level.WARNING, facts.gpu_error, advice)
    else:
        yield Finding(
            "gpu", Level.OK, ", ".join(facts.gpus) if facts.gpus else "this machine has no GPU; ranks train on CPUs"
        )


def _hardware(facts: DoctorFacts) -> Iterator[Finding]:
    if facts.hardware is not None:
        yield from judge_node(facts.hardware)


def _isolation(facts: DoctorFacts) -> Iterator[Finding]:
    if not facts.is_node:
        return
    metadata = ", and can read the credentials of the instance's role from the metadata service" if facts.is_ec2 else ""
    if not facts.is_root:
        message = (
            "an agent started by this user runs ranks as the same user: the code of a job can read the agent's "
            f"files{metadata}"
        )
        advice = (
            "Run the agent as root; ranks then get their own users. Otherwise let only users submit jobs who may "
            "have the agent's access."
        )
        yield Finding("isolation", Level.WARNING, message, advice)
    elif facts.closed_folder:
        message = f"the ranks' own users cannot use this Python: {facts.closed_folder} denies them access"
        advice = f"chmod o+x {facts.closed_folder}, or install Python and Everstep elsewhere."
        yield Finding("isolation", Level.WRONG, message, advice)
    elif facts.is_ec2 and not facts.has_ip:
        message = (
            "the command `ip` is missing, so the agent cannot block the metadata service: the code of a job can "
            "read the credentials of the instance's role"
        )
        yield Finding("isolation", Level.WARNING, message, "Install iproute2.")
    else:
        yield Finding("isolation", Level.OK, "the ranks of each job have their own user")
    if facts.allows_builds:
        message = (
            "pip may build packages for jobs: code of these packages runs during installation and can read the pip "
            "settings of this node"
        )
        yield Finding(
            "builds", Level.WARNING, message, "Remove EVERSTEP_ALLOW_BUILDS unless jobs need packages without wheels."
        )
    else:
        yield Finding("builds", Level.OK, "pip installs wheels only")


def _aws(facts: DoctorFacts) -> Iterator[Finding]:
    aws = facts.aws
    if aws is None:
        return
    if aws.error:
        advice = "Give this machine an instance profile, or set AWS_PROFILE. --no-aws skips the AWS checks."
        yield Finding("aws", Level.WRONG, aws.error, advice)
        return
    yield Finding("aws", Level.OK, f"{aws.caller} in {aws.region}")
    options = {**SERVER_OPTIONS, **NODE_OPTIONS}
    needed = NODE_ACTIONS if facts.is_node else SERVER_ACTIONS
    refused = [action for action, is_allowed in aws.permissions.items() if is_allowed is False]
    denied = [action for action in refused if action in needed or action not in options]
    optional = [f"{action} ({options[action]})" for action in refused if action not in denied]
    unknown = [action for action, is_allowed in aws.permissions.items() if is_allowed is None]
    if denied:
        yield Finding("permissions", Level.WRONG, f"not allowed: {', '.join(denied)}", f"Allow them to {aws.caller}.")
    if optional:
        advice = f"Allow them to {aws.caller} if you use this."
        yield Finding("permissions", Level.WARNING, f"not allowed: {', '.join(optional)}", advice)
    if unknown:
        words = f"the check could not determine whether these actions are allowed: {', '.join(unknown)}"
        advice = (
            "Allow iam:SimulatePrincipalPolicy for this check. It cannot check a policy for named buckets, groups "
            "or queues."
        )
        yield Finding("permissions", Level.WARNING, words, advice)
    if aws.permissions and not refused and not unknown:
        yield Finding("permissions", Level.OK, f"{len(aws.permissions)} actions are allowed")
    yield from _offering(aws)
    if aws.quota_error:
        advice = "Allow servicequotas:GetServiceQuota for this check."
        yield Finding("quota", Level.WARNING, f"the quota is unknown: {aws.quota_error}", advice)
    elif aws.quota is not None:
        quota = aws.quota
        words = (
            f"{quota.node_count} × {quota.instance_type} need {quota.needed} vCPUs; the quota is "
            f"{quota.limit:g} ({quota.name})"
        )
        if quota.needed > quota.limit:
            yield Finding("quota", Level.WRONG, words, "Request an increase: Service Quotas, Amazon EC2.")
        else:
            yield Finding("quota", Level.OK, words)


def _offering(aws: AwsFacts) -> Iterator[Finding]:
    kind = aws.instance_type
    if aws.zones_error:
        words = f"whether {aws.region} offers {kind} is unknown: {aws.zones_error}"
        yield Finding("offering", Level.WARNING, words, "Allow ec2:DescribeInstanceTypeOfferings for this check.")
    elif aws.zones:
        words = f"{kind} is offered in {', '.join(aws.zones)}: the group's subnets must be in these zones"
        yield Finding("offering", Level.OK, words)
    elif aws.zones is not None:
        words = f"no availability zone of {aws.region} offers {kind}"
        yield Finding("offering", Level.WRONG, words, "Choose another region or instance type.")


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB"
