"""Measures the upload of one shard to S3 by several nodes together. Each node has a bandwidth cap.

    writer 0 (owner)   HelpedUpload ─▶ proxy 0 ─▶
    writer 1 …         UploadHelper  ─▶ proxy 1 ─▶   SeaweedFS

Messages between the writers pass no proxy, so only bytes for S3 count against a cap.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace

from benchmarks.durable.token_bucket import SLICE_SECONDS, TokenBucket
from benchmarks.durable.transfer import MIB
from everstep.protocol.codec import Message
from everstep.protocol.ids import Generation, NodeId, Rank, Step
from everstep.protocol.peer_messages import Open
from everstep.protocol.plan import GenerationPlan
from everstep.protocol.slot import SlotState
from tests.unit.worker.rank_plans import rank_plan
from tests.unit.worker.storage.slots import JOB, RUN, header_of, payload_of
from worker.core.slots import Content
from worker.errors import PeerLost
from worker.member.shared_uploads import HelpedUpload, UploadHelper
from worker.shm.held_files import HeldFiles
from worker.shm.store import SlotStore
from worker.storage.checkpoints import upload_shard
from worker.storage.s3 import s3_store

WRITERS = (1, 2, 4)
"""Nodes that share the upload, with the owner."""
OBJECT_MIB = 256
CAP_MIB_PER_SECOND = 16
"""Cap of one writer. On two cores, the S3 server is fast enough for four."""
BUCKET = "bucket"
"""Bucket in the plan of `rank_plan`."""
RANK = Rank(0)
CONTENT = Content(Generation(1), Step(7))


@contextmanager
def capped(url: str, bytes_per_second: float, *, is_download: bool = False) -> Iterator[str]:
    """Run a proxy that limits bytes to the S3 server, or from it (`is_download`), and yield its address."""
    host, port = url.removeprefix("http://").rsplit(":", 1)
    bucket, lines = TokenBucket(bytes_per_second), list[socket.socket]()
    up, down = (None, bucket) if is_download else (bucket, None)
    piece = max(4096, int(bytes_per_second * SLICE_SECONDS))

    def copy(source: socket.socket, target: socket.socket, limit: TokenBucket | None) -> None:
        with suppress(OSError):
            while data := source.recv(piece):
                if limit is not None:
                    limit.spend(len(data))
                target.sendall(data)
        for line in (source, target):
            with suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        with suppress(OSError):
            while True:
                line, _ = listener.accept()
                line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 256 * 1024)
                server = socket.create_connection((host, int(port)))
                lines.extend((line, server))
                threading.Thread(target=copy, args=(line, server, up), daemon=True).start()
                threading.Thread(target=copy, args=(server, line, down), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            for line in lines:
                line.close()


class _Line:
    """A `Session` between two simulated nodes through queues in memory."""

    def __init__(
        self, peer: NodeId, inbox: asyncio.Queue[Message | None], outbox: asyncio.Queue[Message | None]
    ) -> None:
        self.opened = Open(
            run=RUN, generation=Generation(1), kind="upload", node_id=peer, owner_rank=Rank(-1), nonce=bytes(32)
        )
        self.peer = peer
        self.addresses: tuple[tuple[str, int], ...] = ()
        self._inbox = inbox
        self._outbox = outbox

    async def send(self, *messages: Message) -> None:
        for message in messages:
            self._outbox.put_nowait(message)

    async def receive(self) -> Message:
        message = await self._inbox.get()
        if message is None:
            raise PeerLost("the session ended")
        return message

    def close(self) -> None:
        self._outbox.put_nowait(None)
        self._inbox.put_nowait(None)


async def _sealed(payload: bytes, offset: int, size: int) -> SlotStore:
    store = SlotStore(HeldFiles(), memory_bytes=4 * len(payload))
    store.open_run(JOB, RUN)
    index = await store.grant(
        RANK, CONTENT, keep=(), capacity_bytes=len(payload), layout_hash=bytes(range(16)), slot_count=1
    )
    assert index is not None
    with store.shards[RANK][index].file.payload(0, len(payload)) as view:
        view[:] = payload
    header = header_of(payload, offset, size, origin=1)
    await store.seal(RANK, index, replace(header, state=SlotState.WRITING))
    return store


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedUploadTime:
    """Seconds of one shared upload."""

    writers: int
    seconds: float


async def _upload(urls: list[str], environment: Mapping[str, str], payload: tuple[bytes, int, int]) -> float:
    plan: GenerationPlan = rank_plan(addresses=("127.0.0.1",) * len(urls))
    nodes = [NodeId(f"i-{index}") for index in range(len(urls))]
    clients = [s3_store({**environment, "AWS_ENDPOINT_URL": url}) for url in urls]
    stores = [await _sealed(*payload) for _ in nodes]
    helpers = {
        node: UploadHelper(plan, store, client, held_ranks=[RANK])
        for node, store, client in zip(nodes[1:], stores[1:], clients[1:], strict=True)
    }
    serving = set[asyncio.Task[None]]()

    async def dial(peer: NodeId) -> _Line:
        there: asyncio.Queue[Message | None] = asyncio.Queue()
        back: asyncio.Queue[Message | None] = asyncio.Queue()
        serving.add(asyncio.create_task(helpers[peer].serve(_Line(nodes[0], there, back))))
        return _Line(peer, back, there)

    slot = stores[0].sealed(RANK, CONTENT)
    assert slot is not None
    digests = await stores[0].digests(slot)
    for store in stores[1:]:
        other = store.sealed(RANK, CONTENT)
        assert other is not None
        await store.digests(other)
    assert digests is not None
    share = HelpedUpload(slot.file.header, nodes[1:], dial, on_stored=lambda _: None)
    begun = time.perf_counter()
    uploaded = await upload_shard(
        clients[0], slot.file, digests.known, plan, rank=RANK, share=share if helpers else None
    )
    seconds = time.perf_counter() - begun
    await asyncio.gather(*serving, return_exceptions=True)
    with clients[0].open(uploaded.object) as reader:
        assert reader.bytes == uploaded.object_bytes
    clients[0].client.delete_object(Bucket=uploaded.object.bucket, Key=uploaded.object.key)
    for store in stores:
        store.close()
    return seconds


def shared_upload(url: str, environment: Mapping[str, str], writers: int) -> SharedUploadTime:
    """Upload one shard with `writers` nodes to the bucket `BUCKET`, and return the duration."""
    size = OBJECT_MIB * MIB
    payload = payload_of([("weight", "uint8", (size,), os.urandom(size))])
    with ExitStack() as stack:
        urls = [stack.enter_context(capped(url, CAP_MIB_PER_SECOND * MIB)) for _ in range(writers)]
        return SharedUploadTime(writers=writers, seconds=asyncio.run(_upload(urls, environment, payload)))
