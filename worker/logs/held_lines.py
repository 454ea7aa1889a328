"""Stores the newest log lines of other nodes whose shards this node holds, in case such a node is lost.

    owner ──PrintedLines──▶ take ──▶ <state>/logs/<run>/gen=<g>/held/<owner>.jsonl ──ship──▶ object store

An owner sends its ranks' lines before the last message of each transfer of a shard, so the holder of a committed step
has all lines up to this step. Readers of the log skip a copy of lines that the owner has uploaded itself.

Invariant: the stored lines of one owner have consecutive numbers. The newest lines within the size limit are never
dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from everstep.protocol.errors import MalformedMessage
from everstep.protocol.ids import NodeId
from everstep.protocol.log_chunks import ChunkHead, TailName, decode_chunk, decode_lines, encode_head, encode_lines
from everstep.protocol.peer_messages import PrintedLines
from everstep.protocol.plan import GenerationPlan, ObjectReference
from worker.core.line_tails import TAIL_BYTES, Tail
from worker.errors import StorageError
from worker.ranks.files import logs_of
from worker.storage.object_store import ObjectStore

log = logging.getLogger(__name__)
MAX_ATTEMPTS: Final = 3
TAIL_RETRY_SECONDS: Final = 1.0


@dataclass(slots=True)
class _Held:
    path: Path
    limit_bytes: int
    tail: Tail = field(default_factory=Tail)
    is_on_disk: bool = False
    """True if the file contains exactly the lines of `tail`."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class HeldLines:
    """The log lines that this node stores for the other nodes whose shards it holds, in one generation.

    Lines that an earlier agent of this node stored are loaded. The generation's `Member` owns the object.
    """

    def __init__(self, state: Path, plan: GenerationPlan, here: NodeId) -> None:
        self._here = here
        self._place = plan.script.logs
        self._generation = plan.generation
        folder = logs_of(state.absolute(), plan.run) / f"gen={plan.generation}" / "held"
        owners = {rank.holders[0] for rank in plan.ranks if here in rank.holders[1:]}
        self._held: Mapping[NodeId, _Held] = {
            owner: _Held(folder / f"{owner}.jsonl", TAIL_BYTES * max(1, len(plan.node(owner).ranks)))
            for owner in owners
        }
        for held in self._held.values():
            held.tail = _read(held.path)

    async def take(self, peer: NodeId, message: PrintedLines) -> None:
        """Store log lines of an authenticated owner; lines that are already stored are skipped.

        Raises MalformedMessage if the lines cannot be decoded, or `peer` owns no shard that this node holds.
        """
        held = self._held.get(peer)
        if held is None:
            raise MalformedMessage(f"{peer} sent lines, but this node holds none of its shards")
        try:
            decode_lines(message.lines)
        except MalformedMessage as error:
            raise MalformedMessage(f"the lines of {peer} cannot be decoded: {error}") from error
        async with held.lock:
            before = held.tail
            held.tail = before.extended(
                message.first, message.lines.splitlines(keepends=True), limit_bytes=held.limit_bytes
            )
            if held.tail is before:
                return
            added = held.tail.rows[len(before.rows) :] if held.is_on_disk and held.tail.first == before.first else None
            try:
                await asyncio.to_thread(_write, held.path, held.tail, added)
                held.is_on_disk = True
            # The lines stay in memory, and are lost only if the agent restarts before the upload.
            except OSError as error:
                held.is_on_disk = False
                log.warning("the lines of %s cannot be written to disk; they stay in memory: %s", peer, error)

    async def ship(self, objects: ObjectStore) -> tuple[str, ...]:
        """Upload the stored lines of other nodes. Idempotent. Return one sentence per owner whose lines failed."""
        missing = []
        for owner, held in self._held.items():
            if not held.tail.rows:
                continue
            name = TailName(owner, held.tail.first, decode_lines(held.tail.rows[0])[0].at_ms, self._here)
            reference = ObjectReference(
                bucket=self._place.bucket, key=f"{self._place.key}gen={self._generation}/{name.path}"
            )
            error = await self._store(objects, reference, _encoded(held.tail))
            if error is not None:
                missing.append(f"the last lines of {owner} that this node keeps are not in S3: {error}")
        return tuple(missing)

    @staticmethod
    async def _store(objects: ObjectStore, reference: ObjectReference, data: bytes) -> StorageError | None:
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                await asyncio.to_thread(objects.put_bytes, reference, data)
            except StorageError as error:
                if attempt == MAX_ATTEMPTS or not error.retryable:
                    return error
            else:
                return None
            await asyncio.sleep(TAIL_RETRY_SECONDS * attempt)
        raise AssertionError


def _encoded(tail: Tail) -> bytes:
    return encode_head(ChunkHead(first=tail.first, positions={})) + b"".join(tail.rows)


def _read(path: Path) -> Tail:
    try:
        head, lines, _ = decode_chunk(path.read_bytes())
    except OSError:
        return Tail()
    return Tail() if head is None else Tail.of(head.first, [encode_lines([line]) for line in lines])


def _write(path: Path, tail: Tail, added: tuple[bytes, ...] | None) -> None:
    """Append the rows `added` to the file. If `added` is None, replace the file by all rows of `tail`."""
    if added is not None:
        # A killed process can leave an incomplete row, which readers ignore.
        with path.open("ab", buffering=0) as file:
            file.write(b"".join(added))
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    whole = path.with_suffix(".new")
    whole.write_bytes(_encoded(tail))
    whole.replace(path)
