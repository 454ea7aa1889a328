"""The owner of one shard and its only holder, on loopback, without agents. Sessions and slots on tmpfs are real."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from everstep.protocol.ids import Generation, JobName, NodeId, Rank, RunId, Step
from everstep.protocol.peer_messages import PrintedLines, SessionKind
from everstep.protocol.rank_messages import UnkeptCause
from everstep.protocol.rounds import Announcement
from everstep.protocol.slot import SlotHeader, SlotState
from tests.fakes.identities import identity_of
from worker.core.rounds import NONE, Shard
from worker.core.slots import Content
from worker.node.network_cards import NetworkCard
from worker.replication.identity import PeerIdentity
from worker.replication.pacing import NodePacer
from worker.replication.receiver import ReplicaReceiver
from worker.replication.sender import Printed, ReplicaSender
from worker.replication.tcp import LISTENER_LIMITS, ListenerLimits, PeerListener, TcpSession, dial
from worker.replication.transport import Dialler, PeerCredentials, Session
from worker.shards.owned_shard import OwnedShard
from worker.shm.held_files import HeldFiles
from worker.shm.store import Slot, SlotStore
from worker.tasks import end

JOB, RUN, GENERATION = JobName("gpt"), RunId("ab" * 16), Generation(3)
OWNER, HOLDER = NodeId("i-owner"), NodeId("i-holder")
OWNER_ADDRESS, HOLDER_ADDRESS = "127.0.0.2", "127.0.0.3"
RANK = Rank(0)
KEY = b"k" * 32
LAYOUT = b"l" * 16


def credentials(
    node_id: NodeId,
    *,
    key: bytes = KEY,
    run: RunId = RUN,
    generation: Generation = GENERATION,
    identity: PeerIdentity | None = None,
) -> PeerCredentials:
    return PeerCredentials(JOB, run, generation, node_id, key, silence_seconds=3.0, identity=identity)


def content(step: int) -> Content:
    return Content(GENERATION, Step(step))


def payload(step: int, size: int) -> bytes:
    return (step.to_bytes(4, "big") * (size // 4 + 1))[:size]


class Capture:
    """A capture of one step on the owner's node, whose progress the test controls."""

    def __init__(self, pair: Pair, step: int, slot: Slot) -> None:
        self.slot = slot
        self._pair = pair
        self._step = Step(step)
        header = SlotHeader(
            job=JOB,
            run=RUN,
            owner_rank=RANK,
            origin_generation=GENERATION,
            step=self._step,
            state=SlotState.WRITING,
            capacity_bytes=pair.payload_bytes,
            payload_bytes=pair.payload_bytes,
            layout_hash=LAYOUT,
        )
        self.digests, _ = pair.owner_store.follow(slot, header)
        self.sealing = asyncio.create_task(pair.owner_store.seal_followed(slot, self.digests))

    def write(self, end: int, data: bytes | None = None) -> None:
        """Write the payload up to `end`, as the copier does."""
        data = payload(self._step, self._pair.payload_bytes) if data is None else data
        with self.slot.file.payload(0, end) as view:
            view[:] = data[:end]

    def go_on(self, end: int) -> None:
        """Write the payload up to `end`, and report it as the rank does."""
        self.write(end)
        self.digests.grow(end)
        self._pair.shard.capture(self._step)

    async def seal(self) -> None:
        """Complete the capture, as the rank's last message does."""
        self.digests.complete()
        assert await self.sealing is not None
        self._pair.shard.seal(self._step)

    def give_up(self) -> None:
        """Abandon the capture, as a rank does when its state changes during the copy."""
        self._pair.owner_store.give_up(RANK, content(self._step))
        self._pair.shard.abandon(self._step, UnkeptCause.CHANGED, "changed")


TakeLines = Callable[[NodeId, PrintedLines], Awaitable[None]]


class Pair:
    """An owner and a holder on this machine. The fixture closes both."""

    def __init__(
        self,
        tmpfs: Path,
        *,
        payload_bytes: int = 10_000,
        memory_bytes: int = 1 << 24,
        holder_memory_bytes: int = 1 << 24,
        has_parity: bool = False,
        listener_limits: ListenerLimits = LISTENER_LIMITS,
        is_encrypted: bool = False,
    ) -> None:
        self.identities = {node_id: identity_of(node_id) if is_encrypted else None for node_id in (OWNER, HOLDER)}
        self.payload_bytes = payload_bytes
        self.owner_store = self._store(tmpfs / "owner", memory_bytes)
        self.holder_store = self._store(tmpfs / "holder", holder_memory_bytes)
        self.heard = NONE
        """Newest committed step that the coordinator has announced to the holder. Tests set it."""
        self.take_lines: TakeLines = self._discard
        """Stores the printed lines that the holder receives. Tests set it."""
        self.receiver = ReplicaReceiver(
            self.holder_store,
            held_ranks=[RANK],
            keep=self._keep,
            slot_count=2,
            take_lines=lambda peer, message: self.take_lines(peer, message),
        )
        self.receiver.preparing_seconds = 60.0  # no progress message comes between the messages that a test expects
        self.listener = PeerListener(HOLDER, listener_limits, identity=self.identities[HOLDER])
        self.pacer = NodePacer()
        self.changes = 0
        self.shard = OwnedShard(
            rank=RANK,
            generation=GENERATION,
            core=Shard.begin(Step(0), (HOLDER,), has_parity=has_parity),
            base=None,
            store=self.owner_store,
            page=self.owner_store.page(RANK, GENERATION),
            now=lambda: 0.0,
            on_change=self._changed,
        )
        self._sending: asyncio.Task[None] | None = None

    @staticmethod
    def _store(root: Path, memory_bytes: int) -> SlotStore:
        store = SlotStore(HeldFiles(), memory_bytes=memory_bytes)
        store.open_run(JOB, RUN)
        return store

    def _keep(self, rank: Rank, told: Step) -> set[Content]:
        step = max(self.heard, told)
        return {content(step)} if step != NONE else set()

    async def _discard(self, peer: NodeId, message: PrintedLines) -> None:
        pass

    def _changed(self) -> None:
        self.changes += 1

    # -- the holder

    def listen(self, identity: PeerIdentity | None = None) -> None:
        """Accept sessions of the nodes that belong to the generation, with the holder's identity or another one."""
        if identity is not None:
            self.listener = PeerListener(HOLDER, identity=identity)
        if not self.listener.port:
            self.listener.start(HOLDER_ADDRESS)
        self.listener.admit(credentials(HOLDER, identity=identity or self.identities[HOLDER]), self.serve)

    async def serve(self, session: TcpSession) -> None:
        kinds = {"replica": self.receiver.replica, "fetch": self.receiver.fetch, "stream": self.receiver.stream}
        await kinds[session.opened.kind](session)

    async def session(self) -> TcpSession:
        """Open a replica session (see `Dialler`)."""
        return await self.dial()

    async def stream(self, session: Session, number: int = 0) -> socket.socket:
        """Open a stream of a session (see `Dialler`)."""
        return (await self.dial(kind="stream", of=session.opened.nonce)).detach()

    async def dial(
        self,
        who: PeerCredentials | None = None,
        kind: SessionKind = "replica",
        peer: NodeId = HOLDER,
        rank: Rank = RANK,
        of: bytes = b"",
    ) -> TcpSession:
        """Open a session to the holder."""
        return await dial(
            who or credentials(OWNER, identity=self.identities[OWNER]),
            peer=peer,
            address=HOLDER_ADDRESS,
            port=self.listener.port,
            kind=kind,
            owner_rank=rank,
            source=NetworkCard(OWNER_ADDRESS),
            session=of,
        )

    async def line(self) -> socket.socket:
        """Open a TCP connection to the holder's port without a handshake."""
        line = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        line.bind((OWNER_ADDRESS, 0))
        await asyncio.get_running_loop().sock_connect(line, (HOLDER_ADDRESS, self.listener.port))
        return line

    # -- the owner

    def send(
        self,
        *,
        deadline_seconds: float = 30.0,
        dialler: Dialler | None = None,
        printed: Printed | None = None,
        **options: Any,
    ) -> ReplicaSender:
        """Start a sender that sends the owner's steps to the holder."""
        sender = ReplicaSender(
            self.shard,
            HOLDER,
            dialler or self,
            self.owner_store,
            self.pacer,
            holder_deadline_seconds=deadline_seconds,
            printed=printed,
            **options,
        )
        self._sending = asyncio.create_task(sender.run())
        return sender

    async def stop_sending(self) -> None:
        """End the sender, as at the end of its generation."""
        await end(self._sending)

    async def capture(self, step: int) -> None:
        """Capture a step in the owner's own slot, as the rank and its agent do: grant the slot, write it and
        seal it.
        """
        capture = await self.begin_capture(step)
        capture.write(self.payload_bytes)
        await capture.seal()

    async def begin_capture(self, step: int) -> Capture:
        """Grant one of the owner's slots for a step. Return the capture, which the test continues."""
        committed = self.shard.core.committed
        keep = {content(committed)} if committed != NONE else set()
        index = await self.owner_store.grant(
            RANK, content(step), keep=keep, capacity_bytes=self.payload_bytes, layout_hash=LAYOUT, slot_count=2
        )
        assert index is not None
        self.shard.forget_lost()
        return Capture(self, step, self.owner_store.shards[RANK][index])

    def apply_announcement(self, committed: int, proposed: int) -> None:
        """Pass an announcement to the owner: the committed and the proposed step."""
        self.shard.apply_announcement(
            Announcement(generation=GENERATION, term=1, sequence=1, committed=Step(committed), proposed=Step(proposed))
        )

    async def until(self, reached: Callable[[], bool], seconds: float = 60.0) -> None:
        """Wait until a condition of the owner's shard is true.

        The time limit is long, because a slow link delays a test by up to 15 s.
        """
        async with asyncio.timeout(seconds):
            while not reached():
                await self.shard.changed.wait(self.shard.changed.version, 0.05)

    def held(self) -> dict[Step, bytes]:
        """Return the payload of each step that the holder has sealed, by step."""
        found = {}
        for record in self.holder_store.inventory():
            slot = self.holder_store.sealed(RANK, Content(record.origin_generation, record.step))
            assert slot is not None
            with slot.file.payload() as view:
                found[record.step] = bytes(view)
        return found

    def holder_states(self) -> list[SlotState]:
        """Return the state of each slot of the shard on the holder."""
        return [slot.file.header.state for slot in self.holder_store.shards.get(RANK, [])]

    async def close(self) -> None:
        """End the sender and close the listener and the stores."""
        await self.stop_sending()
        await self.listener.close()
        self.shard.page.close()
        self.owner_store.close()
        self.holder_store.close()
