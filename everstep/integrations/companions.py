"""Keeps what the objects of a framework change while they train, besides the trained model and its optimizer.

Examples are a second model that follows the first one, the sums of values that a trainer logs later, the averaged
weights of a callback, and the tensors by which a tuner of adapters chooses ranks.

    attach     `Companions(...)` notes the values of the objects, before the restore
    begin      `apply` sets the restored values when the framework's loop begins, after the hooks of other callbacks
    snapshot   `state_dict` returns the values that are no longer those of `attach`

Invariant: a value that is still that of `attach` is in no snapshot. Any other value of these objects is in each
snapshot, or `state_dict` names it and raises an error. Exceptions are values that no snapshot can contain, such as open
files: the script must create them again.
"""

from __future__ import annotations

import operator
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final, cast

import numpy as np
import torch

from everstep.training import CannotResume, rng
from everstep.training.attributes import copied
from everstep.training.parts import OF_MODULES, is_class_of_script
from everstep.training.state_tree import MAX_DEPTH, Tree, is_same

MAX_ITEMS: Final = 10_000
"""Number of items of the longest list or dict that a snapshot contains. Longer ones usually hold samples."""
_LARGE: Final = object()
"""Mark of a value that is too large for a copy at `attach`."""
_SCALARS: Final = (type(None), bool, int, float, complex, str, bytes)
_DICTS: Final = (dict, defaultdict, OrderedDict, Counter)
_LISTS: Final = (list, tuple, deque, set, frozenset)
_TIMES: Final = 10**9
"""Numbers from here on can be times, which differ between a run and its repetition."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A value of an object: an attribute, or a tensor of a second model."""

    owner: str
    """Path of the object."""
    holder: Any
    key: str
    value: Any


@dataclass(slots=True)
class _Found:
    """One walk through the objects."""

    objects: dict[str, Any] = field(default_factory=dict)
    """The objects that the walk has entered, by path."""
    places: dict[str, _Place] = field(default_factory=dict)
    """Their values that a snapshot can contain, by path."""
    models: dict[str, _Model] = field(default_factory=dict)
    """The second models, by path."""
    others: set[str] = field(default_factory=set)
    """Paths of attributes that no snapshot can contain."""


class Companions:
    """The changed values of a framework's objects. A session registers it like any object with `state_dict`.

    Args:
        roots: returns the objects by name, for example a trainer and its callbacks.
        kept: returns objects that the search does not enter, because other parts of a snapshot contain their state, or
            because a restarted script builds them anew: the trained model, the optimizer, data sets, arguments.
        packages: first components of the names of packages whose objects the search enters, besides the script's
            objects, such as `transformers`.
        hidden: names of attributes of modules that the search skips, because they belong to one process.
    """

    def __init__(
        self,
        roots: Callable[[], Mapping[str, object]],
        kept: Callable[[], Iterable[object]],
        packages: Iterable[str],
        hidden: Iterable[str] = (),
    ) -> None:
        self._roots = roots
        self._kept = kept
        self._packages = frozenset(packages)
        self._hidden = OF_MODULES | set(hidden)
        self._models: dict[str, _Model] = {}
        self._marks: dict[str, Tree] | None = None
        """Copy of each value at `attach`, by path. None until the first walk has ended."""
        self._marks = {path: _mark(place.value) for path, place in self._walk().places.items()}
        self._begun: _Found | None = None
        """The objects when the loop begins; None before."""
        self._restored: dict[str, Tree] = {}

    def state_dict(self) -> dict[str, Tree]:
        """Find the changed values. Called for every snapshot.

        Returns:
            Live values by path.

        Raises:
            CannotResume: training has created an object with state. A restarted script has no such object when it
                restores.
        """
        if self._begun is None:
            return self._restored
        found = self._walk()
        changed = [place for path, place in found.places.items() if not self._is_known(path, place.value)]
        models = {path: model for path, model in found.models.items() if model.has_changed()}
        for owner in chain((place.owner for place in changed), models):
            if owner not in self._begun.objects:
                raise CannotResume(
                    owner,
                    "training has created this object, so a restarted script has none that Everstep could restore. "
                    "Create it before training, or in the hook that runs when training begins",
                )
        # Training may open a file and set a flag of the same object, such as `is_open`. No snapshot contains the file,
        # so leave out the flag, too: a restarted script then opens the file again.
        late = {path.rpartition(".")[0] for path in found.others - self._begun.others}
        flagged = [place for place in changed if not (place.owner in late and type(place.value) is bool)]
        values = {f"{place.owner}.{place.key}": _tree(place.value) for place in flagged}
        return values | {
            f"{path}:{name}": each for path, model in models.items() for name, each in model.tensors.items()
        }

    def compared_state(self) -> dict[str, Tree]:
        """Return the part of the state that a rehearsal compares: tensors and counts. The rest can contain times."""
        return {
            path: value
            for path, value in self.state_dict().items()
            if isinstance(value, torch.Tensor) or (type(value) is int and value < _TIMES)
        }

    def load_state_dict(self, state: dict[str, Tree]) -> None:
        """Store the restored values until `apply`."""
        self._restored = dict(state)

    def apply(self) -> None:
        """Set the restored values. The framework's loop has begun, and has reset its own. Later calls do nothing."""
        if self._begun is not None:
            return
        self._begun = found = self._walk()
        tensors = _named(found.models)
        for path, value in self._restored.items():
            owner, _, key = path.rpartition(".")
            if path in tensors:
                _restored(tensors[path], value)
            elif path in found.places:
                place = found.places[path]
                vars(place.holder)[place.key] = _restored(place.value, value)
            elif owner in found.objects:
                vars(found.objects[owner])[key] = _restored(None, value)
        self._restored = {}

    def _is_known(self, path: str, value: object) -> bool:
        return self._marks is not None and path in self._marks and is_same(_tree(value), self._marks[path])

    def _model(self, path: str, module: torch.nn.Module) -> _Model:
        """Return what is known of a second model. One that was created after `attach` counts as changed."""
        if path not in self._models or self._models[path].is_other(module):
            trained = (each for each in self._kept() if isinstance(each, torch.nn.Module))
            besides = {id(each) for model in trained for _, each in _tensors_of(model)}
            self._models[path] = _Model(module, besides, is_new=self._marks is not None)
        return self._models[path]

    def _walk(self) -> _Found:
        found = _Found()
        roots = self._roots()
        known = {id(each) for each in chain(self._kept(), roots.values())}
        waiting = deque(roots.items())
        while waiting:
            path, holder = waiting.popleft()
            found.objects[path] = holder
            is_module = isinstance(holder, torch.nn.Module)
            for key, value in [*vars(holder).items()]:
                if (is_module and key in self._hidden) or id(value) in known:
                    continue
                inner = f"{path}.{key}"
                if _is_plain(value):
                    found.places[inner] = _Place(path, holder, key, value)
                    continue
                entered = [(name, each) for name, each in _objects_in(inner, value) if self._is_entered(each, known)]
                known |= {id(each) for _, each in entered}
                for name, each in entered:
                    if isinstance(each, torch.nn.Module):
                        found.objects[name], found.models[name] = each, self._model(name, each)
                        known |= found.models[name].parts
                    else:
                        waiting.append((name, each))
                if not entered and not callable(value):
                    found.others.add(inner)
        return found

    def _is_entered(self, value: object, known: set[int]) -> bool:
        if id(value) in known or isinstance(value, type) or not hasattr(value, "__dict__"):
            return False
        if isinstance(value, torch.nn.Module):
            return True
        return type(value).__module__.partition(".")[0] in self._packages or is_class_of_script(type(value))


class _Model:
    """The tensors of a second model, and whether they have changed.

    A script may write through `Tensor.data`, which torch's version counters do not count. The check therefore also
    compares the first, the middle and the last element of each tensor.
    """

    def __init__(self, module: torch.nn.Module, besides: set[int], *, is_new: bool) -> None:
        self._module = module
        self._held = [each for part in module.modules() for each in (part._modules, part._parameters, part._buffers)]
        self._seen = self._observe_parts()
        self.parts = {*map(id, module.modules())}
        """Identities of the model and its submodules."""
        self.tensors = {name: each for name, each in _tensors_of(module) if id(each) not in besides}
        """The tensors that are not of the trained model, by name."""
        self._is_changed = is_new and bool(self.tensors)
        self._marks = self._observe()
        self._elements = _elements(self.tensors.values())
        self._samples = [*map(torch.cat, self._elements)]

    def is_other(self, module: torch.nn.Module) -> bool:
        """Return whether a module is another one, or has other submodules, parameters or buffers than this object."""
        now = self._observe_parts()
        is_same = len(now) == len(self._seen) and all(map(operator.is_, now, self._seen))
        return module is not self._module or not is_same

    def _observe_parts(self) -> list[object]:
        return [*chain.from_iterable(each.values() for each in self._held)]

    def has_changed(self) -> bool:
        if not self._is_changed:
            samples = map(torch.cat, self._elements)
            self._is_changed = self._observe() != self._marks or not all(map(torch.equal, samples, self._samples))
        return self._is_changed

    def _observe(self) -> list[tuple[int, int]]:
        return [(each.data_ptr(), 0 if each.is_inference() else each._version) for each in self.tensors.values()]


def _tensors_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers of a second model; of a sharded one, this rank's part."""
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        yield name, getattr(tensor, "_local_tensor", getattr(tensor, "ds_tensor", tensor))


def _named(models: Mapping[str, _Model]) -> dict[str, Tree]:
    return {f"{path}:{name}": each for path, model in models.items() for name, each in model.tensors.items()}


@torch.no_grad()
def _elements(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return views of the first, the middle and the last element of each tensor, grouped by device and dtype."""
    views: dict[object, list[torch.Tensor]] = defaultdict(list)
    for each in tensors:
        if each.numel() and each.layout is torch.strided and not each.is_meta:
            for place in sorted({0, each.numel() // 2, each.numel() - 1}):
                view = each[np.unravel_index(place, each.shape)] if each.ndim else each
                views[each.device, each.dtype].append(view.reshape(1))
    return list(views.values())


def _is_plain(value: object, depth: int = MAX_DEPTH) -> bool:
    """Return whether a snapshot can contain a value."""
    kind = type(value)
    if kind in _SCALARS or isinstance(value, (torch.Tensor, np.ndarray, np.generic, *rng.GENERATORS)):
        return True
    if not depth or (kind not in _DICTS and kind not in _LISTS) or len(cast("Any", value)) > MAX_ITEMS:
        return False
    parts = chain(value, value.values()) if isinstance(value, dict) else cast("Iterable[object]", value)
    return all(_is_plain(each, depth - 1) for each in parts)


def _tree(value: Any) -> Tree:
    """Return a plain value as a state tree, with generators as their states."""
    if isinstance(value, rng.GENERATORS):
        return rng.generator_state(value)
    if isinstance(value, torch.Tensor):
        return getattr(value, "_local_tensor", value)
    if isinstance(value, dict):
        return {key: _tree(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return (tuple if isinstance(value, tuple) else list)(map(_tree, value))
    return value


def _mark(value: Any) -> Tree:
    """Return a copy of a plain value for later comparisons. Return `_LARGE` instead of a copy of a large value."""
    tree = _tree(value)
    return copied(tree) if _size(tree) <= MAX_ITEMS else _LARGE


def _size(tree: Tree) -> int:
    if isinstance(tree, dict):
        return sum(map(_size, tree.values()))
    if isinstance(tree, (list, tuple)):
        return sum(map(_size, tree))
    return tree.numel() if isinstance(tree, torch.Tensor) else tree.size if isinstance(tree, np.ndarray) else 1


def _restored(held: Any, saved: Any) -> Any:
    """Return the restored value: the object that the script has, with the saved content, where this is possible."""
    if isinstance(held, rng.GENERATORS):
        rng.set_generator_state(held, saved)
    elif isinstance(held, torch.Tensor) and isinstance(saved, torch.Tensor) and held.shape == saved.shape:
        with torch.no_grad():
            getattr(held, "_local_tensor", held).copy_(saved)
    elif isinstance(held, dict) and isinstance(saved, dict):
        for key in held.keys() - saved.keys():
            del held[key]
        make = getattr(held, "default_factory", None) or (lambda: None)
        for key, each in saved.items():
            held[key] = _restored(held[key] if key in held else make(), each)
    elif isinstance(held, (list, deque)) and isinstance(saved, list):
        own = [*held]
        held.clear()
        held.extend(_restored(own[number] if number < len(own) else None, each) for number, each in enumerate(saved))
    else:
        return copied(saved)
    return held


def _objects_in(path: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield an object, or the objects in a list or dict, by path."""
    if isinstance(value, Mapping) and len(value) <= MAX_ITEMS:
        for key, each in cast("Mapping[object, object]", value).items():
            yield from _objects_in(f"{path}[{key}]", each)
    elif isinstance(value, (list, tuple)) and len(value) <= MAX_ITEMS:
        for number, each in enumerate(cast("list[object]", value)):
            yield from _objects_in(f"{path}[{number}]", each)
    else:
        yield path, value
