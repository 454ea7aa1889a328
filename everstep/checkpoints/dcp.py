"""Loads a checkpoint with `torch.distributed.checkpoint`, into any number of ranks and any sharding.

    reader = CheckpointReader("s3://…/manifest.json")
    state = {"model": model.state_dict()}
    torch.distributed.checkpoint.load(state, storage_reader=reader)

DCP's planners choose the parts of tensors that each rank needs. The reader builds DCP's metadata in memory from the
manifest and the headers of the shards. It unpickles nothing. Names of tensors:

    model.<parameter or buffer>                    as in `model.state_dict()`
    optimizer.state.<parameter>.<entry>            as in `get_optimizer_state_dict`
    optimizer.<name>.state.<parameter>.<entry>     if the script registered several optimizers

Invariant: a loaded tensor equals the saved one element by element, converted to the dtype of its target.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from everstep.checkpoints.checkpoint import Checkpoint, open_checkpoint
from everstep.checkpoints.errors import CheckpointError
from everstep.checkpoints.logical import LogicalTensor


class CheckpointReader(StorageReader):
    """Storage reader that lets DCP (`torch.distributed.checkpoint`) load one checkpoint of Everstep.

    Args:
        uri: URI or path of the manifest, as for `open_checkpoint`.
    """

    def __init__(self, uri: str) -> None:
        self._uri = uri

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Use the manifest `checkpoint_id` from now on. None keeps the current manifest. DCP's `load` calls this."""
        if checkpoint_id is not None:
            self._uri = os.fspath(checkpoint_id)

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """Return DCP's description of all tensors of the checkpoint.

        Args:
            *_args: ignored. DCP's own readers ignore them, too.
            **_kwargs: ignored; DCP passes the rank to readers that need it.

        Returns:
            Shape, dtype and stored rectangular pieces of each tensor, by the names that the module's docstring lists.

        Raises:
            CheckpointError: the checkpoint cannot be read or is damaged.
        """
        with open_checkpoint(self._uri) as checkpoint:
            tensors = named_tensors(checkpoint)
        return Metadata(
            state_dict_metadata={
                name: TensorStorageMetadata(
                    TensorProperties(dtype=_dtype(tensor)),
                    torch.Size(tensor.shape),
                    [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in tensor.boxes],
                )
                for name, (_, tensor) in tensors.items()
            },
            planner_data={name: path for name, (path, _) in tensors.items()},
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_args: Any, **_kwargs: Any) -> None:
        """Do nothing, because each rank opens the checkpoint in `read_data`."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return DCP's load plan of this rank unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return DCP's load plans of all ranks unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy the requested pieces of tensors from the checkpoint into the planner's tensors.

        The checkpoint stores each tensor in boxes: the rectangular pieces that ranks held. A box is read once, even if
        several pieces of it are requested. The method holds one box in memory at a time.

        Args:
            plan: the pieces that this rank needs, each within one box.
            planner: provides this rank's tensors, which receive the data.

        Returns:
            A completed future.

        Raises:
            CheckpointError: an object cannot be read, or bytes do not hash to their digest.
        """
        with open_checkpoint(self._uri) as checkpoint:
            named = ((".".join(path), tensor) for path, tensor in _named(checkpoint))
            boxes = {(name, box.offsets): (tensor, box) for name, tensor in named for box in tensor.boxes}
            wanted: dict[tuple[str, tuple[int, ...]], list[Any]] = {}
            for item in plan.items:
                if item.type is not LoadItemType.TENSOR:
                    raise CheckpointError(f"{item.storage_index.fqn} is no tensor; a checkpoint contains only tensors")
                key = item.storage_index.fqn, tuple(item.storage_index.offset or ())
                wanted.setdefault(key, []).append(item)
            for key, items in wanted.items():
                tensor, box = boxes[key]
                data = checkpoint.read_box(tensor, box)
                saved = torch.frombuffer(data, dtype=_dtype(tensor)) if data else torch.empty(0, dtype=_dtype(tensor))
                saved = saved.view(box.sizes)
                for item in items:
                    part = saved
                    for axis, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                        part = part.narrow(axis, offset, length)
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(part)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether the id is the URI of a manifest."""
        return os.fspath(checkpoint_id).endswith("manifest.json")


def named_tensors(checkpoint: Checkpoint) -> dict[str, tuple[tuple[str, ...], LogicalTensor]]:
    """Return all tensors of a checkpoint by the names that they have in DCP (`torch.distributed.checkpoint`).

    Args:
        checkpoint: an open checkpoint, whose manifest and headers are verified.

    Returns:
        By name, in the checkpoint's order: the tensor's path in a nested state dict, and the tensor.

    Raises:
        CheckpointError: two tensors would have the same name.
    """
    tensors: dict[str, tuple[tuple[str, ...], LogicalTensor]] = {}
    for path, tensor in _named(checkpoint):
        if (name := ".".join(path)) in tensors:
            raise CheckpointError(f"two tensors of the checkpoint would have the name {name} in DCP")
        tensors[name] = path, tensor
    return tensors


def _named(checkpoint: Checkpoint) -> Iterator[tuple[tuple[str, ...], LogicalTensor]]:
    """Yield each tensor with its path in a nested state dict. DCP joins the path with dots."""
    for name, tensor in checkpoint.tensors.items():
        kind, _, rest = name.partition("/")
        if kind == "model":
            yield (kind, rest), tensor
        else:
            *registered, parameter, entry = rest.split("/")
            yield (kind, *registered, "state", parameter, entry), tensor


def _dtype(tensor: LogicalTensor) -> torch.dtype:
    found: torch.dtype = getattr(torch, tensor.dtype)
    return found
