"""A person's deletion never destroys the last checkpoint from which an unfinished job can restore."""

from __future__ import annotations

from datetime import timedelta

from control_plane.loop.verifier import Verifier
from tests.unit.control_plane.api.conftest import BUCKET
from tests.unit.control_plane.api.test_checkpoint_keeper import collect, keys, make, steps  # noqa: F401
from tests.unit.control_plane.api.test_trash import GPT, mark, trash

DAY = timedelta(hours=24).total_seconds()


def test_the_last_usable_checkpoint_stays_in_the_trash(service, client, make):  # noqa: F811
    """The newest checkpoint proves damaged while the older one, which a person deleted, is in the trash."""
    job = make(TrashHours=24)
    for step in (10, 20):
        job.checkpoint(step)
    client.delete_checkpoint(**GPT, Step=10)
    service.objects.delete(BUCKET, [mark(job, 20, "u/rank=1.safetensors").key])
    client.verify_checkpoint(**GPT, Step=20)
    Verifier(service.database, service.objects, service.clock).verify_next()
    service.clock.advance(DAY)
    collect(service)
    assert "10" in keys(service, job), "the only checkpoint that is whole is purged"
    assert trash(client) == [10]
    job.checkpoint(30)
    collect(service)
    assert (trash(client), "10" in keys(service, job)) == ([], False)


def test_a_servers_clock_that_jumps_does_not_empty_the_trash(service, client, make):  # noqa: F811
    job = make(TrashHours=24)
    for step in (10, 20, 30):
        job.checkpoint(step)
    collect(service)
    client.delete_checkpoint(**GPT, Step=10)
    real = service.clock()
    service.objects.now = lambda: real
    service.clock.advance(2 * DAY)
    collect(service)
    assert "10" in keys(service, job), "S3's clock says that no time has passed"
    service.objects.now = service.clock
    collect(service)
    assert "10" not in keys(service, job)
