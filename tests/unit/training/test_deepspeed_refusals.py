"""Options of DeepSpeed that are not known to come back are refused by name; engines are stood in for by objects of the same class name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from everstep.training.adapters.deepspeed import _check_engine, is_engine
from everstep.training.errors import CannotResume


def named(path: str) -> type:
    module, _, name = path.rpartition(".")
    return type(name, (SimpleNamespace,), {"__module__": module})


STAGE_3 = named("deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3")
ENGINE = named("deepspeed.runtime.engine.DeepSpeedEngine")
DEVICE = {"nvme": SimpleNamespace(device="OffloadDeviceEnum.nvme"), "cpu": SimpleNamespace(device="OffloadDeviceEnum.cpu")}


def engine(kind: type = ENGINE, optimizer: type = STAGE_3, **changes: Any) -> Any:
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
    values = {key: value if key in ("zenflow", "has_moe_layers") else (lambda value=value: value) for key, value in options.items()}
    return kind(optimizer=optimizer(), **values)


def test_what_is_known_passes() -> None:
    _check_engine("engine", engine())
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
        ({"zero_optimization_stage": 0}, "ZeRO stage 0"),
        ({"kind": named("deepspeed.runtime.pipe.engine.PipelineEngine")}, "PipelineEngine"),
        ({"optimizer": named("deepspeed.runtime.bf16_optimizer.BF16_Optimizer")}, "BF16_Optimizer"),
    ],
)
def test_what_is_not_known_is_refused_by_name(changes: dict[str, Any], name: str) -> None:
    with pytest.raises(CannotResume, match=name):
        _check_engine("engine", engine(**changes))
