"""Gives a rank access to earlier shards, which a launch with a different layout saved.

The layout differs if the launch had more or fewer ranks, or a different kind of training (DDP, FSDP2, ZeRO). An earlier
rank is a rank of the launch that made the shards. A rank of the new launch maps some of these shards into its memory.
The index of each shard names the boxes (rectangular pieces) of logical tensors that the shard holds
(`everstep.protocol.parts`). Adapters define targets: the tensors of the rank's own layout, each with the boxes that
fill it.

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
    """Access to the shards of the restored step: one shard per earlier rank (of the launch that saved the step)."""

    @property
    def world_size(self) -> int:
        """Number of ranks of the generation that made the step to restore."""
        ...

    @property
    def here(self) -> Sequence[Rank]:
        """Ranks of the launch that saved the restored step, whose shards are already in this node's memory."""
        ...

    def fetch(self, rank: Rank) -> Path:
        """Make the shard of an earlier rank, a rank of the launch that saved the step, available on this node.

        The call may wait until the agent has loaded the shard.

        Args:
            rank: the earlier rank that owns the shard.

        Returns:
            Path of the sealed and verified slot.

        Raises:
            RestoreMismatch: the agent cannot load the shard.
            AgentUnreachable: the connection to the agent was lost for too long.
        """
        ...


@dataclass(frozen=True, slots=True)
class AgentShards:
    """Shards of the restored step that this node's agent loads on request."""

    link: AgentLink
    layout: EarlierLayout

    @property
    def world_size(self) -> int:
        """Number of ranks of the generation that made the step to restore."""
        return self.layout.world_size

    @property
    def here(self) -> Sequence[Rank]:
        """Ranks of the launch that saved the restored step, whose shards are already in this node's memory."""
        return self.layout.here

    def fetch(self, rank: Rank) -> Path:
        """Request the shard of an earlier rank, and wait until the agent has loaded the shard into a slot.

        An earlier rank is a rank of the launch that saved the step.

        Args:
            rank: the earlier rank that owns the shard.

        Returns:
            Path of the sealed and verified slot.

        Raises:
            RestoreMismatch: the agent cannot load the shard.
            AgentUnreachable: the connection to the agent was lost for too long.
        """
        answer = self.link.fetch(rank)
        if answer.problem or not answer.path:
            raise RestoreMismatch(f"the agent cannot load the shard of earlier rank {rank}: {answer.problem}")
        return Path(answer.path)


@dataclass(frozen=True, slots=True)
class EarlierShard:
    """The shard of an earlier rank (of the launch that captured the step), mapped into this rank's memory."""

    rank: Rank
    payload: torch.Tensor
    """uint8[index_offset]: the tensors of the slot.

    The memory is a private mapping, so writes never reach the slot itself.
    """
    index: SlotIndex
    values: SlotValues
    facts: Mapping[str, str]
    """Facts about the models and optimizers of the rank that saved the shard, such as shapes (`Adapter.facts`)."""

    def box(self, entry: TensorEntry, part: TensorPart) -> torch.Tensor:
        """Return one box (rectangular piece) of a logical tensor as a view of the slot."""
        begin = entry.offset + part.start * ITEM_BYTES[entry.dtype]
        data = self.payload[begin : begin + part.elements * ITEM_BYTES[entry.dtype]]
        dtype: torch.dtype = getattr(torch, entry.dtype)
        return data.view(dtype).view(part.sizes) if data.numel() else torch.empty(part.sizes, dtype=dtype)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a whole tensor by its name in the slot, or raise KeyError. It shares the memory of the slot."""
        entry = next((entry for entry in self.index.tensors if entry.name == name), None)
        if entry is None:
            raise KeyError(name)
        return self.box(entry, whole(name, entry.shape))


def map_shard(path: Path, run: RunId, rank: Rank, step: Step) -> EarlierShard:
    """Map the slot file with the shard of an earlier rank into memory.

    An earlier rank is a rank of the launch that saved the step.

    Args:
        path: the sealed slot, verified by the agent.
        run: the run that the slot must belong to.
        rank: the earlier rank that must own the slot.
        step: the step that the slot must hold.

    Returns:
        The shard.

    Raises:
        RestoreMismatch: the slot cannot be read, or holds a different shard.
    """
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
    """Return the earlier rank whose values a rank loads: options, schedulers, objects, data positions, generators.

    A rank that existed in the earlier launch loads its own values. A new rank loads the values of the earlier rank with
    the same local rank on the corresponding earlier node. If this launch has N nodes and the earlier launch had E
    nodes, node n corresponds to the earlier node n × E / N, rounded down. Most frameworks divide tensors in the order
    of ranks, so the new rank usually needs the shard of this earlier rank for its tensors, too. The local rank is the
    same, because tensor parallelism inside nodes gives ranks with the same local rank the same slice of each tensor.

    Args:
        earlier_size: number of earlier ranks.
        rank: the rank that loads.
        world_size: number of ranks of this launch.
        ranks_per_node: number of ranks on each node.

    Returns:
        An earlier rank. If the earlier ranks do not fill whole nodes, it is the rank modulo `earlier_size`.
    """
    if rank < earlier_size:
        return rank
    nodes, rest = divmod(earlier_size, ranks_per_node)
    if rest:
        return Rank(rank % earlier_size)
    node, local_rank = divmod(rank, ranks_per_node)
    return Rank(node * nodes // (world_size // ranks_per_node) * ranks_per_node + local_rank)


def fetch_order(earlier_size: int, here: Sequence[Rank], rank: Rank, world_size: int, first: Rank) -> list[Rank]:
    """Return the order in which a rank maps earlier shards, the shards of the launch that saved the step.

    The first shard is the one from which the rank loads its non-tensor values. The shards in this node's memory follow,
    because they need no transfer. All other shards follow in the order of their distance from the rank's own position,
    because frameworks divide tensors in the order of ranks.

    Args:
        earlier_size: number of earlier ranks.
        here: earlier ranks whose shards this node holds.
        rank: the rank that loads.
        world_size: number of ranks of this launch.
        first: the earlier rank from which the rank loads its non-tensor values (`values_rank`).

    Returns:
        Every earlier rank once.
    """
    begin, end = rank * earlier_size / world_size, (rank + 1) * earlier_size / world_size

    def key(other: int) -> tuple[bool, bool, float, int]:
        return other != first, other not in here, max(0.0, begin - other - 1, other - end), other

    return [Rank(other) for other in sorted(range(earlier_size), key=key)]


@dataclass(slots=True)
class HeldTensor:
    """The boxes (pieces) of one logical tensor in those earlier shards that this rank has mapped into its memory."""

    dtype: str
    """Name of the dtype in torch, for example `float32`."""
    shape: tuple[int, ...]
    boxes: dict[tuple[tuple[int, ...], tuple[int, ...]], torch.Tensor]
    """View of each box, by its offsets and sizes.

    If several shards hold the same box, the view shows the copy of the shard that was mapped first.
    """


class EarlierTensors:
    """The tensors of a model that an earlier launch saved in pieces, divided among the shards of its ranks.

    The rank maps shards into its memory and passes each to `add`. The shard that `add` receives with `is_own` also
    supplies the values that are not tensors, such as data positions; `own` returns its tensors by their names in the
    slot.
    """

    def __init__(self) -> None:
        self.shards: list[EarlierShard] = []
        self._held: dict[str, HeldTensor] = {}
        self._entries: dict[str, dict[str, HeldTensor]] = {}
        self._empty: dict[str, dict[str, str]] = {}
        """Dtype of each optimizer state tensor that is empty in an earlier shard, by parameter (owner) and key."""
        self._own: dict[str, TensorEntry] = {}
        self._own_shard: EarlierShard | None = None

    def add(self, shard: EarlierShard, *, is_own: bool) -> None:
        """Add the tensors of a shard of the earlier launch, which this rank has mapped into its memory.

        Args:
            shard: a shard that was not added before.
            is_own: True for the one shard from which this rank also restores data other than tensors.

        Raises:
            CannotRelayout: two shards disagree about the dtype or shape of a logical tensor.
        """
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
        """Return a logical tensor, or None if no earlier shard that this rank has mapped holds a piece of it."""
        return self._held.get(name)

    @property
    def extent(self) -> tuple[int, int]:
        """Number of logical (whole) tensors, and of optimizer-state tensors with zero elements.

        Both count the tensors in the earlier shards that this rank has mapped so far. While the numbers do not change,
        `Adapter.targets` would return the same tensors, so the caller need not call it again.
        """
        return len(self._held), sum(map(len, self._empty.values()))

    def names(self) -> Sequence[str]:
        """Return the names of all logical tensors with pieces in the earlier shards that this rank has mapped."""
        return list(self._held)

    def entries(self, owner: str) -> Mapping[str, HeldTensor]:
        """Return the optimizer state of one parameter by its keys.

        Args:
            owner: `optimizer/<parameter>`, or `optimizer/<optimizer>/<parameter>`.

        Returns:
            The state tensors that have a piece in an earlier shard that this rank has mapped. Empty without such a
            piece.
        """
        return self._entries.get(owner, {})

    def empty_entries(self, owner: str) -> Mapping[str, str]:
        """Return the dtypes of one parameter's optimizer-state tensors that earlier shards store with zero elements.

        The keys are the names of the state entries, such as `exp_avg`.
        """
        return self._empty.get(owner, {})

    def entries_below(self, prefix: str) -> Iterator[tuple[str, Mapping[str, HeldTensor]]]:
        """Yield a pair for every parameter of one optimizer: the parameter's path, and its state tensors by key.

        `entries` accepts these paths as `owner`. The names of this optimizer's state tensors begin with
        `prefix`.
        """
        return ((owner, entries) for owner, entries in self._entries.items() if f"{owner}/".startswith(prefix))

    def own(self, name: str) -> TensorEntry | None:
        """Return a tensor's index entry in the earlier shard from which this rank also restores its non-tensor values.

        None if this shard has no such tensor.
        """
        return self._own.get(name)

    def own_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor of the earlier shard from which this rank also restores its plain (non-tensor) values.

        The tensor shares the memory of the shard's slot.
        """
        assert self._own_shard is not None
        entry = self._own[name]
        return self._own_shard.box(entry, TensorPart(name, entry.shape, (0,) * len(entry.shape), entry.shape, 0))


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """A tensor that this rank loads, and the boxes (pieces of logical tensors) that fill it."""

    name: str
    """Name that the tensor has in a slot of the new launch."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[TensorPart, ...]
    """Boxes (pieces of logical tensors) that fill the tensor.

    If boxes of several logical tensors fill the same elements, these boxes have equal content, so one of them suffices.
    """
    is_padded: bool = False
    """True if the tensor may contain padding: elements that no box (piece of a logical tensor) fills. Padding becomes
    zeros.
    """
    is_own: bool = False
    """True if this rank copies the whole tensor, unchanged, from the shard that supplies its values other than
    tensors."""
    is_optional: bool = False
    """True if the earlier launch may not have had this tensor.

    The rank decides this only after it has mapped all shards.
    """

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def check(self) -> None:
        """Check that every element of the tensor, except padding, is in one of the boxes (pieces) that fill the tensor.

        Raises:
            CannotRelayout: some elements are in no box. This occurs if two shardings, or the script's own parallelism,
                divide a dimension unevenly.
        """
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
    """The values, other than tensors, from a rank of the launch that saved the step.

    Adapters convert the values to the layout of this launch.
    """

    step: Step
    facts: Mapping[str, str]
    adapter: Mapping[str, Any]
    """The values, other than tensors, that `Adapter.observe` returned on the rank that saved the step."""
    others: Mapping[str, Any]
    """States of registered objects, data positions, training modes and random generators, by name."""

    @property
    def is_of_engine(self) -> bool:
        """True if the launch that saved these values trained with a DeepSpeed engine."""
        return "optimizer" in self.adapter

    def scheduler(self) -> Tree:
        """Return the state of the single scheduler, which the engine or the script owned. None without a scheduler."""
        if self.is_of_engine:
            return cast(Tree, self.adapter["scheduler"])
        return cast(Tree, self.others["objects"].get("scheduler"))
