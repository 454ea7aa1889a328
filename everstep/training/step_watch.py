"""Raises an error if an optimizer, scheduler or gradient scaler updates the model without being registered at `init`.

No snapshot contains its state, so a resumed run would silently continue with the initial moments, schedule or scale.

Torch calls one global hook before each `Optimizer.step`. Schedulers and scalers have no hook, so their `step` methods
are wrapped while a session is open. Three cases are not detected:

- an optimizer that is not a `torch.optim.Optimizer`
- an optimizer that updates copies of the parameters
- a scheduler class that is defined after `init` and overrides `step` without calling torch's `step`

Invariant: the watch never rejects an update of tensors that no session registered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, ParamSpec, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from everstep.training.adapters.base import qualified_name
from everstep.training.errors import CannotResume

P = ParamSpec("P")
R = TypeVar("R")

NOT_COMPILED = (
    "Everstep checks here whether this optimizer updates a registered model: compile optimizer.step() without "
    "fullgraph=True, or pass the optimizer to init()"
)
"""Message of torch.compile if a script compiles an unregistered optimizer's step as one unbroken graph."""


def uncompiled(function: Callable[P, R], reason: str) -> Callable[P, R]:
    """Wrap a function so that compiled code calls it outside the graph. torch.compile may print `reason`."""
    # Cast, because torch declares a wider return type for `disable`.
    return cast("Callable[P, R]", torch.compiler.disable(function, reason=reason))  # type: ignore[no-untyped-call]


class StepWatch:
    """Checks until `close` that only registered optimizers update one session's parameters. `companions` are the other
    registered objects with state. `report` gets the error before it is raised.
    """

    def __init__(
        self,
        optimizers: Collection[Optimizer],
        parameters: Mapping[str, torch.Tensor],
        companions: Collection[object],
        report: Callable[[CannotResume], None],
    ) -> None:
        kept = [item for item in (*optimizers, *companions) if isinstance(item, Optimizer)]
        self._optimizers = {id(optimizer): optimizer for optimizer in kept}
        self._parameters = parameters
        self._companions = companions
        self._report = report
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._unrelated: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        """Optimizers that updated no parameter at the last check, with the number of parameters then."""
        self._updated_outside_graphs = uncompiled(self._updated_by, NOT_COMPILED)
        """torch.compile cannot trace the comparison of addresses."""
        _open(self)

    def close(self) -> None:
        """Stop the checks. Idempotent."""
        _close(self)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raise CannotResume if the optimizer is not registered, but updates the session's parameters."""
        if id(optimizer) in self._optimizers:
            return
        if any(optimizer.state is kept.state for kept in self._optimizers.values()):
            return  # Accept the optimizer: it only wraps a registered optimizer, whose state it shares.
        parts = list(getattr(optimizer, "optimizers", ()))
        if parts and all(id(part) in self._optimizers for part in parts):
            return  # Accept the optimizer: it only steps other optimizers, which are all registered.
        if updated := self._updated_outside_graphs(optimizer):
            kind = qualified_name(type(optimizer))
            self._refuse(
                "optimizer",
                f"{kind} updates {updated}, but init() was not given this optimizer: a restart would lose its state. "
                "Write init(..., optimizer=optimizer); for several init(..., optimizer={'name': optimizer, ...})",
            )

    def check_scheduler(self, scheduler: LRScheduler) -> None:
        """Raise CannotResume if the scheduler is not registered, but its optimizer updates the session's parameters.
        Not called for the step that a scheduler makes in its constructor.
        """
        # Use `getattr`, because a custom scheduler may have no attribute `optimizer`.
        optimizer = getattr(scheduler, "optimizer", None)
        if optimizer is None or getattr(scheduler, "_is_initial", False):
            return
        if any(scheduler is kept for kept in unfolded(self._companions)):
            return
        if updated := self._updated_by(optimizer):
            kind = qualified_name(type(scheduler))
            self._refuse(
                "scheduler",
                f"{kind} changes the learning rate of {updated}, but init() was not given this scheduler: "
                "a restart would begin the schedule again. "
                "Write init(..., scheduler=scheduler); for several init(..., scheduler={'name': scheduler, ...})",
            )

    def check_scaler(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """Raise CannotResume if the scaler is not registered, but its optimizer updates the session's parameters."""
        if not scaler.is_enabled() or any(scaler is kept for kept in self._companions):
            return
        if updated := self._updated_by(optimizer):
            kind = qualified_name(type(scaler))
            self._refuse(
                "extra",
                f"{kind} scales the gradients of {updated}, but init() was not given this scaler: "
                "a restart would begin with another scale. Write init(..., extra={'scaler': scaler})",
            )

    def _updated_by(self, optimizer: Optimizer) -> str:
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        if self._unrelated.get(optimizer) == count:
            return ""
        storages = {place: name for name, parameter in self._parameters.items() if (place := _storage(parameter))}
        updated = (parameter for group in optimizer.param_groups for parameter in group["params"])
        names = (self._names.get(id(parameter)) or storages.get(_storage(parameter)) for parameter in updated)
        if found := next(filter(None, names), ""):
            return found
        self._unrelated[optimizer] = count
        return ""

    def _refuse(self, name: str, reason: str) -> None:
        error = CannotResume(name, reason)
        self._report(error)
        raise error


def check_bound(companions: Mapping[str, object], optimizers: Collection[Optimizer]) -> None:
    """Raise CannotResume if a registered scheduler's optimizer is neither registered nor a companion. No snapshot would
    contain the learning rate from which the scheduler continues.
    """
    kept = [optimizer for optimizer in (*optimizers, *companions.values()) if isinstance(optimizer, Optimizer)]
    for name, companion in companions.items():
        for scheduler in unfolded([companion]):
            bound = scheduler.optimizer if isinstance(scheduler, LRScheduler) else None
            if bound is not None and not any(bound.state is other.state for other in kept):
                raise CannotResume(
                    name,
                    f"{qualified_name(type(scheduler))} belongs to {qualified_name(type(bound))}, "
                    "which is not registered with init(): a restart would lose its state. "
                    "Write init(..., optimizer=optimizer)",
                )


def unfolded(companions: Collection[object]) -> Iterator[object]:
    """Yield the given objects, and the schedulers inside a `SequentialLR` or inside accelerate's wrapper."""
    for companion in companions:
        yield companion
        parts = [*getattr(companion, "_schedulers", ()), getattr(companion, "scheduler", None)]
        yield from unfolded([part for part in parts if isinstance(part, LRScheduler)])


def _storage(tensor: torch.Tensor) -> int:
    """Return the address of the local memory of a tensor, or 0 if it has none."""
    return getattr(tensor, "_local_tensor", tensor).untyped_storage().data_ptr()


_watches: tuple[StepWatch, ...] = ()
"""The watches of open sessions, replaced as a whole, because a hook may be iterating over the old tuple."""
_handle: RemovableHandle | None = None
_wrapped: list[tuple[type, Callable[..., Any]]] = []
"""Classes with a wrapped `step`, and their original `step`."""


def _open(watch: StepWatch) -> None:
    global _watches, _handle
    _watches = (*_watches, watch)
    if _handle is None:
        _handle = register_optimizer_step_pre_hook(_before_optimizer)
        for kind in _subclasses(LRScheduler):
            _wrap(kind, _before_scheduler)
        for kind in _subclasses(GradScaler):
            _wrap(kind, _before_scaler)


def _close(watch: StepWatch) -> None:
    global _watches, _handle
    _watches = tuple(other for other in _watches if other is not watch)
    if not _watches and _handle is not None:
        _handle.remove()
        _handle = None
        for kind, step in _wrapped:
            kind.step = step  # type: ignore[attr-defined]
        _wrapped.clear()


def _subclasses(kind: type[object]) -> Iterator[type[object]]:
    yield kind
    for subclass in type.__subclasses__(kind):
        yield from _subclasses(subclass)


def _wrap(kind: type, before: Callable[..., None]) -> None:
    step = vars(kind).get("step")
    if step is None or any(known is kind for known, _ in _wrapped):
        return

    @functools.wraps(step)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        before(self, *args, **kwargs)
        return step(self, *args, **kwargs)

    _wrapped.append((kind, step))
    kind.step = checked  # type: ignore[attr-defined]


def _before_optimizer(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
    for watch in _watches:
        watch.check_optimizer(optimizer)


def _before_scheduler(scheduler: LRScheduler, *_args: object, **_kwargs: object) -> None:
    for watch in _watches:
        watch.check_scheduler(scheduler)


def _before_scaler(scaler: GradScaler, optimizer: Optimizer, *_args: object, **_kwargs: object) -> None:
    for watch in _watches:
        watch.check_scaler(scaler, optimizer)
