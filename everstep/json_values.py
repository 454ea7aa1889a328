"""Type guards for values parsed from JSON, YAML or TOML.

Invariant: a guard looks at the value only, never at its members: their types stay `Any`. `isinstance(value, dict)`
would leave them unknown to a type checker.
"""

from __future__ import annotations

from typing import Any, TypeGuard


def is_object(value: object) -> TypeGuard[dict[str, Any]]:
    """Return whether a value is an object: a dict, whose keys are text."""
    return isinstance(value, dict)


def is_array(value: object) -> TypeGuard[list[Any]]:
    """Return whether a value is an array: a list."""
    return isinstance(value, list)
