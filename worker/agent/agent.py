"""The agent of a node: connection to the control plane, promise, and the member that serves the promised generation.

The agent handles the commands of the control plane one after another. It first writes the promise to disk (`promise`),
then executes the command (`member`, `supervisor`), then reports the result.

Invariant: every fact in a report is true when the report is sent. The agent never acts on a generation below the
promised one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import signal
import ssl
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec

from everstep import __version__
from everstep.protocol.agent_messages import (
    SEND_LINES_SECONDS,
    AgentReport,
    EndedRanks,
    ExitClass,
    FaultCode,
    HaltRanks,
    Hello,
    KeepEvidence,
    KeepSources,
    KillForDrill,
    Load,
    LogLines,
    MemberPhase,
    MemberReport,
    MetricsStored,
    NodeFault,
    NodeMemory,
    PageCommit,
    Prepare,
    RankExit,
    RankMemory,
    Release,
    RunCommand,
    SendLines,
    Start,
    StopTraining,
    TakeCheckpoint,
    TakeStacks,
)
from everstep.protocol.codec import Message
from everstep.protocol.ids import Generation, NodeId, Rank, RunId
from everstep.protocol.log_records import LogFormat
from everstep.protocol.plan import GenerationPlan, ObjectReference, SlotRecord, SourceArchive, Timeouts
from worker.agent.attestation import Claim, join
from worker.agent.control_client import ControlClient
from worker.agent.own_log import OwnLog
from worker.agent.prometheus import AgentFacts, MetricsEndpoint, snapshot_seconds
from worker.agent.promise import Promise, PromiseFile
from worker.core.generation import Answer, Event, Membership, answer_prepare, is_current
from worker.core.line_tails import Tail
from worker.core.metric_outbox import MetricOutbox
from worker.core.own_metrics import NodeUsage
from worker.errors import LoadFailed, RanksNotGone, SourceRefused, StorageError
from worker.logs.uploads import LogShipper, RankLogs
from worker.member.member import Member, Node
from worker.node import metadata_rule
from worker.node.full_disks import FullDisks
from worker.node.health.watch import HealthWatch
from worker.node.instance_metadata import InstanceMetadata
from worker.node.network_cards import card_of, network_cards
from worker.node.rank_user import RankUser, clear, end_processes, user_of
from worker.node.stable_port import KeptPort
from worker.node.state_directory import take
from worker.provisioning.source import SourceArchives
from worker.provisioning.supplies import Supplies, wait_for_start
from worker.ranks.commands import RankCommands
from worker.ranks.environment import Supplied, inherited_as, node_environment
from worker.ranks.files import home_of, make_home
from worker.ranks.server import RankServer
from worker.ranks.shim.messages import RankRecord
from worker.ranks.stacks import StackWatch
from worker.ranks.supervisor import Supervisor
from worker.replication.tcp import PeerListener
from worker.shm.numa import gpu_nodes
from worker.shm.store import SlotStore
from worker.storage.aws import Aws
from worker.storage.object_store import ObjectStore
from worker.tasks import Signal, end, together

log = logging.getLogger(__name__)
LEAVING_SECONDS = 30.0
"""Maximum seconds for which a node that another job needs still uploads output of its previous job."""
LOOK_SECONDS = 1.0
"""Seconds between two checks of the progress of uploads."""


@dataclass(frozen=True, slots=True)
class _Left:
    """Internal command: the output of a finished run is uploaded, or permanently abandoned.

    The agent queues this command for itself.
    """

    membership: Membership


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """Settings of an agent: its node, its addresses, its folders and its limits."""

    node_id: NodeId
    address: str
    state: Path
    slots: Path
    """Folder on tmpfs for this node's slots and rank pages. No other node uses the folder."""
    memory_bytes: int
    control_plane_urls: tuple[str, ...]
    """URLs of the control plane's servers, one of which serves this node's fleet."""
    join_token: str
    peer_port: int = 0
    is_warm: bool = True
    """True if the shim keeps a template process from which ranks are forked."""
    tls: ssl.SSLContext | None = None
    """Context that verifies the control plane's certificate; None uses the system's certificates."""
    claim: Claim | None = None
    """Identity with which this instance obtains a session token. None if the agent joins with a join token."""
    input_bytes: int | None = None
    """Disk space for job inputs, including those kept for later jobs; None means the disk's size minus a reserve."""
    log_format: LogFormat = "text"
    metrics_address: tuple[str, int] | None = None
    """Address and port of the Prometheus endpoint; None for no endpoint."""
    rank_user: RankUser | None = None
    """Users that ranks run as; None means the agent's own user."""
    allows_builds: bool = False
    """True if pip may build those of a job's requirements that have no wheel."""
    exposure: str = ""
    """Sentence that names what a job's code can reach on this node beyond its own job; empty for nothing.

    The agent determines it when it starts.
    """
    metadata_endpoint: str | None = None
    """URL of the instance's metadata service. None if the service is disabled or the machine is not an EC2 instance."""


class Agent:
    """The agent of one node; `run` lasts for the lifetime of the process."""

    def __init__(
        self,
        settings: AgentSettings,
        objects: ObjectStore,
        aws: Aws,
        supervisor: Supervisor,
        *,
        now: Callable[[], float],
        health: HealthWatch | None = None,
        own_log: OwnLog | None = None,
    ) -> None:
        """Claim the state directory and create the agent's parts. `run` opens the connections and sockets.

        Args:
            settings: settings from the command line and environment, valid until the agent ends.
            objects: the object store (S3).
            aws: other AWS services, with the node's permissions.
            supervisor: the interface to this node's ranks; the agent starts and closes it.
            now: returns Unix time, used for timestamps that users see.
            health: the watch over this node's devices; the agent starts and closes it. None means that devices are not
                watched.
            own_log: this process's log in memory, for the diagnosis of a failed node; None creates an empty one.

        Raises:
            ShimUnavailable: the state directory belongs to another node whose shim runs on this machine.
            OSError: the state directory belongs to another node, and that node's files cannot be removed.
        """
        take(settings.state, settings.node_id, settings.rank_user)
        self._settings = settings
        self._objects = objects
        self._health = health
        self._own_log = own_log or OwnLog()
        self._evidence_key = ""
        self._full_disks = FullDisks(settings.state)
        self._agent_id = secrets.token_hex(8)
        self._promises = PromiseFile(settings.state / "promise")
        self._store = SlotStore(settings.slots, memory_bytes=settings.memory_bytes, user=settings.rank_user)
        self._listener = PeerListener(settings.node_id)
        self._ranks = RankServer(settings.slots / "ranks.sock", settings.rank_user)
        self._supervisor = supervisor
        self._logs = RankLogs(settings.state, objects, settings.rank_user)
        self._outbox = MetricOutbox()
        self._archives = SourceArchives(settings.state / "sources" / "archives", objects)
        self._wanted_sources: tuple[SourceArchive, ...] = ()
        self._sources_asked = Signal()
        self._unsound_sources: set[str] = set()
        self._snapshot_seconds = snapshot_seconds()
        self._node = Node(
            settings.node_id,
            settings.address,
            settings.state,
            self._store,
            self._listener,
            objects,
            now,
            self._outbox,
            self._archives,
            settings.rank_user,
            self._usage,
            gpu_nodes(),
            self._snapshot_seconds.observe,
            self._printed,
        )
        self._supplies = Supplies(
            settings.state,
            objects,
            aws,
            now=now,
            input_bytes=settings.input_bytes,
            user=settings.rank_user,
            allows_builds=settings.allows_builds,
        )
        self._metadata = (
            InstanceMetadata(settings.metadata_endpoint, self._changed) if settings.metadata_endpoint else None
        )
        self._control = ControlClient(
            settings.control_plane_urls,
            join_token=settings.join_token,
            token_path=settings.state / "session_token",
            attest=partial(join, claim=settings.claim, tls=settings.tls) if settings.claim is not None else None,
            tls=settings.tls,
            hello=self._hello,
            report=self._report,
            command=self._take,
            welcomed=self._welcomed,
        )
        self._rank_commands = RankCommands(self._beside_ranks, self._control.send_answer, self._user_of)
        self._reported: AgentReport | None = None
        """The last report that the agent sent; None before the first report."""
        self._commands: asyncio.Queue[Message | _Left] = asyncio.Queue()
        self._promise: Promise | None = None
        self._unkept = ""
        """The last logged reason why the disk refused to store a promise; empty after a successful write."""
        self._promising: tuple[RunId, int] | None = None
        self._inventory: tuple[SlotRecord, ...] = ()
        self._ended_ranks: EndedRanks | None = None
        self._commits: tuple[PageCommit, ...] = ()
        """Newest committed steps on the ranks' pages, read when the promise is made. Valid in phase PROMISED."""
        self._member: Member | None = None
        self._supplied: Supplied | None = None
        """Environment and packages of the loaded generation's ranks.

        None before the load, and after a restart of the agent.
        """
        self._exits: dict[Rank, RankExit] = {}
        self._stacks: StackWatch | None = None
        """Stack samples of the running ranks; created at the control plane's first request."""
        self._faults: tuple[NodeFault, ...] = ()
        self._load_seconds = 0.0
        self._exposure = settings.exposure
        self._sequence = 0
        self._working: asyncio.Task[None] | None = None
        """Background work of the current phase: the load, or the watch until all ranks have exited."""
        self._shipper: LogShipper | None = None
        """Log shipper of the generation whose ranks were started last."""
        self._followed_until = 0.0
        """Monotonic time until which a user follows the ranks' log lines."""
        self._leaving: set[asyncio.Task[object]] = set()
        """Tasks that upload the output of ended generations.

        A new generation of the same run does not wait for them.
        """
        self._letting_go: asyncio.Task[None] | None = None
        self._all_stored: Member | None = None
        """The member whose ranks' output was uploaded completely. None if the upload failed or has not finished."""

    async def run(self) -> None:
        """Run the agent until the task is cancelled.

        The next agent process adopts the ranks, the slots and the promise.
        """
        settings = self._settings
        self._listen()
        await self._ranks.start()
        await self._supervisor.start()
        at = self._settings.metrics_address
        metrics = MetricsEndpoint(*at, self._facts, self._snapshot_seconds) if at is not None else None
        if self._health is not None:
            loop = asyncio.get_running_loop()
            self._health.start(lambda: self._health_changed(loop))
        try:
            await self._resume()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._control.run(), name="control line")
                tasks.create_task(self._obey(), name="commands")
                tasks.create_task(self._tell_warm(), name="warm start")
                tasks.create_task(self._fetch_sources(), name="sources")
                if settings.rank_user is not None and metadata_rule.is_covered(settings.metadata_endpoint):
                    tasks.create_task(
                        metadata_rule.keep_on(settings.rank_user, self._exposure, self._exposed), name="metadata rule"
                    )
                if self._metadata is not None:
                    tasks.create_task(self._metadata.run(), name="instance metadata")
        finally:
            await end(self._working, self._letting_go, *self._leaving)
            await self._rank_commands.close()
            if self._shipper is not None:
                await self._shipper.close()
            if self._stacks is not None:
                await self._stacks.close()
            if self._member is not None:
                await self._member.detach()
            await self._ranks.close()
            await self._supplies.close()
            await self._listener.close()
            await self._supervisor.close()
            if self._health is not None:
                await asyncio.to_thread(self._health.close)
            if metrics is not None:
                await asyncio.to_thread(metrics.close)
            self._store.close()

    def _listen(self) -> None:
        """Listen for peers at the port of this node's earlier agent.

        The plan of a running generation contains that port.
        """
        address, kept = self._settings.address, KeptPort(self._settings.state / "peer_port")
        _, *more_cards = network_cards(address)
        port = self._settings.peer_port or kept.read()
        try:
            self._listener.start(address, port, more_cards=more_cards)
        except OSError as error:
            if port == self._settings.peer_port:
                raise
            log.warning(
                "port %d of the agent before this one is taken, peers of a running generation will not find "
                "this node: %s",
                port,
                error,
            )
            self._listener.start(address, more_cards=more_cards)
        kept.keep(self._listener.port)

    # -- after a restart

    async def _resume(self) -> None:
        """Resume the promised membership of an earlier agent process on this node."""
        promise = self._promises.read()
        if promise is None:
            return
        log.info("taking up run %s generation %d, %s", promise.run, promise.generation, promise.phase)
        self._know(promise)
        self._store.open_run(promise.membership.job, promise.membership.run)
        match promise.phase:
            case MemberPhase.PROMISED | MemberPhase.LOAD_FAILED:
                await self._fulfil(promise.membership)
            case MemberPhase.LOADING | MemberPhase.LOADED if promise.plan is not None:
                self._know(msgspec.structs.replace(promise, phase=MemberPhase.LOADING))
                self._begin_load(promise.plan, promise.key)
            case MemberPhase.RUNNING | MemberPhase.EXITED if promise.plan is not None:
                self._member = Member(self._node, promise.plan, promise.key, on_change=self._changed)
                self._member.adopt()
                self._serve_ranks(self._member)
                self._ship(self._member)
                self._member.begin_rounds(is_restarted=True)
                await self._supplies.adopt(promise.plan, promise.key)
                await self._run_ranks(promise, self._member)

    # -- the connection to the control plane

    def _hello(self) -> Hello:
        self._outbox.connected()
        return Hello(
            node_id=self._settings.node_id,
            agent_id=self._agent_id,
            address=self._settings.address,
            peer_port=self._listener.port,
            memory_bytes=self._settings.memory_bytes,
            version=__version__,
            run=self._promise.membership.run if self._promise is not None else None,
        )

    def _report(self) -> AgentReport:
        self._sequence += 1
        self._reported = AgentReport(
            node_id=self._settings.node_id,
            sequence=self._sequence,
            member=self._member_report(),
            metrics=self._outbox.due(time.monotonic()),
            refused_count=self._listener.refused_count + self._ranks.refused_count + self._supplies.refused_count,
            notices=self._metadata.notices if self._metadata is not None else (),
            evidence_key=self._evidence_key,
            is_warm=self._supervisor.is_warm,
            exposure=self._exposure,
            sources=tuple(sorted({*self._archives.held, *self._unsound_sources})),
            faults=self._node_faults(),
            memory=self._memory(),
        )
        return self._reported

    def _node_faults(self) -> tuple[NodeFault, ...]:
        of_health = self._health.faults() if self._health is not None else ()
        return (*of_health, *self._full_disks.faults(of_health))

    def _facts(self) -> AgentFacts:
        """Return the facts for the Prometheus endpoint.

        The endpoint calls this in another thread, so the method reads only immutable state.
        """
        return AgentFacts(self._reported, self._control.is_connected, len(self._outbox), self._outbox.dropped_count)

    def log_fields(self) -> Mapping[str, object]:
        """Return the fields of every log line of this node. Called in any thread."""
        promise = self._promise
        of_job = {} if promise is None else {"job": promise.job, "run": promise.run, "generation": promise.generation}
        return {"node": self._settings.node_id, **of_job}

    def _member_report(self) -> MemberReport | None:
        if self._promise is None or self._promising is not None:
            return None  # Until the new promise is fulfilled, the old membership is ending.
        membership, member = self._promise.membership, self._member
        if member is None:
            return MemberReport(
                job=membership.job,
                run=membership.run,
                generation=membership.generation,
                phase=membership.phase,
                inventory=self._inventory,
                ended=self._ended_ranks,
                commits=self._commits,
                faults=self._faults,
            )
        return MemberReport(
            job=membership.job,
            run=membership.run,
            generation=membership.generation,
            phase=membership.phase,
            ranks=tuple(
                msgspec.structs.replace(status, exit=self._exits.get(status.rank)) for status in member.rank_statuses()
            ),
            longest=member.longest(),
            stacks=self._stacks.shown() if self._stacks is not None else (),
            protection=member.protection(),
            silent_peers=member.silent_peers(),
            round=member.round_status(),
            uploads=tuple(member.uploads),
            faults=(*self._faults, *member.faults()),
            load_seconds=self._load_seconds,
            restored_from=member.restored_from,
            target=member.target(),
            measured=member.lines.measured,
        )

    def _changed(self) -> None:
        self._control.changed.notify()

    def _exposed(self, exposure: str) -> None:
        self._exposure = exposure
        self._changed()

    def _health_changed(self, loop: asyncio.AbstractEventLoop) -> None:
        """Send a report immediately.

        Called in the thread of the health watch, which may outlive the event loop by one reading.
        """
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(self._changed)

    def _welcomed(self, timeouts: Timeouts) -> None:
        self._supervisor.gone_seconds = timeouts.gone_seconds

    async def _tell_warm(self) -> None:
        """Send a report as soon as ranks can start warm, because the control plane prefers nodes with warm starts."""
        while not self._supervisor.is_warm:
            await self._supervisor.changed.wait(self._supervisor.changed.version)
        self._changed()

    async def _fetch_sources(self) -> None:
        """Fetch the source archives that the control plane requests on this idle node.

        A failed fetch is retried at the control plane's next request.
        """
        while True:
            version = self._sources_asked.version
            for source in self._wanted_sources:
                if source.sha256 in self._unsound_sources or source.sha256 in self._archives.held:
                    continue
                try:
                    await asyncio.to_thread(self._archives.get, source)
                except (StorageError, OSError) as error:
                    self._full_disks.note(error)
                    log.info("the source %s is not to be had ahead: %s", source.sha256[:12], error)
                except SourceRefused as error:
                    # The node has received a job, so it stops prefetching source archives.
                    if source in self._wanted_sources:
                        log.warning("a source that this node is to have ready: %s", error)
                        self._unsound_sources.add(source.sha256)
                self._changed()
            await self._sources_asked.wait(version)

    async def _want_sources(self, sources: tuple[SourceArchive, ...]) -> None:
        """Prepare the given source archives and delete all others. A node with a promise ignores the request."""
        if self._promise is not None:
            return
        self._wanted_sources = sources
        self._unsound_sources &= {source.sha256 for source in sources}
        try:
            await asyncio.to_thread(self._archives.keep, {source.sha256 for source in sources})
        except OSError as error:
            # The next request decides again about these archives.
            log.info("sources that are not wanted any more stay on this node: %s", error)
        self._sources_asked.notify()

    # -- commands

    def _take(self, command: Message) -> None:
        """Queue a command of the control plane.

        A halt of ranks takes effect immediately, without the queue. A confirmation of metrics also bypasses the queue.
        """
        if isinstance(command, HaltRanks) and is_current(self._membership, command.run, command.generation):
            self._supervisor.halt_now(command.run, command.generation)
            if self._member is not None and self._member.server is not None:
                self._member.server.halt()
        if isinstance(command, MetricsStored):
            if command.agent_id == self._agent_id:
                self._outbox.confirm(command.next_number)
            return
        self._commands.put_nowait(command)

    @property
    def _membership(self) -> Membership | None:
        return self._promise.membership if self._promise is not None else None

    async def _obey(self) -> None:
        while True:
            command = await self._commands.get()
            match command:
                case Prepare():
                    await self._prepare(command)
                case Release():
                    await self._let_go(command.run)
                case _Left(membership=membership):
                    if membership == self._membership:
                        await self._release(RunId(membership.run), wait_seconds=0.0)
                case KeepEvidence(place=place):
                    await self._keep_evidence(place)
                case KeepSources(sources=sources):
                    await self._want_sources(sources)
                case Load(plan=plan, key=key):
                    await self._load(plan, key)
                case SendLines(run=run):
                    if self._promise is not None and self._promise.run == run:
                        self._be_followed()
                    continue
                case Start(run=run, generation=generation) if is_current(self._membership, run, generation):
                    await self._start()
                case StopTraining(run=run, generation=generation) if is_current(self._membership, run, generation):
                    if self._member is not None and self._member.server is not None:
                        self._member.server.request_stop()
                case TakeCheckpoint(run=run, generation=generation, step=step) if is_current(
                    self._membership, run, generation
                ):
                    if self._member is not None and self._member.server is not None:
                        self._member.server.request_checkpoint(step)
                case KillForDrill(run=run, generation=generation, rank=rank, drill=drill) if is_current(
                    self._membership, run, generation
                ):
                    log.warning("drill %s: killing %s", drill, "this agent" if rank is None else f"rank {rank}")
                    if rank is None:
                        os.kill(os.getpid(), signal.SIGKILL)
                    else:
                        self._supervisor.kill_rank(run, generation, rank)
                case RunCommand():
                    self._run_command(command)
                    continue
                case TakeStacks(run=run, generation=generation, number=number) if is_current(
                    self._membership, run, generation
                ):
                    self._look(run, generation, number)
                case _:
                    log.debug("%s is not for what this node has promised", type(command).__name__)
            self._changed()

    def _look(self, run: RunId, generation: Generation, number: int) -> None:
        """Sample the stacks of the ranks. The next reports contain the result."""
        member = self._member
        if member is None:
            return

        def known() -> list[RankRecord]:
            return [
                record for record in self._supervisor.records if (record.run, record.generation) == (run, generation)
            ]

        self._stacks = self._stacks or StackWatch(
            lambda: [record for record in known() if record.end is None],
            on_change=self._changed,
            monotonic=time.monotonic,
            gpu_percent=partial(self._gpu_percent, member),
            unborn=lambda: set(member.here.ranks) - {record.rank for record in known()},
        )
        self._stacks.ask(number)

    def _run_command(self, command: RunCommand) -> None:
        """Run a command beside a rank; it is refused if that rank does not run here."""
        if not is_current(self._membership, command.run, command.generation):
            self._rank_commands.take(command, None)
            return
        key = (command.run, command.generation, command.rank)
        living = (
            record
            for record in self._supervisor.records
            if (record.run, record.generation, record.rank) == key and record.end is None
        )
        self._rank_commands.take(command, next(living, None))

    def _beside_ranks(self, run: RunId) -> dict[str, str]:
        """Return the inherited environment of commands that run beside a run's ranks."""
        user, inherited = self._user_of(run), node_environment(os.environ, card_of(self._settings.address))
        return inherited_as(make_home(self._settings.state, run, user) if user is not None else {}, inherited)

    def _user_of(self, run: RunId) -> RankUser | None:
        return user_of(run, self._settings.state, self._settings.rank_user)

    def _serve_ranks(self, member: Member) -> None:
        """Accept connections of this member's ranks, and of no others."""
        self._ranks.user = self._user_of(member.plan.run)
        self._ranks.events = member.lines

    def _usage(self) -> NodeUsage:
        """Return the use of this node's devices and the memory of its largest rank, for charts."""
        usage = self._health.usage() if self._health is not None else NodeUsage()
        largest = max((rank.resident_bytes for rank in self._rank_memory()), default=None)
        return replace(usage, rank_memory_bytes=largest)

    def _memory(self) -> NodeMemory | None:
        usage = self._health.usage() if self._health is not None else NodeUsage()
        if usage.memory_total_bytes is None or usage.memory_available_bytes is None:
            return None
        return NodeMemory(
            total_bytes=usage.memory_total_bytes,
            available_bytes=usage.memory_available_bytes,
            limit_bytes=usage.memory_limit_bytes,
            ranks=self._rank_memory(),
        )

    def _rank_memory(self) -> tuple[RankMemory, ...]:
        if self._promise is None:
            return ()
        found = self._supervisor.rank_memory(RunId(self._promise.run), Generation(self._promise.generation))
        return tuple(
            RankMemory(rank=rank, resident_bytes=each.resident_bytes, peak_bytes=each.peak_bytes)
            for rank, each in sorted(found.items())
        )

    def _gpu_percent(self, member: Member, rank: Rank) -> float | None:
        """Return the load in percent of a rank's GPU, whose index is the rank's LOCAL_RANK."""
        return self._health.gpu_percent(member.here.ranks.index(rank)) if self._health is not None else None

    async def _keep_evidence(self, place: ObjectReference) -> None:
        """Store the logs of this agent and its shim.

        If the upload fails, the control plane's next request repeats it. The ranks' streams are stored separately, at
        the latest when the agent handles Release.
        """
        if self._evidence_key == place.key:
            return
        try:
            await asyncio.to_thread(self._own_log.put, self._objects, place, self._settings.state / "logs" / "shim.log")
        except (StorageError, OSError) as error:
            log.warning("the evidence of this node is not in the store yet: %s", error)
        else:
            self._evidence_key = place.key

    async def _prepare(self, command: Prepare) -> None:
        answer = answer_prepare(self._membership, command.run, command.generation)
        if answer is not Answer.PROMISE:
            log.debug("Prepare of generation %d: %s", command.generation, answer)
            return
        if self._promise is not None and self._promise.run != command.run:
            await self._release(RunId(self._promise.run))
        log.info("promise generation %d of job %s", command.generation, command.job)
        promise = Promise(job=command.job, run=command.run, generation=command.generation, phase=MemberPhase.PROMISED)
        await end(self._letting_go)
        self._promising = (command.run, command.generation)
        self._wanted_sources = ()
        self._unsound_sources.clear()
        if self._has_user(command.run) and self._is_kept(promise):
            await self._fulfil(promise.membership)
        else:
            self._promising = None

    async def _fulfil(self, membership: Membership) -> None:
        """Fulfil a promise: end all ranks and streams of older generations, then list the remaining slots."""
        self._promising = (membership.run, membership.generation)
        await self._end_member()
        self._faults = ()
        try:
            await self._supervisor.prove_gone(membership.run)
        except RanksNotGone as error:
            self._faults = (NodeFault(code=FaultCode.RANKS_NOT_GONE, message=str(error), is_permanent=False),)
        self._store.open_run(membership.job, membership.run)
        self._inventory = self._store.inventory()
        self._ended_ranks = self._store.ended_ranks()
        self._commits = self._store.page_commits()
        self._exits = {}
        self._promising = None
        log.info("generation %d promised: %d sealed slots", membership.generation, len(self._inventory))

    async def _end_member(self) -> None:
        """End all work for the current generation. Ranks are ended first, then the member."""
        await end(self._working)
        self._working = None
        await self._rank_commands.close()
        stacks, self._stacks = self._stacks, None
        if stacks is not None:
            await stacks.close()
        self._ranks.events = None
        self._supplied = None
        await self._supervisor.stop_all()
        await self._supplies.withdraw()
        member, self._member = self._member, None
        if member is not None:
            await member.close()
            self._keep_streams(member)

    def _ship(self, member: Member) -> None:
        """Start to upload the log lines of a generation's ranks."""
        self._shipper = LogShipper(
            self._settings.state,
            self._objects,
            member.plan,
            member.here,
            now=self._node.now,
            live=self._show_lines,
            on_trouble=self._full_disks.note,
        )
        self._shipper.begin()

    def _be_followed(self) -> None:
        """Send log lines to the control plane for `SEND_LINES_SECONDS`.

        A new follower also receives lines that are not uploaded yet.
        """
        now = time.monotonic()
        is_new, self._followed_until = now >= self._followed_until, now + SEND_LINES_SECONDS
        if is_new and self._shipper is not None:
            self._shipper.show_recent()

    async def _printed(self, number: int) -> Tail:
        """Return the newest log lines of this node's ranks, which other nodes of the job also store."""
        return await self._shipper.printed(number) if self._shipper is not None else Tail()

    def _show_lines(self, lines: LogLines) -> None:
        if time.monotonic() < self._followed_until:
            self._control.send_lines(lines)

    def _keep_streams(self, member: Member) -> None:
        """Upload the streams and outputs of an ended generation in the background, then delete the local streams.

        A new generation of the same run does not wait for this upload.
        """
        shipper, self._shipper = self._shipper, None
        is_stored, self._all_stored = self._all_stored is member, None

        async def work() -> None:
            missing = await shipper.finish() if shipper is not None else ()
            missing += await member.held_lines.ship(self._objects)
            if not is_stored:
                missing += await self._logs.upload_all(member.plan, member.here)
            if not missing:
                await asyncio.to_thread(self._logs.forget_streams, member.plan)

        task: asyncio.Task[object] = asyncio.create_task(work(), name="streams of an ended generation")
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _let_go(self, run: RunId) -> None:
        """End a run's work on this node, and release the run once its output is uploaded or the uploads stall.

        Until the release, the agent reports the run, so that the node gets no other job. A repeated Release changes
        nothing.
        """
        if self._promise is not None and self._promise.run != run:
            return
        if self._letting_go is not None and not self._letting_go.done():
            return
        await self._end_member()
        if self._promise is None or not self._leaving:
            await self._release(run)
        else:
            self._letting_go = asyncio.create_task(
                self._until_left(self._promise.membership), name="what a run has left"
            )

    async def _until_left(self, membership: Membership) -> None:
        begun = self._logs.monotonic()
        while self._leaving and self._logs.is_moving(begun):
            await asyncio.wait(self._leaving, timeout=LOOK_SECONDS)
        if self._leaving:
            message = (
                f"outputs of ranks of run {membership.run} that are not in S3 are lost with their node's release: "
                "nothing has reached S3 for too long"
            )
            self._faults = (*self._faults, NodeFault(code="output_missing", message=message, is_permanent=False))
            self._changed()
        self._commands.put_nowait(_Left(membership))

    async def _release(self, run: RunId, *, wait_seconds: float = LEAVING_SECONDS) -> None:
        """Wait for the uploads of a run, then remove the run's files and processes from this node.

        The wait takes at most `wait_seconds`.
        """
        if self._promise is not None and self._promise.run != run:
            return
        log.info("release run %s", run)
        self._promising = (run, 0)
        await self._end_member()
        if self._leaving:
            await asyncio.wait(self._leaving, timeout=wait_seconds)
        if self._leaving:
            log.error("run %s is released although not all that its ranks have left is in S3: the rest is lost", run)
            for task in self._leaving:
                task.cancel()  # The upload's thread may still wait for the store, and ends without help.
        self._lapse()
        await self._store.release()
        await asyncio.to_thread(self._forget_files, run)
        await self._supplies.forget(run)
        try:
            self._promises.write(None)
        except OSError as error:
            # After a restart, the agent finds a promise without a plan, and the control plane sends Release again.
            self._full_disks.note(error)
            log.warning("run %s is released, and its promise stays on disk: %s", run, error)
        self._know(None)
        self._inventory, self._ended_ranks, self._commits, self._exits, self._faults = (), None, (), {}, ()
        self._promising = None

    def _lapse(self) -> None:
        """Remove the plan and key from the promise, so that no later agent can resume the run.

        Otherwise, if this agent is killed during the release, the next agent would start the ranks again.
        """
        if self._promise is None:
            return
        lapsed = msgspec.structs.replace(self._promise, phase=MemberPhase.PROMISED, plan=None, key=b"", entry_point="")
        try:
            self._promises.write(lapsed)
        except OSError as error:  # a full disk must not prevent the release
            log.warning("run %s is released while its promise says %s: %s", lapsed.run, self._promise.phase, error)

    def _forget_files(self, run: RunId) -> None:
        if left := end_processes(self._settings.rank_user, seconds=self._supervisor.gone_seconds):
            log.error("run %s has left what cannot be ended, and no job starts here meanwhile: %s", run, left)
        self._supervisor.forget(run)
        self._logs.forget(run)
        self._archives.keep(())
        # The pattern includes an unfinished tree of a killed agent.
        trees = (self._settings.state / "sources").glob(f"{run}*")
        for folder in (*trees, home_of(self._settings.state, run)):
            shutil.rmtree(folder, ignore_errors=True)
        if self._settings.rank_user is not None:
            clear(self._settings.rank_user)

    async def _load(self, plan: GenerationPlan, key: bytes) -> None:
        membership = self._membership
        if (
            membership is None
            or not is_current(membership, plan.run, plan.generation)
            or membership.phase is not MemberPhase.PROMISED
        ):
            log.debug("Load of generation %d is not for what this node has promised", plan.generation)
            return
        if self._is_kept(
            Promise(
                job=plan.job, run=plan.run, generation=plan.generation, phase=MemberPhase.LOADING, plan=plan, key=key
            )
        ):
            self._begin_load(plan, key)

    def _begin_load(self, plan: GenerationPlan, key: bytes) -> None:
        for rank in list(self._store.shards):
            self._store.settle_copiers(rank)
        self._member = Member(self._node, plan, key, on_change=self._changed)
        self._begin(self._load_member(self._member))

    async def _load_member(self, member: Member) -> None:
        """Start the ranks and load their shards in parallel. Watch the ranks until their training starts.

        While shards arrive, the ranks import modules, connect and build their model. Each rank copies its shard as the
        shard is verified. When training starts, the watch in `_start` replaces this watch.
        """
        loop = asyncio.get_running_loop()
        begun = loop.time()
        watching: asyncio.Task[None] | None = None
        try:
            entry = await member.open(has_ranks=self._has_ranks(member))
            assert self._promise is not None
            self._promise = promise = msgspec.structs.replace(self._promise, entry_point=str(entry))
            self._serve_ranks(member)
            self._ship(member)

            async def supply_ranks() -> None:
                nonlocal watching
                self._supplied = await self._supplies.gather(member.plan, promise.key, member.here, entry)
                if not wait_for_start(member.plan):
                    member.begin_clocks()
                    await self._start_ranks(promise, member, self._supplied)
                watching = asyncio.create_task(self._watch_exits(promise, member), name="exits before the start")

            await together(supply_ranks(), member.load())
            assert watching is not None
            self._load_seconds = loop.time() - begun
            self._move(Event.LOADED)
            log.info(
                "generation %d loaded in %.3f s: base step %d",
                member.plan.generation,
                self._load_seconds,
                member.plan.base_step,
            )
            await watching
        except LoadFailed as error:
            log.warning("generation %d cannot be loaded: %s", member.plan.generation, error)
            self._full_disks.note(error, self._settings.slots if error.code == FaultCode.MEMORY_FULL else None)
            if error.code == FaultCode.DISK_FULL:
                self._full_disks.note_words(str(error))
            self._faults = (
                *self._faults,
                NodeFault(code=error.code, message=str(error), is_permanent=error.is_permanent),
            )
            self._move(Event.LOAD_FAILED)
        finally:
            await end(watching)

    def _has_ranks(self, member: Member) -> bool:
        """Return whether ranks of the generation to load already run on this node, started by an earlier agent."""
        key = (member.plan.run, member.plan.generation)
        return any((record.run, record.generation) == key and record.end is None for record in self._supervisor.records)

    async def _start(self) -> None:
        promise, member = self._promise, self._member
        if promise is None or member is None or promise.phase is not MemberPhase.LOADED:
            return
        if not self._is_kept(_after(promise, Event.START)):
            return
        await end(self._working)
        member.begin_rounds(is_restarted=False)
        await self._run_ranks(self._promise or promise, member)

    async def _run_ranks(self, promise: Promise, member: Member) -> None:
        """Start those ranks that an earlier agent process has not started, and watch all ranks."""
        if promise.phase is MemberPhase.RUNNING:
            unborn = set(member.here.ranks) - {
                key.rank
                for key in self._supervisor.records
                if (key.run, key.generation) == (promise.run, promise.generation)
            }
            supplied = self._supplied or Supplied()
            try:
                if unborn and self._supplied is None:
                    supplied = await self._supplies.gather(
                        member.plan, promise.key, member.here, Path(promise.entry_point)
                    )
            except (LoadFailed, OSError) as error:
                self._full_disks.note(error)
                for rank in sorted(unborn):
                    self._supervisor.fail_rank(member.plan, rank, str(error))
            else:
                if unborn:
                    member.begin_clocks()
                await self._start_ranks(promise, member, supplied)
        self._begin(self._watch(promise))

    async def _start_ranks(self, promise: Promise, member: Member, supplied: Supplied) -> None:
        """Start those of this node's ranks that have not been started yet."""
        entry = Path(promise.entry_point)
        for rank in member.here.ranks:
            await self._supervisor.start_rank(
                member.plan, member.here, rank, entry, agent_socket=self._ranks.path, supplied=supplied
            )

    async def _watch(self, promise: Promise) -> None:
        """Report each rank's exit immediately.

        When all ranks have exited and their output is uploaded, the agent's phase becomes EXITED.
        """
        member = self._member
        assert member is not None
        following = asyncio.create_task(self._logs.follow(member.plan, member.here), name="streams of ranks")
        try:
            await self._watch_exits(promise, member)
        finally:
            await end(following)
        await member.uploads_done()
        unshipped = await self._shipper.finish() if self._shipper is not None else ()
        every = (*unshipped, *await self._logs.upload_all(member.plan, member.here))
        for missing in every:
            member.lines.fault("output_missing", missing, is_permanent=False)
        self._all_stored = None if every else member
        if self._promise is not None and self._promise.phase is MemberPhase.RUNNING:
            self._move(Event.EXITED)

    async def _watch_exits(self, promise: Promise, member: Member) -> None:
        while len(self._exits) < len(member.here.ranks):
            exited = await self._supervisor.next_exit(
                promise.membership.run, promise.membership.generation, seen=set(self._exits)
            )
            boundary = next(status.boundary for status in member.rank_statuses() if status.rank == exited.rank)
            self._exits[exited.rank] = exited.describe(boundary)
            if self._exits[exited.rank].exit_class is ExitClass.ERROR:
                # A full disk may have prevented the start of the rank or a write of its script.
                self._full_disks.note_words(self._exits[exited.rank].last_lines)
            log.info(
                "rank %d: %s, code %d, after step %d",
                exited.rank,
                self._exits[exited.rank].exit_class,
                self._exits[exited.rank].code,
                boundary,
            )
            self._changed()

    # -- state

    def _is_kept(self, promise: Promise) -> bool:
        """Write a promise to disk, and return whether the disk accepted the write.

        After a failure the agent's state is unchanged, and the control plane repeats its command.
        """
        try:
            self._promises.write(promise)
        except OSError as error:  # the node's health reports a full or broken disk
            self._full_disks.note(error)
            words = f"generation {promise.generation} is not {promise.phase} on disk: {error}"
            if words != self._unkept:
                log.warning("%s", words)
            self._unkept = words
            return False
        self._unkept = ""
        self._know(promise)
        return True

    def _has_user(self, run: RunId) -> bool:
        """Assign a user to the run's ranks and store the assignment.

        Return False if the disk refuses the write; the agent then makes no promise.
        """
        try:
            self._user_of(run)
        except OSError as error:  # the node's health reports a disk that is full or broken
            self._full_disks.note(error)
            log.warning("the user of run %s cannot be written: %s", run, error)
            return False
        return True

    def _know(self, promise: Promise | None) -> None:
        self._promise = promise
        if promise is not None:
            self._listener.promised_run = RunId(promise.run)

    def _move(self, event: Event) -> None:
        """Store the outcome of the current phase in the promise, and report the outcome.

        If the disk refuses the write, a restarted agent repeats the phase and reaches the same outcome.
        """
        assert self._promise is not None
        promise = _after(self._promise, event)
        if not self._is_kept(promise):
            self._know(promise)
        self._changed()

    def _begin(self, work: Coroutine[object, object, None]) -> None:
        self._working = asyncio.create_task(work, name="member")
        self._working.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Report an unexpected exception in a member's background work as a fault.

        Without the report, the control plane would mistake the failed node for a slow one.
        """
        if task.cancelled() or task.exception() is None:
            return
        error = task.exception()
        assert error is not None
        log.error("the member's work ended: %r", error, exc_info=error)
        fault = self._full_disks.note(error) or NodeFault(code="agent_error", message=repr(error), is_permanent=False)
        self._faults = (*self._faults, fault)
        if self._promise is not None and self._promise.phase is MemberPhase.LOADING:
            self._move(Event.LOAD_FAILED)  # Without this report, the generation would wait for this node forever.
        else:
            self._changed()


def _after(promise: Promise, event: Event) -> Promise:
    return msgspec.structs.replace(promise, phase=promise.membership.on(event).phase)
