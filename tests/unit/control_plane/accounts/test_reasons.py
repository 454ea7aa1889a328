"""Tests of the sentences of reasons."""

from __future__ import annotations

import typing

import msgspec
import pytest

from control_plane.accounts.reasons import sentence, sentences
from control_plane.core.observed import causes
from control_plane.core.observed.causes import NodeFact, Reason, RefusalKind
from control_plane.core.observed.facts import Fact, Faulty, InstanceEnded, NodeRequest, Recorded, Requested
from control_plane.core.observed.nodes import Remedy
from control_plane.core.states import JobState, NodeState
from everstep.protocol.ids import NodeId

NODE = NodeId("i-1")
FAULT = Faulty(code="gpu_lost", text="gpu 3 is gone")
SENTENCES: tuple[tuple[Reason, str], ...] = (
    (InstanceEnded(node_id=NODE, state="terminated", text="Client.X"), "EC2: terminated (Client.X)"),
    (FAULT, "its agent reports the loss of a GPU: gpu 3 is gone"),
    (causes.StillFaulty(fault=FAULT), "after a reboot, its agent still reports the loss of a GPU: gpu 3 is gone"),
    (causes.WorksFor(job="gpt"), "works for gpt"),
    (causes.JobQueued(job="gpt"), "gpt is queued again"),
    (
        causes.GivenUp(job="gpt", remedy=Remedy.HOLD, because=Recorded(text="it was silent")),
        "unreachable by gpt: it was silent",
    ),
    (causes.Silent(seconds=9.5), "unreachable: its agent has been silent for more than 9.5 s"),
    (causes.Silent(text="a check failed"), "unreachable: its agent is silent and a check failed"),
    (
        causes.NotRebooted(is_accepted=False, seconds=900, because=FAULT),
        "EC2 did not reboot it within 900 s: its agent reports the loss of a GPU: gpu 3 is gone",
    ),
    (
        causes.NotRebooted(is_accepted=True, seconds=900, because=Recorded(text="x")),
        "its agent did not reconnect within 900 s of its reboot: x",
    ),
    (causes.Surplus(desired_count=3), "surplus: the fleet needs 3 nodes"),
    (causes.KeptForInspection(because=Recorded(text="x")), "kept for inspection: x"),
    (
        causes.NotKept(because=Recorded(text="x"), max_size=3, needed_count=2, held_count=1),
        "x; not kept for inspection: the group has MaxSize 3, jobs and spares need 2, and 1 nodes are held already",
    ),
    (
        causes.ReleasedToEnd(held=Recorded(text="x")),
        "a user released it for termination; it was held: x",
    ),
    (
        Requested(request=NodeRequest.REBOOT, node_id=NODE, by="ann", note="kernel", is_roll=True),
        "the roll of the fleet reboots i-1 (ann): kernel",
    ),
    (causes.AutomationPaused(text="ann paused all"), "frozen: ann paused all"),
    (causes.Drifted(drift=("A.", "B.")), "frozen: A. B."),
    (
        causes.ReplacementLimit(node_ids=(NODE,), recent_count=0, limit=0),
        "i-1 not replaced: 0 replacements in the last hour, the limit is 0; no replacement is allowed",
    ),
    (
        causes.LacksInstances(missing_count=2, because=causes.LaunchesFail(text="no p5", retry_at=1000.0)),
        "waits for 2 instances: no p5; Everstep retries at 00:16:40 UTC",
    ),
    (
        causes.LaunchesFail(suspension="", is_suspension_administrative=True, retry_at=1000.0),
        "its group's Launch process is suspended (AWS gives no reason): AWS suspended it after failures; "
        "Everstep resumes it and retries at 00:16:40 UTC",
    ),
    (
        causes.Keeps(desired_count=3, spare_probability=0.99),
        "keeps 3 nodes, enough that a spare is free with a probability of 0.99",
    ),
    (causes.RollWaits(because=causes.FleetFrozen()), "waits: the fleet is frozen"),
    (
        causes.RollWaits(because=causes.NotInService(node_id=NODE, state=NodeState.JOINING)),
        "waits until i-1 is in service; it is joining",
    ),
    (causes.RollWaits(because=causes.JobBusy(job="gpt", state=JobState.LOADING)), "waits: gpt is loading"),
    (causes.Rolls(reboots=True, node_ids=("i-1", "i-2"), is_paused=True), "paused; reboots i-1, i-2"),
    (causes.RollDone(reboots=False, node_count=3), "all 3 nodes are replaced"),
    (causes.RollStopped(finished_count=1, node_count=3), "stopped after 1 of 3 nodes"),
    (
        causes.TooFewAvailable(unavailable_count=2, max_unavailable=1),
        "unavailable nodes: 2, MaxUnavailable: 1",
    ),
    (
        causes.ShardUnprotected(job="gpt", rank=3, missing=("i-2",)),
        "the shard of rank 3 of gpt is not fully protected: i-2 does not hold it",
    ),
    (
        causes.JobUnsettled(job="gpt"),
        "gpt has an open incident, or has committed no step since its last launch",
    ),
    (
        causes.RequestRefused(
            why=RefusalKind.FLEET_FROZEN, node_id=NODE, state=NodeState.SPARE, frozen=(causes.Blind(),)
        ),
        "the fleet of the node i-1 is frozen: frozen: most of the fleet is silent although EC2 reports it as running",
    ),
    (
        causes.JoinsFail(count=2, patience_seconds=1800.0),
        "its agent has not connected, for 2 instances in a row: check the user data and its log on the instance, the "
        "network path to this server (security group), and the join token; the next instance is replaced after 1800 s",
    ),
    (
        causes.NotJoined(seconds=900),
        "its agent has not connected within 900 s: check the user data and its log on the instance, the network path "
        "to this server (security group), and the join token",
    ),
    (
        causes.CannotBeDeleted(min_size=1),
        "cannot be deleted while its Auto Scaling group has MinSize 1: set it to 0",
    ),
    (causes.Blind(), "frozen: most of the fleet is silent although EC2 reports it as running"),
    (causes.Happened(what=NodeFact.RELEASED), "a user released it"),
    (causes.FleetFrozen(), "the fleet is frozen"),
    (causes.JobBusy(job="gpt", state=JobState.LOADING), "gpt is loading"),
    (causes.NotInService(node_id=NODE, state=NodeState.JOINING), "i-1 is in service; it is joining"),
)


@pytest.mark.parametrize(("reason", "words"), SENTENCES, ids=lambda value: type(value).__name__)
def test_a_reason_has_its_sentence(reason: Reason, words: str) -> None:
    assert sentence(reason) == words


def test_every_kind_of_reason_has_an_example() -> None:
    assert {type(reason) for reason, _ in SENTENCES} >= {*typing.get_args(Reason)} - {*typing.get_args(Fact)}


@pytest.mark.parametrize("reason", [reason for reason, _ in SENTENCES], ids=lambda value: type(value).__name__)
def test_a_reason_stays_equal_in_the_database(reason: Reason) -> None:
    assert msgspec.json.decode(msgspec.json.encode(reason), type=Reason) == reason


@pytest.mark.parametrize("what", NodeFact)
def test_every_fact_about_a_node_has_a_sentence(what: NodeFact) -> None:
    assert sentence(causes.Happened(what=what))


@pytest.mark.parametrize("why", RefusalKind)
def test_every_refusal_names_the_node(why: RefusalKind) -> None:
    assert NODE in sentence(
        causes.RequestRefused(why=why, node_id=NODE, state=NodeState.HELD, frozen=(causes.Blind(),))
    )


def test_several_reasons_are_joined() -> None:
    assert sentences((causes.WorksFor(job="a"), causes.WorksFor(job="b"))) == "works for a; works for b"
