"""Stores the node's promise on disk (docs/design.md#generations).

Invariant: the file is complete and durable (temporary file, fsync, rename, fsync of the folder) before the agent sends
anything that depends on it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from everstep.protocol.agent_messages import MemberPhase
from everstep.protocol.ids import RunId
from everstep.protocol.plan import GenerationPlan
from worker.core.generation import MemberEvent, Membership
from worker.node.full_disks import FullDisks
from worker.node.state_directory import sync, write_durably

log = logging.getLogger(__name__)


class Promise(msgspec.Struct, frozen=True, kw_only=True):
    """The generation that the node has promised to join, with the facts that a restarted agent needs to resume."""

    job: str
    run: str
    generation: int
    phase: MemberPhase
    plan: GenerationPlan | None = None
    key: bytes = b""
    entry_point: str = ""
    """Path of the script in the unpacked source tree."""
    version: int = 1

    @property
    def membership(self) -> Membership:
        """The promise's run, generation and phase."""
        return Membership(self.job, self.run, self.generation, self.phase)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        return f"Promise(run={self.run}, generation={self.generation}, phase={self.phase})"


_decoder = msgspec.msgpack.Decoder(Promise)


class PromiseFile:
    """Reads and writes the file that stores the node's `Promise`. Only the agent uses it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> Promise | None:
        """Read the promise; None without a file. Raises DecodeError of msgspec if it is invalid."""
        try:
            promise = _decoder.decode(self._path.read_bytes())
        except FileNotFoundError:
            return None
        if promise.version != 1:
            raise msgspec.DecodeError(f"{self._path} has version {promise.version}")
        return promise

    def write(self, promise: Promise | None) -> None:
        """Write `promise` durably; None deletes the file. Raises OSError, and the previous promise stays valid."""
        if promise is not None:
            write_durably(self._path, msgspec.msgpack.encode(promise))
        else:
            self._path.unlink(missing_ok=True)
            sync(self._path.parent)

    def put_aside(self) -> None:
        """Rename the file to `promise.unreadable`, for an operator. Without a file, nothing happens."""
        with contextlib.suppress(OSError):
            self._path.replace(self._path.with_suffix(".unreadable"))


class CurrentPromise:
    """The newest promise of this node. Only the agent's `Lifecycle` and `Departure` change it.

    Invariant: when an agent restarts, the phase on disk is at most one phase behind that of the previous process.
    """

    def __init__(self, file: PromiseFile, full_disks: FullDisks, *, on_run: Callable[[RunId], None]) -> None:
        self.value: Promise | None = None
        """None before the first promise and after a run's release."""
        self._file = file
        self._full_disks = full_disks
        self._on_run = on_run
        self._refusal = ""
        """The last logged reason why the disk refused a write; empty after a successful write."""

    @property
    def membership(self) -> Membership | None:
        """Run, number and phase of the promised generation; None without a promise."""
        return self.value.membership if self.value is not None else None

    @property
    def run(self) -> RunId | None:
        """Run of the promised generation; None without a promise."""
        return RunId(self.value.run) if self.value is not None else None

    def resume(self) -> Promise | None:
        """Read the promise that an earlier agent process of this node wrote to disk. Return None without a promise."""
        promise = self._file.read()
        if promise is not None:
            self.set(promise)
        return promise

    def discard(self) -> None:
        """Put the file of a promise aside that this agent cannot fulfil, as `promise.unreadable`."""
        self.value = None
        self._file.put_aside()

    def set(self, promise: Promise) -> None:
        """Change the promise in memory, without writing it to disk."""
        self.value = promise
        self._on_run(RunId(promise.run))

    def store(self, promise: Promise) -> bool:
        """Write a promise to disk, then make it current. Return False, without a change, if the disk refuses."""
        try:
            self._file.write(promise)
        except OSError as error:  # `FullDisks` records the error, and the agent reports it.
            self._full_disks.note(error)
            words = f"phase {promise.phase} of generation {promise.generation} cannot be written to disk: {error}"
            if words != self._refusal:
                log.warning("%s", words)
            self._refusal = words
            return False
        self._refusal = ""
        self.set(promise)
        return True

    def begin(self, event: MemberEvent) -> bool:
        """Store the phase that follows `event`, then enter it. Return False, without a change, if the disk refuses."""
        return self.store(self._after(event))

    def finish(self, event: MemberEvent) -> None:
        """Enter the phase that follows `event`, even if the disk cannot store it."""
        # If the write failed, a restarted agent repeats the previous phase and reaches the same outcome.
        promise = self._after(event)
        if not self.store(promise):
            self.set(promise)

    def _after(self, event: MemberEvent) -> Promise:
        assert self.value is not None
        return msgspec.structs.replace(self.value, phase=self.value.membership.on(event).phase)

    def lapse(self) -> None:
        """Remove the plan and the key from the promise on disk, so that no later agent process can resume the run."""
        if self.value is None:
            return
        lapsed = msgspec.structs.replace(self.value, phase=MemberPhase.PROMISED, plan=None, key=b"", entry_point="")
        try:
            self._file.write(lapsed)
        except OSError as error:
            # Raise nothing: the caller then deletes the files of the run, which can free space on a full disk.
            log.warning(
                "run %s is released, but its promise on disk still has phase %s: %s",
                lapsed.run,
                self.value.phase,
                error,
            )

    def drop(self, run: RunId) -> None:
        """Delete this node's promise for `run`, after the control plane has released the node from the run."""
        try:
            self._file.write(None)
        except OSError as error:
            # `lapse` has removed the plan, so a restarted agent starts no ranks. The control plane sends Release again.
            self._full_disks.note(error)
            log.warning("run %s is released, but its promise cannot be deleted from disk: %s", run, error)
        self.value = None
