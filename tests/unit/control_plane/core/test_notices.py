"""What follows from an announcement, case by case; whole stories are in the golden incidents."""

from __future__ import annotations

import pytest

from control_plane.core import notices
from control_plane.core.observed import InstanceCondition, Move, NodeObserved, Notice
from control_plane.core.timeouts import ladder
from everstep.protocol.agent_messages import MemberPhase, MemberReport, NoticeKind, ShardProtection
from everstep.protocol.ids import Generation, JobName, NodeId, Rank, RunId, Step
from everstep.protocol.plan import CheckpointPlan, GenerationPlan, ObjectReference, PlanNode, RankPlan, ScriptPlan, SourceArchive

NOW = 10_000.0
TIMEOUTS = ladder(3.0)
REFERENCE = ObjectReference(bucket="b", key="k/")
NODES = tuple(NodeId(f"n{number}") for number in range(4))
SPARES = (NodeId("s0"), NodeId("s1"))


def plan() -> GenerationPlan:
    holders = {0: (0, 1), 1: (1, 0), 2: (2, 3), 3: (3, 2)}
    return GenerationPlan(
        job=JobName("gpt"),
        run=RunId("r"),
        generation=Generation(1),
        parent=Generation(0),
        base_step=Step(0),
        nodes=tuple(PlanNode(node_id=node, address="", peer_port=1, ranks=(Rank(rank),), keep=()) for rank, node in enumerate(NODES)),
        ranks=tuple(RankPlan(rank=Rank(rank), holders=tuple(NODES[holder] for holder in held), sources=()) for rank, held in holders.items()),
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
    values: dict[str, object] = {"instance": InstanceCondition.PRESENT, "is_connected": True, "has_reported": True, "notices": announced}
    return NodeObserved(node_id=name, **{**values, **changes})  # type: ignore[arg-type]


def move_of(announced: dict[int, Notice], spares: int = 0, upload_seconds: float | None = None) -> Move | None:
    nodes = {name: node(name, *([announced[place]] if place in announced else [])) for place, name in enumerate(NODES)}
    nodes |= {name: node(name) for name in SPARES}
    return notices.move_of(plan(), [*NODES, *SPARES[:spares]], nodes, upload_seconds=upload_seconds, now=NOW, timeouts=TIMEOUTS)


def left(move: Move | None) -> tuple[NodeId, ...]:
    return move.node_ids if move is not None else ()


def test_a_node_is_left_at_once_where_another_is_there() -> None:
    assert left(move_of({1: spot(120)}, spares=1)) == (NODES[1],)
    assert left(move_of({1: spot(120)})) == ()


def test_without_another_training_goes_on_until_a_stop_and_an_upload_just_fit_in() -> None:
    assert left(move_of({1: spot(30.1)})) == ()
    assert left(move_of({1: spot(30)})) == (NODES[1],)
    assert left(move_of({1: spot(45.1)}, upload_seconds=10)) == ()
    assert left(move_of({1: spot(45)}, upload_seconds=10)) == (NODES[1],)


def test_two_nodes_are_left_together_and_one_interruption_is_better_than_two() -> None:
    assert left(move_of({1: spot(60), 2: spot(120)}, spares=1)) == ()
    assert left(move_of({1: spot(60), 2: spot(120)}, spares=2)) == (NODES[1], NODES[2])
    assert left(move_of({1: spot(20), 2: spot(120)}, spares=1)) == (NODES[1],)
    assert left(move_of({1: spot(20), 2: spot(25), 3: spot(600)}, spares=1)) == (NODES[1], NODES[2])


def test_what_has_no_time_waits_for_another_node() -> None:
    endless = Notice(kind=NoticeKind.TERMINATING, message="")
    assert left(move_of({1: endless})) == ()
    assert left(move_of({1: endless}, spares=1)) == (NODES[1],)


def test_a_node_that_is_not_ready_takes_nobody_s_place() -> None:
    member = MemberReport(job=JobName("x"), run=RunId("x"), generation=Generation(1), phase=MemberPhase.EXITED)
    ready = {NODES[0]: node(NODES[0]), SPARES[0]: node(SPARES[0])}
    one = plan()
    assert notices.replacements(one, ready, ready, NOW, TIMEOUTS) == (SPARES[0],)
    for changes in ({"is_connected": False}, {"silent_seconds": 100.0}, {"instance": InstanceCondition.ENDED}, {"member": member}):
        assert notices.replacements(one, ready, {**ready, SPARES[0]: node(SPARES[0], **changes)}, NOW, TIMEOUTS) == ()
    assert notices.replacements(one, ready, {**ready, SPARES[0]: node(SPARES[0], spot(60))}, NOW, TIMEOUTS) == ()


@pytest.mark.parametrize(
    ("kind", "seconds", "is_urgent"),
    [
        (NoticeKind.SPOT_INTERRUPTION, 120, True),
        (NoticeKind.SPOT_INTERRUPTION, -500, True),
        (NoticeKind.SPOT_INTERRUPTION, -601, False),
        (NoticeKind.CAPACITY_BLOCK_END, -601, False),
        (NoticeKind.MAINTENANCE, 3600, True),
        (NoticeKind.MAINTENANCE, 3601, False),
        (NoticeKind.MAINTENANCE, -5000, True),
        (NoticeKind.TERMINATING, -5000, True),
        (NoticeKind.REBALANCE, 0, False),
    ],
)
def test_what_is_far_or_has_not_come_true_is_not_urgent(kind: NoticeKind, seconds: float, is_urgent: bool) -> None:
    notice = Notice(kind=kind, message="", ends_at=NOW + seconds)
    assert (notices.urgent(node(NODES[0], notice), NOW) is not None) == is_urgent


def test_the_earliest_of_several_announcements_counts() -> None:
    late, early, unknown = spot(100), spot(50), Notice(kind=NoticeKind.SPOT_INTERRUPTION, message="")
    assert notices.merged([late, unknown, early, late]) == (early,)
    assert notices.urgent(node(NODES[0], spot(50), Notice(kind=NoticeKind.TERMINATING, message="", ends_at=NOW + 20)), NOW) is not None


def test_a_shard_is_held_elsewhere_only_by_the_word_of_its_owner() -> None:
    def reports(view: dict[int, tuple[int, ...]]) -> dict[NodeId, MemberReport]:
        return {
            NODES[rank]: MemberReport(
                job=JobName("gpt"),
                run=RunId("r"),
                generation=Generation(1),
                phase=MemberPhase.RUNNING,
                protection=(
                    ShardProtection(rank=Rank(rank), holders=(), in_view=tuple(NODES[holder] for holder in held), committed=Step(1), payload_bytes=1),
                ),
            )
            for rank, held in view.items()
        }

    whole = {0: (0, 1), 1: (1, 0), 2: (2, 3), 3: (3, 2)}
    assert notices.is_held_elsewhere(plan(), reports(whole), [NODES[1]])
    assert not notices.is_held_elsewhere(plan(), reports(whole), [NODES[0], NODES[1]])
    assert not notices.is_held_elsewhere(plan(), reports({**whole, 1: (1,)}), [NODES[1]])
    assert not notices.is_held_elsewhere(plan(), reports({rank: held for rank, held in whole.items() if rank != 1}), [NODES[1]])


@pytest.mark.parametrize(
    ("waited", "ends_in", "upload", "is_replaceable", "is_held", "expected"),
    [
        (0, 120, 10.0, True, True, (True, "waits for its checkpoint: the last one took 10 s, 114 s were left")),
        (15, 120, 10.0, True, True, (False, "waited no longer for its checkpoint: the last one took 10 s")),
        (0, 120, 100.0, True, True, (False, "did not wait for its checkpoint: the last one took 100 s, 114 s were left")),
        (0, 120, None, True, True, (True, "waits for its checkpoint: none was measured, 114 s were left")),
        (30, 120, None, True, True, (False, "waited no longer for its checkpoint: none was measured")),
        (60, 120, 10.0, True, False, (True, "waits for its checkpoint: only the nodes that it leaves hold its last step, 114 s were left")),
        (60, 120, 10.0, False, True, (True, "waits for its checkpoint while no node can take the place, 114 s were left")),
        (114, 120, 10.0, False, False, (False, "there was no time left for its checkpoint")),
        (0, None, 10.0, True, True, (True, "waits for its checkpoint: the last one took 10 s, 120 s were left")),
    ],
)
def test_a_checkpoint_is_waited_for_where_time_allows(
    waited: float, ends_in: float | None, upload: float | None, is_replaceable: bool, is_held: bool, expected: tuple[bool, str]
) -> None:
    move = Move(node_ids=NODES[:1], evidence=("",), asked_at=NOW, ends_at=None if ends_in is None else NOW + ends_in)
    found = notices.checkpoint_wait(
        move,
        stopped_at=NOW,
        upload_seconds=upload,
        is_replaceable=is_replaceable,
        is_held=is_held,
        now=NOW + waited,
        timeouts=TIMEOUTS,
    )
    assert found == expected
