"""What the harnesses' documents have in common: tables, what makes a run worth nothing, and sections of docs/benchmarks.md between two markers. Pure.

Invariant: a harness renews its own section; what stands around it is not touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.machine import Machine
from benchmarks.measures import BUSY_LOAD_RATIO, is_busy

TITLE = "# Benchmarks\n"


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


def caveats(machine: Machine, *, is_quick: bool) -> list[str]:
    """Return the lines that say why a run measured nothing, each behind an empty one."""
    lines = ["", "**This was a quick run with few samples: it tries the harness and measures nothing.**"] if is_quick else []
    if is_busy(machine.load_average[0], machine.cores):
        lines += ["", f"**The machine was busy with other work when the run began (more than {BUSY_LOAD_RATIO} per core): run it again.**"]
    return lines
