"""The agent of a node: the line to the control plane, the promise, and the member that follows from it.

Commands are taken one after another; each first becomes durable (`promise`), then true (`member`, `supervisor`), then
visible (the next report). Invariant: what a report says of a generation is true at the moment that it is sent, and
nothing of a generation below the promised one is acted on.
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
"""How long a node that another job is waiting for may take to upload what ranks of the one before have left."""
LOOK_SECONDS = 1.0
"""Between two looks whether uploads still move."""


@dataclass(frozen=True, slots=True)
class _Left:
    """What ranks of a run that is over have left is stored, or will not be: said by the agent to itself."""

    membership: Membership


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """Where an agent lives and whom it serves."""

    node_id: NodeId
    address: str
    state: Path
    slots: Path
    """On tmpfs, this node's alone."""
    memory_bytes: int
    control_plane_urls: tuple[str, ...]
    """Of its replicas; one of them serves this node's fleet."""
    join_token: str
    peer_port: int = 0
    is_warm: bool = True
    """Keep a pre-imported process to fork ranks from."""
    tls: ssl.SSLContext | None = None
    """How the control plane's certificate is verified; None: the system's own way."""
    claim: Claim | None = None
    """How this instance joins without a token; None: with one."""
    input_bytes: int | None = None
    """What inputs of jobs may take of the disk, those that are kept for later ones included; None: what it has, less a part."""
    log_format: LogFormat = "text"
    metrics_address: tuple[str, int] | None = None
    """Where Prometheus finds this agent's figures; None: nowhere."""
    rank_user: RankUser | None = None
    """The users that ranks run as; None: as this agent does."""
    allows_builds: bool = False
    """pip may build packages that have no wheel, for a job's requirements."""
    exposure: str = ""
    """What a job's code can get at on this node that is not the job's, as was found at the start; empty: nothing."""
    metadata_endpoint: str | None = None
    """Where the instance's metadata service is; None: there is none, or this is no EC2 instance."""


class Agent:
    """One per node. `run` lives as long as the node's agent does."""

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
        """Take the state directory, and wire the parts; no line and no socket is opened yet.

        Args:
            settings: where this agent lives and whom it serves.
            objects: S3.
            aws: the rest of AWS, with the node's permissions.
            supervisor: of this node's ranks; started and closed here.
            now: Unix time, for what is shown to people.
            health: of this node; started and closed here. None: the node's own devices are not watched.
            own_log: what this process logs, for a person who is to look at the node; None: its own, empty one.

        Raises:
            ShimUnavailable: the state directory is another node's, whose shim lives on this machine.
            OSError: it is another node's, and does not let go of what belongs to that one.
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
        """What was said last."""
        self._commands: asyncio.Queue[Message | _Left] = asyncio.Queue()
        self._promise: Promise | None = None
        self._unkept = ""
        """Why the disk has not taken the promise that was to be made last."""
        self._promising: tuple[RunId, int] | None = None
        self._inventory: tuple[SlotRecord, ...] = ()
        self._ended_ranks: EndedRanks | None = None
        self._commits: tuple[PageCommit, ...] = ()
        """Set with the promise, from the rank pages; valid while PROMISED."""
        self._member: Member | None = None
        self._supplied: Supplied | None = None
        """Of the generation that is loaded; None after a restart, and before."""
        self._exits: dict[Rank, RankExit] = {}
        self._stacks: StackWatch | None = None
        """Of the ranks that run; made when the control plane first asks what they do."""
        self._faults: tuple[NodeFault, ...] = ()
        self._load_seconds = 0.0
        self._exposure = settings.exposure
        self._sequence = 0
        self._working: asyncio.Task[None] | None = None
        """What the current phase does in the background: loading, or watching ranks until all have exited."""
        self._shipper: LogShipper | None = None
        """Of the generation whose ranks were started last."""
        self._followed_until = 0.0
        """Monotonic time until which somebody follows what ranks print."""
        self._leaving: set[asyncio.Task[object]] = set()
        """Uploads of what ended generations have left; a new generation does not wait for them."""
        self._letting_go: asyncio.Task[None] | None = None
        self._all_stored: Member | None = None
        """Of the ranks of this member nothing is left to be uploaded."""

    async def run(self) -> None:
        """Serve until cancelled; then leave ranks, slots and the promise to the next agent."""
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
        """Listen for peers at the port of the agent before this one: the plan of a running generation names it."""
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
        """Take up what an earlier agent on this node had promised."""
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

    # -- the line to the control plane

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
        """Return what Prometheus is shown; called in another thread, so nothing is asked that could be changing."""
        return AgentFacts(self._reported, self._control.is_connected, len(self._outbox), self._outbox.dropped_count)

    def log_fields(self) -> Mapping[str, object]:
        """Return what every line that is logged says of this node; called in any thread."""
        promise = self._promise
        of_job = {} if promise is None else {"job": promise.job, "run": promise.run, "generation": promise.generation}
        return {"node": self._settings.node_id, **of_job}

    def _member_report(self) -> MemberReport | None:
        if self._promise is None or self._promising is not None:
            return None  # what was true is being ended, what is promised is not true yet
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
        """Report it at once. In the watch's thread, which may outlive the loop by one reading."""
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(self._changed)

    def _welcomed(self, timeouts: Timeouts) -> None:
        self._supervisor.gone_seconds = timeouts.gone_seconds

    async def _tell_warm(self) -> None:
        """Let the control plane hear at once when ranks can be started warm: a node that waits for work is chosen for it."""
        while not self._supervisor.is_warm:
            await self._supervisor.changed.wait(self._supervisor.changed.version)
        self._changed()

    async def _fetch_sources(self) -> None:
        """Fetch what a node that waits for work is to have ready.

        What cannot be had now is tried again when it is asked for again.
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
                    if source in self._wanted_sources:  # else this node has been given work meanwhile
                        log.warning("a source that this node is to have ready: %s", error)
                        self._unsound_sources.add(source.sha256)
                self._changed()
            await self._sources_asked.wait(version)

    async def _want_sources(self, sources: tuple[SourceArchive, ...]) -> None:
        """Hold these ready and no others; a node that works, or is about to, keeps to its own job's."""
        if self._promise is not None:
            return
        self._wanted_sources = sources
        self._unsound_sources &= {source.sha256 for source in sources}
        try:
            await asyncio.to_thread(self._archives.keep, {source.sha256 for source in sources})
        except OSError as error:
            log.info(
                "sources that are not wanted any more stay on this node: %s", error
            )  # until they are asked for, or not, again
        self._sources_asked.notify()

    # -- commands

    def _take(self, command: Message) -> None:
        """Queue a command; a Prepare or Release cuts short what is being loaded, a halt reaches ranks without queueing."""
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
        """Find out what the ranks are doing; the answer is in the reports."""
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
        """Run something beside a rank, if that rank lives here."""
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
        """Return what a program that runs beside ranks of a run inherits."""
        user, inherited = self._user_of(run), node_environment(os.environ, card_of(self._settings.address))
        return inherited_as(make_home(self._settings.state, run, user) if user is not None else {}, inherited)

    def _user_of(self, run: RunId) -> RankUser | None:
        return user_of(run, self._settings.state, self._settings.rank_user)

    def _serve_ranks(self, member: Member) -> None:
        """Let the ranks of a member say hello, and nobody else's."""
        self._ranks.user = self._user_of(member.plan.run)
        self._ranks.events = member.lines

    def _usage(self) -> NodeUsage:
        """Return what the node's devices and its ranks use; for charts."""
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
        """Return how busy a rank's GPU is: the one that has the rank's LOCAL_RANK for a number."""
        return self._health.gpu_percent(member.here.ranks.index(rank)) if self._health is not None else None

    async def _keep_evidence(self, place: ObjectReference) -> None:
        """Store what this node alone can tell; asked again when it could not.

        The streams of ranks are there already, or follow with Release.
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
        """Make a promise true: no old rank, no old stream; then list what is left."""
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
        """End what this node did for the generation so far: ranks first, then everything that served them."""
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
        """Ship what the ranks of a generation print, from now on."""
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
        """Pass on what ranks print for a while; to whoever begins to follow, what the store does not have yet, too."""
        now = time.monotonic()
        is_new, self._followed_until = now >= self._followed_until, now + SEND_LINES_SECONDS
        if is_new and self._shipper is not None:
            self._shipper.show_recent()

    async def _printed(self, number: int) -> Tail:
        """Return the newest lines of this node's ranks, for its peers."""
        return await self._shipper.printed(number) if self._shipper is not None else Tail()

    def _show_lines(self, lines: LogLines) -> None:
        if time.monotonic() < self._followed_until:
            self._control.send_lines(lines)

    def _keep_streams(self, member: Member) -> None:
        """Upload what the ended generation's ranks have printed, beside whatever comes next; then let go of it here."""
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
        """The run is over here: end its work, and release it once what its ranks have left is stored, or moves no more.

        Until then the run is reported, so that the node is given to nobody else; nothing waits for it here, and asked
        again it goes on.
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
        """Nothing of the run stays on this node."""
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
                task.cancel()  # its thread may hang in the store; it ends by itself
        self._lapse()
        await self._store.release()
        await asyncio.to_thread(self._forget_files, run)
        await self._supplies.forget(run)
        self._promises.write(None)
        self._know(None)
        self._inventory, self._ended_ranks, self._commits, self._exits, self._faults = (), None, (), {}, ()
        self._promising = None

    def _lapse(self) -> None:
        """From here on nothing of the run can be taken up: the agent after one that is killed meanwhile starts none of its ranks once more."""
        if self._promise is None:
            return
        lapsed = msgspec.structs.replace(self._promise, phase=MemberPhase.PROMISED, plan=None, key=b"", entry_point="")
        try:
            self._promises.write(lapsed)
        except OSError as error:  # a disk that takes nothing lets go all the same
            log.warning("run %s is released while its promise says %s: %s", lapsed.run, self._promise.phase, error)

    def _forget_files(self, run: RunId) -> None:
        if left := end_processes(self._settings.rank_user, seconds=self._supervisor.gone_seconds):
            log.error("run %s has left what cannot be ended, and no job starts here meanwhile: %s", run, left)
        self._supervisor.forget(run)
        self._logs.forget(run)
        self._archives.keep(())
        trees = (self._settings.state / "sources").glob(f"{run}*")  # what a killed agent was unpacking, too
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
        for rank in list(
            self._store.shards
        ):  # the promise has ended every rank and stream, and none of this generation has begun
            self._store.settle_copiers(rank)
        self._member = Member(self._node, plan, key, on_change=self._changed)
        self._begin(self._load_member(self._member))

    async def _load_member(self, member: Member) -> None:
        """Start the ranks, and load their shards meanwhile: they import, meet, build their model, and copy what is verified as it comes.

        Then watch them until the start, which takes the watch over.
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
        """Say whether ranks of a generation live here that is being loaded: an agent before this one has started them."""
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
        """Start the ranks that an agent that died in the middle has not started, and watch all of them."""
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
        """Start those that were not started yet."""
        entry = Path(promise.entry_point)
        for rank in member.here.ranks:
            await self._supervisor.start_rank(
                member.plan, member.here, rank, entry, agent_socket=self._ranks.path, supplied=supplied
            )

    async def _watch(self, promise: Promise) -> None:
        """Report each rank's exit at once; when all have exited and what they leave is in S3, the node's part is done."""
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
            if (
                self._exits[exited.rank].exit_class is ExitClass.ERROR
            ):  # the rank was not started, or its script could not write
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
        """Make a promise, and say whether the disk has taken it: else all is as before, and the control plane says again what it wants."""
        try:
            self._promises.write(promise)
        except OSError as error:  # of a disk that is full, or broken, the node's health tells
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
        """Have the disk say which user the ranks of a run have here; where it does not take that, nothing is promised."""
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
        """Say that something has come to its end.

        Where the disk does not take that, the next agent comes to the same end once more.
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
        """A bug in a member's work must not look like a node that is merely slow."""
        if task.cancelled() or task.exception() is None:
            return
        error = task.exception()
        assert error is not None  # narrowed for the type checker
        log.error("the member's work ended: %r", error, exc_info=error)
        fault = self._full_disks.note(error) or NodeFault(code="agent_error", message=repr(error), is_permanent=False)
        self._faults = (*self._faults, fault)
        if self._promise is not None and self._promise.phase is MemberPhase.LOADING:
            self._move(Event.LOAD_FAILED)  # else everybody would wait for this node without end
        else:
            self._changed()


def _after(promise: Promise, event: Event) -> Promise:
    return msgspec.structs.replace(promise, phase=promise.membership.on(event).phase)
