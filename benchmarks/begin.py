"""How every harness begins: a look at the machine before anything is started, a clock, and an end by SIGTERM that ends what was started, too."""

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
"""Three minutes: a load of 8 a core that has ended is below the limit by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A run that has begun."""

    machine: Machine
    at: float
    """By the monotonic clock."""

    @property
    def seconds(self) -> float:
        """How long ago that was."""
        return time.monotonic() - self.at

    def say(self, text: str) -> None:
        """Print a line with the time that it comes at, for whoever waits."""
        print(f"{self.seconds:6.1f} s  {text}", flush=True)


def pause(seconds: float) -> None:
    """Let time pass between two looks at something that cannot be waited for."""
    threading.Event().wait(seconds)


def begin(*, is_patient: bool = False, wait: Callable[[float], object] = pause) -> Begun:
    """Begin a run. Called once, by the main thread, before anything is started.

    Args:
        is_patient: what was done here before may fade first, for some minutes at most: figures of a run that began on a
            busy machine are none.
        wait: for so many seconds.

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
