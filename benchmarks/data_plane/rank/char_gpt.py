"""The char-GPT of `examples/`, with DDP or DeepSpeed ZeRO-3, every step kept by Everstep, by lm-resiliency, or by nobody: what does it cost a step?

Told by EVERSTEP_HYPERPARAMETERS, also where there is no Everstep: system (none, everstep, lm_resiliency), kind (ddp, zero3), steps, warm_up.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LAYERS, WIDTH, HEADS, CONTEXT, BATCH = 4, 256, 4, 64, 8
LEARNING_RATE = 1e-3
TEXT_BYTES = 1_000_000
LAST_COMMIT_SECONDS = 2.0
SETTLE_STEPS = 20
"""After what is measured, at most, until all stand at a step that is kept."""
LOOK_SECONDS = 0.005
"""Between two looks for a commit: a few in a step, so that none is missed, and too few to be felt."""
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")

settings = json.loads(os.environ["EVERSTEP_HYPERPARAMETERS"])
directory = Path(os.environ["BENCH_DIRECTORY"])
steps, warm_up = int(settings["steps"]), int(settings["warm_up"])
rank = int(os.environ["RANK"])

sys.path.insert(0, os.environ["BENCH_EXAMPLE"])
from model import GPT, GPTConfig  # noqa: E402  (the example's, as it is)


def text() -> torch.Tensor:
    """Return the standard library's first modules as token numbers."""
    data = bytearray()
    for path in sorted(Path(os.__file__).parent.glob("[a-z]*.py")):
        data += path.read_bytes()
        if len(data) >= TEXT_BYTES:
            break
    return torch.frombuffer(data[:TEXT_BYTES], dtype=torch.uint8).clamp(max=127).long()


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield random windows of the text without end; every rank its own."""
    tokens, generator = text(), torch.Generator().manual_seed(rank)
    while True:
        starts = torch.randint(len(tokens) - CONTEXT - 1, (BATCH,), generator=generator)
        windows = torch.stack([tokens[start : start + CONTEXT + 1] for start in starts])
        yield windows[:, :-1], windows[:, 1:]


class Ddp:
    """DistributedDataParallel with AdamW."""

    def __init__(self) -> None:
        dist.init_process_group("gloo")
        self.model = torch.nn.parallel.DistributedDataParallel(GPT(GPTConfig(128, LAYERS, WIDTH, HEADS, CONTEXT, 0.0)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)

    def registered(self) -> dict[str, Any]:
        """Return what `everstep.training.init` takes."""
        return {"model": self.model, "optimizer": self.optimizer}

    def forward_and_backward(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(inputs, targets).backward()

    def step(self) -> None:
        self.optimizer.step()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the live state: parameters and moments."""
        named = {}
        for number, parameter in enumerate(self.model.parameters()):
            named[f"{number}"] = parameter.detach()
            named |= {f"{number}.{key}": value for key, value in self.optimizer.state[parameter].items() if value.numel() > 1}
        return named


class Zero3(Ddp):
    """DeepSpeed ZeRO-3."""

    def __init__(self) -> None:
        import deepspeed

        warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
        deepspeed.init_distributed("gloo")
        config = {
            "train_micro_batch_size_per_gpu": BATCH,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 1000, "reduce_bucket_size": 1_000_000},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 2**31,
        }
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = GPT(GPTConfig(128, LAYERS, WIDTH, HEADS, CONTEXT, 0.0))
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def registered(self) -> dict[str, Any]:
        return {"engine": self.engine}

    def forward_and_backward(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.engine.backward(self.engine(inputs, targets))

    def step(self) -> None:
        self.engine.step()

    def tensors(self) -> dict[str, torch.Tensor]:
        wrapped = self.engine.optimizer
        named = {}
        for number, master in enumerate(wrapped.fp32_partitioned_groups_flat):
            named[f"{number}"] = master.detach()
            named |= {f"{number}.{key}": value for key, value in wrapped.optimizer.state[master].items() if value.numel() > 1}
        return named


class Nobody:
    """Keeps nothing: what the others are held against."""

    def __init__(self, model: Ddp) -> None:
        self._model = model

    def boundary(self, step: int, /) -> None:
        """Keep the state of `step`."""

    def commits(self, _: int) -> int:
        """Return how many steps after this one are kept on both nodes."""
        return 0

    def is_kept(self, _: int) -> bool:
        """Say whether every rank's state of this step, where all stand, is on its holder: then `verified` can compare it."""
        return True

    def verified(self, _: int) -> bool | None:
        """Compare the holder's bytes of this step with the live model's; None: there is no way to."""
        return None

    def close(self) -> None:
        """End."""


class Everstep(Nobody):
    """A session, as every user has it."""

    def __init__(self, model: Ddp) -> None:
        import everstep.training
        from benchmarks.data_plane.rank.everstep_job import CommitWatch

        self._memory = Path(os.environ["EVERSTEP_AGENT_SOCKET"]).parent
        self._page = self._memory / os.environ["EVERSTEP_RUN_ID"] / f"rank-{rank}.word"
        self._session = everstep.training.init(**model.registered())
        self._watch = CommitWatch(self._page, int(os.environ["EVERSTEP_GENERATION"]), LOOK_SECONDS)
        self._session.restore()

    def boundary(self, step: int) -> None:
        self._session.boundary()
        self._watch.expect(step)

    def commits(self, since: int) -> int:
        self._watch.wait(steps, LAST_COMMIT_SECONDS)  # the last one is still under way
        return sum(step > since for step in self._watch.at)

    def is_kept(self, step: int) -> bool:
        from benchmarks.data_plane.rank.everstep_job import least

        self._watch.wait(step, LAST_COMMIT_SECONDS)
        return least(self._watch.committed) >= step

    def verified(self, step: int) -> bool:
        from benchmarks.data_plane.rank.everstep_job import holder_has

        return holder_has(self._session, self._memory, self._page, step, rank)

    def close(self) -> None:
        self._session.close()


class LmResiliency(Nobody):
    """Its manager, as its adapter has it."""

    def __init__(self, model: Ddp) -> None:
        from lm_resiliency.checkpointing import InMemoryCheckpointManager, InMemoryCkptConfig

        super().__init__(model)
        folder = directory / f"node{rank}"
        config = InMemoryCkptConfig(interval=1, replication_jump=1, disk_flush_interval=0, disk_folder=str(folder), run_id="bench")
        self._manager = InMemoryCheckpointManager(config)
        self._saved: list[int] = []

    def boundary(self, step: int) -> None:
        self._manager.save({"state": self._model.tensors(), "step": step}, step)
        self._saved.append(step)

    def commits(self, since: int) -> int:
        return sum(step > since for step in self._saved) - (not self._manager.finalize_replication())

    def close(self) -> None:
        self._manager.close()


def agents_cpu_seconds() -> float:
    """Return what this rank's share of the agents has used so far: rank 0 counts them all."""
    total = 0.0
    for pid in os.environ.get("BENCH_AGENTS", "").split() if rank == 0 else []:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / CLOCK_TICKS
    return total


def main() -> None:
    """Train, and leave the times of the steps behind the warm-up."""
    torch.set_num_threads(1)
    torch.manual_seed(7)
    kinds: dict[str, Callable[[], Ddp]] = {"ddp": Ddp, "zero3": Zero3}
    systems: dict[str, Callable[[Ddp], Nobody]] = {"none": Nobody, "everstep": Everstep, "lm_resiliency": LmResiliency}
    model = kinds[settings["kind"]]()
    system = systems[settings["system"]](model)
    ended, cpu, agents = [], 0.0, 0.0
    stream = batches()

    def train(number: int) -> None:
        model.forward_and_backward(*next(stream))
        model.step()
        system.boundary(number)

    for number in range(1, steps + 1):
        train(number)
        ended.append(time.perf_counter())
        if number == warm_up:
            cpu, agents = time.process_time(), agents_cpu_seconds()
    result = {
        "step_seconds": [later - earlier for earlier, later in zip(ended[warm_up - 1 :], ended[warm_up:], strict=False)],
        "cpu_seconds": time.process_time() - cpu + agents_cpu_seconds() - agents,
        "commits": system.commits(warm_up),
        "state_bytes": sum(tensor.nbytes for tensor in model.tensors().values()),
    }
    last = steps
    while not system.is_kept(last) and last < steps + SETTLE_STEPS:
        last += 1
        train(last)
    result["verified"] = system.verified(last)
    system.close()
    scratch = directory / f"rank{rank}.new"
    scratch.write_text(json.dumps(result))
    scratch.replace(directory / f"rank{rank}.json")
    dist.barrier()
    sys.stdout.flush()
    if settings["system"] != "everstep":
        os._exit(0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
