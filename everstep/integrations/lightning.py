"""Captures the optimizer steps of a Lightning `Trainer`, and resumes from them.

    trainer = Trainer(callbacks=[EverstepCallback()], max_steps=10_000)
    trainer.fit(module, loader)

The callback replaces methods of its trainer and of the trainer's loops. The replaced methods differ from Lightning's as
follows:

    object            method                          with Everstep
    fit loop          _load_combined_loader_states    creates the session, restores the step that the agent names, and
                                                      replaces the training loader by `TrainBatches`
    fit loop          advance                         also ends the epoch of the session's loader
    fit loop          on_run_end                      first reports the last step and closes the session
    fit loop          run                             calls only the final hooks if the last step was restored
    trainer           _run_sanity_check               first sets up the data, to restore before any forward pass
    validation loop   run                             reports the phase `eval`
    trainer           save_checkpoint                 reports the phase `checkpoint`
    logger connector  log_metrics                     also logs the step's values with the session

**Boundary.** The callback reports a step as finished right before the loop requests the next batch, or before the hook
`on_train_end`. At this point, the loop has finished the step's logging, validation and callbacks. Several batches that
accumulate gradients are one step.

**Restore.** The session restores before `on_train_start`. The hooks that follow may change counters.
`LightningLoopState.apply` therefore sets all restored values again when the loop requests its first batch.

Invariant: a resumed run has the same weights, optimizer state, schedule, counters, random numbers and logged values as
an uninterrupted run.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, Final, Unpack, cast

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler, WeightAveraging
from lightning.pytorch.utilities.combined_loader import CombinedLoader

import everstep.training
from everstep.integrations.base import InitOptions, NoSession, StepBatches, is_alone, metrics_of, refuse
from everstep.integrations.lightning_checks import check_data, check_trainer
from everstep.integrations.lightning_loops import LightningLoopState
from everstep.training import SessionMisuse, TrainingError, TrainingSession, rng
from everstep.training.adapters.deepspeed import is_engine
from everstep.training.state import Stateful
from everstep.training.versions import check_version

logger = logging.getLogger("everstep.training")
_GROUPS: Final = {"val_": "val", "test_": "test", "train_": "train"}
"""Group in which the job's Metrics page shows a logged value, by prefix of the value's name."""


class EverstepCallback(Callback):
    """Connects `trainer.fit()` to Everstep. Pass one object to the trainer: `Trainer(callbacks=[EverstepCallback()])`.

    Args:
        extra: other objects with `state_dict` and `load_state_dict` by name, whose state every snapshot contains.
        **options: arguments of `everstep.training.init`: `trusted_optimizers`, `options_from_script`, `tokenizer`.

    Raises:
        UnsupportedVersion: Everstep is not tested with the installed version of Lightning.
    """

    def __init__(self, extra: Mapping[str, Stateful] | None = None, **options: Unpack[InitOptions]) -> None:
        check_version("lightning")
        self._extra = dict(extra or {})
        self._options = options
        self._attachment: LightningAttachment | None = None
        self._is_refused = False

    @property
    def session(self) -> TrainingSession:
        """The session. It exists from the set-up of the training data until the process ends.

        The script's own callbacks may use it, for example for `session.phase`. If the trainer trains without Everstep,
        an object without effect.

        Raises:
            SessionMisuse: the training has not begun.
        """
        if self._is_refused or (self._attachment is not None and self._attachment.is_refused):
            return cast(TrainingSession, NoSession())
        if self._attachment is None or self._attachment.session is None:
            raise SessionMisuse("the callback has no session before the training; call trainer.fit() first")
        return self._attachment.session

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Attach Everstep to the trainer if `stage` is `fit`. Lightning calls this.

        Raises:
            UnsupportedOption: an option of the trainer prevents an exact resume.
            UnsupportedVersion: Everstep is not tested with the installed version of Lightning or DeepSpeed.
            SessionMisuse: `fit` was called before, or the trainer has two `EverstepCallback` objects.
        """
        if stage != "fit":
            return
        try:
            check_version("lightning")
            if self._attachment is not None:
                raise SessionMisuse(
                    "fit() was already called with this EverstepCallback; create another trainer and callback in a job "
                    "of its own"
                )
            check_trainer(trainer, pl_module, EverstepCallback)
        except TrainingError as error:
            refuse(error)
            self._is_refused = True
            return
        self._attachment = LightningAttachment(trainer, self._extra, self._options)


class TrainBatches(StepBatches):
    """The training loader of one fit loop. The attributes of the loader that it reads are its attributes."""

    def __init__(self, *given: Any, loader: Any) -> None:
        super().__init__(*given)
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        # Hide the loader's private attributes and its state methods, so that Lightning neither stores the loader's own
        # state nor ends the loader's workers.
        if name.startswith("_") or name in ("state_dict", "load_state_dict"):
            raise AttributeError(name)
        return getattr(self._loader, name)


class LightningAttachment:
    """Replaces methods of one trainer and its loops, and owns the trainer's session."""

    def __init__(self, trainer: Any, extra: Mapping[str, Stateful], options: InitOptions) -> None:
        self._trainer = trainer
        self._options = options
        self._extra = extra
        self._loop = trainer.fit_loop
        self._batches: TrainBatches | None = None
        self._state: LightningLoopState | None = None
        self.session: TrainingSession | None = None
        self._kept_count = 0
        """Number of optimizer steps that Lightning or DeepSpeed counted when the last finished step was reported."""
        self._is_over = False
        """True when the loop must end, because all ranks stop or the last step is finished."""
        self.is_refused = False
        """True if the trainer trains without Everstep, because it runs outside Everstep and a job would refuse it."""
        self._loads: list[Callable[[], None]] = []
        """Postponed calls that load Lightning's own checkpoint (`fit(ckpt_path=…)`).

        They run only if Everstep has no step to restore.
        """
        for name in ("_restore_modules_and_callbacks", "restore_training_state"):
            _replace(trainer._checkpoint_connector, name, self._postpone)
        _replace(self._loop, "_load_combined_loader_states", self._begin)
        _replace(self._loop, "run", self._run)
        _replace(self._loop, "advance", self._advance)
        _replace(self._loop, "on_run_end", self._on_run_end)
        _replace(self._loop.epoch_loop.val_loop, "run", self._validate)
        _replace(trainer, "_run_sanity_check", self._run_sanity_check)
        _replace(trainer, "save_checkpoint", self._save_checkpoint)
        _replace(trainer._logger_connector, "log_metrics", self._log_metrics)

    def _postpone(self, load: Callable[..., None], *given: Any) -> None:
        # Lightning names the checkpoint in the first of the two calls only.
        if (self._loads or any(given[:1])) and not is_alone():
            self._loads.append(functools.partial(load, *given))
        else:
            load(*given)

    def _begin(self, load_data: Callable[[], None]) -> None:
        """Create the session, restore its step, and replace the training loader, which Lightning has prepared."""
        combined: CombinedLoader = self._loop._combined_loader
        try:
            check_data(self._trainer, combined)
            assert combined.limits is not None
            (loader,), count = combined.flattened, int(combined.limits[0])
            state = self._state = LightningLoopState(self._trainer, count)
            session = self._create_session(state, loader)
        except TrainingError as error:
            refuse(error)
            self.is_refused = True
            load_data()
            return
        self.session = session
        (stream,) = session.data.values()
        order = stream.source.order
        state.samples_at_once = 0 if order is None else order.batch * order.replicas
        restored_step = session.restore()
        if self._loads and restored_step:
            logger.warning("fit(ckpt_path=…) is ignored: Everstep continues after step %d", restored_step)
        for load in () if restored_step else self._loads:
            load()
        resume = functools.partial(_resume, state, rng.observe() if restored_step else None)
        self._kept_count = self._count_steps()
        target = self._last_step(count)
        session.set_target(target and target - self._kept_count + restored_step)
        self._batches = TrainBatches(session, self._end_step, resume, loader=loader)
        combined.flattened = [self._batches]

    def _create_session(self, state: LightningLoopState, loader: Any) -> TrainingSession:
        trainer, strategy = self._trainer, self._trainer.strategy
        extra: dict[str, Any] = {"trainer": state, **self._extra}
        if (scaler := getattr(trainer.precision_plugin, "scaler", None)) is not None:
            extra["scaler"] = scaler
        for number, average in enumerate(_averages(trainer)):
            extra[f"average/{number}"] = average
        schedulers = {str(number): each.scheduler for number, each in enumerate(strategy.lr_scheduler_configs)}
        registered: dict[str, Any] = {"engine": strategy.model}
        if not is_engine(strategy.model):
            optimizers = {str(number): each for number, each in enumerate(strategy.optimizers)}
            optimizer = optimizers if len(optimizers) > 1 else optimizers["0"]
            registered = {"model": strategy.model, "optimizer": optimizer}
        return everstep.training.init(**registered, scheduler=schedulers, data=loader, extra=extra, **self._options)

    def _run(self, run: Callable[[], None]) -> None:
        """Run the fit loop. It returns at once if the last step was restored; then call the final hooks."""
        run()
        if self.session is None or self._is_over:
            return
        if self._state is not None and self._state.restored is not None:
            self._loop.on_run_start()
            self._loop.on_run_end()
        else:
            self.session.close()

    def _advance(self, advance: Callable[[], None]) -> None:
        advance()
        if self.session is None:
            return
        if self._is_over:
            raise StopIteration  # Training is over: Lightning then leaves the loop without calling epoch-end hooks.
        assert self._batches is not None
        self._batches.end_epoch()

    def _on_run_end(self, on_run_end: Callable[[], None]) -> None:
        if self.session is not None:
            self._end_step()
            self._is_over = True
            self.session.close()
        on_run_end()

    def _run_sanity_check(self, run: Callable[[], None]) -> None:
        self._loop.setup_data()
        run()

    def _validate(self, run: Callable[[], Any]) -> Any:
        if self.session is None:
            return run()
        if _averages(self._trainer):
            # Wait for the copy of the state, because Lightning's callback swaps the weights with their averages for
            # validation.
            self.session.fence()
        with self.session.phase("eval"):
            return run()

    def _save_checkpoint(self, save: Callable[..., None], *given: Any, **more: Any) -> None:
        if self.session is None:
            return save(*given, **more)
        with self.session.phase("checkpoint"):
            return save(*given, **more)

    def _log_metrics(self, log: Callable[..., None], metrics: dict[str, Any], step: int | None = None) -> None:
        trainer = self._trainer
        if self.session is not None and not trainer.sanity_checking:
            numbers = metrics_of(metrics, _GROUPS, "val" if trainer.validating else "train")
            if numbers:
                self.session.log(**numbers)
        log(metrics, step)

    def _end_step(self) -> bool:
        """Report the newest step, unless it is reported already. Return whether the loop must end."""
        session = self.session
        assert session is not None
        if not self._is_over and (count := self._count_steps()) != self._kept_count:
            self._kept_count = count
            if session.boundary().stop:
                self._is_over = True
                session.close()
        return self._is_over

    def _count_steps(self) -> int:
        """Return the number of finished optimizer steps: with DeepSpeed its engine's count, else the trainer's."""
        model = self._trainer.strategy.model
        return int(model.global_steps if is_engine(model) else self._trainer.global_step)

    def _last_step(self, batch_count: int) -> int:
        """Return the number of steps of the whole training, or 0 if it is unknown."""
        trainer = self._trainer
        if not trainer.lightning_module.automatic_optimization:
            return 0  # The number of steps is unknown: the module decides which batches form a step.
        limits = [trainer.max_steps] if trainer.max_steps != -1 else []
        is_constant = not any(isinstance(each, GradientAccumulationScheduler) for each in trainer.callbacks)
        if is_constant and self._loop.max_epochs != -1:
            limits.append(math.ceil(batch_count / trainer.accumulate_grad_batches) * self._loop.max_epochs)
        return min(limits, default=0)


def _resume(state: LightningLoopState, generators: rng.RandomState | None) -> None:
    """Set the restored loop state and generators again, because hooks may have changed them since the restore."""
    state.apply()
    state.companions.apply()
    if generators is not None:
        rng.restore(generators)


def _averages(trainer: Any) -> list[Stateful]:
    """Return the averaged models that callbacks of the trainer maintain."""
    averages = [each._average_model for each in trainer.callbacks if isinstance(each, WeightAveraging)]
    return [each for each in averages if each is not None]


def _replace(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Replace a method of one object. The replacement receives the original method as its first argument."""
    setattr(owner, name, functools.partial(replacement, getattr(owner, name)))
