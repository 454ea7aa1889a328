"""A job trains through the loss of servers and of the database, as in production.

    agents, clients ──▶ HAProxy ──▶ two servers ──▶ PostgreSQL with a synchronous standby, SeaweedFS

Terraform made the nodes' Auto Scaling group and the queue of AWS's events.

No fault here touches a node. So the job must have no incident, AWS must get no call that ends an instance, and the
result must equal that of an undisturbed run bit for bit.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, update
from sqlalchemy.exc import DBAPIError

from control_plane.db.leases import Lease, guard
from control_plane.db.models import FleetRow
from control_plane.db.session import Database as Connected
from everstep import sdk
from infra.local_cloud.up import FLEET, MAX_NODES, ClusterOptions, LocalCluster
from tests.e2e.conftest import left_over
from tests.e2e.jobs import Job, Shape, Workplace, assert_identical, wait_until
from tests.e2e.reference import References
from tests.production.leases import LeaseWatch, violations
from tests.production.orphans import orphans
from tests.production.stack import Servers, stack
from tests.terraform import needs_provider, needs_terraform
from tests.warm_parent import WarmParent

pytestmark = [pytest.mark.production, needs_terraform, needs_provider]

NODES, SPARES = 3, 1
NODE_MEMORY_BYTES = 64 * 1024**2
STAGE_STEPS, PACE_SECONDS = 100, 0.2
"""Number of steps from one fault to the next. Faults that last longer find the ranks waiting for the next one."""
CONNECT_SECONDS = 300.0


@dataclass(frozen=True)
class Production:
    """The running installation."""

    place: Workplace
    servers: Servers

    def connected(self, url: str) -> set[str]:
        """Return the nodes whose agents a server reports as connected. Empty if the server does not answer in time."""
        with suppress(Exception), closing(sdk.client(url, self.place.cluster.token, config=sdk.IMPATIENT)) as client:
            return {node["NodeId"] for node in client.list_nodes(FleetName=FLEET)["Nodes"] if node["Connected"]}
        return set()

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
def production(warm_parent: WarmParent, request: pytest.FixtureRequest) -> Iterator[Production]:
    directory = Path(tempfile.mkdtemp(prefix="everstep-production-"))
    with ExitStack() as closed:
        # After a failed test, keep the directory with the logs.
        closed.callback(lambda: request.session.testsfailed or shutil.rmtree(directory, ignore_errors=True))
        parts = closed.enter_context(stack())
        cluster = closed.enter_context(LocalCluster(directory / "cluster"))
        options = ClusterOptions(
            nodes=NODES,
            spares=SPARES,
            max_nodes=MAX_NODES,
            node_memory_bytes=NODE_MEMORY_BYTES,
            connect_seconds=CONNECT_SECONDS,
        )
        cluster.up(parts.options(options))
        client = closed.enter_context(closing(cluster.client()))
        client.update_fleet(FleetName=FLEET, AllowCommands=True)
        place = Workplace(cluster, client, References(warm_parent), directory, NODES + SPARES)
        yield Production(place, Servers(cluster, parts.database))


def kill_the_holder(production: Production) -> None:
    victim, successor = holder_and_other(production)
    production.servers.process(victim).send(signal.SIGKILL)
    wait_until("the other server to take over", lambda: production.servers.holder() == successor)
    production.place.cluster.restart_control_plane(victim)


def kill_the_other(production: Production) -> None:
    _, victim = holder_and_other(production)
    production.servers.process(victim).send(signal.SIGKILL)
    production.place.cluster.restart_control_plane(victim)


def freeze_the_holder(production: Production) -> None:
    servers = production.servers
    frozen, successor = holder_and_other(production)
    with servers.frozen(frozen):
        wait_until("the other server to take over", lambda: servers.holder() == successor)
        # This takes until the agents' time limits expire: the frozen server closes no connection, and its kernel and
        # HAProxy still acknowledge the bytes of all reports.
        wait_until(
            "all agents to find the other server",
            lambda: len(production.connected(servers.urls[successor])) == production.place.node_count,
        )
    wait_until("the frozen server to be ready again", lambda: servers.is_ready(frozen))
    assert servers.holder() == successor


def freeze_the_other(production: Production) -> None:
    servers = production.servers
    holder, frozen = holder_and_other(production)
    with servers.frozen(frozen):
        wait_until(
            "HAProxy to use the holder only", lambda: production.connected(production.place.cluster.endpoint_url)
        )
        wait_until(
            "all agents to find the holder",
            lambda: len(production.connected(servers.urls[holder])) == production.place.node_count,
        )
    wait_until("the frozen server to be ready again", lambda: servers.is_ready(frozen))
    assert servers.holder() == holder


def restart_the_database(production: Production) -> None:
    production.servers.database.restart()


def promote_the_standby_in_a_transaction(production: Production) -> None:
    database = production.servers.database
    with closing(Connected(database.url)) as opened:

        def write_while_the_primary_is_lost() -> None:
            with opened.write() as session:
                row = session.execute(
                    select(FleetRow.lease_owner, FleetRow.lease_counter).where(FleetRow.name == FLEET)
                ).one()
                guard(session, Lease("fleet", FLEET, row.lease_owner, row.lease_counter))
                session.execute(update(FleetRow).where(FleetRow.name == FLEET).values(instance_type="never committed"))
                session.flush()
                database.promote()

        with pytest.raises(DBAPIError):
            write_while_the_primary_is_lost()
        with opened.read() as session:
            assert session.scalar(select(FleetRow.instance_type).where(FleetRow.name == FLEET)) != "never committed"


def holder_and_other(production: Production) -> tuple[str, str]:
    """Return the server that holds the fleet's lease, and the other server."""
    holder = wait_until("a server to hold the fleet's lease", production.servers.holder)
    (other,) = production.servers.urls.keys() - {holder}
    return holder, other


FAULTS: tuple[Callable[[Production], None], ...] = (
    kill_the_other,
    kill_the_holder,
    freeze_the_holder,
    freeze_the_other,
    restart_the_database,
    promote_the_standby_in_a_transaction,
)
STARTS = tuple(STAGE_STEPS * number for number in range(1, len(FAULTS) + 1))
"""Steps at which the ranks wait for the next fault. They train on when it begins, and must commit a step after it."""
LAST = STAGE_STEPS * (len(FAULTS) + 1)
"""The ranks wait here, so that the job cannot end during the last fault."""
STEPS = LAST + 10


def settled(production: Production, job: Job) -> None:
    """Wait until both servers are ready and answer alike, directly and through HAProxy, with all agents connected."""
    place, servers = production.place, production.servers
    wait_until("both servers to be ready", lambda: all(map(servers.is_ready, servers.urls)))
    urls = [*servers.urls.values(), place.cluster.endpoint_url]
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
    watch = LeaseWatch(production.servers.database.url)
    watch.start()
    holds = [f"1:{step}" for step in (*STARTS, LAST)]
    job = place.submit(
        "production", Shape(nodes=NODES), holds=holds, adapter="ddp", steps=STEPS, pace_seconds=PACE_SECONDS
    )
    for fault, start in zip(FAULTS, STARTS, strict=True):
        job.wait_standing(f"1:{start}")
        settled(production, job)
        job.let_go(f"1:{start}")
        fault(production)
        settled(production, job)
        job.wait_committed(start + 1)
    job.wait_standing(f"1:{LAST}")
    job.let_go(f"1:{LAST}")
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
    assert orphans(place.cluster, production.servers.database.url) == []
