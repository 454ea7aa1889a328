"""Ensures that an agent uses only its own node's state directory, which may come from an image of another node.

    <state>/node_id            the owner
    <state>/shim.lock          locked by the shim that serves the directory, for its whole lifetime

Invariant: an agent reads only its own node's state. The new owner's id is written last. Until then, the old owner's id
shows that files of the old node may remain.
"""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path
from typing import Final

from everstep.protocol.ids import NodeId
from worker.errors import ShimUnavailable
from worker.node.file_trees import remove_tree
from worker.node.rank_user import RankUser, clear

log = logging.getLogger(__name__)
OWNER: Final = "node_id"
SHIM_LOCK: Final = "shim.lock"
BELONGINGS: Final = (
    *("promise*", "session_token*", "peer_identity*", "peer_port*", "credentials_port*"),
    *("ranks/*", "logs/*", "outputs/*", "homes/*", "sources/*", "inputs/runs/*"),
)
"""Files and folders that belong to one node. Any node can use cached inputs and installed packages."""


def take(state: Path, node_id: NodeId, user: RankUser | None = None) -> None:
    """Delete the state of another node from the state directory, with its ranks' files elsewhere. Idempotent.

    The agent calls this once, before it reads any state. Raises ShimUnavailable, without a deletion, if the shim of
    another node on the same machine runs. Raises OSError if files cannot be deleted; the next call continues.
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
            "%s belonged to %s, probably because of a machine image: its files are deleted, and this node joins again",
            state,
            whose,
        )
    try:
        write_durably(path, mine)
    except OSError as error:
        if theirs:
            # `OWNER` still names the old node. The next start of the agent would therefore delete all files that this
            # agent writes, the promise included.
            raise
        log.warning("the owner of %s cannot be written yet: %s", state, error)


def write_durably(path: Path, content: bytes) -> None:
    """Write a file atomically and durably, with mode 0600. Raises OSError, and leaves the earlier file."""
    scratch = path.with_suffix(".new")
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)
    sync(path.parent)


def sync(folder: Path) -> None:
    """Flush the entries of a folder to disk, so that they survive a power loss."""
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
                f"{state} belongs to {whose}, whose shim still runs: this node needs its own state directory"
            ) from None
        for belonging in [path for pattern in BELONGINGS for path in state.glob(pattern)]:
            remove_tree(belonging)
        sync(state)
