"""Derives the faults of a node from readings of its devices: GPUs, network cards, disks and memory.

    gpu_xid          the GPU driver reported an Xid error within the last `XID_SECONDS`
    gpu_ecc          GPU memory lost data since the driver was loaded, or the GPU has no spare memory rows left
    gpu_throttled    a GPU was slowed down for `THROTTLED_SECONDS`, except by power limits and idleness
    gpu_lost         the driver cannot reach a GPU any more
    nic_down         a network card that was up is down
    nic_errors       a network card counted `NIC_ERRORS` errors within `WINDOW_SECONDS`
    disk_read_only   the kernel has remounted the file system read-only, usually after a disk error
    disk_full        less than `DiskFacts.least_bytes` are free
    disk_silent      the disk finished no request for `DEVICE_SILENT_SECONDS` although requests waited;
                     `FIRST_SILENT_SECONDS` for a disk that has not finished any request since the first reading
    memory_low       less than `LOW_MEMORY_SHARE` of the memory was available for `LOW_SECONDS`
    memory_killed    the kernel killed a process for lack of memory within `WINDOW_SECONDS`

Invariant: a fault is reported exactly while it lasts. Its message stays the same meanwhile, because the control plane
processes every changed report at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from everstep.protocol.agent_messages import DEVICE_SILENT_SECONDS, FaultCode, NodeFault

FIRST_SILENT_SECONDS = 60.0
"""Seconds after which a disk that never finished a request counts as silent.

An idle disk's driver may show finished requests as waiting. The kernel writes the agent's first data back after at most
35 s, so a working disk has finished a request by then. Source: Linux, Documentation/admin-guide/sysctl/vm.rst
(dirty_expire_centisecs, dirty_writeback_centisecs).
"""
XID_SECONDS = 600.0
"""Seconds for which an Xid error is reported. Lasting damage is reported as `gpu_lost` or `gpu_ecc`."""
THROTTLED_SECONDS = 10.0
NIC_ERRORS = 100
WINDOW_SECONDS = 60.0
LOW_MEMORY_SHARE = 0.02
LOW_SECONDS = 5.0
"""Minimum duration of a reported shortage. A process that briefly allocates much memory is not a fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """State of one GPU, reported by its driver."""

    index: int
    name: str = ""
    xids: tuple[int, ...] = ()
    """Xid errors since the last reading. A simulated GPU reports its configured errors at every reading."""
    ecc_uncorrectable: int = 0
    is_remapping_failed: bool = False
    slowed_by: tuple[str, ...] = ()
    """Reasons why the GPU's clocks are reduced, except power limits and idleness."""
    is_lost: bool = False
    busy_percent: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFacts:
    """State and error counter of one network card."""

    name: str
    is_up: bool
    error_count: int = 0
    byte_count: int | None = None
    """Bytes sent and received so far; None if the counter cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskQueue:
    """Counters of the I/O requests of one volume."""

    finished_count: int
    waiting_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskWait:
    """Observations of one volume over several readings, which show whether it still finishes requests."""

    finished_count: int
    # Some drivers count finished requests as waiting for ever. Only requests above this minimum count as waiting.
    least_waiting: int | None
    """Lowest number of waiting requests while the volume was idle or made progress; None until it finished one."""
    since: float | None
    """Monotonic time of the last progress while requests waited; None while no request waits."""

    @property
    def limit_seconds(self) -> float:
        """Seconds without a finished request after which the volume counts as silent."""
        return FIRST_SILENT_SECONDS if self.least_waiting is None else DEVICE_SILENT_SECONDS

    def is_stuck(self, now: float) -> bool:
        """Return whether the volume has finished no request for `limit_seconds`, although requests wait."""
        return self.since is not None and now - self.since >= self.limit_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskFacts:
    """State of one file system that this node writes to."""

    path: str
    is_read_only: bool
    free_bytes: int
    least_bytes: int
    queue: DiskQueue | None = None
    """None if the counts cannot be read, or without a local volume."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """The readings of all devices of the node at one time."""

    at: float
    """Monotonic seconds."""
    gpus: tuple[GpuFacts, ...] = ()
    links: tuple[LinkFacts, ...] = ()
    disks: tuple[DiskFacts, ...] = ()
    memory_total_bytes: int = 0
    memory_available_bytes: int = 0
    kill_count: int | None = None
    """Kernel kills for lack of memory so far; None if the counter cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHealth:
    """The current faults of a node's devices, and the earlier readings with which `judge` compares the next ones."""

    xids: Mapping[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])
    """Monotonic time of the last report of each (GPU index, Xid)."""
    slowed_since: Mapping[int, float] = field(default_factory=dict[int, float])
    seen_up: frozenset[str] = frozenset()
    errors: Mapping[str, tuple[tuple[float, int], ...]] = field(
        default_factory=dict[str, tuple[tuple[float, int], ...]]
    )
    """Error counts of each network card within the last `WINDOW_SECONDS`, oldest first, as (time, count)."""
    kills: tuple[tuple[float, int], ...] = ()
    low_since: float | None = None
    waits: Mapping[str, DiskWait] = field(default_factory=dict[str, DiskWait])
    """By the path of the file system."""
    faults: tuple[NodeFault, ...] = ()


def judge(before: NodeHealth, facts: NodeFacts) -> NodeHealth:
    """Return the node's health after one more reading. `before` is the last result, or a new `NodeHealth`."""
    now = facts.at
    new_xids = {(gpu.index, xid): now for gpu in facts.gpus for xid in gpu.xids}
    xids = {key: at for key, at in {**before.xids, **new_xids}.items() if now - at < XID_SECONDS}
    slowed = {gpu.index: before.slowed_since.get(gpu.index, now) for gpu in facts.gpus if gpu.slowed_by}
    errors = {link.name: _window(before.errors.get(link.name, ()), now, link.error_count) for link in facts.links}
    kills = _window(before.kills, now, facts.kill_count) if facts.kill_count is not None else ()
    is_low = facts.memory_available_bytes < LOW_MEMORY_SHARE * facts.memory_total_bytes
    low_since = (now if before.low_since is None else before.low_since) if is_low else None
    waits = {
        disk.path: _wait(before.waits.get(disk.path), disk.queue, now) for disk in facts.disks if disk.queue is not None
    }
    stuck = {path: wait.limit_seconds for path, wait in waits.items() if wait.is_stuck(now)}
    seen_up = before.seen_up | {link.name for link in facts.links if link.is_up}
    faults = (
        *_of_gpus(facts.gpus, xids, {index for index, since in slowed.items() if now - since >= THROTTLED_SECONDS}),
        *_of_links(facts.links, seen_up, errors),
        *(fault for disk in facts.disks for fault in _of_disk(disk, silent_seconds=stuck.get(disk.path))),
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
    faults: list[NodeFault] = []
    for gpu in gpus:
        device = f"gpu {gpu.index}"
        name = f"{device} ({gpu.name})" if gpu.name else device
        if gpu.is_lost:
            faults.append(_fault(FaultCode.GPU_LOST, f"the driver cannot reach {name} any more", device))
        for index, xid in sorted(xids):
            if index == gpu.index:
                faults.append(_fault(FaultCode.GPU_XID, f"{name}: Xid {xid}", device, xid))
        if gpu.ecc_uncorrectable:
            words = f"{name}: {gpu.ecc_uncorrectable} uncorrectable memory errors since the driver was loaded"
            faults.append(_fault(FaultCode.GPU_ECC, words, device))
        if gpu.is_remapping_failed:
            faults.append(_fault(FaultCode.GPU_ECC, f"{name}: broken memory rows can be replaced no more", device))
        if gpu.index in slowed:
            faults.append(_fault(FaultCode.GPU_THROTTLED, f"{name} is slowed down: {', '.join(gpu.slowed_by)}", device))
    return faults


def _of_links(
    links: Sequence[LinkFacts], seen_up: frozenset[str], errors: Mapping[str, tuple[tuple[float, int], ...]]
) -> list[NodeFault]:
    faults: list[NodeFault] = []
    for link in links:
        if not link.is_up and link.name in seen_up:
            faults.append(_fault(FaultCode.NIC_DOWN, f"network card {link.name} was up and is down", link.name))
        if _grown(errors[link.name]) >= NIC_ERRORS:
            words = f"network card {link.name} has counted {NIC_ERRORS} errors or more within {WINDOW_SECONDS:g} s"
            faults.append(_fault(FaultCode.NIC_ERRORS, words, link.name))
    return faults


def _wait(before: DiskWait | None, queue: DiskQueue, now: float) -> DiskWait:
    """Return the observations of a volume after one more reading. A finished request restarts or ends the wait."""
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


def _of_disk(disk: DiskFacts, *, silent_seconds: float | None) -> list[NodeFault]:
    if silent_seconds is not None:
        words = f"the disk below {disk.path} has finished no request for {silent_seconds:g} s"
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
    faults: list[NodeFault] = []
    if is_low:
        words = f"less than {LOW_MEMORY_SHARE:.0%} of the node's memory can be allocated"
        faults.append(_fault(FaultCode.MEMORY_LOW, words, "memory"))
    if kill_count > 0:
        words = f"the kernel has ended a process for want of memory within the last {WINDOW_SECONDS:g} s"
        faults.append(_fault(FaultCode.MEMORY_KILLED, words, "memory"))
    return faults


def _fault(code: FaultCode, message: str, device: str, xid: int | None = None) -> NodeFault:
    return NodeFault(code=code, message=message, is_permanent=False, device=device, xid=xid)


def _window(before: tuple[tuple[float, int], ...], now: float, count: int) -> tuple[tuple[float, int], ...]:
    """Return the readings of an error counter within the last `WINDOW_SECONDS`, with the new reading."""
    # A counter that has decreased was reset.
    kept = before if not before or before[-1][1] <= count else ()
    return (*((at, seen) for at, seen in kept if now - at <= WINDOW_SECONDS), (now, count))


def _grown(readings: tuple[tuple[float, int], ...]) -> int:
    return readings[-1][1] - readings[0][1] if readings else 0
