"""How commands read their options and show their results.

exit code   meaning
0           done; for `jobs wait`: the job is Completed
1           it did not work out: the job ended another way, the service failed, a transfer broke
2           the command, its configuration or the request is wrong
3           there is no such thing
4           the token is not good, or not good enough
5           the name is taken, or it is not in a state for that
6           the service does not answer, or is throttling: the same command may work later
130         interrupted
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import StrEnum
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from everstep.errors import ConfigurationError, EverstepError, NothingToDownload, ServiceFailed, SourceRefused

if TYPE_CHECKING:
    from everstep.service import EverstepClient

Json = Mapping[str, Any]
"""What the service answers."""
Column = str | Callable[[Json], str]
"""What a column of a table shows: a field, by its name, or what a function makes of the row."""
Columns = Mapping[str, Column]
"""By heading."""

LARGEST_PAGE = 1_000
"""Items that the service gives in one answer at the most."""
PIPE_WIDTH = 240
"""Columns where stdout is not a terminal: nothing is cut."""

_EXIT_CODES = {
    "ValidationException": 2,
    "ResourceNotFoundException": 3,
    "AccessDeniedException": 4,
    "ConflictException": 5,
    "ThrottlingException": 6,
    "ServiceUnavailableException": 6,
}
"""By the service's word for what went wrong."""


class OutputFormat(StrEnum):
    """How a result is shown."""

    TABLE = "table"
    JSON = "json"


Output = Annotated[OutputFormat, typer.Option("--output", "-o", help="table for people, json for programs (the service's own answer).")]


@contextmanager
def connect() -> Iterator[EverstepClient]:
    """Give a client with the user's configuration; what it raises can be told."""
    from everstep import failures, sdk  # with botocore, which no --help needs

    service = sdk.client()
    try:
        with failures.translated():
            yield service
    finally:
        service.close()


def listed(service: Any, operation: str, limit: int, **query: Any) -> list[Json]:
    """Return the first items of a list, fetched in pages as large as the service gives.

    Args:
        service: the client.
        operation: one that has pages.
        limit: how many items at the most.
        **query: the operation's arguments, the page's size excepted; what is None is left out.

    Returns:
        The items, in the service's order.
    """
    paginator = service.get_paginator(operation)
    pages = paginator.paginate(**without_none(**query), PaginationConfig={"PageSize": min(limit, LARGEST_PAGE)})
    return list(islice(pages.search(f"{paginator.result_keys[0].expression}[]"), limit))


def stdout() -> Console:
    """Return a console on stdout as it is now."""
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False, soft_wrap=False)


def stderr() -> Console:
    """Return a console on stderr as it is now."""
    return Console(stderr=True, width=None if sys.stderr.isatty() else PIPE_WIDTH, highlight=False)


def show_json(value: Json) -> None:
    """Print one JSON document to stdout: what the service answered, times as text."""
    typer.echo(json.dumps({name: inner for name, inner in value.items() if name != "ResponseMetadata"}, indent=2, default=_as_text))


def _as_text(value: object) -> str:
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    raise TypeError(f"{type(value).__name__} has no place in JSON")


def show_rows(rows: Sequence[Json], columns: Columns, *, empty: str) -> None:
    """Print a table to stdout.

    Args:
        rows: what to show.
        columns: of the table, in order.
        empty: what to say, on stderr, when there are no rows.
    """
    if not rows:
        stderr().print(empty, markup=False)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in columns:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*(escaped(_cell(row, column)) for column in columns.values()))
    stdout().print(table)


def show_facts(facts: Iterable[tuple[str, Any]]) -> None:
    """Print names and values, one a line, to stdout; values that are None are left out."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        if value is not None:
            table.add_row(name, escaped(str(value)))
    stdout().print(table)


def say(text: str) -> None:
    """Print a line for the person at the terminal, to stderr."""
    stderr().print(text, markup=False, soft_wrap=True)


def escaped(text: str) -> str:
    """Return text that rich shows as it is: what users and instances wrote is never markup."""
    return text.replace("[", r"\[")


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


def without_none(**fields: Any) -> Any:
    """Return the fields that have a value."""
    return {name: value for name, value in fields.items() if value is not None}


def tell(error: EverstepError) -> int:
    """Print an error as one clear line with its hint, and return the exit code."""
    console = stderr()
    console.print(f"[bold red]error:[/] {escaped(error.message)}", soft_wrap=True)
    if error.hint:
        console.print(f"hint: {error.hint}", markup=False, soft_wrap=True)
    if isinstance(error, ServiceFailed) and error.request_id and exit_code(error) == 1:
        console.print(f"request id: {error.request_id}", markup=False, soft_wrap=True)
    return exit_code(error)


def exit_code(error: EverstepError) -> int:
    """Return the exit code of an error."""
    if isinstance(error, ServiceFailed):
        return _EXIT_CODES.get(error.code, 1)
    if isinstance(error, NothingToDownload):
        return 3
    return 2 if isinstance(error, (ConfigurationError, SourceRefused)) else 1


def _cell(row: Json, column: Column) -> str:
    if callable(column):
        return column(row)
    value = row.get(column)
    return "" if value is None else str(value)
