"""Tests planned departures of nodes: which node leaves its job, when, and whether the job first waits for a checkpoint.

The golden incidents test whole sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from msgspec import structs

from control_plane.accounts.responses import checkpoint_wait
from control_plane.core import moves
from control_plane.core.evidence import NodeDisposition, NodeVerdict
from control_plane.core.observed.facts import NodeRequest, Recorded, Requested
from control_plane.core.observed.jobs import Departure
from control_plane.core.observed.nodes import Cause, InstanceCondition, NodeObserved, Notice, Remedy
from control_plane.core.timeouts import ladder
from everstep.protocol.agent_messages import MemberPhase, MemberReport, NoticeKind, ShardProtection
from everstep.protocol.ids import Generation, JobName, NodeId, Rank, RunId, Step
from everstep.protocol.plan import (
    CheckpointPlan,
    GenerationPlan,
    ObjectReference,
    PlanNode,
    RankPlan,
    ScriptPlan,
    SourceArchive,
)

NOW = 10_000.0
TIMEOUTS = ladder(3.0)
REFERENCE = ObjectReference(bucket="b", key="k/")
NODES = tuple(NodeId(f"n{number}") for number in range(4))
SPARES = (NodeId("s0"), NodeId("s1"))
DRAIN = Requested(request=NodeRequest.DRAIN, node_id=NODES[1], by="ann")


def plan() -> GenerationPlan:
    holders = {0: (0, 1), 1: (1, 0), 2: (2, 3), 3: (3, 2)}
    return GenerationPlan(
        job=JobName("gpt"),
        run=RunId("r"),
        generation=Generation(1),
        parent=Generation(0),
        base_step=Step(0),
        nodes=tuple(
            PlanNode(node_id=node, address="", peer_port=1, ranks=(Rank(rank),), keep=())
            for rank, node in enumerate(NODES)
        ),
        ranks=tuple(
            RankPlan(rank=Rank(rank), holders=tuple(NODES[holder] for holder in held), sources=())
            for rank, held in holders.items()
        ),
        coordinator=NODES[0],
        master_address="",
        master_port=1,
        script=ScriptPlan(
            source=SourceArchive(object=REFERENCE, sha256="", bytes=1),
            entry_point="t.py",
            hyperparameters={},
            environment={},
            output=REFERENCE,
            logs=REFERENCE,
        ),
        checkpoint=CheckpointPlan(every_steps=0, prefix=REFERENCE),
        timeouts=TIMEOUTS,
    )


def spot(seconds: float) -> Notice:
    return Notice(kind=NoticeKind.SPOT_INTERRUPTION, message="soon", ends_at=NOW + seconds)


def node(name: NodeId, *announced: Notice, **changes: object) -> NodeObserved:
    values: dict[str, object] = {
        "instance": InstanceCondition.PRESENT,
        "is_connected": True,
        "has_reported": True,
        "notices": announced,
    }
    return NodeObserved(node_id=name, **{**values, **changes})  # type: ignore[arg-type]


def impaired(node_id: NodeId, *, remedy: Remedy = Remedy.REBOOT) -> NodeVerdict:
    return NodeVerdict(
        node_id=node_id,
        disposition=NodeDisposition.IMPAIRED,
        evidence=Recorded(text="words"),
        cause=Cause.NODE_FAULT,
        remedy=remedy,
        may_terminate=True,
    )


def wanted(
    announced: dict[int, Notice],
    *,
    wounded: tuple[int, ...] = (),
    known: tuple[Departure, ...] = (),
    not_before: float = 0.0,
) -> tuple[Departure, ...]:
    nodes = {name: node(name, *([announced[place]] if place in announced else [])) for place, name in enumerate(NODES)}
    verdicts = {
        name: impaired(name) if place in wounded else NodeVerdict(node_id=name, disposition=NodeDisposition.ALIVE)
        for place, name in enumerate(NODES)
    }
    return moves.wanted(known, NODES, verdicts, nodes, now=NOW, not_before=not_before)


def left(
    announced: dict[int, Notice], spares: int = 0, upload_seconds: float | None = None, *, wounded: tuple[int, ...] = ()
) -> tuple[NodeId, ...]:
    due = moves.due(wanted(announced, wounded=wounded), spares, upload_seconds, NOW, TIMEOUTS)
    return tuple(move.node_id for move in due)


def test_a_node_is_left_at_once_where_another_is_there() -> None:
    assert left({1: spot(120)}, spares=1) == (NODES[1],)
    assert left({1: spot(120)}) == ()


def test_without_another_training_goes_on_until_a_stop_and_an_upload_just_fit_in() -> None:
    assert left({1: spot(30.1)}) == ()
    assert left({1: spot(30)}) == (NODES[1],)
    assert left({1: spot(45.1)}, upload_seconds=10) == ()
    assert left({1: spot(45)}, upload_seconds=10) == (NODES[1],)


def test_two_nodes_are_left_together_and_one_interruption_is_better_than_two() -> None:
    assert left({1: spot(60), 2: spot(120)}, spares=1) == ()
    assert left({1: spot(60), 2: spot(120)}, spares=2) == (NODES[1], NODES[2])
    assert left({1: spot(20), 2: spot(120)}, spares=1) == (NODES[1],)
    assert left({1: spot(20), 2: spot(25), 3: spot(600)}, spares=1) == (NODES[1], NODES[2])
    assert left({1: spot(20), 2: spot(120), 3: spot(600)}, spares=2) == (NODES[1], NODES[2])


def test_what_has_no_time_waits_for_another_node() -> None:
    endless = Notice(kind=NoticeKind.TERMINATING, message="")
    assert left({1: endless}) == ()
    assert left({1: endless}, spares=1) == (NODES[1],)


def test_a_node_that_is_not_ready_takes_nobody_s_place() -> None:
    member = MemberReport(job=JobName("x"), run=RunId("x"), generation=Generation(1), phase=MemberPhase.EXITED)
    ready = {NODES[0]: node(NODES[0]), SPARES[0]: node(SPARES[0])}
    one = plan()
    assert moves.successors(one, [*ready], ready, NOW, TIMEOUTS) == [SPARES[0]]
    for changes in (
        {"is_connected": False},
        {"silent_seconds": 100.0},
        {"instance": InstanceCondition.ENDED},
        {"member": member},
    ):
        assert moves.successors(one, [*ready], {**ready, SPARES[0]: node(SPARES[0], **changes)}, NOW, TIMEOUTS) == []
    assert moves.successors(one, [*ready], {**ready, SPARES[0]: node(SPARES[0], spot(60))}, NOW, TIMEOUTS) == []
    unasked = node(SPARES[0], instance=InstanceCondition.UNKNOWN)
    assert moves.successors(one, [*ready], {**ready, SPARES[0]: unasked}, NOW, TIMEOUTS) == [SPARES[0]], (
        "it is heard, whatever AWS answers"
    )


def reports(view: Mapping[int, tuple[int, ...]]) -> dict[NodeId, MemberReport]:
    """Return the reports of four members.

    `view` contains, for each rank, the members that count as holders of its shard.
    """
    return {
        NODES[rank]: MemberReport(
            job=JobName("gpt"),
            run=RunId("r"),
            generation=Generation(1),
            phase=MemberPhase.RUNNING,
            protection=(
                ShardProtection(
                    rank=Rank(rank),
                    holders=(),
                    in_view=tuple(NODES[holder] for holder in held),
                    committed=Step(1),
                    payload_bytes=1,
                ),
            ),
        )
        for rank, held in view.items()
    }


def test_a_shard_is_held_elsewhere_only_by_the_word_of_its_owner() -> None:
    whole = {0: (0, 1), 1: (1, 0), 2: (2, 3), 3: (3, 2)}
    assert moves.is_held_elsewhere(plan(), reports(whole), [NODES[1]])
    assert not moves.is_held_elsewhere(plan(), reports(whole), [NODES[0], NODES[1]])
    assert not moves.is_held_elsewhere(plan(), reports({**whole, 1: (1,)}), [NODES[1]])
    assert not moves.is_held_elsewhere(
        plan(), reports({rank: held for rank, held in whole.items() if rank != 1}), [NODES[1]]
    )


def test_a_parity_group_can_rebuild_the_shards_of_one_member_that_all_others_have_in_view() -> None:
    members = tuple(map(Rank, range(4)))
    ranks = tuple(
        RankPlan(
            rank=rank,
            holders=(NODES[rank], *(node for node in NODES if node != NODES[rank])),
            sources=(),
            stripe=members,
        )
        for rank in members
    )
    grouped = structs.replace(plan(), ranks=ranks)
    whole = {rank: (rank, *(other for other in range(4) if other != rank)) for rank in range(4)}
    assert moves.is_held_elsewhere(grouped, reports(whole), [NODES[1]])
    assert not moves.is_held_elsewhere(grouped, reports(whole), [NODES[1], NODES[2]]), "two losses need S3"
    assert not moves.is_held_elsewhere(grouped, reports({**whole, 1: (1, 0, 2)}), [NODES[1]]), "a share is missing"
    assert moves.is_held_elsewhere(grouped, reports({**whole, 2: (2,)}), [NODES[1]])


@pytest.mark.parametrize(
    ("waited", "ends_in", "upload", "is_replaceable", "is_held", "expected"),
    [
        (0, 120, 10.0, True, True, (True, "waits for its checkpoint: the last one took 10 s, 114 s remained")),
        (15, 120, 10.0, True, True, (False, "stopped waiting for its checkpoint: the last one took 10 s")),
        (
            0,
            120,
            100.0,
            True,
            True,
            (False, "did not wait for its checkpoint: the last one took 100 s, 114 s remained"),
        ),
        (0, 120, None, True, True, (True, "waits for its checkpoint: no upload was measured, 114 s remained")),
        (30, 120, None, True, True, (False, "stopped waiting for its checkpoint: no upload was measured")),
        (
            60,
            120,
            10.0,
            True,
            False,
            (True, "waits for its checkpoint, because only the departing nodes hold its last step; 114 s remained"),
        ),
        (
            60,
            120,
            10.0,
            False,
            True,
            (True, "waits for its checkpoint while no replacement is ready; 114 s remained"),
        ),
        (114, 120, 10.0, False, False, (False, "no time remained for its checkpoint")),
        (0, 120, 76.0, True, True, (True, "waits for its checkpoint: the last one took 76 s, 114 s remained")),
        (0, None, 10.0, True, True, (True, "waits for its checkpoint: the last one took 10 s, 120 s remained")),
    ],
)
def test_a_checkpoint_is_waited_for_where_time_allows(
    waited: float,
    ends_in: float | None,
    upload: float | None,
    is_replaceable: bool,
    is_held: bool,
    expected: tuple[bool, str],
) -> None:
    found = moves.checkpoint_wait(
        None if ends_in is None else NOW + ends_in,
        is_announced=True,
        stopped_at=NOW,
        upload_seconds=upload,
        is_replaceable=is_replaceable,
        is_held=is_held,
        now=NOW + waited,
        timeouts=TIMEOUTS,
    )
    assert (found.is_awaited, checkpoint_wait(found)) == expected


@pytest.mark.parametrize(
    ("waited", "is_held", "expected"),
    [
        (0, True, (False, "the remaining nodes hold its last step")),
        (
            29,
            False,
            (True, "waits for its checkpoint, because only the departing nodes hold its last step; 30 s remained"),
        ),
        (30, False, (False, "no time remained for its checkpoint")),
    ],
)
def test_where_aws_takes_nothing_only_the_last_copy_is_worth_the_wait(
    waited: float, is_held: bool, expected: tuple[bool, str]
) -> None:
    found = moves.checkpoint_wait(
        None,
        is_announced=False,
        stopped_at=NOW,
        upload_seconds=10.0,
        is_replaceable=True,
        is_held=is_held,
        now=NOW + waited,
        timeouts=TIMEOUTS,
    )
    assert (found.is_awaited, checkpoint_wait(found)) == expected


def test_whom_aws_takes_goes_first_and_waits_for_no_other_s_successor() -> None:
    assert [move.node_id for move in wanted({3: spot(120), 2: spot(60)}, wounded=(0, 1))] == [
        NODES[2],
        NODES[3],
        NODES[0],
        NODES[1],
    ]
    assert left({3: spot(120)}, wounded=(0, 1)) == ()
    assert left({3: spot(120)}, 1, wounded=(0, 1)) == (NODES[3],)
    assert left({3: spot(120)}, 2, wounded=(0, 1)) == (NODES[3], NODES[0])
    assert left({}, 1, wounded=(0, 1)) == (), "one interruption for both"
    assert left({}, 2, wounded=(0, 1)) == (NODES[0], NODES[1])


def test_a_node_that_aws_takes_and_that_has_something_wrong_is_left_for_what_cannot_wait() -> None:
    (move,) = wanted({1: spot(120)}, wounded=(1,))
    assert (move.cause, move.remedy, move.ends_at) == (Cause.NOTICE, Remedy.TERMINATE, NOW + 120)
    assert moves.fault(move, NOW, NOW).implicates is None, "what AWS does speaks against nobody"


def test_one_that_had_to_stay_is_not_tried_again_at_once_but_aws_does_not_wait() -> None:
    assert [move.node_id for move in wanted({2: spot(60)}, wounded=(0,), not_before=NOW + 1)] == [NODES[2]]
    assert [move.node_id for move in wanted({}, wounded=(0,), not_before=NOW)] == [NODES[0]]


def test_once_a_stop_is_asked_for_nobody_is_added_and_nobody_spared() -> None:
    (move,) = wanted({}, wounded=(0,))
    asked = (replace(move, asked_at=NOW),)
    assert wanted({2: spot(60)}, known=asked) == asked
    assert wanted({}, known=(move,)) == (), "it is well again"


def test_a_node_that_a_person_wants_is_left_after_what_is_wrong_and_never_lent() -> None:
    asked = node(NODES[1], request=DRAIN)
    fine = NodeVerdict(node_id=NODES[1], disposition=NodeDisposition.ALIVE)
    (move,) = moves.wanted((), NODES[1:2], {NODES[1]: fine}, {NODES[1]: asked}, now=NOW, not_before=0.0)
    assert (move.cause, move.remedy, move.evidence, move.ends_at) == (
        Cause.REQUESTED,
        Remedy.RELEASE,
        DRAIN,
        None,
    )
    assert not move.is_announced
    assert moves.wanted((), NODES[1:2], {NODES[1]: fine}, {NODES[1]: asked}, now=NOW, not_before=NOW + 1) == ()
    (faulty,) = moves.wanted((), NODES[1:2], {NODES[1]: impaired(NODES[1])}, {NODES[1]: asked}, now=NOW, not_before=0.0)
    assert (faulty.cause, faulty.remedy) == (Cause.NODE_FAULT, Remedy.REBOOT)
    assert moves.is_ready(node(SPARES[0]), NOW, TIMEOUTS)
    assert not moves.is_ready(node(SPARES[0], request=structs.replace(DRAIN, request=NodeRequest.HOLD)), NOW, TIMEOUTS)


@pytest.mark.parametrize(("remedy", "is_left"), [(Remedy.RETIRE, True), (Remedy.HOLD, False), (None, False)])
def test_of_lost_members_only_those_to_retire_are_left_as_planned(remedy: Remedy | None, is_left: bool) -> None:
    gone = NodeVerdict(node_id=NODES[1], disposition=NodeDisposition.GONE, remedy=remedy)
    found = moves.wanted((), NODES[1:2], {NODES[1]: gone}, {NODES[1]: node(NODES[1])}, now=NOW, not_before=0.0)
    assert bool(found) is is_left


@pytest.mark.parametrize(
    ("ends", "stopped_seconds", "promised_seconds", "is_stuck"),
    [
        pytest.param((None,), TIMEOUTS.blind_wait_seconds, 0.0, False, id="at the limit"),
        pytest.param((None,), TIMEOUTS.blind_wait_seconds + 1, 0.0, True, id="after the limit"),
        pytest.param((None,), TIMEOUTS.blind_wait_seconds + 7, 7.0, False, id="at the script's own limit"),
        pytest.param((None,), TIMEOUTS.blind_wait_seconds + 8, 7.0, True, id="after the script's own limit"),
        pytest.param((None, NOW), TIMEOUTS.blind_wait_seconds + 1, 7.0, True, id="aws waits for no script"),
    ],
)
def test_a_stop_is_given_up_without_progress(
    ends: tuple[float | None, ...], stopped_seconds: float, promised_seconds: float, is_stuck: bool
) -> None:
    """The time counts from the request or from the last progress, whichever is later."""
    (move,) = wanted({}, wounded=(0,))
    for asked_ago, progress_ago in ((stopped_seconds, 1e6), (1e6, stopped_seconds)):
        known = [replace(move, asked_at=NOW - asked_ago, ends_at=at) for at in ends]
        assert moves.is_stuck(known, NOW - progress_ago, NOW, TIMEOUTS, promised_seconds) is is_stuck
    assert not moves.is_stuck([move], 0.0, NOW, TIMEOUTS, 0.0), "no stop was requested"


def test_the_newest_notice_tells_when_the_first_departing_node_ends() -> None:
    first, second = wanted({1: spot(60), 2: spot(90)})
    assert moves.ends_at((first, second), {}, NOW) == NOW + 60
    assert moves.ends_at((first, second), {NODES[2]: node(NODES[2], spot(30))}, NOW) == NOW + 30
    assert moves.ends_at((first,), {NODES[1]: node(NODES[1], spot(70))}, NOW) == NOW + 70
    endless = Notice(kind=NoticeKind.TERMINATING, message="")
    assert moves.ends_at((first,), {NODES[1]: node(NODES[1], endless)}, NOW) == NOW + 60
    assert moves.ends_at((), {}, NOW) is None


def test_of_announced_nodes_the_one_that_ends_first_leaves_first_and_one_without_a_time_last() -> None:
    endless = Notice(kind=NoticeKind.TERMINATING, message="")
    found = wanted({0: endless, 1: spot(120), 2: spot(60)}, wounded=(3,))
    assert [move.node_id for move in found] == [NODES[2], NODES[1], NODES[0], NODES[3]]
    assert all(move.may_terminate for move in found)


def test_a_lemon_that_leaves_adds_no_line_to_its_own_history() -> None:
    (move,) = wanted({}, wounded=(1,))
    assert moves.fault(move, 1.0, NOW).implicates is not None
    assert moves.fault(replace(move, is_history=True), 1.0, NOW).implicates is None
