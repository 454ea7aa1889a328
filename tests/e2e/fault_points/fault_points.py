"""Moments at which an agent or a rank of the cluster under test dies, or stands still, each once, when a test has armed
it.

    <folder>/<moment> @ <who>              armed: the instance of an agent, or `rank <r>`; holds the signal's number
    <folder>/<moment> @ <who> was <pid>    fired: that process has renamed it and sends itself the signal

Product code knows nothing of this. `install` wraps a few functions of it while their modules are imported; an armed
moment costs a rename, one that is not a rename that fails. Standard library only: every Python of an instance loads
this.
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
"""Names the folder.

Without our prefix, so that ranks inherit it from their node as they do any variable of the machine's.
"""


class Moment(StrEnum):
    """What a process is in the middle of when it dies. An agent's, unless it says otherwise."""

    CAPTURE = "capture"
    """A rank has copied half of its tensors in the background."""
    SEAL_OWN = "seal own"
    """A snapshot of a rank of this node is digested; its header still says WRITING."""
    SEAL_REPLICA = "seal replica"
    """The same of a shard that came from another node."""
    REPLICA_SENT = "replica sent"
    """The first chunk of a shard has left for its holder."""
    REPLICA_RECEIVED = "replica received"
    """The first chunk of a shard has arrived at its holder."""
    VOTE = "vote"
    """All holders have acknowledged, the page says so, the coordinator has not heard it."""
    COMMIT = "commit"
    """The coordinator has heard the last vote, and nobody has heard of the commit."""
    PROMISED = "promised"
    """The promise is on disk, and nothing that it implies has been done."""
    VERIFIED = "verified"
    """A shard of the base was found whole in an own slot; the next one has not been looked at."""
    BASE_SENT = "fetch sent"
    """The first chunk of a base has left for the node that lacks it."""
    BASE_RECEIVED = "fetch received"
    """The first chunk of a base has arrived at a node that lacks it."""
    LOADED = "loaded"
    """That the base is there is on disk, and has not been reported."""
    RUNNING = "running"
    """That ranks are to run is on disk; none has been asked for."""
    STARTED = "started"
    """The first of this node's ranks has been asked for."""


def arm(folder: Path, moment: Moment, who: str, strike: signal.Signals = signal.SIGKILL) -> Path:
    """Let `who` send itself a signal when it next comes to `moment`; returns the armed file."""
    armed = folder / f"{moment} @ {who}"
    scratch = folder / f"new {armed.name}"
    scratch.write_text(str(int(strike)))
    return scratch.rename(armed)


def fired(armed: Path) -> list[int]:
    """Return the pids of those who were struck by it."""
    return [int(path.name.rpartition(" was ")[2]) for path in armed.parent.glob(f"{armed.name} was *")]


def die(moment: Moment) -> None:
    """Die, or stand still, if this moment of this process is armed."""
    who = os.environ.get("EVERSTEP_INSTANCE_ID") or f"rank {os.environ.get('RANK')}"
    armed = Path(os.environ[VARIABLE]) / f"{moment} @ {who}"
    try:
        fired = armed.rename(f"{armed} was {os.getpid()}")
    except FileNotFoundError:
        return
    os.kill(os.getpid(), int(fired.read_text()))


# -- what is wrapped --------------------------------------------------------------------------------------------------


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
            die(Moment.SEAL_OWN if _is_ours(self.path) else Moment.SEAL_REPLICA)
        write_header(self, header)

    module.SlotFile.write_header = written


def _is_ours(slot: Path) -> bool:
    """A rank has a page beside its slots on its own node only."""
    return slot.with_suffix(".word").exists()


def _transfers(module: Any) -> None:
    """The first chunk that has left, the first that has come: the kind of session is that of the task which began the
    transfer.
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
        moment = sent[kind.get()]  # asked here: what follows is called by a thread that is no part of this task
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
"""By module: what wraps it as soon as it is there, before anybody else can have imported a name of it."""


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
    """Wrap what this process will import."""
    sys.meta_path.insert(0, _Finder())
