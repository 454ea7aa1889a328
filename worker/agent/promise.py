"""What this node has promised, on disk: the one thing that an agent must not forget (docs/design.md#generations).

Invariant: the file is whole and durable (written aside, fsynced, renamed, folder fsynced) before anything that depends
on it is said.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from everstep.protocol.agent_messages import MemberPhase
from everstep.protocol.plan import GenerationPlan
from worker.core.generation import Membership
from worker.node.state_directory import sync, write_durably


class Promise(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A membership, and what a restarted agent needs to take it up again."""

    job: str
    run: str
    generation: int
    phase: MemberPhase
    plan: GenerationPlan | None = None
    key: bytes = b""
    """The generation's key: the file has mode 0600."""
    entry_point: str = ""
    """Of the unpacked source tree."""
    version: int = 1

    @property
    def membership(self) -> Membership:
        """The membership as the core knows it."""
        return Membership(self.job, self.run, self.generation, self.phase)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        return f"Promise(run={self.run}, generation={self.generation}, phase={self.phase})"


_decoder = msgspec.msgpack.Decoder(Promise)


class PromiseFile:
    """One owner: the agent."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> Promise | None:
        """Return what is promised, or None.

        Returns:
            The newest promise, or None when this node has never made one or has forgotten it.

        Raises:
            msgspec.DecodeError: the file is not ours or of another version: a person must look before this node joins
                anything.
        """
        try:
            promise = _decoder.decode(self._path.read_bytes())
        except FileNotFoundError:
            return None
        if promise.version != 1:
            raise msgspec.DecodeError(f"{self._path} has version {promise.version}")
        return promise

    def write(self, promise: Promise | None) -> None:
        """Make `promise` durable; None forgets it.

        Args:
            promise: the newest.

        Raises:
            OSError: the disk does not take it; the one before it stands.
        """
        if promise is not None:
            write_durably(self._path, msgspec.msgpack.encode(promise))
        else:
            self._path.unlink(missing_ok=True)
            sync(self._path.parent)
