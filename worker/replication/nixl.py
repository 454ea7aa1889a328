"""This node's NIXL agent, which reads blocks of memory of other nodes by RDMA, and its registered memory.

NIXL only reads. A sender copies a block of a chunk into its own registered memory and sends the block's address over
the stream's TCP connection. The receiver reads the block into its own registered memory, and copies it to the chunk's
place (`worker.replication.nixl_line`).

Invariant: slots are never registered. A late read or write of a device, for example for a generation that has ended,
can therefore reach only a block, and chunks are verified after the copy out of the block.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import mmap
import os
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from everstep.node_facts import rdma_devices
from everstep.protocol.ids import NodeId
from everstep.protocol.replica_transport import (
    NIXL_MODULE,
    ReplicaTransport,
    TransportSetting,
    choose_transport,
)
from worker.errors import NixlUnavailable

log = logging.getLogger(__name__)
BLOCK_BYTES: Final = 1024 * 1024
POOL_BYTES: Final = 256 * 1024 * 1024
"""Bytes of registered memory. They suffice for 128 streams; further streams use TCP."""
BLOCKS_PER_LINE: Final = 2
"""Blocks of each stream on each side: the sender fills one while the receiver reads the other."""
READ_SECONDS: Final = 5.0
NIXL_RETRY_SECONDS: Final = 600.0
CUT_SECONDS: Final = 0.5
"""Maximum seconds for which a read may still run after its stream was cut. Afterwards its block is abandoned."""
SMALL_BYTES: Final = 64 * 1024
"""Size in bytes below which a piece travels over TCP, because NIXL's extra round trip would cost more."""
READ_POLL_SECONDS: Final = 50e-6
PROGRESS_MICROSECONDS: Final = 100_000
"""Maximum time between two passes of NIXL's progress thread. Events of the network wake the thread immediately."""
MAX_DESCRIPTION_BYTES: Final = 8192
"""Maximum size of the description of a NIXL agent in a handshake. It grows with the number of devices."""
RDMA_TRANSPORTS: Final = "^tcp,sm"
"""UCX transports for nodes with RDMA devices: all transports except (`^`) TCP and shared memory (`sm`).

UCX must not use TCP: it would listen on an unauthenticated port and serve reads and writes in software, without
checking that the memory is registered. Shared memory is useless between nodes.
"""


class Nixl:
    """The NIXL agent of this process with its registered memory. It lives as long as the process.

    Every method may be called by any thread.
    """

    def __init__(self, bindings: Any, agent: Any, backend: int, pool: mmap.mmap, base: int, description: bytes) -> None:
        self.description = description
        """Address and memory keys of this node's NIXL agent, which a peer needs to read from its memory."""
        self.small_bytes = SMALL_BYTES
        self.read_seconds = READ_SECONDS
        """Maximum seconds for reading one block. After this time, streams with the peer use TCP (`retry_seconds`)."""
        self.retry_seconds = NIXL_RETRY_SECONDS
        """Seconds after a failure for which streams with the same node use TCP."""
        self.read_bytes = 0
        """Bytes that this node has read from peers."""
        self._bindings, self._agent, self._backend = bindings, agent, backend
        self._pool, self._base = memoryview(pool), base
        self._errors = tuple(
            getattr(bindings, name) for name in dir(bindings) if name.startswith("nixl") and name.endswith("Error")
        )
        self._lock = threading.Lock()
        self._free = list(range(0, len(pool), BLOCK_BYTES))
        self._abandoned: list[tuple[int, int]] = []
        """(handle, block) of each read that did not end in time. A device may still write to the block."""
        self._peers: dict[bytes, str] = {}
        self._failed_at: dict[NodeId, float] = {}
        """Time of the last failure with each node, in monotonic seconds."""

    @classmethod
    def open(
        cls, *, transports: str = RDMA_TRANSPORTS, net_devices: str | None = None, pool_bytes: int = POOL_BYTES
    ) -> Nixl:
        """Start a NIXL agent, and register its memory. The call blocks for about a second.

        Args:
            transports: UCX's transports. Only tests and benchmarks use other transports than `RDMA_TRANSPORTS`.
            net_devices: UCX's network devices; None for all devices.
            pool_bytes: bytes of registered memory, a multiple of `BLOCK_BYTES`.

        Returns:
            The agent.

        Raises:
            NixlUnavailable: the wheel is missing, NIXL finds no usable device, or the kernel refuses to pin the memory.
        """
        settings = {
            "UCX_TLS": transports,
            "UCX_DEBUG_SIGNO": "0",  # By default, UCX stops the process for a debugger at SIGHUP.
            "UCX_HANDLE_ERRORS": "none",  # UCX must not replace the agent's handler of fatal signals.
            "NIXL_LOG_LEVEL": "WARN",
            **({} if net_devices is None else {"UCX_NET_DEVICES": net_devices}),
        }
        with _environment(settings):
            try:
                bindings: Any = importlib.import_module(NIXL_MODULE)
            except (ImportError, OSError) as error:
                raise NixlUnavailable(f"the package nixl-cu12 cannot be used: {error}") from error
            try:
                options = bindings.nixlAgentConfig()
                options.useProgThread, options.pthrDelay = True, PROGRESS_MICROSECONDS
                options.useListenThread = False
                options.syncMode = bindings.NIXL_THREAD_SYNC_STRICT
                agent = bindings.nixlAgent(secrets.token_hex(16), options)
                backend = agent.createBackend("UCX", {})
                pool = mmap.mmap(-1, pool_bytes)
                base = ctypes.addressof(ctypes.c_char.from_buffer(pool))
                agent.registerMem(bindings.nixlRegDList(bindings.DRAM_SEG, [(base, pool_bytes, 0, "")]), [backend])
                description = bytes(agent.getLocalMD())
            except Exception as error:  # NIXL's Python bindings raise errors without a common base class.
                raise NixlUnavailable(f"NIXL cannot be opened: {error!r}") from error
        if len(description) > MAX_DESCRIPTION_BYTES:
            raise NixlUnavailable(
                f"NIXL's description of this node has {len(description)} bytes, more than {MAX_DESCRIPTION_BYTES}; "
                "restrict UCX_NET_DEVICES"
            )
        return cls(bindings, agent, backend, pool, base, description)

    @property
    def free_count(self) -> int:
        """Number of blocks of registered memory that no stream uses and that no device may write to."""
        with self._lock:
            self._reclaim()
            return len(self._free)

    def reserve(self, node_id: NodeId) -> list[int] | None:
        """Reserve blocks of this node's registered memory for one stream.

        Args:
            node_id: node at the other end of the stream.

        Returns:
            The offsets of `BLOCKS_PER_LINE` blocks in the registered memory. None if too few blocks are free, or NIXL
            has failed with this node recently.
        """
        with self._lock:
            self._reclaim()
            failed_at = self._failed_at.get(node_id)
            if failed_at is not None and time.monotonic() - failed_at < self.retry_seconds:
                return None
            if len(self._free) < BLOCKS_PER_LINE:
                return None
            return [self._free.pop() for _ in range(BLOCKS_PER_LINE)]

    def release(self, blocks: list[int]) -> None:
        """Make a stream's blocks of registered memory available to other streams.

        The list is empty afterwards, so that further calls change nothing.
        """
        with self._lock:
            self._free += blocks
            blocks.clear()

    def _reclaim(self) -> None:
        """Free the blocks of abandoned reads that have ended meanwhile."""
        for handle, block in list(self._abandoned):
            try:
                if self._agent.getXferStatus(handle) == self._bindings.NIXL_IN_PROG:
                    continue
                self._agent.releaseXferReq(handle)
            except self._errors:
                pass  # The read has ended with an error, so its block is free.
            self._abandoned.remove((handle, block))
            self._free.append(block)

    def _fail(self, node_id: NodeId, error: Exception) -> None:
        log.warning("replicas of %s use TCP for %g s: NIXL failed: %r", node_id, self.retry_seconds, error)
        with self._lock:
            self._failed_at[node_id] = time.monotonic()

    def connect(self, node_id: NodeId, description: bytes) -> str:
        """Prepare reading from a peer. The call blocks for up to 0.1 s at the first call for a peer.

        Args:
            node_id: the peer.
            description: the peer's description. The peer must have proved that it holds the generation's key.

        Returns:
            The name of the peer's NIXL agent.

        Raises:
            NixlUnavailable: NIXL rejects the description.
        """
        with self._lock:
            name = self._peers.get(description)
        if name is None:
            try:
                name = bytes(self._agent.loadRemoteMD(description)).decode()
            except (*self._errors, UnicodeDecodeError) as error:
                self._fail(node_id, error)
                raise NixlUnavailable(f"NIXL rejects the peer's description: {error!r}") from error
            with self._lock:
                self._peers[description] = name
        return name

    def address(self, block: int) -> int:
        """Return the memory address of a block, which the peer needs to read the block."""
        return self._base + block

    def memory(self, block: int) -> memoryview:
        """Return the memory of a block (a piece of this node's registered memory), uint8[BLOCK_BYTES]."""
        return self._pool[block : block + BLOCK_BYTES]

    def read(
        self, node_id: NodeId, peer: str, address: int, size: int, blocks: list[int], cut: threading.Event
    ) -> None:
        """Read bytes of a peer's registered memory into the first of `blocks`.

        If the read does not end in time, its block is removed from `blocks`, because a device may still write to it.

        Args:
            node_id: the peer.
            peer: name from `connect`.
            address: address of the bytes in the peer's memory.
            size: bytes to read, at most `BLOCK_BYTES`.
            blocks: offsets from `reserve`; not empty.
            cut: event that is set when the stream is cut.

        Raises:
            OSError: the read failed, and the stream must be closed. Unless the stream was cut, later streams with this
                peer use TCP for `retry_seconds`.
        """
        bindings, agent, block = self._bindings, self._agent, blocks[0]
        try:
            local = bindings.nixlXferDList(bindings.DRAM_SEG, [(self.address(block), size, 0)])
            remote = bindings.nixlXferDList(bindings.DRAM_SEG, [(address, size, 0)])
            handle = agent.createXferReq(bindings.NIXL_READ, local, remote, peer, "", [self._backend])
            state = agent.postXferReq(handle)
            began_at = time.monotonic()
            while state == bindings.NIXL_IN_PROG:
                if time.monotonic() - began_at > (CUT_SECONDS if cut.is_set() else self.read_seconds):
                    with self._lock:
                        self._abandoned.append((handle, blocks.pop(0)))
                    raise TimeoutError("the peer's memory does not answer")
                _never.wait(READ_POLL_SECONDS)
                state = agent.getXferStatus(handle)
            agent.releaseXferReq(handle)
        except (*self._errors, TimeoutError) as error:
            if cut.is_set():
                raise ConnectionAbortedError("the stream was closed during a read over NIXL") from error
            self._fail(node_id, error)
            raise ConnectionAbortedError(f"a read over NIXL failed: {error!r}") from error
        with self._lock:
            self.read_bytes += size


@dataclass(frozen=True, slots=True)
class OpenedTransport:
    """The transport that this agent uses for the chunks of replicas, from its start to its end."""

    nixl: Nixl | None
    """This node's NIXL agent. None if replicas use TCP."""
    reason: str
    """Why replicas use this transport: the option, the RDMA devices, or the error of NIXL."""

    @property
    def kind(self) -> ReplicaTransport:
        """The transport's name in messages and in the API."""
        return ReplicaTransport.TCP if self.nixl is None else ReplicaTransport.NIXL


def open_transport(setting: TransportSetting, devices: Sequence[str] | None = None) -> OpenedTransport:
    """Open NIXL if the agent's setting and this node's devices permit it, and log which transport replicas use.

    The agent calls this once when it starts; the call blocks for about a second.

    Args:
        setting: the agent's option `--replica-transport`.
        devices: names of the RDMA devices; None asks the kernel.

    Returns:
        The transport. Without a usable NIXL it is TCP, and the reason contains NIXL's error.
    """
    choice = choose_transport(setting, rdma_devices() if devices is None else devices)
    if not choice.uses_nixl:
        log.log(logging.WARNING if choice.is_warning else logging.INFO, "replicas use TCP: %s", choice.reason)
        return OpenedTransport(None, choice.reason)
    try:
        nixl = Nixl.open()
    except NixlUnavailable as error:
        log.warning("replicas use TCP: %s, but %s", choice.reason, error)
        return OpenedTransport(None, f"{choice.reason}, but {error}")
    log.info("replicas use NIXL where the peer has it too: %s", choice.reason)
    return OpenedTransport(nixl, choice.reason)


_never = threading.Event()
"""Event that is never set. Waiting for it lets other threads run; NIXL offers no blocking wait."""


@contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """Set environment variables for the duration of the context. UCX reads its settings from there only."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
