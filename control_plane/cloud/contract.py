"""The Auto Scaling group as Everstep needs it: only Everstep ends an instance, and AWS ends none without notice.

    one Availability Zone                  replicas across zones cost money, EFA does not cross them
    new instances protected from scale-in  a lower desired capacity ends nobody by itself
    no scaling policies                    the fleet loop is the only writer of desired capacity
    processes suspended                    AWS neither rebalances, replaces, refreshes nor scales on its own
    a terminating hook of at most 60 s     any termination that AWS makes all the same becomes a notice

`checks` and `changes` say what holds and what differs; `drift`, asked every fleet pass, is their sentences. All three
are pure. `ensure` makes the changes when a fleet is created, and may be called again at any time.

Invariant: what is told is what is done: a change carries its own making, and there is no other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
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
"""CONTINUE: when nobody answers, the instance goes.

ABANDON would do the same on termination, but reads like a failure in the activities.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Something that a group has to be by itself: it is its owner's to decide, and Everstep never changes it."""

    setting: str
    """In the words of Auto Scaling's API."""
    is_met: bool
    words: str
    """A sentence that names the group: what is there, or what is wrong with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Something of a group that is to become another, so that it is as the contract says."""

    setting: str
    """In the words of Auto Scaling's API."""
    before: str | None
    """As text; None where there is nothing."""
    after: str
    why: str
    """The sentence that `drift` has for it."""
    make: Callable[[CloudOperator], None] = field(compare=False, repr=False)
    """Has it made; making it again changes nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ensured:
    """A group that is as the contract says."""

    group: GroupState
    """Described again after the last change."""
    made: tuple[Change, ...]
    """In the order in which they were made; empty where the group was so already."""


def drift(group: GroupState) -> tuple[str, ...]:
    """Return what differs from the contract, a sentence each; empty when the group fits.

    Args:
        group: the group as just described.

    Returns:
        Sentences for an event and for the user, in a fixed order.
    """
    return (*(check.words for check in checks(group) if not check.is_met), *(change.why for change in changes(group)))


def checks(group: GroupState) -> tuple[Check, ...]:
    """Return what the contract asks of a group that only its owner may change.

    Args:
        group: the group as just described.

    Returns:
        All of it, met or not, in a fixed order.
    """
    name, zones, policies, template = (
        group.name,
        group.availability_zones,
        group.scaling_policies,
        group.launch_template,
    )
    return (
        Check(
            setting="Status",
            is_met=not group.status,
            words=f"{name} is in status {group.status!r}." if group.status else f"{name} is not being deleted.",
        ),
        Check(
            setting="AvailabilityZones",
            is_met=len(zones) == 1,
            words=f"{name} has one Availability Zone, {zones[0]}."
            if len(zones) == 1
            else f"{name} spans {len(zones)} Availability Zones ({', '.join(zones)}); it must have one.",
        ),
        Check(
            setting="ScalingPolicies",
            is_met=not policies,
            words=f"{name} has scaling policies ({', '.join(policies)}); Everstep must be the only writer of desired "
            "capacity."
            if policies
            else f"{name} has no scaling policies.",
        ),
        Check(
            setting="LaunchTemplate",
            is_met=template is not None,
            words=f"{name} has no single launch template; a fleet needs exactly one instance type."
            if template is None
            else f"{name} launches {group.instance_type or 'instances'} from the launch template {template.name}, "
            f"version {template.version}.",
        ),
    )


def changes(group: GroupState) -> tuple[Change, ...]:
    """Return what is to be changed of a group, so that it is as the contract says.

    Args:
        group: the group as just described.

    Returns:
        Changes in the order in which they are made; empty when there is nothing to change.
    """
    name, found = group.name, list[Change]()
    missing = sorted(SUSPENDED_PROCESSES - group.suspended_processes)
    if missing:
        found.append(
            Change(
                setting="SuspendedProcesses",
                before=", ".join(sorted(group.suspended_processes)) or None,
                after=", ".join(sorted(SUSPENDED_PROCESSES | group.suspended_processes)),
                why=f"{name} does not suspend {', '.join(missing)}: AWS may end or replace instances on its own.",
                make=lambda operator: operator.suspend_processes(name, missing),
            )
        )
    if not group.new_instances_protected:
        found.append(
            Change(
                setting="NewInstancesProtectedFromScaleIn",
                before="false",
                after="true",
                why=f"New instances of {name} are not protected from scale-in.",
                make=lambda operator: operator.protect_new_instances(name),
            )
        )
    unprotected = sorted(
        member.instance_id for member in group.members if not member.is_protected and not member.is_leaving
    )
    if unprotected:
        found.append(
            Change(
                setting="Instances.ProtectedFromScaleIn",
                before="false",
                after="true",
                why=f"Members of {name} without protection from scale-in: {', '.join(unprotected)}.",
                make=lambda operator: operator.protect_members(name, unprotected),
            )
        )
    hooks = [hook for hook in group.hooks if hook.transition == TERMINATING_TRANSITION]
    if not hooks:
        found.append(
            Change(
                setting=f"LifecycleHooks.{TERMINATION_HOOK.name}",
                before=None,
                after=f"{TERMINATION_HOOK.transition}, {MAX_HOOK_TIMEOUT.total_seconds():.0f} s, then "
                f"{TERMINATION_HOOK.default_result}",
                why=f"{name} has no terminating lifecycle hook: a termination by AWS would come without notice.",
                make=lambda operator: operator.put_termination_hook(name, TERMINATION_HOOK),
            )
        )
    found.extend(_shortened(name, hook) for hook in hooks if hook.heartbeat_timeout > MAX_HOOK_TIMEOUT)
    return tuple(found)


def ensure(operator: CloudOperator, group: GroupState) -> Ensured:
    """Apply the contract to a group and return it as it is afterwards, with what was changed.

    What is changed is what `changes` says of the group as it was described, and nothing else: the caller may have asked
    somebody about it. Idempotent: a group that fits is left alone. What Everstep must not decide for its owner (zones,
    scaling policies, a group being deleted) is never changed. Called by CreateFleet.

    Args:
        operator: the cloud.
        group: the group as just described.

    Returns:
        The group and the changes.

    Raises:
        ContractViolation: the group spans zones, has scaling policies, has no launch template, or is being deleted;
            nothing was changed.
        CloudError: the cloud refused or did not answer; some changes may have been made, and
            calling again goes on from there.
    """
    require_fit(group)
    wanted = changes(group)
    for change in wanted:
        change.make(operator)
    return Ensured(group=operator.describe_group(group.name) if wanted else group, made=wanted)


def require_fit(group: GroupState) -> None:
    """Refuse a group of which only its owner can make a fleet.

    Args:
        group: the group as just described.

    Raises:
        ContractViolation: a check is not met; the error has all their sentences.
    """
    unmet = [check.words for check in checks(group) if not check.is_met]
    if unmet:
        raise ContractViolation(" ".join(unmet))


def _shortened(name: str, hook: LifecycleHook) -> Change:
    before, after = (f"{length.total_seconds():.0f} s" for length in (hook.heartbeat_timeout, MAX_HOOK_TIMEOUT))
    return Change(
        setting=f"LifecycleHooks.{hook.name}.HeartbeatTimeout",
        before=before,
        after=after,
        why=f"The terminating hook {hook.name} of {name} waits up to {before}; the contract allows {after}.",
        make=lambda operator: operator.put_termination_hook(name, replace(hook, heartbeat_timeout=MAX_HOOK_TIMEOUT)),
    )
