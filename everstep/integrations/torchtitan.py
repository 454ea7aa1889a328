"""Captures the optimizer steps of a torchtitan trainer, and resumes from them.

    config.checkpoint = everstep.integrations.torchtitan.CheckpointManager.Config()
    trainer = config.build()
    trainer.train()

torchtitan's trainer builds the checkpoint manager that its configuration names, and calls this manager:

    trainer's call                            what the manager does
    load, when `train` begins                 creates the session and restores the step that the agent names
    maybe_wait_for_staging, before each       waits for the copy of the state
      optimizer step
    save, after each optimizer step           after the last step, writes torchtitan's own final checkpoint
    close                                     ends the session

`load` also replaces four attributes of the trainer:

    trainer's attribute         with Everstep
    should_continue_training    first reports the finished step; returns False if all ranks must stop
    dataloader                  yields the batches that follow the restored data position
    metrics_processor.logger    also logs the values with the session
    validator.validate          reports the phase `eval`

**Boundary.** The manager reports a step as finished when the trainer calls `should_continue_training`, and not in
`save`. Validation runs between the two calls, so the random numbers that it draws belong to the finished step.

Invariant: a resumed run has the same weights, optimizer state, schedule, batches, random numbers and logged losses as
an uninterrupted run.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch

from everstep.integrations.base import NoSession, UnsupportedOption, check_optimizer, refuse
from everstep.refusals import OPTIONS
from everstep.training.versions import check_version

# Check the version before the imports below, because other versions may lack the imported modules.
check_version("torchtitan")

from torchtitan.components.checkpointer import BaseCheckpointManager, dcp  # noqa: E402

import everstep.training  # noqa: E402
from everstep.training import SessionMisuse, TrainingError, TrainingSession  # noqa: E402

_TRAINER: Final = "train_state"
"""Key under which torchtitan passes its trainer to a checkpoint manager."""
_NO_FOLDER: Final = "everstep-has-no-checkpoints"
"""Name of a folder that does not exist.

If torchtitan found checkpoints in its folder, it would load one of them instead of the initial weights.
"""
_ALWAYS: Final = {
    "interval": (1, "Everstep keeps every step", "Remove it, or limit the cost with the job's Protection.MaxSlowdown"),
    "async_mode": ("disabled", "Everstep copies the state in the background", "Remove it"),
    "load_step": (-1, "Everstep names the step from which all ranks continue", "Remove it"),
    "load_only": (False, "Everstep keeps every step", "Set enable=False to train without Everstep"),
    "keep_latest_k": (10, "Everstep deletes older steps itself", "Remove it"),
    "exclude_from_loading": ([], "a resumed run would differ from an undisturbed run", "Remove it"),
    "enable_first_step_checkpoint": (False, "Everstep keeps every step", "Remove it"),
    "create_seed_checkpoint": (
        False,
        "no step is trained",
        "Write the seed checkpoint with torchtitan's own CheckpointManager, and name it in initial_load_path",
    ),
    "initial_load_model_only": (
        True,
        "an optimizer and a data position of another run would be the state of step 0",
        "Remove it: the job then starts from the weights alone",
    ),
}
"""Options for which Everstep accepts only one value: this value, the reason, and an alternative."""


class CheckpointManager(BaseCheckpointManager):  # type: ignore[misc]
    """A checkpoint manager of torchtitan that captures steps with Everstep, and resumes from them.

    A script only names `Config`. The trainer builds the manager with torchtitan's arguments, and calls it on each rank.

    Raises:
        SessionMisuse: `states` contains no trainer with the name `train_state`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc]
        """Configuration of Everstep's checkpoint manager, which a script assigns to its trainer's `config.checkpoint`.

        `folder`, `initial_load_path`, `initial_load_in_hf`, `initial_load_in_hf_quantized`, `last_save_model_only`,
        `last_save_in_hf` and `export_dtype` work as with torchtitan's own manager.

        Raises:
            UnsupportedOption: another option differs from its default.
        """

        enable: bool = True
        """If False, the trainer trains without Everstep and without checkpoints."""
        interval: int = 1
        """Everstep accepts only 1. With 1, torchtitan's loader records its position at every step."""
        async_mode: str = "disabled"
        """Everstep accepts only `disabled`."""
        trusted_optimizers: tuple[type, ...] = ()
        """As for `everstep.training.init`."""
        options_from_script: tuple[str, ...] = ()
        """As for `everstep.training.init`."""

        def __post_init__(self) -> None:
            """Check the options. torchtitan calls this again when it builds the manager."""
            BaseCheckpointManager.Config.__post_init__(self)
            for option, (value, reason, alternative) in _ALWAYS.items():
                if getattr(self, option) != value:
                    refuse(UnsupportedOption(f"checkpoint.{option}", reason, f"{alternative}."))

    running: ClassVar[weakref.ref[CheckpointManager] | None] = None
    """The manager whose session runs in this process; None if no session runs."""

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[torch.nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        self.save_future = None  # torchtitan's trainer reads `save_future`. None means that no save runs.
        if not self.enable:
            return
        if not hasattr(states.get(_TRAINER), "should_continue_training"):
            raise SessionMisuse(f"torchtitan's trainer is not in states[{_TRAINER!r}]; use a subclass of its Trainer")
        self.session: TrainingSession | NoSession | None = None
        """The session, which `load` creates; None before."""
        self._config = config
        self._parts: dict[str, Any] = {
            "dataloader": dataloader,
            "model_parts": model_parts,
            "optimizers": optimizers,
            "lr_schedulers": lr_schedulers,
            "sd_adapter": sd_adapter,
            "base_folder": base_folder,
        }
        self._states = states
        self._trainer: Any = states[_TRAINER]
        self._ended_step = 0
        """The newest step that was reported to the session."""

    def _load(self, step: int = -1) -> bool:  # noqa: ARG002 — `Config` refuses other steps
        other = CheckpointManager.running and CheckpointManager.running()
        if other is not None:
            raise SessionMisuse(
                "train() was already called for this trainer; build another trainer"
                if other is self
                else "another trainer of this process already has a checkpoint manager of Everstep; close it before"
            )
        try:
            session = self.session = self._create_session()
            CheckpointManager.running = weakref.ref(self)
            self._ended_step = session.restore()
            self._attach(session)
        except TrainingError as error:
            refuse(error)
            self.session = NoSession()
        if not self._ended_step and (self._config.initial_load_path or self._config.initial_load_in_hf):
            self._torchtitans(folder=_NO_FOLDER).load()
        return self._ended_step > 0

    def _create_session(self) -> TrainingSession:
        if self._trainer.config.training.enable_cpu_offload:
            raise UnsupportedOption("training.enable_cpu_offload", *OPTIONS["enable_cpu_offload"])
        for optimizer in self._parts["optimizers"]:
            check_optimizer(optimizer)
        session = everstep.training.init(
            model=_named(self._parts["model_parts"]),
            optimizer=_named(self._parts["optimizers"]),
            scheduler=_named(self._parts["lr_schedulers"]),
            data=self._parts["dataloader"],
            extra={**self._states, _TRAINER: _TrainerState(self._trainer, lambda: self._ended_step)},
            trusted_optimizers=self._config.trusted_optimizers,
            options_from_script=self._config.options_from_script,
        )
        session.set_target(self._trainer.config.training.steps)
        return session

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        session = self._begun()
        if not isinstance(session, NoSession) and curr_step != self._ended_step + 1:
            raise SessionMisuse(
                f"step {curr_step} is saved, and step {self._ended_step} is the last one that ended; train() must call "
                "should_continue_training() after each step, as torchtitan's does"
            )
        if last_step:
            # The last step is reported as finished only after this save. If the save fails, a restart therefore repeats
            # the step.
            with session.phase("checkpoint"):
                self._torchtitans(folder=self._config.folder).save(curr_step, last_step=True)
        return last_step

    def _maybe_wait_for_staging(self) -> None:
        self._begun().fence()

    def _wait_for_saving(self) -> None:
        """Do nothing, because this manager never saves checkpoints in the background."""

    def _close(self) -> None:
        if self.session is not None:
            self.session.close()
            CheckpointManager.running = None

    def _begun(self) -> TrainingSession | NoSession:
        if self.session is None:
            raise SessionMisuse("train() must call load() before the first step, as torchtitan's does")
        return self.session

    def _torchtitans(self, folder: str) -> Any:
        """Return torchtitan's checkpoint manager, which loads the initial weights and writes the final checkpoint."""
        names = [field.name for field in dataclasses.fields(BaseCheckpointManager.Config)]
        options: dict[str, Any] = {name: getattr(self._config, name) for name in names}
        create: Any = dcp.CheckpointManager.Config
        config = create(**{**options, "folder": folder, "keep_latest_k": 0})
        return config.build(**self._parts, states=dict(self._states))

    def _attach(self, session: TrainingSession) -> None:
        """Replace the trainer's attributes that the module's docstring lists."""
        trainer = self._trainer
        continues = trainer.should_continue_training

        def should_continue_training() -> bool:
            if self._end_step(session) or not continues():
                session.close()
                return False
            return True

        trainer.should_continue_training = should_continue_training
        (trainer.dataloader,) = session.data.values()
        trainer.metrics_processor.logger = _Logger(trainer.metrics_processor.logger, session)
        if trainer.config.validator.enable:
            validate = trainer.validator.validate

            def validate_in_phase(*given: Any, **more: Any) -> None:
                with session.phase("eval"):
                    validate(*given, **more)

            trainer.validator.validate = validate_in_phase

    def _end_step(self, session: TrainingSession) -> bool:
        """Report the newest step to the session, unless it is reported already. Return whether all ranks stop now."""
        if self._trainer.step == self._ended_step:
            return False
        self._ended_step += 1
        return session.boundary().stop


class _TrainerState:
    """The trainer's counters, which every snapshot contains."""

    def __init__(self, trainer: Any, ended_step: Callable[[], int]) -> None:
        self._trainer = trainer
        self._ended_step = ended_step

    def state_dict(self) -> dict[str, Any]:
        # Replace the trainer's own count of steps. The trainer counts a step before it requests the step's batches. If
        # the data ends then, the step never runs.
        return {**self._trainer.state_dict(), "step": self._ended_step()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._trainer.load_state_dict(state)


class _Logger:
    """Passes the trainer's logged values to the session, and to torchtitan's own logger."""

    def __init__(self, inner: Any, session: TrainingSession) -> None:
        self._inner = inner
        self._session = session

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """Pass all metrics of a step to torchtitan's own logger, and the numbers to the session."""
        self._session.log(**{name: value for name, value in metrics.items() if isinstance(value, (int, float))})
        self._inner.log(metrics, step)

    def close(self) -> None:
        self._inner.close()


def _named(parts: Iterable[Any]) -> Any:
    """Return the parts of a torchtitan container in a dict with the keys "0", "1", …. Return a single part itself."""
    parts = list(parts)
    return parts[0] if len(parts) == 1 else {str(number): part for number, part in enumerate(parts)}
