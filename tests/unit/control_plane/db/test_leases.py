from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy.exc import OperationalError

from control_plane.db import fleets, jobs, leases
from control_plane.db.errors import NotFound, StaleLease
from control_plane.db.fleets import NewFleet
from control_plane.db.leases import Lease, Leaser
from control_plane.db.session import Database
from tests.unit.control_plane.db.conftest import NOW


class Monotonic:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Monotonic()


def claim(database, leaser, run_id, kind="job"):
    with database.write() as session:
        return leaser.claim(session, kind, run_id)


def test_every_claim_bumps_the_counter(database, job, clock):
    leaser = Leaser("a", 3.0, clock)
    assert [claim(database, leaser, job.run_id) for _ in range(3)] == [
        Lease("job", job.run_id, "a", n) for n in (1, 2, 3)
    ]


def test_a_contender_takes_over_only_what_stood_still_for_the_ttl(database, job, clock):
    owner, contender = Leaser("a", 3.0, clock), Leaser("b", 3.0, clock)
    claim(database, owner, job.run_id)
    assert claim(database, contender, job.run_id) is None
    clock.now += 2.9
    assert claim(database, contender, job.run_id) is None
    clock.now += 0.1
    assert claim(database, contender, job.run_id) == Lease("job", job.run_id, "b", 2)


def test_a_successor_takes_over_at_once_from_a_process_that_is_known_to_be_dead(database, job, clock):
    claim(database, Leaser("place-first", 3.0, clock), job.run_id)
    assert claim(database, Leaser("elsewhere-second", 3.0, clock), job.run_id) is None
    # The part of a server's name before the hyphen identifies a lock file, which a running server holds. If another
    # server of the same lock file claims the lease, the owner no longer holds the lock and is dead. The other server
    # may then take over at once. The name here has no such part.
    assert claim(database, Leaser("second", 3.0, clock), job.run_id) is None
    assert claim(database, Leaser("place-second", 3.0, clock), job.run_id) == Lease(
        "job", job.run_id, "place-second", 2
    )


def test_an_owner_that_moves_is_not_robbed(database, job, clock):
    owner, contender = Leaser("a", 3.0, clock), Leaser("b", 3.0, clock)
    for _ in range(5):
        claim(database, owner, job.run_id)
        assert claim(database, contender, job.run_id) is None
        clock.now += 2.0


def test_another_replica_is_seen_while_it_bumps_the_counter(database, job, clock):
    owner, contender = Leaser("a", 3.0, clock), Leaser("b", 3.0, clock)
    claim(database, owner, job.run_id)
    claim(database, contender, job.run_id)
    # After a single read, the contender cannot know whether the stored owner is alive.
    assert not contender.sees_another("job", job.run_id)
    claim(database, owner, job.run_id)
    claim(database, contender, job.run_id)
    assert contender.sees_another("job", job.run_id)
    clock.now += 3.0
    assert not contender.sees_another("job", job.run_id)
    assert claim(database, contender, job.run_id)


def test_who_has_the_right_to_it_does_not_wait(database, job, clock):
    owner, contender = Leaser("a", 3.0, clock), Leaser("b", 3.0, clock)
    lost = claim(database, owner, job.run_id)
    with database.write() as session:
        assert contender.claim(session, "job", job.run_id, at_once=True) == Lease("job", job.run_id, "b", 2)
    with pytest.raises(StaleLease), database.write() as session:
        leases.guard(session, lost)


def test_watching_begins_anew_when_the_counter_moves(database, job, clock):
    owner, contender = Leaser("a", 3.0, clock), Leaser("b", 3.0, clock)
    claim(database, owner, job.run_id)
    claim(database, contender, job.run_id)
    clock.now += 2.0
    claim(database, owner, job.run_id)
    clock.now += 2.0
    # The contender first read the lease four seconds ago, but has seen the owner renew it since.
    assert claim(database, contender, job.run_id) is None
    clock.now += 3.0
    assert claim(database, contender, job.run_id) is not None


def test_what_was_worked_out_under_a_lost_lease_is_not_written(database, job, clock):
    owner, contender = Leaser("a", 0.0, clock), Leaser("b", 0.0, clock)
    lost = claim(database, owner, job.run_id)
    claim(database, contender, job.run_id)
    assert claim(database, contender, job.run_id) is not None
    with pytest.raises(StaleLease), database.write() as session:
        jobs.change(session, lost, reason="nonsense")
    with pytest.raises(StaleLease), database.write() as session:
        owner.renew(session, lost)
    with database.read() as session:
        assert jobs.get(session, "gpt").reason == "Waiting."


def test_an_older_claim_of_the_same_owner_is_stale_too(database, job, clock):
    leaser = Leaser("a", 3.0, clock)
    old = claim(database, leaser, job.run_id)
    claim(database, leaser, job.run_id)
    with pytest.raises(StaleLease), database.write() as session:
        leases.guard(session, old)


def test_a_guard_undoes_everything_in_its_transaction(database, job, lease):
    stale = Lease("job", job.run_id, "owner", lease.counter - 1)

    def write_and_lose() -> None:
        with database.write() as session:
            jobs.change(session, lease, reason="first")
            leases.guard(session, stale)

    with pytest.raises(StaleLease):
        write_and_lose()
    with database.read() as session:
        assert jobs.get(session, "gpt").reason == "Waiting."


def test_renew_keeps_the_lease(database, job, clock):
    leaser = Leaser("a", 3.0, clock)
    lease = claim(database, leaser, job.run_id)
    with database.write() as session:
        renewed = leaser.renew(session, lease)
    assert renewed == Lease("job", job.run_id, "a", 2)
    with database.write() as session:
        leases.guard(session, renewed)


def test_released_is_free_at_once(database, job, clock):
    owner, contender = Leaser("a", 3.0, clock), Leaser("b", 3.0, clock)
    lease = claim(database, owner, job.run_id)
    with database.write() as session:
        owner.release(session, lease)
        owner.release(session, lease)
    with pytest.raises(StaleLease), database.write() as session:
        leases.guard(session, lease)  # a released lease is invalid, even if no other owner has claimed it
    assert claim(database, contender, job.run_id) == Lease("job", job.run_id, "b", 2)
    with pytest.raises(StaleLease), database.write() as session:
        leases.guard(session, lease)


def test_releasing_a_lost_lease_harms_nobody(database, job, clock):
    owner, contender = Leaser("a", 0.0, clock), Leaser("b", 0.0, clock)
    lost = claim(database, owner, job.run_id)
    claim(database, contender, job.run_id)
    held = claim(database, contender, job.run_id)
    with database.write() as session:
        owner.release(session, lost)
    with database.write() as session:
        leases.guard(session, held)


def test_fleets_have_leases_of_their_own(database, clock):
    with database.write() as session:
        fleet = NewFleet(
            name="main",
            auto_scaling_group_name="g",
            project="p",
            state="active",
            min_node_count=0,
            spare_count=0,
            max_node_count=8,
            instance_type="",
            availability_zone="",
            tags={},
        )
        fleets.create(session, fleet, NOW)
    lease = claim(database, Leaser("a", 3.0, clock), "main", kind="fleet")
    with database.write() as session:
        fleets.change(session, lease, drift=("one thing",), desired_node_count=3)
    with database.read() as session:
        assert fleets.get(session, "main").drift == ("one thing",)


def test_what_is_not_there_cannot_be_claimed(database, clock):
    with pytest.raises(NotFound):
        claim(database, Leaser("a", 3.0, clock), "0" * 32)


@pytest.mark.parametrize("engine", ["postgresql"])
def test_a_replica_that_lost_its_connection_stores_nothing_more_once_another_took_over(
    database, job, clock, postgresql
):
    """A server that loses its database connection can store nothing after another server has claimed its lease.

    Each server has its own database connections. The first server's connection is cut during a write. The first server
    repeats the write while it has the lease, and tries another write after it has lost the lease.
    """
    second = Database(str(database.url))
    owner, contender = Leaser("a", 3.0, clock), Leaser("b", 3.0, clock)
    lease = claim(database, owner, job.run_id)

    def store(reason: str, is_cut: bool) -> None:
        with database.write() as session:
            jobs.change(session, lease, reason=reason)
            if is_cut:
                postgresql.cut(str(database.url))

    with pytest.raises(OperationalError):
        store("half", True)
    store("again", False)  # the first server still has the lease, so it may write again
    assert claim(second, contender, job.run_id) is None
    clock.now += 3.0
    assert claim(second, contender, job.run_id) == Lease("job", job.run_id, "b", 2)
    with pytest.raises(StaleLease):
        store("late", False)
    second.close()
    with database.read() as session:
        assert jobs.get(session, "gpt").reason == "again"


@pytest.mark.parametrize("engine", ["postgresql"])
def test_of_replicas_that_claim_at_once_one_has_the_lease(database, job, clock):
    """Several servers claim an expired lease at the same time, and exactly one of them gets it.

    Each server has seen the lease without a renewal for its whole duration. Each reads the lease before any of them
    writes.
    """
    contenders = [Leaser(str(number), 3.0, clock) for number in range(4)]
    claim(database, Leaser("dead", 3.0, clock), job.run_id)
    assert [claim(database, contender, job.run_id) for contender in contenders] == [None] * 4
    clock.now += 3.0
    with ThreadPoolExecutor(4) as threads:
        claimed = list(threads.map(lambda contender: claim(database, contender, job.run_id), contenders))
    assert sum(lease is not None for lease in claimed) == 1


def test_a_lease_is_due_after_a_third_of_its_time_whatever_was_tried_in_vain_meanwhile(database, job, clock):
    leaser = Leaser("a", 3.0, clock)
    old = claim(database, leaser, job.run_id)
    lease = claim(database, leaser, job.run_id)
    clock.now += 0.9
    assert not leaser.is_due(lease)
    clock.now += 0.1
    assert leaser.is_due(lease)
    with pytest.raises(StaleLease), database.write() as session:
        leaser.renew(session, old)
    assert leaser.is_due(lease)
    with database.write() as session:
        assert not leaser.is_due(leaser.renew(session, lease))
