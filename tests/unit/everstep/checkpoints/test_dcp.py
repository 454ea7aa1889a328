"""`torch.distributed.checkpoint` loads a checkpoint into other layouts and dtypes."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException, load
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from everstep.checkpoints import open_checkpoint
from everstep.checkpoints.dcp import CheckpointReader
from everstep.checkpoints.dcp_export import export_dcp
from everstep.checkpoints.errors import CheckpointError
from everstep.protocol.parts import parts_of_range
from tests.unit.everstep.checkpoints.stored import Stored, store

# torch's `load` warns if the process has no process group.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")

RANDOM = np.random.default_rng(13)
WEIGHT = RANDOM.standard_normal((7, 5)).astype(np.float32)
MOMENT = RANDOM.standard_normal((7, 5)).astype(np.float32)


@pytest.fixture(name="manifest")
def made_manifest(tmp_path: Path) -> str:
    """Return the manifest of a checkpoint of three ranks, each of which has a flat range of the tensors."""
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


def exported(manifest: str, to: Path, **options: int) -> Path:
    with open_checkpoint(manifest) as checkpoint:
        export_dcp(checkpoint, str(to), **options)
    return to


def test_plain_load_reads_an_export_into_a_model_and_its_optimizer(manifest: str, tmp_path: Path) -> None:
    """torch's AdamW loads the optimizer state that ZeRO saved."""
    to = exported(manifest, tmp_path / "to")
    model = torch.nn.ModuleDict({"net": torch.nn.Linear(5, 7, bias=False)})
    model["net"].w = model["net"].weight  # give the weight the name that the checkpoint uses
    del model["net"].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model["net"].w.grad = torch.zeros(7, 5)
    optimizer.step()
    state = get_optimizer_state_dict(model, optimizer)
    del state["state"]["net.w"]["exp_avg_sq"]  # the checkpoint has only one of the two moments
    load({"model": model.state_dict(), "optimizer": {"state": state["state"]}}, checkpoint_id=to, no_dist=True)
    assert np.array_equal(model["net"].w.detach().numpy(), WEIGHT)
    assert np.array_equal(state["state"]["net.w"]["exp_avg"].numpy(), MOMENT)
    assert state["state"]["net.w"]["step"] == 7


def test_ranks_read_their_shards_of_an_export(manifest: str, tmp_path: Path) -> None:
    to = exported(manifest, tmp_path / "to")
    for rank in range(4):
        dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", (2, 2))
            target = distribute_tensor(torch.zeros(7, 5), mesh, [Shard(0), Shard(1)])
            load({"model": {"net.w": target}}, checkpoint_id=to, no_dist=True)
            rows, columns = (slice(0, 4), slice(4, 7))[rank // 2], (slice(0, 3), slice(3, 5))[rank % 2]
            assert np.array_equal(target._local_tensor.numpy(), WEIGHT[rows, columns])
        finally:
            dist.destroy_process_group()


def test_small_tensors_share_a_file_and_large_ones_have_their_own(manifest: str, tmp_path: Path) -> None:
    assert sorted(path.name for path in exported(manifest, tmp_path / "one").iterdir()) == [".metadata", "__0_0.distcp"]
    to = exported(manifest, tmp_path / "many", group_bytes=100)
    assert len(list(to.glob("*.distcp"))) == 3
    state = {"model": {"net.w": torch.zeros(7, 5)}}
    load(state, checkpoint_id=to, no_dist=True)
    assert np.array_equal(state["model"]["net.w"].numpy(), WEIGHT)


def test_a_folder_with_a_checkpoint_is_refused_and_a_damaged_one_gets_no_metadata(
    manifest: str, tmp_path: Path
) -> None:
    to = exported(manifest, tmp_path / "to")
    with pytest.raises(CheckpointError, match="already holds a DCP checkpoint"):
        exported(manifest, to)
    path = max(Path(manifest).parent.rglob("rank=2.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="do not hash to their digest"):
        exported(manifest, tmp_path / "other")
    assert not (tmp_path / "other" / ".metadata").exists()
