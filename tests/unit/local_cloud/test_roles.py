"""A fault may name a role as its target, such as "job 0 rank 1".

The local cloud looks up the node with this role when the fault is due.
"""

from __future__ import annotations

import pytest

from infra.local_cloud.errors import FaultRefused, NotUp
from infra.local_cloud.fault_kinds import (
    AnyFault,
    CorruptReplica,
    Hang,
    KillControlPlane,
    KillRank,
    Partition,
    Terminate,
)
from infra.local_cloud.roles import Aim, FaultRole, Hit, RoleJob, RoleShard, check, parse, resolve, training_job

A, B, C, D, E, F = (f"i-{letter}" for letter in "abcdef")
EARLY = RoleJob(
    name="early",
    nodes=(A, B, C),
    ranks_per_node=2,
    committed_step=7,
    shards=tuple(
        RoleShard(rank=rank, holders=holders)
        for rank, holders in enumerate([(A, B), (A, C), (B, C), (B, A), (C, A), (C, B)])
    ),
)
LATE = RoleJob(
    name="late", nodes=(D, E), ranks_per_node=1, committed_step=0, shards=(RoleShard(rank=0, holders=(D, E)),)
)
JOBS = (LATE, EARLY)
ALL = {A, B, C, D, E, F}


def role(words: str) -> FaultRole:
    found = parse(words)
    assert found is not None
    return found


@pytest.mark.parametrize("target", ["", "0", "12", "i-0af3", "i-a"])
def test_ids_and_numbers_are_no_roles(target: str) -> None:
    assert parse(target) is None


@pytest.mark.parametrize("words", ["job 0 node 2", "job 12 rank 5", "last job shard 1", "last job node 0"])
def test_a_role_is_read_and_said_alike(words: str) -> None:
    assert str(role(words)) == words


def test_a_role_has_a_job_a_part_and_a_number() -> None:
    assert role("job 12 rank 5") == FaultRole(job=12, part="rank", number=5)
    assert role("last job shard 1") == FaultRole(job=None, part="shard", number=1)


@pytest.mark.parametrize(
    "target",
    [
        "job",
        "job 0",
        "job 0 node",
        "job 0 node -1",
        "job 0 nodes 1",
        "job0 node 1",
        "Job 0 node 1",
        "job x node 1",
        "last node 1",
        "node 1",
        " 1",
        "i-",
        "job 0 node 1 ",
        "job 0 node 1\n",
        "job \u0662 node 1",
        "\u0662",
        "-1",
    ],
)
def test_what_is_no_target_is_told_what_to_write(target: str) -> None:
    with pytest.raises(
        FaultRefused, match=r'is not a target: write an instance id, a number .* or a role: "job 0 node 2"'
    ):
        parse(target)


@pytest.mark.parametrize(
    ("words", "hit"),
    [
        ("job 0 node 0", Hit(job="early", instances=(A,), rank=None)),
        ("job 0 node 2", Hit(job="early", instances=(C,), rank=None)),
        ("job 0 node 4", Hit(job="early", instances=(B,), rank=None)),
        ("job 1 node 0", Hit(job="late", instances=(D,), rank=None)),
        ("job 3 node 1", Hit(job="late", instances=(E,), rank=None)),
        ("job 0 rank 0", Hit(job="early", instances=(A,), rank=0)),
        ("job 0 rank 3", Hit(job="early", instances=(B,), rank=3)),
        ("job 0 rank 11", Hit(job="early", instances=(C,), rank=5)),
        ("job 1 rank 1", Hit(job="late", instances=(E,), rank=1)),
        ("job 0 shard 1", Hit(job="early", instances=(A, C), rank=1)),
        ("job 0 shard 8", Hit(job="early", instances=(B, C), rank=2)),
    ],
)
def test_a_role_is_somebody(words: str, hit: Hit) -> None:
    assert resolve(role(words), JOBS, ALL) == hit


def test_the_last_job_is_the_one_that_was_meant_last_as_long_as_it_trains() -> None:
    assert resolve(role("last job node 1"), JOBS, ALL, "late").instances == (E,)
    assert resolve(role("last job node 1"), JOBS, ALL, "").instances == (B,)
    assert resolve(role("last job node 1"), [EARLY], ALL, "late").instances == (B,)
    assert resolve(role("job 0 node 1"), JOBS, ALL, "late").instances == (B,)


def test_who_does_not_run_is_not_counted() -> None:
    assert resolve(role("job 0 node 1"), JOBS, ALL - {A}).instances == (C,)
    assert resolve(role("job 0 node 1"), JOBS, {D, E}).job == "late"
    assert resolve(role("job 0 shard 1"), JOBS, ALL - {A}) == Hit(job="early", instances=(C, B), rank=5)


@pytest.mark.parametrize(
    ("words", "running", "why"),
    [
        ("job 0 node 1", set[str](), "no training job has a running node"),
        ("job 0 node 1", {F}, "no training job has a running node"),
        ("job 0 rank 1", ALL - {A}, "i-a, the node of rank 1 of early, is not running"),
        ("job 1 shard 0", ALL, "late has committed no step yet"),
        ("job 0 shard 0", {A}, "early has no shard whose holders all run"),
    ],
)
def test_a_role_that_nobody_has_is_refused_and_why(words: str, running: set[str], why: str) -> None:
    with pytest.raises(FaultRefused, match=f"^{words}: {why}$"):
        resolve(role(words), JOBS, running)


def test_a_shard_that_nobody_holds_is_nobodys() -> None:
    bare = RoleJob(name="bare", nodes=(A,), ranks_per_node=1, committed_step=3, shards=(RoleShard(rank=0, holders=()),))
    with pytest.raises(FaultRefused, match="has no shard"):
        resolve(role("job 0 shard 0"), [bare], ALL)


@pytest.mark.parametrize(
    ("fault", "aimed"),
    [
        (KillControlPlane(down=1), [KillControlPlane(down=1)]),
        (Terminate(), [Terminate()]),
        (Terminate(target="4"), [Terminate(target="4")]),
        (Terminate(target="job 0 node 1"), [Terminate(target=B)]),
        (Terminate(target="job 0 rank 3"), [Terminate(target=B)]),
        (Terminate(target="job 0 shard 2"), [Terminate(target=B), Terminate(target=C)]),
        (KillRank(target="job 0 rank 3"), [KillRank(target=B, rank=3)]),
        (Hang(target="job 0 rank 2"), [Hang(target=B, rank=2)]),
        (KillRank(target="job 0 node 1"), [KillRank(target=B)]),
        (KillRank(target="job 0 node 1", rank=3), [KillRank(target=B, rank=3)]),
        (KillRank(target="job 0 shard 2"), [KillRank(target=B), KillRank(target=C)]),
        (CorruptReplica(target="job 0 shard 2"), [CorruptReplica(target=B, rank=2), CorruptReplica(target=C, rank=2)]),
        (CorruptReplica(target="job 0 rank 3"), [CorruptReplica(target=B)]),
        (Partition(target="job 1 node 0", separate_from="aws"), [Partition(target=D, separate_from="aws")]),
    ],
)
def test_a_fault_is_aimed_at_each_who_is_meant(fault: AnyFault, aimed: list[AnyFault]) -> None:
    assert Aim(lambda: JOBS, lambda: ALL)(fault) == aimed


@pytest.mark.parametrize(
    "fault",
    [
        KillRank(target="job 0 rank 3", rank=3),
        Hang(target="job 0 rank 3", rank=0),
        CorruptReplica(target="job 0 shard 3", rank=1),
    ],
)
def test_a_rank_is_said_once(fault: AnyFault) -> None:
    with pytest.raises(FaultRefused, match="already selects a rank: remove `rank`"):
        check(fault)


def test_an_aim_remembers_the_job() -> None:
    aim = Aim(lambda: JOBS, lambda: ALL)
    aim(Terminate(target="job 1 node 0"))
    assert aim(KillRank(target="last job node 1")) == [KillRank(target=E)]
    aim(Terminate(target="job 0 node 0"))
    aim(Terminate(target="3"))
    assert aim(KillRank(target="last job node 1")) == [KillRank(target=B)]


def test_while_no_control_plane_answers_who_trained_before_counts() -> None:
    is_up = False

    def jobs() -> tuple[RoleJob, ...]:
        if not is_up:
            raise NotUp("it is dead")
        return JOBS

    running = set(ALL)
    aim = Aim(jobs, lambda: running)
    with pytest.raises(FaultRefused, match="the control plane does not answer"):
        aim(Terminate(target="job 0 node 0"))
    assert aim(Terminate(target="1")) == [Terminate(target="1")]
    is_up = True
    assert aim(Terminate(target="job 0 node 0")) == [Terminate(target=A)]
    is_up = False
    running.remove(A)
    assert aim(Terminate(target="job 0 node 0")) == [Terminate(target=B)]


def test_who_trains_is_read_from_the_api() -> None:
    described = {"TrainingJobName": "late", "NodeIds": [D, E], "RanksPerNode": 1, "CommittedStep": 4, "Status": "more"}
    protection = {
        "Shards": [
            {"Rank": 1, "Holders": [{"NodeId": E, "InView": True}, {"NodeId": D, "InView": False}]},
            {"Rank": 0, "Holders": [{"NodeId": D, "InView": True}]},
        ]
    }
    shards = (RoleShard(rank=0, holders=(D,)), RoleShard(rank=1, holders=(E, D)))
    assert training_job(described, protection) == RoleJob(
        name="late", nodes=(D, E), ranks_per_node=1, committed_step=4, shards=shards
    )
