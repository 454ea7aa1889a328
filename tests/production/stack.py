"""The parts of a production installation that the local cloud does not contain.

agents, clients ──▶ HAProxy ──▶ two servers ──▶ PostgreSQL with a synchronous standby
                                          └───▶ SeaweedFS as S3
Terraform ──▶ the local AWS: network, roles, keys, the queue of events, the nodes' Auto Scaling group
"""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
from sqlalchemy import select
from sqlalchemy.exc import DBAPIError

from control_plane.db.models import FleetRow
from control_plane.db.session import Database as Connected
from control_plane.replica import url_of
from everstep.host.local_keys import LocalKeys
from infra.local_cloud.processes import Process, identify
from infra.local_cloud.up import CONTROL_PLANE, FLEET, STANDBY, ClusterOptions, LocalCluster
from tests.production.balancer import Balancer
from tests.production.database import Database
from tests.production.installation import TerraformInstallation
from tests.seaweedfs import SeaweedFs

READY_SECONDS = 2.0


@dataclass(frozen=True)
class Stack:
    """The parts that take the place of RDS, a load balancer and S3. `options` adds them to the options of a cluster."""

    database: Database
    _balancer: Balancer
    _installation: TerraformInstallation
    _closing: ExitStack

    def options(self, options: ClusterOptions) -> ClusterOptions:
        """Return the options of a cluster with two servers that uses these parts."""
        return dataclasses.replace(
            options,
            has_standby=True,
            start_balancer=self._balancer.start,
            start_storage=self._start_storage,
            installation=self._installation,
            control_plane_environment={
                **options.control_plane_environment,
                "EVERSTEP_DATABASE_URL": self.database.url,
            },
        )

    def _start_storage(self, keys: LocalKeys, address: str, port: int) -> str:
        pair = (keys.access_key_id, keys.secret_access_key)
        return self._closing.enter_context(SeaweedFs(address=address, port=port, keys=pair)).url


@contextmanager
def stack() -> Iterator[Stack]:
    """Start PostgreSQL, and yield all parts. The cluster itself starts HAProxy and SeaweedFS.

    All parts end after the block.
    """
    with ExitStack() as closing:
        database = closing.enter_context(Database())
        folder = Path(closing.enter_context(TemporaryDirectory(prefix="everstep-terraform-")))
        yield Stack(database, closing.enter_context(Balancer()), TerraformInstallation(folder), closing)


@dataclass(frozen=True)
class Servers:
    """The two servers of a running cluster."""

    cluster: LocalCluster
    database: Database

    @property
    def urls(self) -> dict[str, str]:
        """URL of each server, by the server's name in the local cloud: `control-plane` or `standby`."""
        return {each.name: each.url for each in self.cluster.status() if each.name in (CONTROL_PLANE, STANDBY)}

    def holder(self) -> str:
        """Return the name of the server that holds the fleet's lease.

        The name is empty if neither server holds the lease, or if the database is unreachable.
        """
        with suppress(DBAPIError), closing(Connected(self.database.url)) as opened, opened.read() as session:
            owner = session.scalar(select(FleetRow.lease_owner).where(FleetRow.name == FLEET))
            return {url: part for part, url in self.urls.items()}.get(url_of(owner or ""), "")
        return ""

    def process(self, part: str) -> Process:
        """Return the running process of a server."""
        (pid,) = [status.pid for status in self.cluster.status() if status.name == part]
        found = identify(pid)
        assert found is not None, f"{part} does not run"
        return found

    def is_ready(self, part: str) -> bool:
        """Return whether a load balancer may send requests to a server."""
        with suppress(httpx.TransportError):
            answer = httpx.get(f"{self.urls[part]}/v1/ready", timeout=READY_SECONDS, trust_env=False)
            return answer.status_code == httpx.codes.OK
        return False

    @contextmanager
    def frozen(self, part: str) -> Iterator[Process]:
        """Stop a server's process for the duration of the block, and yield the process."""
        process = self.process(part)
        process.send(signal.SIGSTOP)
        try:
            yield process
        finally:
            process.send(signal.SIGCONT)
