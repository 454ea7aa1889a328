"""A roll (replacement or reboot of all nodes) of a simulated fleet never breaks its limits, and it ends.

Random pauses, failures and obstacles disturb the roll.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from hypothesis import given
from hypothesis import strategies as st

from control_plane.core import rolls
from control_plane.core.observed.causes import NOTHING, FleetFrozen, Obstacle
from control_plane.core.observed.fleets import NodeRecord
from control_plane.core.observed.rolls import FleetRoll, RollProgress, RollStatus
from control_plane.core.states import NodeState
from everstep.protocol.ids import NodeId

WORKING = (NodeState.SPARE, NodeState.ASSIGNED)


@dataclass
class Simulation:
    """A fleet without jobs whose nodes are all replaced or rebooted (a roll).

    The test decides at random when nodes leave, end, arrive and reboot."""

    roll: FleetRoll
    rows: dict[NodeId, NodeRecord]
    progress: RollProgress | None = None
    begun: list[NodeId] = field(default_factory=list)
    arrival_count: int = 0
    now: float = 0.0

    @property
    def unavailable_count(self) -> int:
        available = sum(row.state in WORKING and row.request is None for row in self.rows.values())
        return len(self.roll.node_ids) - available

    def decide(
        self, obstacle: Obstacle | None, refusal: Callable[[NodeRecord], Obstacle | None] = lambda _: None
    ) -> rolls.RollStep:
        return rolls.decide(
            self.now,
            self.roll,
            self.progress,
            self.rows,
            unavailable_count=max(0, self.unavailable_count),
            obstacle=obstacle,
            refusal=refusal,
        )

    def make_pass(self, obstacle: Obstacle | None = None) -> None:
        """Decide once which nodes the roll replaces or reboots next. Check its limits, and store the decision."""
        self.now += 1
        unavailable = self.unavailable_count
        step = self.decide(obstacle)
        assert step == self.decide(obstacle)
        if step.begun:
            assert obstacle is None
            assert not self.roll.is_paused
            assert not self.roll.is_stopped
            assert len(step.begun) + max(0, unavailable) <= self.roll.max_unavailable
        assert not set(step.begun) & set(self.begun), "a node is begun once"
        assert set(step.begun) <= set(self.roll.node_ids)
        assert all(self.rows[node_id].state in WORKING for node_id in step.begun)
        self.begun += step.begun
        for node_id in step.begun:
            self.rows[node_id] = replace(self.rows[node_id], request=rolls.request_of(self.roll, node_id))
        for node_id in step.cancelled:
            self.rows[node_id] = replace(self.rows[node_id], request=None)
        before, self.progress = self.progress, step.progress
        assert before is None or set(before.finished) <= set(self.progress.finished), "finished nodes stay finished"
        again = self.decide(None)
        assert not set(again.begun) & set(self.begun)

    def advance(self, node_id: NodeId) -> None:
        """Move a node to its next state.

        The fleet begins its requested drain or reboot, the drained node ends, or the node becomes a spare.
        """
        row = self.rows[node_id]
        if row.state in WORKING and row.request is not None:
            state = NodeState.REBOOTING if self.roll.reboots else NodeState.DRAINING
            self.rows[node_id] = replace(row, state=state, request=None, reason=row.request)
        elif row.state in (NodeState.REBOOTING, NodeState.JOINING):
            self.rows[node_id] = replace(row, state=NodeState.SPARE)
        elif row.state is NodeState.DRAINING:
            self.fail(node_id)

    def fail(self, node_id: NodeId) -> None:
        """End a node's instance. Its group launches another one."""
        del self.rows[node_id]
        self.arrival_count += 1
        new = NodeId(f"new-{self.arrival_count}")
        self.rows[new] = NodeRecord(node_id=new, state=NodeState.JOINING, run=None, reason=NOTHING, created_at=self.now)


def row(number: int, state: NodeState) -> NodeRecord:
    return NodeRecord(node_id=NodeId(f"i-{number}"), state=state, run=None, reason=NOTHING, created_at=float(number))


fleets = st.lists(st.sampled_from([*WORKING, NodeState.JOINING, NodeState.REBOOTING]), min_size=1, max_size=6)
acts = st.lists(st.tuples(st.sampled_from(["pass", "advance", "fail", "hold", "pause", "block"]), st.integers(0, 99)))


@given(fleets, acts, st.integers(1, 3), st.booleans(), st.booleans())
def test_a_roll_keeps_its_limits_and_ends(
    states: list[NodeState], acts: list[tuple[str, int]], max_unavailable: int, reboots: bool, stops: bool
) -> None:
    rows = {each.node_id: each for each in (row(number, state) for number, state in enumerate(states))}
    roll = FleetRoll(
        roll_id="one",
        node_ids=tuple(rows),
        max_unavailable=max_unavailable,
        reboots=reboots,
        requested_by="ann",
        reason="",
        started_at=0.0,
    )
    world = Simulation(roll=roll, rows=rows)
    for act, draw in acts:
        node_id = list(world.rows)[draw % len(world.rows)]
        match act:
            case "pass" | "block":
                world.make_pass(FleetFrozen() if act == "block" else None)
            case "advance":
                world.advance(node_id)
            case "fail":
                world.fail(node_id)
            case "hold" if world.rows[node_id].state in WORKING:
                world.rows[node_id] = replace(world.rows[node_id], state=NodeState.HELD, request=None)
                world.arrival_count += 1
                new = row(1000 + world.arrival_count, NodeState.JOINING)
                world.rows[new.node_id] = new
            case "pause":
                world.roll = replace(world.roll, is_paused=not world.roll.is_paused)
            case _:
                pass
    world.roll = replace(world.roll, is_paused=False, is_stopped=stops)
    for _ in range(8 * len(states) + 8):
        world.make_pass()
        for node_id in list(world.rows):
            world.advance(node_id)
    assert world.progress is not None
    assert world.progress.ended_at is not None
    finished = set(world.progress.finished) == set(roll.node_ids)
    assert rolls.status(world.roll, world.progress) is (RollStatus.COMPLETED if finished else RollStatus.STOPPED)
    assert stops or finished
    untouched = {node_id for node_id in roll.node_ids if node_id in world.rows and node_id not in world.begun}
    assert stops or all(world.rows[node_id].state is NodeState.HELD for node_id in untouched)
