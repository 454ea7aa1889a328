"""Adapter for plain torch modules and optimizers, and base class of the DDP and FSDP2 adapters.

Invariant: a snapshot contains exactly the parameters that `init` listed, each with its present optimizer.
"""

from __future__ import annotations

import dataclasses
import operator
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain, repeat
from operator import attrgetter, itemgetter
from typing import Any

import msgspec
import torch
from torch.optim.optimizer import Optimizer

from everstep.protocol.parts import TensorPart, whole
from everstep.protocol.slot import align
from everstep.training.adapters.base import (
    AdapterState,
    ExtraStates,
    Layout,
    NamedOptimizer,
    NamedTensors,
    check_distinct,
    check_optimizer,
    check_parameter,
    local_tensors,
    plain_local,
    plain_rewrap,
    state_tensor,
    tensor_names,
)
from everstep.training.adapters.buffers import Buffers, buffers_of
from everstep.training.adapters.groups import ParameterGroups
from everstep.training.arena import Arena
from everstep.training.capture import StateTensor
from everstep.training.earlier import EarlierState, EarlierTensors, LoadTarget
from everstep.training.errors import CannotRelayout, CannotResume
from everstep.training.module_tree import ModuleTree, refusal
from everstep.training.saved_tensors import SavedTensors
from everstep.training.state_tree import Tree

# Each addition or removal of tensors requires a new capture plan, and a script that accumulates soon leaves unused
# gradients again. After a single skipped step of a gradient scaler, the limit ends the copies.
GRADIENT_BOUNDARIES = 8
"""Number of steps for which snapshots contain an optimizer's gradients after a step has left unused gradients."""

_NO_GRADIENT, _ZERO_GRADIENT, _LIVE_GRADIENT, _SPARSE_GRADIENT = 0, 1, 2, 3


class PlainAdapter:
    """Adapter for plain torch: one rank, or any parallelism that gives each rank plain tensors. Raises CannotResume if
    an optimizer or a tensor is not known to restore bit for bit.
    """

    kind = "plain"

    def __init__(
        self, models: Mapping[str, torch.nn.Module], optimizers: Mapping[str, Optimizer], trusted: Sequence[type] = ()
    ) -> None:
        self._models = dict(models)
        self._tree = ModuleTree(self._models)
        self._obstacle: CannotResume | None = None
        """Why no restarted script could restore the modules or groups at the last `observe`."""
        self._parameters: dict[str, torch.nn.Parameter] = {}
        self._buffers = Buffers(self.local)
        self._extra = ExtraStates()
        self._ties: dict[str, str] = {}
        self._names: dict[int, str] = {}
        for name, model in self._models.items():
            self._list(f"{name}." if name else "", model)
            self._extra.add(f"{name}." if name else "", model)
        self._of_models = self._parameters.keys() | set()
        self._optimizers = [self._named(name, optimizer, trusted) for name, optimizer in optimizers.items()]
        check_distinct([*self._names.values(), *(name for name, _, _ in self._buffers.places), *self._extra.names])
        self._live: list[torch.Tensor] = list(self._parameters.values())
        """The same list until a parameter is replaced, so that a boundary need not compare it."""
        self._kinds = [(each.shape, each.dtype) for each in self._live]
        embeddings = {
            id(each.weight)
            for each in chain.from_iterable(self._tree.modules)
            if isinstance(each, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and each.sparse
        }
        self._sparse = [number for number, parameter in enumerate(self._live) if id(parameter) in embeddings]
        self._parameter_groups = {
            named.name: ParameterGroups(named.optimizer, self._names) for named in self._optimizers
        }
        self.revision = 0
        self._flags = self._live_flags()
        self._listed = NamedTensors()
        self._used: dict[str, dict[int, _GradientMark]] = {}
        """Gradient marks right after each optimizer's step since the last boundary, by optimizer and parameter."""
        self._adds_up: set[str] = set()
        self._list_owners()
        self._accumulating: dict[str | None, int] = {}
        """Further steps for which snapshots contain gradients, by optimizer; None: parameters without an optimizer."""
        for named in self._optimizers:
            self._watch_gradients(named)
        self._facts = self._describe()

    def prepare(self) -> None:
        """Do nothing, because with plain torch the first step of a launch computes like all later steps."""

    def facts(self) -> dict[str, str]:
        return self._facts

    def check(self) -> None:
        if self._obstacle is not None:
            raise self._obstacle
        self._buffers.check()

    def observe(self) -> AdapterState:
        self._obstacle = (self._follow() if self._tree.has_changed() else None) or self._follow_groups()
        observed = [(named.name, *named.observe()) for named in self._optimizers]
        return self._state([tensors for _, tensors, _ in observed], {name: values for name, _, values in observed})

    def forecast(self) -> AdapterState | None:
        foreseen = [named.forecast() for named in self._optimizers]
        if None in foreseen:
            return None
        return self._state(
            [tensors for tensors in foreseen if tensors is not None],
            {named.name: named.observe()[1] for named in self._optimizers},
        )

    def _state(self, of_optimizers: Sequence[list[StateTensor]], values: Mapping[str, Tree]) -> AdapterState:
        flags = self._live_flags()
        if flags != self._flags:
            self._flags = flags
            self.revision += 1
        listed = self._listed.of(local_tensors(self._live, self.local), self.revision, self._named_parameters)
        fresh, buffers = self._buffers.observe()
        gradients, sparse_gradients = self._gradients(fresh)
        plain = {
            "optimizers": dict(values),
            "groups": {name: groups.observe() for name, groups in self._parameter_groups.items()},
            "buffers": buffers,
            "gradients": gradients,
            "sparse_gradients": sparse_gradients,
            "requires_grad": flags,
            "extra_states": self._extra.observe(),
        }
        return AdapterState([listed, *of_optimizers], fresh, plain)

    def _named_parameters(self) -> list[StateTensor]:
        return [
            state_tensor(
                f"model/{name}", p, self.local, is_deferred=self._is_deferred(p), is_frozen=not p.requires_grad
            )
            for name, p in self._parameters.items()
        ]

    def parts(self, states: Sequence[StateTensor]) -> Mapping[str, tuple[TensorPart, ...]]:
        self._check_kinds()
        found = self.boxes(states)
        shapes = {state.name: tuple(state.tensor.shape) for state in states}
        for alias, known in self._ties.items():
            name = f"model/{known}"
            held = found.get(name, (whole(name, shapes[name]),))
            own = (part for part in held if part.name == name)
            found[name] = (*held, *(msgspec.structs.replace(part, name=f"model/{alias}") for part in own))
        return {**found, **self._buffers.transient_parts()}

    def _check_kinds(self) -> None:
        """Raise an error if the script has changed a parameter's shape or dtype in place, as `Module.double`."""
        for (name, parameter), (shape, dtype) in zip(self._parameters.items(), self._kinds, strict=True):
            if (parameter.shape, parameter.dtype) != (shape, dtype):
                raise CannotResume(
                    f"model/{name}",
                    f"this parameter has another shape or dtype ({tuple(parameter.shape)}, {parameter.dtype}) than at "
                    f"init() ({tuple(shape)}, {dtype}), and a restarted script restores into the parameter of init(). "
                    "Change it before init()",
                )

    def boxes(self, states: Sequence[StateTensor]) -> dict[str, tuple[TensorPart, ...]]:  # noqa: ARG002
        """Return the boxes of sharded tensors by name."""
        return {}

    def expect_restore(self) -> Sequence[Arena]:
        return [arena for named in self._optimizers if (arena := named.expect_restore()) is not None]

    @torch.no_grad()
    def load(self, tensors: SavedTensors, values: Tree) -> None:
        assert isinstance(values, dict)
        for (name, parameter), flag in zip(self._parameters.items(), values["requires_grad"], strict=True):
            tensors.bring(f"model/{name}", self.local(parameter))
            if parameter.requires_grad != bool(flag):
                parameter.requires_grad_(bool(flag))
        for named in self._optimizers:
            of_optimizer, groups = values["optimizers"][named.name], values["groups"][named.name]
            self._parameter_groups[named.name].load(groups, of_optimizer["groups"], self._parameters)
            saved = {split[0] for path in tensors if (split := named.split_name(path)) is not None}
            self._list_members(named, saved | of_optimizer["plain"].keys())
            named.load(tensors, of_optimizer)
        self._list_owners()
        self.revision += 1
        self._buffers.load(tensors, values["buffers"])
        gradients = list(zip(self._parameters.items(), values["gradients"], strict=True))
        # Create gradients in one new memory mapping (arena), which is zero without a write. A gradient that the
        # optimizer has already used is restored as zeros. Most scripts clear it without reading it, so the kernel never
        # allocates its pages.
        made = (
            local
            for (_, parameter), state in gradients
            if state in (_ZERO_GRADIENT, _LIVE_GRADIENT) and _is_of_host(local := self.local(parameter))
        )
        arena = Arena(sum(align(local.nbytes) for local in made))
        for (name, parameter), state in gradients:
            if state == _SPARSE_GRADIENT:
                parameter.grad = _sparse_gradient(parameter, values["sparse_gradients"].get(name))
            else:
                self._load_gradient(parameter, state, tensors.get(f"gradient/{name}"), arena)
        self._extra.load(values["extra_states"])

    def targets(self, earlier: EarlierTensors, values: EarlierState) -> Sequence[LoadTarget]:
        states = self._named_parameters()
        optimizers = [self._as_saved(named, values.adapter) for named in self._optimizers]
        states += [state for named in optimizers for state in named.of_earlier(earlier)]
        divided, own = self._buffers.of_earlier(earlier, values.adapter["buffers"])
        states += divided
        parts = self.parts(states)
        found: list[LoadTarget] = []
        for state in states:
            shape = tuple(state.tensor.shape)
            held = parts.get(state.name, (whole(state.name, shape),))
            found.append(LoadTarget(state.name, shape, state.tensor.dtype, held))
        wanted = [name for named in optimizers for name in named.wanted(earlier)]
        found += [LoadTarget(name, (), torch.float32, (whole(name, ()),), is_optional=True) for name in wanted]
        return [*found, *own]

    def translate(self, values: EarlierState) -> Tree:
        saved = values.adapter
        if not values.is_of_engine:
            self._check_gradients(saved)
            return saved
        (named,) = self._optimizers or (None,)
        if named is None:
            raise CannotRelayout("optimizer", "the engine had one, this launch has none. Register the optimizer")
        return {
            "optimizers": {named.name: named.adopt(saved["optimizer"])},
            "groups": {named.name: None},
            "buffers": saved["buffers"],
            "gradients": bytes([_NO_GRADIENT] * len(self._parameters)),
            "sparse_gradients": {},
            "requires_grad": self._live_flags(),
            "extra_states": saved["extra_states"],
        }

    def _check_gradients(self, saved: Mapping[str, Any]) -> None:
        """Raise CannotRelayout for accumulated gradients, because each rank has different ones."""
        states = saved["gradients"]
        if len(states) != len(self._parameters):
            raise CannotRelayout(
                "model", f"it had {len(states)} parameters and has {len(self._parameters)}. Build the same model"
            )
        for name, state in zip(self._parameters, states, strict=True):
            if state == _LIVE_GRADIENT or name in saved["sparse_gradients"]:
                raise CannotRelayout(
                    f"gradient/{name}",
                    "the script accumulates it across a step, and each rank has its own. Restart from a step at which "
                    "the optimizer has used all gradients",
                )

    def synchronize(self) -> None:
        self._extra.finish()

    def optimizers(self) -> Mapping[str, Optimizer]:
        return {named.name: named.optimizer for named in self._optimizers}

    def parameters(self) -> Mapping[str, torch.Tensor]:
        return {f"model/{name}": parameter for name, parameter in self._parameters.items()}

    def schedulers(self) -> Sequence[object]:
        return ()

    def modules(self) -> Sequence[torch.nn.Module]:
        return list(self._models.values())

    def trees(self) -> Sequence[Sequence[torch.nn.Module]]:
        return self._tree.modules

    def steps_made(self) -> int | None:
        return None

    def batches_per_step(self) -> int | None:
        return None

    def end_step(self) -> None:
        self._follow_groups()  # Ignore an error, because the next `observe` finds it again.
        for name, groups in self._parameter_groups.items():
            used = self._used.get(name, {})
            self._keep_place(name, name in self._adds_up or not _are_used(groups.parameters, used))
        # Snapshots contain all gradients of parameters without an optimizer. The script may still use these gradients,
        # for example in a clipping norm, and no hook reports their use.
        self._keep_place(None, any(parameter.grad is not None for parameter in self._ownerless))
        self._used.clear()

    def _keep_place(self, owner: str | None, is_live: bool) -> None:
        left = GRADIENT_BOUNDARIES if is_live else self._accumulating.pop(owner, 0) - 1
        if left > 0:
            self._accumulating[owner] = left

    local: Callable[[torch.Tensor], torch.Tensor] = staticmethod(plain_local)

    def rewrap(self, parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        """Wrap a local tensor in the form that torch keeps for this parameter, with the same memory."""
        return plain_rewrap(parameter, local)

    def check_gradient(self, name: str, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Raise CannotResume for a gradient that a restore would not rebuild, such as a DTensor of partial sums."""

    def _follow(self) -> CannotResume | None:
        """Use the present modules and frozen parameters, or return an error if no restart would build them."""
        tree = ModuleTree(self._models)
        if (refused := refusal("model", self._tree, tree, follows=True)) is not None:
            return refused
        names: dict[int, str] = {}
        parameters: dict[str, torch.nn.Parameter] = {}
        ties: dict[str, str] = {}
        for name, model in self._models.items():
            for called, parameter in self._named_tensors(f"{name}." if name else "", model)[0]:
                known = names.setdefault(id(parameter), called)
                if known == called:
                    parameters[called] = parameter
                else:
                    ties[called] = known
        for name in sorted((self._of_models ^ parameters.keys()) | dict(ties.items() ^ self._ties.items()).keys()):
            return CannotResume(
                f"model/{name}",
                "this parameter was added, removed, or tied to another after init(). Do so before init(), and set "
                "requires_grad=False on parameters that are frozen at first",
            )
        for name, parameter in parameters.items():
            held = self._parameters[name]
            local, of_held = self.local(parameter), self.local(held)
            is_alike = (local.shape, local.dtype) == (of_held.shape, of_held.dtype)
            if parameter is not held and (id(held) in self._owner or not is_alike):
                return CannotResume(
                    f"model/{name}",
                    "this parameter was replaced after init(). Change it in place: "
                    "with torch.no_grad(): parameter.copy_(…)",
                )
        replaced = {self._tree.paths[path]: module for path, module in tree.paths.items()}
        self._tree = tree
        self._parameters |= parameters
        self._live = list(self._parameters.values())
        self._list_owners()
        self._buffers.follow(replaced)
        self._extra.follow(replaced)
        self.revision += 1
        return None

    def _follow_groups(self) -> CannotResume | None:
        """Use the present parameter groups. Return an error if a restarted script would not have a parameter."""
        for named in self._optimizers:
            groups = self._parameter_groups[named.name]
            if groups.have_changed():
                names = {id(parameter): name for name, parameter in self._parameters.items()}
                where = f"optimizer/{named.name}" if named.name else "optimizer"
                if (refused := groups.follow(where, names)) is not None:
                    return refused
                self._list_members(named)
                self._list_owners()
                self.revision += 1
        return None

    def _list_members(self, named: NamedOptimizer, saved: Collection[str] = ()) -> None:
        """List the parameters of an optimizer's groups, and removed ones with state, which may return to a group."""
        parameters = self._parameter_groups[named.name].parameters
        of_groups = set(map(id, parameters))
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        with_state = {*saved, *(names.get(id(owner)) for owner in named.optimizer.state)}
        named.members[:] = [
            *((names[id(parameter)], parameter) for parameter in parameters),
            *(
                (name, parameter)
                for name, parameter in self._parameters.items()
                if name in with_state and id(parameter) not in of_groups
            ),
        ]

    def _list_owners(self) -> None:
        self._owner = {
            id(parameter): name for name, groups in self._parameter_groups.items() for parameter in groups.parameters
        }
        self._ownerless = [parameter for parameter in self._parameters.values() if id(parameter) not in self._owner]

    def _as_saved(self, named: NamedOptimizer, saved: Mapping[str, Any]) -> NamedOptimizer:
        """Return the optimizer with the members that it had at the saved step."""
        if (groups := saved.get("groups", {}).get(named.name)) is None:
            return named
        members = dict.fromkeys([*chain.from_iterable(map(itemgetter(0), groups)), *self._parameters])
        return dataclasses.replace(named, members=[(name, self._parameters[name]) for name in members])

    def _live_flags(self) -> bytes:
        return bytes(map(attrgetter("requires_grad"), self._live))

    def _named_tensors(
        self, prefix: str, model: torch.nn.Module
    ) -> tuple[list[tuple[str, torch.nn.Parameter]], list[str]]:
        """Return the parameters of a model, a tied parameter once per name, and the names of its buffers."""
        parameters = list(model.named_parameters(remove_duplicate=False))
        buffers = buffers_of(model)
        names = tensor_names(
            [*((raw, id(p)) for raw, p in parameters), *((raw, (id(module), key)) for raw, module, key in buffers)]
        )
        named = [(prefix + name, parameter) for name, (_, parameter) in zip(names, parameters, strict=False)]
        return named, names[len(parameters) :]

    def _list(self, prefix: str, model: torch.nn.Module) -> None:
        parameters, of_buffers = self._named_tensors(prefix, model)
        for name, parameter in parameters:
            known = self._names.get(id(parameter))
            if known is None:
                self._add(name, parameter)
            elif known != name:
                self._ties[name] = known
        self._buffers.add(prefix, model, of_buffers)

    def _add(self, name: str, parameter: torch.nn.Parameter) -> None:
        check_parameter(f"model/{name}", self.local(parameter))
        self._names[id(parameter)] = name
        self._parameters[name] = parameter

    def _named(self, name: str, optimizer: Optimizer, trusted: Sequence[type]) -> NamedOptimizer:
        check_optimizer(f"optimizer/{name}" if name else "optimizer", optimizer, trusted)
        for number, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                # Add a parameter that belongs to no registered module, for example a learned temperature.
                if id(parameter) not in self._names:
                    alone = f"{name}.group{number}.{position}" if name else f"group{number}.{position}"
                    self._add(alone, parameter)
        members = [
            (self._names[id(parameter)], parameter) for group in optimizer.param_groups for parameter in group["params"]
        ]
        return NamedOptimizer(name, optimizer, members, self.local, self.rewrap)

    def _describe(self) -> dict[str, str]:
        layout = Layout({"adapter": self.kind})
        for name, parameter in self._parameters.items():
            layout.add_tensor(f"model/{name}", self.local(parameter), parameter.requires_grad)
        for name, _, key in self._buffers.places:
            layout.entries[f"buffer model/{name}"] = key
        for name in self._extra.names:
            layout.entries[f"extra state model/{name}"] = ""
        for name, known in self._ties.items():
            layout.entries[f"tie model/{name}"] = known
        for named in self._optimizers:
            layout.add_optimizer(named)
        return layout.entries

    def _is_deferred(self, parameter: torch.nn.Parameter) -> bool:
        """Return whether the copier may copy the parameter in the background: it is frozen, or in an optimizer."""
        return id(parameter) in self._owner or not parameter.requires_grad

    def _watch_gradients(self, named: NamedOptimizer) -> None:
        """Install hooks that record which gradients an optimizer's step used or cleared."""
        clear = named.optimizer.zero_grad
        left: list[weakref.ref[torch.Tensor]] = []
        """The first gradient that the last step used, while the script has not cleared it."""

        def mark() -> None:
            # Read the groups themselves, because the script may change them between this step and its boundary.
            live = chain.from_iterable(map(itemgetter("params"), named.optimizer.param_groups))
            self._used[named.name] = {id(parameter): _mark(parameter.grad) for parameter in live}

        def use(*_: object) -> None:
            mark()
            first = next((each[0] for each in self._used[named.name].values() if each is not None), None)
            if left and first is not None and first() is left[0]():
                self._adds_up.add(named.name)
            left[:] = [] if first is None else [first]

        def clear_and_mark(set_to_none: bool = True) -> None:
            clear(set_to_none)
            if named.name in self._used:
                # Record the gradients' versions again, because `zero_grad` has just changed them. Otherwise the next
                # snapshot would contain the zeros as gradients that the script changed after the step.
                mark()
            left.clear()

        named.optimizer.register_step_post_hook(use)
        named.optimizer.zero_grad = clear_and_mark  # type: ignore[method-assign]

    def _gradients(self, tensors: list[StateTensor]) -> tuple[bytes, dict[str, _SparseGradient]]:
        """Return the state of each gradient as a byte, and the sparse gradients; append the dense ones to `tensors`.

        If the optimizer's step has used a gradient, only the gradient's existence is recorded: AdamW updates a
        parameter with a zero gradient, and skips one without a gradient. Snapshots contain all other gradients. After a
        step that leaves unused gradients, they do so for `GRADIENT_BOUNDARIES` boundaries.
        """
        if not self._accumulating:
            states = bytearray(map(operator.is_not, map(attrgetter("grad"), self._live), repeat(None)))
            for number in self._sparse:
                if states[number] and self._live[number].grad.is_sparse:  # type: ignore[union-attr]
                    states[number] = _SPARSE_GRADIENT
            return bytes(states), {}
        states, sparse = bytearray(), {}
        for name, parameter in self._parameters.items():
            gradient, owner = parameter.grad, self._owner.get(id(parameter))
            is_live = owner in self._accumulating and (parameter.requires_grad or gradient is not None)
            if gradient is not None and gradient.is_sparse:
                states.append(_SPARSE_GRADIENT)
                if is_live:
                    sparse[name] = gradient._indices(), gradient._values(), gradient.is_coalesced()
                continue
            if is_live:
                if gradient is not None:
                    self.check_gradient(name, parameter, gradient)
                local = self.local(parameter if gradient is None else gradient)
                tensors.append(StateTensor(f"gradient/{name}", local, is_deferred=False))
            states.append(_NO_GRADIENT if gradient is None else _LIVE_GRADIENT if is_live else _ZERO_GRADIENT)
        return bytes(states), sparse

    def _load_gradient(
        self, parameter: torch.nn.Parameter, state: int, saved: torch.Tensor | None, arena: Arena
    ) -> None:
        if state == _NO_GRADIENT:
            parameter.grad = None
            return
        local = self.local(parameter).detach()
        fresh = arena.empty(local.shape, local.dtype) if _is_of_host(local) else None
        value = torch.zeros_like(local) if fresh is None else fresh
        if state == _LIVE_GRADIENT and saved is not None:
            value = value.to(saved.dtype).copy_(saved)
        parameter.grad = self.rewrap(parameter, value)


_SparseGradient = tuple[torch.Tensor, torch.Tensor, bool]


def _sparse_gradient(parameter: torch.Tensor, saved: _SparseGradient | None) -> torch.Tensor:
    if saved is None:
        return torch.zeros_like(parameter, layout=torch.sparse_coo)
    indices, values, is_coalesced = saved
    return torch.sparse_coo_tensor(indices, values, parameter.shape, is_coalesced=is_coalesced, check_invariants=False)


# The reference is weak, so that an optimizer that steps inside backward can free gradients early.
_GradientMark = tuple[weakref.ref[torch.Tensor], int] | None
"""Weak reference to a gradient and its version; None for a missing gradient."""


def _mark(gradient: torch.Tensor | None) -> _GradientMark:
    return None if gradient is None else (weakref.ref(gradient), gradient._version)


def _is_used(gradient: torch.Tensor | None, mark: _GradientMark) -> bool:
    """Return whether the optimizer's last step has used the current gradient, or no gradient exists."""
    return gradient is None or (mark is not None and mark[0]() is gradient and mark[1] == gradient._version)


def _are_used(parameters: Sequence[torch.Tensor], used: Mapping[int, _GradientMark]) -> bool:
    """Return whether `_is_used` is true of all parameters' gradients. Runs at each boundary, so it loops in C."""
    gradients = list(map(attrgetter("grad"), parameters))
    found = map(used.get, map(id, parameters))
    if any(map(operator.is_, gradients, repeat(None))):
        return all(map(_is_used, gradients, found))
    marks = list(filter(None, found))
    return (
        len(marks) == len(gradients)
        and [version for _, version in marks] == list(map(attrgetter("_version"), gradients))
        and all(map(operator.is_, [reference() for reference, _ in marks], gradients))
    )


def _is_of_host(local: torch.Tensor) -> bool:
    return local.device.type == "cpu" and local.is_contiguous()
