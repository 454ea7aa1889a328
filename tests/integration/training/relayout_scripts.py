"""Ranks that save a state in one layout, or load the saved state in another layout.

All kinds of training build the same model, so that their logical tensors have the same names.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import everstep.training
from everstep.protocol.slot import SlotHeader, SlotState, pack_header, payload_digest
from everstep.training.relayout import read_earlier
from everstep.training.restore import Expected, agree, gathered
from tests.integration.training import scripts
from tests.integration.training.scripts import WIDTH, Scenario, keep_payload, schedule, state_of

RUN = "ab" * 16
STEP = 3


class Net(nn.Module):
    """A model with tensors that ranks divide evenly and unevenly, a frozen layer, and a buffer."""

    def __init__(self, width: int = 60) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, width)
        self.down = nn.Linear(width, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.last = nn.Linear(WIDTH, 1)
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(1, dtype=torch.int64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        hidden = self.before(inputs)
        return self.last(self.norm(hidden + self.down(F.gelu(self.up(hidden)))))  # type: ignore[no-any-return]


@dataclass
class Kind:
    """The settings of one launch: adapter, precision and sizes."""

    kind: str
    dtype: str = "fp32"
    optimizer: str = "adamw"
    width: int = 60
    grows: bool = False
    """Whether the optimizer gets the parameters of one layer only in its first step."""

    def replica(self, rank: int) -> int:
        """Return the number of the model copy to which this rank belongs. Two ranks of a mesh share one copy."""
        return rank // 2 if self.kind == "mesh" else rank

    def make_optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)
        return getattr(torch.optim, {"adamw": "AdamW", "adam": "Adam"}[self.optimizer])(  # type: ignore[no-any-return]
            parameters, lr=1e-2, foreach=False
        )


def build(kind: Kind) -> Scenario:
    # Each copy of the model starts from other weights. A load must replace them, so that the result does not depend on
    # them.
    torch.manual_seed(kind.replica(dist.get_rank()) + 50)
    if kind.kind.startswith("zero"):
        return _zero(kind)
    model: nn.Module = Net(kind.width)
    if kind.dtype == "pure_bf16":
        model = model.to(torch.bfloat16)
    if kind.kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif kind.kind == "fsdp":
        _shard(kind, model, None)
    elif kind.kind == "mesh":
        _shard(kind, model, _parallelize(model))
    late = [each for name, each in model.named_parameters() if kind.grows and ".up." in f".{name}"]
    optimizer = kind.make_optimizer([each for each in model.parameters() if all(each is not other for other in late)])
    scheduler = schedule(optimizer)

    def step(batch: Any, _session: Any) -> float:
        inputs, targets = batch
        optimizer.param_groups[0]["params"] += late
        late.clear()
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=kind.dtype == "bf16" and kind.kind in ("plain", "ddp")):
            output = model(inputs.to(torch.bfloat16) if kind.dtype == "pure_bf16" else inputs)
        loss = F.mse_loss(output.float(), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step()
        return loss.item()

    return Scenario({"model": model, "optimizer": optimizer, "scheduler": scheduler}, step)


def _parallelize(model: nn.Module) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("shards", "parts"))
    parallelize_module(model, mesh["parts"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return mesh["shards"]


def _shard(kind: Kind, model: nn.Module, mesh: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    options: dict[str, Any] = {"mesh": mesh or init_device_mesh("cpu", (dist.get_world_size(),))}
    if kind.dtype == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in model.children():
        fully_shard(module, **options)
    fully_shard(model, **options)


def _zero(kind: Kind) -> Scenario:
    import deepspeed

    stage = int(kind.kind[-1])
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 4096, "allgather_bucket_size": 4096},
    }
    if kind.dtype == "bf16":
        config["bf16"] = {"enabled": True}
    deepspeed.init_distributed("gloo", dist_init_required=False)
    if stage == 3:
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = Net(kind.width)
    else:
        model = Net(kind.width)
    optimizer = kind.make_optimizer(model.parameters())
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=schedule(optimizer), config=config, dist_init_required=False
    )

    def step(batch: Any, _session: Any) -> float:
        inputs, targets = batch
        loss = F.mse_loss(engine(inputs.to(torch.bfloat16) if kind.dtype == "bf16" else inputs).float(), targets)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return Scenario({"engine": engine}, step)


def begin(directory: str) -> tuple[int, int]:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world)
    return rank, world


def batch_of(rank: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randn(4, WIDTH, generator=generator), torch.randn(4, 1, generator=generator)


def save(directory: str, options: dict[str, Any]) -> int:
    """Train some steps, and write each rank's slot and payload."""
    rank, world = begin(directory)
    kind = Kind(**options)
    scenario = build(kind)
    session = everstep.training.init(**scenario.register)
    session.restore()
    for number in range(STEP):
        scenario.step(batch_of(kind.replica(rank), number), session)
        session.boundary()
    keep_payload(session, Path(directory), rank)
    np.random.seed(rank)
    payload = (Path(directory) / f"payload-{rank}").read_bytes()
    (index_offset, index_bytes) = json.loads((Path(directory) / f"index-{rank}").read_text())
    header = SlotHeader(
        job="job",  # type: ignore[arg-type]
        run=RUN,  # type: ignore[arg-type]
        owner_rank=rank,  # type: ignore[arg-type]
        origin_generation=1,  # type: ignore[arg-type]
        step=STEP,  # type: ignore[arg-type]
        state=SlotState.SEALED,
        capacity_bytes=len(payload),
        payload_bytes=len(payload),
        index_offset=index_offset,
        index_bytes=index_bytes,
        payload_digest=payload_digest(payload),
        layout_hash=state_of(session).layout_hash,
    )
    (Path(directory) / f"slot-{rank}").write_bytes(pack_header(header) + payload)
    (Path(directory) / f"result-{rank}.json").write_text(json.dumps({"world": world}))
    return 0


class FolderShards:
    """The shards that another number of ranks saved, read from files."""

    def __init__(self, folder: Path, here: list[int]) -> None:
        self.folder = folder
        self.world_size = len(list(folder.glob("slot-*")))
        self.here = here
        self.fetched: list[int] = []

    def fetch(self, rank: int) -> Path:
        self.fetched.append(rank)
        return self.folder / f"slot-{rank}"


def load(directory: str, options: dict[str, Any], saved: str) -> int:
    """Load the saved state into this layout, save it again, and make one step."""
    rank, world = begin(directory)
    kind = Kind(**options)
    scenario = build(kind)
    session = everstep.training.init(**scenario.register)
    state = state_of(session)
    shards = FolderShards(Path(saved), [])
    expected = Expected(RUN, rank, STEP, state.facts)  # type: ignore[arg-type]
    relaid, problem = None, ""
    try:
        relaid = read_earlier(shards, state, expected, world, 1, gathered)  # type: ignore[arg-type]
    except everstep.training.RestoreMismatch as error:
        problem = f"{type(error).__name__}: {error}"
    if problem:
        (Path(directory) / f"result-{rank}.json").write_text(json.dumps({"problem": problem}))
        return 0
    agree(STEP, "")  # type: ignore[arg-type]
    assert relaid is not None
    state.load(relaid)
    state.complete(relaid)
    keep_payload(session, Path(directory), rank)
    session.restore()
    loss = scenario.step(batch_of(kind.replica(rank), STEP), session)
    rates = [group["lr"] for optimizer in state.optimizers() for group in optimizer.param_groups]
    result = {"fetched": shards.fetched, "loss": loss, "rates": rates, "draw": float(np.random.rand())}
    (Path(directory) / f"result-{rank}.json").write_text(json.dumps(result))
    return 0


def train_with_trainer(directory: str, options: dict[str, Any], until: int) -> int:
    """Train with a Trainer of transformers and the same global batch on any number of ranks.

    Report which samples each step uses.
    """
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "ACCELERATE_USE_CPU": "true"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "LOCAL_RANK": os.environ["RANK"]}
    rank, _ = begin(directory)
    from transformers import Trainer, TrainingArguments

    from everstep.integrations import transformers as integration

    steps: dict[int, list[list[int]]] = {}

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(WIDTH)

        def forward(self, inputs: Any, targets: Any, index: Any) -> dict[str, Any]:
            steps.setdefault(trainer.state.global_step + 1, []).append(index.tolist())
            return {"loss": F.mse_loss(self.net(inputs), targets)}

    class Rows(Indices):
        def __getitem__(self, index: int) -> Any:
            return dict(zip(("inputs", "targets", "index"), super().__getitem__(index), strict=True))

    arguments = TrainingArguments(
        output_dir=str(Path(directory, "output")),
        num_train_epochs=50,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=options.get("accumulate") or everstep.training.accumulation(24, 4),
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        remove_unused_columns=False,
    )
    trainer: Any = Trainer(Model(), arguments, train_dataset=Rows(options.get("samples", 60)))
    integration.attach(trainer)
    begun: list[int] = []

    class Progress(transformers_callback()):  # type: ignore[misc]
        def on_train_begin(self, *_: object, **__: object) -> None:
            begun.append(trainer.state.global_step)

        def on_step_end(self, _: object, state: Any, control: Any, **__: object) -> None:
            control.should_training_stop = state.global_step >= until

    trainer.add_callback(Progress())
    trainer.train()
    result = {"begun": begun[0], "steps": steps, "epoch": trainer.state.epoch}
    (Path(directory) / f"result-{rank}.json").write_text(json.dumps(result))
    return 0


def transformers_callback() -> Any:
    from transformers import TrainerCallback

    return TrainerCallback


class Indices(Dataset[tuple[torch.Tensor, torch.Tensor, int]]):
    """A data set in which each sample contains its index, so that tests can tell which samples a step uses."""

    def __init__(self, count: int = 96) -> None:
        self._numbers = scripts.Numbers(count)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return (*self._numbers[index], index)


def train(directory: str, options: dict[str, Any], until: int, global_batch: int = 48) -> int:
    """Train with the same global batch on any number of ranks, and report which samples each step uses."""
    rank, _ = begin(directory)
    scenario = build(Kind(**options))
    dataset = Indices()
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, seed=3)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    accumulate = everstep.training.accumulation(global_batch, 4)
    model, optimizer = scenario.register["model"], scenario.register["optimizer"]
    session = everstep.training.init(data=loader, **scenario.register)
    begun = session.restore()
    steps: dict[int, list[list[int]]] = {}
    losses: list[str] = []
    for inputs, targets, indices in session.batches(until_step=until, accumulate=accumulate):
        samples = steps.setdefault(session.step, [])
        samples.append(indices.tolist())
        if len(samples) == 1:
            optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets) / accumulate
        loss.backward()  # type: ignore[no-untyped-call]
        if len(samples) == accumulate:
            optimizer.step()
            scenario.register["scheduler"].step()
        losses.append(loss.item().hex())
    result = {"begun": begun, "steps": steps, "losses": losses, "digest": scripts.digest(session)}
    session.close()
    (Path(directory) / f"result-{rank}.json").write_text(json.dumps(result))
    return 0
