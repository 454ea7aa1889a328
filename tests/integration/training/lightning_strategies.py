"""The strategies of the tests with Lightning, on CPUs."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy
from lightning.pytorch.strategies.ddp import DDPStrategy as Parallel


class CpuDeepSpeedStrategy(DeepSpeedStrategy):
    """`DeepSpeedStrategy` without Lightning's check for a GPU, because DeepSpeed's engine also runs on CPUs."""

    def setup_environment(self) -> None:
        Parallel.setup_environment(self)

    def setup_distributed(self) -> None:
        self.set_world_ranks()
        self._init_deepspeed_distributed()


def precision_of(name: str) -> dict[str, Any]:
    """Return the arguments of `Trainer` for a precision.

    Lightning itself uses no fp16 on the CPU, so the plugin passes a gradient scaler. Its scale begins so high that a
    gradient of the first step overflows, and grows so fast that gradients of later steps overflow, too.
    """
    if name != "16-mixed":
        return {"precision": name}
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}


def strategy_of(kind: str, world: int, options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `Trainer` for a strategy.

    Args:
        kind: `one`, `ddp`, `fsdp` or `zero`.
        world: number of ranks.
        options: options of the test script.
    """
    devices = {"accelerator": "cpu", "devices": world}
    if kind == "one":
        return devices
    if kind == "ddp":
        return {**devices, "strategy": DDPStrategy()}
    if kind == "fsdp":
        return {**devices, "strategy": ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1)}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": options["stage"],
            "stage3_param_persistence_threshold": 0,
            # Use small buckets: DeepSpeed allocates them in every step, by default with 500 million elements.
            "reduce_bucket_size": 4096,
            "allgather_bucket_size": 4096,
        },
    }
    places = [torch.device("cpu", rank) for rank in range(world)]
    return {**devices, "strategy": CpuDeepSpeedStrategy(config=config, parallel_devices=places)}
