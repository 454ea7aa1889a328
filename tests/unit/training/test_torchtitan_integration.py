"""The checkpoint manager for torchtitan refuses what it cannot resume, and calls the session in the right order."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import everstep.training
from everstep.integrations import torchtitan as integration
from everstep.integrations.base import UnsupportedOption
from everstep.integrations.torchtitan import CheckpointManager
from everstep.training import SessionMisuse


class FakeSession:
    """A fake session that records calls and stops at step `stop_at`."""

    def __init__(self, calls: list[str], logged: dict[str, float], restored: int, stop_at: int) -> None:
        self.calls, self.logged, self.step, self.stop_at, self.restored = calls, logged, restored, stop_at, restored
        self.data = {"data": "stream"}

    def restore(self) -> int:
        return self.restored

    def set_target(self, step: int) -> None:
        self.calls.append(f"target {step}")

    def boundary(self) -> Any:
        self.step += 1
        self.calls.append(f"step {self.step}")
        return SimpleNamespace(stop=self.step == self.stop_at)

    def fence(self) -> None:
        self.calls.append("fence")

    def phase(self, name: str) -> Any:
        return _Phase(self.calls, name)

    def log(self, **values: float) -> None:
        self.logged |= values

    def close(self) -> None:
        if "closed" not in self.calls:
            self.calls.append("closed")


class _Phase:
    def __init__(self, calls: list[str], name: str) -> None:
        self.calls, self.name = calls, name

    def __enter__(self) -> None:
        self.calls.append(f"begin {self.name}")

    def __exit__(self, *_: object) -> None:
        self.calls.append(f"end {self.name}")


class FakeTrainer:
    """A fake trainer with torchtitan's loop and the attributes that a manager reads."""

    def __init__(
        self,
        calls: list[str],
        *,
        steps: int = 3,
        used: Sequence[str] = (),
        model_parts: Sequence[str] = ("model",),
        **options: Any,
    ) -> None:
        training = SimpleNamespace(steps=steps, enable_cpu_offload="enable_cpu_offload" in used)
        self.config = SimpleNamespace(training=training, validator=SimpleNamespace(enable=True))
        self.metrics_processor = SimpleNamespace(logger=SimpleNamespace(log=lambda *_: calls.append("logged")))
        self.validator = SimpleNamespace(validate=lambda step: calls.append(f"validated {step}"))
        self.step, self.dataloader = 0, "loader"
        self.optimizers: list[Any] = ["optimizer"]
        self.checkpointer = CheckpointManager.Config(**options).build(
            dataloader="loader",
            model_parts=list(model_parts),
            optimizers=self.optimizers,
            lr_schedulers=["first", "second"],
            states={"train_state": self},
            sd_adapter=None,
            base_folder="output",
        )

    def train(self) -> None:
        self.checkpointer.load(step=-1)
        while self.should_continue_training():
            self.step += 1
            self.checkpointer.maybe_wait_for_staging()
            self.metrics_processor.logger.log({"loss": 0.5, "name": "llama"}, self.step)
            self.checkpointer.save(self.step, last_step=self.step == self.config.training.steps)
            self.validator.validate(self.step)

    def should_continue_training(self) -> bool:
        return self.step < self.config.training.steps

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "ntokens_seen": 7}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


class Place:
    """Builds trainers whose managers use a fake session, and a fake of torchtitan's own manager."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.restored, self.stop_at = 0, -1
        self.registered: dict[str, Any] = {}
        self.logged: dict[str, float] = {}
        monkeypatch.setattr(CheckpointManager, "running", None)
        monkeypatch.setattr(everstep.training, "init", self._init)
        monkeypatch.setattr(integration.dcp.CheckpointManager, "__init__", lambda *_, **__: None)
        monkeypatch.setattr(integration.dcp.CheckpointManager, "load", lambda _: self.calls.append("initial weights"))
        save = lambda _, step, last_step: self.calls.append(f"final checkpoint {step} {last_step}")  # noqa: E731
        monkeypatch.setattr(integration.dcp.CheckpointManager, "save", save)

    def trainer(self, **options: Any) -> FakeTrainer:
        return FakeTrainer(self.calls, **options)

    def _init(self, **registered: Any) -> FakeSession:
        self.registered = registered
        if self.restored:
            registered["extra"]["train_state"].load_state_dict({"step": self.restored, "ntokens_seen": 7})
        return FakeSession(self.calls, self.logged, self.restored, self.stop_at)


@pytest.fixture(name="in_a_job")
def made_in_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the integration refuse scripts, as in a job of Everstep."""
    monkeypatch.setenv("EVERSTEP_AGENT_SOCKET", "/nowhere")


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(monkeypatch)


@pytest.mark.parametrize(
    "options",
    [
        {"interval": 500},
        {"async_mode": "async"},
        {"async_mode": "async_with_pinned_mem"},
        {"load_step": 100},
        {"load_only": True},
        {"keep_latest_k": 3},
        {"exclude_from_loading": ["dataloader"]},
        {"enable_first_step_checkpoint": True},
        {"create_seed_checkpoint": True},
        {"initial_load_path": "/weights", "initial_load_model_only": False},
    ],
    ids=lambda options: "_".join(map(str, options.values())),
)
@pytest.mark.usefixtures("in_a_job")
def test_a_conflicting_option_is_refused_by_name(options: dict[str, Any]) -> None:
    named = list(options)[-1]
    with pytest.raises(UnsupportedOption, match=rf"checkpoint\.{named}: ") as raised:
        CheckpointManager.Config(**options)
    assert re.search(r"\. [A-Z][^.]*", str(raised.value)), "the error ends with an alternative"
    config = CheckpointManager.Config()
    for option, value in options.items():
        setattr(config, option, value)
    with pytest.raises(UnsupportedOption, match=named):
        config.build(dataloader=None, model_parts=[], optimizers=[], lr_schedulers=[], states={}, sd_adapter=None)


@pytest.mark.usefixtures("in_a_job")
def test_parameters_in_host_memory_are_refused_when_training_begins(place: Place) -> None:
    with pytest.raises(UnsupportedOption, match=r"^training\.enable_cpu_offload: .*\. Set it to False"):
        place.trainer(used=["enable_cpu_offload"]).train()


def test_outside_a_job_a_refused_trainer_trains_without_everstep(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = place.trainer(steps=2, used=["enable_cpu_offload"], interval=500, initial_load_path="/weights")
    trainer.train()
    assert trainer.step == 2
    assert not place.registered
    assert place.calls[0] == "initial weights"
    assert place.calls.count("final checkpoint 2 True") == 1
    assert all(option in caplog.text for option in ("checkpoint.interval", "training.enable_cpu_offload"))


@pytest.mark.usefixtures("in_a_job")
def test_an_optimizer_of_one_graph_is_refused_when_training_begins(place: Place) -> None:
    trainer = place.trainer()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    trainer.optimizers[0] = optimizer
    optimizer.step = torch.compile(optimizer.step, fullgraph=True, backend="eager")  # type: ignore[method-assign]
    with pytest.raises(UnsupportedOption, match="fullgraph=True"):
        trainer.train()
    assert CheckpointManager.running is None
    assert not place.registered


def test_a_foreign_trainer_is_refused(place: Place) -> None:
    with pytest.raises(SessionMisuse, match="trainer is not in states"):
        CheckpointManager.Config().build(
            dataloader=None, model_parts=[], optimizers=[], lr_schedulers=[], states={}, sd_adapter=None
        )


def test_each_step_ends_after_its_validation_and_the_last_one_after_the_final_checkpoint(place: Place) -> None:
    trainer = place.trainer(steps=2)
    trainer.train()
    first = ["fence", "logged", "begin eval", "validated 1", "end eval", "step 1"]
    save = ["begin checkpoint", "final checkpoint 2 True", "end checkpoint"]
    last = ["fence", "logged", *save, "begin eval", "validated 2", "end eval", "step 2", "closed"]
    assert place.calls == ["target 2", *first, *last]
    assert place.logged == {"loss": 0.5}
    assert trainer.dataloader == "stream"
    assert place.registered["model"] == "model"
    assert place.registered["optimizer"] == "optimizer"
    assert place.registered["scheduler"] == {"0": "first", "1": "second"}
    assert place.registered["data"] == "loader"
    assert place.registered["trusted_optimizers"] == ()


def test_a_pipeline_registers_all_stages_of_its_rank(place: Place) -> None:
    trainer = place.trainer(model_parts=["first", "third"])
    trainer.checkpointer.load()
    assert place.registered["model"] == {"0": "first", "1": "third"}


def test_all_ranks_stop_at_the_agreed_step(place: Place) -> None:
    place.stop_at = 2
    trainer = place.trainer(steps=9)
    trainer.train()
    assert trainer.step == 2
    assert place.calls[-2:] == ["step 2", "closed"]


def test_a_restored_trainer_continues_after_the_restored_step(place: Place) -> None:
    place.restored = 5
    trainer = place.trainer(steps=6, initial_load_path="/weights")
    trainer.train()
    assert [call for call in place.calls if call.startswith("step")] == ["step 6"]
    assert "initial weights" not in place.calls
    assert not place.trainer(enable=False).checkpointer.load()


def test_initial_weights_are_loaded_at_the_first_start_only(place: Place) -> None:
    place.trainer(steps=1, initial_load_path="/weights").train()
    assert place.calls.count("initial weights") == 1


def test_a_step_without_data_is_not_part_of_the_state(place: Place) -> None:
    """The saved state does not count a step that got no data.

    The trainer counts a step before it requests the step's data, which may have ended.
    """
    trainer = place.trainer(steps=2)
    trainer.train()
    trainer.step += 1
    assert place.registered["extra"]["train_state"].state_dict() == {"step": 2, "ntokens_seen": 7}


def test_calls_in_the_wrong_order_are_refused(place: Place) -> None:
    trainer = place.trainer()
    for call in (lambda: trainer.checkpointer.save(1), trainer.checkpointer.maybe_wait_for_staging):
        with pytest.raises(SessionMisuse, match="must call load"):
            call()
    trainer.checkpointer.load()
    with pytest.raises(SessionMisuse, match="already called for this trainer"):
        trainer.checkpointer.load()
    other = place.trainer()
    with pytest.raises(SessionMisuse, match="another trainer of this process"):
        other.checkpointer.load()
    with pytest.raises(SessionMisuse, match="should_continue_training"):
        trainer.checkpointer.save(2)
    trainer.checkpointer.close()
    other.checkpointer.load()
