"""What AWS says, looked up in the background: the loops read the newest answer and never wait for one.

Polled every `POLL_SECONDS`, and at once when an agent's line breaks or a change was asked for. Notices are hints to look, never facts.

Invariant: an answer says when the question was asked; one asked before a change is not used to decide about that change again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from control_plane.cloud.contract import drift
from control_plane.cloud.errors import CloudError
from control_plane.cloud.operator import TERMINATING_TRANSITION, CloudOperator, GroupState, InstanceState
from control_plane.core.observed import GroupMember, GroupObserved, InstanceCondition
from control_plane.core.states import NodeState
from control_plane.db import fleets, nodes
from control_plane.db.session import Database
from everstep.protocol.ids import FleetName, NodeId

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
FORGET_SECONDS = 30.0
"""What AWS said that long ago says nothing about an instance that ran; that one has ended stays said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudView:
    """One answer about a fleet."""

    asked_at: float
    """Monotonic seconds."""
    group: GroupObserved
    instance_type: str
    availability_zone: str
    conditions: Mapping[NodeId, tuple[InstanceCondition, str]]
    """By node: what AWS says of it, in AWS's words."""


class CloudWatch:
    """The newest answer of AWS about every fleet. One per server; its methods run on the server's event loop.

    Args:
        database: for the fleets and the nodes to ask about.
        operator: whom to ask; called in threads.
        when_changed: called when an answer differs from the one before.
        monotonic: seconds of a clock that never jumps.
    """

    def __init__(
        self, database: Database, operator: CloudOperator, when_changed: Callable[[], None], monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._database = database
        self._operator = operator
        self._when_changed = when_changed
        self._monotonic = monotonic
        self._views: dict[FleetName, CloudView] = {}
        self._not_before: dict[FleetName, float] = {}
        self._failing: dict[FleetName, str] = {}
        self._look = asyncio.Event()

    async def run(self, stop: asyncio.Event) -> None:
        """Poll until `stop` is set. Everything that goes wrong with one fleet is told once and tried again."""
        while not stop.is_set():
            self._look.clear()
            await self.poll()
            try:
                async with asyncio.timeout(POLL_SECONDS):
                    await self._look.wait()
            except TimeoutError:
                continue

    async def poll(self) -> None:
        """Ask about every fleet once."""
        for fleet in await asyncio.to_thread(self._fleets):
            name = FleetName(fleet.name)
            asked_at = self._monotonic()
            try:
                view = await asyncio.to_thread(self._ask, fleet, asked_at)
            except CloudError as error:
                if self._failing.get(name) != str(error):
                    log.warning("fleet %s: the cloud does not answer: %s", name, error)
                self._failing[name] = str(error)
                continue
            self._failing.pop(name, None)
            before = self._views.get(name)
            self._views[name] = view
            if before is None or (before.group, before.conditions) != (view.group, view.conditions):
                self._when_changed()

    def look_now(self) -> None:
        """Poll at once: something may have changed."""
        self._look.set()

    def changed(self, fleet: FleetName) -> None:
        """Say that a change of the fleet's group was just asked for: answers to older questions are void."""
        self._not_before[fleet] = self._monotonic()
        self._look.set()

    def group(self, fleet: FleetName) -> CloudView | None:
        """Return the newest answer that knows of all changes asked for, or None: there is nothing to decide upon yet."""
        view = self._views.get(fleet)
        return view if view is not None and view.asked_at > self._not_before.get(fleet, float("-inf")) else None

    def condition(self, fleet: FleetName, node_id: NodeId) -> tuple[InstanceCondition, str]:
        """Return what AWS said last of a node, in which words. That it has ended stays true; that it ran does not."""
        view = self._views.get(fleet)
        if view is None:
            return InstanceCondition.UNKNOWN, ""
        condition, words = view.conditions.get(node_id, (InstanceCondition.UNKNOWN, ""))
        if condition is InstanceCondition.PRESENT and self._monotonic() - view.asked_at > FORGET_SECONDS:
            return InstanceCondition.UNKNOWN, ""
        return condition, words

    def launch_failures(self, fleet: FleetName) -> tuple[str, ...]:
        """Return why instances do not come, in AWS's words; empty when they do."""
        view = self._views.get(fleet)
        return view.group.launch_failures if view is not None else ()

    def _fleets(self) -> tuple[fleets.FleetRecord, ...]:
        with self._database.read() as session:
            return fleets.every(session)

    def _ask(self, fleet: fleets.FleetRecord, asked_at: float) -> CloudView:
        group = self._operator.describe_group(fleet.auto_scaling_group_name)
        with self._database.read() as session:
            known = {NodeId(node.id) for node in nodes.of_fleet(session, fleet.name) if node.state != NodeState.GONE}
        instances = self._operator.describe_instances(sorted(known | {member.instance_id for member in group.members}))
        are_missing = sum(not member.is_leaving for member in group.members) < group.desired_count
        failures = self._operator.recent_launch_failures(fleet.auto_scaling_group_name) if are_missing else ()
        return CloudView(
            asked_at=asked_at,
            group=_group(group, tuple(failure.message for failure in failures)),
            instance_type=group.instance_type,
            availability_zone=", ".join(group.availability_zones),
            conditions=_conditions(group, instances),
        )


def _group(group: GroupState, failures: tuple[str, ...]) -> GroupObserved:
    return GroupObserved(
        desired_count=group.desired_count,
        min_size=group.min_size,
        max_size=group.max_size,
        members=tuple(
            GroupMember(
                node_id=member.instance_id,
                is_leaving=member.is_leaving,
                awaits_termination=member.awaits_termination,
                lifecycle_state=member.lifecycle_state,
            )
            for member in group.members
        ),
        termination_hooks=tuple(hook.name for hook in group.hooks if hook.transition == TERMINATING_TRANSITION),
        drift=drift(group),
        launch_failures=failures,
    )


def _conditions(group: GroupState, instances: Mapping[NodeId, InstanceState]) -> dict[NodeId, tuple[InstanceCondition, str]]:
    """Return what AWS says of each node; a group that is ending a member says so before EC2 does."""
    conditions = {}
    for node_id, instance in instances.items():
        words = f"{instance.state.value} ({instance.state_reason})" if instance.state_reason else instance.state.value
        conditions[node_id] = (InstanceCondition.ENDED if instance.state.has_ended else InstanceCondition.PRESENT, words)
    for member in group.members:
        if member.is_leaving and conditions.get(member.instance_id, (None, ""))[0] is not InstanceCondition.ENDED:
            conditions[member.instance_id] = (InstanceCondition.ENDED, f"leaving its Auto Scaling group ({member.lifecycle_state})")
    return conditions
