"""Random stories of a simulated fleet, with the real loops of the control plane.

A *story* is a random sequence of acts. Acts submit and train jobs, and make agents, nodes, AWS and the control plane
fail. In other acts, users pause, resume, stop and take over jobs, and start drills. After some acts, the story records
the answers of the API. Such a record is a *moment*.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from control_plane.api.errors import Forbidden, InUse
from control_plane.core.states import JobState
from control_plane.db import drills, jobs, metrics
from control_plane.db.drills import NewDrill
from control_plane.db.errors import Conflict
from everstep.protocol.agent_messages import (
    ExitClass,
    FaultCode,
    MemberPhase,
    MetricBatch,
    MetricPoint,
    NodeFault,
    NoticeKind,
)
from everstep.protocol.ids import Generation, RunId, Step
from everstep.protocol.rank_messages import OWN_METRICS
from tests.dashboard.answers import Answers, answers
from tests.dashboard.printed import print_run
from tests.sim.world import FLEET, Agent, World

MOMENTS: Final = 2
"""Number of times at which one random story records the answers of the API (moments)."""
ACTS: Final = 8
"""Number of random acts (failures, user requests) in one story."""
NAMES: Final = ("atlas", "birch", "cedar")
MOST_POINTS: Final = 200
"""Maximum number of steps whose metrics one call of `_log` stores."""
RUNS: Final = (JobState.RUNNING, JobState.PAUSING, JobState.STOPPING)
TRACEBACK: Final = "Traceback (most recent call last):\n  File \"train.py\", line 7, in <module>\nKeyError: 'tokens'"


@dataclass(frozen=True, kw_only=True)
class Moment:
    """The state of the fleet at one time in a random story, as the API describes it."""

    seed: int
    number: int
    """Number of this record in its story, from 0."""
    now: float
    """Server time in Unix seconds."""
    acts: list[str]
    """Acts (failures, user requests) of the story before this record, oldest first."""
    answers: Answers


class RandomStory:
    """Runs one random story (sequence of failures and user requests) in a simulated fleet.

    Args:
        directory: empty folder for the database.
        seed: equal seeds give equal stories.
    """

    def __init__(self, directory: Path, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.moments: list[Moment] = []
        self.acts: list[str] = []
        self.silenced: list[Agent] = []
        self.submitted: list[str] = []
        self.logged: dict[str, int] = {}
        """Number of steps whose metrics are stored, by run."""
        self.steps_per_tick = self.random.choice((1, 3, 40))
        most = self.random.choice((4, 6, 10))
        self.world = World(
            directory,
            nodes=self.random.randrange(2, 4),
            spares=self.random.randrange(0, 3),
            boot_seconds=self.random.choice((5, 20, 60)),
            max_size=most,
        )
        self.world.wish(
            price_usd_per_hour=self.random.choice((None, 12.5, 98.32)),
            hold_failed_instances=self.random.random() < 0.5,
            allow_drills=True,
        )

    async def tell(self) -> list[Moment]:
        """Run the story and return its records of the API's answers (moments). The last record is from the end."""
        recorded = {*self.random.sample(range(ACTS - 1), MOMENTS - 1), ACTS - 1}
        self._submit(NAMES[0])
        await self._run(self.random.choice((2, 16, 24)))
        for number in range(ACTS):
            act = self._choose()
            self.acts.append(act.__name__.strip("_"))
            act()
            await self._run(self.random.choice((0, 1, 2, 4, 10)))
            if number in recorded:
                self._record()
        self.world.close()
        return self.moments

    def _record(self) -> None:
        for name in self.submitted:
            print_run(self.world, name, {})
            self._log(self.world.job(name))
        moment = Moment(
            seed=self.seed,
            number=len(self.moments),
            now=self.world.now.timestamp(),
            acts=list(self.acts),
            answers=answers(self.world),
        )
        self.moments.append(moment)

    def _log(self, job: jobs.SavedJob) -> None:
        """Store the metrics of the steps (at most `MOST_POINTS`) that the job has completed since the last call."""
        first = self.logged.get(job.run_id, 0)
        numbers = range(max(first, job.boundary - MOST_POINTS), job.boundary)
        points = tuple(
            MetricPoint(
                generation=Generation(job.generation),
                step=Step(number + 1),
                values={"loss": 8 / (number + 2), f"{OWN_METRICS}step_seconds": 1.0 + number % 3},
                at_seconds=self.world.now.timestamp() - (job.boundary - number),
            )
            for number in numbers
        )
        if points:
            batch = MetricBatch(run=RunId(job.run_id), first_number=first, points=points)
            with self.world.database.write() as session:
                metrics.store(session, "agent", batch)
            self.logged[job.run_id] = first + len(points)

    def _choose(self) -> Callable[[], None]:
        return self.random.choices(
            (
                self._kill_rank, self._fail_script, self._terminate_node, self._silence_node, self._deafen_agent,
                self._hear_again, self._break_hardware, self._lose_capacity, self._regain_capacity,
                self._sleep_control_plane, self._restart_control_plane, self._pause, self._resume, self._stop,
                self._finish, self._drill, self._upload, self._fail_loads, self._load_again, self._submit_another,
                self._take_over, self._hand_back, self._announce, self._terminate_two, self._train_on,
            ),
            (6, 3, 6, 3, 3, 6, 3, 4, 4, 3, 1, 3, 4, 1, 1, 3, 8, 2, 3, 4, 1, 2, 2, 2, 4),
        )[0]  # fmt: skip

    async def _run(self, ticks: int) -> None:
        """Advance the time. Jobs whose nodes all work complete steps."""
        for _ in range(ticks):
            for job in self._jobs():
                self._advance(job)
            await self.world.tick(self.random.choice((0.5, 1.0, 3.0, 10.0)))

    def _jobs(self) -> list[jobs.SavedJob]:
        with self.world.database.read() as session:
            return list(jobs.unfinished(session, FLEET))

    def _advance(self, job: jobs.SavedJob) -> None:
        team = self._team(job)
        if not team or any(agent.exits for agent in team):
            return
        if any(agent.is_told_to_stop for agent in team):
            for agent in team:
                agent.exit_all(ExitClass.SUCCESS, 0)
            self._store(job, max(step for agent in team for step in agent.boundary.values()))
        elif all(self.world.serves(agent.node_id) for agent in team):
            self.world.complete_steps(self.random.randrange(self.steps_per_tick + 1), job.name)

    def _team(self, job: jobs.SavedJob) -> list[Agent]:
        """Return a job's agents if the ranks of all its nodes run the newest generation, otherwise no agents."""
        if job.generation == 0 or job.state not in RUNS:
            return []
        plan = self.world.plan(job.name)
        team = [
            agent
            for agent in self.world.team(job.name)
            if agent.plan is plan or (agent.plan == plan and agent.phase in (MemberPhase.RUNNING, MemberPhase.EXITED))
        ]
        return team if len(team) == len(plan.nodes) and all(agent.boundary for agent in team) else []

    def _store(self, job: jobs.SavedJob, step: int) -> None:
        """Make the agents of a job report that they have uploaded a step."""
        self.world.report_uploads(step, job.name)

    def _running(self) -> list[tuple[jobs.SavedJob, list[Agent]]]:
        return [(job, team) for job in self._jobs() if (team := self._team(job)) and not any(a.exits for a in team)]

    def _hit(self) -> tuple[jobs.SavedJob, Agent] | None:
        """Choose a random agent of a random job that trains. Return None if no job trains."""
        found = self._running()
        if not found:
            return None
        job, team = self.random.choice(found)
        return job, self.random.choice(team)

    def _submit(self, name: str) -> None:
        self.submitted.append(name)
        nodes = self.random.randrange(1, 5)
        changes: dict[str, Any] = {"checkpoint_every_steps": 50, "max_attempts": self.random.choice((1, 3, 10))}
        copies = min(nodes, self.random.choice((1, 2, 2, 2, 3)))
        if nodes >= 3 and self.random.random() < 0.2:
            copies, changes["parity_group_size"] = 1, self.random.choice((2, 3))
        elif nodes > 1 and self.random.random() < 0.3:
            changes |= {"min_node_count": self.random.randrange(1, nodes), "patience_seconds": 10}
        self.world.submit(
            name,
            nodes=nodes,
            copies=copies,
            ranks_per_node=self.random.choice((1, 1, 2)),
            priority=self.random.choice((0, 0, 5)),
            preemptible=self.random.random() < 0.5,
            **changes,
        )

    def _submit_another(self) -> None:
        with self.world.database.read() as session:
            free = [name for name in NAMES if not jobs.named(session, name, None)]
        if free:
            self._submit(free[0])

    def _train_on(self) -> None:
        for job, _ in self._running():
            self._advance(job)

    def _kill_rank(self) -> None:
        if hit := self._hit():
            self.world.kill_rank(hit[1])

    def _fail_script(self) -> None:
        if hit := self._hit():
            self.world.kill_rank(hit[1], exit_class=ExitClass.ERROR, code=1, lines=TRACEBACK)

    def _terminate_node(self) -> None:
        if hit := self._hit():
            self.world.terminate(hit[1])

    def _terminate_two(self) -> None:
        found = self._running()
        if found:
            _, team = self.random.choice(found)
            for agent in self.random.sample(team, min(2, len(team))):
                self.world.terminate(agent)

    def _silence_node(self) -> None:
        if hit := self._hit():
            self.world.silence(hit[1])
            self.silenced.append(hit[1])

    def _deafen_agent(self) -> None:
        if hit := self._hit():
            hit[1].is_deaf = True
            hit[1].disconnect()
            self.silenced.append(hit[1])

    def _hear_again(self) -> None:
        for agent in self.silenced:
            agent.is_deaf = False
            self.world.cut.discard(agent.node_id)
        self.silenced.clear()

    def _break_hardware(self) -> None:
        if hit := self._hit():
            fault = NodeFault(code="gpu_xid", message="GPU 3: Xid 79, off the bus", is_permanent=False, xid=79)
            hit[1].node_faults = (fault,)
            if self.random.random() < 0.5:
                self.world.kill_rank(hit[1], exit_class=ExitClass.ERROR, code=1, lines="CUDA error")

    def _lose_capacity(self) -> None:
        self.world.operator.capacity = len(self.world.agents)
        self.world.operator.launch_retry = timedelta(minutes=2)

    def _regain_capacity(self) -> None:
        self.world.operator.capacity = None
        self.world.operator.launch_retry = timedelta(0)

    def _sleep_control_plane(self) -> None:
        """Keep the control plane down for minutes, then start a new server without connected agents."""
        asleep = timedelta(seconds=self.random.uniform(20, 400))
        if (hit := self._hit()) and self.random.random() < 0.5:
            self.world.terminate(hit[1])
        self.world.now += asleep
        self.world.operator.advance(asleep)
        self.world.start_server()

    def _restart_control_plane(self) -> None:
        self.world.start_server()

    def _ask(self, request: Callable[[str], object]) -> None:
        """Send a user's request about a random job. The control plane may refuse the request."""
        found = self._jobs()
        if found:
            try:
                request(self.random.choice(found).run_id)
            except (Conflict, Forbidden, InUse):
                self.acts[-1] += " (refused)"

    def _pause(self) -> None:
        with self.world.database.write() as session:
            self._ask(lambda run: jobs.request_pause(session, run, self.world.now))

    def _resume(self) -> None:
        with self.world.database.write() as session:
            self._ask(lambda run: jobs.withdraw_pause(session, run, self.world.now))

    def _stop(self) -> None:
        with self.world.database.write() as session:
            self._ask(lambda run: jobs.request_stop(session, run, self.world.now))

    def _take_over(self) -> None:
        with self.world.database.write() as session:
            self._ask(lambda run: jobs.take_over(session, run, "ada", self.world.now))

    def _hand_back(self) -> None:
        with self.world.database.write() as session:
            for job in self._jobs():
                jobs.hand_back(session, job.run_id)

    def _finish(self) -> None:
        found = self._running()
        if found:
            job, team = self.random.choice(found)
            for agent in team:
                agent.exit_all(ExitClass.SUCCESS, 0)
            self._store(job, max(step for agent in team for step in agent.boundary.values()))

    def _drill(self) -> None:
        if not (hit := self._hit()):
            return
        job, agent = hit
        kind = self.random.choice(("kill-rank", "kill-agent", "terminate-instance"))
        new = NewDrill(
            run_id=job.run_id,
            job_name=job.name,
            fleet_name=FLEET,
            project="",
            kind=kind,
            node_id=agent.node_id,
            rank=min(agent.boundary) if kind == "kill-rank" else None,
            requested_by="ada",
            requested_at=self.world.now,
            state="requested",
        )
        with self.world.database.write() as session, suppress(Conflict):  # the job may have an open drill
            drills.create(session, new)

    def _upload(self) -> None:
        if hit := self._hit():
            job, _ = hit
            step = min(step for agent in self._team(job) for step in agent.boundary.values())
            if step > 0:
                self._store(job, step)

    def _fail_loads(self) -> None:
        for agent in self.random.sample(list(self.world.agents.values()), min(1, len(self.world.agents))):
            agent.fails_load, agent.load_fault = True, FaultCode.SOURCE_MISMATCH
        if hit := self._hit():
            self.world.kill_rank(hit[1])

    def _load_again(self) -> None:
        for agent in self.world.agents.values():
            agent.fails_load = False

    def _announce(self) -> None:
        if hit := self._hit():
            self.world.announce(hit[1], self.random.choice((NoticeKind.REBALANCE, NoticeKind.SPOT_INTERRUPTION)), 120.0)
