"""Finds random generators that the script uses and that no snapshot contains.

The search begins at the globals of the script's modules and at the local variables of its running functions.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from types import FrameType, FunctionType, MethodType, ModuleType
from typing import Any, cast

import numpy as np
import torch

from everstep.training.determinism.calls import is_user_file
from everstep.training.rng import Generator

_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_OPAQUE = (torch.Tensor, np.ndarray, str, bytes, int, float, type, ModuleType, random.SystemRandom)
SEARCH_DEPTH = 6
MAX_PARTS = 64
"""Length of the longest container that the search enters.

It skips longer containers, because they usually hold samples.
"""


def find_private(kept: Iterable[Generator]) -> dict[str, Generator]:
    """Return the random generators that the script can reach and that no snapshot contains.

    Args:
        kept: the generators that snapshots contain, besides the global generators of the process.

    Returns:
        Generators by name, for example `train.model.dropout.generator`. Each generator occurs once.
    """
    seen: set[int] = {id(each) for each in (*kept, *_of_process())}
    found: dict[str, Generator] = {}
    for name, value in _roots():
        _search(name, value, SEARCH_DEPTH, seen, found)
    return found


def _of_process() -> list[object]:
    """Return the global generators of torch, numpy and Python. Snapshots contain them."""
    python = cast(MethodType, random.random).__self__
    numpy = cast(MethodType, np.random.random).__self__
    devices = torch.cuda.default_generators if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    return [torch.default_generator, python, numpy, *devices]


def _roots() -> Iterator[tuple[str, object]]:
    for module in list(sys.modules.values()):
        if is_user_file(getattr(module, "__file__", None) or "<built-in>"):
            yield from ((f"{module.__name__}.{name}", value) for name, value in list(vars(module).items()))
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            yield from ((f"{frame.f_code.co_name}.{name}", value) for name, value in list(frame.f_locals.items()))
        frame = frame.f_back


def _search(name: str, value: object, depth: int, seen: set[int], found: dict[str, Generator]) -> None:
    if id(value) in seen or isinstance(value, _OPAQUE):
        return
    seen.add(id(value))
    if isinstance(value, _KINDS):
        found[name] = value
    elif depth:
        for part_name, part in _parts(value):
            _search(f"{name}.{part_name}", part, depth - 1, seen, found)


def _parts(value: object) -> Iterable[tuple[object, object]]:
    if isinstance(value, Mapping):
        items = cast("Mapping[object, object]", value)
        return list(items.items()) if len(items) <= MAX_PARTS else ()
    if isinstance(value, (list, tuple)):
        return list(enumerate(cast("list[object]", value))) if len(value) <= MAX_PARTS else ()
    if isinstance(value, partial):
        return [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    if isinstance(value, MethodType):
        return [("self", value.__self__)]
    if isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        return [*_filled(cells), ("defaults", value.__defaults__)]
    return list(vars(value).items()) if hasattr(value, "__dict__") else ()


def _filled(cells: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, object]]:
    for name, cell in cells:
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue  # Skip a closure variable that has no value yet.
