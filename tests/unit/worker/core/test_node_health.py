"""Tests which faults of a node follow from readings of its hardware counters."""

from __future__ import annotations

from dataclasses import replace

import pytest

from everstep.protocol.agent_messages import DEVICE_SILENT_SECONDS
from worker.core import node_health
from worker.core.node_health import (
    FIRST_SILENT_SECONDS,
    DiskFacts,
    DiskQueue,
    GpuFacts,
    LinkFacts,
    NodeFacts,
    NodeHealth,
    judge,
)

GIB = 1 << 30
WELL = NodeFacts(
    at=0.0,
    gpus=(GpuFacts(index=0, name="H200"), GpuFacts(index=1, name="H200")),
    links=(LinkFacts(name="eth0", is_up=True, error_count=7),),
    disks=(DiskFacts(path="/state", is_read_only=False, free_bytes=GIB, least_bytes=GIB // 4),),
    memory_total_bytes=100 * GIB,
    memory_available_bytes=50 * GIB,
    kill_count=3,
)


def at(seconds: float, **changes: object) -> NodeFacts:
    return replace(WELL, at=seconds, **changes)  # type: ignore[arg-type]


def gpu(**changes: object) -> tuple[GpuFacts, ...]:
    return (replace(WELL.gpus[0], **changes), WELL.gpus[1])  # type: ignore[arg-type]


def told(*readings: NodeFacts) -> list[tuple[str, str]]:
    """Return the faults after the last reading. A healthy reading precedes the given ones."""
    health = judge(NodeHealth(), WELL)
    assert health.faults == ()
    for reading in readings:
        health = judge(health, reading)
    return [(fault.code, fault.device) for fault in health.faults]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"gpus": gpu(xids=(79,))}, ("gpu_xid", "gpu 0")),
        ({"gpus": gpu(ecc_uncorrectable=2)}, ("gpu_ecc", "gpu 0")),
        ({"gpus": gpu(is_remapping_failed=True)}, ("gpu_ecc", "gpu 0")),
        ({"gpus": gpu(is_lost=True)}, ("gpu_lost", "gpu 0")),
        ({"links": (LinkFacts(name="eth0", is_up=False, error_count=7),)}, ("nic_down", "eth0")),
        ({"links": (LinkFacts(name="eth0", is_up=True, error_count=107),)}, ("nic_errors", "eth0")),
        ({"disks": (replace(WELL.disks[0], is_read_only=True),)}, ("disk_read_only", "/state")),
        ({"disks": (replace(WELL.disks[0], free_bytes=GIB // 4 - 1),)}, ("disk_full", "/state")),
        ({"kill_count": 4}, ("memory_killed", "memory")),
    ],
)
def test_a_fault_is_told_and_cleared(changes: dict[str, object], expected: tuple[str, str]) -> None:
    assert told(at(1.0, **changes)) == [expected]
    assert told(at(1.0, **changes), at(1000.0), at(1001.0)) == []


def disk(at_seconds: float, finished: int, waiting: int) -> NodeFacts:
    return at(
        at_seconds, disks=(replace(WELL.disks[0], queue=DiskQueue(finished_count=finished, waiting_count=waiting)),)
    )


STUCK = [("disk_silent", "/state")]
LONG = DEVICE_SILENT_SECONDS


def test_a_volume_that_finishes_nothing_while_requests_wait_is_stuck_until_it_finishes_one() -> None:
    story = (disk(1, 100, 0), disk(2, 100, 3), disk(3, 100, 9))
    assert told(*story, disk(2 + LONG - 0.1, 100, 9)) == []
    assert told(*story, disk(2 + LONG, 100, 9)) == STUCK
    assert told(*story, disk(2 + LONG, 100, 9), disk(60, 101, 8)) == []
    assert told(*story, disk(2 + LONG, 100, 9), disk(60, 101, 8), disk(60 + LONG, 101, 8)) == STUCK
    assert told(*story, disk(2 + LONG, 100, 9), disk(60, 109, 0)) == []


def test_a_busy_volume_finishes_some_however_slowly_and_an_idle_one_has_nothing_to_finish() -> None:
    busy = [disk(1, 100, 0), *(disk(seconds, 100 + int(seconds // 14), 200) for seconds in range(2, 300))]
    assert told(*busy) == []
    assert told(*(disk(seconds, 100, 0) for seconds in range(1, 300))) == []
    assert told(disk(1, 100, 0), disk(2, 100, 1), disk(10, 100, 0), disk(11, 100, 1), disk(10 + LONG, 100, 1)) == [], (
        "a request that was merged away"
    )


def test_one_request_is_enough_for_a_volume_to_be_stuck() -> None:
    story = (disk(1, 100, 0), disk(2, 100, 0), disk(3, 100, 1))
    assert told(*story, disk(3 + LONG, 100, 1)) == STUCK
    assert told(*story, disk(4, 100, 0), disk(3 + LONG, 100, 0), disk(4 + 2 * LONG, 100, 0)) == []


def test_requests_that_a_driver_has_lost_count_of_are_none() -> None:
    lost = [disk(1, 100, 5), *(disk(seconds, 101, 2) for seconds in range(2, 300))]
    assert told(*lost) == []
    assert told(*lost, disk(300, 101, 3), disk(300 + LONG, 101, 3)) == STUCK
    assert told(disk(1, 100, 2), disk(FIRST_SILENT_SECONDS, 101, 2), disk(500, 101, 2)) == [], (
        "it finishes what is written to it"
    )


def test_a_volume_that_was_stuck_before_anybody_looked_is_found() -> None:
    assert told(disk(1, 100, 2), disk(FIRST_SILENT_SECONDS + 0.9, 100, 4)) == []
    assert told(disk(1, 100, 2), disk(FIRST_SILENT_SECONDS + 1, 100, 4)) == STUCK
    assert told(disk(1, 100, 2), disk(40, 100, 2), disk(41, 100, 0), disk(100, 100, 0)) == []
    assert told(disk(1, 100, 2), disk(40, 101, 3), disk(41, 101, 4), disk(41 + LONG, 101, 4)) == STUCK, (
        "it has been seen to work"
    )


def test_two_readings_far_apart_prove_as_much_as_many() -> None:
    assert told(disk(1, 100, 0), disk(2, 100, 1), disk(500, 100, 1)) == STUCK
    assert told(disk(1, 100, 0), disk(2, 100, 1), at(3.0), disk(500, 100, 1)) == [], (
        "nobody knows what was there meanwhile"
    )


def test_a_fault_is_told_in_the_same_words_while_it_holds() -> None:
    """The text of a fault stays the same as long as the fault lasts, although the measured values change.

    Each changed text would make the control plane run a pass.
    """
    bad = {"gpus": gpu(xids=(48,), slowed_by=("hardware",)), "memory_available_bytes": GIB}
    health = judge(NodeHealth(), at(0.0, **bad))
    for second in range(1, 30):
        health = judge(health, at(float(second), **{**bad, "memory_available_bytes": GIB - second, "kill_count": 3}))
        if second == 12:
            settled = health.faults
    assert [fault.code for fault in settled] == ["gpu_xid", "gpu_throttled", "memory_low"]
    assert health.faults == settled


def test_an_xid_is_told_with_its_number_for_ten_minutes_after_it_was_told_last() -> None:
    health = judge(judge(NodeHealth(), WELL), at(1.0, gpus=gpu(xids=(79, 13))))
    assert [(fault.xid, fault.message) for fault in health.faults] == [
        (13, "gpu 0 (H200): Xid 13"),
        (79, "gpu 0 (H200): Xid 79"),
    ]
    health = judge(health, at(600.0, gpus=gpu(xids=(13,))))
    assert [fault.xid for fault in judge(health, at(600.9)).faults] == [13, 79]
    assert [fault.xid for fault in judge(health, at(601.0)).faults] == [13]
    assert judge(health, at(1200.0)).faults == ()


def test_heat_and_want_of_memory_count_once_they_last() -> None:
    hot = {"gpus": gpu(slowed_by=("heat, by hardware",))}
    assert told(at(1.0, **hot), at(10.9, **hot)) == []
    assert told(at(1.0, **hot), at(11.0, **hot)) == [("gpu_throttled", "gpu 0")]
    assert told(at(1.0, **hot), at(6.0), at(11.0, **hot)) == []
    low = {"memory_available_bytes": 2 * GIB - 1}
    assert told(at(1.0, **low), at(5.9, **low)) == []
    assert told(at(1.0, **low), at(6.0, **low)) == [("memory_low", "memory")]
    assert told(at(1.0, memory_available_bytes=2 * GIB), at(9.0, memory_available_bytes=2 * GIB)) == []


def test_a_card_that_was_never_up_is_not_down() -> None:
    unused = LinkFacts(name="eth1", is_up=False)
    assert told(at(1.0, links=(*WELL.links, unused))) == []


def test_errors_count_within_a_minute_and_a_counter_may_begin_anew() -> None:
    def counted(seconds: float, count: int) -> NodeFacts:
        return at(seconds, links=(LinkFacts(name="eth0", is_up=True, error_count=count),))

    assert told(counted(50.0, 60), counted(100.0, 120)) == []
    assert told(counted(50.0, 60), counted(60.0, 107)) == [("nic_errors", "eth0")]
    assert told(counted(1.0, 2), counted(2.0, 101)) == []
    assert told(counted(20.0, 57), counted(30.0, 57), counted(40.0, 107)) == [("nic_errors", "eth0")]
    assert told(counted(10.0, 100), counted(20.0, 50), counted(30.0, 110)) == [], "the counter began anew"
    assert told(counted(70.0, 20), counted(100.0, 120)) == [("nic_errors", "eth0")]
    health = NodeHealth()
    for second in range(1000):
        health = judge(health, counted(float(second), second))
    assert len(health.errors["eth0"]) <= node_health.WINDOW_SECONDS + 1


def test_a_disk_is_full_below_the_least_free_space() -> None:
    assert told(at(1.0, disks=(replace(WELL.disks[0], free_bytes=GIB // 4),))) == []


def test_no_fault_of_hardware_is_permanent() -> None:
    (fault,) = judge(judge(NodeHealth(), WELL), at(1.0, gpus=gpu(is_lost=True))).faults
    assert not fault.is_permanent, "another node can run the job"


def test_a_node_of_which_nothing_is_known_has_no_faults() -> None:
    assert judge(NodeHealth(), NodeFacts(at=1.0)).faults == ()


@pytest.mark.parametrize(
    ("readings", "seconds"),
    [
        ((disk(1, 100, 0), disk(2, 100, 3), disk(2 + LONG, 100, 3)), DEVICE_SILENT_SECONDS),
        ((disk(1, 100, 2), disk(FIRST_SILENT_SECONDS + 1, 100, 4)), FIRST_SILENT_SECONDS),
    ],
)
def test_a_silent_disk_is_reported_with_the_limit_that_applied_to_it(
    readings: tuple[NodeFacts, ...], seconds: float
) -> None:
    health = judge(NodeHealth(), WELL)
    for reading in readings:
        health = judge(health, reading)
    assert [fault.message for fault in health.faults] == [
        f"the disk below /state has finished no request for {seconds:g} s"
    ]
