"""Tests facts about network cards and file systems, read from fake kernel files."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from worker.core.node_health import DiskQueue, LinkFacts
from worker.node.health import devices


def card(
    folder: Path, name: str, state: str, errors: tuple[str, str] = ("2", "3"), *, is_physical: bool = True
) -> None:
    (folder / name / "statistics").mkdir(parents=True)
    (folder / name / "operstate").write_text(f"{state}\n")
    for kind, count in zip(("rx_errors", "tx_errors"), errors, strict=True):
        (folder / name / "statistics" / kind).write_text(f"{count}\n")
    if is_physical:
        (folder / name / "device").mkdir()


def test_cards_and_adapters_are_read_and_virtual_ones_are_not(tmp_path: Path) -> None:
    net, infiniband = tmp_path / "net", tmp_path / "infiniband"
    card(net, "eth0", "up")
    card(net, "eth1", "lowerlayerdown")
    card(net, "eth2", "unknown")
    card(net, "eth3", "up", ("many", "0"))
    card(net, "docker0", "down", is_physical=False)
    (infiniband / "efa_0/ports/1").mkdir(parents=True)
    (infiniband / "efa_0/ports/1/state").write_text("4: ACTIVE\n")
    (infiniband / "efa_1/ports/1").mkdir(parents=True)
    (infiniband / "efa_1/ports/1/state").write_text("1: DOWN\n")
    for name, count in (("rx_bytes", 40), ("tx_bytes", 2), ("rdma_read_bytes", 600)):
        (infiniband / "efa_0/ports/1/hw_counters").mkdir(exist_ok=True)
        (infiniband / "efa_0/ports/1/hw_counters" / name).write_text(f"{count}\n")
        (net / "eth1/statistics" / name).write_text(f"{count}\n")
    assert devices.links(net, infiniband) == (
        LinkFacts(name="eth0", is_up=True, error_count=5),
        LinkFacts(name="eth1", is_up=False, error_count=5, byte_count=42),
        LinkFacts(name="eth2", is_up=True, error_count=5),
        LinkFacts(name="efa_0/1", is_up=True, byte_count=642),
        LinkFacts(name="efa_1/1", is_up=False),
    )
    assert devices.links(tmp_path / "none", tmp_path / "none") == ()


@pytest.mark.parametrize(("flag", "is_read_only"), [(0, False), (os.ST_RDONLY, True)])
def test_a_file_system_is_read(monkeypatch: pytest.MonkeyPatch, flag: int, is_read_only: bool) -> None:
    monkeypatch.setattr(
        os, "statvfs", lambda path: SimpleNamespace(f_blocks=1_000_000, f_frsize=4096, f_bavail=10, f_flag=flag)
    )
    found = devices.disk(Path("/state"))
    assert found is not None
    assert (found.is_read_only, found.free_bytes, found.least_bytes) == (is_read_only, 40960, 40_960_000)


@pytest.mark.parametrize(
    ("recorded", "expected"),
    [
        (  # Linux 6.1 counts reads, writes, discards and flushes
            " 2107740   155104 45644898  1025744  2928411  1643982 92875000   461431        7   457540"
            "  1822128  1242844      826 320649024   283627   849582    51324\n",
            DiskQueue(finished_count=2107740 + 2928411 + 1242844 + 849582, waiting_count=7),
        ),
        (  # Linux 4.14 counts neither discards nor flushes
            "     412        3    21474      138       96       40     1096       24        0       88      160\n",
            DiskQueue(finished_count=412 + 96, waiting_count=0),
        ),
        ("412 3 21474\n", None),
        ("many of them\n", None),
    ],
)
def test_the_queue_of_a_volume_is_read(tmp_path: Path, recorded: str, expected: DiskQueue | None) -> None:
    device = tmp_path.stat().st_dev
    block = tmp_path / "block" / f"{os.major(device)}:{os.minor(device)}"
    block.mkdir(parents=True)
    (block / "stat").write_text(recorded)
    assert devices.queue(tmp_path, tmp_path / "block") == expected
    found = devices.disk(tmp_path, block_devices=tmp_path / "block")
    assert found is not None
    assert found.queue == expected


def test_what_is_no_block_device_of_this_node_has_no_queue(tmp_path: Path) -> None:
    assert devices.queue(tmp_path, tmp_path / "none") is None
    assert devices.queue(tmp_path / "gone") is None


def test_a_folder_that_is_not_there_is_left_out(tmp_path: Path) -> None:
    assert devices.disk(tmp_path / "none") is None
