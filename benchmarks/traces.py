"""Reads traces: files in which ranks record their boundaries (`scripts/traced.py`). Only `read_trace` does I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Passed:
    """One finished step in a rank's trace."""

    generation: int
    step: int
    at: float
    """Monotonic seconds."""
    snapshots: int = 0
    """Snapshots since the start of the process, if recorded."""


def read_trace(directory: Path, ranks: int) -> list[list[Passed]]:
    """Return the steps in each rank's trace file, without an incomplete last line."""
    return [parse((directory / f"rank{rank}").read_text()) for rank in range(ranks)]


def parse(text: str) -> list[Passed]:
    """Return the steps in a trace, in order."""
    return [
        Passed(int(generation), int(step), float(at), *map(int, snapshots))
        for generation, step, at, *snapshots in whole_rows(text)
    ]


def whole_rows(text: str) -> list[list[str]]:
    """Return the fields of each complete line."""
    return [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]


def step_seconds(passed: Sequence[Passed]) -> list[float]:
    """Return the seconds between ends of consecutive steps of a generation."""
    return [later.at - earlier.at for earlier, later in pairwise(passed) if later.generation == earlier.generation]


def highest_step(ranks: Iterable[Sequence[Passed]], generation: int) -> int:
    """Return the highest step of any rank up to this generation; 0 without one."""
    return max((each.step for passed in ranks for each in passed if each.generation <= generation), default=0)


def first_beyond(ranks: Iterable[Sequence[Passed]], generation: int, step: int) -> float | None:
    """Return when every rank had finished a step after `step` in a later generation, or None."""
    firsts = [
        min((each.at for each in passed if each.generation > generation and each.step > step), default=None)
        for passed in ranks
    ]
    known = [at for at in firsts if at is not None]
    return max(known) if known and len(known) == len(firsts) else None
