"""Command of the parity benchmark: `make bench-parity`. `benchmarks.command` documents options and exit codes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import command
from benchmarks.command import Begun
from benchmarks.parity import group, xor
from benchmarks.parity.report import MIB, NAMES, PAGE

STATE_MIB, QUICK_MIB = 128, 64
STEPS, QUICK_STEPS = 11, 2
"""Steps of each group, the first of which creates the slots and is not counted."""
GROUPS = 3
SHARED_MEMORY = "/dev/shm"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, write its page of results, and return the exit code."""
    return command.run(PAGE, measure, argv)


def measure(begun: Begun) -> dict[str, Any]:
    """Measure groups with two copies and with parity in turn, then the XOR of chunks."""
    groups = []
    for _ in range(1 if begun.is_quick else GROUPS):
        for has_parity, name in NAMES.items():
            groups.append(
                asyncio.run(
                    group.measure(
                        has_parity=has_parity,
                        state_bytes=(QUICK_MIB if begun.is_quick else STATE_MIB) * MIB,
                        steps=QUICK_STEPS if begun.is_quick else STEPS,
                    )
                )
            )
            begun.say(f"measured {name}")
    return {"groups": groups, "xors": xor.times()}


if __name__ == "__main__":
    sys.exit(main())
