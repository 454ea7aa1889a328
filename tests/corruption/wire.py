"""Corruptions on the wire: messages and chunks of a replica transfer between two nodes, read by the holder."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Sequence
from pathlib import Path

from everstep.protocol.codec import Message
from everstep.protocol.ids import Step
from everstep.protocol.peer_messages import (
    CHUNK_HEADER,
    BeginShard,
    EndShard,
    HolderInventory,
    ShardDigests,
    ShardRefused,
    ShardSealed,
    ShardWanted,
)
from everstep.protocol.slot import payload_chunk_digests, payload_digest
from tests.corruption.outcomes import CHUNK_BYTES, Counts, Outcome, flipped, truncated
from tests.integration.worker.replication.pair import GENERATION, LAYOUT, RANK, Pair
from worker.errors import PeerLost
from worker.replication.tcp import TcpSession

SIZE = 4 * CHUNK_BYTES - 100
COUNT = 4
ANSWER_SECONDS = 0.1
"""How long the owner waits for an answer of the holder before it ends the session."""


class Wire:
    """A real holder, and an owner that sends it corrupted messages and chunks.

    Args:
        folder: empty directory on tmpfs.
        draw: source of all random choices.
    """

    def __init__(self, folder: Path, draw: random.Random) -> None:
        self._draw = draw
        self._pair = Pair(folder)
        self._pair.listen()
        self._session: TcpSession | None = None
        self._line: socket.socket | None = None
        self._transfer = 0
        self._step = 0
        self._sent: dict[int, bytes] = {}
        self._earlier = [bytes(64)] * 3
        """Uncorrupted messages and chunks of the previous transfer.

        The corruption "stale generation" sends one of them again.
        """

    async def close(self) -> None:
        """End the session and both nodes."""
        await self._hang_up()
        await self._pair.close()

    async def _dialled(self) -> tuple[TcpSession, socket.socket]:
        if self._session is None or self._line is None:
            self._session = await self._pair.dial()
            assert isinstance(await self._session.receive(), HolderInventory)
            self._line = await self._pair.stream(self._session)
            self._transfer = 0
        return self._session, self._line

    async def _hang_up(self) -> None:
        """Close the session.

        The holder notices this at the latest when a new session of the same owner begins.
        """
        if self._session is not None and self._line is not None:
            self._line.close()
            self._session.close()
        self._session = self._line = None

    def _chunks(self, kind: str, data: bytes, older: bytes, indexes: Sequence[int]) -> bytes:
        """Return the bytes that the owner sends for the requested chunks, with the corruption."""
        pieces = {index: data[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES] for index in indexes}
        hit = self._draw.choice(list(indexes))
        if kind == "stale generation":
            pieces[hit] = older[hit * CHUNK_BYTES : hit * CHUNK_BYTES + len(pieces[hit])]
        elif kind == "swapped shards" and len(indexes) > 1:
            other = self._draw.choice([index for index in indexes if index != hit])
            pieces[hit], pieces[other] = pieces[other], pieces[hit]
        elif kind == "dropped part":
            del pieces[hit]
        stream = b"".join(
            CHUNK_HEADER.pack(self._transfer, index, len(piece)) + piece for index, piece in pieces.items()
        )
        if kind == "bit flip":
            return flipped(stream, self._draw)
        if kind == "truncation":
            return stream[: self._draw.randrange(len(stream))]
        return stream

    async def chunks(self, kind: str, counts: Counts) -> None:
        """Send a shard with corrupted chunks.

        If the holder requests chunks again, the owner repeats the corruption with a probability of one half.
        """
        await self._transferred("chunk on the wire", kind, counts, None, repeats=self._draw.random() < 0.5)

    async def message(self, kind: str, counts: Counts) -> None:
        """Send a shard for which one of the three messages that announce it is corrupted."""
        await self._transferred("message on the wire", kind, counts, self._draw.randrange(3), repeats=False)

    async def _transferred(self, place: str, kind: str, counts: Counts, hit: int | None, *, repeats: bool) -> None:
        session, line = await self._dialled()
        older = self._sent.get(self._step, bytes(SIZE))
        self._step += 1
        self._transfer += 1
        data = self._sent[self._step] = self._draw.randbytes(SIZE)
        messages = self._messages(data)
        description = f"step {self._step}" if hit is None else f"{messages[hit]}"
        frames = await self._corrupted(session, "" if hit is None else kind, messages, hit or 0)
        sealed = await self._talk(session, line, frames, kind if hit is None else "", data, older, repeats)
        held = {int(step): bytes_of for step, bytes_of in self._pair.held().items()}
        wrong = [step for step, found in held.items() if found != self._sent.get(step)]
        for slot in self._pair.holder_store.shards.get(RANK, []):
            slot_header = slot.file.header
            if slot_header.step == self._step and slot_header.layout_hash != LAYOUT:
                wrong.append(self._step)
        outcome = Outcome.LOADED if wrong else Outcome.HARMLESS if self._step in held else Outcome.REFUSED
        if sealed and self._step not in held:
            outcome = Outcome.LOADED
            description = f"the holder acknowledged step {self._step} and does not hold it: {description}"
        counts.add(place, kind, outcome, description)
        if wrong:
            for slot in self._pair.holder_store.shards.get(RANK, []):
                slot.file.empty()

    def _messages(self, data: bytes) -> list[Message]:
        begin = BeginShard(
            transfer=self._transfer,
            owner_rank=RANK,
            origin_generation=GENERATION,
            step=Step(self._step),
            payload_bytes=len(data),
            capacity_bytes=len(data),
            index_offset=0,
            index_bytes=0,
            layout_hash=LAYOUT,
            committed=Step(-1),
        )
        digests = ShardDigests(transfer=self._transfer, first=0, chunk_digests=payload_chunk_digests(data))
        return [begin, digests, EndShard(transfer=self._transfer, digest=payload_digest(data))]

    async def _corrupted(self, session: TcpSession, kind: str, messages: list[Message], hit: int) -> list[bytes]:
        """Return the bytes of the messages that announce a shard, with the corruption."""
        frames = [await self._frame(session, message) for message in messages]
        sound = list(frames)
        if kind == "stale generation":
            frames[hit] = self._earlier[hit]
        elif kind == "swapped shards":
            other = (hit + 1) % len(messages)
            frames[hit], frames[other] = frames[other], frames[hit]
        elif kind == "bit flip":
            frames[hit] = flipped(frames[hit], self._draw)
        elif kind == "truncation":
            frames[hit] = truncated(frames[hit], self._draw)
        elif kind == "dropped part":
            del frames[hit]
        self._earlier = sound
        return frames

    async def _frame(self, session: TcpSession, message: Message) -> bytes:
        """Return the bytes that a session sends for a message, without sending them."""
        one, other = socket.socketpair()
        line, session.line = session.line, one
        try:
            with one, other:
                await session.send(message)
                return other.recv(64 * 1024)
        finally:
            session.line = line

    async def _talk(
        self,
        session: TcpSession,
        line: socket.socket,
        frames: list[bytes],
        kind: str,
        data: bytes,
        older: bytes,
        repeats: bool,
    ) -> bool:
        """Send the messages, answer requests for chunks, and return whether the holder acknowledged the shard."""
        is_corrupt = bool(kind)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await asyncio.get_running_loop().sock_sendall(session.line, b"".join(frames))
                while True:
                    answer = await session.receive()
                    if isinstance(answer, ShardSealed):
                        return answer.transfer == self._transfer
                    if isinstance(answer, ShardRefused):
                        return False
                    if not isinstance(answer, ShardWanted):
                        continue
                    wanted = [index for first, count in answer.chunks for index in range(first, first + count)]
                    wanted = [index for index in wanted if index < COUNT]
                    if wanted:
                        line.sendall(self._chunks(kind if is_corrupt else "", data, older, wanted))
                        is_corrupt = is_corrupt and repeats
        except (TimeoutError, PeerLost, OSError):
            await self._hang_up()
            await self._dialled()
            return False
