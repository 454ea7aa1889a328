"""Whose the agent's state directory is: an image that is made of a node takes it along, and it is still that other node's.

    <state>/node_id            whose
    <state>/shim.lock          held by the shim that serves the directory, for as long as it lives

Invariant: whatever an agent reads of the directory is its own node's. The name is written last: while anything of
another node is here, it says so.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from pathlib import Path
from typing import Final

from everstep.protocol.ids import NodeId
from worker.errors import ShimUnavailable
from worker.node.rank_user import RankUser, clear

log = logging.getLogger(__name__)
OWNER: Final = "node_id"
SHIM_LOCK: Final = "shim.lock"
BELONGINGS: Final = (
    *("promise*", "session_token*", "peer_port*", "credentials_port*"),
    *("ranks/*", "logs/*", "outputs/*", "homes/*", "sources/*", "inputs/runs/*"),
)
"""What is a node's own. Objects of inputs and layers of packages are what their names say, on any node: they stay."""


def take(state: Path, node_id: NodeId, user: RankUser | None = None) -> None:
    """Make a state directory this node's. The agent calls it once, before it reads anything of it; again does nothing.

    What belongs to another node is dropped. A directory that does not say whose it is was always this node's.

    Args:
        state: the directory.
        node_id: this node.
        user: that ranks run as; what that user has left elsewhere goes, too.

    Raises:
        ShimUnavailable: it is another node's, whose shim lives on this very machine; nothing is dropped.
        OSError: what belongs to another node cannot be dropped; the next call goes on with it.
    """
    path, mine = state / OWNER, node_id.encode()
    theirs = path.read_bytes() if path.exists() else b""
    if theirs == mine:
        return
    if theirs:
        whose = theirs.decode(errors="replace")
        _drop(state, whose)
        if user is not None:
            clear(user)
        log.warning(
            "%s was that of %s, as in an image made of it: what belongs to that node is dropped, this one joins anew",
            state,
            whose,
        )
    try:
        write_durably(path, mine)
    except OSError as error:
        if theirs:
            raise  # the next agent would drop what this one is about to promise
        log.warning("%s cannot say yet that it is this node's: %s", state, error)


def write_durably(path: Path, content: bytes) -> None:
    """Put a file in place, whole and durable when this returns, mode 0600.

    Args:
        path: the file; what is written aside has the suffix `.new`.
        content: all of it.

    Raises:
        OSError: the disk does not take it; the file before it stands.
    """
    scratch = path.with_suffix(".new")
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)
    sync(path.parent)


def sync(folder: Path) -> None:
    """Make durable which files a folder has.

    Args:
        folder: that something was made in, renamed in or removed from.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _drop(state: Path, whose: str) -> None:
    with open(os.open(state / SHIM_LOCK, os.O_RDWR | os.O_CREAT, 0o600), "rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ShimUnavailable(
                f"{state} is that of {whose}, whose shim lives: this node needs a directory of its own"
            ) from None
        for belonging in [path for pattern in BELONGINGS for path in state.glob(pattern)]:
            _remove(belonging)
        sync(state)


def _remove(path: Path) -> None:
    """Remove a file, or a tree of folders that may not be written to."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
        return
    os.chmod(path, 0o700)
    for parent, folders, _ in os.walk(path):  # each is opened before it is walked into
        for folder in folders:
            if not (inner := Path(parent, folder)).is_symlink():
                os.chmod(inner, 0o700)
    shutil.rmtree(path)
