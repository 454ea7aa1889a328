"""Lists, checks and restores the buffers of modules.

A module may replace a buffer by a tensor of another shape or dtype, or by None, and may register a buffer after `init`.
The adapter therefore looks buffers up by owner and name at each boundary.

Invariant: after a load, each buffer has the values, shape, dtype and kind of device of the snapshot. Names that
referred to one tensor do so again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import attrgetter, itemgetter
from typing import cast

import torch

from everstep.protocol.parts import TensorPart, whole
from everstep.training.adapters.base import check_distinct, check_tensor, overlaps_itself
from everstep.training.capture import StateTensor
from everstep.training.earlier import EarlierTensors, LoadTarget
from everstep.training.errors import CannotRelayout
from everstep.training.module_tree import canonical_name
from everstep.training.saved_tensors import SavedTensors
from everstep.training.state_tree import Tree, dtype_name, dtype_of

Place = tuple[str, torch.nn.Module, str]
"""Name of a buffer, its module, and its key there."""
_Late = tuple[str, int, str, bool]
"""Path of the module, its index among those at that path from the innermost outwards, key, whether persistent."""


def buffers_of(model: torch.nn.Module) -> list[Place]:
    """Return every buffer of a model, including None, with the names of wrapper modules."""
    return [
        (f"{path}.{key}" if path else key, module, key)
        for path, module in model.named_modules()
        for key in module._buffers
    ]


class Buffers:
    """The buffers of all registered models, in a fixed order."""

    def __init__(self, local: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._local = local
        self._modules: dict[str, list[torch.nn.Module]] = {}
        """Modules by path, the innermost first, because another launch may use other wrappers."""
        self._places: list[Place] = []
        self._late: list[_Late] = []

    @property
    def places(self) -> Sequence[Place]:
        """Every buffer that the registered models have had so far."""
        return self._places

    def add(self, prefix: str, model: torch.nn.Module, names: Sequence[str]) -> None:
        """Add a model's buffers, named as by `buffers_of`. Raises CannotResume if one cannot be copied as bytes."""
        for path, module in model.named_modules():
            self._modules.setdefault(f"{prefix}{called}." if (called := canonical_name(path)) else prefix, []).insert(
                0, module
            )
        places = [(prefix + name, owner, key) for name, (_, owner, key) in zip(names, buffers_of(model), strict=True)]
        self._check(places)
        self._places += places

    def follow(self, replaced: Mapping[torch.nn.Module, torch.nn.Module]) -> None:
        """Use the script's new modules in place of those that they have replaced."""
        self._modules = {path: [replaced.get(each, each) for each in held] for path, held in self._modules.items()}
        self._places = [(name, replaced.get(owner, owner), key) for name, owner, key in self._places]

    def check(self) -> None:
        """Raise CannotResume if a buffer registered after `init` cannot be copied as bytes."""
        self._check(self._places[len(self._places) - len(self._late) :])

    def observe(self) -> tuple[list[StateTensor], Tree]:
        """Return the live buffers, and a tree with the names that refer to one tensor, and the devices. Raises
        CannotResume if a buffer registered after `init` has the name of another tensor.
        """
        if sum(key in owner._buffers for _, owner, key in self._places) != self._live_count():
            self._list_late()
        live = [(name, buffer) for name, owner, key in self._places if (buffer := owner._buffers.get(key)) is not None]
        ties: dict[str, Tree] = {}
        if len(set(map(id, map(itemgetter(1), live)))) < len(live):
            first: dict[int, str] = {}
            ties = {name: known for name, buffer in live if (known := first.setdefault(id(buffer), name)) != name}
        tensors = [
            StateTensor(f"model/{name}", self._local(buffer), is_deferred=False)
            for name, buffer in live
            if name not in ties
        ]
        devices = list(map(attrgetter("device"), map(itemgetter(1), live)))
        usual = devices[0] if devices else torch.device("cpu")
        elsewhere: dict[str, Tree] = {}
        if devices.count(usual) < len(devices):
            elsewhere = {name: buffer.device.type for name, buffer in live if buffer.device != usual}
        return tensors, {"late": list(self._late), "ties": ties, "device": usual.type, "elsewhere": elsewhere}

    def transient_parts(self) -> dict[str, tuple[TensorPart, ...]]:
        """Return an empty tuple for each buffer that is not persistent, because it belongs to no logical tensor."""
        return {f"model/{name}": () for name, owner, key in self._places if key in owner._non_persistent_buffers_set}

    def load(self, tensors: SavedTensors, values: Tree) -> None:
        """Restore the buffers. A buffer whose shape and dtype match is written in place."""
        assert isinstance(values, dict)
        self._register(cast("list[_Late]", values["late"]))
        ties: dict[str, str] = values["ties"]
        owners = {name: (owner, key) for name, owner, key in self._places}
        written: set[int] = set()
        for name, owner, key in self._places:
            if name in ties:
                continue
            saved, live = tensors.get(f"model/{name}"), owner._buffers.get(key)
            if saved is None:
                owner._buffers[key] = None
            elif live is not None and id(live) not in written and self._has_room(live, saved):
                written.add(id(live))
                tensors.bring(f"model/{name}", self._local(live))
            else:
                lay = values["elsewhere"].get(name, values["device"])
                owner._buffers[key] = saved.to(lay if live is None else live.device, copy=True)
        for name, known in ties.items():
            (owner, key), (other, other_key) = owners[name], owners[known]
            owner._buffers[key] = other._buffers[other_key]

    def of_earlier(self, earlier: EarlierTensors, values: Tree) -> tuple[list[StateTensor], list[LoadTarget]]:
        """Return the live buffers that are sharded over ranks, and a target for each other buffer, in its saved size.
        This rank loads the targets from the shard that supplies `values`, because the ranks' copies may differ. Raises
        CannotRelayout if a buffer has a different dtype than when the step was saved.
        """
        assert isinstance(values, dict)
        late = [path + key for path, _, key, _ in values["late"]]
        lives = {name: owner._buffers.get(key) for name, owner, key in self._places}
        divided: list[StateTensor] = []
        own: list[LoadTarget] = []
        for name in dict.fromkeys([*lives, *late]):
            place, live, entry = f"model/{name}", lives.get(name), earlier.own(f"model/{name}")
            if entry is None or name in values["ties"]:
                continue
            if live is not None and live.is_floating_point() and dtype_name(live.dtype) != entry.dtype:
                raise CannotRelayout(
                    place,
                    f"this buffer was {entry.dtype}{list(entry.shape)} and is {dtype_name(live.dtype)}"
                    f"{list(live.shape)}. Build the model with the dtypes of the earlier job",
                )
            if live is not None and self._local(live) is not live:
                divided.append(StateTensor(place, self._local(live), is_deferred=False))
            elif entry.parts and entry.parts != (whole(place, entry.shape),):
                part = entry.parts[0]
                own.append(LoadTarget(place, part.shape, dtype_of(entry.dtype), (whole(part.name, part.shape),)))
            else:
                own.append(LoadTarget(place, entry.shape, dtype_of(entry.dtype), (), is_own=True))
        return divided, own

    def _check(self, places: Sequence[Place]) -> None:
        for name, owner, key in places:
            if (buffer := owner._buffers.get(key)) is not None:
                check_tensor(f"model/{name}", self._local(buffer))

    def _has_room(self, live: torch.Tensor, saved: torch.Tensor) -> bool:
        local = self._local(live)
        return local.shape == saved.shape and live.dtype == saved.dtype and not overlaps_itself(local)

    def _live_count(self) -> int:
        return sum(map(len, map(attrgetter("_buffers"), chain.from_iterable(self._modules.values()))))

    def _list_late(self) -> None:
        known = {(id(owner), key) for _, owner, key in self._places}
        late = [
            (path, number, key, key not in module._non_persistent_buffers_set)
            for path, modules in self._modules.items()
            for number, module in enumerate(modules)
            for key in module._buffers
            if (id(module), key) not in known
        ]
        check_distinct([*(name for name, _, _ in self._places), *(path + key for path, _, key, _ in late)])
        self._register(late)

    def _register(self, late: Sequence[_Late]) -> None:
        known = {name for name, _, _ in self._places}
        for path, number, key, is_persistent in late:
            if path + key not in known:
                owner = self._modules[path][number]
                if key not in owner._buffers:
                    owner.register_buffer(key, None, persistent=is_persistent)
                self._places.append((path + key, owner, key))
                self._late.append((path, number, key, is_persistent))
