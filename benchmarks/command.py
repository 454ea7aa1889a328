"""The command line of every benchmark: options, a check of the machine's load, results, page and exit code.

Exit code 0: every row is within its limit or inconclusive. 1: nothing was measured. 2: a row misses its limit. 3: other
programs kept the machine busy, so that no value counts. SIGTERM raises SystemExit, so that context managers end
processes.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.errors import BenchmarkFailed
from benchmarks.machine import ROOT, Machine
from benchmarks.measures import BUSY_LOAD_RATIO, is_busy
from benchmarks.page import BenchmarkRun, Page, write
from benchmarks.rows import exit_code, line
from everstep.errors import EverstepError
from infra.local_cloud.errors import LocalCloudError
from infra.local_cloud.processes import exit_when_asked

HOME = ROOT / ".everstep" / "bench"
LOOK_SECONDS = 5.0
MOST_LOOKS = 36
"""Load checks on a busy machine: three minutes, in which a load of 8 per core decays below `BUSY_LOAD_RATIO`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A benchmark run that has started."""

    machine: Machine
    at: float
    """Monotonic start in seconds."""
    home: Path = HOME
    """Folder for files of the run. Empty at its start."""
    results: Path = HOME / "results.json"
    """Path of the results. Until the end of the run, the file is the previous run's."""
    document: Path = HOME / "page.md"
    """Markdown page."""
    arguments: argparse.Namespace = field(default_factory=argparse.Namespace)

    @property
    def is_quick(self) -> bool:
        """Whether the run takes few samples, to test the benchmark's own code."""
        return bool(self.arguments.quick)

    @property
    def parts(self) -> Sequence[str]:
        """Parts to measure, from `--only`."""
        return list(self.arguments.only)

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.at

    def write(self, page: Page, found: Mapping[str, object]) -> BenchmarkRun:
        """Write the results as JSON and the page as Markdown, and return the results.

        Adds the machine, the duration and `--quick` to `found`, if missing.
        """
        common = {"machine": self.machine, "is_quick": self.is_quick, "seconds": self.seconds}
        measured: BenchmarkRun = page.run(**{**common, **found})
        write(page, measured, self.results, self.document)
        return measured

    def say(self, text: str) -> None:
        """Print a line with the seconds since the start."""
        print(f"{self.seconds:6.1f} s  {text}", flush=True)


def run(
    page: Page,
    measure: Callable[[Begun], Mapping[str, object]],
    argv: Sequence[str] | None = None,
    *,
    parts: Sequence[str] = (),
    options: Callable[[argparse.ArgumentParser], object] = lambda _: None,
    needs_quiet: bool = True,
) -> int:
    """Run a benchmark from its command line, and return the exit code.

    `measure` returns the benchmark's own results, or raises BenchmarkFailed. `parts` are names for `--only`.
    `needs_quiet` waits, without `--quick`, until other programs have stopped using the CPU.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {page.run.__module__.rpartition('.')[0]}")
    parser.add_argument("--quick", action="store_true", help=f"take few samples, and write the page to {HOME}")
    if parts:
        parser.add_argument("--only", nargs="+", choices=parts, default=list(parts), help="measure these parts only")
    parser.add_argument("--json", type=Path, help=f"path of the results; default: {page.results}")
    parser.add_argument("--document", type=Path, help=f"path of the page; default: {page.document}")
    options(parser)
    arguments = parser.parse_args(argv)
    quick = HOME / f"quick-{page.name}"
    home = HOME / page.name
    begun = replace(
        begin(is_patient=needs_quiet and not arguments.quick),
        home=home,
        results=arguments.json or (quick.with_suffix(".json") if arguments.quick else page.results),
        document=arguments.document or (quick.with_suffix(".md") if arguments.quick else page.document),
        arguments=arguments,
    )
    begun.say(f"load average {begun.machine.load_average[0]:.2f} on {begun.machine.cores} cores")
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    try:
        measured = begun.write(page, measure(begun))
    except KeyboardInterrupt:
        return 130
    except (BenchmarkFailed, LocalCloudError, EverstepError, OSError) as error:
        print(f"the benchmark failed: {error}\nlogs: {home}", file=sys.stderr)
        return 1
    begun.say(f"wrote {begun.results} and {begun.document}")
    rows = page.rows(measured)
    for row in rows:
        print(line(row))
    return exit_code(rows, is_busy=measured.is_busy)


def pause(seconds: float) -> None:
    """Wait before the next poll of a state without events."""
    threading.Event().wait(seconds)


def begin(*, is_patient: bool = False, wait: Callable[[float], object] = pause) -> Begun:
    """Start a run, in the main thread, before any process. `is_patient` waits for the load average of earlier work."""
    exit_when_asked(with_parent=False)
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
