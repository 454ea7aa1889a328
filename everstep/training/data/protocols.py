"""Defines protocols of the objects that a data stream uses: loaders, datasets, sources, and the order of samples."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, ClassVar, Protocol, Self, cast, runtime_checkable

import torch
import torch.distributed as dist

from everstep.training import rng
from everstep.training.adapters.base import qualified_name
from everstep.training.errors import CannotResume
from everstep.training.parts import find
from everstep.training.script import Environment
from everstep.training.state_tree import Tree

STATEFUL_DEPTH = 4
"""A deeper search would find a dataset's trainer."""
END = object()
"""Marks the end of an iterator in `next(iterator, END)`."""


@runtime_checkable
class Stateful(Protocol):
    """An object that can return its state and restore it."""

    def state_dict(self) -> dict[str, object]: ...
    def load_state_dict(self, state_dict: dict[str, object]) -> object: ...


def find_stateful(roots: Iterable[object]) -> list[Stateful]:
    """Return the outermost objects with a state, except modules, which the script registers, in a fixed order."""
    return find(roots, has_state, depth=STATEFUL_DEPTH)


def has_state(value: object) -> bool:
    """Return whether the class of an object has `state_dict` and `load_state_dict`, and is not a module of torch."""
    kind = type(value)
    methods = (getattr(kind, name, None) for name in ("state_dict", "load_state_dict"))
    return all(map(callable, methods)) and not isinstance(value, torch.nn.Module)


class Order(ABC):
    """The order in which all ranks together receive the data of an epoch. Its classes are frozen dataclasses. A
    position in this order is a number that has the same meaning for any number of ranks.
    """

    __slots__ = ()
    replicas: int
    batch: int
    compared: ClassVar[tuple[str, ...]]
    """Fields in which two orders must agree, so that positions of one are valid in the other."""

    def tree(self) -> dict[str, Tree]:
        """Return the fields by name, for a snapshot."""
        return cast("dict[str, Tree]", asdict(cast(Any, self)))

    def differences(self, tree: dict[str, Tree]) -> str:
        """Return why positions in an earlier order are not valid in this one, empty if they are."""
        now = self.tree()
        if tree.keys() != now.keys():
            return "the loader was of another kind"
        return "; ".join(
            f"{name} was {tree[name]}, is {now[name]}" for name in self.compared if tree[name] != now[name]
        )

    def earlier(self, tree: dict[str, Tree]) -> Self:
        """Return the order that an earlier launch stored as `tree`. `differences(tree)` must be empty."""
        return type(self)(**cast("dict[str, Any]", tree))

    @abstractmethod
    def position(self, begin: int, batch_count: int) -> int:
        """Return the position in the epoch after each rank has read `batch_count` batches, beginning at `begin`."""


class Resumable(Protocol):
    """A source around a registered data loader, which yields its batches and restores its position."""

    @property
    def generators(self) -> Sequence[rng.Generator]:
        """Generators that the batches depend on, except the global ones."""
        ...

    @property
    def order(self) -> Order | None:
        """The order of all ranks' data; None if another number of ranks cannot continue."""
        ...

    def begin(self, epoch: int) -> Iterator[object]:
        """Return the batches of an epoch that follow the restored position, if any."""
        ...

    def end(self) -> None:
        """End the epoch. Until the next `begin`, `state_dict` returns the position between this epoch and the next."""

    def state_dict(self) -> dict[str, Tree]:
        """Return the position as a state tree."""
        ...

    def load_state_dict(self, state: dict[str, Tree], consumed_count: int) -> None:
        """Restore a position from `state_dict` for the next `begin`."""


def place_in_world() -> tuple[int, int]:
    """Return the rank of this process, and the number of ranks."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    environment = Environment.read()
    return environment.rank, environment.world_size


def check_signatures(name: str, value: object) -> None:
    """Raise CannotResume if an object's `state_dict`, `load_state_dict` or `set_epoch` needs other arguments."""
    for method, arguments in (("state_dict", ()), ("load_state_dict", ({},)), ("set_epoch", (0,))):
        function = getattr(value, method, None)
        with suppress(ValueError):  # a function of C can have no signature
            try:
                if callable(function):
                    inspect.signature(function).bind(*arguments)
            except TypeError as error:
                raise CannotResume(
                    name,
                    f"{qualified_name(type(value))}.{method}: {error}. Everstep calls state_dict(), "
                    "load_state_dict(state) and set_epoch(epoch)",
                ) from error


def set_epoch(thing: object, epoch: int) -> None:
    """Call the object's `set_epoch` if it has one."""
    if callable(method := getattr(thing, "set_epoch", None)):
        method(epoch)
