"""Golden scripts that read like incident reports: events of a job and the reactions of the control plane.

A script contains an explanation and a drawing (`#`), commands, `----`, and the messages and records of the control
plane. The scripts run in the simulated cluster of `tests/sim/world.py`, with real loops and
decisions and virtual time. After an intended change, rewrite the scripts with EVERSTEP_UPDATE_GOLDEN=1 and review the
difference.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest

from control_plane.accounts import facts, reasons
from control_plane.accounts.responses import response
from control_plane.core.observed.fleets import HoldRelease
from control_plane.core.observed.rolls import FleetRoll
from control_plane.core.states import JobState, NodeState
from control_plane.db import events, fleets, jobs, nodes, rolls
from everstep.protocol.agent_messages import (
    AgentWelcome,
    ControlToAgent,
    ExitClass,
    FaultCode,
    HaltRanks,
    KeepEvidence,
    KeepSources,
    Load,
    NodeFault,
    NoticeKind,
    Prepare,
    Rehearse,
    Release,
    RunBurnIn,
    Start,
    StopTraining,
    TakeCheckpoint,
    TakeStacks,
)
from everstep.protocol.ids import NodeId
from tests.sim.world import START, Agent, InTurn, World

SCRIPTS = sorted((Path(__file__).parent / "incidents").glob("*.txt"))
MARK = "----\n"


@pytest.mark.long(keep=45)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
async def test_incident(script: Path, tmp_path: Path) -> None:
    story, _, expected = script.read_text().partition(MARK)
    asyncio.get_running_loop().set_default_executor(InTurn())
    world = World(tmp_path)
    try:
        teller = Teller(world)
        for line in story.splitlines():
            if line and not line.startswith("#"):
                await teller.obey(line.split())
        told = "\n".join([*teller.lines, *teller.summary()]) + "\n"
    finally:
        world.close()
    if os.environ.get("EVERSTEP_UPDATE_GOLDEN"):
        script.write_text(story + MARK + told)
        return
    assert told == expected


class Teller:
    """Executes the commands of a script. It collects the resulting records and messages as lines of text."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.lines: list[str] = []
        self.told_events = 0
        self.told_commit = 0
        self.told_messages = 0
        self.stops: list[StopTraining] = []
        self.silenced: dict[str, Agent] = {}
        world.before_pass = self.tell

    async def obey(self, words: list[str]) -> None:
        world = self.world
        self.lines.append(f"> {' '.join(words)}")
        match words:
            case ["submit", *settings]:
                given = dict(setting.split("=") for setting in settings)
                world.submit(nodes=int(given.pop("nodes", "4")), **{name: int(value) for name, value in given.items()})
            case ["until", state]:
                await world.until(lambda: world.job().state == state, limit=1000)
            case ["until", "generation", number, state]:
                await world.until(
                    lambda: world.job().generation == int(number) and world.job().state == state, limit=1000
                )
            case ["train", steps]:
                await world.train(int(steps))
            case ["upload", step]:
                await world.upload(int(step))
            case ["upload", step, "in", seconds]:
                await world.upload(int(step), seconds=float(seconds))
            case ["announce", kind, *places, "in", seconds]:
                for place in places:
                    world.announce(world.team()[int(place)], NoticeKind(kind), float(seconds))
            case ["advise", *places]:
                for place in places:
                    world.announce(world.agents[NodeId(f"i-{int(place):017x}")], NoticeKind.REBALANCE)
            case ["schedule", place, "in", seconds]:
                world.schedule(world.team()[int(place)], float(seconds))
            case ["shrink", place]:
                world.operator.shrink(world.team()[int(place)].node_id)
            case ["capacity", count]:
                world.operator.capacity = None if count == "back" else int(count)
            case ["kill", "rank", rank]:
                world.kill_rank(world.team()[int(rank)])
            case ["fail", "rank", rank, *lines]:
                world.kill_rank(world.team()[int(rank)], exit_class=ExitClass.ERROR, code=1, lines=" ".join(lines))
            case ["stick", "rank", rank, *place]:
                agent = world.team()[int(rank)]
                agent.stands_at = dict.fromkeys(agent.boundary, " ".join(place))
            case ["gate", "rank", rank, seconds]:
                agent = world.team()[int(rank)]
                agent.phase_of = dict.fromkeys(agent.boundary, "wait")
                agent.limit_of = dict.fromkeys(agent.boundary, float(seconds))
            case ["reason"]:
                self.lines.append(f"    {_short(world.job().reason)}")
            case ["open", "gate", rank]:
                world.team()[int(rank)].phase_of, world.team()[int(rank)].limit_of = {}, {}
            case ["compute"]:
                for agent in world.team():
                    agent.cpu_share = 0.9
            case ["freeze", "rank", rank]:
                agent = world.team()[int(rank)]
                agent.stopped = set(agent.boundary)
            case ["terminate", *places]:
                for agent in [world.team()[int(place)] for place in places]:
                    world.terminate(agent)
            case ["silence", *places]:
                for place in places:
                    agent = self.silenced[place] = world.team()[int(place)]
                    agent.is_deaf = True
                    agent.disconnect()
                    world.cut.add(agent.node_id)
            case ["hear", *places]:
                for place in places:
                    self.silenced[place].is_deaf = False
                    world.cut.discard(self.silenced[place].node_id)
            case ["deafen", *places]:  # cut only the connection to the control plane
                for place in places:
                    agent = self.silenced[place] = world.team()[int(place)]
                    agent.is_deaf = True
                    agent.disconnect()
            case ["impair", place, *checks]:
                world.operator.failed_checks[world.team()[int(place)].node_id] = tuple(checks)
            case ["unplug", *places]:  # cut only the connections to other nodes
                for place in places:
                    agent = self.silenced[place] = world.team()[int(place)]
                    world.cut.add(agent.node_id)
            case ["fault", place, code, *number]:
                fault = NodeFault(
                    code=code,
                    message=f"as the {code} check says",
                    is_permanent=False,
                    xid=int(number[0]) if number else None,
                )
                agent = self.silenced[place] = world.team()[int(place)] if place != "spare" else world.spare()
                agent.node_faults = (fault,)
                agent.report()
            case ["well", place]:
                self.silenced[place].node_faults = ()
            case ["reboots", "mend", "nothing"]:
                world.is_mended_by_reboot = False
            case ["nobody", "returns"]:
                world.never_return.update(world.agents)
            case ["flap", place, times]:
                agent = world.team()[int(place)]
                for _ in range(int(times)):
                    agent.disconnect()
                    await world.train(1)
            case ["train", "for", seconds]:
                for _ in range(int(float(seconds) * 2)):
                    await world.train(1)
            case ["repeat", place]:  # repeat the agent's last report
                agent = world.team()[int(place)]
                for _ in range(3):
                    agent.sequence -= 1
                    agent.report()
            case ["hold", "failed", "instances"]:
                world.wish(hold_failed_instances=True)
            case ["limit", count]:
                world.wish(max_replacements_per_hour=int(count))
            case ["release", place, *how]:
                node_id, what = self.silenced[place].node_id, "terminate" if how else "return"
                with world.database.write() as session:
                    nodes.ask_release(session, node_id, state=NodeState.HELD, release=HoldRelease(what), now=world.now)
            case ["unfreeze"]:
                with world.database.write() as session:
                    fleets.lift_blindness(session, "main", world.now)
            case ["loads", "fail", place, *fault]:
                agent = world.team()[int(place)] if place != "spare" else world.spare()
                agent.fails_load = True
                agent.load_fault = "".join(fault) or FaultCode.SOURCE_MISMATCH
            case ["loads", "work"]:
                for agent in world.agents.values():
                    agent.fails_load = False
            case ["stop"]:
                with world.database.write() as session:
                    jobs.request_stop(session, jobs.get(session, "gpt").run_id, world.now)
            case ["pause"]:
                with world.database.write() as session:
                    jobs.request_pause(session, jobs.get(session, "gpt").run_id, world.now)
            case ["resume"]:
                with world.database.write() as session:
                    jobs.withdraw_pause(session, jobs.get(session, "gpt").run_id, world.now)
            case ["agreed"]:
                world.is_stopped = False
                await world.until(lambda: world.is_stopped)
            case ["finish"]:
                world.finish()
            case ["roll", *settings]:
                given = dict(setting.split("=") for setting in settings)
                with world.database.write() as session:
                    rolls.put(session, "main", fleet_roll(world, **{name: int(value) for name, value in given.items()}))
            case ["roll:", change]:
                with world.database.write() as session:
                    before = rolls.roll_of(fleets.get(session, "main"))
                    assert before is not None
                    after = replace(before, is_paused=change == "pause", is_stopped=change == "stop")
                    rolls.put(session, "main", after)
            case ["progress"]:
                with world.database.read() as session:
                    progress = rolls.progress_of(fleets.get(session, "main"))
                assert progress is not None
                self.lines.append(f"    {len(progress.finished)} finished: {_short(reasons.sentence(progress.reason))}")
            case ["move", number]:  # the job moves off a node at its next agreed stop
                await self.obey(["agreed"])
                await self.obey(["finish"])
                await self.obey(["until", "generation", number, "running"])
            case ["restart", "control", "plane"]:
                world.start_server()
            case ["wait", seconds]:
                for _ in range(int(float(seconds) * 2)):
                    await world.tick()
            case _:
                raise AssertionError(f"no such command: {words}")
        await self.tell()

    async def tell(self) -> None:
        """Append the records and messages that the control plane has stored or sent since the last call."""
        world = self.world
        for event in self.new_events():
            who = f"{_short(event.node_id)} " if event.node_id is not None and event.type == "NodeStateChanged" else ""
            self.lines.append(
                f"{(event.at - START).total_seconds():7.1f}  {who}{_short(event.message)}".partition("\n")[0]
            )
            self.told_events = event.id
        grouped: dict[str, list[str]] = {}
        for node_id, message in world.said[self.told_messages :]:
            if isinstance(message, StopTraining) and message in self.stops:
                continue  # skip a repeated command: the control plane repeats it until its effect is visible
            if isinstance(message, KeepSources):
                continue  # skip messages to spares, which are no part of an incident
            if isinstance(message, StopTraining):
                self.stops.append(message)
            grouped.setdefault(_told(message), []).append(_short(node_id))
        for what, who in grouped.items():
            self.lines.append(f"{world.monotonic():7.1f}    {what} → {' '.join(who)}")
        self.told_messages = len(world.said)

    def new_events(self) -> tuple[events.EventRecord, ...]:
        """Return the events that the control plane has stored since the last call.

        Without a database commit since then, there is no new event, and the function does not read the database.
        """
        database = self.world.database
        if database.commit_number == self.told_commit:
            return ()
        self.told_commit = database.commit_number
        with database.read() as session:
            return events.page(session, events.EventFilter(after_id=self.told_events), limit=1000)

    def summary(self) -> list[str]:
        lines = []
        for incident in self.world.incidents():
            phases = (
                incident.detect_seconds,
                incident.replace_seconds,
                incident.restore_seconds,
                incident.rework_seconds,
            )
            lengths = " + ".join("…" if phase is None else f"{phase:.1f}" for phase in phases)
            lines += [
                f"incident {incident.cause}, generation {incident.generation_before} → "
                f"{incident.generation_after}: {_short(response(incident.decision))}",
                *(f"  because {_short(facts.sentence(fact))}" for fact in incident.evidence),
                f"  from step {incident.from_step} ({incident.restore_source}), {incident.lost_steps} steps "
                f"lost, {incident.phase}",
                f"  detect + replace + restore + rework = {lengths} s",
            ]
            if incident.faulted_instance_ids:
                lines.append(f"  happened on {_short(', '.join(incident.faulted_instance_ids))}")
            if incident.instance_ids:
                replaced = ", ".join(incident.replacement_instance_ids)
                lines.append(
                    f"  lost {_short(', '.join(incident.instance_ids))}, replaced by {_short(replaced) or 'nobody yet'}"
                )
        job = self.world.job()
        lines.append(
            f"job {JobState(job.state).value}, generation {job.generation}: {_short(job.reason)}".replace("\n", " ⏎ ")
        )
        return lines


def fleet_roll(world: World, *, max_unavailable: int = 1, reboots: int = 0) -> FleetRoll:
    """Return a roll, which replaces or reboots all present nodes of the fleet one after another."""
    return FleetRoll(
        roll_id="roll-1",
        node_ids=tuple(NodeId(node_id) for node_id, node in world.nodes().items() if node.state != NodeState.GONE),
        max_unavailable=max_unavailable,
        reboots=bool(reboots),
        requested_by="ann",
        reason="new image",
        started_at=world.now.timestamp(),
    )


def _short(text: str | None) -> str:
    return (text or "").replace("i-0000000000000000", "i-").replace("i-000000000000000", "i-")


def _told(message: ControlToAgent) -> str:
    match message:
        case Prepare():
            return f"Prepare({message.generation}, parent {message.parent})"
        case Load(plan=plan):
            return f"Load({plan.generation}, base {plan.base_step})"
        case Start() | StopTraining():
            return f"{type(message).__name__}({message.generation})"
        case HaltRanks():
            return f"HaltRanks({message.generation})"
        case TakeCheckpoint():
            return f"TakeCheckpoint({message.generation}, step {message.step})"
        case Rehearse():
            return f"Rehearse({message.generation}, order {message.number})"
        case TakeStacks():
            return f"TakeStacks({message.generation}, look {message.number})"
        case RunBurnIn():
            return f"RunBurnIn({message.number}, level {message.level})"
        case Release() | AgentWelcome() | KeepEvidence():
            return type(message).__name__
