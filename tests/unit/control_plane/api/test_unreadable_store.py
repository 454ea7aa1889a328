"""A store that cannot be read is no evidence against a checkpoint.

S3 can deny, throttle, time out or answer with nonsense. The verifier then stores no verdict, and the keeper deletes
nothing. The stored objects are intact throughout these tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from control_plane.cloud import errors
from control_plane.cloud.errors import CloudError
from control_plane.core.verification import LONGEST_PAUSE_SECONDS
from control_plane.db import checkpoints, jobs
from control_plane.loop.checkpoint_keeper import restorable
from control_plane.loop.verifier import Verifier
from everstep.protocol.agent_messages import Obstacle
from everstep.protocol.plan import ObjectReference
from tests.unit.control_plane.api.conftest import BUCKET
from tests.unit.control_plane.api.test_checkpoint_keeper import collect, keeper, keys, steps


def all_errors(kind: type[CloudError] = CloudError) -> list[CloudError]:
    """Return one error of each subclass of CloudError that a call of AWS can raise."""
    made = kind("The provided token has expired.", code="ExpiredToken")
    return [made, *(each for below in kind.__subclasses__() for each in all_errors(below))]


class Broken:
    """A `ServiceStore` whose reads fail while `is_broken`. `spoil` changes the result of a read, or raises."""

    def __init__(self, objects: Any, spoil: Callable[[str, Callable[[], Any]], Any]) -> None:
        self._objects = objects
        self._spoil = spoil
        self.is_broken = True

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._objects, name)
        if not self.is_broken or name not in ("get", "head", "list", "stream"):
            return real
        return lambda *arguments, **options: self._spoil(name, lambda: real(*arguments, **options))


def raising(error: Exception) -> Callable[[str, Callable[[], Any]], Any]:
    def spoil(name: str, read: Callable[[], Any]) -> Any:
        raise error

    return spoil


def cut(name: str, read: Callable[[], Any]) -> Any:
    """End every stream in the middle, as a lost connection does that no library reports."""
    if name == "get":
        return read()[:-1]
    return iter([next(iter(read()))[:-1]]) if name == "stream" else read()


def garbled(name: str, read: Callable[[], Any]) -> Any:
    """Return other bytes at each read."""
    if name == "get":
        return b"<html>Bad gateway</html>"
    return _noise(read()) if name == "stream" else read()


_SEEDS = iter(range(1, 1_000_000))


def _noise(chunks: Iterator[bytes]) -> Iterator[bytes]:
    seed = next(_SEEDS)
    for chunk in chunks:
        yield bytes((byte + seed) % 256 for byte in chunk)


FAILURES = [
    *(pytest.param(raising(error), error.obstacle, id=type(error).__name__) for error in all_errors()),
    pytest.param(raising(TimeoutError("timed out")), Obstacle.NO_ANSWER, id="timeout"),
    pytest.param(raising(ConnectionResetError("reset by peer")), Obstacle.NO_ANSWER, id="reset"),
    pytest.param(raising(RecursionError("too deep")), Obstacle.GARBLED, id="unexpected"),
    pytest.param(cut, Obstacle.GARBLED, id="cut"),
    pytest.param(garbled, Obstacle.GARBLED, id="garbled"),
]


def stored(service, run: str) -> list[tuple[int, str, str]]:
    with service.database.read() as session:
        return [(each.step, each.state, str(each.verdict)) for each in checkpoints.of_run(session, run)]


@pytest.mark.parametrize(("spoil", "obstacle"), FAILURES)
def test_a_failed_read_stores_no_verdict(service, client, make, spoil, obstacle):
    job = make(MaxCount=1)
    for step in (10, 20):
        job.checkpoint(step)
    keeper(service).delete_due()
    before = stored(service, job.run)
    store = Broken(service.objects, spoil)
    for _ in range(3):
        assert not Verifier(service.database, store, service.clock).verify_next()
        keeper(service).delete_due()
        service.clock.advance(LONGEST_PAUSE_SECONDS)
    assert stored(service, job.run) == before
    waiting = client.list_checkpoints(TrainingJobName="gpt")["Checkpoints"][0]
    assert (waiting["Verification"], waiting["VerificationWaitingSince"].timestamp()) == (
        "Waiting",
        service.clock().timestamp() - 3 * LONGEST_PAUSE_SECONDS,
    )
    with service.database.read() as session:
        blocked = checkpoints.of_run(session, job.run)[0].blocked
    assert blocked is not None
    assert (blocked.obstacle, blocked.attempt_count) == (obstacle, 3)
    store.is_broken = False
    assert Verifier(service.database, store, service.clock).verify_next()
    assert client.list_checkpoints(TrainingJobName="gpt")["Checkpoints"][0]["Verification"] == "Intact"


def verify_all(service, store) -> None:
    for _ in range(6):
        keeper(service).delete_due()
        Verifier(service.database, store, service.clock).verify_next()


def test_a_requested_verification_with_expired_credentials_costs_no_checkpoint(service, client, make):
    job = make(MaxCount=2, KeepEverySteps=100)
    for step in (100, 200, 300, 310, 320):
        job.checkpoint(step)
    collect(service)
    kept = steps(client)
    store = Broken(service.objects, raising(errors.AccessDenied("The provided token has expired.")))
    for step in (100, 200):
        client.verify_checkpoint(TrainingJobName="gpt", Step=step)
    verify_all(service, store)
    collect(service)
    assert steps(client) == kept
    assert {"100", "200"} <= keys(service, job)


def test_verifications_of_the_keeper_during_an_outage_cost_no_checkpoint(service, client, make):
    job = make(MaxCount=3)
    for step in (10, 20, 30):
        job.checkpoint(step)
    collect(service)
    store = Broken(service.objects, raising(errors.AccessDenied("The provided token has expired.")))
    for step in (40, 50, 60):
        job.checkpoint(step)
        verify_all(service, store)
    with service.database.read() as session:
        newest = restorable(session, jobs.get(session, "gpt"))
    assert newest is not None
    assert (newest.step, steps(client)) == (60, [60, 50, 40, 30, 20, 10])
    store.is_broken = False
    job.checkpoint(70)
    service.clock.advance(LONGEST_PAUSE_SECONDS)
    collect(service)
    assert steps(client) == [70, 60, 50]


@pytest.mark.parametrize("left", [[], ["another"]])
def test_a_missing_object_counts_only_if_the_store_shows_others(service, client, make, left):
    """An empty bucket under the right name is another bucket, or a store that has lost its disk."""
    job = make()
    manifest = job.checkpoint(10)
    place = f"projects/default/jobs/gpt/run={job.run}/checkpoints/"
    found = [info.reference.key for info in service.objects.list(ObjectReference(bucket=BUCKET, key=place))]
    service.objects.delete(BUCKET, found if not left else [manifest.shards[1].key])
    client.verify_checkpoint(TrainingJobName="gpt", Step=10)
    Verifier(service.database, service.objects, service.clock).verify_next()
    (shown,) = client.list_checkpoints(TrainingJobName="gpt")["Checkpoints"]
    assert shown["Verification"] == ("Damaged" if left else "Waiting")


def test_a_verification_that_waits_does_not_delay_another(service, client, make):
    job = make()
    first, _ = job.checkpoint(10), job.checkpoint(20)
    for step in (10, 20):
        client.verify_checkpoint(TrainingJobName="gpt", Step=step)
        service.clock.advance(1)

    class Half(Broken):
        def __getattr__(self, name: str) -> Any:
            def read(where: ObjectReference, **options: Any) -> Any:
                if "step=10/" in where.key:
                    raise errors.AccessDenied("KMS key disabled", code="KMS.DisabledException")
                return getattr(service.objects, name)(where, **options)

            return read

    verifier = Verifier(service.database, Half(service.objects, raising(OSError())), service.clock)
    assert [verifier.verify_next(), verifier.verify_next()] == [False, True]
    assert first.step == 10
