"""Common parts of the harnesses' reports. Pure except for `write_figures`.

The module writes the JSON file of measured values, the head of a page, tables, and sections of docs/benchmarks.md
between two markers. It also checks for a busy machine.

Invariant: every page names the command that wrote it and its JSON file. A harness replaces only its own section.
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
    """Facts that every benchmark run has. Each benchmark's subclass adds its measured values."""

    machine: Machine
    is_quick: bool
    seconds: float

    @property
    def is_busy(self) -> bool:
        """Whether the machine was busy at the start, so that all values are inconclusive."""
        return is_busy(self.machine.load_average[0], self.machine.cores)

    def with_found(self, **found: object) -> dict[str, object]:
        """Return the content of the JSON file: the run's facts and its results."""
        return {
            "machine": dataclasses.asdict(self.machine),
            "is_quick": self.is_quick,
            "seconds": self.seconds,
            **found,
        }


class Judged(Protocol):
    """Protocol of a row (a dataclass) with a limit."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def is_inconclusive(self) -> bool:
        """Whether the value permits no verdict."""
        ...

    @property
    def falls_short(self) -> bool:
        """Whether the value misses its limit."""
        ...


JudgedRow = TypeVar("JudgedRow", bound=Judged)


def unless_busy(run: BenchmarkRun, rows: Iterable[JudgedRow]) -> list[JudgedRow]:
    """Return a run's rows, all marked inconclusive if the machine was busy."""
    return [dataclasses.replace(row, is_inconclusive=True) if run.is_busy else row for row in rows]


def verdict(row: Judged) -> str:
    """Return a row's verdict as text for tables."""
    if row.is_inconclusive:
        return "inconclusive"
    return "**falls short**" if row.falls_short else "pass"


def judged(rows: Iterable[Judged]) -> list[dict[str, object]]:
    """Return rows with their verdicts for the JSON file."""
    return [dataclasses.asdict(row) | {"falls_short": row.falls_short} for row in rows]


def write_figures(path: Path, content: object) -> None:
    """Write a JSON file of measured values; create its folder.

    Args:
        path: path of the JSON file.
        content: values that JSON can represent.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def opening(run: BenchmarkRun, title: str, command: str, figures: str, *, preface: str = "") -> list[str]:
    """Return the first lines of a page or section, up to the list of machine and method.

    Args:
        run: the run.
        title: heading with its number signs.
        command: the command that writes the page, such as `make bench-first`.
        figures: name of the JSON file.
        preface: text at the start of the first paragraph, with a space at its end.

    Returns:
        Lines; the last line is empty.
    """
    return [
        title,
        "",
        f"{preface}Written by `{command}` ({run.seconds:.0f} s); every figure is in `.everstep/bench/{figures}`.",
        "",
    ]


def with_section(document: str, command: str, section: str) -> str:
    """Return a document with one section replaced, or appended if it is missing.

    Args:
        document: Markdown; empty for a new document.
        command: the command that writes the section, such as `make bench-first`.
        section: new content.

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
    """Return lines that say why a run does not count, each after an empty line.

    Args:
        machine: the machine at the start of the run.
        is_quick: whether the run was a quick one.
        quick: text for a quick run.
        busy: text for a busy machine.

    Returns:
        Lines; none for a run that counts.
    """
    lines = ["", f"**{quick}**"] if is_quick else []
    if is_busy(machine.load_average[0], machine.cores):
        lines += ["", f"**{busy}**"]
    return lines
