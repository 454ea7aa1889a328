"""Renders an answer of the service as JSON, YAML, text or table cells for `--output` and `--query`. Pure.

The format `text` equals the format `text` of the AWS CLI. The scalar fields of an object form one line, sorted by field
name and separated by tabs. Nested objects and lists follow on lines that begin with their field name.

Invariant: the output contains exactly the service's answer, except that times become text and the HTTP metadata of the
response is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final, cast

from everstep.json_values import is_array, is_object

Value = Any
"""A value that JSON can represent."""


class OutputFormat(StrEnum):
    """A format for the result of a command."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"
    TEXT = "text"


UNSET: Final = "None"
"""Text for a field without a value in the format `text`, as in the AWS CLI."""


def plain(value: object) -> Value:
    """Return an answer as JSON values: times as ISO 8601 text in UTC, without the response's metadata."""
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    if isinstance(value, Mapping):
        named = cast("Mapping[object, object]", value)
        return {str(name): plain(inner) for name, inner in named.items() if name != "ResponseMetadata"}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in cast("Sequence[object]", value)]
    return value


def rendered(value: Value, output: OutputFormat, *, is_one_of_many: bool = False) -> str:
    """Return a value as `json`, `yaml` or `text`.

    Args:
        value: a value that `plain` returned.
        output: any format except `table`.
        is_one_of_many: True if the output has several documents. JSON then uses one line per document, and each YAML
            document begins with `---`.

    Returns:
        The text without a final newline. The format `text` yields empty text for a value without lines.
    """
    if output is OutputFormat.JSON:
        return json.dumps(value, indent=None if is_one_of_many else 2)
    if output is OutputFormat.YAML:
        import yaml  # Import here to keep `--help` fast.

        document: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, explicit_start=is_one_of_many)
        # PyYAML ends a document that is a single scalar with `...`, so remove these dots.
        return document.removesuffix("\n").removesuffix("\n...")
    return "\n".join(text_lines(value))


def text_lines(value: Value, name: str = "", fields: Sequence[str] | None = None) -> Iterator[str]:
    """Yield the lines of a value in the AWS CLI's format `text`.

    Args:
        value: a value that `plain` returned.
        name: field name that begins the lines; empty at the top level.
        fields: scalar fields that the line of an object contains, in order. For an object in a list, these are the
            fields of all objects in the list, so that columns align. None: the object's own fields.

    Yields:
        Lines. Source: AWS CLI User Guide, text output format; awscli/text.py.
    """
    head = [name.upper()] if name else []
    if is_object(value):
        own = sorted(field for field, inner in value.items() if not _is_deep(inner))
        cells = [_cell(value[field]) if field in value else "" for field in (own if fields is None else fields)]
        if cells:
            yield "\t".join([*head, *cells])
        for field in sorted(value.keys() - set(own)):
            yield from text_lines(value[field], field)
    elif is_array(value):
        rows = [inner for inner in value if is_object(inner)]
        shared = sorted({field for row in rows for field, inner in row.items() if not _is_deep(inner)})
        flat = [_cell(inner) for inner in value if not _is_deep(inner)]
        if flat and name:
            yield from ("\t".join([*head, cell]) for cell in flat)
        elif flat:
            yield "\t".join(flat)
        for inner in value:
            if _is_deep(inner):
                yield from text_lines(inner, name, shared if is_object(inner) else None)
    else:
        yield "\t".join([*head, _cell(value)])


def headings_and_cells(value: Value) -> tuple[list[str], list[list[str]]]:
    """Return a query's result as the headings and cells of a table.

    - A list of objects: one row per object, one column per field.
    - A list of lists: one row per inner list, without headings.
    - An object: one row per field, with its name and its value.
    - A scalar: one cell. None: no rows.

    Args:
        value: a value that `plain` returned.

    Returns:
        The headings, empty except for a list of objects, and the rows of cells.
    """
    if is_object(value):
        return [], [[name, _cell(inner)] for name, inner in value.items()]
    if not is_array(value):
        return [], [] if value is None else [[_cell(value)]]
    if value and all(is_object(inner) for inner in value):
        headings = list(dict.fromkeys(name for row in value for name in row))
        return headings, [[_cell(row[name]) if name in row else "" for name in headings] for row in value]
    return [], [[_cell(cell) for cell in inner] if is_array(inner) else [_cell(inner)] for inner in value]


def _is_deep(value: Value) -> bool:
    return isinstance(value, (dict, list))


def _cell(value: Value) -> str:
    return UNSET if value is None else json.dumps(value) if _is_deep(value) else str(value)
