"""Generator of `everstep/service.pyi`, the client's types for editors and type checkers, from the service model.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from control_plane.contract.names import error_names, prose, python_name, structures

Json = dict[str, Any]

_HEAD = '''"""Types of `everstep.client()`; written by `python -m control_plane.contract`. \
There is no such module at run time:

    if TYPE_CHECKING:
        from everstep.service import EverstepClient
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, Literal, NotRequired, Protocol, TypedDict, TypeVar, overload

from botocore.client import ClientMeta
from botocore.exceptions import ClientError as Refusal
from botocore.response import StreamingBody

T_co = TypeVar("T_co", covariant=True)
'''
_EVENT_STREAM = """class EventStream(Protocol[T_co]):
    def __iter__(self) -> Iterator[T_co]: ...
    def close(self) -> None: ...
"""
_TYPES = {"string": "str", "integer": "int", "long": "int", "double": "float", "boolean": "bool"}


def stubs(model: Json, pages: Json, waits: Json) -> str:
    """Return the text of `everstep/service.pyi`, from botocore's service, paginators and waiters files."""
    return "\n".join(
        [
            _HEAD,
            _EVENT_STREAM,
            *_types(model),
            *_paginators(model, pages),
            *_waiters(model, waits),
            *_exceptions(model),
            *_client(model, pages, waits),
        ]
    )


def _types(model: Json) -> Iterator[str]:
    inputs = {operation["input"]["shape"] for operation in model["operations"].values() if "input" in operation}
    for name, shape in structures(model).items():
        if name in inputs:
            continue
        yield f"class {name}(TypedDict):"
        if prose(shape):
            yield f"    {_docstring(prose(shape))}"
        for field, member in shape["members"].items():
            kind = _type(model, member["shape"], is_given=False)
            yield f"    {field}: {kind if field in shape.get('required', ()) else f'NotRequired[{kind}]'}"
            if prose(member):
                yield f"    {_docstring(prose(member))}"
        yield ""


def _paginators(model: Json, pages: Json) -> Iterator[str]:
    yield "class PaginatorConfig(TypedDict, total=False):"
    yield "    MaxItems: int\n    PageSize: int\n    StartingToken: str\n"
    for name in pages["pagination"]:
        answer = model["operations"][name]["output"]["shape"]
        yield f"class {name}Pages(Protocol):"
        yield f"    def __iter__(self) -> Iterator[{answer}]: ..."
        yield f"    def build_full_result(self) -> {answer}: ..."
        yield "    def search(self, expression: str) -> Iterator[Any]: ...\n"
        yield f"class {name}Paginator(Protocol):"
        arguments = [
            argument
            for argument in _arguments(model, name)
            if argument.partition(":")[0] not in ("MaxResults", "NextToken")
        ]
        yield (
            "    def "
            f"paginate({', '.join(['self', '*', *arguments, 'PaginationConfig: PaginatorConfig = ...'])}) -> "
            f"{name}Pages: ...\n"
        )


def _waiters(model: Json, waits: Json) -> Iterator[str]:
    yield "class WaiterConfig(TypedDict, total=False):"
    yield "    Delay: int\n    MaxAttempts: int\n"
    for name, waiter in waits["waiters"].items():
        yield f"class {name}Waiter(Protocol):"
        arguments = ["self", "*", *_arguments(model, waiter["operation"]), "WaiterConfig: WaiterConfig = ..."]
        yield f"    def wait({', '.join(arguments)}) -> None:"
        yield f"        {_docstring(waiter['description'])}\n"


def _exceptions(model: Json) -> Iterator[str]:
    yield "class Exceptions(Protocol):"
    yield "    ClientError: type[Refusal]"
    yield from (f"    {name}: type[Refusal]" for name in error_names(model))
    yield ""


def _client(model: Json, pages: Json, waits: Json) -> Iterator[str]:
    yield "class EverstepClient(Protocol):"
    yield f"    {_docstring(prose(model))}"
    yield "    meta: ClientMeta\n    exceptions: Exceptions"
    yield "    def close(self) -> None: ..."
    yield "    def can_paginate(self, operation_name: str) -> bool: ..."
    for name, operation in model["operations"].items():
        arguments = _arguments(model, name)
        yield (
            f"    def {python_name(name)}({', '.join(['self', *(['*'] if arguments else []), *arguments])}) -> "
            f"{operation['output']['shape']}:"
        )
        yield f"        {_docstring(prose(operation))}"
    yield (
        "    def upload_source(self, *, Directory: str | os.PathLike[str] | None = ..., Body: bytes | "
        "BinaryIO | None = ...) -> SourceConfig:"
    )
    yield '        """Store a user\'s code: a directory, packed as it is, or a gzipped tar."""'
    yield "    def follow_events("
    yield (
        "        self, *, TrainingJobName: str | None = ..., FleetName: str | None = ..., AfterEventId: int "
        "| None = ..."
    )
    yield "    ) -> EventStream[Event]:"
    yield '        """Follow what happens, as it happens."""'
    yield (
        "    def download_outputs(self, *, TrainingJobName: str, Directory: str | os.PathLike[str], "
        "Generation: int | None = ...) -> list[Path]:"
    )
    yield '        """Write the outputs of one generation below a directory."""'
    for kind, method, found in (
        ("Paginator", "get_paginator", pages["pagination"]),
        ("Waiter", "get_waiter", waits["waiters"]),
    ):
        argument = "operation_name" if kind == "Paginator" else "waiter_name"
        for name in found:
            yield (
                f'    @overload\n    def {method}(self, {argument}: Literal["{python_name(name)}"]) -> '
                f"{name}{kind}: ..."
            )


def _arguments(model: Json, operation: str) -> list[str]:
    """Return the keyword arguments of an operation, required ones first."""
    taken = model["operations"][operation].get("input")
    if taken is None:
        return []
    shape = model["shapes"][taken["shape"]]
    required = [field for field in shape["members"] if field in shape.get("required", ())]
    given = [f"{field}: {_type(model, shape['members'][field]['shape'], is_given=True)}" for field in required]
    free = [field for field in shape["members"] if field not in required]
    return given + [f"{field}: {_type(model, shape['members'][field]['shape'], is_given=True)} = ..." for field in free]


def _type(model: Json, name: str, *, is_given: bool) -> str:
    shape = model["shapes"][name]
    kind = shape["type"]
    if kind == "structure":
        if shape.get("eventstream"):
            return f"EventStream[{name}]"
        return "Any" if shape.get("document") else name
    if kind == "list":
        inner = _type(model, shape["member"]["shape"], is_given=is_given)
        return f"{'Sequence' if is_given else 'list'}[{inner}]"
    if kind == "map":
        inner = _type(model, shape["value"]["shape"], is_given=is_given)
        return f"{'Mapping' if is_given else 'dict'}[str, {inner}]"
    if kind == "timestamp":
        return "datetime | float | str" if is_given else "datetime"
    if kind == "blob":
        return "bytes | BinaryIO" if is_given else "StreamingBody"
    if shape.get("enum"):
        return f"Literal[{', '.join(repr(word) for word in shape['enum'])}]".replace("'", '"')
    return _TYPES[kind]


def _docstring(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"""', "'''")
    return f'"""{escaped}{" " if escaped.endswith(chr(34)) else ""}"""'
