"""Lets an agent or a rank of the cluster under test kill or stop itself at a chosen point of its work.

A *moment* is such a point, for example the receipt of the last vote (`Moment`). `who` is the process that the signal
ends or stops: an agent, named by its instance id, or `rank <r>`. A test *arms* a moment for one process: it creates a
file that contains the number of the signal. When the process reaches the moment, it renames the file and sends itself
the signal. The moment has then *fired*. It fires once.

    <folder>/<moment> @ <who>              armed
    <folder>/<moment> @ <who> was <pid>    fired

The product contains no code for this. `install` wraps some of the product's functions while their modules are imported.
At each moment, a wrapped function tries to rename the file, which fails if no test has armed the moment. This module
uses only the standard library, because every Python process of an instance loads it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import Any

VARIABLE = "FAULT_POINTS"
"""Environment variable with the path of the folder in which tests arm moments.

Everstep passes the machine's variables to ranks, except those with its own prefix. This name therefore lacks the
prefix.
"""


class Moment(StrEnum):
    """Points in a step or a recovery at which a process can receive a signal.

    For CAPTURE, the process is a rank. Otherwise, it is an agent.
    """

    CAPTURE = "capture"
    """A rank has copied half of its tensors to its slot in the background."""
    SEAL_OWN = "seal own"
    """An agent has computed the digest of its own rank's snapshot. The slot's header still says WRITING."""
    SEAL_REPLICA = "seal replica"
    """An agent has computed the digest of another node's shard that it holds. The slot's header still says WRITING."""
    REPLICA_SENT = "replica sent"
    """The owner's node has sent the first chunk of a shard to its holder."""
    REPLICA_RECEIVED = "replica received"
    """The holder has received the first chunk of a shard."""
    VOTE = "vote"
    """All holders of a shard have acknowledged the step.

    The owner's agent has not yet sent its vote to the coordinator.
    """
    COMMIT = "commit"
    """The coordinator has received the last vote, and has not yet announced the commit."""
    PROMISED = "promised"
    """The promise to join a new generation is on disk. The agent has not acted on it yet."""
    VERIFIED = "verified"
    """The agent has verified one slot of the step to restore, and has not started to verify the next slot."""
    BASE_SENT = "fetch sent"
    """A node has sent the first chunk of a restored shard to the node that lacks it."""
    BASE_RECEIVED = "fetch received"
    """The node that lacks a shard of the step to restore has received the shard's first chunk."""
    LOADED = "loaded"
    """The phase "loaded" is on disk, and the agent has not reported it yet."""
    RUNNING = "running"
    """The phase "running" is on disk, and the agent has not started any rank yet."""
    STARTED = "started"
    """The agent has requested the start of the first rank on this node."""


def arm(folder: Path, moment: Moment, who: str, strike: signal.Signals = signal.SIGKILL) -> Path:
    """Make the process `who` send itself the signal `strike` when it next reaches `moment`. Return the armed file."""
    armed = folder / f"{moment} @ {who}"
    scratch = folder / f"new {armed.name}"
    scratch.write_text(str(int(strike)))
    return scratch.rename(armed)


def fired(armed: Path) -> list[int]:
    """Return the pids of the processes that have renamed the armed file, and so send themselves the signal."""
    return [int(path.name.rpartition(" was ")[2]) for path in armed.parent.glob(f"{armed.name} was *")]


def die(moment: Moment) -> None:
    """Send this process a signal if a test has requested one for this process at this moment (armed it)."""
    who = os.environ.get("EVERSTEP_INSTANCE_ID") or f"rank {os.environ.get('RANK')}"
    armed = Path(os.environ[VARIABLE]) / f"{moment} @ {who}"
    try:
        fired = armed.rename(f"{armed} was {os.getpid()}")
    except FileNotFoundError:
        return
    os.kill(os.getpid(), int(fired.read_text()))


# -- wrapped functions ------------------------------------------------------------------------------------------------


def _capture(module: Any) -> None:
    copy = module.CpuCopier.copy

    def copied(self: Any, copies: Any) -> None:
        half = len(copies.sources) // 2
        if half and threading.current_thread() is not threading.main_thread():
            copy(self, module.Copies(copies.sources[:half], copies.targets[:half]))
            die(Moment.CAPTURE)
        copy(self, copies)

    module.CpuCopier.copy = copied


def _slots(module: Any) -> None:
    write_header = module.SlotFile.write_header

    def written(self: Any, header: Any) -> None:
        if header.state is module.SlotState.SEALED:
            # The page of a rank of this node has the name of the rank's slots.
            is_ours = f"{self.name.rpartition('.')[0]}.word" in self._files
            die(Moment.SEAL_OWN if is_ours else Moment.SEAL_REPLICA)
        write_header(self, header)

    module.SlotFile.write_header = written


def _transfers(module: Any) -> None:
    """Wrap the functions that send and receive the first chunk of a shard.

    The context of the task that started the transfer shows whether the shard is a replica or is being restored.
    """
    send_shard, receive_shard, send_chunks = module.send_shard, module.receive_shard, module.send_chunks
    incoming = module.IncomingShard
    begin, land = incoming.__init__, incoming.land
    sent = {"replica": Moment.REPLICA_SENT, "fetch": Moment.BASE_SENT}
    received = {"replica": Moment.REPLICA_RECEIVED, "fetch": Moment.BASE_RECEIVED}
    kind: ContextVar[str] = ContextVar("kind")

    async def sending(session: Any, *rest: Any, **named: Any) -> Any:
        kind.set(session.opened.kind)
        return await send_shard(session, *rest, **named)

    async def receiving(session: Any, *rest: Any, **named: Any) -> Any:
        kind.set(session.opened.kind)
        return await receive_shard(session, *rest, **named)

    async def chunks_sent(streams: Any, source: Any, transfer: Any, queue: Any, **named: Any) -> None:
        # read the kind of the session (replica or fetch) here: `one_has_left` runs later in a thread, whose context has
        # another value
        moment = sent[kind.get()]
        taken = queue.taken

        def one_has_left(size: int) -> bool:
            die(moment)
            return taken(size)  # type: ignore[no-any-return]

        queue.taken = one_has_left
        await send_chunks(streams, source, transfer, queue, **named)

    def begun(self: Any, *rest: Any, **named: Any) -> None:
        self.kind = kind.get()
        begin(self, *rest, **named)

    def landed(self: Any, *rest: Any, **named: Any) -> None:
        die(received[self.kind])
        land(self, *rest, **named)

    module.send_shard, module.receive_shard, module.send_chunks = sending, receiving, chunks_sent
    incoming.__init__, incoming.land = begun, landed


def _votes(module: Any) -> None:
    round_of = module.OwnedShard.round

    def told(self: Any) -> Any:
        state = round_of(self)
        if state.vote is module.Vote.ACKED:
            die(Moment.VOTE)
        return state

    module.OwnedShard.round = told


def _commits(module: Any) -> None:
    report = module.Coordinator.report

    def heard(self: Any, *rounds: Any) -> Any:
        after = report(self, *rounds)
        if after.committed > self.committed:
            die(Moment.COMMIT)
        return after

    module.Coordinator.report = heard


def _promises(module: Any) -> None:
    write = module.PromiseFile.write
    moments = {"promised": Moment.PROMISED, "loaded": Moment.LOADED, "running": Moment.RUNNING}

    def kept(self: Any, promise: Any) -> None:
        write(self, promise)
        if promise is not None and promise.phase.value in moments:
            die(moments[promise.phase.value])

    module.PromiseFile.write = kept


def _bases(module: Any) -> None:
    verify = module.SlotStore.verify

    async def verified(self: Any, slot: Any, **named: Any) -> Any:
        answer = await verify(self, slot, **named)
        die(Moment.VERIFIED)
        return answer

    module.SlotStore.verify = verified


def _starts(module: Any) -> None:
    start_rank = module.Supervisor.start_rank

    async def started(self: Any, *arguments: Any, **named: Any) -> None:
        await start_rank(self, *arguments, **named)
        die(Moment.STARTED)

    module.Supervisor.start_rank = started


WRAPPED: dict[str, Callable[[ModuleType], None]] = {
    "everstep.training.copier": _capture,
    "worker.shm.slot_file": _slots,
    "worker.shm.store": _bases,
    "worker.replication.transfers": _transfers,
    "worker.shards.owned_shard": _votes,
    "worker.core.rounds": _commits,
    "worker.agent.promise": _promises,
    "worker.ranks.supervisor": _starts,
}
"""Functions that wrap functions of the product, by the name of the product's module.

A module's functions are wrapped before another module can import them.
"""


class _Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        WRAPPED[module.__name__](module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in WRAPPED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(name, spec.origin)
        return spec


def install() -> None:
    """Wrap the modules that this process imports later."""
    sys.meta_path.insert(0, _Finder())
