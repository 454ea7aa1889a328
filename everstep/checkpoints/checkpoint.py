"""Opens a checkpoint by its manifest and reads whole logical tensors (parameters and optimizer states).

Invariant: `read` returns exactly the bytes that training committed. All of them hash to the digests in the manifest.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import product
from types import TracebackType
from typing import Final

from everstep.checkpoints.errors import CheckpointError, CorruptCheckpoint
from everstep.checkpoints.logical import Box, LogicalTensor, join
from everstep.checkpoints.shard_object import ChunkCache, ShardObject
from everstep.checkpoints.stores import Objects, StoredObject, store_of
from everstep.protocol.dtypes import ITEM_BYTES
from everstep.protocol.errors import ProtocolError
from everstep.protocol.ids import Rank
from everstep.protocol.manifest import CheckpointManifest, ManifestShard, SharedObject, decode_manifest
from everstep.protocol.slot import CHUNK_BYTES
from everstep.protocol.slot_values import values_of

READS_AHEAD: Final = 3
"""Number of pieces of tensors that `Checkpoint.stream` reads ahead of its caller.

In addition to its largest tensor, an export needs at most 64 MiB of memory: for the chunks in `ChunkCache`, for the
chunks that are read ahead, and for the parts of an upload that S3 has not stored yet (`stores.PART_BYTES`).
"""
READS_AT_ONCE: Final = 4
"""Number of chunks of 4 MiB that a checkpoint reads at the same time."""
_FOLDER: Final = re.compile(r"run=[^/]*/gen=[^/]*/step=[^/]*/$")
"""Matches the last three folders of a checkpoint's original path: run, generation and step.

If a manifest's path matches, the three values must equal those in the manifest. A user's copy of a checkpoint may have
any other path.
"""
MAX_MANIFEST_BYTES: Final = 64 * 1024 * 1024


class Checkpoint:
    """An open checkpoint. Use it in a `with` statement.

    Args:
        manifest: lists the shards of the checkpoint, one per rank.
        store: store of the shards' objects.
        shard_keys: key of each rank's object within the store.
        shared_keys: key of each shared object within the store, by SHA-256.

    Raises:
        CheckpointError: a shard is missing or damaged.
    """

    def __init__(
        self,
        manifest: CheckpointManifest,
        store: Objects,
        shard_keys: Mapping[int, str],
        shared_keys: Mapping[str, str],
    ) -> None:
        self.manifest = manifest
        with ExitStack() as resources:
            self._pool = ThreadPoolExecutor(READS_AT_ONCE, thread_name_prefix="everstep-read")
            resources.callback(self._pool.shutdown, cancel_futures=True)
            cache = ChunkCache()

            def open_object(key: str) -> StoredObject:
                stored = store.open(key)
                resources.callback(stored.close)
                return stored

            def open_shared(named: SharedObject) -> StoredObject:
                stored = open_object(shared_keys[named.sha256])
                if stored.size != named.object_bytes:
                    raise CorruptCheckpoint(
                        f"{stored.name} has {stored.size:,} bytes; the manifest says {named.object_bytes:,}"
                    )
                return stored

            opened = self._pool.map(open_shared, manifest.shared)
            shared = {named.sha256: stored for named, stored in zip(manifest.shared, opened, strict=True)}

            def open_shard(shard: ManifestShard) -> ShardObject:
                return ShardObject(open_object(shard_keys[int(shard.rank)]), manifest, shard, cache, shared)

            self._shards = {shard.rank: shard for shard in self._pool.map(open_shard, manifest.shards)}
            joined = join({rank: shard.index for rank, shard in self._shards.items()})
            self.tensors: dict[str, LogicalTensor] = joined.tensors
            """Logical tensors by name, in the order of the first rank's shard."""
            self.incomplete: dict[str, str] = joined.incomplete
            """The reason why the shards do not contain the whole tensor, by tensor name."""
            self.pretrained: dict[str, str] = {}
            """Content of `config.json` of each Hugging Face transformers model, by the model's path in tensor names."""
            self.files: dict[str, bytes] = {}
            """Further files of these models, as `SlotValues.files`."""
            for shard in self._shards.values():
                values = values_of(shard.index.values)
                self.pretrained |= values.pretrained
                self.files |= values.files
            self._resources = resources.pop_all()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resources.close()

    def read(self, tensor: LogicalTensor) -> bytearray:
        """Return the bytes of a whole tensor in row-major order.

        Args:
            tensor: a value of `tensors`.

        Returns:
            uint8[tensor.bytes].

        Raises:
            CorruptCheckpoint: bytes of a shard do not hash to their digest.
            StoreFailure: an object cannot be read.
        """
        whole = bytearray(tensor.bytes)
        item = ITEM_BYTES[tensor.dtype]
        with memoryview(whole) as target:
            for box in tensor.boxes:
                length = _run_elements(tensor.shape, box) * item
                for number, first in enumerate(_runs(tensor.shape, box)):
                    self._read_into(box, number * length, target[first * item : first * item + length])
        return whole

    def stream(self, tensors: Iterable[LogicalTensor]) -> Iterator[tuple[LogicalTensor, memoryview]]:
        """Yield the bytes of whole tensors in row-major order, a piece at a time, and read ahead.

        A box is the part of a tensor that one rank holds. If a box is not contiguous in the tensor, for example because
        each rank holds some columns, the method first reads the whole tensor into memory.

        Args:
            tensors: values of the attribute `Checkpoint.tensors`.

        Yields:
            The tensor that a piece belongs to, and the piece: whole elements, at most one chunk. The caller must not
            change the piece. A piece does not keep its whole tensor in memory.

        Raises:
            CorruptCheckpoint: bytes of a shard do not hash to their digest.
            StoreFailure: an object cannot be read.
        """
        ahead: deque[tuple[LogicalTensor, tuple[int, int], Future[bytearray], int, int]] = deque()

        def next_piece() -> tuple[LogicalTensor, memoryview]:
            tensor, _, chunk, low, high = ahead.popleft()
            return tensor, memoryview(chunk.result())[low:high]

        try:
            for tensor in tensors:
                if not all(_run_elements(tensor.shape, box) == math.prod(box.sizes) for box in tensor.boxes):
                    while ahead:
                        yield next_piece()
                    for piece in self._pieces_of(tensor):
                        yield tensor, piece
                        del piece
                    continue
                for box in tensor.boxes:
                    shard = self._shards[Rank(box.rank)]
                    size = math.prod(box.sizes) * ITEM_BYTES[tensor.dtype]
                    for number, low, high in shard.chunks_of(box.begin, size):
                        place = box.rank, number
                        is_last = bool(ahead) and ahead[-1][1] == place
                        chunk = ahead[-1][2] if is_last else self._pool.submit(shard.chunk, number)
                        ahead.append((tensor, place, chunk, low, high))
                        if len(ahead) > READS_AHEAD:
                            yield next_piece()
            while ahead:
                yield next_piece()
        finally:
            for *_, chunk, _, _ in ahead:
                chunk.cancel()

    def _pieces_of(self, tensor: LogicalTensor) -> Iterator[memoryview]:
        """Read a whole tensor, and yield copies of its parts. A caller that keeps a copy does not keep the tensor."""
        whole = self.read(tensor)
        for begin in range(0, len(whole), CHUNK_BYTES):
            yield memoryview(whole[begin : begin + CHUNK_BYTES])

    def read_box(self, tensor: LogicalTensor, box: Box) -> bytearray:
        """Return the bytes of one box (the part of a tensor that one rank holds), in row-major order of the box.

        Args:
            tensor: a value of `tensors`.
            box: one of `tensor.boxes`.

        Returns:
            uint8[elements of the box times bytes per element].

        Raises:
            CorruptCheckpoint: bytes of a shard do not hash to their digest.
            StoreFailure: an object cannot be read.
        """
        data = bytearray(math.prod(box.sizes) * ITEM_BYTES[tensor.dtype])
        with memoryview(data) as target:
            self._read_into(box, 0, target)
        return data

    def _read_into(self, box: Box, start: int, target: memoryview) -> None:
        self._shards[Rank(box.rank)].read_into(box.begin + start, target, self._pool)


def open_checkpoint(uri: str) -> Checkpoint:
    """Open a checkpoint by its manifest.

    Args:
        uri: `s3://…/manifest.json`, or the path of a manifest in a copy of the checkpoint's folder. `everstep
            checkpoints list NAME` shows the URI.

    Returns:
        The open checkpoint. The manifest and the headers of all shards have been read and verified.

    Raises:
        CheckpointError: the manifest or a shard cannot be read or is damaged.
    """
    store, key = store_of(uri)
    with closing(store.open(key)) as stored:
        if stored.size > MAX_MANIFEST_BYTES:
            raise CheckpointError(f"{uri} has {stored.size:,} bytes, a manifest has at most {MAX_MANIFEST_BYTES:,}")
        data = bytes(stored.read(0, stored.size))
    try:
        manifest = decode_manifest(data)
    except ProtocolError as error:
        raise CorruptCheckpoint(f"{uri}: {error}") from error
    # The manifest lists keys in the original bucket, but a user may have copied the checkpoint's folder elsewhere. In a
    # copy, only the part of each key that follows this folder is valid.
    folder = f"run={manifest.run}/gen={manifest.generation}/step={manifest.step}/"
    base = key.rpartition("/")[0]
    found = _FOLDER.search(f"{base}/")
    if found is not None and found[0] != folder:
        raise CorruptCheckpoint(f"{uri} is the manifest of another checkpoint: {folder}")
    inside_base = f"{base}/" if base else ""
    # Frozen objects hold tensors that training does not change. The original bucket stores them in the folder of the
    # run, for all checkpoints of the run. A copy of one checkpoint's folder must contain them in a subfolder `frozen`.
    run_folder = f"{base}/".removesuffix(folder.partition("/")[2])
    shared_keys = {each.sha256: f"{run_folder}frozen/{each.sha256}.safetensors" for each in manifest.frozen}
    shared_keys |= {each.sha256: f"{inside_base}replicated/{each.sha256}.safetensors" for each in manifest.replicated}
    keys: dict[int, str] = {}
    for shard in manifest.shards:
        inside = shard.key.rpartition(folder)[2]
        if inside == shard.key or ".." in inside.split("/"):
            raise CorruptCheckpoint(f"{uri} names an object outside of its folder: {shard.key}")
        keys[int(shard.rank)] = f"{inside_base}{inside}"
    return Checkpoint(manifest, store, keys, shared_keys)


def _run_elements(shape: tuple[int, ...], box: Box) -> int:
    """Return the number of elements in each contiguous run of a box.

    A box is a rectangular piece of the tensor. In the whole tensor, its elements form runs of equal length, with
    elements of other boxes between the runs. For example, a box of some columns of a matrix has one run per row.
    """
    elements = 1
    for length, size in zip(reversed(shape), reversed(box.sizes), strict=True):
        elements *= size
        if size != length:
            break
    return elements


def _runs(shape: tuple[int, ...], box: Box) -> Iterator[int]:
    """Yield the index of the first element of each contiguous run of a box (see `_run_elements`).

    An index counts the elements of the whole tensor in row-major order.
    """
    inner = len(shape)
    while inner and box.sizes[inner - 1] == shape[inner - 1]:
        inner -= 1
    outer = max(0, inner - 1)
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    rest = sum(offset * stride for offset, stride in zip(box.offsets[outer:], strides[outer:], strict=True))
    ranges = [range(offset, offset + size) for offset, size in zip(box.offsets[:outer], box.sizes[:outer], strict=True)]
    for place in product(*ranges):
        yield rest + sum(index * stride for index, stride in zip(place, strides[:outer], strict=True))
