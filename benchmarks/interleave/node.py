"""A node of the benchmark: its agent in this process, its rank in a child, both in the node's network namespace.

    python -m benchmarks.interleave.node CASE.json NODE DIRECTORY

Snapshot bytes travel over the product's sessions (`worker.replication.tcp`), admitted by its pacers; what stands in for a receiver's buffer that is
copied out before the next one is sent is a timed wait at the link's rate, as fast as GEMINI measured it.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.interleave.network import Network
from benchmarks.interleave.schemes import BUFFER_BYTES, BUFFERS, Scheme
from benchmarks.interleave.wire import read_case
from everstep.protocol.ids import Generation, JobName, NodeId, Rank, RunId, Step
from everstep.protocol.peer_messages import EndShard, ShardSealed
from everstep.protocol.rank_messages import IdleSpan
from worker.core.chunks import MU_RATIO, UNIFORM_SHARE, Link, ScheduledChunk, partition
from worker.errors import PeerError
from worker.replication.pacing import Pacer, SpanPacer, UniformPacer, Unpaced
from worker.replication.tcp import PeerListener, TcpSession, dial
from worker.replication.transport import Chunk, Credentials

PORT = 7077
TCP_NOTSENT_LOWAT = 25
PIECE_BYTES = BUFFER_BYTES // BUFFERS
PROBES = 4
PROBE_BYTES = 1024 * 1024
PROBE, COPIED = -1, -2
"""Steps that are no steps: the probe of the link, and the acknowledgement of a chunk that was copied out."""


@dataclass(frozen=True, slots=True)
class Profile:
    iteration_seconds: float
    spans: tuple[IdleSpan, ...]


class Node:
    def __init__(self, case_path: Path, index: int, directory: Path) -> None:
        self.case = read_case(case_path)
        self.case_path = case_path
        self.index = index
        self.directory = directory
        self.state = memoryview(bytearray(os.urandom(1024) * (self.case.state_bytes // 1024)))
        self.received = memoryview(bytearray(max(self.case.state_bytes, PROBE_BYTES)))
        self.sessions: list[TcpSession] = []
        self.link = Link(self.case.link_bytes_per_second)
        self.profile: Profile | None = None
        self.pacers: dict[Scheme, Pacer] = {}
        self.transfer: asyncio.Task[None] | None = None
        self.records: list[dict[str, Any]] = []
        self.acknowledged: dict[tuple[int, int], asyncio.Event] = {}

    # -- the other nodes -------------------------------------------------------------------------------------------------------------------

    def credentials(self) -> Credentials:
        return Credentials(JobName("interleave"), RunId("1"), Generation(1), NodeId(f"n{self.index}"), b"k" * 32, silence_seconds=30.0)

    async def serve(self, session: TcpSession) -> None:
        """Receive in place; a step that asks for it has every chunk copied out, by the clock, before it is acknowledged."""
        while True:
            item = await session.receive()
            if isinstance(item, Chunk):
                with self.received[item.offset : item.offset + item.size] as piece:
                    await session.receive_into(piece)
                last = item.size
            elif isinstance(item, EndShard):
                if item.digest == b"copy":
                    await asyncio.sleep(last / self.link.bandwidth_bytes_per_second)
                await session.send(ShardSealed(owner_rank=item.owner_rank, origin_generation=item.origin_generation, step=item.step, digest=b""))

    async def connect(self) -> None:
        for peer in self.case.holders(self.index):
            while True:
                try:
                    session = await dial(
                        self.credentials(),
                        peer=NodeId(f"n{peer}"),
                        address=Network.address(peer),
                        port=PORT,
                        kind="replica",
                        owner_rank=Rank(self.index),
                        source_address=Network.address(self.index),
                    )
                    break
                except PeerError:
                    await asyncio.sleep(0.05)
            session._line.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, PIECE_BYTES)
            self.sessions.append(session)

    async def listen(self, copy: int) -> None:
        while True:
            message = await self.sessions[copy].receive()
            if isinstance(message, ShardSealed):
                self.acknowledged.setdefault((copy, message.step), asyncio.Event()).set()

    async def end(self, copy: int, step: int, *, digest: bytes = b"") -> None:
        """Say that a shard (or a chunk) is complete, and wait for the holder's word."""
        event = self.acknowledged[copy, step] = asyncio.Event()
        message = EndShard(owner_rank=Rank(self.index), origin_generation=Generation(1), step=Step(step), digest=digest)
        await self.sessions[copy].send(message)
        await event.wait()
        del self.acknowledged[copy, step]

    async def probe(self) -> None:
        """Measure the link, all nodes at once, as they will use it: the best of a few, for a processor that is late is no property of a link."""
        now = asyncio.get_running_loop().time
        rates = []
        for _ in range(PROBES):
            begun = now()
            for offset in range(0, PROBE_BYTES, PIECE_BYTES):
                await self.sessions[0].send_chunk(offset, memoryview(bytes(PIECE_BYTES)))
            await self.end(0, PROBE)
            rates.append(PROBE_BYTES / (now() - begun))
        self.link = Link(max(rates), 0.0002)

    # -- schemes ---------------------------------------------------------------------------------------------------------------------------

    def learn(self, profile: Profile) -> None:
        self.profile = profile
        total = self.case.state_bytes * (self.case.copies - 1)
        self.pacers = {
            Scheme.BLOCKING: Unpaced(),
            Scheme.UNIFORM: UniformPacer(total / (UNIFORM_SHARE * profile.iteration_seconds), PIECE_BYTES),
            Scheme.EVERSTEP: SpanPacer(profile.spans, self.link, iteration_seconds=profile.iteration_seconds),
        }

    async def send(self, scheme: Scheme, number: int, at: float) -> None:
        if scheme.delays_update:
            await self.send_planned(scheme, at)
        else:
            await self.send_paced(self.pacers[scheme])
        for copy in range(len(self.sessions)):
            await self.end(copy, number)

    async def send_paced(self, pacer: Pacer) -> None:
        for session in self.sessions:
            offset = 0
            while offset < len(self.state):
                with self.state[offset : offset + pacer.chunk_bytes] as piece:
                    size = len(piece)
                    await pacer.admit(size)
                    await session.send_chunk(offset, piece)
                offset += size

    async def send_planned(self, scheme: Scheme, at: float) -> None:
        """Send what Algorithm 2 plans, each chunk copied out before the next; what is late begins late."""
        now = asyncio.get_running_loop().time
        for chunk in self.plan(scheme):
            await asyncio.sleep(at + chunk.begin_seconds - now())
            with self.state[chunk.offset : chunk.offset + chunk.bytes_count] as piece:
                await self.sessions[chunk.copy].send_chunk(chunk.offset, piece)
            await self.end(chunk.copy, COPIED, digest=b"copy")

    def plan(self, scheme: Scheme) -> tuple[ScheduledChunk, ...]:
        assert self.profile is not None
        # A chunk occupies its span while it is sent and, with a single buffer, while it is copied out.
        share = 1 if scheme is Scheme.SINGLE else 2
        return partition(
            self.profile.spans,
            self.case.state_bytes,
            len(self.sessions),
            buffer_bytes=self.case.state_bytes if scheme is Scheme.SINGLE else BUFFER_BYTES,
            buffers=1,
            bandwidth_bytes_per_second=self.link.bandwidth_bytes_per_second / share,
            alpha_seconds=self.link.alpha_seconds,
            mu=MU_RATIO,
        )

    # -- the rank --------------------------------------------------------------------------------------------------------------------------

    async def attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def tell(**message: Any) -> None:
            writer.write(json.dumps(message).encode() + b"\n")

        while text := await reader.readline():
            message = json.loads(text)
            match message["kind"]:
                case "spans":
                    self.learn(Profile(message["iteration_seconds"], tuple(IdleSpan(*span) for span in message["spans"])))
                case "boundary":
                    self.boundary(Scheme(message["scheme"]), message["number"], message["at"], tell)
                case "probe":
                    await self.probe()
                    tell(kind="probe")
                case "drain":
                    if self.transfer is not None:
                        await self.transfer
                    tell(kind="drain")
                case "finish":
                    tell(kind="finish")
                    return

    def boundary(self, scheme: Scheme, number: int, at: float, tell: Any) -> None:
        pacer = self.pacers.get(scheme)
        if isinstance(pacer, SpanPacer):
            pacer.boundary(at)
        if scheme is Scheme.NONE or (self.transfer is not None and not self.transfer.done()):
            return  # a snapshot that takes longer than a step: the next one comes later

        async def work() -> None:
            await self.send(scheme, number, at)
            self.records.append({"number": number, "seconds": asyncio.get_running_loop().time() - at})
            tell(kind="sent", number=number)

        self.transfer = asyncio.create_task(work())

    def start_rank(self, line: socket.socket) -> subprocess.Popen[bytes]:
        out = self.directory / f"rank-{self.index}.json"
        environment = {
            "GLOO_SOCKET_IFNAME": "eth0",
            "MASTER_ADDR": Network.address(0),
            "MASTER_PORT": str(PORT + 1),
            "RANK": str(self.index),
            "WORLD_SIZE": str(self.case.nodes),
            "OMP_NUM_THREADS": "1",
            "KINETO_LOG_LEVEL": "6",
        }
        return subprocess.Popen(
            [sys.executable, "-m", "benchmarks.interleave.rank", self.case_path, str(self.index), str(line.fileno()), out],
            pass_fds=[line.fileno()],
            env={**os.environ, **environment},
        )

    async def run(self) -> None:
        listener = PeerListener(NodeId(f"n{self.index}"))
        listener.start(Network.address(self.index), PORT)
        listener.admit(self.credentials(), self.serve)
        ours, theirs = socket.socketpair()
        with theirs:
            rank = self.start_rank(theirs)
        listening: list[asyncio.Task[None]] = []
        try:
            await self.connect()
            listening = [asyncio.create_task(self.listen(copy)) for copy in range(len(self.sessions))]
            reader, writer = await asyncio.open_unix_connection(sock=ours)
            await self.attend(reader, writer)
            if await asyncio.to_thread(rank.wait):
                raise RuntimeError(f"rank {self.index} ended with {rank.returncode}")
        finally:
            for task in listening:
                task.cancel()
            rank.kill()
            rank.wait()
            for session in self.sessions:
                session.close()
            await listener.close()
            report = {"bandwidth_bytes_per_second": self.link.bandwidth_bytes_per_second, "sent": self.records}
            (self.directory / f"node-{self.index}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    asyncio.run(Node(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])).run())
