"""A small training script that uses Hugging Face accelerate. `test_matrix.py` kills and resumes its ranks."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.integration.training.faults import reach
from tests.integration.training.trainer_scripts import Samples, divide_on_cpu, gpt2, mask, use_fp16


class Seen:
    """Counts batches. The script registers it with the accelerator."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def accelerator_for(options: dict[str, Any], accumulate: int) -> Any:
    """Return an accelerator of the kind `ddp`, `fsdp` or `zero`. With `copies`, FSDP2 keeps so many whole models."""
    from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin, ParallelismConfig

    kind = options.get("kind", "ddp")
    divide_on_cpu(kind)
    plugins: dict[str, Any] = {}
    if copies := options.get("copies"):
        shards = int(os.environ["WORLD_SIZE"]) // copies
        plugins["parallelism_config"] = ParallelismConfig(dp_replicate_size=copies, dp_shard_size=shards)
    if kind == "fsdp":
        plugins["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["GPT2Block"]
        )
    elif kind == "zero":
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": accumulate,
            "zero_optimization": {
                "stage": options.get("stage", 3),
                # Use small buckets: DeepSpeed allocates them in every step, by default with 500 million elements.
                "reduce_bucket_size": 4096,
                "allgather_bucket_size": 4096,
                **options.get("zero", {}),
            },
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        plugins["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=config)
    return Accelerator(
        cpu=kind == "ddp",
        gradient_accumulation_steps=accumulate,
        mixed_precision="bf16" if options.get("bf16") else "no",
        **plugins,
    )


def run(directory: str, arguments: dict[str, Any]) -> int:
    """Train, and write the losses, a digest of each tensor of the state, and the next random draws."""
    os.environ |= {"LOCAL_RANK": os.environ["RANK"], "MASTER_ADDR": "127.0.0.1"}
    import torch.distributed as dist

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world)
    from everstep.integrations.accelerate import prepare
    from tests.integration.training.scripts import digest

    torch.use_deterministic_algorithms(True)
    options = arguments.get("options", {})
    accumulate = options.get("accumulate", 2)
    torch.manual_seed(0)
    accelerator = accelerator_for(options, accumulate)
    if options.get("fp16"):
        # The scale is so small that no step overflows. After an overflow, the scaler would skip the optimizer step, and
        # with it the guard's wait for the copy of the state.
        use_fp16(accelerator, 2.0**6)
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
    loader = torch.utils.data.DataLoader(Samples(), batch_size=2, shuffle=True, collate_fn=mask)
    seen = Seen()
    accelerator.register_for_checkpointing(seen)
    kept = prepare(accelerator, model=model, optimizer=optimizer, data=loader, scheduler=scheduler)
    random.seed(300 + rank)
    np.random.seed(200 + rank)
    begun = kept.session.restore()
    events = []
    for batch in kept.batches(until_step=arguments["until"]):
        seen.count += 1
        with accelerator.accumulate(kept.model):
            loss = kept.model(**batch).loss
            accelerator.backward(loss)
            kept.optimizer.step()
            kept.scheduler.step()
            kept.optimizer.zero_grad()
        step = kept.session.step
        events.append([step, loss.item().hex()])
        if accelerator.scaler is not None:
            events.append([step, accelerator.scaler.get_scale()])
        if seen.count % accumulate == 0:
            reach(rank, step, arguments.get("points", {}))
            if options.get("evaluates") and step % 3 == 0:
                events.append([step, evaluate(kept.model)])
                kept.session.log(**{"eval/loss": float.fromhex(events[-1][1])})
    result = {
        "rank": rank,
        "strategy": accelerator.distributed_type.value,
        "begun": begun,
        "step": kept.session.step - 1,
        "count": seen.count,
        "events": events,
        "digest": digest(kept.session),
        "draws": [torch.rand(()).item().hex(), float(np.random.rand()).hex(), random.random().hex()],
    }
    kept.close()
    Path(directory, f"result-{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()
    return 0


@torch.no_grad()
def evaluate(model: Any) -> str:
    """Return the loss over masked samples. The mask draws random numbers of the process."""
    model.eval()
    samples = Samples()
    loss = sum(model(**mask([samples[number]])).loss.item() for number in range(3))
    model.train()
    return float(loss).hex()
