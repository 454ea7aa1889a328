"""Implements all faults, with one method per kind of fault.

Invariant: a fault either takes effect, and the injector returns facts that prove it, or is refused and changes nothing.
The injector runs in the process of the local AWS, which holds its lock meanwhile.
"""

from __future__ import annotations

import logging
import random
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final

import msgspec
from moto.ec2.models.instances import Instance

from infra.local_cloud import events, fault_kinds, node_faults
from infra.local_cloud.auto_scaling import AutoScaling, instance_types
from infra.local_cloud.ec2 import Ec2, End, Life, owner_of
from infra.local_cloud.errors import FaultRefused
from infra.local_cloud.events import Announcements, stamp
from infra.local_cloud.fault_kinds import LASTING, WARNINGS, AnyFault, Effect, name_of
from infra.local_cloud.faults import Faults
from infra.local_cloud.instances import InstanceRunner
from infra.local_cloud.network import Network
from infra.local_cloud.node_faults import Facts, Gpu
from infra.local_cloud.processes import Process

log = logging.getLogger(__name__)

MAINTENANCE_ENDS: Final[Mapping[str, End]] = {
    "instance-retirement": "stop",
    "instance-stop": "stop",
    "instance-reboot": "reboot",
    "system-reboot": "reboot",
}
"""Action of the local cloud on an instance, by EC2's code of the event. Other codes do not affect it."""
MAINTENANCE_LASTS: Final = timedelta(hours=2)
BLOCK_END_LEAD: Final = timedelta(minutes=30)
"""Time from the first termination of instances to the end of a Capacity Block, which AWS's warning names. Source:
Amazon EC2 User Guide (Capacity Blocks for ML).
"""
THROTTLED: Final = ("autoscaling", "ec2", "events", "sqs")
NO_NETWORK: Final = (
    "this local cloud has no network of its own, and a {fault} is a real one or none: `everstep local "
    "up --network namespaces` (needs root)"
)
HISTORY: Final = 1000
_Outcome = tuple[str, str, Facts]
"""Affected instance or group, sentence and facts of an `Effect`."""
CONDITIONS_OF: Final = {
    "throttle": ("throttle",),
    "rate-limits": ("api_rate_share",),
    "stale-view": ("visibility_seconds", "describe_omit_share"),
    "zone-disruption": ("disrupted_zones",),
    "capacity": ("capacity",),
    "slow-boot": ("boot_delay_seconds",),
    "slots-taken": ("slot_release_seconds",),
    "bad-events": ("event_delay_seconds", "event_double_share", "event_drop_share"),
}
"""Fields of `Conditions` that each kind changes and `clear` restores."""


@dataclass(eq=False, repr=False, kw_only=True)
class Injector:
    """Injects faults into the local cloud and clears lasting faults.

    `network` None: instances share this machine's loopback. A fault can cut an instance off from `aws_addresses`.
    `control_plane_addresses` includes the load balancer's.
    """

    ec2: Ec2
    auto_scaling: AutoScaling
    announcements: Announcements
    faults: Faults
    runner: InstanceRunner
    network: Network | None
    aws_addresses: tuple[str, ...]
    control_plane_addresses: tuple[str, ...]
    history: list[Effect] = field(default_factory=list, init=False)
    """Effects, oldest first, at most `HISTORY`."""
    # `clear` reads the following records of the lasting faults in effect, and ends these faults.
    _stopped: list[Process] = field(default_factory=list, init=False)
    _sick_gpus: dict[str, dict[int, Gpu]] = field(default_factory=dict, init=False)
    _suspended: set[str] = field(default_factory=set, init=False)
    """ARNs of the groups whose Launch a fault suspended."""

    def inject(self, fault: AnyFault) -> Effect:
        """Inject a fault.

        Raises FaultRefused, without any change, if it is impossible in this cloud or for this target.
        """
        target, did, facts = getattr(self, f"_{name_of(fault).replace('-', '_')}")(fault)
        effect = Effect(fault=name_of(fault), target=target, did=did, facts=facts)
        log.info("fault %s: %s %s", effect.fault, effect.did, effect.facts)
        self.history.append(effect)
        del self.history[:-HISTORY]
        return effect

    def clear(self, name: str = "", target: str = "") -> list[str]:
        """Clear the lasting faults of one kind (empty: all) for one target (empty: all).

        Return one sentence per effect. Ended processes and instances stay ended. Raises FaultRefused if the fault is
        unknown, is not a lasting fault, or cannot be cleared for a single target.
        """
        if target:
            if name not in ("partition", "slow-network"):
                raise FaultRefused(
                    f"only partition and slow-network can be cleared for one instance, not {name or 'all faults'}"
                )
            return self._mend_lines(name, target)
        undo: dict[str, Callable[[], list[str]]] = {
            **{fault: partial(self._restore_conditions, *fields) for fault, fields in CONDITIONS_OF.items()},
            "warnings": self._take_warnings_back,
            "fail-status": self._pass_checks,
            "suspend-launch": self._resume_launch,
            "hang": self._continue_ranks,
            "xid": self._heal_gpus,
            "unfit": self._repair_nodes,
            "partition": partial(self._mend_lines, "partition"),
            "slow-network": partial(self._mend_lines, "slow-network"),
        }
        key = "warnings" if name in WARNINGS else name
        if name and name not in LASTING:
            raise FaultRefused(f"{name} is not a lasting fault; lasting faults: {', '.join(sorted(LASTING))}")
        assert not key or key in undo, f"{key} lasts and cannot be cleared"
        return [sentence for fault, work in undo.items() if key in ("", fault) for sentence in work()]

    def _restore_conditions(self, *fields: str) -> list[str]:
        now, first = self.faults.conditions, self.faults.first
        changed = {field: getattr(first, field) for field in fields if getattr(now, field) != getattr(first, field)}
        if changed:
            self._condition(**changed)
        return [f"{field} is {msgspec.json.encode(value).decode()} again" for field, value in changed.items()]

    def _take_warnings_back(self) -> list[str]:
        return [f"{instance_id} has nothing to fear" for instance_id in self.ec2.unplan()]

    def _pass_checks(self) -> list[str]:
        return [f"the status checks of {instance_id} pass" for instance_id in self.ec2.pass_checks()]

    def _resume_launch(self) -> list[str]:
        groups = [group for group in self.auto_scaling.groups() if group.arn in self._suspended]
        self._suspended = set()
        for group in groups:
            self.auto_scaling.resume(group, ["Launch"])
        return [f"Launch of {group.name} is resumed" for group in groups]

    def _continue_ranks(self) -> list[str]:
        stopped, self._stopped = self._stopped, []
        return [f"process {pid} goes on" for pid in node_faults.continue_stopped(stopped)]

    def _heal_gpus(self) -> list[str]:
        sick, self._sick_gpus = sorted(self._sick_gpus), {}
        for instance_id in sick:
            node_faults.write_gpus(self.runner.directory(instance_id), ())
        return [f"the GPUs of {instance_id} are well" for instance_id in sick]

    def _repair_nodes(self) -> list[str]:
        files = [node_faults.burn_in_file(self.runner.directory(instance_id)) for instance_id in self.runner.pids()]
        spoiled = [file for file in files if file.exists()]
        for file in spoiled:
            file.unlink()
        return [f"{file.parent.name} passes its tests" for file in spoiled]

    def _mend_lines(self, fault: str, target: str = "") -> list[str]:
        network, sentences = self.network, []
        for instance_id, link in network.links().items() if network else ():
            if target not in ("", instance_id):
                continue
            if network and fault == "partition" and link.cut_from != set():
                # Read the counters of dropped packets before the repair, because the repair (`cut` without addresses)
                # removes them.
                counters = network.counters(instance_id)
                network.cut(instance_id, ())
                sentences.append(
                    f"{instance_id} is reached again; {counters['dropped_to'] + counters['dropped_from']} "
                    "packets were dropped"
                )
            elif network and fault == "slow-network" and link.bits_per_second:
                network.slow(instance_id, None)
                sentences.append(f"the line of {instance_id} carries what it can")
        return sentences

    # The methods below inject faults of AWS on one instance.

    def _spot_warning(self, fault: fault_kinds.SpotWarning) -> _Outcome:
        instance, life = self._affected(fault.target)
        plan = life.spot_action = self.ec2.plan(instance.id, fault.action, "spot", fault.after)
        self.announcements.put(events.spot_interruption(owner_of(instance), instance.id, fault.action))
        did = f"{instance.id} is interrupted in {fault.after:g} s: {fault.action}"
        return instance.id, did, {"time": stamp(plan.at_time)}

    def _rebalance(self, fault: fault_kinds.Rebalance) -> _Outcome:
        instance, life = self._affected(fault.target)
        life.rebalance_at = datetime.now(UTC)
        self.announcements.put(events.rebalance_recommendation(owner_of(instance), instance.id))
        self.auto_scaling.rebalance(instance.id)
        return instance.id, f"{instance.id} should be left", {"notice_time": stamp(life.rebalance_at)}

    def _maintenance(self, fault: fault_kinds.Maintenance) -> _Outcome:
        instance, life = self._affected(fault.target)
        begins = datetime.now(UTC) + timedelta(seconds=fault.after)
        scheduled = events.PlannedEvent(
            event_id=f"instance-event-{uuid.uuid4().hex[:17]}",
            code=fault.code,
            not_before=begins,
            not_after=begins + MAINTENANCE_LASTS,
        )
        life.scheduled = (*life.scheduled, scheduled)
        how = MAINTENANCE_ENDS.get(fault.code)
        if how:
            self.ec2.plan(instance.id, how, "retirement", fault.after)
        self.announcements.put(events.scheduled_change(owner_of(instance), instance.id, scheduled))
        facts = {"event_id": scheduled.event_id, "code": fault.code, "not_before": stamp(begins)}
        return instance.id, f"{fault.code} of {instance.id} in {fault.after:g} s", facts

    def _block_end(self, fault: fault_kinds.BlockEnd) -> _Outcome:
        instance, _ = self._affected(fault.target)
        plan = self.ec2.plan(instance.id, "terminate", "block", fault.after)
        reservation = instance.capacity_reservation_id = f"cr-{uuid.uuid4().hex[:17]}"
        ends_at = plan.at_time + BLOCK_END_LEAD
        self.announcements.put(events.block_expiration(owner_of(instance), reservation, ends_at))
        facts = {"capacity_reservation_id": reservation, "time": stamp(plan.at_time), "end_date": stamp(ends_at)}
        return instance.id, f"{instance.id} ends in {fault.after:g} s, and its capacity block half an hour later", facts

    def _terminate(self, fault: fault_kinds.Terminate) -> _Outcome:
        instance_id = self._running(fault.target)
        pid = self.runner.pids().get(instance_id)
        self.ec2.end(instance_id, "terminate", "outside")
        return instance_id, f"{instance_id} was terminated from outside", {"state": "terminated", "init_pid": pid}

    def _crash(self, fault: fault_kinds.Crash) -> _Outcome:
        instance, life = self._affected(fault.target)
        pid = self.runner.pids()[instance.id]
        life.has_crashed = True
        life.failed_checks = {"instance": datetime.now(UTC), "system": datetime.now(UTC)}
        return instance.id, f"the host of {instance.id} died; EC2 says running", {"init_pid": pid, "state": "running"}

    def _fail_status(self, fault: fault_kinds.FailStatus) -> _Outcome:
        instance, life = self._affected(fault.target)
        life.failed_checks[fault.check] = datetime.now(UTC)
        facts = {"check": fault.check, "status": "impaired"}
        return instance.id, f"the {fault.check} status check of {instance.id} fails", facts

    # The methods below inject faults of AWS that affect the whole local cloud.

    def _throttle(self, fault: fault_kinds.Throttle) -> _Outcome:
        services = (fault.service,) if fault.service else THROTTLED
        conditions = self.faults.conditions
        self._condition(throttle={**conditions.throttle, **dict.fromkeys(services, fault.share)})
        did = f"{fault.share:.0%} of the calls of {', '.join(services)} are throttled"
        return "", did, {"services": list(services)}

    def _rate_limits(self, fault: fault_kinds.RateLimits) -> _Outcome:
        self._condition(api_rate_share=fault.share)
        return "", f"calls of ec2 and autoscaling are limited to {fault.share:g} of AWS's rates", {}

    def _stale_view(self, fault: fault_kinds.StaleView) -> _Outcome:
        delay = self.ec2.answers.visibility_seconds if fault.delay is None else fault.delay
        self._condition(visibility_seconds=delay, describe_omit_share=fault.omit)
        shown = f"DescribeInstances shows changes after {msgspec.json.encode(delay).decode()} s"
        return "", f"{shown}, and answers omit {fault.omit:.0%} of the instances", {}

    def _zone_disruption(self, fault: fault_kinds.ZoneDisruption) -> _Outcome:
        every = {zone for group in self.auto_scaling.groups() for zone in group.availability_zones}
        zones = (fault.zone,) if fault.zone else tuple(sorted(every))
        if not zones:
            raise FaultRefused("no Auto Scaling group exists yet; pass a zone")
        self._condition(disrupted_zones=zones)
        return "", f"descriptions of instances in {', '.join(zones)} fail", {"zones": list(zones)}

    def _capacity(self, fault: fault_kinds.Capacity) -> _Outcome:
        types = (
            {fault.instance_type}
            if fault.instance_type
            else {kind for group in self.auto_scaling.groups() for kind in instance_types(group)}
        )
        if not types:
            raise FaultRefused("no Auto Scaling group exists yet; pass an instance type")
        conditions = self.faults.conditions
        self._condition(capacity={**conditions.capacity, **dict.fromkeys(types, fault.count)})
        facts = {"instance_types": sorted(types), "count": fault.count}
        return "", f"no more than {fault.count} of {', '.join(sorted(types))} can exist", facts

    def _slow_boot(self, fault: fault_kinds.SlowBoot) -> _Outcome:
        self._condition(boot_delay_seconds=fault.delay)
        return "", "boots take another time", {"delay": msgspec.to_builtins(fault.delay)}

    def _slots_taken(self, fault: fault_kinds.SlotsTaken) -> _Outcome:
        self._condition(slot_release_seconds=fault.delay)
        return "", "slots of instances that end stay taken", {"delay": msgspec.to_builtins(fault.delay)}

    def _bad_events(self, fault: fault_kinds.BadEvents) -> _Outcome:
        self._condition(event_delay_seconds=fault.delay, event_double_share=fault.double, event_drop_share=fault.drop)
        facts = {"delay": msgspec.to_builtins(fault.delay), "double": fault.double, "drop": fault.drop}
        return "", f"{fault.double:.0%} of events come twice, {fault.drop:.0%} never", facts

    def _suspend_launch(self, fault: fault_kinds.SuspendLaunch) -> _Outcome:
        groups = [group for group in self.auto_scaling.groups() if fault.group in ("", group.name)]
        if not groups:
            raise FaultRefused(
                f"no Auto Scaling group {fault.group} exists" if fault.group else "no Auto Scaling group exists"
            )
        for group in groups:
            if fault.administrative:
                self.auto_scaling.suspend_administratively(group)
            else:
                self.auto_scaling.suspend(group, ["Launch"])
            self._suspended.add(group.arn)
        names = [group.name for group in groups]
        reason = self.auto_scaling.suspension_reason(groups[0], "Launch")
        return names[0], f"Launch of {', '.join(names)} is suspended", {"groups": names, "reason": reason}

    # The methods below inject faults of Everstep's own processes and nodes.

    def _kill_rank(self, fault: fault_kinds.KillRank) -> _Outcome:
        instance_id, facts = self._where_it_can(fault.target, lambda _, init: node_faults.kill_rank(init, fault.rank))
        return instance_id, f"rank {facts['rank']} on {instance_id}, pid {facts['pid']}, was killed", facts

    def _kill_agent(self, fault: fault_kinds.KillAgent) -> _Outcome:
        instance_id, facts = self._where_it_can(fault.target, lambda _, init: node_faults.kill_agent(init))
        return instance_id, f"the agent on {instance_id}, pid {facts['pid']}, was killed", facts

    def _kill_control_plane(self, _: fault_kinds.KillControlPlane) -> _Outcome:
        raise FaultRefused(
            "the local AWS does not run the control plane; use `everstep local fault kill-control-plane`"
        )

    def _hang(self, fault: fault_kinds.Hang) -> _Outcome:
        instance_id, facts = self._where_it_can(fault.target, lambda _, init: node_faults.stop_rank(init, fault.rank))
        self._stopped.append(Process(facts["pid"], facts["start_ticks"]))
        return instance_id, f"rank {facts['rank']} on {instance_id}, pid {facts['pid']}, stands still", facts

    def _partition(self, fault: fault_kinds.Partition) -> _Outcome:
        network = self._require_network("partition")
        instance_id = self._running(fault.target)
        words = [word.strip() for word in fault.separate_from.split(",")]
        peers = {peer: link.address for peer, link in network.links().items() if peer != instance_id}
        known = {
            "aws": [*self.aws_addresses],
            "control-plane": [*self.control_plane_addresses],
            "peers": [*peers.values()],
            **{peer: [address] for peer, address in peers.items()},
        }
        for word in words:
            if word != "rest" and word not in known:
                raise FaultRefused(f"{word!r} is not rest, aws, control-plane, peers or another running instance")
        addresses = None if "rest" in words else [address for word in words for address in known[word]]
        network.cut(instance_id, addresses)
        facts = {
            "addresses": "all" if addresses is None else addresses,
            "port": network.links()[instance_id].port,
            **network.counters(instance_id),
        }
        return instance_id, f"{instance_id} is cut off from {fault.separate_from}", facts

    def _slow_network(self, fault: fault_kinds.SlowNetwork) -> _Outcome:
        network = self._require_network("slow line")
        instance_id = self._running(fault.target)
        network.slow(instance_id, max(1, int(fault.megabits * 1e6)))
        facts = {
            "port": network.links()[instance_id].port,
            "bits_per_second": int(fault.megabits * 1e6),
            **network.counters(instance_id),
        }
        return instance_id, f"the line of {instance_id} carries {fault.megabits:g} Mbit/s", facts

    def _corrupt_replica(self, fault: fault_kinds.CorruptReplica) -> _Outcome:
        chance = random.Random(f"{self.faults.seed}/corrupt/{self.faults.choose('corrupt', 1 << 30)}")
        instance_id, facts = self._where_it_can(
            fault.target, lambda instance_id, init: node_faults.corrupt_replica(init, instance_id, fault.rank, chance)
        )
        what = f"rank {facts['rank']}'s replica of step {facts['step']}"
        return instance_id, f"a bit of {what} on {instance_id} has changed", facts

    def _xid(self, fault: fault_kinds.Xid) -> _Outcome:
        instance_id = self._running(fault.target)
        gpus = self._sick_gpus.setdefault(instance_id, {})
        xids = (fault.code,) if fault.code else ()
        gpus[fault.gpu] = Gpu(
            index=fault.gpu, xids=xids, ecc_uncorrectable=fault.ecc, throttled=fault.throttled, lost=fault.lost
        )
        path = node_faults.write_gpus(self.runner.directory(instance_id), [gpus[index] for index in sorted(gpus)])
        facts: Facts = {"file": str(path), "gpu": msgspec.to_builtins(gpus[fault.gpu])}
        return instance_id, f"NVML of {instance_id} reports Xid {fault.code} on GPU {fault.gpu}", facts

    def _unfit(self, fault: fault_kinds.Unfit) -> _Outcome:
        instance_id = self._running(fault.target)
        file = node_faults.spoil_test(self.runner.directory(instance_id), fault.test)
        return instance_id, f"the test {fault.test} of {instance_id} is spoiled", {"file": str(file)}

    def _affected(self, target: str) -> tuple[Instance, Life]:
        return self.ec2.find(self._running(target))

    def _running(self, target: str) -> str:
        """Return the running instance that a target selects: by id, by number, or at random if empty."""
        return self._running_from(target)[0]

    def _running_from(self, target: str) -> list[str]:
        """Return the instances on which to try a fault: the selected one, then others, unless the target is an id."""
        pids = self.runner.pids()
        running = [instance_id for instance_id in self.ec2.in_order_of_launch() if instance_id in pids]
        if target in running:
            return [target]
        if not running:
            raise FaultRefused("no instance is running")
        if target and not (target.isascii() and target.isdigit()):
            raise FaultRefused(f"{target} is not a running instance")
        first = int(target) % len(running) if target else self.faults.choose("target", len(running))
        return running[first:] + running[:first]

    def _where_it_can(self, target: str, work: Callable[[str, int], Facts]) -> tuple[str, Facts]:
        """Call `work` for the selected instance, and after a refusal for the next one, unless the target is an id."""
        refused = None
        for instance_id in self._running_from(target):
            try:
                return instance_id, work(instance_id, self.runner.pids()[instance_id])
            except FaultRefused as error:
                refused = refused or error
        assert refused is not None
        raise refused

    def _require_network(self, what: str) -> Network:
        if self.network is None:
            raise FaultRefused(NO_NETWORK.format(fault=what))
        return self.network

    def _condition(self, **changes: Any) -> None:
        self.faults.replace(msgspec.structs.replace(self.faults.conditions, **changes))
