"""Some reports and events end a generation, and some of them also end the job."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from control_plane.accounts.facts import sentence
from control_plane.core import breakers, faults, launch, members, witnesses
from control_plane.core.breakers import BreakerCourse
from control_plane.core.evidence import NodeDisposition, NodeVerdict
from control_plane.core.observed.facts import CutOff
from control_plane.core.observed.incidents import FailureRecord
from control_plane.core.observed.jobs import AgentSilence
from control_plane.core.observed.nodes import Cause, NodeObserved, Remedy
from control_plane.core.observed.specs import JobSpec
from control_plane.core.states import IncidentState
from control_plane.core.timeouts import ladder
from everstep.protocol.agent_messages import (
    ExitClass,
    MemberPhase,
    MemberReport,
    NodeFault,
    Obstacle,
    RankExit,
    RankStatus,
)
from everstep.protocol.ids import Generation, JobName, NodeId, Rank, RunId, Step
from everstep.protocol.plan import GenerationPlan, Relayout
from tests.unit.control_plane.core.cluster import POLICY, fresh, spec_of

RUN = RunId("a" * 32)


def report(*ranks: RankStatus, **changes: object) -> MemberReport:
    values = {"run": RUN, "generation": Generation(1), **changes}
    return MemberReport(job=JobName("gpt"), phase=MemberPhase.RUNNING, ranks=ranks, **values)  # type: ignore[arg-type]


def rank(number: int, exit_class: ExitClass | None = None, at: float = 0.0, code: int = -9) -> RankStatus:
    ended = (
        None
        if exit_class is None
        else RankExit(exit_class=exit_class, code=code, at_seconds=at, boundary=Step(7), last_lines="boom")
    )
    return RankStatus(rank=Rank(number), boundary=Step(7), exit=ended)


def plan() -> GenerationPlan:
    planned = fresh().jobs[0].plan
    assert planned is not None
    return planned


def spec(max_attempts: int = 3) -> JobSpec:
    return replace(spec_of("gpt", "a", 4, 2), max_attempts=max_attempts)


def failure(
    step: int = 5, code: int = 1, top: int = 5, exit_class: ExitClass | None = ExitClass.ERROR
) -> FailureRecord:
    return FailureRecord(
        generation=Generation(1),
        step=Step(step),
        exit_class=exit_class,
        code=code,
        at=0.0,
        max_boundary=Step(top),
        last_lines="boom",
    )


def test_the_first_rank_that_failed_is_the_fault_and_halted_ones_are_not() -> None:
    reports = {
        NodeId("n0"): report(rank(0, ExitClass.HALTED, at=1.0)),
        NodeId("n1"): report(rank(1, ExitClass.ERROR, at=5.0, code=1)),
        NodeId("n2"): report(rank(2, ExitClass.KILLED, at=4.0)),
        NodeId("n3"): report(rank(3)),
    }
    (found,) = faults.of_ranks(reports)
    assert sentence(found.evidence) == "rank 2 on n2 ended: killed, signal 9"
    assert (found.seen_on, found.node_id) == ((NodeId("n2"),), None)
    assert (found.at, found.rank) == (4.0, 2)
    assert [each.rank for each in faults.of_ranks(reports, only=Rank(1))] == [1]
    assert faults.of_ranks(reports, only=Rank(3)) == ()
    assert faults.failing_since(reports, otherwise=9.0) == 4.0
    remembered = faults.failure_of_ranks(plan(), reports, Step(9))
    assert remembered is not None
    assert (remembered.exit_class, remembered.code, remembered.step, remembered.node_id) == (
        ExitClass.KILLED,
        -9,
        7,
        "n2",
    )


def test_of_ranks_that_failed_at_the_same_time_the_lowest_is_the_fault() -> None:
    reports = {NodeId("a"): report(rank(1, ExitClass.ERROR, 5.0)), NodeId("b"): report(rank(0, ExitClass.ERROR, 5.0))}
    (fault,) = faults.of_ranks(reports)
    assert (fault.rank, fault.seen_on) == (0, ("b",))


def verdict(node: NodeId, **changes: object) -> NodeVerdict:
    values: dict[str, object] = {"disposition": NodeDisposition.GONE, "is_final": True, "since": 50.0, **changes}
    return NodeVerdict(node_id=node, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(("since", "at"), [(90.0, 90.0), (110.0, 100.0)])
def test_a_node_is_lost_since_its_last_sign_of_life_and_not_later_than_now(since: float, at: float) -> None:
    assert faults.lost_at(verdict(NodeId("a"), since=since), {}, 100.0) == at


def test_shards_are_lost_with_the_first_of_their_holders() -> None:
    planned = plan()
    lost = {node.node_id: verdict(node.node_id, since=50.0 + place) for place, node in enumerate(planned.nodes)}
    found = faults.of_nodes(planned, lost, {}, 100.0)
    assert [(fault.cause, fault.at) for fault in found[-2:]] == [
        (Cause.NODE_UNREACHABLE, 50.0 + len(planned.nodes) - 1),
        (Cause.GROUP_LOST, 50.0),
    ]
    unsure = {node: replace(each, is_final=False) for node, each in lost.items()}
    assert [fault.node_id for fault in faults.of_nodes(planned, unsure, {}, 100.0)] == [None] * len(planned.nodes)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"cause": Cause.INSTANCE_TERMINATED}, None),
        ({"cause": Cause.NOTICE}, None),
        ({"cause": Cause.NODE_FAULT, "what": "gpu_lost", "remedy": Remedy.REBOOT}, ("gpu_lost", Remedy.REBOOT)),
        ({"cause": Cause.NODE_UNREACHABLE}, ("node_unreachable", Remedy.RESTART)),
    ],
)
def test_what_a_loss_adds_to_the_history_of_a_node(
    changes: dict[str, object], expected: tuple[str, Remedy] | None
) -> None:
    line = faults.implied(verdict(NodeId("a"), **changes), 100.0)
    assert (None if line is None else (line.what, line.remedy)) == expected


@pytest.mark.parametrize(("heard_at", "at"), [(None, 100.0), (90.0, 90.0), (110.0, 100.0)])
def test_a_loss_without_a_known_begin_dates_from_the_last_report(heard_at: float | None, at: float) -> None:
    nodes = {NodeId("a"): NodeObserved(node_id=NodeId("a"), heard_at=heard_at)}
    assert faults.lost_at(verdict(NodeId("a"), since=None), nodes, 100.0) == at
    assert faults.lost_at(verdict(NodeId("a"), since=None), {}, 100.0) == 100.0


def test_a_member_that_the_fleet_has_removed_is_lost_and_keeps_earlier_evidence() -> None:
    earlier = verdict(NodeId("a"), is_final=False, cause=Cause.NODE_FAULT)
    assert faults.gone(earlier) == replace(earlier, is_final=True)
    removed = faults.gone(replace(earlier, disposition=NodeDisposition.ALIVE))
    assert (removed.disposition, removed.cause, removed.is_final) == (
        NodeDisposition.GONE,
        Cause.INSTANCE_TERMINATED,
        True,
    )


@pytest.mark.parametrize(
    ("changes", "is_lost"),
    [
        pytest.param({}, True, id="without a report about the job"),
        pytest.param({"member": report()}, False, id="of the generation"),
        pytest.param({"member": report(generation=Generation(2))}, True, id="of another generation"),
        pytest.param({"member": report(run=RunId("b" * 32))}, True, id="of another run"),
        pytest.param({"is_connected": False}, False, id="not connected"),
        pytest.param({"has_reported": False}, False, id="not heard yet"),
    ],
)
def test_a_connected_agent_that_does_not_know_its_generation_has_restarted(
    changes: dict[str, object], is_lost: bool
) -> None:
    planned = plan()
    values: dict[str, object] = {"is_connected": True, "has_reported": True, **changes}
    first, *_, last = (node.node_id for node in planned.nodes)
    nodes = {first: NodeObserved(node_id=first, member=report(), is_connected=True, has_reported=True)}
    nodes[last] = NodeObserved(node_id=last, **values)  # type: ignore[arg-type]
    found = faults.of_agents(planned, RUN, nodes, 100.0)
    assert [fault.seen_on for fault in found] == [(last,)] * is_lost


@pytest.mark.parametrize(
    ("seconds", "committed", "is_lost"), [(15.0, 4, False), (15.1, 4, True), (15.1, 5, False), (15.1, 3, True)]
)
def test_a_coordinator_is_lost_without_a_commit_since_its_last_word(
    seconds: float, committed: int, is_lost: bool
) -> None:
    quiet = AgentSilence(node_id=plan().coordinator, since=100.0 - seconds, boundary=Step(9), committed=Step(4))
    found = faults.of_coordinator(plan(), quiet, Step(committed), 100.0, ladder(3.0))
    assert [fault.at for fault in found] == [100.0 - seconds] * is_lost
    assert [fault.evidence.seconds for fault in found] == [round(seconds, 1)] * is_lost  # type: ignore[union-attr]
    assert faults.of_coordinator(plan(), None, Step(committed), 100.0, ladder(3.0)) == ()


@pytest.mark.parametrize(("seconds", "is_lost"), [(15.0, False), (15.04, True)])
def test_a_member_that_is_silent_in_a_launch_is_lost_since_its_last_word(seconds: float, is_lost: bool) -> None:
    (name, *_) = (node.node_id for node in plan().nodes)
    found = faults.of_silence(plan(), {name: NodeObserved(node_id=name, silent_seconds=seconds)}, 100.0, ladder(3.0))
    assert [fault.at for fault in found] == [100.0 - seconds] * is_lost
    assert [fault.evidence.seconds for fault in found] == [15.0] * is_lost  # type: ignore[union-attr]


def test_ranks_that_were_only_halted_are_a_fault_but_no_failure() -> None:
    reports = {NodeId("n0"): report(rank(0, ExitClass.HALTED))}
    assert len(faults.of_ranks(reports)) == 1
    assert faults.failing_since(reports, otherwise=9.0) == 9.0
    assert faults.failure_of_ranks(plan(), reports, Step(9)) is None


def test_success_is_no_fault() -> None:
    assert faults.of_ranks({NodeId("n0"): report(rank(0, ExitClass.SUCCESS, code=0))}) == ()


@pytest.mark.parametrize(
    ("failures", "trips"),
    [
        ([failure()] * 2, False),
        ([failure()] * 3, True),
        ([failure(), failure(), failure(code=2)], False),
        ([failure(), failure(), failure(step=6)], False),
        ([failure(code=2), failure(), failure(), failure()], True),
        ([failure(code=code, top=5) for code in range(9)], True),
        ([failure(code=code, top=code) for code in range(9)], False),
    ],
)
def test_the_breaker(failures: list[FailureRecord], trips: bool) -> None:
    ruling = breakers.rule(failures, (), spec(), has_spare=False, older_base=Step(0))
    assert (ruling.course is BreakerCourse.GIVE_UP) is trips
    if trips:
        assert ruling.why is not None
        assert ruling.why.failure.last_lines == "boom"


def test_memory_of_failures_is_bounded_and_a_lost_nodes_failures_are_forgiven() -> None:
    many: tuple[FailureRecord, ...] = ()
    for _ in range(50):
        many = breakers.remembered(many, failure(), spec(2))
    assert len(many) == 6
    assert breakers.forgiven(many, Generation(1)) == ()
    assert breakers.forgiven(many, Generation(2)) == many


def test_a_job_that_has_trained_needs_two_nodes_that_report_a_permanent_fault() -> None:
    refused = NodeFault(code="cannot_resume", message="no", is_permanent=True)
    one = {NodeId("n0"): report(faults=(refused, refused)), NodeId("n1"): report()}
    both = {**one, NodeId("n1"): report(faults=(refused,))}
    assert faults.permanent(one, has_trained=True) is None
    assert faults.permanent(both, has_trained=True) == refused


def test_members_that_cannot_reach_the_coordinator_end_the_generation() -> None:
    """A member reports that it cannot reach the coordinator, and the generation ends.

    The coordinator may be alive. The next generation gets another coordinator.
    """
    timeouts = ladder(3.0)
    told = NodeFault(
        code="coordinator_unreachable", message="n1 has not reached the coordinator n0 for 15 s", is_permanent=False
    )
    assert faults.of_cut_off_members(plan(), {NodeId("n1"): report()}, 100.0, timeouts) == ()
    (fault,) = faults.of_cut_off_members(
        plan(), {NodeId("n0"): report(), NodeId("n1"): report(faults=(told,))}, 100.0, timeouts
    )
    assert fault.cause is Cause.AGENT_LOST
    assert fault.evidence == CutOff(texts=(told.message,))
    assert fault.at == 100.0 - timeouts.coordinator_deadline_seconds
    assert fault.node_id is None, "the coordinator is no lost node"
    assert fault.unreached == plan().coordinator


def test_a_recovery_that_has_caught_up_fails_again_before_anybody_has_looked() -> None:
    """A job recovers, catches up and fails again, all between two decisions of the control plane.

    One decision then closes the first incident and opens the next one.
    """
    simulation = fresh()
    job = simulation.jobs[0]
    for _ in range(3):
        simulation.train(job, 1)
        simulation.step()
    simulation.kill_rank(simulation.running(job)[0])
    simulation.step(0.1)
    while job.record.state != "running":
        simulation.step(0.1)
    assert job.record.incident is not None
    first = job.record.incident
    simulation.train(job, 5)
    simulation.kill_rank(simulation.running(job)[0])
    simulation.step(0.1)
    assert job.record.incident is not None
    assert job.record.incident.id != first.id
    assert job.record.incident.state is IncidentState.REPLACING


def failed_load(fault_code: str | None):
    simulation = fresh()
    job = simulation.jobs[0]
    for _ in range(3):
        simulation.train(job, 1)
    simulation.upload(job)
    simulation.step()
    simulation.kill_rank(simulation.running(job)[0])
    while job.record.state != "loading":
        simulation.step(0.1)
    assert job.plan is not None
    observed = simulation.observe(job)
    given = (NodeFault(code=fault_code, message="", is_permanent=False),) if fault_code else ()
    owner = job.plan.nodes[1].node_id
    reports = {
        owner: MemberReport(
            job=job.spec.job,
            run=job.spec.run,
            generation=job.plan.generation,
            phase=MemberPhase.LOAD_FAILED,
            faults=given,
        )
    }
    return job.plan, reports, observed.nodes


def with_relayout(plan: GenerationPlan) -> GenerationPlan:
    """Return the plan as if three ranks had made the step from which it starts."""
    shards = tuple(
        tuple(
            structs.replace(source, kind="peer" if source.kind == "local" else source.kind)
            for source in plan.ranks[rank % plan.world_size].sources
        )
        for rank in range(3)
    )
    return structs.replace(
        plan,
        ranks=tuple(structs.replace(rank, sources=()) for rank in plan.ranks),
        relayout=Relayout(world_size=3, shards=shards),
    )


def unloaded(reports: dict[NodeId, MemberReport], code: str, shard: int | None) -> dict[NodeId, MemberReport]:
    """Return the reports as if a rank had failed to fetch a shard after its start.

    `shard` is the rank that owned the shard in the generation that made the base. None: the fault names no shard.
    """
    fault = NodeFault(code=code, message="", is_permanent=False, shard=None if shard is None else Rank(shard))
    return {
        node: structs.replace(report, phase=MemberPhase.RUNNING, faults=(fault,)) for node, report in reports.items()
    }


def test_a_shard_of_another_layout_that_does_not_verify_ends_the_generation() -> None:
    plan, reports, nodes = failed_load(None)
    plan, reports = with_relayout(plan), unloaded(reports, "source_mismatch", 2)
    found = [read.source for read in witnesses.failed_reads(plan, reports, nodes, 0.0)]
    assert {(source.rank, source.is_object) for source in found} == {(2, False), (2, True)}
    assert [fault.cause for fault in faults.of_loads(plan, reports, 0.0)] == [Cause.LOAD_FAILED]
    failure = faults.failure_of_loads(plan, reports, Step(0), 0.0)
    assert failure is not None
    assert failure.base_step == plan.base_step


def test_a_shard_of_another_layout_that_was_out_of_reach_proves_nothing_about_s3() -> None:
    plan, reports, nodes = failed_load(None)
    plan, reports = with_relayout(plan), unloaded(reports, "source_unavailable", 1)
    (read,) = witnesses.failed_reads(plan, reports, nodes, 0.0)
    assert (read.source.rank, read.source.is_object, read.is_mismatch) == (1, False, False)


def test_a_fault_of_a_running_node_is_a_failed_load_only_after_a_relayout() -> None:
    plan, reports, _ = failed_load(None)
    running = unloaded(reports, "memory_full", None)
    assert faults.of_loads(plan, running, 0.0) == ()
    assert len(faults.of_loads(with_relayout(plan), running, 0.0)) == 1
    assert faults.of_loads(with_relayout(plan), unloaded(reports, "upload_failed", None), 0.0) == ()


def test_each_node_has_the_ranks_after_those_of_the_nodes_before_it() -> None:
    assert [members.ranks_of(place, 3) for place in (0, 2)] == [(0, 1, 2), (6, 7, 8)]


def test_newcomers_take_the_places_of_the_lost_in_the_order_they_came() -> None:
    plan = failed_load(None)[0]
    first = [node.node_id for node in plan.nodes]
    lost = [first[0], *first[2:3]]
    available = [NodeId("x"), *[node for node in first if node not in lost], NodeId("y")]
    assert members.places(plan, available, 4) == ("x", first[1], "y", first[3])
    assert members.places(plan, available[:-1], 4) == ("x", first[1], None, first[3])
    assert members.places(None, [NodeId("x")], 2) == ("x", None)


def test_a_newcomer_that_was_asked_for_its_promise_keeps_its_place_before_an_older_node() -> None:
    simulation = fresh()
    job = simulation.jobs[0]
    seen = simulation.observe(job)
    _, *rest = seen.assigned
    late, older = NodeId("late"), NodeId("older")
    record = replace(job.record, asked=tuple((node_id, 0.0) for node_id in (*rest, late)))
    seen = replace(seen, assigned=(older, *rest, late))
    assert launch.call_roll(job.spec, seen, record, POLICY).places == (late, *rest)
    assert launch.call_roll(job.spec, seen, replace(record, asked=()), POLICY).places == (older, *rest)
    told = MemberReport(
        job=job.spec.job, run=job.spec.run, generation=record.issued_generation, phase=MemberPhase.PROMISED
    )
    seen = replace(seen, nodes={**seen.nodes, late: replace(seen.nodes[rest[0]], node_id=late, member=told)})
    roll = launch.call_roll(job.spec, seen, replace(record, asked=()), POLICY)
    assert (roll.places, list(roll.promised)) == ((late, *rest), [late]), "it owes nothing any more"


def test_the_old_word_of_a_silent_member_proves_nothing() -> None:
    """A member's report that a holder does not answer is ignored once the member itself has fallen silent.

    In the test, the holder's connection is restored after the report, and the member's own connection is cut.
    """
    simulation = fresh()
    job = simulation.jobs[0]
    team = simulation.running(job)
    simulation.train(job, 2)
    simulation.unplugged.add(team[3].node_id)
    simulation.step()
    assert {each.node_id for each in job.record.impairments} == {team[2].node_id, team[3].node_id}
    simulation.deaf.add(team[2].node_id)
    simulation.unplugged.clear()
    for _ in range(70):
        simulation.train(job, 2)
        simulation.step()
    assert (job.record.impairments, job.record.moves) == ((), ())


@pytest.mark.parametrize(("parity", "lost", "ranks"), [((4, 3), 1, ""), ((4, 3), 2, "0, 1"), ((2, 3), 2, "0, 1")])
def test_two_lost_nodes_of_a_parity_group_lose_their_shards(parity: tuple[int, int], lost: int, ranks: str) -> None:
    planned = fresh(parity=parity).jobs[0].plan
    assert planned is not None
    nodes = [node.node_id for node in planned.nodes[:lost]]
    words = [sentence(fault.evidence) for fault in faults.group_loss(planned, nodes, 1.0)]
    assert words == (
        [f"two nodes of a parity group are lost, and with them the shard of rank {ranks}"] if ranks else []
    )


def test_one_lost_node_of_each_parity_group_loses_no_shard() -> None:
    planned = fresh(parity=(2, 3)).jobs[0].plan
    assert planned is not None
    assert faults.group_loss(planned, [planned.nodes[0].node_id, planned.nodes[3].node_id], 1.0) == ()


DENIED = NodeFault(code="load_failed", message="", is_permanent=False, obstacle=Obstacle.DENIED)
UNAVAILABLE = NodeFault(code="source_unavailable", message="", is_permanent=False)
WRONG = NodeFault(code="source_mismatch", message="", is_permanent=False)


@pytest.mark.parametrize(
    ("given", "phase", "found"),
    [
        pytest.param((DENIED,), MemberPhase.LOAD_FAILED, DENIED, id="an obstacle"),
        pytest.param((WRONG, DENIED), MemberPhase.LOAD_FAILED, None, id="also wrong content"),
        pytest.param((DENIED, UNAVAILABLE), MemberPhase.LOAD_FAILED, DENIED, id="the first of two"),
        pytest.param((UNAVAILABLE,), MemberPhase.LOAD_FAILED, UNAVAILABLE, id="an older agent, with a source in S3"),
        pytest.param(
            (structs.replace(UNAVAILABLE, code="disk_full"),), MemberPhase.LOAD_FAILED, None, id="another fault"
        ),
        pytest.param((), MemberPhase.LOAD_FAILED, None, id="no fault"),
        pytest.param((DENIED,), MemberPhase.RUNNING, None, id="no failed load"),
    ],
)
def test_a_load_is_blocked_if_only_a_store_prevented_it(
    given: tuple[NodeFault, ...], phase: MemberPhase, found: NodeFault | None
) -> None:
    plan, reports, _ = failed_load(None)
    ((owner, report_),) = reports.items()
    changed = {owner: structs.replace(report_, phase=phase, faults=given)}
    assert faults.blocked_loads(plan, changed) == (() if found is None else ((owner, found),))
    idle = {NodeId("0"): structs.replace(report_, phase=MemberPhase.RUNNING, faults=())}
    assert faults.blocked_loads(plan, idle | changed) == faults.blocked_loads(plan, changed)
    both = {**changed, NodeId("z"): structs.replace(report_, phase=MemberPhase.LOAD_FAILED, faults=(WRONG,))}
    assert faults.blocked_loads(plan, both) == ()


def test_a_source_in_memory_that_was_out_of_reach_blocks_no_load() -> None:
    plan, reports, _ = failed_load("source_unavailable")
    ranks = tuple(
        structs.replace(rank, sources=tuple(source for source in rank.sources if source.kind != "s3"))
        for rank in plan.ranks
    )
    assert len(faults.blocked_loads(plan, reports)) == 1
    assert faults.blocked_loads(structs.replace(plan, ranks=ranks), reports) == ()
    relayout = structs.replace(with_relayout(plan))
    assert len(faults.blocked_loads(relayout, reports)) == 1
