"""This node's part in one generation: it loads shards, serves ranks and takes part in the rounds.

    Prepare ─▶ (agent: promise) ─▶ Member.open ─▶ Member.load ─▶ Member.begin_rounds ─▶ replicas, uploads
            ─▶ Member.close

Invariant: the `Member` owns everything that a generation starts on this node: sessions, senders, uploads and rank
connections. All of these have ended when `close` returns. Only slots outlive the member.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from msgspec import structs

from everstep.protocol.agent_messages import (
    FaultCode,
    NodeFault,
    RankStatus,
    RoundStatus,
    ShardProtection,
    UploadedShard,
)
from everstep.protocol.errors import ProtocolError
from everstep.protocol.ids import NodeId, Rank, Step
from everstep.protocol.peer_messages import SessionKind
from everstep.protocol.plan import GenerationPlan, RankPlan, ShardSource
from everstep.protocol.rounds import Announcement, Pacing, RankRound
from everstep.protocol.slot import SlotState
from worker.core.metric_outbox import MetricOutbox
from worker.core.own_metrics import NodeUsage
from worker.core.phases import PhaseClock
from worker.core.rounds import NONE, Coordinator, Shard
from worker.core.slots import Content, is_superseded, kept, memory_nodes
from worker.core.strays import Strays, strayed
from worker.core.tree import RoundTree
from worker.errors import CorruptCheckpoint, LoadFailed, NoRoom, ObjectMissing, PeerError, SourceRefused, StorageError
from worker.logs.held_lines import HeldLines
from worker.member.rank_lines import RankLines
from worker.member.traffic import Traffic
from worker.node.full_disks import FullDisks
from worker.node.network_cards import NetworkCard, network_cards
from worker.node.priority import before_other_sessions
from worker.node.rank_user import RankUser, make_way
from worker.provisioning.source import SourceArchives, fetch_source
from worker.replication.coordinator import RoundServer
from worker.replication.fetching import fetch_shard
from worker.replication.pacing import NodePacer
from worker.replication.receiver import ReplicaReceiver
from worker.replication.round_member import RoundMember
from worker.replication.routes import Address, Ways
from worker.replication.sender import Printed, ReplicaSender
from worker.replication.streams import OWN_STREAMS
from worker.replication.tcp import PeerListener, TcpSession, dial
from worker.replication.transfers import ShardRejected
from worker.replication.transport import Credentials, Session
from worker.shards.owned_shard import OwnedShard
from worker.shm.rank_page import RankPage
from worker.shm.store import VERIFY_THREADS, SlotStore
from worker.storage.checkpoints import download_shard, upload_shard
from worker.storage.object_store import ObjectStore
from worker.tasks import end, together

log = logging.getLogger(__name__)
NO_RANK = Rank(-1)
REGAIN_SECONDS = 1.0
"""Seconds between two attempts to fetch a base that this node has lost."""
AGAIN_SECONDS = 1.0
"""Seconds before a background task that raised an unexpected exception is started again."""


@dataclass(frozen=True, slots=True)
class Node:
    """The parts of a node that a member uses. They exist before the member and continue after it."""

    node_id: NodeId
    address: str
    state: Path
    store: SlotStore
    listener: PeerListener
    objects: ObjectStore
    now: Callable[[], float]
    """Returns Unix time, for timestamps that users see."""
    outbox: MetricOutbox
    """Receives the values that rank 0 logs."""
    archives: SourceArchives
    full_disks: FullDisks
    user: RankUser | None = None
    """The user that ranks run as; None means the agent's own user."""
    usage: Callable[[], NodeUsage] = NodeUsage
    """Returns the present use of the node's devices."""
    gpu_nodes: tuple[int, ...] = ()
    """The NUMA node of each GPU; empty if the machine has only one NUMA node."""
    on_snapshot: Callable[[float], None] = lambda _: None
    """Called with the duration of every snapshot in seconds."""
    printed: Printed | None = None
    """Returns lines that the ranks of the running generation have printed.

    None means that holders receive no lines.
    """


class _PeerDialler:
    """Opens a member's connections to one peer. Implements `Dialler`."""

    def __init__(self, member: Member, peer: NodeId, kind: SessionKind, owner_rank: Rank) -> None:
        self._member = member
        self._peer = peer
        self._kind = kind
        self._owner_rank = owner_rank

    async def session(self) -> Session:
        """Open a session (see `Dialler`)."""
        return await self._member.dial(self._peer, self._kind, self._owner_rank)

    async def stream(self, session: Session, number: int) -> socket.socket:
        """Open a stream (see `Dialler`)."""
        return await self._member.dial_stream(session, number)


class Member:
    """This node's part in one generation.

    The agent owns the member. It calls `open` and `load` first, or `adopt` after its own restart.
    """

    def __init__(self, node: Node, plan: GenerationPlan, key: bytes, *, on_change: Callable[[], None]) -> None:
        self.plan = plan
        self.here = plan.node(node.node_id)
        self.uploads: list[UploadedShard] = []
        self._restored_from: dict[Rank, Literal["local", "peer", "s3"]] = {}
        self._node = node
        self._on_change = on_change
        self._slot_count = 3 if plan.checkpoint.third_slot else 2
        self._credentials = Credentials(
            plan.job,
            plan.run,
            plan.generation,
            node.node_id,
            key,
            silence_seconds=plan.timeouts.holder_deadline_seconds,
        )
        self._ways = Ways(network_cards(node.address))
        self._keep_list: dict[Rank, set[Content]] = {}
        for named in self.here.keep:
            self._keep_list.setdefault(named.owner_rank, set()).add(Content(named.origin_generation, named.step))
        self.shards: dict[Rank, OwnedShard] = {}
        self._committed = NONE
        self._persist = NONE
        node.store.memory_nodes = memory_nodes(self.here.ranks, node.gpu_nodes)
        held = [rank.rank for rank in plan.ranks if node.node_id in rank.holders[1:]]
        node.store.place(Strays.of(plan, node.node_id))
        self.pacer = NodePacer()
        self.held_lines = HeldLines(node.state, plan, node.node_id)
        self._receiver = ReplicaReceiver(
            node.store, held_ranks=held, keep=self._keep, slot_count=self._slot_count, take_lines=self.held_lines.take
        )
        tree = RoundTree.of(plan.coordinator, {each.node_id: each.ranks for each in plan.nodes})
        self._rounds = RoundMember(
            plan.generation,
            node.node_id,
            tree=tree,
            state=self._round_state,
            hear=self._hear,
            deadline_seconds=plan.timeouts.holder_deadline_seconds,
            on_silence=on_change,
        )
        self.server: RoundServer | None = None
        self.lines = RankLines(
            plan,
            self.shards,
            node.store,
            keep=lambda rank: self._keep(rank, NONE),
            on_change=on_change,
            on_round_change=self._rounds.changed.notify,
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
        )
        self._clocks = {rank: PhaseClock(plan.base_step) for rank in self.here.ranks}
        self._told: tuple[object, ...] = ()
        self._tasks: set[asyncio.Task[None]] = set()
        self._upload_tasks: set[asyncio.Task[None]] = set()
        self._uploading: dict[Rank, asyncio.Task[None]] = {}
        """The newest upload task of each local rank; the task may have ended."""

    # -- contents to keep

    def _base(self, rank: Rank) -> Content | None:
        sources = self.plan.ranks[rank].sources
        return Content(sources[0].origin_generation, sources[0].step) if sources else None

    def _content(self, rank: Rank, step: Step) -> Content:
        base = self._base(rank)
        return base if base is not None and base.step == step else Content(self.plan.generation, step)

    def _keep(self, rank: Rank, told: Step) -> frozenset[Content]:
        """Return the contents of a shard that must not be overwritten.

        These are the committed content, or the plan's contents until the base is committed. `told` is a committed step
        from another source, for example from an owner's message.
        """
        step = max(self._committed, told)
        committed = self._content(rank, step) if step != NONE else None
        return kept(committed, self._keep_list.get(rank, set()), self._base(rank))

    # -- load

    async def open(self, *, has_ranks: bool = False) -> Path:
        """Prepare slots and pages for the generation, and write its source tree. Then its ranks can be started.

        Args:
            has_ranks: True if ranks are already running. The source tree then stays unchanged, because these ranks
                import from it.

        Returns:
            The path of the entry point.

        Raises:
            LoadFailed: the generation cannot be prepared; contains a code and a message for the user.
        """
        await self._node.store.empty_all_but({rank.rank: self._keep(rank.rank, NONE) for rank in self.plan.ranks})
        self._node.listener.admit(self._credentials, self._serve)
        entry = (self._tree / self.plan.script.entry_point).resolve() if has_ranks else await self._load_source()
        try:
            self._open_shards()
        except OSError as error:  # tmpfs is completely full; a retry or another node may succeed
            raise LoadFailed(
                FaultCode.MEMORY_FULL, f"the ranks' pages cannot be made on tmpfs: {error.strerror}", is_permanent=False
            ) from error
        return entry

    async def load(self) -> None:
        """Fetch and verify the base of every local rank concurrently.

        A shard that contradicts the plan ends the load immediately, because all ranks will need an older step. If a
        source is only unreachable, the other ranks finish: their shards are then available for the next attempt.

        Raises:
            LoadFailed: a base cannot be loaded; contains a code and a message for the user.
        """
        failed: dict[Rank, LoadFailed] = {}

        async def load(rank: Rank) -> None:
            try:
                await self._load_rank(self.plan.ranks[rank])
            except LoadFailed as error:
                if error.code == FaultCode.SOURCE_MISMATCH:
                    raise
                failed[rank] = error

        with before_other_sessions():  # Starting ranks wait until their shards are loaded.
            await together(*(load(rank) for rank in self.here.ranks))
        if failed:
            raise failed[min(failed)]

    @property
    def restored_from(self) -> tuple[Literal["local", "peer", "s3"], ...]:
        """Source of the base of each local rank that has a base, in the order of the ranks."""
        return tuple(self._restored_from[rank] for rank in self.here.ranks if rank in self._restored_from)

    def adopt(self) -> None:
        """Take over the running generation from an earlier agent process on this node, with its slots and pages."""
        for rank in self._node.store.shards:
            if rank not in self.here.ranks:  # incoming transfers of the slot ended with the earlier process
                self._node.store.settle_copiers(rank)
        self._node.listener.admit(self._credentials, self._serve)
        self._open_shards()
        for shard in self.shards.values():
            shard.adopt()
            self._committed = max(self._committed, shard.committed)

    def _open_shards(self) -> None:
        for rank in self.here.ranks:
            plan = self.plan.ranks[rank]
            self.shards[rank] = OwnedShard(
                rank=rank,
                generation=self.plan.generation,
                core=Shard.begin(self.plan.base_step, plan.holders[1:]),
                base=self._base(rank),
                store=self._node.store,
                page=RankPage(self._node.store.page_path(rank), generation=self.plan.generation),
                now=self._node.now,
                on_change=self._shard_changed,
            )

    async def _load_rank(self, rank: RankPlan, sources: Sequence[ShardSource] | None = None) -> None:
        """Load the base of one rank into a slot of this node, and verify it.

        The member tries the sources in this order: this node, other nodes, S3. `sources` replaces the plan's list of
        sources.
        """
        refusals, is_mismatch, has_room = [], True, True
        shard = self.shards[rank.rank]
        for source in rank.sources if sources is None else sources:
            begun = time.monotonic()
            shard.begin_load()
            try:
                match source.kind:
                    case "local":
                        await self._load_local(rank.rank, source)
                    case "peer":
                        await self._load_peer(rank.rank, source)
                    case "s3":
                        await self._load_s3(rank.rank, source)
            except (PeerError, StorageError, NoRoom, ProtocolError, TimeoutError) as error:
                refusals.append(f"{source.kind}{f' {source.node_id}' if source.node_id else ''}: {error}")
                is_mismatch = is_mismatch and isinstance(error, (ShardRejected, CorruptCheckpoint, ObjectMissing))
                has_room = has_room and not isinstance(error, NoRoom)
                log.warning("rank %d step %d is not to be had from %s", rank.rank, source.step, refusals[-1])
                continue
            log.info(
                "rank %d: step %d restored from %s in %.3f s",
                rank.rank,
                source.step,
                source.kind,
                time.monotonic() - begun,
            )
            slot = shard.slot(self.plan.base_step)
            assert slot is not None, "what was loaded is sealed"
            self.lines.arrived(rank.rank, slot.file, slot.file.header, slot.file.header.payload_bytes)
            self._restored_from[rank.rank] = source.kind
            return
        if rank.sources:
            code = (
                FaultCode.SOURCE_MISMATCH
                if is_mismatch
                else FaultCode.SOURCE_UNAVAILABLE
                if has_room
                else FaultCode.MEMORY_FULL
            )
            raise LoadFailed(
                code, f"step {self.plan.base_step} of rank {rank.rank}: " + "; ".join(refusals), is_permanent=False
            )

    async def _regain_base(self, shard: OwnedShard) -> None:
        """Fetch a base that this node has lost during a restart of its agent.

        This rank cannot vote before the base is available. Failed attempts are repeated until the base is on this node
        or is no longer needed.
        """
        rank = self.plan.ranks[shard.rank]
        asked = {source.node_id for source in rank.sources if source.kind == "peer"}
        held = [
            # A holder may have received the base from this node earlier.
            structs.replace(rank.sources[0], kind="peer", node_id=peer, object=None)
            for peer in rank.holders[1:]
            if peer not in asked
        ]
        sources = [*held, *(source for source in rank.sources if source.kind != "local")]
        while sources and shard.committed == NONE:
            if shard.page.rank().copying == NONE:
                self._node.store.settle_copiers(shard.rank)
            try:
                await self._load_rank(rank, sources)
            except LoadFailed as error:
                log.warning("the base of rank %d is lost here: %s", shard.rank, error)
                await asyncio.sleep(REGAIN_SECONDS)
            else:
                shard.seal(self.plan.base_step)
                return

    async def _load_local(self, rank: Rank, source: ShardSource) -> None:
        slot = self._node.store.sealed(rank, Content(source.origin_generation, source.step))
        if slot is None or slot.file.header.payload_digest != source.digest:
            raise ShardRejected("no slot here holds it")
        if not await self._node.store.verify(slot, threads=self._share(VERIFY_THREADS), is_pressing=True):
            raise ShardRejected("the slot no longer hashes to its digest")

    async def _load_peer(self, rank: Rank, source: ShardSource) -> None:
        timeouts = self.plan.timeouts
        await fetch_shard(
            _PeerDialler(self, source.node_id or NodeId(""), "fetch", NO_RANK),
            rank,
            source,
            self._node.store,
            keep=self._keep(rank, NONE) - {Content(source.origin_generation, source.step)},
            slot_count=self._slot_count,
            answer_seconds=timeouts.coordinator_deadline_seconds,
            silence_seconds=timeouts.holder_deadline_seconds,
            arrived=partial(self.lines.arrived, rank),
            stream_limit=self._share(OWN_STREAMS),
        )

    def _share(self, count: int) -> int:
        """Return one rank's share of `count` threads, because all local ranks load at the same time."""
        return max(1, count // len(self.here.ranks))

    async def _load_s3(self, rank: Rank, source: ShardSource) -> None:
        content = Content(source.origin_generation, source.step)
        keep = self._keep(rank, NONE) - {content}
        await download_shard(
            self._node.objects,
            source,
            self._node.store,
            rank=rank,
            content=content,
            keep=keep,
            slot_count=self._slot_count,
        )

    @property
    def _tree(self) -> Path:
        return self._node.state / "sources" / self.plan.run

    async def _load_source(self) -> Path:
        make_way(self._tree.parent, self._node.user)
        try:
            return await fetch_source(self._node.archives, self.plan.script, self._tree)
        except StorageError as error:
            words = f"the source archive cannot be fetched: {error}"
            raise LoadFailed.lacking(
                self.plan.parent, "archive_unavailable", words, is_passing=error.retryable
            ) from error
        except SourceRefused as error:
            raise LoadFailed.lacking(self.plan.parent, "source_refused", str(error), is_passing=False) from error

    # -- rounds

    def begin_rounds(self, *, is_restarted: bool) -> None:
        """Start to take part in the rounds. On the coordinator's node, also start the coordinator.

        Args:
            is_restarted: True if the agent adopted a running generation. The coordinator then waits for a report of
                every rank before it proposes a step.
        """
        plan = self.plan
        self._node.store.strays = self._node.store.strays.loaded()
        self.lines.welcome_all()
        if plan.coordinator == self._node.node_id:
            begin = Coordinator.recover if is_restarted else Coordinator.begin
            core = begin(
                world_size=plan.world_size,
                base=plan.base_step,
                every_steps=plan.checkpoint.every_steps,
                slot_count=self._slot_count,
                stored=plan.checkpoint.stored_step,
                strayed=strayed(plan),
            )
            self.server = RoundServer(
                plan.generation, core, final_round_seconds=plan.timeouts.final_round_seconds, now=self._node.now
            )
            self._begin(partial(self._rounds.run_local, self.server), "rounds")
        else:
            patience = plan.timeouts.holder_deadline_seconds
            dial = partial(self.dial, kind="round")
            self._begin(partial(self._rounds.run, dial, patience_seconds=patience, is_restarted=is_restarted), "rounds")
        for shard in self.shards.values():
            if shard.lacks_base:
                self._begin(partial(self._supply_regained, shard), f"the base of rank {shard.rank}")
            else:
                self._supply(shard)

    def _supply(self, shard: OwnedShard) -> None:
        for peer in shard.peers:
            sender = ReplicaSender(
                shard,
                peer,
                _PeerDialler(self, peer, "replica", shard.rank),
                self._node.store,
                self.pacer,
                holder_deadline_seconds=self.plan.timeouts.holder_deadline_seconds,
                printed=self._node.printed,
            )
            self._begin(sender.run, f"replicas of rank {shard.rank} to {peer}")

    async def _supply_regained(self, shard: OwnedShard) -> None:
        """Start the senders after the base is regained.

        A holder lists its steps when a session begins, and the owner counts only those steps that the owner also has.
        So the session must not begin earlier.
        """
        await self._regain_base(shard)
        self._supply(shard)

    async def dial(self, peer: NodeId, kind: SessionKind, owner_rank: Rank = NO_RANK) -> TcpSession:
        """Open a session to a member of this generation (see `tcp.dial`)."""
        node = self.plan.node(peer)
        return await dial(
            self._credentials,
            peer=peer,
            address=node.address,
            port=node.peer_port,
            kind=kind,
            owner_rank=owner_rank,
            source=NetworkCard(self._node.address),
        )

    async def dial_stream(self, session: Session, number: int) -> socket.socket:
        """Open a stream of a session, over the next pair of network cards (see `Dialler`)."""

        async def over(card: NetworkCard, to: Address) -> TcpSession:
            address, port = to
            return await dial(
                self._credentials,
                peer=session.peer,
                address=address,
                port=port,
                kind="stream",
                owner_rank=session.opened.owner_rank,
                source=card,
                session=session.opened.nonce,
            )

        return (await self._ways.open(session.peer, session.addresses, number, over)).detach()

    async def _serve(self, session: TcpSession) -> None:
        match session.opened.kind:
            case "replica":
                await self._receiver.replica(session)
            case "fetch":
                await self._receiver.fetch(session)
            case "stream":
                await self._receiver.stream(session)
            case "round":
                await self._rounds.serve(session)

    def _keep_distance(self, distance: int) -> None:
        """Pass the distance between proposals to the coordinator if the coordinator runs on this node.

        All ranks have the same iterations, so the measurements of the coordinator's node suffice.
        """
        if self.server is not None:
            self.server.keep_distance(distance)

    def _keep_pacing(self, pacing: Pacing) -> None:
        """Pass the pacing mode to the coordinator if the coordinator runs on this node.

        The coordinator's mode applies to all nodes.
        """
        if self.server is not None:
            self.server.keep_pacing(pacing)

    def _round_state(self) -> tuple[RankRound, ...]:
        return tuple(shard.round() for shard in self.shards.values())

    def _hear(self, announcement: Announcement) -> None:
        self._committed = max(self._committed, announcement.committed)
        self._persist = announcement.persist_step
        self._node.store.strays = self._node.store.strays.heard(announcement.committed, announcement.held)
        self._node.store.drop_strays()
        for shard in self.shards.values():
            self._upload_if_due(shard)
        self.lines.hear(announcement)
        for shard in self.shards.values():
            if is_superseded(shard.pinned, proposed=announcement.proposed, persist=announcement.persist_step):
                log.info(
                    "the upload of step %d of rank %d is cancelled for the final step %d",
                    shard.pinned,
                    shard.rank,
                    announcement.proposed,
                )
                self._keep_upload_task(self._end_upload(shard), f"end of the upload of rank {shard.rank}")
        self._tell()

    def _shard_changed(self) -> None:
        self._rounds.changed.notify()
        self._tell()

    def _tell(self) -> None:
        """Report important changes to the control plane immediately.

        Mere progress waits for the next regular report.
        """
        finished = self.server is not None and self.server.ending
        visible = (finished, len(self.uploads), *(shard.reported for shard in self.shards.values()))
        if visible != self._told:
            self._told = visible
            self._on_change()

    # -- uploads to S3

    def _upload_if_due(self, shard: OwnedShard) -> None:
        """Upload the step that the coordinator marked, in the background.

        The slot is pinned immediately, before it can be granted again. Uploads of one shard run one after another.
        """
        step, is_kept = self._persist, self._persist in (self._committed, self.plan.base_step)
        slot = shard.slot(step) if step > shard.uploaded and is_kept and shard.pinned == NONE else None
        if slot is None:
            return
        shard.pinned = shard.uploaded = step
        slot.pins += 1

        async def work() -> None:
            subject = f"rank {shard.rank}"
            try:
                digests = await self._node.store.digests(slot)
                if digests is None:
                    raise CorruptCheckpoint(f"step {step} in memory no longer hashes to its digest")
                uploaded = await upload_shard(self._node.objects, slot.file, digests.known, self.plan, rank=shard.rank)
                self.uploads = [*self.uploads[-2 * len(self.shards) + 1 :], uploaded]
                self.lines.mended("upload_failed", subject)
            except StorageError as error:
                self.lines.fault(
                    "upload_failed",
                    f"step {step} of {subject} is not in S3: {error}",
                    is_permanent=False,
                    subject=subject,
                )
            finally:
                slot.pins -= 1
                shard.pinned = NONE
                self._shard_changed()
            self._upload_if_due(shard)

        self._uploading[shard.rank] = self._keep_upload_task(work(), f"upload rank {shard.rank} step {step}")

    async def _end_upload(self, shard: OwnedShard) -> None:
        """Cancel the upload of a shard, then grant the shard's slot for the final step."""
        await end(self._uploading[shard.rank])
        self.lines.grant_if_due(shard)

    def _keep_upload_task(self, work: Coroutine[object, object, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._upload_tasks.add(task)
        task.add_done_callback(self._upload_tasks.discard)
        return task

    async def uploads_done(self) -> None:
        """Wait until no upload is running."""
        while self._upload_tasks:
            await asyncio.wait(list(self._upload_tasks))

    # -- status for the control plane

    def rank_statuses(self) -> tuple[RankStatus, ...]:
        """Return the phase and boundary of each local rank, and the seconds since the rank last made progress.

        Each call updates the phase clocks.
        """
        now, statuses = time.monotonic(), []
        for shard in self.shards.values():
            half = shard.page.rank()
            shard.note_first(half)
            clock = self._clocks[shard.rank] = self._clocks[shard.rank].seen(half, now)
            statuses.append(
                RankStatus(
                    rank=shard.rank,
                    boundary=Step(half.boundary),
                    phase=clock.phase,
                    still_seconds=clock.still_seconds,
                    limit_seconds=clock.limit_seconds,
                    passed_at_seconds=shard.passed[1] if shard.passed[0] == half.boundary else 0.0,
                    first_passed_at_seconds=shard.first_passed_at,
                )
            )
        return tuple(statuses)

    def target(self) -> Step:
        """Return the last step of the training, as its ranks have announced it; 0 before an announcement."""
        return Step(max((shard.page.rank().target for shard in self.shards.values()), default=0))

    def begin_clocks(self) -> None:
        """Reset the phase clocks when ranks are started, because the time before the start does not count."""
        self._clocks = {rank: PhaseClock(self.plan.base_step) for rank in self.here.ranks}

    def longest(self) -> dict[str, float]:
        """Return the longest finished duration of each phase on this node's ranks, in seconds."""
        longest: dict[str, float] = {}
        for clock in self._clocks.values():
            for phase, seconds in clock.longest.items():
                longest[phase] = max(longest.get(phase, 0.0), seconds)
        return longest

    def protection(self) -> tuple[ShardProtection, ...]:
        """Return the protection status of this node's shards."""
        return tuple(shard.protection(self.plan.ranks[rank].holders) for rank, shard in self.shards.items())

    def silent_peers(self) -> tuple[NodeId, ...]:
        """Return the neighbours in the tree of agents that have fallen silent."""
        return tuple(sorted(self._rounds.silent))

    def faults(self) -> tuple[NodeFault, ...]:
        """Return the present faults of the ranks and of this node's part in the generation."""
        since, deadline = self._rounds.silent_since, self.plan.timeouts.coordinator_deadline_seconds
        faults = tuple(self.lines.faults.values())
        if since is None or asyncio.get_running_loop().time() - since <= deadline:
            return faults
        message = f"{self._node.node_id} has not reached the coordinator {self.plan.coordinator} for {deadline:g} s"
        return (*faults, NodeFault(code=FaultCode.COORDINATOR_UNREACHABLE, message=message, is_permanent=False))

    def round_status(self) -> RoundStatus | None:
        """Return the coordinator's state; None on every other node."""
        return self.server.status() if self.server is not None else None

    # -- background tasks and shutdown

    def _begin(self, work: Callable[[], Awaitable[None]], name: str) -> None:
        """Run a part of the generation in the background until `detach`.

        If the part ends with an unexpected exception, report the fault and start the part again. Without the restart,
        commits would stop without a visible cause. A full disk is reported as a fault of the node; the fault
        ends by itself.
        """

        async def run() -> None:
            while True:
                try:
                    return await work()
                except Exception as error:
                    log.exception("%s raised an unexpected error and starts again in %g s", name, AGAIN_SECONDS)
                    if self._node.full_disks.note(error) is None:
                        self.lines.fault("agent_error", f"{name} ended: {error!r}", is_permanent=False, subject=name)
                    else:
                        self._on_change()
                await asyncio.sleep(AGAIN_SECONDS)

        task = asyncio.create_task(run(), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def detach(self) -> None:
        """End every session, sender, upload and rank connection of this generation.

        The ranks continue to train, and the next agent process adopts the slots and pages.
        """
        await self._node.listener.revoke()
        await end(*self._tasks, *self._upload_tasks)
        if self.server is not None:
            self.server.close()
        await self.lines.close()
        for shard in self.shards.values():
            shard.page.close()

    async def close(self) -> None:
        """End the generation on this node after its ranks have exited.

        Unsealed slots are emptied, sealed slots stay.
        """
        await self.detach()
        for slots in self._node.store.shards.values():
            for slot in slots:
                if slot.file.header.state is SlotState.WRITING:
                    slot.is_busy = False
                    slot.file.empty()
