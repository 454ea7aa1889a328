"""Corruptions of shards and shares from which a node rebuilds a lost shard, and of the parts that make a share.

A *contribution* is the part of a shard that another node adds to its share.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from msgspec import structs

from everstep.protocol.errors import ProtocolError
from everstep.protocol.ids import NO_RANK, NodeId, Rank, Step
from everstep.protocol.parity import Rebuild, Survivor, share_owner
from everstep.protocol.peer_messages import CHUNK_HEADER, ShardSealed
from everstep.protocol.plan import ShardSource
from everstep.protocol.slot import SlotState
from tests.corruption.group import ORIGIN, RANKS, SIZES, SLOT_COUNT, STEPS, Contributor, Group, sealed
from tests.corruption.outcomes import CHUNK_BYTES, Counts, Outcome, flipped, without_part
from tests.unit.worker.storage.slots import JOB, RUN
from worker.core.parity import Stripe
from worker.core.slots import Content
from worker.errors import NoRoom, PeerError, PeerLost
from worker.replication.rebuilding import rebuild_shard
from worker.replication.transport import Dialler
from worker.shm.held_files import HeldFiles
from worker.shm.store import SlotStore
from worker.tasks import end

SECONDS = 30.0
"""Time limit of a rebuild or a contribution. No corruption waits for it."""
HOLDER = Rank(2)
"""The rank whose share is made from corrupted contributions."""


class Rebuilds:
    """A node that rebuilds a lost shard from corrupted shards and shares, or with a corrupted plan.

    Args:
        folder: empty directory on tmpfs.
        draw: source of all random choices.
    """

    def __init__(self, folder: Path, draw: random.Random) -> None:
        self._draw = draw
        self._group = Group(folder / "group", draw)
        self._store = SlotStore(HeldFiles(), memory_bytes=1 << 20)
        self._store.open_run(JOB, RUN)

    async def prepare(self) -> None:
        """Make all shards and shares, and check that each shard can be rebuilt without a corruption."""
        await self._group.prepare()
        for lost in RANKS:
            for step in STEPS:
                source = self._source(lost, step)
                assert source is not None
                assert await self._rebuilt(lost, step, source) == (Outcome.HARMLESS, "")

    async def close(self) -> None:
        """End all sessions and close all slots."""
        await self._group.close()
        self._store.close()

    async def rebuild(self, kind: str, counts: Counts) -> None:
        """Plant a corruption in a survivor's memory or in the plan, and rebuild the shard of a lost node."""
        lost, step = self._draw.choice(RANKS), self._draw.choice(STEPS)
        survivors = [node for rank, node in self._group.nodes.items() if rank != lost]
        moment = self._draw.choice(("plan", "before the plan", "after the plan", "after the plan"))
        match moment:
            case "plan":
                source = self._source(lost, step)
                other = self._source(lost, next(each for each in STEPS if each != step))
                assert source is not None
                assert other is not None
                source = self._misled(kind, source, other)
                place = f"{source}"
            case "before the plan":
                place = await self._group.plant(kind, survivors, step)
                source = self._source(lost, step)
            case _:
                source = self._source(lost, step)
                place = await self._group.plant(kind, survivors, step)
        outcome, difference = Outcome.REFUSED, ""
        if source is not None:  # Otherwise, the control plane restores an older step.
            outcome, difference = await self._rebuilt(lost, step, source)
        counts.add("rebuild by parity", kind, outcome, f"rank {lost} step {step}, {place}: {difference}")
        if moment != "plan":
            await self._group.mend(survivors)

    def _source(self, lost: Rank, step: Step) -> ShardSource | None:
        """Return the source that the control plane names for the lost shard, or None if it restores another step."""
        restore = self._group.restore(step, lost=lost, new_world=len(RANKS))
        if restore.base_step != step:
            return None
        (source,) = restore.sources[lost]
        return source

    def _misled(self, kind: str, source: ShardSource, other: ShardSource) -> ShardSource:
        """Return a source with a corruption. `other` names the lost shard at another step."""
        rebuild, draw = source.rebuild, self._draw
        assert rebuild is not None
        assert other.rebuild is not None
        lost, survivors = rebuild.lost, list(rebuild.survivors)
        hit = draw.randrange(len(survivors))
        one, two = survivors
        match kind:
            case "bit flip" if draw.random() < 0.5:
                lost = structs.replace(lost, digest=flipped(lost.digest, draw))
            case "bit flip":
                survivors[hit] = self._flipped(survivors[hit])
            case "truncation":
                size = draw.randrange(1, lost.payload_bytes)
                offset = min(lost.index_offset, size)
                lost = structs.replace(
                    lost, payload_bytes=size, index_offset=offset, index_bytes=min(lost.index_bytes, size - offset)
                )
            case "dropped part":
                del survivors[hit]
            case "swapped shards":
                survivors = draw.choice(
                    (
                        [structs.replace(one, node_id=two.node_id), structs.replace(two, node_id=one.node_id)],
                        [structs.replace(one, rank=two.rank), structs.replace(two, rank=one.rank)],
                        [structs.replace(one, share_digest=one.shard_digest, shard_digest=one.share_digest), two],
                        [structs.replace(one, rank=lost.rank), two],
                    )
                )
            case "stale generation":
                match draw.randrange(3):
                    case 0:
                        lost = other.rebuild.lost
                    case 1:
                        survivors[hit] = other.rebuild.survivors[hit]
                    case _:
                        source, survivors = other, list(other.rebuild.survivors)
        changed = Rebuild(lost=lost, survivors=tuple(survivors))
        return structs.replace(source, digest=lost.digest, payload_bytes=lost.payload_bytes, rebuild=changed)

    def _flipped(self, survivor: Survivor) -> Survivor:
        if self._draw.random() < 0.5:
            return structs.replace(survivor, share_digest=flipped(survivor.share_digest, self._draw))
        return structs.replace(survivor, shard_digest=flipped(survivor.shard_digest, self._draw))

    async def _rebuilt(self, lost: Rank, step: Step, source: ShardSource) -> tuple[Outcome, str]:
        """Rebuild a shard, and return the outcome with its difference from the shard of the lost node."""
        sessions = self._group.sessions[lost]

        def dialler(node_id: NodeId) -> Dialler:
            return sessions.dialler(node_id, "fetch", NO_RANK)

        try:
            await rebuild_shard(
                dialler,
                source,
                self._store,
                keep=(),
                slot_count=SLOT_COUNT,
                answer_seconds=SECONDS,
                silence_seconds=SECONDS,
                stream_limit=1,
            )
            outcome = Outcome.HARMLESS
        except (PeerError, ProtocolError, NoRoom):
            outcome = Outcome.REFUSED
        slots = [slot for each in self._store.shards.values() for slot in each]
        if outcome is Outcome.REFUSED:
            left = [slot.file.header for slot in slots if slot.file.header.state is not SlotState.EMPTY]
            difference = f"the refused rebuild left {left}" if left else ""
        elif self._store.sealed(lost, Content(ORIGIN, step)) is None:
            difference = f"the rebuild sealed {[slot.file.header for slot in slots]}"
        else:
            difference = self._group.difference(sealed(self._store, lost, step), lost, step)
        for slot in slots:
            slot.file.empty()
        return (Outcome.LOADED if difference else outcome), difference


class Contributions:
    """A node that makes its share from the shards of two other nodes, one of which sends corrupted chunks.

    Args:
        folder: empty directory on tmpfs.
        draw: source of all random choices.
    """

    def __init__(self, folder: Path, draw: random.Random) -> None:
        self._draw = draw
        self._group = Group(folder, draw)
        self._members = [Contributor(self._group, rank, HOLDER) for rank in RANKS if rank != HOLDER]
        self._shares: dict[Step, bytes] = {}
        """The share of each step, made without a corruption."""
        self._step = max(STEPS)

    async def prepare(self) -> None:
        """Make all shards and shares."""
        await self._group.prepare()
        store = self._group.nodes[HOLDER].store
        self._shares = {step: sealed(store, share_owner(HOLDER), step)[1] for step in STEPS}

    async def close(self) -> None:
        """End all sessions and close all slots."""
        for member in self._members:
            await member.close()
        await self._group.close()

    async def contribute(self, kind: str, counts: Counts) -> None:
        """Send the shards of two nodes as a new step, one of them with corrupted chunks.

        If the holder refuses it, the node sends the shard again without the corruption with a probability of one half.
        The share must then be right.
        """
        draw, step = self._draw, self._draw.choice(STEPS)
        self._step = Step(self._step + 1)
        damaged, sound = draw.sample(self._members, 2)
        (older,) = [each for each in STEPS if each != step]
        payload = self._corrupted(kind, damaged, step, older)
        is_repeated = draw.random() < 0.5
        waiting = asyncio.create_task(sound.deliver(step, as_step=self._step))
        async with asyncio.timeout(SECONDS):
            is_refused = not await self._is_sealed(damaged, step, payload)
            if is_refused and is_repeated:
                await damaged.deliver(step, as_step=self._step)
            if is_refused and not is_repeated:
                await end(waiting)
                await sound.cancel()
            else:
                await waiting
        slot = self._group.nodes[HOLDER].store.sealed(share_owner(HOLDER), Content(ORIGIN, self._step))
        outcome, difference = Outcome.REFUSED if is_refused else Outcome.HARMLESS, ""
        if slot is not None:
            with slot.file.payload() as view:
                difference = "" if bytes(view) == self._shares[step] else "the share is wrong"
        elif not is_refused or is_repeated:
            difference = "the holder acknowledged a share that it does not hold"
        outcome = Outcome.LOADED if difference else outcome
        counts.add("contribution", kind, outcome, f"rank {damaged.rank} step {self._step}: {difference}")

    async def _is_sealed(self, member: Contributor, step: Step, payload: _OnTheWay) -> bool:
        """Send a shard with a corruption, and return whether the holder has sealed its share."""
        try:
            answer = await member.send(step, as_step=self._step, payload=payload)
        except PeerLost:
            await member.close()
            return False
        return isinstance(answer, ShardSealed)

    def _corrupted(self, kind: str, member: Contributor, step: Step, older: Step) -> _OnTheWay:
        """Return the bytes of a shard as they reach the holder."""
        draw, store, size = self._draw, self._group.nodes[member.rank].store, SIZES[member.rank]
        data = sealed(store, member.rank, step)[1]
        chunks = Stripe(RANKS).contributed(member.rank, HOLDER, size)
        hit = draw.choice(chunks)
        begin, stop = hit * CHUNK_BYTES, min((hit + 1) * CHUNK_BYTES, size)
        piece, cut = data[begin:stop], None
        match kind:
            case "bit flip":
                piece = flipped(piece, draw)
            case "truncation":
                cut = draw.randrange(len(piece))
            case "dropped part":
                piece = without_part(piece, draw)
            case "swapped shards":
                other = next(rank for rank in RANKS if rank not in (member.rank, HOLDER))
                piece = sealed(self._group.nodes[other].store, other, step)[1][begin:stop]
            case "stale generation":
                piece = sealed(store, member.rank, older)[1][begin:stop]
        piece = piece[: stop - begin].ljust(stop - begin, b"\0")
        return _OnTheWay(
            bytearray(data[:begin] + piece + data[stop:]),
            bytearray(data),
            begin,
            repeats=draw.choice((1, SIZES[member.rank])),
            cut=cut,
            member=member,
        )


class _OnTheWay:
    """The payload of a shard whose bytes change between two nodes. Implements `Payload`.

    Args:
        data: the payload with a corrupted chunk.
        sound: the payload without the corruption.
        hit: begin of the corrupted chunk.
        repeats: how often the corrupted chunk is sent. Later, its sound bytes are sent.
        cut: bytes of the chunk after which the stream ends; None if it does not end.
        member: the sender.
    """

    def __init__(
        self, data: bytearray, sound: bytearray, hit: int, *, repeats: int, cut: int | None, member: Contributor
    ) -> None:
        self._data = data
        self._sound = sound
        self._hit = hit
        self._repeats = repeats
        self._cut = cut
        self._member = member

    def payload(self, start: int = 0, end: int | None = None) -> memoryview:
        """Return the bytes `start` to `end` as they reach the holder. Called in the thread of a stream."""
        assert end is not None
        if start != self._hit or not self._repeats:
            return memoryview(self._sound)[start:end]
        self._repeats -= 1
        if self._cut is not None:
            (line,) = self._member.streams.lines
            header = CHUNK_HEADER.pack(self._member.transfer, start // CHUNK_BYTES, end - start)
            line.sendall(header + self._data[start : start + self._cut])
            raise ConnectionAbortedError("the stream ended in the middle of a chunk")
        return memoryview(self._data)[start:end]
