"""The local cluster that nearly all end-to-end tests share.

After each test, the fixture `settled` checks that no process, slot or assignment of a job remains.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from infra.local_cloud.instance_init import memory_directory
from infra.local_cloud.parts import tail
from infra.local_cloud.processes import memory_of
from infra.local_cloud.up import MAX_NODES, ClusterOptions, LocalCluster
from tests.e2e.jobs import ENDED, Workplace, wait_until
from tests.e2e.reference import References
from tests.warm_parent import WarmParent

NODES, SPARES = 5, 1
NODE_MEMORY_BYTES = 64 * 1024**2
CONNECT_SECONDS = 300.0
E2E_SECONDS = 400
HERE = Path(__file__).parent
MACHINE_NETWORK = "machine network"
"""Group of the tests that add network devices to the machine, and of the test with Chromium.

A new network device makes Chromium abort its requests, so these tests must not run at the same time.
"""

_newest_state_dir: Path | None = None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the end-to-end tests. `--dist loadgroup` runs the tests of a group in one process, one after another."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.e2e)
            if item.get_closest_marker("xdist_group") is None:
                item.add_marker(pytest.mark.xdist_group(item.path.name))
            item.add_marker(pytest.mark.timeout(E2E_SECONDS))  # this time includes the start of the cluster


@pytest.fixture(scope="session")
def references(warm_parent: WarmParent) -> References:
    """Return the object that starts the undisturbed runs, whose results the tests compare with a job's results."""
    return References(warm_parent)


@pytest.fixture(scope="session")
def place(request: pytest.FixtureRequest, references: References) -> Iterator[Workplace]:
    """Yield the cluster that most modules share. Some modules replace this fixture by a cluster of their own."""
    with workplace(request.session, references, nodes=NODES, spares=SPARES) as shared:
        yield shared


@contextlib.contextmanager
def workplace(
    session: pytest.Session,
    references: References,
    *,
    nodes: int,
    spares: int,
    detection_seconds: float | None = None,
    environment: Mapping[str, str] | None = None,
    control_plane_environment: Mapping[str, str] | None = None,
    has_namespaces: bool = False,
    storage_url: str = "",
) -> Iterator[Workplace]:
    """Start a cluster with a client, and end it in any case.

    `environment` contains variables for the cluster's instances, `control_plane_environment` for its servers.
    `storage_url` names an S3 server that replaces the local AWS's S3.
    """
    global _newest_state_dir
    faulthandler.enable(sys.__stderr__)
    before = signal.signal(signal.SIGTERM, _give_up)
    # The directory is not inside pytest's directory, which another run may clear before this run ends.
    directory = Path(tempfile.mkdtemp(prefix="everstep-e2e-"))
    _newest_state_dir = directory / "cluster"
    options = ClusterOptions(
        nodes=nodes,
        spares=spares,
        max_nodes=MAX_NODES,
        node_memory_bytes=NODE_MEMORY_BYTES,
        detection_seconds=detection_seconds,
        connect_seconds=CONNECT_SECONDS,
        environment=environment or {},
        control_plane_environment=control_plane_environment or {},
        has_namespaces=has_namespaces,
        start_storage=(lambda *_: storage_url) if storage_url else None,
    )
    with contextlib.ExitStack() as stack:
        stack.callback(_remove_unless_failed, directory, session)
        stack.callback(signal.signal, signal.SIGTERM, before)
        cluster = stack.enter_context(LocalCluster(_newest_state_dir))
        cluster.up(options)
        client = stack.enter_context(contextlib.closing(cluster.client()))
        yield Workplace(cluster, client, references, directory, nodes + spares)


@pytest.fixture
def reader(place: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to an empty directory, and set the environment that `everstep local env` prints.

    A reader of the documents starts with the same environment.
    """
    for name, value in place.cluster.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def settled(place: Workplace) -> Iterator[None]:
    """Wait until all nodes are connected. After the test, check that its jobs leave no rank, slot or assignment.

    The fixture stops the test's jobs. Then no rank may run, no slot may exist, and no node may have a job.
    """
    place.cluster.wait_for_nodes(place.node_count, timeout_seconds=CONNECT_SECONDS)
    yield
    for hold in place.directory.glob("gates/*/hold *"):
        hold.unlink()  # A failed test leaves files that make ranks wait. Waiting ranks cannot stop.
    for summary in place.client.get_paginator("list_training_jobs").paginate().search("TrainingJobSummaries[]"):
        if summary["TrainingJobStatus"] not in ENDED:
            # the job ended after the list was read
            with contextlib.suppress(place.client.exceptions.ConflictException):
                place.client.stop_training_job(TrainingJobName=summary["TrainingJobName"])
    wait_until("what the test has started to end", lambda: not left_over(place), lambda: left_over(place))
    assert place.cluster.wrong_calls() == [], "AWS would refuse these calls of the cluster's processes"


def left_over(place: Workplace) -> list[str]:
    """Return all existing rank processes and slots, and all nodes that still have a job."""
    left = [f"process {process.pid}" for process in place.rank_processes()]
    for instance_id in place.cluster.instances():
        left += [f"file {name}" for name in memory_of(memory_directory(instance_id))]
    for node in place.client.list_nodes(FleetName="local")["Nodes"]:
        if "TrainingJobName" in node:
            left.append(f"{node['NodeId']} has job {node['TrainingJobName']}")
    return left


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Add the end of the cluster's logs to the report of a failed test."""
    report = yield
    place = getattr(item, "funcargs", {}).get("place")  # missing if the cluster did not start
    state_dir = place.cluster.state_dir if place is not None else _newest_state_dir
    if report.failed and state_dir is not None and item.path.is_relative_to(HERE):
        logs = [*sorted(state_dir.glob("logs/*.log")), *sorted(state_dir.glob("nodes/*/console.log"))]
        report.sections += [(f"end of {log}", tail(log)) for log in logs]
    return report


def _remove_unless_failed(directory: Path, session: pytest.Session) -> None:
    if session.testsfailed == 0:
        shutil.rmtree(directory)


def _give_up(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt on SIGTERM, so that the cluster is ended."""
    raise KeyboardInterrupt(f"signal {number}, process {os.getpid()}")
