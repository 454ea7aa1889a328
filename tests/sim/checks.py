"""Checks every decision of the control plane against the truth of the simulated world.

`Checks` stands between the real loops and the real `decide` functions. It knows what the control plane cannot know:
which slots each node has, which instances really ended, and whether the ranks make steps.

    of a job     generation numbers grow; a plan has the right nodes, holders and sources, and starts from the newest
                 step that its nodes have completely; no node leaves while the steps advance; the ledger has no gap
    of a fleet   no node ends without the agent's own fault report, AWS or a person; replacements respect the limit
    of both      the same input gives the same decision; a pause of all automatic actions stops them
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from unittest.mock import patch

from control_plane.accounts.facts import sentence
from control_plane.accounts.jobs import reason
from control_plane.core import accounting, elastic, incidents, remedies, witnesses
from control_plane.core.actions import (
    Decision,
    FleetDecision,
    PutManifest,
    RebootMember,
    Send,
    SetDesired,
    TerminateMember,
)
from control_plane.core.observed.causes import Surplus
from control_plane.core.observed.fleets import FleetObserved, FleetSpec
from control_plane.core.observed.incidents import IncidentRecord
from control_plane.core.observed.jobs import JobObserved, JobRecord
from control_plane.core.observed.nodes import InstanceCondition, NodeObserved, Remedy
from control_plane.core.observed.spans import Bucket, JobSpan
from control_plane.core.observed.specs import JobSpec, Policy
from control_plane.core.observed.steps import NO_GENERATION
from control_plane.core.states import ENDED_JOBS, JobState, NodeState
from control_plane.loop import fleet_loop, job_loop
from everstep.protocol.agent_messages import HaltRanks
from everstep.protocol.ids import Generation, NodeId, Rank, RunId, Step
from everstep.protocol.parity import holder_of, is_share, share_owner
from everstep.protocol.plan import GenerationPlan
from tests.sim.world import World, digest

SILENCE = re.compile(r"(?:agent of|coordinator) (\S+) was silent for ([0-9.]+) s")
ROUNDED_SECONDS = 0.06
"""Tolerance of a silence that a message states. Messages round it to a tenth of a second."""
SAME_SECONDS = 1e-4
"""Largest difference between the ledger and the incidents. The ledger rounds times to microseconds."""


Remembered = dict[RunId, tuple[dict[str, IncidentRecord], list[tuple[JobSpan, int]]]]
"""The incidents and the settled spans of each job."""


@dataclass
class JobTruth:
    """What the checks remember about a job."""

    spec: JobSpec
    plans: dict[Generation, GenerationPlan] = field(default_factory=dict)
    incidents: dict[str, IncidentRecord] = field(default_factory=dict)
    spans: list[tuple[JobSpan, int]] = field(default_factory=list)
    generation: Generation = NO_GENERATION
    """The newest generation that the control plane has issued."""
    advanced_at: float = 0.0
    """Simulated time at which the ranks last made so many steps that the job provably trains."""

    @property
    def plan(self) -> GenerationPlan | None:
        """The plan of the newest generation, or None if it has no plan yet."""
        return self.plans.get(self.generation)

    @property
    def newest_plan(self) -> GenerationPlan | None:
        return self.plans[max(self.plans)] if self.plans else None


class Checks:
    """The checks of one simulated world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.broken: list[str] = []
        """Broken rules, the first one first. A check does not raise, because the loops would catch the error."""
        self.jobs: dict[RunId, JobTruth] = {}
        self.told: set[NodeId] = set()
        """Nodes whose own agent has reported a fault that justifies their termination."""
        self.asked: set[NodeId] = set()
        """Nodes that a person wants to end."""
        self.announced: set[NodeId] = set()
        """Nodes for which AWS has announced an event, even if AWS withdrew it later."""
        self.is_lying = False
        """True from the first time that a part of the world lies."""
        self.rebooted: set[tuple[NodeId, float]] = set()

    def remembered(self) -> Remembered:
        """Return what the database stores about each job, for `forget_since`."""
        return {run: (dict(job.incidents), list(job.spans)) for run, job in self.jobs.items()}

    def forget_since(self, remembered: Remembered) -> None:
        """Follow the restore of a backup. The plans stay, because no generation number may be used twice."""
        for run, job in self.jobs.items():
            incidents, spans = remembered.get(run, ({}, []))
            job.incidents, job.spans = dict(incidents), list(spans)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Check all decisions of the loops within the context."""
        # The names in the loops, under which `tests.sim.planted` plants bugs.
        decide_job: Callable[..., Decision] = vars(job_loop)["decide"]
        decide_fleet: Callable[..., FleetDecision] = vars(fleet_loop)["decide"]

        def of_job(now: float, spec: JobSpec, observed: JobObserved, policy: Policy) -> Decision:
            decision = decide_job(now, spec, observed, policy)
            with self._noting():
                assert decide_job(now, spec, observed, policy) == decision, "the same facts give another decision"
                self.of_job(now, spec, observed, policy, decision)
            return decision

        def of_fleet(now: float, spec: FleetSpec, observed: FleetObserved, policy: Policy) -> FleetDecision:
            decision = decide_fleet(now, spec, observed, policy)
            with self._noting():
                assert decide_fleet(now, spec, observed, policy) == decision, "the same facts give another decision"
                self.of_fleet(now, spec, observed, policy, decision)
            return decision

        with patch.object(job_loop, "decide", of_job), patch.object(fleet_loop, "decide", of_fleet):
            yield

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except AssertionError:
            self.broken.append(traceback.format_exc(limit=-1))

    def of_fleet(
        self, now: float, spec: FleetSpec, observed: FleetObserved, policy: Policy, decision: FleetDecision
    ) -> None:
        """Check a decision about the fleet."""
        if policy.pause:
            assert (decision.actions, decision.records, decision.is_empty) == ((), (), False), "a paused fleet acts"
        self._note_faults(observed.nodes, now)
        replaced = [row.node_id for row in decision.records if row.replaced_at == now]
        count = len(observed.replaced) + len(replaced)
        assert not replaced or count <= spec.max_replacements_per_hour, f"{replaced} exceed the hourly limit"
        rows = {row.node_id: row for row in (*observed.records, *decision.records)}
        for action in decision.actions:
            match action:
                case SetDesired(desired_count=desired):
                    staying = observed.group.staying if observed.group is not None else ()
                    assert self.is_lying or len({*staying}) <= desired, "AWS would end an instance that nobody named"
                case TerminateMember(node_id=node_id):
                    row = rows.get(node_id)
                    assert row is None or row.state is not NodeState.ASSIGNED, "a node of a job is ended"
                    is_allowed = self.has_ended(node_id) or node_id in self.told | self.asked | self.announced
                    assert is_allowed or (row is not None and isinstance(row.reason, Surplus)), (
                        f"nothing allows the end of {node_id}: {row}"
                    )
                case RebootMember(node_id=node_id, since=since):
                    assert node_id in self.told, f"{node_id} is rebooted without a fault"
                    self.rebooted.add((node_id, since))
                case _:
                    pass

    def _note_faults(self, nodes: Mapping[NodeId, NodeObserved], now: float) -> None:
        for node in nodes.values():
            if any(remedies.of_fault(fault, (), now) in (Remedy.REBOOT, Remedy.REPLACE) for fault in node.faults):
                self.told.add(node.node_id)

    def has_ended(self, node_id: NodeId) -> bool:
        """Return whether an instance has really ended, or AWS and the silence of its agent both say so."""
        operator, agent = self.world.operator, self.world.agents.get(node_id)
        if node_id in operator.omitted | operator.reported_ended and (agent is None or agent.connection is None):
            return True
        return not any(node_id in self.world.operator.running(group) for group in self.world.groups.values())

    def of_job(self, now: float, spec: JobSpec, observed: JobObserved, policy: Policy, decision: Decision) -> None:
        """Check a decision about a job."""
        job = self.jobs.setdefault(spec.run, JobTruth(spec))
        job.spec = spec
        before, after = observed.record, decision.record
        self._note_faults(observed.nodes, now)
        if policy.pause:
            self.check_pause(observed, decision)
        self.check_exclusions(job, observed, decision)
        self.check_silences(observed, decision)
        if before.state in ENDED_JOBS:
            assert decision == Decision(record=before), "a job that has ended changes"
            return
        if before.state is JobState.PAUSING and after.state is JobState.QUEUED and not self.is_lying:
            stored = max((each.step for each in observed.checkpoints), default=0)
            assert stored >= before.committed, "a job releases nodes with a step that only they have"
        job.incidents |= {each.id: each for each in (*decision.incidents, after.incident) if each is not None}
        job.spans += decision.settled_spans
        check_ledger(before, after, job.spans)
        check_incidents(after, job.incidents.values())
        if not self.is_lying:
            assert after.boundary >= after.committed, "no rank of this generation has finished the committed step"
        assert after.issued_generation >= before.issued_generation, "a generation number shrinks"
        job.generation = after.generation
        if decision.plan is not None:
            self.check_plan(job, observed, decision.plan, decision.record)
            job.plans[decision.plan.generation] = decision.plan

    def check_pause(self, observed: JobObserved, decision: Decision) -> None:
        """Check that a paused job starts nothing. Ranks of earlier generations may still be ended."""
        before, after = observed.record, decision.record
        assert (after.state, after.issued_generation) == (before.state, before.issued_generation)
        assert decision.plan is None
        assert decision.fleet is None
        for action in decision.actions:
            match action:
                case PutManifest():
                    pass
                case Send(_, HaltRanks(generation=generation)):
                    assert generation < before.issued_generation
                case _:
                    raise AssertionError(f"{action} leaves while automation is paused")

    def check_plan(self, job: JobTruth, observed: JobObserved, plan: GenerationPlan, after: JobRecord) -> None:
        assert plan.generation > max(job.plans, default=0)
        assert all(agent.generation <= plan.generation for agent in self.world.agents.values() if agent.run == plan.run)
        nodes = [node.node_id for node in plan.nodes]
        assert len(nodes) == len(set(nodes))
        # A person may have lowered the maximum below the present number of nodes.
        most = max(job.spec.most_node_count, elastic.count_before(job.spec, observed.record))
        assert job.spec.least_node_count <= len(nodes) <= most
        assert set(nodes) <= set(observed.assigned)
        owners = {rank: node.node_id for node in plan.nodes for rank in node.ranks}
        assert sorted(owners) == list(range(len(nodes) * job.spec.ranks_per_node))
        if job.newest_plan is not None:
            before = [node.node_id for node in job.newest_plan.nodes]
            if len(before) == len(nodes):
                assert all(a == b for a, b in zip(nodes, before, strict=True) if a in before), "a node changed place"
            else:
                staying = [node for node in before if node in nodes]
                assert nodes[: len(staying)] == staying, "the order of the ranks changed"
        for rank in plan.ranks:
            assert len(rank.copy_nodes) == len(set(rank.copy_nodes)) == min(job.spec.copies, len(nodes))
            assert rank.holders[0] == owners[rank.rank]
            assert set(rank.holders) <= set(nodes)
            assert bool(rank.sources) == (plan.base_step > 0 and plan.relayout is None)
        for shard, sources in plan.base_shards:
            assert bool(sources) == (plan.base_step > 0)
            for source in (each for each in sources if not self.is_lying):
                assert source.step == plan.base_step
                assert self.maker(job, plan.parent, source.step) == source.origin_generation, "a source off the path"
                assert source.digest == digest(shard, source.origin_generation, source.step)
                assert job.plans[source.origin_generation].world_size == len(plan.base_shards)
        self.check_placement(job, observed, plan)
        self.check_base(job, observed, plan, after)
        for node in plan.nodes:
            for reference in node.keep:
                assert reference.step <= plan.base_step
                assert self.maker(job, plan.parent, reference.step) == reference.origin_generation
            by_rank = [reference.owner_rank for reference in node.keep]
            assert all(by_rank.count(rank) <= 2 for rank in by_rank)

    def held_steps(self, job: JobTruth, parent: Generation, nodes: Iterable[NodeId]) -> set[Step]:
        """Return the steps that these nodes have completely in memory, among the steps in the history of generation
        `parent`.
        """
        slots = {
            key
            for node_id in nodes
            if node_id in self.world.agents and (agent := self.world.agents[node_id]).run == job.spec.run
            for key in agent.slots
        }
        steps = {Step(step) for _, _, step in slots}
        return {
            step
            for step in steps
            if (maker := self.maker(job, parent, step)) is not None
            and all(
                (rank.rank, maker, step) in slots
                or (
                    len(rank.stripe) > 1
                    and all(self.is_left(slots, each, maker, step) for each in rank.stripe if each != rank.rank)
                )
                for rank in job.plans[maker].ranks
            )
        }

    @staticmethod
    def is_left(slots: Collection[tuple[int, int, int]], rank: Rank, maker: Generation, step: Step) -> bool:
        """Return whether a rank's shard and share of a step are among these slots."""
        return (rank, maker, step) in slots and (share_owner(rank), maker, step) in slots

    def check_base(self, job: JobTruth, observed: JobObserved, plan: GenerationPlan, after: JobRecord) -> None:
        """Check that a plan starts from the newest step of which its nodes hold all shards, or from a newer step.

        It may start from an older step only after a source of a newer step failed verification, by two readers. A
        relayout with parity may start from the committed step, because the shares of a newer step can be incomplete.
        """
        if not after.refused and not self.is_lying:
            held = self.held_steps(job, plan.parent, (node.node_id for node in plan.nodes))
            held -= {each.step for each in witnesses.refused(observed.record.failed_reads, observed.checkpoints)}
            if plan.relayout is not None and job.spec.parity_group_size is not None:
                held = {step for step in held if step <= observed.record.committed}
            assert plan.base_step >= max(held, default=0), "a step that is whole in memory was given up"

    def check_placement(self, job: JobTruth, observed: JobObserved, plan: GenerationPlan) -> None:
        """Check that as few shards as possible have all their holders in one failure domain.

        If the previous placement of the same number of nodes reaches this minimum too, it must stay unchanged.
        """
        if job.spec.parity_group_size is not None:
            self.check_stripes(job, plan, job.spec.parity_group_size)
            return
        nodes = [node.node_id for node in plan.nodes]
        copies = len(plan.ranks[0].holders)
        if copies == 1 or copies < job.spec.copies:
            # Each shard has one holder, or every node holds all shards because there are as few nodes as copies.
            return
        domains = [observed.nodes[node_id].domain or node_id for node_id in nodes]

        def places(other: GenerationPlan) -> list[list[int]]:
            place = {node.node_id: i for i, node in enumerate(other.nodes)}
            return [sorted(place[holder] for holder in other.ranks[node.ranks[0]].holders) for node in other.nodes]

        def exposed(held: list[list[int]]) -> int:
            return sum(len({domains[place] for place in holders}) == 1 for holders in held)

        most = max(domains.count(domain) for domain in domains)
        # Smallest possible number of shards whose holders are all in one failure domain.
        least = max(0, len(nodes) - job.spec.copies * (len(nodes) - most))
        assert exposed(places(plan)) == least
        is_same_size = job.newest_plan is not None and len(job.newest_plan.nodes) == len(nodes)
        if job.newest_plan is not None and is_same_size and exposed(places(job.newest_plan)) == least:
            assert places(plan) == places(job.newest_plan), "a surviving group changed without a reason"

    def check_stripes(self, job: JobTruth, plan: GenerationPlan, group_size: int) -> None:
        """Check the stripes of a new plan.

        A stripe consists of the ranks with the same LOCAL_RANK on the nodes of a group.

        If a member has a share, the new plan must not discard it without need. A new plan with as many nodes as the
        previous plan (`newest_plan`) must have the same stripes. Otherwise, it must have the stripes of the generation
        that made the base, if every such stripe still has a share of the base.
        """
        owners = {rank: node.node_id for node in plan.nodes for rank in node.ranks}
        for rank in plan.ranks:
            assert rank.rank in rank.stripe
            assert group_size <= len(rank.stripe) < 2 * group_size
            assert list(rank.stripe) == sorted(rank.stripe)
            assert {each % job.spec.ranks_per_node for each in rank.stripe} == {rank.rank % job.spec.ranks_per_node}
            assert all(plan.ranks[each].stripe == rank.stripe for each in rank.stripe)
            assert {*rank.holders} == {owners[each] for each in rank.stripe}
        before = job.newest_plan
        inventories = [
            agent.inventory for node in plan.nodes if (agent := self.world.agents.get(node.node_id)) is not None
        ]
        shares = [slot for slots in inventories for slot in slots if is_share(slot.owner_rank)]
        if before is None or not shares:
            return
        if len(before.nodes) == len(plan.nodes):
            assert [rank.stripe for rank in plan.ranks] == [rank.stripe for rank in before.ranks], "stripes changed"
        elif plan.relayout is None and plan.base_step:
            maker = job.plans[plan.ranks[0].sources[0].origin_generation]
            of_base = {holder_of(slot.owner_rank) for slot in shares if slot.step == plan.base_step}
            if all(of_base & {*rank.stripe} for rank in maker.ranks):
                assert [rank.stripe for rank in plan.ranks] == [rank.stripe for rank in maker.ranks], "stripes changed"

    def check_exclusions(self, job: JobTruth, observed: JobObserved, decision: Decision) -> None:
        """Check that no node is excluded while its job's steps advance.

        There are two exceptions: nodes that AWS reports as ended, and jobs whose ranks have all agreed on a stop.
        """
        known = {exclusion.node_id for exclusion in observed.record.exclusions}
        fresh = [exclusion for exclusion in decision.record.exclusions if exclusion.node_id not in known]
        for exclusion in fresh:
            node_id = exclusion.node_id
            if exclusion.may_terminate:
                is_taken = observed.nodes[node_id].instance is InstanceCondition.ENDED or node_id in self.announced
                failed = {read.generation for read in observed.record.failed_reads if read.reader == node_id}
                if len(failed) > 1:  # Its own agent reported two failed loads.
                    self.told.add(node_id)
                assert node_id in self.told or is_taken, exclusion
            is_member = job.plan is not None and any(node.node_id == node_id for node in job.plan.nodes)
            is_training = (
                observed.record.state is JobState.RUNNING and bool(self.world.stepping(job.plan)) and is_member
            )
            if is_training and observed.nodes[node_id].instance is not InstanceCondition.ENDED:
                lasted = self.world.monotonic() - job.advanced_at
                assert lasted > self.world.timeouts.lease_seconds, (
                    f"{node_id} was excluded while steps advanced: {exclusion.evidence}"
                )

    def check_silences(self, observed: JobObserved, decision: Decision) -> None:
        """Assert that no message overstates how long a node has been silent, whatever the clocks show."""
        told = [
            reason(observed.record.reason),
            *(map(sentence, observed.record.incident.evidence) if observed.record.incident is not None else ()),
        ]
        tells = [
            reason(decision.record.reason),
            *(map(sentence, decision.record.incident.evidence) if decision.record.incident is not None else ()),
        ]
        for words in tells:
            for node_id, seconds in SILENCE.findall(words) if words not in told else ():
                lasted = observed.nodes[NodeId(node_id)].silent_seconds
                assert float(seconds) <= lasted + ROUNDED_SECONDS, f"{words}: it was silent for {lasted} s"

    def maker(self, job: JobTruth, generation: Generation, step: int) -> Generation | None:
        """Return the generation that made a step, which is this generation or an ancestor.

        Return None if none of them made it.
        """
        while generation in job.plans:
            plan = job.plans[generation]
            if step > plan.base_step:
                return plan.generation
            generation = plan.parent
        return None


def check_ledger(before: JobRecord, after: JobRecord, settled: Iterable[tuple[JobSpan, int]]) -> None:
    """Assert that every second of a job is in one bucket, and that no bucket shrinks."""
    spans = [*settled, *accounting.open_spans(after)]
    assert all(end == later.start for (_, end), (later, _) in pairwise(spans)), "the spans have gaps"
    for bucket in set(Bucket) - {Bucket.TRAIN, Bucket.SHORTAGE}:
        spent = sum(end - span.start for span, end in spans if span.bucket is bucket)
        assert spent == after.microseconds.get(bucket, 0), f"{bucket}: the spans differ from their sums"
    wall = accounting.microseconds(accounting.accounted_until(after)) - accounting.microseconds(after.created_at)
    assert sum(after.microseconds.values()) == wall
    assert all(spent >= 0 for spent in after.microseconds.values())
    assert accounting.accounted_until(after) >= accounting.accounted_until(before)
    assert after.node_microseconds >= before.node_microseconds
    assert after.ended_at in (None, accounting.accounted_until(after))


def check_incidents(record: JobRecord, found: Collection[IncidentRecord]) -> None:
    """Assert that incidents do not overlap, and that each phase has the same seconds as its bucket of the ledger.

    Args:
        record: the job's record after a decision of the control plane.
        found: all incidents of the job, as the control plane stored them last.
    """
    for earlier, later in pairwise(sorted(found, key=lambda each: each.generation_before)):
        assert earlier.closed_at is not None, f"{earlier.id} is open when {later.id} begins"
        assert max(earlier.closed_at, earlier.failed_at) <= later.failed_at, f"{earlier.id} overlaps {later.id}"
    until = accounting.accounted_until(record)
    unaccounted = record.microseconds.get(Bucket.UNACCOUNTED, 0) / 1_000_000
    for phase in incidents.PHASES:
        shown = sum(incidents.phase_seconds(each, until)[f"{phase}_seconds"] for each in found)
        booked = record.microseconds.get(phase, 0) / 1_000_000
        # The launch after a pause counts as RESTORE, and no incident covers this launch.
        is_more = phase == Bucket.RESTORE and Bucket.PAUSED in record.microseconds and booked > shown
        if phase in (Bucket.DETECT, Bucket.REPLACE) and booked < shown:
            # No control plane was active for a part of this phase.
            unaccounted -= shown - booked
            assert unaccounted >= -SAME_SECONDS, f"{phase}: {booked} s by the job, {shown} s by its incidents"
            continue
        assert abs(booked - shown) < SAME_SECONDS or is_more, (
            f"{phase}: {booked} s by the job, {shown} s by its incidents"
        )
