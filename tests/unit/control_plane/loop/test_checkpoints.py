"""Runs the real loops on checkpoints that a person requests or deletes."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from control_plane.cloud.errors import CloudUnavailable
from control_plane.core.actions import PutManifest
from control_plane.core.states import JobState
from control_plane.core.verification import CheckpointVerdict, Damage, DamageKind
from control_plane.db import checkpoints, events, jobs
from control_plane.db.leases import Lease, Leaser
from control_plane.db.models import CheckpointRow
from control_plane.loop.executor import Executor
from control_plane.loop.observer import Observer
from everstep.protocol.agent_messages import FaultCode, MemberPhase, NoticeKind, TakeCheckpoint
from everstep.protocol.ids import Generation, JobName, RunId, Step
from everstep.protocol.manifest import CheckpointManifest, SharedObject
from everstep.protocol.plan import ObjectReference
from tests.sim.world import BUCKET, Agent, World


@pytest.fixture
def world(tmp_path: Path):
    made = World(tmp_path, nodes=4, spares=0, max_size=4)
    yield made
    made.close()


def want(world: World, step: int) -> None:
    with world.database.write() as session:
        jobs.want_checkpoint(session, world.job().run_id, step, world.now)


def asked(world: World) -> list[tuple[str, int, int]]:
    told = [
        (node_id, message.generation, message.step)
        for node_id, message in world.said
        if isinstance(message, TakeCheckpoint)
    ]
    return list(dict.fromkeys(told))


async def replaced(world: World) -> Agent:
    """Terminate the node that holds the only copy of a shard.

    Return the agent of the new node before this agent loads the plan.
    """
    before = {*world.agents}
    world.terminate(world.team()[0])
    await world.until(lambda: bool({*world.agents} - before))
    (new,) = {*world.agents} - before
    return world.agents[new]


async def test_the_coordinator_is_asked_until_the_checkpoint_is_there(world: World) -> None:
    world.submit()
    await world.running()
    await world.train(5)
    assert asked(world) == []
    want(world, 5)
    await world.tick()
    await world.tick()
    assert asked(world) == [(world.plan().coordinator, 1, 5)]
    assert not any(message.ends_exports for _, message in world.said if isinstance(message, TakeCheckpoint))
    await world.train(2)
    await world.upload(6)
    world.said.clear()
    for _ in range(5):
        await world.tick()
    assert asked(world) == []
    assert [record.step for record in world.checkpoints()] == [6]


async def test_a_new_generation_and_a_new_server_ask_again(world: World) -> None:
    world.submit()
    await world.running()
    await world.train(5)
    want(world, 5)
    await world.tick()
    world.kill_rank(world.team()[0])
    await world.until(lambda: world.job().generation == 2)
    world.start_server()
    await world.running()
    await world.train(2)
    await world.tick()
    assert asked(world)[-1] == (world.plan().coordinator, 2, 5)


async def test_a_notice_makes_a_checkpoint_due_while_no_node_can_take_the_place(world: World) -> None:
    world.submit()
    await world.running()
    await world.train(5)
    leaving = world.team()[1]
    world.announce(leaving, NoticeKind.SPOT_INTERRUPTION, 120.0)
    await world.tick()
    await world.train(2)
    assert asked(world) == [(world.plan().coordinator, 1, 4)], "one checkpoint per notice"
    assert all(message.ends_exports for _, message in world.said if isinstance(message, TakeCheckpoint))
    await world.upload(6)
    world.said.clear()
    await world.train(2)
    assert asked(world) == []
    world.announce(world.team()[2], NoticeKind.MAINTENANCE, 300.0)
    committed = world.job().committed_step
    await world.train(1)
    assert [step for _, _, step in asked(world)] == [committed + 1]


async def test_a_job_may_decline_checkpoints_on_notices(world: World) -> None:
    world.submit(checkpoint_on_notice=False)
    await world.running()
    await world.train(5)
    world.announce(world.team()[1], NoticeKind.SPOT_INTERRUPTION, 120.0)
    await world.train(2)
    assert asked(world) == []


async def test_a_plan_carries_the_policy_and_the_age_of_the_newest_checkpoint(world: World) -> None:
    world.submit(checkpoint_interval_seconds=600)
    await world.running()
    assert (world.plan().checkpoint.interval_seconds, world.plan().checkpoint.stored_at_seconds) == (600, 0.0)
    await world.train(5)
    await world.upload(4)
    (record,) = world.checkpoints()
    world.kill_rank(world.team()[0])
    await world.until(lambda: world.job().generation == 2)
    assert record.completed_at is not None
    assert world.plan().checkpoint.stored_at_seconds == record.completed_at.timestamp()


async def test_a_deleted_checkpoint_is_not_put_again_while_agents_report_its_shards(world: World) -> None:
    world.submit()
    await world.running()
    await world.train(5)
    await world.upload(4)
    (record,) = world.checkpoints()
    place = record.manifest_key
    with world.database.write() as session:
        checkpoints.set_state(session, world.job().run_id, record, checkpoints.DELETING)
    world.objects.delete(record.bucket, [place])
    for _ in range(5):
        await world.tick()
    with world.database.write() as session:
        checkpoints.set_state(session, world.job().run_id, record, checkpoints.DELETED)
    world.start_server()
    for _ in range(10):
        await world.tick()
    assert [found.state for found in world.checkpoints()] == [checkpoints.DELETED]
    assert all(info.reference.key != place for info in world.objects.list(ObjectReference(bucket=BUCKET, key="")))


async def test_nobody_restores_from_a_deleted_checkpoint(world: World) -> None:
    world.submit(copies=1)
    await world.running()
    await world.train(3)
    await world.upload(3)
    await world.train(2)
    await world.upload(5)
    newest = world.checkpoints()[0]
    assert newest.step == 5
    with world.database.write() as session:
        checkpoints.set_state(session, world.job().run_id, newest, checkpoints.DELETING)
    world.terminate(world.team()[0])
    await world.until(lambda: world.job().generation == 2)
    assert world.plan().base_step == 3


async def test_a_checkpoint_that_a_verification_found_damaged_is_skipped(world: World) -> None:
    world.submit(copies=1)
    await world.running()
    await world.train(3)
    await world.upload(3)
    await world.train(2)
    await world.upload(5)
    newest = world.checkpoints()[0]
    with world.database.write() as session:
        missing = CheckpointVerdict.of(Damage(kind=DamageKind.MISSING, rank=1))
        checkpoints.store_verdict(session, world.job().run_id, newest, verdict=missing, now=world.now)
    world.terminate(world.team()[0])
    await world.until(lambda: world.job().generation == 2)
    assert (world.plan().base_step, world.plan().checkpoint.stored_step) == (3, 3)


async def test_a_checkpoint_that_one_node_cannot_read_is_verified_and_read_by_another_node(world: World) -> None:
    world.submit(copies=1)
    await world.running()
    await world.train(3)
    await world.upload(3)
    await world.train(2)
    await world.upload(5)
    reader = await replaced(world)
    reader.fails_load = True
    await world.until(lambda: reader.phase is MemberPhase.LOAD_FAILED)
    await world.until(lambda: world.job().generation > 2 and world.job().state == JobState.RUNNING)
    assert world.plan().base_step == 5
    assert reader not in world.team()
    found = {
        record.step: (str(record.verdict or ""), record.verify_requested_at is not None)
        for record in world.checkpoints()
    }
    assert found == {3: ("", False), 5: ("", True)}
    (told,) = [message for message in world.events() if message.startswith("the checkpoint of step 5, launch 1,")]
    assert told.endswith(f"is verified, because {reader.node_id} read other content than its manifest names")


async def test_a_checkpoint_that_two_nodes_cannot_read_is_marked_and_skipped(world: World) -> None:
    world.submit(copies=1)
    await world.running()
    await world.train(3)
    await world.upload(3)
    await world.train(2)
    await world.upload(5)
    first = await replaced(world)
    first.fails_load = True
    await world.until(lambda: first.phase is MemberPhase.LOAD_FAILED)
    failed = {first.node_id: None}
    while len(failed) < 2:
        for agent in world.agents.values():
            agent.fails_load = agent.node_id in failed or agent.number > first.number
            if agent.phase is MemberPhase.LOAD_FAILED:
                failed[agent.node_id] = None
        await world.tick()
    for agent in world.agents.values():
        agent.fails_load = False
    await world.until(lambda: world.job().state == JobState.RUNNING)
    assert world.plan().base_step == 3
    words = f"{' and '.join(failed)} read other content than its manifest names"
    assert {record.step: str(record.verdict or "") for record in world.checkpoints()} == {3: "", 5: words}


async def test_an_object_that_was_only_unreachable_leaves_its_checkpoint_usable(world: World) -> None:
    world.submit(copies=1)
    await world.running()
    await world.train(3)
    await world.upload(3)
    reader = await replaced(world)
    reader.fails_load, reader.load_fault = True, FaultCode.SOURCE_UNAVAILABLE
    await world.until(lambda: reader.phase is MemberPhase.LOAD_FAILED)
    reader.fails_load = False
    await world.until(lambda: world.job().generation == 3)
    assert world.plan().base_step == 3
    assert [record.verdict for record in world.checkpoints()] == [None]


async def test_a_manifest_that_could_not_be_put_is_put_before_its_checkpoint_is_complete(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, failures = world.objects.put_if_unchanged, [CloudUnavailable("no answer"), CloudUnavailable("no answer")]

    def failing(at: ObjectReference, body: bytes) -> None:
        if failures:
            raise failures.pop()
        put(at, body)

    monkeypatch.setattr(world.objects, "put_if_unchanged", failing)
    world.submit()
    await world.running()
    await world.train(5)
    await world.upload(4)
    await world.until(lambda: bool(world.checkpoints()))
    (record,) = world.checkpoints()
    assert not failures
    assert world.objects.get(ObjectReference(bucket=record.bucket, key=record.manifest_key)) == record.manifest


async def test_a_report_that_gives_an_invalid_manifest_is_refused_with_one_event(world: World) -> None:
    world.submit()
    await world.running()
    await world.train(5)
    await world.upload(4, frozen=(SharedObject(key="k", object_bytes=1, sha256="no digest"),))
    for _ in range(5):
        await world.tick()
    assert world.checkpoints() == ()
    (message,) = [message for message in world.events() if message.startswith("The checkpoint of step 4 was refused")]
    assert "SHA-256 is not 64 hexadecimal digits" in message
    await world.upload(4)
    assert [record.step for record in world.checkpoints()] == [4]


@pytest.mark.parametrize(("is_taken", "expected"), [(False, 1), (True, 2)])
async def test_a_manifest_may_take_longer_than_the_lease_is_renewed(
    world: World, monkeypatch: pytest.MonkeyPatch, is_taken: bool, expected: int
) -> None:
    """The upload of a manifest may take longer than a lease lasts.

    Passes renew the lease during the upload.

    If another server has held the job's lease during the upload, the loop reads the job again and repeats its decision.
    """
    world.submit()
    await world.running()
    await world.train(5)
    put, puts, run = world.objects.put_if_unchanged, itertools.count(1), world.job().run_id

    def slow(at: ObjectReference, body: bytes) -> None:
        number = next(puts)
        put(at, body)
        world.now += timedelta(seconds=4)
        if is_taken and number == 1:
            with world.database.write() as session:
                assert Leaser("another", 1.0, world.monotonic).claim(session, "job", run, at_once=True)
        assert world.runner.job_leases.hold(run, at_once=True)

    monkeypatch.setattr(world.objects, "put_if_unchanged", slow)
    await world.upload(4)
    await world.tick()
    assert [record.step for record in world.checkpoints()] == [4]
    assert next(puts) - 1 == expected


@pytest.mark.parametrize("is_taken", [False, True], ids=["leads", "has lost the job"])
async def test_a_server_replaces_another_manifest_only_while_it_holds_the_job(
    world: World, monkeypatch: pytest.MonkeyPatch, is_taken: bool
) -> None:
    """Another manifest of the step appears in S3 after a server has decided to write its own.

    The server replaces that manifest only if it still holds the job's lease.
    """
    world.submit()
    await world.running()
    await world.train(5)
    put, run, places = world.objects.put_if_unchanged, world.job().run_id, set[ObjectReference]()

    def late(at: ObjectReference, body: bytes, *, etag: str = "") -> None:
        if not places:
            places.add(at)
            world.objects.put(at, b"another")
            if is_taken:
                with world.database.write() as session:
                    assert Leaser("another", 1.0, world.monotonic).claim(session, "job", run, at_once=True)
            put(at, body, etag=etag)
        elif etag or not is_taken:  # Once another server holds the job, the test lets every write without an ETag fail.
            put(at, body, etag=etag)
        else:
            raise CloudUnavailable("no answer")

    monkeypatch.setattr(world.objects, "put_if_unchanged", late)
    await world.upload(4)
    await world.until(lambda: bool(places))
    for _ in range(3):
        await world.tick()
    (place,) = places
    assert (world.objects.get(place) == b"another") is is_taken
    assert len(world.checkpoints()) == (0 if is_taken else 1)


async def test_a_deleted_checkpoint_of_a_job_that_a_person_looks_after_is_left_alone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.submit()
    await world.running()
    await world.train(5)
    await world.upload(4)
    (record,) = world.checkpoints()
    with world.database.write() as session:
        checkpoints.set_state(session, world.job().run_id, record, checkpoints.DELETED)
        assert jobs.take_over(session, jobs.get(session, "gpt").run_id, "ann", world.now)
    recorded: list[object] = []
    monkeypatch.setattr(checkpoints, "record", lambda *given: recorded.append(given))
    for _ in range(10):
        await world.tick()
    assert not recorded, "each time wakes the loop, which does it again"
    with world.database.read() as session:
        found = events.page(session, events.EventFilter(), limit=10_000)
    (told,) = [event for event in found if event.type == "CheckpointCompleted"]
    assert (told.project, told.fleet_name) == (world.job().project, world.job().fleet_name)


@pytest.mark.security
async def test_a_pass_reads_few_checkpoints_and_decodes_no_manifest_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job has hundreds of checkpoints, because it makes one per step."""
    world.submit()
    await world.running()
    await world.train(3)
    await world.upload(3)
    run = RunId(world.job().run_id)
    with world.database.write() as session:
        (row,) = session.scalars(select(CheckpointRow))
        values = {column.name: getattr(row, column.name) for column in CheckpointRow.__table__.columns}
        session.add_all(CheckpointRow(**{**values, "step": step}) for step in range(4, 300))
    decoded: list[int] = []
    manifests = checkpoints.manifests

    def watched(session: Session, run_id: str, keys: Collection[tuple[int, int]]) -> object:
        decoded.append(len(keys))
        return manifests(session, run_id, keys)

    monkeypatch.setattr(checkpoints, "manifests", watched)
    observer = Observer(world.context, world.runner.cloud, world.runner.silence_clock)
    for _ in range(2):
        stored = observer.read_job(run)
        assert [each.step for each in stored.checkpoints] == list(range(299, 299 - checkpoints.USABLE_LIMIT, -1))
        assert {step for _, step in stored.dropped_checkpoints} == {each.step for each in stored.checkpoints}
    assert decoded == [checkpoints.USABLE_LIMIT, 0]


@pytest.mark.security
@pytest.mark.parametrize(("object_count", "most"), [(0, 1000), (40_000, 25)])
def test_a_run_writes_manifests_at_a_limited_rate(
    world: World, monkeypatch: pytest.MonkeyPatch, object_count: int, most: int
) -> None:
    """A hostile agent reports new steps of its job, which it claims to be committed, as fast as it can."""
    begun: list[str] = []
    monkeypatch.setattr(Executor, "begin_work", lambda executor, key, work: begun.append(key))
    executor = Executor(replace(world.context, monotonic=lambda: 0.0), lambda lease: lease)
    lease = Lease(kind="job", key="a", owner="test", counter=1)
    objects = tuple(SharedObject(key="k", object_bytes=1, sha256=f"{each:064x}") for each in range(object_count))

    def put(run: str, step: int) -> None:
        manifest = CheckpointManifest(
            version=4,
            job=JobName("gpt"),
            run=RunId(run),
            generation=Generation(1),
            parent_chain=(),
            step=Step(step),
            shards=(),
            frozen=objects,
        )
        executor.put_manifest(lease, PutManifest(at=ObjectReference(bucket=BUCKET, key="k"), manifest=manifest))

    for step in range(2 * most):
        put("hostile", step)
    assert len(begun) == most
    put("other", 1)
    assert begun[-1] == "manifest/other/1/1"
