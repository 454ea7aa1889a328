"""Runs a group of four nodes in one process, with two copies or parity, on Everstep's slots and sessions."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from everstep.protocol.ids import Generation, JobName, NodeId, Rank, RunId, Step
from everstep.protocol.parity import Rebuild, Survivor, share_owner
from everstep.protocol.peer_messages import SessionKind
from everstep.protocol.plan import ShardSource, SlotRecord
from everstep.protocol.rank_messages import Vote
from everstep.protocol.rounds import Announcement
from everstep.protocol.slot import CHUNK_BYTES, ZERO_DIGEST, payload_digest
from worker.core.rounds import NONE, Shard
from worker.core.slots import Content
from worker.node.network_cards import NetworkCard
from worker.replication.fetching import fetch_shard
from worker.replication.pacing import NodePacer
from worker.replication.rebuilding import rebuild_shard
from worker.replication.receiver import ReplicaReceiver
from worker.replication.sender import ReplicaSender
from worker.replication.tcp import PeerListener, TcpSession, dial
from worker.replication.transport import PeerCredentials, Session
from worker.shards.owned_shard import OwnedShard
from worker.shm.held_files import HeldFiles
from worker.shm.shares import Shares
from worker.shm.store import SlotStore
from worker.tasks import end

MEMBERS = 4
SLOTS = 2
JOB, RUN, GENERATION = JobName("bench"), RunId("ab" * 16), Generation(1)
ADDRESS = "127.0.0.1"
DEADLINE_SECONDS = 60.0
ROOM_BYTES = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTimes:
    """One simulated group."""

    has_parity: bool
    state_bytes: int
    """Bytes of each member's shard."""
    step_seconds: tuple[float, ...]
    """Seconds from the last member's seal until all have voted."""
    cpu_seconds: tuple[float, ...]
    """CPU seconds of all members, per step."""
    memory_ratio: float
    """Bytes of all slots ÷ bytes of all shards."""
    sent_ratio: float
    """Bytes that all members send per step ÷ bytes of all shards."""
    restore_seconds: float
    """Seconds in which a new node obtains a lost shard."""
    is_equal: bool
    """Whether the restored shard equals the lost one."""


class Member:
    """One node of the group, with one rank."""

    def __init__(self, rank: Rank, *, has_parity: bool) -> None:
        """Create the node's slots, its shard's state in the commit protocol, and its listening socket."""
        self.rank, self.node_id = rank, node_of(rank)
        self.store = SlotStore(HeldFiles(), memory_bytes=ROOM_BYTES)
        self.store.open_run(JOB, RUN)
        others = [Rank((rank + distance) % MEMBERS) for distance in range(1, MEMBERS)]
        self.peers = others if has_parity else others[:1]
        stripe = tuple(map(Rank, range(MEMBERS)))
        self.shares = Shares(self.store, {rank: stripe} if has_parity else {}, keep=self._keep, slot_count=SLOTS)
        self.receiver = ReplicaReceiver(
            self.store,
            held_ranks=[] if has_parity else [others[-1]],
            keep=self._keep,
            slot_count=SLOTS,
            shares=self.shares,
        )
        self.pacer = NodePacer()
        self.shard = OwnedShard(
            rank=rank,
            generation=GENERATION,
            core=Shard.begin(Step(0), tuple(map(node_of, self.peers)), has_parity=has_parity),
            base=None,
            store=self.store,
            page=self.store.page(rank, GENERATION),
            now=time.time,
            on_change=lambda: None,
        )
        self.listener = PeerListener(self.node_id)
        self.listener.start(ADDRESS)
        self.listener.admit(credentials(self.node_id), self._serve)
        self._tasks: list[asyncio.Task[None]] = []

    def _keep(self, owner: Rank, committed: Step) -> set[Content]:  # noqa: ARG002
        step = max(self.shard.core.committed, committed)
        return {content(step)} if step != NONE else set()

    async def _serve(self, session: TcpSession) -> None:
        kinds = {"replica": self.receiver.replica, "fetch": self.receiver.fetch, "stream": self.receiver.stream}
        await kinds[session.opened.kind](session)

    def send(self, members: list[Member]) -> None:
        """Start one sender per peer, for replicas or chunks that the peer XORs into its share."""
        for peer in self.peers:
            sender = ReplicaSender(
                self.shard,
                node_of(peer),
                Line(self.node_id, members[peer], "replica", self.rank),
                self.store,
                self.pacer,
                holder_deadline_seconds=DEADLINE_SECONDS,
            )
            self._tasks.append(asyncio.create_task(sender.run()))

    async def seal(self, step: Step, payload: bytes) -> None:
        """Reserve a slot, write the payload and seal it."""
        index = await self.store.grant(
            self.rank,
            content(step),
            keep=self._keep(self.rank, NONE),
            capacity_bytes=len(payload),
            layout_hash=ZERO_DIGEST,
            slot_count=SLOTS,
        )
        assert index is not None
        self.shard.forget_lost()
        slot = self.store.shards[self.rank][index]
        with slot.file.payload(0, len(payload)) as target:
            target[:] = payload
        await self.store.seal(self.rank, index, replace(slot.file.header, payload_bytes=len(payload)))

    def apply_announcement(self, committed: Step, proposed: Step) -> None:
        """Apply a coordinator's announcement of the committed step and the proposed step."""
        self.shard.apply_announcement(
            Announcement(generation=GENERATION, term=1, sequence=1, committed=committed, proposed=proposed)
        )

    async def voted(self, step: Step) -> None:
        """Wait until the member has voted ACKED."""
        while not (self.shard.core.vote is Vote.ACKED and self.shard.core.proposed == step):
            await self.shard.changed.wait(self.shard.changed.version)

    async def close(self) -> None:
        """End the senders, and close listener, page and slots."""
        await end(*self._tasks)
        await self.listener.close()
        await self.shares.close()
        self.shard.page.close()
        self.store.close()


@dataclass(frozen=True, slots=True)
class Line:
    """A `Dialler` of another node of the group."""

    node_id: NodeId
    to: Member
    kind: SessionKind
    rank: Rank

    async def session(self) -> TcpSession:
        return await self._dial(self.kind)

    async def stream(self, session: Session, number: int) -> socket.socket:  # noqa: ARG002
        return (await self._dial("stream", session.opened.nonce)).detach()

    async def _dial(self, kind: SessionKind, of: bytes = b"") -> TcpSession:
        return await dial(
            credentials(self.node_id),
            peer=self.to.node_id,
            address=ADDRESS,
            port=self.to.listener.port,
            kind=kind,
            owner_rank=self.rank,
            source=NetworkCard(ADDRESS),
            session=of,
        )


def node_of(rank: Rank) -> NodeId:
    """Return the id of the node on which a rank runs."""
    return NodeId(f"i-{rank}")


def credentials(node_id: NodeId) -> PeerCredentials:
    """Return the credentials of a node in the generation."""
    return PeerCredentials(JOB, RUN, GENERATION, node_id, b"k" * 32, silence_seconds=DEADLINE_SECONDS)


def content(step: Step) -> Content:
    return Content(GENERATION, step)


async def measure(
    *, has_parity: bool, state_bytes: int, steps: int, clock: Callable[[], float] = time.perf_counter
) -> GroupTimes:
    """Run a group for `steps`, then restore rank 1's shard on a new node. The first step is not counted."""
    members = [Member(Rank(rank), has_parity=has_parity) for rank in range(MEMBERS)]
    states = {member.rank: bytearray(os.urandom(state_bytes)) for member in members}
    seconds, cpu, sent = [], [], 0
    try:
        for member in members:
            member.apply_announcement(NONE, Step(1))
            member.send(members)
        for step in map(Step, range(1, steps + 1)):
            for member in members:
                # Change every chunk, because holders of copies request only changed chunks.
                for begin in range(0, state_bytes, CHUNK_BYTES):
                    states[member.rank][begin] = step % 256
                await member.seal(step, bytes(states[member.rank]))
            begun, cpu_begun, sent_before = clock(), time.process_time(), sum(each.pacer.sent_bytes for each in members)
            for member in members:
                member.shard.seal(step)
            await asyncio.gather(*(member.voted(step) for member in members))
            seconds.append(clock() - begun)
            cpu.append(time.process_time() - cpu_begun)
            sent = sum(each.pacer.sent_bytes for each in members) - sent_before
            for member in members:
                member.apply_announcement(step, Step(step + 1))
        memory = sum(member.store.used_bytes() for member in members)
        restore_seconds, is_equal = await _restore(members, Step(steps), bytes(states[Rank(1)]))
    finally:
        for member in members:
            await member.close()
    return GroupTimes(
        has_parity=has_parity,
        state_bytes=state_bytes,
        step_seconds=tuple(seconds[1:]),
        cpu_seconds=tuple(cpu[1:]),
        memory_ratio=memory / (MEMBERS * state_bytes),
        sent_ratio=sent / (MEMBERS * state_bytes),
        restore_seconds=restore_seconds,
        is_equal=is_equal,
    )


async def _restore(members: list[Member], step: Step, expected: bytes) -> tuple[float, bool]:
    """Restore rank 1's shard on a new node. Return the seconds, and whether it has the expected bytes."""
    lost, node_id = members[1], NodeId("i-new")
    store = SlotStore(HeldFiles(), memory_bytes=ROOM_BYTES)
    store.open_run(JOB, RUN)
    records = {
        (member.rank, record.owner_rank): record
        for member in members
        for record in member.store.inventory()
        if record.step == step
    }
    own = records[lost.rank, lost.rank]
    source = ShardSource(
        kind="peer", origin_generation=GENERATION, step=step, digest=own.digest, payload_bytes=own.payload_bytes
    )
    begun = time.perf_counter()
    if lost.shard.core.has_parity:
        await rebuild_shard(
            lambda peer: Line(node_id, next(each for each in members if each.node_id == peer), "fetch", Rank(-1)),
            replace_source(source, records, lost.rank),
            store,
            keep=(),
            slot_count=SLOTS,
            answer_seconds=DEADLINE_SECONDS,
            silence_seconds=DEADLINE_SECONDS,
            stream_limit=1,
        )
    else:
        await fetch_shard(
            Line(node_id, members[2], "fetch", Rank(-1)),
            lost.rank,
            source,
            store,
            keep=(),
            slot_count=SLOTS,
            answer_seconds=DEADLINE_SECONDS,
            silence_seconds=DEADLINE_SECONDS,
        )
    seconds = time.perf_counter() - begun
    slot = store.sealed(lost.rank, content(step))
    assert slot is not None
    with slot.file.payload() as found:
        is_equal = payload_digest(found) == payload_digest(expected)
    store.close()
    return seconds, is_equal


def replace_source(source: ShardSource, records: dict[tuple[Rank, Rank], SlotRecord], lost: Rank) -> ShardSource:
    """Return the source of a lost shard: the shards and shares of all other members."""
    survivors = [Rank(rank) for rank in range(MEMBERS) if rank != lost]
    (named,) = {
        each for rank in survivors for each in records[rank, share_owner(rank)].contributions if each.rank == lost
    }
    rebuild = Rebuild(
        lost=named,
        survivors=tuple(
            Survivor(
                rank=rank,
                node_id=node_of(rank),
                shard_bytes=records[rank, rank].payload_bytes,
                shard_digest=records[rank, rank].digest,
                share_bytes=records[rank, share_owner(rank)].payload_bytes,
                share_digest=records[rank, share_owner(rank)].digest,
            )
            for rank in survivors
        ),
    )
    return ShardSource(
        kind="parity",
        origin_generation=source.origin_generation,
        step=source.step,
        digest=source.digest,
        payload_bytes=source.payload_bytes,
        rebuild=rebuild,
    )
