"""Fits a table to the terminal: selects the columns and their widths. Pure.

A cell is one line. The module never cuts ids and names, because people copy them. If the terminal is too narrow, the
module first cuts the text of `Prose` columns. Then it drops `Detail` columns, starting with the last one.

Invariant: no line is wider than the terminal, unless the columns of ids and names alone are wider.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.cells import cell_len
from rich.text import Text

from everstep.cli.terminal import safe_cell

Field = str | Callable[[Mapping[str, Any]], str]
"""Source of a cell's content: the name of a field of the row, or a function of the row."""

GAP: Final = "  "
"""Text between two columns of a table."""
PROSE_WIDTH: Final = 24
"""Minimum width of a `Prose` column, in terminal columns, while `Detail` columns are still shown."""


@dataclass(frozen=True, slots=True)
class Prose:
    """A table column of sentences. A narrow terminal cuts its text off."""

    field: Field


@dataclass(frozen=True, slots=True)
class Detail:
    """A column that the table drops if the terminal is too narrow for all columns."""

    field: Field


Column = Field | Prose | Detail
Columns = Mapping[str, Column]
"""Columns by heading, in the order of printing."""


def cells_of(rows: Sequence[Mapping[str, Any]], columns: Columns) -> list[list[str]]:
    """Return the text of every cell as one line without control sequences.

    Args:
        rows: items of an answer.
        columns: fields of the items by heading, in the printed order.

    Returns:
        Rows with one cell per column.
    """
    fields = [column.field if isinstance(column, (Prose, Detail)) else column for column in columns.values()]
    return [[_one_line(_text(row, field)) for field in fields] for row in rows]


def widths(cells: Sequence[Sequence[str]], columns: Columns, width: int | None) -> dict[int, int]:
    """Select the columns to print and compute their widths.

    Args:
        cells: rows with one cell per column.
        columns: columns by heading. Their kinds, `Prose` and `Detail`, decide which column is shortened or dropped
            first.
        width: the terminal's width in columns; None: no limit.

    Returns:
        Width in terminal columns by column number. Dropped columns are missing.
    """
    natural = {
        number: max(cell_len(heading), *(cell_len(row[number]) for row in cells))
        for number, heading in enumerate(columns)
    }
    if width is None:
        return natural
    kinds = list(columns.values())
    shown = dict(natural)
    least = {n: min(size, PROSE_WIDTH) if isinstance(kinds[n], Prose) else size for n, size in natural.items()}
    for number in reversed([number for number, kind in enumerate(kinds) if isinstance(kind, Detail)]):
        if _total(least[n] for n in shown) <= width:
            break
        del shown[number]
    spare = width - _total(least[n] for n in shown)
    for number in shown:
        if isinstance(kinds[number], Prose):
            grown = min(natural[number], max(1, least[number] + spare))
            spare -= max(0, grown - least[number])
            shown[number] = grown
    return shown


def lines(cells: Sequence[Sequence[str]], columns: Columns, width: int | None) -> list[Text]:
    """Return the lines of a table, headings first.

    Args:
        cells: the result of `cells_of`.
        columns: the columns that `cells_of` received.
        width: the terminal's width in columns; None: no limit.

    Returns:
        One text per line, without trailing spaces.
    """
    chosen = widths(cells, columns, width)
    return [_line(row, chosen, style) for row, style in ((list(columns), "bold"), *((row, "") for row in cells))]


def _line(row: Sequence[str], chosen: Mapping[int, int], style: str) -> Text:
    line = Text()
    for number, size in chosen.items():
        cell = Text(row[number], style=style)  # Use a Text, because rich would interpret markup in a str.
        cell.truncate(size, overflow="ellipsis", pad=True)
        line.append(GAP if line.cell_len else "")
        line.append_text(cell)
    line.rstrip()
    return line


def _total(sizes: Iterable[int]) -> int:
    given = list(sizes)
    return sum(given) + len(GAP) * (len(given) - 1)


def _text(row: Mapping[str, Any], field: Field) -> str:
    if callable(field):
        return field(row)
    value = row.get(field)
    return "" if value is None else str(value)


def _one_line(text: str) -> str:
    return " ".join(safe_cell(text).split("\n"))
