"""Exports a checkpoint as a directory that `torch.distributed.checkpoint.load` reads with its own reader.

    __0_0.distcp, __0_1.distcp …    tensors, each in the format of `torch.save`, one after another
    .metadata                       written last; DCP's format is a pickle, which the export writes and never reads

The tensors have the names that `everstep.checkpoints.dcp` documents. The export stores each tensor whole, and `load`
divides it among ranks.

The export needs memory for one tensor, and up to 64 MiB for chunks of the checkpoint and for small tensors that share a
file.

Invariant: a directory that contains the file `.metadata` is complete.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Final

import torch
from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    _StorageInfo,  # pyright: ignore[reportPrivateUsage]  # DCP's own reader expects objects of this class.
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from everstep.checkpoints.checkpoint import Checkpoint
from everstep.checkpoints.dcp import named_tensors
from everstep.checkpoints.errors import CheckpointError, IncompleteTensor
from everstep.checkpoints.export import Exported
from everstep.checkpoints.logical import LogicalTensor
from everstep.checkpoints.stores import store_of
from everstep.checkpoints.torch_files import Pieces, saved, size_of, tensor_of

METADATA: Final = ".metadata"
GROUP_BYTES: Final = 16 * 1024 * 1024
"""Small tensors share a file up to this size. A larger tensor has its own file."""


def export_dcp(
    checkpoint: Checkpoint,
    to: str,
    *,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
    group_bytes: int = GROUP_BYTES,
) -> Exported:
    """Write all tensors of the model and its optimizers in DCP's format.

    Args:
        checkpoint: an open checkpoint; it stays open after the export.
        to: folder, as a path or as `s3://bucket/prefix`. It must not hold a checkpoint of DCP.
        progress: called with exported and total bytes after each tensor.
        group_bytes: size up to which tensors share a file.

    Returns:
        The written files.

    Raises:
        CheckpointError: the folder already holds a checkpoint, which stays unchanged. Or a tensor is incomplete, a byte
            of the checkpoint is damaged, or a file cannot be written; the folder then has no `.metadata`.
    """
    store, folder = store_of(to.rstrip("/") or "/")
    base = f"{folder.rstrip('/')}/" if folder else ""
    if store.exists(base + METADATA):
        raise CheckpointError(f"{to} already holds a DCP checkpoint; name an empty folder")
    for reason in checkpoint.incomplete.values():
        raise IncompleteTensor(reason)
    named = named_tensors(checkpoint)
    total = sum(tensor.bytes for _, tensor in named.values())
    described: dict[str, TensorStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    files: list[str] = []
    pending: Pieces = []
    done = 0

    def write_pending() -> None:
        if pending:
            file = f"__0_{len(files)}.distcp"
            store.write(base + file, pending, size_of(pending))
            files.append(file)
            pending.clear()

    def add(name: str, logical: LogicalTensor) -> None:
        # The local variables of this function must not outlive the call: they would keep the tensor in memory while the
        # next tensor is read.
        tensor = tensor_of(checkpoint, logical)
        zeros = torch.Size([0] * tensor.dim())
        described[name] = TensorStorageMetadata(
            TensorProperties(dtype=tensor.dtype), tensor.shape, [ChunkStorageMetadata(zeros, tensor.shape)]
        )
        pieces = saved(tensor, tensor)
        begin = size_of(pending)
        places[MetadataIndex(name, zeros, 0)] = _StorageInfo(f"__0_{len(files)}.distcp", begin, size_of(pieces))
        pending.extend(pieces)

    for name, (_, logical) in named.items():
        if pending and size_of(pending) + logical.bytes > group_bytes:
            write_pending()
        add(name, logical)
        if size_of(pending) >= group_bytes:
            write_pending()
        done += logical.bytes
        progress(done, total)
    write_pending()
    metadata = Metadata(
        state_dict_metadata=dict(described),
        planner_data={name: path for name, (path, _) in named.items()},
        storage_data=places,
        storage_meta=StorageMeta(),
        version=CURRENT_DCP_VERSION,
    )
    data = pickle.dumps(metadata)
    store.write(base + METADATA, [data], len(data))
    return Exported((*files, METADATA), len(named), total)
