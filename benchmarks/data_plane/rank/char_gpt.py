"""Trains the char-GPT of `examples/` with DDP or ZeRO-3, in blocks of steps under different systems.

    warm-up ─▶ block of steps under one system ─▶ under another ─▶ … ─▶ each system's last copy, compared with the state

One launch measures Everstep, lm-resiliency and no protection in the same processes, because step times of separate
launches differ by more than the systems' effect.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.data_plane.rank.state import dump_tensors, equal_to_dump, least, leave

LAYERS, WIDTH, HEADS, CONTEXT, BATCH = 4, 256, 4, 64, 8
LEARNING_RATE = 1e-3
TEXT_BYTES = 1_000_000
LAST_COMMIT_SECONDS = 2.0
OTHERS_WARM_UP_STEPS = 8
"""Steps of every other system, whose first write to a buffer takes several times as long as later ones."""
SETTLE_STEPS = 20
"""Steps after the measurement, in which a system tries to store its last step on both nodes."""
LOOK_SECONDS = 0.02
"""Seconds between two checks of a commit: 0.1 ms of CPU time each, several per step."""

settings = json.loads(os.environ["EVERSTEP_HYPERPARAMETERS"])
skipped_steps, counted_steps = int(settings["skipped"]), int(settings["counted"])
directory = Path(os.environ["BENCH_DIRECTORY"])
rank = int(os.environ["RANK"])

sys.path.insert(0, os.environ["BENCH_EXAMPLE"])
from model import GPT, GPTConfig  # noqa: E402  (the example's, as it is)


def text() -> torch.Tensor:
    """Return the source of some standard library modules as tokens."""
    data = bytearray()
    for path in sorted(Path(os.__file__).parent.glob("[a-z]*.py")):
        data += path.read_bytes()
        if len(data) >= TEXT_BYTES:
            break
    return torch.frombuffer(data[:TEXT_BYTES], dtype=torch.uint8).clamp(max=127).long()


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches of random windows of the text, without end, with a seed per rank."""
    tokens, generator = text(), torch.Generator().manual_seed(rank)
    while True:
        starts = torch.randint(len(tokens) - CONTEXT - 1, (BATCH,), generator=generator)
        windows = torch.stack([tokens[start : start + CONTEXT + 1] for start in starts])
        yield windows[:, :-1], windows[:, 1:]


class Ddp:
    """The char-GPT under torch's DistributedDataParallel, with AdamW."""

    def __init__(self) -> None:
        dist.init_process_group("gloo")
        self.model = torch.nn.parallel.DistributedDataParallel(GPT(GPTConfig(128, LAYERS, WIDTH, HEADS, CONTEXT, 0.0)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)

    def registered(self) -> dict[str, Any]:
        """Return the arguments with which `everstep.training.init` registers model and optimizer."""
        return {"model": self.model, "optimizer": self.optimizer}

    def forward_and_backward(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(inputs, targets).backward()

    def step(self) -> None:
        self.optimizer.step()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the live parameters and Adam's moments."""
        named = {}
        for number, parameter in enumerate(self.model.parameters()):
            named[f"{number}"] = parameter.detach()
            named |= {
                f"{number}.{key}": value for key, value in self.optimizer.state[parameter].items() if value.numel() > 1
            }
        return named


class Zero3(Ddp):
    """The char-GPT under DeepSpeed ZeRO-3, with AdamW."""

    def __init__(self) -> None:
        import deepspeed

        warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
        deepspeed.init_distributed("gloo")
        config = {
            "train_micro_batch_size_per_gpu": BATCH,
            "zero_optimization": {
                "stage": 3,
                "stage3_param_persistence_threshold": 1000,
                "reduce_bucket_size": 1_000_000,
            },
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
            named |= {
                f"{number}.{key}": value for key, value in wrapped.optimizer.state[master].items() if value.numel() > 1
            }
        return named


class Nobody:
    """Stores no copies of the state. Base class of the systems that do."""

    def __init__(self, model: Ddp) -> None:
        self._model = model

    def boundary(self, number: int, /) -> None:
        """Start a snapshot of the state after a step, if the system takes any. Steps are numbered across systems."""

    def kept(self, numbers: Collection[int], /) -> int:
        """Return for how many of these steps the other node has held a complete copy, perhaps replaced later."""
        # This class makes no copies, so no step lacks one.
        return len(numbers)

    def is_last_kept(self) -> bool:
        """Return whether every rank's last step is complete on the other node, so that `verified` can compare.

        Collective.
        """
        return True

    def verified(self) -> bool | None:
        """Return whether the other node's copy of the last step equals the live model. None without a copy.

        Collective.
        """
        return None

    def close(self) -> None:
        """End the threads and processes of the compared system that this object runs."""


class Everstep(Nobody):
    """Protects the model with an Everstep session, as a user's script does."""

    def __init__(self, model: Ddp) -> None:
        import everstep.training
        from benchmarks.data_plane.rank.everstep_job import CommitWatch

        super().__init__(model)
        self._memory = Path(os.environ["EVERSTEP_AGENT_SOCKET"]).parent
        self._run = os.environ["EVERSTEP_RUN_ID"]
        self._session = everstep.training.init(**model.registered())
        self._watch = CommitWatch(f"{self._run}/rank-{rank}.word", int(os.environ["EVERSTEP_GENERATION"]), LOOK_SECONDS)
        self._session.restore()
        self._steps: dict[int, int] = {}
        """Everstep's number of a step, by the number that `boundary` received."""
        self._step = 0

    def boundary(self, number: int) -> None:
        self._step = self._steps[number] = self._session.boundary().step
        self._watch.expect(self._step)

    def kept(self, numbers: Collection[int]) -> int:
        return sum(self._steps[number] in self._watch.at for number in numbers)

    def is_last_kept(self) -> bool:
        self._watch.wait(self._step, LAST_COMMIT_SECONDS)
        return least(self._watch.committed) >= self._step

    def verified(self) -> bool:
        from benchmarks.data_plane.rank.everstep_job import holder_has

        return holder_has(self._session, self._memory, self._run, self._step, rank)

    def close(self) -> None:
        self._session.close()


class LmResiliency(Nobody):
    """Protects the model with lm-resiliency's manager."""

    def __init__(self, model: Ddp) -> None:
        # Append lm-resiliency's environment at the end of the path, so that a package that exists in both environments
        # is imported from Everstep's environment.
        sys.path.append(os.environ["BENCH_LM_RESILIENCY"])
        from lm_resiliency.checkpointing import InMemoryCheckpointManager, InMemoryCkptConfig

        super().__init__(model)
        folder = directory / f"node{rank}"
        config = InMemoryCkptConfig(
            interval=1, replication_jump=1, disk_flush_interval=0, disk_folder=str(folder), run_id="bench"
        )
        self._manager = InMemoryCheckpointManager(config)
        self._number = 0
        self._held: set[int] = set()
        """Steps of which this rank has the other rank's complete state. `boundary` adds to it."""

    def boundary(self, number: int) -> None:
        self._number = number
        self._manager.save({"state": self._model.tensors(), "step": number}, number)
        # Each save of lm-resiliency first completes the previous exchange of snapshots between the two ranks.
        self._held.add(self._manager._buffer_pool.peer_previous.step)

    def kept(self, numbers: Collection[int]) -> int:
        return len(self._held.intersection(numbers))

    def is_last_kept(self) -> bool:
        self._manager.finalize_replication()
        held = self._manager._buffer_pool.get_latest_peer_step()
        self._held.add(held)
        return least(held) >= self._number

    def verified(self) -> bool:
        dump_tensors(self._model.tensors().values(), directory / f"dump{rank}")
        dist.barrier()
        pool = self._manager._buffer_pool
        held = max((pool.peer_current, pool.peer_previous), key=lambda slot: slot.step)
        return held.step == self._number and equal_to_dump(list(held.tensors), directory / f"dump{1 - rank}")

    def close(self) -> None:
        self._manager.close()


@dataclass
class Block:
    """Consecutive steps under one system, the first of which are not timed."""

    system: str
    seconds: float = 0.0
    """Mean of the timed steps."""
    cpu_seconds: float = 0.0
    """Mean per step. Rank 0's value includes the agents."""
    numbers: list[int] = field(default_factory=list)
    """Numbers of all steps, also of untimed ones."""
    kept_count: int = 0


def cpu_seconds() -> float:
    """Return the CPU time of this rank. Rank 0's value includes the agents."""
    agents = os.environ["BENCH_AGENTS"].split() if rank == 0 else []
    threads = [thread for pid in agents for thread in Path(f"/proc/{pid}/task").iterdir()]
    return time.process_time() + sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def main() -> None:
    """Train under each system in turn, and write the measurements to a file."""
    torch.set_num_threads(1)
    torch.manual_seed(7)
    kinds: dict[str, Callable[[], Ddp]] = {"ddp": Ddp, "zero3": Zero3}
    makers: dict[str, Callable[[Ddp], Nobody]] = {"everstep": Everstep, "none": Nobody, "lm_resiliency": LmResiliency}
    model = kinds[settings["kind"]]()
    systems = {name: make(model) for name, make in makers.items() if name in settings["blocks"]}
    stream, number = batches(), 0

    def train(system: Nobody) -> int:
        nonlocal number
        number += 1
        model.forward_and_backward(*next(stream))
        model.step()
        system.boundary(number)
        return number

    for name, system in systems.items():
        for _ in range(int(settings["warm_up"]) if name == "everstep" else OTHERS_WARM_UP_STEPS):
            train(system)
    blocks = []
    for name in settings["blocks"].split():
        block = Block(name)
        block.numbers += [train(systems[name]) for _ in range(skipped_steps)]
        cpu, begun = cpu_seconds(), time.perf_counter()
        block.numbers += [train(systems[name]) for _ in range(counted_steps)]
        block.seconds = (time.perf_counter() - begun) / counted_steps
        block.cpu_seconds = (cpu_seconds() - cpu) / counted_steps
        blocks.append(block)
    verified = {}
    for name, system in systems.items():
        for _ in range(SETTLE_STEPS):
            train(system)
            if system.is_last_kept():
                break
        verified[name] = system.verified()
    for block in blocks:
        block.kept_count = systems[block.system].kept(block.numbers)
    state_bytes = sum(tensor.nbytes for tensor in model.tensors().values())
    for system in reversed(systems.values()):
        system.close()
    leave(
        directory / f"rank{rank}.json",
        {"blocks": [asdict(block) for block in blocks], "verified": verified, "state_bytes": state_bytes},
    )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
