"""Tests that the shim keeps an agent's memory for the next agent process."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.corruption.outcomes import hold
from worker.node.unix_socket import listen_private
from worker.shm.held_files import FORGET, HOLD, NEXT, AgentFiles, HeldFiles, allow_huge_pages, create_file, seal


@contextlib.contextmanager
def shim_at(path: Path, held: HeldFiles) -> Iterator[None]:
    """Serve files as the shim does. At the end, the shim has died."""
    connections: list[socket.socket] = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                connections.append(connection)
                while held.answer(connection):
                    pass

    with listen_private(path, socket.SOCK_SEQPACKET) as listener:
        listener.setblocking(True)
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            for line in (*connections, listener):
                with contextlib.suppress(OSError):
                    line.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in connections:
                connection.close()


def contents(files: HeldFiles) -> dict[str, bytes]:
    return {name: os.pread(files.descriptor(name), 100, 0) for name in files.names()}


def test_the_next_agent_finds_the_files_of_the_one_before(tmp_path: Path) -> None:
    path, kept = tmp_path / "files.sock", HeldFiles()
    with shim_at(path, kept):
        agent = AgentFiles(path)
        agent.join()
        for name in ("run/a", "run/b", "run/c"):
            hold(agent, name, name.encode())
        hold(agent, "run/b", b"newer")
        agent.forget("run/c")
        with mmap.mmap(agent.descriptor("run/a"), 5) as mapped:
            agent.close()
            following = AgentFiles(path)
            following.join()
            mapped[:1] = b"R"
        assert contents(following) == {"run/a": b"Run/a", "run/b": b"newer"}, "the same memory"
        following.close()
    kept.close()


def test_a_new_shim_gets_the_files_of_the_agent_and_keeps_no_others(tmp_path: Path) -> None:
    path, agent, second = tmp_path / "files.sock", AgentFiles(tmp_path / "files.sock"), HeldFiles()
    with shim_at(path, HeldFiles()):
        agent.join()
        hold(agent, "run/a", b"a")
    hold(agent, "run/b", b"b")  # no shim answers
    hold(second, "run/old", b"old")
    with shim_at(path, second):
        agent.join()
        assert contents(second) == contents(agent) == {"run/a": b"a", "run/b": b"b"}
    agent.close()
    second.close()


def test_an_agent_that_cannot_read_the_files_of_the_one_before_drops_none(tmp_path: Path) -> None:
    path, kept = tmp_path / "files.sock", HeldFiles()
    hold(kept, "run/a", b"a")
    agent = AgentFiles(path)
    with listen_private(path, socket.SOCK_SEQPACKET) as failing:
        failing.setblocking(True)
        thread = threading.Thread(target=lambda: failing.accept()[0].close())
        thread.start()
        with pytest.raises(OSError, match=r"closed the connection|reset|pipe"):
            agent.join()
        thread.join()
    with shim_at(path, kept):
        agent.join()
        assert contents(agent) == contents(kept) == {"run/a": b"a"}
    agent.close()
    kept.close()


@pytest.mark.security
@pytest.mark.parametrize("packet", [b"", b"x", HOLD + b"no descriptor", b"\xff" * 400])
def test_a_malformed_packet_ends_the_connection_alone(packet: bytes) -> None:
    held = HeldFiles()
    hold(held, "run/a", b"a")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        theirs.send(packet)
        assert not held.answer(ours)
    assert held.names() == ["run/a"]
    held.close()


def test_a_list_goes_on_after_the_last_name_and_names_may_be_gone(tmp_path: Path) -> None:
    held = HeldFiles()
    hold(held, "run/b", b"b")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        for sent, answer in ((NEXT + b"run/a", HOLD + b"run/b"), (NEXT + b"run/b", b"."), (FORGET + b"run/x", FORGET)):
            theirs.send(sent)
            assert held.answer(ours)
            packet, files, _, _ = socket.recv_fds(theirs, 100, 1)
            assert packet == answer
            for file in files:
                os.close(file)
    held.close()


def test_a_name_without_a_file_leads_to_nothing_that_can_be_mapped() -> None:
    held = HeldFiles()
    with pytest.raises(OSError, match="No such device"):
        mmap.mmap(held.descriptor("run/a"), 4096)
    held.close()


@pytest.mark.security
def test_a_sealed_file_keeps_its_seals() -> None:
    descriptor = create_file("run/a", 4096)
    seal(descriptor)
    with pytest.raises(PermissionError):
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    os.close(descriptor)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("always within_size advise [never] deny force\n", "advise"),
        ("always within_size advise never [deny] force\n", "always within_size advise never [deny] force\n"),
        ("[always] within_size advise never deny force\n", "[always] within_size advise never deny force\n"),
    ],
)
def test_huge_pages_are_allowed_unless_somebody_has_decided(tmp_path: Path, before: str, after: str) -> None:
    setting = tmp_path / "shmem_enabled"
    setting.write_text(before)
    allow_huge_pages(setting)
    allow_huge_pages(tmp_path / "none")
    assert setting.read_text() == after
