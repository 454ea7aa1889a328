"""The agent of a node: creates its parts, connects them and runs them. Each part has its own module.

    control plane ─▶ ControlClient ─▶ Commands ─┬─▶ Lifecycle ─▶ Member, Supervisor    promise, load, start, exits
                          ▲                     ├─▶ Departure                          release of a run
                          │                     └─▶ RankInspection, RankLogLines, SourcePrefetch, Evidence
                          └──────── Reports ◀── all parts

Invariant: no part starts work before `Agent.run`, and all work has ended when `run` returns. The ranks, the slots and
the promise remain for the next agent process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Mapping
from functools import partial

from everstep.protocol.plan import Timeouts
from worker.agent.attestation import join
from worker.agent.burn_in import BurnInRunner
from worker.agent.commands import Commands
from worker.agent.control_client import ControlClient
from worker.agent.departure import Departure
from worker.agent.inspection import RankInspection
from worker.agent.lifecycle import Lifecycle
from worker.agent.lines import RankLogLines
from worker.agent.outputs import EndedOutputs
from worker.agent.own_log import Evidence, OwnLog
from worker.agent.prometheus import MetricsEndpoint, snapshot_seconds
from worker.agent.promise import CurrentPromise, PromiseFile
from worker.agent.reports import AgentReports
from worker.agent.settings import AgentSettings
from worker.agent.snapshot_requests import SnapshotRequests
from worker.agent.sources import SourcePrefetch
from worker.agent.usage import Usage
from worker.core.metric_outbox import MetricOutbox
from worker.logs.outputs import RankOutputs
from worker.member.member import LocalNode
from worker.node import metadata_rule
from worker.node.full_disks import FullDisks
from worker.node.health.watch import HealthWatch
from worker.node.instance_metadata import InstanceMetadata
from worker.node.network_cards import network_cards
from worker.node.stable_port import KeptPort
from worker.node.state_directory import take
from worker.provisioning.source import SourceArchives
from worker.provisioning.supplies import Supplies
from worker.ranks.server import RankServer
from worker.ranks.supervisor import Supervisor
from worker.replication.identity import PeerIdentity
from worker.replication.tcp import PeerListener
from worker.shm.held_files import FILES_SOCKET, AgentFiles
from worker.shm.numa import gpu_nodes
from worker.shm.store import SlotStore
from worker.storage.aws import Aws
from worker.storage.object_store import ObjectStore

log = logging.getLogger(__name__)


class Agent:
    """Creates, connects and runs the parts of one node's agent. `worker.__main__` calls `run` once."""

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

        The agent starts and closes `supervisor` and `health`. `now` is Unix time in seconds. Raises ShimUnavailable if
        the shim of another node on the same machine uses the state directory. Raises OSError if another node's files
        there cannot be removed.
        """
        state, user, agent_id = settings.state, settings.rank_user, secrets.token_hex(8)
        take(state, settings.node_id, user)
        self.settings = settings
        self.supervisor = supervisor
        self.health = health
        self.control = ControlClient(
            settings.control_plane_urls,
            join_token=settings.join_token,
            token_path=state / "session_token",
            attest=partial(join, claim=settings.claim, tls=settings.tls) if settings.claim is not None else None,
            tls=settings.tls,
            hello=lambda: self.reports.hello(),
            report=lambda: self.reports.report(),
            command=lambda command: self.commands.take(command),
            welcomed=self._welcomed,
        )
        changed = self.control.changed.notify
        self.metadata = InstanceMetadata(settings.metadata_endpoint, changed) if settings.metadata_endpoint else None
        self.full_disks = FullDisks(state)
        self.files = AgentFiles(settings.sockets / FILES_SOCKET)
        supervisor.on_shim = self.files.join
        self.store = SlotStore(self.files, memory_bytes=settings.memory_bytes)
        identity = PeerIdentity(state / "peer_identity")
        self.listener = PeerListener(settings.node_id, identity=identity)
        self.ranks = RankServer(settings.sockets / "ranks.sock", self.files, user)
        self.archives = SourceArchives(state / "sources" / "archives", objects)
        self.rank_outputs = RankOutputs(state, objects, self.archives.files, user)
        self.outbox = MetricOutbox()
        builds, input_bytes = settings.allows_builds, settings.input_bytes
        self.supplies = Supplies(state, objects, aws, now=now, input_bytes=input_bytes, user=user, allows_builds=builds)
        self.promises = PromiseFile(state / "promise")
        self.promise = CurrentPromise(self.promises, self.full_disks, on_run=self.listener.expect)
        self.usage = Usage(health, supervisor, self.promise)
        self.lines = RankLogLines(state, objects, self.full_disks, now=now, send=self.control.send_lines)
        self.outputs = EndedOutputs(objects, self.rank_outputs, changed)
        self.sources = SourcePrefetch(self.archives, self.full_disks, on_change=changed)
        self.burn_in = BurnInRunner(state, changed, address=settings.address)
        self.evidence = Evidence(own_log or OwnLog(), objects, state)
        self.inspection = RankInspection(
            settings, supervisor, self.usage, answer=self.control.send_answer, on_change=changed
        )
        self.snapshots = SnapshotRequests(self.control.send_answer)
        self.snapshot_seconds = snapshot_seconds()
        node = LocalNode(
            node_id=settings.node_id,
            address=settings.address,
            state=state,
            store=self.store,
            listener=self.listener,
            objects=objects,
            now=now,
            outbox=self.outbox,
            archives=self.archives,
            full_disks=self.full_disks,
            user=user,
            usage=self.usage.now,
            gpu_nodes=gpu_nodes(),
            on_snapshot=self.snapshot_seconds.observe,
            printed=self.lines.printed,
        )
        self.lifecycle = Lifecycle(
            settings,
            node,
            self.promise,
            supervisor=supervisor,
            ranks=self.ranks,
            supplies=self.supplies,
            rank_outputs=self.rank_outputs,
            lines=self.lines,
            outputs=self.outputs,
            inspection=self.inspection,
            full_disks=self.full_disks,
            on_change=changed,
        )
        self.departure = Departure(
            settings,
            self.lifecycle,
            self.promise,
            self.outputs,
            store=self.store,
            supervisor=supervisor,
            supplies=self.supplies,
            rank_outputs=self.rank_outputs,
            archives=self.archives,
        )
        self.commands = Commands(
            agent_id,
            self.lifecycle,
            self.departure,
            supervisor=supervisor,
            inspection=self.inspection,
            snapshots=self.snapshots,
            lines=self.lines,
            sources=self.sources,
            burn_in=self.burn_in,
            evidence=self.evidence,
            outbox=self.outbox,
            identity=identity,
            on_change=changed,
        )
        self.reports = AgentReports(
            settings,
            agent_id,
            self.lifecycle,
            listener=self.listener,
            ranks=self.ranks,
            supervisor=supervisor,
            supplies=self.supplies,
            sources=self.sources,
            burn_in=self.burn_in,
            evidence=self.evidence,
            inspection=self.inspection,
            usage=self.usage,
            full_disks=self.full_disks,
            outbox=self.outbox,
            metadata=self.metadata,
        )

    async def run(self) -> None:
        """Connect to the control plane, and run all parts of the agent until this task is cancelled."""
        self._listen()
        await self.ranks.start()
        await self.supervisor.start()
        metrics = self._metrics()
        if self.health is not None:
            loop = asyncio.get_running_loop()
            self.health.start(lambda: self._health_changed(loop))
        try:
            await self.lifecycle.resume()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.control.run(), name="control line")
                tasks.create_task(self.commands.run(), name="commands")
                tasks.create_task(self._report_warm(), name="warm start")
                tasks.create_task(self.sources.run(), name="sources")
                user = self.settings.rank_user
                if user is not None and metadata_rule.is_covered(self.settings.metadata_endpoint):
                    tasks.create_task(
                        metadata_rule.keep_on(user, self.settings.exposure, self._exposed), name="metadata rule"
                    )
                if self.metadata is not None:
                    tasks.create_task(self.metadata.run(), name="instance metadata")
        finally:
            await self.lifecycle.end_work()
            await self.departure.close()
            await self.outputs.close()
            await self.burn_in.stop()
            await self.inspection.close()
            await self.snapshots.close()
            await self.lines.close()
            await self.lifecycle.detach()
            await self.ranks.close()
            await self.supplies.close()
            await self.listener.close()
            await self.supervisor.close()
            if self.health is not None:
                await asyncio.to_thread(self.health.close)
            if metrics is not None:
                await asyncio.to_thread(metrics.close)
            self.store.close()
            self.files.close()

    def log_fields(self) -> Mapping[str, object]:
        """Return the fields that the agent adds to each of its log lines. Called in any thread."""
        promise = self.promise.value
        of_job = {} if promise is None else {"job": promise.job, "run": promise.run, "generation": promise.generation}
        return {"node": self.settings.node_id, **of_job}

    def _listen(self) -> None:
        """Listen for other agents at the port of this node's earlier agent process, which a running plan contains."""
        address, kept = self.settings.address, KeptPort(self.settings.state / "peer_port")
        _, *more_cards = network_cards(address)
        port = self.settings.peer_port or kept.read()
        try:
            self.listener.start(address, port, more_cards=more_cards)
        except OSError as error:
            if port == self.settings.peer_port:
                raise
            words = (
                "another process uses port %d of the earlier agent, so peers of a running generation cannot connect: %s"
            )
            log.warning(words, port, error)
            self.listener.start(address, more_cards=more_cards)
        kept.keep(self.listener.port)

    def _metrics(self) -> MetricsEndpoint | None:
        if (at := self.settings.metrics_address) is None:
            return None
        return MetricsEndpoint(
            *at, lambda: self.reports.facts(is_connected=self.control.is_connected), self.snapshot_seconds
        )

    def _welcomed(self, timeouts: Timeouts) -> None:
        self.supervisor.gone_seconds = timeouts.gone_seconds

    async def _report_warm(self) -> None:
        """Send a report as soon as this node can fork ranks from a process that has imported torch."""
        while not self.supervisor.is_warm:
            await self.supervisor.changed.wait(self.supervisor.changed.version)
        self.control.changed.notify()

    def _exposed(self, exposure: str) -> None:
        self.reports.exposure = exposure
        self.control.changed.notify()

    def _health_changed(self, loop: asyncio.AbstractEventLoop) -> None:
        """Send a report immediately, because the faults of the node's devices have changed."""
        # If a driver hangs, the thread that checks the devices can outlast the event loop.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(self.control.changed.notify)
