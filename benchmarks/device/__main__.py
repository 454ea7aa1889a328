"""Command of the GPU benchmark: `make bench-device`.

    python -m benchmarks.device [--quick] [--only PART …] [--gib 8] [--layers 16 --width 1024 …]

With `--only`, the report keeps the other parts' values of an earlier run on the same device. The parts can therefore
run one by one on a machine that is available for a short time only. Exit code 0: every row passes or is inconclusive.
1: a row misses its limit. 2: there is no device, and nothing is reported.
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

from benchmarks.begin import begin
from benchmarks.device import report
from benchmarks.device.parts import GIB, GPT, PARTS, QUICK, ROOT, Sizes, probe, run_part
from benchmarks.device.report import Outcome
from benchmarks.errors import BenchmarkFailed

HOME = ROOT / ".everstep" / "bench"
CUDA = "cuda"
MODEL = ("layers", "width", "heads", "context", "batch", "accumulate", "warm_up", "block_steps", "verified_steps")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, write the report, and return the exit code."""
    arguments = parse(argv)
    begun = begin()
    say = begun.say
    try:
        device = probe()
    except BenchmarkFailed as error:
        print(
            f"there is no device to measure: {error}; run it on a machine with an NVIDIA GPU, its driver and a "
            "torch built for CUDA",
            file=sys.stderr,
        )
        return 2
    machine = begun.machine
    say(
        f"{device['name']}, driver {device['driver']}, torch {device['torch']}; load average "
        f"{machine.load_average[0]:.2f} on {machine.cores} cores"
    )
    outcomes = report.earlier(arguments.json, device, is_quick=arguments.quick)
    for part in arguments.only:
        outcomes[part] = attempt(part, lambda name: measure(name, sizes_of(arguments), HOME / "device", say), say)
        run = report.Run(machine=machine, device=device, outcomes=outcomes, is_quick=arguments.quick)
        # Write after each part, because a later part may crash this process.
        report.write(run, arguments.json, arguments.document)
    say(f"written: {arguments.json} and {arguments.document}")
    for row in run.rows:
        print(report.line(row))
    return 1 if run.falls_short else 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.device", description="Capture, restore and every-step snapshots on a GPU."
    )
    parser.add_argument(
        "--quick", action="store_true", help="small and few, to try the harness on the device; no judged figures"
    )
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=list(PARTS), help="leave the others as an earlier run left them"
    )
    parser.add_argument("--gib", type=float, help="of the state that is captured and restored; 8")
    for name in MODEL:
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=int, help=f"of the GPT's part; {getattr(Sizes(), name)}"
        )
    parser.add_argument("--order", help="of the GPT's blocks, A with snapshots, B without; ABBA four times")
    parser.add_argument("--json", type=Path, default=HOME / "device.json", help="where the figures go")
    parser.add_argument(
        "--document", type=Path, help="where the tables go; docs/benchmarks-device.md, or with --quick a draft"
    )
    arguments = parser.parse_args(argv)
    if arguments.document is None:
        arguments.document = HOME / "device_quick.md" if arguments.quick else ROOT / "docs" / "benchmarks-device.md"
    return arguments


def sizes_of(arguments: argparse.Namespace) -> Sizes:
    """Return the sizes and counts of a run, as the command line requests."""
    given = {name: value for name in (*MODEL, "order") if (value := getattr(arguments, name)) is not None}
    if arguments.gib is not None:
        given["state_bytes"] = round(arguments.gib * GIB)
    return dataclasses.replace(QUICK if arguments.quick else Sizes(), **given)


def attempt(part: str, work: Callable[[str], dict[str, Any]], say: Callable[[str], None]) -> Outcome:
    """Run a part and return its outcome. An exception becomes the outcome of this part only.

    Args:
        part: name of the part.
        work: runs the part.
        say: receives progress messages.
    """
    at, begun = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", time.monotonic()
    say(f"part {part}")
    try:
        found, failure = work(part), ""
    except Exception as error:  # any exception fails only this part
        found, failure = None, str(error) if isinstance(error, BenchmarkFailed) else f"{type(error).__name__}: {error}"
        say(f"  part {part} failed: {failure}")
    return Outcome(found=found, failure=failure, at=at, seconds=time.monotonic() - begun)


def measure(part: str, sizes: Sizes, home: Path, say: Callable[[str], None], *, device: str = CUDA) -> dict[str, Any]:
    """Run one part.

    Args:
        part: name of the part.
        sizes: sizes and counts.
        home: folder for the part's output; emptied first.
        say: receives progress messages.
        device: `cuda`; `cpu` tests the harness.
    """
    folder = home / part
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if part != GPT:
        return run_part(part, sizes, folder, device=device)
    from benchmarks.device import gpt  # only this part needs the local cloud and its imports

    return gpt.measure(folder, sizes, device=device, say=say)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
