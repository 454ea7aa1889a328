"""What is wrong with a node, judged from what was read. Pure.

    gpu_xid          the driver told of an error of this number; for `XID_SECONDS` after it did
    gpu_ecc          memory of a GPU has lost data since the driver was loaded, or can replace no more rows
    gpu_throttled    hardware or heat has slowed a GPU down for `THROTTLED_SECONDS`; what power limits and idleness do hurts nobody
    gpu_lost         the driver cannot reach a GPU any more
    nic_down         a card that was up is down
    nic_errors       a card has counted `NIC_ERRORS` within `WINDOW_SECONDS`
    disk_read_only   the kernel has remounted it so, as a rule after an error of the disk
    disk_full        nothing of use can be written any more
    disk_silent      it has finished none of the requests that lie before it for `DEVICE_SILENT_SECONDS`: a busy one finishes some; one that has
                     finished none since the first reading, for `FIRST_SILENT_SECONDS`
    memory_low       less than `LOW_MEMORY_SHARE` can be allocated, for `LOW_SECONDS`
    memory_killed    the kernel has ended a process for want of memory, within `WINDOW_SECONDS`

Invariant: a fault is told while it holds and no longer, in the same words all the while: a report that changes wakes
the control plane.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from everstep.protocol.agent_messages import DEVICE_SILENT_SECONDS, FaultCode, NodeFault

FIRST_SILENT_SECONDS = 60.0
"""A volume of which nobody has seen yet that it finishes anything may be an idle one whose driver shows what is long finished. What the agent writes
to it as it starts is dirty for 35 s at the most, and then written: one that works has finished some by now.
Source: Linux, Documentation/admin-guide/sysctl/vm.rst (dirty_expire_centisecs, dirty_writeback_centisecs)."""
XID_SECONDS = 600.0
"""What an Xid leaves behind for longer shows as `gpu_lost` or `gpu_ecc`."""
THROTTLED_SECONDS = 10.0
NIC_ERRORS = 100
WINDOW_SECONDS = 60.0
LOW_MEMORY_SHARE = 0.02
LOW_SECONDS = 5.0
"""A process that allocates much and ends at once is no want."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """One GPU, as the driver tells of it."""

    index: int
    name: str = ""
    xids: tuple[int, ...] = ()
    """Told since the last reading; while a stub has them, at each."""
    ecc_uncorrectable: int = 0
    """Since the driver was loaded."""
    is_remapping_failed: bool = False
    slowed_by: tuple[str, ...] = ()
    """What slows its clocks down and hurts; empty when nothing does."""
    is_lost: bool = False
    busy_percent: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFacts:
    """One network card."""

    name: str
    is_up: bool
    error_count: int = 0
    """Only ever grows."""
    byte_count: int | None = None
    """Sent and received; only ever grows. None where nobody counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskQueue:
    """What a volume has done and has still to do."""

    finished_count: int
    """Requests of all kinds; only ever grows."""
    waiting_count: int
    """Requests that it was given and has not finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskWait:
    """Since when a volume has finished nothing although it had to."""

    finished_count: int
    least_waiting: int | None
    """The fewest requests seen before it while it finished others, or none: some drivers lose count, and show for ever what is long finished. None:
    nobody has seen it finish anything yet."""
    since: float | None
    """Monotonic seconds; None while nothing waits."""

    def is_stuck(self, now: float) -> bool:
        """Say whether it has finished nothing for so long that it is at fault."""
        patience = FIRST_SILENT_SECONDS if self.least_waiting is None else DEVICE_SILENT_SECONDS
        return self.since is not None and now - self.since >= patience


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskFacts:
    """One file system that this node writes to."""

    path: str
    is_read_only: bool
    free_bytes: int
    least_bytes: int
    """Below this it counts as full."""
    queue: DiskQueue | None = None
    """Of the volume below it; None where there is none of this node's own, or nobody counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """One reading."""

    at: float
    """Monotonic seconds."""
    gpus: tuple[GpuFacts, ...] = ()
    links: tuple[LinkFacts, ...] = ()
    disks: tuple[DiskFacts, ...] = ()
    memory_total_bytes: int = 0
    memory_available_bytes: int = 0
    kill_count: int | None = None
    """How often the kernel has killed for want of memory; None where nobody counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHealth:
    """What must be remembered from one reading to the next, and what is wrong."""

    xids: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """When each (GPU, Xid) was told last."""
    slowed_since: Mapping[int, float] = field(default_factory=dict)
    seen_up: frozenset[str] = frozenset()
    errors: Mapping[str, tuple[tuple[float, int], ...]] = field(default_factory=dict)
    """Readings of a card's count within the window, the oldest first."""
    kills: tuple[tuple[float, int], ...] = ()
    low_since: float | None = None
    waits: Mapping[str, DiskWait] = field(default_factory=dict)
    """By path."""
    faults: tuple[NodeFault, ...] = ()


def judge(before: NodeHealth, facts: NodeFacts) -> NodeHealth:
    """Return what is wrong with the node after one more reading.

    Args:
        before: what the last call returned; a fresh one at first.
        facts: a reading, later than the one before.

    Returns:
        What to remember and the faults, GPUs first.
    """
    now = facts.at
    told = {(gpu.index, xid): now for gpu in facts.gpus for xid in gpu.xids}
    xids = {key: at for key, at in {**before.xids, **told}.items() if now - at < XID_SECONDS}
    slowed = {gpu.index: before.slowed_since.get(gpu.index, now) for gpu in facts.gpus if gpu.slowed_by}
    errors = {link.name: _window(before.errors.get(link.name, ()), now, link.error_count) for link in facts.links}
    kills = _window(before.kills, now, facts.kill_count) if facts.kill_count is not None else ()
    is_low = facts.memory_available_bytes < LOW_MEMORY_SHARE * facts.memory_total_bytes
    low_since = (now if before.low_since is None else before.low_since) if is_low else None
    waits = {
        disk.path: _wait(before.waits.get(disk.path), disk.queue, now) for disk in facts.disks if disk.queue is not None
    }
    stuck = {path for path, wait in waits.items() if wait.is_stuck(now)}
    seen_up = before.seen_up | {link.name for link in facts.links if link.is_up}
    faults = (
        *_of_gpus(facts.gpus, xids, {index for index, since in slowed.items() if now - since >= THROTTLED_SECONDS}),
        *_of_links(facts.links, seen_up, errors),
        *(fault for disk in facts.disks for fault in _of_disk(disk, is_stuck=disk.path in stuck)),
        *_of_memory(is_low=low_since is not None and now - low_since >= LOW_SECONDS, kill_count=_grown(kills)),
    )
    return NodeHealth(
        xids=xids,
        slowed_since=slowed,
        seen_up=seen_up,
        errors=errors,
        kills=kills,
        low_since=low_since,
        waits=waits,
        faults=faults,
    )


def _of_gpus(gpus: Sequence[GpuFacts], xids: Mapping[tuple[int, int], float], slowed: set[int]) -> list[NodeFault]:
    faults = []
    for gpu in gpus:
        device = f"gpu {gpu.index}"
        name = f"{device} ({gpu.name})" if gpu.name else device
        if gpu.is_lost:
            faults.append(_fault(FaultCode.GPU_LOST, f"the driver cannot reach {name} any more", device))
        for index, xid in sorted(xids):
            if index == gpu.index:
                faults.append(
                    NodeFault(
                        code=FaultCode.GPU_XID, message=f"{name}: Xid {xid}", is_permanent=False, device=device, xid=xid
                    )
                )
        if gpu.ecc_uncorrectable:
            faults.append(
                _fault(
                    FaultCode.GPU_ECC,
                    f"{name}: {gpu.ecc_uncorrectable} uncorrectable memory errors since the driver was loaded",
                    device,
                )
            )
        if gpu.is_remapping_failed:
            faults.append(_fault(FaultCode.GPU_ECC, f"{name}: broken memory rows can be replaced no more", device))
        if gpu.index in slowed:
            faults.append(_fault(FaultCode.GPU_THROTTLED, f"{name} is slowed down: {', '.join(gpu.slowed_by)}", device))
    return faults


def _of_links(
    links: Sequence[LinkFacts], seen_up: frozenset[str], errors: Mapping[str, tuple[tuple[float, int], ...]]
) -> list[NodeFault]:
    faults = []
    for link in links:
        if not link.is_up and link.name in seen_up:
            faults.append(_fault(FaultCode.NIC_DOWN, f"network card {link.name} was up and is down", link.name))
        if _grown(errors[link.name]) >= NIC_ERRORS:
            words = f"network card {link.name} has counted {NIC_ERRORS} errors or more within {WINDOW_SECONDS:g} s"
            faults.append(_fault(FaultCode.NIC_ERRORS, words, link.name))
    return faults


def _wait(before: DiskWait | None, queue: DiskQueue, now: float) -> DiskWait:
    """Return how long a volume has finished nothing: a request that waits at two readings between which none was finished has waited all the time."""
    finished, waiting = queue.finished_count, queue.waiting_count
    least = before.least_waiting if before is not None else None
    if least is not None or waiting == 0 or (before is not None and before.finished_count != finished):
        least = waiting if least is None else min(least, waiting)
    if waiting <= (least or 0):
        return DiskWait(finished_count=finished, least_waiting=least, since=None)
    has_stood = before is not None and before.since is not None and before.finished_count == finished
    return DiskWait(
        finished_count=finished, least_waiting=least, since=before.since if before is not None and has_stood else now
    )


def _of_disk(disk: DiskFacts, *, is_stuck: bool) -> list[NodeFault]:
    if is_stuck:
        words = f"the disk below {disk.path} has finished none of its requests for {DEVICE_SILENT_SECONDS:g} s"
        return [_fault(FaultCode.DISK_SILENT, words, disk.path)]
    if disk.is_read_only:
        return [
            _fault(
                FaultCode.DISK_READ_ONLY, f"{disk.path} can only be read: the kernel has taken it out of use", disk.path
            )
        ]
    if disk.free_bytes < disk.least_bytes:
        return [_fault(FaultCode.DISK_FULL, f"less than {disk.least_bytes:,} bytes are free on {disk.path}", disk.path)]
    return []


def _of_memory(*, is_low: bool, kill_count: int) -> list[NodeFault]:
    faults = []
    if is_low:
        faults.append(
            _fault(
                FaultCode.MEMORY_LOW,
                f"less than {LOW_MEMORY_SHARE:.0%} of the node's memory can be allocated",
                "memory",
            )
        )
    if kill_count > 0:
        words = f"the kernel has ended a process for want of memory within the last {WINDOW_SECONDS:g} s"
        faults.append(_fault(FaultCode.MEMORY_KILLED, words, "memory"))
    return faults


def _fault(code: FaultCode, message: str, device: str) -> NodeFault:
    return NodeFault(code=code, message=message, is_permanent=False, device=device)


def _window(before: tuple[tuple[float, int], ...], now: float, count: int) -> tuple[tuple[float, int], ...]:
    """Return the readings of the last `WINDOW_SECONDS`; a counter that went back has begun anew."""
    kept = before if not before or before[-1][1] <= count else ()
    return (*((at, seen) for at, seen in kept if now - at <= WINDOW_SECONDS), (now, count))


def _grown(readings: tuple[tuple[float, int], ...]) -> int:
    return readings[-1][1] - readings[0][1] if readings else 0
