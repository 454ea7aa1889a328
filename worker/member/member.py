"""A node's part in one generation: the member loads shards, serves ranks and votes on the commit of each step.

    Prepare ─▶ (agent: promise) ─▶ Member.open ─▶ BaseLoading.load ─▶ Member.begin_rounds ─▶ replicas, uploads
            ─▶ Member.close

Invariant: the `Member` object owns everything that a generation starts on this node. All of it has ended when `close`
returns. Only slots outlive the object.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from everstep.protocol.agent_messages import (
    FaultCode,
)
from everstep.protocol.ids import FIRST_STEP, NodeId, Rank
from everstep.protocol.plan import CheckpointPlan, GenerationPlan
from everstep.protocol.rounds import Announcement, Pacing
from everstep.protocol.slot import SlotState
from worker.core.checkpoint_schedule import CheckpointSchedule
from worker.core.metric_outbox import MetricOutbox
from worker.core.misplaced_shards import MisplacedShards, misplaced_ranks
from worker.core.own_metrics import NodeUsage
from worker.core.rounds import Coordinator, Shard
from worker.core.slots import memory_nodes, slots_per_shard
from worker.core.tree import RoundTree
from worker.errors import LoadFailed, SourceRefused, StorageError
from worker.logs.held_lines import HeldLines
from worker.member.base_loading import BaseLoading
from worker.member.checkpoint_uploads import CheckpointUploads
from worker.member.earlier_shards import EarlierShards
from worker.member.held_snapshots import HeldSnapshots
from worker.member.peer_sessions import PeerSessions
from worker.member.rank_connections import RankConnections
from worker.member.retained_steps import RetainedSteps
from worker.member.shared_loads import LoadHelper
from worker.member.shared_uploads import UploadHelper
from worker.member.status import MemberStatus
from worker.member.traffic import Traffic
from worker.member.upload_division import UploadDivision
from worker.node.full_disks import FullDisks
from worker.node.rank_user import RankUser, create_traversable_dir, user_of
from worker.provisioning.source import SourceArchives, fetch_source
from worker.ranks.files import source_of
from worker.replication.coordinator import RoundServer
from worker.replication.pacing import NodePacer
from worker.replication.receiver import ReplicaReceiver
from worker.replication.round_member import RoundMember
from worker.replication.sender import Printed, ReplicaSender
from worker.replication.tcp import PeerListener, TcpSession
from worker.shards.owned_shard import OwnedShard, rounds_of
from worker.shm.shares import Shares
from worker.shm.store import SlotStore
from worker.storage.object_store import ObjectStore
from worker.tasks import end

log = logging.getLogger(__name__)
AGAIN_SECONDS = 1.0
"""Seconds from an unexpected exception in a background task until the task starts again."""


@dataclass(frozen=True, slots=True)
class LocalNode:
    """Objects of the agent that all `Member` objects of this node use."""

    node_id: NodeId
    address: str
    state: Path
    store: SlotStore
    listener: PeerListener
    objects: ObjectStore
    now: Callable[[], float]
    outbox: MetricOutbox
    archives: SourceArchives
    full_disks: FullDisks
    user: RankUser | None = None
    """The user that ranks run as; None means the agent's own user."""
    usage: Callable[[], NodeUsage] = NodeUsage
    gpu_nodes: tuple[int, ...] = ()
    """The NUMA node of each GPU; empty if the machine has only one NUMA node."""
    on_snapshot: Callable[[float], None] = lambda _: None
    """Called with the duration of every snapshot of this node in seconds."""
    printed: Printed | None = None
    """Returns the log lines that the generation's ranks have printed; None sends no lines to other nodes."""


class Member:
    """One generation on one node. The agent calls `open`, then `base.load`; `adopt` instead if ranks run already."""

    def __init__(self, node: LocalNode, plan: GenerationPlan, key: bytes, *, on_change: Callable[[], None]) -> None:
        """Create the parts of the generation; `open` or `adopt` starts them."""
        self.plan = plan
        self.here = plan.node(node.node_id)
        self.shards: dict[Rank, OwnedShard] = {}
        self.server: RoundServer | None = None
        self.contents = RetainedSteps(plan, self.here)
        self.sessions = PeerSessions(node.node_id, node.address, plan, key, identity=node.listener.identity)
        self.pacer = NodePacer()
        self.held_lines = HeldLines(node.state, plan, node.node_id)
        self._node = node
        self._on_change = on_change
        self._slot_count = slots_per_shard(
            has_third_slot=plan.checkpoint.third_slot, max_uploads=plan.checkpoint.max_uploads
        )
        self._reported: tuple[object, ...] = ()
        self._tasks: set[asyncio.Task[None]] = set()
        node.store.memory_nodes = memory_nodes(self.here.ranks, node.gpu_nodes)
        node.store.place(MisplacedShards.of(plan, node.node_id))
        held_ranks = [rank.rank for rank in plan.ranks if node.node_id in rank.copy_nodes[1:]]
        self.shares = Shares(
            node.store,
            {rank: stripe for rank in self.here.ranks if (stripe := plan.ranks[rank].stripe)},
            keep=self.contents.keep,
            slot_count=self._slot_count,
        )
        self.receiver = ReplicaReceiver(
            node.store,
            held_ranks=held_ranks,
            keep=self.contents.keep,
            slot_count=self._slot_count,
            take_lines=self.held_lines.take,
            shares=self.shares,
            load_earlier=None if plan.relayout is None else lambda rank: self.earlier.supply(rank),
        )
        self.rounds = RoundMember(
            plan.generation,
            node.node_id,
            tree=RoundTree.of(plan.coordinator, {each.node_id: each.ranks for each in plan.nodes}),
            state=partial(rounds_of, self.shards),
            apply_announcement=self._apply_announcement,
            deadline_seconds=plan.timeouts.holder_deadline_seconds,
            on_silence=on_change,
        )
        self.lines = RankConnections(
            plan,
            self.shards,
            node.store,
            keep=self.contents.keep,
            on_change=on_change,
            on_round_change=self.rounds.changed.notify,
            traffic=Traffic(
                self.here.ranks,
                self.pacer,
                replica_count=sum(len(plan.ranks[rank].holders) - 1 for rank in self.here.ranks),
                max_slowdown=plan.max_slowdown,
                on_distance=self._keep_distance,
                on_pacing=self._keep_pacing,
            ),
            outbox=node.outbox,
            slot_count=self._slot_count,
            now=node.now,
            usage=node.usage,
            sent_bytes=lambda: self.pacer.sent_bytes,
            on_snapshot=node.on_snapshot,
            earlier_layout=lambda: self.earlier.layout,
            fetch_earlier=None if plan.relayout is None else lambda rank, faults: self.earlier.fetch(rank, faults),
            is_loading_earlier=self._is_loading_earlier,
        )
        self.base = BaseLoading(
            plan,
            self.here,
            self.shards,
            store=node.store,
            objects=node.objects,
            sessions=self.sessions,
            contents=self.contents,
            slot_count=self._slot_count,
            arrived=self.lines.arrived,
        )
        self.earlier = EarlierShards(plan, self.here, self.base, node.store, self.contents)
        self.division = UploadDivision(plan, node.node_id, partial(self.sessions.dial, kind="division"))
        self.uploads = CheckpointUploads(
            plan,
            self.shards,
            node.store,
            node.objects,
            self.contents,
            self.lines.faults,
            dial=partial(self.sessions.dial, kind="upload"),
            agree=self.division.agree,
            grant_if_due=self.lines.slots.grant_if_due,
            on_change=self._shard_changed,
        )
        self.upload_helper = UploadHelper(plan, node.store, node.objects, held_ranks=held_ranks)
        self.load_helper = LoadHelper(
            plan, node.objects, is_loaded=self.base.is_loaded, ranks=self.here.ranks, loads=self.base.loads
        )
        self.held = HeldSnapshots(
            self.shards,
            node.store,
            self.contents,
            grant_if_due=self.lines.slots.grant_if_due,
            on_change=self.rounds.changed.notify,
        )
        self.status = MemberStatus(
            plan,
            self.here,
            self.shards,
            rounds=self.rounds,
            server=lambda: self.server,
            faults=self.lines.faults,
            rehearsed=self.lines.rehearsed,
            kept_options=self.lines.kept_options,
            stalls=self.uploads.stalls,
        )

    async def open(self, *, has_ranks: bool = False) -> Path:
        """Prepare slots, pages and the source tree, and return the path of the entry point.

        With `has_ranks`, the source tree stays unchanged, because running ranks import from it. Raises LoadFailed, with
        a code and a message for the user.
        """
        store = self._node.store
        await store.empty_all_but({rank: self.contents.keep(rank) for rank in store.shards})
        self._node.listener.admit(self.sessions.credentials, self.serve)
        entry = (self._tree / self.plan.script.entry_point).resolve() if has_ranks else await self._load_source()
        try:
            self._open_shards()
        except OSError as error:  # A retry, here or on another node, may succeed.
            raise LoadFailed(
                FaultCode.MEMORY_FULL,
                f"the ranks' pages cannot be created: {error.strerror}",
                is_permanent=False,
            ) from error
        return entry

    def adopt(self) -> None:
        """Take over the running generation of an earlier agent process, with its slots and its ranks' pages."""
        for rank in self._node.store.shards:
            # The earlier agent process received the transfers of other nodes' shards. It has ended, so no transfer
            # writes into these slots.
            if rank not in self.here.ranks:
                self._node.store.settle_copiers(rank)
        self._node.listener.admit(self.sessions.credentials, self.serve)
        self.base.is_loaded.set()
        self._open_shards()
        for shard in self.shards.values():
            shard.adopt()
            self.contents.committed = max(self.contents.committed, shard.core.committed)

    def _open_shards(self) -> None:
        for rank in self.here.ranks:
            plan = self.plan.ranks[rank]
            self.shards[rank] = OwnedShard(
                rank=rank,
                generation=self.plan.generation,
                core=Shard.begin(
                    FIRST_STEP if self.plan.relayout else self.plan.base_step,
                    plan.holders[1:],
                    has_parity=bool(plan.stripe),
                ),
                base=self.contents.base(rank),
                base_step=self.plan.base_step,
                store=self._node.store,
                page=self._node.store.page(rank, self.plan.generation),
                now=self._node.now,
                on_change=self._shard_changed,
                on_progress=self.rounds.changed.notify,
            )

    @property
    def _tree(self) -> Path:
        return source_of(self._node.state, self.plan.run)

    async def _load_source(self) -> Path:
        create_traversable_dir(self._tree.parent, self._node.user)
        try:
            user = user_of(self.plan.run, self._node.state, self._node.user)
            return await fetch_source(self._node.archives, self.plan.script, self._tree, user)
        except StorageError as error:
            words = f"the source archive cannot be fetched: {error}"
            place = self.plan.script.source.object
            raise LoadFailed.lacking(self.plan.parent, "archive_unavailable", words, error, place) from error
        except SourceRefused as error:
            raise LoadFailed.lacking(self.plan.parent, "source_refused", str(error)) from error

    def begin_rounds(self, *, is_restarted: bool) -> None:
        """Begin to take part in the commits of steps. On the coordinator's node, also start the coordinator."""
        plan = self.plan
        if plan.relayout is None:
            self._node.store.misplaced_shards = self._node.store.misplaced_shards.loaded()
        self.lines.welcome_all()
        if plan.coordinator == self._node.node_id:
            core = Coordinator(
                world_size=plan.world_size,
                base=plan.base_step,
                every_steps=plan.checkpoint.every_steps,
                slot_count=self._slot_count,
                stored=plan.checkpoint.stored_step,
                misplaced_ranks=misplaced_ranks(plan),
                is_relayout=plan.relayout is not None,
                max_uploads=plan.checkpoint.max_uploads,
            )
            self.server = RoundServer(
                plan.generation,
                # A recovering coordinator waits for a report of every rank before it proposes a step.
                core.recover() if is_restarted else core.begin(),
                final_round_seconds=plan.timeouts.final_round_seconds,
                now=self._node.now,
                schedule=_schedule(plan.checkpoint, unix_now=self._node.now(), now=time.monotonic()),
                node_bytes=lambda: sum(shard.committed_bytes for shard in self.shards.values()),
            )
            self._begin(partial(self.rounds.run_local, self.server), "rounds")
        else:
            patience = plan.timeouts.holder_deadline_seconds
            dial = partial(self.sessions.dial, kind="round")
            self._begin(partial(self.rounds.run, dial, patience_seconds=patience, is_restarted=is_restarted), "rounds")
        self._begin(self.uploads.abort_abandoned, "the end of abandoned uploads")
        for shard in self.shards.values():
            if shard.lacks_base:
                self._begin(partial(self._supply_regained, shard), f"the base of rank {shard.rank}")
            else:
                self._supply(shard)

    def _supply(self, shard: OwnedShard) -> None:
        for peer in shard.core.peers:
            sender = ReplicaSender(
                shard,
                peer,
                self.sessions.dialler(peer, "replica", shard.rank),
                self._node.store,
                self.pacer,
                holder_deadline_seconds=self.plan.timeouts.holder_deadline_seconds,
                printed=self._node.printed,
            )
            self._begin(sender.run, f"replicas of rank {shard.rank} to {peer}")

    async def _supply_regained(self, shard: OwnedShard) -> None:
        """Fetch the base of a shard that this node has lost, then start the senders to the shard's holders."""
        # A holder lists its sealed steps to the sender. This node accepts a listed step only if its own slots
        # contain it.
        await self.base.regain(shard)
        self._supply(shard)

    async def serve(self, session: TcpSession) -> None:
        """Serve a session that another node of the generation has opened, until it ends."""
        match session.opened.kind:
            case "replica":
                await self.receiver.replica(session)
            case "fetch":
                await self.receiver.fetch(session)
            case "stream":
                await self.receiver.stream(session)
            case "round":
                await self.rounds.serve(session)
            case "upload":
                await self.upload_helper.serve(session)
            case "load":
                await self.receiver.supply(session, partial(self.load_helper.serve, session))
            case "division":
                await self.division.serve(session)

    def _keep_distance(self, distance: int) -> None:
        if self.server is not None:
            self.server.keep_distance(distance)

    def _keep_pacing(self, pacing: Pacing) -> None:
        if self.server is not None:
            self.server.keep_pacing(pacing)

    def _apply_announcement(self, announcement: Announcement) -> None:
        self.contents.committed = max(self.contents.committed, announcement.committed)
        self._node.store.misplaced_shards = self._node.store.misplaced_shards.announced(
            announcement.committed, announcement.held
        )
        self._node.store.drop_misplaced_shards()
        # Uploads begin before ranks receive slots, because each upload pins the slot that it reads.
        self.uploads.apply_announcement(announcement)
        self.upload_helper.apply_announcement(announcement)
        self.held.apply_announcement(announcement)
        self.lines.apply_announcement(announcement)
        self._report_visible()

    def _is_loading_earlier(self) -> bool:
        # The ranks' pages show this even after a restart of the agent.
        if self.contents.is_loading_earlier and all(
            shard.page.rank().boundary >= self.plan.base_step for shard in self.shards.values()
        ):
            self.contents.is_loading_earlier = False
            self._node.store.misplaced_shards = self._node.store.misplaced_shards.loaded()
        return self.contents.is_loading_earlier

    def _shard_changed(self) -> None:
        self.rounds.changed.notify()
        self._report_visible()

    def _report_visible(self) -> None:
        """Report immediately if a fact that users see has changed. Other progress waits for the next regular report."""
        rounds = self.server is not None and self.server.visible
        uploaded = tuple((each.rank, each.step) for each in self.uploads.uploaded)
        visible = (rounds, uploaded, *(shard.reported for shard in self.shards.values()))
        if visible != self._reported:
            self._reported = visible
            self._on_change()

    def _begin(self, work: Callable[[], Awaitable[None]], name: str) -> None:
        """Run `work` in the background until `detach`. Report an unexpected exception as a fault, and start again."""

        async def run() -> None:
            while True:
                try:
                    return await work()
                except Exception as error:
                    log.exception("%s raised an unexpected error and starts again in %g s", name, AGAIN_SECONDS)
                    if self._node.full_disks.note(error) is None:
                        self.lines.faults.report("agent_error", f"{name} ended: {error!r}", subject=name)
                    else:
                        self._on_change()
                await asyncio.sleep(AGAIN_SECONDS)

        task = asyncio.create_task(run(), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def detach(self) -> None:
        """End every session, sender, upload and rank connection. The ranks continue for the next agent process."""
        await self._node.listener.revoke()
        self.held.close()
        await end(*self._tasks)
        await self.shares.close()
        await self.uploads.close()
        await self.division.close()
        if self.server is not None:
            self.server.close()
        await self.lines.close()
        for shard in self.shards.values():
            shard.page.close()

    async def close(self) -> None:
        """End the generation after its ranks have exited. Unsealed slots are emptied, sealed slots stay."""
        await self.detach()
        for slots in self._node.store.shards.values():
            for slot in slots:
                if slot.file.header.state is SlotState.WRITING:
                    slot.is_busy = False
                    slot.file.empty()


def _schedule(plan: CheckpointPlan, *, unix_now: float, now: float) -> CheckpointSchedule:
    """Return the schedule in monotonic time, which began when the last checkpoint was stored, or now."""
    age = max(0.0, unix_now - plan.stored_at_seconds) if plan.stored_at_seconds else 0.0
    return CheckpointSchedule(
        interval_seconds=plan.interval_seconds,
        max_overhead=plan.max_overhead,
        max_bytes_per_second=plan.max_bytes_per_second,
        begun_at=now - age,
        upload_seconds=plan.upload_seconds or None,
    )
