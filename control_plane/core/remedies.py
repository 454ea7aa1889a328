"""What a fault of a node calls for: restart in place, reboot or replace; from the fault's kind and the node's history.

    fault                          remedy           once more within a day
    application's own (Xid 13 …)   restart ranks    restart ranks
    a reset mends it (Xid 95 …)    reboot           replace
    only other hardware does       replace

A GPU is never reset by itself: that takes root and every process off it, which is all that a reboot costs. A reboot
leaves an instance on its host: what NVIDIA answers with a restart of the bare metal, EC2 answers with another instance.

Invariant: what is not in the tables restarts ranks and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from control_plane.core.observed.nodes import Implication, Remedy
from everstep.protocol.agent_messages import FaultCode, NodeFault

LEMON_INCIDENTS = 3
LEMON_WINDOW_SECONDS = 24 * 3600.0
"""A node that had its part in so many incidents within so long is a lemon: whatever each of them was, it is not used again.

Source: Kokolis et al., HPCA'25 (arXiv 2410.21680), section on lemon nodes: few nodes make most failures, and are found
by their history.
"""
HISTORY_LIMIT = 20
"""Lines of a node's history that are looked at, the newest."""

_IGNORE = (14, 37, 38, 43, 44, 63, 66, 67, 92, 93, 106, 107, 121, 137, 141, 152, 153, 157, 160, 161)
_RESTART = (
    8,
    11,
    13,
    25,
    31,
    32,
    39,
    40,
    41,
    45,
    60,
    68,
    69,
    70,
    71,
    72,
    75,
    76,
    77,
    80,
    82,
    83,
    84,
    85,
    86,
    88,
    89,
    94,
)
_RESTART_NEWER = (*range(96, 106), *range(126, 136), 139)
_RESET = (46, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158)
_RESET_OR_REBOOT = (48, 74, 151, 171, 172)
"""Workflows of the catalog that end in `a GPU reset or node reboot is needed to clear this error`; 151 wants the virtual machine restarted, 171 and
172 are details of a 48."""
_NEW_HARDWARE = (54, 79)
"""54 CHECK_MECHANICALS, 79 RESTART_BM."""
XID: Mapping[int, Remedy] = {
    **dict.fromkeys(_IGNORE, Remedy.NONE),
    **dict.fromkeys((*_RESTART, *_RESTART_NEWER), Remedy.RESTART),
    **dict.fromkeys((*_RESET, *_RESET_OR_REBOOT), Remedy.REBOOT),
    **dict.fromkeys(_NEW_HARDWARE, Remedy.REPLACE),
}
"""By Xid. Source: NVIDIA, Xid Catalog, column `Resolution Bucket (Immediate Action)`,
https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html: IGNORE is NONE, RESTART_APP is RESTART, RESET_GPU
and RESTART_VM are REBOOT, RESTART_BM and CHECK_MECHANICALS are REPLACE. 154 only repeats what another Xid calls for."""
FAULTS: Mapping[str, Remedy] = {
    FaultCode.RANKS_NOT_GONE: Remedy.REPLACE,
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
}
"""By code; `gpu_xid` goes by its number. A GPU that is lost is an Xid 79 whose line was not seen.

A disk that does not answer keeps in the kernel
whoever touches it: nothing short of a reboot brings them back, and a node that does not return from that is replaced.
Throttling, errors of a card, a full disk and little memory pass, or are the job's own doing: ranks that fail of them
restart, and the breakers see to the rest."""
_XID_IN_WORDS = re.compile(r"\bxid\s*(?:\(PCI:[^)]*\))?\D{0,3}(\d{1,3})\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A fault that a node must leave its job for."""

    what: str
    """The fault's code, with its number."""
    remedy: Remedy
    words: str
    """The fault in a sentence, and why that remedy."""


def xid_of(fault: NodeFault) -> int | None:
    """Return the Xid that a `gpu_xid` speaks of, by its number or, where there is none, as its message words it; None when neither has one."""
    if fault.xid is not None:
        return fault.xid
    found = _XID_IN_WORDS.search(fault.message)
    return int(found.group(1)) if found is not None else None


def name_of(fault: NodeFault) -> str:
    """Return a fault's code with its number: `gpu_xid 79`."""
    number = xid_of(fault) if fault.code == FaultCode.GPU_XID else None
    return fault.code if number is None else f"{fault.code} {number}"


def recent(history: Iterable[Implication], now: float) -> tuple[Implication, ...]:
    """Return the part of a node's history that still counts, oldest first."""
    return tuple(line for line in history if now - line.at <= LEMON_WINDOW_SECONDS)


def of_fault(fault: NodeFault, history: Sequence[Implication], now: float) -> Remedy:
    """Return what a fault calls for on a node with this history.

    Args:
        fault: as the node's own agent reports it.
        history: of the node.
        now: Unix seconds.

    Returns:
        The table's remedy; REPLACE instead of a second REBOOT for the same fault within the window.
    """
    remedy = _by_kind(fault)
    return Remedy.REPLACE if remedy is Remedy.REBOOT and _was_rebooted(fault, history, now) else remedy


def worst(faults: Sequence[NodeFault], history: Sequence[Implication], now: float) -> Finding | None:
    """Return the gravest fault that a node must leave its job for, or None while there is none.

    Args:
        faults: of the node, as its live agent reports them.
        history: of the node.
        now: Unix seconds.

    Returns:
        The first of the gravest; None when no fault calls for a reboot or a replacement.
    """
    for grave in (Remedy.REPLACE, Remedy.REBOOT):
        for fault in faults:
            if of_fault(fault, history, now) is grave:
                again = "; a reboot has not mended it" if _by_kind(fault) is not grave else ""
                return Finding(what=name_of(fault), remedy=grave, words=f"{fault.code}: {fault.message}{again}")
    return None


def _by_kind(fault: NodeFault) -> Remedy:
    if fault.code == FaultCode.GPU_XID:
        return XID.get(xid_of(fault) or 0, Remedy.RESTART)
    return FAULTS.get(fault.code, Remedy.RESTART)


def _was_rebooted(fault: NodeFault, history: Sequence[Implication], now: float) -> bool:
    return any(line.what == name_of(fault) and line.remedy is Remedy.REBOOT for line in recent(history, now))


def lemon(history: Iterable[Implication], now: float) -> str | None:
    """Return why a node is not to be used again, with its history, or None.

    Args:
        history: of the node.
        now: Unix seconds.

    Returns:
        A sentence that names every incident within the window, or None while there are fewer than `LEMON_INCIDENTS`.
    """
    lines = recent(history, now)
    if len({line.incident_id for line in lines}) < LEMON_INCIDENTS:
        return None
    told = ", ".join(f"{line.what} ({line.incident_id})" for line in lines)
    return f"it had its part in {len(lines)} incidents within {LEMON_WINDOW_SECONDS / 3600:g} h: {told}"


def of_lemon(history: Iterable[Implication], now: float) -> Remedy:
    """Return what is done about a lemon: ended only if its own live agent reported one of its faults, else kept for a person to decide."""
    return Remedy.REPLACE if any(line.is_own_word for line in recent(history, now)) else Remedy.RETIRE
