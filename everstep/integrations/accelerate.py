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
that loader requests one batch ahead and, on a resume, skips samples without collating them. With Everstep, the batches
of one gradient accumulation may belong to two epochs. Without Everstep, accelerate ends an accumulation with the epoch.

Invariant: a run that was interrupted and resumed equals an uninterrupted run bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from accelerate.accelerator import Accelerator
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.utils.dataclasses import DistributedType
from accelerate.utils.operations import send_to_device

import everstep.training
from everstep.integrations.errors import UnsupportedOption
from everstep.integrations.versions import check_version
from everstep.training import TrainingSession
from everstep.training.adapters.deepspeed import is_engine

TESTED_TYPES: Final = (
    DistributedType.NO,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
    DistributedType.FSDP,
    DistributedType.DEEPSPEED,
)
"""accelerate's distribution types that Everstep accepts. Everstep's tests use each of them, or a type that runs the
same code on another device."""


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

    def batches(self, until_step: int) -> Iterator[Any]:
        """Yield batches across epochs, on the accelerator's device, and end a step after each accumulation.

        Args:
            until_step: number of finished steps at which the loop ends. Steps before a restart count.

        Yields:
            One batch of this rank.

        Raises:
            SessionMisuse: the loader yields no batches.
            RestoreMismatch: the snapshot does not fit this launch.
        """
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

    Returns:
        The prepared objects with their session.

    Raises:
        UnsupportedVersion: Everstep is not tested with the installed version of accelerate.
        UnsupportedOption: an option of the accelerator, or the optimizer, prevents an exact resume.
        CannotResume: an object cannot be restored. The error names it.
    """
    check_version("accelerate")
    check_accelerator(accelerator)
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
    )
    return Prepared(
        accelerator=accelerator,
        model=wrapped,
        optimizer=wrapped_optimizer,
        scheduler=rest[0] if rest else None,
        session=session,
    )


def check_accelerator(accelerator: Accelerator) -> None:
    """Check the options of an accelerator. The integration of transformers calls this, too.

    Args:
        accelerator: the accelerator whose options are checked.

    Raises:
        UnsupportedOption: rank 0 reads the batches of all ranks and sends them to the other ranks, or Everstep has no
            tests with the accelerator's distribution type.
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
    plugin: Any = accelerator.state.fsdp_plugin if kind is DistributedType.FSDP else None
    if plugin is not None and plugin.fsdp_version == 1:
        raise UnsupportedOption(
            "fsdp_version=1",
            "Everstep does not know whether FSDP1 resumes bit for bit",
            "Set it to 2; for a Trainer with fsdp_config={'version': 2}.",
        )
    config = accelerator.parallelism_config
    if config is not None and (config.tp_enabled or config.cp_enabled or config.sp_enabled):
        raise UnsupportedOption(
            "parallelism_config",
            "Everstep has no tests with tensor, context or sequence parallelism of accelerate",
            "Use its data parallel sizes only, or call everstep.training.init() in a loop of your own.",
        )


def check_optimizer(optimizer: Any) -> None:
    """Check that Everstep's guard can run before the optimizer's step. The integration of transformers calls this, too.

    Args:
        optimizer: a torch optimizer, accelerate's wrapper, or None.

    Raises:
        UnsupportedOption: torch.compile compiles the step as one graph, so the guard, which is Python code, cannot run.
    """
    step = getattr(_inside(optimizer, "optimizer"), "step", None)
    cells = getattr(step, "__closure__", None) or ()
    if hasattr(step, "_torchdynamo_orig_callable") and any(_is_full_graph(cell.cell_contents) for cell in cells):
        raise UnsupportedOption(
            "torch.compile(optimizer.step, fullgraph=True)",
            "Everstep waits before the update for the copy of the state, which is not possible inside one graph",
            "Remove fullgraph=True.",
        )


def _is_full_graph(context: object) -> bool:
    """Return whether a context of torch.compile was made with `fullgraph=True`."""
    return getattr(context, "fullgraph", False) is True


def _dispatched() -> UnsupportedOption:
    return UnsupportedOption(
        "dispatch_batches",
        "rank 0 reads the batches of all ranks",
        "Set it to False: each rank then reads its own batches.",
    )


def keep(
    accelerator: Accelerator, *, model: Any, optimizer: Any, scheduler: Any, data: Any, extra: Mapping[str, Any]
) -> TrainingSession:
    """Create the session that keeps the state of objects that accelerate has prepared.

    Args:
        accelerator: the accelerator that prepared the objects.
        model: the wrapped model, or the DeepSpeed engine.
        optimizer: accelerate's wrapper or a torch optimizer. Unused with an engine, which has its own.
        scheduler: accelerate's wrapper, a torch scheduler, or None.
        data: accelerate's loader, or another loader of `everstep.training.data`.
        extra: further objects with `state_dict` and `load_state_dict`, by name.

    Returns:
        The session. It has not restored a step yet.

    Raises:
        CannotResume: an object cannot be restored. The error names it.
        UnsupportedOption: rank 0 reads the batches of all ranks, or the optimizer's step is compiled as one graph.
    """
    check_optimizer(optimizer)
    if isinstance(data, DataLoaderDispatcher) and accelerator.num_processes > 1:
        # With a DataLoaderDispatcher, rank 0 reads the batches of all ranks. It is accelerate's default for an
        # IterableDataset.
        raise _dispatched()
    inner = _inside(scheduler, "scheduler")
    loader = _inside(data, "base_dataloader")
    objects = dict(extra)
    if accelerator.scaler is not None:
        objects["scaler"] = accelerator.scaler
    if is_engine(model):
        if inner is not None and inner is not model.lr_scheduler:
            objects["scheduler"] = inner
        return everstep.training.init(engine=model, data=loader, extra=objects)
    return everstep.training.init(
        model=model, optimizer=_inside(optimizer, "optimizer"), scheduler=inner, data=loader, extra=objects
    )


def _inside(wrapper: Any, name: str) -> Any:
    """Return the object inside accelerate's wrapper. Return an object without such a wrapper unchanged."""
    return getattr(wrapper, name, wrapper) if type(wrapper).__module__.startswith("accelerate.") else wrapper
