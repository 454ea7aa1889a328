"""Runs all loops of a control-plane server (docs/design.md#control-loops).

    job loop     woken by agents and requests, else about once a second       lease per job, several passes at a time
    fleet loop   as the job loop; also woken by new answers of AWS            lease per fleet
    cloud watch  polls AWS in the background
    retention    deletes rows that are older than their limit, once a minute
    verifier     verifies checkpoints at a user's request
    keeper       deletes checkpoints
    orphans      deletes uploaded shards that no checkpoint can contain
    uploads      deletes uploads of sources that no client completed, once an hour
    duties       records events about duties that begin or end, every 5 s
    notices      reads AWS events from the queue, if one is configured

Invariant: the leases are released only after all passes and all background calls have ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from control_plane.core.timeouts import grace_seconds
from control_plane.db.leases import Lease
from control_plane.db.retention import prune
from control_plane.loop.checkpoint_keeper import DELETION_CHECK_SECONDS, CheckpointKeeper
from control_plane.loop.cloud_watch import CloudWatch
from control_plane.loop.context import LoopContext
from control_plane.loop.decision_store import DecisionStore
from control_plane.loop.duty_watch import DUTY_CHECK_SECONDS, DutyWatch
from control_plane.loop.executor import Executor
from control_plane.loop.fleet_loop import FleetLoop
from control_plane.loop.held_leases import HeldLeases
from control_plane.loop.job_loop import JobLoop
from control_plane.loop.loop_metrics import LOOPS, Loop
from control_plane.loop.notice_reader import NoticeReader
from control_plane.loop.observer import Observer, SilenceClock
from control_plane.loop.orphan_keeper import ORPHAN_CHECK_SECONDS, OrphanKeeper
from control_plane.loop.repeating import pause, repeat
from control_plane.loop.upload_keeper import EXPIRY_CHECK_SECONDS, UploadKeeper
from control_plane.loop.verifier import VERIFICATION_POLL_SECONDS, Verifier

log = logging.getLogger(__name__)

SWEEP_SECONDS = 1.0
PRUNE_SECONDS = 60.0
PAUSE_SECONDS = 0.005
"""Shortest pause after a sweep. It lasts at least as long as the sweep, so a loop is busy at most half of the time."""
BEATS_PER_LEASE = 6


class Runner:
    """All loops of one control-plane server."""

    def __init__(self, context: LoopContext) -> None:
        self._context = context
        context.readiness.expect(LOOPS, grace_seconds(context.timeouts), context.monotonic)
        self.job_leases = HeldLeases(context, "job")
        self.fleet_leases = HeldLeases(context, "fleet")
        store = DecisionStore(context.database, self.fleet_leases)
        self.cloud = CloudWatch(context, serves=lambda name: not self.fleet_leases.sees_another(name))
        context.loop_metrics.watch_view_age(self.cloud.view_age_seconds)
        self.silence_clock = SilenceClock(context.timeouts, context.monotonic)
        self.observer = Observer(context, self.cloud, self.silence_clock)
        self.executor = Executor(context, self._renewed)
        self.verifier = Verifier(context.database, context.objects, context.now)
        self.keeper = CheckpointKeeper(context.database, context.objects, context.now)
        self.orphans = OrphanKeeper(context.database, context.objects, context.now)
        self.duties = DutyWatch(context.database, context.registry, context.now)
        self.uploads = UploadKeeper(context.objects, context.bucket, context.now)
        self.notices = None if context.events is None else NoticeReader(context.events, context, self.cloud)
        parts = context, self.observer, self.executor, store, self.cloud
        self.job_loop = JobLoop(*parts, leases=self.job_leases, fleet_leases=self.fleet_leases)
        self.fleet_loop = FleetLoop(
            *parts, silence_clock=self.silence_clock, leases=self.fleet_leases, stored=self.job_loop.forget_rows
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Run all loops until `stop` is set, then release all leases."""
        try:
            await self._work(stop)
        finally:
            # After an error or a cancellation, passes over jobs may still run: end them before the leases are released.
            self.job_loop.cancel()
        await self.executor.close()
        await asyncio.to_thread(self.job_leases.release_all)
        await asyncio.to_thread(self.fleet_leases.release_all)

    async def _work(self, stop: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._beat(stop))
            group.create_task(self.cloud.run(stop))
            group.create_task(self.sweep_repeatedly(stop, self.fleet_loop.sweep, "fleet"))
            group.create_task(self.sweep_repeatedly(stop, self.job_loop.sweep, "job"))
            group.create_task(self.prune_repeatedly(stop))
            for work, seconds, trouble in self.periodic_work(stop):
                group.create_task(repeat(work, stop, seconds=seconds, trouble=f"could not {trouble}"))
            if self.notices is not None:
                group.create_task(self.notices.run(stop))
            await stop.wait()
            self.cloud.poll_now()
            self._context.registry.hint()
            await self.job_loop.close()

    def periodic_work(self, stop: asyncio.Event) -> tuple[tuple[Callable[[], object], float, str], ...]:
        """Return the work that threads repeat: a function, the pause after each call in seconds, and what it does."""
        return (
            (partial(self.verifier.verify_next, stop.is_set), VERIFICATION_POLL_SECONDS, "verify a checkpoint"),
            (self.keeper.delete_due, DELETION_CHECK_SECONDS, "delete checkpoints"),
            (self.orphans.delete_due, ORPHAN_CHECK_SECONDS, "delete orphaned shards"),
            (self.uploads.delete_due, EXPIRY_CHECK_SECONDS, "delete source uploads that no client completed"),
            (self.duties.compare, DUTY_CHECK_SECONDS, "compare the duties"),
        )

    async def sweep_repeatedly(self, stop: asyncio.Event, sweep: Callable[[], Awaitable[None]], loop: Loop) -> None:
        """Repeat a loop's sweep until `stop` is set, at a change, silence of `lease_seconds`, or `SWEEP_SECONDS`."""
        seen = 0
        while not stop.is_set():
            begun = self._context.monotonic()
            try:
                await sweep()
                self._context.readiness.swept(loop)
            except Exception as error:
                self._context.readiness.failed(loop, error)
                log.exception("a sweep of the %s loop failed; the next sweep follows", loop)
            await pause(max(PAUSE_SECONDS, self._context.monotonic() - begun), until=stop)
            verdict_in = self.silence_clock.verdict_in(self._context.registry.views().values())
            seen = await self._context.registry.wait_for_change(seen, min(SWEEP_SECONDS, verdict_in + PAUSE_SECONDS))

    async def _beat(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            self.silence_clock.beat()
            await pause(self._context.timeouts.lease_seconds / BEATS_PER_LEASE, until=stop)

    async def prune_repeatedly(self, stop: asyncio.Event) -> None:
        """Delete database rows older than their retention until `stop` is set, in batches with pauses between them."""
        await repeat(
            self.prune,
            stop,
            seconds=PRUNE_SECONDS,
            trouble="could not delete old rows",
            more_seconds=SWEEP_SECONDS,
        )

    def prune(self) -> bool:
        """Delete a batch of rows older than their retention. Return whether more may exist. Blocks."""
        with self._context.database.write() as session:
            counts = prune(session, self._context.retention, self._context.now())
        if any(counts.values()):
            log.info("deleted old rows: %s", ", ".join(f"{count} {kind}" for kind, count in counts.items() if count))
        return max(counts.values()) >= self._context.retention.batch_rows

    def _renewed(self, lease: Lease) -> Lease:
        return (self.job_leases if lease.kind == "job" else self.fleet_leases).renewed(lease)
