"""DeepSpeed options that Everstep cannot restore are refused by name.

Fake engines with the class name of DeepSpeed's engine replace real ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from everstep.training.adapters.deepspeed import _check_engine, check_cpu_adam, is_engine, replay_powers
from everstep.training.adapters.plain import PlainAdapter
from everstep.training.errors import CannotResume


def named(path: str) -> type:
    module, _, name = path.rpartition(".")
    return type(name, (SimpleNamespace,), {"__module__": module})


STAGE_3 = named("deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3")
STAGE_1 = named("deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer")
ENGINE = named("deepspeed.runtime.engine.DeepSpeedEngine")
DEVICE = {
    "nvme": SimpleNamespace(device="OffloadDeviceEnum.nvme"),
    "cpu": SimpleNamespace(device="OffloadDeviceEnum.cpu"),
}


def engine(kind: type = ENGINE, optimizer: Callable[[], Any] = STAGE_3, **changes: Any) -> Any:
    options: dict[str, Any] = {
        "zenflow": False,
        "super_offload": False,
        "zero_offload_optimizer": None,
        "zero_offload_param": None,
        "zero_hpz_partition_size": 1,
        "zero_quantized_weights": False,
        "zero_quantized_gradients": False,
        "fp16_enabled": False,
        "zero_optimization_stage": 3,
        "has_moe_layers": False,
        **changes,
    }
    values = {
        key: value if key in ("zenflow", "has_moe_layers") else (lambda value=value: value)
        for key, value in options.items()
    }
    return kind(optimizer=optimizer(), **values)


def test_what_is_known_passes() -> None:
    _check_engine("engine", engine())
    _check_engine("engine", engine(optimizer=partial(STAGE_3, torch_autocast_gradscaler=None)))
    _check_engine("engine", engine(zero_offload_optimizer=DEVICE["cpu"]))
    assert is_engine(engine())
    assert not is_engine(object())


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"zenflow": True}, "ZenFlow"),
        ({"zero_offload_optimizer": DEVICE["cpu"], "super_offload": True}, "SuperOffload"),
        ({"zero_offload_optimizer": DEVICE["nvme"]}, "NVMe offload of the optimizer"),
        ({"zero_offload_param": DEVICE["nvme"]}, "NVMe offload of parameters"),
        ({"has_moe_layers": True}, "mixture-of-experts"),
        ({"zero_hpz_partition_size": 2}, r"ZeRO\+\+"),
        ({"zero_quantized_weights": True}, r"ZeRO\+\+"),
        ({"fp16_enabled": True}, "fp16"),
        ({"optimizer": partial(STAGE_3, torch_autocast_gradscaler=object())}, "torch autocast in fp16"),
        ({"optimizer": partial(STAGE_3, backup_optimizer=object())}, "an offload ratio below 1"),
        ({"zero_optimization_stage": 0}, "ZeRO stage 0"),
        ({"kind": named("deepspeed.runtime.pipe.engine.PipelineEngine")}, "PipelineEngine"),
        ({"optimizer": named("deepspeed.runtime.bf16_optimizer.BF16_Optimizer")}, "BF16_Optimizer"),
    ],
)
def test_what_is_not_known_is_refused_by_name(changes: dict[str, Any], name: str) -> None:
    with pytest.raises(CannotResume, match=name):
        _check_engine("engine", engine(**changes))


class Powers:
    """A fake of DeepSpeed's CPU Adam that keeps 32-bit powers of its betas, as the real one does in C++.

    It multiplies the powers while steps are consecutive, and recomputes them otherwise.
    """

    def __init__(self) -> None:
        self.betas: tuple[np.float32, ...] = (np.float32(0.5), np.float32(0.5))
        self.powers: tuple[np.float32, ...] = (np.float32(1), np.float32(1))
        self.step = 0

    def adam_update(self, number: int, step: int, lr: float, beta1: float, beta2: float, *rest: Any) -> None:
        betas = np.float32(beta1), np.float32(beta2)
        if betas == self.betas and step == self.step + 1:
            self.powers = tuple(power * beta for power, beta in zip(self.powers, betas, strict=True))
        elif betas != self.betas or step != self.step:
            self.powers = tuple(np.float32(float(beta) ** step) for beta in betas)
        self.betas, self.step = betas, step


def cpu_adam(step: int | None, *betas: tuple[float, float]) -> Any:
    state = {0: {} if step is None else {"step": step}}
    return SimpleNamespace(
        param_groups=[{"betas": pair} for pair in betas], state=state, ds_opt_adam=Powers(), opt_id=3
    )


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.8, 0.95)])
def test_the_powers_that_cpu_adam_keeps_come_back(betas: tuple[float, float]) -> None:
    differing = 0
    for steps in range(40):
        one, other = cpu_adam(steps or None, betas), cpu_adam(steps or None, betas)
        for step in range(1, steps + 1):
            one.ds_opt_adam.adam_update(3, step, 0.1, *betas)
        for _ in range(2):  # load the state twice, because a script may do so
            replay_powers(other)
        assert vars(one.ds_opt_adam) == vars(other.ds_opt_adam)
        fresh = cpu_adam(steps, betas)
        for optimizer in (one, fresh):
            optimizer.ds_opt_adam.adam_update(3, steps + 1, 0.1, *betas)
        differing += one.ds_opt_adam.powers != fresh.ds_opt_adam.powers
    assert differing > 5, "without it, it would not be the same"


def test_powers_that_steps_and_betas_do_not_tell_are_refused() -> None:
    check_cpu_adam("engine", cpu_adam(4, (0.9, 0.99), (0.9, 0.99)), [0.9, 0.99])
    for optimizer in (cpu_adam(4, (0.9, 0.99), (0.8, 0.99)), cpu_adam(4, (0.85, 0.99))):
        with pytest.raises(
            CannotResume, match=r"^engine: DeepSpeedCPUAdam with betas that differ between groups or change"
        ):
            check_cpu_adam("engine", optimizer, [0.9, 0.99])
    odd = cpu_adam(4, (0.9, 0.99))
    odd.state[1] = {"step": 3}
    with pytest.raises(CannotResume, match="different step counts"):
        check_cpu_adam("engine", odd, (0.9, 0.99))


def test_cpu_adam_without_an_engine_is_refused() -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = type("DeepSpeedCPUAdam", (torch.optim.SGD,), {"__module__": "deepspeed.ops.adam.cpu_adam"})(
        model.parameters(), lr=1
    )
    with pytest.raises(CannotResume, match="DeepSpeedCPUAdam restores bit-identically"):
        PlainAdapter({"": model}, {"": optimizer})
