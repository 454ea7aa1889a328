"""A simulated fleet with five incidents and a queue. The real loops of the control plane handle each incident.

This module writes no incident, event or message itself. It makes agents misbehave, AWS run out of capacity, and the
control plane pause. The real loops then store the rows that the pages show. Names and numbers depend on a seed, so that
tests must read them from the API.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from control_plane.core.observed.steps import NO_GENERATION
from control_plane.core.states import JobState, NodeState
from control_plane.loop.metric_writer import MetricWriter
from everstep.protocol.agent_messages import ExitClass, MemberPhase, MetricBatch, MetricPoint, NodeFault, RankValues
from everstep.protocol.ids import Generation, Rank, RunId, Step
from everstep.protocol.rank_messages import OWN_METRICS
from tests.dashboard.printed import print_run
from tests.sim.world import Agent, World

FINE_SECONDS = 0.5
MOST_SECONDS = 6.0
COARSE_SECONDS = 20.0
MAX_SIZE = 18
"""Maximum size of the Auto Scaling group. One job waits in the queue because it needs more nodes than this."""
_NAMES = ("atlas", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "islet", "juniper", "krill", "larch")
_TRACEBACK = """Traceback (most recent call last):
  File "/job/source/train.py", line {line}, in <module>
    main()
  File "/job/source/train.py", line {inner}, in main
    batch = next(batches)[{key!r}]
KeyError: {key!r}"""


@dataclass
class Job:
    """A job of the simulated fleet, and the duration of its steps."""

    name: str
    step_seconds: float
    owed_seconds: float = 0.0

    @property
    def target(self) -> int:
        """Number of steps that the script reports as its goal: two days of training."""
        return 100 * round(2 * 864 / self.step_seconds)


def _measured(job: Job, step: int, place: int) -> dict[str, float]:
    """Return an agent's measurements. They vary over time, and each node's curve lags by a different delay.

    The third node has an idle GPU.
    """
    wave = 1 + 0.08 * math.sin(step / 7 + place / 3)
    return {
        f"{OWN_METRICS}step_seconds": job.step_seconds * wave,
        f"{OWN_METRICS}snapshot_blocked_seconds": 0.004 * job.step_seconds * wave,
        f"{OWN_METRICS}replicate_seconds": 0.6 * job.step_seconds * wave,
        f"{OWN_METRICS}replica_bytes_per_second": 2.1e9 / job.step_seconds * wave,
        f"{OWN_METRICS}network_bytes_per_second": 9.4e9 / job.step_seconds * wave,
        f"{OWN_METRICS}gpu_percent": min(100.0, 94 * wave),
        f"{OWN_METRICS}gpu_least_percent": (31 if place == 2 else 88) * wave,
    }


def _loss(step: int) -> float:
    return 1.7 + 6.5 * math.exp(-step / 180)


class Story:
    """Runs one morning with five incidents in a simulated fleet.

    Args:
        directory: folder for the database.
        seed: determines names, sizes and numbers.
    """

    def __init__(self, directory: Path, seed: int = 7) -> None:
        self.random = random.Random(seed)
        names = self.random.sample(_NAMES, 8)
        self.world = World(directory, nodes=4, spares=2, boot_seconds=self.random.uniform(40, 70), max_size=MAX_SIZE)
        self.world.wish(
            price_usd_per_hour=round(self.random.uniform(20, 99), 2), hold_failed_instances=True, allow_drills=True
        )
        self.gpu, self.shortage, self.partition, self.crashing, self.frozen, self.finished, self.waiting, self.calm = (
            f"{name}-{self.random.choice(('7b', '13b', '70b', 'moe'))}" for name in names
        )
        self.jobs: dict[str, Job] = {}
        self.logged_counts: Counter[int] = Counter()
        """Number of logged metric values so far, by agent."""
        self._last_words: dict[int, str] = {}
        """Last printed lines of the failing script, by launch."""

    async def tell(self) -> None:
        """Cause all incidents, one after another. At the end, only the incident of the capacity shortage is open."""
        await self._begin()
        await self._bad_gpu()
        await self._partition()
        await self._crash_loop()
        await self._frozen_control_plane()
        await self._queue()
        await self._shortage()

    async def go(self, seconds: float, tick: float = COARSE_SECONDS) -> None:
        """Advance the time while all running jobs train."""
        for _ in range(max(1, math.ceil(seconds / tick))):
            for job in self.jobs.values():
                self._train(job, tick)
            await self.world.tick(tick)
            await MetricWriter(self.world.database, self.world.registry, lambda: self.world.now).flush()

    async def _until(self, name: str, what: Callable[[], bool], ticks: int = 1500) -> None:
        """Advance the time until `what` returns True.

        Ticks are short after a change, and grow while nothing changes, for example during a boot.
        """
        seen, tick = None, FINE_SECONDS
        for _ in range(ticks):
            if what():
                return
            record = self.world.job(name)
            now = record.state, record.reason, len(self.world.agents)
            tick = min(MOST_SECONDS, tick * 1.5) if now == seen else FINE_SECONDS
            seen = now
            await self.go(tick, tick)
        raise AssertionError(f"{name} is {self.world.job(name).state}: {self.world.job(name).reason}")

    async def settle(self, name: str) -> None:
        """Advance the time until a job trains and none of its incidents is open."""
        await self._until(
            name,
            lambda: (
                self.world.job(name).state == JobState.RUNNING
                and all(each.closed_at for each in self.world.incidents(name))
            ),
        )

    async def _runs(self, name: str) -> None:
        await self._until(name, lambda: self.world.job(name).state == JobState.RUNNING)

    async def _recovered(self, name: str) -> None:
        """Advance the time until the newest incident of a job is closed."""
        await self._until(name, lambda: bool(self.world.incidents(name)))
        await self._until(name, lambda: self.world.incidents(name)[-1].closed_at is not None)

    def _train(self, job: Job, seconds: float) -> None:
        started = [
            agent
            for agent in self.world.agents.values()
            if agent.job == job.name and agent.phase is MemberPhase.RUNNING and agent.boundary
        ]
        # Only the newest generation counts: a disconnected node may still run an older one.
        newest = max((agent.generation for agent in started), default=NO_GENERATION)
        team = [agent for agent in started if agent.generation == newest]
        plan = team[0].plan if team else None
        if plan is None or len(team) < len(plan.nodes) or any(agent.exits for agent in team):
            job.owed_seconds = 0.0
            return
        job.owed_seconds += seconds
        steps = int(job.owed_seconds / job.step_seconds)
        job.owed_seconds -= steps * job.step_seconds
        if not steps or any(not self.world.serves(agent.node_id) for agent in team):
            return
        for place, agent in enumerate(team):
            agent.target = job.target
            agent.measured = _measured(job, max(agent.boundary.values()) + steps, place)
            agent.logged = tuple(
                RankValues(rank=rank, values={"loss": _loss(agent.boundary[rank] + steps) + rank / 10})
                for rank in sorted(agent.boundary)
                if rank != 0
            )
            for rank in agent.boundary:
                agent.boundary[rank] += steps
                for holder in plan.ranks[rank].holders:
                    for step in range(max(1, agent.boundary[rank] - 1), agent.boundary[rank] + 1):
                        self.world.agents[holder].seal(rank, plan.generation, step)
        self._log(job, next(agent for agent in team if 0 in agent.boundary), plan.generation, steps)

    def _log(self, job: Job, first: Agent, generation: Generation, steps: int) -> None:
        """Log a falling loss and the step time for rank 0."""
        if first.connection is None:
            return
        reached = first.boundary[Rank(0)]
        points = tuple(
            MetricPoint(
                generation=generation,
                step=Step(step),
                at_seconds=self.world.now.timestamp(),
                values={
                    "loss": round(_loss(step) + self.random.gauss(0, 0.04), 4),
                    "step_seconds": round(job.step_seconds * (1 + abs(self.random.gauss(0, 0.03))), 3),
                }
                | (first.measured if step == reached else {}),
            )
            for step in range(reached - steps + 1, reached + 1)
        )
        batch = MetricBatch(
            run=RunId(self.world.job(job.name).run_id), first_number=self.logged_counts[first.number], points=points
        )
        self.logged_counts[first.number] += len(points)
        first.report(batch)

    def _submit(self, name: str, *, nodes: int, **changes: object) -> Job:
        step_seconds = self.random.uniform(3.0, 9.0)
        parameters = {
            "learning_rate": f"{self.random.uniform(1e-5, 6e-4):.2e}",
            "sequence_length": str(self.random.choice((2048, 4096, 8192))),
        }
        self.world.submit(
            name, nodes=nodes, ranks_per_node=2, hyperparameters=parameters, checkpoint_every_steps=100, **changes
        )
        self.jobs[name] = Job(name, step_seconds)
        return self.jobs[name]

    def _victim(self, name: str) -> Agent:
        return self.random.choice(self.world.team(name)[1:])

    async def _begin(self) -> None:
        self._submit(self.gpu, nodes=4)
        self._submit(self.finished, nodes=2)
        await self._runs(self.gpu)
        self.world.team(self.gpu)[0].exposure = "ranks run as the agent's user: a job's code can read the agent's files"
        self._submit(self.partition, nodes=3)
        self._submit(self.frozen, nodes=2)
        self._submit(self.shortage, nodes=3)
        await self._runs(self.shortage)
        await self.go(self.random.uniform(600, 900))
        for name in (self.gpu, self.partition, self.frozen, self.shortage):
            await self.world.upload(min(self.world.team(name)[0].boundary.values()), name, seconds=4.0)
        await self.go(self.random.uniform(200, 400))
        self.world.finish(self.finished)
        await self._until(self.finished, lambda: self.world.job(self.finished).state == JobState.COMPLETED)

    async def _bad_gpu(self) -> None:
        victim = self._victim(self.gpu)
        gpu = self.random.randrange(8)
        victim.node_faults = (
            NodeFault(
                code="gpu_xid",
                message=f"GPU {gpu}: Xid 79, the GPU has fallen off the bus",
                is_permanent=False,
                device=f"gpu {gpu}",
                xid=79,
            ),
        )
        self.world.kill_rank(
            victim, exit_class=ExitClass.ERROR, code=1, lines="RuntimeError: CUDA error: unspecified launch failure"
        )
        await self._recovered(self.gpu)
        await self.go(self.random.uniform(150, 300))

    async def _partition(self) -> None:
        victim = self._victim(self.partition)
        victim.is_deaf = True
        victim.disconnect()
        self.world.cut.add(victim.node_id)
        await self._recovered(self.partition)
        await self.go(self.random.uniform(150, 300))
        victim.is_deaf = False
        self.world.cut.discard(victim.node_id)
        await self.go(60, MOST_SECONDS)

    async def _crash_loop(self) -> None:
        self._submit(self.crashing, nodes=2)
        key = self.random.choice(("tokens", "labels", "mask"))
        lines = _TRACEBACK.format(line=self.random.randrange(90, 140), inner=self.random.randrange(30, 80), key=key)
        generation = 0
        while self.world.job(self.crashing).state != JobState.FAILED:
            await self._until(
                self.crashing, lambda: self.world.job(self.crashing).state in (JobState.RUNNING, JobState.FAILED)
            )
            record = self.world.job(self.crashing)
            if record.state == JobState.FAILED:
                break
            assert record.generation > generation, record
            generation = record.generation
            if generation == 1:
                await self.go(self.random.uniform(60, 120), FINE_SECONDS * 4)
            agent = self.world.team(self.crashing)[0]
            self._last_words[generation] = lines
            self.world.kill_rank(agent, exit_class=ExitClass.ERROR, code=1, lines=lines)
            await self.go(FINE_SECONDS, FINE_SECONDS)
        await self.go(120)

    async def _frozen_control_plane(self) -> None:
        """An instance is terminated while the control plane is down for minutes."""
        victim = self._victim(self.frozen)
        self.world.terminate(victim)
        asleep = timedelta(seconds=self.random.uniform(240, 420))
        self.world.now += asleep
        self.world.operator.advance(asleep)
        self.world.start_server()
        await self._recovered(self.frozen)
        await self.go(self.random.uniform(150, 300))

    async def _queue(self) -> None:
        self._submit(self.calm, nodes=2)
        await self._runs(self.calm)
        await self.go(300)
        self.queue(self.waiting)
        await self.go(60, MOST_SECONDS)

    async def _shortage(self) -> None:
        """The fleet loses more nodes than it has spares, while AWS has no capacity for new ones."""
        world = self.world
        world.wish(spare_count=0)
        await self.go(30, FINE_SECONDS * 2)
        world.operator.launch_retry = timedelta(minutes=4)
        team = world.team(self.shortage)
        free = [
            node_id
            for node_id, node in world.nodes().items()
            if node.state == NodeState.SPARE and node_id in world.agents
        ]
        world.operator.capacity = 0
        for node_id in free:
            world.operator.end_instance(node_id)
        world.terminate(team[-1])
        await self.go(self.random.uniform(60, 90), FINE_SECONDS * 4)

    def queue(self, name: str) -> None:
        """Submit a job of low priority that stays in the queue, because it needs more nodes than the fleet can have."""
        self._submit(name, nodes=9, priority=-1)

    def print_all(self) -> None:
        """Store the log lines that the ranks of all jobs have printed."""
        for name in self.jobs:
            print_run(self.world, name, self._last_words if name == self.crashing else {})
