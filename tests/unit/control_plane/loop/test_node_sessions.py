"""A node's session is invalid once the node has ended or its fleet is deleted."""

from __future__ import annotations

import pytest

from control_plane.core.states import NodeState
from control_plane.db import fleets, tokens
from control_plane.db.tokens import NewToken, Role, TokenKind
from everstep.protocol.ids import NodeId
from tests.sim.world import World

pytestmark = pytest.mark.security


def open_session(world: World, node_id: NodeId) -> str:
    with world.database.write() as session:
        new = NewToken(kind=TokenKind.SESSION, role=Role.AGENT, fleet_name="main", node_id=node_id)
        return tokens.mint(session, new, world.now)[0]


def good(world: World, sessions: dict[NodeId, str]) -> set[NodeId]:
    with world.database.read() as session:
        return {node_id for node_id, secret in sessions.items() if tokens.find(session, secret, world.now) is not None}


async def test_a_node_that_is_gone_loses_its_session_and_the_others_keep_theirs(world: World) -> None:
    world.submit()
    await world.running()
    await world.train(2)
    sessions = {node_id: open_session(world, node_id) for node_id in world.nodes()}
    lost = world.team()[1]
    world.terminate(lost)
    await world.until(lambda: world.nodes()[lost.node_id].state == NodeState.GONE)
    assert good(world, sessions) == sessions.keys() - {lost.node_id}


async def test_no_session_outlives_the_fleet_of_its_node(world: World) -> None:
    await world.until(lambda: len(world.nodes()) > 1)
    sessions = {node_id: open_session(world, node_id) for node_id in world.nodes()}
    with world.database.write() as session:
        fleets.request_delete(session, "main", world.now)

    def is_removed() -> bool:
        with world.database.read() as session:
            return not fleets.every(session)

    await world.until(is_removed)
    assert good(world, sessions) == set()
