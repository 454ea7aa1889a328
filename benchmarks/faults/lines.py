"""Finds the network namespaces of a local cluster's nodes, and measures the rate of a connection between two nodes."""

from __future__ import annotations

import mmap
import socket
import threading
import time
from pathlib import Path

from infra.local_cloud.network import inside, listening_socket, namespace_path, network_name
from infra.local_cloud.up import LocalCluster

MIB = 1024**2
PROBE_MIB = 512


def namespace(cluster: LocalCluster, node: str) -> Path:
    """Return the path of a node's network namespace."""
    return namespace_path(network_name(cluster.state_dir), node)


def bytes_per_second(cluster: LocalCluster, source: str, target: str) -> float:
    """Measure the bytes per second of one plain TCP connection between two nodes, without other traffic."""
    with listening_socket(_address(cluster, target), namespace(cluster, target)) as server:
        meeting = server.getsockname()
        sender = threading.Thread(target=inside, args=(namespace(cluster, source), lambda: _send(meeting)))
        sender.start()
        line, _ = server.accept()
        begun, received = time.perf_counter(), 0
        with line, mmap.mmap(-1, MIB) as memory:
            while count := line.recv_into(memory):
                received += count
        seconds = time.perf_counter() - begun
        sender.join()
    return received / seconds


def _send(meeting: tuple[str, int]) -> None:
    with socket.create_connection(meeting) as line, mmap.mmap(-1, MIB) as memory:
        for _ in range(PROBE_MIB):
            line.sendall(memory)


def _address(cluster: LocalCluster, node: str) -> str:
    (reservation,) = cluster.aws("ec2").describe_instances(InstanceIds=[node])["Reservations"]
    return str(reservation["Instances"][0]["PrivateIpAddress"])
