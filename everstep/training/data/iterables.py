"""Resumes loaders that store their own state, and iterables that are read again from the beginning."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Iterator
from typing import Any, Final, cast

from everstep.training import rng
from everstep.training.attributes import Attributes, objects_of_script
from everstep.training.data.protocols import END, Order, Stateful, set_epoch
from everstep.training.data.walks import Place, Walk
from everstep.training.parts import SEARCH_DEPTH
from everstep.training.state_tree import Tree, is_same

logger = logging.getLogger("everstep.training")

LOADER_DEPTH = 3 * SEARCH_DEPTH
_RESTARTS: Final = "restart_on_stop_iteration"
"""Attribute of torchdata's `Loader`: whether `iter` begins an epoch if the restored one has no further batches."""


class OwnState:
    """Resumes a loader that stores its own position and has `state_dict` and `load_state_dict`.

    No method of the loader is called before its state is restored, because a call can change it. Until a restarted
    loader has made its next batch, the generators have their states from the beginning of the epoch: it may draw
    numbers again, for example to start workers. If a loader draws both at its start and for every batch, only the
    rehearsal can find a difference.
    """

    def __init__(self, loader: Stateful) -> None:
        self._loader = loader
        self._epoch = 0
        self._is_begun = False
        self._is_resuming = False
        self._loaded: Tree = None
        self._began: rng.States | None = None
        self._draws: bool | None = None
        self._is_of_nodes = hasattr(loader, _RESTARTS)
        self._is_lazy = self._is_of_nodes or inspect.isgeneratorfunction(getattr(type(loader), "__iter__", None))
        self.generators = rng.find_generators([loader], depth=LOADER_DEPTH)
        self.order: Order | None = None

    def begin(self, epoch: int) -> Iterator[object]:
        loaded, self._loaded, self._is_begun = self._loaded, None, True
        is_resuming, self._is_resuming = self._is_resuming, False
        present = rng.states(self.generators)
        if loaded is not None:
            rng.set_states(self.generators, self._began or present)
            set_epoch(self._loader, self._epoch)  # before the load, because it resets the position of some loaders
            self._loader.load_state_dict(cast("dict[str, object]", loaded))
            if not is_resuming and self._is_of_nodes:
                next(self._iter_once(), END)  # Such a loader goes on to the next epoch only from the end of one.
        if is_resuming:
            batches = self._iter_once()
            if not (self._is_lazy if self._draws is None else not self._draws):
                rng.set_states(self.generators, present)
                return self._received(batches, None)
            return self._received(batches, present)
        rng.set_states(self.generators, present)
        self._began, self._epoch = present, epoch
        set_epoch(self._loader, epoch)
        return self._received(iter(cast("Iterable[object]", self._loader)), None)

    def _iter_once(self) -> Iterator[object]:
        """Return an iterator that ends with the restored epoch, where torchdata's `Loader` would begin another one."""
        batches = cast("Iterable[object]", self._loader)
        if not self._is_of_nodes:
            return iter(batches)
        before = getattr(self._loader, _RESTARTS)
        setattr(self._loader, _RESTARTS, False)
        try:
            return iter(batches)
        finally:
            setattr(self._loader, _RESTARTS, before)

    def _received(self, batches: Iterator[object], present: rng.States | None) -> Iterator[object]:
        """Yield the batches, and note whether the loader draws for them. After the first, set the states `present`."""
        batch = next(batches, END)
        if present is not None and self._began is not None:
            states = rng.states(self.generators)
            for index, (now, began) in enumerate(zip(states, self._began, strict=True)):
                if index == 0 or is_same(now, began):
                    rng.set_state_at(self.generators, index, present[index])
        # Threads of torchdata's nodes read ahead, and can shuffle for the end of the epoch during any batch.
        watched = [] if self._is_of_nodes else self.generators
        while batch is not END:
            yield batch
            before = None if self._draws else rng.states(watched)
            batch = next(batches, END)
            if before is not None and batch is not END:
                self._draws = not is_same(before, rng.states(watched))

    def end(self) -> None:
        """Do nothing, because the loader's state contains the end of the epoch."""

    def state_dict(self) -> dict[str, Tree]:
        return {
            "state": cast(Tree, self._loader.state_dict()) if self._is_begun else self._loaded,
            "epoch": self._epoch,
            "began": None if self._began is None else list(self._began),
            "present": rng.generator_states(self.generators),
            "draws": self._draws,
        }

    def load_state_dict(self, state: dict[str, Tree], consumed_count: int) -> None:
        self._epoch, self._loaded = cast(int, state["epoch"]), state["state"]
        self._began, self._draws = cast("rng.States | None", state["began"]), cast("bool | None", state["draws"])
        self._is_begun, self._is_resuming = False, consumed_count > 0
        rng.set_generator_states(self.generators, cast("list[Tree]", state["present"]))


class Replayed:
    """Resumes an iterable by reading the epoch again, and dropping the batches that the script already received."""

    def __init__(self, name: str, iterable: Iterable[object]) -> None:
        self._name = name
        self._iterable = iterable
        self.generators = [] if isinstance(iterable, (list, tuple)) else rng.find_generators([iterable])
        self.order: Order | None = None
        self._skip_count = 0
        self._attributes = Attributes(objects_of_script([iterable]))
        self._place: Place | None = None
        self._changed: dict[str, Any] = {}
        """Restored attributes, which the repeated walk does not change."""

    def begin(self, epoch: int) -> Iterator[object]:
        set_epoch(self._iterable, epoch)
        set_epoch(getattr(self._iterable, "dataset", None), epoch)
        count, self._skip_count = self._skip_count, 0
        if count == 0:
            self._place = Place(rng.states(self.generators), attributes=self._attributes.copy())
        assert self._place is not None
        self._attributes.load(cast("dict[str, Any]", self._place.attributes) if count else {})
        walk = Walk(self._iterable, self.generators, self._place)
        if count:
            if not isinstance(self._iterable, (list, tuple)):
                logger.warning("%s does not store its position: replaying %d batches to reach it", self._name, count)
            walk.repeat(count)
            self._attributes.load(self._changed)
        return iter(walk)

    def end(self) -> None:
        self._place, self._skip_count = None, 0

    def state_dict(self) -> dict[str, Tree]:
        place = None if self._place is None else self._place.tree()
        return {
            "place": place,
            "present": rng.generator_states(self.generators),
            "attributes": self._attributes.observe(is_within=place is not None),
        }

    def load_state_dict(self, state: dict[str, Tree], consumed_count: int) -> None:
        self._place, self._skip_count = Place.of(state["place"]), consumed_count
        rng.set_generator_states(self.generators, cast("list[Tree]", state["present"]))
        self._changed = cast("dict[str, Any]", state["attributes"])
        if self._place is None:
            self._attributes.load(self._changed)
