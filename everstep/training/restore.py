"""From a slot back into the live objects: read, agree, write.

Invariant: no rank writes before every rank has said that its snapshot is whole, of the same step, and fits what the script built. A refusal
anywhere is a refusal everywhere.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from everstep.protocol.errors import ProtocolError
from everstep.protocol.ids import Rank, RunId, Step
from everstep.protocol.pages import populate
from everstep.protocol.slot import HEADER_BYTES, SlotState, digest, unpack_header, unpack_index
from everstep.training.arena import Arena
from everstep.training.capture import view_of
from everstep.training.errors import RestoreMismatch
from everstep.training.state_tree import Tree, decode

VALUE_PREFIX = "value"
"""Of the names of tensors that stand for large values of the tree: `value/rng/torch`."""
SHOWN_DIFFERENCES = 8


class SlotValues(msgspec.Struct, frozen=True, array_like=True):
    """What the `values` of a slot's index hold."""

    facts: bytes
    """msgpack of the layout's facts: their digest is the layout hash, and they say what differs when it does."""
    tree: bytes
    """`state_tree.encode` of the plain values."""


_SLOT_VALUES = msgspec.msgpack.Decoder(SlotValues)
_FACTS = msgspec.msgpack.Decoder(dict[str, str])


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A slot's content, checked."""

    step: Step
    tensors: Mapping[str, torch.Tensor]
    """Private copies on write: the slot itself never changes."""
    tree: Tree


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

    def bring() -> None:
        view = torch.frombuffer(memory, dtype=torch.uint8)
        populate(view.data_ptr(), len(memory), is_written=False)
        for arena in arenas:
            arena.prefault()

    threading.Thread(target=bring, name="everstep-prefault", daemon=True).start()
    return memory


def read_snapshot(path: Path, memory: mmap.mmap, expected: Expected) -> Snapshot:
    """Return the snapshot in a slot. Local; the agent has verified the payload's digest.

    Args:
        path: the slot that the agent named.
        memory: its mapping.
        expected: what it must be.

    Returns:
        The snapshot; its tensors are views of memory that only this process writes.

    Raises:
        RestoreMismatch: another run, rank, step or layout, or not a whole slot; says what differs.
    """
    try:
        header = unpack_header(memory[:HEADER_BYTES])
        index_begin = HEADER_BYTES + header.index_offset
        index = unpack_index(memory[index_begin : index_begin + header.index_bytes], header.index_offset)
        values = _SLOT_VALUES.decode(index.values)
    except (ValueError, ProtocolError) as error:  # msgspec's errors are ValueErrors
        raise RestoreMismatch(f"the slot {path} cannot be read: {error}") from error
    found = (header.state, header.run, header.owner_rank, header.step)
    wanted = (SlotState.SEALED, expected.run, expected.rank, expected.step)
    if found != wanted:
        raise RestoreMismatch(f"the slot {path} holds {found}, expected {wanted} (state, run, rank, step)")
    facts, layout_hash = encode_facts(expected.facts)
    if values.facts != facts or header.layout_hash != layout_hash:
        raise RestoreMismatch(f"the snapshot of step {header.step} does not fit: {_differences(values.facts, expected.facts)}")
    payload = torch.frombuffer(memory, dtype=torch.uint8, offset=HEADER_BYTES, count=header.index_offset) if header.index_offset else torch.empty(0)
    tensors = {entry.name: view_of(payload, entry) for entry in index.tensors}
    try:
        # Objects may keep what load_state_dict hands them: give them memory of their own.
        tree = decode(values.tree, lambda path: tensors[VALUE_PREFIX + path].clone())
    except ProtocolError as error:
        raise RestoreMismatch(f"the slot {path} cannot be read: {error}") from error
    return Snapshot(header.step, tensors, tree)


def agree(step: Step, problem: str) -> None:
    """Return when all ranks are ready to restore the same step. Collective: every rank calls it once, with or without a problem of its own.

    Args:
        step: the base that this rank was given, 0 for none.
        problem: why this rank cannot restore; empty when it can.

    Raises:
        RestoreMismatch: this rank has a problem, another has, or the steps differ.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
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
    return "; ".join(lines[:SHOWN_DIFFERENCES]) + more if lines else "the layout hash in its header is not that of its facts"
