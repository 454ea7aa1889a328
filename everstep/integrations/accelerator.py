"""Checks an accelerator of Hugging Face accelerate, and creates the session for objects that it has prepared.

The integrations of accelerate and of transformers use this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Unpack

from accelerate.accelerator import Accelerator
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.utils.dataclasses import DistributedType, RNGType
from accelerate.utils.random import synchronize_rng_state
from torch.distributed.fsdp import CPUOffloadPolicy

import everstep.training
from everstep.integrations.base import InitOptions, UnsupportedOption, check_engine, check_optimizer
from everstep.refusals import OPTIONS
from everstep.training import TrainingSession
from everstep.training.adapters.deepspeed import is_engine
from everstep.training.versions import check_version

_DDP: Final = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
TESTED_TYPES: Final = (*_DDP, DistributedType.FSDP, DistributedType.DEEPSPEED)
"""accelerate's distribution types that Everstep accepts. Everstep's tests use each of them, or a type that runs the
same code on another device."""
TESTED_PRECISIONS: Final = ("no", "bf16", "fp16")
"""accelerate's names of the precisions that Everstep accepts. Everstep's tests use each of them."""


def check_accelerator(accelerator: Accelerator) -> None:
    """Check the options of an accelerator.

    Raises:
        UnsupportedOption: rank 0 reads the batches of all ranks and sends them to the other ranks, or Everstep has no
            tests with the accelerator's distribution type, parallelism or precision.
        UnsupportedVersion: Everstep is not tested with the installed version of DeepSpeed.
    """
    if accelerator.dispatch_batches:
        raise UnsupportedOption("dispatch_batches", *OPTIONS["dispatch_batches"])
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
    if config is not None and (config.tp_enabled or config.cp_enabled or config.sp_enabled):
        raise UnsupportedOption(
            "parallelism_config",
            "Everstep has no tests with tensor, context or sequence parallelism of accelerate",
            "Use dp_replicate_size and dp_shard_size only, or call everstep.training.init() in a loop of your own.",
        )
    if accelerator.mixed_precision not in TESTED_PRECISIONS:
        raise UnsupportedOption(
            f"mixed_precision={accelerator.mixed_precision!r}", "Everstep has no tests with it", "Use 'bf16' or 'fp16'."
        )


def keep(
    accelerator: Accelerator,
    *,
    model: Any,
    optimizer: Any,
    scheduler: Any,
    data: Any,
    extra: Mapping[str, Any],
    **options: Unpack[InitOptions],
) -> TrainingSession:
    """Return the session that keeps the state of objects that accelerate has prepared. It has not restored a step.

    `optimizer` is unused with an engine of DeepSpeed, which has its own.

    Raises:
        CannotResume: an object cannot be restored. The error names it.
        UnsupportedOption: rank 0 reads the batches of all ranks, the optimizer's step is compiled as one graph, or
            Everstep has no tests with the ZeRO stage or with the offload of the engine.
    """
    check_optimizer(inside(optimizer, "optimizer"))
    if isinstance(data, DataLoaderDispatcher) and accelerator.num_processes > 1:
        # With a DataLoaderDispatcher, rank 0 reads the batches of all ranks. It is accelerate's default for an
        # IterableDataset.
        raise UnsupportedOption("dispatch_batches", *OPTIONS["dispatch_batches"])
    shuffling = getattr(data, "synchronized_generator", None)
    if shuffling is not None and accelerator.num_processes > 1:
        # accelerate does this before each epoch, in the loader that the session does not use. Once is enough, because
        # all ranks make the same draws, and a restored generator is the same on all ranks.
        synchronize_rng_state(RNGType.GENERATOR, shuffling)
    inner = inside(scheduler, "scheduler")
    loader = inside(data, "base_dataloader")
    objects = dict(extra)
    if accelerator.scaler is not None:
        objects["scaler"] = accelerator.scaler
    if is_engine(model):
        check_engine(model)
        if inner is not None and inner is not model.lr_scheduler:
            objects["scheduler"] = inner
        return everstep.training.init(engine=model, data=loader, extra=objects, **options)
    return everstep.training.init(
        model=model,
        optimizer=inside(optimizer, "optimizer"),
        scheduler=inner,
        data=loader,
        extra=objects,
        **options,
    )


def inside(wrapper: Any, name: str) -> Any:
    """Return the object inside accelerate's wrapper. Return an object without such a wrapper unchanged."""
    return getattr(wrapper, name, wrapper) if type(wrapper).__module__.startswith("accelerate.") else wrapper
