"""Finds the filter names that AWS documents for its operations. Pure.

botocore checks types only, and moto accepts filters that AWS refuses. The local cloud refuses undocumented filters as
EC2 does.

Source: the documentation strings of botocore's service models, which AWS publishes.
"""

from __future__ import annotations

import html
import re
from functools import lru_cache
from typing import Final

from botocore.model import OperationModel

_ENTRY: Final = re.compile(r"<li>\s*(?:<p>\s*)?<code>([^<]+)</code>\s*(:&lt;[^&]+&gt;)?\s*-")
_ALIASES: Final = re.compile(r"You can also use ((?:<code>[^<]+</code>(?:, | or | and )?)+)")
_CODE: Final = re.compile(r"<code>([^<]+)</code>")


@lru_cache(maxsize=256)
def _names(documentation: str) -> frozenset[str]:
    """Return the filter names in an operation's documentation.

    An entry that ends with a colon, such as `tag:`, stands for all names with this prefix.
    """
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
    # Auto Scaling documents the filters of all operations in one place: the shape that they share.
    return _names(filters.documentation) or _names(filters.member.members["Name"].documentation)


def is_documented(name: str, names: frozenset[str]) -> bool:
    """Return whether `names`, a result of `filter_names`, contains `name` or its prefix."""
    prefix, colon, _ = name.partition(":")
    return name in names or (bool(colon) and prefix + colon in names)
