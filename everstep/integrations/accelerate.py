"""Captures the optimizer steps of a script that uses Hugging Face accelerate, and resumes from them.

    keep = everstep.integrations.accelerate.prepare(accelerator, model=model, optimizer=optimizer, data=loader)
    for batch in keep.batches(until_step=10_000):
        with accelerator.accumulate(keep.model):
            loss = keep.model(**batch).loss
            accelerator.backward(loss)
            keep.optimizer.step()
            keep.optimizer.zero_grad()
    keep.close()

`prepare` calls `accelerator.prepare` and creates a session that keeps the state of the returned objects. `batches`
yields the batches of this rank on the accelerator's device, and ends a step after `gradient_accumulation_steps`
batches.

**Data.** The session reads the torch loader inside accelerate's loader. It does not use accelerate's loader, because
that loader requests one batch ahead and, on a resume, skips samples without collating them. Random collators and random
augmentation would then draw other numbers after a resume.

With Everstep, the batches of one gradient accumulation may belong to two epochs. Without Everstep, accelerate ends an
accumulation with the epoch.

Invariant: a run that was interrupted and resumed equals an uninterrupted run bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from accelerate.accelerator import Accelerator
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.utils.dataclasses import DistributedType, RNGType
from accelerate.utils.operations import send_to_device
from accelerate.utils.random import synchronize_rng_state
from torch.distributed.fsdp import CPUOffloadPolicy

import everstep.training
from everstep.integrations.base import check_engine, check_optimizer, modules_of
from everstep.integrations.errors import UnsupportedOption
from everstep.training import SessionMisuse, TrainingSession
from everstep.training.adapters.deepspeed import is_engine
from everstep.training.versions import check_version

TESTED_TYPES: Final = (
    DistributedType.NO,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
    DistributedType.FSDP,
    DistributedType.DEEPSPEED,
)
"""accelerate's distribution types that Everstep accepts. Everstep's tests use each of them, or a type that runs the
same code on another device."""


TESTED_PRECISIONS: Final = ("no", "bf16", "fp16")
"""accelerate's names of the precisions that Everstep accepts. Everstep's tests use each of them."""
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

    def batches(self, until_step: int) -> Iterator[Any]:
        """Yield batches across epochs, on the accelerator's device, and end a step after each accumulation.

        Args:
            until_step: number of finished steps at which the loop ends. Steps before a restart count.

        Yields:
            One batch of this rank.

        Raises:
            SessionMisuse: the loader yields no batches, or the model was changed after `prepare`.
            RestoreMismatch: the snapshot does not fit this launch.
            UnsupportedOption: the script changed an option after `prepare`, and the option prevents an exact resume.
        """
        check_accelerator(self.accelerator)
        check_optimizer(_inside(self.optimizer, "optimizer"))
        if modules_of(self.model) != self.modules:
            raise SessionMisuse("the model was changed after prepare(): its modules differ. Change it before prepare()")
        count = self.accelerator.gradient_accumulation_steps
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
    trusted_optimizers: Sequence[type] = (),
    tokenizer: Any = None,
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
        trusted_optimizers: as for `everstep.training.init`.
        tokenizer: as for `everstep.training.init`.

    Returns:
        The prepared objects with their session.

    Raises:
        UnsupportedVersion: Everstep is not tested with the installed version of accelerate.
        UnsupportedOption: an option of the accelerator, or the optimizer, prevents an exact resume.
        CannotResume: an object cannot be restored. The error names it.
        SessionMisuse: this is the second call for the accelerator, an object is prepared already, or the optimizer has
            made steps.
    """
    check_version("accelerate")
    check_accelerator(accelerator)
    _check_unused(accelerator, {"model": model, "optimizer": optimizer, "data": data, "scheduler": scheduler})
    setattr(accelerator, _PREPARED, True)
    objects = [model, optimizer, data, *([] if scheduler is None else [scheduler])]
    wrapped, wrapped_optimizer, loader, *rest = accelerator.prepare(*objects)
    registered = {f"registered/{number}": each for number, each in enumerate(accelerator._custom_objects)}
    session = keep(
        accelerator,
        model=wrapped,
        optimizer=wrapped_optimizer,
        scheduler=rest[0] if rest else None,
        data=loader,
        extra={**registered, **(extra or {})},
        trusted_optimizers=trusted_optimizers,
        tokenizer=tokenizer,
    )
    return Prepared(
        accelerator=accelerator,
        model=wrapped,
        optimizer=wrapped_optimizer,
        scheduler=rest[0] if rest else None,
        session=session,
        modules=modules_of(wrapped),
    )


def _check_unused(accelerator: Accelerator, objects: Mapping[str, Any]) -> None:
    """Check that the accelerator has no session yet, and that no object was prepared or trained."""
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


def check_accelerator(accelerator: Accelerator) -> None:
    """Check the options of an accelerator. The integration of transformers calls this, too.

    Args:
        accelerator: the accelerator whose options are checked.

    Raises:
        UnsupportedOption: rank 0 reads the batches of all ranks and sends them to the other ranks, or Everstep has no
            tests with the accelerator's distribution type, parallelism or precision.
        UnsupportedVersion: Everstep is not tested with the installed version of DeepSpeed.
    """
    if accelerator.dispatch_batches:
        raise _dispatched()
    kind = accelerator.distributed_type
    if kind not in TESTED_TYPES:
        raise UnsupportedOption(
            f"distributed_type={kind.value}",
            "Everstep has no tests with it",
            "Use DDP, FSDP2 or DeepSpeed ZeRO.",
        )
    if kind is DistributedType.DEEPSPEED:
        check_version("deepspeed")
    plugin: Any = accelerator.state.fsdp_plugin if kind is DistributedType.FSDP else None
    if plugin is not None and plugin.fsdp_version == 1:
        raise UnsupportedOption(
            "fsdp_version=1",
            "Everstep does not know whether FSDP1 resumes bit for bit",
            "Set it to 2; for a Trainer with fsdp_config={'version': 2}.",
        )
    if plugin is not None and isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        raise UnsupportedOption(
            "fsdp_plugin.cpu_offload",
            "Everstep has no tests with parameters that FSDP2 keeps in host memory",
            "Set it to False; for a Trainer remove `offload` from `fsdp`.",
        )
    config = accelerator.parallelism_config
    if config is not None and (
        config.tp_enabled
        or config.cp_enabled
        or config.sp_enabled
        or (config.dp_replicate_enabled and config.dp_shard_enabled)
    ):
        raise UnsupportedOption(
            "parallelism_config",
            "Everstep has no tests with tensor, context or sequence parallelism of accelerate, nor with HSDP",
            "Use one of its data parallel sizes only, or call everstep.training.init() in a loop of your own.",
        )
    if accelerator.mixed_precision not in TESTED_PRECISIONS:
        raise UnsupportedOption(
            f"mixed_precision={accelerator.mixed_precision!r}", "Everstep has no tests with it", "Use 'bf16' or 'fp16'."
        )


def _dispatched() -> UnsupportedOption:
    return UnsupportedOption(
        "dispatch_batches",
        "rank 0 reads the batches of all ranks",
        "Set it to False: each rank then reads its own batches.",
    )


def keep(
    accelerator: Accelerator,
    *,
    model: Any,
    optimizer: Any,
    scheduler: Any,
    data: Any,
    extra: Mapping[str, Any],
    trusted_optimizers: Sequence[type] = (),
    tokenizer: Any = None,
) -> TrainingSession:
    """Create the session that keeps the state of objects that accelerate has prepared.

    Args:
        accelerator: the accelerator that prepared the objects.
        model: the wrapped model, or the DeepSpeed engine.
        optimizer: accelerate's wrapper or a torch optimizer. Unused with an engine, which has its own.
        scheduler: accelerate's wrapper, a torch scheduler, or None.
        data: accelerate's loader, or another loader of `everstep.training.data`.
        extra: further objects with `state_dict` and `load_state_dict`, by name.
        trusted_optimizers: as for `everstep.training.init`.
        tokenizer: as for `everstep.training.init`.

    Returns:
        The session. It has not restored a step yet.

    Raises:
        CannotResume: an object cannot be restored. The error names it.
        UnsupportedOption: rank 0 reads the batches of all ranks, the optimizer's step is compiled as one graph, or
            Everstep has no tests with the ZeRO stage or with the offload of the engine.
    """
    check_optimizer(_inside(optimizer, "optimizer"))
    if isinstance(data, DataLoaderDispatcher) and accelerator.num_processes > 1:
        # With a DataLoaderDispatcher, rank 0 reads the batches of all ranks. It is accelerate's default for an
        # IterableDataset.
        raise _dispatched()
    shuffling = getattr(data, "synchronized_generator", None)
    if shuffling is not None and accelerator.num_processes > 1:
        # accelerate does this before each epoch, in the loader that the session does not use. Once is enough, because
        # all ranks make the same draws, and a restored generator is the same on all ranks.
        synchronize_rng_state(RNGType.GENERATOR, shuffling)
    inner = _inside(scheduler, "scheduler")
    loader = _inside(data, "base_dataloader")
    objects = dict(extra)
    others: dict[str, Any] = {"trusted_optimizers": trusted_optimizers, "tokenizer": tokenizer}
    if accelerator.scaler is not None:
        objects["scaler"] = accelerator.scaler
    if is_engine(model):
        check_engine(model)
        if inner is not None and inner is not model.lr_scheduler:
            objects["scheduler"] = inner
        return everstep.training.init(engine=model, data=loader, extra=objects, **others)
    return everstep.training.init(
        model=model,
        optimizer=_inside(optimizer, "optimizer"),
        scheduler=inner,
        data=loader,
        extra=objects,
        **others,
    )


def _inside(wrapper: Any, name: str) -> Any:
    """Return the object inside accelerate's wrapper. Return an object without such a wrapper unchanged."""
    return getattr(wrapper, name, wrapper) if type(wrapper).__module__.startswith("accelerate.") else wrapper
