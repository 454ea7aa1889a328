"""Every export needs at most 64 MiB of memory and memory for its largest tensor, whatever the format and the target."""

from __future__ import annotations

import hashlib
import shutil
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from everstep.checkpoints import open_checkpoint
from everstep.checkpoints.dcp_export import export_dcp
from everstep.checkpoints.export import Exported, export_safetensors
from everstep.checkpoints.universal import export_universal
from everstep.protocol.parts import TensorPart
from tests.seaweedfs import SeaweedFs
from tests.unit.everstep.checkpoints.stored import Stored, store

MIB = 1024 * 1024
LIMIT = 64 * MIB
BUCKET = "bucket"
EXPORTS: dict[str, Callable[..., Exported]] = {
    "hf": export_safetensors,
    "hf-bfloat16": partial(export_safetensors, dtype="bfloat16"),
    "dcp": export_dcp,
    "universal": export_universal,
}


def weight(number: int, shape: tuple[int, ...], dtype: type[np.floating[Any]] = np.float32) -> np.ndarray:
    """Return a tensor whose chunks differ from each other and from the chunks of other tensors."""
    whole = np.zeros(shape, dtype)
    whole.reshape(-1)[::512] = np.arange(whole.size // 512) % 1999 + number
    return whole


def small() -> Mapping[int, Sequence[Stored]]:
    """Return 24 tensors of 4 MiB on two ranks. Each chunk of a payload contains padding and parts of two tensors."""
    tensors = [Stored(f"model/w{number}", weight(number, (1024, 1023))) for number in range(24)]
    return {0: tensors[::2], 1: tensors[1::2]}


def large() -> Mapping[int, Sequence[Stored]]:
    """Return a parameter and two states of its optimizer, each of 64 MiB."""
    names = ("model/w", "optimizer/w/exp_avg", "optimizer/w/exp_avg_sq")
    return {0: [Stored(name, weight(number, (4096, 4096))) for number, name in enumerate(names)]}


def columns() -> Mapping[int, Sequence[Stored]]:
    """Return two tensors of 32 MiB in float16, of which each of two ranks holds half of the columns."""
    return {
        rank: [
            Stored(
                f"model/w{number}",
                np.ascontiguousarray(weight(number, (4096, 4096), np.float16)[:, 2048 * rank :][:, :2048]),
                (TensorPart(f"model/w{number}", (4096, 4096), (0, 2048 * rank), (4096, 2048), 0),),
            )
            for number in range(2)
        ]
        for rank in range(2)
    }


MODELS: dict[str, tuple[Callable[[], Mapping[int, Sequence[Stored]]], int]] = {
    "small": (small, 4 * MIB),
    "large": (large, 64 * MIB),
    "columns": (columns, 64 * MIB),
}
"""Checkpoints, each with the size of its largest tensor in memory during an export, by name.

An export converts the float16 tensors of `columns` to fp32, which doubles their size to 64 MiB.
"""


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    """Yield a client of an S3 server in a process of its own, so that the server's memory does not count."""
    with SeaweedFs() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in {**server.environment, "AWS_DEFAULT_REGION": server.environment["AWS_REGION"]}.items():
            patch.setenv(name, value)
        client = boto3.client("s3")
        client.create_bucket(Bucket=BUCKET)
        yield client
        client.close()


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, s3: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Store a checkpoint in a folder and in the bucket. Yield its name, and its manifest's path and URI."""
    folder = tmp_path_factory.mktemp(request.param)
    path = store(folder, MODELS[request.param][0]())
    for each in folder.rglob("*"):
        if each.is_file():
            s3.upload_file(str(each), BUCKET, f"{request.param}/{each.relative_to(folder)}")
    yield request.param, path, f"s3://{BUCKET}/{request.param}/{path.relative_to(folder)}"
    shutil.rmtree(folder)


def digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


@pytest.mark.parametrize("form", EXPORTS)
def test_an_export_holds_64_mib_and_one_tensor(
    s3: Any, model: tuple[str, Path, str], tmp_path: Path, form: str
) -> None:
    """An export from S3 to S3 and one from a folder to a folder stay within the limit and write equal files."""
    name, path, uri = model
    peaks = {}
    for source, target in ((str(path), str(tmp_path / "to")), (uri, f"s3://{BUCKET}/to/{name}/{form}")):
        with open_checkpoint(source) as checkpoint:
            tracemalloc.start()
            try:
                files = EXPORTS[form](checkpoint, target).files
                peaks[target] = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
    assert max(peaks.values()) <= LIMIT + MODELS[name][1], peaks
    for file in files:
        s3.download_file(BUCKET, f"to/{name}/{form}/{file}", str(tmp_path / "found"))
        if form.startswith("hf") or file.endswith(".pt"):
            assert digest(tmp_path / "found") == digest(tmp_path / "to" / file)
    if form == "universal":
        parameter = "w" if name == "large" else "w1"
        found = torch.load(tmp_path / "to" / "global_step7" / "zero" / parameter / "fp32.pt")["param"]
    elif form.startswith("hf"):
        found = load_file(tmp_path / "to" / "model.safetensors")["w" if name == "large" else "w1"]
    else:
        return
    shape = (1024, 1023) if name == "small" else (4096, 4096)
    expected = torch.from_numpy(weight(name != "large", shape, np.float16 if name == "columns" else np.float32))
    assert torch.equal(found, expected.to(found.dtype))
