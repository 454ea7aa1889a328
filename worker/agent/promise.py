"""The node's promise on disk, which an agent must never lose (docs/design.md#generations).

Invariant: the file is complete and durable (temporary file, fsync, rename, fsync of the folder) before the agent sends
anything that depends on it.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from everstep.protocol.agent_messages import MemberPhase
from everstep.protocol.plan import GenerationPlan
from worker.core.generation import Membership
from worker.node.state_directory import sync, write_durably


class Promise(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A promised membership, with the facts that a restarted agent needs to resume the membership."""

    job: str
    run: str
    generation: int
    phase: MemberPhase
    plan: GenerationPlan | None = None
    key: bytes = b""
    """The generation's secret key; the file therefore has mode 0600."""
    entry_point: str = ""
    """Path of the script in the unpacked source tree."""
    version: int = 1

    @property
    def membership(self) -> Membership:
        """The promise's run, generation and phase as a `Membership` of `worker.core.generation`."""
        return Membership(self.job, self.run, self.generation, self.phase)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        return f"Promise(run={self.run}, generation={self.generation}, phase={self.phase})"


_decoder = msgspec.msgpack.Decoder(Promise)


class PromiseFile:
    """The file of the promise; only the agent uses it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> Promise | None:
        """Read the promise.

        Returns:
            The newest promise, or None if this node has never made one or has dropped it.

        Raises:
            msgspec.DecodeError: the file is damaged or of another version. An operator must check the node before it
                joins a generation.
        """
        try:
            promise = _decoder.decode(self._path.read_bytes())
        except FileNotFoundError:
            return None
        if promise.version != 1:
            raise msgspec.DecodeError(f"{self._path} has version {promise.version}")
        return promise

    def write(self, promise: Promise | None) -> None:
        """Store `promise` durably; None deletes the file.

        Raises OSError if the disk refuses the write. The earlier promise then stays valid.
        """
        if promise is not None:
            write_durably(self._path, msgspec.msgpack.encode(promise))
        else:
            self._path.unlink(missing_ok=True)
            sync(self._path.parent)
