"""Generator of the API's reference pages from the service model. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from control_plane.api.surface import is_server_sent, operations
from control_plane.contract.markdown import wrap
from control_plane.contract.names import error_names, prose, python_name, structures

Json = dict[str, Any]

_HEAD = (
    "Written by `python -m control_plane.contract` from the routes and models of the API; change those, "
    "not this page.\n"
)


def pages(document: Json, model: Json, paginated: Json, waits: Json) -> Mapping[str, str]:
    """Return the pages by file name.

    `document` is the OpenAPI document; the others are botocore's service-2.json, paginators-1.json and waiters-2.json.
    """
    nouns: dict[str, list[str]] = {}
    streams: dict[str, list[str]] = {}
    for path, method, operation in operations(document):
        noun = operation["tags"][0]
        if is_server_sent(operation):
            streams.setdefault(noun, []).extend(_stream(path, method, operation))
        else:
            nouns.setdefault(noun, []).append(operation["operationId"])
    found = {
        f"{_file(noun)}.md": _noun(noun, names, model, paginated, streams.get(noun, []))
        for noun, names in sorted(nouns.items())
    }
    others = {
        "README.md": _contents(nouns, model),
        "types.md": _types(model),
        "errors.md": _errors(model),
        "waiters.md": _waiters(waits),
    }
    return {name: wrap(text) for name, text in (found | others).items()}


def _contents(nouns: Mapping[str, list[str]], model: Json) -> str:
    lines = ["# API reference\n", _HEAD]
    lines += [
        f"Version {model['metadata']['apiVersion']}. How to call it: [the SDK](../sdk.md). As OpenAPI: "
        "[openapi.json](../openapi.json).\n"
    ]
    lines += ["| | operations |", "| --- | --- |"]
    for noun, names in sorted(nouns.items()):
        lines.append(
            f"| [{_words(noun)}]({_file(noun)}.md) | "
            f"{', '.join(f'[{name}]({_file(noun)}.md#{name.lower()})' for name in sorted(names))} |"
        )
    lines.append(
        "\n[Types](types.md), [errors](errors.md), [waiters](waiters.md), [fields and their tests](field-coverage.md)."
    )
    lines.append(
        "\nFor operators: [settings](settings.md), [metrics](metrics.md), [files](files.md), [timeouts](timeouts.md)."
    )
    return "\n".join(lines) + "\n"


def _stream(path: str, method: str, operation: Json) -> Iterator[str]:
    """Yield the lines that describe an operation with server-sent events, which the service model lacks."""
    yield f"## {operation['operationId']}\n"
    yield f"{operation['description']}\n"
    yield f"`{method} {path}` · server-sent events: for browsers, and whatever reads `text/event-stream`\n"
    names = [parameter["name"] for parameter in operation["parameters"]]
    yield f"In the query: {', '.join(f'`{name}`' for name in names)}.\n"


def _noun(noun: str, names: list[str], model: Json, paginated: Json, streams: list[str]) -> str:
    lines = [f"# {_words(noun)}\n", _HEAD]
    for name in sorted(names):
        operation = model["operations"][name]
        lines += [f"## {name}\n", f"{prose(operation)}\n"]
        lines += [
            f"`{operation['http']['method']} {operation['http']['requestUri']}` · `client.{python_name(name)}(…)`\n"
        ]
        if name in paginated["pagination"]:
            lines.append(f'In pages: `client.get_paginator("{python_name(name)}")`.\n')
        if "input" in operation:
            lines += ["**Request**\n", *_fields(model, operation["input"]["shape"], is_request=True)]
        answer = operation["output"]["shape"]
        payload = model["shapes"][answer].get("payload")
        if payload == "EventStream":
            stream = model["shapes"][answer]["members"][payload]["shape"]
            lines.append(f"**Answer**: `EventStream`, a stream of events: [{stream}](types.md#{stream.lower()})\n")
        elif payload:
            lines.append("**Answer**: `Body`, a stream of bytes.\n")
        else:
            lines.append(f"**Answer**: [{answer}](types.md#{answer.lower()})\n")
    lines += streams
    return "\n".join(lines).rstrip("\n") + "\n"


def _types(model: Json) -> str:
    inputs = {operation["input"]["shape"] for operation in model["operations"].values() if "input" in operation}
    lines = [
        "# Types\n",
        _HEAD,
        "Times are seconds since 1970; the SDK converts them to `datetime`. A field without a value is absent.\n",
    ]
    for name, shape in structures(model).items():
        if name not in inputs and not shape.get("payload"):
            lines += [f"## {name}\n", f"{prose(shape)}\n", *_fields(model, name, is_request=False)]
    return "\n".join(lines).rstrip("\n") + "\n"


def _errors(model: Json) -> str:
    lines = [
        "# Errors\n",
        _HEAD,
        "Every refusal has the header `x-amzn-errortype` and the body `ErrorResponse` of "
        "[openapi.json](../openapi.json): `Code`, `Message`, "
        "`RequestId`, `Hint` and, where single fields are wrong, `Fields`.",
        "The SDK raises `client.exceptions.<type>`, a `botocore.exceptions.ClientError`; `Hint` and "
        "`Fields` are in its `response`.\n",
        "| type | status | meaning | retried by the SDK |",
        "| --- | --- | --- | --- |",
    ]
    for name in error_names(model):
        shape = model["shapes"][name]
        is_again = "retryable" in shape or shape["error"]["httpStatusCode"] >= 500
        lines.append(
            f"| `{name}` | {shape['error']['httpStatusCode']} | {prose(shape)} | {'yes' if is_again else 'no'} |"
        )
    lines.append(
        "\nA missing or unknown token is an `AccessDeniedException` with status 401; a body that is too "
        "long is a `ValidationException` with 413, "
        "and a method that a path does not have one with 405."
    )
    return "\n".join(lines) + "\n"


def _waiters(waits: Json) -> str:
    lines = ["# Waiters\n", _HEAD, "| waiter | what it does | asks | every, at most |", "| --- | --- | --- | --- |"]
    for name, waiter in waits["waiters"].items():
        often = f"{waiter['delay']} s, {waiter['maxAttempts']} times"
        lines.append(
            f'| `client.get_waiter("{python_name(name)}")` | {waiter["description"]} | {waiter["operation"]} | '
            f"{often} |"
        )
    lines.append('\nOther times: `wait(…, WaiterConfig={"Delay": 1, "MaxAttempts": 600})`.')
    return "\n".join(lines) + "\n"


def _fields(model: Json, name: str, *, is_request: bool) -> Iterator[str]:
    shape = model["shapes"][name]
    yield "| field | type | |"
    yield "| --- | --- | --- |"
    for field, member in shape["members"].items():
        notes = [prose(member).replace("|", "\\|"), *_limits(model, member["shape"])]
        if is_request and field in shape.get("required", ()):
            notes.insert(0, "Required.")
        yield f"| `{field}` | {_type(model, member['shape'])} | {' '.join(note for note in notes if note)} |"
    yield ""


def _type(model: Json, name: str) -> str:
    shape = model["shapes"][name]
    if shape["type"] == "structure":
        return "any JSON" if shape.get("document") else f"[{name}](types.md#{name.lower()})"
    if shape["type"] == "list":
        return f"list of {_type(model, shape['member']['shape'])}"
    if shape["type"] == "map":
        return f"map of {_type(model, shape['value']['shape'])}"
    return {"long": "integer", "blob": "bytes"}.get(shape["type"], str(shape["type"]))


def _limits(model: Json, name: str) -> Iterator[str]:
    shape = model["shapes"][name]
    unit = {"string": " characters", "list": " entries", "map": " entries"}.get(shape["type"], "")
    low, high = shape.get("min"), shape.get("max")
    if low is not None and high is not None:
        yield f"{low} to {high}{unit}."
    elif low is not None or high is not None:
        yield f"At {'most' if low is None else 'least'} {high if low is None else low}{unit}."
    if "pattern" in shape:
        yield f"Matches `{shape['pattern']}`.".replace("|", "\\|")
    if "enum" in shape:
        yield f"One of {', '.join(f'`{word}`' for word in shape['enum'])}."


def _file(noun: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "-", noun).lower()


def _words(noun: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", " ", noun).capitalize()
