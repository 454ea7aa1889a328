"""Provides type guards for values parsed from JSON, YAML or TOML.

Invariant: a guard checks only the value itself, not its members. For type checkers, the members have the type `Any`.
"""

from __future__ import annotations

from typing import Any, TypeGuard


def is_object(value: object) -> TypeGuard[dict[str, Any]]:
    """Return whether a value is a JSON object: a dict with text keys."""
    return isinstance(value, dict)


def is_array(value: object) -> TypeGuard[list[Any]]:
    """Return whether a value is a JSON array: a list."""
    return isinstance(value, list)
