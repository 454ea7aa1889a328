"""Executes the commands of the control plane, one after another.

Commands to halt ranks and confirmations of stored values do not wait in the queue. Invariant: a command for a
generation other than the promised one changes nothing on this node.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from everstep.protocol.agent_messages import (
    HaltRanks,
    HoldSnapshot,
    KeepEvidence,
    KeepSources,
    KillForDrill,
    Load,
    MetricsStored,
    PeerCertificate,
    Prepare,
    ReadSnapshot,
    Rehearse,
    Release,
    ReleaseSnapshot,
    RunBurnIn,
    RunCommand,
    SendLines,
    Start,
    StopTraining,
    TakeCheckpoint,
    TakeStacks,
)
from everstep.protocol.codec import Message
from everstep.protocol.ids import Generation, Rank, RunId
from worker.agent.burn_in import BurnInRunner
from worker.agent.departure import Departure
from worker.agent.inspection import RankInspection
from worker.agent.lifecycle import Lifecycle
from worker.agent.lines import RankLogLines
from worker.agent.own_log import Evidence
from worker.agent.snapshot_requests import SnapshotRequests
from worker.agent.sources import SourcePrefetch
from worker.core.generation import Membership, is_current
from worker.core.metric_outbox import MetricOutbox
from worker.ranks.supervisor import Supervisor
from worker.replication.coordinator import RoundServer
from worker.replication.identity import PeerIdentity

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _OutputsStored:
    """Command that the agent queues for itself when it no longer waits for the uploads of a released run."""

    membership: Membership


@dataclass(eq=False, repr=False)
class Commands:
    """Queues the commands of the control plane, and passes each command to the part of the agent that executes it.

    `agent_id` is the random name of this agent process; confirmations for another process are ignored. `on_change` is
    called after each command that can change the report.
    """

    agent_id: str
    lifecycle: Lifecycle
    departure: Departure
    _: KW_ONLY
    supervisor: Supervisor
    inspection: RankInspection
    snapshots: SnapshotRequests
    lines: RankLogLines
    sources: SourcePrefetch
    burn_in: BurnInRunner
    evidence: Evidence
    outbox: MetricOutbox
    identity: PeerIdentity
    on_change: Callable[[], None]

    def __post_init__(self) -> None:
        self._queue: asyncio.Queue[Message | _OutputsStored] = asyncio.Queue()

    def take(self, command: Message) -> None:
        """Queue a command of the control plane, or execute it immediately if it must not wait. Must not block."""
        match command:
            case HaltRanks(run=run, generation=generation):
                if self._is_current(run, generation):
                    self.supervisor.halt_now(run, generation)
                    if (rounds := self._rounds) is not None:
                        rounds.halt()
                self._queue.put_nowait(command)
            case MetricsStored(agent_id=agent_id, next_number=number):
                if agent_id == self.agent_id:
                    self.outbox.confirm(number)
            case _:
                self._queue.put_nowait(command)

    async def run(self) -> None:
        """Execute the control plane's commands one after another, until cancelled."""
        while True:
            await self._execute(await self._queue.get())

    async def _execute(self, command: Message | _OutputsStored) -> None:
        match command:
            case Prepare():
                if self.lifecycle.must_promise(command) and await self.departure.release_other(command.run):
                    self.sources.stop()
                    await self.burn_in.stop()
                    await self.lifecycle.prepare(command)
            case Load(plan=plan, key=key):
                self.lifecycle.load(plan, key)
            case Start(run=run, generation=generation) if self._is_current(run, generation):
                await self.lifecycle.start()
            case Release():
                await self.departure.begin(command, then=lambda left: self._queue.put_nowait(_OutputsStored(left)))
            case _OutputsStored(membership=membership):
                await self.departure.finish(membership)
            case StopTraining(run=run, generation=generation) if self._is_current(run, generation):
                if (rounds := self._rounds) is not None:
                    rounds.request_stop()
            case TakeCheckpoint(run=run, generation=generation, step=step) if self._is_current(run, generation):
                if (rounds := self._rounds) is not None:
                    rounds.request_checkpoint(step, ends_exports=command.ends_exports)
            case Rehearse(run=run, generation=generation) if self._is_current(run, generation):
                if (rounds := self._rounds) is not None:
                    rounds.request_rehearsal(command.number, command.steps)
            case KillForDrill(run=run, generation=generation) if self._is_current(run, generation):
                self._kill(run, generation, command.rank, command.drill)
            case TakeStacks(run=run, generation=generation, number=number) if self._is_current(run, generation):
                if (member := self.lifecycle.member) is not None:
                    self.inspection.sample_stacks(member.plan, member.here, number)
            case RunCommand(run=run, generation=generation):
                self.inspection.run_command(command, is_current=self._is_current(run, generation))
                return
            case HoldSnapshot() | ReadSnapshot() | ReleaseSnapshot():
                is_current = self._is_current(command.run, command.generation)
                self.snapshots.take(command, self.lifecycle.member if is_current else None)
                return
            case SendLines(run=run):
                if run == self.lifecycle.promise.run:
                    self.lines.follow()
                return
            case KeepEvidence(place=place):
                await self.evidence.keep(place)
            case PeerCertificate():
                # Write the certificate to disk in a thread, so that a slow disk does not stop the event loop.
                await asyncio.to_thread(self.identity.accept, command)
                return
            case KeepSources(sources=sources):
                # Only a node without a job fetches source archives in advance.
                if self.lifecycle.promise.value is None:
                    await self.sources.want(sources)
            case RunBurnIn():
                if self.lifecycle.promise.value is None:
                    await self.burn_in.start(command)
            case _:
                log.debug("%s ignored: it is not for this node's promised generation", type(command).__name__)
        # After a release, values that the run logged must not delay those of the node's next run.
        self.outbox.leave_earlier(self.lifecycle.promise.run)
        self.on_change()

    def _is_current(self, run: RunId, generation: Generation) -> bool:
        return is_current(self.lifecycle.promise.membership, run, generation)

    @property
    def _rounds(self) -> RoundServer | None:
        return self.lifecycle.member.server if self.lifecycle.member is not None else None

    def _kill(self, run: RunId, generation: Generation, rank: Rank | None, drill: str) -> None:
        log.warning("drill %s: killing %s", drill, "this agent" if rank is None else f"rank {rank}")
        if rank is None:
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            self.supervisor.kill_rank(run, generation, rank)
