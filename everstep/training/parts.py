"""Finds objects of one kind inside other objects, such as random generators inside a dataset.

The search follows attributes, lists, dicts, closures and methods, a few levels deep. If a function uses a global
variable, the search includes the variable's value only if it is a wanted object or another function of the script.

Callers pass the function that recognizes wanted objects.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any, Final, cast

import numpy as np
import torch

SEARCH_DEPTH: Final = 4
MAX_PARTS: Final = 64
"""Length of the longest list or dict that `find` searches. It skips longer ones, because they usually hold samples."""
_LIBRARIES: Final = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
"""Directories of Python's standard library and of installed packages.

The search follows no method and no function in them, because their code uses no global object of the script.
"""


def find(roots: Iterable[object], is_wanted: Callable[[object], bool]) -> list[Any]:
    """Return each wanted object inside these objects once, in a fixed order.

    Args:
        roots: samplers, datasets, functions or other objects.
        is_wanted: returns whether an object belongs to the result. The search does not look inside such an object.

    Returns:
        The wanted objects.
    """
    found: dict[int, object] = {}
    seen: dict[int, int] = {}
    """The largest number of further levels to which the search has followed an object, by the object's id.

    The search follows an object again only if more levels remain than before.
    """

    def search(value: object, depth: int) -> None:
        if is_wanted(value):
            found.setdefault(id(value), value)
        elif depth > seen.get(id(value), 0) and not isinstance(
            value, (torch.Tensor, np.ndarray, str, bytes, type, torch.nn.Module)
        ):
            seen[id(value)] = depth
            for part in _parts(value, is_wanted):
                search(part, depth - 1)

    for root in roots:
        search(root, SEARCH_DEPTH)
    return list(found.values())


def _parts(value: object, is_wanted: Callable[[object], bool]) -> Iterable[object]:
    if isinstance(value, Mapping):
        return list(value.values()) if len(value) <= MAX_PARTS else ()
    if isinstance(value, (list, tuple)):
        return value if len(value) <= MAX_PARTS else ()
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, FunctionType):
        used = (value.__globals__.get(name) for name in _names(value.__code__))
        return [
            *_cells(value),
            *(value.__defaults__ or ()),
            *(value.__kwdefaults__ or {}).values(),
            *(each for each in used if _is_of_script(each) or is_wanted(each)),
        ]
    if not hasattr(value, "__dict__"):
        return ()
    methods = (each for kind in type(value).__mro__ for each in vars(kind).values() if _is_of_script(each))
    return [*vars(value).values(), *methods]


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names that a function uses, also in the comprehensions, lambdas and functions inside it."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _is_of_script(value: object) -> bool:
    return isinstance(value, FunctionType) and not value.__code__.co_filename.startswith(_LIBRARIES)


def _cells(function: FunctionType) -> Iterator[object]:
    for cell in cast("tuple[Any, ...]", function.__closure__ or ()):
        with suppress(ValueError):  # Skip a closure variable that has no value yet.
            yield cell.cell_contents
