"""Tests LaunchInstances in the loops: one instance per decision, and SetDesiredCapacity where AWS refuses the call."""

from __future__ import annotations

import pytest

from control_plane.cloud.errors import AccessDenied, CloudError, CloudUnavailable, InvalidRequest
from control_plane.cloud.operator import Launched
from control_plane.core.states import NodeState
from control_plane.db import intents
from control_plane.db.models import IntentRow
from tests.sim.world import GROUP, World


def are_spares(world: World, count: int) -> bool:
    nodes = [node for node in world.nodes().values() if node.state != NodeState.GONE]
    return len(nodes) == len(world.agents) == count and all(node.state == NodeState.SPARE for node in nodes)


def calls_of(world: World, name: str) -> list[tuple[object, ...]]:
    return [call for call in world.operator.calls if call[0] == name]


def stored_launches(world: World) -> list[tuple[str, str]]:
    with world.database.read() as session:
        rows = session.query(IntentRow).filter(IntentRow.action == "LaunchInstances").order_by(IntentRow.created_at)
        return [(row.state, row.outcome) for row in rows]


@pytest.mark.parametrize("reaches_aws", [False, True], ids=["before the call", "after the call"])
async def test_a_server_that_ends_around_a_launch_leaves_one_instance_per_decision(
    world: World, monkeypatch: pytest.MonkeyPatch, reaches_aws: bool
) -> None:
    await world.until(lambda: are_spares(world, 5))
    made, tokens = world.operator.launch_instances, list[str]()

    def die(name: str, count: int, *, zone: str, token: str) -> Launched:
        tokens.append(token)
        if reaches_aws:
            made(name, count, zone=zone, token=token)
        raise CloudUnavailable("the server ended, and stored no outcome")

    monkeypatch.setattr(world.operator, "launch_instances", die)
    world.terminate(world.spare())
    await world.until(lambda: bool(tokens))

    def record(name: str, count: int, *, zone: str, token: str) -> Launched:
        tokens.append(token)
        return made(name, count, zone=zone, token=token)

    monkeypatch.setattr(world.operator, "launch_instances", record)
    before = len(calls_of(world, "launch_instances"))
    world.start_server()
    await world.until(lambda: are_spares(world, 5))
    assert len(set(tokens)) == 1, "the new server repeats the token of the stored call"
    assert len(calls_of(world, "launch_instances")) == before + (not reaches_aws)
    assert world.operator.describe_group(GROUP).desired_count == 5
    assert calls_of(world, "set_desired") == []


@pytest.mark.parametrize(
    "refusal",
    [InvalidRequest("…", code="UnsupportedOperation"), InvalidRequest("…", code="ValidationError"), AccessDenied("…")],
    ids=lambda refusal: refusal.code or type(refusal).__name__,
)
async def test_where_aws_refuses_the_call_the_capacity_is_set_and_the_refusal_is_stored(
    world: World, refusal: CloudError
) -> None:
    world.operator.launch_refusal = refusal
    await world.until(lambda: are_spares(world, 5))
    assert calls_of(world, "set_desired") == [("set_desired", GROUP, 5)]
    lost = world.spare()
    world.terminate(lost)
    await world.until(lambda: are_spares(world, 5) and lost.node_id not in world.agents)
    assert calls_of(world, "terminate_member") == [("terminate_member", lost.node_id, False)]
    world.start_server()  # The refusal is stored.
    world.wish(spare_count=2)
    await world.until(lambda: are_spares(world, 6))
    assert [state for state, _ in stored_launches(world)] == [intents.IntentState.FAILED]
    assert calls_of(world, "launch_instances") == []
    world.operator.launch_refusal = None
    await world.tick(3600)
    await world.until(lambda: are_spares(world, 6))
    world.wish(spare_count=3)
    await world.until(lambda: are_spares(world, 7))
    assert calls_of(world, "launch_instances") == [("launch_instances", GROUP, 1)]


async def test_the_instances_and_the_error_codes_of_a_launch_are_stored(world: World) -> None:
    world.operator.capacity = 3
    await world.until(lambda: are_spares(world, 3))
    ((state, outcome),) = stored_launches(world)
    assert state == intents.IntentState.DONE
    assert outcome.split(", ") == [*sorted(world.agents), "InsufficientInstanceCapacity"]
    view = world.runner.cloud.group(next(iter(world.groups)))
    assert view is not None
    assert (view.group.is_short, view.group.desired_count) == (True, 5)
