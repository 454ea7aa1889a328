"""Whether a node counts as lost depends on its agent's silence, its ranks' steps, and EC2's reports."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from control_plane.accounts.facts import sentence
from control_plane.core import evidence, moves
from control_plane.core.evidence import NodeDisposition, NodeProgress
from control_plane.core.job.progress import MAX_OMITTED, unstored_outputs
from control_plane.core.job.view import current_reports
from control_plane.core.observed.facts import AgentSilent, InstanceEnded, OutOfView, Recorded
from control_plane.core.observed.jobs import AgentSilence, Impairment
from control_plane.core.observed.nodes import Cause, Implication, InstanceCondition, NodeObserved, Remedy
from control_plane.core.timeouts import ladder
from everstep.protocol.agent_messages import (
    MemberPhase,
    MemberReport,
    NodeFault,
    OutputCause,
    OutputFailure,
    RankStatus,
    RoundStatus,
    ShardProtection,
)
from everstep.protocol.ids import Generation, JobName, NodeId, Rank, RunId, Step
from tests.unit.worker.rank_plans import rank_plan

NODE = NodeId("i-1")
LADDER = ladder(3.0)
NOW = 1000.0


def silence(seconds: float, boundary: int = 5, committed: int = 4) -> AgentSilence:
    return AgentSilence(node_id=NODE, since=NOW - seconds, boundary=Step(boundary), committed=Step(committed))


def node(**changes: object) -> NodeObserved:
    return NodeObserved(node_id=NODE, **{"instance": InstanceCondition.PRESENT, "is_connected": True, **changes})  # type: ignore[arg-type]


def judge(
    seen: NodeObserved, quiet: AgentSilence | None = None, *, out_of_view: bool = False, is_blind: bool = False
) -> evidence.NodeVerdict:
    return evidence.judge(seen, silence=quiet, out_of_view=out_of_view, is_blind=is_blind, now=NOW, timeouts=LADDER)


def test_aws_word_is_enough_even_if_the_agent_still_speaks() -> None:
    verdict = judge(node(instance=InstanceCondition.ENDED, ended=InstanceEnded(node_id=NODE, state="shutting-down")))
    assert (verdict.disposition, verdict.cause) == (NodeDisposition.GONE, Cause.INSTANCE_TERMINATED)
    assert verdict.may_terminate
    assert verdict.is_final
    assert sentence(verdict.evidence) == "EC2 reports i-1 as shutting-down"


def test_aws_word_counts_while_blind() -> None:
    assert judge(node(instance=InstanceCondition.ENDED), silence(1), is_blind=True).disposition is NodeDisposition.GONE


def test_an_agent_that_speaks_is_alive_whatever_its_peers_say() -> None:
    assert judge(node(), None, out_of_view=True).disposition is NodeDisposition.ALIVE


@pytest.mark.parametrize(
    ("seconds", "out_of_view", "is_blind", "expected"),
    [
        (4, False, False, NodeDisposition.UNCLEAR),
        (4, True, False, NodeDisposition.GONE),
        (3, True, False, NodeDisposition.UNCLEAR),
        (60, False, False, NodeDisposition.UNCLEAR),
        (61, False, False, NodeDisposition.GONE),
        (61, True, True, NodeDisposition.UNCLEAR),
    ],
)
def test_silence_needs_a_second_class_or_time(
    seconds: float, out_of_view: bool, is_blind: bool, expected: NodeDisposition
) -> None:
    verdict = judge(
        node(is_connected=False, silent_seconds=max(seconds, 4)),
        silence(seconds),
        out_of_view=out_of_view,
        is_blind=is_blind,
    )
    assert verdict.disposition is expected
    assert not verdict.may_terminate
    assert not verdict.is_final
    assert isinstance(verdict.evidence, AgentSilent)
    assert verdict.evidence.limit_seconds == (60.0 if seconds == 61 and not is_blind else 0.0)


def test_a_step_of_the_wall_clock_makes_no_silence_longer() -> None:
    """A jump of the wall clock does not lengthen a silence.

    The control plane's Unix time jumps by 65 s while an agent has been silent for 3.2 s of the monotonic clock.
    """
    quiet = node(is_connected=False, silent_seconds=3.2)
    verdict = evidence.judge(
        quiet, silence=silence(1.2), out_of_view=False, is_blind=False, now=NOW + 65, timeouts=LADDER
    )
    assert (verdict.disposition, sentence(verdict.evidence)) == (
        NodeDisposition.UNCLEAR,
        "the agent of i-1 was silent for 3.2 s",
    )


@pytest.mark.parametrize(
    ("seconds", "is_blind", "expected"),
    [
        (2, False, NodeDisposition.ALIVE),
        (3, False, NodeDisposition.UNCLEAR),
        (4, False, NodeDisposition.GONE),
        (4, True, NodeDisposition.UNCLEAR),
    ],
)
def test_a_status_check_that_fails_is_the_second_class_of_a_silence(
    seconds: float, is_blind: bool, expected: NodeDisposition
) -> None:
    ill = node(
        is_connected=False,
        silent_seconds=max(seconds, 2),
        failed_status_check="EC2 reports its system status check as impaired",
    )
    verdict = judge(replace(ill, silent_seconds=4.0) if seconds == 3 else ill, silence(seconds), is_blind=is_blind)
    assert verdict.disposition is expected
    assert not verdict.may_terminate, "EC2 does not say that it ended"
    assert not verdict.is_final
    if expected is NodeDisposition.GONE:
        assert (
            sentence(verdict.evidence)
            == "the agent of i-1 was silent for 4.0 s and EC2 reports its system status check as impaired"
        )


def test_a_status_check_that_fails_on_a_node_that_speaks_means_nothing() -> None:
    assert (
        judge(node(failed_status_check="EC2 reports its instance status check as impaired")).disposition
        is NodeDisposition.ALIVE
    )


def test_a_fault_of_the_job_is_no_fault_of_the_node() -> None:
    fault = NodeFault(code="gpu_lost", message="a rank's words", is_permanent=False)
    member = MemberReport(
        job=JobName("gpt"), run=RunId("r"), generation=Generation(1), phase=MemberPhase.RUNNING, faults=(fault,)
    )
    assert judge(node(member=member)).disposition is NodeDisposition.ALIVE


def test_a_node_whose_processes_do_not_end_is_sound_but_not_in_service() -> None:
    stuck = node(faults=(NodeFault(code="ranks_not_gone", message="pid 7", is_permanent=False),))
    assert judge(stuck).disposition is NodeDisposition.ALIVE
    assert moves.is_in_service(node(has_reported=True), NOW, LADDER)
    assert not moves.is_in_service(replace(stuck, has_reported=True), NOW, LADDER)


def track(known: tuple[AgentSilence, ...], seen: NodeObserved, boundary: int) -> tuple[AgentSilence, ...]:
    return evidence.track_silences(
        known, (seen,), {NODE: NodeProgress(boundary=Step(boundary), committed=Step(0))}, NOW, LADDER
    )


def test_a_silence_begins_with_the_last_word() -> None:
    watched = evidence.WATCHED_FROM_LEASES * LADDER.lease_seconds
    assert track((), node(silent_seconds=watched), 7) == ()
    (begun,) = track((), node(silent_seconds=watched + 0.01), 7)
    assert (begun.since, begun.boundary) == (pytest.approx(NOW - watched, abs=0.02), 7)


def test_a_silence_counts_as_shorter_than_a_lease_when_it_is_first_seen() -> None:
    """The job loop is late, and first sees that an agent is silent when the silence has lasted 50 s.

    No earlier decision has recorded which steps the node's ranks had finished. This decision therefore cannot determine
    whether the ranks still finish steps. If the 50 s counted, it would declare the node lost. The silence therefore
    counts as shorter than a lease. A later decision determines whether the ranks have finished further steps.
    """
    (begun,) = track((), node(silent_seconds=50.0), 7)
    assert NOW - begun.since < LADDER.lease_seconds


def test_an_ended_instance_has_no_silence() -> None:
    ended = node(instance=InstanceCondition.ENDED, is_connected=False, silent_seconds=313.0)
    assert evidence.track_silences((), [ended], {}, NOW, LADDER) == ()
    present = replace(ended, node_id=NodeId("i-2"), instance=InstanceCondition.PRESENT)
    found = evidence.track_silences((), [ended, present], {}, NOW, LADDER)
    assert [each.node_id for each in found] == ["i-2"]


@pytest.mark.parametrize(
    ("stepped_at", "since"), [(None, NOW - 4), (NOW - 9, NOW - 4), (NOW - 3.5, NOW - 3.5), (NOW + 7, NOW)]
)
def test_steps_after_its_last_word_spoke_for_a_node_that_is_given_up(stepped_at: float | None, since: float) -> None:
    """A silent node counts as lost since its agent's last report, or since its ranks' last step if that was later.

    An agent reports once a second. Its connection may break just before a report, while the ranks finish more steps.
    The time stamp of a step may come from a clock that is ahead, so a later stamp than the present time counts as now.
    """
    quiet = node(silent_seconds=4.0)
    verdict = evidence.judge(
        quiet, silence=silence(4), stepped_at=stepped_at, out_of_view=True, is_blind=False, now=NOW, timeouts=LADDER
    )
    assert (verdict.disposition, verdict.since) == (NodeDisposition.GONE, since)


def test_a_silence_is_followed_before_it_counts() -> None:
    """The control plane records a node's steps before the agent's silence is as long as a lease.

    If the ranks finish steps during the silence, only the agent has died, and the job keeps the node.
    """
    (followed,) = track((), node(silent_seconds=2.1), 5)
    assert judge(node(silent_seconds=2.1), followed, out_of_view=True).disposition is NodeDisposition.ALIVE
    (renewed,) = track((followed,), node(silent_seconds=3.2), 9)
    assert judge(node(silent_seconds=3.2), renewed, out_of_view=True).disposition is NodeDisposition.UNCLEAR
    (stalled,) = track((followed,), node(silent_seconds=3.2), 5)
    assert (
        judge(node(silent_seconds=3.2), replace(stalled, since=NOW - 3.2), out_of_view=True).disposition
        is NodeDisposition.GONE
    )


def test_two_boundaries_during_a_silence_begin_it_anew_one_does_not() -> None:
    assert track((silence(30, boundary=5),), node(silent_seconds=30), 6)[0].since == NOW - 30
    assert track((silence(30, boundary=5),), node(silent_seconds=30), 7)[0].since == NOW


def test_a_word_ends_a_silence() -> None:
    assert track((silence(30),), node(silent_seconds=0.5), 5) == ()


def test_a_silent_agent_vouches_for_its_shards_only_while_steps_are_committed() -> None:
    silent, heard = node(silent_seconds=3.1), replace(node(silent_seconds=3.0), node_id=NodeId("i-2"))

    def silent_without_commit(committed_at: float | None) -> frozenset[NodeId]:
        return evidence.silent_without_commit((silent, heard), committed_at=committed_at, now=NOW, timeouts=LADDER)

    assert silent_without_commit(NOW - 3.1) == silent_without_commit(None) == {NODE}
    assert silent_without_commit(NOW - 3.0) == frozenset(), (
        "a commit has the vote of every owner, whoever the control plane hears"
    )


def test_a_fleet_is_blind_when_most_of_three_or_more_are_silent() -> None:
    def fleet(silent: int, talking: int, ended: int = 0) -> list[NodeObserved]:
        return (
            [node(silent_seconds=10.0)] * silent
            + [node()] * talking
            + [node(instance=InstanceCondition.ENDED, silent_seconds=10.0)] * ended
        )

    assert evidence.is_fleet_blind(fleet(2, 1), LADDER)
    assert not evidence.is_fleet_blind(fleet(2, 2), LADDER)
    assert not evidence.is_fleet_blind(fleet(2, 0), LADDER)
    assert not evidence.is_fleet_blind(fleet(1, 2, ended=4), LADDER)


def test_peers_that_are_silent_in_the_rounds_are_evidence_of_the_data_plane_but_nobody_speaks_of_itself() -> None:
    def report(*silent: NodeId) -> MemberReport:
        return MemberReport(
            job=JobName("gpt"), run=RunId("r"), generation=Generation(1), phase=MemberPhase.RUNNING, silent_peers=silent
        )

    assert evidence.nodes_out_of_view({NodeId("i-2"): report(NODE), NodeId("i-3"): report()}) == {NODE}
    assert evidence.nodes_out_of_view({NODE: report(NODE)}) == frozenset()


LOST = NodeFault(code="gpu_lost", message="GPU 3", is_permanent=False)


def impairment(since: float, *, stepped: float = 0.0, is_out_of_view: bool = True) -> Impairment:
    return Impairment(
        node_id=NODE, is_out_of_view=is_out_of_view, since=NOW - since, boundary=Step(5), stepped_at=NOW - stepped
    )


def judge_training(
    seen: NodeObserved, each: Impairment | None, *, is_blind: bool = False, is_first_to_leave: bool = True
) -> evidence.NodeVerdict:
    return evidence.judge(
        seen,
        silence=None,
        out_of_view=True,
        is_blind=is_blind,
        now=NOW,
        timeouts=LADDER,
        impairment=each,
        is_training=True,
        is_first_to_leave=is_first_to_leave,
    )


@pytest.mark.parametrize(
    ("stepped", "disposition"),
    [
        (0.0, NodeDisposition.IMPAIRED),
        (LADDER.exclude_seconds, NodeDisposition.IMPAIRED),
        (LADDER.exclude_seconds + 1, NodeDisposition.GONE),
    ],
)
def test_a_typed_fault_ends_nobodys_use_while_steps_advance(stepped: float, disposition: NodeDisposition) -> None:
    verdict = judge_training(node(faults=(LOST,)), impairment(stepped, stepped=stepped, is_out_of_view=False))
    assert (verdict.disposition, verdict.remedy, verdict.may_terminate) == (disposition, Remedy.REPLACE, True)
    assert verdict.is_final is (disposition is NodeDisposition.GONE)
    assert verdict.what == "gpu_lost"


def test_a_typed_fault_takes_a_member_from_no_launch_unless_it_can_promise_nothing() -> None:
    def disposition(seen: NodeObserved) -> NodeDisposition:
        return evidence.judge(
            seen,
            silence=None,
            out_of_view=False,
            is_blind=False,
            now=NOW,
            timeouts=LADDER,
            impairment=impairment(500.0, stepped=500.0),
            is_launching=True,
        ).disposition

    assert disposition(node(faults=(LOST,))) is NodeDisposition.IMPAIRED


def test_a_typed_fault_is_believed_of_a_live_agent_alone() -> None:
    assert judge(node(faults=(LOST,))).disposition is NodeDisposition.GONE
    assert judge(node(faults=(LOST,), silent_seconds=4.0), silence(4)).disposition is NodeDisposition.UNCLEAR


@pytest.mark.parametrize(
    ("since", "stepped", "disposition"),
    [
        (60, 0, NodeDisposition.UNCLEAR),
        (61, 0, NodeDisposition.IMPAIRED),
        (200, 60, NodeDisposition.IMPAIRED),
        (200, 61, NodeDisposition.GONE),
    ],
)
def test_a_holder_out_of_view_is_left_after_t_max(since: float, stepped: float, disposition: NodeDisposition) -> None:
    verdict = judge_training(node(), impairment(since, stepped=stepped))
    assert verdict.disposition is disposition
    assert not verdict.may_terminate
    assert not verdict.is_final, "it may hold what nobody else has"
    assert isinstance(verdict.evidence, OutOfView)


def test_a_holder_out_of_view_is_no_evidence_while_blind_or_not_blamed_or_while_nothing_trains() -> None:
    each = impairment(100)
    assert judge_training(node(), each, is_blind=True).disposition is NodeDisposition.ALIVE
    assert judge_training(node(), each, is_first_to_leave=False).disposition is NodeDisposition.ALIVE
    idle = evidence.judge(
        node(), silence=None, out_of_view=True, is_blind=False, now=NOW, timeouts=LADDER, impairment=each
    )
    assert idle.disposition is NodeDisposition.ALIVE


def follow(
    known: tuple[Impairment, ...], seen: NodeObserved, boundary: int, *, out_of_view: bool = True
) -> tuple[Impairment, ...]:
    progress = {NODE: NodeProgress(boundary=Step(boundary), committed=Step(0))}
    return evidence.track_impairments(known, (seen,), {NODE} if out_of_view else set(), progress, NOW, LADDER)


def test_an_impairment_is_followed_as_long_as_it_lasts_and_the_agent_is_heard() -> None:
    assert follow((impairment(30),), node(), 5)[0].since == NOW - 30
    assert follow((impairment(30),), node(), 5, out_of_view=False) == ()
    assert follow((impairment(30),), node(silent_seconds=4.0), 5) == ()
    assert follow((impairment(30),), node(instance=InstanceCondition.ENDED), 5) == ()
    assert follow((impairment(30),), node(faults=(LOST,)), 5)[0].since == NOW, "another thing is wrong now"


def test_a_member_without_an_impairment_does_not_hide_those_of_later_members() -> None:
    ended, healthy, faulty = (replace(node(), node_id=NodeId(name)) for name in ("i-1", "i-2", "i-3"))
    ended, faulty = replace(ended, instance=InstanceCondition.ENDED), replace(faulty, faults=(LOST,))
    found = evidence.track_impairments((), (ended, healthy, faulty), set(), {}, NOW, LADDER)
    assert [each.node_id for each in found] == ["i-3"]


def test_two_boundaries_during_an_impairment_show_that_steps_advance_one_does_not() -> None:
    assert follow((impairment(30, stepped=30),), node(), 6)[0].stepped_at == NOW - 30
    assert follow((impairment(30, stepped=30),), node(), 7)[0].stepped_at == NOW


def test_progress_is_the_others_and_dated_by_the_first_that_passed_its_boundary() -> None:
    def report(*ranks: RankStatus) -> MemberReport:
        return MemberReport(
            job=JobName("gpt"), run=RunId("r"), generation=Generation(1), phase=MemberPhase.RUNNING, ranks=ranks
        )

    def rank(number: int, boundary: int, passed_at: float) -> RankStatus:
        return RankStatus(rank=Rank(number), boundary=Step(boundary), exit=None, passed_at_seconds=passed_at)

    others = {
        NodeId("i-2"): report(rank(1, 6, 997.0), rank(2, 7, 998.5)),
        NodeId("i-3"): report(rank(3, 7, 998.0), rank(4, 7, 0.0)),
    }
    seen = evidence.progress_without({NODE: report(rank(0, 9, 999.0)), **others}, NODE)
    assert (seen.boundary, seen.stepped_at) == (7, 998.0)
    assert evidence.progress_without({}, NODE).stepped_at is None


def test_committed_progress_is_the_newest_that_another_member_reports() -> None:
    told = {NodeId(name): owner(0, (), ()) for name in ("i-1", "i-2", "i-3")}
    for name, step in (("i-1", 9), ("i-2", 4), ("i-3", 6)):
        (shard,) = told[NodeId(name)].protection
        shard = structs.replace(shard, committed=Step(step))
        told[NodeId(name)] = structs.replace(told[NodeId(name)], protection=(shard,))
    assert evidence.progress_without(told, NODE).committed == 6


@pytest.mark.parametrize(
    ("ranks", "at"),
    [
        pytest.param(((6, 900.0, 950.0), (5, 910.0, 940.0)), 900.0, id="the first of the first steps"),
        pytest.param(((6, 0.0, 950.0), (5, 910.0, 940.0)), 910.0, id="of the ranks that know it"),
        pytest.param(((6, 0.0, 950.0), (5, 0.0, 940.0)), 950.0, id="a later step, but not the restored one"),
        pytest.param(((5, 0.0, 940.0),), None, id="no new step"),
    ],
)
def test_a_generation_begins_with_its_first_new_step(
    ranks: tuple[tuple[int, float, float], ...], at: float | None
) -> None:
    told = tuple(
        RankStatus(
            rank=Rank(number), boundary=Step(boundary), passed_at_seconds=passed_at, first_passed_at_seconds=first_at
        )
        for number, (boundary, first_at, passed_at) in enumerate(ranks)
    )
    report = structs.replace(owner(0, (), ()), ranks=told)
    assert evidence.first_passed_at({NODE: report}, Step(5)) == at


def owner(rank: int, holders: tuple[str, ...], in_view: tuple[str, ...]) -> MemberReport:
    shard = ShardProtection(
        rank=Rank(rank),
        holders=tuple(map(NodeId, holders)),
        in_view=tuple(map(NodeId, in_view)),
        committed=Step(1),
        payload_bytes=1,
    )
    return MemberReport(
        job=JobName("gpt"), run=RunId("r"), generation=Generation(1), phase=MemberPhase.RUNNING, protection=(shard,)
    )


@pytest.mark.security
def test_an_agent_speaks_about_its_own_ranks_only() -> None:
    plan = rank_plan(addresses=("a", "b"), generation=1)
    first, second = (node.node_id for node in plan.nodes)
    stranger = NodeId("stranger")
    statuses = tuple(RankStatus(rank=Rank(number), boundary=Step(5)) for number in (-1, 0, 1, 2))
    liar = structs.replace(owner(1, ("x",), ("x",)), run=plan.run, ranks=statuses)
    nodes = {name: NodeObserved(node_id=name, member=liar) for name in (first, second, stranger)}
    found = current_reports(nodes, plan.run, plan.generation, plan)
    told = {
        name: ([r.rank for r in report.ranks], [s.rank for s in report.protection]) for name, report in found.items()
    }
    assert told == {first: ([0], []), second: ([1], [1]), stranger: ([], [])}
    earlier = structs.replace(plan, generation=Generation(2))
    assert current_reports(nodes, plan.run, plan.generation, earlier)[first] is liar, "another generation's plan"


def test_of_two_that_blame_each_other_one_is_left_and_not_the_partner_of_one_that_was_left() -> None:
    a, b, c = (NodeObserved(node_id=NodeId(name)) for name in "abc")
    mutual = {NodeId("a"): owner(0, ("a", "b"), ("a",)), NodeId("b"): owner(1, ("b", "a"), ("b",))}
    assert evidence.first_to_leave(mutual, (a, b)) == "b"
    line = Implication(
        node_id=NodeId("a"), incident_id="inc-1", at=0.0, what="node_unreachable", evidence=Recorded(text="words")
    )
    assert evidence.first_to_leave(mutual, (replace(a, history=(line,)), b)) == "a", "it has lost its second partner"
    two = {**mutual, NodeId("c"): owner(2, ("c", "a"), ("c",))}
    assert evidence.first_to_leave(two, (a, b, c)) == "a", "most others have lost it"
    assert evidence.first_to_leave({}, (a, b)) is None


def test_a_node_that_accuses_a_second_partner_alone_is_the_one_to_leave() -> None:
    a, b, c = (NodeObserved(node_id=NodeId(name)) for name in "abc")
    one_sided = {NodeId("a"): owner(0, ("a", "b"), ("a", "b")), NodeId("b"): owner(1, ("b", "a"), ("b",))}
    assert evidence.first_to_leave(one_sided, (a, b)) == "a"
    line = Implication(
        node_id=NodeId("b"), incident_id="inc-1", at=0.0, what="node_unreachable", evidence=Recorded(text="words")
    )
    before = replace(b, history=(line,))
    assert evidence.first_to_leave(one_sided, (a, before)) == "b"
    two = {**one_sided, NodeId("c"): owner(2, ("c", "a"), ("c",))}
    assert evidence.first_to_leave(two, (a, before, c)) == "a", "two nodes accuse it"


def test_of_three_the_coordinator_is_not_blamed_and_of_two_the_last() -> None:
    a, b, c = (NodeObserved(node_id=NodeId(name)) for name in "abc")
    status = RoundStatus(committed=Step(9), proposed=Step(10), boundary=Step(10), committed_at_seconds=0.0)
    coordinator = structs.replace(owner(1, ("b", "a"), ("b",)), round=status)
    mutual = {NodeId("a"): owner(0, ("a", "b"), ("a",)), NodeId("b"): coordinator}
    assert evidence.first_to_leave(mutual, (a, b)) == "b"
    assert evidence.first_to_leave(mutual, (a, b, c)) == "a"


@pytest.mark.parametrize(("place", "root"), [(0, 0), (1, 0), (3, 0), (0, 1), (1, 1), (3, 1), (0, 3)])
def test_of_a_parity_group_whose_members_all_report_each_other_the_silent_one_is_given_up(
    place: int, root: int
) -> None:
    """Only the node that is cut off counts as lost, although it and the other nodes report each other as silent.

    The node at `place` is cut off. The node at `root` is the coordinator, to which all nodes report.
    """
    ids = [NodeId(f"i-{number}") for number in range(4)]
    cut, coordinator = ids[place], ids[root]
    status = RoundStatus(committed=Step(9), proposed=Step(10), boundary=Step(10), committed_at_seconds=0.0)

    def report(own: NodeId) -> MemberReport:
        neighbours = ids if own == coordinator else [coordinator]
        holders = (own, *(node for node in ids if node != own))
        shard = ShardProtection(rank=Rank(0), holders=holders, in_view=(own,), committed=Step(9), payload_bytes=1)
        silent = tuple(peer for peer in neighbours if peer != own and cut in (own, peer))
        return MemberReport(
            job=JobName("gpt"),
            run=RunId("r"),
            generation=Generation(1),
            phase=MemberPhase.RUNNING,
            protection=(shard,),
            silent_peers=silent,
            round=status if own == coordinator else None,
        )

    observed = [NodeObserved(node_id=node) for node in ids]
    assert evidence.first_to_leave({node: report(node) for node in ids}, observed) == cut


@pytest.mark.security
def test_a_count_of_outputs_that_no_agent_can_have_is_cut() -> None:
    output = OutputFailure(rank=Rank(0), path="x", cause=OutputCause.OUTSIDE, omitted_count=2**40)
    fault = NodeFault(code="output_missing", message="x", is_permanent=False, output=output)
    stored, _ = unstored_outputs(None, Generation(1), [structs.replace(owner(0, (), ()), faults=(fault,))])
    assert stored is not None
    assert stored.count == 1 + MAX_OMITTED
