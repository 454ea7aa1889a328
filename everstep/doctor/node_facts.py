"""Gathers the facts that `everstep.doctor.node_checks` judges: from the kernel, systemd, EC2 and its metadata.

Invariant: the module changes nothing and raises no errors. A fact that cannot be gathered keeps its default.
"""

from __future__ import annotations

import http.client
import os
import resource
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import urlsplit

from everstep.doctor.node_checks import InstanceTypeFacts, NodeFacts
from everstep.host.firmware import is_ec2_instance

EC2_METADATA: Final = "http://169.254.169.254"
TIMEOUT_SECONDS: Final = 10.0
CLASS_INFINIBAND: Final = Path("/sys/class/infiniband")
PCI_DEVICES: Final = Path("/sys/bus/pci/devices")
EFA_MODALIAS: Final = "pci:v00001D0Fd0000EFA"
"""Beginning of the kernel's name for an EFA device on the PCI bus: Amazon's vendor id, and device ids efa0 to efa3."""
EFA_TOOLS: Final = Path("/opt/amazon/efa/bin")
NCCL_PLUGINS: Final = (Path("/opt/amazon"), Path("/usr/lib/x86_64-linux-gnu"), Path("/usr/local/lib"))


def node_facts(
    *,
    gpu_count: int,
    devices: Path = CLASS_INFINIBAND,
    pci: Path = PCI_DEVICES,
    tools: Path = EFA_TOOLS,
    plugins: Sequence[Path] = NCCL_PLUGINS,
    endpoint: str | None = None,
) -> NodeFacts:
    """Return the facts about this machine. The call blocks for at most a minute.

    Args:
        gpu_count: number of GPUs that NVML lists.
        devices: the kernel's folder of RDMA devices.
        pci: the kernel's folder of PCI devices.
        tools: folder with EFA's programs. The function also searches PATH for them.
        plugins: folders that may contain aws-ofi-nccl, at any depth.
        endpoint: URL of the instance metadata service. None: EC2's own URL on EC2; outside EC2, no request is sent.

    Returns:
        The facts. A fact that cannot be read has its default in `NodeFacts`.
    """
    endpoint = endpoint or (EC2_METADATA if is_ec2_instance() else None)
    efa_count = sum(1 for each in devices.glob("*/device/driver") if each.resolve().name == "efa")
    _, open_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    _, locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    kind = _metadata(endpoint, "instance-type", with_token=True) if endpoint else None
    region = _metadata(endpoint, "placement/region", with_token=True) if endpoint else None
    return NodeFacts(
        instance_type=kind or "",
        described=described_type(kind, region) if kind and region else None,
        gpu_count=gpu_count,
        efa_count=efa_count,
        efa_attached=_efa_attached(pci),
        efa_error=_efa_error(tools) if efa_count else "",
        has_nccl_plugin=any(next(folder.rglob("libnccl-net*.so*"), None) is not None for folder in plugins),
        fabric_manager=_output("systemctl", "is-active", "nvidia-fabricmanager.service").strip(),
        open_files=open_files,
        # An agent that runs as root raises the limit of locked memory itself.
        is_memory_lockable=locked == resource.RLIM_INFINITY or os.geteuid() == 0,
        answers_without_token=_metadata(endpoint, "instance-type", with_token=False) is not None if endpoint else None,
        has_rdma_device=next(devices.glob("*"), None) is not None,
    )


def described_type(instance_type: str, region_name: str) -> InstanceTypeFacts | None:
    """Return EC2's description of an instance type, or None if this machine's AWS credentials do not obtain one.

    Source: https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_DescribeInstanceTypes.html
    """
    import boto3  # pyright: ignore[reportMissingTypeStubs]  its stubs are large
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError

    # The boot of a node without a way to EC2 must not wait for long.
    retries: Any = {"mode": "standard", "total_max_attempts": 2}
    settings = Config(connect_timeout=5, read_timeout=5, retries=retries, user_agent_extra="everstep")
    try:
        ec2 = cast(Any, boto3.Session(region_name=region_name)).client("ec2", config=settings)
        (found,) = ec2.describe_instance_types(InstanceTypes=[instance_type])["InstanceTypes"]
    except (BotoCoreError, ClientError, ResponseParserError, ValueError):
        return None
    network, gpus = found["NetworkInfo"], found.get("GpuInfo", {}).get("Gpus", ())
    return InstanceTypeFacts(
        name=instance_type,
        gpus=sum(each["Count"] for each in gpus if each["Manufacturer"] == "NVIDIA"),
        network_cards=network["MaximumNetworkCards"],
        efa_interfaces=network.get("EfaInfo", {}).get("MaximumEfaInterfaces", 0),
    )


def _efa_attached(pci: Path) -> int:
    try:
        return sum(1 for each in pci.glob("*/modalias") if each.read_text().startswith(EFA_MODALIAS))
    except OSError:
        return 0


def _efa_error(tools: Path) -> str:
    program = shutil.which("fi_info", path=f"{tools}:{os.environ.get('PATH', os.defpath)}")
    if program is None:
        return "EFA's fi_info is not installed, so that libfabric cannot be checked"
    found = _output(program, "-p", "efa", "-t", "FI_EP_RDM")
    return "" if "provider: efa" in found else "libfabric offers no provider `efa`: fi_info -p efa lists none"


def _output(*command: str) -> str:
    """Return a program's stdout; empty if the program is missing or does not end within `TIMEOUT_SECONDS`."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _metadata(endpoint: str, path: str, *, with_token: bool) -> str | None:
    """Return a value of the metadata service, or None if the service does not answer or refuses."""
    parts = urlsplit(endpoint)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=TIMEOUT_SECONDS)
    headers: dict[str, str] = {}
    try:
        if with_token:
            connection.request("PUT", "/latest/api/token", headers={"X-aws-ec2-metadata-token-ttl-seconds": "60"})
            headers["X-aws-ec2-metadata-token"] = connection.getresponse().read().decode()
        connection.request("GET", f"/latest/meta-data/{path}", headers=headers)
        answer = connection.getresponse()
        body = answer.read().decode(errors="replace").strip()
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()
    return body if answer.status == http.client.OK else None
