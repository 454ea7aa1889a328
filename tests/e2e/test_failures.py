"""A ZeRO-3 job survives every single fault, and a random sequence of faults.

Each test checks that the fault took effect, and that the job's result equals the undisturbed run bit for bit.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from everstep.protocol.errors import ProtocolError
from everstep.protocol.slot import HEADER_BYTES, SlotState, unpack_header
from infra.local_cloud.fault_kinds import SpotWarning
from infra.local_cloud.instance_init import memory_directory
from infra.local_cloud.processes import memory_of, rank_of
from tests.e2e.jobs import (
    PATIENCE_SECONDS,
    SHAPES,
    Job,
    Shape,
    Workplace,
    assert_identical,
    assert_incident,
    wait_until,
)

STEPS = 18
FIRST, LAST = "1:6", "1:14"
"""Steps after which all ranks wait, as `generation:step`.

The test releases the ranks from the first wait and injects its fault before the second, so the ranks train at that
time.
"""
PACE_SECONDS = 0.1
"""Minimum duration of a step."""
MOST_LOST = 3
"""Maximum number of lost steps if the ranks wait at the failure."""
PAIRS = Shape(nodes=4)
MIXED = SHAPES[5]
PARITY = Shape(nodes=4, parity_group_size=4)


@pytest.fixture
def start(place: Workplace, request: pytest.FixtureRequest) -> Callable[..., Job]:
    """Return a function that starts a job with the test's name."""
    name = request.node.name.removeprefix("test_").replace("_", "-").replace("[", "-").replace("]", "").strip("-")

    def submit(shape: Shape, *, holds: tuple[str, ...] = (FIRST, LAST), **more: object) -> Job:
        return place.submit(name, shape, **{"holds": holds, "steps": STEPS, "pace_seconds": PACE_SECONDS, **more})  # type: ignore[arg-type]

    return submit


def in_mid_training(job: Job, least: int = int(FIRST.split(":")[1]) - MOST_LOST) -> str:
    """Wait until all ranks wait at FIRST or soon after it, and a step of at least `least` is committed.

    Returns:
        The moment, `generation:step`, at which the ranks wait.
    """
    job.reference()  # the undisturbed run ends before the fault, so that it does not slow the recovery
    return job.wait_standing_committed(FIRST, least)


# -- faults of instances ----------------------------------------------------------------------------------------------


def test_a_terminated_instance(place: Workplace, start: Callable[..., Job]) -> None:
    job = start(MIXED)
    moment = in_mid_training(job)
    victim = job.node_of(3)
    (spare,) = place.cluster.instances().keys() - set(job.describe()["NodeIds"])
    job.let_go(moment)
    committed = job.committed()
    job.terminate(victim)
    job.wait_ended()
    (incident,) = job.incidents()
    assert_incident(incident, cause="instance_terminated", source="peer", committed=committed)
    assert (incident["InstanceId"], incident["ReplacementInstanceId"]) == (victim, spare)
    assert job.describe()["NodeIds"][3] == spare, (
        "the replacement takes the lost node's place, so that the order of ranks stays"
    )
    assert_identical(job)


def test_a_terminated_instance_of_a_parity_group(place: Workplace, start: Callable[..., Job]) -> None:
    job = start(PARITY)
    moment = in_mid_training(job)
    before = job.protection()
    assert (before["ParityGroupSize"], before["Copies"], before["ProtectionState"]) == (4, 1, "Protected")
    assert [odds["Probability"] for odds in before["RecoveryOdds"]] == [1.0, 0.0, 0.0]
    victim = job.node_of(1)
    job.let_go(moment)
    committed = job.committed()
    job.terminate(victim)
    job.wait_ended()
    (incident,) = job.incidents()
    assert_incident(incident, cause="instance_terminated", source="parity", committed=committed)
    assert incident["InstanceId"] == victim
    assert {"Source": "parity", "FirstRank": 1, "LastRank": 1} in incident["RankSources"]
    assert_identical(job)


def test_a_spot_warning_moves_ranks_before_the_instance_goes(place: Workplace, start: Callable[..., Job]) -> None:
    job = start(PAIRS)
    moment = in_mid_training(job)
    victim = job.node_of(1)
    committed = job.committed()
    place.cluster.inject(SpotWarning(target=victim, after=PATIENCE_SECONDS))
    job.let_go(moment)
    job.wait_ended()
    (incident,) = job.incidents()
    assert_incident(incident, cause="notice", source="peer", committed=committed, lost_steps=0)
    assert incident["InstanceIds"] == [victim]
    assert victim not in job.describe()["NodeIds"]
    assert_identical(job)
    place.cluster.clear_faults()


def test_a_lost_group(start: Callable[..., Job]) -> None:
    interval = 4
    job = start(PAIRS, request={"CheckpointConfig": {"EverySteps": interval}})
    moment = in_mid_training(job, least=interval)
    job.wait("a checkpoint", lambda _: job.protection().get("LastCheckpoint"))
    victims = job.groups()[0]
    assert len(victims) == 2
    job.let_go(moment)
    kept = job.protection()["LastCheckpoint"]["Step"]
    assert kept >= interval
    job.terminate(*victims)
    job.wait_ended()
    (incident,) = job.incidents()
    assert_incident(incident, cause="group_lost", source="s3", committed=kept)
    assert set(incident["InstanceIds"]) == victims
    assert len(incident["ReplacementInstanceIds"]) == 2
    assert_identical(job)


def test_a_second_instance_is_lost_during_the_recovery(start: Callable[..., Job]) -> None:
    job = start(PAIRS)
    moment = in_mid_training(job)
    groups = job.groups()
    first, second = sorted(groups[0])[0], next(sorted(group)[0] for group in groups if group.isdisjoint(groups[0]))
    job.let_go(moment)
    committed = job.committed()
    job.terminate(first)
    job.wait("the incident", lambda seen: seen["IncidentCount"] == 1)
    job.terminate(second)
    job.wait_ended()
    incidents = job.incidents()
    assert {node for incident in incidents for node in incident["InstanceIds"]} == {first, second}
    for incident in incidents:
        assert_incident(incident, cause="instance_terminated", source="peer", committed=committed)
    assert_identical(job)


# -- faults of ranks and of their memory ------------------------------------------------------------------------------


def test_a_rank_is_killed_in_the_middle_of_a_capture(start: Callable[..., Job]) -> None:
    """A rank is killed while one of its slots is being written.

    Everstep audits the first captures of a launch: just before the optimizer's next step, it compares the copy with the
    live tensors, and only then ends the capture. A rank that waits between two steps is therefore in the middle of it.

    The ranks also leave shared memory of fixed names, which the next launch creates again.
    """
    victim = 2
    job = start(PAIRS, holds=tuple(f"1:{step}" for step in range(1, STEPS)), fixed_names=True)
    job.reference()
    for step in itertools.count(1):
        job.wait_standing(f"1:{step}")
        # Once `step` or a later step is proposed, the round of the earlier proposal is over. A slot that is being
        # written then belongs to a capture of the new proposal.
        wait_until("a proposal", lambda: job.protection()["ProposedStep"] >= step)  # noqa: B023 — asked at once
        wait_until("the slots to come to rest", lambda: slot_states(job, victim) == slot_states(job, victim))
        if job.describe()["CommittedStep"] > 0 and SlotState.WRITING in slot_states(job, victim):
            break
        job.let_go(f"1:{step}")
    committed = job.committed()
    job.kill_rank(victim)
    job.wait_ended()
    (incident,) = job.incidents()
    assert_incident(incident, cause="rank_exit", source="local", committed=committed, lost_steps=MOST_LOST)
    assert_identical(job)


def test_all_survivors_are_stopped_although_none_of_them_notices(place: Workplace, start: Callable[..., Job]) -> None:
    """One rank is killed while the others wait between two steps, and Everstep ends all of them.

    The waiting ranks take part in no collective that could fail, so only Everstep can end them. The incident names the
    killed rank alone.
    """
    shape = Shape(nodes=3, ranks_per_node=2)
    job = start(shape, holds=(FIRST,), adapter="plain")
    in_mid_training(job)
    ranks = {rank_of(process.pid): process for process in place.rank_processes()}
    assert len(ranks) == shape.world
    committed = job.committed()
    assert job.kill_rank(2) == ranks.pop(2).pid
    wait_until(
        "all survivors to be gone", lambda: not any(process.is_alive for process in ranks.values()), lambda: ranks
    )
    job.wait_ended()
    (incident,) = job.incidents()
    assert_incident(incident, cause="rank_exit", source="local", committed=committed, lost_steps=MOST_LOST)
    (told,) = incident["Evidence"]
    assert "rank 2" in told
    assert_identical(job)


def test_a_flipped_bit_in_memory(start: Callable[..., Job]) -> None:
    """One bit flips in each sealed slot of one rank, and then another rank is killed.

    The node of the damaged slots rejects them and restores the shard from the other holder.
    """
    victim = 1
    job = start(PAIRS)
    in_mid_training(job)
    sealed = wait_until(
        "a sealed slot", lambda: [path for path in own_slots(job, victim) if state_of(path) is SlotState.SEALED]
    )
    for path in sealed:
        flip(path)
    committed = job.committed()
    job.kill_rank(3)
    job.wait_ended()
    (incident,) = job.incidents()
    assert_incident(incident, cause="rank_exit", source="peer", committed=committed, lost_steps=MOST_LOST)
    assert_identical(job)


def own_slots(job: Job, rank: int) -> list[Path]:
    """Return the slot files of a rank's own shard on the rank's node."""
    files = memory_of(memory_directory(job.node_of(rank)))
    return [path for name, path in sorted(files.items()) if f"/rank-{rank}.slot-" in name]


def state_of(path: Path) -> SlotState | None:
    """Return a slot's state, or None while its header is being written."""
    try:
        with path.open("rb") as file:
            return unpack_header(file.read(HEADER_BYTES)).state
    except ProtocolError:
        return None


def slot_states(job: Job, rank: int) -> list[SlotState | None]:
    return [state_of(path) for path in own_slots(job, rank)]


def flip(path: Path) -> None:
    """Flip one bit of a slot's payload."""
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES + 100)
        (byte,) = file.read(1)
        file.seek(HEADER_BYTES + 100)
        file.write(bytes([byte ^ 0x10]))


# -- faults of the control plane and of agents ------------------------------------------------------------------------


def test_the_control_plane_is_killed_and_comes_back(place: Workplace, start: Callable[..., Job]) -> None:
    later = "1:12"
    job = start(PAIRS, holds=(FIRST, later))
    moment = in_mid_training(job)
    ranks = place.rank_processes()
    place.cluster.kill_control_plane()
    job.let_go(moment)
    job.wait_standing(later)  # training continues without a control plane
    place.cluster.restart_control_plane()
    later = job.wait_standing_committed(later, 10)
    assert place.rank_processes() == ranks
    job.let_go(later)
    assert job.wait_ended()["Generation"] == 1
    assert job.incidents() == []
    assert_identical(job)

    def logged() -> dict[int, float]:
        results = place.client.get_metric_data(TrainingJobName=job.name, MetricName="loss")["MetricDataResults"]
        return {
            step: value for result in results for step, value in zip(result["Steps"], result["LastValues"], strict=True)
        }

    wait_until("every logged value", lambda: len(logged()) == STEPS, logged)
    losses = [float.fromhex(loss) for loss in job.results()[0]["losses"]]
    assert logged() == dict(enumerate(losses, start=1)), "what was logged while nobody listened is there, too"


@pytest.mark.parametrize("whose", ["coordinator", "member"])
def test_an_agent_is_killed_and_comes_back(place: Workplace, start: Callable[..., Job], whose: str) -> None:
    """An agent is killed and restarted. Its ranks continue to train.

    While the agent is silent, the advancing steps prove that the ranks are alive. The new agent takes over the slots
    and the ranks, and votes on new steps.
    """
    job = start(PAIRS, holds=(FIRST,), steps=100, pace_seconds=0.08)
    moment = in_mid_training(job)
    ranks = place.rank_processes()
    seen = job.describe()
    coordinator = seen["CoordinatorNodeId"]
    node = coordinator if whose == "coordinator" else next(node for node in seen["NodeIds"] if node != coordinator)
    job.let_go(moment)
    place.cluster.kill_agent(node)
    place.wait_all_connected([node])
    job.wait_committed(job.describe()["Boundary"] + 1)
    assert place.rank_processes() == ranks
    assert job.wait_ended()["Generation"] == 1
    assert job.incidents() == []
    assert_identical(job)


def test_an_agent_and_a_rank_of_its_node_are_killed_together(place: Workplace, start: Callable[..., Job]) -> None:
    job = start(PAIRS)
    moment = in_mid_training(job)
    job.let_go(moment)
    node = job.node_of(1)
    place.cluster.kill_agent(node)
    place.cluster.kill_rank(node, 1)
    job.wait_ended()
    assert all(incident["RestoreSource"] in ("local", "peer") for incident in job.incidents())
    assert 1 <= len(job.incidents()) <= 2
    assert_identical(job)


# -- random sequences of faults ---------------------------------------------------------------------------------------


CAUSES = {"rank": "rank_exit", "instance": "instance_terminated"}


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_a_bad_day(place: Workplace, start: Callable[..., Job], seed: int) -> None:
    """Ranks, instances, agents and the control plane are killed in a random order.

    Nothing is restored from S3, because each group always keeps a holder.
    """
    chance = random.Random(seed)
    job = start(MIXED, holds=(FIRST,), steps=200, pace_seconds=0.1)
    moment = in_mid_training(job)
    job.let_go(moment)
    faults = chance.sample(["rank", "rank", "instance", "instance", "agent", "control plane"], k=6)
    committed = []
    for fault in faults:
        job.wait_committed(max(0, job.describe()["Boundary"]) + chance.randint(2, 5))
        rank = chance.randrange(job.shape.world)
        if fault in CAUSES:
            committed.append(job.committed())
        match fault:
            case "rank":
                job.kill_rank(rank)
            case "instance":
                place.cluster.wait_for_nodes(job.shape.nodes + 1, timeout_seconds=PATIENCE_SECONDS)
                job.terminate(job.node_of(rank))
            case "agent":
                place.cluster.kill_agent(job.node_of(rank))
            case "control plane":
                place.cluster.kill_control_plane()
                place.cluster.restart_control_plane()
        job.wait_recovered(len(committed))
        place.wait_all_connected(job.describe()["NodeIds"])
    job.wait_ended()
    incidents = job.incidents()
    assert [incident["Cause"] for incident in incidents] == [CAUSES[fault] for fault in faults if fault in CAUSES]
    assert {incident["RestoreSource"] for incident in incidents} <= {"local", "peer"}
    for incident, step in zip(incidents, committed, strict=True):
        assert incident["FromStep"] >= step, f"{faults}: {incidents}"
    assert_identical(job)
