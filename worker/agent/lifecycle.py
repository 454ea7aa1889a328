"""Executes the phases of each generation on this node: promise, load, start, and watch for exits of the ranks.

    Prepare ─▶ promise ─▶ Load ─▶ load ─▶ Start ─▶ start ─▶ exits of all ranks
                  ▲ a higher Prepare, from any phase

Before the agent acts, it writes the new phase to the promise on disk, so that a restarted agent resumes it.

Invariant: this node never acts on a generation below the promised one, and works for at most one generation at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from everstep.protocol.agent_messages import (
    EndedRanks,
    ExitClass,
    FaultCode,
    MemberPhase,
    NodeFault,
    PageCommit,
    Prepare,
    RankExit,
)
from everstep.protocol.ids import Rank, RunId
from everstep.protocol.limits import cut
from everstep.protocol.plan import GenerationPlan, SlotRecord
from worker.agent.inspection import RankInspection
from worker.agent.lines import RankLogLines
from worker.agent.outputs import EndedOutputs
from worker.agent.promise import CurrentPromise, Promise
from worker.agent.settings import AgentSettings
from worker.agent.store_patience import fault_of, patiently
from worker.core.generation import MemberAnswer, MemberEvent, Membership, answer_prepare, may_load
from worker.core.task_limit import refused_task
from worker.errors import LoadFailed, RanksNotGone
from worker.logs.outputs import RankOutputs
from worker.member.member import LocalNode, Member
from worker.node.full_disks import FullDisks
from worker.node.rank_user import user_of
from worker.provisioning.supplies import Supplies, wait_for_start
from worker.ranks.environment import Supplied
from worker.ranks.server import RankServer
from worker.ranks.supervisor import Supervisor
from worker.shm.store import SlotStore
from worker.tasks import end, together

log = logging.getLogger(__name__)
RECHECK_SECONDS: Final = 1.0
"""Time between two attempts to end the processes of an older generation."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Remains:
    """Data that older generations left on this node, read after the end of all their ranks."""

    inventory: tuple[SlotRecord, ...] = ()
    ended: EndedRanks | None = None
    commits: tuple[PageCommit, ...] = ()
    """Newest committed step of each older generation, read from the rank pages."""

    @classmethod
    def of(cls, store: SlotStore) -> Remains:
        """Read what older generations have left in the slots and on the rank pages of `store`."""
        return cls(store.inventory(), store.ended_ranks(), store.page_commits())


@dataclass(eq=False, repr=False)
class Lifecycle:
    """Prepares, starts and ends the node's part of the promised generation. `on_change` triggers a report."""

    settings: AgentSettings
    node: LocalNode
    promise: CurrentPromise
    _: KW_ONLY
    supervisor: Supervisor
    ranks: RankServer
    supplies: Supplies
    rank_outputs: RankOutputs
    lines: RankLogLines
    outputs: EndedOutputs
    inspection: RankInspection
    full_disks: FullDisks
    on_change: Callable[[], None]

    def __post_init__(self) -> None:
        self.member: Member | None = None
        """This node's part in the generation whose ranks it runs; None between generations."""
        self.is_unsettled = False
        """True while ranks of older generations may still run. The agent then reports no part in any generation."""
        self.remains = Remains()
        self.exits: dict[Rank, RankExit] = {}
        self.faults: tuple[NodeFault, ...] = ()
        self.load_seconds = 0.0
        self.supplied: Supplied | None = None
        """Environment and packages of the ranks. None before the load, and after a restart of the agent."""
        self._working: asyncio.Task[None] | None = None
        """Background work of the current phase: the load, or the watch until all ranks have exited."""
        self._stored: Member | None = None
        """The member whose ranks' output is completely uploaded; None before that."""

    async def resume(self) -> None:
        """Resume the generation of the promise on disk, in the phase that an earlier agent process stored there.

        If that is impossible, the node ends its ranks, promises the same generation again and reports a fault. If this
        is impossible as well, or the promise is damaged, the node gives up the run. Raises OSError if the disk does not
        let the agent read the promise.
        """
        try:
            promise = self.promise.resume()
        except msgspec.DecodeError as error:
            await self._discard(error)
            return
        if promise is None:
            return
        try:
            await self._resume(promise)
        except Exception as error:  # Whatever the state on disk or in memory contains, the agent must connect.
            log.exception("generation %d cannot be resumed, and is promised again", promise.generation)
            try:
                await self._promise_again(promise)
            except Exception as again:
                await self._discard(again)
            else:
                self._report_unresumed(error)

    async def _promise_again(self, promise: Promise) -> None:
        promised = Promise(job=promise.job, run=promise.run, generation=promise.generation, phase=MemberPhase.PROMISED)
        if not self.promise.store(promised):
            self.promise.set(promised)
        self.node.store.close()
        await self._fulfil(promised.membership)

    async def _discard(self, error: Exception) -> None:
        """Give up the promise. The node keeps the memory of its slots until it works for another run."""
        log.error("the work of the earlier agent process is given up", exc_info=error)
        await self.supervisor.stop_all()
        self.promise.discard()
        self.node.store.close()
        self.member, self.is_unsettled = None, False
        self._report_unresumed(error)

    def _report_unresumed(self, error: Exception) -> None:
        self.fault("agent_error", f"the work of the earlier agent process cannot be resumed: {error!r}")

    async def _resume(self, promise: Promise) -> None:
        log.info("resuming run %s generation %d in phase %s", promise.run, promise.generation, promise.phase)
        self.node.store.open_run(promise.membership.job, promise.membership.run)
        match promise.phase:
            case MemberPhase.PROMISED | MemberPhase.LOAD_FAILED:
                await self._fulfil(promise.membership)
            case MemberPhase.LOADING | MemberPhase.LOADED if promise.plan is not None:
                self.promise.set(msgspec.structs.replace(promise, phase=MemberPhase.LOADING))
                self._begin_load(promise.plan, promise.key)
            case MemberPhase.RUNNING | MemberPhase.EXITED if promise.plan is not None:
                self.member = Member(self.node, promise.plan, promise.key, on_change=self.on_change)
                self.member.adopt()
                self._open_to_ranks(self.member)
                self.member.begin_rounds(is_restarted=True)
                await self.supplies.adopt(promise.plan, promise.key)
                await self._run_ranks(promise, self.member)

    def must_promise(self, command: Prepare) -> bool:
        """Return whether the node must promise the generation that a Prepare command names."""
        answer = answer_prepare(self.promise.membership, command.run, command.generation)
        if answer is not MemberAnswer.PROMISE:
            log.debug("Prepare of generation %d: %s", command.generation, answer)
        return answer is MemberAnswer.PROMISE

    async def prepare(self, command: Prepare) -> None:
        """Promise to join the generation of a Prepare command. If the disk refuses a write, promise nothing."""
        log.info("promise generation %d of job %s", command.generation, command.job)
        promise = Promise(job=command.job, run=command.run, generation=command.generation, phase=MemberPhase.PROMISED)
        self.is_unsettled = True
        if self._has_user(command.run) and self.promise.store(promise):
            await self._fulfil(promise.membership)
        else:
            self.is_unsettled = False

    def _has_user(self, run: RunId) -> bool:
        """Assign a Linux user to the run's ranks. Return False if the disk refuses to store the assignment."""
        try:
            user_of(run, self.settings.state, self.settings.rank_user)
        except OSError as error:  # `FullDisks` records the error, and the agent reports it.
            self.full_disks.note(error)
            log.warning("the user of run %s cannot be stored on disk: %s", run, error)
            return False
        return True

    async def _fulfil(self, membership: Membership) -> None:
        """End all ranks of older generations, as the new promise requires, and list what they left on this node."""
        self.is_unsettled = True
        self.faults = ()
        await self.end_member()
        if await self.has_ended(membership.run):
            self._settle(membership)
        else:
            self._begin(self._await_end(membership))

    async def has_ended(self, run: RunId) -> bool:
        """Return whether no process of a run's ranks exists. Otherwise report the fault RANKS_NOT_GONE until then."""
        try:
            await self.supervisor.prove_gone(run)
        except RanksNotGone as error:
            log.warning("%s", error)
            self.faults = ()
            self.fault(FaultCode.RANKS_NOT_GONE, str(error))
            return False
        self.faults = ()
        return True

    async def _await_end(self, membership: Membership) -> None:
        # The kernel does not end a process before it has written its dirty pages and freed its memory, which takes
        # minutes after some scripts. The node is sound, so it keeps no promise meanwhile, and reports no worse fault.
        has_ended = False
        while not has_ended:
            await asyncio.sleep(RECHECK_SECONDS)
            has_ended = await self.has_ended(membership.run)
        self._settle(membership)
        self.on_change()

    def _settle(self, membership: Membership) -> None:
        self.node.store.open_run(membership.job, membership.run)
        self.remains = Remains.of(self.node.store)
        self.exits = {}
        self.is_unsettled = False
        log.info("generation %d promised: %d sealed slots", membership.generation, len(self.remains.inventory))

    def load(self, plan: GenerationPlan, key: bytes) -> None:
        """Begin to start the ranks of the promised generation of `plan`, and to load their shards. Idempotent."""
        if not may_load(self.promise.membership, plan.run, plan.generation):
            log.debug("Load of generation %d ignored: it is not for this node's promised generation", plan.generation)
            return
        phase = MemberPhase.LOADING
        if self.promise.store(
            Promise(job=plan.job, run=plan.run, generation=plan.generation, phase=phase, plan=plan, key=key)
        ):
            self._begin_load(plan, key)

    def _begin_load(self, plan: GenerationPlan, key: bytes) -> None:
        for rank in list(self.node.store.shards):
            self.node.store.settle_copiers(rank)
        self.member = Member(self.node, plan, key, on_change=self.on_change)
        self._begin(self._load_member(self.member))

    async def _load_member(self, member: Member) -> None:
        """Start the ranks and load their shards in parallel. Watch the ranks until their training starts."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        watching: asyncio.Task[None] | None = None
        try:
            entry = await self._patiently(lambda: member.open(has_ranks=self._has_ranks(member)))
            assert self.promise.value is not None
            promise = msgspec.structs.replace(self.promise.value, entry_point=str(entry))
            self.promise.set(promise)
            self._open_to_ranks(member)

            async def supply_ranks() -> None:
                nonlocal watching
                self.supplied = await self._patiently(
                    lambda: self.supplies.gather(member.plan, promise.key, member.here, entry)
                )
                if not wait_for_start(member.plan):
                    member.status.begin_clocks()
                    await self._start_ranks(promise, member, self.supplied)
                watching = asyncio.create_task(self._watch_exits(promise, member), name="exits before the start")

            await together(supply_ranks(), self._patiently(member.base.load))
            assert watching is not None
            self.load_seconds = loop.time() - begun
            self._finish(MemberEvent.LOADED)
            log.info(
                "generation %d loaded in %.3f s: base step %d",
                member.plan.generation,
                self.load_seconds,
                member.plan.base_step,
            )
            await watching
        except LoadFailed as error:
            log.warning("generation %d cannot be loaded: %s", member.plan.generation, error)
            self.full_disks.note(error)
            if error.code == FaultCode.DISK_FULL:
                self.full_disks.note_words(str(error))
            self.faults = (*self.faults, fault_of(error))
            self._finish(MemberEvent.LOAD_FAILED)
        finally:
            await end(watching)

    async def _patiently(self, load: Callable[[], Awaitable[T]]) -> T:
        reported: NodeFault | None = None

        def report(fault: NodeFault | None) -> None:
            nonlocal reported
            others = tuple(each for each in self.faults if each is not reported)
            self.faults, reported = (others if fault is None else (*others, fault)), fault
            self.on_change()

        return await patiently(load, self.node.objects, report)

    def _has_ranks(self, member: Member) -> bool:
        key = (member.plan.run, member.plan.generation)
        return any((record.run, record.generation) == key and record.end is None for record in self.supervisor.records)

    def _open_to_ranks(self, member: Member) -> None:
        """Accept connections from the ranks of this generation only, and begin to upload their log lines."""
        user = user_of(member.plan.run, self.settings.state, self.settings.rank_user)
        self.ranks.admit(member.lines, user)
        self.lines.begin(member.plan, member.here)

    async def start(self) -> None:
        """Start the training of a loaded generation: begin to vote on commits of steps, and watch the ranks."""
        promise, member = self.promise.value, self.member
        if promise is None or member is None or promise.phase is not MemberPhase.LOADED:
            return
        if not self.promise.begin(MemberEvent.START):
            return
        await end(self._working)
        member.begin_rounds(is_restarted=False)
        await self._run_ranks(self.promise.value or promise, member)

    async def _run_ranks(self, promise: Promise, member: Member) -> None:
        if promise.phase is MemberPhase.RUNNING:
            unborn = set(member.here.ranks) - {
                key.rank
                for key in self.supervisor.records
                if (key.run, key.generation) == (promise.run, promise.generation)
            }
            supplied = self.supplied or Supplied()
            try:
                if unborn and self.supplied is None:
                    supplied = await self.supplies.gather(
                        member.plan, promise.key, member.here, Path(promise.entry_point)
                    )
            except (LoadFailed, OSError) as error:
                self.full_disks.note(error)
                for rank in sorted(unborn):
                    self.supervisor.fail_rank(member.plan, rank, str(error))
            else:
                if unborn:
                    member.status.begin_clocks()
                await self._start_ranks(promise, member, supplied)
        self._begin(self._watch(promise, member))

    async def _start_ranks(self, promise: Promise, member: Member, supplied: Supplied) -> None:
        entry = Path(promise.entry_point)
        for rank in member.here.ranks:
            await self.supervisor.start_rank(
                member.plan, member.here, rank, entry, agent_socket=self.ranks.path, supplied=supplied
            )

    async def _watch(self, promise: Promise, member: Member) -> None:
        """Report each rank's exit immediately, then upload the output of all ranks and enter the phase EXITED."""
        await self._watch_exits(promise, member)
        await member.uploads.idle()
        unshipped = await self.lines.finish()
        await asyncio.to_thread(self.rank_outputs.take_source, member.plan)
        unstored = await self.rank_outputs.upload_all(member.plan, member.here)
        for missing in unshipped:
            member.lines.faults.report("output_missing", missing)
        for output, words in unstored:
            member.lines.faults.report("output_missing", words, output=output)
        self._stored = None if unshipped or unstored else member
        if self.promise.value is not None and self.promise.value.phase is MemberPhase.RUNNING:
            self._finish(MemberEvent.EXITED)

    async def _watch_exits(self, promise: Promise, member: Member) -> None:
        while len(self.exits) < len(member.here.ranks):
            exited = await self.supervisor.next_exit(
                promise.membership.run, promise.membership.generation, seen=set(self.exits)
            )
            boundary = next(status.boundary for status in member.status.rank_statuses() if status.rank == exited.rank)
            found = self.exits[exited.rank] = exited.describe(boundary)
            if found.exit_class is ExitClass.ERROR:
                # A full disk may have prevented the rank's start or a write of its script.
                self.full_disks.note_words(found.last_lines)
                if refused := refused_task(found.last_lines):
                    self.fault(FaultCode.TASKS_FULL, f"rank {exited.rank}: {refused}")
            log.info("rank %d: %s, code %d, after step %d", exited.rank, found.exit_class, found.code, boundary)
            self.on_change()

    async def end_member(self) -> None:
        """End the current generation's ranks, sessions and uploads. Output is uploaded in the background."""
        await end(self._working)
        self._working = None
        await self.inspection.close()
        self.ranks.refuse()
        self.supplied = None
        await self.supervisor.stop_all()
        await self.supplies.withdraw()
        member, self.member = self.member, None
        if member is not None:
            await member.close()
            is_stored, self._stored = self._stored is member, None
            await asyncio.to_thread(self.rank_outputs.take_source, member.plan)
            self.outputs.store(member, self.lines.hand_over(), is_stored=is_stored)

    def forget(self) -> None:
        """Discard the remaining data, rank exits and faults of a run from which this node was released."""
        self.remains, self.exits, self.faults = Remains(), {}, ()
        self.outputs.forget()
        self.is_unsettled = False

    async def end_work(self) -> None:
        """Cancel the background task of the current phase. Called when the agent ends."""
        await end(self._working)

    async def detach(self) -> None:
        """Close the connections of this process. The ranks and slots remain for the next agent process."""
        if self.member is not None:
            await self.member.detach()

    @property
    def reported_faults(self) -> tuple[NodeFault, ...]:
        """The faults of the generation, and the outputs of the run's ended generations that are not in S3."""
        return (*self.faults, *self.outputs.faults)

    def fault(self, code: str, message: str) -> None:
        """Report a fault of this node that is not permanent: a later generation may succeed on this node."""
        self.faults = (*self.faults, NodeFault(code=code, message=cut(message), is_permanent=False))
        self.on_change()

    def _finish(self, event: MemberEvent) -> None:
        self.promise.finish(event)
        self.on_change()

    def _begin(self, work: Coroutine[object, object, None]) -> None:
        self._working = asyncio.create_task(work, name="member")
        self._working.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Report an unexpected exception of a background task, because the control plane would wait for this node."""
        if task.cancelled() or task.exception() is None:
            return
        error = task.exception()
        assert error is not None
        log.error("the node's work for its generation failed: %r", error, exc_info=error)
        fault = self.full_disks.note(error) or NodeFault(
            code="agent_error", message=cut(repr(error)), is_permanent=False
        )
        self.faults = (*self.faults, fault)
        if self.promise.value is not None and self.promise.value.phase is MemberPhase.LOADING:
            # The control plane waits for the end of every load, so report the load as failed.
            self._finish(MemberEvent.LOAD_FAILED)
        else:
            self.on_change()
