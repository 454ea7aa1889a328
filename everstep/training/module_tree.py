"""Follows the modules of registered models, which a script may replace while it trains."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from everstep.training.errors import CannotResume

WRAPPER_NAMES = ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Path components that torch.compile, DDP and activation checkpointing add."""


class ModuleTree:
    """The modules and parameters of models at the creation of this object. A single model has the empty name."""

    def __init__(self, models: Mapping[str, torch.nn.Module]) -> None:
        self.modules = [list(model.modules()) for model in models.values()]
        self.paths = {
            f"{prefix}.{path}".strip("."): module
            for prefix, model in models.items()
            for path, module in model.named_modules()
        }
        found = list(chain.from_iterable(self.modules))
        dicts: list[dict[str, Any]] = [*(each._modules for each in found), *(each._parameters for each in found)]
        self._views = [each.values() for each in dicts if each]  # live views, so that a look needs no call per module
        self._empty = [each for each in dicts if not each]
        self._dicts = [each for each in dicts if each]
        self._seen = [*chain.from_iterable(self._views)]
        self._names = [*chain.from_iterable(self._dicts)]

    def has_changed(self) -> bool:
        """Return whether a module or parameter was added, removed, replaced or renamed since the creation."""
        now = [*chain.from_iterable(self._views)]
        is_same = len(now) == len(self._seen) and all(map(operator.is_, now, self._seen)) and not any(self._empty)
        return not is_same or [*chain.from_iterable(self._dicts)] != self._names


def refusal(name: str, before: ModuleTree, now: ModuleTree, *, follows: bool) -> CannotResume | None:
    """Return an error for a module that a restart would build differently. `follows` permits another of its class."""
    if (found := _difference(before, now, follows=follows)) is None:
        return None
    path, how = found
    return CannotResume(
        f"{name}/{path}", f"{how} after init(), and a restarted script restores into the model of init()"
    )


def _difference(before: ModuleTree, now: ModuleTree, *, follows: bool) -> tuple[str, str] | None:
    for path in before.paths:
        if path not in now.paths:
            return path, "this module was removed"
    for path, module in now.paths.items():
        known = before.paths.get(path)
        if known is None:
            return path, "this module was added"
        if type(module) is not type(known):
            return path, f"this module was replaced by a {type(module).__qualname__}"
        if module is not known and not follows:
            return path, "this module was replaced"
    return None


def places_of(modules: Sequence[Sequence[torch.nn.Module]]) -> Iterable[tuple[str, torch.nn.Module]]:
    """Yield each module by the number of its model and its path, without the names of wrappers."""
    for number, (root, *_) in enumerate(modules):
        for path, module in root.named_modules():
            yield f"{number}/{canonical_name(path)}", module


def canonical_name(name: str) -> str:
    """Return a path without `WRAPPER_NAMES`."""
    return ".".join(part for part in name.split(".") if part not in WRAPPER_NAMES)
