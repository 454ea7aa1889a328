"""Decides about the fleets. A *pass* over a fleet is: claim the lease, observe, decide, store and execute the decision.

Invariant: a pass stores all its results under the fleet's lease in one transaction, or none. Its calls to AWS follow
from the stored decision.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

from control_plane.core.actions import FleetDecision, GroupAction, Send, SendKeepEvidence
from control_plane.core.fleets import decide
from control_plane.core.observed.specs import Policy
from control_plane.db import fleets
from control_plane.db.errors import NotFound, StaleLease
from control_plane.db.leases import Lease
from control_plane.loop import records
from control_plane.loop.cloud_watch import CloudView, CloudWatch
from control_plane.loop.context import LoopContext
from control_plane.loop.decision_store import DecisionStore
from control_plane.loop.executor import Executor
from control_plane.loop.held_leases import HeldLeases
from control_plane.loop.observer import Observer, SilenceClock
from everstep.protocol.agent_messages import Release
from everstep.protocol.ids import FleetName

log = logging.getLogger(__name__)


@dataclass(eq=False)
class FleetLoop:
    """Makes passes over all fleets, and disconnects agents of fleets that another server manages."""

    context: LoopContext
    observer: Observer
    executor: Executor
    store: DecisionStore
    cloud: CloudWatch
    silence_clock: SilenceClock
    leases: HeldLeases
    stored: Callable[[FleetName], None]
    """Called with a fleet's name after the loop has stored a decision."""
    _fleets: tuple[FleetName, ...] = ()

    async def sweep(self) -> None:
        """Make one pass per fleet. Disconnect the agents of fleets that another server manages."""
        failed = set(self._fleets)
        try:
            self._fleets = await asyncio.to_thread(self._fleet_names)
            failed.clear()
            for name in self._fleets:
                try:
                    await self.make_pass(name)
                except StaleLease as stale:
                    log.info("fleet %s: %s", name, stale)
                    self.leases.lose(name)
                except NotFound as gone:
                    log.info("fleet %s: %s", name, gone)
                    self.leases.drop(name)
                except Exception:
                    log.exception("fleet %s: the pass failed; the next pass retries", name)
                    failed.add(name)
                    if self.leases.has_lapsed(name):
                        self._leave(self._fleets)
        finally:
            self._leave(failed)

    async def make_pass(self, name: FleetName) -> FleetDecision | None:
        """Make one pass over a fleet and return its decision. Return None without the lease or an answer of AWS.

        Raises StaleLease if another server took the fleet over during the pass; nothing was stored. Raises NotFound if
        the fleet was removed.
        """
        served_before = self.leases.holds(name)
        lease = await asyncio.to_thread(self.leases.hold, name)
        if lease is None:
            return None
        if not served_before:
            # This server has just got the fleet's lease. Wake the job loop, which may now handle the fleet's jobs.
            self.context.registry.hint()
        view = self.cloud.group(name)
        if view is None:
            return None
        with self.context.loop_metrics.measured_pass("fleet", self.context.monotonic):
            return await self._reconcile(lease, name, view)

    def _leave(self, failed: Collection[FleetName]) -> None:
        """Disconnect the agents of fleets that another control-plane server manages."""
        # The other server would consider an agent silent that stays connected here. If the last pass over a fleet
        # failed and this server's lease has expired, another server may manage the fleet by now.
        leases = self.leases
        elsewhere = frozenset(
            name for name in self._fleets if leases.sees_another(name) or (name in failed and leases.has_lapsed(name))
        )
        self.context.registry.leave(elsewhere)
        self.context.readiness.settle(
            [name for name in self._fleets if not leases.holds(name) and not leases.sees_another(name)]
        )
        self.silence_clock.begin_anew(elsewhere)

    async def _reconcile(self, lease: Lease, name: FleetName, view: CloudView) -> FleetDecision:
        history = await asyncio.to_thread(self.observer.read_history, name)
        now = self.context.now().timestamp()
        stored = await asyncio.to_thread(self.observer.read_fleet, name, records.at(now))
        spec, observed = self.observer.observe_fleet(stored, view, history)
        decision = decide(now, spec, observed, Policy(timeouts=self.context.timeouts, pause=stored.pause))
        facts = self.cloud.facts(name)
        if not await asyncio.to_thread(self.store.apply_fleet, lease, stored, decision, view, facts, now):
            self.context.registry.hint()
            return decision
        self.stored(name)
        for node_id in decision.forgotten:
            self.context.registry.forget(node_id)
        if decision.records:
            self.context.registry.hint()
        self.executor.change_group(
            lease,
            [action for action in decision.actions if isinstance(action, GroupAction)],
            partial(self.cloud.changed, name),
        )
        for action in decision.actions:
            if isinstance(action, SendKeepEvidence):
                self.executor.keep_evidence(lease, action)
                continue
            if isinstance(action, Send) and isinstance(action.message, Release) and action.message.unstored_count:
                member = observed.nodes[action.node_id].member
                assert member is not None
                await asyncio.to_thread(self.store.record_outputs, name, action.node_id, member, now)
            self.executor.send(action)
        return decision

    def _fleet_names(self) -> tuple[FleetName, ...]:
        with self.context.database.read() as session:
            return tuple(map(FleetName, fleets.names(session)))
