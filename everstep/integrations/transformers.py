"""Captures the optimizer steps of a Hugging Face `Trainer`, and resumes from them.

    trainer = Trainer(model=model, args=args, train_dataset=dataset)
    everstep.integrations.transformers.attach(trainer)
    trainer.train()

`attach` replaces methods of this one trainer. The replaced methods differ from the trainer's as follows:

    trainer's method             with Everstep
    _init_training_state         also wraps model and optimizer, creates the session, restores the step that the agent
                                 names, and returns the restored position of the loop
    _prepare_for_training        returns the wrapped model, and the training data as `StepBatches`
    _run_epoch                   skips no batches, because `StepBatches` starts at the restored data position
    _finalize_training           first closes the session
    evaluate, _save_checkpoint   report the phases `eval` and `checkpoint`

**Boundary.** The attachment reports a step as finished right before the trainer requests the first batch of the next
step, or at the end of training. At this point, the trainer has finished the step's logging, evaluation and callbacks.

**Data.** `StepBatches` reads through `everstep.training.data`, not through accelerate's loader. Accelerate's loader
requests one batch ahead, and on a resume it skips samples without collating them. With that loader, random collators
and random augmentation would draw other numbers after a resume.

Invariant: a resumed run has the same weights, optimizer state, schedule, random numbers and logged losses as an
uninterrupted run.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Unpack, cast

import torch
import transformers.trainer
from transformers.integrations.deepspeed import deepspeed_load_checkpoint
from transformers.trainer import TRAINER_STATE_NAME, Trainer
from transformers.trainer_callback import TrainerCallback, TrainerState
from transformers.trainer_utils import get_last_checkpoint, has_length

from everstep.integrations import accelerator
from everstep.integrations.base import (
    InitOptions,
    NoSession,
    StepBatches,
    UnsupportedOption,
    check_optimizer,
    is_alone,
    metrics_of,
    modules_of,
    refuse,
)
from everstep.integrations.trainer_state import TrainerLoopState, is_of
from everstep.refusals import CLASSES, OPTIONS
from everstep.training import SessionMisuse, TrainingError, TrainingSession, rng
from everstep.training.versions import check_version

_ATTACHED: Final = "_everstep"
"""Attribute of a trainer that holds its `TrainerAttachment`, or None if the trainer trains without Everstep."""
_RESUMED: Final = "everstep"
"""Value of `resume_from_checkpoint` that makes the trainer's loop continue in the middle of an epoch.

The value need not name a directory, because `_run_epoch` only tests whether it is None.
"""
logger = logging.getLogger("everstep.training")
UNTESTED_TUNERS: Final = ("ADAMSS", "CPT", "SHADOW", "XLORA")
"""Types of PEFT's tuners that no test resumes."""
_GROUPS: Final = {"eval_": "eval", "test_": "test", "train_": "train"}
"""Group in which the job's Metrics page shows a logged value, by the prefix of the value's name."""


def attach(trainer: Trainer, **options: Unpack[InitOptions]) -> None:
    """Make `trainer.train()` take snapshots and resume from them. Each rank calls this once for a new trainer.

    Args:
        trainer: a `Trainer` or an object of a subclass that does not replace the trainer's training loop, for example
            `Seq2SeqTrainer`. It has not trained yet.
        **options: arguments of `everstep.training.init`: `trusted_optimizers`, `options_from_script`, and `tokenizer`
            (default: the trainer's tokenizer or processor).

    Raises:
        UnsupportedVersion: Everstep is not tested with the installed version of transformers, accelerate, TRL, PEFT or
            DeepSpeed.
        UnsupportedOption: an argument or the class of the trainer prevents an exact resume.
        SessionMisuse: the trainer is attached already, or it has trained.
    """
    if hasattr(trainer, _ATTACHED):
        raise SessionMisuse("attach() was already called for this trainer. Remove the second call; one is enough")
    try:
        _check(trainer)
    except TrainingError as error:
        refuse(error)
        setattr(trainer, _ATTACHED, None)
        return
    setattr(trainer, _ATTACHED, TrainerAttachment(trainer, options))


def _check(trainer: Trainer) -> None:
    check_version("transformers")
    check_version("accelerate")
    if is_of("trl", trainer):
        check_version("trl")
    if is_of("peft", trainer.model):
        check_version("peft")
        for config in getattr(trainer.model, "peft_config", {}).values():
            if (kind := getattr(config.peft_type, "value", config.peft_type)) in UNTESTED_TUNERS:
                raise UnsupportedOption(f"peft_type={kind}", "no test resumes it", "Use another tuner, such as LoRA.")
    if trainer.state.global_step:
        raise SessionMisuse(
            f"the trainer has already trained {trainer.state.global_step} steps. Call attach() before train(), or "
            "create another trainer"
        )
    _check_options(trainer)


def session_of(trainer: Trainer) -> TrainingSession:
    """Return the session of an attached trainer, for example for `session.phase` in one of the script's callbacks.

    If the trainer trains without Everstep, the result is an object without effect.

    Raises:
        SessionMisuse: the trainer is not attached, or its training has not begun.
    """
    attachment: TrainerAttachment | None = getattr(trainer, _ATTACHED, None)
    if attachment is None and hasattr(trainer, _ATTACHED):
        return cast(TrainingSession, NoSession())
    if attachment is None or attachment.session is None:
        raise SessionMisuse("the trainer has no session; call attach(trainer) and trainer.train() before")
    return attachment.session


def _check_options(trainer: Trainer) -> None:
    args = trainer.args
    for option in ("auto_find_batch_size", "ignore_data_skip", "enable_jit_checkpoint"):
        if getattr(args, option, False):
            raise UnsupportedOption(f"TrainingArguments.{option}", *OPTIONS[option])
    if args.n_gpu > 1:
        raise UnsupportedOption(
            "DataParallel", f"one process trains on {args.n_gpu} GPUs", "Start one process per GPU, as Everstep does."
        )
    _check_class(trainer)
    accelerator.check_accelerator(trainer.accelerator)
    check_optimizer(trainer.optimizer)


def _check_class(trainer: Trainer) -> None:
    kind = type(trainer)
    for method in ("_inner_training_loop", "_run_epoch"):
        if getattr(kind, method, None) is not getattr(Trainer, method):
            raise UnsupportedOption(
                f"{kind.__name__}.{method}",
                "it replaces a part of the trainer's loop, in which Everstep finds the steps",
                "Override training_step() or compute_loss(), or use a callback.",
            )
    if hasattr(trainer, "_buffered_inputs"):
        raise UnsupportedOption(kind.__name__, *CLASSES["GRPOTrainer"])


class TrainerAttachment:
    """Replaces methods of one trainer, and owns the trainer's session."""

    def __init__(self, trainer: Trainer, options: InitOptions) -> None:
        self._trainer: Any = trainer
        self._options = options
        self._model = trainer.model
        self._modules = _modules_of(trainer)
        self.session: TrainingSession | None = None
        self._loop = TrainerLoopState(trainer)
        self._loader: Any = None
        self._batches: Any = None
        self._kept_step = 0
        """The newest step that this object reported to the session."""
        self._checkpoint = ""
        """The trainer's checkpoint from which a new run begins, as the script names it; empty without one."""
        self._callback = _Callback(self)
        replaced = ("train", "get_train_dataloader", "_init_training_state", "_prepare_for_training", "_run_epoch")
        later = ("_finalize_training", "evaluate", "_save_checkpoint", "_load_rng_state")
        self._originals = {name: getattr(trainer, name) for name in (*replaced, *later)}
        for name in self._originals:
            setattr(trainer, name, getattr(self, name.removeprefix("_")))
        trainer.add_callback(self._callback)

    def train(self, resume_from_checkpoint: str | bool | None = None, *rest: Any, **more: Any) -> Any:
        """Run `Trainer.train`. `resume_from_checkpoint` is ignored if Everstep names a step to continue from.

        Raises:
            UnsupportedOption: an argument that the script has changed after `attach` prevents an exact resume, or the
                trainer runs a search of hyperparameters.
            SessionMisuse: the trainer has trained already, or its model was replaced or changed after `attach`.
        """
        given = (resume_from_checkpoint, *rest)
        if resume_from_checkpoint and is_alone():
            self._detach()
            return self._trainer.train(*given, **more)
        try:
            self._check(trial=more.get("trial", rest[0] if rest else None))
        except TrainingError as error:
            refuse(error)
            self._detach()
            return self._trainer.train(*given, **more)
        if resume_from_checkpoint:
            newest = functools.partial(get_last_checkpoint, self._trainer.args.output_dir)
            self._checkpoint = str((newest() if resume_from_checkpoint is True else resume_from_checkpoint) or "")
        return self._originals["train"](None, *rest, **more)

    def _check(self, trial: object) -> None:
        trainer = self._trainer
        if trial is not None:
            raise UnsupportedOption(
                "hyperparameter_search()", "each trial is another training run", "Submit one job per trial."
            )
        if self.session is not None:
            raise SessionMisuse("train() was already called for this trainer; create another trainer")
        if trainer.model is not self._model and trainer.model_init is None:
            raise SessionMisuse("the trainer's model was replaced after attach(); call attach() after the last change")
        if _modules_of(trainer) != self._modules and trainer.model_init is None:
            raise SessionMisuse("the trainer's model was changed after attach(); call attach() after the last change")
        _check_options(trainer)

    def _detach(self) -> None:
        """Give the trainer its own methods again. It then trains without Everstep."""
        for name, original in self._originals.items():
            setattr(self._trainer, name, original)
        self._trainer.remove_callback(self._callback)
        setattr(self._trainer, _ATTACHED, None)

    def get_train_dataloader(self) -> Any:
        """Return the trainer's loader, and store it for the session."""
        self._loader = self._originals["get_train_dataloader"]()
        return self._loader

    def init_training_state(
        self, max_steps: int, updates_per_epoch: int, epochs: int, resume: object, trial: object
    ) -> tuple[int, int]:
        """Prepare model and optimizer, create the session, and restore the step that the agent names.

        Returns:
            The number of finished epochs, and the number of batches that the current epoch has used.

        Raises:
            CannotRelayout: the number of ranks has changed, and a step would use another number of samples, or an epoch
                would have another number of steps.
        """
        trainer = self._trainer
        of_trainer = self._originals["_init_training_state"](max_steps, updates_per_epoch, epochs, resume, trial)
        self._model, loader = self._originals["_prepare_for_training"](max_steps, self._loader, None)
        try:
            session = accelerator.keep(
                trainer.accelerator,
                model=self._model,
                optimizer=trainer.optimizer,
                scheduler=trainer.lr_scheduler,
                data=loader,
                extra={"trainer": self._loop},
                **{"tokenizer": _saved_with_model(trainer), **self._options},
            )
        except TrainingError as error:
            refuse(error)
            self._detach()
            trainer._prepare_for_training = functools.partial(_given, (self._model, loader))
            return cast("tuple[int, int]", of_trainer)
        self.session = session
        (stream,) = session.data.values()
        stream.batches_per_step = trainer.args.gradient_accumulation_steps
        self._loop.updates_per_epoch = updates_per_epoch if has_length(loader) else 0
        self._loop.max_steps = max_steps
        restored_step = session.restore()
        stream.check_step()
        if restored_step:
            trainer.state = self._loop.trainer_state()
        elif self._checkpoint:
            self._load_checkpoint()
        generators = rng.observe() if restored_step else None
        self._batches = StepBatches(session, self._end_step, functools.partial(self._resume, generators))
        self._kept_step = trainer.state.global_step
        session.set_target(max_steps - self._kept_step + restored_step)
        if not self._kept_step:
            return 0, 0
        if restored_step and self._checkpoint:
            logger.warning("resume_from_checkpoint is ignored: Everstep continues after step %d", self._kept_step)
        trainer.state.init_training_references(trainer, max_steps, epochs, None)
        # Do not repeat the evaluation that precedes the first step, because the first launch has already made it.
        trainer.args.eval_on_start = trainer.args.eval_on_start and not restored_step
        if not has_length(loader):
            # If the loader has no length, the trainer cannot compute the epoch from the number of steps. Take the epoch
            # from the data stream, which counts the ends of the data.
            return stream.epoch, stream.consumed_count
        finished, updates = divmod(trainer.state.global_step, updates_per_epoch)
        consumed = updates * trainer.args.gradient_accumulation_steps
        if not restored_step:
            stream.skip(finished, consumed)
        elif updates == 0:
            self._batches.begin_next_epoch()
        return finished, consumed

    def _load_checkpoint(self) -> None:
        """Load the trainer's own checkpoint, in the place in which `Trainer.train` loads it."""
        trainer, path = self._trainer, self._checkpoint
        if trainer.is_deepspeed_enabled:
            deepspeed_load_checkpoint(self._model, path, load_module_strict=not is_of("peft", trainer.model))
        else:
            trainer._load_from_checkpoint(path, *([self._model] if trainer.is_fsdp_enabled else []))
        trainer._load_optimizer_and_scheduler(path)
        trainer._load_scaler(path)
        trainer.state = TrainerState.load_from_json(str(Path(path) / TRAINER_STATE_NAME))
        trainer._load_callback_state()

    def prepare_for_training(self, *_: object) -> tuple[Any, StepBatches]:
        """Return the wrapped model and the batches that `init_training_state` prepared."""
        return self._model, self._batches

    def load_rng_state(self, _: object) -> None:
        """Do nothing. `_resume` sets the random generators."""

    def run_epoch(self, **given: Any) -> None:
        """Run `Trainer._run_epoch` from the restored data position, unless training had ended there."""
        if self._loop.is_over:
            self._trainer.control.should_training_stop = True
            return
        is_inside = given["epoch"] == given["epochs_trained"] and given["steps_trained_in_current_epoch"] > 0
        self._originals["_run_epoch"](**{**given, "resume_from_checkpoint": _RESUMED if is_inside else None})

    def finalize_training(self, *given: Any, **more: Any) -> Any:
        """Report the last step and close the session, before the trainer loads its best model or writes results."""
        assert self.session is not None
        self._loop.apply()  # Without a first batch, nothing has applied the restored values yet.
        self._end_step()
        self.session.close()
        return self._originals["_finalize_training"](*given, **more)

    def evaluate(self, *given: Any, **more: Any) -> Any:
        """Run `Trainer.evaluate` as the phase `eval`."""
        return self._in_phase("eval", self._originals["evaluate"], *given, **more)

    def save_checkpoint(self, *given: Any, **more: Any) -> Any:
        """Run `Trainer._save_checkpoint` as the phase `checkpoint`."""
        return self._in_phase("checkpoint", self._originals["_save_checkpoint"], *given, **more)

    def _resume(self, generators: rng.RandomState | None) -> None:
        """Set the restored values that hooks may have changed since, right before the first batch."""
        self._loop.apply()
        if generators is not None:
            rng.restore(generators)
        elif self._checkpoint:
            self._originals["_load_rng_state"](self._checkpoint)

    def log(self, values: dict[str, Any]) -> None:
        """Log the numbers of one entry of the trainer's log for the newest finished step."""
        numbers = {name: value for name, value in values.items() if name not in ("epoch", "step")}
        if self.session is not None and (metrics := metrics_of(numbers, _GROUPS, "train")):
            self.session.log(**metrics)

    def _in_phase(self, phase: Any, function: Callable[..., Any], *given: Any, **more: Any) -> Any:
        if self.session is None:
            return function(*given, **more)
        with self.session.phase(phase):
            return function(*given, **more)

    def _end_step(self) -> bool:
        """Report the newest step to the session, unless it is reported already. Return whether all ranks stop now."""
        trainer, session = self._trainer, self.session
        assert session is not None
        if trainer.state.global_step > self._kept_step:
            self._kept_step = trainer.state.global_step
            if session.boundary().stop:
                # Close the session first. The trainer leaves the epoch now and still evaluates at its end. The snapshot
                # of this step must neither contain effects of that evaluation, nor store that training has ended.
                session.close()
                trainer.control.should_training_stop = True
                return True
        return False


def _saved_with_model(trainer: Any) -> Any:
    """Return the trainer's tokenizer or processor, which the trainer, too, saves with its model."""
    return trainer.processing_class if hasattr(trainer.processing_class, "save_pretrained") else None


def _modules_of(trainer: Any) -> tuple[torch.nn.Module, ...]:
    return () if trainer.model is None else modules_of(trainer.model)


def _given(result: Any, *_: object) -> Any:
    """Return the result, in place of a method that has run already."""
    return result


class _Callback(TrainerCallback):  # type: ignore[misc]
    """Reports each log entry to the trainer's `TrainerAttachment`."""

    def __init__(self, attachment: TrainerAttachment) -> None:
        self._attachment = attachment

    def on_log(self, *_: Any, logs: dict[str, Any] | None = None, **__: Any) -> None:
        self._attachment.log(logs or {})


_trainer_module: Any = transformers.trainer
_skip_first_batches = _trainer_module.skip_first_batches


def _skip_nothing(loader: Any, count: int) -> Any:
    """Skip `count` batches, but none of a `StepBatches`, which starts at the restored data position."""
    return loader if isinstance(loader, StepBatches) else _skip_first_batches(loader, count)


_trainer_module.skip_first_batches = _skip_nothing
