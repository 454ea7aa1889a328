"""Judges whether a machine has the hardware and the limits that its EC2 instance type promises.

`everstep doctor --node` uses this module. Machine images run that command at boot and start the agent only if no
finding is WRONG. `everstep.node_facts` gathers the facts.

Invariant: the module is pure. A fact that could not be gathered has its default value. The module then reports the
hardware or the limit as missing, if the instance type has this hardware or every node needs this limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from everstep.findings import Finding, Level

LEAST_OPEN_FILES: Final = 65_536
"""Smallest accepted limit of open files per process.

In a job of a thousand ranks, rank 0 needs one open file per rank, and a data loader needs many per worker.
"""


@dataclass(frozen=True, slots=True)
class Accelerators:
    """The accelerators and network cards of an EC2 instance type."""

    gpus: int
    efa_cards: int = 0
    has_switch: bool = False
    """True if NVSwitch connects the GPUs. Such GPUs work only while the fabric manager runs."""


INSTANCE_TYPES: Final = {
    "p4d.24xlarge": Accelerators(8, 4, has_switch=True),
    "p4de.24xlarge": Accelerators(8, 4, has_switch=True),
    "p5.4xlarge": Accelerators(1),
    "p5.48xlarge": Accelerators(8, 32, has_switch=True),
    "p5e.48xlarge": Accelerators(8, 32, has_switch=True),
    "p5en.48xlarge": Accelerators(8, 16, has_switch=True),
    "p6-b200.48xlarge": Accelerators(8, 8, has_switch=True),
    **{
        f"{family}.{size}xlarge": Accelerators(count)
        for family in ("g5", "g6", "g6e")
        for size, count in {"": 1, "2": 1, "4": 1, "8": 1, "12": 4, "16": 1, "24": 4, "48": 8}.items()
    },
}
"""Instance types with NVIDIA GPUs. Their numbers of EFA cards equal those in infra/terraform/modules/fleet/efa.tf.

Source: Amazon EC2 Instance Types; Amazon EC2 User Guide, "Maximize network bandwidth with multiple network cards".
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """Facts about a node's hardware and the limits of its processes."""

    instance_type: str = ""
    """EC2's name of the type. Empty outside EC2, or if the metadata service does not answer."""
    gpu_count: int = 0
    """Number of GPUs that NVML lists."""
    efa_count: int = 0
    """Number of EFA devices of the kernel."""
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
    wanted = INSTANCE_TYPES.get(facts.instance_type)
    return (
        *(() if wanted is None else _accelerators(facts, wanted)),
        *_limits(facts),
        *_metadata(facts),
    )


def _accelerators(facts: NodeFacts, wanted: Accelerators) -> Iterator[Finding]:
    kind = facts.instance_type
    if facts.gpu_count != wanted.gpus:
        words = f"{kind} has {wanted.gpus} GPUs, and NVML lists {facts.gpu_count}"
        advice = "Read `nvidia-smi` and `dmesg`. If a GPU is lost, replace the instance."
        yield Finding("gpu count", Level.WRONG, words, advice)
    else:
        yield Finding("gpu count", Level.OK, f"all {wanted.gpus} GPUs of {kind}")
    if wanted.has_switch and facts.fabric_manager != "active":
        words = f"the GPUs of {kind} need NVIDIA's fabric manager, and its unit is {facts.fabric_manager or 'missing'}"
        advice = "Install nvidia-fabricmanager in the driver's version: systemctl enable --now nvidia-fabricmanager"
        yield Finding("fabric manager", Level.WRONG, words, advice)
    if not wanted.efa_cards:
        return
    if facts.efa_count != wanted.efa_cards:
        words = f"{kind} has {wanted.efa_cards} EFA cards, and this machine has {facts.efa_count}"
        advice = "Install EFA's driver, and add the cards to the launch template (infra/terraform/modules/fleet)."
        yield Finding("efa", Level.WRONG, words, advice)
    elif facts.efa_error:
        yield Finding("efa", Level.WRONG, facts.efa_error, "Install EFA: infra/image/install.sh with --gpu.")
    elif not facts.has_nccl_plugin:
        words = "aws-ofi-nccl is not installed, so that NCCL does not use EFA"
        yield Finding("efa", Level.WRONG, words, "Install EFA: infra/image/install.sh with --gpu.")
    else:
        yield Finding("efa", Level.OK, f"{facts.efa_count} EFA cards, with aws-ofi-nccl")


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
