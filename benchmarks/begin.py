"""How every harness begins: a look at the machine before anything is started, a clock, and an end by SIGTERM that ends what was started, too."""

from __future__ import annotations

import signal
import sys
import time
from dataclasses import dataclass

from benchmarks.machine import Machine


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


def begin() -> Begun:
    """Begin a run. Called once, by the main thread, before anything is started."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    return Begun(machine=Machine.observe(), at=time.monotonic())
