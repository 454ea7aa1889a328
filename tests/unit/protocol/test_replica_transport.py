"""Tests the choice between TCP and NIXL for the chunks of replicas."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from everstep.node_facts import rdma_devices
from everstep.protocol.replica_transport import (
    TRANSPORT_SETTINGS,
    ReplicaTransport,
    TransportSetting,
    choose_transport,
)
from worker.replication.nixl import open_transport


@pytest.mark.parametrize("setting", TRANSPORT_SETTINGS)
@pytest.mark.parametrize("devices", [(), ("rdmap0s6", "rdmap1s6")])
def test_nixl_is_chosen_only_with_a_device_and_never_against_the_operator(
    setting: TransportSetting, devices: tuple[str, ...]
) -> None:
    choice = choose_transport(setting, devices)
    assert choice.uses_nixl == (setting != "tcp" and bool(devices))
    assert choice.is_warning == (setting == "nixl" and not devices)
    if choice.uses_nixl:
        assert "rdmap0s6, rdmap1s6" in choice.reason


def test_the_kernel_lists_the_devices(tmp_path: Path) -> None:
    assert rdma_devices(tmp_path / "absent") == ()
    for name in ("rdmap1s6", "mlx5_0"):
        (tmp_path / name).mkdir()
    assert rdma_devices(tmp_path) == ("mlx5_0", "rdmap1s6")


@pytest.mark.parametrize(
    ("setting", "level", "words"),
    [
        ("auto", logging.INFO, "replicas use TCP: this node has no EFA or InfiniBand device"),
        ("nixl", logging.WARNING, "replicas use TCP: this node has no EFA or InfiniBand device"),
        ("tcp", logging.INFO, "replicas use TCP: --replica-transport is tcp"),
    ],
)
def test_the_agent_logs_that_replicas_use_tcp(
    setting: TransportSetting, level: int, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        opened = open_transport(setting, devices=())
    assert (opened.nixl, opened.kind) == (None, ReplicaTransport.TCP)
    assert f"replicas use TCP: {opened.reason}" == words
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [(level, words)]


def test_a_device_that_nixl_cannot_use_leaves_tcp(caplog: pytest.LogCaptureFixture) -> None:
    """Replicas use TCP if NIXL cannot use the network device.

    The device that the test names does not exist. NIXL finds no usable device, or its package is not installed.
    """
    if rdma_devices():
        pytest.skip("this machine has an RDMA device")
    opened = open_transport("auto", devices=("rdmap0s6",))
    assert opened.kind is ReplicaTransport.TCP
    assert opened.reason.startswith("found rdmap0s6, but ")
    assert f"replicas use TCP: {opened.reason}" in caplog.text
