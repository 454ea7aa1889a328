"""Finds objects of one kind inside other objects, such as random generators inside a dataset.

The search follows attributes, slots, lists, dicts, closures, methods, and attributes of the script's classes. Of
globals and class attributes, it includes only wanted objects and functions of the script.
"""

from __future__ import annotations

import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import BuiltinMethodType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final, cast

import numpy as np
import torch

SEARCH_DEPTH: Final = 16
LIBRARY_DEPTH: Final = 3
"""Levels inside objects of libraries. Deeper inside, libraries keep generators of their own."""
MAX_OBJECTS: Final = 20_000
OF_MODULES: Final = frozenset(vars(torch.nn.Module()))
"""Attributes in which torch keeps a module's parameters, buffers, modules, hooks and mode."""
HOOKS: Final = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Attributes with the hooks that a module's calls run."""
_LEAVES: Final = (torch.Tensor, np.ndarray, str, bytes, int, float, type, type(None), ModuleType)
_CONTAINERS: Final = (Mapping, list, tuple, deque, partial, MethodType, BuiltinMethodType, FunctionType)
MAX_PARTS: Final = 64
"""Longer lists and dicts usually hold samples."""
LIBRARIES: Final = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
"""Directories whose functions the search does not follow, because they use no global object of the script."""


def find(roots: Iterable[object], is_wanted: Callable[[object], bool], *, depth: int = SEARCH_DEPTH) -> list[Any]:
    """Return each wanted object inside `roots` once, in a fixed order. The search does not enter wanted objects."""
    found: dict[int, object] = {}
    seen: dict[int, object] = {}  # keeps each object alive, so that no other object gets its id
    waiting = deque((root, depth) for root in roots)
    while waiting and len(seen) < MAX_OBJECTS:
        value, left = waiting.popleft()
        if id(value) in seen or isinstance(value, _LEAVES) or _is_module_of_library(value):
            continue
        seen[id(value)] = value
        if is_wanted(value):
            found[id(value)] = value
        elif left > 1:
            levels = 1 if isinstance(value, _CONTAINERS) or is_class_of_script(type(value)) else LIBRARY_DEPTH
            waiting += ((part, left - levels) for part in _parts(value, is_wanted))
    return list(found.values())


def values_of(value: object) -> list[object]:
    """Return the values of an object's attributes. For a module, omit parameters, buffers and hooks."""
    if isinstance(value, torch.nn.Module):
        own = (each for key, each in vars(value).items() if key not in OF_MODULES)
        return [*value._modules.values(), *own]
    slots = (name for kind in type(value).__mro__ for name in _slots(kind))
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, name) for name in slots if hasattr(value, name))]


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ()) if is_class_of_script(kind) else ()
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _parts(value: object, is_wanted: Callable[[object], bool]) -> Iterable[object]:
    if isinstance(value, Mapping):
        return list(value.values()) if len(value) <= MAX_PARTS else ()
    if isinstance(value, (list, tuple, deque)):
        return value if len(value) <= MAX_PARTS else ()
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, BuiltinMethodType):
        return [value.__self__]
    if isinstance(value, FunctionType):
        used = (value.__globals__.get(name) for name in _names(value.__code__))
        return [
            *_cells(value),
            *(value.__defaults__ or ()),
            *(value.__kwdefaults__ or {}).values(),
            *(each for each in used if _is_of_script(each) or is_wanted(each)),
        ]
    of_kinds = (each for kind in type(value).__mro__ if is_class_of_script(kind) for each in vars(kind).values())
    return [*values_of(value), *(each for each in of_kinds if _is_of_script(each) or is_wanted(each))]


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _is_module_of_library(value: object) -> bool:
    return isinstance(value, ModuleType) and (getattr(value, "__file__", None) or "").startswith(LIBRARIES)


def is_class_of_script(kind: type) -> bool:
    """Return whether the script defines a class, not a library, Python or Everstep."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    is_known = kind.__module__ in sys.builtin_module_names or kind.__module__.startswith("everstep.")
    return not is_known and not (file or "").startswith(LIBRARIES)


def _is_of_script(value: object) -> bool:
    return isinstance(value, FunctionType) and not value.__code__.co_filename.startswith(LIBRARIES)


def _cells(function: FunctionType) -> Iterator[object]:
    for cell in cast("tuple[Any, ...]", function.__closure__ or ()):
        with suppress(ValueError):  # Skip a closure variable that has no value yet.
            yield cell.cell_contents
