"""Trainers of transformers and TRL are disturbed, and resumed in new processes.

Their weights, optimizer, schedule, scaler, logged values and random draws equal those of an undisturbed run bit for
bit. `test_matrix.py` combines parallelism, precision and accumulation.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from everstep.protocol.rehearsals import RehearsalVerdict
from everstep.protocol.slot import HEADER_BYTES, SlotIndex, TensorEntry, unpack_header, unpack_index
from tests.integration.training import kills
from tests.integration.training.fake_agent import FakeAgent
from tests.integration.training.faults import FAULTS, UNTIL, Training, check_equal
from tests.integration.training.test_matrix import FSDP, zero
from tests.integration.training.trainer_scripts import PREFERENCES, SIMPLE_TUNERS, TUNERS
from tests.warm_parent import WarmParent

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

TRL = ("trl.trainer.sft_trainer", "peft", "transformers.models.llama.modeling_llama")
PEFT = ("peft",)
T5 = ("transformers.models.t5.modeling_t5", "transformers.trainer_seq2seq")


def check(training: Training, fault: str) -> list[dict[str, Any]]:
    """Disturb and resume a run, compare it with an undisturbed run, and return the results of the resumed run."""
    resumed = training.resumed(fault)
    check_equal(resumed, training.undisturbed())
    return resumed


@pytest.mark.long(keep=1)
@pytest.mark.parametrize(
    "first",
    [
        pytest.param(4, id="inside_an_epoch"),
        pytest.param(11, id="at_the_end_of_an_epoch"),
        pytest.param(12, id="after_the_end_of_an_epoch"),
    ],
)
@pytest.mark.parametrize("fault", FAULTS)
def test_one_process_resumes_at_each_place_of_an_epoch(
    warm_parent: WarmParent, tmp_path: Path, first: int, fault: str
) -> None:
    options = {"accumulate": 2, "evaluates": True}
    training = Training(warm_parent, tmp_path, "trainer_scripts", 1, options, first=first, until=first + 6)
    check(training, fault)


VARIANTS = {
    "workers": {"workers": 2},
    "activation_checkpointing": {"arguments": {"gradient_checkpointing": True}},
    "label_smoothing": {"arguments": {"label_smoothing_factor": 0.1}},
    "lengths": {"ragged": True, "accumulate": 2, "arguments": {"train_sampling_strategy": "group_by_length"}},
    "stream": {"streams": True, "accumulate": 2, "arguments": {"accelerator_config": {"dispatch_batches": False}}},
    "epochs": {"arguments": {"eval_strategy": "epoch", "logging_strategy": "epoch"}},
    "zero_2": {"accumulate": 2, "arguments": {"deepspeed": {**zero(2, False), "zero_optimization": {"stage": 2}}}},
}


@pytest.mark.long(keep=2)
@pytest.mark.parametrize("variant", sorted(VARIANTS))
@pytest.mark.parametrize("fault", ["kill_a_rank", "stop_and_resume"])
def test_a_variant(warm_parent: WarmParent, tmp_path: Path, variant: str, fault: str) -> None:
    options = {"evaluates": variant != "epochs", **VARIANTS[variant]}
    check(Training(warm_parent, tmp_path, "trainer_scripts", 2, options), fault)


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_two_copies_of_a_model_divided_between_two_ranks(warm_parent: WarmParent, tmp_path: Path, fault: str) -> None:
    options = {"copies": 2, "arguments": FSDP}
    check(Training(warm_parent, tmp_path, "trainer_scripts", 4, options), fault)


@pytest.mark.long(keep=1)
@pytest.mark.parametrize("optimizer", ["adamw_torch", "adamw_torch_fused"])
@pytest.mark.parametrize("fault", ["kill_a_rank", "stop_and_resume"])
def test_a_gradient_scaler_skips_updates_before_and_after_the_resumed_step(
    warm_parent: WarmParent, tmp_path: Path, optimizer: str, fault: str
) -> None:
    """A run in which the gradient scaler skips updates resumes bit for bit, between two of these skipped updates.

    With `adamw_torch`, accelerate reports a skipped step. The fused optimizer skips the update itself, so accelerate
    reports no skipped step.
    """
    options = {"fp16": True, "arguments": {"optim": optimizer}}
    training = Training(warm_parent, tmp_path, "trainer_scripts", 2, options)
    resumed, undisturbed = training.resumed(fault), training.undisturbed()
    check_equal(resumed, undisturbed)
    events = undisturbed[0]["events"]
    lower = [after[0] for before, after in itertools.pairwise(events) if after[1] < before[1]]
    assert lower[0] <= resumed[0]["begun"] < lower[-1]
    assert any(was_skipped for _, _, was_skipped in events) == (optimizer == "adamw_torch")


@pytest.mark.long(keep=1)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_sequence_to_sequence_trainer_generates_during_evaluation(
    warm_parent: WarmParent, tmp_path: Path, fault: str
) -> None:
    options = {"trainer": "t5", "evaluates": True, "accumulate": 2}
    check(Training(warm_parent, tmp_path, "trainer_scripts", 2, options, imports=T5), fault)


@pytest.mark.long(keep=2)
@pytest.mark.parametrize("adapters", [False, True], ids=["whole_model", "adapters"])
@pytest.mark.parametrize("kind", ["ddp", "zero"])
@pytest.mark.parametrize("fault", ["kill_a_rank", "stop_and_resume"])
def test_a_trainer_of_trl(warm_parent: WarmParent, tmp_path: Path, kind: str, adapters: bool, fault: str) -> None:
    arguments = {"ddp": {}, "zero": {"deepspeed": zero(2, False)}}[kind]
    options = {"trainer": "sft", "adapters": adapters, "evaluates": True, "accumulate": 2, "arguments": arguments}
    (resumed, *_) = check(Training(warm_parent, tmp_path, "trainer_scripts", 2, options, imports=TRL), fault)
    assert {"num_tokens", "mean_token_accuracy", "entropy"} <= resumed["history"][0].keys()


@pytest.mark.long(keep=2)
@pytest.mark.parametrize("kind", sorted(PREFERENCES.keys() - {"dpo_sync"}))
def test_a_trainer_of_trl_that_reads_preferences(warm_parent: WarmParent, tmp_path: Path, kind: str) -> None:
    options = {"trainer": kind, "averages": True}
    (resumed, *_) = check(
        Training(warm_parent, tmp_path, "trainer_scripts", 2, options, imports=TRL), "terminate_an_instance"
    )
    assert resumed["averages"]
    assert bool(resumed["second"]) == kind.startswith(("dpo", "kto"))


@pytest.mark.long(keep=2)
@pytest.mark.parametrize("tuner", [*TUNERS, *SIMPLE_TUNERS])
def test_a_tuner_of_peft(warm_parent: WarmParent, tmp_path: Path, tuner: str) -> None:
    """AdaLoRA keeps tensors in dictionaries of an object that is no module."""
    check(Training(warm_parent, tmp_path, "trainer_scripts", 1, {"tuner": tuner}, imports=TRL), "kill_a_rank")


@pytest.mark.long(keep=1)
def test_a_rehearsal_proves_a_trainer_whose_callback_averages_and_notes_the_time(
    warm_parent: WarmParent, tmp_path: Path
) -> None:
    """The callback's average is compared. Its time differs in the repeated steps, and is not compared."""
    options = {"averages": True, "clock": True, "evaluates": True}
    with FakeAgent(tmp_path, 1) as agent:
        launch = warm_parent.fork(
            "tests.integration.training.trainer_scripts:rehearse",
            *(str(tmp_path), {"until": 300, "options": options}),
            world=1,
            directory=tmp_path,
            environment=agent.environment,
            result="result-{rank}.json",
        )
        (report,) = agent.rehearse()
        launch.results()
    assert report.verdict is RehearsalVerdict.PROVEN, report


@pytest.mark.long(keep=0)
def test_each_tuner_of_the_installed_peft_is_tested_or_refused() -> None:
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    from everstep.integrations.transformers import UNTESTED_TUNERS

    known = {*TUNERS, *SIMPLE_TUNERS, *UNTESTED_TUNERS}
    assert {kind.value for kind in PEFT_TYPE_TO_CONFIG_MAPPING} == known


@pytest.mark.long(keep=1)
@pytest.mark.parametrize("world", [1, 2])
def test_a_reference_model_that_follows_the_trained_model_is_kept(
    warm_parent: WarmParent, tmp_path: Path, world: int
) -> None:
    """Its first update makes the state larger, so the job needs larger slots then."""
    options = {"trainer": "dpo_sync", "averages": True}
    compared = ("step", "history", "draws", "second", "averages")
    kills.check(warm_parent, tmp_path, world, commits=2, compared=compared, **options)


@pytest.mark.long(keep=1)
@pytest.mark.parametrize("kind", ["plain", "ddp", "zero"])
def test_a_model_with_adapters_keeps_its_frozen_base_once(warm_parent: WarmParent, tmp_path: Path, kind: str) -> None:
    """The index of a slot marks the frozen tensors. An upload stores marked tensors once per run."""
    world = 1 if kind == "plain" else 2
    arguments = {"deepspeed": zero(1, False)} if kind == "zero" else {}
    options = {"trainer": "lora", "evaluates": True, "arguments": arguments}
    training = Training(warm_parent, tmp_path, "trainer_scripts", world, options, imports=PEFT)
    check(training, "kill_a_rank")
    for slot in training.slots.values():
        entries = index_of(slot).tensors
        frozen = logical_names(entry for entry in entries if entry.is_frozen)
        trained = logical_names(entry for entry in entries if not entry.is_frozen)
        assert frozen
        assert [name for name in frozen if "lora" in name] == []
        assert [name for name in trained if name.startswith(("model/", "optimizer/")) and "lora" not in name] == []


def logical_names(entries: Iterable[TensorEntry]) -> list[str]:
    """Return the names of the parameters and optimizer states that stored tensors contain."""
    return [part.name for entry in entries for part in entry.logical_parts]


def index_of(slot: Path) -> SlotIndex:
    """Return the index of a sealed slot."""
    data = slot.read_bytes()
    header = unpack_header(data[:HEADER_BYTES])
    begin = HEADER_BYTES + header.index_offset
    return unpack_index(data[begin : begin + header.index_bytes], header.index_offset)


BEST = {"save_strategy": "steps", "save_steps": 3, "load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}


@pytest.mark.long(keep=1)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_best_model_is_loaded_at_the_end(warm_parent: WarmParent, tmp_path: Path, fault: str) -> None:
    options = {"evaluates": True, "arguments": {**BEST, "learning_rate": 0.3}}
    (resumed, *_) = check(Training(warm_parent, tmp_path, "trainer_scripts", 2, options), fault)
    assert resumed["best"][0] < UNTIL, "the last model is not the best"


@pytest.mark.long(keep=1)
@pytest.mark.parametrize("fault", FAULTS)
def test_early_stopping_counts_evaluations_before_the_resumed_step(
    warm_parent: WarmParent, tmp_path: Path, fault: str
) -> None:
    """The loss grows from the second evaluation on. The early stop needs evaluations before and after the fault."""
    options = {
        "evaluates": True,
        "patience": 2,
        "arguments": {**BEST, "learning_rate": 0.3, "eval_steps": 2, "save_steps": 2},
    }
    training = Training(warm_parent, tmp_path, "trainer_scripts", 2, options, first=5, until=30)
    (resumed, *_) = check(training, fault)
    assert resumed["step"] < 30, "the early stop has ended training"
