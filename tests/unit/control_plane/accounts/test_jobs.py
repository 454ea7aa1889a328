"""The sentences of the reasons for jobs' states. Sentences that an earlier version stored stay readable."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from control_plane.accounts import jobs
from control_plane.core.observed.causes import JoinsFail, LaunchesFail
from control_plane.core.observed.facts import NotStopped
from control_plane.core.observed.incidents import AwaitsStore, StoreWaitStage
from control_plane.core.observed.reasons import (
    AwaitsConsent,
    JobFact,
    JobNote,
    JobReason,
    Observes,
    Starting,
    Unclear,
    Waits,
)
from control_plane.core.observed.steps import HolderState, LostHolder, RepeatedWork
from control_plane.core.verification import Blocked
from everstep.protocol.agent_messages import Obstacle
from everstep.protocol.ids import Generation, NodeId, Step

NODES = (NodeId("i-1"), NodeId("i-2"))
LATE = JobNote(what=JobFact.MAX_COST_SPENT, limit=100.0)
LAUNCH = (LaunchesFail(text="AWS has none"),)
STORE = Blocked(obstacle=Obstacle.DENIED, since=0.0, next_attempt_at=10.0, detail="i-1: AccessDenied")
CHOICE = RepeatedWork(
    base_step=Step(2),
    newest_step=Step(9),
    after=Generation(1),
    seconds=None,
    since=0.0,
    holders=(LostHolder(node_id=NODES[0], state=HolderState.SILENT),),
)
CONSENT = AwaitsConsent(choice=CHOICE, job="gpt", limit_minutes=30)


@pytest.mark.parametrize("what", JobFact)
def test_every_fact_of_a_job_has_a_sentence_with_all_its_fields(what: JobFact) -> None:
    words = jobs.reason(JobNote(what=what, step=Step(5), node_ids=NODES, stop=LATE, name="gpt"))
    assert words
    assert "{" not in words
    assert jobs.message(JobNote(what=what, step=Step(5), node_ids=NODES, stop=LATE, name="gpt")) == words


@pytest.mark.parametrize(
    ("fact", "words"),
    [
        (
            JobNote(what=JobFact.STOPPED, step=Step(7), checkpoint_step=Step(7), stop=LATE),
            "stopped at step 7: MaxCostUsd (100) is spent; the newest checkpoint is step 7",
        ),
        (
            JobNote(
                what=JobFact.KILLED, stop="as an earlier version said", because=(NotStopped(seconds=5, is_over=False),)
            ),
            "stopped (as an earlier version said), but not at one step: no step within 5 s; there is no checkpoint",
        ),
        (
            JobNote(what=JobFact.KILLS, because=(NotStopped(seconds=5, is_over=True),)),
            "stops without agreement: its ranks did not end within 5 s",
        ),
        (
            JobNote(what=JobFact.STOPPED_WITHOUT_RANKS, stop=LATE, lost_step_count=3),
            "stopped: MaxCostUsd (100) is spent; no rank was running; 3 committed steps were only in the memory of its "
            "nodes: there is no checkpoint",
        ),
        (
            JobNote(what=JobFact.COMPLETED, step=Step(9), committed_step=Step(9), checkpoint_step=Step(4)),
            "every rank ended with success after step 9. Warning: step 9 did not become a checkpoint; the newest "
            "checkpoint is step 4",
        ),
        (
            JobNote(
                what=JobFact.COMPLETED,
                step=Step(9),
                committed_step=Step(4),
                checkpoint_step=Step(4),
                target_step=Step(10),
            ),
            "every rank ended with success after step 9. Warning: no later step than 4 was kept; the newest checkpoint "
            "is step 4. Warning: the target is step 10; the end of the log shows why the script ended early",
        ),
        (
            JobNote(what=JobFact.COMPLETED, step=Step(9), committed_step=Step(9), checkpoint_step=Step(9)),
            "every rank ended with success after step 9",
        ),
        (JobNote(what=JobFact.TRAINS, step=Step(0), count=4, node_count=4), "trains from step 0"),
        (
            JobNote(what=JobFact.TRAINS, step=Step(5), count=3, node_count=4),
            "trains on 3 of 4 nodes from step 5; grows back when capacity returns",
        ),
        (
            JobNote(
                what=JobFact.LACKS_NODES_AND_SHRINKS,
                missing_count=1,
                lack_reasons=LAUNCH,
                count=4,
                node_count=4,
                seconds=30.0,
            ),
            "continues on 4 nodes: waits for 1 node: AWS has none; none came within 30 s",
        ),
        (Unclear(doing=JobNote(what=JobFact.TRAINS), silent=NODES), "trains; i-1, i-2 silent"),
        (Unclear(doing=None, silent=NODES[:1]), "starts; i-1 silent"),
        (
            Unclear(doing=Starting(phase="start", node_ids=NODES, seconds=10), silent=NODES[:1]),
            "running the script up to everstep.training.init on i-1, i-2 (10 s); i-1 silent",
        ),
        (
            Observes(taken_over_by="ann", impaired=NODES[:1], lost=NODES[1:]),
            "taken over by ann: Everstep decides nothing; it observes: i-1 is impaired; i-2 is lost",
        ),
        (Observes(pause="ann: drill"), "ann: drill: Everstep decides nothing"),
        (
            Waits(
                missing_count=2,
                lack_reasons=(*LAUNCH, JoinsFail(count=2, patience_seconds=9.0)),
                smaller=JobNote(what=JobFact.NEEDS_MORE_NODES, count=3),
                stop=LATE,
            ),
            "stops (MaxCostUsd (100) is spent) once it trains, so that no step is lost: needs at least 3 nodes to "
            "continue; waits for 2 nodes: AWS has none; its agent has not connected, for 2 instances in a row: check "
            "the user data and its log on the instance, the network path to this server (security group), and the "
            "join token; the next instance is replaced after 9 s",
        ),
        (
            AwaitsStore(stage=StoreWaitStage.RETRIES, wait=STORE, until=60.0),
            "waits: a store denies access since 00:00:00 UTC (i-1: AccessDenied); tries again at 00:00:10 UTC; keeps "
            "its nodes until 00:01:00 UTC",
        ),
        (
            AwaitsStore(stage=StoreWaitStage.GIVES_UP, wait=STORE, step=Step(3)),
            "gives its nodes back, because a store denies access since 00:00:00 UTC (i-1: AccessDenied); it queues "
            "again in 10 minutes and restores step 3",
        ),
    ],
)
def test_the_sentence_of_a_reason(fact: JobReason, words: str) -> None:
    assert jobs.reason(fact) == words


@pytest.mark.parametrize(
    ("fact", "words"),
    [
        (Waits(missing_count=1, lack_reasons=LAUNCH), "waits for 1 node"),
        (Waits(late=NODES), "waits for i-1, i-2 to prepare"),
        (Waits(missing_count=1, consent=CONSENT), "waits for a decision"),
        (CONSENT, "waits for a decision"),
        (AwaitsStore(stage=StoreWaitStage.LOADS, wait=STORE), "waits for a store that is out of reach"),
        (AwaitsStore(stage=StoreWaitStage.GIVES_UP, wait=STORE), None),
        (Waits(missing_count=1, stop=LATE), None),
        (JobNote(what=JobFact.TRAINS), None),
    ],
)
def test_for_what_a_job_waits_follows_from_the_fact(fact: JobReason, words: str | None) -> None:
    assert jobs.waiting(fact) == words


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        ("waits for an earlier version", "waits for an earlier version"),
        ({"kind": "Told", "parts": ["stops: ", {"kind": "Recorded", "text": "a fact"}]}, "stops: a fact"),
        ({"kind": "Waits", "missing_count": 2, "text": "AWS has none", "before": "x", "aim": "y"}, "waits for 2 nodes"),
    ],
)
def test_a_reason_that_an_earlier_version_stored_stays_readable(stored: Any, words: str) -> None:
    assert jobs.reason(msgspec.convert(stored, JobReason)) == words  # type: ignore[arg-type]
