"""Exports the model of a checkpoint as safetensors files that Hugging Face libraries open.

    model.safetensors                                    if all tensors together have at most FILE_BYTES
    model-00001-of-00003.safetensors …, and the index model.safetensors.index.json    otherwise
    config.json                                          if the checkpoint or the caller provides it
    generation_config.json and the tokenizer's files     if the checkpoint has them

The names in a checkpoint contain no components of wrappers (`module`, `_orig_mod`), because the training hooks remove
them. If the script registered a module that contains one model of transformers, the export removes the path of
this model.

Tied parameters are several names of one tensor. Where the model's configuration ties parameters, the export writes only
the first name, as `save_pretrained` does. The header's metadata lists the other names.

The export streams pieces of tensors without a local disk. It writes the index last, so an export with an index is
complete.

For parameters that DeepSpeed ZeRO trains, a checkpoint contains the fp32 master weights instead of the 16-bit weights.
The export writes these master weights.

Invariant: each tensor in the files has the bytes of the checkpoint, or their conversion by torch.
Source: https://huggingface.co/docs/transformers/big_models (file names and index), and the safetensors format.
"""

from __future__ import annotations

import json
import math
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from everstep.checkpoints.checkpoint import Checkpoint
from everstep.checkpoints.errors import CheckpointError, IncompleteTensor
from everstep.checkpoints.logical import LogicalTensor
from everstep.checkpoints.stores import store_of
from everstep.protocol.dtypes import ITEM_BYTES
from everstep.protocol.errors import UNDECODABLE
from everstep.protocol.safetensors import DTYPE_NAMES
from everstep.protocol.slot_values import ADAPTER_FILE, BASE_FILE

FILE_BYTES: Final = 5_000_000_000
"""Maximum bytes of tensors in one file. A larger tensor has its own file.

Source: the default of `save_pretrained`, 5 GB.
"""
PREFIX: Final = "model/"
WHOLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
CONFIG: Final = "config.json"
FLOATS: Final = ("float64", "float32", "bfloat16", "float16")
"""Floating point types that the option `dtype` converts from and to. The export keeps other types, such as integers."""

MAX_FILE_BYTES: Final = 32 * 1024 * 1024
"""Size of the largest file beside the weights."""
MAX_FILES_BYTES: Final = 4 * MAX_FILE_BYTES
"""Size of all files beside the weights."""
_PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_. -]{0,99}(/[A-Za-z0-9_][A-Za-z0-9_. -]{0,99})?")
FIELDS: Final = msgspec.json.Decoder(dict[str, Any])


@dataclass(frozen=True, slots=True)
class Exported:
    """The files that an export wrote, and the number and size of their tensors."""

    files: tuple[str, ...]
    """Names of the files, in the order in which they were written."""
    tensors: int
    bytes: int
    """Total size of all tensors in the files, in bytes."""
    left_out: tuple[str, ...] = ()
    """Names of the model's tensors that the export skipped because their names lack the prefix `strip`."""


@dataclass(frozen=True, slots=True)
class _Saved:
    """A tensor to export: its source in the checkpoint, and its dtype in the written files."""

    tensor: LogicalTensor
    dtype: str
    ties: tuple[str, ...]
    """Further names of this tensor, if the model has several names for it (tied parameters)."""

    @property
    def bytes(self) -> int:
        return math.prod(self.tensor.shape) * ITEM_BYTES[self.dtype]


def export_safetensors(
    checkpoint: Checkpoint,
    to: str,
    *,
    strip: str | None = None,
    dtype: str | None = None,
    config: str | None = None,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
    file_bytes: int = FILE_BYTES,
) -> Exported:
    """Write the parameters and buffers of the model under their names in `state_dict`.

    Args:
        checkpoint: an open checkpoint; it stays open after the export.
        to: folder, as a path or as `s3://bucket/prefix`. It must not hold an exported model: after an interruption,
            files of two steps could look like one model.
        strip: prefix to remove from names, up to a dot. For example, `actor` exports only the model that the script
            registered as `actor`: tensors without the prefix are skipped. None: the name prefix of the transformers
            model if the checkpoint has exactly one, otherwise no prefix.
        dtype: one of `FLOATS`, to which all floating point tensors are converted. None: the dtypes of the checkpoint.
        config: content of `config.json`. None: the configuration that the training script's model had, if it came from
            transformers.
        progress: called with exported and total bytes after each piece.
        file_bytes: maximum bytes of tensors in one file.

    Returns:
        The written files.

    Raises:
        CheckpointError: the folder holds a model, no tensor has the prefix, a tensor is incomplete or has a dtype that
            safetensors lacks, the configuration is no JSON object, a value does not fit into the dtype, a byte of the
            checkpoint is damaged, or a file cannot be written. The export then writes no index.
    """
    store, folder = store_of(to.rstrip("/") or "/")
    if dtype not in (None, *FLOATS):
        raise CheckpointError(f"dtype {dtype!r} is none of {', '.join(FLOATS)}")
    if strip is None:
        strip = next(iter(checkpoint.pretrained)) if len(checkpoint.pretrained) == 1 else ""
    fields = _fields(config if config is not None else checkpoint.pretrained.get(strip.removesuffix(".")))
    check_empty(to)
    strip = strip if strip.endswith(".") or not strip else f"{strip}."
    for name, reason in checkpoint.incomplete.items():
        if name.startswith(PREFIX + strip):
            raise IncompleteTensor(reason)
    chosen = _chosen(checkpoint, strip, dtype, is_tied=fields is not None and fields.get("tie_word_embeddings") is True)
    total = sum(saved.bytes for saved in chosen.values())
    groups = list(_groups(chosen, file_bytes))
    names = [
        WHOLE if len(groups) == 1 else f"model-{number:05}-of-{len(groups):05}.safetensors"
        for number in range(1, len(groups) + 1)
    ]
    written: list[str] = []

    def write(file: str, pieces: Iterable[bytes | bytearray | memoryview], size: int) -> None:
        store.write(_key(folder, file), pieces, size)
        written.append(file)

    done = 0

    def pieces(header: bytes, group: Mapping[str, _Saved]) -> Iterator[bytes | bytearray | memoryview]:
        nonlocal done
        yield header
        targets = {saved.tensor.name: (name, saved.dtype) for name, saved in group.items()}
        for tensor, piece in checkpoint.stream(saved.tensor for saved in group.values()):
            name, dtype = targets[tensor.name]
            for part in [piece] if dtype == tensor.dtype else _imported_cast()(name, piece, tensor.dtype, dtype):
                yield part
                done += len(part)
                progress(done, total)
                del part
            del piece

    beside = files_beside(checkpoint, strip.removesuffix("."))
    if fields is not None:
        data = json.dumps({**fields, **_dtype_field(chosen)}, indent=2, sort_keys=True).encode()
        write(CONFIG, [data], len(data))
    for file, data in beside.items():
        write(file, [data], len(data))
    for file, group in zip(names, groups, strict=True):
        header = _header(group)
        write(file, pieces(header, group), len(header) + sum(each.bytes for each in group.values()))
    if len(groups) > 1:
        index = {
            "metadata": {"total_size": total},
            "weight_map": {name: file for file, group in zip(names, groups, strict=True) for name in sorted(group)},
        }
        data = json.dumps(index, indent=2, sort_keys=True).encode()
        write(INDEX, [data], len(data))
    left_out = (name.removeprefix(PREFIX) for name in checkpoint.tensors if name.startswith(PREFIX))
    return Exported(tuple(written), len(chosen), total, tuple(name for name in left_out if not name.startswith(strip)))


def has_adapters(checkpoint: Checkpoint) -> bool:
    """Return whether the checkpoint's model has adapters of PEFT, so that its tensors fit no `config.json`."""
    return any(key.endswith(f":{BASE_FILE}") for key in checkpoint.files)


def check_empty(to: str) -> None:
    """Raise CheckpointError if a folder, a path or `s3://bucket/prefix`, holds an exported model."""
    store, folder = store_of(to.rstrip("/") or "/")
    for file in (WHOLE, INDEX, CONFIG, ADAPTER_FILE):
        if store.exists(_key(folder, file)):
            raise CheckpointError(f"{to} already holds an exported model ({file}); name an empty folder")


def files_beside(checkpoint: Checkpoint, path: str) -> dict[str, bytes]:
    """Read the files of the tokenizer and of the generation that belong to a model.

    Args:
        checkpoint: holds the files that the ranks of a job have stored. It stays open.
        path: path of the model in the names of tensors, empty for the registered model itself.

    Returns:
        The content of each file by name.

    Raises:
        CheckpointError: a name leads out of the folder of an export, or the files are too large.
    """
    found = {key.removeprefix(f"{path}:"): data for key, data in checkpoint.files.items() if key.startswith(f"{path}:")}
    for name in found:
        if not _PLAIN_NAME.fullmatch(name):
            raise CheckpointError(f"the checkpoint names a file {name[:100]!r}, which no export writes")
    files: dict[str, bytes] = {}
    for name in found.keys() - {ADAPTER_FILE, BASE_FILE}:
        files[name] = unpacked(found[name])
        if sum(map(len, files.values())) > MAX_FILES_BYTES:
            raise CheckpointError(f"the files beside the model have more than {MAX_FILES_BYTES} bytes")
    return files


def unpacked(data: bytes) -> bytes:
    """Decompress a value of `SlotValues.files`.

    Args:
        data: bytes that a rank of the job wrote.

    Returns:
        The file's content, at most `MAX_FILE_BYTES`.

    Raises:
        CheckpointError: the bytes are damaged, or the file has more than `MAX_FILE_BYTES`.
    """
    reader = zlib.decompressobj()
    try:
        file = reader.decompress(data, MAX_FILE_BYTES)
    except zlib.error as error:
        raise CheckpointError(f"a file of the checkpoint is damaged: {error}") from error
    if reader.unconsumed_tail or not reader.eof:
        raise CheckpointError(f"a file of the checkpoint has more than {MAX_FILE_BYTES} bytes")
    return file


def _imported_cast() -> Callable[[str, memoryview, str, str], Iterator[memoryview]]:
    """Import the dtype conversion only when an export needs it, because the rest of this module works without torch."""
    try:
        from everstep.checkpoints.casting import cast
    except ImportError as error:
        raise CheckpointError(
            f"the conversion to another dtype needs torch: {error}", hint="next: pip install 'everstep[training]'"
        ) from error
    return cast


def _fields(config: str | None) -> dict[str, object] | None:
    """Return the fields of a `config.json` except `torch_dtype`, the former name of `dtype` in transformers."""
    if config is None:
        return None
    try:
        fields = FIELDS.decode(config)
    except UNDECODABLE as error:
        raise CheckpointError(f"the model's configuration is no JSON object: {error}") from error
    return {key: value for key, value in fields.items() if key != "torch_dtype"}


def _dtype_field(chosen: Mapping[str, _Saved]) -> dict[str, str]:
    """Return the `dtype` field for `config.json`, so that `from_pretrained` does not round the exported weights."""
    floats = [saved.dtype for saved in chosen.values() if saved.dtype in FLOATS]
    return {"dtype": floats[0]} if floats else {}


def _chosen(checkpoint: Checkpoint, strip: str, dtype: str | None, *, is_tied: bool) -> dict[str, _Saved]:
    """Return the tensors to export, by name in the written files.

    With `is_tied`, tensors that share stored elements appear once, under the first of their names.
    """
    named = {
        tensor.name.removeprefix(PREFIX + strip): tensor
        for tensor in checkpoint.tensors.values()
        if tensor.name.startswith(PREFIX + strip)
    }
    if not named:
        raise CheckpointError(f"no tensor's name begins with {strip!r}; {_some_names(checkpoint)}")
    aliases: dict[object, list[str]] = {}
    for name, tensor in named.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"{name} has the dtype {tensor.dtype}, which safetensors does not support")
        shared = is_tied and tensor.bytes
        aliases.setdefault((tensor.dtype, tensor.shape, tensor.boxes) if shared else name, []).append(name)
    return {
        name: _Saved(named[name], dtype if dtype and named[name].dtype in FLOATS else named[name].dtype, tuple(others))
        for name, *others in aliases.values()
    }


def _key(folder: str, file: str) -> str:
    return f"{folder.rstrip('/')}/{file}" if folder else file


def _groups(chosen: Mapping[str, _Saved], file_bytes: int) -> Iterator[dict[str, _Saved]]:
    """Divide the tensors, in order, into one group per file.

    A group has at most `file_bytes` bytes, or is one larger tensor.
    """
    group: dict[str, _Saved] = {}
    size = 0
    for name, tensor in chosen.items():
        if group and size + tensor.bytes > file_bytes:
            yield group
            group, size = {}, 0
        group[name] = tensor
        size += tensor.bytes
    yield group


def _header(group: Mapping[str, _Saved]) -> bytes:
    ties = {other: name for name, saved in group.items() for other in saved.ties}
    described: dict[str, object] = {"__metadata__": {**ties, "format": "pt"}}
    position = 0
    for name, saved in group.items():
        described[name] = {
            "dtype": DTYPE_NAMES[saved.dtype],
            "shape": saved.tensor.shape,
            "data_offsets": (position, position + saved.bytes),
        }
        position += saved.bytes
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _some_names(checkpoint: Checkpoint) -> str:
    names = [name.removeprefix(PREFIX) for name in checkpoint.tensors if name.startswith(PREFIX)]
    return f"the model's names are {', '.join(names[:3])} …" if names else "the checkpoint holds no model"
