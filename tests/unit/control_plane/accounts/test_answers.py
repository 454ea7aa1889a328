"""Tests the answers about an incident: its headline, why it happened, and what Everstep has done about it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from control_plane.accounts.answers import done, headline, why
from control_plane.accounts.incidents import Account, IncidentOutcome, verdict
from control_plane.core.duties import HeldNode
from control_plane.core.observed.causes import NOTHING
from control_plane.core.observed.facts import (
    AgentSilent,
    Fact,
    Faulty,
    HangProof,
    NodeFaulty,
    RankEnded,
    RanksOnNodes,
    Recorded,
    Standstill,
)
from control_plane.core.observed.fleets import Hold
from control_plane.core.observed.incidents import Change, LeavesNodes, Tries
from control_plane.core.observed.nodes import Cause
from everstep.protocol.agent_messages import ExitClass, MemoryEnd, MemoryKind, MemorySource
from everstep.protocol.ids import NodeId, Rank, Step
from tests.unit.control_plane.accounts.test_incidents import FAILED, OPEN, RECOVERED, SHORT, WAITING
from tests.unit.control_plane.accounts.values import ABSENT, CRASHED, EXITED, NODE, XID, ended, gave_up

BY_API = "Someone outside Everstep terminated it."
SPOT = ended("Spot instance termination", code="Server.SpotInstanceTermination")
SHUTDOWN = ended("User initiated shutdown", code="Client.UserInitiatedShutdown")
READ_ONLY = NodeFaulty(node_id=NODE, fault=Faulty(code="disk_read_only", text="/"))
TRIED = "Everstep also tried i-2 in place of a node."
FAILED_ALONE = replace(FAILED, generation_before=1, generation_after=4)
"""A failed job whose 3 restarts all belong to this incident."""
HUNG = Standstill(
    stuck=RanksOnNodes((Rank(0), Rank(1)), (NodeId("i-1"),), are_all=True),
    phases=("train",),
    limit_seconds=30.0,
    seconds=95.0,
    proof=HangProof.ASLEEP,
)
OUT_OF_MEMORY = RankEnded(
    rank=Rank(3),
    node_id=NodeId("i-1"),
    exit_class=ExitClass.OUT_OF_MEMORY,
    code=1,
    memory=MemoryEnd(source=MemorySource.EXCEPTION, kind=MemoryKind.GPU, words="CUDA out of memory"),
)


def case(cause: Cause, *evidence: Fact, account: Account = RECOVERED) -> Account:
    return replace(account, cause=cause, evidence=evidence)


@pytest.mark.parametrize(
    ("account", "words"),
    [
        (
            case(Cause.NODE_FAULT, EXITED, XID),
            "Xid 79 (the GPU has fallen off the bus).",
        ),
        (
            case(Cause.NODE_FAULT, READ_ONLY),
            "i-1 reported a read-only disk.",
        ),
        (
            case(Cause.INSTANCE_TERMINATED, SHUTDOWN),
            BY_API,
        ),
        (
            case(Cause.INSTANCE_TERMINATED, SHUTDOWN, account=replace(RECOVERED, terminated_ids=("i-1",))),
            "Everstep terminated the instance.",
        ),
        (
            case(Cause.INSTANCE_TERMINATED, SHUTDOWN, account=replace(RECOVERED, terminated_ids=("i-2",))),
            BY_API,
        ),
        (
            case(Cause.INSTANCE_TERMINATED, SPOT, account=replace(RECOVERED, terminated_ids=("i-1",))),
            "AWS took the Spot instance back.",
        ),
        (
            case(Cause.INSTANCE_TERMINATED, SHUTDOWN, ABSENT),
            f"{BY_API} Outage: cause unknown.",
        ),
        (replace(WAITING, evidence=(SHUTDOWN,)), BY_API),
        (
            case(Cause.INSTANCE_TERMINATED, ended("odd", code="Server.Strange")),
            "Cause unknown: EC2 reports i-1 as terminated, gives the reason “Server.Strange: odd”, but does not say "
            "who ended it.",
        ),
        (
            case(Cause.INSTANCE_TERMINATED, ended(state="ended")),
            "Cause unknown: EC2 reports i-1 as ended, gives no reason and does not say who ended it.",
        ),
        (
            case(Cause.NODE_UNREACHABLE, AgentSilent(node_id=NODE, seconds=7.4)),
            "Cause unknown: no message for 7.4 s.",
        ),
        (
            case(Cause.NODE_UNREACHABLE, Recorded(text="EC2's status check failed")),
            "Cause unknown: EC2's status check failed.",
        ),
        (
            replace(case(Cause.HANG), evidence=(HUNG,)),
            "Cause unknown: all 2 ranks made no progress in train for 95 s, the limit is 30 s: no stack changed between "
            "two stack dumps, and the ranks used neither CPU nor GPU.",
        ),
        (case(Cause.HANG), "Cause unknown: no evidence was recorded."),
        (
            case(Cause.RANK_EXIT, CRASHED),
            "Cause unknown: rank 3 on i-1 ended by signal 11 (SIGSEGV, an invalid memory access).",
        ),
        (case(Cause.RANK_EXIT, EXITED), "Cause unknown: rank 3 on i-1 ended with exit code 1."),
        (
            replace(case(Cause.RANK_EXIT), evidence=(EXITED, OUT_OF_MEMORY)),
            "Rank 3 on i-1 ran out of GPU memory: CUDA out of memory; lower the batch size, checkpoint activations, or "
            "shard the model over more GPUs.",
        ),
        (case(Cause.DRILL, Recorded(text="ann asked for a drill")), "Ann asked for a drill."),
        (case(Cause.DRILL), "Cause unknown: no evidence was recorded."),
    ],
)
def test_the_cause_is_one_sentence_or_unknown_with_the_evidence(account: Account, words: str) -> None:
    assert why(account) == words


@pytest.mark.parametrize(
    ("account", "words"),
    [
        (case(Cause.NODE_FAULT, XID), "GPU 5 of i-1 failed"),
        (case(Cause.NODE_FAULT, READ_ONLY), "i-1 reported a read-only disk"),
        (case(Cause.NODE_FAULT, Recorded(text="x")), "i-1 reported a fault"),
        (case(Cause.INSTANCE_TERMINATED, SHUTDOWN), "i-1 was terminated"),
        (
            replace(case(Cause.INSTANCE_TERMINATED, SHUTDOWN), faulted_instance_ids=()),
            "An instance was terminated",
        ),
        (
            replace(case(Cause.INSTANCE_TERMINATED, SHUTDOWN), faulted_instance_ids=("i-1", "i-2")),
            "An instance was terminated",
        ),
        (case(Cause.NODE_UNREACHABLE), "i-1 became unreachable"),
        (
            case(Cause.NODE_FAULT, XID, ABSENT),
            "GPU 5 of i-1 failed during an Everstep outage",
        ),
        (
            case(Cause.INSTANCE_TERMINATED, SHUTDOWN, ABSENT),
            "i-1 was terminated during an Everstep outage",
        ),
        (replace(FAILED, job_reason=gave_up()), "The training script raised KeyError"),
        (FAILED, "A training process failed"),
    ],
)
def test_the_headline_is_as_specific_as_the_stored_facts(account: Account, words: str) -> None:
    nodes = account.faulted_instance_ids
    assert headline(account.cause, account.evidence, nodes, account.script_error) == words


def test_the_cause_of_a_failed_script_is_the_exception_of_the_verdict() -> None:
    """The evidence of an earlier launch names a signal, which must not replace the exception."""
    account = replace(FAILED, evidence=(CRASHED, EXITED), job_reason=gave_up())
    assert why(account) == "KeyError: 'labels', rank 3."
    assert "KeyError: 'labels'" in verdict(account, 500.0)


def test_the_cause_of_a_failed_script_names_the_place_of_the_exception() -> None:
    failed = replace(FAILED, evidence=(EXITED,), job_reason=gave_up(place="data.py:2"))
    assert why(failed) == "KeyError: 'labels' at data.py:2, rank 3."


@pytest.mark.parametrize("step", [1, 7, 1200])
def test_the_newest_step_of_the_account_is_the_last_lost_step(step: int) -> None:
    """The lost steps include the newest step that any launch of the incident finished.

    The failed rank of the last launch may have ended before this step.
    """
    failed = replace(FAILED_ALONE, job_reason=gave_up(), kept_step=None, reached_step=Step(step))
    assert done(failed)[1:] == (f"No launch passed step {step:,}.", TRIED)
    assert failed.lost_steps == step


def test_steps_before_the_jobs_initial_checkpoint_are_not_lost() -> None:
    failed = replace(FAILED_ALONE, kept_step=None, first_step=Step(1200), reached_step=Step(1203))
    assert failed.lost_steps == 3


def test_the_name_of_an_exception_keeps_its_small_letters() -> None:
    failed = replace(FAILED, evidence=(EXITED,), job_reason=gave_up("torch.OutOfMemoryError: full"))
    assert why(failed) == "torch.OutOfMemoryError: full, rank 3."


def test_a_job_that_failed_before_its_first_step_lost_none() -> None:
    failed = replace(FAILED_ALONE, job_reason=gave_up(), reached_step=Step(0))
    assert done(failed)[1:] == ("No launch finished a step.", TRIED)
    assert done(replace(failed, reached_step=None)) == done(failed)


@pytest.mark.parametrize("cause", Cause)
@pytest.mark.parametrize("outcome", IncidentOutcome)
def test_every_incident_has_both_answers_as_sentences(cause: Cause, outcome: IncidentOutcome) -> None:
    account = case(cause, Recorded(text="something happened."), account=replace(RECOVERED, outcome=outcome))
    for sentence in (why(account), *done(account)):
        assert sentence[0].isupper()
        assert sentence.endswith(".")
        assert not sentence.endswith("..")
        assert "  " not in sentence


AGREED = LeavesNodes(node_ids=(NODE,))
HELD = HeldNode(node_id="i-1", hold=Hold.INSPECTION, reason=NOTHING)
RESUMED = "Training resumed from step 10, from the memory of other nodes"
NEWER = f"{RESUMED}, because no complete copy of step 12 existed."


QUOTED = (
    "AWS reports: “We do not have sufficient p5.48xlarge capacity (a). Launching EC2 instance failed.”",
    "Pauses between attempts double from 30 s up to 15 min.",
)


@pytest.mark.parametrize(
    ("account", "sentences"),
    [
        (
            replace(RECOVERED, decision=AGREED, reached_step=Step(10), held=(HELD,)),
            (
                "Everstep resumed from step 10 with i-2 instead.",
                "Everstep took i-1 out of use.",
                "All ranks stopped after step 10, which every rank had finished.",
                f"{RESUMED}.",
            ),
        ),
        (
            replace(RECOVERED, terminated_ids=("i-1",)),
            ("Everstep terminated i-1 and resumed from step 10 with i-2 instead.", NEWER),
        ),
        (RECOVERED, ("Everstep resumed from step 10 with i-2 instead.", NEWER)),
        (
            replace(RECOVERED, cause=Cause.SHRUNK, replacement_instance_ids=(), node_count_after=3),
            ("Everstep continued on 3 nodes without i-1 and resumed from step 10.", NEWER),
        ),
        (
            replace(WAITING, replacement_instance_ids=(), from_step=None),
            ("Everstep requested 1 p5.48xlarge 2 times: AWS has none.", *QUOTED),
        ),
        (
            replace(
                WAITING,
                replacement_instance_ids=(),
                wait=replace(SHORT, missing_count=2, failed_count=5),
                instance_type="",
            ),
            ("Everstep requested 2 nodes 5 times: AWS has none.", *QUOTED),
        ),
        (
            replace(WAITING, replacement_instance_ids=(), wait=replace(SHORT, failed_count=1, is_shortage=False)),
            ("Everstep requested 1 p5.48xlarge once: AWS launches none.", *QUOTED),
        ),
        (replace(OPEN, replacement_instance_ids=()), ("Everstep stopped all ranks.",)),
        (
            replace(RECOVERED, restored_at=None, from_step=None),
            ("Everstep moved its ranks to i-2.",),
        ),
        (
            case(Cause.INSTANCE_TERMINATED, SHUTDOWN),
            (
                "Everstep resumed from step 10 with i-2 instead.",
                "AWS CloudTrail records who called TerminateInstances for i-1.",
                NEWER,
            ),
        ),
        (
            case(Cause.INSTANCE_TERMINATED, SHUTDOWN, account=replace(RECOVERED, terminated_ids=("i-1",))),
            ("Everstep terminated i-1 and resumed from step 10 with i-2 instead.", NEWER),
        ),
        (
            case(Cause.INSTANCE_TERMINATED, SPOT),
            ("Everstep resumed from step 10 with i-2 instead.", NEWER),
        ),
    ],
)
def test_done_is_one_sentence_and_its_details(account: Account, sentences: tuple[str, ...]) -> None:
    assert done(account) == sentences


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"generation_before": 5, "generation_after": 9, "job_reason": gave_up(count=9)},
            "gave up after 8 restarts",
        ),
        (
            {"generation_before": 1, "generation_after": 2, "job_reason": "a node failed to load its shards"},
            "restarted all ranks on the same nodes and gave the job up",
        ),
        (
            {"replacement_instance_ids": ("i-2",), "job_reason": gave_up()},
            "gave up after 3 restarts",
        ),
        (
            {"job_reason": gave_up(count=2)},
            "gave up after 1 restart",
        ),
        (
            {"job_reason": gave_up(count=1)},
            "gave the job up",
        ),
        (
            {"replacement_instance_ids": ("i-2",), "job_reason": "a node failed to load its shards"},
            "restarted all ranks with i-2 in place of one node and gave the job up",
        ),
    ],
)
def test_done_about_a_failed_job_says_whether_everstep_restarted_the_script(changes: dict, words: str) -> None:
    account = replace(FAILED, **{"replacement_instance_ids": (), **changes})
    assert done(account)[0] == f"Everstep {words}."


def test_done_about_growth_says_that_nodes_were_added_and_none_was_replaced() -> None:
    grown = replace(
        RECOVERED,
        cause=Cause.GROWN,
        instance_ids=(),
        faulted_instance_ids=(),
        replacement_instance_ids=("i-8", "i-9"),
        held=(),
        terminated_ids=(),
        node_count_before=2,
        node_count_after=4,
    )
    words = f"Everstep added i-8 and i-9 to continue on 4 nodes and resumed from step {grown.from_step:,}."
    assert done(grown)[0] == words


@pytest.mark.parametrize(("generation_after", "is_said"), [(None, True), (3, True), (4, False)])
def test_details_say_that_restarts_of_earlier_incidents_are_not_in_the_figures(
    generation_after: int | None, is_said: bool
) -> None:
    """The details mention earlier incidents only if some of the job's 3 restarts belong to earlier incidents.

    Generation 1 is before the incident. If the last generation is 4, all 3 restarts belong to this incident.
    """
    failed = replace(FAILED, job_reason=gave_up(), generation_before=1, generation_after=generation_after)
    assert ("The time and the cost of earlier restarts are in earlier incidents." in done(failed)) is is_said


def test_a_skipped_step_is_the_reason_for_an_older_one() -> None:
    skips = Tries(change=Change(skipped_step=Step(12)), because=Recorded(text="the same failure"))
    account = replace(RECOVERED, cause=Cause.RANK_EXIT, decision=skips, instance_ids=(), replacement_instance_ids=())
    assert done(account) == (
        "Everstep skipped step 12 once and resumed from step 10.",
        "The launch without step 12 showed whether the state or the script was at fault.",
        f"{RESUMED}.",
    )
