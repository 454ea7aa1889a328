"""Instances in network namespaces: the local cloud cuts and slows their connections, and removes every namespace.

The module runs in a network of its own. A new bridge in the machine's network would make every browser there cancel its
requests. Another test process may use a browser at the same time.
"""

from __future__ import annotations

import ctypes
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from infra.local_cloud import network
from infra.local_cloud.fault_kinds import Partition, SlowNetwork, Terminate
from infra.local_cloud.processes import identify
from infra.local_cloud.up import ClusterOptions, LocalCluster
from tests.unit.local_cloud.served import ServedAws, eventually, served_aws

OBSTACLE = network.obstacle()
pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(240),
    pytest.mark.skipif(OBSTACLE is not None, reason=f"no network namespaces here: {OBSTACLE}"),
]
PORT = 7000
REFUSED, TIMED_OUT = 7, 28
"""Exit codes of curl: connection refused, and timed out."""
BLOB_BYTES = 4 * 1024 * 1024
SERVER = (
    f"#!/bin/sh\nhead -c {BLOB_BYTES} /dev/zero > blob\nexec {sys.executable} -m http.server --bind "
    f"$EVERSTEP_ADDRESS {PORT}\n"
)


def left_of(name: str) -> list[str]:
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    routes = subprocess.run(
        ["ip", "route", "show", "table", "local"], capture_output=True, text=True, check=True
    ).stdout
    namespaces = [path.name for path in network.NAMESPACES.glob(f"{name}-*")]
    return [line for line in (links + routes).splitlines() if name in line] + namespaces


@pytest.fixture(scope="module", autouse=True)
def own_network() -> Iterator[None]:
    """Move this thread, and every process that it starts, into a network that has only a loopback."""
    with open("/proc/thread-self/ns/net", "rb") as of_machine:
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.unshare(network.CLONE_NEWNET) == 0, ctypes.get_errno()
        try:
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
            yield
        finally:
            assert libc.setns(of_machine.fileno(), network.CLONE_NEWNET) == 0, ctypes.get_errno()


@pytest.fixture(scope="module")
def name(tmp_path_factory: pytest.TempPathFactory) -> str:
    return network.network_name(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, name: str) -> Iterator[ServedAws]:
    with served_aws(tmp_path_factory.mktemp("aws"), network_name=name) as aws:
        yield aws
    eventually(lambda: left_of(name) == [])


@pytest.fixture
def aws(served: ServedAws) -> Iterator[ServedAws]:
    yield served
    served.clear()


@pytest.fixture(scope="module")
def pair(served: ServedAws, name: str) -> list[str]:
    """Start two instances that serve a file to each other."""
    group = served.make_group(desired=2, user_data=SERVER)
    ids = served.in_service(group, 2)
    for here, there in (ids, ids[::-1]):
        eventually(lambda here=here, there=there: reaches(name, here, of_peer(served, there)))
    return ids


def address(aws: ServedAws, instance_id: str) -> str:
    found: str = aws.instance(instance_id)["PrivateIpAddress"]
    return found


def curl(name: str, instance_id: str, url: str, *, seconds: float) -> subprocess.CompletedProcess[str]:
    words = [
        "curl",
        "--noproxy",
        "*",
        "-s",
        "-o",
        "/dev/null",
        "-m",
        str(seconds),
        "-w",
        "%{size_download} %{time_total}",
        url,
    ]
    return subprocess.run(
        ["ip", "netns", "exec", f"{name}-{instance_id}", *words], capture_output=True, text=True, check=False
    )


def reaches(name: str, instance_id: str, url: str) -> bool:
    """Return whether an instance gets an answer from a URL."""
    return curl(name, instance_id, url, seconds=20).returncode == 0


def is_cut_off(name: str, instance_id: str, url: str) -> bool:
    """Return whether a request of an instance times out. A request that is refused at once does not count."""
    return curl(name, instance_id, url, seconds=1).returncode == TIMED_OUT


def of_aws(aws: ServedAws) -> str:
    return f"{aws.url}/_everstep/config"


def of_peer(aws: ServedAws, instance_id: str) -> str:
    return f"http://{address(aws, instance_id)}:{PORT}/"


@contextmanager
def listening_everywhere() -> Iterator[int]:
    """Yield the port of a service on all addresses of this machine, outside the local cloud."""
    with closing(socket.create_server(("0.0.0.0", 0))) as server:

        def accept() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                connection.close()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_instances_reach_aws_and_one_another_and_nothing_else(aws: ServedAws, name: str, pair: list[str]) -> None:
    first, second = pair
    assert reaches(name, first, of_aws(aws))
    assert reaches(name, first, of_peer(aws, second))
    with listening_everywhere() as port:
        aws_host = aws.url.split("/")[2].split(":")[0]
        refused = curl(name, first, f"http://{aws_host}:{port}/", seconds=20)
        assert refused.returncode == REFUSED, "the routes of an instance end at the two ports"
        assert curl(name, first, f"http://127.0.0.1:{port}/", seconds=20).returncode == REFUSED, (
            "its loopback is its own"
        )
    routes = subprocess.run(["ip", "-n", f"{name}-{first}", "route"], capture_output=True, text=True, check=True).stdout
    assert "default" not in routes


def test_a_partition_swallows_packets_in_both_directions_until_it_is_cleared(
    aws: ServedAws, name: str, pair: list[str]
) -> None:
    first, second = pair
    effect = aws.inject(Partition(target=first))
    assert effect.facts["addresses"] == "all"
    for here, there in ((first, second), (second, first)):
        assert is_cut_off(name, here, of_peer(aws, there))
    assert is_cut_off(name, first, of_aws(aws))
    assert reaches(name, second, of_aws(aws)), "only one is cut off"
    counters = aws.links()[first]
    assert counters["dropped_from"] > 0
    assert counters["dropped_to"] > 0
    (said,) = aws.clear("partition")
    assert "packets were dropped" in said
    assert reaches(name, first, of_peer(aws, second))
    assert reaches(name, first, of_aws(aws))


def test_one_of_two_partitions_is_cleared(aws: ServedAws, name: str, pair: list[str]) -> None:
    first, second = pair
    for each in pair:
        aws.inject(Partition(target=each))
    (said,) = aws.clear("partition", target=first)
    assert said.startswith(f"{first} is reached again")
    assert reaches(name, first, of_aws(aws))
    assert is_cut_off(name, second, of_aws(aws))
    assert [said.partition(" ")[0] for said in aws.clear("partition")] == [second]


@pytest.mark.parametrize(
    ("separate_from", "aws_is_reached", "peer_is_reached"), [("aws", False, True), ("peers", True, False)]
)
def test_a_partition_may_be_of_some(
    aws: ServedAws, name: str, pair: list[str], separate_from: str, aws_is_reached: bool, peer_is_reached: bool
) -> None:
    first, second = pair
    aws.inject(Partition(target=first, separate_from=separate_from))
    assert (reaches if aws_is_reached else is_cut_off)(name, first, of_aws(aws))
    for here, there in ((first, second), (second, first)):
        assert (reaches if peer_is_reached else is_cut_off)(name, here, of_peer(aws, there))


def test_a_slow_line_carries_no_more_than_it_is_given(aws: ServedAws, name: str, pair: list[str]) -> None:
    first, second = pair
    # the slow instance sends in the first transfer, and receives in the second
    for here, there in ((first, second), (second, first)):
        aws.inject(SlowNetwork(target=first, megabits=16))
        done = curl(name, here, f"http://{address(aws, there)}:{PORT}/blob", seconds=30)
        size, seconds = done.stdout.split()
        assert int(size) == BLOB_BYTES
        assert int(size) * 8 / float(seconds) < 20e6, "no faster; how much slower is the machine's affair"
        aws.clear("slow-network")


def test_an_instance_takes_its_namespace_along(aws: ServedAws, name: str, pair: list[str]) -> None:
    group = aws.make_group(desired=1, user_data=SERVER)
    (id,) = aws.in_service(group, 1)
    eventually(lambda: (network.NAMESPACES / f"{name}-{id}").exists() and id in aws.links())
    init = identify(aws.pids()[id])
    assert init is not None
    aws.client("autoscaling").suspend_processes(AutoScalingGroupName=group)
    aws.inject(Terminate(target=id))
    eventually(lambda: not init.is_alive and not (network.NAMESPACES / f"{name}-{id}").exists())
    assert set(pair) <= set(aws.links()), "the others have theirs"


@pytest.mark.long
def test_a_cloud_in_namespaces_comes_up_and_a_crash_leaves_nothing(tmp_path: Path) -> None:
    name = network.network_name((tmp_path / "state").resolve())
    with LocalCluster(tmp_path / "state") as cluster:
        cluster.up(ClusterOptions(nodes=1, spares=0, has_namespaces=True, seed=11))
        assert cluster.seed == 11
        (instance_id,) = cluster.instances()
        with closing(cluster.client()) as client:
            (node,) = client.list_nodes(FleetName="local")["Nodes"]
        assert node["Connected"] is True
        url = cluster.endpoint_url
        cluster.restart_control_plane()
        assert cluster.endpoint_url == url
        cluster.wait_for_nodes(1, timeout_seconds=60)
        assert set(cluster.links()) == {instance_id}
        aws = next(identify(part.pid) for part in cluster.status() if part.name == "aws")
        assert aws is not None
        aws.send(signal.SIGKILL)
        eventually(lambda: not aws.is_alive)
        assert left_of(name), "a crash leaves them"
        cluster.down()
        eventually(lambda: left_of(name) == [])
