"""Scripts for the determinism check. Each script has one planted source of non-determinism, or none.

A check runs the same steps three times, in three *passes*. `run` makes one pass in a forked process. In production, a
process continues with the next pass by an exec. Here it exits instead, and the test forks a process for the next pass.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

import everstep.training
from everstep.protocol.plan import CHECK_VARIABLE
from everstep.training.determinism import calls, passes

WIDTH, SAMPLES, STEPS = 8, 24, 8
PRIVATE = SimpleNamespace(generator=random.Random(7))


def drawn() -> float:
    """Draw from a generator that no snapshot contains: it is an attribute of a global object."""
    return float(PRIVATE.generator.random())


class Numbers(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Regression samples. `change` augments a sample when it is fetched."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor] = lambda sample: sample) -> None:
        generator = torch.Generator().manual_seed(5)
        self.inputs = torch.randn(SAMPLES, WIDTH, generator=generator)
        self.targets = torch.randn(SAMPLES, 1, generator=generator)
        self.change = change

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.change(self.inputs[index]), self.targets[index]


class Files(Numbers):
    """Samples in the order in which the file system lists their files. The order differs in each run of the steps."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        for number in range(SAMPLES):
            (folder / f"{number:02}").touch()
        names = sorted(os.listdir(folder))
        places = [int(name) for name in [*names[pass_number() :], *names[: pass_number()]]]
        self.inputs, self.targets = self.inputs[places], self.targets[places]


class Unseeded(Sampler[int]):
    """A sampler that shuffles with entropy of the operating system."""

    def __init__(self) -> None:
        super().__init__()

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        order = list(range(SAMPLES))
        random.Random().shuffle(order)
        return iter(order)


class OwnDropout(nn.Module):
    """Dropout with a generator of its own, which snapshots contain."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * (torch.rand(inputs.shape, generator=self.generator) > 0.2)


class Forgetful:
    """A registered object that does not restore its state."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Timer(Forgetful):
    """A registered object that contains the time."""

    def state_dict(self) -> dict[str, Any]:
        return {"time": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["time"]


def pass_number() -> int:
    return int(os.environ[passes.PASS_VARIABLE].split(":")[0])


def fresh_noise() -> float:
    """Return random bytes of the kernel as a number. Python observes no call, as with a race inside a GPU kernel."""
    data = ctypes.create_string_buffer(4)
    ctypes.CDLL(None).getrandom(data, 4, 0)
    return int.from_bytes(data.raw, "little") / 2**40


def noisy_collate(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    noise = int.from_bytes(os.urandom(4), "little") / 2**32
    return torch.stack([sample for sample, _ in samples]) + noise, torch.stack([target for _, target in samples])


DATASETS: dict[str, Callable[[Path], Numbers]] = {
    "augmentation_clock": lambda _: Numbers(lambda sample: sample + time.time_ns() % 1_000_003 / 1e6),
    "augmentation_entropy": lambda _: Numbers(lambda sample: sample + random.SystemRandom().random()),
    "augmentation_generator": lambda _: Numbers(lambda sample: sample + drawn()),
    "augmentation_kept": lambda _: Numbers(lambda sample: sample + torch.rand(WIDTH) + float(np.random.rand())),
    "files": Files,
}


def run(name: str, directory: str, arguments: dict[str, Any]) -> int:
    rank, world, number = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), arguments["pass"]
    folder = Path(directory)
    state, records = folder / f"state-{rank}", folder / f"records-{rank}"
    state.touch()
    os.environ |= {
        CHECK_VARIABLE: str(arguments.get("steps", STEPS)),
        passes.PASS_VARIABLE: f"{number}:True:{state}:{records}",
        "EVERSTEP_OUTPUT_DIR": str(folder / f"output-{rank}"),
    }
    passes.begin = lambda new: os._exit(0 if new.number == number + 1 else 3)  # type: ignore[assignment]
    # In a new process, the import of `everstep.training` does this. The forked process has imported it without a check.
    calls.install()
    torch.use_deterministic_algorithms(True)
    if script := arguments.get("other_script"):
        module = importlib.import_module(f"tests.integration.training.{script}")
        named = () if name == "plain" else (name,)
        module.run(*named, f"{folder}/pass-{number}", {"until": 100, "options": arguments.get("options", {})})
        return 4  # This line is not reached, because the check ends the process during the script.
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store-{number}", rank=rank, world_size=world)
    (folder / f"files-{rank}").mkdir(exist_ok=True)
    train(name, folder / f"files-{rank}", arguments)
    return 0


def train(name: str, folder: Path, arguments: dict[str, Any]) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    is_planted = rank == world - 1
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, 1)]
    if name == "dropout":
        layers.insert(1, OwnDropout())
    model: nn.Module = nn.Sequential(*layers)
    if world > 1:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    dataset = DATASETS[name](folder) if name in DATASETS and is_planted else Numbers()
    loader: Any = DataLoader(
        dataset,
        batch_size=4,
        num_workers=arguments.get("workers", 0),
        persistent_workers=bool(arguments.get("workers")),
        sampler=Unseeded() if name == "shuffle" else DistributedSampler(dataset) if world > 1 else None,
        shuffle=True if world == 1 and name != "shuffle" else None,
        collate_fn=noisy_collate if name == "collator" and is_planted else None,
    )
    if name == "iterable":
        loader = [(inputs + random.SystemRandom().random(), targets) for inputs, targets in loader]
    objects: dict[str, Forgetful] = {"forgetful": Forgetful(), "timer": Timer()}
    extra = {key: value for key, value in objects.items() if key == name}
    session = everstep.training.init(model=model, optimizer=optimizer, data=loader, extra=extra)
    average, count = torch.zeros(1), 0

    def step(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        nonlocal average, count
        count += 1
        inputs, targets = batch
        if name == "own_seed":
            torch.manual_seed(time.time_ns())
        if name == "default_rng":
            inputs = inputs + float(np.random.default_rng().normal())
        if name == "system_random":
            inputs = inputs * random.SystemRandom().random()
        loss = F.mse_loss(model(inputs), targets)
        if name == "average":
            average = 0.5 * average + 0.5 * loss.detach()
            loss = loss * (1 + average)
        optimizer.zero_grad()
        loss.backward()
        if name == "kernel" and is_planted:
            next(model.parameters()).grad += fresh_noise()  # type: ignore[operator]
        if name == "clock_rate":
            optimizer.param_groups[0]["lr"] = 1e-2 * (1 + time.time() % 1)
        if name == "counted_rate":
            optimizer.param_groups[0]["lr"] = 1e-2 / count
        optimizer.step()
        for each in objects.values():
            each.count = time.time_ns() if isinstance(each, Timer) else each.count + 1
        session.log(loss=loss)
        if name == "logged_time":
            session.log(now=time.time())

    if arguments.get("owns_loop"):
        for _ in range(session.restore(), arguments.get("until", 100)):
            batch = next(iter(session.data["data"]))
            step(batch)  # type: ignore[arg-type]
            session.boundary()
    else:
        for batch in session.batches(arguments.get("until", 100), accumulate=arguments.get("accumulate", 1)):
            step(batch)
    session.close()
