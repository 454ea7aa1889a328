"""The kinds of acts: what nodes, agents, ranks, AWS, clocks, the control plane and people do in a story.

A new kind is a function of a `Simulation` and an `Act` with `@kind(weight)`. The name of the function is the name of
the kind. A kind that makes a part lie sets `checks.is_lying`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from control_plane.cloud.errors import CloudUnavailable, Throttled
from control_plane.core import notices
from control_plane.core.observed.facts import NodeRequest, Requested
from control_plane.core.observed.fleets import HoldRelease
from control_plane.core.states import NodeState
from control_plane.db import automation, drills, fleets, jobs, nodes
from control_plane.db.automation import PauseRecord
from control_plane.db.drills import NewDrill
from control_plane.db.errors import Conflict
from everstep.protocol.agent_messages import (
    ExitClass,
    FaultCode,
    MemberPhase,
    MemberReport,
    NodeFault,
    NoticeKind,
    RankExit,
)
from everstep.protocol.ids import Generation, NodeId, Rank, RunId, Step
from everstep.protocol.rehearsals import RehearsalVerdict
from tests.sim.story import Act
from tests.sim.world import FLEET, Agent

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation

Do = Callable[["Simulation", Act], None]
T = TypeVar("T")
KINDS: Final[dict[str, tuple[float, Do]]] = {}
"""For each kind of act: its mean frequency, and the function that performs it."""
LIES: Final[dict[str, tuple[float, Do]]] = {}
"""Kinds in which one part of the world lies. A story has at most one of them."""
ENDING: Final = sorted(notices.ENDING)
HARDWARE: Final = (
    ("gpu_xid", 31),
    ("gpu_xid", 95),
    ("gpu_xid", 79),
    ("gpu_lost", None),
    ("nic_down", None),
    ("disk_full", None),
)
TRACEBACK: Final = "Traceback (most recent call last):\n  File \"train.py\", line 7, in <module>\nKeyError: 'tokens'"
VERDICTS: Final = (None, *RehearsalVerdict)


def kind(weight: float, table: dict[str, tuple[float, Do]] = KINDS) -> Callable[[Do], Do]:
    """Register a kind of act."""

    def register(do: Do) -> Do:
        table[do.__name__] = weight, do
        return do

    return register


def of_node(
    weight: float, table: dict[str, tuple[float, Do]] = KINDS
) -> Callable[[Callable[[Simulation, Act, Agent], None]], None]:
    """Register a kind of act that needs a living agent, which `Act.which` chooses."""

    def register(do: Callable[[Simulation, Act, Agent], None]) -> None:
        def of_drawn(simulation: Simulation, act: Act) -> None:
            agents = [simulation.world.agents[id] for id in sorted(simulation.world.agents)]
            if agents:
                do(simulation, act, agents[act.which % len(agents)])

        table[do.__name__] = weight, of_drawn

    return register


def choice(act: Act, options: Sequence[T]) -> T:
    """Return the option that `Act.amount` chooses."""
    return options[act.amount % len(options)]


# Ranks and training


@kind(6)
def train(simulation: Simulation, act: Act) -> None:
    simulation.train(simulation.job(act), 1 + act.amount % 4)


@kind(3)
def train_partly(simulation: Simulation, act: Act) -> None:
    """Complete a step that some holders do not store."""
    simulation.train(simulation.job(act), 1, is_lagging=partial(is_drawn, act.amount))


def is_drawn(bits: int, holder: NodeId, rank: Rank) -> bool:
    """Return whether a holder does not store the newest step of a rank's shard."""
    return bool(bits >> (int(holder[2:], 16) * 5 + rank) % 16 & 1)


@kind(3)
def standstill_of_training(simulation: Simulation, act: Act) -> None:
    simulation.is_idle = not simulation.is_idle


@of_node(6)
def kill_rank(simulation: Simulation, act: Act, agent: Agent) -> None:
    if agent.phase is MemberPhase.RUNNING and agent.boundary:
        code = choice(act, ((ExitClass.KILLED, -9), (ExitClass.KILLED, -9), (ExitClass.ERROR, 1)))
        lines = TRACEBACK if code[0] is ExitClass.ERROR else ""
        simulation.world.kill_rank(agent, exit_class=code[0], code=code[1], lines=lines)


@kind(1)
def finish(simulation: Simulation, act: Act) -> None:
    """End a job's script with success."""
    for agent in simulation.stepping(simulation.job(act)):
        agent.exit_all(ExitClass.SUCCESS, 0)


@kind(4)
def upload(simulation: Simulation, act: Act) -> None:
    simulation.upload(simulation.job(act))


@kind(1)
def uploads_take(simulation: Simulation, act: Act) -> None:
    simulation.upload_seconds = choice(act, (0.0, 1.0, 30.0, 4000.0))


@kind(1)
def rehearsals_end(simulation: Simulation, act: Act) -> None:
    simulation.verdict = choice(act, VERDICTS)


# Nodes and their agents


@of_node(6)
def terminate(simulation: Simulation, act: Act, agent: Agent) -> None:
    simulation.world.terminate(agent)


@kind(2)
def terminate_two(simulation: Simulation, act: Act) -> None:
    agents = [simulation.world.agents[id] for id in sorted(simulation.world.agents)]
    for agent in (
        {agents[place % len(agents)].node_id: agents[place % len(agents)] for place in (act.which, act.amount)}.values()
        if agents
        else ()
    ):
        simulation.world.terminate(agent)


@of_node(3)
def silence(simulation: Simulation, act: Act, agent: Agent) -> None:
    """Cut a node off from everything."""
    simulation.world.silence(agent)


@of_node(3)
def deafen(simulation: Simulation, act: Act, agent: Agent) -> None:
    """Cut a node off from the control plane only."""
    agent.is_deaf = True
    agent.disconnect()


@of_node(3)
def unplug(simulation: Simulation, act: Act, agent: Agent) -> None:
    """Cut a node off from the other nodes only."""
    simulation.world.cut.add(agent.node_id)


@kind(5)
def reconnect_all(simulation: Simulation, act: Act) -> None:
    simulation.reconnect()


@of_node(2)
def lose_connection(simulation: Simulation, act: Act, agent: Agent) -> None:
    agent.disconnect()


@of_node(2)
def lose_memory(simulation: Simulation, act: Act, agent: Agent) -> None:
    """Restart an agent that finds nothing on its node."""
    agent.run, agent.slots, agent.plan, agent.boundary, agent.exits = None, {}, None, {}, {}


@of_node(3)
def fault(simulation: Simulation, act: Act, agent: Agent) -> None:
    code, xid = choice(act, HARDWARE)
    agent.node_faults = (NodeFault(code=code, message="words", is_permanent=False, xid=xid),)


@kind(1)
def faults_of_many(simulation: Simulation, act: Act) -> None:
    """Report faults of several nodes at once that need their replacement."""
    ids = sorted(simulation.world.agents)
    for number in range(min(2 + act.amount % 3, len(ids))):
        agent = simulation.world.agents[ids[(act.which + number) % len(ids)]]
        agent.node_faults = (NodeFault(code="gpu_lost", message="words", is_permanent=False),)


@of_node(2)
def no_fault(simulation: Simulation, act: Act, agent: Agent) -> None:
    agent.node_faults = ()


@of_node(2)
def load_fails(simulation: Simulation, act: Act, agent: Agent) -> None:
    agent.fails_load = bool(act.amount % 3)
    agent.load_fault = choice(act, (FaultCode.SOURCE_MISMATCH, FaultCode.SOURCE_UNAVAILABLE, FaultCode.MEMORY_FULL))


@of_node(1)
def node_clock(simulation: Simulation, act: Act, agent: Agent) -> None:
    agent.wall_ahead_seconds += choice(act, (-3600.0, -65.0, 65.0, 3600.0))


# AWS


@of_node(2)
def announce(simulation: Simulation, act: Act, agent: Agent) -> None:
    """Announce the end of an instance, which follows."""
    simulation.announce(agent, choice(act, ENDING), 5.0 + act.amount % 200, is_true=True)


@of_node(2)
def announce_falsely(simulation: Simulation, act: Act, agent: Agent) -> None:
    simulation.announce(agent, choice(act, ENDING), 5.0 + act.amount % 200, is_true=False)


@of_node(1)
def advise(simulation: Simulation, act: Act, agent: Agent) -> None:
    simulation.announce(agent, NoticeKind.REBALANCE, None, is_true=False)


@kind(3)
def capacity(simulation: Simulation, act: Act) -> None:
    present = sum(job.nodes for job in simulation.story.jobs)
    simulation.world.operator.capacity = choice(act, (None, present - 1, present, present + 1))
    simulation.world.operator.launch_retry = timedelta(seconds=choice(act, (0, 120)))


@kind(2)
def refuse(simulation: Simulation, act: Act) -> None:
    """Let AWS refuse every call, until the next act of this kind."""
    errors = (Throttled("slow down", code="RequestLimitExceeded"), CloudUnavailable("no answer"))
    simulation.world.refusal = None if simulation.world.refusal is not None else choice(act, errors)


# The control plane


@kind(2)
def restart(simulation: Simulation, act: Act) -> None:
    simulation.world.start_server()


@kind(2)
def sleep(simulation: Simulation, act: Act) -> None:
    """Stop the control plane, and start another one after up to ten minutes."""
    asleep = timedelta(seconds=choice(act, (2, 20, 200, 600)))
    simulation.world.now += asleep
    simulation.world.operator.advance(asleep)
    simulation.world.start_server()


@kind(2)
def standstill(simulation: Simulation, act: Act) -> None:
    """Stop the machine of the control plane for a while."""
    asleep = timedelta(seconds=act.amount % 600)
    simulation.world.now += asleep
    simulation.world.operator.advance(asleep)


@kind(1)
def clock(simulation: Simulation, act: Act) -> None:
    simulation.world.wall_ahead_seconds += choice(act, (-3600.0, -65.0, 65.0, 3600.0))


@kind(2)
def lose_messages(simulation: Simulation, act: Act) -> None:
    simulation.world.losses = 1 + act.amount % 6


@kind(1)
def back_up(simulation: Simulation, act: Act) -> None:
    simulation.back_up()


@kind(1)
def restore_backup(simulation: Simulation, act: Act) -> None:
    """Restore the newest backup, as `everstep db restore` does, and start a server on it."""
    simulation.restore_backup()


# People


def _request(simulation: Simulation, request: Callable[..., object], *values: object) -> None:
    with suppress(Conflict), simulation.world.database.write() as session:
        request(session, *values)


@kind(1)
def stop(simulation: Simulation, act: Act) -> None:
    _request(simulation, jobs.request_stop, simulation.job(act).run_id, simulation.now)


@kind(2)
def pause(simulation: Simulation, act: Act) -> None:
    _request(simulation, jobs.request_pause, simulation.job(act).run_id, simulation.now)


@kind(2)
def resume(simulation: Simulation, act: Act) -> None:
    _request(simulation, jobs.withdraw_pause, simulation.job(act).run_id, simulation.now)


@kind(1)
def rehearse(simulation: Simulation, act: Act) -> None:
    _request(simulation, jobs.request_rehearsal, simulation.job(act).run_id, simulation.now)


@kind(1)
def take_over(simulation: Simulation, act: Act) -> None:
    _request(simulation, jobs.take_over, simulation.job(act).run_id, "ada", simulation.now)


@kind(1)
def hand_back(simulation: Simulation, act: Act) -> None:
    _request(simulation, jobs.hand_back, simulation.job(act).run_id)


@kind(2)
def pause_automation(simulation: Simulation, act: Act) -> None:
    if act.amount % 2:
        _request(simulation, automation.resume)
    else:
        wanted = PauseRecord(reason="an incident", paused_by="ann", paused_at=simulation.now)
        _request(simulation, automation.pause, wanted)


@of_node(2)
def ask_for_node(simulation: Simulation, act: Act, agent: Agent) -> None:
    """Ask for a node: drain, reboot or replace it."""
    request = choice(act, tuple(NodeRequest))
    simulation.checks.asked.add(agent.node_id)
    simulation.checks.told.add(agent.node_id)
    about = Requested(request=request, node_id=agent.node_id, by="ann", note="")
    _request(simulation, nodes.ask, agent.node_id, about)


@of_node(2)
def end_held_node(simulation: Simulation, act: Act, agent: Agent) -> None:
    simulation.checks.asked.add(agent.node_id)
    with suppress(Conflict), simulation.world.database.write() as session:
        nodes.ask_release(
            session, agent.node_id, state=NodeState.HELD, release=HoldRelease.TERMINATE, now=simulation.now
        )


@of_node(1)
def drill(simulation: Simulation, act: Act, agent: Agent) -> None:
    job = next((job for job in simulation.jobs() if agent.run == job.run_id), None)
    name = choice(act, ("kill-rank", "kill-agent", "terminate-instance"))
    if job is None or not agent.boundary:
        return
    new = NewDrill(
        run_id=job.run_id,
        job_name=job.name,
        fleet_name=FLEET,
        project="",
        kind=name,
        node_id=agent.node_id,
        rank=min(agent.boundary) if name == "kill-rank" else None,
        requested_by="ada",
        requested_at=simulation.now,
        state="requested",
    )
    _request(simulation, drills.create, new)


@kind(1)
def limit_replacements(simulation: Simulation, act: Act) -> None:
    _request(simulation, partial(fleets.set_wanted, max_replacements_per_hour=choice(act, (1, 2, 1000))), FLEET)


# Lies: one part of the world is wrong, and says so to nobody.


@of_node(1, LIES)
def agent_reads_wrong_content(simulation: Simulation, act: Act, agent: Agent) -> None:
    agent.fails_load = True
    simulation.checks.is_lying = True


@of_node(3, LIES)
def agent_lies(simulation: Simulation, act: Act, agent: Agent) -> None:
    agent.lie = partial(_false, choice(act, AGENT_LIES))
    simulation.checks.is_lying = True
    simulation.checks.told.add(agent.node_id)


@of_node(1, LIES)
def aws_omits(simulation: Simulation, act: Act, agent: Agent) -> None:
    simulation.world.operator.omitted |= {agent.node_id} if act.amount % 4 else set(simulation.world.agents)
    simulation.checks.is_lying = True


@of_node(1, LIES)
def aws_reports_an_end(simulation: Simulation, act: Act, agent: Agent) -> None:
    simulation.world.operator.reported_ended.add(agent.node_id)
    simulation.checks.is_lying = True


@of_node(1, LIES)
def aws_lists_twice(simulation: Simulation, act: Act, agent: Agent) -> None:
    simulation.world.operator.listed_twice.add(agent.node_id)


def _false(lie: str, report: MemberReport) -> MemberReport:
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
            ended = RankExit(exit_class=ExitClass.SUCCESS, code=0, at_seconds=1.0, boundary=Step(3))
            ranks = tuple(change(rank, exit=ended) for rank in report.ranks)
            status = report.round and change(report.round, finished=True)
            return change(report, ranks=ranks, phase=MemberPhase.EXITED if ranks else report.phase, round=status)
        case "permanent fault":
            fault = NodeFault(code="cannot_resume", message="no", is_permanent=True)
            return change(report, faults=(*report.faults, fault))
        case "lost peers":
            shards = tuple(change(each, in_view=each.holders[:1]) for each in report.protection)
            return change(report, protection=shards)
        case _:
            raise AssertionError(lie)


AGENT_LIES: Final = (
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
