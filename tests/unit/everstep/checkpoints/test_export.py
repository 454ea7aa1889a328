"""Exported safetensors files contain the model's tensors, whatever the layout of the training.

After an interrupted export, each file is either complete or absent.
"""

from __future__ import annotations

import errno
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from everstep.checkpoints import export, open_checkpoint
from everstep.checkpoints.checkpoint import READS_AHEAD
from everstep.checkpoints.errors import CheckpointError, CorruptCheckpoint, IncompleteTensor, StoreFailure
from everstep.checkpoints.export import export_safetensors
from everstep.checkpoints.shard_object import CACHED_CHUNKS
from everstep.protocol.parts import TensorPart, parts_of_range
from everstep.protocol.slot import CHUNK_BYTES
from tests.unit.everstep.checkpoints.stored import Stored, store

RANDOM = np.random.default_rng(11)
SHAPES = {"encoder.weight": (6, 4), "encoder.bias": (6,), "head": (3, 6)}


@pytest.fixture(name="model")
def made_model() -> dict[str, np.ndarray]:
    return {name: RANDOM.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


@pytest.fixture(name="manifest")
def made_manifest(tmp_path: Path, model: dict[str, np.ndarray]) -> Path:
    """Return the manifest of a checkpoint that two ranks of ZeRO have saved, including the optimizer's state."""
    flat = np.concatenate([value.ravel() for value in model.values()])
    ranks = {}
    for rank, (begin, end) in enumerate([(0, 23), (23, flat.size)]):
        parts, first = [], 0
        for name, value in model.items():
            low, high = max(begin, first), min(end, first + value.size)
            parts += parts_of_range(f"model/{name}", value.shape, low - first, high - first, low - begin)
            first += value.size
        moments = tuple(
            type(part)(f"optimizer/{part.name}/exp_avg", *(part.shape, part.offsets, part.sizes), part.start)
            for part in parts
        )
        ranks[rank] = [
            Stored("model/master0", flat[begin:end], tuple(parts)),
            Stored("optimizer/master0/exp_avg", flat[begin:end], moments),
        ]
    return store(tmp_path / "checkpoint", ranks)


def exported(manifest: Path, to: Path, **options: Any) -> export.Exported:
    with open_checkpoint(str(manifest)) as checkpoint:
        return export_safetensors(checkpoint, str(to), **options)


def test_a_model_of_two_ranks_becomes_one_file(tmp_path: Path, manifest: Path, model: dict[str, np.ndarray]) -> None:
    seen: list[tuple[int, int]] = []
    result = exported(manifest, tmp_path / "to", progress=lambda done, total: seen.append((done, total)))
    found = load_file(tmp_path / "to" / "model.safetensors")
    assert found.keys() == model.keys()
    assert all(np.array_equal(found[name], value) for name, value in model.items())
    assert result == export.Exported(("model.safetensors",), 3, 4 * 48)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert {total for _, total in seen} == {192}
    assert {96, 120} < {done for done, _ in seen}
    assert seen[-1] == (192, 192)
    assert [path.name for path in (tmp_path / "to").iterdir()] == ["model.safetensors"]


def test_a_large_model_becomes_several_files_with_an_index(
    tmp_path: Path, manifest: Path, model: dict[str, np.ndarray]
) -> None:
    result = exported(manifest, tmp_path / "to", file_bytes=100)
    assert result.files == (
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    )
    index = json.loads((tmp_path / "to" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 192}
    assert index["weight_map"].keys() == model.keys()
    for name, file in index["weight_map"].items():
        assert np.array_equal(load_file(tmp_path / "to" / file)[name], model[name])


def test_one_of_several_models_is_exported_by_its_prefix(tmp_path: Path, manifest: Path) -> None:
    exported(manifest, tmp_path / "to", strip="encoder.")
    assert load_file(tmp_path / "to" / "model.safetensors").keys() == {"weight", "bias"}
    with pytest.raises(CheckpointError, match=r"begins with 'actor.'; the model's names are encoder.weight, "):
        exported(manifest, tmp_path / "other", strip="actor.")


def test_a_dtype_that_safetensors_lacks_is_refused_by_name(tmp_path: Path) -> None:
    manifest = store(tmp_path / "checkpoint", {0: [Stored("model/phase", np.zeros(2, np.complex64))]})
    with pytest.raises(CheckpointError, match="phase has the dtype complex64"):
        exported(manifest, tmp_path / "to")


def test_a_damaged_checkpoint_leaves_no_file(tmp_path: Path, manifest: Path) -> None:
    path = max(tmp_path.rglob("rank=1.safetensors"))
    data = bytearray(path.read_bytes())
    data[len(data) - 100] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptCheckpoint, match="use another checkpoint"):
        exported(manifest, tmp_path / "to")
    assert not (tmp_path / "to").exists() or list((tmp_path / "to").iterdir()) == []


@pytest.mark.parametrize("file", ["model.safetensors", "model.safetensors.index.json"])
def test_a_folder_that_holds_a_model_is_refused(tmp_path: Path, manifest: Path, file: str) -> None:
    """The export refuses a folder that already contains a model.

    Otherwise an interrupted second export would leave files of two steps that look like one model.
    """
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / file).write_text("earlier")
    with pytest.raises(CheckpointError, match=f"already holds an exported model .{file}."):
        exported(manifest, tmp_path / "to")
    assert [path.read_text() for path in (tmp_path / "to").iterdir()] == ["earlier"]


def test_an_incomplete_tensor_is_refused_unless_it_is_left_out(tmp_path: Path) -> None:
    tensors = [Stored("model/a.w", np.ones(2, np.float32)), Stored("model/b.w", np.ones(3, np.float32), ())]
    half = parts_of_range("model/b.v", (4,), 0, 2, 0)
    manifest = store(tmp_path / "checkpoint", {0: [*tensors, Stored("x", np.ones(2, np.float32), half)]})
    with pytest.raises(IncompleteTensor, match=r"hold 2 elements of the 4 of model/b\.v"):
        exported(manifest, tmp_path / "all")
    assert exported(manifest, tmp_path / "one", strip="a").tensors == 1
    assert load_file(tmp_path / "one" / "model.safetensors").keys() == {"w"}


def test_an_export_of_a_large_tensor_needs_memory_for_some_chunks_alone(tmp_path: Path) -> None:
    tensor = 96 * 1024 * 1024
    manifest = store(tmp_path / "checkpoint", {0: [Stored("model/w", np.arange(tensor // 4, dtype=np.float32))]})
    with open_checkpoint(str(manifest)) as checkpoint:
        tracemalloc.start()
        try:
            export_safetensors(checkpoint, str(tmp_path / "to"))
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    # The export may hold the cached chunks, the piece that it writes, and the chunks that it reads ahead.
    limit = CHUNK_BYTES * (CACHED_CHUNKS + 1 + READS_AHEAD + 1)
    assert limit <= 64 * 1024 * 1024
    assert most < limit + 1024 * 1024
    assert np.array_equal(
        load_file(tmp_path / "to" / "model.safetensors")["w"], np.arange(tensor // 4, dtype=np.float32)
    )


def test_a_tensor_that_ranks_hold_by_columns_is_exported_between_others(tmp_path: Path) -> None:
    whole = RANDOM.standard_normal((4, 6)).astype(np.float32)
    before, after = (RANDOM.standard_normal(5).astype(np.float32) for _ in range(2))
    columns = [
        Stored(
            "model/w", np.ascontiguousarray(whole[:, at : at + 3]), (TensorPart("model/w", (4, 6), (0, at), (4, 3), 0),)
        )
        for at in (0, 3)
    ]
    ranks = {0: [Stored("model/a", before), columns[0], Stored("model/z", after)], 1: [columns[1]]}
    exported(store(tmp_path / "checkpoint", ranks), tmp_path / "to")
    found = load_file(tmp_path / "to" / "model.safetensors")
    assert all(np.array_equal(found[name], value) for name, value in {"a": before, "w": whole, "z": after}.items())


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, manifest: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreFailure, match=r"model\.safetensors: File exists"):
        exported(manifest, tmp_path / "file")


def test_an_export_to_a_full_disk_leaves_no_file_and_says_what_to_do(
    tmp_path: Path, manifest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", is_full)
    with pytest.raises(StoreFailure, match=r"model\.safetensors: No space left on device; free space, or name another"):
        exported(manifest, tmp_path / "to")
    assert list((tmp_path / "to").iterdir()) == []


def test_a_configuration_that_is_no_object_is_refused(tmp_path: Path, manifest: Path) -> None:
    with pytest.raises(CheckpointError, match="the model's configuration is no JSON object"):
        exported(manifest, tmp_path / "to", config="[]")


def test_a_value_beyond_the_range_of_a_dtype_is_refused_and_integers_keep_their_dtype(tmp_path: Path) -> None:
    count = Stored("model/count", np.array([70000], np.int64))
    wide = store(tmp_path / "wide", {0: [Stored("model/w", np.array([70000, np.inf], np.float32)), count]})
    with pytest.raises(CheckpointError, match=r"w has a value beyond the range of float16; export it as float32"):
        exported(wide, tmp_path / "to", dtype="float16")
    weight = np.array([1.5, np.inf, np.nan], np.float32)
    manifest = store(tmp_path / "narrow", {0: [Stored("model/w", weight), count]})
    exported(manifest, tmp_path / "to", dtype="float16")
    found = load_file(tmp_path / "to" / "model.safetensors")
    assert np.array_equal(found["w"], weight.astype(np.float16), equal_nan=True)
    assert found["count"] == 70000
