"""Generator of `web/src/contract.ts`: the API's types, and words that API and dashboard share. Pure.

A time is a number: seconds since 1970. Bytes have the type Blob.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from control_plane.accounts.jobs import SOURCES
from control_plane.accounts.occurrences import occurrence
from control_plane.contract.names import error_names, prose, structures
from control_plane.contract.service_model import LOGGED_NUMBER
from control_plane.core.observed.nodes import Cause

Json = dict[str, Any]

_TYPES = {
    "string": "string",
    "integer": "number",
    "long": "number",
    "double": "number",
    "boolean": "boolean",
    "timestamp": "Timestamp",
    "blob": "Blob",
}


def typescript(model: Json, roles: Mapping[str, str]) -> str:
    """Return the text of `web/src/contract.ts`.

    `model` is the content of service-2.json. `roles` is the least role per operation; one without an entry needs no
    token.
    """
    return (
        "\n".join([*_head(model), *_interfaces(model), *_operations(model, roles), *_settings(model), *_words()]) + "\n"
    )


def _head(model: Json) -> Iterator[str]:
    yield (
        "// Written by `python -m control_plane.contract`; change the models of control_plane/api/schemas/, "
        "not this file."
    )
    yield ""
    yield "/** Seconds since 1970, UTC. */\nexport type Timestamp = number\n"
    yield f"export type ErrorCode = {' | '.join(repr(name) for name in error_names(model))}\n"
    yield "/** Body of the response to a request that the server refuses. */"
    yield (
        "export interface ErrorResponse {\n  Code: ErrorCode\n  Message: string\n  RequestId: string\n  "
        "Hint: string\n  Fields: FieldError[]\n}\n"
    )


def _interfaces(model: Json) -> Iterator[str]:
    for name, shape in structures(model).items():
        if prose(shape):
            yield f"/** {_comment(prose(shape))} */"
        yield f"export interface {name} {{"
        for field, member in shape["members"].items():
            if prose(member):
                yield f"  /** {_comment(prose(member))} */"
            yield f"  {field}{'' if field in shape.get('required', ()) else '?'}: {_type(model, member['shape'])}"
        yield "}\n"


def _operations(model: Json, roles: Mapping[str, str]) -> Iterator[str]:
    yield "/** Types of the request and the response of each operation. */"
    yield "export interface Operations {"
    for name, operation in model["operations"].items():
        taken = operation["input"]["shape"] if "input" in operation else "Record<string, never>"
        yield f"  {name}: {{ request: {taken}; response: {operation['output']['shape']} }}"
    yield "}\n"
    yield ("/** HTTP method, path, query parameters and least role of each operation. Other fields are in the body. */")
    yield "export const operations = {"
    for name, operation in model["operations"].items():
        members = model["shapes"][operation["input"]["shape"]]["members"] if "input" in operation else {}
        in_query = [repr(field) for field, member in members.items() if member.get("location") == "querystring"]
        http = operation["http"]
        role = roles.get(name, "viewer")
        yield (
            f"  {name}: {{ method: '{http['method']}', path: '{http['requestUri']}', "
            f"query: [{', '.join(in_query)}], role: '{role}' }},"
        )
    yield (
        "} as const satisfies Record<keyof Operations, "
        "{ method: string; path: string; query: readonly string[]; role: string }>"
    )


def _settings(model: Json) -> Iterator[str]:
    asked, shown = (model["shapes"][name]["members"] for name in ("CreateTrainingJobRequest", "TrainingJob"))
    names = ", ".join(repr(name) for name in asked if name in shown)
    yield "\n/** Fields of a job that are also fields of the request for one. */"
    yield f"export const jobSettings = [{names}] as const satisfies readonly (keyof TrainingJob)[]"


def _words() -> Iterator[str]:
    yield "\n/** What happened, by the cause of an incident. A sentence without its full stop. */"
    yield "export const causeTitles = {"
    yield from (f"  {cause}: {occurrence(cause)!r}," for cause in Cause)
    yield "} as const satisfies Record<Incident['Cause'], string>"
    yield "\n/** Sources from which ranks restore their state. */"
    yield "export const restoreSources = {"
    yield from (f"  {source}: {words!r}," for source, words in SOURCES.items())
    yield "} as const satisfies Record<NonNullable<Incident['RestoreSource']>, string>"


def _type(model: Json, name: str) -> str:
    shape = model["shapes"][name]
    if name == LOGGED_NUMBER:
        return "number | 'NaN' | 'Infinity' | '-Infinity'"
    if shape["type"] == "structure":
        return "unknown" if shape.get("document") else name
    if shape["type"] == "list":
        inner = _type(model, shape["member"]["shape"])
        return f"({inner})[]" if " " in inner else f"{inner}[]"
    if shape["type"] == "map":
        return f"Record<string, {_type(model, shape['value']['shape'])}>"
    if shape.get("enum"):
        return " | ".join(repr(word) for word in shape["enum"])
    return _TYPES[shape["type"]]


def _comment(text: str) -> str:
    return text.replace("*/", "* /")
