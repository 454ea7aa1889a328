"""Start of every harness: a check of the machine's load, a clock, and a SIGTERM handler.

SIGTERM raises SystemExit, so that context managers end the processes that the harness started.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.machine import Machine
from benchmarks.measures import BUSY_LOAD_RATIO, is_busy

LOOK_SECONDS = 5.0
MOST_LOOKS = 36
"""Load checks before a patient run starts on a busy machine.

The checks take three minutes. In this time, a load average of 8 per core decays below the limit.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A started benchmark run with its start time."""

    machine: Machine
    at: float
    """Monotonic time of the start."""

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.at

    def say(self, text: str) -> None:
        """Print a line with the seconds since the start."""
        print(f"{self.seconds:6.1f} s  {text}", flush=True)


def pause(seconds: float) -> None:
    """Wait between two polls of a state that sends no event."""
    threading.Event().wait(seconds)


def begin(*, is_patient: bool = False, wait: Callable[[float], object] = pause) -> Begun:
    """Start a run. The main thread calls this once, before it starts any process.

    Args:
        is_patient: wait up to three minutes until the load average of earlier work has decayed, because measurements
            on a busy machine do not count.
        wait: waits for a number of seconds.

    Returns:
        The run.
    """
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    machine = Machine.observe()
    if is_patient and _is_busy(machine):
        limit = BUSY_LOAD_RATIO * machine.cores
        print(
            f"the load is {machine.load_average[0]:.2f}: waiting until it is {limit:.2f}, "
            f"{MOST_LOOKS * LOOK_SECONDS:.0f} s at most",
            flush=True,
        )
        for _ in range(MOST_LOOKS):
            wait(LOOK_SECONDS)
            machine = Machine.observe()
            if not _is_busy(machine):
                break
    return Begun(machine=machine, at=time.monotonic())


def _is_busy(machine: Machine) -> bool:
    return is_busy(machine.load_average[0], machine.cores)
