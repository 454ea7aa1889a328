"""Fixtures of the contract's tests: one service for all tests of a module, and clients of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import httpx
import pytest

from control_plane.db import jobs, nodes
from control_plane.db.leases import Leaser
from tests.unit.control_plane.api.conftest import GROUP, Service
from tests.unit.control_plane.api.test_commands import agent, says
from tests.unit.control_plane.api.test_results import Job
from tests.unit.control_plane.api.test_snapshots import Agent as SnapshotAgent


@pytest.fixture(scope="module")
def service(tmp_path_factory) -> Iterator[Service]:
    """Yield one service for all tests of this module.

    The service has a fleet, a job that has run, and at least one object for every Describe operation.
    """
    with Service(tmp_path_factory.mktemp("service")) as running:
        running.operator.create_group(GROUP, max_size=8)
        yield running


@pytest.fixture(scope="module")
def client(service) -> Iterator[Any]:
    with closing(service.client()) as connected:
        yield connected


@pytest.fixture(scope="module")
def http(service) -> Iterator[httpx.Client]:
    with httpx.Client(
        base_url=f"http://{service.address}",
        headers={"authorization": f"Bearer {service.admin_token}"},
        trust_env=False,
        timeout=30,
    ) as made:
        yield made


@pytest.fixture(scope="module")
def world(service, client, tmp_path_factory) -> Iterator[dict[str, Any]]:
    """Yield the names of the service's objects. Tests use the names to build a successful request of each operation."""
    client.create_fleet(
        FleetName="main", AutoScalingGroupName=GROUP, MinNodeCount=2, AllowDrills=True, AllowCommands=True
    )
    directory = tmp_path_factory.mktemp("code")
    (directory / "train.py").write_text("pass")
    source = client.upload_source(Directory=directory)
    job = Job(service, client, source)
    job.launch(1)
    job.run_ranks()
    job.connect("i-0", "i-1")
    with service.database.write() as session:
        lease = Leaser("test", 3.0, lambda: 0.0).claim(session, "fleet", "main")
        nodes.change(
            session,
            lease,
            "i-2",
            initial_state="held",
            now=service.clock(),
            state="held",
            hold="distrusted",
            reason="words",
        )
    client.create_training_job(TrainingJobName="ended", Source=source, EntryPoint="train.py", NodeCount=1)
    with service.database.write() as session:
        ended = Leaser("test", 3.0, lambda: 0.0).claim(session, "job", jobs.get(session, "ended").run_id)
        jobs.change(session, ended, ended_at=service.clock(), reason="stopped")
        for number in range(3, 7):
            nodes.change(session, lease, f"i-{number}", initial_state="spare", now=service.clock(), state="spare")
    job.put("output", "gen=1/rank=0/model.bin", b"weights")
    job.open_incident("inc-0")
    for step in (4, 8):
        job.checkpoint(step)
    choice = {"base_step": 4, "newest_step": 8, "after": 1, "seconds": None, "since": 0.0}
    job.write(jobs.change, committed_step=8, memo={"repeat": choice})
    # this write adds an event, so that the list of events is not empty
    client.update_fleet(FleetName="main", SpareCount=0)
    token = client.create_token(Role="viewer")["Token"]["TokenId"]
    with ExitStack() as stack:
        for rank in range(2):
            holder = SnapshotAgent(service, f"i-{rank}", rank, committed=8, sealed={7, 8})
            holder.held["0" * 32] = 8
            stack.enter_context(agent(service, f"i-{rank}", says, holder))
        yield {"source": source, "job": job, "token": token}
