"""Stores and restores the state of the training loop of a Hugging Face `Trainer`.

    state_dict       called for every snapshot: returns counters, log history, sums of losses, callbacks
    load_state_dict  called by the restore, before the trainer's loop begins
    trainer_state, apply_callbacks, apply_sums, is_over
                     called by `everstep.integrations.transformers` at the points of the loop that need the restored
                     values

Invariant: the state contains only plain values and copies, so training does not change it afterwards.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from typing import Any, Final

from transformers.trainer_callback import ExportableState, TrainerControl, TrainerState

from everstep.training import CannotRelayout

_METRICS: Final = "_metrics"
"""Name of the attribute in which TRL's trainers collect values since the last log entry, by mode and name."""
_TOKENS: Final = "_total_train_tokens"
"""Name of the attribute in which TRL's trainers count the tokens of all steps."""


class TrainerLoopState:
    """The state of one trainer's loop, which the session registers.

    Args:
        trainer: the trainer. The state includes its callbacks that inherit from transformers' `ExportableState`.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._history = History()
        self.updates_per_epoch = 0
        """Number of optimizer steps of an epoch, from which the trainer computes its epoch; 0 if it is unknown."""
        self.restored: dict[str, Any] | None = None
        """The restored state; None if nothing was restored."""

    @property
    def is_over(self) -> bool:
        """True if training had ended at the restored step, for example by an early stop."""
        return self.restored is not None and bool(self.restored["is_over"])

    def state_dict(self) -> dict[str, Any]:
        """Return the loop's current state, for a snapshot."""
        trainer, state = self._trainer, self._trainer.state
        fields = {
            field.name: getattr(state, field.name)
            for field in dataclasses.fields(state)
            if field.name not in ("log_history", "stateful_callbacks")
        }
        loss = getattr(trainer, "_tr_loss", None)
        return {
            "state": json.dumps(fields),
            "history": self._history.encode(state.log_history),
            "callbacks": json.dumps([(type(each).__name__, each.state()) for each in self._callbacks()]),
            "is_over": trainer.control.should_training_stop,
            "loss": None if loss is None else loss.detach().clone(),
            "loss_sum": getattr(trainer, "_total_loss_scalar", 0.0),
            "logged_step": getattr(trainer, "_globalstep_last_logged", 0),
            "flos": trainer.current_flos,
            "trl": self._trl_sums(),
            "updates_per_epoch": self.updates_per_epoch,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Store the restored state until the trainer's loop needs it.

        Args:
            state: result of `state_dict` in an earlier launch.

        Raises:
            CannotRelayout: an epoch of this launch has a different number of optimizer steps.
        """
        was = state.get("updates_per_epoch", 0)  # Earlier versions did not store it.
        if was and self.updates_per_epoch and was != self.updates_per_epoch:
            raise CannotRelayout(
                "trainer",
                f"an epoch had {was} optimizer steps and now has {self.updates_per_epoch}, and the trainer computes "
                "its epoch from the number of steps. Use the earlier dataset, and keep the global batch with "
                "gradient_accumulation_steps=everstep.training.accumulation(global_batch, micro_batch)",
            )
        self.restored = state

    def trainer_state(self) -> TrainerState:
        """Return the restored `TrainerState`. Call this after `apply_callbacks`."""
        assert self.restored is not None
        state = TrainerState(**json.loads(self.restored["state"]))
        state.log_history = History.decode(self.restored["history"])
        return dataclasses.replace(state, stateful_callbacks=[*self._callbacks(), self._trainer.control])

    def apply_callbacks(self) -> None:
        """Restore the callbacks in place: the n-th callback of a class receives the n-th state of this class.

        The trainer's own restore is not used, because it creates new callbacks, and does so only if the user sets an
        option.
        """
        assert self.restored is not None
        left = self._callbacks()
        for name, saved in json.loads(self.restored["callbacks"]):
            if (found := next((each for each in left if type(each).__name__ == name), None)) is not None:
                left.remove(found)
                for attribute, value in saved["attributes"].items():
                    setattr(found, attribute, value)

    def apply_sums(self) -> None:
        """Restore the running sums, such as that of the losses, which the trainer's loop resets at its start.

        Does nothing if no step was restored.
        """
        if (restored := self.restored) is None:
            return
        trainer = self._trainer
        if restored["loss"] is not None:
            trainer._tr_loss = restored["loss"].to(trainer.args.device)
        trainer._total_loss_scalar = restored["loss_sum"]
        trainer._globalstep_last_logged = restored["logged_step"]
        trainer.current_flos = restored["flos"]
        # The trainer reports the mean loss of the steps after `_initial_global_step`. Include the steps of earlier
        # launches.
        trainer._initial_global_step = 0
        if restored["trl"] is not None:
            setattr(trainer, _TOKENS, restored["trl"]["tokens"])
            for mode, values in restored["trl"]["metrics"].items():
                getattr(trainer, _METRICS)[mode].update(values)

    def _callbacks(self) -> list[Any]:
        return [
            each
            for each in self._trainer.callback_handler.callbacks
            if isinstance(each, ExportableState) and not isinstance(each, TrainerControl)
        ]

    def _trl_sums(self) -> dict[str, Any] | None:
        """Return the sums from which a trainer of TRL computes its next log entry. Return None for other trainers."""
        trainer = self._trainer
        if not is_of_trl(trainer) or not hasattr(trainer, _METRICS):
            return None
        metrics = {
            mode: {key: list(values) for key, values in of_mode.items()} for mode, of_mode in trainer._metrics.items()
        }
        return {"metrics": metrics, "tokens": getattr(trainer, _TOKENS, 0)}


def is_of_trl(trainer: Any) -> bool:
    """Return whether a trainer's class is a class of Hugging Face's library TRL, or inherits from one."""
    return any(each.__module__.partition(".")[0] == "trl" for each in type(trainer).__mro__)


class History:
    """Encodes the log history of a trainer, which every snapshot contains.

    The encoder compresses each entry once. The bytes depend only on the entries, and not on how often `encode` was
    called. A resumed run therefore has the same bytes as an uninterrupted run.
    """

    def __init__(self) -> None:
        self._count = 0
        self._compressor = zlib.compressobj()
        self._encoded = b""

    def encode(self, entries: list[dict[str, Any]]) -> bytes:
        """Return the entries of the trainer's log history as one compressed stream of JSON lines.

        Between two calls, the caller may only append to the list, because earlier entries are not encoded again.
        """
        new = [
            self._compressor.compress(f"{json.dumps(entry)}\n".encode()) + self._compressor.flush(zlib.Z_SYNC_FLUSH)
            for entry in entries[self._count :]
        ]
        self._count, self._encoded = len(entries), b"".join([self._encoded, *new])
        return self._encoded

    @staticmethod
    def decode(data: bytes) -> list[dict[str, Any]]:
        """Return the trainer's log entries from the bytes that `encode` returned."""
        return [json.loads(line) for line in zlib.decompressobj().decompress(data).splitlines()]
