"""What signals prove."""

from __future__ import annotations

from dataclasses import replace

import pytest

from control_plane.core import evidence
from control_plane.core.evidence import Progress, Standing
from control_plane.core.observed import Cause, InstanceCondition, NodeObserved, Silence
from control_plane.core.timeouts import ladder
from everstep.protocol.agent_messages import MemberPhase, MemberReport, NodeFault
from everstep.protocol.ids import Generation, JobName, NodeId, RunId, Step

NODE = NodeId("i-1")
LADDER = ladder(3.0)
NOW = 1000.0


def silence(seconds: float, boundary: int = 5, committed: int = 4) -> Silence:
    return Silence(node_id=NODE, since=NOW - seconds, boundary=Step(boundary), committed=Step(committed))


def node(**changes: object) -> NodeObserved:
    return NodeObserved(node_id=NODE, **{"instance": InstanceCondition.PRESENT, "is_connected": True, **changes})  # type: ignore[arg-type]


def judge(seen: NodeObserved, quiet: Silence | None = None, *, out_of_view: bool = False, is_blind: bool = False) -> evidence.Verdict:
    return evidence.judge(seen, silence=quiet, out_of_view=out_of_view, is_blind=is_blind, now=NOW, timeouts=LADDER)


def test_aws_word_is_enough_even_if_the_agent_still_speaks() -> None:
    verdict = judge(node(instance=InstanceCondition.ENDED, instance_words="shutting-down"))
    assert (verdict.standing, verdict.cause) == (Standing.GONE, Cause.INSTANCE_TERMINATED)
    assert verdict.may_terminate
    assert verdict.is_final
    assert verdict.evidence == "EC2 reports i-1 as shutting-down"


def test_aws_word_counts_while_blind() -> None:
    assert judge(node(instance=InstanceCondition.ENDED), silence(1), is_blind=True).standing is Standing.GONE


def test_an_agent_that_speaks_is_alive_whatever_its_peers_say() -> None:
    assert judge(node(), None, out_of_view=True).standing is Standing.ALIVE


@pytest.mark.parametrize(
    ("seconds", "out_of_view", "is_blind", "expected"),
    [
        (4, False, False, Standing.UNCLEAR),
        (4, True, False, Standing.GONE),
        (2, True, False, Standing.UNCLEAR),
        (59, False, False, Standing.UNCLEAR),
        (61, False, False, Standing.GONE),
        (61, True, True, Standing.UNCLEAR),
    ],
)
def test_silence_needs_a_second_class_or_time(seconds: float, out_of_view: bool, is_blind: bool, expected: Standing) -> None:
    verdict = judge(node(is_connected=False, silent_seconds=max(seconds, 4)), silence(seconds), out_of_view=out_of_view, is_blind=is_blind)
    assert verdict.standing is expected
    assert not verdict.may_terminate
    assert not verdict.is_final
    assert "silent" in verdict.evidence


def test_a_typed_fault_of_the_live_agent_is_its_own_word() -> None:
    fault = NodeFault(code="ranks_not_gone", message="pid 7", is_permanent=False)
    member = MemberReport(job=JobName("gpt"), run=RunId("r"), generation=Generation(1), phase=MemberPhase.RUNNING, faults=(fault,))
    verdict = judge(node(member=member))
    assert (verdict.standing, verdict.cause, verdict.may_terminate) == (Standing.GONE, Cause.NODE_FAULT, True)


def track(known: tuple[Silence, ...], seen: NodeObserved, boundary: int) -> tuple[Silence, ...]:
    return evidence.track_silences(known, (seen,), {NODE: Progress(boundary=Step(boundary), committed=Step(0))}, NOW, LADDER)


def test_a_silence_begins_with_the_last_word() -> None:
    (begun,) = track((), node(silent_seconds=5.0), 7)
    assert (begun.since, begun.boundary) == (NOW - 5, 7)


def test_an_ended_instance_has_no_silence() -> None:
    ended = node(instance=InstanceCondition.ENDED, is_connected=False, silent_seconds=313.0)
    assert evidence.track_silences((), [ended], {}, NOW, LADDER) == ()
    assert evidence.track_silences((), [replace(ended, instance=InstanceCondition.PRESENT)], {}, NOW, LADDER) != ()


def test_a_silence_is_followed_before_it_counts() -> None:
    """Steps that advance in the last third of the lease are known when it is over: a node whose agent alone has died is not given up."""
    (followed,) = track((), node(silent_seconds=2.1), 5)
    assert judge(node(silent_seconds=2.1), followed, out_of_view=True).standing is Standing.ALIVE
    (renewed,) = track((followed,), node(silent_seconds=3.2), 9)
    assert judge(node(silent_seconds=3.2), renewed, out_of_view=True).standing is Standing.UNCLEAR
    (stalled,) = track((followed,), node(silent_seconds=3.2), 5)
    assert judge(node(silent_seconds=3.2), replace(stalled, since=NOW - 3.2), out_of_view=True).standing is Standing.GONE


def test_two_boundaries_during_a_silence_begin_it_anew_one_does_not() -> None:
    assert track((silence(30, boundary=5),), node(silent_seconds=30), 6)[0].since == NOW - 30
    assert track((silence(30, boundary=5),), node(silent_seconds=30), 7)[0].since == NOW


def test_a_word_ends_a_silence() -> None:
    assert track((silence(30),), node(silent_seconds=0.5), 5) == ()


def test_a_fleet_is_blind_when_most_of_three_or_more_are_silent() -> None:
    def fleet(silent: int, talking: int, ended: int = 0) -> list[NodeObserved]:
        return [node(silent_seconds=10.0)] * silent + [node()] * talking + [node(instance=InstanceCondition.ENDED, silent_seconds=10.0)] * ended

    assert evidence.is_fleet_blind(fleet(2, 1), LADDER)
    assert not evidence.is_fleet_blind(fleet(2, 2), LADDER)
    assert not evidence.is_fleet_blind(fleet(2, 0), LADDER)
    assert not evidence.is_fleet_blind(fleet(1, 2, ended=4), LADDER)


def test_peers_that_are_silent_in_the_rounds_are_evidence_of_the_data_plane_but_nobody_speaks_of_itself() -> None:
    def report(*silent: NodeId) -> MemberReport:
        return MemberReport(job=JobName("gpt"), run=RunId("r"), generation=Generation(1), phase=MemberPhase.RUNNING, silent_peers=silent)

    assert evidence.nodes_out_of_view({NodeId("i-2"): report(NODE), NodeId("i-3"): report()}) == {NODE}
    assert evidence.nodes_out_of_view({NODE: report(NODE)}) == frozenset()
