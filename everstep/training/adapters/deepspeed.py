"""Adapter for DeepSpeed engines with ZeRO stage 1, 2 or 3, in fp32 or bf16.

A snapshot contains a rank's partition of the fp32 master weights with their optimizer state, buffers, parameters that
the optimizer does not update, and the engine's counters. After a load, all ranks together compute the 16-bit weights.

Invariant: no other file accesses private attributes of DeepSpeed's engines. This file accesses only those of tested
classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Protocol, cast

import msgspec
import torch
from torch.optim.optimizer import Optimizer

from everstep.protocol.parts import TensorPart, parts_of_range, whole
from everstep.training.adapters.base import (
    SCALARS,
    AdapterState,
    ExtraStates,
    Layout,
    NamedOptimizer,
    NamedTensors,
    check_distinct,
    check_optimizer,
    check_parameter,
    plain_local,
    plain_rewrap,
    qualified_name,
    tensor_names,
)
from everstep.training.adapters.buffers import Buffers, buffers_of
from everstep.training.arena import Arena
from everstep.training.capture import StateTensor
from everstep.training.earlier import EarlierState, EarlierTensors, LoadTarget
from everstep.training.errors import CannotRelayout, CannotResume
from everstep.training.module_tree import ModuleTree, refusal
from everstep.training.saved_tensors import SavedTensors
from everstep.training.state_tree import Tree, dtype_name, dtype_of

_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
_STAGE_3 = "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3"
_STAGE_1_AND_2 = "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer"
_ENGINE = "deepspeed.runtime.engine.DeepSpeedEngine"
_CPU_ADAM = "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam"


class _Scheduler(Protocol):
    def state_dict(self) -> Tree: ...
    def load_state_dict(self, state: Tree) -> None: ...


def is_engine(model: object) -> bool:
    """Return whether `model` is a DeepSpeed engine of any kind, without importing DeepSpeed."""
    return any(qualified_name(kind) == _ENGINE for kind in type(model).__mro__)


class DeepSpeedAdapter:
    """Adapter for one engine. Raises CannotResume if its stage, optimizer or options may not restore bit for bit."""

    kind = "deepspeed"
    revision = 0  # An engine refuses all changes that this number counts.

    def __init__(self, name: str, engine: torch.nn.Module, trusted: Sequence[type] = ()) -> None:
        self._name = name or "engine"
        self._prefix = f"{name}." if name else ""
        self._engine = cast(Any, engine)
        self._zero = self._engine.optimizer
        _check_engine(self._name, self._engine)
        base: Optimizer = self._zero.optimizer
        self._is_cpu_adam = qualified_name(type(base)) == _CPU_ADAM
        check_optimizer(self._name, base, (*trusted, type(base)) if self._is_cpu_adam else trusted)
        self._is_stage_3 = self._engine.zero_optimization_stage() == 3
        masters: list[torch.Tensor] = (
            self._zero.fp32_partitioned_groups_flat if self._is_stage_3 else self._zero.single_partition_of_fp32_groups
        )
        self._masters = [(f"master{number}", master) for number, master in enumerate(masters)]
        self._optimizer = NamedOptimizer(name, base, self._masters, plain_local, plain_rewrap)
        parameters = list(self._engine.module.named_parameters())
        buffers = buffers_of(self._engine.module)
        names = tensor_names(
            [*((raw, id(p)) for raw, p in parameters), *((raw, (id(module), key)) for raw, module, key in buffers)]
        )
        self._parameters = [(called, p) for called, (_, p) in zip(names, parameters, strict=False)]
        held = set(
            map(id, chain.from_iterable(self._zero.fp16_groups if self._is_stage_3 else self._zero.bit16_groups))
        )
        self._others = [(called, p) for called, p in self._parameters if id(p) not in held or not p.requires_grad]
        """Parameters without a master weight: frozen, or in no group."""
        of_buffers = names[len(parameters) :]
        self._buffers = Buffers(plain_local)
        self._buffers.add(self._prefix, self._engine.module, of_buffers)
        self._extra = ExtraStates()
        self._extra.add("", self._engine.module)
        check_distinct([*(called for called, _ in (*self._masters, *self._others)), *of_buffers, *self._extra.names])
        self._tree = ModuleTree({"": self._engine.module})
        self._listed = NamedTensors()
        self._betas: tuple[float, ...] = tuple(base.param_groups[0].get("betas", ()))
        self.check()
        self._facts = self._describe()

    def prepare(self) -> None:
        """Do nothing, because `deepspeed.initialize` has already determined ZeRO's layout."""

    def facts(self) -> dict[str, str]:
        return self._facts

    def check(self) -> None:
        """Raise CannotResume for replaced modules, a `boundary` between micro-batches, or changed betas."""
        if self._tree.has_changed():
            refused = refusal(self._name, self._tree, ModuleTree({"": self._engine.module}), follows=False)
            if refused is not None:
                raise refused
        self._buffers.check()
        check_accumulation(self._name, self._engine)
        if self._is_cpu_adam:
            check_cpu_adam(self._name, self._optimizer.optimizer, self._betas)

    def observe(self) -> AdapterState:
        of_optimizer, values = self._optimizer.observe()
        return self._state(of_optimizer, values)

    def forecast(self) -> AdapterState | None:
        foreseen = self._optimizer.forecast()
        return None if foreseen is None else self._state(foreseen, self._optimizer.observe()[1])

    def _state(self, of_optimizer: list[StateTensor], values: Tree) -> AdapterState:
        listed = self._listed.of(
            [*(master for _, master in self._masters), *(_partition(p) for _, p in self._others)],
            None,
            self._named_weights,
        )
        fresh, buffers = self._buffers.observe()
        plain = {"optimizer": values, "buffers": buffers, "extra_states": self._extra.observe()}
        return AdapterState([listed, of_optimizer], fresh, {**plain, **self._counters()})

    def _named_weights(self) -> list[StateTensor]:
        weights = [(name, master, True, False) for name, master in self._masters]
        # The script may at any time change a trainable parameter that has no master weight. Such parameters are
        # therefore copied at the boundary, not during the next step.
        weights += [
            (name, _partition(parameter), not parameter.requires_grad, not parameter.requires_grad)
            for name, parameter in self._others
        ]
        return [
            StateTensor(f"model/{self._prefix}{name}", tensor, is_deferred, is_frozen=is_frozen)
            for name, tensor, is_deferred, is_frozen in weights
        ]

    def parts(self, states: Sequence[StateTensor]) -> Mapping[str, tuple[TensorPart, ...]]:
        if self._has_tensor_parallelism():
            # Give these tensors no boxes (pieces of whole tensors). Each rank holds a slice of a parameter, and
            # DeepSpeed does not expose the slice's position.
            return {state.name: () for state in states if state.name.startswith(("model/", self._optimizer.prefix))}
        of_model = self._find_parts()
        sizes = {name: master.numel() for name, master in self._masters}
        found: dict[str, tuple[TensorPart, ...]] = {}
        for state in states:
            if state.name in of_model:
                found[state.name] = of_model[state.name]
            master, key = self._optimizer.split_name(state.name) or ("", "")
            if (of_master := of_model.get(f"model/{self._prefix}{master}")) is None:
                continue
            parts = [
                msgspec.structs.replace(part, name=f"{self._optimizer.prefix}{part.name.removeprefix('model/')}/{key}")
                for part in of_master
            ]
            # A master weight contains many parameters. A scalar of its optimizer state, such as the count of steps,
            # therefore gets one box for each of these parameters.
            if state.tensor.dim() == 0:
                parts = [whole(name, ()) for name in dict.fromkeys(part.name for part in parts)]
            elif state.tensor.numel() != sizes[master]:
                # The state has a different number of elements than the master weight, so the adapter cannot know which
                # elements of the state belong to which parameter.
                parts = []
            found[state.name] = tuple(parts)
        return {**found, **self._buffers.transient_parts()}

    def expect_restore(self) -> Sequence[Arena]:
        return ()  # `deepspeed.initialize` has already created all state.

    @torch.no_grad()
    def load(self, tensors: SavedTensors, values: Tree) -> None:
        assert isinstance(values, dict)
        for name, master in self._masters:
            tensors.bring(f"model/{self._prefix}{name}", master.data)
        for name, parameter in self._others:
            tensors.bring(f"model/{self._prefix}{name}", _partition(parameter).data)
        self._optimizer.load(tensors, values["optimizer"])
        if self._is_cpu_adam:
            replay_powers(self._optimizer.optimizer)
        self._buffers.load(tensors, values["buffers"])
        self._extra.load(values["extra_states"])
        for key, value in values["engine"].items():
            setattr(self._engine, key, value)
        for key, value in values["zero"].items():
            setattr(self._zero, key, value)
        for key, value in values["scaler"].items():
            setattr(self._zero.loss_scaler, key, value)
        if values["scheduler"] is not None:
            cast(_Scheduler, self._engine.lr_scheduler).load_state_dict(values["scheduler"])

    def targets(self, earlier: EarlierTensors, values: EarlierState) -> Sequence[LoadTarget]:
        if self._has_tensor_parallelism():
            raise CannotRelayout(
                self._name, "DeepSpeed's tensor parallelism does not name the slices of its ranks. Use FSDP2 for it"
            )
        of_model = self._find_parts()
        found: list[LoadTarget] = []
        for name, master in self._masters:
            place = f"model/{self._prefix}{name}"
            found.append(LoadTarget(place, tuple(master.shape), master.dtype, of_model[place], is_padded=True))
        for name, parameter in self._others:
            place, local = f"model/{self._prefix}{name}", _partition(parameter)
            held = of_model.get(place, (whole(place, tuple(local.shape)),))
            found.append(LoadTarget(place, tuple(local.shape), local.dtype, held, is_padded=place in of_model))
        for name, master in self._masters:
            found += self._state_targets(name, master, of_model[f"model/{self._prefix}{name}"], earlier)
        _, own = self._buffers.of_earlier(earlier, values.adapter["buffers"])
        return [*found, *own]

    def _state_targets(
        self, name: str, master: torch.Tensor, parts: Sequence[TensorPart], earlier: EarlierTensors
    ) -> list[LoadTarget]:
        """Return a master weight's optimizer state with its boxes. Missing state becomes zeros, as in DeepSpeed."""
        prefix = self._optimizer.prefix
        owners = {part.name: earlier.entries(prefix + part.name.removeprefix("model/")) for part in parts}
        # `known` contains optimizer state by parameter. The keys and dtypes of this rank's state are read from it. If
        # this rank's partition contains only padding, the partition belongs to no parameter and `owners` is empty.
        # `known` then contains the state of all parameters of the optimizer.
        known = owners if parts else dict(earlier.entries_below(prefix))
        found: list[LoadTarget] = []
        if not any(known.values()):
            # The shards that this rank has mapped into its memory so far contain no optimizer state for its partition.
            # The rank maps further shards while any target is unfilled, so add a target: the step count of one
            # parameter. One parameter suffices. For a partition of padding, the shard with this step count supplies the
            # keys and dtypes. For any other partition, the shards with the partition's weights also contain the
            # optimizer state, and the rank maps these shards anyway. The target is optional, because the earlier
            # optimizer may have had no state: if no shard contains the step count, the rank loads without it.
            owner = next(called for called, p in self._parameters if all(p is not other for _, other in self._others))
            scalar = f"{prefix}{self._prefix}{owner}/{SCALARS[0]}"
            found.append(LoadTarget(scalar, (), torch.float32, (whole(scalar, ()),), is_optional=True))
        for key in dict.fromkeys(key for entries in known.values() for key in entries):
            held = next(entries[key] for entries in known.values() if key in entries)
            dtype = dtype_of(held.dtype)
            place = f"{prefix}{name}/{key}"
            if key in SCALARS:
                of_scalar = [
                    whole(f"{prefix}{owner.removeprefix('model/').removeprefix(prefix)}/{key}", ())
                    for owner, entries in known.items()
                    if key in entries
                ]
                found.append(LoadTarget(place, (), dtype, tuple(of_scalar)))
                continue
            of_key: list[TensorPart] = []
            for part in parts:
                logical = f"{prefix}{part.name.removeprefix('model/')}/{key}"
                if key not in owners[part.name]:
                    continue
                if (shape := owners[part.name][key].shape) != part.shape:
                    raise CannotRelayout(
                        logical,
                        f"this state has the shape {list(shape)}, its parameter {list(part.shape)}. ZeRO keeps one "
                        "element of state per element of a parameter; use an optimizer that does so",
                    )
                of_key.append(msgspec.structs.replace(part, name=logical))
            found.append(LoadTarget(place, tuple(master.shape), dtype, tuple(of_key), is_padded=True))
        return found

    def translate(self, values: EarlierState) -> Tree:
        saved, live = values.adapter, self._counters()
        zero: dict[str, Tree] = {"zero": live["zero"], "scaler": saved.get("scaler", live["scaler"])}
        scheduler = values.scheduler()
        if live["scheduler"] is None and not values.is_of_engine:
            # Ignore a scheduler that the script itself owned in the earlier launch, because this engine has no
            # scheduler.
            scheduler = None
        if (scheduler is None) != (live["scheduler"] is None):
            had = "no scheduler" if scheduler is None else "a scheduler"
            raise CannotRelayout(
                "scheduler", f"the earlier launch had {had}, this engine differs. Pass the scheduler to initialize()"
            )
        accumulation = int(self._engine.gradient_accumulation_steps())
        if values.is_of_engine:
            optimizer = self._optimizer.adopt(saved["optimizer"])
            counters = dict(saved["engine"])
            before = int(values.facts.get(f"accumulation {self._name}", accumulation))
            # Convert the count of micro-batches to this launch's number of micro-batches per step. DeepSpeed ends a
            # step when the count is a multiple of this number.
            counters["micro_steps"] = counters["micro_steps"] // before * accumulation
        else:
            optimizer = self._optimizer.adopt(_only_optimizer(self._optimizer.name, saved))
            step = int(values.step)
            counters = {
                "global_steps": step,
                "global_samples": step * int(self._engine.train_batch_size()),
                "micro_steps": step * accumulation,
                "skipped_steps": 0,
            }
        return {
            "optimizer": optimizer,
            "buffers": saved["buffers"],
            "extra_states": saved["extra_states"],
            "engine": counters,
            "scheduler": scheduler,
            **zero,
        }

    @torch.no_grad()
    def synchronize(self) -> None:
        if self._is_stage_3:
            gather_stage_3(self._zero)
        else:
            gather_stage_1_and_2(self._zero)
        self._extra.finish()

    def optimizers(self) -> Mapping[str, Optimizer]:
        return {self._name: self._optimizer.optimizer}

    def parameters(self) -> Mapping[str, torch.Tensor]:
        return {f"model/{self._prefix}{name}": tensor for name, tensor in (*self._masters, *self._parameters)}

    def schedulers(self) -> Sequence[object]:
        return () if self._engine.lr_scheduler is None else (self._engine.lr_scheduler,)

    def modules(self) -> Sequence[torch.nn.Module]:
        return [self._engine.module]

    def trees(self) -> Sequence[Sequence[torch.nn.Module]]:
        return self._tree.modules

    def steps_made(self) -> int | None:
        return int(self._engine.global_steps)

    def batches_per_step(self) -> int | None:
        return int(self._engine.gradient_accumulation_steps())

    def end_step(self) -> None:
        """Do nothing, because the engine counts its own steps."""

    def _counters(self) -> dict[str, Tree]:
        scaler = getattr(self._zero, "loss_scaler", None)
        scheduler = self._engine.lr_scheduler
        return {
            "engine": {key: getattr(self._engine, key) for key in _COUNTERS},
            "zero": {
                key: getattr(self._zero, key) for key in ("micro_step_id", "overflow") if hasattr(self._zero, key)
            },
            "scaler": {key: getattr(scaler, key) for key in _SCALER if hasattr(scaler, key)},
            "scheduler": None if scheduler is None else cast(_Scheduler, scheduler).state_dict(),
        }

    def _describe(self) -> dict[str, str]:
        layout = Layout({f"adapter {self._name}": f"{self.kind} stage {self._engine.zero_optimization_stage()}"})
        layout.entries["deepspeed"] = deepspeed_version()
        layout.entries[f"accumulation {self._name}"] = str(self._engine.gradient_accumulation_steps())
        for name, master in self._masters:
            layout.add_tensor(f"model/{self._prefix}{name}", master, requires_grad=True)
        for name, parameter in self._others:
            check_parameter(f"model/{self._prefix}{name}", _partition(parameter))
            layout.add_tensor(f"model/{self._prefix}{name}", _partition(parameter), parameter.requires_grad)
        for name, _, key in self._buffers.places:
            layout.entries[f"buffer model/{name}"] = key
        for name in self._extra.names:
            layout.entries[f"extra state model/{self._prefix}{name}"] = ""
        for name, parameter in self._parameters:
            # Record the parameters' shapes too. The master weights are flat, so their shapes do not show a changed
            # model with the same number of elements.
            shape = list(getattr(parameter, "ds_shape", parameter.shape))
            layout.entries[f"parameter {self._prefix}{name}"] = f"{dtype_name(parameter.dtype)}{shape}"
        layout.add_optimizer(self._optimizer)
        return layout.entries

    def _has_tensor_parallelism(self) -> bool:
        return self._engine.mpu is not None or self._engine.autotp_size() > 1

    def _find_parts(self) -> dict[str, tuple[TensorPart, ...]]:
        found: dict[str, list[TensorPart]] = {f"model/{self._prefix}{name}": [] for name, _ in self._masters}
        others = {name for name, _ in self._others}
        for name, parameter in self._parameters:
            logical = f"model/{self._prefix}{name}"
            if name in others:
                if hasattr(parameter, "ds_tensor"):
                    found[logical] = list(self._partition_parts(logical, parameter, 0))
            elif self._is_stage_3:
                number, start, _ = self._zero.grad_position[self._zero.get_param_id(parameter)]
                found[f"model/{self._prefix}master{number}"] += self._partition_parts(logical, parameter, start)
            elif (mapping := parameter._hp_mapping) is not None:
                of_parameter, of_master = mapping.lp_fragment_address, mapping.hp_fragment_address
                found[f"model/{self._prefix}master{mapping.param_group_index}"] += parts_of_range(
                    logical,
                    tuple(parameter.shape),
                    of_parameter.start,
                    of_parameter.start + of_parameter.numel,
                    of_master.start,
                )
        return {name: tuple(parts) for name, parts in found.items()}

    def _partition_parts(self, name: str, parameter: Any, start: int) -> tuple[TensorPart, ...]:
        size, count = parameter.partition_numel(), parameter.ds_numel
        begin = min(count, self._zero._get_param_partition_rank(parameter) * size)
        return parts_of_range(name, tuple(parameter.ds_shape), begin, min(count, begin + size), start)


def _only_optimizer(name: str, adapter: Mapping[str, Any]) -> Mapping[str, Any]:
    saved = adapter["optimizers"]
    if name not in saved:
        raise CannotRelayout(
            f"optimizer/{name}" if name else "optimizer",
            f"the earlier launch registered {sorted(saved)}. Give the engine the name of its optimizer",
        )
    if adapter["groups"][name] is not None:
        raise CannotRelayout(
            f"optimizer/{name}" if name else "optimizer",
            "the earlier script changed its parameter groups while it trained, and an engine cannot. Load the step "
            "with the earlier kind of training",
        )
    return cast("Mapping[str, Any]", saved[name])


def deepspeed_version() -> str:
    """Return the version of the installed DeepSpeed. Call this only if an engine exists."""
    import deepspeed  # Import here, because DeepSpeed is certainly installed only if an engine exists.

    return str(deepspeed.__version__)


def _partition(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return the rank's part of a parameter without a master weight: `ds_tensor` in ZeRO-3, otherwise all of it."""
    return cast(torch.Tensor, getattr(parameter, "ds_tensor", parameter))


def _check_engine(name: str, engine: Any) -> None:
    kind, zero = qualified_name(type(engine)), qualified_name(type(engine.optimizer))
    if kind != _ENGINE:
        raise CannotResume(name, f"Everstep does not know whether an engine of class {kind} restores bit-identically")
    offload = engine.zero_offload_optimizer()
    refused = {
        "ZenFlow": bool(engine.zenflow),
        "SuperOffload": bool(offload is not None and engine.super_offload()),
        "NVMe offload of the optimizer": _is_on_nvme(offload),
        "NVMe offload of parameters": _is_on_nvme(engine.zero_offload_param()),
        "mixture-of-experts layers": bool(engine.has_moe_layers),
        "ZeRO++ (hpZ, quantized weights or gradients)": engine.zero_hpz_partition_size() > 1
        or engine.zero_quantized_weights()
        or engine.zero_quantized_gradients(),
        "fp16 with a loss scaler of DeepSpeed": bool(engine.fp16_enabled()),
        "torch autocast in fp16 with a loss scaler": getattr(engine.optimizer, "torch_autocast_gradscaler", None)
        is not None,
        "an offload ratio below 1, where a second optimizer updates the rest": hasattr(
            engine.optimizer, "backup_optimizer"
        ),
    }
    for option, is_used in refused.items():
        if is_used:
            raise CannotResume(name, f"Everstep does not know whether DeepSpeed with {option} restores bit-identically")
    if engine.zero_optimization_stage() not in (1, 2, 3) or zero not in (_STAGE_3, _STAGE_1_AND_2):
        raise CannotResume(
            name, f"ZeRO stage {engine.zero_optimization_stage()} with {zero} is not supported; use stage 1, 2 or 3"
        )


def _is_on_nvme(offload: Any) -> bool:
    return offload is not None and str(offload.device).endswith("nvme")


def check_accumulation(name: str, engine: Any) -> None:
    """Raise CannotResume if the engine is still accumulating gradients of a step. If the script itself sets DeepSpeed's
    accumulation boundary, the engine's count does not show where a step ends.
    """
    count = engine.gradient_accumulation_steps()
    if (
        engine.micro_steps % count
        and engine._is_gradient_accumulation_boundary is None
        and engine.managed_gradient_accumulation()
    ):
        raise CannotResume(
            name, f"a boundary between the {count} micro-batches of a step cannot be saved; use accumulate={count}"
        )


def check_cpu_adam(name: str, optimizer: Optimizer, betas: Sequence[float]) -> None:
    """Raise CannotResume if betas differ or have changed, or parameters have different step counts. `replay_powers`
    could then not restore the powers of the betas.
    """
    if any(tuple(group["betas"]) != tuple(betas) for group in optimizer.param_groups):
        raise CannotResume(
            name,
            "DeepSpeedCPUAdam with betas that differ between groups or change (cycled momentum) does not restore "
            "bit-identically",
        )
    if len({state["step"] for state in optimizer.state.values() if "step" in state}) > 1:
        raise CannotResume(
            name,
            "DeepSpeedCPUAdam with parameters that have different step counts does not restore bit-identically",
        )


def replay_powers(optimizer: Any) -> None:
    """Restore the powers beta1^step and beta2^step of a CPU Adam whose state is restored.

    CPU Adam keeps them in its C++ code, and multiplies by beta once per step. After a restart, it would use `pow`,
    whose last bits differ. Repeating the multiplications takes about a microsecond per step. Source:
    `Adam_Optimizer::IncrementStep` in DeepSpeed's csrc/includes/cpu_adam.h.
    """
    beta1, beta2 = optimizer.param_groups[0]["betas"]
    # Only CPU Adam's step function multiplies the powers. Call it on dummy tensors, as often as the optimizer has
    # stepped.
    weights = [torch.zeros(1) for _ in range(4)]
    for step in range(1, 1 + max((state["step"] for state in optimizer.state.values() if "step" in state), default=0)):
        optimizer.ds_opt_adam.adam_update(optimizer.opt_id, step, 0.0, beta1, beta2, 1e-8, 0.0, True, *weights)


def gather_stage_3(zero: Any) -> None:
    """Rebuild the parameters of a ZeRO-3 engine from its restored master parameters."""
    for number, master in enumerate(zero.fp32_partitioned_groups_flat):
        bit16 = zero.fp16_partitioned_groups_flat[number]
        if bit16 is not None and bit16.data_ptr() != master.data_ptr():
            bit16.data.copy_(master.data)
        zero._unflatten_partitioned_parameters(number)
    persistent = zero.persistent_parameters
    if persistent:
        # ZeRO-3 keeps small parameters whole on every rank. Release the old values of these parameters before gathering
        # the loaded values.
        persistent[0].partition(persistent)
        persistent[0].all_gather(persistent)


def gather_stage_1_and_2(zero: Any) -> None:
    """Rebuild the parameters of a ZeRO-1 or ZeRO-2 engine from its restored master parameters."""
    from deepspeed import comm
    from deepspeed.runtime.utils import all_gather_dp_groups

    for number, master in enumerate(zero.single_partition_of_fp32_groups):
        rank = comm.get_rank(group=zero.real_dp_process_group[number])
        zero.parallel_partitioned_bit16_groups[number][rank].data.copy_(master.data)
    all_gather_dp_groups(
        groups_flat=zero.bit16_groups_flat,
        partitioned_param_groups=zero.parallel_partitioned_bit16_groups,
        dp_process_group=zero.real_dp_process_group,
        start_alignment_factor=zero.nccl_start_alignment_factor,
        allgather_bucket_size=zero.allgather_bucket_size,
    )
