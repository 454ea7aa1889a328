"""Finds values in the attributes of a script's objects that change in training, such as a hidden state."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import chain, compress
from operator import itemgetter
from types import BuiltinFunctionType, BuiltinMethodType, FunctionType, MethodType
from typing import Any, Final, TypeAlias, cast

import numpy as np
import torch

from everstep.training import rng
from everstep.training.parts import HOOKS, LIBRARIES, MAX_PARTS, OF_MODULES, find, values_of
from everstep.training.state_tree import PLAIN_CLASSES, Tree

MAX_ATTRIBUTE_BYTES: Final = 16 * 1024 * 1024
"""Larger tensors in attributes are usually caches."""
_NEUTRAL: Final = (
    *("torch.nn.modules.", "torch.ao.nn.", "torch.utils.data.", "torch.distributed.fsdp."),
    *("abc", "builtins", "collections.abc", "typing"),
)
_SEARCHED: Final = (*rng.GENERATORS, list, tuple, dict)
MODULE_DEPTH: Final = 4
"""Levels below a module's attribute that the search for random generators follows."""
_SCALARS: Final = (bool, int, float, str)
_FUNCTIONS: Final = (FunctionType, BuiltinFunctionType, MethodType, partial, type, Enum)
_call = cast("Callable[[Callable[[dict[str, Any]], tuple[Any, ...]], dict[str, Any]], tuple[Any, ...]]", operator.call)
_LATE: Final = object()
_Kinds: TypeAlias = tuple[type, ...]
_TORCH: Final[_Kinds] = (float, type(None))
_LIBRARY: Final[_Kinds] = (float, list, tuple, torch.Tensor)
_SCRIPT: Final[_Kinds] = (*_LIBRARY, bool, int, str, type(None))
"""Watched values in modules of a torch class, of a library's class, and of the script's class."""


class Attributes:
    """The attributes that changed since this object was created: plain values, and tensors that are not buffers.
    Modules of torch and of libraries contribute only numbers, tensors and their lists. Torch's wrappers and other
    objects of libraries contribute nothing. Object names are the same in each launch. `max_items` limits the length of
    lists.
    """

    def __init__(self, objects: Iterable[tuple[str, object]], *, max_items: int = MAX_PARTS) -> None:
        self._max_items = max_items
        self._initial: dict[tuple[str, str], object] = {}
        self._watch(dict(objects), is_first=True)

    def follow(self, objects: Iterable[tuple[str, object]]) -> None:
        """Watch the objects by which the script has replaced the earlier objects of the same names."""
        self._watch(dict(objects), is_first=False)

    def observe(self, *, is_within: bool = False) -> dict[str, Tree]:
        """Return the changed attributes, by object and attribute. `is_within` states that a pass over the data runs. A
        restart repeats the pass and rebuilds a sampler's long lists, so the result omits them.
        """
        if sum(map(len, self._growing)) != self._count:
            self._watch(self._objects, is_first=False)
        try:
            values = self._values()
        except KeyError:  # The script has deleted an attribute.
            self._watch(self._objects, is_first=False)
            values = self._values()
        with suppress(Exception):  # A value of the script may refuse the comparison.
            if values == self._marks:
                return {}
        suspected = compress(range(len(values)), map(operator.is_not, values, self._marks))
        changed = [number for number in suspected if not _is_same(values[number], self._marks[number])]
        max_items = min(self._max_items, MAX_PARTS) if is_within else self._max_items
        changed = [number for number in changed if _is_kept(values[number], max_items)]
        found: dict[str, Any] = {}
        if any(map(_has_tensor, map(values.__getitem__, changed))):
            held = {*chain.from_iterable(map(_storages, self._objects.values()))}
            changed = [number for number in changed if not _shares(values[number], held)]
        for number in changed:
            place, key = self._places[number]
            found.setdefault(place, {})[key] = values[number]
        return found

    def copy(self) -> dict[str, Tree]:
        """Return copies of the changed attributes."""
        return cast("dict[str, Tree]", copied(self.observe()))

    def load(self, saved: Mapping[str, Any]) -> None:
        """Set the attributes that `observe` returned."""
        for place, values in saved.items():
            held = self._objects.get(place)
            for key, value in values.items() if held is not None else ():
                vars(held)[key] = copied(value)

    def _values(self) -> list[object]:
        return [*chain.from_iterable(map(_call, self._getters, self._dicts))]

    def _watch(self, objects: dict[str, object], *, is_first: bool) -> None:
        self._objects = objects
        self._places: list[tuple[str, str]] = []
        self._dicts: list[dict[str, Any]] = []
        self._getters: list[Callable[[dict[str, Any]], tuple[Any, ...]]] = []
        self._growing: list[dict[str, Any]] = []
        for place, each in objects.items():
            origin = _origin(type(each)) if hasattr(each, "__dict__") else None
            if origin is None:
                continue
            held = vars(each)
            if origin is _SCRIPT:
                self._growing.append(held)
            keys = [
                key
                for key, value in held.items()
                if isinstance(value, origin)
                and not (isinstance(each, torch.nn.Module) and key in OF_MODULES)
                and (origin is _SCRIPT or not key.startswith("_"))
            ]
            if keys:
                keys = keys if len(keys) > 1 else keys * 2  # With one name, `itemgetter` returns no tuple.
                self._places += [(place, key) for key in keys]
                self._dicts.append(held)
                self._getters.append(itemgetter(*keys))
            if is_first:
                self._initial |= {(place, key): _mark(held[key]) for key in keys}
        self._marks = [self._initial.get(place, _LATE) for place in self._places]
        self._count = sum(map(len, self._growing))


def objects_of_script(roots: Iterable[object], *, besides: Iterable[object] = ()) -> list[tuple[str, object]]:
    """Return the objects of the script's classes inside these objects, such as transforms. Their names are numbers."""
    others = {id(each) for _, each in objects_of_script(besides)} if besides else ()
    found: dict[int, object] = {}
    waiting = [*roots]
    while waiting and len(found) < MAX_PARTS:
        fresh = [each for each in find(waiting, _is_of_script) if id(each) not in found and id(each) not in others]
        found |= {id(each): each for each in fresh}
        waiting = [value for each in fresh for value in values_of(each)]
    return [(str(number), each) for number, each in enumerate(found.values())]


def generators_of(modules: Iterable[torch.nn.Module]) -> list[rng.Generator]:
    """Return the random generators that modules hold, also in lists, in objects of the script, and in its classes.
    Objects of libraries are not searched, because they hold generators of their own, for example of process groups.
    """
    values = (each for module in modules for each in (*values_of(module), *_of_class(type(module))))
    roots = [each for each in values if isinstance(each, _SEARCHED) or _is_of_script(each) or _is_function(each)]
    return rng.find_generators([each for each in roots if not isinstance(each, torch.nn.Module)], depth=MODULE_DEPTH)


def _is_function(value: object) -> bool:
    """Return whether a value is a function of the script, or a method of a generator such as `random.Random.random`."""
    function = value.func if isinstance(value, partial) else value
    if isinstance(function, FunctionType):
        return not function.__code__.co_filename.startswith(LIBRARIES)
    return isinstance(function, (MethodType, BuiltinMethodType)) and isinstance(function.__self__, rng.GENERATORS)


def functions_of(modules: Iterable[torch.nn.Module]) -> list[object]:
    """Return marks of the hooks and functions that modules call. Equal marks mean unchanged hooks and functions."""
    found: list[object] = []
    for number, module in enumerate(modules):
        held = vars(module)
        found += [(number, key, _code(each)) for key in HOOKS for each in (held.get(key) or {}).values()]
        for key in sorted(held.keys() - OF_MODULES):
            if isinstance(held[key], _FUNCTIONS):
                found.append((number, key, _code(held[key])))
        for key, parameter in module._parameters.items():
            if parameter is not None and (hooks := parameter._backward_hooks or parameter._post_accumulate_grad_hooks):
                found += [(number, key, _code(each)) for each in hooks.values()]
    return found


def _code(function: object) -> object:
    """Return a value that is equal for all functions of the same code."""
    while isinstance(function, (partial, MethodType)):
        function = function.func if isinstance(function, partial) else function.__func__
    if isinstance(function, FunctionType):
        return function.__code__
    return function if isinstance(function, _FUNCTIONS) else type(function)


def _of_class(kind: type) -> Iterable[object]:
    of_script = (each for each in kind.__mro__ if _origin(each) is _SCRIPT)
    return (value for each in of_script for value in vars(each).values() if isinstance(value, rng.GENERATORS))


def _is_of_script(value: object) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, type) and _origin(type(value)) is _SCRIPT


def _origin(kind: type) -> _Kinds | None:
    """Return the kinds of watched values in a class's objects. None for wrappers and objects of libraries."""
    own = [each for each in kind.__mro__ if each not in (object, torch.nn.Module)]
    others = [each for each in own if not each.__module__.startswith(_NEUTRAL)]
    if any(each.__module__.startswith("torch.") for each in others):
        return None
    files = (getattr(sys.modules.get(each.__module__), "__file__", None) or "" for each in others)
    is_library = any(file.startswith(LIBRARIES) for file in files) or kind.__module__.startswith("everstep.")
    if not issubclass(kind, torch.nn.Module):
        return _SCRIPT if others and not is_library else None
    return _TORCH if not others else _LIBRARY if is_library else _SCRIPT


def _mark(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return _TensorMark(value, 0 if value.is_inference() else value._version)
    return [*map(_mark, value)] if isinstance(value, (list, tuple)) else value


@dataclass(frozen=True, slots=True, eq=False)
class _TensorMark:
    tensor: torch.Tensor
    version: int


def _is_same(value: object, mark: object) -> bool:
    if isinstance(mark, _TensorMark):
        return value is mark.tensor and (mark.tensor.is_inference() or mark.version == mark.tensor._version)
    if isinstance(value, (list, tuple)):
        return isinstance(mark, list) and len(value) == len(mark) and all(map(_is_same, value, mark))
    return value is mark or (isinstance(value, _SCALARS) and type(value) is type(mark) and value == mark)


def _is_kept(value: object, max_items: int) -> bool:
    """Return whether a snapshot can contain a value. A tensor with a graph is computed again by the next step."""
    if isinstance(value, torch.Tensor):
        return type(value) is torch.Tensor and value.grad_fn is None and value.nbytes <= MAX_ATTRIBUTE_BYTES
    if isinstance(value, (list, tuple)):
        is_short = type(value) in (list, tuple) and len(value) <= max_items
        return is_short and all(_is_kept(each, max_items) for each in value)
    return value is None or type(value) in _SCALARS


def _has_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, (list, tuple)) and any(map(_has_tensor, value)))


def _storages(value: object) -> Iterable[int]:
    tensors = (*value._parameters.values(), *value._buffers.values()) if isinstance(value, torch.nn.Module) else ()
    for tensor in tensors:
        if tensor is not None and type(tensor) in PLAIN_CLASSES:
            yield tensor.untyped_storage().data_ptr()


def _shares(value: object, storages: Collection[int]) -> bool:
    """Return whether a value is a view of a parameter or buffer, which the snapshot contains anyway."""
    if isinstance(value, torch.Tensor):
        return value.numel() > 0 and value.untyped_storage().data_ptr() in storages
    return isinstance(value, (list, tuple)) and any(_shares(each, storages) for each in value)


def copied(value: Any) -> Any:
    """Return a copy of a state tree, with copies of its tensors, arrays and sets."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, (np.ndarray, set)):
        return value.copy()
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items()}
    return type(value)(map(copied, value)) if isinstance(value, (list, tuple)) else value
