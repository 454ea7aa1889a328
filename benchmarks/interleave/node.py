"""Runs a node of the benchmark: its agent in this process, its rank in a child process, both in the node's namespace.

    python -m benchmarks.interleave.node CASE.json NODE DIRECTORY

`worker.replication.streams.send_chunks` sends snapshots, one stream per holder, delayed by the product's pacers.
`budgeted` selects steps if idle time is too short. Handshake, slots, capture, digests, resumption and rounds are
omitted. A timed wait replaces GEMINI's copy out of the receive buffer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.interleave.budgeted import Budgeted
from benchmarks.interleave.network import Network
from benchmarks.interleave.schemes import BUFFER_BYTES, BUFFERS, Scheme
from benchmarks.interleave.uniform import UniformPacer
from benchmarks.interleave.wire import read_case
from everstep.protocol.peer_messages import CHUNK_HEADER
from everstep.protocol.rank_messages import IdleSpan
from everstep.protocol.slot import CHUNK_BYTES
from worker.core.chunks import MU_RATIO, UNIFORM_SHARE, Link, ScheduledChunk, partition
from worker.member.traffic import ALPHA_SECONDS
from worker.replication.pacing import NodePacer, Pacer, SpanPacer
from worker.replication.streams import ChunkQueue, Streams, send_chunks

PORT = 7077
PIECE_BYTES = BUFFER_BYTES // BUFFERS
PROBES, PROBE_BYTES = 4, 1024 * 1024
ACKNOWLEDGEMENT = struct.Struct(">Q")


@dataclass(frozen=True, slots=True)
class Profile:
    iteration_seconds: float
    spans: tuple[IdleSpan, ...]


@dataclass(frozen=True, slots=True)
class State:
    """Bytes for `send_chunks`."""

    memory: memoryview

    def payload(self, start: int = 0, end: int | None = None) -> memoryview:
        """Return the bytes `start` to `end`."""
        return self.memory[start:end]


class Node:
    def __init__(self, case_path: Path, index: int, directory: Path) -> None:
        self.case = read_case(case_path)
        self.case_path = case_path
        self.index = index
        self.directory = directory
        self.state = memoryview(bytearray(os.urandom(1024) * (self.case.state_bytes // 1024)))
        self.streams: list[Streams] = []
        self.link = Link(self.case.link_bytes_per_second)
        self.profile: Profile | None = None
        self.pacers: dict[Scheme, Pacer | None] = {}
        self.budgeted = (
            Budgeted(index, self.case.copies, directory / "proposed", NodePacer()) if self.case.is_crowded else None
        )
        self.sending: asyncio.Task[None] | None = None
        self.records: list[dict[str, Any]] = []
        self.transfers = 0
        self.acknowledged: dict[int, asyncio.Future[None]] = {}

    def listen(self) -> socket.socket:
        """Accept connections from every node that sends its copies here, with a thread each."""
        listener = socket.create_server((Network.address(self.index), PORT))

        def accept() -> None:
            # `accept` raises an error and ends this thread when the main thread closes the socket at the end of the run
            with contextlib.suppress(OSError):
                while True:
                    line, _ = listener.accept()
                    threading.Thread(target=self.receive, args=(line,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        return listener

    def receive(self, line: socket.socket) -> None:
        """Receive and acknowledge transfers, on request after the time of a copy out of the buffer."""
        place = memoryview(bytearray(max(CHUNK_BYTES, self.case.state_bytes)))
        rate = self.case.link_bytes_per_second
        with line:
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while header := line.recv(CHUNK_HEADER.size, socket.MSG_WAITALL):
                transfer, _, size = CHUNK_HEADER.unpack(header)
                filled = 0
                while filled < size:
                    filled += line.recv_into(place[filled:size])
                if transfer % 2:
                    threading.Event().wait(size / rate)
                line.sendall(ACKNOWLEDGEMENT.pack(transfer))

    async def connect(self) -> None:
        loop = asyncio.get_running_loop()
        for peer in self.case.holders(self.index):
            while True:
                try:
                    line = socket.create_connection((Network.address(peer), PORT), timeout=30)
                    break
                except OSError:
                    await asyncio.sleep(0.05)
            line.settimeout(None)
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            streams = Streams()
            streams.add(line)
            self.streams.append(streams)
            threading.Thread(target=self.hear, args=(line, loop), daemon=True).start()

    def hear(self, line: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        """Receive one holder's acknowledgements, in a thread of its own."""
        with contextlib.suppress(OSError, RuntimeError):  # the holder closes the connection at the end of the run
            while data := line.recv(ACKNOWLEDGEMENT.size, socket.MSG_WAITALL):
                (transfer,) = ACKNOWLEDGEMENT.unpack(data)
                loop.call_soon_threadsafe(self.acknowledged[transfer].set_result, None)

    async def transfer(
        self, copy: int, data: State, pacer: Pacer | None, *, is_copied: bool = False, counting: NodePacer | None = None
    ) -> None:
        """Send bytes to a holder, and wait for the acknowledgement.

        `pacer` None sends all pieces at once. `counting` counts the transfer, and learns the link's rate from one
        without a pacer. `is_copied`: the holder delays its acknowledgement by the time of a copy.
        """
        self.transfers += 1
        number = 2 * self.transfers + is_copied
        self.acknowledged[number] = asyncio.get_running_loop().create_future()
        queue = ChunkQueue(link=None if counting is None else counting.link)
        with contextlib.nullcontext() if counting is None else counting.counted(queue):
            queue.add([(0, 1)])
            queue.complete()
            await send_chunks(
                self.streams[copy],
                data,
                number,
                queue,
                payload_bytes=len(data.memory),
                pacer=pacer,
                progress=lambda _: None,
            )
            await self.acknowledged[number]
            if counting is not None and pacer is None:
                counting.measured(queue)
        del self.acknowledged[number]

    async def probe(self) -> None:
        """Measure the link's rate while all nodes send: the best of a few trials, because delays only reduce it."""
        now = asyncio.get_running_loop().time
        rates = []
        for _ in range(PROBES):
            begun = now()
            await self.transfer(0, State(memoryview(bytes(PROBE_BYTES))), None)
            rates.append(PROBE_BYTES / (now() - begun))
        self.link = Link(max(rates), ALPHA_SECONDS)

    def learn(self, profile: Profile) -> None:
        self.profile = profile
        if self.budgeted is not None:
            self.budgeted.spans(profile.iteration_seconds, profile.spans)
        total = self.case.state_bytes * (self.case.copies - 1)
        self.pacers = {
            Scheme.BLOCKING: None,
            Scheme.UNIFORM: UniformPacer(total / (UNIFORM_SHARE * profile.iteration_seconds), PIECE_BYTES),
            Scheme.EVERSTEP: SpanPacer(profile.spans, self.link, iteration_seconds=profile.iteration_seconds),
        }

    async def send(self, scheme: Scheme, at: float) -> None:
        if scheme.delays_update:
            await self.send_planned(scheme, at)
        else:
            for copy in range(len(self.streams)):
                await self.send_copy(copy, scheme)

    async def send_copy(self, copy: int, scheme: Scheme) -> None:
        """Send the whole snapshot to one holder."""
        if scheme is not Scheme.EVERSTEP or self.budgeted is None:
            await self.transfer(copy, State(self.state), self.pacers[scheme])
        else:
            await self.transfer(copy, State(self.state), self.budgeted.pacer, counting=self.budgeted.node_pacer)

    async def send_planned(self, scheme: Scheme, at: float) -> None:
        """Send the chunks of GEMINI's Algorithm 2 at their planned times, after the holder has copied earlier ones."""
        now = asyncio.get_running_loop().time
        for chunk in self.plan(scheme):
            await asyncio.sleep(at + chunk.begin_seconds - now())
            piece = State(self.state[chunk.offset : chunk.offset + chunk.bytes_count])
            await self.transfer(chunk.copy, piece, None, is_copied=True)

    def plan(self, scheme: Scheme) -> tuple[ScheduledChunk, ...]:
        assert self.profile is not None
        # The other scheme here, UNPIPELINED, is slower: before each chunk, the sender waits until the holder has
        # emptied its only buffer. This wait takes as long as sending a chunk, so the rate is halved.
        share = 1 if scheme is Scheme.SINGLE else 2
        return partition(
            self.profile.spans,
            self.case.state_bytes,
            len(self.streams),
            buffer_bytes=self.case.state_bytes if scheme is Scheme.SINGLE else BUFFER_BYTES,
            buffers=1,
            bandwidth_bytes_per_second=self.link.bandwidth_bytes_per_second / share,
            alpha_seconds=self.link.alpha_seconds,
            mu=MU_RATIO,
        )

    async def attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def tell(**message: Any) -> None:
            writer.write(json.dumps(message).encode() + b"\n")

        while text := await reader.readline():
            message = json.loads(text)
            match message["kind"]:
                case "spans":
                    self.learn(
                        Profile(message["iteration_seconds"], tuple(IdleSpan(*span) for span in message["spans"]))
                    )
                case "boundary":
                    self.boundary(Scheme(message["scheme"]), message["number"], message["at"], tell)
                case "probe":
                    await self.probe()
                    tell(kind="probe")
                case "drain":
                    if self.sending is not None:
                        await self.sending
                    if self.budgeted is not None:
                        self.budgeted.pause()
                    tell(kind="drain")
                case "finish":
                    tell(kind="finish")
                    return

    def boundary(self, scheme: Scheme, number: int, at: float, tell: Any) -> None:
        pacer = self.pacers.get(scheme)
        if isinstance(pacer, SpanPacer):
            pacer.boundary(at)
        is_sending = self.sending is not None and not self.sending.done()
        if not self.begins(scheme, at, is_sending=is_sending):
            return

        async def work() -> None:
            await self.send(scheme, at)
            self.records.append({"number": number, "seconds": asyncio.get_running_loop().time() - at})
            tell(kind="sent", number=number)

        self.sending = asyncio.create_task(work())

    def begins(self, scheme: Scheme, at: float, *, is_sending: bool) -> bool:
        """Return whether a snapshot begins after this iteration, which needs the end of the previous snapshot."""
        if self.budgeted is not None and scheme is Scheme.EVERSTEP:
            return self.budgeted.boundary(at, is_sending=is_sending)
        if self.budgeted is not None and self.profile is None:
            self.budgeted.quiet_boundary(at)
        return scheme is not Scheme.NONE and not is_sending

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
            [
                sys.executable,
                "-m",
                "benchmarks.interleave.rank",
                self.case_path,
                str(self.index),
                str(line.fileno()),
                out,
            ],
            pass_fds=[line.fileno()],
            env={**os.environ, **environment},
        )

    async def run(self) -> None:
        listener = self.listen()
        ours, theirs = socket.socketpair()
        with theirs:
            rank = self.start_rank(theirs)
        try:
            await self.connect()
            reader, writer = await asyncio.open_unix_connection(sock=ours)
            await self.attend(reader, writer)
            if await asyncio.to_thread(rank.wait):
                raise RuntimeError(f"rank {self.index} ended with {rank.returncode}")
        finally:
            rank.kill()
            rank.wait()
            listener.close()
            for streams in self.streams:
                await streams.close()
            interval = self.budgeted.interval if self.budgeted is not None else 1
            report = {
                "bandwidth_bytes_per_second": self.link.bandwidth_bytes_per_second,
                "sent": self.records,
                "interval": interval,
            }
            (self.directory / f"node-{self.index}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    asyncio.run(Node(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])).run())
