"""Command of the GPU benchmark: `make bench-device`.

    python -m benchmarks.device [--quick] [--only PART …] [--gib 8] [--rounds 8] [--layers 16 --width 1024 …]

With `--only`, the page keeps the other parts' values of an earlier run on the same device with the same sizes and
revision. The parts can thus run one by one on a machine that is available for a short time only.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import command
from benchmarks.command import Begun
from benchmarks.device import report
from benchmarks.device.parts import GIB, GPT, PARTS, QUICK, Sizes, probe, run_part
from benchmarks.device.report import Outcome
from benchmarks.errors import BenchmarkFailed

CUDA = "cuda"
MODEL = ("layers", "width", "heads", "context", "batch", "accumulate", "warm_up", "block_steps", "verified_steps")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, write its page of results, and return the exit code."""
    return command.run(report.PAGE, measure, argv, parts=PARTS, options=options, needs_quiet=False)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gib", type=float, help="GiB of the state that is captured and restored; default: 8")
    for name in MODEL:
        default = getattr(Sizes(), name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=f"size of the GPT's part; default: {default}")
    parser.add_argument("--rounds", type=int, help=f"captures and restores of each kind; default: {Sizes().rounds}")
    parser.add_argument("--order", help="order of the GPT's blocks, A with snapshots, B without; default: ABBA × 4")


def measure(begun: Begun) -> dict[str, Any]:
    """Run the requested parts. The others come from a matching earlier run.

    Raises BenchmarkFailed if there is no device, or a part did not run on it.
    """
    try:
        device = probe()
    except BenchmarkFailed as error:
        raise BenchmarkFailed(
            f"there is no device to measure: {error}. Use a machine with an NVIDIA GPU, its driver and a torch that "
            "was built for CUDA"
        ) from error
    begun.say(f"{device['name']}, driver {device['driver']}, torch {device['torch']}")
    sizes = sizes_of(begun.arguments)
    outcomes = report.earlier(begun.results, device, sizes, begun.machine, is_quick=begun.is_quick)
    found = {"device": device, "sizes": sizes, "outcomes": outcomes}
    for part in begun.parts:
        outcome = attempt(part, lambda name: run_one(name, sizes, begun.home, begun.say), begun.say)
        if outcome.found is not None and outcome.found.get("device") != CUDA:
            raise BenchmarkFailed(f"the part {part} ran on {outcome.found.get('device')}, not on a GPU")
        outcomes[part] = outcome
        # Write the page after each part, because a later part may crash this process.
        begun.write(report.PAGE, found)
    return found


def sizes_of(arguments: argparse.Namespace) -> Sizes:
    """Return the sizes and repetitions of the command line."""
    given = {name: value for name in (*MODEL, "rounds", "order") if (value := getattr(arguments, name)) is not None}
    if arguments.gib is not None:
        given["state_bytes"] = round(arguments.gib * GIB)
    return dataclasses.replace(QUICK if arguments.quick else Sizes(), **given)


def attempt(part: str, work: Callable[[str], dict[str, Any]], say: Callable[[str], None]) -> Outcome:
    """Run one part and return its outcome, also of an exception, so that the other parts still run."""
    at, begun = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", time.monotonic()
    say(f"part {part}")
    try:
        found, failure = work(part), ""
    except Exception as error:  # An exception in one part of the benchmark must not prevent the others.
        found, failure = None, str(error) if isinstance(error, BenchmarkFailed) else f"{type(error).__name__}: {error}"
        say(f"  part {part} failed: {failure}")
    return Outcome(found=found, failure=failure, at=at, seconds=time.monotonic() - begun)


def run_one(part: str, sizes: Sizes, home: Path, say: Callable[[str], None], *, device: str = CUDA) -> dict[str, Any]:
    """Run one part, and return its measurements.

    `home` is emptied first. `device` `cpu` tests the benchmark's own code.
    """
    folder = home / part
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if part != GPT:
        return run_part(part, sizes, folder, device=device)
    # Import the module here, because only the part `gpt` needs the local cloud.
    from benchmarks.device import gpt

    return gpt.measure(folder, sizes, device=device, say=say)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
