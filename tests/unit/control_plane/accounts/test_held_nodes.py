"""Tests the advice for held nodes."""

from __future__ import annotations

import pytest

from control_plane.accounts.held_nodes import HoldDecision, advice
from control_plane.core.observed.causes import GivenUp, KeptForInspection
from control_plane.core.observed.facts import Faulty, NodeFaulty, Recorded
from control_plane.core.observed.fleets import Hold
from control_plane.core.observed.nodes import Remedy
from everstep.protocol.ids import NodeId


@pytest.mark.parametrize(
    ("hold", "reason", "decision", "fault"),
    [
        (Hold.INSPECTION, "the agent of i-1 reports gpu_xid: GPU 3: Xid 79, the GPU fell off", "Terminate", "Xid 79"),
        (Hold.DISTRUSTED, "gpu_xid: NVRM: Xid (PCI:0000:53:00): 95, contained", "Terminate", "Xid 95"),
        (Hold.PERSON, "gpu_lost: GPU 2 is missing", "Terminate", "the loss of a GPU"),
        (Hold.INSPECTION, "disk_read_only: /", "Terminate", "a read-only disk"),
        (Hold.INSPECTION, "gpu_xid: GPU 3: Xid 94", "Inspect", "because it failed"),
        (Hold.INSPECTION, "rank 3 ended", "Inspect", "because it failed"),
        (Hold.INSPECTION, "disk_full: /", "Inspect", "because it failed"),
        (Hold.DISTRUSTED, "three incidents within a day", "Inspect", "because its reports are suspicious"),
        (Hold.PERSON, "ann: looks at the network", "Release", "A person keeps it out of use."),
    ],
)
def test_the_hold_and_the_reported_fault_determine_the_advice(
    hold: Hold, reason: str, decision: str, fault: str
) -> None:
    found = advice("i-1", hold, Recorded(text=reason))
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


@pytest.mark.parametrize("reason", ["gpu_xid: Xid 79", "rank 3 ended"])
def test_the_advice_says_what_a_node_costs_until_a_person_decides(reason: str) -> None:
    priced, free = (advice("i-1", Hold.INSPECTION, Recorded(text=reason), price) for price in (55.04, None))
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
