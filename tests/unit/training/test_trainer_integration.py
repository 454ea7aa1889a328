"""The integration of transformers refuses settings that it cannot resume before the first step, and names them."""

from __future__ import annotations

import importlib.metadata
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import DistributedType, ParallelismConfig
from accelerate.data_loader import DataLoaderDispatcher
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState, TrainerControl, TrainerState

import everstep.integrations.transformers as integration
from everstep.integrations import trainer_state
from everstep.integrations.accelerator import keep
from everstep.integrations.base import UnsupportedOption, check_engine, check_optimizer
from everstep.training import SessionMisuse, versions
from everstep.training.errors import UnsupportedVersion


def fake_accelerator(**attributes: Any) -> SimpleNamespace:
    """Return an object with the attributes that `check_accelerator` reads."""
    plugin = SimpleNamespace(
        fsdp_version=attributes.pop("fsdp_version", 2), cpu_offload=attributes.pop("cpu_offload", OffloadPolicy())
    )
    plain = {
        "dispatch_batches": None,
        "distributed_type": DistributedType.NO,
        "parallelism_config": None,
        "mixed_precision": "no",
    }
    return SimpleNamespace(**{**plain, "scaler": None, "state": SimpleNamespace(fsdp_plugin=plugin), **attributes})


@pytest.fixture(autouse=True)
def in_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the script believe that an agent runs it. Elsewhere, nothing is refused."""
    monkeypatch.setenv("EVERSTEP_AGENT_SOCKET", "/nowhere")


class FakeTrainer(Trainer):
    """A fake trainer with the attributes that `attach` reads, but without a model."""

    def __init__(self, accelerator: Any = None, **options: Any) -> None:
        self.args = SimpleNamespace(
            **{"n_gpu": 1, "device": "cpu", "logging_steps": 4, "eval_steps": 4, "save_steps": 4, **options}
        )
        self.accelerator = accelerator or fake_accelerator()
        self.optimizer = options.get("optimizer")
        self.state = TrainerState()
        self.control = TrainerControl()
        self.callback_handler = SimpleNamespace(callbacks=[])
        self.model, self.model_init, self.current_flos = torch.nn.Sequential(torch.nn.Linear(1, 1)), None, 0.0

    def add_callback(self, callback: TrainerCallback) -> None:
        self.callback_handler.callbacks.append(callback)

    def remove_callback(self, callback: TrainerCallback) -> None:
        self.callback_handler.callbacks.remove(callback)

    def train(self, *given: Any, **more: Any) -> str:
        return f"trained {[*given, *more]}"


class OtherLoop(FakeTrainer):
    """A trainer whose class replaces a part of the training loop."""

    def _run_epoch(self, *_: Any, **__: Any) -> None:
        """Train in another way."""


class Generates(FakeTrainer):
    """A trainer that trains several steps on samples that it has generated, as TRL's GRPOTrainer does."""

    def __init__(self) -> None:
        super().__init__()
        self._buffered_inputs = None


def compiled_optimizer(is_full_graph: bool) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.step = torch.compile(optimizer.step, fullgraph=is_full_graph, backend="eager")
    return optimizer


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"ignore_data_skip": True}, "ignore_data_skip"),
        ({"enable_jit_checkpoint": True}, "enable_jit_checkpoint"),
        ({"n_gpu": 2}, "DataParallel"),
        ({"optimizer": compiled_optimizer(is_full_graph=True)}, "fullgraph=True"),
    ],
)
def test_an_option_that_prevents_a_resume_is_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedOption, match=named) as raised:
        integration.attach(FakeTrainer(**options))
    assert named in raised.value.option
    check_alternative(raised.value)


@pytest.mark.parametrize("kind", integration.UNTESTED_TUNERS)
def test_a_tuner_without_a_test_is_refused_by_name(kind: str) -> None:
    from peft import PeftModel, PeftType

    trainer = FakeTrainer()
    trainer.model.__class__ = type("Tuned", (torch.nn.Sequential,), {"__module__": PeftModel.__module__})
    trainer.model.peft_config = {"default": SimpleNamespace(peft_type=PeftType(kind))}  # type: ignore[assignment]
    with pytest.raises(UnsupportedOption, match=f"^peft_type={kind}: ") as raised:
        integration.attach(trainer)
    check_alternative(raised.value)
    trainer.model.peft_config["default"].peft_type = PeftType.LORA  # type: ignore[index, union-attr]
    integration.attach(trainer)


def check_alternative(error: UnsupportedOption) -> None:
    """Check that the message ends with a sentence, which names an alternative."""
    assert re.search(r"\. [A-Z].*\.$", str(error))


@pytest.mark.parametrize(
    ("attributes", "named"),
    [
        ({"dispatch_batches": True}, "dispatch_batches"),
        ({"distributed_type": DistributedType.FSDP, "fsdp_version": 1}, "fsdp_version=1"),
        ({"distributed_type": DistributedType.FSDP, "cpu_offload": CPUOffloadPolicy()}, "cpu_offload"),
        ({"distributed_type": DistributedType.MEGATRON_LM}, "MEGATRON_LM"),
        ({"parallelism_config": ParallelismConfig(tp_size=2)}, "parallelism_config"),
        ({"mixed_precision": "fp8"}, "mixed_precision='fp8'"),
    ],
)
def test_a_strategy_without_tests_is_refused_by_name(attributes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedOption, match=named) as raised:
        integration.attach(FakeTrainer(fake_accelerator(**attributes)))
    assert named in raised.value.option
    check_alternative(raised.value)


def test_fsdp_2_and_a_compiled_step_with_graph_breaks_are_accepted() -> None:
    accelerator = fake_accelerator(distributed_type=DistributedType.FSDP, fsdp_version=2)
    integration.attach(FakeTrainer(accelerator, optimizer=compiled_optimizer(is_full_graph=False)))


@pytest.mark.parametrize(("kind", "named"), [(OtherLoop, r"OtherLoop\._run_epoch"), (Generates, "Generates")])
def test_a_trainer_with_another_loop_is_refused_by_name(kind: type[FakeTrainer], named: str) -> None:
    with pytest.raises(UnsupportedOption, match=named) as raised:
        integration.attach(kind())
    check_alternative(raised.value)


def test_the_compiled_step_of_an_unwrapped_optimizer_is_refused() -> None:
    with pytest.raises(UnsupportedOption, match="fullgraph=True") as raised:
        check_optimizer(compiled_optimizer(is_full_graph=True))
    check_alternative(raised.value)


def test_a_stream_that_rank_0_reads_for_all_ranks_is_refused() -> None:
    """A data loader in which rank 0 reads the stream for all ranks is refused.

    An accelerator chooses such a loader for an IterableDataset unless `dispatch_batches` is False.
    """
    loader = object.__new__(DataLoaderDispatcher)
    with pytest.raises(UnsupportedOption, match="dispatch_batches") as raised:
        keep(fake_accelerator(num_processes=2), model=None, optimizer=None, scheduler=None, data=loader, extra={})
    check_alternative(raised.value)


def test_outside_a_job_nothing_is_refused(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("EVERSTEP_AGENT_SOCKET")
    trainer = OtherLoop()
    integration.attach(trainer)
    assert "_run_epoch: it replaces a part" in caplog.text
    assert trainer.train("checkpoint") == "trained ['checkpoint']"
    session = integration.session_of(trainer)
    with session.phase("eval"):
        session.log(loss=1.0)


def test_outside_a_job_the_trainer_loads_its_own_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EVERSTEP_AGENT_SOCKET")
    trainer = FakeTrainer()
    integration.attach(trainer)
    assert trainer.train(resume_from_checkpoint=True) == "trained [True]"
    assert trainer.callback_handler.callbacks == [], "the trainer is as before"


def test_a_search_of_hyperparameters_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = FakeTrainer()
    integration.attach(trainer)
    with pytest.raises(UnsupportedOption, match="one job per trial"):
        trainer.train(trial="first")
    monkeypatch.delenv("EVERSTEP_AGENT_SOCKET")
    assert trainer.train(trial="first") == "trained [None, 'trial']"


def test_calls_in_the_wrong_order_are_refused() -> None:
    trainer = FakeTrainer()
    integration.attach(trainer)
    with pytest.raises(SessionMisuse, match=r"already called for this trainer\. Remove the second call"):
        integration.attach(trainer)
    with pytest.raises(SessionMisuse, match="no session"):
        integration.session_of(trainer)
    trainer.model = torch.nn.Linear(1, 1)
    with pytest.raises(SessionMisuse, match="model was replaced"):
        trainer.train()
    used = FakeTrainer()
    used.state.global_step = 7
    with pytest.raises(SessionMisuse, match=r"trained 7 steps\. Call attach\(\) before train\(\)"):
        integration.attach(used)


def test_a_part_of_the_model_that_is_replaced_after_attach_is_refused() -> None:
    trainer = FakeTrainer()
    integration.attach(trainer)
    assert trainer.train() == "trained [None]"
    trainer.model[0] = torch.nn.Linear(1, 1)
    with pytest.raises(SessionMisuse, match=r"model was changed after attach\(\); call attach\(\) after"):
        trainer.train()


def test_an_option_that_the_script_sets_after_attach_is_refused() -> None:
    trainer = FakeTrainer()
    integration.attach(trainer)
    trainer.args.ignore_data_skip = True
    with pytest.raises(UnsupportedOption, match="ignore_data_skip"):
        trainer.train()


def test_an_adapter_of_an_untested_version_of_peft_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = FakeTrainer()
    trainer.model = type("PeftModel", (torch.nn.Module,), {"__module__": "peft.peft_model"})()
    installed = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.99.0" if name == "peft" else installed(name))
    with pytest.raises(UnsupportedVersion, match=r"peft 0\.99\.0 is installed"):
        integration.attach(trainer)


def test_an_untested_version_of_deepspeed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = FakeTrainer(fake_accelerator(distributed_type=DistributedType.DEEPSPEED))
    installed = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.0.0" if name == "deepspeed" else installed(name))
    with pytest.raises(UnsupportedVersion, match=r"deepspeed 1\.0\.0 is installed"):
        integration.attach(trainer)


@pytest.mark.parametrize(("device", "is_refused"), [("cpu", True), ("nvme", True), ("none", False)])
def test_parameters_that_deepspeed_keeps_in_host_memory_are_refused(device: str, is_refused: bool) -> None:
    engine = SimpleNamespace(zero_offload_param=lambda: SimpleNamespace(device=device))
    if not is_refused:
        check_engine(engine)
        return
    with pytest.raises(UnsupportedOption, match="offload_param") as raised:
        check_engine(engine)
    check_alternative(raised.value)


@pytest.mark.parametrize(
    "package", sorted(package for package, version in versions.TESTED.items() if not version.startswith("0."))
)
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


@pytest.mark.parametrize("package", sorted(package for package, own in versions.TESTED.items() if own.startswith("0.")))
@pytest.mark.parametrize("change", [-1, 1, None])
def test_before_version_1_another_minor_version_is_refused(
    package: str, change: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    minor = int(versions.TESTED[package].split(".")[1])
    installed = "1.3.0" if change is None else f"0.{minor + change}.0"
    versions.check_version(package)
    monkeypatch.setattr(importlib.metadata, "version", lambda _: installed)
    with pytest.raises(UnsupportedVersion, match=f"{package} {installed} is installed"):
        versions.check_version(package)


class Patience(TrainerCallback, ExportableState):
    def __init__(self, count: int) -> None:
        self.count = count

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"count": self.count}}


def trainer_with(*callbacks: TrainerCallback) -> Any:
    trainer: Any = FakeTrainer()
    trainer.callback_handler.callbacks = list(callbacks)
    return trainer


def test_the_state_of_the_loop_survives_as_plain_values() -> None:
    trainer = trainer_with(Patience(0), Patience(0))
    loop = trainer_state.TrainerLoopState(trainer)
    loop.apply()
    trainer.state.global_step, trainer.state.log_history = 5, [{"loss": 0.1 + 0.2, "step": 4}]
    for each, count in zip(trainer.callback_handler.callbacks, (3, 4), strict=True):
        each.count = count
    sums = {"_total_loss_scalar": 1.5, "_globalstep_last_logged": 4, "current_flos": 1e18}
    vars(trainer).update(sums)
    first = loop.state_dict()
    trainer.state.log_history.append({"loss": float("inf"), "step": 6})
    second = loop.state_dict()
    assert first["history"] != second["history"]
    resumed = trainer_with(Patience(0), Patience(0))
    other = trainer_state.TrainerLoopState(resumed)
    other.load_state_dict(second)
    other.apply()
    assert [each.count for each in resumed.callback_handler.callbacks] == [3, 4]
    state = other.trainer_state()
    assert (state.global_step, state.log_history) == (5, trainer.state.log_history)
    assert [each["attributes"]["count"] for each in state.stateful_callbacks["Patience"]] == [3, 4]
    assert "TrainerControl" in state.stateful_callbacks
    assert {name: vars(resumed)[name] for name in sums} == sums


@pytest.mark.parametrize(
    ("stopped_early", "step", "max_steps", "is_over"),
    [(False, 5, 9, False), (True, 5, 9, True), (False, 9, 9, True), (True, 9, 12, False)],
)
def test_a_loop_is_over_after_an_early_stop_and_at_its_last_step(
    stopped_early: bool, step: int, max_steps: int, is_over: bool
) -> None:
    """A trainer sets its flag to stop also at its last step. A launch with more steps continues then."""
    trainer = trainer_with()
    trainer.control.should_training_stop = stopped_early
    trainer.state.global_step, trainer.state.max_steps = step, 9
    loop = trainer_state.TrainerLoopState(trainer)
    loop.max_steps = max_steps
    assert not loop.is_over, "nothing is restored"
    loop.load_state_dict(loop.state_dict())
    assert loop.is_over == is_over


def test_the_bytes_of_a_history_depend_on_its_entries_only() -> None:
    entries = [{"loss": 1 / number, "step": number} for number in range(1, 200)]
    growing, resumed = trainer_state.History(), trainer_state.History()
    for count in range(len(entries) + 1):
        data = growing.encode(entries[:count])
        assert trainer_state.History.decode(data) == entries[:count]
    assert resumed.encode(entries) == data
    assert growing.encode(entries) is data, "an unchanged history is not encoded again"
    assert len(data) < len(str(entries)) / 2
