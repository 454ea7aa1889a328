"""Ensures that an agent uses only its own node's state directory.

A machine image that was created from a node contains the node's state directory. On a new instance, this directory
still belongs to the old node.

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
"""Files and folders of the state directory that belong to one node.

Cached inputs and installed packages are not in the list, because any node can use them.
"""


def take(state: Path, node_id: NodeId, user: RankUser | None = None) -> None:
    """Check that the state directory belongs to this node, and delete the state of another node.

    The agent calls this function once, before it reads any state. Idempotent.

    Args:
        state: the agent's state directory; its file `OWNER` names the node.
        node_id: this node's id.
        user: the Linux user or users of the ranks; their files outside the directory are also deleted.

    Raises:
        ShimUnavailable: another node on the same machine, as in the local cloud, uses the directory: its shim runs. No
            file is deleted.
        OSError: files of another node cannot be deleted; the next call continues.
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
    """Write a file atomically and durably, with mode 0600.

    Args:
        path: the file; the temporary file has the suffix `.new`.
        content: the whole new content of the file.

    Raises:
        OSError: the disk refuses the write; the earlier file is unchanged.
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
    """Flush the entries of a folder to disk, so that they survive a power loss.

    Args:
        folder: a folder in which a file was created, renamed or removed.
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
                f"{state} belongs to {whose}, whose shim still runs: this node needs its own state directory"
            ) from None
        for belonging in [path for pattern in BELONGINGS for path in state.glob(pattern)]:
            remove_tree(belonging)
        sync(state)
