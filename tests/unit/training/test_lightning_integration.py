"""The integration of Lightning refuses settings that it cannot resume before the first step, and names them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    Callback,
    LearningRateFinder,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, Strategy
from torch.utils.data import DataLoader, IterableDataset

from everstep.integrations.base import UnsupportedOption, metrics_of
from everstep.integrations.lightning import EverstepCallback
from everstep.integrations.lightning_checks import check_trainer
from everstep.integrations.lightning_loops import LightningLoopState
from everstep.training import CannotRelayout, SessionMisuse

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


class Line(LightningModule):
    """A linear model that logs its loss."""

    logs: dict[str, Any] = {}  # noqa: RUF012 — each subclass sets its own

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        rows: torch.Tensor = batch[0] if isinstance(batch, (list, tuple)) else batch
        loss: torch.Tensor = self.layer(rows).square().mean()
        self.log("train_loss", loss, **self.logs)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class LineOfIterator(Line):
    def training_step(self, dataloader_iter: Any) -> None:  # type: ignore[override]
        """Lightning passes an iterator to a step with this signature."""


class LineWithoutOptimizer(Line):
    def configure_optimizers(self) -> None:
        """Return no optimizer."""


class LineOfOneGraph(Line):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        optimizer.step = torch.compile(optimizer.step, fullgraph=True, backend="eager")
        return optimizer


class Endless(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield torch.ones(2)


def rows(count: int = 6) -> Any:
    return DataLoader(torch.ones(count, 2), batch_size=2)  # type: ignore[arg-type]


def trainer_with(*callbacks: Callback, kind: type[Trainer] = Trainer, **options: Any) -> Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    plain = {"accelerator": "cpu", "devices": 1, "max_steps": 4, "enable_model_summary": False}
    return kind(**{**quiet, **plain, **options}, callbacks=list(callbacks))


class ReplacedStrategy(Trainer):
    """A trainer whose strategy the test replaces.

    The test can thus use strategies with which Lightning creates no trainer on this machine.
    """

    replacement: Strategy | None = None

    @property
    def strategy(self) -> Strategy:
        return self.replacement or super().strategy


def assert_refused(named: str, call: Callable[[], object]) -> None:
    with pytest.raises(UnsupportedOption, match=re.escape(named)) as raised:
        call()
    assert re.search(r"\. [A-Z].*\.$", str(raised.value)), "the error ends with an alternative"


@pytest.mark.parametrize(
    "callback",
    [
        BackboneFinetuning(),
        BatchSizeFinder(),
        LearningRateFinder(),
        ModelPruning("l1_unstructured"),
        OnExceptionCheckpoint("."),
        StochasticWeightAveraging(1e-2),
    ],
    ids=lambda callback: type(callback).__name__,
)
def test_a_callback_that_prevents_a_resume_is_refused_by_name(callback: Callback) -> None:
    assert_refused(
        type(callback).__name__,
        lambda: check_trainer(trainer_with(callback, enable_checkpointing=True), Line(), EverstepCallback),
    )


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_time": "00:01:00:00"}, "max_time"),
        ({"val_check_interval": "00:01:00:00", "check_val_every_n_epoch": None}, "val_check_interval"),
        ({"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders_every_n_epochs"),
        ({"strategy": "ddp_spawn", "devices": 2}, "DDPStrategy(start_method"),
        ({"precision": "64-true"}, "precision='64-true'"),
        ({"precision": "16-true"}, "precision='16-true'"),
    ],
)
def test_an_option_that_prevents_a_resume_is_refused_by_name(options: dict[str, Any], named: str) -> None:
    assert_refused(named, lambda: check_trainer(trainer_with(**options), Line(), EverstepCallback))


class OtherStrategy:
    """A strategy that Everstep does not know."""


class TwoTensorRanks(ModelParallelStrategy):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(data_parallel_size=1, tensor_parallel_size=2)


@pytest.mark.parametrize(
    "strategy", [FSDPStrategy(), OtherStrategy(), TwoTensorRanks()], ids=lambda strategy: type(strategy).__name__
)
def test_a_strategy_without_tests_is_refused_by_name(strategy: Any) -> None:
    trainer: Any = trainer_with(kind=ReplacedStrategy)
    trainer.replacement = strategy
    assert_refused(type(strategy).__name__, lambda: check_trainer(trainer, Line(), EverstepCallback))


def test_a_step_that_reads_batches_itself_is_refused() -> None:
    assert_refused("dataloader_iter", lambda: check_trainer(trainer_with(), LineOfIterator(), EverstepCallback))


def test_a_trainer_of_another_package_is_refused() -> None:
    other = type("Trainer", (), {"__module__": "pytorch_lightning.trainer"})()
    assert_refused("pytorch_lightning", lambda: check_trainer(other, Line(), EverstepCallback))


@pytest.mark.parametrize(
    ("module", "data", "named"),
    [
        (Line(), [rows(), rows()], "2 training loaders"),
        (Line(), DataLoader(Endless(), batch_size=2), "without a length"),
        (LineWithoutOptimizer(), rows(), "configure_optimizers"),
        (LineOfOneGraph(), rows(), "torch.compile(optimizer.step, fullgraph=True)"),
    ],
)
def test_data_that_cannot_be_resumed_is_refused_by_name(
    module: Line, data: Iterable[Any], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERSTEP_AGENT_SOCKET", "/nowhere")
    assert_refused(named, lambda: trainer_with(EverstepCallback()).fit(module, data))


def test_outside_a_job_nothing_is_refused() -> None:
    callback = EverstepCallback()
    trainer = trainer_with(callback)
    trainer.fit(Line(), [rows(), rows()])
    assert trainer.global_step == 4
    callback.session.log(loss=1.0)
    assert callback.session.step == 0, "the trainer trained without Everstep"


def test_outside_a_job_lightning_loads_its_own_checkpoint(tmp_path: Path) -> None:
    trainer = trainer_with(max_steps=2)
    trainer.fit(Line(), rows())
    trainer.save_checkpoint(tmp_path / "line.ckpt")
    callback = EverstepCallback()
    again = trainer_with(callback)
    again.fit(Line(), rows(), ckpt_path=str(tmp_path / "line.ckpt"))
    assert (again.global_step, callback.session.step) == (4, 3)


def test_a_value_with_a_process_group_of_its_own_is_refused() -> None:
    class LineOfGroup(Line):
        logs = {"sync_dist_group": object(), "on_epoch": True}  # noqa: RUF012 — a constant of this class

    callback = EverstepCallback()
    trainer = trainer_with(callback)
    trainer.fit(LineOfGroup(), rows(14))
    assert_refused("sync_dist_group", LightningLoopState(trainer, 7).state_dict)


def test_calls_in_the_wrong_order_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    callback = EverstepCallback()
    with pytest.raises(SessionMisuse, match="no session"):
        assert callback.session
    with pytest.raises(SessionMisuse, match="more than one"):
        check_trainer(trainer_with(EverstepCallback(), Other()), Line(), EverstepCallback)
    trainer, module = trainer_with(callback), Line()
    trainer.fit(module, rows())
    assert callback.session.step == 5
    monkeypatch.setenv("EVERSTEP_AGENT_SOCKET", "/nowhere")
    with pytest.raises(SessionMisuse, match="already called"):
        trainer.fit(module, rows())


class Other(EverstepCallback):
    """A subclass of Everstep's callback with a state key of its own. Lightning refuses two callbacks with one key."""


def test_another_number_of_batches_is_refused() -> None:
    trainer = trainer_with(EverstepCallback())
    trainer.fit(Line(), rows())
    with pytest.raises(CannotRelayout, match="had 3 batches per rank and now has 2"):
        LightningLoopState(trainer, 2).load_state_dict(LightningLoopState(trainer, 3).state_dict())
    before, after = LightningLoopState(trainer, 3), LightningLoopState(trainer, 3)
    before.samples_at_once, after.samples_at_once = 12, 9
    with pytest.raises(CannotRelayout, match="all ranks together read 12 samples at a time and now read 9"):
        after.load_state_dict(before.state_dict())


def test_logged_values_are_numbers_in_groups() -> None:
    values = {
        "val_loss": 1.0,
        "train_acc": torch.ones(()),
        "/rate": 3,
        "name": "x",
        "flag": True,
        "many": torch.ones(2),
    }
    assert metrics_of(values, {"val_": "val", "train_": "train"}, "train") == {
        "val/loss": 1.0,
        "train/acc": torch.ones(()),
        "train/rate": 3,
    }


def test_without_an_agent_an_epoch_may_be_short_and_validation_runs() -> None:
    class Validated(Line):
        validations = 0

        def validation_step(self, batch: Any, index: int) -> None:
            self.validations += not self.trainer.sanity_checking

    module, callback = Validated(), EverstepCallback()
    trainer = trainer_with(callback, max_steps=-1, max_epochs=3, limit_train_batches=2)
    trainer.fit(module, rows(), rows(2))
    assert (trainer.global_step, trainer.current_epoch, module.validations) == (6, 3, 3)
    assert callback.session.data["data"].epoch == 3
