"""Exports a checkpoint in DeepSpeed's universal layout, which an engine with `load_universal` reads.

    latest_universal                                        names the folder of the step; written last
    global_step<N>/mp_rank_00_model_states.pt               the engine's count of steps, for ZeRO 1 and 2
    global_step<N>/zero_pp_rank_0_mp_rank_00_model_states.pt    the same content, for ZeRO 3
    global_step<N>/zero/optimizer_state.pt                  the optimizer's count of steps
    global_step<N>/zero/<parameter>/fp32.pt                 the weight, converted to fp32 if necessary
    global_step<N>/zero/<parameter>/<entry>.pt              a state of the optimizer, such as exp_avg

DeepSpeed can load the export into ZeRO 1, 2 and 3 and into any number of ranks. The layout contains neither options of
parameter groups nor schedulers, so the script must set both. DeepSpeed restores only parameters that an optimizer
trains.

Source: `ds_to_universal.py` and `load_universal_checkpoint` of DeepSpeed 0.19.
Invariant: if the file `latest_universal` names a folder, this folder is complete.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from everstep.checkpoints.checkpoint import Checkpoint
from everstep.checkpoints.errors import CheckpointError, IncompleteTensor
from everstep.checkpoints.export import Exported
from everstep.checkpoints.logical import LogicalTensor
from everstep.checkpoints.stores import store_of
from everstep.checkpoints.torch_files import saved, size_of, tensor_of

LATEST: Final = "latest_universal"
SOURCE_VERSION: Final = "0.19.8"
"""Version of DeepSpeed whose layout this module writes.

The exported files contain this version, because DeepSpeed rejects files of very old versions.
"""
MOST_GROUPS: Final = 1024
"""Number of parameter groups in the exported file. DeepSpeed skips the optimizer state of groups beyond this number."""


def export_universal(
    checkpoint: Checkpoint,
    to: str,
    *,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Exported:
    """Write the model's weights and the optimizer's state in DeepSpeed's universal layout.

    Args:
        checkpoint: an open checkpoint with one model and one optimizer; it stays open after the export.
        to: folder, as a path or as `s3://bucket/prefix`. It must not hold a universal checkpoint.
        progress: called with exported and total bytes after each tensor.

    Returns:
        The written files.

    Raises:
        CheckpointError: the folder holds a checkpoint, the script registered several optimizers, a tensor is
            incomplete, a byte of the checkpoint is damaged, or a file cannot be written. `latest_universal` is then
            missing.
    """
    store, folder = store_of(to.rstrip("/") or "/")
    base = f"{folder.rstrip('/')}/" if folder else ""
    if store.exists(base + LATEST):
        raise CheckpointError(f"{to} already holds a universal checkpoint; name an empty folder")
    for reason in checkpoint.incomplete.values():
        raise IncompleteTensor(reason)
    weights, states = _by_parameter(checkpoint)
    step = int(checkpoint.manifest.step)
    tag = f"global_step{step}"
    files: list[str] = []

    def write(file: str, content: Any, tensor: torch.Tensor | None = None) -> None:
        pieces = saved(content, tensor)
        store.write(base + file, pieces, size_of(pieces))
        files.append(file)

    def write_tensor(file: str, logical: LogicalTensor, dtype: torch.dtype | None = None) -> None:
        # The local variable must not outlive the call: it would keep the tensor in memory while the next tensor is
        # read.
        value = tensor_of(checkpoint, logical, dtype)
        write(file, {"param": value}, value)

    chosen = [*weights.values(), *(tensor for entries in states.values() for tensor in entries.values())]
    total, done = sum(tensor.bytes for tensor in chosen), 0
    steps: Any = None
    for parameter, weight in weights.items():
        place = f"{tag}/zero/{parameter}"
        entries = states.get(parameter, {})
        write_tensor(f"{place}/fp32.pt", weight, torch.float32)
        for entry, logical in entries.items():
            if entry == "step":
                value = tensor_of(checkpoint, logical)
                steps = value if steps is None else steps
                write(f"{place}/step.pt", value)
            else:
                write_tensor(f"{place}/{entry}.pt", logical)
        if entries and "step" not in entries:
            write(f"{place}/step.pt", step)
        done += weight.bytes + sum(logical.bytes for logical in entries.values())
        progress(done, total)
    groups: list[dict[str, object]] = [{} for _ in range(MOST_GROUPS)]
    optimizer: dict[str, object] = {
        "state": {0: {"step": step if steps is None else steps}},
        "param_groups": [{"params": []}],
    }
    write(
        f"{tag}/zero/optimizer_state.pt",
        {"ds_version": SOURCE_VERSION, "param_groups": groups, "optimizer_state_dict": optimizer},
    )
    counters = {
        "module": {},
        "global_steps": step,
        "skipped_steps": 0,
        "dp_world_size": len(checkpoint.manifest.shards),
        "mp_world_size": 1,
        "ds_version": SOURCE_VERSION,
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.4},
    }
    for file in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        write(f"{tag}/{file}", counters)
    data = tag.encode()
    store.write(base + LATEST, [data], len(data))
    return Exported((*files, LATEST), len(chosen), total)


def _by_parameter(
    checkpoint: Checkpoint,
) -> tuple[dict[str, LogicalTensor], dict[str, dict[str, LogicalTensor]]]:
    """Return two maps by parameter name: the model's floating point tensors, and their optimizer states."""
    weights: dict[str, LogicalTensor] = {}
    states: dict[str, dict[str, LogicalTensor]] = {}
    for name, tensor in checkpoint.tensors.items():
        kind, _, rest = name.partition("/")
        if kind == "model":
            if getattr(torch, tensor.dtype).is_floating_point:
                weights[rest] = tensor
            continue
        *registered, parameter, entry = rest.split("/")
        if registered:
            raise CheckpointError(
                f"the script registered several optimizers, such as {registered[0]}; the universal layout has one"
            )
        states.setdefault(parameter, {})[entry] = tensor
    if not weights:
        raise CheckpointError("the checkpoint holds no model")
    return weights, states
