"""The health watch of a node: a thread that reads all devices once per second and reports their faults.

If a driver or disk does not answer, only this thread blocks, and `faults` reports the device as silent. Invariant: the
agent's event loop never waits for a reading. The watch calls the agent only when the faults change.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TypeVar

from everstep.protocol.agent_messages import DEVICE_SILENT_SECONDS, FaultCode, NodeFault
from worker.core.node_health import DiskFacts, NodeFacts, NodeHealth, judge
from worker.core.own_metrics import NodeUsage
from worker.node.health import devices
from worker.node.health.gpus import GpuReader
from worker.node.health.memory import memory_facts, oom_kill_count

log = logging.getLogger(__name__)
PERIOD_SECONDS = 1.0
_BUSY_READINGS = 10
_CLOSE_SECONDS = 1.0
_SILENT = {"gpu": FaultCode.GPU_SILENT, "disk": FaultCode.DISK_SILENT}
"""Fault code for a device that does not answer a read request, by kind of device."""
_T = TypeVar("_T")


@dataclass(eq=False, repr=False)
class HealthWatch:
    """Reads the devices of one node periodically, and reports their faults to the agent.

    The agent calls `start` before all other methods, and `close` after them. The watch closes `gpus`. `close` waits
    `close_seconds` at most for a reading.
    """

    gpus: GpuReader
    _: KW_ONLY
    state: Path
    monotonic: Callable[[], float] = time.monotonic
    period_seconds: float = PERIOD_SECONDS
    close_seconds: float = _CLOSE_SECONDS

    def __post_init__(self) -> None:
        self._health = NodeHealth()
        self._usage = NodeUsage()
        self._busy: dict[int, deque[float]] = {}
        self._asked: tuple[str, float] | None = None
        """The device that the thread is reading now, and the start time of the reading; None between readings."""
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, on_change: Callable[[], None]) -> None:
        """Start the thread, which calls `on_change` whenever the faults have changed."""
        self._thread = threading.Thread(target=self._run, args=(on_change,), name="node health", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. A thread in a hanging driver cannot end, and does not delay the exit of the process."""
        self._ends.set()
        if self._thread is not None:
            self._thread.join(self.close_seconds)

    def faults(self) -> tuple[NodeFault, ...]:
        """Return the current faults of the node's devices, for the agent's reports."""
        asked = self._asked
        if asked is None or self.monotonic() - asked[1] <= DEVICE_SILENT_SECONDS:
            return self._health.faults
        what = asked[0]
        words = f"the {what} has not answered for {DEVICE_SILENT_SECONDS:g} s"
        return (*self._health.faults, NodeFault(code=_SILENT[what], message=words, is_permanent=False, device=what))

    def gpu_percent(self, index: int) -> float | None:
        """Return a GPU's highest load of the last ten readings in percent; None if unknown."""
        return max(self._busy.get(index, ()), default=None)

    def usage(self) -> NodeUsage:
        """Return the use of the devices at the last reading, for charts."""
        return self._usage

    def look(self) -> bool:
        """Read all devices once and derive the faults; return whether the faults have changed."""
        gpus = self._ask("gpu", self.gpus.read)
        for gpu in gpus:
            readings = self._busy.setdefault(gpu.index, deque(maxlen=_BUSY_READINGS))
            if gpu.busy_percent is not None:
                readings.append(gpu.busy_percent)
        disks = self._ask("disk", self._disks)
        memory = memory_facts()
        links = devices.links()
        busy = [gpu.busy_percent for gpu in gpus if gpu.busy_percent is not None]
        moved = [link.byte_count for link in links if link.byte_count is not None]
        self._usage = NodeUsage(
            gpu_percent=sum(busy) / len(busy) if busy else None,
            gpu_least_percent=min(busy, default=None),
            network_bytes=sum(moved) if moved else None,
            memory_total_bytes=memory.total_bytes,
            memory_available_bytes=memory.available_bytes,
            memory_limit_bytes=memory.limit_bytes,
        )
        facts = NodeFacts(
            at=self.monotonic(),
            gpus=gpus,
            links=links,
            disks=disks,
            memory_total_bytes=memory.total_bytes,
            memory_available_bytes=memory.available_bytes,
            kill_count=oom_kill_count(),
        )
        before, self._health = self._health, judge(self._health, facts)
        for fault in self._health.faults:
            if fault not in before.faults:
                log.warning("%s: %s", fault.code, fault.message)
        return self._health.faults != before.faults

    def _run(self, on_change: Callable[[], None]) -> None:
        trouble = ""
        while not self._ends.wait(self.period_seconds):
            try:
                if self.look():
                    on_change()
            except Exception as error:  # An exception in one reading must not end the thread.
                if str(error) != trouble:
                    trouble = str(error)
                    log.exception("the node's health cannot be read")
        self.gpus.close()

    def _ask(self, what: str, question: Callable[[], _T]) -> _T:
        self._asked = (what, self.monotonic())
        try:
            return question()
        finally:
            self._asked = None

    def _disks(self) -> tuple[DiskFacts, ...]:
        found = devices.disk(self.state)
        return () if found is None else (found,)
