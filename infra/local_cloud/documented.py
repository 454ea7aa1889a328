"""Rules on parameters that AWS documents in addition to types: filter names and enumerations. Pure.

botocore checks types only, and moto accepts filters that AWS refuses. The local cloud refuses undocumented filters as
EC2 does. The tests check every call of the product against both rules.

Source: the documentation strings and enumerations of botocore's service models, which AWS publishes.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Final

from botocore.model import OperationModel, Shape

GROWING: Final = frozenset({"InstanceType"})
"""Enumerations that AWS extends every month. botocore's list is always incomplete, so it is not checked."""
SHOWN_VALUES: Final = 12
_ENTRY: Final = re.compile(r"<li>\s*(?:<p>\s*)?<code>([^<]+)</code>\s*(:&lt;[^&]+&gt;)?\s*-")
_ALIASES: Final = re.compile(r"You can also use ((?:<code>[^<]+</code>(?:, | or | and )?)+)")
_CODE: Final = re.compile(r"<code>([^<]+)</code>")


@lru_cache(maxsize=256)
def _names(documentation: str) -> frozenset[str]:
    """Return the filter names that a documentation string lists. A name that ends with a colon is a prefix."""
    entries = {html.unescape(name) + (":" if key else "") for name, key in _ENTRY.findall(documentation)}
    aliases = {html.unescape(name) for names in _ALIASES.findall(documentation) for name in _CODE.findall(names)}
    return frozenset(name.partition("<")[0] for name in entries | aliases)


def filter_names(operation: OperationModel) -> frozenset[str]:
    """Return the filter names that an operation documents.

    Args:
        operation: an operation of any service.

    Returns:
        Names, and prefixes that end with a colon, such as `tag:`. Empty if the operation has no filters or documents
        none.
    """
    filters = operation.input_shape.members.get("Filters") if operation.input_shape else None
    if filters is None or filters.type_name != "list" or "Name" not in getattr(filters.member, "members", {}):
        return frozenset()
    # Auto Scaling documents the filters of all its operations at their common shape.
    return _names(filters.documentation) or _names(filters.member.members["Name"].documentation)


def is_documented(name: str, names: frozenset[str]) -> bool:
    """Return whether a filter name is in the result of `filter_names`."""
    prefix, colon, _ = name.partition(":")
    return name in names or (bool(colon) and prefix + colon in names)


def undocumented(operation: OperationModel, parameters: Mapping[str, Any]) -> list[str]:
    """Return the undocumented filters and values in the parameters of a call.

    Args:
        operation: botocore's model of the called operation.
        parameters: the call's parameters as passed to boto3.

    Returns:
        One sentence for each unknown filter and for each value outside of its enumeration.
    """
    names = filter_names(operation)
    filters = (
        [given["Name"] for given in parameters.get("Filters", ()) if isinstance(given, Mapping) and "Name" in given]
        if names
        else []
    )
    wrong = [f"{operation.name} has no filter {name!r}" for name in filters if not is_documented(name, names)]
    shape = operation.input_shape
    return wrong + (
        [] if shape is None else [f"{operation.name}: {said}" for said in _unknown_values(shape, parameters, "")]
    )


def _unknown_values(shape: Shape, value: Any, where: str) -> Iterator[str]:
    if shape.type_name == "structure" and isinstance(value, Mapping):
        for name, member in shape.members.items():
            if name in value:
                yield from _unknown_values(member, value[name], f"{where}.{name}".lstrip("."))
    elif shape.type_name == "list" and isinstance(value, (list, tuple)):
        for item in value:
            yield from _unknown_values(shape.member, item, where)
    elif shape.type_name == "map" and isinstance(value, Mapping):
        for item in value.values():
            yield from _unknown_values(shape.value, item, where)
    elif (
        isinstance(value, str)
        and shape.name not in GROWING
        and getattr(shape, "enum", None)
        and value not in shape.enum
    ):
        yield (
            f"{where} {value!r} is none of "
            f"{', '.join(shape.enum[:SHOWN_VALUES])}{', …' if len(shape.enum) > SHOWN_VALUES else ''}"
        )
