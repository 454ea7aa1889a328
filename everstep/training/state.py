"""All that a run's state is made of on one rank: what the adapters hold, what the script registered, where its data stands, its generators.

Invariant: `load` of what `observe` returned brings back the same state, random draws included; what could not be brought back is refused when
the state is first observed, before the first step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import torch

from everstep.training import rng
from everstep.training.adapters.base import Adapter
from everstep.training.capture import StateTensor
from everstep.training.data import DataStream
from everstep.training.restore import VALUE_PREFIX, SlotValues, Snapshot, encode_facts
from everstep.training.script import Environment
from everstep.training.state_tree import Tree, encode


class Stateful(Protocol):
    """A scheduler, a gradient scaler, an average of weights."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any) -> object: ...


@dataclass(frozen=True, slots=True)
class Observed:
    """The state of a moment."""

    tensors: list[StateTensor]
    """Live, in canonical order."""
    values: bytes
    """Encoded: they are of this moment whatever happens next."""


class RankState:
    """One rank's whole state.

    Args:
        adapters: models and optimizers.
        objects: whatever else was registered, by name.
        streams: the loaders, by name.
        environment: of the rank.

    Raises:
        CannotResume: something in it cannot be brought back.
    """

    def __init__(
        self, adapters: Sequence[Adapter], objects: Mapping[str, Stateful], streams: Mapping[str, DataStream], environment: Environment
    ) -> None:
        self.adapters = adapters
        self.objects = objects
        self.streams = streams
        self.facts = {
            "torch": str(torch.__version__),
            "rank": str(environment.rank),
            "world size": str(environment.world_size),
            "objects": str(sorted(objects)),
            "data": str(sorted(streams)),
        }
        for adapter in adapters:
            self.facts |= adapter.facts()
        self._facts_data, self.layout_hash = encode_facts(self.facts)
        self.observe()

    def observe(self) -> Observed:
        """Return the state of the moment. At every captured boundary, by the training thread.

        Returns:
            Live tensors and encoded values.

        Raises:
            CannotResume: something in it could not be brought back.
        """
        tensors: list[StateTensor] = []
        of_adapters: list[Tree] = []
        for adapter in self.adapters:
            adapter.check()
            state = adapter.observe()
            tensors += state.tensors
            of_adapters.append(state.values)
        tree = encode(
            {
                "adapters": of_adapters,
                "objects": {name: item.state_dict() for name, item in self.objects.items()},
                "data": {name: stream.state_dict() for name, stream in self.streams.items()},
                "rng": rng.observe(),
            },
            "",
        )
        tensors += [StateTensor(VALUE_PREFIX + path, tensor, is_deferred=False) for path, tensor in tree.tensors]
        return Observed(tensors, msgspec.msgpack.encode(SlotValues(self._facts_data, tree.data)))

    def load(self, snapshot: Snapshot) -> None:
        """Bring the live objects to a snapshot, in place. Collective: ranks rebuild together what they derive from each other."""
        tree: Any = snapshot.tree
        for adapter, values in zip(self.adapters, tree["adapters"], strict=True):
            adapter.load(snapshot.tensors, values)
            adapter.synchronize()
        for name, item in self.objects.items():
            item.load_state_dict(tree["objects"][name])
        for name, stream in self.streams.items():
            stream.load_state_dict(tree["data"][name])
        rng.restore(tree["rng"])  # last: everything above may draw

    def end_step(self) -> None:
        """A boundary is reached."""
        for adapter in self.adapters:
            adapter.end_step()

    def steps_made(self) -> int | None:
        """Return the framework's own count of optimizer steps, or None where only the script can tell."""
        return self.adapters[0].steps_made() if len(self.adapters) == 1 else None
