"""Restores a step: reads the rank's slot, agrees with the other ranks, and writes the snapshot into the live objects.

Invariant: no rank changes a live object before all ranks have found that their snapshots are of the same step and fit
the objects that the script built. If one rank rejects its snapshot, all ranks raise an error. While the agent is still
receiving the payload, the rank copies each tensor as soon as the agent has verified its bytes (`Arrival`). No rank
trains before all bytes are verified on all nodes.
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
"""Prefix of the names of large tensors that do not belong to a model or optimizer.

An example is `value/objects/extra/average/weights`.
"""
SHOWN_DIFFERENCES = 8

_SLOT_VALUES = msgspec.msgpack.Decoder(SlotValues)
_FACTS = msgspec.msgpack.Decoder(dict[str, str])


def decode_values(data: bytes) -> SlotValues:
    """Decode the field `values` of a slot's index. Raises a ValueError of msgspec if the bytes are invalid."""
    return _SLOT_VALUES.decode(data)


def decode_facts(data: bytes) -> dict[str, str]:
    """Decode the facts about models and optimizers from `encode_facts`. Raises ValueError if the bytes are invalid."""
    return _FACTS.decode(data)


class Restorable(Protocol):
    """A saved state for one rank, whose format and layout were checked when it was read.

    `RankState.load` and `RankState.complete` write it into the script's live objects.
    """

    @property
    def tensors(self) -> SavedTensors:
        """The tensors of the state by name, in this rank's layout."""
        ...

    def adapters(self) -> Tree:
        """Return the plain values of models and optimizers: for each adapter, the value that its `load` receives."""
        ...

    def others(self) -> Tree:
        """Return all values that do not belong to models and optimizers, by name.

        These are the states of registered objects and data loaders, the modules' training modes, and random generators.
        """
        ...


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The checked content of a slot from which a rank restores."""

    step: Step
    tensors: SavedTensors
    """Tensors of the slot. Their memory is copy-on-write, so the slot itself never changes.

    Reading a tensor waits until its bytes are verified.
    """
    values: SlotValues

    def adapters(self) -> Tree:
        """Return the plain values of models and optimizers, as their adapters stored them in the snapshot.

        Returns:
            A list with the values that each adapter's `observe` returned.

        Raises:
            RestoreMismatch: the values do not decode.
        """
        return self._decode(self.values.adapters)

    def others(self) -> Tree:
        """Return all values that do not belong to models and optimizers.

        Values that are tensors are read from the end of the payload.

        Returns:
            The values of objects, data and generators, by name.

        Raises:
            RestoreMismatch: the values do not decode.
        """
        return self._decode(self.values.others)

    def _decode(self, data: bytes) -> Tree:
        try:
            # Clone each tensor, because an object may keep it, and a later snapshot overwrites the slot's memory.
            return decode(data, lambda path: self.tensors[VALUE_PREFIX + path].clone())
        except ProtocolError as error:
            raise RestoreMismatch(f"the values of step {self.step} cannot be read: {error}") from error


class LoadBegunAnew(Exception):
    """The agent has started to load the snapshot again, from another source or after a restart of the agent.

    The bytes that the rank has already copied are then invalid.
    """


class Arrival:
    """Tracks how much of a snapshot the agent has already written into its slot and verified.

    Args:
        link: connection to the agent; receives the messages about the progress.
        named: the agent's message about the snapshot to restore. If it is a `Welcome`, the whole snapshot has arrived.
    """

    def __init__(self, link: AgentLink, named: Arriving | Welcome) -> None:
        self._link = link
        self._load = named.load if isinstance(named, Arriving) else None
        self._verified = 0

    def has(self, end: int) -> bool:
        """Return whether the agent has reported that the first `end` bytes of the payload are verified.

        The call does not wait.
        """
        return self._load is None or end <= self._verified

    def wait(self, end: int) -> None:
        """Wait until the first bytes of the payload are verified.

        Args:
            end: length of the prefix, in bytes.

        Raises:
            LoadBegunAnew: the agent loads the snapshot again.
            AgentUnreachable: the connection to the agent was lost for too long.
        """
        if not self.has(end):
            self._look(lambda half: half.verified >= end)

    def check(self) -> None:
        """Check that the agent has not started to load the snapshot again.

        Raises:
            LoadBegunAnew: the agent has started to load the snapshot again.
            AgentUnreachable: the connection to the agent was lost for too long.
        """
        if self._load is not None:
            self._look(lambda _: True)

    def finish(self) -> None:
        """Wait until every node has verified its ranks' shards.

        Then check that the agent has not started to load the snapshot again.

        Raises:
            LoadBegunAnew: the agent loads the snapshot again.
            AgentUnreachable: the connection to the agent was lost for too long.
        """
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
    """The tensors of a payload, as views of the slot. Reading a tensor waits until its bytes are verified."""

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
    """The run, rank, step and facts about models and optimizers that the slot to restore from must have."""

    run: RunId
    rank: Rank
    step: Step
    facts: Mapping[str, str]


def encode_facts(facts: Mapping[str, str]) -> tuple[bytes, bytes]:
    """Encode the facts about models and optimizers, and return the bytes with their digest (the layout hash).

    Args:
        facts: facts that must be equal in the launch that saved and the launch that restores. Their order does not
            matter.

    Returns:
        The bytes, and the xxh3-128 digest of the bytes.
    """
    data = msgspec.msgpack.encode(dict(sorted(facts.items())))
    return data, digest(data)


def map_ahead(path: Path, arenas: Sequence[Arena]) -> mmap.mmap:
    """Map a slot file, and prefault its pages and the arenas in the background.

    Prefaulting means to access memory in advance, because the first access is slow. The script continues meanwhile.

    Args:
        path: the slot that the agent named.
        arenas: memory for tensors that do not exist yet.

    Returns:
        A private mapping: what this process writes into it does not change the slot.

    Raises:
        OSError: the file cannot be opened.
    """
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
    """Read and check the snapshot in a slot, without communication between ranks.

    The agent has verified the payload's digest, or verifies arriving chunks one by one.

    Args:
        named: the agent's message about the snapshot to restore.
        memory: mapping of the whole slot, header included.
        arrival: waits for the parts of the payload that have not arrived yet.
        expected: run, rank, step and facts that the slot must have.

    Returns:
        The snapshot. Its tensors are views of `memory`.

    Raises:
        RestoreMismatch: the slot is incomplete, or has a different run, rank, step or layout. The error names the
            differences.
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
    """Check that a slot is sealed and has the expected run, rank, step and layout.

    Args:
        named: the agent's message about the snapshot to restore.
        memory: mapping of the whole slot, header included.
        expected: run, rank, step and layout that the slot must have.

    Raises:
        RestoreMismatch: the slot is incomplete, or has a different run, rank, step or layout. The error names the
            differences.
    """
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
    """Wait until all ranks have reported which step they can restore, and check that it is the same step.

    Collective: every rank calls it once, even if it has a problem.

    Args:
        step: the step that the agent named for this rank; 0 without a snapshot.
        problem: why this rank cannot restore. Empty if the rank can restore.

    Raises:
        RestoreMismatch: this rank or another rank cannot restore, or the ranks received different steps.
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
