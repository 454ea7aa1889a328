"""What a session needs of a way to train, and what all ways share: canonical names, optimizers, what is allowed.

Invariant: tensors are named once, at `init`, and every later list has the same order; classes that are not known to
come back bit for bit are refused by name.
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

from everstep.protocol.slot import align
from everstep.training.arena import Arena
from everstep.training.capture import StateTensor
from everstep.training.errors import CannotResume
from everstep.training.saved_tensors import SavedTensors
from everstep.training.sources import same_tensors
from everstep.training.state_tree import Tree, check_dense, dtype_name, encode

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
"""Outside torch.optim: they keep their state in `state` and `param_groups` and change it in `step` alone."""

WRAPPER_NAMES = ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""What torch.compile, DDP and activation checkpointing put into names."""


@dataclass(frozen=True, slots=True)
class AdapterState:
    """An adapter's part of a snapshot."""

    lists: Sequence[list[StateTensor]]
    """Live; the same list objects as last time where they hold the same tensors."""
    fresh: list[StateTensor]
    """Live, but other objects perhaps than last time."""
    values: Tree

    @property
    def tensors(self) -> list[StateTensor]:
        """All of them."""
        return [*chain.from_iterable(self.lists), *self.fresh]


class Adapter(Protocol):
    """One way to train: plain, DDP, FSDP2 or DeepSpeed."""

    kind: str

    def prepare(self) -> None:
        """Make launches alike before the first step. Collective; every launch, once, by `init`."""

    def facts(self) -> dict[str, str]:
        """Return what must be equal for one launch's snapshot to fit another's. Constant from `init` on."""

    def check(self) -> None:
        """Refuse what has changed since `init` so that a restarted script could not take it back.

        At every captured boundary, behind `observe`.

        Raises:
            CannotResume: named.
        """

    def observe(self) -> AdapterState:
        """Return the state of the moment, nothing copied. At every captured boundary."""

    def foresee(self) -> AdapterState | None:
        """Return the state as it will be after each optimizer's first step, new tensors on the meta device; None where that is not known."""

    def expect_restore(self) -> Sequence[Arena]:
        """Set memory aside for the tensors that `load` will make anew. Once, before `load`."""

    def load(self, tensors: SavedTensors, values: Tree) -> None:
        """Write a state into the live objects, in place; what `tensors` gathers is there once the caller has finished it. Local: no rank waits for
        another here.

        Args:
            tensors: to ask for one may be to wait for its bytes: ask in the order of `AdapterState.tensors`. What comes
                may be void after all, and this called again, or the process ended.
            values: what `observe` returned.
        """

    def synchronize(self) -> None:
        """Rebuild what ranks and modules derive from the loaded state, all of which is there.

        Collective, once after `load`.
        """

    def optimizers(self) -> Mapping[str, Optimizer]:
        """Return the optimizers whose steps change the deferred tensors."""

    def parameters(self) -> Mapping[str, torch.Tensor]:
        """Return the parameters that are kept, by their names in a slot: only registered optimizers may step them."""

    def schedulers(self) -> Sequence[object]:
        """Return the schedulers that the framework itself holds, and whose state is kept."""

    def modules(self) -> Sequence[torch.nn.Module]:
        """Return the root modules."""

    def steps_made(self) -> int | None:
        """Return a count that grows with each optimizer step, or None where only the script knows when a step is complete."""

    def end_step(self) -> None:
        """A boundary is reached: what was noticed so far belongs to the finished step.

        Called first at every boundary.
        """


class NamedTensors:
    """A list of named tensors that is made anew only when they are other tensors: who finds the same list knows that nothing has changed."""

    def __init__(self) -> None:
        self._key: object = None
        self._live: list[torch.Tensor] = []
        self._named: list[StateTensor] = []

    def of(self, live: list[torch.Tensor], key: object, name: Callable[[], list[StateTensor]]) -> list[StateTensor]:
        """Return the named list of `live`.

        Args:
            live: the tensors of the moment, and others that their names depend on.
            key: whatever else the list depends on.
            name: makes the list.

        Returns:
            The list that was returned last, unless a tensor or the key is another one.
        """
        if key != self._key or not same_tensors(live, self._live):
            self._named, self._live, self._key = name(), live, key
        return self._named


FORESEEN: Mapping[type[Optimizer], Callable[[Mapping[str, Any]], tuple[str, ...]]] = {
    torch.optim.Adam: lambda group: (
        "step",
        "exp_avg",
        "exp_avg_sq",
        *(("max_exp_avg_sq",) if group["amsgrad"] else ()),
    ),
    torch.optim.AdamW: lambda group: (
        "step",
        "exp_avg",
        "exp_avg_sq",
        *(("max_exp_avg_sq",) if group["amsgrad"] else ()),
    ),
    torch.optim.NAdam: lambda _group: ("step", "mu_product", "exp_avg", "exp_avg_sq"),
    torch.optim.RAdam: lambda _group: ("step", "exp_avg", "exp_avg_sq"),
    torch.optim.SGD: lambda group: ("momentum_buffer",) if group["momentum"] else (),
}
"""What the first step adds to the state of each parameter, by the group's options."""
SCALARS = ("step", "mu_product")


@dataclass(frozen=True, slots=True)
class NamedOptimizer:
    """An optimizer and the names of its parameters."""

    name: str
    optimizer: Optimizer
    members: Sequence[tuple[str, torch.Tensor]]
    """(name, parameter) of everything it may change, in canonical order."""
    local: Callable[[torch.Tensor], torch.Tensor]
    """The memory of this rank behind a tensor."""
    rewrap: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """(parameter, local state) → state as the optimizer keeps it, over the very memory of the local one: that is filled later."""
    listed: NamedTensors = field(default_factory=NamedTensors)
    arenas: list[Arena] = field(default_factory=list)
    """Memory for the tensors that a restore will make anew, as long as one is expected."""

    @property
    def prefix(self) -> str:
        """Where its tensors' names begin."""
        return f"optimizer/{self.name}/" if self.name else "optimizer/"

    def observe(self) -> tuple[list[StateTensor], Tree]:
        """Return the live state tensors (the list of last time if they are the same), and groups and other entries as a tree."""
        entries = list(self.optimizer.state.values())
        keys = list(chain.from_iterable(entries))
        values = list(chain.from_iterable(map(dict.values, entries)))
        live = (
            values
            if all(issubclass(kind, torch.Tensor) for kind in set(map(type, values)))
            else list(filter(torch.is_tensor, values))
        )
        plain = {} if live is values else self._plain()
        owners = list(self.optimizer.state)  # an entry that changed hands has another name
        # What torch's optimizers keep by parameter, one of a script's own may keep for all of them under a name.
        shared = {} if all(issubclass(kind, torch.Tensor) for kind in set(map(type, owners))) else self._shared()
        listed = self.listed.of([*owners, *local_tensors(live, self.local)], keys, self._named)
        return listed, {"groups": self._groups(), "plain": plain, "shared": shared}

    def foresee(self) -> list[StateTensor] | None:
        """Return the state tensors as they will be after the first step of a parameter that has none yet; None for a class that is not known."""
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
        """Set memory aside for state that is not there yet; None where nothing is missing, or nobody knows what."""
        missing = [state.tensor for state in self.foresee() or () if state.tensor.is_meta]
        if not missing or any(parameter.device.type != "cpu" for _, parameter in self.members):
            return None
        self.arenas[:] = [Arena(sum(align(tensor.numel() * tensor.element_size()) for tensor in missing))]
        return self.arenas[0]

    def _foreseen(self, name: str, key: str, local: torch.Tensor) -> StateTensor:
        place = f"{self.prefix}{name}/{key}"
        if key in SCALARS:
            return StateTensor(place, torch.empty((), dtype=torch.float32, device="meta"), is_deferred=True)
        return StateTensor(place, torch.empty(local.shape, dtype=local.dtype, device="meta"), is_deferred=True)

    def _named(self) -> list[StateTensor]:
        return [state for name, parameter in self.members for state in self._named_of(name, parameter)]

    def _named_of(self, name: str, parameter: torch.Tensor) -> list[StateTensor]:
        return [
            state_tensor(f"{self.prefix}{name}/{key}", value, self.local, is_deferred=True)
            for key, value in self.optimizer.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor)
        ]

    def _options(self) -> dict[str, Mapping[str, Any]]:
        """Return each parameter's group; the defaults where ZeRO-3 has taken it out of its group."""
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
        """Write state and groups into the live optimizer; entries that the snapshot lacks are removed.

        Args:
            tensors: of the whole snapshot, by name.
            values: what `observe` returned.
        """
        assert isinstance(values, dict)
        options = self._options()
        saved: dict[str, dict[str, str]] = {}
        for path in tensors:
            if path.startswith(self.prefix):
                name, key = path.removeprefix(self.prefix).rsplit("/", 1)
                saved.setdefault(name, {})[key] = path
        for group, entries in zip(self.optimizer.param_groups, values["groups"], strict=True):
            for key, value in entries.items():
                if isinstance(group.get(key), torch.Tensor) and isinstance(value, torch.Tensor):
                    group[key].copy_(value)  # a compiled step holds this very tensor
                else:
                    group[key] = value
        for name, parameter in self.members:
            self._load_parameter(parameter, tensors, saved.get(name, {}), values["plain"].get(name, {}), options[name])
        state = cast("dict[object, Any]", self.optimizer.state)
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
            live, saved = state.get(key), tensors[path]
            if isinstance(live, torch.Tensor) and self.local(live).shape == saved.shape and live.dtype == saved.dtype:
                tensors.bring(saved, self.local(live))
            else:
                state[key] = self._place(parameter, key, tensors, path, group)
        state.update(plain)

    def _place(
        self, parameter: torch.Tensor, key: str, tensors: SavedTensors, path: str, group: Mapping[str, Any]
    ) -> torch.Tensor:
        """Make a state tensor where a step would put it."""
        saved, local = tensors[path], self.local(parameter)
        if key in SCALARS and not (group.get("capturable") or group.get("fused")):
            return saved.clone()
        if saved.shape != local.shape:
            return saved.to(local.device, copy=True)
        fresh = self.arenas[0].empty(local.shape, saved.dtype) if self.arenas and local.is_contiguous() else None
        return self.rewrap(
            parameter, tensors.bring(saved, torch.empty_like(local, dtype=saved.dtype) if fresh is None else fresh)
        )


class ExtraStates:
    """What modules keep beside parameters and buffers, and give by `get_extra_state`.

    Invariant: a module is handed its state when all tensors are there, as torch's own `load_state_dict` does it.
    """

    def __init__(self) -> None:
        self._modules: dict[str, torch.nn.Module] = {}
        self._loaded: Mapping[str, Tree] = {}

    def add(self, prefix: str, model: torch.nn.Module) -> None:
        """List the modules of a model.

        Args:
            prefix: of their names.
            model: root module.

        Raises:
            CannotResume: one gives its state and takes none, or its state is not of plain values and tensors.
        """
        found = [
            (path, module)
            for path, module in model.named_modules()
            if type(module).get_extra_state is not torch.nn.Module.get_extra_state
        ]
        names = tensor_names([(f"{path}.extra_state" if path else "extra_state", id(module)) for path, module in found])
        for name, (_, module) in zip((prefix + name for name in names), found, strict=True):
            if type(module).set_extra_state is torch.nn.Module.set_extra_state:
                raise CannotResume(
                    f"model/{name}", f"{qualified_name(type(module))} has get_extra_state and no set_extra_state"
                )
            encode(module.get_extra_state(), f"model/{name}")
            self._modules[name] = module

    @property
    def names(self) -> Sequence[str]:
        """Of the modules' states."""
        return list(self._modules)

    def observe(self) -> dict[str, Tree]:
        """Return the states, live. At every captured boundary."""
        return {name: module.get_extra_state() for name, module in self._modules.items()}

    def load(self, values: Mapping[str, Tree]) -> None:
        """Take what `observe` returned; it is handed on by `finish`."""
        self._loaded = values

    def finish(self) -> None:
        """Hand each module its state."""
        for name, module in self._modules.items():
            module.set_extra_state(self._loaded[name])
        self._loaded = {}


@dataclass(frozen=True, slots=True)
class Layout:
    """Facts about modules and optimizers, gathered once."""

    entries: dict[str, str] = field(default_factory=dict)

    def add_tensor(self, name: str, tensor: torch.Tensor, requires_grad: bool) -> None:
        """Record a tensor."""
        self.entries[f"tensor {name}"] = (
            f"{dtype_name(tensor.dtype)}{list(tensor.shape)}{'' if requires_grad else ' frozen'}"
        )

    def add_optimizer(self, named: NamedOptimizer) -> None:
        """Record an optimizer's class, which parameters its groups hold, and the switches of its algorithm."""
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
    """Refuse an optimizer whose state is not known to be all in `state` and `param_groups`.

    Args:
        name: under which it was registered.
        optimizer: the optimizer.
        trusted: classes that the script vouches for.

    Raises:
        CannotResume: the class is not on the list, or keeps a state elsewhere as it was made.
    """
    kind = type(optimizer)
    path = qualified_name(kind)
    if not (f"{kind.__module__}.".startswith("torch.optim.") or path in EXPECTED_OPTIMIZERS or kind in trusted):
        raise CannotResume(
            name,
            f"{path} is not known to come back bit for bit; if it keeps all state in `state`, pass "
            f"trusted_optimizers=({kind.__qualname__},)",
        )
    if path in EXPECTED_OPTIMIZERS and getattr(
        optimizer, "master_weights", False
    ):  # apex: in lists of its own, not in `state`
        raise CannotResume(
            name, f"{path} with master_weights=True keeps its fp32 weights where a snapshot does not reach them"
        )


def canonical_name(name: str) -> str:
    """Return a module or tensor path without what wrappers put into it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPER_NAMES)


def tensor_names(found: Sequence[tuple[str, Hashable]]) -> list[str]:
    """Return the canonical names of a model's tensors; of those that would be called alike, the raw ones: not only wrappers call a part `module`.

    Args:
        found: path of each, and what it is that lies there; the same tensor may lie at several.

    Returns:
        A name for each.
    """
    called: dict[str, set[Hashable]] = {}
    for raw, identity in found:
        called.setdefault(canonical_name(raw), set()).add(identity)
    return [raw if len(called[name := canonical_name(raw)]) > 1 else name for raw, _ in found]


def check_distinct(names: Sequence[str]) -> None:
    """Refuse two tensors of one name.

    Args:
        names: of all that would be kept.

    Raises:
        CannotResume: one of them stands there twice.
    """
    for name, count in Counter(names).items():
        if count > 1:
            raise CannotResume(
                f"model/{name}", "two tensors have this name; call models and modules so that theirs differ"
            )


def qualified_name(kind: type) -> str:
    """Return `package.module.Class`."""
    return f"{kind.__module__}.{kind.__qualname__}"


def plain_local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself: without sharding all of it is here."""
    return tensor


def state_tensor(
    name: str, tensor: torch.Tensor, local: Callable[[torch.Tensor], torch.Tensor], *, is_deferred: bool
) -> StateTensor:
    """Return a tensor of the state by the memory of this rank behind it."""
    memory = local(tensor)
    return StateTensor(name, memory, is_deferred, None if memory is tensor else tensor)


def local_tensors(tensors: list[torch.Tensor], local: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors and the memory of this rank behind each; without sharding the list itself: there are thousands at every boundary."""
    return tensors if local is plain_local else [*tensors, *map(local, tensors)]


def plain_rewrap(_parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return the state itself."""
    return local


def check_parameter(name: str, parameter: torch.Tensor) -> None:
    """Refuse a parameter that cannot be copied as bytes, or be written to.

    Args:
        name: under which it would be kept.
        parameter: the memory of this rank behind it.

    Raises:
        CannotResume: as for any tensor; also one whose elements share memory.
    """
    check_tensor(name, parameter)
    if overlaps_itself(parameter):
        raise CannotResume(
            name, "an expanded tensor, whose elements share memory, cannot be written to; register its clone()"
        )


def check_tensor(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that cannot be copied as bytes.

    Args:
        name: under which it would be kept.
        tensor: the memory of this rank behind a parameter or buffer.

    Raises:
        CannotResume: it is lazy, sparse, quantized, made of other tensors, on the meta device, or a view with other
            values than its bytes say.
    """
    if torch.nn.parameter.is_lazy(tensor):
        raise CannotResume(name, "a lazy tensor has no shape yet; run one forward before init")
    if is_traceable_wrapper_subclass(tensor):
        raise CannotResume(
            name, f"a tensor of class {qualified_name(type(tensor))} is made of others, and is not known to come back"
        )
    check_dense(tensor, name)
    if tensor.is_conj() or tensor.is_neg():
        raise CannotResume(
            name,
            "a conjugate or negative view, whose bytes are not its values; register its resolve_conj().resolve_neg()",
        )


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Say whether elements are known to share memory (`expand`): torch does not let such a tensor be written to."""
    return bool(torch._debug_has_internal_overlap(tensor) == 1)
