"""S3 is out of reach in the middle of a recovery: the job keeps its nodes and its generation, and loses no bit."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial

import pytest

from tests.e2e.conftest import workplace
from tests.e2e.jobs import PATIENCE_SECONDS, Shape, Workplace, assert_identical, wait_until
from tests.e2e.reference import References
from tests.moto_server import moto_server
from tests.s3_proxy import Answer, S3Proxy

SHAPE = Shape(nodes=2)
STEPS, EVERY_STEPS, HELD = 30, 5, "1:20"
OUTAGE_SECONDS = 20
LONG_OUTAGE_SECONDS = 600


@pytest.fixture(scope="module")
def proxy() -> Iterator[S3Proxy]:
    with moto_server() as url, S3Proxy(url) as made:
        yield made


@pytest.fixture(scope="module")
def place(request: pytest.FixtureRequest, references: References, proxy: S3Proxy) -> Iterator[Workplace]:
    """Start a cluster whose processes reach S3 only through the proxy."""
    nodes = SHAPE.nodes
    with workplace(request.session, references, nodes=nodes, spares=nodes, storage_url=proxy.url) as own:
        yield own


@pytest.mark.timeout(LONG_OUTAGE_SECONDS + 300)
@pytest.mark.parametrize("seconds", [OUTAGE_SECONDS, LONG_OUTAGE_SECONDS])
def test_a_recovery_outlasts_an_outage_of_s3(place: Workplace, proxy: S3Proxy, seconds: int) -> None:
    """All nodes with copies are lost, and S3 fails before the new nodes have read the checkpoint."""
    request = {"CheckpointConfig": {"EverySteps": EVERY_STEPS}}
    name = f"outage-of-{seconds}-seconds"
    job = place.submit(name, SHAPE, holds=(HELD,), request=request, adapter="ddp", steps=STEPS, pace_seconds=0.05)
    job.reference()
    job.wait_standing(HELD)
    stored = partial(place.client.list_checkpoints, TrainingJobName=name)
    wait_until("a checkpoint", lambda: any(each["Step"] >= 2 * EVERY_STEPS for each in stored()["Checkpoints"]))
    proxy.plan(Answer(code="ServiceUnavailable", status=503), times=10**9)
    job.terminate(*job.describe()["NodeIds"])

    waiting = job.wait("the wait for S3", lambda seen: seen.get("StoreWait"))
    assert waiting["StoreWait"]["Obstacle"] == "NoAnswer"
    assert "a store does not answer since" in waiting["Reason"]
    begun = waiting["StoreWait"]["Since"]

    def is_over() -> bool:
        return (datetime.now(UTC) - begun).total_seconds() > seconds

    wait_until("the end of the outage", is_over, patience_seconds=seconds + PATIENCE_SECONDS)
    before = job.describe()
    assert before["StoreWait"]["Since"] == begun, "the wait has one beginning"
    proxy.clear()
    after = job.wait("the end of the wait", lambda seen: "StoreWait" not in seen)
    job.wait_ended()
    assert (after["Generation"], after["NodeIds"]) == (waiting["Generation"], waiting["NodeIds"]), "nothing restarted"
    assert_identical(job)
    (incident,) = job.incidents()
    assert incident["RestoreSource"] == "s3"
