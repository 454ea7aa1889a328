"""All that a run's state is made of on one rank: what the adapters hold, what the script registered, where its data stands, its generators.

Invariant: `load` of what `observe` returned brings back the same state, random draws included; what could not be
brought back is refused when the state is first observed, before the first step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any, Protocol

import msgspec
import torch
from torch.optim.optimizer import Optimizer

from everstep.training import rng
from everstep.training.adapters.base import Adapter, AdapterState
from everstep.training.arena import Arena
from everstep.training.capture import StateTensor
from everstep.training.data import DataStream
from everstep.training.restore import VALUE_PREFIX, SlotValues, Snapshot, encode_facts
from everstep.training.script import Environment
from everstep.training.state_tree import Tree, encode

FORMAT = 2
"""Of what adapters and sessions keep in a slot's values.

Whoever changes that raises it: what another library has kept is refused by this, before
anything is written."""


class Stateful(Protocol):
    """A scheduler, a gradient scaler, an average of weights."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any) -> object: ...


@dataclass(frozen=True, slots=True)
class Observed:
    """The state of a moment."""

    lists: Sequence[list[StateTensor]]
    """Live, in canonical order; the same list objects as last time where they hold the same tensors."""
    fresh: list[StateTensor]
    """Behind them: tensors that are other objects from boundary to boundary (buffers that modules replace, the generators' states)."""
    values: bytes
    """Encoded: they are of this moment whatever happens next."""

    @property
    def tensors(self) -> list[StateTensor]:
        """All of them, in the order in which they lie in a slot."""
        return [*chain.from_iterable(self.lists), *self.fresh]


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
        self,
        adapters: Sequence[Adapter],
        objects: Mapping[str, Stateful],
        streams: Mapping[str, DataStream],
        environment: Environment,
    ) -> None:
        self.adapters = adapters
        self.objects = objects
        self.streams = streams
        self._modules = [list(root.modules()) for adapter in adapters for root in adapter.modules()]
        self._kept: dict[str, Tree] | None = None
        """Of the moment that `keep_passing` was called in."""
        self.facts = {
            "format": str(FORMAT),
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

    def optimizers(self) -> Sequence[Optimizer]:
        """Return every registered optimizer."""
        return [optimizer for adapter in self.adapters for optimizer in adapter.optimizers().values()]

    def parameters(self) -> Mapping[str, torch.Tensor]:
        """Return every parameter that the adapters hold, by its name in a slot."""
        return {name: parameter for adapter in self.adapters for name, parameter in adapter.parameters().items()}

    def companions(self) -> Sequence[object]:
        """Return everything that is kept by its own `state_dict`: what the script registered, and the schedulers of its frameworks."""
        return [*self.objects.values(), *chain.from_iterable(adapter.schedulers() for adapter in self.adapters)]

    def devices(self) -> set[int]:
        """Return the CUDA devices that its tensors lie on."""
        return {
            tensor.get_device()
            for adapter in self.adapters
            for item in adapter.observe().tensors
            if (tensor := item.tensor).is_cuda
        }

    def on_device(self) -> AbstractContextManager[object]:
        """Make its CUDA device the current one: a script need not, as long as it names devices itself, and its current one is everybody's first."""
        devices = self.devices()
        return torch.cuda.device(min(devices)) if devices else nullcontext()

    def observe(self) -> Observed:
        """Return the state of the moment. At every captured boundary, by the training thread.

        Returns:
            Live tensors and encoded values.

        Raises:
            CannotResume: something in it could not be brought back.
        """
        return self._observed([_checked(adapter) for adapter in self.adapters])

    def foresee(self) -> Observed | None:
        """Return the state as it will be after the first optimizer step, with what is not there yet on the meta device; None where nobody knows.

        Returns:
            What `observe` will return then, or nearly so.

        Raises:
            CannotResume: as for `observe`.
        """
        foreseen = [adapter.foresee() for adapter in self.adapters]
        return None if None in foreseen else self._observed([state for state in foreseen if state is not None])

    def _observed(self, of_adapters: Sequence[AdapterState]) -> Observed:
        adapters = encode([state.values for state in of_adapters], "/adapters")
        others = encode(
            {
                "objects": {name: item.state_dict() for name, item in self.objects.items()},
                **(self._kept or self._passing()),
            },
            "",
        )
        fresh = [item for state in of_adapters for item in state.fresh]
        fresh += [
            StateTensor(VALUE_PREFIX + path, tensor, is_deferred=False)
            for path, tensor in (*adapters.tensors, *others.tensors)
        ]
        values = msgspec.msgpack.encode(SlotValues(self._facts_data, adapters.data, others.data))
        return Observed([one for state in of_adapters for one in state.lists], fresh, values)

    def expect_restore(self) -> Sequence[Arena]:
        """Set memory aside for what `load` will make anew; the caller has its pages given. Once, before `load`."""
        return [arena for adapter in self.adapters for arena in adapter.expect_restore()]

    def load(self, snapshot: Snapshot) -> None:
        """Bring models and optimizers to a snapshot, in place, as far and as fast as it arrives.

        Local; may be done again with the same snapshot.
        """
        values: Any = snapshot.adapters()
        for adapter, of_adapter in zip(self.adapters, values, strict=True):
            adapter.load(snapshot.tensors, of_adapter)
        snapshot.tensors.finish()

    def complete(self, snapshot: Snapshot) -> None:
        """Bring everything else to it, once `load` has ended and all of it is there.

        Collective: ranks rebuild what they derive from each other.
        """
        tree: Any = snapshot.others()
        for adapter in self.adapters:
            adapter.synchronize()
        for name, item in self.objects.items():
            item.load_state_dict(tree["objects"][name])
        for name, stream in self.streams.items():
            stream.load_state_dict(tree["data"][name])
        for modules, modes in zip(self._modules, tree["modes"], strict=True):
            if len(modules) == len(modes):  # not with another wrapper around them
                for module, mode in zip(modules, modes, strict=True):
                    module.training = bool(mode)
        rng.restore(tree["rng"])  # last: everything above may draw

    def keep_passing(self) -> None:
        """Have modes and generators observed as they are now until the next boundary.

        Called where the script leaves its loop, for it may evaluate
        before it closes; again without effect.
        """
        self._kept = self._kept or self._passing()

    def end_step(self) -> None:
        """A boundary is reached."""
        self._kept = None
        for adapter in self.adapters:
            adapter.end_step()

    def progress(self) -> tuple[int | None, ...]:
        """Return counts that grow as soon as a step is begun: steps that frameworks have made, batches that loaders have handed out."""
        return (
            *(adapter.steps_made() for adapter in self.adapters),
            *(stream.handed_count for stream in self.streams.values()),
        )

    def steps_made(self) -> int | None:
        """Return the framework's own count of optimizer steps, or None where only the script can tell."""
        return self.adapters[0].steps_made() if len(self.adapters) == 1 else None

    def _passing(self) -> dict[str, Tree]:
        """Return what an evaluation changes: which modules train (a script may put some into evaluation for good), the
        process's generators, and those of the loaders.
        """
        return {
            "modes": [bytes(map(attrgetter("training"), modules)) for modules in self._modules],
            "data": {name: stream.state_dict() for name, stream in self.streams.items()},
            "rng": rng.observe(),
        }


def _checked(adapter: Adapter) -> AdapterState:
    observed = adapter.observe()
    adapter.check()
    return observed
