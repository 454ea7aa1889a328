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
from collections.abc import Callable
from typing import Any, Final

import torch
import transformers.trainer
from transformers.trainer import Trainer
from transformers.trainer_callback import TrainerCallback, TrainerControl
from transformers.trainer_utils import has_length

from everstep.integrations import accelerate
from everstep.integrations.checks import check_optimizer, modules_of
from everstep.integrations.errors import UnsupportedOption
from everstep.integrations.steps import StepBatches, metrics_of
from everstep.integrations.trainer_state import TrainerLoopState, is_of_trl
from everstep.training import SessionMisuse, TrainingSession, rng
from everstep.training.versions import check_version

_ATTACHED: Final = "_everstep"
"""Attribute of a trainer that holds its `TrainerAttachment`."""
_RESUMED: Final = "everstep"
"""Value of `resume_from_checkpoint` that makes the trainer's loop continue in the middle of an epoch.

The value need not name a directory, because `_run_epoch` only tests whether it is None.
"""
_GROUPS: Final = {"eval_": "eval", "test_": "test", "train_": "train"}
"""Group in which the job's Metrics page shows a logged value, by the prefix of the value's name."""


def attach(trainer: Trainer) -> None:
    """Make `trainer.train()` take snapshots and resume from them. Each rank calls this once for a new trainer.

    Args:
        trainer: a `Trainer` or an object of a subclass that does not replace the trainer's training loop, for example
            `Seq2SeqTrainer`. It has not trained yet.

    Raises:
        UnsupportedVersion: Everstep is not tested with the installed version of transformers, accelerate, TRL, PEFT or
            DeepSpeed.
        UnsupportedOption: an argument or the class of the trainer prevents an exact resume.
        SessionMisuse: the trainer is attached already, or it has trained.
    """
    check_version("transformers")
    check_version("accelerate")
    if is_of_trl(trainer):
        check_version("trl")
    if any(kind.__module__.startswith("peft.") for kind in type(trainer.model).__mro__):
        check_version("peft")
    if hasattr(trainer, _ATTACHED):
        raise SessionMisuse("attach() was already called for this trainer. Remove the second call; one is enough")
    if trainer.state.global_step:
        raise SessionMisuse(
            f"the trainer has already trained {trainer.state.global_step} steps. Call attach() before train(), or "
            "create another trainer"
        )
    _check_options(trainer)
    setattr(trainer, _ATTACHED, TrainerAttachment(trainer))


def session_of(trainer: Trainer) -> TrainingSession:
    """Return the session of an attached trainer, for example for `session.phase` in one of the script's callbacks.

    Args:
        trainer: an attached trainer whose training has begun.

    Returns:
        The trainer's session. Every later call for this trainer returns the same session.

    Raises:
        SessionMisuse: the trainer is not attached, or its training has not begun.
    """
    attachment: TrainerAttachment | None = getattr(trainer, _ATTACHED, None)
    if attachment is None or attachment.session is None:
        raise SessionMisuse("the trainer has no session; call attach(trainer) and trainer.train() before")
    return attachment.session


def _check_options(trainer: Trainer) -> None:
    args = trainer.args
    unsupported = {
        "auto_find_batch_size": (
            "a restart of the loop with another batch size changes the steps",
            "Set per_device_train_batch_size to a size that fits",
        ),
        "ignore_data_skip": (
            "a resumed run would repeat samples",
            "Remove the option: Everstep continues at the next sample without reading the earlier ones",
        ),
        "enable_jit_checkpoint": (
            "its signal handler replaces the agreed stop of all ranks",
            "Remove the option: Everstep stores a checkpoint before an instance is reclaimed",
        ),
    }
    for option, (reason, alternative) in unsupported.items():
        if getattr(args, option, False):
            raise UnsupportedOption(f"TrainingArguments.{option}", reason, f"{alternative}.")
    if args.n_gpu > 1:
        raise UnsupportedOption(
            "DataParallel", f"one process trains on {args.n_gpu} GPUs", "Start one process per GPU, as Everstep does."
        )
    _check_class(trainer)
    accelerate.check_accelerator(trainer.accelerator)
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
        raise UnsupportedOption(
            kind.__name__,
            "it trains several steps on samples that it has generated, and no snapshot contains them",
            "Use a trainer that reads its samples from a dataset, such as SFTTrainer or DPOTrainer.",
        )


class TrainerAttachment:
    """Replaces methods of one trainer, and owns the trainer's session."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer: Any = trainer
        self._model = trainer.model
        self._modules = _modules_of(trainer)
        self.session: TrainingSession | None = None
        self._loop = TrainerLoopState(trainer)
        self._loader: Any = None
        self._prepared: tuple[Any, StepBatches] | None = None
        self._kept_step = 0
        """The newest step that this object reported to the session."""
        self._originals = {
            name: getattr(trainer, name)
            for name in (
                "train",
                "get_train_dataloader",
                "_init_training_state",
                "_prepare_for_training",
                "_run_epoch",
                "_finalize_training",
                "evaluate",
                "_save_checkpoint",
            )
        }
        for name in self._originals:
            setattr(trainer, name, getattr(self, name.removeprefix("_")))
        setattr(trainer, "_load_rng_state", _load_nothing)  # noqa: B010 — a method
        trainer.add_callback(_Callback(self))

    def train(self, resume_from_checkpoint: str | bool | None = None, *rest: Any, **more: Any) -> Any:
        """Run `Trainer.train`. A second call raises an error.

        Args:
            resume_from_checkpoint: None or False, because Everstep names the step to resume from.
            *rest: further positional arguments of `Trainer.train`.
            **more: further named arguments of `Trainer.train`.

        Returns:
            The `TrainOutput` of the trainer.

        Raises:
            UnsupportedOption: the script passes a checkpoint to resume from, or an argument of the trainer that the
                script has changed after `attach` prevents an exact resume.
            SessionMisuse: the trainer has trained already, or its model was replaced or changed after `attach`.
        """
        if resume_from_checkpoint:
            raise UnsupportedOption(
                "train(resume_from_checkpoint=…)",
                "Everstep names the step from which all ranks continue",
                "Remove it. Load weights of another run before you create the trainer.",
            )
        if self.session is not None:
            raise SessionMisuse("train() was already called for this trainer; create another trainer")
        if self._trainer.model is not self._model and self._trainer.model_init is None:
            raise SessionMisuse("the trainer's model was replaced after attach(); call attach() after the last change")
        if _modules_of(self._trainer) != self._modules and self._trainer.model_init is None:
            raise SessionMisuse("the trainer's model was changed after attach(); call attach() after the last change")
        _check_options(self._trainer)
        return self._originals["train"](None, *rest, **more)

    def get_train_dataloader(self) -> Any:
        """Return the trainer's loader, and store it for the session."""
        self._loader = self._originals["get_train_dataloader"]()
        return self._loader

    def init_training_state(
        self, max_steps: int, updates_per_epoch: int, epochs: int, resume: object, trial: object
    ) -> tuple[int, int]:
        """Prepare model and optimizer, create the session, and restore the step that the agent names.

        Args:
            max_steps: number of optimizer steps at the end of training.
            updates_per_epoch: number of optimizer steps of one epoch.
            epochs: number of epochs of the whole training.
            resume: the trainer's `resume_from_checkpoint`, which `train` has set to None.
            trial: the trial of a search of hyperparameters, or None.

        Returns:
            The number of finished epochs, and the number of batches that the current epoch has used.

        Raises:
            UnsupportedOption: the trainer runs a search of hyperparameters.
            CannotRelayout: the number of ranks has changed, and a step would use another number of samples, or an epoch
                would have another number of steps.
        """
        if trial is not None:
            raise UnsupportedOption(
                "hyperparameter_search()", "each trial is another training run", "Submit one job per trial."
            )
        trainer = self._trainer
        self._originals["_init_training_state"](max_steps, updates_per_epoch, epochs, resume, None)
        model, loader = self._originals["_prepare_for_training"](max_steps, self._loader, None)
        session = self.session = accelerate.keep(
            trainer.accelerator,
            model=model,
            optimizer=trainer.optimizer,
            scheduler=trainer.lr_scheduler,
            data=loader,
            extra={"trainer": self._loop},
        )
        session.set_target(max_steps)
        (stream,) = session.data.values()
        stream.batches_per_step = trainer.args.gradient_accumulation_steps
        self._loop.updates_per_epoch = updates_per_epoch if has_length(loader) else 0
        self._kept_step = session.restore()
        stream.check_step()
        # Restore the generators again at the first batch, because the trainer's callbacks may draw random numbers
        # before it.
        resume = functools.partial(rng.restore, rng.observe()) if self._kept_step else None
        batches = StepBatches(session, self._end_step, resume)
        self._prepared = model, batches
        if not self._kept_step:
            return 0, 0
        self._loop.apply_callbacks()
        trainer.state = self._loop.trainer_state()
        trainer.state.init_training_references(trainer, max_steps, epochs, None)
        # Do not repeat the evaluation that precedes the first step, because the first launch has already made it.
        trainer.args.eval_on_start = False
        if not has_length(loader):
            # If the loader has no length, the trainer cannot compute the epoch from the number of steps. Take the epoch
            # from the data stream, which counts the ends of the data.
            return stream.epoch, stream.consumed_count
        finished, updates = divmod(trainer.state.global_step, updates_per_epoch)
        if updates == 0:
            batches.begin_next_epoch()
        return finished, updates * trainer.args.gradient_accumulation_steps

    def prepare_for_training(self, *_: object) -> tuple[Any, StepBatches]:
        """Return the wrapped model and the batches that `init_training_state` prepared."""
        assert self._prepared is not None
        return self._prepared

    def run_epoch(self, **given: Any) -> None:
        """Run `Trainer._run_epoch` from the restored data position.

        Does nothing if training had ended at the restored step.
        """
        if self._loop.is_over:
            return
        is_inside = given["epoch"] == given["epochs_trained"] and given["steps_trained_in_current_epoch"] > 0
        self._originals["_run_epoch"](**{**given, "resume_from_checkpoint": _RESUMED if is_inside else None})

    def finalize_training(self, *given: Any, **more: Any) -> Any:
        """Report the last step and close the session, before the trainer loads its best model or writes results."""
        assert self.session is not None
        self._end_step()
        self.session.close()
        return self._originals["_finalize_training"](*given, **more)

    def evaluate(self, *given: Any, **more: Any) -> Any:
        """Run `Trainer.evaluate`, and declare this time to the session as the phase `eval`."""
        return self._in_phase("eval", self._originals["evaluate"], *given, **more)

    def save_checkpoint(self, *given: Any, **more: Any) -> Any:
        """Run `Trainer._save_checkpoint`, and declare this time to the session as the phase `checkpoint`."""
        return self._in_phase("checkpoint", self._originals["_save_checkpoint"], *given, **more)

    def begin(self, control: TrainerControl) -> None:
        """Restore the trainer's running sums, such as that of the losses, and its flag that training has ended.

        `_Callback` calls this right after the trainer's loop has reset the sums and the flag.
        """
        self._loop.apply_sums()
        control.should_training_stop = self._loop.is_over

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
        """Report the trainer's newest step to the session, unless it is reported already.

        Return whether all ranks stop now.
        """
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


def _modules_of(trainer: Any) -> tuple[torch.nn.Module, ...]:
    return () if trainer.model is None else modules_of(trainer.model)


def _load_nothing(_: object) -> None:
    """Do nothing, in place of `_load_rng_state`, because the session has already restored the random generators."""


class _Callback(TrainerCallback):  # type: ignore[misc]
    """Reports the start of the trainer's loop and each log entry to the trainer's `TrainerAttachment`.

    The attachment connects the trainer with Everstep, and detects other events by replacing methods of the trainer.
    """

    def __init__(self, attachment: TrainerAttachment) -> None:
        self._attachment = attachment

    def on_train_begin(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:  # noqa: ARG002
        """Restore the running sums, such as that of the losses, which the loop has just reset."""
        self._attachment.begin(control)

    def on_log(self, *_: Any, logs: dict[str, Any] | None = None, **__: Any) -> None:
        self._attachment.log(logs or {})


_trainer_module: Any = transformers.trainer
_skip_first_batches = _trainer_module.skip_first_batches


def _skip_nothing(loader: Any, count: int) -> Any:
    """Skip no batches of a `StepBatches`, because it starts at the restored data position.

    Skip `count` batches of any other loader.
    """
    return loader if isinstance(loader, StepBatches) else _skip_first_batches(loader, count)


_trainer_module.skip_first_batches = _skip_nothing
