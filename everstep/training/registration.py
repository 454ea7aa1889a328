"""Implements `init`, which checks the objects that a script registers and creates the script's session.

Invariant: `init` changes none of the script's objects before it has checked that all of them can be resumed. The agent
receives every error before `init` raises it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer

from everstep.protocol.rank_messages import RankFault, RankHello
from everstep.training.adapters.base import Adapter, qualified_name
from everstep.training.adapters.ddp import DDPAdapter
from everstep.training.adapters.deepspeed import DeepSpeedAdapter, is_engine
from everstep.training.adapters.fsdp import FSDPAdapter
from everstep.training.adapters.plain import PlainAdapter
from everstep.training.agent_link import AgentLink, NullLink, ReplayLink, UnixAgentLink
from everstep.training.copier import Copier, CpuCopier
from everstep.training.data import DataStream, check_apart
from everstep.training.data.protocols import check_signatures
from everstep.training.determinism_check import DeterminismCheck
from everstep.training.errors import CannotResume, SessionMisuse, TrainingError
from everstep.training.pretrained import Pretrained
from everstep.training.rehearsal import Replay
from everstep.training.script import Environment
from everstep.training.session import TrainingSession
from everstep.training.state import RankState, Stateful
from everstep.training.step_watch import check_bound
from everstep.training.values import PLAIN, Values


def init(
    *,
    model: torch.nn.Module | Mapping[str, torch.nn.Module] | None = None,
    optimizer: Optimizer | Mapping[str, Optimizer] | None = None,
    engine: torch.nn.Module | Mapping[str, torch.nn.Module] | None = None,
    scheduler: Stateful | Mapping[str, Stateful] | None = None,
    data: Iterable[Any] | Mapping[str, Iterable[Any]] | None = None,
    extra: Mapping[str, Any] | None = None,
    guard: Literal["step", "forward"] = "step",
    trusted_optimizers: Sequence[type] = (),
    tokenizer: Any = None,
    options_from_script: Sequence[str] = (),
) -> TrainingSession:
    """Register the objects whose state snapshots must contain, and return the session.

    Every rank calls this once, after the script has wrapped and compiled the model and built the optimizer, and before
    the first forward pass.

    Args:
        model: one module, or several by name. Pass the wrapped modules that the script calls.
        optimizer: one optimizer, or several by name.
        engine: one DeepSpeed engine, or several by name. An engine includes its model and its optimizer. Other models
            and optimizers may be registered in addition.
        scheduler: one scheduler, or several by name. `state_dict` must return tensors and plain values only.
        data: one loader, or several by name. `everstep.training.data` lists the loaders that can be resumed.
        extra: other state by name: objects with `state_dict` and `load_state_dict`, for example a gradient scaler or
            averaged weights; and plain values, which the script then reads and writes as `session.extra[name]`.
        guard: the call of the script that waits for the background copy. "step": the next optimizer step. "forward":
            the next forward pass, for optimizers that step inside backward or inside a captured CUDA graph.
        trusted_optimizers: classes outside torch.optim that keep all their state in `state` and `param_groups`. Of
            other classes, `init` accepts those that continue bit for bit in a trial with small parameters.
        tokenizer: an object with `save_pretrained`, whose files an export writes beside the model.
        options_from_script: names of options, such as `("lr", "weight_decay")`, whose values come from the script also
            if a restored step has others. A learning rate is scaled at its place in the schedule.

    Returns:
        The session.

    Raises:
        CannotResume: a registered object cannot be restored. The error names the object.
        SessionMisuse: the script passes neither a model nor an engine, several ranks run without a process group, or
            `options_from_script` names an unknown option.
        AgentUnreachable: the agent at the socket named in the environment does not answer.
        StaleGeneration: the agent runs a different generation.
    """
    environment = Environment.read()
    check = DeterminismCheck.read(environment)
    if check is not None:
        environment = check.environment
    replay = Replay.read()
    link = _link(environment, replay) if check is None else check.link
    try:
        if environment.world_size > 1 and not (dist.is_available() and dist.is_initialized()):
            raise SessionMisuse(
                "call init() after torch.distributed.init_process_group (or deepspeed.init_distributed), or run the "
                "script as one rank (--node-count 1)"
            )
        link.welcome()
        adapters = _adapters(_named(model), _named(optimizer), _named(engine), trusted_optimizers)
        objects = {f"scheduler/{name}" if name else "scheduler": item for name, item in _named(scheduler).items()}
        values = Values({name: item for name, item in (extra or {}).items() if isinstance(item, PLAIN)})
        objects |= {f"extra/{name}": item for name, item in (extra or {}).items() if name not in values}
        objects |= {"extra": values} if values else {}
        for name, item in objects.items():
            if not callable(getattr(item, "state_dict", None)) or not callable(getattr(item, "load_state_dict", None)):
                raise CannotResume(name, f"{qualified_name(type(item))} has no state_dict and load_state_dict")
            check_signatures(name, item)
        check_bound(objects, [optimizer for adapter in adapters for optimizer in adapter.optimizers().values()])
        seed = torch.initial_seed()
        streams = {
            name or "data": DataStream(f"data/{name}" if name else "data", loader, seed, is_traced=check is not None)
            for name, loader in _named(data).items()
        }
        check_apart(streams.values())
        if environment.is_elastic:
            for stream in streams.values():
                stream.check_elastic()
        pretrained = Pretrained({**_named(model), **_named(engine)}, tokenizer)
        state = RankState(adapters, objects, streams, environment, pretrained, options_from_script)
        session = TrainingSession(
            state,
            link,
            environment,
            make_copier(state.devices(), environment),
            has_many_streams=isinstance(data, Mapping),
            extra=values,
            check=check,
            replay=replay,
        )
    except TrainingError as error:
        link.send(RankFault(generation=link.generation, code=error.code, message=str(error)))
        link.close()
        raise
    if guard == "forward":
        for module in (module for adapter in adapters for module in adapter.modules()):
            module.register_forward_pre_hook(session.fence_hook)
    for adapter in adapters:
        adapter.prepare()
    return session


def make_copier(devices: set[int], environment: Environment) -> Copier:
    """Return a started copier for these GPUs, or for host memory. Raises CannotResume for more than one GPU."""
    if not devices:
        return CpuCopier(is_crowded=environment.is_crowded)
    if len(devices) > 1:
        raise CannotResume(
            "model", f"one rank has tensors on the CUDA devices {sorted(devices)}; use one device per rank"
        )
    # Import here, so that a rank without a GPU does not pay for this import.
    from everstep.training.cuda_copier import NODE_RING_BYTES, CopySizes, CudaCopier
    from everstep.training.cuda_device import CudaDevice

    return CudaCopier(CudaDevice(devices.pop()), CopySizes(ring_bytes=NODE_RING_BYTES // environment.ranks_per_node))


def _link(environment: Environment, replay: Replay | None) -> AgentLink:
    if environment.agent_socket is None:
        return NullLink()
    hello = RankHello(
        job=environment.job,
        run=environment.run,
        generation=environment.generation,
        rank=environment.rank,
        pid=os.getpid(),
    )
    if replay is not None:
        seconds, is_child = environment.welcome_seconds, replay.is_child
        return ReplayLink(environment.agent_socket, hello, seconds, replay.base, is_child=is_child)
    return UnixAgentLink(environment.agent_socket, hello, environment.welcome_seconds)


def _named(given: object) -> dict[str, Any]:
    if given is None:
        return {}
    return dict(given) if isinstance(given, Mapping) else {"": given}


def _adapters(
    models: Mapping[str, torch.nn.Module],
    optimizers: Mapping[str, Optimizer],
    engines: Mapping[str, torch.nn.Module],
    trusted: Sequence[type],
) -> list[Adapter]:
    modules = {name: model for name, model in models.items() if not is_engine(model)}
    doubled = engines.keys() & models.keys()
    engines = {**engines, **{name: model for name, model in models.items() if is_engine(model)}}
    adapters: list[Adapter] = [DeepSpeedAdapter(name, engine, trusted) for name, engine in engines.items()]
    others = {
        name: optimizer
        for name, optimizer in optimizers.items()
        if not any(_is_own(optimizer, engine) for engine in engines.values())
    }
    for name, optimizer in others.items():
        _check_apart(name, optimizer, engines)
    if clashing := sorted(doubled | (engines.keys() & others.keys())):
        raise SessionMisuse(
            f"an engine and another argument have the same name {clashing[0]!r}; name the engine: engine={{name: …}}"
        )
    if modules or others:
        adapters.append(_torch_adapter(modules, others, trusted))
    if not adapters:
        raise SessionMisuse("init() needs a model and its optimizer, or a DeepSpeed engine")
    return adapters


def _is_own(optimizer: object, engine: Any) -> bool:
    """Return whether `deepspeed.initialize` returned the optimizer or received it as an argument."""
    return optimizer is engine.optimizer or optimizer is engine.optimizer.optimizer


def _check_apart(name: str, optimizer: Optimizer, engines: Mapping[str, Any]) -> None:
    members = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for engine_name, engine in engines.items():
        if any(id(parameter) in members for parameter in engine.module.parameters()):
            where, whose = (
                f"optimizer/{name}" if name else "optimizer",
                f"engine {engine_name}" if engine_name else "the engine",
            )
            raise CannotResume(where, f"it contains parameters of {whose}, which have their own optimizer; omit it")


def _torch_adapter(
    models: Mapping[str, torch.nn.Module], optimizers: Mapping[str, Optimizer], trusted: Sequence[type]
) -> Adapter:
    kinds: set[type[PlainAdapter]] = set()
    for name, model in models.items():
        for module in model.modules():
            if isinstance(module, (FullyShardedDataParallel, torch.nn.DataParallel)):
                raise CannotResume(
                    f"model/{name}",
                    (
                        f"Everstep does not know whether {qualified_name(type(module))} restores "
                        "bit-identically; use fully_shard or DDP"
                    ),
                )
            if isinstance(module, DistributedDataParallel):
                kinds.add(DDPAdapter)
            elif isinstance(module, FSDPModule):
                kinds.add(FSDPAdapter)
    parameters = [parameter for model in models.values() for parameter in model.parameters()]
    parameters += [
        parameter
        for optimizer in optimizers.values()
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
    # Detect DTensors under DDP too. DDP replaces them by plain tensors and sets `_st_info` on these parameters.
    if any(isinstance(parameter, DTensor) or hasattr(parameter, "_st_info") for parameter in parameters):
        kinds.add(FSDPAdapter)
    if len(kinds) > 1:
        raise CannotResume(
            "model",
            (
                "Everstep does not know whether DDP with fully_shard or tensor parallel parameters in one "
                "session restores bit-identically"
            ),
        )
    return (kinds.pop() if kinds else PlainAdapter)(models, optimizers, trusted)
