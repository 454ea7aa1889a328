"""Scenarios of the adapter tests: small models, each with one property that a resume could restore wrongly.

A scenario builds all its objects from seeds. It returns the objects to register and a function that makes a step. `run`
trains the scenario. It writes a digest of the whole state, every loss of this launch, and the next random draws.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    default_collate,
    get_worker_info,
)

import everstep.training
from everstep.protocol.slot import HEADER_BYTES
from everstep.training.capture import CapturePlan, SlotMemory
from everstep.training.data import SeededCollator, SeededDataset, ShardedFiles, ShuffledBlocks
from everstep.training.session import TrainingSession
from everstep.training.state import RankState
from everstep.training.state_tree import tensor_bytes

WIDTH = 16


@dataclass
class Scenario:
    """The objects to register, and the function that makes a step."""

    register: dict[str, Any]
    step: Callable[[Any, TrainingSession], float]
    accumulate: int = 1
    after: Callable[[], None] = field(default=lambda: None)


class Losses:
    def __init__(self) -> None:
        self.values: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state["values"]


def run(name: str, directory: str, arguments: dict[str, Any]) -> int:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world)
    torch.manual_seed(0)
    scenario = SCENARIOS[name](**arguments.get("options", {}))
    torch.manual_seed(100 + rank)
    np.random.seed(200 + rank)
    random.seed(300 + rank)
    losses = Losses()
    session = _init(scenario, losses)
    begun = session.restore()
    for batch in session.batches(until_step=arguments["until"], accumulate=scenario.accumulate):
        losses.values.append(scenario.step(batch, session))
    scenario.after()
    if "keep" in arguments:
        keep(session, scenario.register, Path(arguments["keep"]), rank)
    result = {
        "rank": rank,
        "begun": begun,
        "step": session.step - 1,
        "losses": [value.hex() for value in losses.values],
        "digest": digest(session),
        "draws": [torch.rand(()).item().hex(), float(np.random.rand()).hex(), random.random().hex()],
        "unstable": sorted(session._guard.unstable),
        "blocked": len(session.blocked_seconds),
    }
    session.close()
    Path(directory, f"result-{rank}.json").write_text(json.dumps(result))
    return 0


def _init(scenario: Scenario, losses: Losses) -> TrainingSession:
    register = dict(scenario.register)
    extra = {"losses": losses, **register.pop("extra", {})}
    return everstep.training.init(extra=extra, **register)


def state_of(session: TrainingSession) -> RankState:
    return session._state


def digest(session: TrainingSession) -> dict[str, str]:
    """Return a short hash of each tensor of the state, and one hash of all values that are not tensors."""
    observed = state_of(session).observe()
    hashes = {
        item.name: hashlib.sha256(tensor_bytes(item.tensor).numpy().tobytes()).hexdigest()[:16]
        for item in observed.tensors
    }
    return {**hashes, "(values)": hashlib.sha256(observed.values).hexdigest()[:16]}


def keep(session: TrainingSession, registered: dict[str, Any], directory: Path, rank: int) -> None:
    """Write the rank's state as a slot's payload, and the whole tensors that the framework gathers."""
    keep_payload(session, directory, rank)
    whole = {name: tensor.detach().float().numpy() for name, tensor in gathered(registered).items()}
    np.savez(directory / f"whole-{rank}.npz", **{name.replace("/", "|"): value for name, value in whole.items()})


def keep_payload(session: TrainingSession, directory: Path, rank: int) -> None:
    """Write the rank's state as a slot's payload, and the offset and size of its index as JSON."""
    state = state_of(session)
    observed = state.observe()
    plan = CapturePlan.make(observed.tensors, state.parts(observed.tensors))
    path = directory / f"payload-{rank}"
    with path.open("wb") as file:
        file.truncate(HEADER_BYTES + plan.capacity_bytes(observed.values))
    memory = SlotMemory(path, plan.capacity_bytes(observed.values))
    with torch.no_grad():
        for view, state in zip(memory.views(plan), observed.tensors, strict=True):
            view.copy_(state.tensor)
    size = memory.write_values(plan, observed.values)
    path.write_bytes(bytes(memory.bytes_at(0, plan.index_offset + size)))
    (directory / f"index-{rank}").write_text(json.dumps([plan.index_offset, size]))


def gathered(registered: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return every parameter and optimizer state as a whole tensor, gathered by the framework's own functions."""
    found: dict[str, torch.Tensor] = {}
    if (engine := registered.get("engine")) is not None:
        import deepspeed
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        for name, parameter in engine.module.named_parameters():
            if parameter.requires_grad:
                found[f"model/{name}"] = safe_get_full_fp32_param(parameter)
                for key in ("exp_avg", "exp_avg_sq"):
                    found[f"optimizer/{name}/{key}"] = safe_get_full_optimizer_state(parameter, key)
            else:
                with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
                    found[f"model/{name}"] = parameter.detach().clone()
        return found
    model = getattr(registered["model"], "module", registered["model"])
    names = {parameter: name for name, parameter in model.named_parameters()}
    optimizers = registered["optimizer"]
    for called, optimizer in (optimizers if isinstance(optimizers, dict) else {"": optimizers}).items():
        prefix = f"optimizer/{called}/" if called else "optimizer/"
        for parameter, state in optimizer.state.items():
            found |= {f"{prefix}{names[parameter]}/{key}": value for key, value in state.items()}
    found |= {f"model/{name}": parameter for parameter, name in names.items()}
    return {name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for name, tensor in found.items()}


class Numbers(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """A data set for regression. `noisy` adds noise to each sample when the sample is fetched."""

    def __init__(self, count: int = 96, noisy: bool = False) -> None:
        generator = torch.Generator().manual_seed(5)
        self.inputs = torch.randn(count, WIDTH, generator=generator)
        self.targets = torch.randn(count, 1, generator=generator)
        self.noisy = noisy

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = self.inputs[index]
        if self.noisy:
            inputs = inputs + 0.1 * torch.randn(WIDTH) + float(np.random.rand()) + random.random()
        return inputs, self.targets[index]


class Stream(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    def __iter__(self) -> Any:
        yield from (Numbers()[index] for index in range(40))


class Positioned(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """A data set that keeps its position, and divides its noisy samples among ranks and workers."""

    def __init__(self) -> None:
        self.numbers = Numbers(noisy=True)
        self.position = 0
        self.start = 0

    def __iter__(self) -> Any:
        info = get_worker_info()
        reader = dist.get_rank() if info is None else 2 * info.id + dist.get_rank()
        readers = dist.get_world_size() * (1 if info is None else info.num_workers)
        start, self.start = self.start, 0
        for number in range(start, len(self.numbers)):
            self.position = number
            if number % readers == reader:
                yield self.numbers[number]

    def state_dict(self) -> dict[str, int]:
        return {"next": self.position + 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["next"]


def read_numbers(part: int) -> Any:
    """Yield the noisy samples of one of eight files."""
    numbers = Numbers(noisy=True)
    yield from (numbers[index] for index in range(12 * part, 12 * part + 12))


def rows_of_numbers(rows: list[dict[str, int]]) -> Any:
    """Combine noisy samples, whose numbers a streaming dataset has read."""
    numbers = Numbers(noisy=True)
    return default_collate([numbers[row["index"]] for row in rows])


def network(dropout: float = 0.1, depth: int = 3) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1))


def loader(batch_size: int = 4, **options: Any) -> DataLoader[Any]:
    noisy = options.pop("noisy", False)
    dataset = Numbers(noisy=noisy)
    sampler = DistributedSampler(dataset, seed=3)
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler, **options)


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5) * 0.98**step)


def average_gradients(*modules: nn.Module) -> None:
    for module in modules:
        for parameter in module.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()


def usual_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, *, averages: bool = False
) -> Callable[[Any, TrainingSession], float]:
    def step(batch: Any, _session: TrainingSession) -> float:
        inputs, targets = batch
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        if averages:
            average_gradients(model)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        return loss.item()

    return step


def plain() -> Scenario:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = schedule(optimizer)
    return Scenario(
        {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": loader()},
        usual_step(model, optimizer, scheduler, averages=True),
    )


def ddp(bucket_cap_mb: float = 0.001, static_graph: bool = False, compress: bool = False, depth: int = 6) -> Scenario:
    """Return a DDP scenario with several small gradient buckets.

    The layout of the buckets affects how sums are rounded.
    """
    model = nn.parallel.DistributedDataParallel(
        network(depth=depth), bucket_cap_mb=bucket_cap_mb, static_graph=static_graph
    )
    if compress:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        model.register_comm_hook(powerSGD_hook.PowerSGDState(None), powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = schedule(optimizer)
    return Scenario(
        {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": loader()},
        usual_step(model, optimizer, scheduler),
    )


def growing(kind: str = "plain", adds: bool = True, freezes_first: bool = False, delay: int = 0) -> Scenario:
    """Return a scenario that trains the last layer first, two more after step 4, and the first one after step 6.

    Args:
        kind: how the model is wrapped.
        adds: whether the script adds groups. Otherwise, the optimizer has all parameters from the beginning.
        freezes_first: whether the script freezes the layers before DDP wraps them, so that DDP never averages them.
        delay: number of steps by which rank 1 adds its groups later than rank 0.
    """
    model: nn.Module = network()
    layers = [module for module in model if isinstance(module, nn.Linear)]  # type: ignore[attr-defined]
    for layer in layers[:-1] if freezes_first else ():
        layer.requires_grad_(False)
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for layer in layers:
            fully_shard(layer)
        fully_shard(model)
    for layer in layers[:-1]:
        layer.requires_grad_(False)
    optimizer = torch.optim.AdamW(layers[-1].parameters() if adds else model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.8)
    stages = {4: layers[1:-1], 6: layers[:1]}
    usual = usual_step(model, optimizer, scheduler, averages=kind == "plain")

    def step(batch: Any, session: TrainingSession) -> float:
        loss = usual(batch, session)
        for layer in stages.get(session.step, ()):
            layer.requires_grad_(True)
        if adds:
            for layer in stages.get(session.step - delay * dist.get_rank(), ()):
                optimizer.add_param_group({"params": list(layer.parameters()), "lr": 1e-3})
        return loss

    return Scenario({"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": loader()}, step)


class Branches(nn.Module):
    """A module with two branches. Each step uses one branch; the parameters of the other branch get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList([network(depth=4), network(depth=4)])

    def forward(self, inputs: torch.Tensor, way: int) -> torch.Tensor:
        return self.ways[way](inputs)  # type: ignore[no-any-return]


def ddp_unused() -> Scenario:
    """Return a scenario in which each step uses only a part of the module, and gradients accumulate without
    all-reduce.
    """
    model = nn.parallel.DistributedDataParallel(
        Branches(), bucket_cap_mb=0.001, find_unused_parameters=True, gradient_as_bucket_view=True
    )
    optimizer = torch.optim.Adamax(model.parameters(), lr=1e-2)
    micro = 0

    def step(batch: Any, session: TrainingSession) -> float:
        nonlocal micro
        inputs, targets = batch
        micro += 1
        model.require_backward_grad_sync = micro % 2 == 0
        loss = F.mse_loss(model(inputs, session.step // 2 % 2), targets)
        loss.backward()
        if model.require_backward_grad_sync:
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    return Scenario({"model": model, "optimizer": optimizer, "data": loader()}, step, accumulate=2)


def fsdp(dtype: str = "fp32", copies: int = 1) -> Scenario:
    """Return a scenario whose parameters ranks divide. With two copies, two groups of ranks each hold a whole model."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = network()
    mesh = init_device_mesh("cpu", (copies, dist.get_world_size() // copies), mesh_dim_names=("copies", "parts"))
    options: dict[str, Any] = {"mesh": mesh if copies > 1 else mesh["parts"]}
    if dtype == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in model:
        if isinstance(module, nn.Linear):
            fully_shard(module, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = schedule(optimizer)

    def step(batch: Any, session: TrainingSession) -> float:
        inputs, targets = batch
        if session.step % 3 == 0:
            with torch.no_grad(), session.phase("eval"):
                model(inputs)  # after a forward pass, DeepSpeed's named_parameters() returns gathered tensors
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs).float(), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        return loss.item()

    return Scenario({"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": loader()}, step)


class Heads(nn.Module):
    """A module with two linear layers that ranks divide between them, and layers that stay whole."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 60)  # divisible by two to five ranks, because torch divides only evenly
        self.down = nn.Linear(60, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.last = nn.Linear(WIDTH, 1)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        hidden = self.before(inputs)
        return self.last(self.norm(hidden + self.down(F.gelu(self.up(F.dropout(hidden, 0.1))))))  # type: ignore[no-any-return]


def tensor_parallel(wraps: bool = False) -> Scenario:
    """Return a scenario with two optimizers: one for DTensors, and one for plain parameters.

    With `wraps`, DDP wraps the model.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("copies", "parts"))
    model: nn.Module = parallelize_module(Heads(), mesh["parts"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if wraps:
        model = nn.parallel.DistributedDataParallel(model, device_mesh=mesh["copies"])
    parameters: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        parameters["up." in name or "down." in name].append(parameter)
    optimizers: dict[str, torch.optim.Optimizer] = {
        "parts": torch.optim.AdamW(parameters[True], lr=1e-2),
        "whole": torch.optim.AdamW(parameters[False], lr=1e-2),
    }
    schedulers = {name: schedule(optimizer) for name, optimizer in optimizers.items()}

    def step(batch: Any, session: TrainingSession) -> float:
        inputs, targets = batch
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        torch.manual_seed(session.step)  # ranks that share one copy of the model draw the same random numbers
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        for name, optimizer in optimizers.items():
            optimizer.step()
            schedulers[name].step()
        return loss.item()

    dataset = DataLoader(Numbers(), batch_size=4, sampler=DistributedSampler(Numbers(), num_replicas=1, rank=0, seed=3))
    return Scenario({"model": model, "optimizer": optimizers, "scheduler": schedulers, "data": dataset}, step)


def zero(
    stage: int = 3,
    dtype: str = "fp32",
    accumulate: int = 2,
    freeze: bool = False,
    offload: bool = False,
    leave: bool = False,
    universal: str | None = None,
) -> Scenario:
    """Return a DeepSpeed ZeRO scenario.

    With `leave`, the script itself changes one layer, which its optimizer does not update. `universal` is the folder of
    a universal checkpoint that the engine loads first.
    """
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulate,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 64,
            "reduce_bucket_size": 4096,
            "allgather_bucket_size": 4096,
        },
    }
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if offload:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    if universal is not None:
        config["checkpoint"] = {"load_universal": True}
    deepspeed.init_distributed("gloo", dist_init_required=False)
    if stage == 3:
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = network()
    else:
        model = network()
    if freeze:
        for parameter in model[0].parameters():
            parameter.requires_grad_(False)
    kind = DeepSpeedCPUAdam if offload else torch.optim.AdamW
    # DeepSpeed's CPU Adam computes powers of the betas by repeated 32-bit multiplication, and a resume must do so, too.
    # For the betas of `offload`, directly computed powers differ from the third power on.
    left = list(model[0].parameters()) if leave else []
    held = [p for p in model.parameters() if p.requires_grad and all(p is not other for other in left)]
    optimizer = kind(held, lr=1e-2, betas=(0.85, 0.98) if offload else (0.9, 0.999))
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=schedule(optimizer), config=config, dist_init_required=False
    )

    if universal is not None:
        path, _ = engine.load_checkpoint(universal, load_lr_scheduler_states=False)
        assert path is not None

    def step(batch: Any, _session: TrainingSession) -> float:
        inputs, targets = batch
        output = engine(inputs.to(torch.bfloat16) if dtype == "bf16" else inputs)
        loss = F.mse_loss(output.float(), targets)
        engine.backward(loss)
        engine.step()
        with torch.no_grad(), deepspeed.zero.GatheredParameters(left, modifier_rank=0, enabled=stage == 3):
            for parameter in left:
                parameter.mul_(0.99)
        return loss.item()

    return Scenario({"engine": engine, "data": loader()}, step)


class Wrapper(nn.Module):
    """A script's own module that contains a model of transformers and one more tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.net = model
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.net(input_ids=ids).logits / self.temperature


TOKENS = torch.arange(24).reshape(2, 12)


def transformers(kind: str = "ddp", logits: str = "") -> Scenario:
    """Return a scenario with a model of Hugging Face's transformers, trained by one of several frameworks.

    After training, rank 0 writes the logits of `TOKENS` to the file `logits`.
    """
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1}
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
        net: nn.Module = LlamaForCausalLM(LlamaConfig(hidden_size=16, intermediate_size=32, **heads, **sizes))
        model: nn.Module = fully_shard(net)
    else:
        dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        net = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, n_positions=16, **dropouts, **sizes))
        model = net if kind == "zero" else nn.parallel.DistributedDataParallel(Wrapper(net))
    register: dict[str, Any] = {"data": loader()}
    if kind == "zero":
        import deepspeed

        deepspeed.init_distributed("gloo", dist_init_required=False)
        config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}, "steps_per_print": 2**31}
        config["zero_allow_untested_optimizer"] = True
        model, *_ = deepspeed.initialize(
            model=net,
            optimizer=torch.optim.AdamW(net.parameters(), lr=1e-2),
            config=config,
            dist_init_required=False,
        )
        register["engine"] = model
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        register |= {"model": model, "optimizer": optimizer}

    def step(_batch: Any, _session: TrainingSession) -> float:
        output = model(TOKENS)
        output = output if isinstance(output, torch.Tensor) else output.logits
        loss = F.cross_entropy(output[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
        if kind == "zero":
            model.backward(loss)
            model.step()
        else:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.item()

    def after() -> None:
        with torch.no_grad():
            found = net(input_ids=TOKENS).logits
        if kind == "fsdp":
            net.reshard()  # type: ignore[operator]
        if dist.get_rank() == 0:
            np.save(logits, found.numpy())

    return Scenario(register, step, after=after)


class Counted(nn.Module):
    """A module whose output depends on how often it was called. Only `get_extra_state` returns this number."""

    calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return inputs / (1 + self.calls / 8)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def batch_norm() -> Scenario:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), Counted(), nn.Linear(WIDTH, 1))
    model.register_buffer("scratch", torch.zeros(3), persistent=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, nesterov=True)
    scheduler = schedule(optimizer)
    usual = usual_step(model, optimizer, scheduler, averages=True)

    def step(batch: Any, session: TrainingSession) -> float:
        # replace the buffer's tensor, so that the adapter has to look the buffer up again
        model.scratch = model.scratch + 1
        return usual(batch, session) + float(model.scratch[0])

    return Scenario({"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": loader()}, step)


def two_optimizers() -> Scenario:
    """Return a scenario whose second optimizer steps every third time, so that its gradients accumulate over several
    steps.
    """
    models = {"body": network(), "head": nn.Linear(1, 1)}
    optimizers: dict[str, torch.optim.Optimizer] = {
        "body": torch.optim.AdamW(models["body"].parameters(), lr=1e-2),
        "head": torch.optim.Adagrad(models["head"].parameters(), lr=1e-1),
    }
    schedulers = {name: schedule(optimizer) for name, optimizer in optimizers.items()}

    def step(batch: Any, session: TrainingSession) -> float:
        inputs, targets = batch
        optimizers["body"].zero_grad()
        loss = F.mse_loss(models["head"](models["body"](inputs)), targets)
        loss.backward()
        average_gradients(models["body"])
        optimizers["body"].step()
        schedulers["body"].step()
        if session.step % 3 == 0:
            average_gradients(models["head"])
            optimizers["head"].step()
            optimizers["head"].zero_grad()
            schedulers["head"].step()
        return loss.item()

    return Scenario({"model": models, "optimizer": optimizers, "scheduler": schedulers, "data": loader()}, step)


def scaler() -> Scenario:
    """Return a scenario with a gradient scaler in which every fourth step overflows and is skipped."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = schedule(optimizer)
    gradient_scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)

    def step(batch: Any, session: TrainingSession) -> float:
        inputs, targets = batch
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        gradient_scaler.scale(loss).backward()
        average_gradients(model)
        if session.step % 4 == 0:
            next(model.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]
        gradient_scaler.step(optimizer)
        gradient_scaler.update()
        scheduler.step()
        return loss.item() + gradient_scaler.get_scale()

    register = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "data": loader(),
        "extra": {"scaler": gradient_scaler},
    }
    return Scenario(register, step)


def max_norm() -> Scenario:
    """Return a scenario whose embedding changes its own weights in forward.

    Only an audit, which compares the copy with the live tensors byte by byte, detects this change.
    """
    model = nn.ModuleDict({"table": nn.Embedding(32, WIDTH, max_norm=0.5), "rest": network()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = schedule(optimizer)

    def step(batch: Any, _session: TrainingSession) -> float:
        inputs, targets = batch
        optimizer.zero_grad()
        rows = model["table"]((inputs[:, 0].abs() * 10).long() % 32)
        loss = F.mse_loss(model["rest"](inputs + rows), targets)
        loss.backward()
        average_gradients(model)
        optimizer.step()
        scheduler.step()
        return loss.item()

    return Scenario({"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": loader()}, step)


def momentum_encoder() -> Scenario:
    """Return a scenario whose frozen weights follow the trained weights through `.data`.

    torch's version counter does not count such changes.
    """
    online = network(dropout=0.0)
    target = copy.deepcopy(online)
    target.requires_grad_(False)
    optimizer = torch.optim.AdamW(online.parameters(), lr=1e-2)
    scheduler = schedule(optimizer)

    def step(batch: Any, _session: TrainingSession) -> float:
        inputs, targets = batch
        for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
            slow.data.mul_(0.9).add_(fast.data, alpha=0.1)
        optimizer.zero_grad()
        loss = F.mse_loss(online(inputs), targets + target(inputs).detach())
        loss.backward()
        average_gradients(online)
        optimizer.step()
        scheduler.step()
        return loss.item()

    return Scenario(
        {
            "model": {"online": online, "target": target},
            "optimizer": optimizer,
            "scheduler": scheduler,
            "data": loader(),
        },
        step,
    )


def kept_gradients() -> Scenario:
    """Return a scenario whose result depends on whether a gradient is zero or missing.

    It calls `zero_grad` with `set_to_none=False`. A frozen layer and an unused layer have no gradient. A branch that
    only the first steps use has a gradient of zeros afterwards.
    """
    model = nn.ModuleDict(
        {"body": network(), "side": nn.Linear(1, 1), "never": nn.Linear(1, 1), "frozen": nn.Linear(1, 1)}
    )
    model["frozen"].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = schedule(optimizer)

    def step(batch: Any, session: TrainingSession) -> float:
        inputs, targets = batch
        optimizer.zero_grad(set_to_none=False)
        output = model["frozen"](model["body"](inputs))
        if session.step <= 2:
            output = model["side"](output)
        loss = F.mse_loss(output, targets)
        loss.backward()
        average_gradients(model)
        optimizer.step()
        scheduler.step()
        return loss.item()

    return Scenario({"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": loader()}, step)


def accumulated() -> Scenario:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = schedule(optimizer)
    count = 0

    def step(batch: Any, _session: TrainingSession) -> float:
        nonlocal count
        inputs, targets = batch
        loss = F.mse_loss(model(inputs), targets)
        (loss / 3).backward()
        count += 1
        if count % 3 == 0:
            average_gradients(model)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return loss.item()

    return Scenario(
        {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": loader()}, step, accumulate=3
    )


def data(kind: str = "plain", workers: int = 0, persistent: bool = False) -> Scenario:
    """Return a scenario that reads augmented data through one kind of loader.

    At two ranks, an epoch has four batches.
    """
    options: dict[str, Any] = {"noisy": True, "num_workers": workers, "batch_size": 12}
    if workers:
        options["persistent_workers"] = persistent
    made: Any
    if kind == "plain":
        made = loader(**options)
    elif kind == "random":  # the loader draws its order from the random generator of the process
        made = DataLoader(
            Numbers(noisy=True),
            batch_size=24,
            shuffle=True,
            num_workers=workers,
            persistent_workers=persistent and workers > 0,
        )
    elif kind == "generator":
        generator = torch.Generator().manual_seed(9)
        made = DataLoader(Numbers(noisy=True), batch_size=24, shuffle=True, num_workers=workers, generator=generator)
    elif kind == "stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader

        made = StatefulDataLoader(Numbers(noisy=True), batch_size=24, shuffle=True, num_workers=workers)
    elif kind == "iterable":
        made = DataLoader(Stream(), batch_size=10, num_workers=workers)
    elif kind == "list":
        made = list(loader())
    elif kind == "positioned":
        made = DataLoader(Positioned(), batch_size=12, num_workers=workers)
    elif kind == "files":
        files = ShardedFiles(range(8), read_numbers, [12] * 8, batch_size=12, shuffle=True, block_size=20, open_files=4)
        made = DataLoader(files, batch_size=None, num_workers=workers, persistent_workers=persistent)
    elif kind == "seeded":
        numbers = SeededDataset(Numbers(noisy=True))  # type: ignore[arg-type]
        sampler: DistributedSampler[Any] = DistributedSampler(numbers, seed=3)
        collate = SeededCollator(default_collate, numbers)
        made = DataLoader(numbers, batch_size=12, sampler=sampler, num_workers=workers, collate_fn=collate)
    elif kind == "streaming":
        from datasets import Dataset as Table
        from datasets.distributed import split_dataset_by_node

        rows = Table.from_dict({"index": list(range(96))}).to_iterable_dataset(num_shards=8)
        rows = split_dataset_by_node(rows, dist.get_rank(), dist.get_world_size())
        made = DataLoader(ShuffledBlocks(rows, 5), batch_size=12, num_workers=workers, collate_fn=rows_of_numbers)
    else:
        raise ValueError(kind)
    scenario = plain()
    scenario.register["data"] = made
    return scenario


SCENARIOS: dict[str, Callable[..., Scenario]] = {
    function.__name__: function
    for function in (
        plain,
        ddp,
        ddp_unused,
        growing,
        fsdp,
        tensor_parallel,
        zero,
        transformers,
        batch_norm,
        two_optimizers,
        scaler,
        max_norm,
        momentum_encoder,
        kept_gradients,
        accumulated,
        data,
    )
}
