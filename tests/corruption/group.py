"""Three nodes in one process that protect each other's shards by parity. Sessions over loopback and slots are real."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from msgspec import structs

from control_plane.core import recovery
from everstep.protocol.ids import Generation, NodeId, Rank, Step
from everstep.protocol.parity import share_owner
from everstep.protocol.peer_messages import (
    CancelShard,
    HolderInventory,
    PreparingShard,
    ShardRefused,
    ShardSealed,
    ShardWanted,
)
from everstep.protocol.slot import HEADER_BYTES, SlotHeader
from tests.corruption.outcomes import CHUNK_BYTES, flipped, hold, truncated, without_part
from tests.unit.worker.rank_plans import rank_plan
from tests.unit.worker.storage.slots import JOB, RUN
from worker.core.rounds import NONE
from worker.core.slots import Content
from worker.errors import PeerLost
from worker.member.earlier_shards import EarlierShards
from worker.member.peer_sessions import PeerSessions
from worker.replication.receiver import ReplicaReceiver
from worker.replication.streams import ChunkQueue, Payload, Streams
from worker.replication.tcp import PeerListener, TcpSession
from worker.replication.transfers import announcement, send_shard
from worker.replication.transport import Session
from worker.shm.held_files import HeldFiles
from worker.shm.shares import Shares
from worker.shm.slot_file import SlotFile
from worker.shm.store import Slot, SlotStore

RANKS = (Rank(0), Rank(1), Rank(2))
ORIGIN = Generation(2)
STEPS = (Step(4), Step(5))
SIZES = {Rank(0): 5 * CHUNK_BYTES - 100, Rank(1): 4 * CHUNK_BYTES, Rank(2): 6 * CHUNK_BYTES - 300}
INDEX_BYTES = 64
SLOT_COUNT = 2
KEY = b"k" * 32
MAX_ATTEMPTS = 3
"""Maximum number of transfers of one undamaged shard."""

Key = tuple[Rank, str]
"""Rank of a node, and the name of a file of this node."""


class Node:
    """The node of one rank: its slots, and the server for the sessions of other nodes."""

    def __init__(self, folder: Path, rank: Rank) -> None:
        self.rank = rank
        self.id = NodeId(f"i-{rank}")
        self.listener = PeerListener(self.id)
        self.listener.start(f"127.0.0.{rank + 11}")
        self.earlier: EarlierShards | None = None
        """Loads shards of the launch before a relayout for other nodes; None without a relayout."""
        self.store = SlotStore(HeldFiles(), memory_bytes=1 << 22)
        self.store.open_run(JOB, RUN)
        self._receiver = ReplicaReceiver(
            self.store,
            held_ranks=(),
            keep=lambda owner, committed: (),
            slot_count=SLOT_COUNT,
            shares=Shares(self.store, {rank: RANKS}, keep=lambda owner, committed: (), slot_count=SLOT_COUNT),
            load_earlier=self._supply,
        )

    async def _supply(self, rank: Rank) -> None:
        if self.earlier is not None:
            await self.earlier.supply(rank)

    async def serve(self, session: TcpSession) -> None:
        """Serve a session of another node, as `Member` does."""
        kinds = {"replica": self._receiver.replica, "fetch": self._receiver.fetch, "stream": self._receiver.stream}
        await kinds[session.opened.kind](session)

    async def idle(self) -> None:
        """Wait until the sessions of other nodes have ended, so that no thread reads a slot."""
        while self._receiver.open_sessions:  # noqa: ASYNC110
            await asyncio.sleep(0)

    async def close(self) -> None:
        """End all sessions and close all slots."""
        await self.listener.close()
        self.store.close()


class Group:
    """Nodes that hold two steps of their shards, and the shares that the nodes have made of these shards.

    Args:
        folder: empty directory on tmpfs.
        draw: source of all random choices.
    """

    def __init__(self, folder: Path, draw: random.Random) -> None:
        self._draw = draw
        self._sound: dict[Key, bytes] = {}
        """The file of each slot before any corruption, by the rank of its node."""
        self._expected: dict[tuple[Rank, Step], tuple[SlotHeader, bytes]] = {}
        self.nodes = {rank: Node(folder / f"{rank}", rank) for rank in RANKS}
        listeners = [node.listener for node in self.nodes.values()]
        plan = rank_plan(addresses=tuple(each.addresses[0][0] for each in listeners), ranks_per_node=2, generation=3)
        self.plan = structs.replace(
            plan,
            nodes=tuple(
                structs.replace(node, peer_port=listener.port)
                for node, listener in zip(plan.nodes, listeners, strict=True)
            ),
        )
        """The generation that restores a step of the generation `ORIGIN`. It has twice as many ranks."""
        self.sessions = {
            rank: PeerSessions(node.id, node.listener.addresses[0][0], self.plan, KEY)
            for rank, node in self.nodes.items()
        }
        """Opens the sessions of each rank's node."""
        for rank, node in self.nodes.items():
            node.listener.admit(self.sessions[rank].credentials, node.serve)

    async def prepare(self) -> None:
        """Seal two steps of each shard, and make the shares of both steps."""
        for step in STEPS:
            for rank, node in self.nodes.items():
                await self._seal(node.store, rank, step)
        for holder in RANKS:
            contributors = [Contributor(self, rank, holder) for rank in RANKS if rank != holder]
            for step in STEPS:
                await asyncio.gather(*(each.deliver(step, as_step=step) for each in contributors))
            for each in contributors:
                await each.close()
        for rank, node in self.nodes.items():
            slots = [slot for each in node.store.shards.values() for slot in each]
            self._sound |= {(rank, slot.file.name): slot.file.path.read_bytes() for slot in slots}
            for step in STEPS:
                self._expected[rank, step] = sealed(node.store, rank, step)

    async def _seal(self, store: SlotStore, rank: Rank, step: Step) -> None:
        size = SIZES[rank]
        index = await store.grant(
            rank,
            Content(ORIGIN, step),
            keep=[Content(ORIGIN, each) for each in STEPS],
            capacity_bytes=size + 40,
            layout_hash=bytes([rank]) * 16,
            slot_count=SLOT_COUNT,
        )
        assert index is not None
        slot = store.shards[rank][index]
        with slot.file.payload(0, size) as view:
            view[:] = self._draw.randbytes(size)
        header = replace(slot.file.header, payload_bytes=size, index_offset=size - INDEX_BYTES, index_bytes=INDEX_BYTES)
        assert await store.seal(rank, index, header) is not None

    def slot(self, rank: Rank, step: Step) -> Slot:
        """Return the slot of a rank's shard on its own node."""
        slot = self.nodes[rank].store.sealed(rank, Content(ORIGIN, step))
        assert slot is not None
        return slot

    def restore(self, step: Step, *, lost: Rank | None, new_world: int) -> recovery.Restore:
        """Return the sources that the control plane chooses, if the job's history ends with `step`.

        The result may name an older step than `step`.

        Args:
            step: last step of the generation `ORIGIN`.
            lost: rank whose node is lost, or None.
            new_world: number of ranks of the next generation.
        """
        return recovery.choose(
            recovery.Survey(
                owners=[self.nodes[RANKS[rank * len(RANKS) // new_world]].id for rank in range(new_world)],
                inventories={node.id: node.store.inventory() for node in self.nodes.values() if node.rank != lost},
                path={ORIGIN: step},
                worlds={ORIGIN: len(RANKS)},
            )
        )

    async def plant(self, kind: str, nodes: Sequence[Node], step: Step) -> str:
        """Plant a corruption in the shard or share of one of the nodes, and return its description.

        Either the bytes change while the node's agent runs, or they change while no agent runs and the next agent
        adopts the slots.
        """
        slots = [(node, slot) for node in nodes for slot in slots_of(node, step)]
        (node, slot), other = self._draw.sample(slots, 2)
        (older,) = [each for each in node.store.shards[slot.file.header.owner_rank] if each is not slot]
        drawn = (node, slot), other, (node, older)
        changed = self._changed(kind, *((each.rank, taken.file.name) for each, taken in drawn))
        is_running = self._draw.random() < 0.5
        if is_running:
            for node, slot in slots:
                if (key := (node.rank, slot.file.name)) in changed:
                    await self._overwrite(node.store, slot, changed[key][HEADER_BYTES:])
        else:
            for node in nodes:
                await node.idle()
                node.store.close()
            for (rank, name), data in changed.items():
                hold(self.nodes[rank].store.files, name, data)
            for node in nodes:
                node.store.open_run(JOB, RUN)
        return f"{'running' if is_running else 'adopted'} {[name for _, name in changed]}"

    async def _overwrite(self, store: SlotStore, slot: Slot, data: bytes) -> None:
        """Change the payload of a slot in place. The agent may have the digests of its chunks already."""
        if self._draw.random() < 0.5:
            assert await store.digests(slot) is not None
        capacity = slot.file.header.capacity_bytes
        with slot.file.payload(0, capacity) as view:
            view[:] = data[:capacity].ljust(capacity, b"\0")

    def _changed(self, kind: str, path: Key, other: Key, older: Key) -> dict[Key, bytes]:
        """Return the files that a corruption of the slot `path` changes, with their new content."""
        sound = self._sound
        header, payload = sound[path][:HEADER_BYTES], sound[path][HEADER_BYTES:]
        match kind:
            case "bit flip":
                # The fields fill the first bytes of the header. A uniform choice would rarely hit them.
                if self._draw.random() < 0.2:
                    return {path: flipped(header[:256], self._draw) + header[256:] + payload}
                return {path: header + flipped(payload, self._draw)}
            case "truncation":
                return {path: truncated(header + payload, self._draw)}
            case "dropped part":
                return {path: header + without_part(payload, self._draw)}
            case "swapped shards" if self._draw.random() < 0.5:
                return {path: sound[other], other: sound[path]}
            case "swapped shards":
                data, end = sound[other], HEADER_BYTES
                return {path: header + data[end:], other: data[:end] + payload}
            case "stale generation":
                return {path: header + sound[older][HEADER_BYTES:]}
        raise AssertionError(kind)

    async def lose(self, rank: Rank) -> None:
        """Lose the node of a rank with its memory. Another node takes its place."""
        await self._write(self.nodes[rank], {})

    async def mend(self, nodes: Iterable[Node]) -> None:
        """Remove all corruptions of some nodes, and all slots that were made since the group was prepared."""
        for node in nodes:
            await self._write(node, {name: data for (rank, name), data in self._sound.items() if rank == node.rank})

    async def _write(self, node: Node, sound: dict[str, bytes]) -> None:
        await node.idle()
        node.store.close()
        files = node.store.files
        for name in files.names():
            files.forget(name)
        for name, data in sound.items():
            hold(files, name, data)
        node.store.open_run(JOB, RUN)

    def difference(self, found: tuple[SlotHeader, bytes], rank: Rank, step: Step) -> str:
        """Return how a loaded shard differs from the shard that its owner has sealed; an empty string if it is equal.

        The capacity of the slot does not count.
        """
        (header, payload), (expected, data) = found, self._expected[rank, step]
        if replace(header, capacity_bytes=0) != replace(expected, capacity_bytes=0):
            return f"{header} instead of {expected}"
        first = next((at for at, pair in enumerate(zip(payload, data, strict=True)) if pair[0] != pair[1]), None)
        return "" if first is None else f"rank {rank} step {step} differs from byte {first} on"

    async def close(self) -> None:
        """End all sessions and close all slots."""
        for node in self.nodes.values():
            await node.close()


def slots_of(node: Node, step: Step) -> list[Slot]:
    """Return the slots of a node's own shard and of its share at a step."""
    found = [node.store.sealed(owner, Content(ORIGIN, step)) for owner in (node.rank, share_owner(node.rank))]
    return [slot for slot in found if slot is not None]


def sealed(store: SlotStore, owner: Rank, step: Step) -> tuple[SlotHeader, bytes]:
    """Return the header and the payload of a sealed slot."""
    slot = store.sealed(owner, Content(ORIGIN, step))
    assert slot is not None
    with slot.file.payload() as view:
        return slot.file.header, bytes(view)


class Contributor:
    """Sends the shard of one rank to the node of another rank, which adds a part of it to its share."""

    def __init__(self, group: Group, rank: Rank, holder: Rank) -> None:
        self.rank = rank
        self.holder = holder
        self.streams = Streams()
        self.transfer = 0
        """Number of the last transfer of the session."""
        self._store = group.nodes[rank].store
        self._dialler = group.sessions[rank].dialler(group.nodes[holder].id, "replica", rank)
        self._session: Session | None = None

    async def send(self, step: Step, *, as_step: Step, payload: Payload | None = None) -> ShardSealed | ShardRefused:
        """Send the shard of a step, and wait until the share is sealed.

        Args:
            step: the step in the slot of this rank.
            as_step: the step as which the shard is announced.
            payload: the bytes that reach the holder; by default, the bytes in the slot.
        """
        session = await self._dialled()
        self.transfer += 1
        slot = self._store.sealed(self.rank, Content(ORIGIN, step))
        assert slot is not None
        digests = await self._store.digests(slot)
        assert digests is not None
        begin = announcement(replace(slot.file.header, step=as_step), transfer=self.transfer, committed=NONE)

        async def answers() -> ShardWanted | ShardSealed | ShardRefused:
            while isinstance(answer := await session.receive(), PreparingShard):
                pass
            assert isinstance(answer, ShardWanted | ShardSealed | ShardRefused), answer
            return answer

        return await send_shard(
            session,
            self.streams,
            answers,
            cast(SlotFile, payload or slot.file),
            digests,
            begin,
            ChunkQueue(),
            progress=lambda _: None,
        )

    async def deliver(self, step: Step, *, as_step: Step) -> None:
        """Send the shard of a step until the share is sealed. The arguments are those of `send`.

        An earlier transfer may have ended within a chunk, which cuts its stream. The next `send` then fails.
        """
        for _ in range(MAX_ATTEMPTS):
            try:
                answer = await self.send(step, as_step=as_step)
            except PeerLost:
                await self.close()
            else:
                assert isinstance(answer, ShardSealed), answer
                return
        raise AssertionError(f"{MAX_ATTEMPTS} transfers of rank {self.rank} step {as_step} failed")

    async def _dialled(self) -> Session:
        if self._session is None:
            session = await self._dialler.session()
            try:
                assert isinstance(await session.receive(), HolderInventory)
                self.streams.add(await self._dialler.stream(session, 0))
            except BaseException:
                session.close()
                raise
            self._session, self.transfer = session, 0
        return self._session

    async def cancel(self) -> None:
        """Tell the holder that the last transfer was cancelled."""
        if self._session is not None:
            await self._session.send(CancelShard(transfer=self.transfer))

    async def close(self) -> None:
        """End the session and its streams. The next `send` opens another session."""
        if self._session is not None:
            self._session.close()
            await self.streams.close()
        self._session = None
