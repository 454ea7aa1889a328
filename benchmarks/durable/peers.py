"""Runs one load or export by one system, in its own process: `python -m benchmarks.durable.peers JSON`.

    operation    Everstep                              compared system
    load         DCP's load with `CheckpointReader`    boto3's download of DCP's directory, then DCP's load
    copy         export from S3 to S3                  boto3's download and upload of the same bytes
    export       export from files to files            DCP's consolidation; DeepSpeed's zero_to_fp32

`prepare` writes the same model in each format; in Everstep's, each of two ranks has a flat half of each tensor, as with
ZeRO. After the measured time, every resulting tensor is compared with the model. The process prints an `Outcome` as
JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

BUCKET = "peers"
SEED = 7
COLUMNS = 1024
FILE = "model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A measured operation with its parameters."""

    name: str
    """`prepare`, `load`, `copy` or `export`."""
    system: str
    """`everstep`, `boto3`, `dcp` or `zero_to_fp32`."""
    url: str
    """URL of the S3 server. Credentials are in the environment."""
    folder: str
    """Folder in shared memory, with the models of `prepare`."""
    mib: int
    """MiB of the parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The printed result of one operation."""

    seconds: float
    is_equal: bool
    """Whether each resulting tensor equals the model's."""


def model(mib: int) -> dict[str, Any]:
    """Return matrices of 4 MiB, `mib` MiB in total."""
    import torch

    generator = torch.Generator().manual_seed(SEED)
    return {f"layer{number}.weight": torch.randn(COLUMNS, COLUMNS, generator=generator) for number in range(mib // 4)}


def optimizer_of(parameters: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return Adam's moments as an optimizer's state dict."""
    return {name: {"exp_avg": value * 2, "exp_avg_sq": value * value} for name, value in parameters.items()}


def prepare(task: Operation) -> Outcome:
    """Write the model in each format, and upload the objects of `load` and `copy`."""
    from safetensors.torch import save_file
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    from everstep.protocol.parts import parts_of_range
    from tests.unit.everstep.checkpoints.stored import Stored, store

    folder, parameters = Path(task.folder), model(task.mib)
    optimizer = optimizer_of(parameters)
    size = COLUMNS * COLUMNS
    ranks: dict[int, list[Stored]] = {}
    for rank, (begin, end) in enumerate(((0, size // 2), (size // 2, size))):
        logical = {
            **{f"model/{name}": value for name, value in parameters.items()},
            **{f"optimizer/{name}/{entry}": each for name, of in optimizer.items() for entry, each in of.items()},
        }
        ranks[rank] = [
            Stored(name, value.numpy().ravel()[begin:end], parts_of_range(name, (COLUMNS, COLUMNS), begin, end, 0))
            for name, value in logical.items()
        ]
    store(folder / "everstep", ranks)
    dcp.save({"model": parameters, "optimizer": {"state": optimizer}}, checkpoint_id=folder / "dcp", no_dist=True)
    dcp.save(
        parameters, storage_writer=HuggingFaceStorageWriter(str(folder / "hf"), save_distributed=True), no_dist=True
    )
    _prepare_deepspeed(folder / "deepspeed", parameters)
    save_file(parameters, folder / FILE)
    client = _client(task)
    client.create_bucket(Bucket=BUCKET)
    for part in ("everstep", "dcp"):
        root = folder / part
        for path in sorted(each for each in root.rglob("*") if each.is_file()):
            prefix = "" if part == "everstep" else "dcp/"
            client.upload_file(str(path), BUCKET, prefix + str(path.relative_to(root)))
    client.upload_file(str(folder / FILE), BUCKET, FILE)
    return Outcome(seconds=0.0, is_equal=True)


def _prepare_deepspeed(folder: Path, parameters: Mapping[str, Any]) -> None:
    """Write files as DeepSpeed's ZeRO-2 would for two ranks."""
    # An engine would first compile its operators, which takes minutes.
    import torch
    from deepspeed import __version__

    tag = folder / "global_step1"
    tag.mkdir(parents=True)
    (folder / "latest").write_text(tag.name)
    states = {
        "module": {},
        "buffer_names": [],
        "param_shapes": [{name: value.shape for name, value in parameters.items()}],
        "shared_params": {},
        "ds_version": __version__,
    }
    torch.save(states, tag / "mp_rank_00_model_states.pt")
    flat = torch.cat([value.reshape(-1) for value in parameters.values()])
    for rank, part in enumerate(flat.chunk(2)):
        optimizer = {
            "zero_stage": 2,
            "partition_count": 2,
            "single_partition_of_fp32_groups": [part.clone()],
            "param_slice_mappings": [],
        }
        torch.save({"optimizer_state_dict": optimizer}, tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


def load(task: Operation) -> Outcome:
    """Load model and optimizer from S3 into new tensors in one process."""
    import torch
    from torch.distributed import checkpoint as dcp

    from everstep.checkpoints.dcp import CheckpointReader

    expected = model(task.mib)
    parameters = {name: torch.zeros_like(value) for name, value in expected.items()}
    state = {"model": parameters, "optimizer": {"state": optimizer_of(parameters)}}
    begun = time.perf_counter()
    if task.system == "everstep":
        dcp.load(state, storage_reader=CheckpointReader(f"s3://{BUCKET}/{_manifest(task)}"), no_dist=True)
    else:
        with tempfile.TemporaryDirectory(dir=task.folder) as local:
            _download(task, "dcp/", Path(local))
            dcp.load(state, checkpoint_id=local, no_dist=True)
    seconds = time.perf_counter() - begun
    wanted, found = optimizer_of(expected), state["optimizer"]["state"]
    is_equal = _are_equal(parameters, expected) and all(_are_equal(found[name], wanted[name]) for name in expected)
    return Outcome(seconds=seconds, is_equal=is_equal)


def copy(task: Operation) -> Outcome:
    """Write the model from S3 as one safetensors object to S3. boto3 downloads and uploads one."""
    from safetensors.torch import load_file

    from everstep.checkpoints.checkpoint import open_checkpoint
    from everstep.checkpoints.export import export_safetensors

    target = f"copies/{task.system}-{os.getpid()}"
    with tempfile.TemporaryDirectory(dir=task.folder) as local:
        begun = time.perf_counter()
        if task.system == "everstep":
            with open_checkpoint(f"s3://{BUCKET}/{_manifest(task)}") as checkpoint:
                export_safetensors(checkpoint, f"s3://{BUCKET}/{target}")
        else:
            client = _client(task)
            client.download_file(BUCKET, FILE, f"{local}/raw")
            client.upload_file(f"{local}/raw", BUCKET, f"{target}/{FILE}")
        seconds = time.perf_counter() - begun
        client = _client(task)
        client.download_file(BUCKET, f"{target}/{FILE}", f"{local}/result")
        is_equal = _are_equal(load_file(f"{local}/result"), model(task.mib))
    client.delete_object(Bucket=BUCKET, Key=f"{target}/{FILE}")
    return Outcome(seconds=seconds, is_equal=is_equal)


def export(task: Operation) -> Outcome:
    """Write the model as safetensors files, from the checkpoint in the format of `task.system`."""
    from safetensors.torch import load_file

    folder = Path(task.folder)
    with tempfile.TemporaryDirectory(dir=task.folder) as local:
        if task.system == "everstep":
            from everstep.checkpoints.checkpoint import open_checkpoint
            from everstep.checkpoints.export import export_safetensors

            begun = time.perf_counter()
            with open_checkpoint(str(folder / "everstep" / _manifest(task))) as checkpoint:
                export_safetensors(checkpoint, local)
        elif task.system == "dcp":
            from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

            begun = time.perf_counter()
            consolidate_safetensors_files(str(folder / "hf"), local, dict.fromkeys(model(task.mib), 1))
        else:
            import huggingface_hub  # noqa: F401 — the conversion imports it, which is no part of its work
            from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict

            begun = time.perf_counter()
            convert_zero_checkpoint_to_fp32_state_dict(str(folder / "deepspeed"), local, safe_serialization=True)
        seconds = time.perf_counter() - begun
        found: dict[str, Any] = {}
        for path in Path(local).rglob("*.safetensors"):
            found |= load_file(path)
    return Outcome(seconds=seconds, is_equal=_are_equal(found, model(task.mib)))


RUNS: Mapping[str, Callable[[Operation], Outcome]] = {"prepare": prepare, "load": load, "copy": copy, "export": export}


def _manifest(task: Operation) -> str:
    root = Path(task.folder) / "everstep"
    (path,) = root.rglob("manifest.json")
    return str(path.relative_to(root))


def _download(task: Operation, prefix: str, local: Path) -> None:
    client = _client(task)
    for each in client.list_objects_v2(Bucket=BUCKET, Prefix=prefix)["Contents"]:
        client.download_file(BUCKET, each["Key"], str(local / each["Key"].removeprefix(prefix)))


def _client(task: Operation) -> Any:
    import boto3

    return boto3.client("s3", endpoint_url=task.url)


def _are_equal(found: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    def digest(value: Any) -> str:
        return hashlib.sha256(value.contiguous().numpy()).hexdigest()

    return found.keys() == expected.keys() and all(digest(found[name]) == digest(expected[name]) for name in expected)


if __name__ == "__main__":
    given = Operation(**json.loads(sys.argv[1]))
    print(json.dumps(asdict(RUNS[given.name](given))))
