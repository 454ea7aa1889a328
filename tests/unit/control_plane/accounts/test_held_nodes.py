"""Tests the advice for held nodes."""

from __future__ import annotations

import pytest

from control_plane.accounts.held_nodes import HoldDecision, advice
from control_plane.core.observed.fleets import Hold


@pytest.mark.parametrize(
    ("hold", "reason", "decision", "fault"),
    [
        (Hold.INSPECTION, "the agent of i-1 reports gpu_xid: GPU 3: Xid 79, the GPU fell off", "Terminate", "Xid 79"),
        (Hold.DISTRUSTED, "gpu_xid: NVRM: Xid (PCI:0000:53:00): 95, contained", "Terminate", "Xid 95"),
        (Hold.PERSON, "gpu_lost: GPU 2 is missing", "Terminate", "gpu_lost"),
        (Hold.INSPECTION, "disk_read_only: /", "Terminate", "disk_read_only"),
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


@pytest.mark.parametrize("reason", ["gpu_xid: Xid 79", "rank 3 ended"])
def test_the_advice_says_what_a_node_costs_until_a_person_decides(reason: str) -> None:
    priced, free = advice("i-1", Hold.INSPECTION, reason, 55.04), advice("i-1", Hold.INSPECTION, reason)
    assert priced is not None
    assert free is not None
    assert priced.words == f"{free.words} It costs $55.04 per hour until then."
    assert free.words.endswith("The fleet keeps the node until you decide.")


def test_an_unreachable_node_is_terminated_like_a_faulty_one() -> None:
    found = advice("i-1", Hold.UNREACHABLE, "silent", 55.04)
    assert (found.decision, found.command) == (HoldDecision.TERMINATE, "everstep nodes release i-1 --terminate")
    assert found.words.endswith("If it answers, Everstep uses it again. It costs $55.04 per hour until then.")
