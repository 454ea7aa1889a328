"""Finds parameters of a call that AWS would refuse, which moto accepts and botocore does not check. Pure.

Source: botocore's service models, which AWS publishes: their shapes and their documentation strings.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from botocore.model import OperationModel, Shape

_ENTRY: Final = re.compile(r"<li>\s*(?:<p>\s*)?<code>([^<]+)</code>\s*(:&lt;[^&]+&gt;)?\s*-")
_ALIASES: Final = re.compile(r"You can also use ((?:<code>[^<]+</code>(?:, | or | and )?)+)")
_CODE: Final = re.compile(r"<code>([^<]+)</code>")
_NOT_WITH_IDS: Final = re.compile(
    r"(?:cannot|can't) specify this parameter and the instance IDs parameter in the same", re.IGNORECASE
)
_MOST_ITEMS: Final = re.compile(
    r"(?:maximum|maximum number of|up to) (\d+) (?:explicitly specified )?(?:instance IDs|instances|items|names)",
    re.IGNORECASE,
)
_MOST_RECORDS: Final = re.compile(r"maximum value is (?:<code>)?(\d+)")

GROWING: Final = frozenset({"InstanceType"})
"""Enumerations that are not checked, because AWS extends them every month and botocore's list is incomplete."""
SHOWN_VALUES: Final = 12
FILTER_VALUES: Final = 200
"""Limit of the values of all filters of a call. Source: Amazon EC2 User Guide, list and filter your resources."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One reason why AWS would refuse a call."""

    code: str
    """EC2's error code. Auto Scaling answers ValidationError to every violation."""
    words: str
    """Names the parameter and the refused value."""


def violations(operation: OperationModel, parameters: Mapping[str, Any]) -> list[Violation]:
    """Return why AWS would refuse a call: unknown filters, values outside their enumeration, exceeded limits.

    `parameters` are as passed to boto3. Empty if AWS would accept the call.
    """
    shape = operation.input_shape
    return [
        *_wrong_filters(operation, parameters),
        *_over_limits(operation, parameters),
        *([] if shape is None else _wrong_values(shape, parameters, "")),
    ]


def filter_names(operation: OperationModel) -> frozenset[str]:
    """Return the filters that an operation documents: names, and prefixes that end with a colon, such as `tag:`."""
    filters = operation.input_shape.members.get("Filters") if operation.input_shape else None
    if filters is None or filters.type_name != "list" or "Name" not in getattr(filters.member, "members", {}):
        return frozenset()
    # Auto Scaling documents the filters of all operations in the documentation of their shared type.
    return _names(filters.documentation) or _names(filters.member.members["Name"].documentation)


def is_documented(name: str, names: frozenset[str]) -> bool:
    """Return whether `names`, from `filter_names`, contains a filter or its prefix."""
    prefix, colon, _ = name.partition(":")
    return name in names or (bool(colon) and prefix + colon in names)


@lru_cache(maxsize=256)
def _names(documentation: str) -> frozenset[str]:
    """Return the filter names in an operation's documentation."""
    entries = {html.unescape(name) + (":" if key else "") for name, key in _ENTRY.findall(documentation)}
    aliases = {html.unescape(name) for names in _ALIASES.findall(documentation) for name in _CODE.findall(names)}
    return frozenset(name.partition("<")[0] for name in entries | aliases)


def _wrong_filters(operation: OperationModel, parameters: Mapping[str, Any]) -> Iterator[Violation]:
    names = filter_names(operation)
    if not names:
        return
    filters = [given for given in parameters.get("Filters") or () if isinstance(given, Mapping)]
    for given in filters:
        if "Name" in given and not is_documented(given["Name"], names):
            yield Violation("InvalidParameterValue", f"The filter '{given['Name']}' is invalid")
    values = sum(len(given.get("Values") or ()) for given in filters)
    if values > FILTER_VALUES:
        yield Violation("FilterLimitExceeded", f"The filters have {values} values; the limit is {FILTER_VALUES}")


def _over_limits(operation: OperationModel, parameters: Mapping[str, Any]) -> Iterator[Violation]:
    members = operation.input_shape.members if operation.input_shape else {}
    for name, value in parameters.items():
        documentation = html.unescape(members[name].documentation) if name in members else ""
        if isinstance(value, (list, tuple)) and (found := _MOST_ITEMS.search(documentation)):
            # Some operations have a parameter MaxRecords, with which a call can raise the documented limit of the list.
            most = max(int(found[1]), parameters.get("MaxRecords") or 0 if "MaxRecords" in documentation else 0)
            if len(value) > most:
                yield Violation("InvalidParameterValue", f"{name} has {len(value)} items; the limit is {most}")
        elif isinstance(value, int) and (found := _MOST_RECORDS.search(documentation)) and value > int(found[1]):
            yield Violation("InvalidParameterValue", f"{name} is {value}; the limit is {found[1]}")
        elif name == "MaxResults" and parameters.get("InstanceIds") and _NOT_WITH_IDS.search(documentation):
            yield Violation("InvalidParameterCombination", "MaxResults cannot be combined with InstanceIds")


def _wrong_values(shape: Shape, value: Any, where: str) -> Iterator[Violation]:
    """Yield a violation for each text that is not a documented value of its parameter."""
    if shape.type_name == "structure" and isinstance(value, Mapping):
        for name, member in shape.members.items():
            if name in value:
                yield from _wrong_values(member, value[name], f"{where}.{name}".lstrip("."))
    elif shape.type_name == "list" and isinstance(value, (list, tuple)):
        longest = shape.metadata.get("max")
        if longest is not None and len(value) > longest:
            yield Violation("InvalidParameterValue", f"{where} has {len(value)} items; the limit is {longest}")
        for item in value:
            yield from _wrong_values(shape.member, item, where)
    elif shape.type_name == "map" and isinstance(value, Mapping):
        for item in value.values():
            yield from _wrong_values(shape.value, item, where)
    elif (
        isinstance(value, str) and shape.name not in GROWING and value not in (getattr(shape, "enum", None) or [value])
    ):
        most = shape.enum[:SHOWN_VALUES]
        more = ", …" if len(shape.enum) > SHOWN_VALUES else ""
        yield Violation("InvalidParameterValue", f"{where} {value!r} is none of {', '.join(most)}{more}")
