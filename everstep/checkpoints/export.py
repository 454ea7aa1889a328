"""Exports the model of a checkpoint as safetensors files that Hugging Face libraries open.

    model.safetensors                                    up to FILE_BYTES
    model-00001-of-00003.safetensors …, and the index model.safetensors.index.json    beyond

The export streams: one tensor is in memory at a time, and no local disk is used. The index and thus the export's
completeness come last.

Invariant: each tensor in the files has the bytes of the checkpoint. Parameters of ZeRO are the fp32 master weights.
Source: https://huggingface.co/docs/transformers/big_models (file names and index), and the safetensors format.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from everstep.checkpoints.checkpoint import Checkpoint
from everstep.checkpoints.errors import CheckpointError, IncompleteTensor
from everstep.checkpoints.logical import LogicalTensor
from everstep.checkpoints.stores import Store, store_of
from everstep.protocol.safetensors import DTYPE_NAMES

FILE_BYTES: Final = 5_000_000_000
"""Most bytes of tensors per file, unless one tensor is larger. Source: the default of `save_pretrained`, 5 GB."""
PREFIX: Final = "model/"
WHOLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Exported:
    """The files that an export wrote, and the number and size of their tensors."""

    files: tuple[str, ...]
    """Names of the files, in the order in which they were written."""
    tensors: int
    bytes: int
    """Total size of all tensors, in bytes."""


def export_safetensors(
    checkpoint: Checkpoint,
    to: str,
    *,
    strip: str = "",
    progress: Callable[[int, int], None] = lambda _done, _total: None,
    file_bytes: int = FILE_BYTES,
) -> Exported:
    """Write the parameters and buffers of the model, under the names that `state_dict` has for them.

    Args:
        checkpoint: an open checkpoint; it stays open after the export.
        to: folder, as a path or as `s3://bucket/prefix`. It must not hold an exported model: after an interruption,
            files of two steps could look like one model.
        strip: prefix to remove from names, up to a dot: `actor` if the script registered several models and one is
            wanted. Tensors without the prefix are left out.
        progress: called with exported and total bytes after each tensor.
        file_bytes: most bytes of tensors per file.

    Returns:
        The written files.

    Raises:
        CheckpointError: the folder holds a model, no tensor has the prefix, a tensor is incomplete or has a dtype that
            safetensors lacks, a byte of the checkpoint is damaged, or a file cannot be written. The index is then
            missing.
    """
    store, folder = store_of(to.rstrip("/") or "/")
    for file in (WHOLE, INDEX):
        if store.exists(_key(folder, file)):
            raise CheckpointError(f"{to} holds an exported model already ({file}); name an empty folder")
    strip = strip if strip.endswith(".") or not strip else f"{strip}."
    for name, reason in checkpoint.incomplete.items():
        if name.startswith(PREFIX + strip):
            raise IncompleteTensor(reason)
    chosen = {
        tensor.name.removeprefix(PREFIX + strip): tensor
        for tensor in checkpoint.tensors.values()
        if tensor.name.startswith(PREFIX + strip)
    }
    if not chosen:
        raise CheckpointError(f"no tensor's name begins with {strip!r}; {_some_names(checkpoint)}")
    for name, tensor in chosen.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"{name} is {tensor.dtype}, which safetensors cannot hold")
    total = sum(tensor.bytes for tensor in chosen.values())
    groups = list(_groups(chosen, file_bytes))
    names = [
        WHOLE if len(groups) == 1 else f"model-{number:05}-of-{len(groups):05}.safetensors"
        for number in range(1, len(groups) + 1)
    ]
    done = 0

    def pieces(header: bytes, group: Mapping[str, LogicalTensor]) -> Iterator[bytes | bytearray]:
        nonlocal done
        yield header
        for tensor in group.values():
            yield checkpoint.read(tensor)
            done += tensor.bytes
            progress(done, total)

    for file, group in zip(names, groups, strict=True):
        header = _header(group)
        _write(store, folder, file, pieces(header, group), len(header) + sum(each.bytes for each in group.values()))
    if len(groups) > 1:
        index = {
            "metadata": {"total_size": total},
            "weight_map": {name: file for file, group in zip(names, groups, strict=True) for name in sorted(group)},
        }
        data = json.dumps(index, indent=2, sort_keys=True).encode()
        names.append(INDEX)
        _write(store, folder, names[-1], [data], len(data))
    return Exported(tuple(names), len(chosen), total)


def _write(store: Store, folder: str, file: str, pieces: Iterable[bytes | bytearray], size: int) -> None:
    store.write(_key(folder, file), pieces, size)


def _key(folder: str, file: str) -> str:
    return f"{folder.rstrip('/')}/{file}" if folder else file


def _groups(chosen: Mapping[str, LogicalTensor], file_bytes: int) -> Iterator[dict[str, LogicalTensor]]:
    """Cut the tensors, in their order, into groups of at most `file_bytes` bytes, or of one tensor."""
    group: dict[str, LogicalTensor] = {}
    size = 0
    for name, tensor in chosen.items():
        if group and size + tensor.bytes > file_bytes:
            yield group
            group, size = {}, 0
        group[name] = tensor
        size += tensor.bytes
    yield group


def _header(group: Mapping[str, LogicalTensor]) -> bytes:
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, tensor in group.items():
        described[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": (position, position + tensor.bytes),
        }
        position += tensor.bytes
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _some_names(checkpoint: Checkpoint) -> str:
    names = [name.removeprefix(PREFIX) for name in checkpoint.tensors if name.startswith(PREFIX)]
    return f"the model's names are {', '.join(names[:3])} …" if names else "the checkpoint holds no model"
