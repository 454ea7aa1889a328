"""The integration of transformers refuses settings that it cannot resume before the first step, and names them."""

from __future__ import annotations

import importlib.metadata
import re
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState, TrainerControl, TrainerState

import everstep.integrations.transformers as integration
from everstep.integrations import versions
from everstep.integrations.errors import UnsupportedOption, UnsupportedVersion
from everstep.training import SessionMisuse


class FakeTrainer:
    """Has the attributes of a trainer that `attach` reads, but no model."""

    def __init__(self, **options: Any) -> None:
        self.args = SimpleNamespace(**{"n_gpu": 1, "device": "cpu", **options})
        self.accelerator = SimpleNamespace(dispatch_batches=options.get("dispatch_batches"), scaler=None)
        self.state = TrainerState()
        self.control = TrainerControl()
        self.callback_handler = SimpleNamespace(callbacks=[])
        self.model, self.model_init, self.current_flos = object(), None, 0.0

    def add_callback(self, callback: TrainerCallback) -> None:
        self.callback_handler.callbacks.append(callback)

    def train(self, *_: Any) -> str:
        return "trained"

    def __getattr__(self, name: str) -> Any:
        if name in ("get_train_dataloader", "evaluate") or name.startswith(("_init", "_prep", "_run", "_fin", "_save")):
            return lambda *_, **__: None
        raise AttributeError(name)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"ignore_data_skip": True}, "ignore_data_skip"),
        ({"enable_jit_checkpoint": True}, "enable_jit_checkpoint"),
        ({"n_gpu": 2}, "DataParallel"),
        ({"dispatch_batches": True}, "dispatch_batches"),
    ],
)
def test_an_option_that_prevents_a_resume_is_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedOption, match=named) as raised:
        integration.attach(FakeTrainer(**options))  # type: ignore[arg-type]
    assert re.search(r"\. [A-Z][^.]*\.$", str(raised.value)), "the error ends with an alternative"


def test_a_checkpoint_of_the_trainer_is_refused() -> None:
    trainer = FakeTrainer()
    integration.attach(trainer)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedOption, match="resume_from_checkpoint"):
        trainer.train("output/checkpoint-500")
    assert trainer.train(False) == "trained"


def test_calls_in_the_wrong_order_are_refused() -> None:
    trainer = FakeTrainer()
    integration.attach(trainer)  # type: ignore[arg-type]
    with pytest.raises(SessionMisuse, match="already called"):
        integration.attach(trainer)  # type: ignore[arg-type]
    with pytest.raises(SessionMisuse, match="no session"):
        integration.session_of(trainer)  # type: ignore[arg-type]
    trainer.model = object()
    with pytest.raises(SessionMisuse, match="model was replaced"):
        trainer.train()
    used = FakeTrainer()
    used.state.global_step = 7
    with pytest.raises(SessionMisuse, match="trained 7 steps"):
        integration.attach(used)  # type: ignore[arg-type]


@pytest.mark.parametrize("package", sorted(package for package in versions.TESTED if package != "torchtitan"))
def test_another_major_version_is_refused_and_another_minor_version_warns(
    package: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    major, minor = versions.TESTED[package].split(".")
    versions.check_version(package)
    assert not caplog.messages, "the installed version is the tested one"
    monkeypatch.setattr(importlib.metadata, "version", lambda _: f"{major}.{int(minor) + 1}.0")
    versions.check_version(package)
    assert package in caplog.text
    monkeypatch.setattr(importlib.metadata, "version", lambda _: f"{int(major) + 1}.0.0")
    with pytest.raises(UnsupportedVersion, match=f"{package}=={versions.TESTED[package]}"):
        versions.check_version(package)


@pytest.mark.parametrize("installed", ["0.2.2", "0.4.0", "1.3.0"])
def test_before_version_1_another_minor_version_is_refused(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    versions.check_version("torchtitan")
    monkeypatch.setattr(importlib.metadata, "version", lambda _: installed)
    with pytest.raises(UnsupportedVersion, match=f"torchtitan {installed} is installed"):
        versions.check_version("torchtitan")


def test_the_state_of_the_loop_survives_as_plain_values() -> None:
    class Patience(TrainerCallback, ExportableState):
        def __init__(self, count: int) -> None:
            self.count = count

        def state(self) -> dict[str, Any]:
            return {"args": {"count": self.count}, "attributes": {}}

    trainer: Any = FakeTrainer()
    trainer.callback_handler.callbacks = [Patience(3), Patience(4)]
    trainer.state.global_step, trainer.state.log_history = 5, [{"loss": 0.1 + 0.2, "step": 4}]
    sums = {"_total_loss_scalar": 1.5, "_globalstep_last_logged": 4, "current_flos": 1e18}
    vars(trainer).update(sums)
    loop = integration.LoopState(trainer)
    first = loop.state_dict()
    trainer.state.log_history.append({"loss": float("inf"), "step": 6})
    second = loop.state_dict()
    assert first["history"] != second["history"]
    resumed: Any = FakeTrainer()
    other = integration.LoopState(resumed)
    other.load_state_dict(second)
    state = other.trainer_state()
    assert (state.global_step, state.log_history) == (5, trainer.state.log_history)
    assert [each["args"]["count"] for each in state.stateful_callbacks["Patience"]] == [3, 4]
    other.apply_sums()
    assert {name: vars(resumed)[name] for name in sums} == sums
