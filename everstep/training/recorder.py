"""Records digests of what a script computes in each step, to compare runs of the same steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from everstep.determinism import Entry, Kind, Record
from everstep.training import rng
from everstep.training.determinism.digests import digest_of
from everstep.training.state import RankState
from everstep.training.step_watch import uncompiled

Arguments = tuple[Any, ...]
ClosureCall = tuple[Arguments, dict[str, Any]]
_NOT_COMPILED = "Everstep records here: compile optimizer.step() without fullgraph=True"


class Recorder:
    """Records the batches, gradients, states and logged values of a session's steps."""

    def __init__(
        self,
        state: RankState,
        received: Callable[[str, object], object] | None = None,
        before_update: Callable[[], None] = lambda: None,
    ) -> None:
        self._state = state
        self._received = received or self.batch
        self._before_update = before_update
        self._removals: list[Callable[[], None]] = []
        # A framework may apply an object's restored state only when its loop begins, as transformers' `Trainer` does.
        self._are_objects_due = False
        """Whether the restored objects must still be recorded, right before the next entry."""
        self.step = 1
        self.record = Record(0)

    def attach(self) -> None:
        """Observe the optimizers and loaders of the session, until `detach`."""
        names = {id(parameter): name for name, parameter in self._state.parameters().items()}

        def record(optimizer: Optimizer) -> None:
            if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
                self._before_update()
                self.add_generators()
                self._add_all(_of_optimizer(optimizer, names))

        def before_step(optimizer: Optimizer, args: Arguments, options: dict[str, Any]) -> ClosureCall | None:
            closure = options.get("closure", args[1] if len(args) > 1 else None)
            if not callable(closure):
                record(optimizer)
                return None

            # Lightning passes a closure that computes the gradients inside `Optimizer.step`. Record the gradients after
            # the closure, because before it the parameters still hold the gradients of the previous step.
            def recorded() -> object:
                loss = closure()
                record(optimizer)
                return loss

            return (optimizer, recorded, *args[2:]), {name: each for name, each in options.items() if name != "closure"}

        hook = uncompiled(before_step, _NOT_COMPILED)
        self._removals = [optimizer.register_step_pre_hook(hook).remove for optimizer in self._state.optimizers()]
        for stream in self._state.streams.values():
            stream.observe = self._received

    def detach(self) -> None:
        """Stop observing optimizers and loaders."""
        for remove in self._removals:
            remove()
        self._removals = []
        for stream in self._state.streams.values():
            stream.observe = None

    def keep(self, step: int) -> None:
        """Begin a new record with the present state, which is that after `step` steps."""
        self.record = Record(step, calls=self.record.calls)
        self.restored(step)

    def restored(self, step: int) -> None:
        """Record the restored state. 0: the script builds the state."""
        self.step = step + 1
        if step:
            self.record.steps[step] = [_as_restored(entry) for entry in (*self._tensors(), *self._generators())]
            self._are_objects_due = True

    def batch(self, name: str, batch: object) -> object:
        """Record a batch that the script receives from the named loader, and return the batch."""
        self.add(Kind.LOADED, name, batch)
        self.add_generators()
        return batch

    def logged(self, values: Mapping[str, object]) -> None:
        """Record values that the script logs for the current step."""
        for name, value in values.items():
            self.add(Kind.VALUE, name, value)

    def boundary(self, step: int) -> None:
        """Record the state after a step."""
        self.add_generators()
        self._add_all(self._tensors())
        self._add_all(self._objects())
        self.step = step + 1

    def add_generators(self) -> None:
        """Record the states of all random generators that snapshots contain."""
        self._add_all(self._generators())

    def entries(self) -> list[Entry]:
        """Return the live list of entries of the current step."""
        if self._are_objects_due:
            self._are_objects_due = False
            self.record.steps[self.step - 1].extend(map(_as_restored, self._objects()))
        return self.record.steps.setdefault(self.step, [])

    def add(self, kind: Kind, name: str, value: object) -> None:
        """Record the digest of one value."""
        self.entries().append(Entry(kind, name, digest_of(value)))

    def _add_all(self, entries: Iterator[Entry]) -> None:
        self.entries().extend(entries)

    def _tensors(self) -> Iterator[Entry]:
        """Yield each tensor of the state, except gradients, which `_of_optimizer` yields."""
        for adapter in self._state.adapters:
            observed = adapter.observe()
            for item in observed.tensors:
                if not item.name.startswith("gradient/"):
                    yield Entry(Kind.STATE, item.name, digest_of(item.tensor))

    def _objects(self) -> Iterator[Entry]:
        for name, item in self._state.objects.items():
            # Some objects also keep times, which differ between a run and its repetition.
            observe = getattr(item, "compared_state", item.state_dict)
            yield Entry(Kind.OBJECT, name, digest_of(observe()))

    def _generators(self) -> Iterator[Entry]:
        for name, state in rng.observe().items():
            yield Entry(Kind.GENERATOR, name, digest_of(state))
        for name, stream in self._state.streams.items():
            for number, generator in enumerate(stream.source.generators):
                digest = digest_of(rng.generator_state(generator))
                yield Entry(Kind.GENERATOR, f"generator {number} of {name}", digest)


def _of_optimizer(optimizer: Optimizer, names: Mapping[int, str]) -> Iterator[Entry]:
    """Yield the options of an optimizer's groups, then the gradients of its parameters."""
    for number, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if name != "params":
                yield Entry(Kind.SETTING, f"{name} of group {number}", digest_of(value))
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            name = names.get(id(parameter), f"parameter {place} of group {number}")
            yield Entry(Kind.GRADIENT, name, digest_of(parameter.grad))


def _as_restored(entry: Entry) -> Entry:
    return Entry(Kind.RESTORED, entry.name, entry.digest)
