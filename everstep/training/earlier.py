"""Gives a rank access to earlier shards, which a launch with a different layout saved.

The layout differs if the launch had more or fewer ranks, or a different kind of training (DDP, FSDP2, ZeRO). An earlier
rank is a rank of that launch. The index of each shard names its boxes (`everstep.protocol.parts`). Adapters define
targets: the tensors of the rank's own layout, each with the boxes that fill it.

Invariant: this module writes to no live object and does not communicate with other ranks.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from everstep.protocol.dtypes import ITEM_BYTES
from everstep.protocol.errors import ProtocolError
from everstep.protocol.ids import Rank, RunId, Step
from everstep.protocol.parts import LOGICAL_PREFIXES, TensorPart, whole
from everstep.protocol.rank_messages import EarlierLayout
from everstep.protocol.slot import HEADER_BYTES, SlotIndex, SlotState, TensorEntry, digest, unpack_header, unpack_index
from everstep.protocol.slot_values import SlotValues
from everstep.training.agent_link import AgentLink
from everstep.training.errors import CannotRelayout, RestoreMismatch
from everstep.training.restore import decode_facts, decode_values
from everstep.training.state_tree import Tree, dtype_name


class EarlierShards(Protocol):
    """Access to the shards of the restored step: one per earlier rank."""

    @property
    def world_size(self) -> int:
        """Number of earlier ranks."""
        ...

    @property
    def here(self) -> Sequence[Rank]:
        """Earlier ranks whose shards are already in this node's memory."""
        ...

    def fetch(self, rank: Rank) -> Path:
        """Return the slot with an earlier rank's verified shard, after the agent has loaded it. Raises RestoreMismatch
        if the agent cannot load it, and AgentUnreachable if the connection was lost for too long.
        """
        ...


@dataclass(frozen=True, slots=True)
class AgentShards:
    """Shards of the restored step that this node's agent loads on request."""

    link: AgentLink
    layout: EarlierLayout

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    @property
    def here(self) -> Sequence[Rank]:
        return self.layout.here

    def fetch(self, rank: Rank) -> Path:
        answer = self.link.fetch(rank)
        if answer.problem or not answer.path:
            raise RestoreMismatch(f"the agent cannot load the shard of earlier rank {rank}: {answer.problem}")
        return Path(answer.path)


@dataclass(frozen=True, slots=True)
class EarlierShard:
    """The shard of an earlier rank, mapped into this rank's memory."""

    rank: Rank
    payload: torch.Tensor
    """uint8[index_offset], a private mapping: writes never reach the slot."""
    index: SlotIndex
    values: SlotValues
    facts: Mapping[str, str]
    """`Adapter.facts` of the earlier rank."""

    def box(self, entry: TensorEntry, part: TensorPart) -> torch.Tensor:
        """Return one box as a view of the slot."""
        begin = entry.offset + part.start * ITEM_BYTES[entry.dtype]
        data = self.payload[begin : begin + part.elements * ITEM_BYTES[entry.dtype]]
        dtype: torch.dtype = getattr(torch, entry.dtype)
        return data.view(dtype).view(part.sizes) if data.numel() else torch.empty(part.sizes, dtype=dtype)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor by its name as a view of the slot, or raise KeyError."""
        entry = next((entry for entry in self.index.tensors if entry.name == name), None)
        if entry is None:
            raise KeyError(name)
        return self.box(entry, whole(name, entry.shape))


def map_shard(path: Path, run: RunId, rank: Rank, step: Step) -> EarlierShard:
    """Map an earlier rank's slot file. Raises RestoreMismatch if it is unreadable or holds another shard."""
    try:
        with path.open("rb") as file:
            memory = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        header = unpack_header(memory[:HEADER_BYTES])
        found = (header.state, header.run, header.owner_rank, header.step)
        if found != (SlotState.SEALED, run, rank, step):
            expected = (SlotState.SEALED, run, rank, step)
            raise RestoreMismatch(f"the slot {path} holds {found}, expected {expected} (state, run, rank, step)")
        begin = HEADER_BYTES + header.index_offset
        index = unpack_index(memory[begin : begin + header.index_bytes], header.index_offset)
        values = decode_values(index.values)
        facts = decode_facts(values.facts)
    except (OSError, ValueError, ProtocolError) as error:
        # Catch ValueError, because msgspec's errors are subclasses of it.
        raise RestoreMismatch(f"the slot {path} cannot be read: {error}") from error
    if digest(values.facts) != header.layout_hash:
        raise RestoreMismatch(f"the layout hash in the header of the slot {path} is not that of its facts")
    count = header.index_offset
    payload = torch.frombuffer(memory, dtype=torch.uint8, offset=HEADER_BYTES, count=count) if count else torch.empty(0)
    return EarlierShard(rank, payload, index, values, facts)


def values_rank(earlier_size: int, rank: Rank, world_size: int, ranks_per_node: int) -> Rank:
    """Return the earlier rank whose values, other than tensors, a rank loads.

    A rank that existed loads its own. A new rank on node n of N takes the same local rank of the earlier node n × E /
    N, rounded down. Frameworks divide tensors in the order of ranks, and tensor parallelism inside nodes gives equal
    local ranks the same slices, so the rank usually needs this shard for its tensors as well. If the earlier ranks do
    not fill whole nodes, it is the rank modulo `earlier_size`.
    """
    if rank < earlier_size:
        return rank
    nodes, rest = divmod(earlier_size, ranks_per_node)
    if rest:
        return Rank(rank % earlier_size)
    node, local_rank = divmod(rank, ranks_per_node)
    return Rank(node * nodes // (world_size // ranks_per_node) * ranks_per_node + local_rank)


def fetch_order(earlier_size: int, here: Sequence[Rank], rank: Rank, world_size: int, first: Rank) -> list[Rank]:
    """Return the order in which a rank maps earlier shards: `first`, those on this node, then the nearest positions.
    Frameworks divide tensors in the order of ranks, so near positions hold the rank's elements.
    """
    begin, end = rank * earlier_size / world_size, (rank + 1) * earlier_size / world_size

    def key(other: int) -> tuple[bool, bool, float, int]:
        return other != first, other not in here, max(0.0, begin - other - 1, other - end), other

    return [Rank(other) for other in sorted(range(earlier_size), key=key)]


@dataclass(slots=True)
class HeldTensor:
    """The boxes of one logical tensor in the mapped earlier shards."""

    dtype: str
    """torch's name, for example `float32`."""
    shape: tuple[int, ...]
    boxes: dict[tuple[tuple[int, ...], tuple[int, ...]], torch.Tensor]
    """View of each box by offsets and sizes, of the shard that was mapped first."""


class EarlierTensors:
    """The logical tensors in the mapped shards. The shard with `is_own` also supplies the rank's values."""

    def __init__(self) -> None:
        self.shards: list[EarlierShard] = []
        self._held: dict[str, HeldTensor] = {}
        self._entries: dict[str, dict[str, HeldTensor]] = {}
        self._empty: dict[str, dict[str, str]] = {}
        """Dtype of optimizer state that is empty in an earlier shard, by owner and key."""
        self._own: dict[str, TensorEntry] = {}
        self._own_shard: EarlierShard | None = None

    def add(self, shard: EarlierShard, *, is_own: bool) -> None:
        """Add the tensors of a shard. Raises CannotRelayout if two shards disagree about a dtype or shape."""
        self.shards.append(shard)
        if is_own:
            self._own_shard = shard
            self._own = {entry.name: entry for entry in shard.index.tensors}
        for entry in shard.index.tensors:
            if not entry.bytes and entry.name.startswith("optimizer/"):
                owner, _, key = entry.name.rpartition("/")
                self._empty.setdefault(owner, {})[key] = entry.dtype
            for part in entry.logical_parts:
                if part.name.startswith(LOGICAL_PREFIXES):
                    self._add(shard, entry, part)

    def _add(self, shard: EarlierShard, entry: TensorEntry, part: TensorPart) -> None:
        held = self._held.get(part.name)
        if held is None:
            held = self._held[part.name] = HeldTensor(entry.dtype, part.shape, {})
            if part.name.startswith("optimizer/"):
                owner, _, key = part.name.rpartition("/")
                self._entries.setdefault(owner, {})[key] = held
        elif (held.dtype, held.shape) != (entry.dtype, part.shape):
            raise CannotRelayout(
                part.name,
                f"it is {held.dtype}{list(held.shape)} on one earlier rank and {entry.dtype}{list(part.shape)} on "
                f"earlier rank {shard.rank}. Its shape depends on the data of each rank; keep it out of the state",
            )
        held.boxes.setdefault((part.offsets, part.sizes), shard.box(entry, part))

    def get(self, name: str) -> HeldTensor | None:
        """Return a logical tensor, or None if no mapped shard holds a piece of it."""
        return self._held.get(name)

    @property
    def extent(self) -> tuple[int, int]:
        """Numbers of logical tensors and of empty optimizer state. `Adapter.targets` changes only with them."""
        return len(self._held), sum(map(len, self._empty.values()))

    def names(self) -> Sequence[str]:
        """Return the names of all logical tensors in the mapped shards."""
        return list(self._held)

    def entries(self, owner: str) -> Mapping[str, HeldTensor]:
        """Return the optimizer state of `optimizer/<parameter>` or `optimizer/<optimizer>/<parameter>` by key."""
        return self._entries.get(owner, {})

    def empty_entries(self, owner: str) -> Mapping[str, str]:
        """Return the dtypes of one parameter's empty optimizer state, by key such as `exp_avg`."""
        return self._empty.get(owner, {})

    def entries_below(self, prefix: str) -> Iterator[tuple[str, Mapping[str, HeldTensor]]]:
        """Yield the owner, for `entries`, and the state of every parameter of the optimizer with this prefix."""
        return ((owner, entries) for owner, entries in self._entries.items() if f"{owner}/".startswith(prefix))

    def own(self, name: str) -> TensorEntry | None:
        """Return a tensor's index entry in the shard with `is_own`, or None."""
        return self._own.get(name)

    def own_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor of the shard with `is_own`, as a view of its slot."""
        assert self._own_shard is not None
        entry = self._own[name]
        return self._own_shard.box(entry, TensorPart(name, entry.shape, (0,) * len(entry.shape), entry.shape, 0))


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """A tensor that this rank loads, and the boxes that fill it."""

    name: str
    """Name in a slot of the new launch."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[TensorPart, ...]
    """Boxes of several logical tensors that fill the same elements have equal content, so one suffices."""
    is_padded: bool = False
    """Whether the tensor may contain elements in no box, which become zeros."""
    is_own: bool = False
    """Whether this rank copies the whole tensor from the shard with `is_own`."""
    is_optional: bool = False
    """Whether the earlier launch may lack this tensor, which is decided after all shards are mapped."""

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def check(self) -> None:
        """Raise CannotRelayout if an element is in no box, as after two uneven shardings of one dimension."""
        boxed = sum(count for _, count in {(part.start, part.elements) for part in self.parts})
        if not (self.is_own or self.is_padded) and boxed != math.prod(self.shape):
            raise CannotRelayout(
                self.name,
                f"this rank's part, {dtype_name(self.dtype)}{list(self.shape)}, has no place in the whole tensor: "
                "the dimension is divided unevenly by two shardings, or by a parallelism of the script. "
                "Use sizes that the numbers of ranks divide",
            )


@dataclass(frozen=True, slots=True)
class EarlierState:
    """The values, other than tensors, from an earlier rank."""

    step: Step
    facts: Mapping[str, str]
    adapter: Mapping[str, Any]
    """The values of `Adapter.observe`."""
    others: Mapping[str, Any]
    """States of registered objects, data positions, training modes and random generators, by name."""

    @property
    def is_of_engine(self) -> bool:
        """Whether the earlier launch trained with a DeepSpeed engine."""
        return "optimizer" in self.adapter

    def scheduler(self) -> Tree:
        """Return the state of the single scheduler of the engine or the script, or None."""
        if self.is_of_engine:
            return cast(Tree, self.adapter["scheduler"])
        return cast(Tree, self.others["objects"].get("scheduler"))
