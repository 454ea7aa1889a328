"""Reads traces: files in which ranks record their boundaries with the time of each boundary (`scripts/traced.py`).

Only `read_trace` reads files. All other functions are pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Passed:
    """One finished step of a rank, as the rank recorded it in its trace file."""

    generation: int
    step: int
    at: float
    """Monotonic seconds at which the rank finished the step."""
    snapshots: int = 0
    """Number of snapshots since the start of the rank's process, if the script records them."""


def read_trace(directory: Path, ranks: int) -> list[list[Passed]]:
    """Return the finished steps in each rank's trace file. An incomplete last line is skipped."""
    return [parse((directory / f"rank{rank}").read_text()) for rank in range(ranks)]


def parse(text: str) -> list[Passed]:
    """Return the finished steps in the text of one rank's trace file, in order."""
    return [
        Passed(int(generation), int(step), float(at), *map(int, snapshots))
        for generation, step, at, *snapshots in whole_rows(text)
    ]


def whole_rows(text: str) -> list[list[str]]:
    """Return the fields of each complete line of a rank's trace file, whose content is `text`."""
    return [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]


def step_seconds(passed: Sequence[Passed]) -> list[float]:
    """Return the seconds between each step's end and the next step's end in the same generation."""
    return [later.at - earlier.at for earlier, later in pairwise(passed) if later.generation == earlier.generation]


def highest_step(ranks: Iterable[Sequence[Passed]], generation: int) -> int:
    """Return the highest step that any rank finished in this or an earlier generation; 0 if there is none."""
    return max((each.step for passed in ranks for each in passed if each.generation <= generation), default=0)


def first_beyond(ranks: Iterable[Sequence[Passed]], generation: int, step: int) -> float | None:
    """Return the time at which every rank had finished a later step than `step`, in a later generation.

    Return None if a rank has not finished such a step yet.
    """
    firsts = [
        min((each.at for each in passed if each.generation > generation and each.step > step), default=None)
        for passed in ranks
    ]
    known = [at for at in firsts if at is not None]
    return max(known) if known and len(known) == len(firsts) else None
