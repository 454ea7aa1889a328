"""What the harnesses' reports have in common: the file of figures, how a page begins, what makes a run worth nothing, tables, and sections of
docs/benchmarks.md between two markers. Pure but for `write_figures`.

Invariant: every page says which command wrote it and where its figures are; a harness renews its own section, what
stands around it is not touched.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import Field, dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from benchmarks.machine import Machine
from benchmarks.measures import BUSY_LOAD_RATIO, is_busy

TITLE = "# Benchmarks\n"
QUICK = "This was a quick run with few samples: it tries the harness and measures nothing."
BUSY = f"The machine was busy with other work when the run began (more than {BUSY_LOAD_RATIO} per core)"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkRun:
    """What every run of a benchmark is known by; each adds what it measured."""

    machine: Machine
    is_quick: bool
    seconds: float

    @property
    def is_busy(self) -> bool:
        """The machine had other work when it began: nothing that it measured was reached, and nothing missed."""
        return is_busy(self.machine.load_average[0], self.machine.cores)

    def with_found(self, **found: object) -> dict[str, object]:
        """Return what the file of figures says of the run, and what was found in it."""
        return {
            "machine": dataclasses.asdict(self.machine),
            "is_quick": self.is_quick,
            "seconds": self.seconds,
            **found,
        }


class Judged(Protocol):
    """A row, a dataclass, of what was to be reached."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def is_inconclusive(self) -> bool:
        """What was measured says neither that it was reached nor that it was not."""
        ...

    @property
    def falls_short(self) -> bool:
        """It was not reached."""
        ...


JudgedRow = TypeVar("JudgedRow", bound=Judged)


def unless_busy(run: BenchmarkRun, rows: Iterable[JudgedRow]) -> list[JudgedRow]:
    """Return the rows of a run; where the machine was busy all of them are inconclusive."""
    return [dataclasses.replace(row, is_inconclusive=True) if run.is_busy else row for row in rows]


def verdict(row: Judged) -> str:
    """Return a row's verdict, as tables say it."""
    if row.is_inconclusive:
        return "inconclusive"
    return "**falls short**" if row.falls_short else "pass"


def judged(rows: Iterable[Judged]) -> list[dict[str, object]]:
    """Return rows for the file of figures, each with its verdict."""
    return [dataclasses.asdict(row) | {"falls_short": row.falls_short} for row in rows]


def write_figures(path: Path, content: object) -> None:
    """Write a file of figures, and the folder that it lies in.

    Args:
        path: the JSON file.
        content: of plain values.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def opening(run: BenchmarkRun, title: str, command: str, figures: str, *, preface: str = "") -> list[str]:
    """Return the lines that a page or a section begins with; the list of what it was measured on and how comes next.

    Args:
        run: what is told of.
        title: with its number signs.
        command: that writes the page, such as `make bench-first`.
        figures: name of the JSON file.
        preface: what stands before the rest in the same paragraph, with its last space.

    Returns:
        Lines, the last one empty.
    """
    return [
        title,
        "",
        f"{preface}Written by `{command}` ({run.seconds:.0f} s); every figure is in `.everstep/bench/{figures}`.",
        "",
    ]


def with_section(document: str, command: str, section: str) -> str:
    """Return a document with one section renewed, or appended where it had none.

    Args:
        document: Markdown; empty for a new one.
        command: that writes the section, such as `make bench-first`.
        section: its new content.

    Returns:
        The document.
    """
    begin, end = f"<!-- {command}: begin -->", f"<!-- {command}: end -->"
    whole = f"{begin}\n{section.strip()}\n{end}"
    if begin in document and end in document:
        return document[: document.index(begin)] + whole + document[document.index(end) + len(end) :]
    return f"{(document or TITLE).rstrip()}\n\n{whole}\n"


def table(head: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    titles = tuple(head)
    return "\n".join("| " + " | ".join(line) + " |" for line in (titles, ("---",) * len(titles), *rows))


def caveats(machine: Machine, *, is_quick: bool, quick: str = QUICK, busy: str = f"{BUSY}: run it again.") -> list[str]:
    """Return the lines that say why a run measured nothing, each behind an empty one.

    Args:
        machine: as it was when the run began.
        is_quick: it was a quick one.
        quick: what is said of that.
        busy: what is said where the machine had other work.

    Returns:
        Lines; none of a run that counts.
    """
    lines = ["", f"**{quick}**"] if is_quick else []
    if is_busy(machine.load_average[0], machine.cores):
        lines += ["", f"**{busy}**"]
    return lines
