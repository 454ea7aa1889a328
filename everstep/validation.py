"""Checks requests against the service model before they are sent, with the service's own error messages.

botocore itself checks types, minima and required fields, with its own messages. This module also checks maxima,
patterns, enumerations and numbers of entries. For a field that only SageMaker has, the message names the replacement.
One error lists all invalid fields of the request.

Invariant: every request that the service would accept passes, and each message equals the service's message. Like
boto3, the check rejects a parameter with the value None, although a request without the parameter may be valid.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from botocore.exceptions import ParamValidationError

from everstep.errors import FieldError
from everstep.protocol import constraints

Path = tuple[str | int, ...]


class ValidationError(ParamValidationError):  # type: ignore[misc]  # botocore is untyped.
    """A request is invalid, so the client did not send it.

    The message is the one that the service would return.

    Args:
        fields: one entry per invalid field, not empty.
    """

    fmt = "{report}"

    def __init__(self, fields: Sequence[FieldError]) -> None:
        super().__init__(report=constraints.summary([(error.field, error.message) for error in fields]))
        self.fields = tuple(fields)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.fields,)


def check(params: Mapping[str, Any], model: Any, **_: Any) -> None:
    """Check a request. botocore calls it before it builds the request.

    Args:
        params: the user's parameters.
        model: botocore's model of the operation.

    Raises:
        ValidationError: at least one parameter is invalid.
    """
    if model.input_shape is None:
        wrong = [FieldError(name, constraints.unknown(name)) for name in params]
    else:
        wrong = [
            FieldError(constraints.path_of(path), message)
            for path, message in _structure((), params, model.input_shape)
        ]
    if wrong:
        raise ValidationError(wrong)


def _value(path: Path, value: Any, shape: Any) -> Iterator[tuple[Path, str]]:
    if getattr(shape, "is_document_type", False) or shape.type_name == "blob":
        return
    if not _IS_OF[shape.type_name](value):
        yield path, constraints.wrong_type(shape.type_name, value)
        return
    if shape.type_name == "structure":
        yield from _structure(path, value, shape)
    elif shape.type_name == "list":
        yield from _count(path, value, shape)
        for index, item in enumerate(value):
            yield from _value((*path, index), item, shape.member)
    elif shape.type_name == "map":
        yield from _count(path, value, shape)
        for key, item in value.items():
            yield from _value((*path, str(key)), key, shape.key)
            yield from _value((*path, str(key)), item, shape.value)
    else:
        yield from ((path, message) for message in _scalar(value, shape))


def _structure(path: Path, value: Mapping[str, Any], shape: Any) -> Iterator[tuple[Path, str]]:
    for name, member in shape.members.items():
        if name in value:
            yield from _value((*path, name), value[name], member)
        elif name in shape.required_members and name not in shape.metadata.get("idempotencyToken", ()):
            yield (*path, name), constraints.MISSING
    for name in value:
        if name not in shape.members:
            yield (*path, name), constraints.unknown(constraints.path_of((*path, name)))


def _count(path: Path, value: Any, shape: Any) -> Iterator[tuple[Path, str]]:
    low, high = shape.metadata.get("min"), shape.metadata.get("max")
    if low is not None and len(value) < low:
        yield path, constraints.too_few(low)
    if high is not None and len(value) > high:
        yield path, constraints.too_many(high)


def _scalar(value: Any, shape: Any) -> Iterator[str]:
    """Yield the error of the first constraint that the value breaks. The service also reports one error per field."""
    limits = shape.metadata
    low, high = limits.get("min"), limits.get("max")
    if shape.type_name == "string":
        if limits.get("enum") is not None:
            if value not in limits["enum"]:
                yield constraints.none_of(limits["enum"], value)
        elif low is not None and len(value) < low:
            yield constraints.too_short(low)
        elif high is not None and len(value) > high:
            yield constraints.too_long(high)
        elif "pattern" in limits and not re.fullmatch(limits["pattern"], value):
            yield constraints.mismatch(limits["pattern"], value)
    elif low is not None and value < low:
        yield constraints.at_least(low, value)
    elif high is not None and value > high:
        yield constraints.at_most(high, value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


_IS_OF: Mapping[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "integer": _is_whole,
    "long": _is_whole,
    "float": _is_number,
    "double": _is_number,
    "boolean": lambda value: isinstance(value, bool),
    "timestamp": lambda value: isinstance(value, (datetime, str, int, float)),
    "list": lambda value: isinstance(value, (list, tuple)),
    "map": lambda value: isinstance(value, Mapping),
    "structure": lambda value: isinstance(value, Mapping),
}
