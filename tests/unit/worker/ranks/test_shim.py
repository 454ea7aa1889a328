"""Tests functions of the shim, the process that starts ranks, without real processes.

The tests cover the members of a process tree, reasons for a cold start, records on disk, and printed lines.
"""

from __future__ import annotations

import os
import random
import socket
from pathlib import Path

import numpy
import pytest
import torch

from everstep.protocol import codec
from everstep.protocol.errors import OversizedMessage
from everstep.protocol.ids import Generation, Rank, RunId
from worker.ranks.shim import processes
from worker.ranks.shim.launch import needs_cold_start, reseed
from worker.ranks.shim.line import ShimLine
from worker.ranks.shim.messages import ListRanks, RankEnd, RankRecord, ToShim
from worker.ranks.shim.preload import can_preload
from worker.ranks.shim.processes import RankProcess, find, initial_environment, is_alive, tree
from worker.ranks.shim.records import RankRecords

RUN = RunId("cd" * 16)


def process(pid: int, parent: int, session: int) -> RankProcess:
    return RankProcess(pid=pid, parent=parent, session=session, start_ticks=pid, is_zombie=False)


def record(rank: int, generation: int = 1, end: RankEnd | None = None) -> RankRecord:
    return RankRecord(
        run=RUN,
        generation=Generation(generation),
        rank=Rank(rank),
        pid=100 + rank,
        start_ticks=5,
        started_at_seconds=1.5,
        is_warm=True,
        stdout_path="/out",
        stderr_path="/err",
        end=end,
    )


def test_a_tree_is_descendants_and_session_and_the_descendants_of_the_session() -> None:
    """The tree of rank 20 contains its descendants, its session, and the session's descendants.

    Process 10 is the shim. Rank 20, in its own session, is the parent of 21, and 21 of 22, which has another
    session. Process 30 is an orphan in the rank's session, and 31 is its child. Process 40 is another rank.
    """
    processes = [
        process(10, 1, 10),
        process(20, 10, 20),
        process(21, 20, 20),
        process(22, 21, 22),
        process(30, 10, 20),
        process(31, 30, 31),
        process(40, 10, 40),
    ]
    by_pid = {found.pid: found for found in processes}
    assert tree(20, by_pid) == {20, 21, 22, 30, 31}
    assert tree(40, by_pid) == {40}
    assert tree(99, by_pid) == set()
    del by_pid[20]
    assert tree(20, by_pid) == {21, 22, 30, 31}, "the leader may be gone; its session is still its own"


def test_this_process_is_found_by_pid_and_start() -> None:
    me = find(os.getpid())
    assert me is not None
    assert me.parent == os.getppid()
    assert me.session == os.getsid(0)
    assert is_alive(me.pid, me.start_ticks)
    assert not is_alive(me.pid, me.start_ticks + 1)
    assert find(2**22 + 1) is None


def test_the_first_environment_is_that_of_the_start() -> None:
    os.environ["EVERSTEP_TEST_LATER"] = "1"
    try:
        assert "EVERSTEP_TEST_LATER" not in initial_environment()
        assert initial_environment().get("HOME") == os.environ.get("HOME")
    finally:
        del os.environ["EVERSTEP_TEST_LATER"]


@pytest.mark.parametrize(
    ("environment", "template", "late"),
    [
        ({}, {}, None),
        ({"RANK": "0", "NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "0"}, {}, None),
        ({"OMP_NUM_THREADS": "4", "PYTHONUNBUFFERED": "1"}, {"OMP_NUM_THREADS": "1"}, None),
        ({"PYTHONHASHSEED": "0"}, {}, "PYTHONHASHSEED"),
        ({"PYTHONHASHSEED": "0"}, {"PYTHONHASHSEED": "0"}, None),
        ({}, {"LD_PRELOAD": "libx.so"}, "LD_PRELOAD"),
        ({"OMP_PROC_BIND": "true"}, {}, "OMP_PROC_BIND"),
        ({"MKL_NUM_THREADS": "2"}, {}, "MKL_NUM_THREADS"),
        ({"LANG": "de_DE.UTF-8"}, {"LANG": "C.UTF-8"}, "LANG"),
        ({"LANGUAGE": "de"}, {}, None),
        ({"TORCHDYNAMO_DISABLE": "1"}, {}, "TORCHDYNAMO_DISABLE"),
    ],
)
def test_variables_that_act_at_start_force_a_cold_start(
    environment: dict[str, str], template: dict[str, str], late: str | None
) -> None:
    assert needs_cold_start(environment, template) == late


def test_a_template_is_worth_its_while_only_with_something_slow_to_import() -> None:
    assert can_preload(("everstep.training", "graphlib"))
    assert not can_preload(("everstep.training", "numpy", "no_such_module_anywhere"))
    assert not can_preload(())


def test_records_are_whole_and_in_order(tmp_path: Path) -> None:
    records = RankRecords(tmp_path)
    assert records.read() == []
    end = RankEnd(code=-9, at_seconds=2.0, stopped=True)
    for made in (record(10), record(2), record(0, generation=2)):
        records.write(made)
    records.write(record(2, end=end))
    (tmp_path / "ranks" / "half.json").write_text('{"run":')
    (tmp_path / "ranks" / "x.new").write_text("{}")
    assert records.read() == [record(2, end=end), record(10), record(0, generation=2)]


def test_only_ended_ranks_of_a_run_are_forgotten(tmp_path: Path) -> None:
    records = RankRecords(tmp_path)
    records.write(record(0, end=RankEnd(code=0, at_seconds=2.0, stopped=False)))
    records.write(record(1))
    records.forget(RunId("00" * 16))
    assert len(records.read()) == 2
    records.forget(RUN)
    assert records.read() == [record(1)]


def test_a_line_puts_frames_together() -> None:
    left, right = socket.socketpair()
    with left, right:
        line = ShimLine(right)
        assert line.receive() == []
        data = codec.frame(ListRanks()) * 2
        left.sendall(data[:3])
        assert line.receive() == []
        left.sendall(data[3:-1])
        (first,) = line.receive() or ()
        assert codec.decode(first, ToShim) == ListRanks()  # type: ignore[arg-type]
        left.sendall(data[-1:])
        assert line.receive() == [first]
        left.close()
        assert line.receive() is None


def test_a_line_refuses_what_is_too_long() -> None:
    left, right = socket.socketpair()
    with left, right:
        left.sendall(b"\xff\xff\xff\xff")
        with pytest.raises(OversizedMessage):
            ShimLine(right).receive()


def test_a_line_keeps_what_the_other_side_does_not_read_yet() -> None:
    left, right = socket.socketpair()
    with left, right:
        line = ShimLine(right)
        count = 0
        while not line.has_unsent:
            assert line.send(ListRanks())
            count += 1
        expected = len(codec.frame(ListRanks())) * count
        received = 0
        left.setblocking(False)
        while received < expected:
            received += len(left.recv(1 << 20))
            assert line.flush()
        assert not line.has_unsent
        left.close()
        assert not line.send(ListRanks())


def test_a_process_of_another_user_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shim that is not root skips processes of another user, such as `sudo`, in a rank's process tree.

    It may not send signals to them. The error would end the shim and all its ranks.
    """
    sent = []

    def kill(pid: int, number: int) -> None:
        if pid == 2:
            raise PermissionError(1, "Operation not permitted")
        sent.append(pid)

    monkeypatch.setattr(os, "kill", kill)
    processes.send((1, 2, 3), 9)
    assert sent == [1, 3]


def test_forked_ranks_draw_other_random_numbers() -> None:
    def draws() -> list[float]:
        random.seed(1)
        numpy.random.seed(1)
        torch.manual_seed(1)
        reseed()
        return [random.random(), float(numpy.random.random()), torch.rand(()).item()]

    assert not set(draws()) & set(draws())
