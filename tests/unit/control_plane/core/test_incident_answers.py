"""Tests the answers about an incident: its headline, why it happened, and what Everstep has done about it."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from control_plane.core.incident_accounts import Account, HeldNode, Outcome, verdict
from control_plane.core.incident_answers import done, headline, why
from control_plane.core.observed.fleets import Hold
from control_plane.core.observed.nodes import Cause
from everstep.protocol.ids import Step
from tests.unit.control_plane.core.test_incident_accounts import FAILED, OPEN, RECOVERED, SHORT, WAITING

ABSENT = "no control plane was running for 172 s, until 09:19:54 UTC"
SHUTDOWN = "EC2 reports i-1 as terminated (Client.UserInitiatedShutdown: User initiated shutdown)"
SAME = "the same failure occurred 4 times after step 7, also without i-2: error (1)\nTraceback\nKeyError: 'labels'"
NINE = (
    "9 failures occurred since 00:39:43 UTC without a step beyond 1132, the last 4 are identical: error (1)\n"
    "[rank0]: KeyError: 'labels'"
)
CRASHED = "rank 3 on i-1 ended: crashed, signal 11"
EXITED = "rank 3 on i-1 ended: error, code 1"


def case(cause: Cause, *evidence: str, account: Account = RECOVERED) -> Account:
    return replace(account, cause=cause, evidence=evidence)


@pytest.mark.parametrize(
    ("account", "words"),
    [
        (
            case(Cause.NODE_FAULT, EXITED, "the agent of i-1 reports gpu_xid: gpu 5 (NVIDIA H100): Xid 79"),
            "The GPU reported Xid 79 (the GPU has fallen off the bus).",
        ),
        (
            case(Cause.NODE_FAULT, "the agent of i-1 reports disk_read_only: /"),
            "i-1 reported disk_read_only.",
        ),
        (
            case(Cause.INSTANCE_TERMINATED, SHUTDOWN),
            "A user or a program terminated the instance through the EC2 API.",
        ),
        (
            case(Cause.INSTANCE_TERMINATED, SHUTDOWN, ABSENT),
            "A user or a program terminated the instance through the EC2 API, and the control plane was down for "
            "2 min 52 s (up again since 09:19:54 UTC).",
        ),
        (
            replace(WAITING, evidence=(SHUTDOWN,)),
            "A user or a program terminated the instance through the EC2 API, and AWS is out of capacity.",
        ),
        (
            replace(WAITING, evidence=(SHUTDOWN,), wait=replace(SHORT, message="The image does not exist")),
            "A user or a program terminated the instance through the EC2 API, and AWS launches no replacement.",
        ),
        (
            case(Cause.INSTANCE_TERMINATED, "EC2 reports i-1 as terminated (Server.Strange: odd)"),
            "Cause unknown: EC2 reports i-1 as terminated and gives the reason “Server.Strange: odd”.",
        ),
        (
            case(Cause.INSTANCE_TERMINATED, "EC2 reports i-1 as ended"),
            "Cause unknown: EC2 reports i-1 as ended and gives no reason.",
        ),
        (
            case(Cause.NODE_UNREACHABLE, "the agent of i-1 was silent for 7.4 s"),
            "Cause unknown, either the node or its network: no message for 7.4 s.",
        ),
        (
            case(Cause.NODE_UNREACHABLE, "EC2's status check failed"),
            "Cause unknown, either the node or its network: EC2's status check failed.",
        ),
        (case(Cause.HANG, "hang: all ranks stood still", "b"), "Cause unknown: all ranks stood still."),
        (case(Cause.HANG), "Cause unknown: no evidence was recorded."),
        (
            case(Cause.RANK_EXIT, CRASHED),
            "Cause unknown: rank 3 on i-1 ended by signal 11 (SIGSEGV, an invalid memory access).",
        ),
        (case(Cause.RANK_EXIT, EXITED), "Cause unknown: rank 3 on i-1 ended with exit code 1."),
        (
            case(
                Cause.RANK_EXIT, EXITED, "rank 3 on i-1 ran out of GPU memory: CUDA out of memory; lower the batch size"
            ),
            "Rank 3 on i-1 ran out of GPU memory: CUDA out of memory; lower the batch size.",
        ),
        (case(Cause.DRILL, "ann asked for a drill"), "Ann asked for a drill."),
        (case(Cause.DRILL), "Cause unknown: no evidence was recorded."),
    ],
)
def test_the_cause_is_one_sentence_or_unknown_with_the_evidence(account: Account, words: str) -> None:
    assert why(account) == words


@pytest.mark.parametrize(
    ("account", "words"),
    [
        (case(Cause.NODE_FAULT, "the agent of i-1 reports gpu_xid: gpu 5: Xid 79"), "GPU 5 of i-1 failed"),
        (case(Cause.NODE_FAULT, "the agent of i-1 reports disk_read_only: /"), "i-1 reported disk_read_only"),
        (case(Cause.NODE_FAULT, "x"), "A node reported a fault"),
        (case(Cause.INSTANCE_TERMINATED, SHUTDOWN), "An instance was terminated"),
        (
            case(Cause.INSTANCE_TERMINATED, SHUTDOWN, ABSENT),
            "An instance was terminated while the control plane was down",
        ),
        (replace(FAILED, job_reason=SAME), "The training script raised KeyError"),
        (FAILED, "A training process failed"),
    ],
)
def test_the_headline_is_as_specific_as_the_stored_facts(account: Account, words: str) -> None:
    assert headline(account) == words


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        (
            SAME,
            "The script failed 4 times in step 8: KeyError: 'labels' on rank 3. It also failed on another node, so the "
            "cause is the script or its data.",
        ),
        (
            SAME.replace("also without i-2", "also without i-2, also from an older state than step 7"),
            "The script failed 4 times in step 8: KeyError: 'labels' on rank 3. It also failed on another node and from "
            "an older step, so the cause is the script or its data.",
        ),
        (
            SAME.replace(", also without i-2", ""),
            "The script failed 4 times in step 8: KeyError: 'labels' on rank 3. The cause is probably the script or its "
            "data.",
        ),
        (
            SAME.replace("after step 7, also without i-2", "before its first step"),
            "The script failed 4 times before its first step: KeyError: 'labels' on rank 3. The cause is probably the "
            "script or its data.",
        ),
        (
            NINE,
            "The script failed 9 times without a step beyond 1,132: KeyError: 'labels' on rank 3. The cause is probably "
            "the script or its data.",
        ),
        ("error (1)\nKeyError: 'labels'", "The training script raised KeyError: 'labels' on rank 3."),
    ],
)
def test_the_cause_of_a_failed_script_is_the_exception_of_the_verdict(reason: str, words: str) -> None:
    """The evidence of an earlier launch names a signal, which must not replace the exception."""
    account = replace(FAILED, evidence=(CRASHED, EXITED), job_reason=reason)
    assert why(account) == words
    assert "KeyError: 'labels'" in verdict(account, 500.0)


@pytest.mark.parametrize("cause", Cause)
@pytest.mark.parametrize("outcome", Outcome)
def test_every_incident_has_both_answers_as_sentences(cause: Cause, outcome: Outcome) -> None:
    account = case(cause, "something happened.", account=replace(RECOVERED, outcome=outcome))
    for sentence in (why(account), *done(account)):
        assert sentence[0].isupper()
        assert sentence.endswith(".")
        assert not sentence.endswith("..")
        assert "  " not in sentence


AGREED = "stop at an agreed step and move the ranks of i-1 to other nodes; the remaining nodes hold its last step"
HELD = HeldNode(node_id="i-1", hold=Hold.INSPECTION, reason="")
RESUMED = "Training resumed from step 10, from the memory of other nodes"
NEWER = f"{RESUMED}, because no complete copy of step 12 existed."


@pytest.mark.parametrize(
    ("account", "sentences"),
    [
        (
            replace(RECOVERED, decision=AGREED, reached_step=Step(10), held=(HELD,)),
            (
                "Everstep took i-1 out of use, moved its ranks to i-2 and resumed training from step 10.",
                "All ranks stopped after step 10, which every rank had finished.",
                f"{RESUMED}.",
            ),
        ),
        (
            replace(RECOVERED, terminated_ids=("i-1",)),
            ("Everstep terminated i-1, moved its ranks to i-2 and resumed training from step 10.", NEWER),
        ),
        (RECOVERED, ("Everstep moved the ranks of i-1 to i-2 and resumed training from step 10.", NEWER)),
        (
            replace(RECOVERED, cause=Cause.SHRUNK, replacement_instance_ids=(), node_count_after=3),
            ("Everstep continued on 3 nodes without i-1 and resumed training from step 10.", NEWER),
        ),
        (
            replace(WAITING, replacement_instance_ids=(), from_step=None),
            ("Everstep stopped all ranks and requested a replacement from AWS, which launched none.",),
        ),
        (
            replace(WAITING, replacement_instance_ids=(), wait=replace(SHORT, missing_count=2, failed_count=5)),
            ("Everstep stopped all ranks and requested 2 replacements from AWS, which launched none in 5 attempts.",),
        ),
        (
            replace(WAITING, replacement_instance_ids=(), wait=replace(SHORT, failed_count=1)),
            ("Everstep stopped all ranks and requested a replacement from AWS, which launched none in 1 attempt.",),
        ),
        (replace(OPEN, replacement_instance_ids=()), ("Everstep stopped all ranks.",)),
    ],
)
def test_done_is_one_sentence_and_its_details(account: Account, sentences: tuple[str, ...]) -> None:
    assert done(account) == sentences


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"generation_before": 5, "generation_after": 9, "job_reason": NINE},
            "restarted the job after each failure and gave up after 9 failures",
        ),
        (
            {"generation_before": 1, "generation_after": 2, "job_reason": "a node failed to load its shards"},
            "restarted all ranks on the same nodes and gave the job up",
        ),
        (
            {"replacement_instance_ids": ("i-2",), "job_reason": SAME},
            "restarted the job after each failure, once on another node, and gave up after 4 failures",
        ),
        (
            {"replacement_instance_ids": ("i-2",), "job_reason": "a node failed to load its shards"},
            "restarted all ranks with i-2 in place of one node and gave the job up",
        ),
    ],
)
def test_done_about_a_failed_job_has_the_count_of_the_cause(changes: dict, words: str) -> None:
    account = replace(FAILED, **{"replacement_instance_ids": (), **changes})
    assert done(account) == (f"Everstep {words}.",)
    count = re.search(r"after (\d+) failures", words)
    assert count is None or f"The script failed {count[1]} times" in why(account)


def test_a_skipped_step_is_the_reason_for_an_older_one() -> None:
    decision = "step 12 is skipped once, to find out whether the state or the script is at fault: the same failure"
    account = replace(RECOVERED, cause=Cause.RANK_EXIT, decision=decision, instance_ids=(), replacement_instance_ids=())
    assert done(account) == (
        "Everstep skipped step 12 once and resumed training from step 10.",
        "The launch without step 12 showed whether the state or the script was at fault.",
        f"{RESUMED}.",
    )
