"""How commands show their results, and how they end.

exit code   meaning
0           done; for `jobs wait`: the job is Completed
1           it did not work out: the job ended another way, there is nothing to download, a transfer broke
2           the command, its configuration or the request is wrong
130         interrupted
254         the service refuses, or does not answer; the error names its code
255         what was waited for has not come in time

The last two are the AWS CLI's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from everstep.cli import tables
from everstep.cli.tables import Columns
from everstep.cli.terminal import safe, safe_cell
from everstep.errors import ConfigurationError, EverstepError, ServiceFailed, SourceRefused, WaitTimedOut

Json = Mapping[str, Any]
"""What the service answers."""
PIPE_WIDTH = 240
"""Columns where stdout is not a terminal: nothing is cut."""

FAILED, WRONG, SERVICE_FAILED, TIMED_OUT = 1, 2, 254, 255
_THE_CALLERS = (
    "ValidationException",
    "ResourceNotFoundException",
    "AccessDeniedException",
    "ConflictException",
    "ThrottlingException",
)
"""What the service's log need not be asked about."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A table."""

    rows: Sequence[Json]
    columns: Columns
    empty: str
    """What to say, on stderr, when there are no rows."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Names and values, one a line; values that are None are left out."""

    facts: Sequence[tuple[str, Any]]


Part = str | Rows | Facts
"""Of what a person sees of an answer; text is a line."""


def show(person: Part | Sequence[Part]) -> None:
    """Print what a person sees of an answer to stdout."""
    for part in (person,) if isinstance(person, (str, Rows, Facts)) else person:
        if isinstance(part, Facts):
            show_cells(
                (), [[name, str(value)] for name, value in part.facts if value is not None], is_first_a_name=True
            )
        elif isinstance(part, Rows) and part.rows:
            for line in tables.lines(tables.cells_of(part.rows, part.columns), part.columns, _table_width()):
                stdout().print(line, soft_wrap=True)
        elif isinstance(part, Rows):
            say(part.empty)
        else:
            echo(part)


def _table_width() -> int | None:
    """Return how many columns a table may take: those of the terminal, or of the variable COLUMNS; None: no limit."""
    return stdout().width if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit() else None


class _Pipe(Console):
    """A console that says when nobody reads it any more, instead of ending the process as a failure."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def stdout() -> Console:
    """Return a console on stdout as it is now."""
    return _Pipe(
        width=None if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit() else PIPE_WIDTH,
        highlight=False,
        soft_wrap=False,
    )


def stderr() -> Console:
    """Return a console on stderr as it is now."""
    return Console(stderr=True, width=None if sys.stderr.isatty() else PIPE_WIDTH, highlight=False)


def show_cells(headings: Sequence[str], cells: Sequence[Sequence[str]], *, is_first_a_name: bool = False) -> None:
    """Print rows to stdout; nothing where there are none.

    Args:
        headings: of the columns; none where they have none.
        cells: by row.
        is_first_a_name: the first column says what the others are.
    """
    if not cells:
        return
    table = Table(box=None, pad_edge=False, header_style="bold", show_header=bool(headings))
    for number, heading in enumerate(headings or [""] * max(len(row) for row in cells)):
        is_name = is_first_a_name and number == 0
        table.add_column(heading, overflow="fold", style="bold" if is_name else "", no_wrap=is_name)
    for row in cells:
        table.add_row(*map(cell, row))
    stdout().print(table)


def cell(text: str, style: str = "") -> Text:
    """Return a cell of a table: text that is neither markup nor a control sequence, whoever wrote it."""
    return Text(safe_cell(text), style=style)


def echo(text: str, *, err: bool = False) -> None:
    """Print text, which may have colors of its own, to stdout or stderr."""
    typer.echo(safe(text), err=err)


def leave_stdout() -> None:
    """Let go of stdout: whoever read us has seen enough.

    Without this Python complains once more when it flushes at exit.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say(text: str) -> None:
    """Print a line for the person at the terminal, to stderr."""
    stderr().print(Text(safe_cell(text)), soft_wrap=True)


def when(time: datetime | None) -> str:
    """Return a time of the service as people write it, in UTC; empty for none."""
    return "" if time is None else time.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")


def moment(time: datetime | None) -> str | None:
    """Return a time as a fact of its own, with its zone; None for none."""
    return None if time is None else f"{when(time)} UTC"


def seconds(value: float | None) -> str:
    """Return a duration with one digit after the point; a dash for none."""
    return "-" if value is None else f"{value:.1f}"


def step(value: int | None) -> str:
    """Return a step; a dash where there is none yet."""
    return "-" if value is None or value < 0 else str(value)


def condition_words(shown: Json) -> str | None:
    """Return what is wrong now with a job or a node, one line each; None while nothing is."""
    lines = (
        f"{each['Type']}{' on ' + each['NodeId'] if 'NodeId' in each else ''}: {each['Message']}"
        for each in shown.get("Conditions", [])
    )
    return "\n".join(lines) or None


def size(count: int) -> str:
    """Return a number of bytes as people read it."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def pairs(option: str, given: Sequence[str]) -> dict[str, str]:
    """Return options of the form `name=value` as a dictionary.

    Args:
        option: its name, for the error.
        given: what the user wrote.

    Returns:
        Values by name.

    Raises:
        typer.BadParameter: there is no `=`, no name, or a name twice.
    """
    found: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"{text!r} is not of the form name=value.", param_hint=option)
        if name in found:
            raise typer.BadParameter(f"{name!r} is given twice.", param_hint=option)
        found[name] = value
    return found


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """Return a number of things in words, as `1 node` and `2 nodes`."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def copies_of_shards(copies: int) -> str:
    """Return how many copies of every shard a job keeps."""
    return f"{counted(copies, 'copy', 'copies')} of every shard"


def duration(value: float) -> str:
    """Return seconds as people say them: `42 s`, `12 min 05 s`, `3 h 20 min`, `2 d 4 h`."""
    whole = max(0, round(value))
    days, hours, minutes = whole // 86_400, whole % 86_400 // 3600, whole % 3600 // 60
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {whole % 60:02} s" if minutes else f"{whole} s"


def without_none(**fields: Any) -> Any:
    """Return the fields that have a value."""
    return {name: value for name, value in fields.items() if value is not None}


def colored(text: str, color: str) -> str:
    """Return text in a color, where people want colors (https://no-color.org); a pipe loses them when it is printed."""
    return text if os.environ.get("NO_COLOR") else typer.style(text, fg=color)


def tell(error: EverstepError) -> int:
    """Print an error as one clear line with its hint, and return the exit code."""
    console = stderr()
    code = f" ({error.code})" if isinstance(error, ServiceFailed) and error.code else ""
    console.print(Text.assemble(("error:", "bold red"), f" {safe_cell(error.message + code)}"), soft_wrap=True)
    if error.hint:
        console.print(Text(safe_cell(f"hint: {error.hint}")), soft_wrap=True)
    if isinstance(error, ServiceFailed) and error.request_id and not error.code.endswith(_THE_CALLERS):
        console.print(Text(safe_cell(f"request id: {error.request_id}")), soft_wrap=True)
    return exit_code(error)


def exit_code(error: EverstepError) -> int:
    """Return the exit code of an error."""
    if isinstance(error, WaitTimedOut):
        return TIMED_OUT
    if isinstance(error, ServiceFailed):
        return WRONG if error.code == "ValidationException" else SERVICE_FAILED
    return WRONG if isinstance(error, (ConfigurationError, SourceRefused)) else FAILED
