"""The Auto Scaling group as Everstep needs it: only Everstep ends an instance, and AWS ends none without notice.

    one Availability Zone                  replicas across zones cost money, EFA does not cross them
    new instances protected from scale-in  a lower desired capacity ends nobody by itself
    no scaling policies                    the fleet loop is the only writer of desired capacity
    processes suspended                    AWS neither rebalances, replaces, refreshes nor scales on its own
    a terminating hook of at most 60 s     any termination that AWS makes all the same becomes a notice

`drift` is pure and is asked every fleet pass; `ensure` is called when a fleet is created, and may be called again at any time.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from control_plane.cloud.errors import ContractViolation
from control_plane.cloud.operator import TERMINATING_TRANSITION, CloudOperator, GroupState, LifecycleHook

SUSPENDED_PROCESSES: Final = frozenset(
    {"AZRebalance", "ReplaceUnhealthy", "ScheduledActions", "InstanceRefresh", "AlarmNotification"},
)
"""Launch, Terminate, HealthCheck and AddToLoadBalancer stay on: capacity we ask for must come, and health must be visible."""
MAX_HOOK_TIMEOUT: Final = timedelta(seconds=60)
TERMINATION_HOOK: Final = LifecycleHook(
    name="everstep-termination",
    transition=TERMINATING_TRANSITION,
    heartbeat_timeout=MAX_HOOK_TIMEOUT,
    default_result="CONTINUE",
)
"""CONTINUE: when nobody answers, the instance goes. ABANDON would do the same on termination, but reads like a failure in the activities."""


def drift(group: GroupState) -> tuple[str, ...]:
    """Return what differs from the contract, a sentence each; empty when the group fits.

    Args:
        group: the group as just described.

    Returns:
        Sentences for an event and for the user, in a fixed order.
    """
    found = list(_beyond_repair(group))
    if not group.new_instances_protected:
        found.append(f"New instances of {group.name} are not protected from scale-in.")
    missing = sorted(SUSPENDED_PROCESSES - group.suspended_processes)
    if missing:
        found.append(f"{group.name} does not suspend {', '.join(missing)}: AWS may end or replace instances on its own.")
    unprotected = sorted(member.instance_id for member in group.members if not member.is_protected and not member.is_leaving)
    if unprotected:
        found.append(f"Members of {group.name} without protection from scale-in: {', '.join(unprotected)}.")
    hooks = [hook for hook in group.hooks if hook.transition == TERMINATING_TRANSITION]
    if not hooks:
        found.append(f"{group.name} has no terminating lifecycle hook: a termination by AWS would come without notice.")
    found.extend(
        f"The terminating hook {hook.name} of {group.name} waits up to {hook.heartbeat_timeout.total_seconds():.0f} s; "
        f"the contract allows {MAX_HOOK_TIMEOUT.total_seconds():.0f} s."
        for hook in hooks
        if hook.heartbeat_timeout > MAX_HOOK_TIMEOUT
    )
    return tuple(found)


def ensure(operator: CloudOperator, name: str) -> GroupState:
    """Apply the contract to a group and return it as it is afterwards.

    Idempotent: a group that fits is only read. What Everstep must not decide for its owner (zones, scaling policies, a group being deleted) is
    never changed. Called by CreateFleet, and by the fleet loop when a person asks for repair.

    Args:
        operator: the cloud.
        name: the Auto Scaling group.

    Returns:
        The group, described again after the last change.

    Raises:
        ContractViolation: the group spans zones, has scaling policies, has no launch template, or is being deleted; nothing was changed.
        CloudError: the cloud refused or did not answer; some changes may have been made, and calling again goes on from there.
    """
    group = operator.describe_group(name)
    violations = _beyond_repair(group)
    if violations:
        raise ContractViolation(" ".join(violations))
    if not drift(group):
        return group
    missing = SUSPENDED_PROCESSES - group.suspended_processes
    if missing:
        operator.suspend_processes(name, sorted(missing))
    if not group.new_instances_protected:
        operator.protect_new_instances(name)
    unprotected = [member.instance_id for member in group.members if not member.is_protected and not member.is_leaving]
    if unprotected:
        operator.protect_members(name, unprotected)
    hooks = [hook for hook in group.hooks if hook.transition == TERMINATING_TRANSITION]
    if not hooks:
        operator.put_termination_hook(name, TERMINATION_HOOK)
    for hook in hooks:
        if hook.heartbeat_timeout > MAX_HOOK_TIMEOUT:
            shorter = LifecycleHook(
                name=hook.name, transition=hook.transition, heartbeat_timeout=MAX_HOOK_TIMEOUT, default_result=hook.default_result
            )
            operator.put_termination_hook(name, shorter)
    return operator.describe_group(name)


def _beyond_repair(group: GroupState) -> tuple[str, ...]:
    found = []
    if group.status:
        found.append(f"{group.name} is in status {group.status!r}.")
    if len(group.availability_zones) != 1:
        found.append(
            f"{group.name} spans {len(group.availability_zones)} Availability Zones ({', '.join(group.availability_zones)}); it must have one."
        )
    if group.scaling_policies:
        found.append(
            f"{group.name} has scaling policies ({', '.join(group.scaling_policies)}); Everstep must be the only writer of desired capacity."
        )
    if group.launch_template is None:
        found.append(f"{group.name} has no single launch template; a fleet needs exactly one instance type.")
    return tuple(found)
