"""The settings that Everstep requires of a fleet's Auto Scaling group, called the contract.

    one Availability Zone                  traffic between zones costs money, and EFA does not cross zones
    one instance type, or several          any node must be able to take the place of any other node
      of one family and like hardware
    new instances protected from scale-in  lowering the desired capacity ends no instance by itself
    no scaling policies                    the fleet loop is the only writer of desired capacity
    no Capacity Rebalancing                AWS would replace Spot instances while they train
    no warm pool                           its instances are stopped or idle, and cannot join as nodes
    five processes suspended               AWS neither rebalances, replaces, refreshes nor scales by itself
    Terminate and HealthCheck active       requested terminations must take effect, and the group reports its health
    a terminating hook of at most 60 s     a termination by AWS becomes a notice

Invariant: `ensure` makes exactly the changes that `changes` returns. Each `Change` contains the function that makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Final

from control_plane.cloud.errors import ContractViolation
from control_plane.cloud.operator import (
    TERMINATING_TRANSITION,
    CloudOperator,
    GroupState,
    LifecycleHook,
    MixedInstances,
)
from everstep.protocol.ids import NodeId

SUSPENDED_PROCESSES: Final = frozenset(
    {"AZRebalance", "ReplaceUnhealthy", "ScheduledActions", "InstanceRefresh", "AlarmNotification"},
)
"""Processes of Auto Scaling that the contract suspends. Launch stays active. A person may suspend it; the fleet then
shows the suspension as the reason why it waits.
"""
ACTIVE_PROCESSES: Final = ("Terminate", "HealthCheck")
"""Processes of Auto Scaling that must be active, so that terminations and health reports take effect. Everstep does not
resume them, because a person may have suspended them on purpose.
"""
MAX_NAMED_MEMBERS: Final = 20
"""Maximum number of a group's instances that one sentence names."""
MAX_HOOK_TIMEOUT: Final = timedelta(seconds=60)
TERMINATION_HOOK: Final = LifecycleHook(
    name="everstep-termination",
    transition=TERMINATING_TRANSITION,
    heartbeat_timeout=MAX_HOOK_TIMEOUT,
    default_result="CONTINUE",
)
"""The lifecycle hook that delays a termination by AWS, so that the control plane sees it as a notice. After CONTINUE,
AWS's activity history shows no failure, unlike after ABANDON.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A condition of the contract that only the owner of the Auto Scaling group can meet."""

    setting: str
    is_met: bool
    words: str
    """A sentence that names the Auto Scaling group, and states the setting's value or the problem with this value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of one setting of an Auto Scaling group to the value that the contract requires."""

    setting: str
    before: str | None
    """None if the Auto Scaling group has no value for the setting."""
    after: str
    why: str
    """The sentence in which `drift` describes the current value."""
    make: Callable[[CloudOperator], None] = field(compare=False, repr=False)
    """Idempotent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ensured:
    """The result of `ensure`: the group as AWS described it after the last change, and the changes in their order."""

    group: GroupState
    made: tuple[Change, ...]


def drift(group: GroupState) -> tuple[str, ...]:
    """Return the deviations of a group from the contract, one sentence each, in a fixed order. Pure."""
    return (*(check.words for check in checks(group) if not check.is_met), *(change.why for change in changes(group)))


def checks(group: GroupState) -> tuple[Check, ...]:
    """Return the conditions on a group that only its owner can meet, met or not, in a fixed order. Pure."""
    name, zones, policies = group.name, group.availability_zones, group.scaling_policies
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
        _template_check(group),
        *([_mixed_check(name, group.mixed)] if group.mixed is not None else []),
        Check(
            setting="CapacityRebalance",
            is_met=not group.has_capacity_rebalance,
            words=f"{name} has Capacity Rebalancing: AWS would replace Spot instances while they train. Turn it off: "
            f"aws autoscaling update-auto-scaling-group --auto-scaling-group-name {name} --no-capacity-rebalance."
            if group.has_capacity_rebalance
            else f"{name} has no Capacity Rebalancing.",
        ),
        Check(
            setting="WarmPoolConfiguration",
            is_met=not group.has_warm_pool,
            words=f"{name} has a warm pool, whose instances no job can use. Spares replace it (SpareCount). Delete it: "
            f"aws autoscaling delete-warm-pool --auto-scaling-group-name {name}."
            if group.has_warm_pool
            else f"{name} has no warm pool.",
        ),
        _processes_check(group),
    )


def _template_check(group: GroupState) -> Check:
    name, template = group.name, group.launch_template
    if template is None:
        words = f"{name} has no single launch template; a fleet needs one, which names an instance type."
    elif not group.instance_type and group.mixed is None:
        words = f"The launch template {template.name} of {name} names no instance type; a fleet needs one."
    else:
        words = (
            f"{name} launches {group.instance_type or 'instances'} from the launch template {template.name}, version "
            f"{template.version}."
        )
    is_met = template is not None and bool(group.instance_type or group.mixed is not None)
    return Check(setting="LaunchTemplate", is_met=is_met, words=words)


def _mixed_check(name: str, mixed: MixedInstances) -> Check:
    """Return the check of a mixed instances policy."""
    # Weights are not allowed, because they would change the meaning of the desired capacity.
    types = mixed.instance_types
    trouble = ""
    if mixed.features:
        trouble = f"uses {', '.join(mixed.features)}, which a fleet cannot have."
    elif len(types) > 1 and (difference := _difference(mixed)):
        trouble = (
            f"has several instance types ({', '.join(types)}); any node must be able to take the place of any other, "
            f"but {difference}. Remove the types that differ."
        )
    allowed = f"has the instance types {', '.join(types)}" if len(types) > 1 else "has one instance type"
    words = trouble or f"{allowed}; it may mix Spot and On-Demand instances."
    return Check(
        setting="MixedInstancesPolicy", is_met=not trouble, words=f"The mixed instances policy of {name} {words}"
    )


def _difference(mixed: MixedInstances) -> str:
    """Return why nodes of a mixed instances policy's types cannot replace each other. Empty if they can."""
    # Users size their jobs for the first instance type, which the group prefers. A node runs one rank per
    # accelerator. The launch template attaches the same EFA interfaces to all nodes.
    first, *others = mixed.instance_types
    families = list(dict.fromkeys(each.partition(".")[0] for each in mixed.instance_types))
    if len(families) > 1:
        return f"they belong to the families {', '.join(families)}"
    wanted = mixed.shapes[first]
    for each in others:
        shape = mixed.shapes[each]
        if shape.accelerator_count != wanted.accelerator_count:
            return f"{each} has {shape.accelerator_count} accelerators, and {first} has {wanted.accelerator_count}"
        if shape.efa_count < wanted.efa_count:
            return f"{each} has {shape.efa_count} EFA interfaces, fewer than {first} with {wanted.efa_count}"
        if shape.memory_mib < wanted.memory_mib:
            return f"{each} has {shape.memory_mib} MiB of memory, less than {first} with {wanted.memory_mib} MiB"
    return ""


def _processes_check(group: GroupState) -> Check:
    suspended = [process for process in ACTIVE_PROCESSES if process in group.suspended_processes]
    words = (
        f"{group.name} suspends {' and '.join(suspended)}: terminations or health reports would not take effect. "
        f"Resume: aws autoscaling resume-processes --auto-scaling-group-name {group.name} --scaling-processes "
        f"{' '.join(suspended)}."
        if suspended
        else f"{group.name} runs the processes {' and '.join(ACTIVE_PROCESSES)}."
    )
    return Check(setting="SuspendedProcesses", is_met=not suspended, words=words)


def changes(group: GroupState) -> tuple[Change, ...]:
    """Return the changes that give a group the settings of the contract, in the order in which `ensure` makes them."""
    return tuple(_changes(group))


def _changes(group: GroupState) -> Iterator[Change]:
    name = group.name
    missing = sorted(SUSPENDED_PROCESSES - group.suspended_processes)
    if missing:
        yield Change(
            setting="SuspendedProcesses",
            before=", ".join(sorted(group.suspended_processes)) or None,
            after=", ".join(sorted(SUSPENDED_PROCESSES | group.suspended_processes)),
            why=f"{name} does not suspend {', '.join(missing)}: AWS may end or replace instances on its own.",
            make=lambda operator: operator.suspend_processes(name, missing),
        )
    if not group.new_instances_protected:
        yield Change(
            setting="NewInstancesProtectedFromScaleIn",
            before="false",
            after="true",
            why=f"New instances of {name} are not protected from scale-in.",
            make=lambda operator: operator.protect_new_instances(name),
        )
    unprotected = sorted(member.instance_id for member in group.members if member.lacks_protection)
    if unprotected:
        yield Change(
            setting="Instances.ProtectedFromScaleIn",
            before="false",
            after="true",
            why=f"Members of {name} without protection from scale-in: {_some(unprotected)}.",
            make=lambda operator: operator.protect_members(name, unprotected),
        )
    hooks = [hook for hook in group.hooks if hook.transition == TERMINATING_TRANSITION]
    if not hooks:
        yield Change(
            setting=f"LifecycleHooks.{TERMINATION_HOOK.name}",
            before=None,
            after=f"{TERMINATION_HOOK.transition}, {MAX_HOOK_TIMEOUT.total_seconds():.0f} s, then "
            f"{TERMINATION_HOOK.default_result}",
            why=f"{name} has no terminating lifecycle hook: a termination by AWS would come without notice.",
            make=lambda operator: operator.put_termination_hook(name, TERMINATION_HOOK),
        )
    yield from (_shortened(name, hook) for hook in hooks if hook.heartbeat_timeout > MAX_HOOK_TIMEOUT)


def _some(instance_ids: Sequence[NodeId]) -> str:
    """Return a text with the first `MAX_NAMED_MEMBERS` ids and the number of further ids. The API limits its length."""
    more = len(instance_ids) - MAX_NAMED_MEMBERS
    return ", ".join(instance_ids[:MAX_NAMED_MEMBERS]) + (f" and {more} more" if more > 0 else "")


def ensure(operator: CloudOperator, group: GroupState) -> Ensured:
    """Give an Auto Scaling group the settings that Everstep requires. Return the group and the changes. Idempotent.

    Makes exactly the changes that `changes` returns for `group`, because a person may have confirmed them.

    Raises:
        ContractViolation: a condition of `checks` is not met. Nothing was changed.
        CloudError: the cloud refused a change or did not answer. Some changes may be made. Another call makes the
            remaining changes.
    """
    require_fit(group)
    wanted = changes(group)
    for change in wanted:
        change.make(operator)
    return Ensured(group=operator.describe_group(group.name) if wanted else group, made=wanted)


def require_fit(group: GroupState) -> None:
    """Raise ContractViolation with the sentences of all checks of the group that are not met."""
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
