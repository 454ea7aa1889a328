"""Tests of the sentences of facts."""

from __future__ import annotations

import typing

import msgspec
import pytest

from control_plane.accounts.facts import drill_outcome, sentence
from control_plane.accounts.responses import response
from control_plane.core.observed.drills import DrillKind, DrillOutcome
from control_plane.core.observed.facts import (
    AgentSilent,
    Announced,
    DrillOrdered,
    Fact,
    Faulty,
    InstanceEnded,
    Involvement,
    Lemon,
    LostEachOther,
    NodeFaulty,
    NodeRequest,
    RankEnded,
    RanksOnNodes,
    Recorded,
    Requested,
    Returned,
    SameStack,
    ShardLoss,
    ShardsLost,
    SilenceProof,
    Standstill,
    nodes_of,
    ranks_of,
)
from control_plane.core.observed.incidents import (
    Change,
    CheckpointWait,
    CheckpointWaitKind,
    GivesUp,
    LeavesNodes,
    Response,
    RestartsRanks,
    Shrinks,
    Tries,
)
from everstep.protocol.agent_messages import ExitClass, FaultCode, NoticeKind
from everstep.protocol.ids import NodeId, Rank, Step
from tests.unit.control_plane.accounts.values import ABSENT, NODE

SENTENCES: tuple[tuple[Fact, str], ...] = (
    (
        RankEnded(rank=Rank(3), node_id=NODE, exit_class=ExitClass.CRASHED, code=-9),
        "rank 3 on i-1 ended: crashed, signal 9",
    ),
    (
        InstanceEnded(node_id=NODE, state="terminated", text="Client.X: no"),
        "EC2 reports i-1 as terminated (Client.X: no)",
    ),
    (
        NodeFaulty(node_id=NODE, fault=Faulty(code="gpu_lost", text="gpu 3 is gone", is_repeated=True)),
        "the agent of i-1 reports the loss of a GPU: gpu 3 is gone; a reboot did not repair it",
    ),
    (
        AgentSilent(node_id=NODE, seconds=12.04, proof=SilenceProof.LIMIT, limit_seconds=10),
        "the agent of i-1 was silent for 12.0 s, longer than 10 s, and no step advanced",
    ),
    (
        AgentSilent(node_id=NODE, seconds=12, proof=SilenceProof.COORDINATOR),
        "the coordinator i-1 was silent for 12.0 s and no step was committed meanwhile",
    ),
    (
        Returned(
            node_id=NODE,
            to="job b",
            besides=Announced(node_id=NODE, notice=NoticeKind.SPOT_INTERRUPTION, text="two minutes"),
        ),
        "i-1 returns to the fleet: for job b; AWS announced for i-1: spot interruption (two minutes)",
    ),
    (
        AgentSilent(node_id=NODE, seconds=7.4, proof=SilenceProof.PEERS),
        "the agent of i-1 was silent for 7.4 s and other nodes could not reach it",
    ),
    (
        ShardsLost(ranks=(Rank(0), Rank(3)), how=ShardLoss.HOLDERS),
        "every node that held the shard of rank 0, 3 is lost",
    ),
    (ShardsLost(ranks=(Rank(0),), how=ShardLoss.MEMORY), "no remaining node holds the shard of rank 0"),
    (
        DrillOrdered(drill_id="drl-1", by="ann", drill=DrillKind.KILL_RANK, node_id=NODE, rank=Rank(1)),
        "a drill (drl-1): ann requested kill-rank on rank 1 on i-1",
    ),
    (ABSENT, "no control plane was running for 172 s, until 09:19:54 UTC"),
    (
        Requested(request=NodeRequest.DRAIN, node_id=NODE, by="ann", note="AWS announced for i-7 the same fault"),
        "a user requested to drain i-1 (ann): AWS announced for i-7 the same fault",
    ),
)


@pytest.mark.parametrize("code", FaultCode)
def test_a_sentence_contains_no_code_of_a_fault_or_a_cause(code: FaultCode) -> None:
    fault = NodeFaulty(
        node_id=NODE, fault=Faulty(code=code, text="details", xid=79 if code is FaultCode.GPU_XID else None)
    )
    lemon = Lemon(
        node_id=NODE,
        involvements=tuple(Involvement(what, "inc-1") for what in (code, "gpu_xid 79", "rank_exit")),
        hours=24,
    )
    for fact in (fault, fault.fault, lemon):
        assert "_" not in sentence(fact)
    assert "Xid 79 (the GPU has fallen off the bus) (inc-1), rank exit (inc-1)" in sentence(lemon)


def test_a_fact_names_its_nodes_and_ranks() -> None:
    stuck = RanksOnNodes((Rank(0), Rank(1)), (NODE, NodeId("i-2")))
    standstill = Standstill(stuck=stuck, phases=("train",), limit_seconds=5, seconds=6)
    assert (nodes_of(standstill), ranks_of(standstill)) == ((NODE, "i-2"), (0, 1))
    ended = SENTENCES[0][0]
    assert (nodes_of(ended), ranks_of(ended)) == ((NODE,), (3,))
    assert nodes_of(LostEachOther(node_id=NODE, departed=(NodeId("i-2"),))) == (NODE, "i-2")
    same = SameStack(ranks=(Rank(2),), text="")
    assert (nodes_of(same), ranks_of(same)) == ((), (2,))


def test_a_fact_has_its_sentence():
    assert [sentence(fact) for fact, _ in SENTENCES] == [words for _, words in SENTENCES]


def test_a_fact_stays_equal_in_the_database():
    for fact, _ in SENTENCES:
        assert msgspec.convert(msgspec.to_builtins(fact), Fact) == fact


def test_facts_have_different_names():
    names = [kind.__name__ for kind in typing.get_args(Fact)]
    assert len(set(names)) == len(names)


RESPONSES: tuple[tuple[Response, str], ...] = (
    (RestartsRanks(), "restart all ranks on the same nodes"),
    (
        GivesUp(after=RestartsRanks(replaced=(NODE, NodeId("i-2")))),
        "replace i-1, i-2 and restart all ranks; then give the job up",
    ),
    (LeavesNodes(node_ids=(NODE,), is_return=True), "stop at an agreed step and return i-1"),
    (
        LeavesNodes(node_ids=(NODE,), wait=CheckpointWait(why=CheckpointWaitKind.HELD_ELSEWHERE)),
        "stop at an agreed step and move the ranks of i-1 to other nodes; the remaining nodes hold its last step",
    ),
    (Shrinks(count=3, node_count=4), "continue on 3 of 4 nodes; grow when nodes return"),
    (
        Tries(change=Change(skipped_step=Step(12)), because=Recorded(text="the same failure")),
        "step 12 is skipped once, to find out whether the state or the script is at fault: the same failure",
    ),
)


def test_a_response_has_its_sentence():
    assert [response(value) for value, _ in RESPONSES] == [words for _, words in RESPONSES]


@pytest.mark.parametrize(
    ("outcome", "incident_id", "words"),
    [
        ("", "", ""),
        (DrillOutcome.TRAINED_ON, "i", "training has passed the step that it had reached before the drill"),
        (
            DrillOutcome.JOB_FAILED,
            "i",
            "the job failed before training passed the step that it had reached before the drill",
        ),
        (DrillOutcome.JOB_STOPPED, "", "the job stopped before the result of the drill was known"),
        ("the words of an earlier version", "i", "the words of an earlier version"),
    ],
)
def test_a_drill_tells_why_it_ended(outcome: DrillOutcome | str, incident_id: str, words: str) -> None:
    assert drill_outcome(outcome, incident_id) == words
