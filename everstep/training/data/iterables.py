"""Resumes loaders that store their own state, and iterables that are read again from the beginning."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any, cast

from everstep.training import rng
from everstep.training.attributes import Attributes, objects_of_script
from everstep.training.data.protocols import Order, Stateful, set_epoch
from everstep.training.data.walks import Place, Walk
from everstep.training.state_tree import Tree

logger = logging.getLogger("everstep.training")


class OwnState:
    """Resumes a loader that stores its own position and has `state_dict` and `load_state_dict`."""

    def __init__(self, loader: Stateful) -> None:
        self._loader = loader
        self._epoch = 0
        self._is_resuming = False
        self._loaded: Tree = None
        """The restored state, until the next `begin`.

        `state_dict` returns it, because some loaders do not return a restored state before they are iterated.
        """
        self.generators = rng.find_generators([loader])
        self.order: Order | None = None

    def begin(self, epoch: int) -> Iterator[object]:
        self._epoch, self._loaded = epoch, None
        if not self._is_resuming:
            set_epoch(self._loader, epoch)
            return iter(cast("Iterable[object]", self._loader))
        self._is_resuming = False
        before = rng.observe(with_devices=False)
        iterator = iter(cast("Iterable[object]", self._loader))
        rng.restore(before)
        return iterator

    def end(self) -> None:
        """Do nothing, because the loader's state contains the end of the epoch."""

    def state_dict(self) -> dict[str, Tree]:
        return {"state": self._loaded or self._loader.state_dict(), "epoch": self._epoch}

    def load_state_dict(self, state: dict[str, Tree], consumed_count: int) -> None:
        self._epoch = cast(int, state["epoch"])
        # Call set_epoch before loading the state, because set_epoch resets the position of some loaders.
        set_epoch(self._loader, self._epoch)
        self._loaded = state["state"]
        self._loader.load_state_dict(cast("dict[str, object]", self._loaded))
        self._is_resuming = consumed_count > 0


class Replayed:
    """Resumes an iterable that can only be read from the beginning of an epoch.

    A resumed run reads the epoch again, and drops the batches that the script already received.
    """

    def __init__(self, name: str, iterable: Iterable[object]) -> None:
        self._name = name
        self._iterable = iterable
        self.generators = [] if isinstance(iterable, (list, tuple)) else rng.find_generators([iterable])
        self.order: Order | None = None
        self._skip_count = 0
        self._attributes = Attributes(objects_of_script([iterable]))
        self._place: Place | None = None
        """Progress of this epoch's walk (pass through the iterable); None between two epochs."""

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
        return iter(walk)

    def end(self) -> None:
        self._place, self._skip_count = None, 0

    def state_dict(self) -> dict[str, Tree]:
        place = None if self._place is None else self._place.tree()
        return {
            "place": place,
            "present": rng.generator_states(self.generators),
            "attributes": self._attributes.observe() if place is None else {},
        }

    def load_state_dict(self, state: dict[str, Tree], consumed_count: int) -> None:
        self._place, self._skip_count = Place.of(state["place"]), consumed_count
        rng.set_generator_states(self.generators, cast("list[Tree]", state["present"]))
        self._attributes.load(cast("dict[str, Any]", state["attributes"]))
