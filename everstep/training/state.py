"""Reads and restores the complete state of one rank, which a snapshot contains.

Invariant: `load` and `complete` restore exactly the state that `observe` returned, including the random numbers that
follow. The session calls `observe` before the first step, so state that cannot be restored is rejected early.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any, Protocol, TypeGuard

import msgspec
import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, MultiplicativeLR, ReduceLROnPlateau
from torch.optim.optimizer import Optimizer

from everstep.protocol.parts import TensorPart
from everstep.protocol.slot_values import SlotValues
from everstep.training import rng
from everstep.training.adapters.base import Adapter, AdapterState, qualified_name
from everstep.training.arena import Arena
from everstep.training.attributes import Attributes, copied, generators_of
from everstep.training.capture import StateTensor
from everstep.training.data import DataStream
from everstep.training.errors import CannotResume, TrainingError
from everstep.training.module_tree import places_of
from everstep.training.options import ScriptOptions
from everstep.training.pretrained import Pretrained
from everstep.training.restore import VALUE_PREFIX, Restorable, encode_facts
from everstep.training.script import Environment
from everstep.training.state_tree import Tree, encode
from everstep.training.step_watch import unfolded

FORMAT = 8
"""Version of the values in a slot. A restore rejects others before it changes any object. Increase it whenever the form
of these values changes, unless readers may ignore the change.
"""


class Stateful(Protocol):
    """A registered object with state, such as a scheduler, a gradient scaler or averaged weights."""

    def state_dict(self) -> Any:
        """Return the object's state."""
        ...

    def load_state_dict(self, state_dict: Any) -> object:
        """Restore a state that `state_dict` returned."""
        ...


@dataclass(frozen=True, slots=True)
class Observed:
    """The complete state of a rank at one moment."""

    lists: Sequence[list[StateTensor]]
    """The list objects stay the same while the tensor objects do."""
    fresh: list[StateTensor]
    """Tensors that training may replace at any step, such as generator states. A slot stores them after `lists`."""
    values: bytes
    """Encoded values other than tensors, which later changes do not affect."""

    @property
    def tensors(self) -> list[StateTensor]:
        """All tensors in the order in which a slot stores them."""
        return [*chain.from_iterable(self.lists), *self.fresh]


class RankState:
    """The complete state of one rank. Raises CannotResume if a part of it cannot be restored."""

    def __init__(
        self,
        adapters: Sequence[Adapter],
        objects: Mapping[str, Stateful],
        streams: Mapping[str, DataStream],
        environment: Environment,
        pretrained: Pretrained | None = None,
        options_from_script: Sequence[str] = (),
    ) -> None:
        self.adapters = adapters
        self.objects = objects
        self.streams = streams
        self._pretrained = pretrained or Pretrained({})
        self._has_files = environment.rank == 0
        self._modules = [of_root for adapter in adapters for of_root in adapter.trees()]
        self._attributes = Attributes(places_of(self._modules))
        self._holders = _holders_of(self._modules)
        self.generators = generators_of(self._holders)
        self._kept: dict[str, Tree] | None = None
        """What `keep_passing` has recorded, for the next `observe`."""
        self._lambdas = {
            name: [(scheduler, list(scheduler.lr_lambdas)) for scheduler in unfolded([item]) if _has_lambdas(scheduler)]
            for name, item in objects.items()
        }
        self.facts = {
            "format": str(FORMAT),
            "torch": str(torch.__version__),
            "rank": str(environment.rank),
            "world size": str(environment.world_size),
            "objects": str(sorted(objects)),
            "data": str(sorted(streams)),
            "generators": str(len(self.generators)),
        }
        for adapter in adapters:
            self.facts |= adapter.facts()
        self._facts_data, self.layout_hash = encode_facts(self.facts)
        self.options = ScriptOptions({}, {})  # Placeholder until `observe` has checked the schedulers.
        self.observe()
        self.options = self._script_options(options_from_script)

    def optimizers(self) -> Sequence[Optimizer]:
        """Return every registered optimizer."""
        return [optimizer for adapter in self.adapters for optimizer in adapter.optimizers().values()]

    def parameters(self) -> Mapping[str, torch.Tensor]:
        """Return every model parameter, or its master weight, by its name in a slot."""
        return {name: parameter for adapter in self.adapters for name, parameter in adapter.parameters().items()}

    def modules(self) -> Sequence[Sequence[torch.nn.Module]]:
        """Return each registered model and its present submodules."""
        modules = [of_root for adapter in self.adapters for of_root in adapter.trees()]
        if not all(map(operator.is_, modules, self._modules)):
            self._modules = modules
            self._attributes.follow(places_of(modules))
            self._holders = _holders_of(modules)
        return self._modules

    @property
    def revision(self) -> int:
        """A number that grows with each change of modules, parameter groups or `requires_grad` that `observe` sees."""
        return sum(adapter.revision for adapter in self.adapters)

    def companions(self) -> Sequence[object]:
        """Return the script's objects and the frameworks' schedulers, whose `state_dict` a snapshot contains."""
        return [*self.objects.values(), *chain.from_iterable(adapter.schedulers() for adapter in self.adapters)]

    def devices(self) -> set[int]:
        """Return the indices of the CUDA devices that hold tensors of this state."""
        return {
            tensor.get_device()
            for adapter in self.adapters
            for item in adapter.observe().tensors
            if (tensor := item.tensor).is_cuda
        }

    def on_device(self) -> AbstractContextManager[object]:
        """Return a context that makes this rank's CUDA device the current device."""
        # The default device is the same on all ranks, and a script that always names its device may never set it.
        devices = self.devices()
        return torch.cuda.device(min(devices)) if devices else nullcontext()

    def observe(self) -> Observed:
        """Return the live tensors and the encoded values. Raises CannotResume if a part cannot be restored."""
        for stream in self.streams.values():
            stream.check()
        for name, schedulers in self._lambdas.items():
            if any(scheduler.lr_lambdas != lambdas for scheduler, lambdas in schedulers):
                raise CannotResume(
                    name,
                    "lr_lambdas has other functions than at init(), and functions are not kept. Create the scheduler "
                    "with its functions before init()",
                )
        observed = [_checked(adapter) for adapter in self.adapters]
        self._follow_generators()
        return self._observed(observed)

    def forecast(self) -> Observed | None:
        """Predict the state after the first step, with missing tensors on the meta device; None: unpredictable. Raises
        CannotResume if a part of the state cannot be restored.
        """
        foreseen = [adapter.forecast() for adapter in self.adapters]
        return None if None in foreseen else self._observed([state for state in foreseen if state is not None])

    def _observed(self, of_adapters: Sequence[AdapterState]) -> Observed:
        adapters = encode([state.values for state in of_adapters], "/adapters")
        others = encode(
            {
                "objects": {name: _state_of(name, item) for name, item in self.objects.items()},
                "options": self.options.state,
                **(self._kept or self._passing()),
            },
            "",
        )
        fresh = [item for state in of_adapters for item in state.fresh]
        fresh += [
            StateTensor(VALUE_PREFIX + path, tensor, is_deferred=False)
            for path, tensor in (*adapters.tensors, *others.tensors)
        ]
        files = self._pretrained.files() if self._has_files else {}
        values = SlotValues(self._facts_data, adapters.data, others.data, self._pretrained.configs, files)
        return Observed([one for state in of_adapters for one in state.lists], fresh, msgspec.msgpack.encode(values))

    def parts(self, tensors: Sequence[StateTensor]) -> dict[str, tuple[TensorPart, ...]]:
        """Return the boxes of the tensors that are not whole logical tensors, by name, when a slot's layout changes."""
        return {name: parts for adapter in self.adapters for name, parts in adapter.parts(tensors).items()}

    def expect_restore(self) -> Sequence[Arena]:
        """Reserve the memory for `load`, once before it. The caller prefaults the returned arenas."""
        return [arena for adapter in self.adapters for arena in adapter.expect_restore()]

    def load(self, snapshot: Restorable) -> None:
        """Copy a snapshot into models and optimizers, while its bytes still arrive, without communication. A second
        call with the same snapshot is allowed.
        """
        values: Any = snapshot.adapters()
        for adapter, of_adapter in zip(self.adapters, values, strict=True):
            adapter.load(snapshot.tensors, of_adapter)
        snapshot.tensors.finish()

    def complete(self, snapshot: Restorable) -> None:
        """Restore all other state when the whole snapshot has arrived. Collective."""
        tree: Any = snapshot.others()
        for adapter in self.adapters:
            adapter.synchronize()
        for name, item in self.objects.items():
            item.load_state_dict(tree["objects"][name])
        for name, stream in self.streams.items():
            stream.load_state_dict(tree["data"][name])
        self._attributes.load(tree["attributes"])
        rng.set_generator_states(self.generators, tree["generators"])
        for modules, modes in zip(self.modules(), tree["modes"], strict=True):
            # Skip the training modes if the numbers of modules differ: this launch then wraps the modules in a
            # different way than the launch that saved the step.
            if len(modules) == len(modes):
                for module, mode in zip(modules, modes, strict=True):
                    module.training = bool(mode)
        if "options" in tree:  # Earlier versions did not store it.
            self.options.load(tree["options"])
        rng.restore(tree["rng"])  # Restore the generators last: `load_state_dict` may draw random numbers.

    def keep_passing(self) -> None:
        """Store the training modes, data positions and generator states for the next `observe`. The session calls this
        at the end of the loop, because an evaluation before `close` would change them. Until the next boundary, further
        calls have no effect.
        """
        if self._kept is None:
            with suppress(CannotResume):  # The next `observe` raises it again.
                self._follow_generators()
            self._kept = copied(self._passing())

    def end_step(self) -> None:
        """Record that a step is finished."""
        self._kept = None
        for adapter in self.adapters:
            adapter.end_step()

    def progress(self) -> tuple[int | None, ...]:
        """Return counters of steps and batches that change as soon as the script starts another step."""
        return (
            *(adapter.steps_made() for adapter in self.adapters),
            *(stream.handed_count for stream in self.streams.values()),
        )

    def steps_made(self) -> int | None:
        """Return the framework's count of optimizer steps; None if only the script can count them."""
        return self.adapters[0].steps_made() if len(self.adapters) == 1 else None

    def batches_per_step(self, accumulate: int) -> int:
        """Return the batches per optimizer step: the single engine's number, else `accumulate`."""
        counts = {count for adapter in self.adapters if (count := adapter.batches_per_step()) is not None}
        return counts.pop() if len(counts) == 1 and len(self.adapters) == 1 else accumulate

    def _script_options(self, from_script: Sequence[str]) -> ScriptOptions:
        named: dict[str, Optimizer] = {}
        schedulers: dict[str, Any] = {}
        for adapter in self.adapters:
            for name, optimizer in adapter.optimizers().items():
                named[f"optimizer/{name}" if name else "optimizer"] = optimizer
            schedulers |= {f"engine.lr_scheduler{len(schedulers) or ''}": each for each in adapter.schedulers()}
        for name, item in self.objects.items():
            found = [each for each in unfolded([item]) if isinstance(each, (LRScheduler, ReduceLROnPlateau))]
            schedulers |= {f"{name}[{number}]" if number else name: each for number, each in enumerate(found)}
        return ScriptOptions(named, schedulers, from_script)

    def _follow_generators(self) -> None:
        """Use the present random generators of modules, or raise CannotResume if a restart would have other kinds."""
        self.modules()
        found = generators_of(self._holders)
        if len(found) == len(self.generators) and all(map(operator.is_, found, self.generators)):
            return
        self.generators = rng.followed(found, self.generators, "model")

    def _passing(self) -> dict[str, Tree]:
        modules = self.modules()
        return {
            "modes": [bytes(map(attrgetter("training"), of_model)) for of_model in modules],
            "attributes": self._attributes.observe(),
            "data": {name: stream.state_dict() for name, stream in self.streams.items()},
            "generators": rng.generator_states(self.generators),
            "rng": rng.observe(),
        }


def _state_of(name: str, item: Stateful) -> Any:
    try:
        return item.state_dict()
    except TrainingError:
        raise
    except Exception as error:
        raise CannotResume(name, f"state_dict() of {qualified_name(type(item))} failed: {error!r}") from error


def _holders_of(modules: Sequence[Sequence[torch.nn.Module]]) -> list[torch.nn.Module]:
    return [each for each in chain.from_iterable(modules) if generators_of([each])]


def _has_lambdas(scheduler: object) -> TypeGuard[LambdaLR | MultiplicativeLR]:
    return isinstance(scheduler, (LambdaLR, MultiplicativeLR))


def _checked(adapter: Adapter) -> AdapterState:
    observed = adapter.observe()
    adapter.check()
    return observed
