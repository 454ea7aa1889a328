"""An answer of the service as JSON, YAML, text or rows: what `--output` and `--query` make of it. Pure.

`text` is what the AWS CLI makes of it: values of one thing on one line, by the names of its fields, tabs between them;
what lies deeper follows on lines that begin with its name.

Invariant: what is rendered is the service's own answer, times as text and nothing left out but the response's metadata.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

Value = Any
"""What JSON can hold."""


class OutputFormat(StrEnum):
    """How a result is shown."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"
    TEXT = "text"


UNSET: Final = "None"
"""What `text` shows of a field without a value, as the AWS CLI does."""


def plain(value: object) -> Value:
    """Return an answer as JSON can hold it: times as text, in UTC, without the response's metadata."""
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    if isinstance(value, Mapping):
        return {str(name): plain(inner) for name, inner in value.items() if name != "ResponseMetadata"}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    return value


def rendered(value: Value, output: OutputFormat, *, is_one_of_many: bool = False) -> str:
    """Return a value as `json`, `yaml` or `text` writes it.

    Args:
        value: as `plain` gives it.
        output: any format but `table`.
        is_one_of_many: other documents follow: JSON then takes one line, and YAML begins with its mark.

    Returns:
        The text, without a line's end; empty where `text` has nothing to say.
    """
    if output is OutputFormat.JSON:
        return json.dumps(value, indent=None if is_one_of_many else 2)
    if output is OutputFormat.YAML:
        import yaml  # no --help needs it

        document: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, explicit_start=is_one_of_many)
        return document.removesuffix("\n").removesuffix("\n...")  # the end mark that a lone value gets
    return "\n".join(text_lines(value))


def text_lines(value: Value, name: str = "", fields: Sequence[str] | None = None) -> Iterator[str]:
    """Yield the lines of a value as the AWS CLI's `text` has them.

    Args:
        value: as `plain` gives it.
        name: under which it lies; empty at the top.
        fields: plain fields that a row has, its neighbours' included; by default its own.

    Yields:
        Lines. Source: AWS CLI User Guide, text output format; awscli/text.py.
    """
    head = [name.upper()] if name else []
    if isinstance(value, dict):
        own = sorted(field for field, inner in value.items() if not _is_deep(inner))
        cells = [_cell(value[field]) if field in value else "" for field in (own if fields is None else fields)]
        if cells:
            yield "\t".join([*head, *cells])
        for field in sorted(value.keys() - set(own)):
            yield from text_lines(value[field], field)
    elif isinstance(value, list):
        rows = [inner for inner in value if isinstance(inner, dict)]
        shared = sorted({field for row in rows for field, inner in row.items() if not _is_deep(inner)})
        flat = [_cell(inner) for inner in value if not _is_deep(inner)]
        if flat and name:
            yield from ("\t".join([*head, cell]) for cell in flat)
        elif flat:
            yield "\t".join(flat)
        for inner in value:
            if _is_deep(inner):
                yield from text_lines(inner, name, shared if isinstance(inner, dict) else None)
    else:
        yield "\t".join([*head, _cell(value)])


def headings_and_cells(value: Value) -> tuple[list[str], list[list[str]]]:
    """Return what a query has found as a table: of things, their fields; of rows, their values; of one thing, its fields one a line.

    Args:
        value: as `plain` gives it.

    Returns:
        Headings, empty where there are none, and rows of cells.
    """
    if isinstance(value, dict):
        return [], [[name, _cell(inner)] for name, inner in value.items()]
    if not isinstance(value, list):
        return [], [] if value is None else [[_cell(value)]]
    if value and all(isinstance(inner, dict) for inner in value):
        headings = list(dict.fromkeys(name for row in value for name in row))
        return headings, [[_cell(row[name]) if name in row else "" for name in headings] for row in value]
    return [], [[_cell(cell) for cell in inner] if isinstance(inner, list) else [_cell(inner)] for inner in value]


def _is_deep(value: Value) -> bool:
    return isinstance(value, (dict, list))


def _cell(value: Value) -> str:
    return UNSET if value is None else json.dumps(value) if _is_deep(value) else str(value)
