"""A large control plane with a week of history: 500 jobs, one of them on 256 nodes.

The rows are written directly into the database, because a simulation would take hours. The history serves tests of
large pages, which need no real decisions.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import msgspec
from sqlalchemy import insert, update

from control_plane.core.observed.causes import NOTHING
from control_plane.core.observed.facts import Recorded
from control_plane.core.observed.incidents import RestartsRanks
from control_plane.core.states import JobState, NodeState
from control_plane.db.jobs import JobTransition
from control_plane.db.models import EventRow, GenerationRow, IncidentRow, JobRow, NodeRow, ReplicaRow, ShardRow
from everstep.protocol.codec import encode
from everstep.protocol.ids import Generation as Number
from everstep.protocol.ids import JobName, NodeId, Rank, RunId
from everstep.protocol.plan import PlanNode, RankPlan
from tests.dashboard.service import Living
from tests.sim.world import FLEET, World
from tests.unit.control_plane.db.test_jobs import plan

JOBS, NODES, EVENTS, INCIDENTS = 500, 256, 20_000, 300
WIDE: Final = "wide"
STEP, TARGET = 48_210, 100_000
_ENDED = (JobState.COMPLETED, JobState.COMPLETED, JobState.COMPLETED, JobState.FAILED, JobState.STOPPED)
_TYPES = ("JobStateChanged", "NodeExcluded", "CheckpointCompleted", "NodesToBeLeft", "GenerationEnded")


class Many:
    """Writes the rows of a week of history into the database of a simulated fleet.

    Args:
        world: a simulated fleet without jobs.
        seed: determines names and numbers.
    """

    def __init__(self, world: World, seed: int = 11) -> None:
        self.world = world
        self.random = random.Random(seed)
        self.nodes = [f"i-{self.random.getrandbits(68):017x}" for _ in range(NODES)]
        self.spare = self.nodes[0]
        """A node that the large job used at first and then released, without an incident."""

    def write(self) -> None:
        """Write all rows in a few transactions."""
        self._jobs()
        self._wide()
        self._events()
        self._incidents()

    def _add(self, table: Any, rows: list[dict[str, Any]]) -> None:
        with self.world.database.write() as session:
            session.execute(insert(table), rows)

    def _jobs(self) -> None:
        self.world.submit(WIDE, nodes=NODES)
        for number in range(JOBS - 1):
            self.world.submit(f"run-{number:03d}", nodes=1 + number % 8, priority=-1)
        with self.world.database.write() as session:
            for number in range(JOBS - 1):
                if number % 10 == 9:
                    continue  # every tenth job stays in the queue
                created = self.world.now - timedelta(minutes=20 * number + 30)
                times = {
                    "created_at": created,
                    "started_at": created + timedelta(minutes=1),
                    "ended_at": created + timedelta(minutes=19),
                }
                values = {
                    **times,
                    "state": _ENDED[number % len(_ENDED)].value,
                    "boundary": number,
                    "target_step": 500,
                    "reason": f"It made {number} steps.",
                }
                session.execute(update(JobRow).where(JobRow.name == f"run-{number:03d}").values(**values))

    def _wide(self) -> None:
        run, now = self.world.job(WIDE).run_id, self.world.now
        begun = now - timedelta(days=7)
        self._add(NodeRow, [self._node(number, node_id, run) for number, node_id in enumerate(self.nodes)])
        for number, ids in ((1, self.nodes), (2, [*self.nodes[1:], self.nodes[0]][:-1])):
            ranks = tuple(
                RankPlan(rank=Rank(rank), holders=(NodeId(node), NodeId(ids[(rank + 1) % len(ids)])))
                for rank, node in enumerate(ids)
            )
            members = tuple(
                PlanNode(node_id=NodeId(node), address="127.0.0.2", peer_port=1, ranks=(Rank(rank),))
                for rank, node in enumerate(ids)
            )
            changes = {
                "job": JobName(WIDE),
                "run": RunId(run),
                "nodes": members,
                "ranks": ranks,
                "coordinator": members[0].node_id,
            }
            made = msgspec.structs.replace(plan(number), generation=Number(number), **changes)
            at = begun + timedelta(days=number - 1)
            row = {
                "run_id": run,
                "number": number,
                "revision": 1,
                "parent": number - 1,
                "base_step": 0,
                "world_size": len(ranks),
                "plan": encode(made),
                "node_ids": tuple(ids),
            }
            self._add(GenerationRow, [{**row, "created_at": at, "started_at": at}])
        rest = self.nodes[1:]
        at = now.timestamp()
        self._add(
            ShardRow, [self._shard(rank, node, rest[(rank + 1) % len(rest)], run, at) for rank, node in enumerate(rest)]
        )
        self._add(
            ReplicaRow, [self._replica(rank, place, rest, run) for rank in range(len(rest)) for place in range(2)]
        )
        with self.world.database.write() as session:
            story = [
                JobTransition(JobState.QUEUED.value, "", begun),
                JobTransition(JobState.RUNNING.value, "trains", begun),
            ]
            values = {
                "transitions": [msgspec.to_builtins(each) for each in story],
                "state": JobState.RUNNING.value,
                "reason": "trains",
                "created_at": begun,
                "started_at": begun,
                "generation": 2,
                "boundary": STEP,
                "max_boundary": STEP,
                "target_step": TARGET,
                "committed_step": STEP - 1,
                "proposed_step": STEP,
                "committed_at": now,
                "accounting": {"train": 7 * 86_400 * 1_000_000},
                "accounted_until": now,
                "spec": msgspec.to_builtins(replace(self.world.job(WIDE).spec, node_count=len(rest))),
            }
            session.execute(update(JobRow).where(JobRow.name == WIDE).values(**values))

    def _node(self, number: int, node_id: str, run: str) -> dict[str, Any]:
        texts = dict.fromkeys(("address", "agent_id", "version", "release"), "")
        belongs = (
            {"state": NodeState.SPARE.value, "run_id": None}
            if node_id == self.spare
            else {"state": NodeState.ASSIGNED.value, "run_id": run}
        )
        domain = {"instance_type": "p5", "availability_zone": "us-east-1a", "failure_domain": f"nn-{number // 16:02d}"}
        return {
            **texts,
            "reason": NOTHING,
            **belongs,
            **domain,
            "id": node_id,
            "fleet_name": FLEET,
            "created_at": self.world.now - timedelta(days=8),
        }

    def _shard(self, rank: int, node: str, holder: str, run: str, at: float) -> dict[str, Any]:
        lag = self.random.randrange(1, 4)
        verified = [{"node_id": node, "step": STEP, "at": at}, {"node_id": holder, "step": STEP - lag, "at": at - lag}]
        row = {
            "run_id": run,
            "rank": rank,
            "generation": 2,
            "owner_node_id": node,
            "committed_step": STEP - 3,
            "payload_bytes": 1 << 30,
            "reason": "",
        }
        return {**row, "verified": verified, "updated_at": self.world.now}

    def _replica(self, rank: int, place: int, rest: list[str], run: str) -> dict[str, Any]:
        holder = rest[(rank + place) % len(rest)]
        is_in_view = not (place == 1 and rank == 100)
        return {
            "run_id": run,
            "rank": rank,
            "holder_node_id": holder,
            "position": place,
            "is_in_view": is_in_view,
            "changed_at": self.world.now,
        }

    def _events(self) -> None:
        week = timedelta(days=7)
        rows = [
            {
                "at": self.world.now - week + week * number / EVENTS,
                "type": _TYPES[number % len(_TYPES)],
                "message": f"number {number} of a week",
                "project": "",
                "fleet_name": FLEET,
                "job_name": WIDE,
                "node_id": self.nodes[number % NODES],
                "detail": {},
            }
            for number in range(EVENTS)
        ]
        self._add(EventRow, rows)

    def _incidents(self) -> None:
        run = self.world.job(WIDE).run_id
        self._add(IncidentRow, [self._incident(number, run) for number in range(INCIDENTS)])

    def _incident(self, number: int, run: str) -> dict[str, Any]:
        at = self.world.now - timedelta(minutes=30 * (INCIDENTS - number))
        phases = {
            f"{phase}_seconds": self.random.uniform(0.5, 9) for phase in ("detect", "replace", "restore", "rework")
        }
        return {
            **phases,
            "id": f"{run}-g{number:03d}",
            "run_id": run,
            "job_name": WIDE,
            "project": "",
            "phase": "closed",
            "cause": "instance_terminated" if number % 3 else "rank_exit",
            "evidence": (Recorded(text=f"EC2 says terminated, number {number}"),),
            "decision": RestartsRanks(),
            "restore_source": "peer",
            "from_step": 100 * number,
            "reached_step": 100 * number + 2,
            "lost_steps": 2,
            "generation_before": 1,
            "generation_after": 2,
            "instance_ids": (self.nodes[number % NODES],),
            "faulted_instance_ids": (self.nodes[number % NODES],),
            "replacement_instance_ids": (),
            "failed_at": at,
            "opened_at": at,
            "closed_at": at + timedelta(seconds=30),
            "detail": {},
            "acknowledged_by": "",
            "acknowledgement": "",
        }


@contextmanager
def served(directory: Path) -> Iterator[tuple[Living, Many]]:
    """Start a server over a week of history. `Many` writes the history into the server's database."""
    with Living(directory, World(directory, nodes=NODES, max_size=NODES + 8)) as made:
        many = Many(made.world)
        many.write()
        made.serve()
        yield made, many
