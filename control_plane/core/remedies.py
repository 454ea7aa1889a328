"""The remedy for a node's fault: restart the ranks, reboot the node or replace it, by the fault and the node's history.

    fault                                  remedy           same fault again within a day
    application fault (Xid 13 …)           restart ranks    restart ranks
    cleared by a reset (Xid 95 …)          reboot           replace
    needs other hardware                   replace

A reset of a single GPU costs as much as a reboot. A reboot keeps an instance on its host, so a restart of the bare
metal becomes a replacement. Invariant: a fault that the tables do not contain only restarts ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from control_plane.core.observed.causes import Reason, StillFaulty, origins
from control_plane.core.observed.facts import Faulty, Involvement, Lemon, NodeFaulty
from control_plane.core.observed.nodes import Implication, Remedy
from everstep.protocol.agent_messages import FaultCode, NodeFault
from everstep.protocol.ids import NodeId

LEMON_INCIDENTS = 3
LEMON_WINDOW_SECONDS = 24 * 3600.0
"""Period in which `LEMON_INCIDENTS` incidents of any cause make a node a lemon, which jobs do not use again.

Source: Kokolis et al., HPCA'25 (arXiv 2410.21680), section on lemon nodes: a few nodes cause most failures, and their
history identifies them.
"""

_IGNORE = (14, 37, 38, 43, 44, 63, 66, 67, 92, 93, 106, 107, 121, 137, 141, 152, 153, 157, 160, 161)
_RESTART = (8, 11, 13, 25, 31, 32, 39, 40, 41, 45, 60, *range(68, 73), 75, 76, 77, 80, *range(82, 87), 88, 89, 94)
_RESTART_NEWER = (*range(96, 106), *range(126, 136), 139)
_RESET = (46, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158)
_RESET_OR_REBOOT = (48, 74, 151, 171, 172)
"""Xids whose workflow ends with a GPU reset or a reboot. 171 and 172 are details of 48."""
_NEW_HARDWARE = (54, 79)
"""CHECK_MECHANICALS and RESTART_BM."""
XID: Mapping[int, Remedy] = {
    **dict.fromkeys(_IGNORE, Remedy.NONE),
    **dict.fromkeys((*_RESTART, *_RESTART_NEWER), Remedy.RESTART),
    **dict.fromkeys((*_RESET, *_RESET_OR_REBOOT), Remedy.REBOOT),
    **dict.fromkeys(_NEW_HARDWARE, Remedy.REPLACE),
}
"""Remedies by Xid. Xid 154 only repeats another Xid's recommendation.

Source: NVIDIA, Xid Catalog, column `Resolution Bucket (Immediate Action)`.
https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html: IGNORE is NONE, RESTART_APP is RESTART, RESET_GPU
and RESTART_VM are REBOOT, RESTART_BM and CHECK_MECHANICALS are REPLACE.
"""
FAULTS: Mapping[str, Remedy] = {
    FaultCode.RANKS_NOT_GONE: Remedy.NONE,
    FaultCode.GPU_ECC: Remedy.REBOOT,
    FaultCode.GPU_LOST: Remedy.REPLACE,
    FaultCode.GPU_THROTTLED: Remedy.NONE,
    FaultCode.GPU_SILENT: Remedy.NONE,
    FaultCode.NIC_DOWN: Remedy.REBOOT,
    FaultCode.NIC_ERRORS: Remedy.NONE,
    FaultCode.DISK_FULL: Remedy.NONE,
    FaultCode.DISK_READ_ONLY: Remedy.REPLACE,
    FaultCode.DISK_SILENT: Remedy.REBOOT,
    FaultCode.MEMORY_LOW: Remedy.NONE,
    FaultCode.MEMORY_KILLED: Remedy.NONE,
    FaultCode.BURN_IN_FAILED: Remedy.REBOOT,
}
"""Remedies by fault code. `gpu_xid` uses `XID` instead.

A wrong result of a test can have a transient cause. If a disk does not respond, processes that access it hang in the
kernel until a reboot. Throttling, network errors, a full disk and low memory are temporary or caused by the job. So are
processes that end slowly: the kernel first writes their dirty pages and frees their memory.
"""
OF_HARDWARE = (Remedy.REBOOT, Remedy.REPLACE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A fault for which the node's job must give up the node, with its remedy."""

    what: str
    """The fault code, followed by the Xid of a `gpu_xid` fault."""
    remedy: Remedy
    fault: Faulty


def name_of(fault: NodeFault) -> str:
    """Return the fault code, followed by the Xid if there is one: `gpu_xid 79`."""
    return fault.code if fault.xid is None else f"{fault.code} {fault.xid}"


def hardware_fault(reason: Reason) -> Faulty | None:
    """Return the fault behind a reason if its remedy is a reboot or other hardware, or None."""
    for each in origins(reason):
        fault = each.fault if isinstance(each, NodeFaulty | StillFaulty) else each
        if isinstance(fault, Faulty) and is_of_hardware(fault):
            return fault
    return None


def is_of_hardware(fault: Faulty) -> bool:
    """Return whether the remedy of a fault is a reboot or other hardware."""
    return _by_kind(fault) in OF_HARDWARE


def recent(history: Iterable[Implication], now: float) -> tuple[Implication, ...]:
    """Return the entries of a fault history that are younger than `LEMON_WINDOW_SECONDS`, oldest first."""
    return tuple(line for line in history if now - line.at <= LEMON_WINDOW_SECONDS)


def of_fault(fault: NodeFault, history: Sequence[Implication], now: float) -> Remedy:
    """Return the remedy for a fault. A repeated fault within `LEMON_WINDOW_SECONDS` of a reboot is REPLACE."""
    remedy = _by_kind(fault)
    return Remedy.REPLACE if remedy is Remedy.REBOOT and _was_rebooted(fault, history, now) else remedy


def worst(faults: Sequence[NodeFault], history: Sequence[Implication], now: float) -> Finding | None:
    """Return the first of the most severe faults of a node that require a reboot or a replacement, or None."""
    for grave in (Remedy.REPLACE, Remedy.REBOOT):
        for fault in faults:
            if of_fault(fault, history, now) is grave:
                again = _by_kind(fault) is not grave
                found = Faulty(
                    code=fault.code, text=fault.message, xid=fault.xid, device=fault.device, is_repeated=again
                )
                return Finding(what=name_of(fault), remedy=grave, fault=found)
    return None


def _by_kind(fault: NodeFault | Faulty) -> Remedy:
    if fault.code == FaultCode.GPU_XID:
        return Remedy.RESTART if fault.xid is None else XID.get(fault.xid, Remedy.RESTART)
    return FAULTS.get(fault.code, Remedy.RESTART)


def _was_rebooted(fault: NodeFault, history: Sequence[Implication], now: float) -> bool:
    return any(line.what == name_of(fault) and line.remedy is Remedy.REBOOT for line in recent(history, now))


def lemon(node_id: NodeId, history: Iterable[Implication], now: float) -> Lemon | None:
    """Return why a node is a lemon, with all incidents within `LEMON_WINDOW_SECONDS`, or None."""
    lines = recent(history, now)
    if len({line.incident_id for line in lines}) < LEMON_INCIDENTS:
        return None
    involvements = tuple(Involvement(line.what, line.incident_id) for line in lines)
    return Lemon(node_id=node_id, involvements=involvements, hours=LEMON_WINDOW_SECONDS / 3600)


def of_lemon(history: Iterable[Implication], now: float) -> Remedy:
    """Return the remedy for a lemon: REPLACE if its own live agent reported a fault, else RETIRE."""
    return Remedy.REPLACE if any(line.is_own_word for line in recent(history, now)) else Remedy.RETIRE
