"""Restores a step: reads the rank's slot, agrees with the other ranks, and writes the snapshot into the live objects.

Invariant: no rank changes a live object before all ranks have found that their snapshots are of the same step and fit
the script's objects. Otherwise, all ranks raise an error. A rank copies each tensor as soon as the agent has verified
its bytes (`Arrival`). No rank trains before all bytes are verified on all nodes.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist

from everstep.protocol.errors import ProtocolError
from everstep.protocol.ids import Rank, RunId, Step
from everstep.protocol.pages import populate
from everstep.protocol.rank_messages import AgentHalf, Arriving, Welcome
from everstep.protocol.slot import (
    HEADER_BYTES,
    SlotHeader,
    SlotIndex,
    SlotState,
    TensorEntry,
    digest,
    unpack_header,
    unpack_index,
)
from everstep.protocol.slot_values import SlotValues
from everstep.training.agent_link import AgentLink
from everstep.training.arena import Arena
from everstep.training.capture import view_of
from everstep.training.errors import RestoreMismatch
from everstep.training.saved_tensors import SavedTensors
from everstep.training.state_tree import Tree, decode

VALUE_PREFIX = "value"
"""Prefix of the names of large tensors outside models and optimizers, as `value/objects/extra/average/weights`."""
SHOWN_DIFFERENCES = 8

_SLOT_VALUES = msgspec.msgpack.Decoder(SlotValues)
_FACTS = msgspec.msgpack.Decoder(dict[str, str])


def decode_values(data: bytes) -> SlotValues:
    """Decode `values` of a slot's index. Raises a ValueError of msgspec if the bytes are invalid."""
    return _SLOT_VALUES.decode(data)


def decode_facts(data: bytes) -> dict[str, str]:
    """Decode the bytes of `encode_facts`. Raises ValueError if they are invalid."""
    return _FACTS.decode(data)


class Restorable(Protocol):
    """A checked saved state for one rank, in its layout."""

    @property
    def tensors(self) -> SavedTensors:
        """The tensors by name, in this rank's layout."""
        ...

    def adapters(self) -> Tree:
        """Return what each adapter's `load` receives. Raises RestoreMismatch if the values do not decode."""
        ...

    def others(self) -> Tree:
        """Return all other values by name. Raises RestoreMismatch if they do not decode."""
        ...


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The checked content of a slot from which a rank restores."""

    step: Step
    tensors: SavedTensors
    """Views of the slot's copy-on-write memory. Reading one waits until its bytes are verified."""
    values: SlotValues

    def adapters(self) -> Tree:
        return self._decode(self.values.adapters)

    def others(self) -> Tree:
        return self._decode(self.values.others)

    def _decode(self, data: bytes) -> Tree:
        try:
            # Clone each tensor, because an object may keep it, and a later snapshot overwrites the slot's memory.
            return decode(data, lambda path: self.tensors[VALUE_PREFIX + path].clone())
        except ProtocolError as error:
            raise RestoreMismatch(f"the values of step {self.step} cannot be read: {error}") from error


class LoadBegunAnew(Exception):
    """The agent loads the snapshot anew, so the bytes that the rank has copied are invalid."""


class Arrival:
    """Tracks how much of a snapshot the agent has written into its slot and verified; all of it after a `Welcome`."""

    def __init__(self, link: AgentLink, named: Arriving | Welcome) -> None:
        self._link = link
        self._load = named.load if isinstance(named, Arriving) else None
        self._verified = 0

    def has(self, end: int) -> bool:
        """Return, without waiting, whether the first `end` bytes of the payload are verified."""
        return self._load is None or end <= self._verified

    def wait(self, end: int) -> None:
        """Wait for the first `end` verified bytes. Raises LoadBegunAnew, or AgentUnreachable after a long silence."""
        if not self.has(end):
            self._look(lambda half: half.verified >= end)

    def check(self) -> None:
        """Check that the agent has not started to load the snapshot again. Raises as `wait`."""
        if self._load is not None:
            self._look(lambda _: True)

    def finish(self) -> None:
        """Wait until every node has verified its ranks' shards, then `check`. Raises as `wait`."""
        if self._load is not None:
            self._link.watch(lambda _: isinstance(self._link.welcome(), Welcome))
            self.check()

    def _look(self, is_enough: Callable[[AgentHalf], bool]) -> None:
        found: list[AgentHalf] = []

        def look(half: AgentHalf | None) -> bool:
            if half is None or not (half.load != self._load or is_enough(half)):
                return False
            found.append(half)
            return True

        self._link.watch(look)
        if found[-1].load != self._load:
            raise LoadBegunAnew
        self._verified = found[-1].verified


class _Tensors(SavedTensors):
    def __init__(self, memory: mmap.mmap, index_offset: int, index: SlotIndex, arrival: Arrival) -> None:
        super().__init__()
        self._payload = (
            torch.frombuffer(memory, dtype=torch.uint8, offset=HEADER_BYTES, count=index_offset)
            if index_offset
            else torch.empty(0)
        )
        self._entries: dict[str, TensorEntry] = {entry.name: entry for entry in index.tensors}
        self._arrival = arrival

    def __getitem__(self, name: str) -> torch.Tensor:
        entry = self._entries[name]
        end = entry.offset + entry.bytes
        if not self._arrival.has(end):
            self.finish()  # Copy the tensors that have arrived, because the rank must wait for the next bytes anyway.
            self._arrival.wait(end)
        return view_of(self._payload, entry)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


@dataclass(frozen=True, slots=True)
class Expected:
    """The run, rank, step and facts that the slot to restore from must have."""

    run: RunId
    rank: Rank
    step: Step
    facts: Mapping[str, str]


def encode_facts(facts: Mapping[str, str]) -> tuple[bytes, bytes]:
    """Return encoded facts, in any order, and their xxh3-128 digest (the layout hash)."""
    data = msgspec.msgpack.encode(dict(sorted(facts.items())))
    return data, digest(data)


def map_ahead(path: Path, arenas: Sequence[Arena]) -> mmap.mmap:
    """Map a slot file privately, and prefault it and the arenas in the background. Raises OSError as `open`."""
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)

    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()

    # Make no torch calls in this thread, because a process that exits during such a call ends with SIGABRT.
    def bring() -> None:
        populate(address, len(memory), is_written=False)
        for arena in arenas:
            arena.prefault()

    threading.Thread(target=bring, name="everstep-prefault", daemon=True).start()
    return memory


def read_snapshot(named: Arriving | Welcome, memory: mmap.mmap, arrival: Arrival, expected: Expected) -> Snapshot:
    """Read and check the snapshot in a mapped slot, without communication between ranks. Its tensors are views. The
    agent verifies the payload's digest, or arriving chunks one by one. Raises RestoreMismatch if the slot is
    incomplete, or has a different run, rank, step or layout.
    """
    # While the agent still loads the snapshot (`Arriving`), the slot's header is not valid. The agent writes the header
    # after the whole payload, and `check_whole` checks it then.
    place = named if isinstance(named, Arriving) else _header(named, memory, expected)
    try:
        index_begin = HEADER_BYTES + place.index_offset
        index = unpack_index(memory[index_begin : index_begin + place.index_bytes], place.index_offset)
        values = _SLOT_VALUES.decode(index.values)
    except (ValueError, ProtocolError) as error:  # Catch ValueError, because msgspec's errors are subclasses of it.
        raise RestoreMismatch(f"the slot {named.base_slot_path} cannot be read: {error}") from error
    if values.facts != encode_facts(expected.facts)[0]:
        raise RestoreMismatch(
            f"the snapshot of step {expected.step} does not fit: {_differences(values.facts, expected.facts)}"
        )
    if isinstance(named, Welcome):
        check_whole(named, memory, expected)
    return Snapshot(expected.step, _Tensors(memory, place.index_offset, index, arrival), values)


def check_whole(named: Arriving | Welcome, memory: mmap.mmap, expected: Expected) -> None:
    """Raise RestoreMismatch if a mapped slot is not sealed, or has another run, rank, step or layout."""
    if _header(named, memory, expected).layout_hash != encode_facts(expected.facts)[1]:
        raise RestoreMismatch(
            f"the layout hash in the header of the slot {named.base_slot_path} is not that of its facts"
        )


def _header(named: Arriving | Welcome, memory: mmap.mmap, expected: Expected) -> SlotHeader:
    try:
        header = unpack_header(memory[:HEADER_BYTES])
    except ProtocolError as error:
        raise RestoreMismatch(f"the slot {named.base_slot_path} cannot be read: {error}") from error
    found = (header.state, header.run, header.owner_rank, header.step)
    wanted = (SlotState.SEALED, expected.run, expected.rank, expected.step)
    if found != wanted:
        raise RestoreMismatch(
            f"the slot {named.base_slot_path} holds {found}, expected {wanted} (state, run, rank, step)"
        )
    return header


def agree(step: Step, problem: str) -> None:
    """Check that all ranks can restore the same step, 0 without a snapshot. Collective, even for a rank with a
    `problem`. Raises RestoreMismatch if a rank cannot restore, or the ranks received different steps.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        backend = dist.get_backend()  # The backend may have a device prefix, as in "cuda:nccl".
        device = (
            torch.device("cuda", torch.cuda.current_device())
            if "nccl" in backend and "cpu" not in backend
            else torch.device("cpu")
        )
        words = torch.tensor([int(bool(problem)), step, -step], dtype=torch.int64, device=device)
        dist.all_reduce(words, op=dist.ReduceOp.MAX)
        is_refused, highest, lowest = (int(word) for word in words.tolist())
        if not problem and is_refused:
            problem = "another rank cannot restore its shard; its own error says why"
        elif not problem and highest != -lowest:
            problem = f"the ranks were given different steps, {-lowest} to {highest}; this one {step}"
    if problem:
        raise RestoreMismatch(problem)


def gathered(value: Any) -> Sequence[Any]:
    """Return the values of all ranks by rank. Collective: every rank calls it with its own value."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _differences(found: bytes, expected: Mapping[str, str]) -> str:
    try:
        saved = _FACTS.decode(found)
    except ValueError:
        return "its facts cannot be read"
    lines = [
        f"{key} was {saved.get(key, 'absent')}, is {expected.get(key, 'absent')}"
        for key in sorted(saved.keys() | expected.keys())
        if saved.get(key) != expected.get(key)
    ]
    more = f"; and {len(lines) - SHOWN_DIFFERENCES} more" if len(lines) > SHOWN_DIFFERENCES else ""
    return "; ".join(lines[:SHOWN_DIFFERENCES]) + more
