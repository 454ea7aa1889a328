"""What AWS says, looked up in the background: the loops read the newest answer and never wait for one.

Polled every `POLL_SECONDS`, and at once when an agent's line breaks, an event came or a change was asked for. What EC2
has scheduled and where instances hang in the network changes seldom and is asked every `CLOSE_SECONDS`, at once for
instances that are new. How EC2's status checks go is asked with it, and every `SUSPECT_SECONDS` of instances whose
agents are silent: of nobody else does it matter.

Invariant: an answer says when the question was asked; one asked before a change is not used to decide about that change
again. What AWS announces for an instance goes to the database, where the loop that owns its job finds it, whichever
replica asked.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial

from control_plane.cloud.contract import MAX_HOOK_TIMEOUT, drift
from control_plane.cloud.errors import CloudError
from control_plane.cloud.operator import (
    TERMINATING_TRANSITION,
    CloudOperator,
    Ec2State,
    GroupState,
    InstanceState,
    LaunchFailure,
    MemberState,
    ScheduledEvent,
)
from control_plane.core.capacity import failing_since, waiting_words
from control_plane.core.observed.fleets import GroupMember, GroupObserved
from control_plane.core.observed.nodes import InstanceCondition
from control_plane.core.states import NodeState
from control_plane.core.timeouts import FORGET_SECONDS
from control_plane.db import fleets, nodes, notices
from control_plane.db.notices import NoticeRecord, NoticeSource
from control_plane.db.session import Database
from control_plane.loop.repeating import pause
from control_plane.steady_clock import steady_now
from everstep.protocol.agent_messages import NoticeKind
from everstep.protocol.ids import FleetName, NodeId

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
FLEETS_AT_ONCE = 4
"""Are asked about; each call has its thread."""
CLOSE_SECONDS = 60.0
SUSPECT_SECONDS = 5.0
"""EC2 checks once a minute; more often than this there is nothing new."""


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


@dataclass(slots=True)
class _Known:
    """What is kept of a fleet between two answers."""

    looked_closely_at: float = float("-inf")
    asked: set[NodeId] = field(default_factory=set)
    """Whose network nodes EC2 was asked for."""
    suspects: dict[NodeId, float] = field(default_factory=dict)
    """Whose agents are silent, and when that was last said; monotonic seconds."""
    looked_at_suspects_at: float = float("-inf")
    failed_checks: dict[NodeId, tuple[float, tuple[str, ...]]] = field(default_factory=dict)
    """When EC2 was asked, monotonic seconds, and which status checks of an instance it called impaired."""
    domains: dict[NodeId, str] = field(default_factory=dict)
    launch_failures: tuple[LaunchFailure, ...] = ()
    """As AWS told of them last, while instances are missing."""
    has_held: bool = True
    """A terminating hook held one of its instances, or may have before this server started."""


class CloudWatch:
    """The newest answer of AWS about every fleet. One per server; its methods run on the server's event loop.

    Args:
        database: for the fleets and the nodes to ask about.
        operator: whom to ask; called in threads.
        when_changed: called when an answer differs from the one before.
        monotonic: seconds of a clock that never jumps.
        now: the time in UTC.
    """

    def __init__(
        self,
        database: Database,
        operator: CloudOperator,
        when_changed: Callable[[], None],
        monotonic: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = steady_now,
    ) -> None:
        self._database = database
        self._operator = operator
        self._when_changed = when_changed
        self._monotonic = monotonic
        self._views: dict[FleetName, CloudView] = {}
        self._not_before: dict[FleetName, float] = {}
        self._now = now
        self._failing: dict[str, str] = {}
        self._known: dict[FleetName, _Known] = {}
        self._asking: dict[FleetName, asyncio.Task[None]] = {}
        self._turns = asyncio.Semaphore(FLEETS_AT_ONCE)
        self._look = asyncio.Event()
        self._look_closer = asyncio.Event()

    async def run(self, stop: asyncio.Event) -> None:
        """Poll until `stop` is set. Everything that goes wrong with one fleet is told once and tried again."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._repeat(stop, partial(self.poll, patience_seconds=POLL_SECONDS), self._look))
                group.create_task(self._repeat(stop, self.survey, self._look_closer))
        finally:
            asking = list(self._asking.values())
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    async def _repeat(self, stop: asyncio.Event, ask: Callable[[], Awaitable[None]], wake: asyncio.Event) -> None:
        while not stop.is_set():
            wake.clear()
            try:
                await ask()
            except Exception:  # the database was away, say: nothing else looks at AWS meanwhile
                log.exception("looking at AWS failed; it is looked at again")
            await pause(POLL_SECONDS, until=wake)

    async def poll(self, *, patience_seconds: float | None = None) -> None:
        """Ask about every fleet that is not being asked about; several at a time, so that one whose calls hang, or take long, holds up no other.

        Args:
            patience_seconds: after which it returns although not all have been answered; None: when all have.
        """
        for fleet in await asyncio.to_thread(self._fleets):
            if (name := FleetName(fleet.name)) not in self._asking:
                task = self._asking[name] = asyncio.create_task(
                    self._poll_fleet(name, fleet), name=f"ask AWS about {name}"
                )
                task.add_done_callback(partial(self._answered, name))
        if self._asking:
            await asyncio.wait(self._asking.values(), timeout=patience_seconds)

    def _answered(self, name: FleetName, _: asyncio.Task[None]) -> None:
        del self._asking[name]

    async def _poll_fleet(self, name: FleetName, fleet: fleets.FleetRecord) -> None:
        async with self._turns:
            asked_at = self._monotonic()
            try:
                view = await asyncio.to_thread(self._ask, fleet, asked_at)
            except CloudError as error:
                self._tell_once(name, f"fleet {name}: the cloud does not answer: {error}")
                return
            except Exception:
                log.exception("fleet %s: what AWS says of it could not be read or stored; it is asked again", name)
                return
        self._failing.pop(name, None)
        before = self._views.get(name)
        self._views[name] = view
        if before is None or (before.group, before.conditions) != (view.group, view.conditions):
            self._when_changed()

    async def survey(self) -> None:
        """Ask what EC2 has scheduled and where instances hang, where that is due.

        Apart from `poll`: what is rare must not hold up what is urgent.
        """
        for name, view in list(self._views.items()):
            about = self._known.setdefault(name, _Known())
            try:
                is_news = await asyncio.to_thread(self._ask_closely, name, set(view.conditions), about)
            except Exception:
                log.exception("fleet %s: what EC2 says of its instances could not be stored; it is asked again", name)
                continue
            if is_news:
                self._when_changed()

    def look_now(self) -> None:
        """Poll at once: something may have changed."""
        self._look.set()
        self._look_closer.set()

    def look_closely(self) -> None:
        """Poll at once, and ask what EC2 has scheduled, too."""
        for known in self._known.values():
            known.looked_closely_at = float("-inf")
        self.look_now()

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

    def suspect(self, fleet: FleetName, node_id: NodeId) -> None:
        """Say that a node's agent is silent: EC2's status checks of its instance are of interest.

        Said again in every pass while it is.
        """
        self._known.setdefault(fleet, _Known()).suspects[node_id] = self._monotonic()

    def complaint(self, fleet: FleetName, node_id: NodeId) -> str:
        """Return what AWS finds wrong with an instance that runs, in words that follow `and`; empty where it has not said so lately."""
        known = self._known.get(fleet)
        asked_at, failed = known.failed_checks.get(node_id, (0.0, ())) if known is not None else (0.0, ())
        if not failed or self._monotonic() - asked_at > FORGET_SECONDS:
            return ""
        return f"EC2 reports its {' and '.join(failed)} status check{'s' if len(failed) > 1 else ''} as impaired"

    def domains(self, fleet: FleetName) -> Mapping[NodeId, str]:
        """Return by node the network node that its instance hangs on; nodes that AWS tells nothing of are left out."""
        known = self._known.get(fleet)
        return dict(known.domains) if known is not None else {}

    def waiting_words(self, fleet: FleetName) -> str:
        """Return why instances do not come, in AWS's words; empty when they do."""
        view = self._views.get(fleet)
        return waiting_words(view.group) if view is not None else ""

    def launch_failed_at(self, fleet: FleetName) -> float | None:
        """Return when the fleet's newest launch failed, Unix seconds; None while none has since the last that succeeded."""
        view = self._views.get(fleet)
        return view.group.failed_at if view is not None else None

    def _fleets(self) -> tuple[fleets.FleetRecord, ...]:
        with self._database.read() as session:
            return fleets.every(session)

    def _ask(self, fleet: fleets.FleetRecord, asked_at: float) -> CloudView:
        group = self._operator.describe_group(fleet.auto_scaling_group_name)
        with self._database.read() as session:
            known = {NodeId(node.id) for node in nodes.of_fleet(session, fleet.name) if node.state != NodeState.GONE}
        ids = known | {member.instance_id for member in group.members}
        instances = self._operator.describe_instances(sorted(ids))
        about = self._known.setdefault(FleetName(fleet.name), _Known())
        self._note_held(group, instances, about)
        are_missing = sum(not member.is_leaving for member in group.members) < group.desired_count
        about.launch_failures = self._launch_failures(fleet, about) if are_missing else ()
        before = self._views.get(FleetName(fleet.name))
        return CloudView(
            asked_at=asked_at,
            group=_group(group, about.launch_failures, before.group if before is not None else None),
            instance_type=group.instance_type,
            availability_zone=", ".join(group.availability_zones),
            conditions=_conditions(group, instances),
        )

    def _launch_failures(self, fleet: fleets.FleetRecord, about: _Known) -> tuple[LaunchFailure, ...]:
        """Ask why instances do not come; without an answer that is what it was, and the rest of what AWS says counts all the same."""
        key = f"{fleet.name}/launches"
        try:
            found = self._operator.recent_launch_failures(fleet.auto_scaling_group_name)
        except CloudError as error:
            self._tell_once(key, f"fleet {fleet.name}: why its launches fail is unknown: {_first_line(error)}")
            return about.launch_failures
        self._failing.pop(key, None)
        return found

    def _note_held(self, group: GroupState, instances: Mapping[NodeId, InstanceState], about: _Known) -> None:
        """Store which instances a terminating hook holds, and from the first sight until when."""
        held = _held(group, instances)
        if not held and not about.has_held:
            return
        ends_at = self._now() + timedelta(seconds=_hook_seconds(group))
        found = [
            NoticeRecord(
                node_id=member.instance_id,
                kind=NoticeKind.TERMINATING,
                event_id=group.name,
                source=NoticeSource.GROUP,
                message=f"{group.name} is ending it: {member.lifecycle_state}",
                ends_at=ends_at,
            )
            for member in held
        ]
        with self._database.write() as session:
            notices.replace_polled(session, NoticeSource.GROUP, instances.keys(), found, self._now())
        about.has_held = bool(held)

    def _ask_closely(self, fleet: FleetName, ids: set[NodeId], about: _Known) -> bool:
        """Ask both questions about a fleet; without an answer both are unknown. Returns whether anything is news."""
        asked_at = self._monotonic()
        is_due = asked_at - about.looked_closely_at >= CLOSE_SECONDS
        is_news = False
        if is_due:
            for node_id, said_at in list(about.suspects.items()):  # the event loop adds to it meanwhile
                if asked_at - said_at > FORGET_SECONDS:
                    about.suspects.pop(node_id, None)
            about.failed_checks = {node_id: told for node_id, told in about.failed_checks.items() if node_id in ids}
            is_news = self._ask_status(fleet, ids, about, asked_at)
            about.looked_closely_at = asked_at  # what was said is stored, or AWS said nothing
        elif asked_at - about.looked_at_suspects_at >= SUSPECT_SECONDS:
            suspects = {
                node_id for node_id, said_at in list(about.suspects.items()) if asked_at - said_at <= SUSPECT_SECONDS
            }
            if suspects & ids:
                is_news = self._ask_status(fleet, suspects & ids, about, asked_at)
        unknown = ids - about.domains.keys()
        if not unknown or not (is_due or unknown - about.asked):
            return is_news
        about.asked |= unknown
        try:
            networks = self._operator.network_nodes(sorted(unknown))
        except CloudError as error:
            self._tell_once(
                f"{fleet}/topology",
                f"fleet {fleet}: the network nodes of its instances are unknown: {_first_line(error)}",
            )
            return is_news
        about.domains = {
            **about.domains,
            **{node_id: network[-1] for node_id, network in networks.items()},
        }  # a new one: others may be reading
        return is_news or bool(networks)

    def _ask_status(self, fleet: FleetName, ids: set[NodeId], about: _Known, asked_at: float) -> bool:
        """Ask what EC2 has scheduled for instances and how their checks go. Returns whether anything is news."""
        try:
            found = self._operator.statuses(sorted(ids))
        except CloudError as error:
            about.looked_at_suspects_at = asked_at
            self._tell_once(
                f"{fleet}/events", f"fleet {fleet}: what EC2 has scheduled is unknown: {_first_line(error)}"
            )
            return False
        self._failing.pop(f"{fleet}/events", None)
        failed = {node_id: (asked_at, found[node_id].failed_checks if node_id in found else ()) for node_id in ids}
        before = about.failed_checks
        about.failed_checks = {**before, **failed}  # a new one: others may be reading
        scheduled = [_scheduled(node_id, event) for node_id, status in found.items() for event in status.events]
        with self._database.write() as session:
            is_news = notices.replace_polled(session, NoticeSource.STATUS, ids, scheduled, self._now())
        about.looked_at_suspects_at = asked_at
        return is_news or any(
            before.get(node_id, (asked_at, ()))[1] != checks for node_id, (_, checks) in failed.items()
        )

    def _tell_once(self, key: str, words: str) -> None:
        if self._failing.get(key) != words:
            log.warning("%s", words)
        self._failing[key] = words


def _group(group: GroupState, failures: tuple[LaunchFailure, ...], before: GroupObserved | None) -> GroupObserved:
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
        launch_failure=failures[0].message if failures else "",
        failed_at=failures[0].at.timestamp() if failures else None,
        failing_since=failing_since(before, failures[-1].at.timestamp()) if failures else None,
        launch_suspension=group.suspension_reasons.get("Launch", "") if "Launch" in group.suspended_processes else None,
        is_suspension_administrative=group.is_suspended_by_aws("Launch"),
        hook_seconds=_hook_seconds(group),
    )


def _first_line(error: CloudError) -> str:
    """Return what fits a line of a log: an answer that does not parse comes whole."""
    return str(error).partition("\n")[0]


def _hook_seconds(group: GroupState) -> float:
    """Return how long the group's terminating hooks hold an instance: the shortest of them counts."""
    timeouts = [hook.heartbeat_timeout for hook in group.hooks if hook.transition == TERMINATING_TRANSITION]
    return min(timeouts, default=MAX_HOOK_TIMEOUT).total_seconds()


def _scheduled(node_id: NodeId, event: ScheduledEvent) -> NoticeRecord:
    begins = f", from {event.not_before:%Y-%m-%d %H:%M} UTC" if event.not_before is not None else ""
    return NoticeRecord(
        node_id=node_id,
        kind=NoticeKind.MAINTENANCE,
        event_id=event.event_id,
        source=NoticeSource.STATUS,
        message=f"{event.code}{begins}: {event.description}",
        ends_at=event.not_before,
    )


def _held(group: GroupState, instances: Mapping[NodeId, InstanceState]) -> list[MemberState]:
    """Return the members that a terminating hook holds or is about to: one is Terminating, for minutes where a load balancer drains it, before that.

    Source: Amazon EC2 Auto Scaling User Guide, how lifecycle hooks work.
    """
    has_hook = any(hook.transition == TERMINATING_TRANSITION for hook in group.hooks)
    return [
        member
        for member in group.members
        if member.awaits_termination
        or (has_hook and member.lifecycle_state == "Terminating" and not instances[member.instance_id].state.has_ended)
    ]


def _conditions(
    group: GroupState, instances: Mapping[NodeId, InstanceState]
) -> dict[NodeId, tuple[InstanceCondition, str]]:
    """Return what AWS says of each node; a group that is ending a member says so before EC2 does, unless a hook still holds it: that is a notice.

    EC2 may not know an id yet that a group has just launched: that is no word that it has ended.
    """
    conditions = {}
    launching = {member.instance_id for member in group.members if member.lifecycle_state.startswith("Pending")}
    for node_id, instance in instances.items():
        if instance.state is Ec2State.ABSENT and node_id in launching:
            conditions[node_id] = (InstanceCondition.UNKNOWN, "")
            continue
        words = f"{instance.state.value} ({instance.state_reason})" if instance.state_reason else instance.state.value
        conditions[node_id] = (
            InstanceCondition.ENDED if instance.state.has_ended else InstanceCondition.PRESENT,
            words,
        )
    held = _held(group, instances)
    for member in group.members:
        if (
            member.is_leaving
            and member not in held
            and conditions.get(member.instance_id, (None, ""))[0] is not InstanceCondition.ENDED
        ):
            conditions[member.instance_id] = (
                InstanceCondition.ENDED,
                f"leaving its Auto Scaling group ({member.lifecycle_state})",
            )
    return conditions
