"""Defines the `Adapter` interface, and the code that all adapters share: names, optimizers, checks.

Invariant: an adapter names each tensor once, at `init`, and lists the tensors in the same order in every snapshot. It
rejects a class that is not known to restore bit for bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol, cast

import torch
from torch.optim.optimizer import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from everstep.protocol.parts import TensorPart
from everstep.protocol.slot import align
from everstep.training.adapters.optimizer_trial import keeps_all_state
from everstep.training.arena import Arena
from everstep.training.capture import StateTensor
from everstep.training.earlier import EarlierState, EarlierTensors, LoadTarget
from everstep.training.errors import CannotRelayout, CannotResume
from everstep.training.module_tree import canonical_name
from everstep.training.saved_tensors import SavedTensors
from everstep.training.sources import same_tensors
from everstep.training.state_tree import Tree, check_dense, dtype_name, dtype_of, encode

EXPECTED_OPTIMIZERS = frozenset(
    {
        "deepspeed.ops.adam.fused_adam.FusedAdam",
        "deepspeed.ops.adagrad.cpu_adagrad.DeepSpeedCPUAdagrad",
        "deepspeed.ops.lion.cpu_lion.DeepSpeedCPULion",
        "deepspeed.ops.lion.fused_lion.FusedLion",
        "apex.optimizers.fused_adam.FusedAdam",
        "torch_optimizer.lion.Lion",
        "lion_pytorch.lion_pytorch.Lion",
    }
)
"""Optimizers outside torch.optim that keep their state in `state` and `param_groups`, and change it only in `step`."""


@dataclass(frozen=True, slots=True)
class AdapterState:
    """The part of a snapshot that one adapter provides."""

    lists: Sequence[list[StateTensor]]
    """Live tensors. A list stays the same object while its tensors do, so that the session need not compare them."""
    fresh: list[StateTensor]
    values: Tree

    @property
    def tensors(self) -> list[StateTensor]:
        """All tensors in the order in which a slot stores them."""
        return [*chain.from_iterable(self.lists), *self.fresh]


class Adapter(Protocol):
    """Captures and restores models and optimizers of one way to train."""

    kind: str
    revision: int
    """Number of changes of modules, groups and `requires_grad` that `observe` has seen."""

    def prepare(self) -> None:
        """Prepare the models so that a launch's first step computes in the same order as all later steps. Otherwise,
        the first step after a restore would differ from that of an undisturbed run. Collective, once per launch.
        """

    def facts(self) -> dict[str, str]:
        """Return facts, such as shapes, which a snapshot and a launch must have in common. The facts describe the state
        at `init`, because a restarted script has not repeated later changes when it restores.
        """
        ...

    def check(self) -> None:
        """Raise CannotResume if a restarted script could not restore the changes since `init`."""

    def observe(self) -> AdapterState:
        """Return the current state without copying its tensors."""
        ...

    def forecast(self) -> AdapterState | None:
        """Predict the state after each optimizer's first step, with missing tensors on the meta device, else None."""

    def parts(self, states: Sequence[StateTensor]) -> Mapping[str, tuple[TensorPart, ...]]:
        """Return the boxes of each stored tensor by its name, when the tensors of a snapshot or their shapes change. A
        tensor that contains only padding has no box. A tensor that is a whole logical tensor has no entry. The adapter
        ignores the tensors of other adapters.
        """
        ...

    def expect_restore(self) -> Sequence[Arena]:
        """Reserve memory for the tensors that `load` will create. Called once, before `load`."""
        ...

    def load(self, tensors: SavedTensors, values: Tree) -> None:
        """Write a saved state into the live objects, in place, without communication between ranks.

        Reading a tensor may wait for its bytes, so read in the order of `AdapterState.tensors`. Tensors passed to
        `tensors.bring` are complete after `tensors.finish`. If the bytes turn out to be invalid, the caller calls
        `load` again or ends the process. `values` are those that `observe` returned.
        """

    def targets(self, earlier: EarlierTensors, values: EarlierState) -> Sequence[LoadTarget]:
        """Return the tensors that `load` will read from another layout's snapshot, in the order of `load`. This rank
        calls the method after each earlier shard that it maps, and every call returns the same boxes. `values` are
        those of the shard that was mapped first. Raises CannotRelayout if a tensor cannot be filled.
        """
        ...

    def translate(self, values: EarlierState) -> Tree:
        """Convert an earlier rank's `observe` values for `load`. Raises CannotRelayout if that is impossible."""
        ...

    def synchronize(self) -> None:
        """Compute state that derives from several ranks' loaded state. Collective, once after `load`."""

    def optimizers(self) -> Mapping[str, Optimizer]:
        """Return the optimizers by name. Only their steps may change the tensors with `StateTensor.is_deferred`."""
        ...

    def parameters(self) -> Mapping[str, torch.Tensor]:
        """Return the parameters by their names in a slot. Only registered optimizers may update them."""
        ...

    def schedulers(self) -> Sequence[object]:
        """Return the schedulers that the framework owns, whose state is in this adapter's part of a snapshot."""
        ...

    def modules(self) -> Sequence[torch.nn.Module]:
        """Return the root modules that the script registered."""
        ...

    def trees(self) -> Sequence[Sequence[torch.nn.Module]]:
        """Return the present modules of each root. A list is the same object until a module of its root is replaced."""
        ...

    def steps_made(self) -> int | None:
        """Return the framework's count of optimizer steps; None if it does not count them."""

    def batches_per_step(self) -> int | None:
        """Return the framework's batches per optimizer step; None if the script decides."""

    def end_step(self) -> None:
        """Record the end of a step, before any other call. Present gradients belong to the finished step."""


class NamedTensors:
    """Caches the named tensors of a state, until a tensor object of this state is replaced."""

    def __init__(self) -> None:
        self._key: object = None
        self._live: list[torch.Tensor] = []
        self._named: list[StateTensor] = []

    def of(self, live: list[torch.Tensor], key: object, name: Callable[[], list[StateTensor]]) -> list[StateTensor]:
        """Return the cached list, or a new one from `name` if an object of `live` or `key` has changed."""
        if key != self._key or not same_tensors(live, self._live):
            self._named, self._live, self._key = name(), live, key
        return self._named


def _foresee_adam(group: Mapping[str, Any]) -> tuple[str, ...]:
    return ("step", "exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))


FORESEEN: Mapping[type[Optimizer], Callable[[Mapping[str, Any]], tuple[str, ...]]] = {
    torch.optim.Adam: _foresee_adam,
    torch.optim.AdamW: _foresee_adam,
    torch.optim.NAdam: lambda _group: ("step", "mu_product", "exp_avg", "exp_avg_sq"),
    torch.optim.RAdam: lambda _group: ("step", "exp_avg", "exp_avg_sq"),
    torch.optim.SGD: lambda group: ("momentum_buffer",) if group["momentum"] else (),
}
"""A parameter's state entries after the first step, from its group's options, by optimizer class."""
SCALARS = ("step", "mu_product")


@dataclass(frozen=True, slots=True)
class NamedOptimizer:
    """A registered optimizer, with the names of its parameters."""

    name: str
    optimizer: Optimizer
    members: list[tuple[str, torch.Tensor]]
    """Name and parameter of each tensor that the optimizer may change or has state of."""
    local: Callable[[torch.Tensor], torch.Tensor]
    rewrap: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """Wraps a local state tensor in the optimizer's form, such as a DTensor, with the same memory."""
    listed: NamedTensors = field(default_factory=NamedTensors)
    arenas: list[Arena] = field(default_factory=list)

    @property
    def prefix(self) -> str:
        """Prefix of the names of this optimizer's tensors in a snapshot."""
        return f"optimizer/{self.name}/" if self.name else "optimizer/"

    def observe(self) -> tuple[list[StateTensor], Tree]:
        """Return the live state tensors, the same list if none changed, and the groups and other entries."""
        entries = list(self.optimizer.state.values())
        keys = list(chain.from_iterable(entries))
        values = list(chain.from_iterable(map(dict.values, entries)))
        live = (
            values
            if all(issubclass(kind, torch.Tensor) for kind in set(map(type, values)))
            else list(filter(torch.is_tensor, values))
        )
        plain = {} if live is values else self._plain()
        # Compare the parameters to which the state belongs, too. The name of a state tensor contains its parameter, so
        # a tensor that moved to another parameter needs a new name.
        owners = list(self.optimizer.state)
        # Collect state that belongs to no single parameter. A custom optimizer may store it under string keys, while
        # torch's optimizers use parameters as keys.
        shared = {} if all(issubclass(kind, torch.Tensor) for kind in set(map(type, owners))) else self._shared()
        listed = self.listed.of([*owners, *local_tensors(live, self.local)], keys, self._named)
        return listed, {"groups": self._groups(), "plain": plain, "shared": shared}

    def split_name(self, state_name: str) -> tuple[str, str] | None:
        """Split a state tensor's name into parameter and state entry; None if it is not of this optimizer."""
        name, found, key = state_name.removeprefix(self.prefix).rpartition("/")
        return (name, key) if found and state_name.startswith(self.prefix) else None

    def forecast(self) -> list[StateTensor] | None:
        """Return the state tensors after the first step, missing ones on the meta device; None for an unknown class."""
        expected = FORESEEN.get(type(self.optimizer))
        if expected is None:
            return self._named() if all(parameter in self.optimizer.state for _, parameter in self.members) else None
        options = self._options()
        found: list[StateTensor] = []
        for name, parameter in self.members:
            if self.optimizer.state.get(parameter):
                found += self._named_of(name, parameter)
            elif parameter.requires_grad:
                found += [self._foreseen(name, key, self.local(parameter)) for key in expected(options[name])]
        return found

    def expect_restore(self) -> Arena | None:
        """Reserve memory for the state that `forecast` adds. None if there is none."""
        missing = [state.tensor for state in self.forecast() or () if state.tensor.is_meta]
        if not missing or any(parameter.device.type != "cpu" for _, parameter in self.members):
            return None
        self.arenas[:] = [Arena(sum(align(tensor.numel() * tensor.element_size()) for tensor in missing))]
        return self.arenas[0]

    def of_earlier(self, earlier: EarlierTensors) -> list[StateTensor]:
        """Return the state tensors that the mapped earlier shards contain, on the meta device. A tensor with one
        element per element of its parameter has the size of this rank's part. Any other tensor has its earlier size.
        """
        found: list[StateTensor] = []
        for name, parameter in self.members:
            local, entries = self.local(parameter), earlier.entries(f"{self.prefix}{name}")
            shapes: dict[str, tuple[tuple[int, ...], str]] = {}
            for key, held in entries.items():
                is_like = key not in SCALARS and tuple(parameter.shape) == held.shape
                shapes[key] = (tuple(local.shape) if is_like else held.shape), held.dtype
            if not local.numel():
                # Add tensors without elements. They belong to the optimizer's state, although no shard contains a piece
                # of them.
                empty = dict(earlier.empty_entries(f"{self.prefix}{name}"))
                if entries:
                    empty |= dict.fromkeys(self._expected_keys(name), dtype_name(local.dtype))
                shapes = {**{key: (tuple(local.shape), dtype) for key, dtype in empty.items()}, **shapes}
            for key, (shape, dtype) in shapes.items():
                tensor = torch.empty(shape, dtype=dtype_of(dtype), device="meta")
                found.append(StateTensor(f"{self.prefix}{name}/{key}", tensor, is_deferred=True))
        return found

    def wanted(self, earlier: EarlierTensors) -> list[str]:
        """Return the names of state scalars, such as `step`, that no mapped earlier shard has contained. A parameter
        without elements on this rank also has scalars, in the first mapped shard with state of the parameter.
        """
        return [
            f"{self.prefix}{name}/{key}"
            for name, parameter in self.members
            if not self.local(parameter).numel() and not earlier.entries(f"{self.prefix}{name}")
            for key in SCALARS
            if key in self._expected_keys(name)
        ]

    def _expected_keys(self, name: str) -> Sequence[str]:
        expected = FORESEEN.get(type(self.optimizer))
        return () if expected is None else expected(self._options()[name])

    def adopt(self, saved: Mapping[str, Any]) -> Tree:
        """Convert the plain values of an earlier optimizer of another kind of training, without options that this one
        lacks. Raises CannotRelayout if the numbers of groups differ, or parameters that now share one state have
        different values.
        """
        where = f"optimizer/{self.name}" if self.name else "optimizer"
        groups, live = saved["groups"], self.optimizer.param_groups
        if len(groups) != len(live):
            raise CannotRelayout(
                where, f"it had {len(groups)} parameter groups and has {len(live)}. Build the same groups as before"
            )
        common: dict[str, Tree] = {}
        for entries in saved["plain"].values():
            for key, value in entries.items():
                if common.setdefault(key, value) != value:
                    raise CannotRelayout(
                        where,
                        f"its parameters have different values of {key!r}, {common[key]!r} and {value!r}, and one "
                        "state now holds several parameters. Load the step with the earlier kind of training",
                    )
        return {
            "groups": [
                {key: value for key, value in entries.items() if key in group}
                for entries, group in zip(groups, live, strict=True)
            ],
            "plain": {name: dict(common) for name, _ in self.members} if common else {},
            "shared": saved["shared"],
        }

    def _foreseen(self, name: str, key: str, local: torch.Tensor) -> StateTensor:
        place = f"{self.prefix}{name}/{key}"
        if key in SCALARS:
            return StateTensor(place, torch.empty((), dtype=torch.float32, device="meta"), is_deferred=True)
        return StateTensor(place, torch.empty(local.shape, dtype=local.dtype, device="meta"), is_deferred=True)

    def _named(self) -> list[StateTensor]:
        places = {id(parameter): place for place, parameter in enumerate(self.optimizer.state)}
        members = sorted(self.members, key=lambda member: places.get(id(member[1]), -1))
        return [state for name, parameter in members for state in self._named_of(name, parameter)]

    def _named_of(self, name: str, parameter: torch.Tensor) -> list[StateTensor]:
        return [
            state_tensor(f"{self.prefix}{name}/{key}", value, self.local, is_deferred=True)
            for key, value in self.optimizer.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor)
        ]

    def _options(self) -> dict[str, Mapping[str, Any]]:
        """Return the options of each parameter's group, or the defaults if ZeRO-3 has removed the parameter from it."""
        group_of = {id(parameter): group for group in self.optimizer.param_groups for parameter in group["params"]}
        return {name: group_of.get(id(parameter), self.optimizer.defaults) for name, parameter in self.members}

    def _plain(self) -> dict[str, dict[str, Tree]]:
        plain: dict[str, dict[str, Tree]] = {}
        for name, parameter in self.members:
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if not isinstance(value, torch.Tensor):
                    plain.setdefault(name, {})[key] = value
        return plain

    def _shared(self) -> dict[Any, Tree]:
        state = cast("dict[object, dict[object, Any]]", self.optimizer.state)
        return {key: dict(entry) for key, entry in state.items() if not isinstance(key, torch.Tensor)}

    def _groups(self) -> list[Tree]:
        return [
            {key: value for key, value in group.items() if key not in ("params", "param_names")}
            for group in self.optimizer.param_groups
        ]

    @torch.no_grad()
    def load(self, tensors: SavedTensors, values: Tree) -> None:
        """Write the saved state and group options into the live optimizer, and delete other state entries."""
        assert isinstance(values, dict)
        options = self._options()
        saved: dict[str, dict[str, str]] = {}
        for path in tensors:
            if (split := self.split_name(path)) is not None:
                saved.setdefault(split[0], {})[split[1]] = path
        for group, entries in zip(self.optimizer.param_groups, values["groups"], strict=True):
            for key, value in entries.items():
                if isinstance(group.get(key), torch.Tensor) and isinstance(value, torch.Tensor):
                    group[key].copy_(value)  # Write into the existing tensor, because a compiled step may reference it.
                else:
                    group[key] = value
        for name, parameter in self.members:
            self._load_parameter(parameter, tensors, saved.get(name, {}), values["plain"].get(name, {}), options[name])
        state = cast("dict[object, Any]", self.optimizer.state)
        members = dict(self.members)
        for parameter in (members[name] for name in saved if members[name] in state):
            state[parameter] = state.pop(parameter)
        for key in self._shared():
            del state[key]
        state.update(values["shared"])
        self.arenas.clear()

    def _load_parameter(
        self,
        parameter: torch.Tensor,
        tensors: SavedTensors,
        paths: Mapping[str, str],
        plain: Mapping[str, Tree],
        group: Mapping[str, Any],
    ) -> None:
        if not paths and not plain:
            self.optimizer.state.pop(parameter, None)
            return
        state = self.optimizer.state[parameter]
        for key in [key for key in state if key not in paths and key not in plain]:
            del state[key]
        for key, path in paths.items():
            live = state.get(key)
            if isinstance(live, torch.Tensor) and (self.local(live).shape, live.dtype) == tensors.described(path):
                tensors.bring(path, self.local(live))
            else:
                state[key] = self._place(parameter, key, tensors, path, group)
        state.update(plain)

    def _place(
        self, parameter: torch.Tensor, key: str, tensors: SavedTensors, path: str, group: Mapping[str, Any]
    ) -> torch.Tensor:
        (shape, dtype), local = tensors.described(path), self.local(parameter)
        if key in SCALARS and not (group.get("capturable") or group.get("fused")):
            return tensors[path].clone()
        if shape != local.shape:
            return tensors[path].to(local.device, copy=True)
        fresh = self.arenas[0].empty(local.shape, dtype) if self.arenas and local.is_contiguous() else None
        return self.rewrap(
            parameter, tensors.bring(path, torch.empty_like(local, dtype=dtype) if fresh is None else fresh)
        )


class ExtraStates:
    """Captures and restores what modules return from `get_extra_state`, after all tensors are loaded, as torch does."""

    def __init__(self) -> None:
        self._modules: dict[str, torch.nn.Module] = {}
        self._loaded: Mapping[str, Tree] = {}

    def add(self, prefix: str, model: torch.nn.Module) -> None:
        """Add a model. Raises CannotResume if an extra state lacks a setter, or is not plain values and tensors."""
        found = [
            (path, module)
            for path, module in model.named_modules()
            if type(module).get_extra_state is not torch.nn.Module.get_extra_state
        ]
        names = tensor_names([(f"{path}.extra_state" if path else "extra_state", id(module)) for path, module in found])
        for name, (_, module) in zip((prefix + name for name in names), found, strict=True):
            if type(module).set_extra_state is torch.nn.Module.set_extra_state:
                raise CannotResume(
                    f"model/{name}", f"{qualified_name(type(module))} has get_extra_state but no set_extra_state"
                )
            encode(module.get_extra_state(), f"model/{name}")
            self._modules[name] = module

    @property
    def names(self) -> Sequence[str]:
        """Names of the extra states in a snapshot."""
        return list(self._modules)

    def follow(self, replaced: Mapping[torch.nn.Module, torch.nn.Module]) -> None:
        """Use the script's new modules in place of those that they have replaced."""
        self._modules = {name: replaced.get(module, module) for name, module in self._modules.items()}

    def observe(self) -> dict[str, Tree]:
        """Return the result of each module's `get_extra_state`, by name."""
        return {name: module.get_extra_state() for name, module in self._modules.items()}

    def load(self, values: Mapping[str, Tree]) -> None:
        """Keep the saved extra states until `finish`."""
        self._loaded = values

    def finish(self) -> None:
        """Pass the saved extra states to the modules. Called after all tensors are loaded."""
        for name, module in self._modules.items():
            module.set_extra_state(self._loaded[name])
        self._loaded = {}


@dataclass(frozen=True, slots=True)
class Layout:
    """Collects facts about modules and optimizers that determine the layout of a snapshot."""

    entries: dict[str, str] = field(default_factory=dict)

    def add_tensor(self, name: str, tensor: torch.Tensor, requires_grad: bool) -> None:
        """Record a tensor's dtype, shape and `requires_grad`."""
        self.entries[f"tensor {name}"] = (
            f"{dtype_name(tensor.dtype)}{list(tensor.shape)}{'' if requires_grad else ' frozen'}"
        )

    def add_optimizer(self, named: NamedOptimizer) -> None:
        """Record an optimizer's class, its groups' parameters, and those options that are bool, str or None."""
        optimizer = named.optimizer
        names = {id(parameter): name for name, parameter in named.members}
        self.entries[f"optimizer {named.name}"] = qualified_name(type(optimizer))
        for number, group in enumerate(optimizer.param_groups):
            switches = {
                key: group[key]
                for key in sorted(group)
                if key != "params" and (group[key] is None or isinstance(group[key], (bool, str)))
            }
            members = [names.get(id(parameter), "") for parameter in group["params"]]
            self.entries[f"optimizer {named.name} group {number}"] = f"{switches} {members}"


def check_optimizer(name: str, optimizer: Optimizer, trusted: Sequence[type]) -> None:
    """Reject an optimizer that may keep state outside its `state` and `param_groups`. Raises CannotResume if the class
    is neither known nor in `trusted`, and a trial with a copy fails; or if the options make the optimizer keep state
    elsewhere.
    """
    kind = type(optimizer)
    path = qualified_name(kind)
    if not (f"{kind.__module__}.".startswith("torch.optim.") or path in EXPECTED_OPTIMIZERS or kind in trusted):
        try:
            problem = "" if keeps_all_state(optimizer) else "a copy that received its state made another step"
        except Exception as error:
            problem = f"a copy with small parameters could not make a step: {error!r:.200}"
        if problem:
            raise CannotResume(
                name,
                f"Everstep does not know whether {path} restores bit-identically, and {problem}. If it keeps all state "
                f"in `state` and `param_groups`, pass trusted_optimizers=({kind.__qualname__},)",
            )
    # Reject master weights of Apex, which keeps them in its own lists, outside `state`.
    if path in EXPECTED_OPTIMIZERS and getattr(optimizer, "master_weights", False):
        raise CannotResume(name, f"{path} with master_weights=True keeps its fp32 weights outside of the snapshot")


def tensor_names(found: Sequence[tuple[str, Hashable]]) -> list[str]:
    """Return the paths without the components of wrappers, except if two names would then be equal."""
    called: dict[str, set[Hashable]] = {}
    for raw, identity in found:
        called.setdefault(canonical_name(raw), set()).add(identity)
    return [raw if len(called[name := canonical_name(raw)]) > 1 else name for raw, _ in found]


def check_distinct(names: Sequence[str]) -> None:
    """Raise CannotResume if a name occurs twice."""
    for name, count in Counter(names).items():
        if count > 1:
            raise CannotResume(
                f"model/{name}", "two tensors have this name; give the models and modules different names"
            )


def qualified_name(kind: type) -> str:
    """Return the class's name as `package.module.Class`."""
    return f"{kind.__module__}.{kind.__qualname__}"


def plain_local(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` unchanged: without sharding, this rank's local part is the whole tensor."""
    return tensor


def state_tensor(
    name: str,
    tensor: torch.Tensor,
    local: Callable[[torch.Tensor], torch.Tensor],
    *,
    is_deferred: bool,
    is_frozen: bool = False,
) -> StateTensor:
    """Return a `StateTensor` for this rank's local part of a tensor."""
    memory = local(tensor)
    return StateTensor(name, memory, is_deferred, None if memory is tensor else tensor, is_frozen)


def local_tensors(tensors: list[torch.Tensor], local: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    """Return the given tensors and, if they are sharded, also this rank's local part of each of them."""
    # Without sharding, this saves a copy of thousands of entries at every boundary.
    return tensors if local is plain_local else [*tensors, *map(local, tensors)]


def plain_rewrap(_parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return the state tensor unchanged, because without sharding it needs no wrapper."""
    return local


def check_parameter(name: str, parameter: torch.Tensor) -> None:
    """Raise CannotResume as `check_tensor` does, or if a restore could not write the parameter in place."""
    check_tensor(name, parameter)
    if overlaps_itself(parameter):
        raise CannotResume(
            name, "an expanded tensor, whose elements share memory, cannot be restored; register its clone()"
        )


def check_tensor(name: str, tensor: torch.Tensor) -> None:
    """Reject a tensor that cannot be copied as bytes. Raises CannotResume if it is lazy, sparse, quantized, composed of
    other tensors, on the meta device, or a conjugate or negative view.
    """
    if torch.nn.parameter.is_lazy(tensor):
        raise CannotResume(name, "a lazy tensor has no shape yet; run one forward before init")
    if is_traceable_wrapper_subclass(tensor):
        raise CannotResume(
            name,
            (
                f"a tensor of class {qualified_name(type(tensor))} consists of other tensors; Everstep does not "
                "know whether it restores bit-identically"
            ),
        )
    check_dense(tensor, name)
    if tensor.is_conj() or tensor.is_neg():
        raise CannotResume(
            name,
            (
                "a conjugate or negative view stores other bytes than its values; register its "
                "resolve_conj().resolve_neg()"
            ),
        )


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Return whether several elements share memory, as after `expand`. Torch refuses to write to such a tensor."""
    return bool(torch._debug_has_internal_overlap(tensor) == 1)
