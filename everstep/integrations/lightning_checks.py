"""Checks the options of a Lightning `Trainer`, its callbacks and its data."""

from __future__ import annotations

import math
from typing import Any, Final

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, Timer
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from everstep.integrations.base import UnsupportedOption, check_engine, check_optimizer
from everstep.refusals import CLASSES, OPTIONS
from everstep.training import SessionMisuse
from everstep.training.adapters.deepspeed import is_engine
from everstep.training.versions import check_version

_STRATEGIES: Final = (SingleDeviceStrategy, DDPStrategy, ModelParallelStrategy, DeepSpeedStrategy)
_PRECISIONS: Final = ("32-true", "bf16-mixed", "bf16-true", "16-mixed")
"""Lightning's names of the precisions that Everstep accepts. Everstep's tests use each of them."""


def check_trainer(trainer: Any, module: LightningModule, kind: type[Callback]) -> None:
    """Check the options of a trainer whose callbacks and strategy are set up. `kind` is Everstep's callback.

    Raises:
        UnsupportedOption: an option prevents an exact resume.
        UnsupportedVersion: Everstep is not tested with the installed version of DeepSpeed.
        SessionMisuse: the trainer has two `EverstepCallback` objects.
    """
    if not _is_trainer(trainer):
        raise UnsupportedOption(
            type(trainer).__module__.split(".")[0],
            "the trainer is not a lightning.pytorch.Trainer",
            "Import Trainer from lightning.pytorch.",
        )
    if sum(isinstance(each, kind) for each in trainer.callbacks) > 1:
        raise SessionMisuse("the trainer has more than one EverstepCallback; pass one")
    _check_strategy(trainer.strategy)
    for callback in trainer.callbacks:
        if known := CLASSES.keys() & {each.__name__ for each in type(callback).__mro__}:
            raise UnsupportedOption(type(callback).__name__, *CLASSES[known.pop()])
    if any(isinstance(each, Timer) and each.time_remaining() is not None for each in trainer.callbacks):
        raise UnsupportedOption("Trainer(max_time=…)", *OPTIONS["max_time"])
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        raise UnsupportedOption(
            "Trainer(val_check_interval=…)",
            "a resumed run would validate at other steps",
            "Set a number of batches instead of a time.",
        )
    if trainer.reload_dataloaders_every_n_epochs:
        option = "reload_dataloaders_every_n_epochs"
        raise UnsupportedOption(f"Trainer({option}=…)", *OPTIONS[option])
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise UnsupportedOption(
            "training_step(dataloader_iter)",
            "Everstep cannot see which batches belong to a step",
            "Use training_step(batch, batch_idx).",
        )


def _is_trainer(value: object) -> bool:
    """Return whether a value is a trainer of the package `lightning`, and not of the package `pytorch_lightning`."""
    return isinstance(value, Trainer)


def _check_strategy(strategy: Any) -> None:
    name = type(strategy).__name__
    if isinstance(strategy, FSDPStrategy):
        raise UnsupportedOption(name, *CLASSES["FSDPStrategy"])
    if isinstance(strategy, DeepSpeedStrategy):
        check_version("deepspeed")
    if not isinstance(strategy, _STRATEGIES):
        known = ", ".join(each.__name__ for each in _STRATEGIES)
        raise UnsupportedOption(name, "Everstep has no tests with this strategy", f"Use one of {known}.")
    if isinstance(strategy, ModelParallelStrategy) and strategy._tensor_parallel_size != 1:
        raise UnsupportedOption(
            f"{name}(tensor_parallel_size={strategy._tensor_parallel_size})",
            "no test resumes tensor parallelism of Lightning",
            "Set tensor_parallel_size=1, and data_parallel_size to the number of ranks.",
        )
    if (precision := strategy.precision_plugin.precision) not in _PRECISIONS:
        raise UnsupportedOption(
            f"Trainer(precision={precision!r})",
            "no test resumes this precision with Lightning",
            f"Use one of {', '.join(_PRECISIONS)}.",
        )
    if isinstance(strategy.launcher, _MultiProcessingLauncher):
        raise UnsupportedOption(
            f"{name}(start_method=…)",
            "the script's process does not train itself",
            'Use strategy="ddp": each rank is then a process of its own.',
        )


def check_data(trainer: Any, combined: CombinedLoader) -> None:
    """Check the options that have their final values only after the trainer has set up its strategy and data.

    Raises:
        UnsupportedOption: an optimizer or the data prevents an exact resume.
    """
    if not trainer.strategy.optimizers or any(isinstance(each, _MockOptimizer) for each in trainer.strategy.optimizers):
        raise UnsupportedOption(
            "configure_optimizers", "it returns no optimizer, so no step ends", "Return the optimizers."
        )
    for optimizer in trainer.strategy.optimizers:
        check_optimizer(optimizer)
    if is_engine(trainer.strategy.model):
        check_engine(trainer.strategy.model)
    if len(combined.flattened) != 1:
        raise UnsupportedOption(
            f"{len(combined.flattened)} training loaders",
            "Lightning starts the shorter ones anew during an epoch",
            "Combine the datasets in one loader.",
        )
    assert combined.limits is not None
    if math.isinf(combined.limits[0]):
        raise UnsupportedOption(
            "a training loader without a length",
            "Lightning reads one batch ahead, and no snapshot contains this batch",
            "Set Trainer(limit_train_batches=…) to a number of batches per epoch.",
        )
