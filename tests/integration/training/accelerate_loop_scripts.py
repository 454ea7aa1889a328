"""A script of accelerate with its own loop over epochs, like its `nlp_example.py`, and with Everstep's two lines."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import torch

from tests.integration.training.accelerate_scripts import accelerator_for
from tests.integration.training.scripts import digest
from tests.integration.training.trainer_scripts import Samples, gpt2, mask


def run(directory: str, arguments: dict[str, Any]) -> int:
    """Train until a number of steps, with an evaluation after each epoch. Write the results."""
    os.environ |= {"LOCAL_RANK": os.environ["RANK"], "MASTER_ADDR": "127.0.0.1"}
    import torch.distributed as dist

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world)
    import everstep.integrations.accelerate

    torch.manual_seed(0)
    random.seed(300 + rank)
    options = arguments["options"]
    accelerator = accelerator_for(options, options.get("accumulate", 1))
    everstep.integrations.accelerate.attach(accelerator)

    def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Refer to the accelerator, as the collate functions of accelerate's examples do."""
        assert accelerator.mixed_precision == "no"
        return mask(samples)

    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
    train = torch.utils.data.DataLoader(Samples(), batch_size=2, shuffle=True, collate_fn=collate)
    test = torch.utils.data.DataLoader(Samples(), batch_size=4, collate_fn=collate)
    model, optimizer, train, test, scheduler = accelerator.prepare(model, optimizer, train, test, scheduler)
    begun: list[int] = []
    losses: list[str] = []

    def count() -> int:
        """Return the number of steps that the optimizer has made, which a restart restores."""
        if hasattr(model, "global_steps"):
            return int(model.global_steps)  # an engine of DeepSpeed
        return max((int(each["step"]) for each in optimizer.optimizer.state.values()), default=0)

    while count() < arguments["until"]:
        model.train()
        for batch in train:
            if not begun:
                session = everstep.integrations.accelerate.session_of(accelerator)
                begun.append(session.step - 1)
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item().hex())
            if count() >= arguments["until"]:
                break
        model.eval()
        with torch.no_grad():
            sums = [model(**batch).loss for batch in test]
        assert accelerator.gather_for_metrics(torch.stack(sums)).isfinite().all()
    accelerator.end_training()
    result = {
        "begun": begun[0],
        "step": count(),
        "losses": losses[-4:],
        "digest": digest(session),
        "draws": [torch.rand(()).item().hex(), random.random().hex()],
    }
    Path(directory, f"result-{rank}.json").write_text(json.dumps(result))
    return 0
