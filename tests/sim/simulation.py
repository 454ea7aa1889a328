"""Plays stories in one process: the real control plane, simulated agents, AWS, people and time.

`play` performs the acts of a story, then ends all faults, and requires that every job trains again or has ended. After
each tick, it raises `Failed` if a check of `Checks` has failed, or if an error ended a pass of a loop.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

from control_plane.core import evidence
from control_plane.core.observed.fleets import HoldRelease
from control_plane.core.states import ENDED_JOBS, JobState, NodeState
from control_plane.db import automation, backups, fleets, jobs, nodes
from control_plane.db.errors import Conflict
from control_plane.db.jobs import SavedJob
from control_plane.db.session import Database
from control_plane.db_commands import restore
from control_plane.loop import memos
from everstep.protocol.agent_messages import ExitClass, NoticeKind
from everstep.protocol.ids import NodeId, RunId
from everstep.protocol.plan import GenerationPlan
from everstep.protocol.rank_messages import StopState
from everstep.protocol.rehearsals import RehearsalVerdict
from tests.sim.acts import KINDS, LIES
from tests.sim.checks import Checks, Remembered
from tests.sim.story import Act, Story, drawn
from tests.sim.world import FLEET, Agent, InTurn, Lagging, World

NAMES: Final = ("gpt", "bert")
TICK_SECONDS: Final = 1.0
SETTLE_TICKS: Final = 400
"""Limit for all jobs to train again after the last fault."""
SLOW_TICK_SECONDS: Final = 10.0
"""Length of a tick while nothing changed in the tick before, as during a boot or a back-off."""
REST_TICKS: Final = 400


class Failed(AssertionError):
    """A story broke a rule. The message contains the rule and the story."""


class _Errors(logging.Handler):
    """Collects the errors that the loops of the control plane catch and log."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(logging.Formatter().format(record))


class Simulation:
    """The world of one story, and what its acts have changed."""

    def __init__(self, directory: Path, story: Story) -> None:
        self.story = story
        size = sum(job.nodes for job in story.jobs)
        self.world = World(
            directory,
            nodes=size,
            spares=story.spares,
            boot_seconds=story.boot_seconds,
            max_size=size + story.spares + story.room,
        )
        self.world.wish(allow_drills=True)
        self.checks = Checks(self.world)
        self.errors = _Errors()
        self.is_idle = False
        """True while the ranks make no steps between the acts."""
        self.upload_seconds = 1.0
        """Time from the successful end of all ranks until their last upload has ended."""
        self.verdict: RehearsalVerdict | None = RehearsalVerdict.PROVEN
        """What rank 0 reports after a rehearsal. None: no rank reports."""
        self.due: dict[NodeId, datetime] = {}
        """When AWS ends instances whose end it has announced."""
        self.ended_at: dict[RunId, datetime] = {}
        self.directory = directory
        self.database_count = 0
        self.backup: tuple[Path, Remembered] | None = None
        """The newest backup, with what the checks remembered then."""
        self._jobs: list[SavedJob] = []
        self._plans: dict[tuple[str, int], GenerationPlan] = {}
        for name, job in zip(NAMES, story.jobs, strict=False):
            self.world.submit(
                name, nodes=job.nodes, copies=job.copies, ranks_per_node=job.ranks_per_node, **job.settings
            )

    @property
    def now(self) -> datetime:
        return self.world.now

    def jobs(self) -> list[SavedJob]:
        """Return the story's jobs, also those that have ended."""
        self._jobs = self._jobs or [self.world.job(name) for name in NAMES[: len(self.story.jobs)]]
        return self._jobs

    def plan(self, job: SavedJob) -> GenerationPlan | None:
        """Return the plan of a job's newest generation."""
        key = job.run_id, job.generation
        if job.generation and key not in self._plans:
            self._plans[key] = self.world.plan(job.name)
        return self._plans.get(key)

    def back_up(self) -> None:
        """Write a backup of the database."""
        self.database_count += 1
        file = self.directory / f"backup-{self.database_count}"
        backups.back_up(self.world.database, file)
        self.backup = file, self.checks.remembered()

    def restore_backup(self) -> None:
        """Restore the newest backup, if there is one. The agents live on, and connect to a new server."""
        if self.backup is None:
            return
        file, remembered = self.backup
        self.database_count += 1
        url = f"sqlite:///{self.directory / f'everstep-{self.database_count}.db'}"
        self.world.database.close()
        self.world.now += timedelta(seconds=30)
        restore(file, url, lambda: self.world.objects, self.world.now)
        self.world.database = Database(url)
        self.world.start_server()
        self.checks.forget_since(remembered)
        self._jobs = []

    def job(self, act: Act) -> SavedJob:
        """Return the job that an act is about."""
        return self.jobs()[act.which % len(self.story.jobs)]

    def stepping(self, job: SavedJob) -> list[Agent]:
        """Return the agents of a job's newest generation if all its ranks run, otherwise no agents."""
        return self.world.stepping(self.plan(job))

    def train(self, job: SavedJob, steps: int, *, is_lagging: Lagging = lambda holder, rank: False) -> None:
        """Let all ranks of a job complete steps, if all of them run and no node is cut off from everything."""
        team = self.stepping(job)
        if not team or any(agent.is_deaf and agent.node_id in self.world.cut for agent in team):
            return
        if steps >= evidence.COUNTER_EVIDENCE_BOUNDARIES and RunId(job.run_id) in self.checks.jobs:
            self.checks.jobs[RunId(job.run_id)].advanced_at = self.world.monotonic()
        self.world.complete_steps(steps, job.name, is_lagging=is_lagging, plan=self.plan(job))
        plan = self.plan(job)
        assert plan is not None
        coordinator = next((agent for agent in team if agent.node_id == plan.coordinator), None)
        if coordinator is not None and coordinator.rehearsal_state is StopState.ANNOUNCED:
            newest = max(coordinator.boundary.values(), default=-1)
            if newest >= coordinator.rehearses_from + 5:
                proven = dict.fromkeys(range(plan.world_size), RehearsalVerdict.PROVEN)
                for agent in team:
                    agent.end_rehearsal({} if self.verdict is None else {**proven, 0: self.verdict}, seconds=3.0)

    def upload(self, job: SavedJob) -> None:
        """Let the agents of a job report the upload of its newest common step."""
        team = self.stepping(job)
        if team and (step := min(step for agent in team for step in agent.boundary.values())) > job.base_step:
            self.world.report_uploads(step, job.name)

    def announce(self, agent: Agent, kind: NoticeKind, seconds: float | None, *, is_true: bool) -> None:
        """Announce an event for an instance. If the announcement is true, the end of the instance follows."""
        self.checks.announced.add(agent.node_id)
        self.world.announce(agent, kind, seconds)
        if is_true and seconds is not None and kind is not NoticeKind.REBALANCE:
            self.due.setdefault(agent.node_id, self.now + timedelta(seconds=seconds))

    def reconnect(self) -> None:
        """End all partitions."""
        self.world.cut.clear()
        for agent in self.world.agents.values():
            agent.is_deaf = False

    async def tick(self, seconds: float = TICK_SECONDS) -> None:
        """Let the ranks step, then advance the time by a tick of the control plane and the agents. Raises Failed."""
        for job in self.jobs():
            self._end_agreed(job)
            if not self.is_idle:
                self.train(job, self.story.steps_per_tick)
            self._take_checkpoint(job)
        for node_id in [node_id for node_id, at in self.due.items() if at <= self.now]:
            del self.due[node_id]
            if node_id in self.world.agents:
                self.world.terminate(self.world.agents[node_id])
        if self.story.domains:
            for node_id in self.world.agents.keys() - self.world.operator.topology.keys():
                domain = int(node_id[2:], 16) * 2654435761 % 997 % self.story.domains
                self.world.operator.topology[node_id] = ("nn-0", "nn-1", f"nn-{domain}")
        await self.world.tick(seconds)
        self._jobs = []
        for job in self.jobs():
            self._finish_uploads(job)
        if self.checks.broken or self.errors.found:
            raise Failed((self.checks.broken + self.errors.found)[0])

    def _take_checkpoint(self, job: SavedJob) -> None:
        """Upload a step if the control plane has asked for a checkpoint of this generation."""
        team = self.stepping(job)
        if any(agent.wanted_checkpoint >= 0 for agent in team):
            self.upload(job)
            if any(agent.uploads for agent in team):
                for agent in team:
                    agent.wanted_checkpoint = -1

    def _end_agreed(self, job: SavedJob) -> None:
        """If the ranks of a job have been asked to stop, let all of them stop at one step."""
        team = self.stepping(job)
        if any(agent.is_told_to_stop for agent in team):
            for agent in team:
                agent.exit_all(ExitClass.SUCCESS, 0)

    def _finish_uploads(self, job: SavedJob) -> None:
        """Report the upload of a job's last step, `upload_seconds` after all its ranks ended with success."""
        run = RunId(job.run_id)
        plan = self.plan(job)
        team = (
            [self.world.agents[node.node_id] for node in plan.nodes if node.node_id in self.world.agents]
            if plan
            else []
        )
        exits = [
            each for agent in team if plan and agent.generation == plan.generation for each in agent.exits.values()
        ]
        if plan is None or len(exits) < plan.world_size or any(e.exit_class is not ExitClass.SUCCESS for e in exits):
            self.ended_at.pop(run, None)
        elif self.now - self.ended_at.setdefault(run, self.now) >= timedelta(seconds=self.upload_seconds):
            step = min((step for agent in team for step in agent.boundary.values()), default=0)
            if plan.relayout is None or step > plan.base_step:
                self.world.report_uploads(step, job.name)

    async def wait(self, ticks: int) -> None:
        for _ in range(ticks):
            await self.tick()

    async def settle(self) -> None:
        """End all faults, and wait until each job trains or has ended. People decide what only people can decide."""
        world, operator = self.world, self.world.operator
        world.losses, world.refusal, self.upload_seconds, self.is_idle = 0, None, 1.0, False
        operator.capacity, operator.launch_retry = None, timedelta(0)
        for lies in (operator.omitted, operator.reported_ended, operator.listed_twice):
            lies.clear()
        self.reconnect()
        self.due = dict.fromkeys(self.due, self.now)
        with world.database.write() as session:
            automation.resume(session)
            fleets.set_wanted(session, FLEET, max_replacements_per_hour=1000)
        for agent in world.agents.values():
            agent.fails_load, agent.lie, agent.node_faults = False, None, ()
            agent.spoils_sums = agent.denies_sums = False
            if agent.node_id not in self.due:
                agent.notices = ()
        quiet = 0
        for _ in range(SETTLE_TICKS):
            self._decide_as_people()
            seen = len(world.said), len(operator.calls), tuple(job.state for job in self.jobs())
            await self.tick(TICK_SECONDS if quiet < 5 else SLOW_TICK_SECONDS)
            quiet = (
                quiet + 1 if seen == (len(world.said), len(operator.calls), tuple(j.state for j in self.jobs())) else 0
            )
            if all(
                job.state in ENDED_JOBS or (job.state == JobState.RUNNING and self.stepping(job)) for job in self.jobs()
            ):
                return
        raise Failed(
            f"no training {SETTLE_TICKS} ticks after the last fault: {[(j.state, j.reason) for j in self.jobs()]}"
        )

    def _decide_as_people(self) -> None:
        with self.world.database.write() as session:
            for job in self.jobs():
                if job.state in ENDED_JOBS:
                    continue
                jobs.hand_back(session, job.run_id)
                with suppress(Conflict):
                    jobs.withdraw_pause(session, job.run_id, self.now)
                if (choice := memos.repeat_choice_of(job)) is not None:
                    jobs.accept_loss(session, job.run_id, step=choice.base_step, after=choice.after, now=self.now)
            for node in nodes.of_fleet(session, FLEET):
                if node.state == NodeState.HELD:
                    nodes.ask_release(session, node.id, state=node.state, release=HoldRelease.RETURN, now=self.now)

    async def come_to_rest(self) -> None:
        """Wait until nothing is left to do. Then no further action may follow, and no ended job may have a node."""
        in_between = {NodeState.JOINING, NodeState.REBOOTING, NodeState.DRAINING, NodeState.HELD}
        quiet = 0
        for _ in range(REST_TICKS):
            before = len(self.world.said), len(self.world.operator.calls)
            self._decide_as_people()
            await self.tick(TICK_SECONDS if quiet < 2 else SLOW_TICK_SECONDS)
            is_quiet = before == (len(self.world.said), len(self.world.operator.calls))
            is_between = any(node.state in in_between for node in self.world.nodes().values())
            quiet = quiet + 1 if is_quiet and not is_between else 0
            if quiet >= 5:
                break
        else:
            acts = self.world.said[-6:], self.world.operator.calls[-6:]
            raise Failed(f"no rest {REST_TICKS} ticks after the last recovery: {acts}")
        live = {job.run_id for job in self.jobs() if job.state not in ENDED_JOBS}
        stray = {
            agent.node_id for agent in self.world.agents.values() if agent.run is not None and agent.run not in live
        }
        if stray:
            raise Failed(f"jobs that have ended still have the nodes {stray}")

    async def play(self) -> None:
        """Play the acts of the story, and let the world come to rest. Raises Failed."""
        await self.settle()
        self.world.wish(max_replacements_per_hour=self.story.replacements_per_hour)
        for act in self.story.acts:
            (KINDS | LIES)[act.kind][1](self, act)
            await self.wait(act.wait)
        await self.settle()
        await self.come_to_rest()


def tell(story: Story, course: Callable[[Simulation], Coroutine[Any, Any, None]]) -> None:
    """Run a course of events in the new world of a story, with all checks. Raises Failed."""

    async def run(directory: Path) -> None:
        asyncio.get_running_loop().set_default_executor(InTurn())
        simulation = Simulation(directory, story)
        logger = logging.getLogger("control_plane")
        logger.addHandler(simulation.errors)
        try:
            with simulation.checks.watching():
                await course(simulation)
        finally:
            logger.removeHandler(simulation.errors)
            simulation.world.close()

    with tempfile.TemporaryDirectory(prefix="everstep-sim-", dir="/dev/shm") as directory:
        asyncio.run(run(Path(directory)))


def play(story: Story) -> None:
    """Play a story in a new world. Raises Failed."""
    tell(story, Simulation.play)


def story_of(seed: int, *, with_lies: bool = True) -> Story:
    """Draw the story of a seed. Every fourth one has a lie."""
    kinds = {name: weight for name, (weight, _) in KINDS.items()}
    story = drawn(seed, kinds)
    if not with_lies or seed % 4:
        return story
    lie = drawn(seed, {name: weight for name, (weight, _) in LIES.items()}, count=1).acts
    return replace(story, acts=(*story.acts[:6], *lie, *story.acts[6:]))


def shrunk(story: Story, fails: Callable[[Story], bool], *, limit: int = 200) -> Story:
    """Return a story with fewer acts, jobs and waits that still fails."""
    tries = 0

    def attempt(other: Story) -> bool:
        nonlocal tries
        tries += 1
        return tries <= limit and fails(other)

    size = max(1, len(story.acts) // 2)
    while size:
        begin = 0
        while begin < len(story.acts):
            fewer = replace(story, acts=(*story.acts[:begin], *story.acts[begin + size :]))
            if attempt(fewer):
                story = fewer
            else:
                begin += size
        size //= 2
    for change in ({"jobs": story.jobs[:1]}, {"spares": 0}, {"domains": 0}, {"steps_per_tick": 1}):
        other = replace(story, **change)
        if other != story and attempt(other):
            story = other
    for number, act in enumerate(story.acts):
        for wait in (0, 1):
            shorter = replace(story, acts=(*story.acts[:number], replace(act, wait=wait), *story.acts[number + 1 :]))
            if wait < act.wait and attempt(shorter):
                story = shorter
                break
    return story
