"""Prints results and errors of commands, and maps errors to exit codes.

    exit code   meaning
    0           done; for `jobs wait`: the job is Completed
    1           failed: the job ended in another status, there is nothing to download, or a transfer broke
    2           the command, its configuration or the request is wrong
    3           the job completed, and its final checkpoint lies before its last step
    130         interrupted
    254         the service refuses or does not answer; the error contains its code
    255         the time limit of a wait is over

254 and 255 have the same meaning in the AWS CLI.
"""

from __future__ import annotations

import math
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
"""An answer of the service as JSON values."""
_BARS = "▁▂▃▄▅▆▇█"
PIPE_WIDTH = 240
"""Width in columns if stdout is not a terminal; wide enough that nothing is cut."""

FAILED, WRONG, OLDER_CHECKPOINT, SERVICE_FAILED, TIMED_OUT = 1, 2, 3, 254, 255
_THE_CALLERS = (
    "ValidationException",
    "ResourceNotFoundException",
    "AccessDeniedException",
    "ConflictException",
    "ThrottlingException",
)
"""Codes of errors that the caller's own request has caused.

The command prints no request id for these errors, because the service's log contains no further details about them.
"""


@dataclass(frozen=True, slots=True)
class Rows:
    """A table with one row per item."""

    rows: Sequence[Json]
    columns: Columns
    empty: str
    """Text that replaces a table without rows. It goes to stderr."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Names and values, printed as one pair per line. A pair whose value is None is not printed."""

    facts: Sequence[tuple[str, Any]]


Part = str | Rows | Facts
"""One piece of a command's output for people: a table, names and values, or a text that is printed unchanged."""


def show(person: Part | Sequence[Part]) -> None:
    """Print to stdout the parts of a command's output that are meant for people."""
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
    """Return the maximum width of a table, or None for no limit.

    The limit is the width of the terminal or the value of the variable COLUMNS.
    """
    return stdout().width if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit() else None


class _Pipe(Console):
    """A console that raises BrokenPipeError if its reader has closed the pipe. rich itself would exit with code 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def stdout() -> Console:
    """Return a rich console that prints to the current `sys.stdout`."""
    return _Pipe(
        width=None if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit() else PIPE_WIDTH,
        highlight=False,
        soft_wrap=False,
    )


def stderr() -> Console:
    """Return a rich console that prints to the current `sys.stderr`."""
    return Console(stderr=True, width=None if sys.stderr.isatty() else PIPE_WIDTH, highlight=False)


def show_cells(headings: Sequence[str], cells: Sequence[Sequence[str]], *, is_first_a_name: bool = False) -> None:
    """Print a table to stdout, or nothing if there are no rows.

    Args:
        headings: the columns' headings. Empty: the table has no heading line.
        cells: the rows, each a sequence of cells.
        is_first_a_name: whether the first column contains names. Names are bold and never wrapped.
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


def cell(text: str) -> Text:
    """Return text as a table cell. Markup and control sequences in the text have no effect."""
    return Text(safe_cell(text))


def echo(text: str, *, err: bool = False) -> None:
    """Print text to stdout or stderr. Colors in the text are kept, other control sequences are removed."""
    typer.echo(safe(text), err=err)


def leave_stdout() -> None:
    """Redirect stdout to the null device after its reader has closed the pipe.

    Without the redirection, Python would report a second error when it flushes stdout at exit.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say(text: str) -> None:
    """Print a remark for the user to stderr."""
    stderr().print(Text(safe_cell(text)), soft_wrap=True)


def when(time: datetime | None) -> str:
    """Return a time as `2026-03-01 12:00:00` in UTC; empty for None."""
    return "" if time is None else time.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")


def moment(time: datetime | None) -> str | None:
    """Return a time as `2026-03-01 12:00:00 UTC`; None for None."""
    return None if time is None else f"{when(time)} UTC"


def seconds(value: float | None) -> str:
    """Return a duration with one decimal; a dash for None."""
    return "-" if value is None else f"{value:.1f}"


def step(value: int | None) -> str:
    """Return a step number as text; a dash for None and for -1, which mean that there is no step."""
    return "-" if value is None or value < 0 else str(value)


def to_do(action: Mapping[str, Any]) -> str:
    """Return as text what a user can do about an incident or a held node (kept out of use), with commands to run."""
    commands = [action["Command"], *action.get("FurtherCommands", [])]
    return "\n".join((action["Description"], *(f"    {command}" for command in commands)))


def duty_words(described: Json) -> str:
    """Return what a person has to do for a job or fleet, in the service's own sentence. `-` without an answer."""
    return str(described.get("Duty", {}).get("Sentence", "-"))


def condition_words(shown: Json) -> str | None:
    """Return the conditions of a job or a node as text, one line per condition; None without conditions."""
    lines = (
        f"{each['Type']}{' on ' + each['NodeId'] if 'NodeId' in each else ''}: {each['Message']}"
        for each in shown.get("Conditions", [])
    )
    return "\n".join(lines) or None


def size(count: int) -> str:
    """Return a number of bytes with a binary unit, for example `1.5 GiB`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def plot(values: Sequence[float]) -> str:
    """Return one character per value, whose height shows the value between the least and the greatest finite value.

    NaN and infinite values are crosses.
    """
    halves = [value / 2 for value in values]  # the difference of two floats may be infinite, that of their halves not
    finite = [half for half in halves if math.isfinite(half)]
    low = min(finite, default=0.0)
    span = max(finite, default=0.0) - low
    return "".join(
        _BARS[round((half - low) / span * (len(_BARS) - 1)) if span else 0] if math.isfinite(half) else "×"
        for half in halves
    )


def pairs(option: str, given: Sequence[str]) -> dict[str, str]:
    """Parse options of the form `name=value`.

    Args:
        option: the option's name, for error messages.
        given: values of the option, one for each time the user repeated it.

    Returns:
        Values by name.

    Raises:
        typer.BadParameter: a value has no `=` or no name, or a name occurs twice.
    """
    found: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"{text!r} is not of the form name=value.", param_hint=option)
        if name in found:
            raise typer.BadParameter(f"{name!r} is set twice.", param_hint=option)
        found[name] = value
    return found


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """Return a count with its noun, for example `1 node` or `2 nodes`."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def protection_words(settings: Json) -> str:
    """Return a job's protection as text: the number of copies of every shard, or the size of the parity groups.

    `settings` contains Copies and, with parity, ParityGroupSize.
    """
    size = settings.get("ParityGroupSize")
    if size:
        return f"parity: in each group of {size} nodes, one node can fail without the loss of a step"
    return f"{counted(settings['Copies'], 'copy', 'copies')} of every shard"


def duration(value: float) -> str:
    """Return a number of seconds as text: `42 s`, `12 min 05 s`, `3 h 20 min`, `2 d 4 h`."""
    whole = max(0, round(value))
    days, hours, minutes = whole // 86_400, whole % 86_400 // 3600, whole % 3600 // 60
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {whole % 60:02} s" if minutes else f"{whole} s"


def days_old(created: datetime | None) -> str | None:
    """Return the age of a machine image as text: `41 days old`."""
    return None if created is None else f"{counted(max(0, (datetime.now(UTC) - created).days), 'day')} old"


def without_none(**fields: Any) -> Any:
    """Return the keyword arguments whose value is not None."""
    return {name: value for name, value in fields.items() if value is not None}


def colored(text: str, color: str) -> str:
    """Return text in a color unless NO_COLOR is set (https://no-color.org).

    `echo` removes the color again if its stream is not a terminal.
    """
    return text if os.environ.get("NO_COLOR") else typer.style(text, fg=color)


def tell(error: EverstepError) -> int:
    """Print an error with its hint to stderr, and return the exit code."""
    console = stderr()
    code = f" ({error.code})" if isinstance(error, ServiceFailed) and error.code else ""
    console.print(Text.assemble(("error:", "bold red"), f" {safe_cell(error.message + code)}"), soft_wrap=True)
    if error.hint:
        console.print(Text(safe_cell(f"hint: {error.hint}")), soft_wrap=True)
    if isinstance(error, ServiceFailed) and error.request_id and not error.code.endswith(_THE_CALLERS):
        console.print(Text(safe_cell(f"request id: {error.request_id}")), soft_wrap=True)
    return exit_code(error)


def exit_code(error: EverstepError) -> int:
    """Return the exit code for an error; see the table of this module."""
    if isinstance(error, WaitTimedOut):
        return TIMED_OUT
    if isinstance(error, ServiceFailed):
        return WRONG if error.code == "ValidationException" else SERVICE_FAILED
    return WRONG if isinstance(error, (ConfigurationError, SourceRefused)) else FAILED
