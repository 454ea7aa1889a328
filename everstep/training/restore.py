"""From a slot back into the live objects: read, agree, write.

Invariant: no rank writes before every rank has said that its snapshot is of the same step and fits what the script
built; a refusal anywhere is a refusal everywhere. Where the payload is still on its way, a tensor is copied when its
bytes are verified, and no rank goes on before all of them are, everywhere (`Arrival`).
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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
from everstep.training.agent_link import AgentLink
from everstep.training.arena import Arena
from everstep.training.capture import view_of
from everstep.training.errors import RestoreMismatch
from everstep.training.saved_tensors import SavedTensors
from everstep.training.state_tree import Tree, decode

VALUE_PREFIX = "value"
"""Of the names of tensors that stand for large values of the tree: `value/objects/extra/average/weights`."""
SHOWN_DIFFERENCES = 8


class SlotValues(msgspec.Struct, frozen=True, array_like=True):
    """What the `values` of a slot's index hold."""

    facts: bytes
    """msgpack of the layout's facts: their digest is the layout hash, and they say what differs when it does."""
    adapters: bytes
    """`state_tree.encode` of the adapters' values: needed first."""
    others: bytes
    """`state_tree.encode` of all other values."""


_SLOT_VALUES = msgspec.msgpack.Decoder(SlotValues)
_FACTS = msgspec.msgpack.Decoder(dict[str, str])


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A slot's content, checked."""

    step: Step
    tensors: SavedTensors
    """Private copies on write: the slot itself never changes.

    To ask for one is to wait until its bytes are verified.
    """
    values: SlotValues

    def adapters(self) -> Tree:
        """Return the adapters' values.

        Returns:
            As the adapters' `observe` returned them, one of each.

        Raises:
            RestoreMismatch: they do not decode.
        """
        return self._decode(self.values.adapters)

    def others(self) -> Tree:
        """Return all other values; asks for tensors at the payload's end.

        Returns:
            Those of objects, data and generators, by name.

        Raises:
            RestoreMismatch: they do not decode.
        """
        return self._decode(self.values.others)

    def _decode(self, data: bytes) -> Tree:
        try:
            # Objects may keep what load_state_dict hands them: give them memory of their own.
            return decode(data, lambda path: self.tensors[VALUE_PREFIX + path].clone())
        except ProtocolError as error:
            raise RestoreMismatch(f"the values of step {self.step} cannot be read: {error}") from error


class LoadBegunAnew(Exception):
    """The agent brings the base anew, from elsewhere or after its own restart: what was copied is void."""


class Arrival:
    """Follows a base on its way into its slot.

    Args:
        link: to the agent.
        named: what it has said of the base; a `Welcome` says that all of it is there.
    """

    def __init__(self, link: AgentLink, named: Arriving | Welcome) -> None:
        self._link = link
        self._load = named.load if isinstance(named, Arriving) else None
        self._verified = 0

    def has(self, end: int) -> bool:
        """Say whether the first bytes of the payload are known to be verified, so many."""
        return self._load is None or end <= self._verified

    def wait(self, end: int) -> None:
        """Return when the first bytes of the payload are verified.

        Args:
            end: so many.

        Raises:
            LoadBegunAnew: the slot is being written anew.
            AgentUnreachable: there has been no line to the agent for long.
        """
        if not self.has(end):
            self._look(lambda half: half.verified >= end)

    def check(self) -> None:
        """Return if nothing has been written anew since this was begun.

        Raises:
            LoadBegunAnew: something has.
            AgentUnreachable: there has been no line to the agent for long.
        """
        if self._load is not None:
            self._look(lambda _: True)

    def finish(self) -> None:
        """Return when every node has verified what its ranks restore, and nothing has been written anew since this was begun.

        Raises:
            LoadBegunAnew: something has.
            AgentUnreachable: there has been no line to the agent for long.
        """
        if self._load is not None:
            self._link.watch(lambda _: isinstance(self._link.welcome(), Welcome))
            self.check()  # on the page as it is behind that word

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
    """Views of a payload, each given when its bytes are verified."""

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
            self.finish()  # there is time for it now
            self._arrival.wait(end)
        return view_of(self._payload, entry)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


@dataclass(frozen=True, slots=True)
class Expected:
    """What a slot must be for this rank to restore from it."""

    run: RunId
    rank: Rank
    step: Step
    facts: Mapping[str, str]


def encode_facts(facts: Mapping[str, str]) -> tuple[bytes, bytes]:
    """Return the facts as bytes, and the layout hash over them.

    Args:
        facts: everything that must be equal for a snapshot to fit; order does not matter.

    Returns:
        (bytes, xxh3-128 of them).
    """
    data = msgspec.msgpack.encode(dict(sorted(facts.items())))
    return data, digest(data)


def map_ahead(path: Path, arenas: Sequence[Arena]) -> mmap.mmap:
    """Map a slot file, and have its pages and those of the memory to restore into brought near in the background: the script goes on meanwhile.

    Args:
        path: the slot that the agent named.
        arenas: memory for tensors that are not there yet.

    Returns:
        The mapping: private, so that only this process sees what it writes there.

    Raises:
        OSError: there is no such file.
    """
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)

    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()

    def bring() -> None:  # no call of torch: a script that ends while a thread is in one ends with SIGABRT
        populate(address, len(memory), is_written=False)
        for arena in arenas:
            arena.prefault()

    threading.Thread(target=bring, name="everstep-prefault", daemon=True).start()
    return memory


def read_snapshot(named: Arriving | Welcome, memory: mmap.mmap, arrival: Arrival, expected: Expected) -> Snapshot:
    """Return the snapshot in a slot. Local; the agent has verified its payload's digest, or verifies it chunk by chunk.

    Args:
        named: what the agent has said of it.
        memory: the slot's mapping.
        arrival: of its payload.
        expected: what it must be.

    Returns:
        The snapshot; its tensors are views of memory that only this process writes.

    Raises:
        RestoreMismatch: another run, rank, step or layout, or not a whole slot; says what differs.
    """
    # The header of one that arrives is written when all of it is there, and looked at then.
    place = named if isinstance(named, Arriving) else _header(named, memory, expected)
    try:
        index_begin = HEADER_BYTES + place.index_offset
        index = unpack_index(memory[index_begin : index_begin + place.index_bytes], place.index_offset)
        values = _SLOT_VALUES.decode(index.values)
    except (ValueError, ProtocolError) as error:  # msgspec's errors are ValueErrors
        raise RestoreMismatch(f"the slot {named.base_slot_path} cannot be read: {error}") from error
    if values.facts != encode_facts(expected.facts)[0]:
        raise RestoreMismatch(
            f"the snapshot of step {expected.step} does not fit: {_differences(values.facts, expected.facts)}"
        )
    if isinstance(named, Welcome):
        check_whole(named, memory, expected)
    return Snapshot(expected.step, _Tensors(memory, place.index_offset, index, arrival), values)


def check_whole(named: Arriving | Welcome, memory: mmap.mmap, expected: Expected) -> None:
    """Check that a slot is sealed, and what was expected.

    Args:
        named: what the agent has said of it.
        memory: the slot's mapping.
        expected: what it must be.

    Raises:
        RestoreMismatch: another run, rank, step or layout, or not a whole slot; says what differs.
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
    """Return when all ranks are ready to restore the same step.

    Collective: every rank calls it once, with or without a problem of its own.

    Args:
        step: the base that this rank was given, 0 for none.
        problem: why this rank cannot restore; empty when it can.

    Raises:
        RestoreMismatch: this rank has a problem, another has, or the steps differ.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        backend = dist.get_backend()  # "cuda:nccl" where it was named so
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
