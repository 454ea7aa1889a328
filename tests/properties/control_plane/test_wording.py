"""Rewording changes no decision: neither a person's note, nor the words of AWS, of an agent or of an earlier version.

Each story is decided twice, with other words in each text. Apart from these words, both decisions are equal.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from control_plane.core import fleets
from control_plane.core.observed import causes
from control_plane.core.observed.causes import Reason
from control_plane.core.observed.facts import Announced, Faulty, InstanceEnded, NodeRequest, Recorded, Requested
from control_plane.core.observed.fleets import FleetObserved, Hold, HoldRelease
from control_plane.core.observed.jobs import Exclusion
from control_plane.core.observed.nodes import Notice, Remedy
from control_plane.core.observed.rolls import FleetRoll
from control_plane.core.states import JobState, NodeState
from everstep.protocol.agent_messages import FaultCode, NodeFault, NoticeKind
from everstep.protocol.ids import NodeId
from tests.unit.control_plane.core.test_fleets import NOW, POLICY, SPEC, job, row, seen

PLAIN = "@@"
WORDS = (
    "AWS announced for i1: terminating (now)",
    "surplus: the fleet needs 1 nodes",
    "the roll of the fleet replaces i1 (ann)",
    "EC2: terminated",
    "gpu_xid: Xid 79",
    "late",
    "stopped",
    "its agent has not connected",
    "i1 not replaced",
    "excluded by a: AWS announced for i1",
)
HELD_STATES = (NodeState.HELD, NodeState.DRAINING, NodeState.REBOOTING)


def reasons(words: str) -> tuple[Reason, ...]:
    node_id = NodeId("i1")
    fault = Faulty(code="gpu_xid", text=words, xid=79)
    asked = Requested(request=NodeRequest.REPLACE, node_id=node_id, by="ann", note=words)
    return (
        Recorded(text=words),
        InstanceEnded(node_id=node_id, state=words, text=words),
        asked,
        Requested(request=NodeRequest.REPLACE, node_id=node_id, by="ann", note=words, is_roll=True),
        causes.GivenUp(job="a", remedy=Remedy.REPLACE, because=Recorded(text=words)),
        causes.GivenUp(job="a", remedy=Remedy.TERMINATE, because=Recorded(text=words)),
        fault,
        causes.StillFaulty(fault=fault),
        Announced(node_id=node_id, notice=NoticeKind.SPOT_INTERRUPTION, text=words),
        causes.Surplus(desired_count=2),
        causes.Silent(text=words),
        causes.KeptForInspection(because=asked),
    )


@st.composite
def draws(draw: st.DrawFn) -> tuple[dict[str, Any], ...]:
    """Draw what each node of a story is, without its words."""
    node = st.fixed_dictionaries(
        {
            "state": st.sampled_from([state for state in NodeState if state is not NodeState.GONE]),
            "reason": st.integers(0, len(reasons(PLAIN)) - 1),
            "request": st.sampled_from([None, *NodeRequest]),
            "is_roll": st.booleans(),
            "release": st.sampled_from([None, *HoldRelease]),
            "hold": st.sampled_from(Hold),
            "is_faulty": st.booleans(),
            "notice": st.sampled_from([None, *NoticeKind]),
            "is_excluded": st.booleans(),
            "is_replaced": st.booleans(),
            "silent_seconds": st.sampled_from([0.0, 0.0, 10.0, 1000.0]),
        }
    )
    return tuple(draw(st.lists(node, min_size=1, max_size=5)))


def story(drawn: tuple[dict[str, Any], ...], words: str, *, has_roll: bool, launch_fails: bool) -> FleetObserved:
    """Return a fleet that the draws describe, with the same words in each text."""
    rows, notices, faults = [], {}, {}
    for number, each in enumerate(drawn, start=1):
        name, state = f"i{number}", each["state"]
        request = (
            Requested(request=each["request"], node_id=NodeId(name), by="ann", note=words, is_roll=each["is_roll"])
            if each["request"] is not None and state in (NodeState.SPARE, NodeState.ASSIGNED)
            else None
        )
        held = {"hold": each["hold"], "release": each["release"]} if state is NodeState.HELD else {}
        rows.append(
            row(
                name,
                state,
                "a" if state is NodeState.ASSIGNED else None,
                reasons(words)[each["reason"]],
                request=request,
                replaced_at=NOW if each["is_replaced"] and state in HELD_STATES else None,
                since=NOW - 5000 if state is NodeState.REBOOTING else 1.0,
                **held,
            )
        )
        if each["notice"] is not None:
            notices[name] = Notice(kind=each["notice"], message=words, ends_at=NOW + 60)
        if each["is_faulty"]:
            faults[name] = NodeFault(code=FaultCode.GPU_LOST, message=words, is_permanent=False)
    excluded = tuple(
        Exclusion(node_id=each.node_id, evidence=words, may_terminate=True, remedy=Remedy.REPLACE)
        for each, facts in zip(rows, drawn, strict=True)
        if facts["is_excluded"] and each.state is NodeState.ASSIGNED
    )
    works = job("a", JobState.RUNNING, 2, exclusions=excluded)
    failure = {"launch_failure": words, "failed_at": NOW - 10, "failing_since": NOW - 10} if launch_fails else {}
    observed = seen(rows, [works], announced=notices, faulty=faults, replaced=(NOW - 10,), **failure)
    nodes = {
        each.node_id: replace(
            observed.nodes[each.node_id],
            failed_status_check=words if facts["silent_seconds"] else "",
            is_connected=not facts["silent_seconds"],
            silent_seconds=facts["silent_seconds"],
        )
        for each, facts in zip(rows, drawn, strict=True)
    }
    roll = FleetRoll(
        roll_id="one",
        node_ids=tuple(nodes),
        max_unavailable=1,
        reboots=False,
        requested_by="ann",
        reason=words,
        started_at=1.0,
    )
    return replace(observed, nodes=nodes, roll=roll if has_roll else None)


@given(draws(), st.sampled_from(WORDS), st.booleans(), st.booleans(), st.integers(0, 2))
def test_other_words_lead_to_the_same_decision_about_a_fleet(
    drawn: tuple[dict[str, Any], ...], words: str, has_roll: bool, launch_fails: bool, limit: int
) -> None:
    spec = replace(SPEC, max_replacements_per_hour=limit, holds_failed_instances=bool(limit % 2))
    plain, reworded = (
        fleets.decide(NOW, spec, story(drawn, text, has_roll=has_roll, launch_fails=launch_fails), POLICY)
        for text in (PLAIN, words)
    )
    assert repr(plain).replace(PLAIN, words) == repr(reworded)
