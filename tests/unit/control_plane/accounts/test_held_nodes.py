"""Tests the advice for held nodes."""

from __future__ import annotations

import pytest

from control_plane.accounts.held_nodes import HoldDecision, advice
from control_plane.core.observed.causes import GivenUp, KeptForInspection, Reason
from control_plane.core.observed.facts import Faulty, NodeFaulty, Recorded
from control_plane.core.observed.fleets import Hold
from control_plane.core.observed.nodes import Remedy
from everstep.protocol.ids import NodeId


def faulty(code: str, xid: int | None = None) -> NodeFaulty:
    return NodeFaulty(node_id=NodeId("i-1"), fault=Faulty(code=code, text="words of the agent", xid=xid))


@pytest.mark.parametrize(
    ("hold", "reason", "decision", "fault"),
    [
        (Hold.INSPECTION, faulty("gpu_xid", 79), "Terminate", "Xid 79 (the GPU has fallen off the bus)"),
        (Hold.DISTRUSTED, faulty("gpu_xid", 95), "Terminate", "Xid 95"),
        (Hold.DISTRUSTED, faulty("gpu_xid", 46), "Terminate", "reported Xid 46."),
        (Hold.PERSON, faulty("gpu_lost"), "Terminate", "the loss of a GPU"),
        (Hold.INSPECTION, faulty("disk_read_only"), "Terminate", "a read-only disk"),
        (Hold.INSPECTION, faulty("gpu_xid", 94), "Inspect", "because it failed"),
        (Hold.INSPECTION, Recorded(text="gpu_xid: Xid 79"), "Inspect", "because it failed"),
        (Hold.INSPECTION, faulty("disk_full"), "Inspect", "because it failed"),
        (Hold.DISTRUSTED, Recorded(), "Inspect", "because its reports are suspicious"),
        (Hold.PERSON, Recorded(text="ann: looks at the network"), "Release", "A person keeps it out of use."),
    ],
)
def test_the_hold_and_the_reported_fault_determine_the_advice(
    hold: Hold, reason: Reason, decision: str, fault: str
) -> None:
    found = advice("i-1", hold, reason)
    assert found is not None
    assert found.decision == decision
    assert found.words.startswith(f"{decision} node i-1")
    assert fault in found.words
    terminate, release = "everstep nodes release i-1 --terminate", "everstep nodes release i-1"
    commands = {
        HoldDecision.TERMINATE: (terminate,),
        HoldDecision.RELEASE: (release,),
        HoldDecision.INSPECT: ("everstep nodes describe i-1", terminate, release),
    }
    assert (found.command, *found.further_commands) == commands[found.decision]


@pytest.mark.parametrize("reason", [faulty("gpu_xid", 79), Recorded(text="rank 3 ended")])
def test_the_advice_says_what_a_node_costs_until_a_person_decides(reason: Reason) -> None:
    priced, free = (advice("i-1", Hold.INSPECTION, reason, price) for price in (55.04, None))
    assert priced is not None
    assert free is not None
    assert priced.words == f"{free.words} It costs $55.04 per hour until you decide."


def test_an_unreachable_node_is_terminated_like_a_faulty_one() -> None:
    found = advice("i-1", Hold.UNREACHABLE, Recorded(text="silent"), 55.04)
    assert (found.decision, found.command) == (HoldDecision.TERMINATE, "everstep nodes release i-1 --terminate")
    assert found.words.endswith("If it answers, Everstep uses it again. It costs $55.04 per hour until you decide.")


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        (Faulty(code="gpu_xid", text="the GPU fell off", xid=79), "Xid 79"),
        (Faulty(code="gpu_lost", text="GPU 2 is missing"), "the loss of a GPU"),
        (Faulty(code="gpu_xid", text="Xid 79", xid=94), None),
    ],
)
def test_the_fault_behind_the_hold_is_found_without_its_sentence(fault: Faulty, named: str | None) -> None:
    reported = NodeFaulty(node_id=NodeId("i-1"), fault=fault)
    reason = KeptForInspection(because=GivenUp(job="gpt", remedy=Remedy.REPLACE, because=reported))
    found = advice("i-1", Hold.INSPECTION, reason)
    assert (found.decision is HoldDecision.TERMINATE) is (named is not None)
    assert named is None or named in found.words
