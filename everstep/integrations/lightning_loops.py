"""The state of a Lightning `Trainer` that is not in the model, the optimizers and the schedulers.

    part         content
    loops        counters of the fit loop and its inner loops: epochs, batches, optimizer steps, `global_step`
    results      values of `self.log` that Lightning averages at the end of the epoch
    logged       the newest logged values, which callbacks and `ReduceLROnPlateau` monitor
    metrics      states of the module's torchmetrics
    callbacks    `state_dict` of each callback
    companions   what the module and the script's callbacks change besides
    datamodule   `state_dict` of the data module

The session registers a `LightningLoopState`, so every snapshot contains these values. They are the values right before
the loop requests a batch.

Invariant: after `apply`, called right before the loop requests a batch, the loop continues exactly like the loop whose
state was stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.trainer.call import _call_callbacks_load_state_dict, _call_callbacks_state_dict
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)
from lightning_utilities.core.apply_func import apply_to_collection
from torchmetrics import Metric

from everstep.integrations.base import UnsupportedOption
from everstep.integrations.companions import Companions
from everstep.training import CannotRelayout
from everstep.training.parts import is_class_of_script

_REDUCTIONS: Final[Mapping[str, Callable[..., Any]]] = {
    "torch.mean": torch.mean,
    "torch.sum": torch.sum,
    "torch.max": torch.max,
    "torch.min": torch.min,
    "sum": sum,
    "max": max,
    "min": min,
}
"""The functions that `self.log(reduce_fx=…)` accepts, by the name under which a snapshot stores each of them."""
_PLAIN_FIELDS: Final = (
    "fx",
    "name",
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "enable_graph",
    "add_dataloader_idx",
    "dataloader_idx",
    "metric_attribute",
)
"""Fields of Lightning's `_Metadata`, the options of a value logged with `self.log`, that are plain values."""
_COUNTERS: Final = ("_computed", "_forward_cache", "_update_count")
"""Attributes of a torchmetrics `Metric` that affect its results, in addition to its registered states."""


class LightningLoopState:
    """The state of one trainer's loop, which the session registers.

    Args:
        trainer: the trainer, whose data is set up.
        batch_count: number of batches of one epoch on this rank.
    """

    def __init__(self, trainer: Any, batch_count: int) -> None:
        self._trainer = trainer
        self._batch_count = batch_count
        self.samples_at_once = 0
        """Number of samples in the batches that all ranks read at the same time; 0 if it is unknown."""
        self.restored: dict[str, Any] | None = None
        """The restored state; None if nothing was restored."""
        kept = (trainer, trainer.lightning_module)
        self.companions = Companions(self._roots, lambda: kept, (), hidden=vars(LightningModule()))

    def _roots(self) -> dict[str, object]:
        own = [each for each in self._trainer.callbacks if is_class_of_script(type(each))]
        named = {f"{type(each).__name__}{number}": each for number, each in enumerate(own)}
        return {"module": self._trainer.lightning_module, **named}

    def compared_state(self) -> dict[str, Any]:
        """Return the part of the state that a rehearsal compares, without directories, which each launch chooses."""
        state = self.state_dict() | {"companions": self.companions.compared_state()}
        return state | {"callbacks": self._with_directories(state["callbacks"], lambda _: "")}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of loops, results, metrics and callbacks, by kind.

        Raises:
            UnsupportedOption: the module logs a value with `sync_dist_group`, a process group that the script created.
        """
        trainer = self._trainer
        loop, logger = trainer.fit_loop, trainer._logger_connector
        return {
            "batch_count": self._batch_count,
            "samples_at_once": self.samples_at_once,
            "loops": loop.state_dict(),
            "validated": dict(loop.epoch_loop.val_loop._seen_batches_per_dataloader),
            "should_stop": trainer.should_stop,
            "accumulate": trainer.accumulate_grad_batches,
            "results": {name: _stored(result) for name, result in loop.epoch_loop._results.items()},
            "logged": {
                "callback": dict(logger._callback_metrics),
                "log": dict(logger._logged_metrics),
                "progress": dict(logger._progress_bar_metrics),
                "function": logger._current_fx,
                "is_first": logger._first_loop_iter,
            },
            "metrics": {
                name: _metric_state(metric)
                for name, metric in trainer.lightning_module.named_modules()
                if isinstance(metric, Metric)
            },
            "callbacks": _call_callbacks_state_dict(trainer),
            "companions": self.companions.state_dict(),
            "datamodule": {} if trainer.datamodule is None else trainer.datamodule.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check that the restored state fits this launch, store it, and apply it to the loop.

        Raises:
            CannotRelayout: an epoch of this launch has a different number of batches, or the batches of all ranks
                together have a different number of samples.
        """
        was, now = state["samples_at_once"], self.samples_at_once
        if was != now:
            raise CannotRelayout(
                "trainer",
                f"all ranks together read {was} samples at a time and now read {now}, and Lightning counts batches. "
                "Use a batch size that keeps this number, or the earlier number of ranks",
            )
        if state["batch_count"] != self._batch_count:
            raise CannotRelayout(
                "trainer",
                f"an epoch had {state['batch_count']} batches per rank and now has {self._batch_count}, and Lightning "
                "counts batches. Use the earlier number of ranks, batch size and dataset",
            )
        self.restored = state
        self.companions.load_state_dict(state["companions"])
        self.apply()

    def apply(self) -> None:
        """Set the restored state again, because hooks may have changed it. Does nothing if no step was restored."""
        if self.restored is None:
            return
        # Pass copies of the restored tensors, because the trainer changes some tensors in place.
        state: dict[str, Any] = apply_to_collection(self.restored, torch.Tensor, torch.clone)
        trainer = self._trainer
        loop, logger = trainer.fit_loop, trainer._logger_connector
        loop.load_state_dict(state["loops"])
        _continue(loop)
        validated = loop.epoch_loop.val_loop._seen_batches_per_dataloader
        validated.clear()
        validated.update(state["validated"])
        trainer.should_stop = state["should_stop"]
        trainer.accumulate_grad_batches = state["accumulate"]
        modules = dict(trainer.lightning_module.named_modules())
        for name, of_metric in state["metrics"].items():
            _load_metric(modules[name], of_metric)
        results: _ResultCollection = loop.epoch_loop._results
        results.clear()
        for name, stored in state["results"].items():
            results[name] = _result(stored, trainer, modules)
        logged = state["logged"]
        logger._callback_metrics, logger._logged_metrics = logged["callback"], logged["log"]
        logger._progress_bar_metrics = logged["progress"]
        logger._current_fx, logger._first_loop_iter = logged["function"], logged["is_first"]
        if loop._data_fetcher is not None:  # The fetcher is None until Lightning has set up the data.
            loop._data_fetcher.fetched = loop.epoch_loop.batch_progress.current.ready
        # With another directory, a ModelCheckpoint would forget its best models.
        callbacks = self._with_directories(state["callbacks"], lambda each: each.dirpath)
        _call_callbacks_load_state_dict(trainer, {"callbacks": callbacks})
        if trainer.datamodule is not None and state["datamodule"]:
            trainer.datamodule.load_state_dict(state["datamodule"])

    def _with_directories(self, states: Mapping[str, Any], directory: Callable[[Any], Any]) -> dict[str, Any]:
        found = {each.state_key: directory(each) for each in self._trainer.checkpoint_callbacks}
        return {key: {**each, "dirpath": found[key]} if key in found else each for key, each in states.items()}


def _continue(loop: _Loop) -> None:
    """Clear the flags of a restart in a loop and its inner loops, because Lightning then resets some counters."""
    loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
    for inner in vars(loop).values():
        if isinstance(inner, _Loop):
            _continue(inner)


def _stored(result: _ResultMetric) -> dict[str, Any]:
    """Encode one value that the module logged with `self.log` as plain values and tensors."""
    meta = result.meta
    if meta.sync.group is not None:
        raise UnsupportedOption(
            f"self.log({meta.name!r}, sync_dist_group=…)",
            "no snapshot contains a process group",
            "Reduce the value over your group before you log it.",
        )
    return {
        "meta": {name: getattr(meta, name) for name in _PLAIN_FIELDS},
        "reduction": next(name for name, function in _REDUCTIONS.items() if function is meta.reduce_fx),
        "sync": (meta.sync.should, meta.sync.op, meta.sync.rank_zero_only),
        "is_tensor": result.is_tensor,
        "has_reset": result.has_reset,
        "state": _metric_state(result),
    }


def _result(stored: Mapping[str, Any], trainer: Any, modules: Mapping[str, torch.nn.Module]) -> _ResultMetric:
    """Decode a value of `self.log` that `_stored` encoded."""
    meta = _Metadata(**stored["meta"], reduce_fx=_REDUCTIONS[stored["reduction"]])
    should, operation, is_of_rank_zero = stored["sync"]
    meta.sync = _Sync(fn=trainer.strategy.reduce, _should=should, rank_zero_only=is_of_rank_zero, _op=operation)
    result = _ResultMetric(meta, stored["is_tensor"])
    result.has_reset = stored["has_reset"]
    _load_metric(result, stored["state"])
    if not result.is_tensor:
        result.value = modules[stored["meta"]["metric_attribute"]]
    return result


def _metric_state(metric: Any) -> dict[str, Any]:
    """Return the state of a torchmetrics `Metric`. Lightning's results of `self.log` are such metrics, too."""
    return {name: _detached(getattr(metric, name)) for name in (*metric._defaults, *_COUNTERS)}


def _load_metric(metric: Any, state: Mapping[str, Any]) -> None:
    for name, value in state.items():
        setattr(metric, name, value)


def _detached(value: Any) -> Any:
    return apply_to_collection(value, torch.Tensor, torch.Tensor.detach)
