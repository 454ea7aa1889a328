"""Files in memory, by name: the slots and pages of a node, which its ranks map and cannot resize.

Each file is a memfd with the seals F_SEAL_SHRINK, F_SEAL_GROW and F_SEAL_SEAL. The shim holds a second descriptor of
each file, so that the node's next agent process finds the files again.

    agent                                shim
    = name, descriptor  ────▶            holds the file, in place of another of this name
    - name              ────▶            forgets the file
    > name              ────▶
                        ◀────            = name, descriptor of the first file after this name; or .

Each packet has an answer, which repeats the sign of a `=` or `-`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

from worker.node.unix_socket import connect_private

log = logging.getLogger(__name__)
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
ANSWER_SECONDS = 2.0
"""Longest wait for an answer of the shim, which usually takes 0.1 ms."""
_PACKET_BYTES = 512
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
FILES_SOCKET = "files.sock"
"""Name of the shim's socket for files, in the folder of its other socket."""
HOLD, FORGET, NEXT, END = b"=", b"-", b">", b"."


def create_file(name: str, size: int) -> int:
    """Return the descriptor of a new, unsealed file without memory. Raises OSError for too many open files."""
    descriptor = os.memfd_create(f"everstep {name}"[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    return descriptor


def seal(descriptor: int) -> None:
    """Fix the size of a file for all processes."""
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)


def is_sealed(descriptor: int) -> bool:
    """Return whether no process can change the size of a file."""
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS == SEALS
    except OSError:  # not a memfd
        return False


class HeldFiles:
    """The files of one process by name. Each has a descriptor of its own, which no caller may close."""

    def __init__(self) -> None:
        self._descriptors: dict[str, int] = {}
        weakref.finalize(self, _close_all, self._descriptors)
        self._descriptors[""] = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)

    def hold(self, name: str, descriptor: int) -> None:
        """Hold a copy of a descriptor, in place of another file of this name."""
        copy = os.dup(descriptor)
        self.forget(name)
        self._descriptors[name] = copy

    def forget(self, name: str) -> None:
        """Close the descriptor of a file, if there is one."""
        if (descriptor := self._descriptors.pop(name, None)) is not None:
            os.close(descriptor)

    def names(self) -> list[str]:
        """Return the names of all files, sorted."""
        return sorted(filter(None, self._descriptors))

    def descriptor(self, name: str) -> int:
        """Return the descriptor of a file; that of /dev/null, which cannot be mapped, if it does not exist."""
        return self._descriptors.get(name, self._descriptors[""])

    def __contains__(self, name: str) -> bool:
        return name in self._descriptors

    def close(self) -> None:
        """Close all descriptors of this process."""
        _close_all(self._descriptors)

    def answer(self, connection: socket.socket) -> bool:
        """Answer one packet of an agent. Return False if the connection has ended or the packet is malformed."""
        received: list[int] = []
        try:
            packet, received, _, _ = socket.recv_fds(connection, _PACKET_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            reply, sent = self._reply(packet[:1], packet[1:].decode(errors="replace"), received)
            if reply:
                socket.send_fds(connection, [reply], sent)
        except OSError:
            return False
        finally:
            for descriptor in received:
                os.close(descriptor)
        return bool(reply)

    def _reply(self, sign: bytes, name: str, received: Sequence[int]) -> tuple[bytes, list[int]]:
        if sign == HOLD and received:
            self.hold(name, received[0])
            return HOLD, []
        if sign == FORGET:
            self.forget(name)
            return FORGET, []
        if sign == NEXT:
            following = min((each for each in self._descriptors if each > name), default=None)
            return (END, []) if following is None else (HOLD + following.encode(), [self._descriptors[following]])
        return b"", []


def _close_all(descriptors: dict[str, int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[1])


class AgentFiles(HeldFiles):
    """The files of an agent, which the shim also holds. While no shim answers, they end with this process."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._lock = threading.RLock()
        self._socket: socket.socket | None = None
        self._has_joined = False

    def hold(self, name: str, descriptor: int) -> None:
        with self._lock:
            super().hold(name, descriptor)
            self._ask(HOLD, name, descriptor)

    def forget(self, name: str) -> None:
        with self._lock:
            if name in self:
                super().forget(name)
                self._ask(FORGET, name)

    def join(self) -> None:
        """Connect to a shim. The first time, take over an earlier agent's files; otherwise send all files.

        The supervisor calls this for each new connection to a shim. Raises OSError if the shim does not answer, or for
        too many open files.
        """
        with self._lock:
            self._hang_up()
            try:
                self._socket = connect_private(self._path, socket.SOCK_SEQPACKET)
            except FileNotFoundError:
                log.warning("the shim is of an earlier release: a restart of the agent loses the steps of this node")
                self._has_joined = True
                return
            self._socket.settimeout(ANSWER_SECONDS)
            theirs = self._listed()
            self._has_joined = True
            for name in self.names():
                self._exchange(HOLD, name, self.descriptor(name))
            for name in theirs - set(self.names()):
                self._exchange(FORGET, name)

    def close(self) -> None:
        """Close all descriptors of this process. The shim keeps its own."""
        with self._lock:
            self._hang_up()
            super().close()

    def _listed(self) -> set[str]:
        """Return the names that the shim has, and take over its files if this process has not joined before."""
        found: dict[str, int] = {}
        name = ""
        try:
            while (answer := self._exchange(NEXT, name))[0] != END:
                name = answer[0][1:].decode()
                if answer[1] is None:
                    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
                found[name] = answer[1]
            if not self._has_joined:
                for name, descriptor in found.items():
                    HeldFiles.hold(self, name, descriptor)
        finally:
            for descriptor in found.values():
                os.close(descriptor)
        return set(found)

    def _ask(self, sign: bytes, name: str, *files: int) -> None:
        if self._socket is not None:
            try:
                self._exchange(sign, name, *files)
            except OSError as error:
                log.error("a restart of the agent loses the steps of this node until a new shim runs: %s", error)
                self._hang_up()

    def _exchange(self, sign: bytes, name: str, *files: int) -> tuple[bytes, int | None]:
        assert self._socket is not None
        socket.send_fds(self._socket, [sign + name.encode()], files)
        packet, received, _, _ = socket.recv_fds(self._socket, _PACKET_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        if not packet:
            raise ConnectionResetError(errno.ECONNRESET, "the shim has closed the connection for files")
        return packet, received[0] if received else None

    def _hang_up(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def allow_huge_pages(setting: Path = HUGE_PAGES) -> None:
    """Let the kernel use huge pages for files that request them, unless an administrator has decided otherwise."""
    # The kernel allocates huge pages ten times as fast as normal pages.
    with contextlib.suppress(OSError):
        if "[never]" in setting.read_text():
            setting.write_text("advise")
