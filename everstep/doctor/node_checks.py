"""Judges whether a machine has the hardware and the limits that its EC2 instance type promises.

`everstep doctor --node` uses this module. Machine images run that command at boot and start the agent only if no
finding is WRONG. `everstep.doctor.node_facts` gathers the facts.

Invariant: the module is pure. A fact that could not be gathered has its default value. The module then reports the
hardware or the limit as missing, if the instance type has this hardware or every node needs this limit. The instance
type itself is an exception: without EC2's description of it, the module reports nothing about its hardware.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from everstep.doctor.findings import Finding, Level

LEAST_OPEN_FILES: Final = 65_536
"""Smallest accepted limit of open files per process.

In a job of a thousand ranks, rank 0 needs one open file per rank, and a data loader needs many per worker.
"""


_P_TYPE: Final = re.compile(r"p(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceTypeFacts:
    """The accelerators and network cards of an EC2 instance type, as EC2 describes them."""

    name: str
    gpus: int
    """Number of whole NVIDIA GPUs. 0 for a type without NVIDIA GPUs, or with a part of one."""
    network_cards: int
    efa_interfaces: int
    """Maximum number of EFA interfaces."""

    @property
    def has_switch(self) -> bool:
        """Whether NVSwitch connects the GPUs. Such GPUs work only while the fabric manager runs.

        EC2 does not describe this fact. It holds for P types with several GPUs since A100. Source:
        https://docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide/index.html
        """
        generation = _P_TYPE.match(self.name)
        return generation is not None and int(generation[1]) >= 4 and self.gpus > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """Facts about a node's hardware and the limits of its processes."""

    instance_type: str = ""
    """EC2's name of the type. Empty outside EC2, or if the metadata service does not answer."""
    described: InstanceTypeFacts | None = None
    """EC2's description of the type. None if EC2 could not be asked; the node is then not compared with its type."""
    gpu_count: int = 0
    """Number of GPUs that NVML lists."""
    efa_count: int = 0
    """Number of EFA devices that the kernel drives."""
    efa_attached: int = 0
    """Number of EFA devices on the PCI bus, with or without a driver."""
    efa_error: str = ""
    """Reason why libfabric offers no EFA provider. Empty if it offers one, or on a machine without EFA devices."""
    has_nccl_plugin: bool = False
    """True if aws-ofi-nccl is installed, with which NCCL uses EFA."""
    fabric_manager: str = ""
    """State of the unit of NVIDIA's fabric manager, as systemd names it. Empty without systemd."""
    open_files: int = 0
    """Hard limit of open files of this process."""
    is_memory_lockable: bool = False
    """True if this process may lock any amount of memory, which GPUs and EFA need."""
    answers_without_token: bool | None = None
    """True if the metadata service answers requests without a token (IMDSv1). None: unknown."""
    has_rdma_device: bool = False
    """True if the kernel has an RDMA device: EFA, InfiniBand or RoCE."""


def judge_node(facts: NodeFacts) -> tuple[Finding, ...]:
    """Return the findings about a node: accelerators, limits of processes, metadata service."""
    return (
        *(() if facts.described is None else _accelerators(facts, facts.described)),
        *_limits(facts),
        *_metadata(facts),
    )


def _accelerators(facts: NodeFacts, wanted: InstanceTypeFacts) -> Iterator[Finding]:
    kind = wanted.name
    if wanted.gpus and facts.gpu_count != wanted.gpus:
        words = f"{kind} has {wanted.gpus} GPUs, and NVML lists {facts.gpu_count}"
        advice = "Read `nvidia-smi` and `dmesg`. If a GPU is lost, replace the instance."
        yield Finding("gpu count", Level.WRONG, words, advice)
    elif wanted.gpus:
        yield Finding("gpu count", Level.OK, f"all {wanted.gpus} GPUs of {kind}")
    if wanted.has_switch and facts.fabric_manager != "active":
        words = f"the GPUs of {kind} need NVIDIA's fabric manager, and its unit is {facts.fabric_manager or 'missing'}"
        advice = "Install nvidia-fabricmanager in the driver's version: systemctl enable --now nvidia-fabricmanager"
        yield Finding("fabric manager", Level.WRONG, words, advice)
    if facts.efa_count or facts.efa_attached or (wanted.gpus and wanted.efa_interfaces and wanted.network_cards > 1):
        yield _efa(facts, wanted)


def _efa(facts: NodeFacts, wanted: InstanceTypeFacts) -> Finding:
    """Return the finding about EFA, which NCCL needs on types with several network cards, and may use on others."""
    install = "Install EFA: infra/image/install.sh with --gpu."
    if facts.efa_count < facts.efa_attached:
        words = f"the kernel drives {facts.efa_count} of the {facts.efa_attached} EFA interfaces of this instance"
        return Finding("efa", Level.WRONG, words, f"Read `dmesg`. {install} If a card is lost, replace the instance.")
    if facts.efa_error:
        return Finding("efa", Level.WRONG, facts.efa_error, install)
    if facts.efa_count and not facts.has_nccl_plugin:
        return Finding("efa", Level.WRONG, "aws-ofi-nccl is not installed, so that NCCL does not use EFA", install)
    if facts.efa_count < wanted.efa_interfaces:
        words = f"{wanted.name} can have {wanted.efa_interfaces} EFA interfaces, and this machine has {facts.efa_count}"
        # A launch template may omit interfaces on purpose, but without any, NCCL has a small part of the bandwidth.
        level = Level.WARNING if facts.efa_count else Level.WRONG
        return Finding("efa", level, words, "Add interfaces to the launch template (infra/terraform/modules/fleet).")
    return Finding("efa", Level.OK, f"{facts.efa_count} EFA interfaces, with aws-ofi-nccl")


def _limits(facts: NodeFacts) -> Iterator[Finding]:
    if facts.open_files < LEAST_OPEN_FILES:
        words = f"a process may open {facts.open_files:,} files; large jobs need {LEAST_OPEN_FILES:,}"
        yield Finding("limits", Level.WARNING, words, "Set LimitNOFILE=1048576 in the unit of the agent.")
    elif not facts.is_memory_lockable:
        words = "the amount of locked memory is limited; GPUs and EFA lock the memory that they transfer"
        level = Level.WRONG if facts.has_rdma_device else Level.WARNING  # With a limit, EFA refuses every transfer.
        yield Finding("limits", level, words, "Set LimitMEMLOCK=infinity in the unit of the agent.")
    else:
        yield Finding("limits", Level.OK, f"{facts.open_files:,} open files, unlimited locked memory")


def _metadata(facts: NodeFacts) -> Iterator[Finding]:
    if facts.answers_without_token:
        words = "the metadata service answers requests without a token (IMDSv1)"
        advice = "Set HttpTokens to required, and HttpPutResponseHopLimit to 1, in the launch template."
        yield Finding("metadata", Level.WARNING, words, advice)
    elif facts.answers_without_token is False:
        yield Finding("metadata", Level.OK, "the metadata service requires a token (IMDSv2)")
