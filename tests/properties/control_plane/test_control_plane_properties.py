"""Whatever happens to a fleet and its jobs: generations grow, nobody has two jobs, plans are sound, and quiet brings training back.

The invariants are asserted inside the simulation, at every pass; here is what may happen, in any order.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane.core import placement
from control_plane.core.states import JobState
from everstep.protocol.ids import NodeId
from tests.properties.control_plane.simulated import fresh

EVENTS = st.one_of(
    st.tuples(st.just("train"), st.integers(0, 1), st.integers(1, 4)),
    st.tuples(st.just("upload"), st.integers(0, 1), st.just(0)),
    st.tuples(st.just("kill"), st.integers(0, 11), st.just(0)),
    st.tuples(st.just("terminate"), st.integers(0, 11), st.just(0)),
    st.tuples(st.just("cut"), st.integers(0, 11), st.just(0)),
    st.tuples(st.just("mend"), st.integers(0, 11), st.just(0)),
    st.tuples(st.just("forget"), st.integers(0, 11), st.just(0)),
    st.tuples(st.just("load fails"), st.integers(0, 11), st.booleans()),
    st.tuples(st.just("lose messages"), st.integers(1, 6), st.just(0)),
    st.tuples(st.just("wait"), st.sampled_from([1, 2, 7, 40, 130]), st.just(0)),
    st.tuples(st.just("clock"), st.integers(-30, 600), st.just(0)),
)


@settings(max_examples=60)
@given(st.lists(EVENTS, max_size=25))
def test_whatever_happens(story: list[tuple[str, int, int]]) -> None:
    simulation = fresh()
    for kind, which, extra in story:
        names = sorted(simulation.agents)
        agent = simulation.agents[names[which % len(names)]] if names else None
        job = simulation.jobs[which % 2]
        match kind:
            case "train":
                simulation.train(job, extra)
            case "upload":
                simulation.upload(job)
            case "lose messages":
                simulation.losses = which
            case "clock":
                simulation.seconds += which
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
                simulation.cut.discard(agent.node_id)
            case "forget":
                simulation.forget(agent)
            case "load fails":
                agent.fails_load = bool(extra)
        simulation.step()
        simulation.check()
    simulation.settle()


@settings(max_examples=30)
@given(st.integers(1, 20), st.data())
def test_one_lost_node_costs_no_committed_step(steps: int, data: st.DataObject) -> None:
    simulation = fresh()
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
