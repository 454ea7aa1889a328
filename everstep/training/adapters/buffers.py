"""The buffers of modules.

They are looked up by owner and name at each boundary, because modules replace them: by tensors of another shape or
dtype, by None, by two where one was tied. One that a module registers after `init` (a statistic that begins with the
first batch) is listed when it is first seen.

Invariant: after a load each buffer has the values, shape and dtype that it was observed with, on that kind of device,
and is one tensor with those that it was one with then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter, itemgetter
from typing import cast

import torch

from everstep.training.adapters.base import canonical_name, check_distinct, check_tensor, overlaps_itself
from everstep.training.capture import StateTensor
from everstep.training.saved_tensors import SavedTensors
from everstep.training.state_tree import Tree

Place = tuple[str, torch.nn.Module, str]
"""(name, owner, key) of a buffer."""
_Late = tuple[str, int, str, bool]
"""(path of the owner, which of those at that path from the innermost outwards, key, whether it is persistent)."""


def buffers_of(model: torch.nn.Module) -> list[Place]:
    """Return every buffer of a model by its raw path, also those that are None for now."""
    return [
        (f"{path}.{key}" if path else key, module, key)
        for path, module in model.named_modules()
        for key in module._buffers
    ]


class Buffers:
    """The buffers of some models, in canonical order.

    Args:
        local: returns the memory of this rank behind a tensor.
    """

    def __init__(self, local: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._local = local
        self._modules: dict[str, list[torch.nn.Module]] = {}
        """By path, the innermost first: a wrapper has the path of what it wraps, and there may be another around it in the next launch."""
        self._places: list[Place] = []
        self._late: list[_Late] = []
        """Those that came after `init`."""

    @property
    def places(self) -> Sequence[Place]:
        """All that are known."""
        return self._places

    def add(self, prefix: str, model: torch.nn.Module, names: Sequence[str]) -> None:
        """List those of a model.

        Args:
            prefix: of their names.
            model: root module.
            names: of `buffers_of(model)`, in that order.

        Raises:
            CannotResume: one cannot be copied as bytes.
        """
        for path, module in model.named_modules():
            self._modules.setdefault(f"{prefix}{called}." if (called := canonical_name(path)) else prefix, []).insert(
                0, module
            )
        places = [(prefix + name, owner, key) for name, (_, owner, key) in zip(names, buffers_of(model), strict=True)]
        self._check(places)
        self._places += places

    def check(self) -> None:
        """Refuse those that came after `init` and cannot be copied as bytes.

        At every captured boundary, behind `observe`.

        Raises:
            CannotResume: by name.
        """
        self._check(self._places[len(self._places) - len(self._late) :])

    def observe(self) -> tuple[list[StateTensor], Tree]:
        """Return the live buffers, and what else is to be known of them. At every captured boundary.

        Returns:
            Tensors, and a tree.

        Raises:
            CannotResume: one that was registered after `init` has the name of another tensor.
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

    def load(self, tensors: SavedTensors, values: Tree) -> None:
        """Bring back what was observed: in place where a buffer has room for it.

        Args:
            tensors: of the whole snapshot, by name.
            values: what `observe` returned.
        """
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
                tensors.bring(saved, self._local(live))
            else:
                lay = values["elsewhere"].get(name, values["device"])
                owner._buffers[key] = saved.to(lay if live is None else live.device, copy=True)
        for name, known in ties.items():
            (owner, key), (other, other_key) = owners[name], owners[known]
            owner._buffers[key] = other._buffers[other_key]

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
