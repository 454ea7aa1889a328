"""Captures the optimizer steps of a script that uses Hugging Face accelerate, and resumes from them.

    keep = everstep.integrations.accelerate.prepare(accelerator, model=model, optimizer=optimizer, data=loader)
    for batch in keep.batches(until_step=10_000):
        with accelerator.accumulate(keep.model):
            loss = keep.model(**batch).loss
            accelerator.backward(loss)
            keep.optimizer.step()
            keep.optimizer.zero_grad()
    keep.close()

`prepare` calls `accelerator.prepare`; `attach` keeps the script's own loops instead. The session reads the torch loader
inside accelerate's loader, which would request one batch ahead and, on a resume, skip samples without collating them:
random collators and random augmentation would draw other numbers. The batches of one gradient accumulation may belong
to two epochs; accelerate alone ends an accumulation with the epoch.

Invariant: a run that was interrupted and resumed equals an uninterrupted run bit for bit.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Unpack, cast

import torch
from accelerate.accelerator import Accelerator
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils.operations import send_to_device
from torch.utils.data import DataLoader

from everstep.integrations.accelerator import check_accelerator, inside, keep
from everstep.integrations.base import (
    InitOptions,
    NoSession,
    StepBatches,
    check_optimizer,
    is_alone,
    modules_of,
    refuse,
)
from everstep.training import CannotResume, SessionMisuse, TrainingError, TrainingSession, rng
from everstep.training.versions import check_version

_PREPARED: Final = "_everstep"
"""Attribute of an accelerator for which `prepare` was called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The objects that `accelerator.prepare` returned, and the session that keeps their state."""

    accelerator: Accelerator
    model: Any
    """The wrapped model, or the DeepSpeed engine."""
    optimizer: Any
    scheduler: Any
    """The wrapped scheduler, or None if the script has no scheduler."""
    session: TrainingSession
    modules: tuple[Any, ...]
    """The model's modules at the end of `prepare`. `batches` raises an error if the model has other modules later."""
    data: Any
    """The loader that `accelerator.prepare` returned."""

    def batches(self, until_step: int) -> Iterator[Any]:
        """Yield this rank's batches across epochs, on the accelerator's device, until `until_step` steps are finished.

        A step ends after each accumulation. Steps before a restart count.

        Raises:
            SessionMisuse: the loader yields no batches, or the model was changed after `prepare`.
            RestoreMismatch: the snapshot does not fit this launch.
            UnsupportedOption: an option that the script changed after `prepare` prevents an exact resume.
        """
        count = self.accelerator.gradient_accumulation_steps
        if isinstance(self.session, NoSession):
            left = until_step * count
            while left > 0:
                before = left
                for batch in itertools.islice(self.data, left):
                    left -= 1
                    yield batch
                if left == before:
                    raise SessionMisuse("the loader yields no batches")
            return
        check_accelerator(self.accelerator)
        check_optimizer(inside(self.optimizer, "optimizer"))
        if modules_of(self.model) != self.modules:
            raise SessionMisuse("the model was changed after prepare(): its modules differ. Change it before prepare()")
        for batch in self.session.batches(until_step, accumulate=count):
            yield send_to_device(batch, self.accelerator.device)

    def close(self) -> None:
        """Wait until the last step is committed, and end the session. Call this right after the loop."""
        self.session.close()


def prepare(
    accelerator: Accelerator,
    *,
    model: Any,
    optimizer: Any,
    data: Any,
    scheduler: Any = None,
    extra: Mapping[str, Any] | None = None,
    **options: Unpack[InitOptions],
) -> Prepared:
    """Prepare a script's objects for training, and keep their state at every step.

    Every rank calls this once, before the first forward pass. The session also keeps the state of objects that were
    passed to `accelerator.register_for_checkpointing`.

    Args:
        accelerator: the one accelerator of the script, which prepares the objects.
        model: a module that accelerate has not prepared yet.
        optimizer: a torch optimizer, or accelerate's `DummyOptim` for an optimizer of DeepSpeed's configuration.
        data: a torch DataLoader over the whole dataset; accelerate divides its batches among the ranks.
        scheduler: a torch scheduler, accelerate's `DummyScheduler`, or None.
        extra: other objects with `state_dict` and `load_state_dict`, by name.
        **options: arguments of `everstep.training.init`: `trusted_optimizers`, `options_from_script`, `tokenizer`.

    Returns:
        The prepared objects with their session.

    Raises:
        UnsupportedVersion: Everstep is not tested with the installed version of accelerate.
        UnsupportedOption: an option of the accelerator, or the optimizer, prevents an exact resume.
        CannotResume: an object cannot be restored. The error names it.
        SessionMisuse: this is the second call for the accelerator, an object is prepared already, or the optimizer has
            made steps.
    """
    objects = {"model": model, "optimizer": optimizer, "data": data, "scheduler": scheduler}
    wrapped: dict[str, Any] = {}
    try:
        check_version("accelerate")
        check_accelerator(accelerator)
        _check_unused(accelerator, objects)
        setattr(accelerator, _PREPARED, True)
        wrapped = _wrapped(accelerator, objects)
        session = keep(accelerator, **wrapped, extra={**_registered(accelerator), **(extra or {})}, **options)
    except TrainingError as error:
        refuse(error)
        session = cast(TrainingSession, NoSession())
    wrapped = wrapped or _wrapped(accelerator, objects)
    return Prepared(accelerator=accelerator, session=session, modules=modules_of(wrapped["model"]), **wrapped)


def _wrapped(accelerator: Accelerator, objects: Mapping[str, Any]) -> dict[str, Any]:
    """Let the accelerator prepare the objects that are not None. Return all objects by the same names."""
    given = {name: each for name, each in objects.items() if each is not None}
    return {**objects, **dict(zip(given, accelerator.prepare(*given.values()), strict=True))}


def _registered(accelerator: Any) -> dict[str, Any]:
    return {f"registered/{number}": each for number, each in enumerate(accelerator._custom_objects)}


def attach(
    accelerator: Accelerator,
    *,
    extra: Mapping[str, Any] | None = None,
    **options: Unpack[InitOptions],
) -> None:
    """Keep the steps of a script that keeps its own loop over epochs and batches.

    Every rank calls this once, before `accelerator.prepare`, and calls `accelerator.end_training()` at its end. After a
    restart, the loops of finished epochs yield no batch, and the loop of the newest epoch yields the remaining ones.
    Code between these loops, such as an evaluation, runs again with the restored model.

    Args:
        accelerator: the one accelerator of the script, which has prepared nothing yet.
        extra: other objects with `state_dict` and `load_state_dict`, by name.
        **options: arguments of `everstep.training.init`: `trusted_optimizers`, `options_from_script`, `tokenizer`.

    Raises:
        UnsupportedVersion: Everstep is not tested with the installed version of accelerate.
        UnsupportedOption: an option of the accelerator prevents an exact resume.
        SessionMisuse: this is the second call for the accelerator.
    """
    try:
        check_version("accelerate")
        check_accelerator(accelerator)
        if hasattr(accelerator, _PREPARED):
            raise SessionMisuse("attach() or prepare() was already called for this accelerator; call one of them once")
    except TrainingError as error:
        refuse(error)
        return
    setattr(accelerator, _PREPARED, AccelerateAttachment(accelerator, dict(extra or {}), options))


def session_of(accelerator: Accelerator) -> TrainingSession:
    """Return the session of an attached accelerator, for example for `session.log`.

    If the script trains without Everstep, the result is an object without effect.

    Raises:
        SessionMisuse: the accelerator is not attached, or its training loop has not begun.
    """
    attachment = getattr(accelerator, _PREPARED, None)
    if isinstance(attachment, AccelerateAttachment):
        if attachment.session is None:
            raise SessionMisuse("the training loop has not begun; iterate over the prepared loader first")
        return attachment.session
    if is_alone():
        return cast(TrainingSession, NoSession())
    raise SessionMisuse("the accelerator is not attached; call attach(accelerator) before accelerator.prepare")


class AccelerateAttachment:
    """Replaces `prepare` and `end_training` of one accelerator, and owns its session."""

    def __init__(self, accelerator: Any, extra: Mapping[str, Any], options: InitOptions) -> None:
        self.accelerator = accelerator
        self._extra, self._options = extra, options
        self._prepare, self._end_training = accelerator.prepare, accelerator.end_training
        self._prepared: list[Any] = []
        self.session: TrainingSession | None = None
        self._loader: EpochLoader | None = None
        """The loader whose loop trains."""
        accelerator.prepare = self.prepare
        accelerator.end_training = self.end_training

    def prepare(self, *given: Any, **more: Any) -> Any:
        """Prepare objects as `Accelerator.prepare` does. Each loader is an `EpochLoader`."""
        made = self._prepare(*given, **more)
        objects = made if isinstance(made, (tuple, list)) else (made,)  # a list with FSDP2
        self._prepared += objects
        wrapped = tuple(EpochLoader(self, each) if isinstance(each, DataLoader) else each for each in objects)
        return wrapped if objects is made else wrapped[0]

    def end_training(self) -> None:
        """Report the last step and close the session, before the accelerator ends its trackers."""
        if self._loader is not None and self.session is not None:
            self._loader.end_step()
            self.session.close()
        self._end_training()

    def is_training(self) -> bool:
        """Return whether the script's next loop trains: a model is in training mode, and gradients are on."""
        models = [each for each in self._prepared if isinstance(each, torch.nn.Module)]
        return torch.is_grad_enabled() and any(each.training for each in models)

    def begin(self, loader: EpochLoader) -> bool:
        """Create the session for the first loop that trains. Return whether the session reads this loader."""
        if self._loader is None and self.is_training():
            self._loader = loader
            objects = self._prepared
            try:
                self.session = keep(
                    self.accelerator,
                    model=_only(objects, torch.nn.Module, "model"),
                    optimizer=_only(objects, torch.optim.Optimizer, "optimizer"),
                    scheduler=next((each for each in objects if isinstance(each, AcceleratedScheduler)), None),
                    data=loader.inner,
                    extra={**_registered(self.accelerator), **self._extra},
                    **self._options,
                )
            except TrainingError as error:
                refuse(error)
                self._loader, self.session = None, cast(TrainingSession, NoSession())
                return False
            loader.begin(self.session)
        return self._loader is loader and self.session is not None


def _only(objects: Iterable[Any], kind: type, name: str) -> Any:
    found = [each for each in objects if isinstance(each, kind)]
    if len(found) != 1:
        raise CannotResume(
            name, f"the accelerator has prepared {len(found)} of them. attach() needs one; use everstep.training.init"
        )
    return found[0]


class EpochLoader:
    """A prepared loader. If its loop trains, it yields the batches that follow the restored position.

    The attributes of accelerate's loader are attributes of this object.
    """

    def __init__(self, attachment: AccelerateAttachment, inner: Any) -> None:
        self._attachment = attachment
        self.inner = inner
        self._batches: StepBatches | None = None
        self._loops = 0
        """Number of loops over this loader that the script has begun."""
        self._skipped = 0
        """Number of loops that yield no batch, because their epochs were finished before the restart."""
        self._is_pending = False
        """Whether the script has a batch whose step is not reported."""
        self._is_over = False
        """Whether all ranks stop now."""

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __iter__(self) -> Iterator[Any]:
        if not self._attachment.begin(self) or self._batches is None:
            yield from self.inner
            return
        self._loops += 1
        if self._loops <= self._skipped:
            return
        device = self._attachment.accelerator.device
        for batch in self._batches:
            self._is_pending = True
            yield send_to_device(batch, device)

    def begin(self, session: TrainingSession) -> None:
        """Restore the step that the agent names."""
        resume = functools.partial(rng.restore, rng.observe()) if session.restore() else None
        (stream,) = session.data.values()
        self._skipped = stream.epoch
        self._batches = StepBatches(session, self.end_step, resume)

    def end_step(self) -> bool:
        """Report the newest step to the session, unless it is reported already. Return whether training must stop."""
        session, accelerator = self._attachment.session, self._attachment.accelerator
        assert session is not None
        if self._is_pending and accelerator.sync_gradients:
            self._is_pending = False
            if session.boundary().stop:
                self._is_over = True
                session.close()
        return self._is_over


def _check_unused(accelerator: Accelerator, objects: Mapping[str, Any]) -> None:
    if hasattr(accelerator, _PREPARED):
        raise SessionMisuse(
            "prepare() was already called for this accelerator. Call it once, with all objects; pass further objects "
            "with extra={name: object}"
        )
    for name, thing in objects.items():
        if getattr(thing, "_is_accelerate_prepared", False):
            raise SessionMisuse(
                f"{name}: accelerator.prepare() was already called for it. Pass the object itself to prepare(), which "
                "calls accelerator.prepare()"
            )
    if getattr(objects["optimizer"], "state", None):
        raise SessionMisuse(
            "optimizer: it has already made steps. Call prepare() before the first step; to continue from another "
            "run, load the weights of that run and create a new optimizer"
        )
