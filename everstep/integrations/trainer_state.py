"""Stores and restores the state of the training loop of a Hugging Face `Trainer`.

    state_dict       called for every snapshot: returns counters, log history, and what else the trainer, its callbacks
                     and its tuner have changed
    load_state_dict  called by the restore, before the trainer's loop begins
    trainer_state, apply, is_over
                     called by `everstep.integrations.transformers` at the points of the loop that need the restored
                     values

Invariant: the state contains only plain values and copies, so training does not change it afterwards.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections import Counter
from typing import Any

from transformers.trainer_callback import ExportableState, TrainerControl, TrainerState

from everstep.integrations.companions import Companions
from everstep.training import CannotRelayout


class TrainerLoopState:
    """The state of one trainer's loop, which the session registers.

    Args:
        trainer: the trainer, which has not trained yet.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._companions = Companions(self._roots, self._kept, ("transformers", "trl", "peft"))
        self._history = History()
        self.max_steps = 0
        """Number of optimizer steps at the end of this launch."""
        self.updates_per_epoch = 0
        """Number of optimizer steps of an epoch, from which the trainer computes its epoch; 0 if it is unknown."""
        self.restored: dict[str, Any] | None = None
        """The restored state; None if nothing was restored."""

    @property
    def is_over(self) -> bool:
        """True if training had ended at the restored step: by an early stop, or because it is the last step."""
        restored = self.restored
        return restored is not None and (restored["is_over"] or self._trainer.state.global_step >= self.max_steps)

    def state_dict(self) -> dict[str, Any]:
        """Return the loop's current state, for a snapshot."""
        trainer, state = self._trainer, self._trainer.state
        fields = {
            field.name: getattr(state, field.name)
            for field in dataclasses.fields(state)
            if field.name not in ("log_history", "stateful_callbacks")
        }
        return {
            "state": json.dumps(fields),
            "history": self._history.encode(state.log_history),
            # At its last step, a trainer stops because it has reached the limit, which a later launch may raise.
            "is_over": trainer.control.should_training_stop and state.global_step < state.max_steps,
            "companions": self._companions.state_dict(),
            "updates_per_epoch": self.updates_per_epoch,
        }

    def compared_state(self) -> dict[str, Any]:
        """Return the part of the state that a rehearsal compares."""
        return self.state_dict() | {"companions": self._companions.compared_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Store the restored state until the trainer's loop needs it.

        Args:
            state: result of `state_dict` in an earlier launch.

        Raises:
            CannotRelayout: an epoch of this launch has a different number of optimizer steps.
        """
        was = state["updates_per_epoch"]
        if was and self.updates_per_epoch and was != self.updates_per_epoch:
            raise CannotRelayout(
                "trainer",
                f"an epoch had {was} optimizer steps and now has {self.updates_per_epoch}, and the trainer computes "
                "its epoch from the number of steps. Use the earlier dataset, and keep the global batch with "
                "gradient_accumulation_steps=everstep.training.accumulation(global_batch, micro_batch)",
            )
        self.restored = state
        self._companions.load_state_dict(state["companions"])

    def trainer_state(self) -> TrainerState:
        """Return the restored `TrainerState`, with the options of this launch."""
        assert self.restored is not None
        trainer = self._trainer
        state = TrainerState(**json.loads(self.restored["state"]))
        state.log_history = History.decode(self.restored["history"])
        state.compute_steps(trainer.args, self.max_steps)
        callbacks = [each for each in self._callbacks() if isinstance(each, ExportableState)]
        return dataclasses.replace(state, stateful_callbacks=[*callbacks, trainer.control])

    def apply(self) -> None:
        """Set all other restored values. Call this right before the trainer requests its first batch."""
        self._companions.apply()

    def _callbacks(self) -> list[Any]:
        return [each for each in self._trainer.callback_handler.callbacks if not isinstance(each, TrainerControl)]

    def _roots(self) -> dict[str, object]:
        """Return the trainer, its callbacks that do more than report, and the tuners of its model."""
        found: dict[str, object] = {"trainer": self._trainer}
        seen: Counter[str] = Counter()
        for each in self._callbacks():
            kind = type(each)
            if not kind.__module__.startswith(("transformers.integrations.", "everstep.")):
                seen[kind.__name__] += 1
                found[f"{kind.__name__}{seen[kind.__name__]}"] = each
        if is_of("peft", model := self._trainer.model):
            found["model"] = model
            found["tuner"] = getattr(model, "base_model", model)
        return found

    def _kept(self) -> list[object]:
        """Return the objects of the trainer whose state a snapshot contains in another place, or needs not contain."""
        trainer = self._trainer
        names = (
            *("model", "model_wrapped", "optimizer", "lr_scheduler", "accelerator", "args", "state", "control"),
            *("callback_handler", "train_dataset", "eval_dataset", "processing_class", "_memory_tracker"),
        )
        found = [getattr(trainer, name, None) for name in names]
        return [each for each in (*found, getattr(trainer.model, "config", None)) if each is not None]


def is_of(package: str, value: object) -> bool:
    """Return whether an object's class is a class of a package, or inherits from one."""
    return any(each.__module__.partition(".")[0] == package for each in type(value).__mro__)


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
