"""`torch.distributed.checkpoint` loads a checkpoint into other layouts and dtypes."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException, load
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from everstep.checkpoints.dcp import CheckpointReader
from everstep.protocol.parts import parts_of_range
from tests.unit.everstep.checkpoints.stored import Stored, store

# Without a process group, `load` warns.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")

RANDOM = np.random.default_rng(13)
WEIGHT = RANDOM.standard_normal((7, 5)).astype(np.float32)
MOMENT = RANDOM.standard_normal((7, 5)).astype(np.float32)


@pytest.fixture(name="manifest")
def made_manifest(tmp_path: Path) -> str:
    """Return the manifest of a checkpoint of three ranks, which cut the tensors into flat ranges."""
    edges = (0, 9, 21, 35)
    ranks = {
        rank: [
            Stored("master", WEIGHT.ravel()[begin:end], parts_of_range("model/net.w", (7, 5), begin, end, 0)),
            Stored("m", MOMENT.ravel()[begin:end], parts_of_range("optimizer/net.w/exp_avg", (7, 5), begin, end, 0)),
            Stored("optimizer/net.w/step", np.float32(7)),
        ]
        for rank, (begin, end) in enumerate(itertools.pairwise(edges))
    }
    return str(store(tmp_path, ranks))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_process_loads_the_tensors_of_three_ranks(manifest: str, dtype: torch.dtype) -> None:
    state = {
        "model": {"net.w": torch.zeros(7, 5, dtype=dtype)},
        "optimizer": {"state": {"net.w": {"exp_avg": torch.zeros(7, 5), "step": torch.zeros(())}}},
    }
    load(state, storage_reader=CheckpointReader(manifest), no_dist=True)
    assert torch.equal(state["model"]["net.w"], torch.from_numpy(WEIGHT).to(dtype))
    found = state["optimizer"]["state"]["net.w"]
    assert torch.equal(found["exp_avg"], torch.from_numpy(MOMENT))
    assert found["step"] == 7


def test_ranks_load_their_shards_of_another_sharding(manifest: str) -> None:
    for rank in range(4):
        dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", (2, 2))
            target = distribute_tensor(torch.zeros(7, 5), mesh, [Shard(0), Shard(1)])
            load({"model": {"net.w": target}}, storage_reader=CheckpointReader(manifest), no_dist=True)
            rows, columns = (slice(0, 4), slice(4, 7))[rank // 2], (slice(0, 3), slice(3, 5))[rank % 2]
            assert np.array_equal(target._local_tensor.numpy(), WEIGHT[rows, columns])
        finally:
            dist.destroy_process_group()


def test_a_checkpoint_is_loaded_without_a_model(manifest: str) -> None:
    state = _load_state_dict_from_keys(storage_reader=CheckpointReader(manifest))
    assert np.array_equal(state["model"]["net.w"].numpy(), WEIGHT)
    assert np.array_equal(state["optimizer"]["state"]["net.w"]["exp_avg"].numpy(), MOMENT)


def test_damaged_bytes_are_not_loaded(manifest: str) -> None:
    path = max(Path(manifest).parent.rglob("rank=2.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointException, match="do not hash to their digest"):
        load({"model": {"net.w": torch.zeros(7, 5)}}, storage_reader=CheckpointReader(manifest), no_dist=True)


def test_several_optimizers_have_a_name_each(tmp_path: Path) -> None:
    stored = [Stored(f"optimizer/{name}/net.w/exp_avg", MOMENT) for name in ("actor", "critic")]
    manifest = str(store(tmp_path, {0: stored}))
    state = {"optimizer": {"critic": {"state": {"net.w": {"exp_avg": torch.zeros(7, 5)}}}}}
    load(state, storage_reader=CheckpointReader(manifest), no_dist=True)
    assert np.array_equal(state["optimizer"]["critic"]["state"]["net.w"]["exp_avg"].numpy(), MOMENT)
