"""Tests faults in the processes and the memory of an instance, with fake processes and a fake slot folder."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.protocol.ids import Generation, JobName, Rank, RunId, Step
from everstep.protocol.slot import HEADER_BYTES, SlotHeader, SlotState, pack_header
from infra.local_cloud import node_faults
from infra.local_cloud.errors import FaultRefused
from infra.local_cloud.instance_init import memory_directory
from infra.local_cloud.processes import Process, descendants, identify, memory_of, rank_of
from tests.unit.local_cloud.served import eventually

RUN = RunId("dfa5d87895cf475eb87cab85d285b93b")
INIT = """
import signal, subprocess, sys
ranks = [subprocess.Popen(["sleep", "1000"], env={"RANK": str(rank), "EVERSTEP_AGENT_SOCKET": "x", "PATH": "/usr/bin:/bin"}) for rank in (5, 2)]
agent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)", "-m", "worker"])
print("ready", flush=True)
signal.pause()
"""


@pytest.fixture
def init() -> Iterator[int]:
    """Start a process in place of an instance's init process, with an agent and the ranks 2 and 5. Yield its pid."""
    with subprocess.Popen([sys.executable, "-c", INIT], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        eventually(lambda: {rank_of(one.pid) for one in descendants(process.pid)} == {2, 5, None})
        yield process.pid
        for one in descendants(process.pid):
            one.send(signal.SIGKILL)
        process.kill()


@contextlib.contextmanager
def held(*slots: int) -> Iterator[str]:
    """Start a process in place of an instance's shim, which holds these descriptors. Yield the instance's id."""
    instance_id = f"i-test{uuid.uuid4().hex[:8]}"
    words = [
        "-c",
        "import sys; sys.stdin.read()",
        "worker.ranks.shim",
        str(memory_directory(instance_id) / "shim.sock"),
    ]
    with subprocess.Popen([sys.executable, *words], stdin=subprocess.PIPE, pass_fds=slots):
        eventually(lambda: len(memory_of(memory_directory(instance_id))) == len(slots))
        yield instance_id
    for descriptor in slots:
        os.close(descriptor)


def slot(rank: int, step: int, *, state: SlotState = SlotState.SEALED, index: int = 0) -> int:
    header = SlotHeader(
        job=JobName("gpt"),
        run=RUN,
        owner_rank=Rank(rank),
        origin_generation=Generation(1),
        step=Step(step),
        state=state,
        capacity_bytes=4096,
        payload_bytes=1000,
    )
    descriptor = os.memfd_create(f"everstep {RUN}/rank-{rank}.slot-{index}")
    os.pwrite(descriptor, pack_header(header) + bytes(4096), 0)
    return descriptor


def content_of(descriptor: int) -> bytes:
    return os.pread(descriptor, 1 << 20, 0)


def test_the_rank_that_is_named_dies_and_no_other(init: int) -> None:
    facts = node_faults.kill_rank(init, 5)
    assert facts["rank"] == 5
    assert {rank_of(one.pid) for one in descendants(init)} == {2, None}
    assert node_faults.kill_rank(init, None)["rank"] == 2
    with pytest.raises(FaultRefused, match="no rank runs"):
        node_faults.kill_rank(init, None)


def test_a_rank_that_is_not_there_is_refused(init: int) -> None:
    with pytest.raises(FaultRefused, match="rank 7 does not run"):
        node_faults.kill_rank(init, 7)
    assert {rank_of(one.pid) for one in descendants(init)} == {2, 5, None}


def test_the_agent_dies_alone(init: int) -> None:
    pid = node_faults.kill_agent(init)["pid"]
    assert identify(pid) is None or not Process(pid, identify(pid).start_ticks).is_alive  # type: ignore[union-attr]
    assert {rank_of(one.pid) for one in descendants(init)} == {2, 5}
    with pytest.raises(FaultRefused, match="no agent"):
        node_faults.kill_agent(init)


def test_a_rank_that_hangs_stands_still_until_it_may_go_on(init: int) -> None:
    facts = node_faults.stop_rank(init, 2)
    stat = Path(f"/proc/{facts['pid']}/stat")
    eventually(lambda: stat.read_text().split()[2] == "T")
    stopped = Process(facts["pid"], facts["start_ticks"])
    assert node_faults.continue_stopped([stopped, Process(facts["pid"], 1)]) == [facts["pid"]], (
        "another process of the same pid is left alone"
    )
    eventually(lambda: stat.read_text().split()[2] == "S")


def test_one_bit_of_the_newest_sealed_replica_changes(init: int) -> None:
    newest = slot(3, 12, index=1)
    own = slot(2, 14)  # rank 2 runs on this instance, so this slot is the owner's copy and no replica
    before = content_of(newest)
    with held(slot(3, 10), newest, own, slot(4, 15, state=SlotState.WRITING)) as instance_id:
        facts = node_faults.corrupt_replica(init, instance_id, None, random.Random(1))
        after = content_of(newest)
    assert (facts["file"], facts["rank"], facts["step"]) == (f"{RUN}/rank-3.slot-1", 3, 12)
    (offset,) = [at for at, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
    assert offset == facts["offset"] >= HEADER_BYTES
    assert (before[offset] ^ after[offset]).bit_count() == 1
    assert (before[offset], after[offset]) == (facts["before"], facts["after"])


def test_without_a_replica_nothing_is_corrupted(init: int) -> None:
    own = slot(2, 14)
    before = content_of(own)
    with held(own) as instance_id:
        with pytest.raises(FaultRefused, match="holds no sealed replica"):
            node_faults.corrupt_replica(init, instance_id, None, random.Random(1))
        assert content_of(own) == before
