"""Translates AWS's answers about a fleet into the input of decisions. Pure: sends no requests."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta

from control_plane.cloud.contract import MAX_HOOK_TIMEOUT, drift
from control_plane.cloud.errors import CloudError
from control_plane.cloud.operator import (
    TERMINATING_TRANSITION,
    Ec2State,
    GroupState,
    InstanceState,
    LaunchFailure,
    MemberState,
    ScheduledEvent,
)
from control_plane.core.capacity import failing_since
from control_plane.core.observed.facts import InstanceEnded
from control_plane.core.observed.fleets import GroupMember, GroupObserved
from control_plane.core.observed.nodes import InstanceCondition
from control_plane.db.notices import NoticeRecord, NoticeSource
from everstep.protocol.agent_messages import NoticeKind
from everstep.protocol.ids import NodeId


def group_observed(
    group: GroupState, failures: tuple[LaunchFailure, ...], before: GroupObserved | None
) -> GroupObserved:
    """Convert AWS's answer about a group, completed by `complete_group`. `failures` are newest first."""
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
        unprotected=tuple(sorted(member.instance_id for member in group.members if member.lacks_protection)),
        launch_failure=failures[0].message if failures else "",
        is_short=bool(failures) and failures[0].is_shortage,
        failed_at=failures[0].at.timestamp() if failures else None,
        failing_since=failing_since(before, failures[-1].at.timestamp()) if failures else None,
        launch_suspension=group.suspension_reasons.get("Launch", "") if "Launch" in group.suspended_processes else None,
        is_suspension_administrative=group.is_suspended_by_aws("Launch"),
        zone=group.availability_zones[0] if len(group.availability_zones) == 1 and group.launch_template else "",
        hook_seconds=hook_seconds(group),
    )


def first_line(error: CloudError) -> str:
    """Return the first line of an error message; parse errors have many lines."""
    return str(error).partition("\n")[0]


def hook_seconds(group: GroupState) -> float:
    """Return the shortest timeout of a group's terminating lifecycle hooks, in seconds."""
    timeouts = [hook.heartbeat_timeout for hook in group.hooks if hook.transition == TERMINATING_TRANSITION]
    return min(timeouts, default=MAX_HOOK_TIMEOUT).total_seconds()


def maintenance_notice(node_id: NodeId, event: ScheduledEvent) -> NoticeRecord:
    """Convert an event that EC2 has scheduled for an instance to a notice."""
    begins = f", from {event.not_before:%Y-%m-%d %H:%M} UTC" if event.not_before is not None else ""
    return NoticeRecord(
        node_id=node_id,
        kind=NoticeKind.MAINTENANCE,
        event_id=event.event_id,
        source=NoticeSource.STATUS,
        message=f"{event.code}{begins}: {event.description}",
        ends_at=event.not_before,
    )


def held_notices(group: GroupState, instances: Mapping[NodeId, InstanceState], now: datetime) -> list[NoticeRecord]:
    """Return a notice for each instance that a hook holds. Its end assumes that the hook took effect at `now`."""
    ends_at = now + timedelta(seconds=hook_seconds(group))
    return [
        NoticeRecord(
            node_id=member.instance_id,
            kind=NoticeKind.TERMINATING,
            event_id=group.name,
            source=NoticeSource.GROUP,
            message=f"{group.name} is ending it: {member.lifecycle_state}",
            ends_at=ends_at,
        )
        for member in held_members(group, instances)
    ]


def held_members(group: GroupState, instances: Mapping[NodeId, InstanceState]) -> list[MemberState]:
    """Return the members that a terminating hook holds, or will hold soon. Source: EC2 Auto Scaling User Guide."""
    # A member stays in the state Terminating until its hook takes effect. With a load balancer, that can take minutes.
    has_hook = any(hook.transition == TERMINATING_TRANSITION for hook in group.hooks)
    return [
        member
        for member in group.members
        if member.awaits_termination
        or (has_hook and member.lifecycle_state == "Terminating" and not instances[member.instance_id].state.has_ended)
    ]


def conditions_of(
    group: GroupState, instances: Mapping[NodeId, InstanceState], absent: frozenset[NodeId]
) -> dict[NodeId, tuple[InstanceCondition, InstanceEnded | None]]:
    """Return the condition of each node's instance, and AWS's report if the instance ended or is omitted.

    A member that a lifecycle hook still holds is not ENDED. An instance that EC2 does not list is ABSENT if it belongs
    to `absent` and the group does not list it as Pending, otherwise UNKNOWN.
    """
    conditions: dict[NodeId, tuple[InstanceCondition, InstanceEnded | None]] = {}
    launching = {member.instance_id for member in group.members if member.lifecycle_state.startswith("Pending")}
    for node_id, instance in instances.items():
        if instance.state is Ec2State.ABSENT:
            is_absent = node_id in absent and node_id not in launching
            conditions[node_id] = (
                (
                    InstanceCondition.ABSENT,
                    InstanceEnded(node_id=node_id, state="not listed in two answers in a row"),
                )
                if is_absent
                else (InstanceCondition.UNKNOWN, None)
            )
            continue
        if not instance.state.has_ended:
            conditions[node_id] = (InstanceCondition.PRESENT, None)
            continue
        ended = InstanceEnded(
            node_id=node_id, state=instance.state.value, code=instance.state_code, text=instance.state_reason
        )
        conditions[node_id] = (InstanceCondition.ENDED, ended)
    # The Auto Scaling group reports the termination of a member earlier than EC2 does.
    held = held_members(group, instances)
    for member in group.members:
        if (
            member.is_leaving
            and member not in held
            and conditions.get(member.instance_id, (None, None))[0] is not InstanceCondition.ENDED
        ):
            conditions[member.instance_id] = (
                InstanceCondition.ENDED,
                InstanceEnded(
                    node_id=member.instance_id, state=f"leaving its Auto Scaling group ({member.lifecycle_state})"
                ),
            )
    return conditions
