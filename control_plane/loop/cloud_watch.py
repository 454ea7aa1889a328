"""Polls AWS for the state of groups and instances. The loops read the newest answer and never wait for AWS.

- Groups and instances: at the interval of `core.polling`, and immediately after an agent's connection breaks, an AWS
  event arrives or the executor changes the group. One request lists the groups of all fleets.
- Scheduled events, network topology, images and tags of jobs: every `CLOSE_SECONDS`, and immediately for new instances.
- Status checks: every `CLOSE_SECONDS`, and every `SUSPECT_SECONDS` for instances with a silent agent.

Only the server that manages a fleet polls it. Invariant: each answer contains the time of its request. If the control
plane changed the group after this request, the loops do not use the answer for decisions about the group.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from control_plane.cloud.errors import CloudError, NotFound, Throttled
from control_plane.cloud.operator import Ec2State, GroupState, InstanceState, LaunchFailure
from control_plane.core.absence import Omissions
from control_plane.core.observed.facts import InstanceEnded
from control_plane.core.observed.fleets import GroupObserved
from control_plane.core.observed.nodes import InstanceCondition
from control_plane.core.polling import AWS_POLL_SECONDS, backoff_seconds, interval_seconds
from control_plane.core.states import NodeState
from control_plane.core.timeouts import FORGET_SECONDS
from control_plane.db import fleets, nodes, notices
from control_plane.db.nodes import InstanceFacts
from control_plane.db.notices import NoticeSource
from control_plane.loop.cloud_answers import (
    conditions_of,
    first_line,
    group_observed,
    held_notices,
    maintenance_notice,
)
from control_plane.loop.context import LoopContext
from control_plane.loop.instance_facts import FactReader
from control_plane.loop.repeating import pause
from control_plane.loop.work_tags import update_tags
from everstep.protocol.ids import FleetName, NodeId

log = logging.getLogger(__name__)

FLEETS_AT_ONCE = 4
CLOSE_SECONDS = 60.0
SUSPECT_SECONDS = 5.0
"""Pause between polls of the status checks of nodes with a silent agent. EC2 runs the checks once a minute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudView:
    """The newest answers of AWS about one fleet: its Auto Scaling group and the instances."""

    asked_at: float
    group: GroupObserved
    instance_type: str
    """Instance type that the group launches. With several types, the first."""
    instance_types: Mapping[NodeId, str]
    encrypting_types: tuple[str, ...]
    """See `GroupState.encrypting_types`."""
    availability_zone: str
    conditions: Mapping[NodeId, tuple[InstanceCondition, InstanceEnded | None]]
    work_tags: Mapping[NodeId, Mapping[str, str]]
    """See `InstanceState.work_tags`. Contains the instances that have not ended."""


@dataclass(slots=True)
class _Known:
    not_before: float = float("-inf")
    """Monotonic seconds of the earliest next poll, after AWS throttled a poll."""
    throttled_count: int = 0
    details_requested_at: float = float("-inf")
    suspects: dict[NodeId, float] = field(default_factory=dict)
    """Nodes with a silent agent, each with the monotonic seconds of the newest call of `suspect`."""
    statuses_requested_at: float = float("-inf")
    failed_checks: dict[NodeId, tuple[float, tuple[str, ...]]] = field(default_factory=dict)
    omissions: Omissions = field(default_factory=Omissions)
    """Instances of the fleet that EC2's newest answers omit."""
    facts: FactReader = field(default_factory=FactReader)
    launch_failures: tuple[LaunchFailure, ...] = ()
    """Empty while the Auto Scaling group has its desired number of instances."""
    has_held: bool = True
    """Initially True, because an earlier process may have stored notices."""


class CloudWatch:
    """The poller of AWS, with AWS's newest answers about each fleet. Used on the server's event loop."""

    def __init__(
        self,
        context: LoopContext,
        *,
        serves: Callable[[FleetName], bool] = lambda _: True,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._context = context
        self._views: dict[FleetName, CloudView] = {}
        self._not_before: dict[FleetName, float] = {}
        self._serves = serves
        self._jitter = jitter
        self._failing: dict[str, str] = {}
        self._known: dict[FleetName, _Known] = {}
        self._asking: dict[FleetName, asyncio.Task[None]] = {}
        self._listing: set[asyncio.Task[Mapping[str, GroupState]]] = set()
        self._turns = asyncio.Semaphore(FLEETS_AT_ONCE)
        self._event_at: float | None = None
        self._look = asyncio.Event()
        self._look_closer = asyncio.Event()

    async def run(self, stop: asyncio.Event) -> None:
        """Poll until `stop` is set. A failure of one fleet does not delay other fleets."""
        try:
            async with asyncio.TaskGroup() as group:
                poll = partial(self.poll, patience_seconds=AWS_POLL_SECONDS)
                group.create_task(self._repeat(stop, poll, self._look, self.poll_interval_seconds))
                group.create_task(self._repeat(stop, self.survey, self._look_closer, lambda: AWS_POLL_SECONDS))
        finally:
            asking = [*self._asking.values(), *self._listing]
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    async def _repeat(
        self,
        stop: asyncio.Event,
        ask: Callable[[], Awaitable[None]],
        wake: asyncio.Event,
        interval_seconds: Callable[[], float],
    ) -> None:
        while not stop.is_set():
            wake.clear()
            try:
                await ask()
            except Exception:
                # No other task of the server sends these requests, so this task must continue after any error.
                log.exception("a poll of AWS failed; the next poll follows")
            await pause(interval_seconds(), until=wake)

    def poll_interval_seconds(self) -> float:
        """Return the current pause between two polls of groups and instances."""
        return interval_seconds(None if self._event_at is None else self._context.monotonic() - self._event_at)

    async def poll(self, *, patience_seconds: float | None = None) -> None:
        """Request the groups and instances of each fleet that is due. Requests continue after `patience_seconds`."""
        asked_at, due = self._context.monotonic(), list[fleets.FleetRecord]()
        for fleet in await asyncio.to_thread(self._fleets):
            name = FleetName(fleet.name)
            if not self._serves(name):
                self._views.pop(name, None)
            elif name not in self._asking and asked_at >= self._known.setdefault(name, _Known()).not_before:
                due.append(fleet)
        # List all groups by one call, then poll the fleets in parallel, so that a hanging call delays only one fleet.
        if due:
            names = [fleet.auto_scaling_group_name for fleet in due]
            listing = asyncio.create_task(
                asyncio.to_thread(self._context.operator.list_groups, names), name="ask AWS about groups"
            )
            self._listing.add(listing)
            listing.add_done_callback(self._listing.discard)
            for fleet in due:
                name = FleetName(fleet.name)
                task = self._asking[name] = asyncio.create_task(
                    self._poll_fleet(name, fleet, listing, asked_at), name=f"ask AWS about {name}"
                )
                task.add_done_callback(partial(self._answered, name))
        if self._asking:
            await asyncio.wait(self._asking.values(), timeout=patience_seconds)

    def _answered(self, name: FleetName, _: asyncio.Task[None]) -> None:
        del self._asking[name]

    async def _poll_fleet(
        self,
        name: FleetName,
        fleet: fleets.FleetRecord,
        listing: asyncio.Task[Mapping[str, GroupState]],
        asked_at: float,
    ) -> None:
        about = self._known.setdefault(name, _Known())
        try:
            # All fleets share this request. Without the shield, a cancelled poll of one fleet would cancel the request
            # for all fleets.
            groups = await asyncio.shield(listing)
            async with self._turns:
                view = await asyncio.to_thread(self._ask, fleet, groups, asked_at)
        except CloudError as error:
            if isinstance(error, Throttled):
                about.throttled_count += 1
                about.not_before = self._context.monotonic() + backoff_seconds(about.throttled_count, self._jitter())
            self._tell_once(name, f"fleet {name}: the cloud does not answer: {error}")
            return
        except Exception:
            log.exception("fleet %s: could not read or store AWS's answer; the next poll retries", name)
            return
        about.throttled_count = 0
        self._failing.pop(name, None)
        before = self._views.get(name)
        self._views[name] = view
        if before is None or (before.group, before.conditions) != (view.group, view.conditions):
            self._context.registry.hint()

    async def survey(self) -> None:
        """Make the requests to EC2 that are due for each fleet: scheduled events, status checks, network topology."""
        # Runs concurrently with `poll`, so that slow, rare requests do not delay frequent requests.
        for name, view in list(self._views.items()):
            about = self._known.setdefault(name, _Known())
            try:
                is_news = await asyncio.to_thread(self._ask_closely, name, set(view.conditions), about)
            except Exception:
                log.exception("fleet %s: could not store EC2's answer about its instances; the next poll retries", name)
                continue
            if is_news:
                self._context.registry.hint()

    def event_arrived(self) -> None:
        """Record that AWS sent an event, so that the server polls less often for a while."""
        self._event_at = self._context.monotonic()

    def view_age_seconds(self) -> float:
        """Return the age in seconds of the oldest of AWS's newest answers about the fleets; 0 without answers."""
        return max((self._context.monotonic() - view.asked_at for view in self._views.values()), default=0.0)

    def poll_now(self) -> None:
        """Start the next polls immediately."""
        self._look.set()
        self._look_closer.set()

    def poll_details(self) -> None:
        """Start the next poll immediately, and also request EC2's scheduled events of all instances."""
        for known in self._known.values():
            known.details_requested_at = float("-inf")
        self.poll_now()

    def changed(self, fleet: FleetName) -> None:
        """Record that the control plane changes a fleet's group now, which outdates older answers of AWS."""
        self._not_before[fleet] = self._context.monotonic()
        self._look.set()

    def group(self, fleet: FleetName) -> CloudView | None:
        """Return AWS's newest answer about a fleet, or None if the control plane changed the group since."""
        view = self._views.get(fleet)
        return view if view is not None and view.asked_at > self._not_before.get(fleet, float("-inf")) else None

    def condition(self, fleet: FleetName, node_id: NodeId) -> tuple[InstanceCondition, InstanceEnded | None]:
        """Return the condition of a node's instance, and AWS's report if the instance ended or is omitted.

        ENDED never expires. PRESENT and ABSENT become UNKNOWN when EC2's answer is older than `FORGET_SECONDS`.
        """
        view = self._views.get(fleet)
        if view is None:
            return InstanceCondition.UNKNOWN, None
        condition, ended = view.conditions.get(node_id, (InstanceCondition.UNKNOWN, None))
        if condition is not InstanceCondition.ENDED and self._context.monotonic() - view.asked_at > FORGET_SECONDS:
            return InstanceCondition.UNKNOWN, None
        return condition, ended

    def suspect(self, fleet: FleetName, node_id: NodeId) -> None:
        """Request a node's status checks more often for a while. The loops repeat it while the agent is silent."""
        self._known.setdefault(fleet, _Known()).suspects[node_id] = self._context.monotonic()

    def failed_status_check(self, fleet: FleetName, node_id: NodeId) -> str:
        """Return a clause, to follow "and", about an instance's recent failed EC2 status checks. Empty without any."""
        known = self._known.get(fleet)
        asked_at, failed = known.failed_checks.get(node_id, (0.0, ())) if known is not None else (0.0, ())
        if not failed or self._context.monotonic() - asked_at > FORGET_SECONDS:
            return ""
        return f"EC2 reports its {' and '.join(failed)} status check{'s' if len(failed) > 1 else ''} as impaired"

    def facts(self, fleet: FleetName) -> Mapping[NodeId, InstanceFacts]:
        """Return the facts of each instance that never change. Nodes about which AWS has reported none are missing."""
        known = self._known.get(fleet)
        return known.facts.facts() if known is not None else {}

    def newest_group(self, fleet: FleetName) -> GroupObserved | None:
        """Return AWS's newest answer about the fleet's group, whatever has changed since. None before an answer."""
        view = self._views.get(fleet)
        return None if view is None else view.group

    def _fleets(self) -> tuple[fleets.FleetRecord, ...]:
        with self._context.database.read() as session:
            return fleets.every(session)

    def _ask(self, fleet: fleets.FleetRecord, groups: Mapping[str, GroupState], asked_at: float) -> CloudView:
        listed = groups.get(fleet.auto_scaling_group_name)
        if listed is None:
            raise NotFound(f"Auto Scaling group {fleet.auto_scaling_group_name!r} does not exist")
        group = self._context.operator.complete_group(listed)
        with self._context.database.read() as session:
            known = {NodeId(node.id): node for node in nodes.of_fleet(session, fleet.name)}
        known = {node_id: node for node_id, node in known.items() if node.state != NodeState.GONE}
        ids = known.keys() | {member.instance_id for member in group.members}
        instances = self._context.operator.describe_instances(sorted(ids))
        about = self._known.setdefault(FleetName(fleet.name), _Known())
        about.facts.read_images(instances)
        self._note_held(group, instances, about)
        are_missing = sum(not member.is_leaving for member in group.members) < group.desired_count
        about.launch_failures = self._launch_failures(fleet, about) if are_missing else ()
        before = self._views.get(FleetName(fleet.name))
        about.omissions = about.omissions.with_answer(
            [node_id for node_id, instance in instances.items() if instance.state is Ec2State.ABSENT],
            asked_at,
            joined=[node_id for node_id, node in known.items() if node.state != NodeState.JOINING],
        )
        return CloudView(
            asked_at=asked_at,
            group=group_observed(group, about.launch_failures, before.group if before is not None else None),
            instance_type=group.instance_type,
            instance_types={id: instance.instance_type for id, instance in instances.items() if instance.instance_type},
            encrypting_types=tuple(sorted(group.encrypting_types)),
            availability_zone=", ".join(group.availability_zones),
            conditions=conditions_of(group, instances, about.omissions.absent),
            work_tags={
                id: instance.work_tags
                for id, instance in instances.items()
                if instance.state in (Ec2State.PENDING, Ec2State.RUNNING)
            },
        )

    def _launch_failures(self, fleet: fleets.FleetRecord, about: _Known) -> tuple[LaunchFailure, ...]:
        key = f"{fleet.name}/launches"
        try:
            found = self._context.operator.recent_launch_failures(fleet.auto_scaling_group_name)
        except CloudError as error:
            # This error must not make the poller discard AWS's answers about the group and its instances.
            self._tell_once(key, f"fleet {fleet.name}: why its launches fail is unknown: {first_line(error)}")
            return about.launch_failures
        self._failing.pop(key, None)
        return found

    def _note_held(self, group: GroupState, instances: Mapping[NodeId, InstanceState], about: _Known) -> None:
        found = held_notices(group, instances, self._context.now())
        if not found and not about.has_held:
            return
        with self._context.database.write() as session:
            notices.replace_polled(session, NoticeSource.GROUP, instances.keys(), found, self._context.now())
        about.has_held = bool(found)

    def _ask_closely(self, fleet: FleetName, ids: set[NodeId], about: _Known) -> bool:
        asked_at = self._context.monotonic()
        is_due = asked_at - about.details_requested_at >= CLOSE_SECONDS
        is_news = False
        if is_due:
            # Iterate over a copy, because the event loop adds entries concurrently.
            for node_id, suspected_at in list(about.suspects.items()):
                if asked_at - suspected_at > FORGET_SECONDS:
                    about.suspects.pop(node_id, None)
            about.failed_checks = {node_id: entry for node_id, entry in about.failed_checks.items() if node_id in ids}
            is_news = self._ask_status(fleet, ids, about, asked_at)
            # Set the time even if the request failed, so that the next request waits for the usual interval.
            about.details_requested_at = asked_at
            self._tag(fleet)
        elif asked_at - about.statuses_requested_at >= SUSPECT_SECONDS:
            suspects = {
                node_id
                for node_id, suspected_at in list(about.suspects.items())
                if asked_at - suspected_at <= SUSPECT_SECONDS
            }
            if suspects & ids:
                is_news = self._ask_status(fleet, suspects & ids, about, asked_at)
        return (
            about.facts.ask(self._context.operator, ids, is_due=is_due, report=partial(self._tell_unknown, fleet))
            or is_news
        )

    def _tell_unknown(self, fleet: FleetName, subject: str, error: CloudError) -> None:
        self._tell_once(f"{fleet}/{subject}", f"fleet {fleet}: the {subject} are unknown: {first_line(error)}")

    def _tag(self, fleet: FleetName) -> None:
        view, key = self._views.get(fleet), f"{fleet}/tags"
        try:
            update_tags(self._context, fleet, {} if view is None else view.work_tags)
            self._failing.pop(key, None)
        except CloudError as error:
            self._tell_once(key, f"fleet {fleet}: instances lack the tags of their jobs: {first_line(error)}")

    def _ask_status(self, fleet: FleetName, ids: set[NodeId], about: _Known, asked_at: float) -> bool:
        """Request and store scheduled events and status checks. Return whether an answer changed."""
        try:
            found = self._context.operator.statuses(sorted(ids))
        except CloudError as error:
            about.statuses_requested_at = asked_at
            self._tell_once(f"{fleet}/events", f"fleet {fleet}: what EC2 has scheduled is unknown: {first_line(error)}")
            return False
        self._failing.pop(f"{fleet}/events", None)
        failed = {node_id: (asked_at, found[node_id].failed_checks if node_id in found else ()) for node_id in ids}
        before = about.failed_checks
        # Replace the mapping of failed checks instead of updating it, because other threads may be reading the old
        # mapping.
        about.failed_checks = {**before, **failed}
        scheduled = [maintenance_notice(node_id, event) for node_id, status in found.items() for event in status.events]
        with self._context.database.write() as session:
            is_news = notices.replace_polled(session, NoticeSource.STATUS, ids, scheduled, self._context.now())
        about.statuses_requested_at = asked_at
        return is_news or any(
            before.get(node_id, (asked_at, ()))[1] != checks for node_id, (_, checks) in failed.items()
        )

    def _tell_once(self, key: str, words: str) -> None:
        if self._failing.get(key) != words:
            log.warning("%s", words)
        self._failing[key] = words
