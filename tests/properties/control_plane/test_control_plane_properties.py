"""Tests invariants of a fleet and its jobs under any sequence of events.

Generation numbers grow, no node works for two jobs, plans are sound, and training resumes once no more faults occur.
The simulation asserts these invariants at every pass, in which the control plane decides about the jobs and the fleet.
This file generates the events.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from control_plane.core import evidence, notices, placement
from control_plane.core.incidents import lost_steps
from control_plane.core.job import view
from control_plane.core.observed.fleets import HoldRelease
from control_plane.core.observed.jobs import AgentSilence
from control_plane.core.observed.nodes import Cause, NodeObserved, Notice
from control_plane.core.states import ENDED_JOBS, JobState, NodeState
from everstep.protocol.agent_messages import ExitClass, MemberPhase, MemberReport, NodeFault, NoticeKind, RankExit
from everstep.protocol.ids import Generation, NodeId, Rank, RunId, Step
from everstep.protocol.rehearsals import RehearsalVerdict
from tests.properties.control_plane.simulated import EPOCH_SECONDS, Domains, SimulatedJob, Simulation, fresh
from tests.unit.control_plane.loop.world import Agent

Event = tuple[str, int, Any]
ENDING = sorted(notices.ENDING)
FAULTS = tuple(
    NodeFault(code=code, message="words", is_permanent=False, xid=number)
    for code, number in (
        ("gpu_xid", 31),
        ("gpu_xid", 95),
        ("gpu_xid", 79),
        ("gpu_lost", None),
        ("nic_down", None),
        ("disk_full", None),
    )
)
DOMAINS = st.tuples(st.sampled_from([0, 2, 3, 6]), st.integers(0, 99))
RANKS_PER_NODE = st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2)])
"""Ranks per node of the first and the second job."""
EVENTS = st.one_of(
    st.tuples(st.just("train"), st.integers(0, 1), st.integers(1, 4)),
    st.tuples(st.just("train partly"), st.integers(0, 1), st.integers(0, 2**16 - 1)),
    st.tuples(st.just("upload"), st.integers(0, 1), st.just(0)),
    st.tuples(st.just("kill"), st.integers(0, 11), st.just(0)),
    st.tuples(st.just("terminate"), st.integers(0, 11), st.just(0)),
    st.tuples(st.just("cut"), st.integers(0, 11), st.just(0)),
    st.tuples(st.just("mend"), st.integers(0, 11), st.just(0)),
    st.tuples(st.just("deafen"), st.integers(0, 11), st.just(0)),
    st.tuples(st.just("unplug"), st.integers(0, 11), st.just(0)),
    st.tuples(st.just("fault"), st.integers(0, 11), st.sampled_from(range(len(FAULTS)))),
    st.tuples(st.just("well"), st.integers(0, 11), st.just(0)),
    st.tuples(st.just("person ends"), st.integers(0, 11), st.just(0)),
    st.tuples(st.just("train for"), st.integers(0, 1), st.sampled_from([5, 65])),
    st.tuples(st.just("forget"), st.integers(0, 11), st.just(0)),
    st.tuples(st.just("load fails"), st.integers(0, 11), st.booleans()),
    st.tuples(st.just("lose messages"), st.integers(1, 6), st.just(0)),
    st.tuples(st.just("announce"), st.integers(0, 11), st.sampled_from([5, 60, 120, 4000])),
    st.tuples(st.just("false alarm"), st.integers(0, 11), st.sampled_from([5, 120])),
    st.tuples(st.just("advise"), st.integers(0, 11), st.just(0)),
    st.tuples(st.just("wait"), st.sampled_from([1, 2, 7, 40, 130]), st.just(0)),
    st.tuples(st.just("standstill"), st.integers(0, 600), st.just(0)),
    st.tuples(st.just("clock"), st.integers(0, 11), st.sampled_from([-3600, -65, 65, 3600])),
    st.tuples(
        st.just("person"),
        st.integers(0, 1),
        st.sampled_from(["stop", "pause", "resume", "take over", "hand back", "rehearse"]),
    ),
    st.tuples(st.just("automation"), st.integers(0, 2), st.just(0)),
    st.tuples(st.just("finish"), st.integers(0, 1), st.just(0)),
    st.tuples(st.just("uploads take"), st.sampled_from([0, 1, 30, 4000]), st.just(0)),
    st.tuples(st.just("rehearsals end"), st.just(0), st.sampled_from([None, *RehearsalVerdict])),
    st.tuples(st.just("restart"), st.sampled_from([0, 2, 20, 200]), st.just(0)),
)
TOGETHER = st.tuples(st.just("faults"), st.integers(0, 11), st.tuples(st.integers(2, 4), st.sampled_from([1, 2, 3])))
"""Faults of several nodes at once that need their replacement, with the fleet's hourly limit of replacements."""


def stories(events: st.SearchStrategy[Event]) -> st.SearchStrategy[list[Event]]:
    """Return random stories. Each contains simultaneous faults at a random position."""
    parts = (st.lists(events, max_size=12), TOGETHER, st.lists(events, max_size=12))
    return st.builds(lambda before, faults, after: [*before, faults, *after], *parts)


RECOVERY: list[Event] = [("train for", 0, 5), ("kill", 1, 0), ("wait", 7, 0), ("train for", 0, 5)]
LATE_REPORT: list[Event] = [("deafen", 1, 0), ("clock", 1, -65), ("kill", 1, 0), ("kill", 2, 0), ("mend", 1, 0)]
"""A rank on a node without a connection fails, and its node's clock is a minute behind."""
TWO_READERS: list[Event] = [
    *(("train for", 0, 5), ("automation", 2, 0), ("terminate", 2, 0), ("unplug", 9, 0), ("standstill", 33, 0)),
    *(("announce", 2, 60), ("automation", 2, 0), ("standstill", 33, 0), ("person ends", 5, 0), ("unplug", 8, 0)),
    *(("automation", 2, 0), ("terminate", 1, 0), ("faults", 7, (2, 2)), ("standstill", 33, 0)),
]
"""Two nodes, one after the other, fail to load the newest step, and the job continues from the step before it."""


@pytest.mark.timeout(400)  # 60 examples, each with up to a few hundred decisions
@settings(max_examples=60)
@given(st.sampled_from([12, 8, 7]), DOMAINS, RANKS_PER_NODE, stories(EVENTS))
@example(12, (0, 0), (1, 1), [("automation", 0, 0), ("kill", 1, 0), ("terminate", 6, 0), ("wait", 40, 0)])
@example(12, (0, 0), (1, 1), [("clock", 1, -3600), ("train for", 0, 5), ("kill", 1, 0), ("wait", 7, 0)])
@example(12, (0, 0), (1, 1), [*RECOVERY, ("clock", 1, -65), ("kill", 1, 0), ("wait", 7, 0)])
@example(12, (0, 0), (1, 1), [*RECOVERY, *LATE_REPORT, ("wait", 7, 0)])
@example(12, (0, 0), (1, 1), [("person", 0, "pause"), ("clock", 4, -65), ("clock", 10, -3600)])
@example(12, (0, 43), (1, 1), TWO_READERS)
def test_whatever_happens(max_size: int, domains: Domains, ranks_per_node: tuple[int, int], story: list[Event]) -> None:
    simulation = fresh(max_size, domains, ranks_per_node)
    play(simulation, story)
    simulation.settle()
    come_to_rest(simulation)


CAPACITY = st.tuples(st.just("capacity"), st.sampled_from([3, 4, 5, 6, 7, 20]), st.just(0))
REVISION = st.tuples(
    st.just("revise"), st.integers(0, 1), st.tuples(st.integers(0, 2), st.integers(0, 2), st.sampled_from([0, 30]))
)
"""A change of a job's ElasticConfig: NodeCount - MinNodeCount, MaxNodeCount - NodeCount, and the patience."""


@pytest.mark.timeout(400)  # 30 examples, each with up to a few hundred decisions
@settings(max_examples=30)
@given(st.sampled_from([12, 8, 7]), DOMAINS, RANKS_PER_NODE, stories(EVENTS | CAPACITY | REVISION))
def test_whatever_happens_to_elastic_jobs(
    max_size: int, domains: Domains, ranks_per_node: tuple[int, int], story: list[Event]
) -> None:
    simulation = fresh(max_size, domains, ranks_per_node, is_elastic=True)
    play(simulation, story)
    simulation.settle()
    come_to_rest(simulation)
    for job in simulation.jobs:
        is_whole = job.record.state in ENDED_JOBS or job.record.member_count >= job.spec.node_count
        assert is_whole, "a job stays small although nodes are free"


LATE_SILENCE: list[Event] = [
    ("automation", 2, 0),
    ("false alarm", 11, 5),
    ("wait", 130, 0),
    ("cut", 6, 0),
    ("person ends", 7, 0),
    ("unplug", 8, 0),
    ("train", 1, 1),
    ("uploads take", 4000, 0),
    ("train partly", 0, 8269),
    ("faults", 11, (2, 3)),
]
"""A failure ends a recovery, and a later report says that the failed node was silent before the recovery's end."""
PARITY = st.sampled_from([(2, 3), (3, 2), (4, 3)])
"""Nodes per parity group of the first job, which has four nodes, and of the second job, which has three."""


@pytest.mark.timeout(400)  # 40 examples, each with up to a few hundred decisions
@settings(max_examples=40)
@given(st.sampled_from([12, 8, 7]), DOMAINS, RANKS_PER_NODE, PARITY, stories(EVENTS))
@example(12, (0, 80), (1, 1), (2, 3), LATE_SILENCE)
def test_whatever_happens_to_jobs_with_parity(
    max_size: int, domains: Domains, ranks_per_node: tuple[int, int], parity: tuple[int, int], story: list[Event]
) -> None:
    simulation = fresh(max_size, domains, ranks_per_node, parity=parity)
    play(simulation, story)
    simulation.settle()
    come_to_rest(simulation)


@pytest.mark.timeout(400)  # 30 examples, each with up to a few hundred decisions
@settings(max_examples=30)
@given(st.sampled_from([12, 8, 7]), DOMAINS, RANKS_PER_NODE, PARITY, stories(EVENTS | CAPACITY | REVISION))
def test_whatever_happens_to_elastic_jobs_with_parity(
    max_size: int, domains: Domains, ranks_per_node: tuple[int, int], parity: tuple[int, int], story: list[Event]
) -> None:
    simulation = fresh(max_size, domains, ranks_per_node, is_elastic=True, parity=parity)
    play(simulation, story)
    simulation.settle()
    come_to_rest(simulation)


@settings(max_examples=30)
@given(st.integers(1, 20), DOMAINS, RANKS_PER_NODE, PARITY, st.data())
def test_one_lost_node_of_a_parity_group_costs_no_committed_step(
    steps: int, domains: Domains, ranks_per_node: tuple[int, int], parity: tuple[int, int], data: st.DataObject
) -> None:
    """One node is lost, and another one after the next commit. Neither loss costs a committed step."""
    simulation = fresh(domains=domains, ranks_per_node=ranks_per_node, parity=parity)
    job = simulation.jobs[data.draw(st.integers(0, 1))]
    for losses in (1, 2):
        for _ in range(steps):
            simulation.train(job, 1)
            simulation.step(0.2)
        team = simulation.running(job)
        simulation.terminate(team[data.draw(st.integers(0, len(team) - 1))].node_id)
        simulation.settle()
        assert job.plan is not None
        assert (job.plan.generation, job.plan.base_step) == (1 + losses, losses * steps)
        kinds = [rank.sources[0].kind for rank in job.plan.ranks]
        assert sorted({*kinds}) == ["local", "parity"]
        assert kinds.count("parity") == job.spec.ranks_per_node


@settings(max_examples=30)
@given(RANKS_PER_NODE, PARITY, st.integers(0, 2**16 - 1), st.integers(0, 1), st.lists(st.integers(0, 3), max_size=2))
def test_a_job_with_parity_restores_the_newest_step_that_its_nodes_hold_or_rebuild(
    ranks_per_node: tuple[int, int], parity: tuple[int, int], bits: int, which: int, lost: list[int]
) -> None:
    """Nodes are lost while some shares of the newest step are incomplete.

    The job resumes from the newest step that the remaining nodes hold or can rebuild.
    """
    simulation = fresh(ranks_per_node=ranks_per_node, parity=parity)
    job = simulation.jobs[which]
    for _ in range(3):
        simulation.train(job, 1)
        simulation.step(1.0)
    assert job.plan is not None
    simulation.train(job, 1, is_lagging=partial(is_drawn, bits))
    nodes = [node.node_id for node in job.plan.nodes]
    gone = {nodes[place % len(nodes)] for place in lost}
    held = simulation.held_steps(job, job.plan.generation, set(nodes) - gone)
    for node_id in gone:
        simulation.terminate(node_id)
    if not gone:
        simulation.kill_rank(simulation.agents[nodes[0]])
    simulation.settle()
    assert job.plan.base_step == max(held, default=0)
    assert len(gone) > 1 or job.plan.base_step >= 3, "the loss of one node costs a committed step"


@settings(max_examples=30)
@given(st.integers(1, 20), st.integers(0, 1), st.sampled_from([None, (3, 2), (2, 2)]), st.data())
def test_a_job_that_shrinks_and_grows_loses_no_committed_step(
    steps: int, which: int, parity: tuple[int, int] | None, data: st.DataObject
) -> None:
    simulation = fresh(is_elastic=True, parity=parity)
    job = simulation.jobs[which]
    for _ in range(steps):
        simulation.train(job, 1)
        simulation.step(0.2)
    assert job.plan is not None
    team, count = simulation.running(job), len(job.plan.nodes)
    lost = team[data.draw(st.integers(0, len(team) - 1))].node_id
    spares = [node_id for node_id, agent in simulation.agents.items() if agent.run is None]
    for node_id in [*spares, *simulation.booting]:
        simulation.terminate(node_id)
    simulation.capacity = 0
    simulation.terminate(lost)
    generation = job.plan.generation
    while job.plan.generation == generation or not simulation.running(job):
        simulation.step()
        simulation.check()
        assert simulation.seconds < EPOCH_SECONDS + 9_000
    assert (len(job.plan.nodes), job.plan.base_step) == (count - 1, steps)
    assert job.plan.relayout is not None
    kinds = [sources[0].kind for sources in job.plan.relayout.shards]
    assert kinds.count("parity") == (0 if parity is None else job.spec.ranks_per_node)
    simulation.train(job, 2)
    simulation.settle()
    while job.record.member_count < job.spec.most_node_count:
        simulation.train(job, 1)
        simulation.step()
        simulation.check()
        assert simulation.seconds < EPOCH_SECONDS + 9_000
    assert job.plan.base_step >= steps + 2, "a step was lost"


@settings(max_examples=20)
@given(st.integers(1, 9), st.sampled_from([(1, 1), (1, 2)]))
def test_a_job_that_returns_nodes_loses_no_step(steps: int, ranks_per_node: tuple[int, int]) -> None:
    """A job that has grown returns nodes without losing a step when another job needs them.

    The second job grows while the first job is paused, and returns nodes when the first job resumes.
    """
    simulation = fresh(7, ranks_per_node=ranks_per_node, is_elastic=True)
    first, second = simulation.jobs

    def until(what: Callable[[], bool]) -> None:
        while not what():
            simulation.train(second, 1)
            simulation.step()
            simulation.check()
            assert simulation.seconds < EPOCH_SECONDS + 9_000, [job.record.reason for job in simulation.jobs]

    simulation.ask(first, "pause")
    until(lambda: second.record.member_count == second.spec.most_node_count and bool(simulation.running(second)))
    assert second.plan is not None
    generation = second.plan.generation
    for _ in range(steps):
        simulation.train(second, 1)
        simulation.step()
    simulation.ask(first, "resume")
    until(lambda: second.plan is not None and second.plan.generation > generation)
    assert len(second.plan.nodes) == second.spec.node_count, "the job returns only the nodes that the other job needs"
    assert second.plan.base_step == second.record.max_boundary
    until(lambda: first.record.state is JobState.RUNNING)


def agent_lies(report: MemberReport, lie: str) -> MemberReport:
    """Return an agent's report with one lie in it."""
    change = msgspec.structs.replace
    match lie:
        case "later step":
            ranks = tuple(change(rank, boundary=Step(rank.boundary + 50)) for rank in report.ranks)
            status = report.round and change(report.round, committed=Step(report.round.committed + 40))
            return change(report, ranks=ranks, round=status)
        case "earlier step":
            status = report.round and change(report.round, committed=Step(0), boundary=Step(0))
            return change(report, ranks=tuple(change(rank, boundary=Step(0)) for rank in report.ranks), round=status)
        case "later commit":
            commits = tuple(change(each, step=Step(each.step + 40)) for each in report.commits)
            shards = tuple(change(each, committed=Step(each.committed + 40)) for each in report.protection)
            return change(report, commits=commits, protection=shards)
        case "lost slots":
            return change(report, inventory=())
        case "later slots":
            return change(report, inventory=tuple(change(slot, step=Step(slot.step + 50)) for slot in report.inventory))
        case "wrong digest":
            return change(report, inventory=tuple(change(slot, digest=b"x" * 16) for slot in report.inventory))
        case "old generation":
            return change(report, generation=Generation(report.generation - 1))
        case "future generation":
            return change(report, generation=Generation(2**32 - 1))
        case "other run":
            return change(report, run=RunId("z" * 32))
        case "completed":
            ended = RankExit(exit_class=ExitClass.SUCCESS, code=0, at_seconds=EPOCH_SECONDS, boundary=Step(3))
            ranks = tuple(change(rank, exit=ended) for rank in report.ranks)
            status = report.round and change(report.round, finished=True)
            phase = MemberPhase.EXITED if ranks else report.phase
            return change(report, ranks=ranks, phase=phase, round=status)
        case "permanent fault":
            fault = NodeFault(code="cannot_resume", message="no", is_permanent=True)
            return change(report, faults=(*report.faults, fault))
        case "lost peers":
            shards = tuple(change(each, in_view=each.holders[:1]) for each in report.protection)
            return change(report, protection=shards)
        case _:
            raise AssertionError(lie)


AGENT_LIES = (
    "later step",
    "earlier step",
    "later commit",
    "lost slots",
    "later slots",
    "wrong digest",
    "old generation",
    "future generation",
    "other run",
    "completed",
    "permanent fault",
    "lost peers",
)
LIES = (
    "agent",
    *AGENT_LIES,
    "AWS omits",
    "AWS omits all",
    "AWS terminated",
    "AWS twice",
    "S3 read",
    "S3 other run",
    "clock",
    "clock back",
    "node clock",
    "database row",
    "lost row",
)
"""Parts of the system of which exactly one lies or misreads in a story."""


def lie(simulation: Simulation, job: SimulatedJob, part: str, agent: Agent) -> None:
    """Let one part lie or misread from now on: an agent, an answer of AWS, a verification, a clock or a row."""
    match part:
        case "agent":
            agent.fails_load = True  # It reads wrong content, whatever the source is.
        case "AWS omits":
            simulation.omitted.add(agent.node_id)
        case "AWS omits all":
            simulation.omitted |= simulation.agents.keys()
        case "AWS terminated":
            simulation.reported_ended.add(agent.node_id)
        case "AWS twice":
            simulation.listed_twice.add(agent.node_id)
        case "S3 read":
            job.checkpoints = [replace(each, is_wrong=True) for each in job.checkpoints]
        case "S3 other run":
            foreign = replace(job.checkpoints[-1], generation=Generation(77), step=Step(500))
            shards = tuple(
                msgspec.structs.replace(each, origin_generation=Generation(77), key=f"other/{each.rank}")
                for each in foreign.shards
            )
            job.checkpoints = [*job.checkpoints, replace(foreign, shards=shards)]
        case "clock":
            simulation.step_wall_clock(0, 3600)
        case "clock back":
            simulation.step_wall_clock(0, -3600)
        case "node clock":
            agent.wall_ahead_seconds += 3600
        case "database row":
            job.record = replace(job.record, committed=Step(0))
        case "lost row":
            job.checkpoints = []
        case _:
            simulation.lies[agent.node_id] = partial(agent_lies, lie=part)


@pytest.mark.parametrize("part", LIES)
@settings(max_examples=1)
@given(st.integers(0, 1), st.integers(0, 3), st.integers(1, 6), st.integers(0, 2))
@example(0, 0, 3, 0)
@example(0, 3, 3, 2)
def test_no_irreversible_act_rests_on_one_lying_part(part: str, which: int, place: int, steps: int, lost: int) -> None:
    """One part lies while a job recovers, after it also lost up to two nodes.

    The job repeats no committed step unless a person agrees, no job ends, and no healthy node is terminated.
    """
    simulation = fresh()
    job = simulation.jobs[which]
    job.spec = replace(job.spec, max_repeated_minutes=0)
    for step in range(steps + 2):
        simulation.train(job, 1)
        simulation.step()
        if step == steps:
            simulation.upload(job)
            simulation.step()
    committed, team = job.record.committed, simulation.running(job)
    liar = team[place % len(team)]
    lie(simulation, job, part, liar)
    ended = {agent.node_id for agent in [each for each in team if each is not liar][:lost]}
    for node_id in ended:
        simulation.terminate(node_id)
    if not ended:
        simulation.kill_rank(next(agent for agent in team if agent is not liar))
    assert job.plan is not None
    for _ in range(120):
        simulation.step()
        simulation.check()
        if job.record.repeat is not None or (job.plan.generation > 1 and simulation.running(job)):
            break
    assert all(each.record.state not in ENDED_JOBS for each in simulation.jobs)
    assert simulation.removed <= ended | ({liar.node_id} if part in ("agent", *AGENT_LIES) else set())
    if job.plan.generation == 1:
        choice = job.record.repeat
        assert choice is not None, "the job neither continues nor asks"
        assert choice.base_step < choice.newest_step
        job.record = replace(job.record, accepted_step=choice.base_step, accepted_after=choice.after)
        liar.fails_load = False
        for _ in range(60):
            simulation.step()
            if simulation.running(job):
                break
        assert job.record.state in (JobState.STARTING, JobState.RUNNING)
        assert job.plan.base_step == choice.base_step
    else:
        assert job.plan.base_step >= committed, "committed steps are repeated without consent"


def play(simulation: Simulation, story: Sequence[Event]) -> None:
    """Apply a sequence of events to the simulation. After each event, let the control plane decide once (one pass)."""
    for kind, which, extra in story:
        names = sorted(simulation.agents)
        agent = simulation.agents[names[which % len(names)]] if names else None
        job = simulation.jobs[which % 2]
        match kind:
            case "train":
                simulation.train(job, extra)
            case "train partly":
                simulation.train(job, 1, is_lagging=partial(is_drawn, extra))
            case "upload":
                simulation.upload(job)
            case "capacity":
                simulation.capacity = which
            case "revise":
                fewer, more, patience = extra
                job.spec = replace(
                    job.spec,
                    min_node_count=max(job.spec.parity_group_size or 1, job.spec.node_count - fewer),
                    max_node_count=job.spec.node_count + more,
                    patience_seconds=patience,
                )
            case "lose messages":
                simulation.losses = which
            case "standstill":
                simulation.seconds += which
            case "clock":
                simulation.step_wall_clock(which, extra)
            case "person":
                simulation.ask(job, extra)
            case "automation":
                simulation.pause = "ann paused all automatic actions: an incident" if which == 0 else ""
            case "finish":
                simulation.finish(job)
            case "uploads take":
                simulation.upload_seconds = which
            case "restart":
                simulation.restart(which)
            case "train for":
                for _ in range(extra):
                    simulation.train(job, 2)
                    simulation.step()
                    simulation.check()
            case "wait":
                for _ in range(which):
                    simulation.step()
                    simulation.check()
            case _ if agent is None:
                pass
            case "kill":
                simulation.kill_rank(agent)
            case "terminate":
                simulation.terminate(agent.node_id)
            case "cut":
                simulation.cut.add(agent.node_id)
            case "mend":
                for cut in (simulation.cut, simulation.deaf, simulation.unplugged):
                    cut.discard(agent.node_id)
            case "deafen":
                simulation.deaf.add(agent.node_id)
            case "unplug":
                simulation.unplugged.add(agent.node_id)
            case "faults":
                count, simulation.replacement_limit = extra
                for number in range(count):
                    simulation.agents[names[(which + number) % len(names)]].node_faults = (FAULTS[3],)
                # Recoveries give the faulty nodes up together.
                for each in simulation.jobs:
                    for member in simulation.running(each)[:1]:
                        simulation.kill_rank(member)
                for _ in range(8):
                    simulation.step()
                    simulation.check()
            case "fault":
                agent.node_faults = (FAULTS[extra],)
            case "well":
                agent.node_faults = ()
            case "person ends":
                row = simulation.table.get(agent.node_id)
                if row is not None and row.state is NodeState.HELD:
                    simulation.people_say.add(agent.node_id)
                    simulation.table[agent.node_id] = replace(row, release=HoldRelease.TERMINATE)
            case "forget":
                simulation.forget(agent)
            case "announce":
                simulation.announce(agent.node_id, ENDING[extra % len(ENDING)], extra)
            case "false alarm":
                simulation.announce(agent.node_id, ENDING[extra % len(ENDING)], extra, is_true=False)
            case "advise":
                simulation.announce(agent.node_id, NoticeKind.REBALANCE, 0)
            case "rehearsals end":
                simulation.verdict = extra
            case "load fails":
                agent.fails_load = bool(extra)
        simulation.step()
        simulation.check()


def is_drawn(bits: int, holder: NodeId, rank: Rank) -> bool:
    """Return whether a holder fails to store the newest step of a rank's shard.

    The numbers of the holder and of the rank select one of 16 bits as the answer.
    """
    return bool(bits >> (int(holder[2:]) * 5 + rank) % 16 & 1)


def come_to_rest(simulation: Simulation) -> None:
    """Let the control plane decide until no work is pending. Then check that further decisions request nothing."""
    in_between = {NodeState.JOINING, NodeState.REBOOTING, NodeState.DRAINING, NodeState.HELD}
    quiet_steps = 0
    for _ in range(1200):
        is_quiet = all(decision.actions == () for decision in simulation.last_decisions)
        is_under_way = any(row.state in in_between for row in simulation.table.values())
        is_watched = any(
            job.record.moves
            or job.record.impairments
            or job.record.incident
            or job.record.growth
            or job.record.rehearsal.is_open
            for job in simulation.jobs
        )
        quiet_steps = quiet_steps + 1 if is_quiet and not is_under_way and not is_watched else 0
        if quiet_steps > 3:
            break
        simulation.release()
        for job in simulation.jobs:
            simulation.train(job, 1)
        simulation.step()
        simulation.check()
    for _ in range(3):
        simulation.step()
        assert [decision.actions for decision in simulation.last_decisions] == [(), (), ()]
    live = {job.spec.run for job in simulation.jobs if job.record.state not in ENDED_JOBS}
    assert {agent.run for agent in simulation.agents.values()} <= live | {None}, (
        "a job that has ended is still on a node"
    )


@settings(max_examples=30)
@given(st.integers(1, 20), DOMAINS, st.data())
def test_one_lost_node_costs_no_committed_step(steps: int, domains: Domains, data: st.DataObject) -> None:
    simulation = fresh(domains=domains)
    job = simulation.jobs[data.draw(st.integers(0, 1))]
    for _ in range(steps):
        simulation.train(job, 1)
        simulation.step(0.2)
    team = simulation.running(job)
    simulation.terminate(team[data.draw(st.integers(0, len(team) - 1))].node_id)
    simulation.settle()
    assert job.record.state is JobState.RUNNING
    assert job.plan is not None
    assert job.plan.base_step == steps
    assert job.plan.generation == 2


@settings(max_examples=30)
@given(st.integers(0, 3), st.booleans(), st.data())
def test_a_second_loss_during_the_restore_costs_no_committed_step(
    unseen: int, has_restarted: bool, data: st.DataObject
) -> None:
    """A second node is lost while the nodes load the step after a first loss. No committed step is lost.

    The control plane has not recorded the newest commits, and some holders lack the step from which the job resumes.
    Each shard still has one node that has the committed step.
    """
    simulation = fresh()
    job = simulation.jobs[0]
    for _ in range(3):
        simulation.train(job, 1)
        simulation.step(1.0)
    simulation.train(job, unseen)
    committed = 3 + unseen
    assert job.plan is not None
    nodes = [node.node_id for node in job.plan.nodes]
    first = data.draw(st.sampled_from(nodes), label="lost first")
    partners = {node for rank in job.plan.ranks if rank.holders[0] == first for node in rank.holders}
    others = sorted(set(nodes) - partners)
    simulation.train(job, 1, is_lagging=lambda holder, rank: holder in others)
    simulation.terminate(first)
    if has_restarted:
        simulation.restart(5)
    while job.plan.generation == 1:
        simulation.step()
        assert simulation.seconds < EPOCH_SECONDS + 9_000
    assert job.plan.base_step == committed + 1, "every owner holds the step that was proposed"
    simulation.step()
    simulation.terminate(data.draw(st.sampled_from(others), label="lost second"))
    simulation.settle()
    assert job.plan.base_step == committed


PARTS_OF_A_SHARD_PAIR = 0b0000_0000_0010_0000
"""Argument `bits` of `is_drawn` with which exactly one holder fails to store the newest step of one shard.

The holder is the node before the owner. The shard belongs to the first of the owner's two ranks.
"""


@settings(max_examples=30)
@given(
    st.sampled_from([(2, 1), (2, 2), (3, 3)]),
    st.integers(0, 1),
    st.integers(0, 2**16 - 1),
    st.lists(st.integers(0, 3), max_size=2),
)
@example((2, 2), 0, PARTS_OF_A_SHARD_PAIR, [0])
@example((2, 2), 0, PARTS_OF_A_SHARD_PAIR, [1])
def test_holders_that_die_with_some_of_a_nodes_shards_cost_no_step_that_others_have(
    ranks_per_node: tuple[int, int], which: int, bits: int, lost: list[int]
) -> None:
    """Nodes are lost while a holder has the newest step of only some of an owner's ranks.

    No step is lost that the remaining nodes have completely.
    """
    simulation = fresh(ranks_per_node=ranks_per_node)
    job = simulation.jobs[which]
    for _ in range(3):
        simulation.train(job, 1)
        simulation.step(1.0)
    assert job.plan is not None
    simulation.train(job, 1, is_lagging=partial(is_drawn, bits))
    nodes = [node.node_id for node in job.plan.nodes]
    gone = {nodes[place % len(nodes)] for place in lost}
    held = simulation.held_steps(job, job.plan.generation, set(nodes) - gone)
    for node_id in gone:
        simulation.terminate(node_id)
    if not gone:
        simulation.kill_rank(simulation.agents[nodes[0]])
    simulation.settle()
    assert job.plan.base_step == max(held, default=0)
    assert len(gone) > 1 or job.plan.base_step >= 3, "the loss of one node costs a committed step"


CLOCKS_AND_A_SILENT_NODE: list[Event] = [("train", 0, 4), ("clock", 0, 3600), ("deafen", 1, 0), ("wait", 130, 0)]


def test_no_clock_changes_the_age_of_a_silence() -> None:
    simulation = fresh()
    play(simulation, CLOCKS_AND_A_SILENT_NODE)
    assert any(row.state is NodeState.HELD for row in simulation.table.values()), "nobody was left for its silence"


def test_a_judge_that_takes_a_difference_of_unix_times_for_the_age_of_a_silence_is_found() -> None:
    """A planted bug computes how long a node has been silent from Unix times. The simulation detects the bug.

    The real `judge` takes the age of the node's last report by the monotonic clock as an upper limit.
    """

    def mixed(node: NodeObserved, *, silence: AgentSilence | None, now: float, **others: Any) -> evidence.NodeVerdict:
        unbounded = replace(node, silent_seconds=now - silence.since) if silence is not None else node
        return evidence.judge(unbounded, silence=silence, now=now, **others)

    simulation = fresh()
    with pytest.MonkeyPatch.context() as planted:
        planted.setattr(view, "judge", mixed)
        with pytest.raises(AssertionError, match="it was silent for"):
            play(simulation, CLOCKS_AND_A_SILENT_NODE)


@settings(max_examples=30)
@given(st.integers(1, 20), st.sampled_from(ENDING), st.sampled_from([40.0, 120.0, 600.0]), st.booleans(), st.data())
def test_an_announced_end_costs_no_step(
    steps: int, kind: NoticeKind, seconds: float, is_uploading: bool, data: st.DataObject
) -> None:
    simulation = fresh()
    job = simulation.jobs[data.draw(st.integers(0, 1))]
    for _ in range(steps):
        simulation.train(job, 1)
        simulation.step(0.2)
    team = simulation.running(job)
    leaving = team[data.draw(st.integers(0, len(team) - 1))].node_id
    simulation.announce(leaving, kind, seconds)
    planned = []
    while leaving in simulation.agents or job.record.state is not JobState.RUNNING or not simulation.running(job):
        simulation.step()
        simulation.check()
        if is_uploading and job.record.incident is not None and job.plan is not None and job.plan.generation == 1:
            simulation.upload(job)
        if job.record.incident is not None:
            planned.append(job.record.incident)
        assert simulation.seconds < EPOCH_SECONDS + 9_000
    assert planned, "nothing was recorded"
    assert planned[-1].cause is Cause.NOTICE
    assert planned[-1].instance_ids == (leaving,)
    assert lost_steps(planned[-1]) == 0
    assert job.plan is not None
    assert job.plan.base_step == steps
    assert job.plan.generation == 2, "one interruption"


NOTICES = st.builds(
    Notice,
    kind=st.sampled_from(NoticeKind),
    message=st.sampled_from("ab"),
    ends_at=st.none() | st.integers(0, 5).map(float),
)


@given(st.lists(NOTICES, max_size=8), st.data())
def test_notices_doubled_late_or_out_of_order_change_nothing(told: list[Notice], data: st.DataObject) -> None:
    again = data.draw(
        st.permutations([*told, *data.draw(st.lists(st.sampled_from(told), max_size=5) if told else st.just([]))])
    )
    assert notices.merged(again) == notices.merged(told)
    assert {notice.kind for notice in notices.merged(told)} == {notice.kind for notice in told}


@given(st.integers(1, 40), st.data())
def test_every_placement_spreads_every_shard(count: int, data: st.DataObject) -> None:
    copies = data.draw(st.integers(1, count))
    nodes = [NodeId(f"n{i}") for i in range(count)]
    domains = {node: f"d{data.draw(st.integers(0, 3))}" for node in nodes if data.draw(st.booleans())}
    planned = placement.plan(nodes, copies, domains)
    assert set(planned.holders) == set(nodes)
    assert sorted(node for group in planned.groups for node in group) == sorted(nodes)
    load = dict.fromkeys(nodes, 0)
    for owner, holders in planned.holders.items():
        assert holders[0] == owner
        assert len(holders) == len(set(holders)) == copies
        for holder in holders:
            load[holder] += 1
    assert set(load.values()) == {copies}, "some node holds more than its share"
    assert all(copies <= len(group) < 2 * copies for group in planned.groups)
