"""A job trains through the loss of servers and of the database, as in production.

    agents, clients ──▶ HAProxy ──▶ two servers ──▶ PostgreSQL with a synchronous standby

No fault here touches a node. So the job must have no incident, AWS must get no call that ends an instance, and the
result must equal that of an undisturbed run bit for bit.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select, update
from sqlalchemy.exc import DBAPIError

from control_plane.db.leases import Lease, guard
from control_plane.db.models import Fleet
from control_plane.db.session import Database as Connected
from control_plane.replica import url_of
from everstep import sdk
from infra.local_cloud.up import CONTROL_PLANE, FLEET, STANDBY, ClusterOptions, LocalCluster
from tests.e2e.conftest import left_over
from tests.e2e.jobs import Job, Shape, Workplace, assert_identical, wait_until
from tests.e2e.reference import References
from tests.production.balancer import Balancer
from tests.production.database import Database
from tests.production.leases import LeaseWatch, violations
from tests.warm_parent import WarmParent

pytestmark = [pytest.mark.production, pytest.mark.full]

NODES, SPARES = 3, 1
NODE_MEMORY_BYTES = 64 * 1024**2
STEPS, PACE_SECONDS = 700, 0.2
LAST = f"1:{STEPS - 10}"
"""The ranks wait here, so that the job cannot end before the last fault."""
FIRST_STEP = 5
CONNECT_SECONDS = 300.0


@dataclass(frozen=True)
class Production:
    """The running installation."""

    place: Workplace
    servers: dict[str, str]
    """URL of each server, by its part of the local cloud."""
    database: Database

    def holder(self) -> str:
        """Return the part that holds the fleet's lease. Empty if none of the two does or the database is away."""
        with suppress(DBAPIError), closing(Connected(self.database.url)) as opened, opened.read() as session:
            owner = session.scalar(select(Fleet.lease_owner).where(Fleet.name == FLEET))
            urls = {url: part for part, url in self.servers.items()}
            return urls.get(url_of(owner or ""), "")
        return ""

    def other(self) -> str:
        (other,) = self.servers.keys() - {self.holder()}
        return other

    def pid(self, part: str) -> int:
        return next(status.pid for status in self.place.cluster.status() if status.name == part)

    def is_ready(self, part: str) -> bool:
        with suppress(httpx.TransportError):
            return httpx.get(f"{self.servers[part]}/v1/ready", timeout=2, trust_env=False).status_code == 200
        return False

    def answers(self, url: str, job: Job) -> Any:
        """Return answers that depend on the job's agents, from one server or through HAProxy."""
        with closing(sdk.client(url, self.place.cluster.token)) as client:
            nodes = client.list_nodes(FleetName=FLEET)["Nodes"]
            seen = client.describe_training_job(TrainingJobName=job.name)
            command = client.execute_command(TrainingJobName=job.name, Rank=1, Command=["echo", "here"])
            return (
                sorted((node["NodeId"], node["NodeStatus"], node["Connected"]) for node in nodes),
                (seen["TrainingJobStatus"], seen["SecondaryStatus"], seen["Generation"], seen["HealthyNodeCount"]),
                (command["NodeId"], command["ExitCode"], command["Stdout"]),
            )


@pytest.fixture
def production(warm_parent: WarmParent) -> Iterator[Production]:
    directory = Path(tempfile.mkdtemp(prefix="everstep-production-"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        database = stack.enter_context(Database())
        balancer = stack.enter_context(Balancer())
        cluster = stack.enter_context(LocalCluster(directory / "cluster"))
        options = ClusterOptions(
            nodes=NODES,
            spares=SPARES,
            node_memory_bytes=NODE_MEMORY_BYTES,
            connect_seconds=CONNECT_SECONDS,
            has_standby=True,
            start_balancer=balancer.start,
            control_plane_environment={"EVERSTEP_DATABASE_URL": database.url},
        )
        cluster.up(options)
        client = stack.enter_context(closing(sdk.client(balancer.url, cluster.token)))
        client.update_fleet(FleetName=FLEET, AllowCommands=True)
        place = Workplace(cluster, client, References(warm_parent), directory, NODES + SPARES)
        servers = {status.name: status.url for status in cluster.status() if status.name in (CONTROL_PLANE, STANDBY)}
        yield Production(place, servers, database)


def kill_the_holder(production: Production) -> None:
    victim, successor = production.holder(), production.other()
    os.kill(production.pid(victim), signal.SIGKILL)
    wait_until("the other server to take over", lambda: production.holder() == successor)
    production.place.cluster.restart_control_plane(victim)


def kill_the_other(production: Production) -> None:
    victim = production.other()
    os.kill(production.pid(victim), signal.SIGKILL)
    production.place.cluster.restart_control_plane(victim)


def freeze_the_holder(production: Production) -> None:
    frozen, successor = production.holder(), production.other()
    os.kill(production.pid(frozen), signal.SIGSTOP)
    try:
        wait_until("the other server to take over", lambda: production.holder() == successor)
    finally:
        os.kill(production.pid(frozen), signal.SIGCONT)
    wait_until("the frozen server to leave its fleet", lambda: production.is_ready(frozen))
    assert production.holder() == successor


def restart_the_database(production: Production) -> None:
    production.database.restart()


def promote_the_standby_in_a_transaction(production: Production) -> None:
    with closing(Connected(production.database.url)) as opened:

        def write_while_the_primary_is_lost() -> None:
            with opened.write() as session:
                row = session.execute(select(Fleet.lease_owner, Fleet.lease_counter).where(Fleet.name == FLEET)).one()
                guard(session, Lease("fleet", FLEET, row.lease_owner, row.lease_counter))
                session.execute(update(Fleet).where(Fleet.name == FLEET).values(reason="never committed"))
                session.flush()
                production.database.promote()

        with pytest.raises(DBAPIError):
            write_while_the_primary_is_lost()
        with opened.read() as session:
            assert session.scalar(select(Fleet.reason).where(Fleet.name == FLEET)) != "never committed"


FAULTS: tuple[Callable[[Production], None], ...] = (
    kill_the_other,
    kill_the_holder,
    freeze_the_holder,
    restart_the_database,
    promote_the_standby_in_a_transaction,
)


def settled(production: Production, job: Job) -> None:
    """Wait until both servers are ready and answer alike, directly and through HAProxy, with all agents connected."""
    place = production.place
    wait_until("both servers to be ready", lambda: all(map(production.is_ready, production.servers)))
    urls = [*production.servers.values(), place.client.meta.endpoint_url]
    seen: list[Any] = []

    def are_alike() -> bool:
        seen[:] = []
        with suppress(place.client.exceptions.ClientError):
            seen.extend(production.answers(url, job) for url in urls)
        return (
            len(seen) == len(urls)
            and all(answer == seen[0] for answer in seen)
            and sum(is_connected for _, _, is_connected in seen[0][0]) == place.node_count
        )

    wait_until("equal answers of both servers", are_alike, lambda: seen)
    assert seen[0][2][1:] == (0, "here\n")


@pytest.mark.timeout(1200)
def test_training_continues_through_every_fault_of_servers_and_database(production: Production) -> None:
    place = production.place
    instances = set(place.cluster.instances())
    watch = LeaseWatch(production.database.url)
    watch.start()
    job = place.submit(
        "production", Shape(nodes=NODES), holds=(LAST,), adapter="ddp", steps=STEPS, pace_seconds=PACE_SECONDS
    )
    job.wait_committed(FIRST_STEP)
    settled(production, job)
    for fault in FAULTS:
        before = job.describe()["CommittedStep"]
        fault(production)
        settled(production, job)
        after = job.describe()["CommittedStep"]
        assert after > before, f"no step was committed during {fault.__name__}"
    job.let_go(LAST)
    seen = job.wait_ended()
    watch.end()
    assert seen["Generation"] == 1
    assert job.incidents() == []
    assert_identical(job)
    assert violations(watch.samples) == []
    assert len({sample.owner for sample in watch.samples if sample.row == FLEET} - {None}) >= 3, "no takeover was seen"
    assert set(place.cluster.instances()) == instances
    assert [call for call in place.cluster.calls() if "Terminate" in call.action] == []
    assert place.cluster.wrong_calls() == []
    wait_until("the job to leave no rank, slot or assignment", lambda: not left_over(place), lambda: left_over(place))
    assert orphaned_objects(place, job) == []


def orphaned_objects(place: Workplace, job: Job) -> list[str]:
    """Return the objects of the job that no checkpoint, log or output of its run contains."""
    run = place.client.describe_training_job(TrainingJobName=job.name)["RunId"]
    with closing(place.cluster.aws("s3")) as s3:
        pages = s3.get_paginator("list_objects_v2").paginate(Bucket="everstep-local")
        keys = [found["Key"] for page in pages for found in page.get("Contents", [])]
        uploads = s3.list_multipart_uploads(Bucket="everstep-local").get("Uploads", [])
    assert any(f"/{job.name}/run={run}/" in f"/{key}" for key in keys)
    strange = [key for key in keys if "sources/" not in key and f"/{job.name}/run={run}/" not in f"/{key}"]
    return strange + [upload["Key"] for upload in uploads]
