"""Tests what Everstep does with a node after each kind of fault."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from control_plane.core import remedies
from control_plane.core.observed.facts import Recorded
from control_plane.core.observed.nodes import Implication, Remedy
from everstep.protocol.agent_messages import NodeFault
from everstep.protocol.ids import NodeId

NOW = 1_000_000.0


def fault(code: str, number: int | None = None, message: str = "words") -> NodeFault:
    return NodeFault(code=code, message=message, is_permanent=False, xid=number)


def line(
    what: str, *, ago: float = 60.0, incident: str = "inc-1", is_own_word: bool = True, remedy: Remedy = Remedy.REBOOT
) -> Implication:
    return Implication(
        node_id=NodeId("i-1"),
        incident_id=incident,
        at=NOW - ago,
        what=what,
        evidence=Recorded(text="words"),
        is_own_word=is_own_word,
        remedy=remedy,
    )


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        *((number, Remedy.RESTART) for number in (13, 31, 45, 69, 94)),
        *((number, Remedy.NONE) for number in (43, 63, 92)),
        *((number, Remedy.REBOOT) for number in (46, 48, 62, 64, 74, 95, 109, 119, 120, 140, 143)),
        *((number, Remedy.REPLACE) for number in (54, 79)),
        (154, Remedy.RESTART),
        (9999, Remedy.RESTART),
    ],
)
def test_xids_are_answered_as_nvidias_catalog_says(number: int, expected: Remedy) -> None:
    assert remedies.of_fault(fault("gpu_xid", number), (), NOW) is expected


def test_no_xid_is_read_from_the_words_of_an_agent() -> None:
    assert remedies.of_fault(fault("gpu_xid", message="NVRM: Xid (PCI:0000:3b:00): 79"), (), NOW) is Remedy.RESTART


def test_a_code_that_nobody_knows_ends_nothing() -> None:
    assert remedies.worst([fault("something_new"), fault("memory_low"), fault("gpu_xid", 31)], (), NOW) is None


def test_the_gravest_fault_decides() -> None:
    found = remedies.worst([fault("gpu_xid", 95), fault("gpu_lost"), fault("gpu_xid", 79)], (), NOW)
    assert found is not None
    assert (found.what, found.remedy) == ("gpu_lost", Remedy.REPLACE)


def test_a_reboot_is_tried_once_for_the_same_fault() -> None:
    rebooted = (line("gpu_xid 95"),)
    again = remedies.worst([fault("gpu_xid", 95)], rebooted, NOW)
    assert again is not None
    assert again.remedy is Remedy.REPLACE
    assert again.fault.is_repeated
    other = remedies.worst([fault("gpu_xid", 119)], rebooted, NOW)
    assert other is not None
    assert other.remedy is Remedy.REBOOT
    long_ago = remedies.worst([fault("gpu_xid", 95)], (line("gpu_xid 95", ago=remedies.LEMON_WINDOW_SECONDS + 1),), NOW)
    assert long_ago is not None
    assert long_ago.remedy is Remedy.REBOOT


def test_three_incidents_within_a_day_make_a_lemon_and_are_named() -> None:
    history = [line("agent_lost", incident=f"inc-{number}", is_own_word=False) for number in range(3)]
    assert remedies.lemon(NodeId("i-1"), history[:2], NOW) is None
    assert remedies.lemon(NodeId("i-1"), [*history[:2], history[1]], NOW) is None, "one incident counts once"
    assert (
        remedies.lemon(
            NodeId("i-1"),
            [*history[:2], line("agent_lost", incident="inc-9", ago=remedies.LEMON_WINDOW_SECONDS + 1)],
            NOW,
        )
        is None
    )
    told = remedies.lemon(NodeId("i-1"), history, NOW)
    assert told is not None
    assert [each.incident_id for each in told.involvements] == ["inc-0", "inc-1", "inc-2"]


def test_a_lemon_is_ended_only_by_a_word_of_its_own() -> None:
    silent = [line("node_unreachable", incident=f"inc-{number}", is_own_word=False) for number in range(3)]
    assert remedies.of_lemon(silent, NOW) is Remedy.RETIRE
    assert remedies.of_lemon([*silent, line("gpu_xid 95")], NOW) is Remedy.REPLACE


def test_a_disk_that_does_not_answer_is_rebooted_and_then_replaced() -> None:
    assert remedies.of_fault(fault("disk_silent"), (), NOW) is Remedy.REBOOT
    assert remedies.of_fault(fault("disk_silent"), (line("disk_silent"),), NOW) is Remedy.REPLACE


def test_every_fault_of_a_node_that_is_documented_has_its_remedy() -> None:
    text = (Path(__file__).parents[4] / "docs" / "reference" / "metrics.md").read_text()
    table = text.partition("## Node faults")[2].partition("Without NVIDIA's driver")[0]
    rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    assert {code for row in rows for code in re.findall(r"`(\w+)`", row)} | {"ranks_not_gone"} == {
        *remedies.FAULTS,
        "gpu_xid",
    }


def test_a_fault_history_reaches_back_for_its_window() -> None:
    window = remedies.LEMON_WINDOW_SECONDS
    lines = (line("a", ago=window), line("b", ago=window + 1), line("c", ago=0.0))
    assert [each.what for each in remedies.recent(lines, NOW)] == ["a", "c"]
    found = remedies.lemon(NodeId("i-1"), [line("a", incident=f"inc-{number}") for number in range(3)], NOW)
    assert found is not None
    assert found.hours == 24
