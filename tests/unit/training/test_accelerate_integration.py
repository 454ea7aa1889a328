"""`prepare` of the integration of accelerate: calls in the wrong order and changed objects are refused by name."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch.utils.data import DataLoader, TensorDataset

from everstep.integrations.accelerate import Prepared, attach, prepare, session_of
from everstep.integrations.base import UnsupportedOption
from everstep.training import CannotResume, SessionMisuse


@pytest.fixture(autouse=True)
def own_state() -> Iterator[None]:
    """Reset the state that accelerate keeps per process after each test, so that no test affects the next one."""
    yield
    gc.collect()
    for kind in (AcceleratorState, GradientState, PartialState):
        kind._reset_state()


@pytest.fixture(name="in_a_job")
def made_in_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the script believe that an agent runs it. Elsewhere, nothing is refused."""
    monkeypatch.setenv("EVERSTEP_AGENT_SOCKET", "/nowhere")


def loader() -> Any:
    return DataLoader(TensorDataset(torch.arange(8.0).reshape(8, 1)), batch_size=2)


def parts() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), "data": loader()}


def trained(keep: Prepared, steps: int) -> list[float]:
    """Train up to a step, and return the losses."""
    losses = []
    for (rows,) in keep.batches(until_step=steps):
        with keep.accelerator.accumulate(keep.model):
            loss = keep.model(rows).square().mean()
            keep.accelerator.backward(loss)
            keep.optimizer.step()
            keep.optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_without_an_agent_a_step_ends_after_its_accumulation() -> None:
    keep = prepare(Accelerator(cpu=True, gradient_accumulation_steps=2), **parts())
    losses = trained(keep, 3)
    assert len(losses) == 6
    assert keep.session.step == 4
    assert keep.session.data["data"].epoch == 1
    keep.close()


def test_a_second_call_is_refused_in_a_job_only(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True)
    prepare(accelerator, **parts()).close()
    assert len(trained(prepare(accelerator, **parts()), 5)) == 5
    attach(accelerator)
    session_of(accelerator).log(loss=1.0)
    monkeypatch.setenv("EVERSTEP_AGENT_SOCKET", "/nowhere")
    with pytest.raises(SessionMisuse, match="already called for this accelerator"):
        attach(accelerator)
    with pytest.raises(SessionMisuse, match=r"already called for this accelerator\. Call it once"):
        prepare(accelerator, **parts())


@pytest.mark.usefixtures("in_a_job")
@pytest.mark.parametrize("name", ["model", "optimizer", "data"])
def test_an_object_that_is_prepared_already_is_refused_by_name(name: str) -> None:
    accelerator, objects = Accelerator(cpu=True), parts()
    objects[name] = accelerator.prepare(objects[name])
    with pytest.raises(SessionMisuse, match=rf"^{name}: accelerator\.prepare\(\) was already called.*Pass the object"):
        prepare(accelerator, **objects)


@pytest.mark.usefixtures("in_a_job")
def test_an_optimizer_that_has_trained_is_refused() -> None:
    objects = parts()
    objects["model"](torch.ones(1, 1)).sum().backward()
    objects["optimizer"].step()
    with pytest.raises(SessionMisuse, match=r"optimizer: it has already made steps\. Call prepare\(\) before"):
        prepare(Accelerator(cpu=True), **objects)


def test_a_model_that_the_script_changes_after_prepare_is_refused() -> None:
    keep = prepare(Accelerator(cpu=True), **parts())
    keep.model[0] = torch.nn.Linear(1, 1)
    with pytest.raises(SessionMisuse, match=r"model was changed after prepare.*Change it before prepare"):
        trained(keep, 1)
    keep.close()


def test_options_that_the_script_changes_after_prepare_are_refused_when_training_begins() -> None:
    keep = prepare(Accelerator(cpu=True), **parts())
    inner = keep.optimizer.optimizer
    inner.step = torch.compile(inner.step, fullgraph=True, backend="eager")
    with pytest.raises(UnsupportedOption, match="fullgraph=True"):
        trained(keep, 1)
    keep.close()


@pytest.mark.usefixtures("in_a_job")
def test_an_option_of_the_accelerator_is_refused_before_anything_is_prepared() -> None:
    objects = parts()
    accelerator: Any = SimpleNamespace(dispatch_batches=True)
    with pytest.raises(UnsupportedOption, match="dispatch_batches"):
        prepare(accelerator, **objects)
    assert not hasattr(objects["model"], "_is_accelerate_prepared")


def test_two_models_are_refused_by_name_when_the_loop_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, objects = Accelerator(cpu=True), parts()
    attach(accelerator)
    with pytest.raises(SessionMisuse, match="has not begun"):
        session_of(accelerator)
    prepared = accelerator.prepare(*objects.values(), torch.nn.Linear(1, 1))
    monkeypatch.setenv("EVERSTEP_AGENT_SOCKET", "/nowhere")
    with pytest.raises(CannotResume, match=r"^model: the accelerator has prepared 2 of them"):
        next(iter(prepared[2]))
    monkeypatch.delenv("EVERSTEP_AGENT_SOCKET")
    assert len(list(prepared[2])) == len(prepared[2]) == 4, "outside a job, the loop trains without Everstep"


def test_a_script_that_a_job_refuses_has_a_session_without_effect_outside_a_job() -> None:
    accelerator, objects = Accelerator(cpu=True), parts()
    attach(accelerator)
    prepared = accelerator.prepare(*objects.values(), torch.nn.Linear(1, 1))
    for _ in prepared[2]:
        session_of(accelerator).log(loss=1.0)
    session_of(accelerator).fence()
    accelerator.end_training()
