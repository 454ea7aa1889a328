"""Runs a local cluster from its start to its end, with faults.

The processes are real. The fleet has no nodes, so that a test takes seconds.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.local_cloud.errors import NotUp, PreflightFailed, StartFailed
from infra.local_cloud.faults import Conditions
from infra.local_cloud.instance_init import memory_directory
from infra.local_cloud.processes import descendants, identify, marked_with, wait_gone
from infra.local_cloud.up import ClusterOptions, LocalCluster

# Several real servers start in each test, and a busy machine starts them slowly.
pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

EMPTY = ClusterOptions(nodes=0, spares=0)


MAKER = """
import sys
from pathlib import Path
from infra.local_cloud.up import ClusterOptions, LocalCluster
with LocalCluster(Path(sys.argv[1])) as cluster:
    cluster.up(ClusterOptions(nodes=1, spares=0, node_memory_bytes=1 << 26))
    print("up", flush=True)
    sys.stdin.read()
"""


def run(state_dir: Path, *words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "EVERSTEP_STATE_DIR": str(state_dir)}
    command = [sys.executable, "-P", "-m", "infra.local_cloud", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=50, check=False, **more)


def left_of(cluster: LocalCluster) -> list[int]:
    return [process.pid for process in marked_with("EVERSTEP_LOCAL_CLUSTER", str(cluster.state_dir))]


def crash(cluster: LocalCluster) -> None:
    parts = [identify(part.pid) for part in cluster.status()]
    for part in parts:
        assert part is not None
        part.send(signal.SIGKILL)
    assert wait_gone([part for part in parts if part], timeout_seconds=10)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path / "state") as cluster:
        yield cluster
    assert left_of(cluster) == []


def test_a_cluster_is_up_used_and_down(cluster: LocalCluster, tmp_path: Path) -> None:
    cluster.up(EMPTY)
    assert [(part.name, part.is_alive) for part in cluster.status()] == [("aws", True), ("control-plane", True)]
    assert all(part.url.startswith("http://127.0.0.1:") for part in cluster.status())
    with contextlib.closing(cluster.client()) as client:
        (fleet,) = client.list_fleets()["Fleets"]
    assert fleet["FleetName"] == "local"
    assert fleet["AutoScalingGroupName"] == cluster.group
    with contextlib.closing(cluster.aws("s3")) as s3:
        assert [bucket["Name"] for bucket in s3.list_buckets()["Buckets"]] == ["everstep-local"]
    cluster.set_conditions(Conditions(boot_delay_seconds=7))
    assert cluster.conditions().boot_delay_seconds == 7
    assert cluster.instances() == {}
    for path in [cluster.state_dir, *cluster.state_dir.rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, f"{path} is open to others"

    with pytest.raises(PreflightFailed, match="up already"):
        LocalCluster(cluster.state_dir).up(EMPTY)
    with pytest.raises(PreflightFailed, match="up already"), LocalCluster(cluster.state_dir) as second:
        second.up(EMPTY)
    assert all(part.is_alive for part in cluster.status()), "the refusal harmed nothing"

    lines = run(cluster.state_dir, "env").stdout
    assert cluster.token in lines
    poisoned = {
        **os.environ,
        "AWS_PROFILE": "work",
        "AWS_ENDPOINT_URL_S3": "http://trap.invalid",
        "HOME": str(tmp_path),
    }
    script = f"{lines}\npython -c \"import boto3; print(boto3.client('s3').list_buckets()['Buckets'][0]['Name'])\"\n"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    told = subprocess.run(
        ["/bin/sh", "-c", script],
        env={**poisoned, "PATH": path},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert told.stdout.strip() == "everstep-local", told.stderr
    script = (
        f'{lines}\npython -c "import boto3; '
        "print(boto3.client('everstep').list_fleets()['Fleets'][0]['FleetName'])\"\n"
    )
    told = subprocess.run(
        ["/bin/sh", "-c", script],
        env={**poisoned, "PATH": path},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert told.stdout.strip() == "local", told.stderr
    undone = run(cluster.state_dir, "env", "--unset").stdout
    assert undone.startswith("unset ")
    assert set(cluster.environment()) <= set(undone.split())

    status = run(cluster.state_dir, "status", "--output", "json")
    assert status.returncode == 0
    assert json.loads(status.stdout)["Up"] is True

    # Another process stops the cluster, using only the records on disk.
    assert run(cluster.state_dir, "down").returncode == 0
    assert left_of(cluster) == []
    assert (cluster.logs / "control-plane.log").exists(), "logs stay"
    assert run(cluster.state_dir, "status").returncode == 3
    with pytest.raises(NotUp):
        cluster.client()
    cluster.down()


def test_the_control_plane_dies_and_comes_back_at_its_address(cluster: LocalCluster) -> None:
    cluster.up(EMPTY)
    url, token = cluster.endpoint_url, cluster.token
    cluster.kill_control_plane()
    assert [part.is_alive for part in cluster.status()] == [True, False]
    assert run(cluster.state_dir, "status").returncode == 3
    cluster.restart_control_plane()
    assert (cluster.endpoint_url, cluster.token) == (url, token)
    with contextlib.closing(cluster.client()) as client:
        assert [fleet["FleetName"] for fleet in client.list_fleets()["Fleets"]] == ["local"]
    cluster.restart_control_plane()
    assert cluster.endpoint_url == url


def test_down_and_up_work_after_any_crash(cluster: LocalCluster) -> None:
    cluster.up(EMPTY)
    crash(cluster)
    cluster.up(EMPTY)
    assert all(part.is_alive for part in cluster.status())
    crash(cluster)
    cluster.down()
    assert left_of(cluster) == []


def test_down_ends_also_what_has_lost_its_directory(cluster: LocalCluster) -> None:
    cluster.up(EMPTY)
    parts = left_of(cluster)
    shutil.rmtree(cluster.state_dir)
    assert left_of(cluster) == parts
    cluster.down()
    assert left_of(cluster) == []
    assert not cluster.state_dir.exists()


def test_two_clusters_know_nothing_of_each_other(cluster: LocalCluster, tmp_path: Path) -> None:
    cluster.up(EMPTY)
    with LocalCluster(tmp_path / "other") as other:
        other.up(EMPTY)
        assert other.endpoint_url != cluster.endpoint_url
        assert other.aws_url != cluster.aws_url
    assert all(part.is_alive for part in cluster.status())


def test_a_start_that_fails_leaves_nothing_but_its_logs(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise StartFailed("no fleet today")

    monkeypatch.setattr(LocalCluster, "_create_fleet", refuse)
    with pytest.raises(StartFailed, match="no fleet today"):
        cluster.up(EMPTY)
    assert left_of(cluster) == []
    assert cluster.status() == ()
    assert (cluster.logs / "control-plane.log").exists()


def test_what_is_not_up_is_said_in_one_line(tmp_path: Path) -> None:
    for words in (["env"],):
        told = run(tmp_path / "state", *words)
        assert told.returncode == 1
        assert "no local cloud is up" in told.stderr
        assert "Traceback" not in told.stderr
    assert run(tmp_path / "state", "down").returncode == 0
    assert not (tmp_path / "state").exists(), "down creates nothing"


def test_two_cannot_work_on_one_directory(cluster: LocalCluster) -> None:
    lock = cluster.state_dir / "local/lock"
    lock.parent.mkdir(parents=True)
    with lock.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(PreflightFailed, match="is running in"):
            LocalCluster(cluster.state_dir).down()


def test_the_guardian_of_a_run_that_started_nothing_leaves_the_next_one_in_the_same_folder_alone(
    tmp_path: Path,
) -> None:
    state_dir = tmp_path / "state"
    command = [sys.executable, "-P", "-c", MAKER.replace("cluster.up(", "(lambda *_: None)("), str(state_dir)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "up\n", "it has its guardian, and no cluster yet"
        (guardian,) = descendants(first.pid)
        try:
            with LocalCluster(state_dir) as second:
                second.up(EMPTY)
                first.kill()
                assert wait_gone([guardian], timeout_seconds=120)
                assert all(part.is_alive for part in second.status())
                second.down(of_run="another")
                assert all(part.is_alive for part in second.status())
                second.down(of_run=second.run_id)
                assert left_of(second) == []
        finally:
            first.kill()


def test_a_cluster_whose_maker_is_killed_leaves_nothing_behind(tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    command = [sys.executable, "-P", "-c", MAKER, str(state_dir)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None
        try:
            assert maker.stdout.readline() == "up\n"
            of_cluster = marked_with("EVERSTEP_LOCAL_CLUSTER", str(state_dir))
            everyone = {*of_cluster, *descendants(maker.pid)}
            assert len(everyone) > len(of_cluster) > 2, (
                "the guardian is no part of the cluster; that is a server of AWS, a control plane and an instance"
            )
            memory = [memory_directory(node.name) for node in (state_dir / "nodes").iterdir()]
            assert all(folder.exists() for folder in memory)
        finally:
            maker.kill()
    assert wait_gone(everyone, timeout_seconds=120)
    assert [folder for folder in memory if folder.exists()] == []
    assert marked_with("EVERSTEP_LOCAL_CLUSTER", str(state_dir)) == []
