"""Tests which requests of a person the service accepts for a node in each state, and why it rejects others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from control_plane.accounts.reasons import sentence
from control_plane.core import requests
from control_plane.core.observed.causes import Blind
from control_plane.core.observed.facts import NodeRequest
from control_plane.core.observed.fleets import Hold
from control_plane.core.requests import RequestContext
from control_plane.core.states import FleetStatus, NodeState

ASSIGNED = RequestContext(
    node_id="i-1",
    state=NodeState.ASSIGNED,
    hold=None,
    request=None,
    fleet_status=FleetStatus.ACTIVE,
    fleet_reasons=(Blind(),),
    spare_count=1,
    node_count=4,
    max_node_count=4,
    job_name="gpt",
)
DRAIN, REPLACE, REBOOT, HOLD = NodeRequest.DRAIN, NodeRequest.REPLACE, NodeRequest.REBOOT, NodeRequest.HOLD
MOVES = (DRAIN, REPLACE, REBOOT)


def refusal(asked: NodeRequest, context: RequestContext) -> str:
    found = requests.refusal(asked, context)
    return "" if found is None else sentence(found)


@pytest.mark.parametrize("asked", MOVES)
def test_a_node_that_works_is_left_where_another_one_can_come(asked: NodeRequest) -> None:
    assert refusal(asked, ASSIGNED) == ""
    assert refusal(asked, replace(ASSIGNED, spare_count=0, max_node_count=5)) == ""
    assert "no node can replace it" in refusal(asked, replace(ASSIGNED, spare_count=0))
    assert "ann has taken over" in refusal(asked, replace(ASSIGNED, taken_over_by="ann"))
    assert "is frozen: frozen: most of the fleet is silent" in refusal(
        asked, replace(ASSIGNED, fleet_status=FleetStatus.FROZEN)
    )
    assert "is being deleted" in refusal(asked, replace(ASSIGNED, fleet_status=FleetStatus.DELETING))


def test_a_node_that_works_is_not_just_held() -> None:
    assert "everstep nodes drain i-1" in refusal(HOLD, ASSIGNED)
    assert refusal(HOLD, replace(ASSIGNED, state=NodeState.SPARE)) == ""
    assert refusal(HOLD, replace(ASSIGNED, state=NodeState.SPARE, fleet_status=FleetStatus.FROZEN)) == ""


@pytest.mark.parametrize("state", [NodeState.GONE, NodeState.DRAINING, NodeState.JOINING, NodeState.REBOOTING])
@pytest.mark.parametrize("asked", NodeRequest)
def test_a_node_that_comes_or_goes_is_let_be(asked: NodeRequest, state: NodeState) -> None:
    assert bool(refusal(asked, replace(ASSIGNED, state=state))) is not (asked is REPLACE and state is NodeState.JOINING)


@pytest.mark.parametrize(("asked", "is_possible"), [(DRAIN, False), (REBOOT, False), (REPLACE, True), (HOLD, True)])
def test_a_held_node_is_ended_or_kept(asked: NodeRequest, is_possible: bool) -> None:
    assert (refusal(asked, replace(ASSIGNED, state=NodeState.HELD, hold=Hold.UNREACHABLE)) == "") is is_possible


def test_one_thing_at_a_time() -> None:
    disposition = replace(ASSIGNED, request=DRAIN)
    assert refusal(DRAIN, disposition) == ""
    assert "already has a pending request: drain; cancel it with everstep nodes release i-1" in refusal(
        REBOOT, disposition
    )
