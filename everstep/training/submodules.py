"""Imports submodules of torch when a job's script uses one that nothing has imported.

A warm rank is forked from a process that has imported many submodules, and any other rank is not. With this module, a
script runs in both kinds of ranks.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def import_on_use() -> None:
    """Make the packages of torch import a public submodule at the first access to it. Repeated calls change nothing."""
    for name, module in [*sys.modules.items()]:
        if name.partition(".")[0] == "torch" and type(module) is ModuleType and hasattr(module, "__path__"):
            known = vars(module).get("__getattr__")
            if not isinstance(known, _Lookup):
                vars(module)["__getattr__"] = _Lookup(name, known)


class _Lookup:
    def __init__(self, package: str, original: Callable[[str], Any] | None) -> None:
        self._package = package
        self._original = original
        self._missing: set[str] = set()

    def __call__(self, name: str) -> Any:
        if self._original is not None:
            try:
                return self._original(name)
            except AttributeError:
                if name.startswith("_"):
                    raise
        path = f"{self._package}.{name}"
        if not name.startswith("_") and name not in self._missing and importlib.util.find_spec(path) is not None:
            try:
                found = importlib.import_module(path)
            except ImportError as error:
                raise AttributeError(f"module {path!r} cannot be imported: {error}") from error
            import_on_use()
            return found
        self._missing.add(name)
        raise AttributeError(f"module {self._package!r} has no attribute {name!r}", name=name)
