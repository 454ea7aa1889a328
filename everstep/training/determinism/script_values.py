"""Finds values that the script keeps and that no snapshot contains, from its modules' globals and running functions."""

from __future__ import annotations

import inspect
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from types import BuiltinMethodType, FrameType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any, Final, cast

import numpy as np
import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from everstep.training import rng
from everstep.training.determinism.calls import is_user_file
from everstep.training.determinism.digests import digest_of
from everstep.training.parts import HOOKS, OF_MODULES
from everstep.training.rng import Generator

_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_SMALL = (bool, int, float, complex, str, bytes)
"""Equal values may be one object, so each occurrence counts."""
_PLAIN = (*_SMALL, torch.Tensor, np.ndarray)
_OPAQUE = (torch.Tensor, np.ndarray, ModuleType, random.SystemRandom)
_OF_OPTIMIZERS = ("state", "param_groups", "defaults", "step")
"""Attributes of optimizers that snapshots contain, and the method that schedulers replace."""
SEARCH_DEPTH = 6
MAX_VALUES = 20_000
"""Objects per search from the modules, and again from the running functions."""
MAX_BYTES = 16 * 1024 * 1024
"""Size of the largest tensor or array in the result."""
MAX_PARTS = 64
"""Longer containers usually hold samples."""


OF_LIBRARY: Final = "library"
"""The class, in a result of `values_of_script`, of numbers and texts inside an object of a package."""


@dataclass(frozen=True)
class _OfLibrary:
    value: object


def find_private(kept: Iterable[Generator]) -> dict[str, Generator]:
    """Return the reachable generators that no snapshot contains, each once, by name such as `train.model.generator`."""
    return _search({id(each) for each in (*kept, *_of_process())}, _KINDS)


def values_of_script(kept: Iterable[object], *, with_tensors: bool = True) -> dict[str, str]:
    """Return type and digest of each reachable value, lengths of containers, and positions of iterators over loaders.

    Names are `train.best` for a global of train.py, `main.best` for a variable of `main`, or `Encoder.memory` for an
    attribute of a registered module. Without tensors, the search costs little time. Within the objects `kept`, the
    search enters only what snapshots may lack.
    """
    kept = list(kept)
    kinds = (*_KINDS, *_PLAIN) if with_tensors else _SMALL
    found = _search({id(each) for each in (*kept, *_of_process())}, kinds, registered=kept, lengths=True)
    return {
        name: f"{OF_LIBRARY} {digest_of(value.value)}"
        if isinstance(value, _OfLibrary)
        else f"{type(value).__name__} {digest_of(rng.generator_state(value) if isinstance(value, _KINDS) else value)}"
        for name, value in found.items()
        if getattr(value, "nbytes", 0) <= MAX_BYTES
    }


def _of_process() -> list[object]:
    python = cast(MethodType, random.random).__self__
    numpy = cast(MethodType, np.random.random).__self__
    devices = torch.cuda.default_generators if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    return [torch.default_generator, python, numpy, *devices]


def _globals() -> Iterator[tuple[str, object]]:
    for module in list(sys.modules.values()):
        if is_user_file(getattr(module, "__file__", None) or "<built-in>"):
            yield from ((f"{module.__name__}.{name}", value) for name, value in list(vars(module).items()))


def _locals() -> Iterator[tuple[str, object]]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        # The local variables of a module's own code are its globals, which `_globals` yields.
        if is_user_file(frame.f_code.co_filename) and frame.f_locals is not frame.f_globals:
            yield from ((f"{frame.f_code.co_name}.{name}", value) for name, value in list(frame.f_locals.items()))
        frame = frame.f_back


def _inside(registered: Iterable[object]) -> Iterator[tuple[str, object]]:
    """Yield the attributes of modules and optimizers of the script's classes, and the script's hooks, by class name."""
    for each in registered:
        kind, held = type(each), vars(each) if isinstance(each, (torch.nn.Module, torch.optim.Optimizer)) else {}
        if _is_of_script(kind):
            keys = (key for key in held if key not in OF_MODULES and key not in _OF_OPTIMIZERS and key[:1] != "_")
            yield from ((f"{kind.__name__}.{key}", held[key]) for key in keys)
        hooks = (hook for key in HOOKS for hook in (held.get(key) or {}).values())
        yield from ((f"{kind.__name__}.hook", hook) for hook in hooks if _is_of_script(_class_of(hook)))


def _class_of(hook: object) -> type | FunctionType | MethodType:
    """Return the class of a hook, or the function itself. Both name the module that defines them."""
    hook = hook.func if isinstance(hook, partial) else hook
    return hook if isinstance(hook, (FunctionType, MethodType)) else type(hook)


def _search(
    seen: set[int], kinds: tuple[type, ...], *, registered: Iterable[object] = (), lengths: bool = False
) -> dict[str, Any]:
    """Return the reachable objects of these kinds by name, and with `lengths` also lengths and positions as texts."""
    found: dict[str, Any] = {}
    alive: list[object] = []  # so that no other object gets the id of one that the search has seen
    for roots in (_globals(), (*_locals(), *_inside(registered))):
        waiting = deque((name, value, SEARCH_DEPTH, False) for name, value in roots)
        limit = len(alive) + MAX_VALUES
        while waiting and len(alive) < limit:
            name, value, depth, is_library = waiting.popleft()
            if isinstance(value, _SMALL):
                if isinstance(value, kinds):
                    found[name] = _OfLibrary(value) if is_library else value
                continue
            if id(value) in seen:
                continue
            seen.add(id(value))
            alive.append(value)
            if lengths and (position := _position(value)):
                found[name] = _OfLibrary(position) if is_library else position
            if isinstance(value, kinds):
                found[name] = value
            elif depth and not isinstance(value, _OPAQUE):
                if lengths and isinstance(value, (list, tuple, deque, dict)):
                    found[name] = _OfLibrary(len(value)) if is_library else f"length {len(value)}"
                is_within = is_library or _is_of_library(str(type(value).__module__))
                waiting += ((f"{name}.{part_name}", part, depth - 1, is_within) for part_name, part in _parts(value))
    return found


def _position(value: object) -> str:
    """Return the position of an iterator that a restart begins anew; empty for other objects."""
    if isinstance(value, _BaseDataLoaderIter):
        return f"{value._num_yielded} batches"
    if not isinstance(value, GeneratorType) or not is_user_file(value.gi_code.co_filename):
        return ""
    held = [] if value.gi_frame is None else list(value.gi_frame.f_locals.values())
    # A generator over a stream of the session continues where the stream does.
    is_kept = any(type(each).__module__.partition(".")[0] == "everstep" for each in held)
    return "" if is_kept else inspect.getgeneratorstate(value)


def _parts(value: object) -> Iterable[tuple[object, object]]:
    if isinstance(value, Mapping):
        items = cast("Mapping[object, object]", value)
        return list(items.items()) if len(items) <= MAX_PARTS else ()
    if isinstance(value, (list, tuple, deque)):
        return list(enumerate(cast("list[object]", value))) if len(value) <= MAX_PARTS else ()
    if isinstance(value, partial):
        return [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    if isinstance(value, (MethodType, BuiltinMethodType)):
        return [("self", value.__self__)]
    if isinstance(value, FunctionType):
        if (value.__module__ or "").partition(".")[0] == "everstep":
            return ()  # methods that Everstep has wrapped, such as `zero_grad`
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        return [*_filled(cells), ("defaults", value.__defaults__)]
    if isinstance(value, type):
        return list(vars(value).items()) if _is_of_script(value) else ()
    if isinstance(value, torch.nn.Module):
        own = [(name, part) for name, part in vars(value).items() if name not in OF_MODULES]
        return [*value.named_parameters(), *value.named_buffers(), *own]
    if type(value).__module__.partition(".")[0] in ("everstep", "tqdm"):
        return ()  # Everstep's own objects, such as the session, and displays of progress
    return list(vars(value).items()) if hasattr(value, "__dict__") else ()


@lru_cache(maxsize=4096)
def _is_of_library(module: str) -> bool:
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file


def _is_of_script(kind: type | FunctionType | MethodType) -> bool:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is not None and is_user_file(file)


def _filled(cells: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, object]]:
    for name, cell in cells:
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue  # Skip a closure variable that has no value yet.
