"""Scripts that fail while torch works in another thread. They must end with their own exit code.

Each script runs in its own process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.protocol.rank_messages import Captured
from everstep.training.guard import AUDITED_AT_START
from tests.integration.training.fake_agent import FakeAgent
from tests.ports import ReservedPort
from tests.warm_parent import ROOT

# Each process imports torch, which is slow on a busy machine.
pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(180),
]

COPYING = """
import sys
import threading
import torch
import everstep.training
from everstep.training import copier

copies, copy_now = threading.Event(), copier.copy_now

def copy_often(these):
    if these.targets and threading.current_thread().name == "everstep-copier":
        copies.set()
        for _ in range(20):
            copy_now(these)
    copy_now(these)

copier.copy_now = copy_often
model = torch.nn.Linear(1000, 1000)
optimizer = torch.optim.AdamW(model.parameters())
session = everstep.training.init(model=model, optimizer=optimizer)
session.restore()
while not copies.is_set():
    model(torch.zeros(1, 1000)).sum().backward()
    optimizer.step()
    session.boundary()
sys.exit(3)
"""
MAPPING = """
import sys
import threading
import torch
import everstep.training
from everstep.training import snapshots

mapping = threading.Event()

class LongMapped(snapshots.SlotMemory):
    def __init__(self, *slot):
        mapping.set()
        for _ in range(50_000):
            torch.zeros(1000).view(10, 100)
        super().__init__(*slot)

snapshots.SlotMemory = LongMapped
model = torch.nn.Linear(3, 3)
optimizer = torch.optim.AdamW(model.parameters())
session = everstep.training.init(model=model, optimizer=optimizer)
session.restore()
mapping.wait()
sys.exit(3)
"""
INTERRUPTED = """
import os, signal, threading
import torch
import everstep.training
from everstep.training import copier

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it
closing, copy_now = threading.Event(), copier.copy_now
interrupts = iter([signal.SIGINT])

def interrupt(these):
    if these.targets and threading.current_thread().name == "everstep-copier":
        closing.wait()
        for signal_number in interrupts:
            os.kill(os.getpid(), signal_number)
        for _ in range(20):
            copy_now(these)
    copy_now(these)

copier.copy_now = interrupt
model = torch.nn.Linear(1000, 1000)
optimizer = torch.optim.AdamW(model.parameters())
session = everstep.training.init(model=model, optimizer=optimizer)
session.restore()
while session._guard._flight is None or session._guard._flight.copies is not None:
    model(torch.zeros(1, 1000)).sum().backward()
    optimizer.step()
    session.boundary()
closing.set()
session.close()
"""
AUDITED = """
import sys
import torch
import everstep.training

model = torch.nn.Linear(3, 3)
optimizer = torch.optim.AdamW(model.parameters())
session = everstep.training.init(model=model, optimizer=optimizer)
session.restore()
while session._guard._flight is None:
    model(torch.zeros(1, 3)).sum().backward()
    optimizer.step()
    session.boundary()
assert session._guard._flight.copies is not None
sys.exit(3)
"""
PROFILED = """
import os, signal
import torch
import torch.distributed as dist
import everstep.training

dist.init_process_group("gloo")
model = torch.nn.Linear(3, 3)
optimizer = torch.optim.AdamW(model.parameters())
session = everstep.training.init(model=model, optimizer=optimizer)
session.restore()
while True:
    model(torch.zeros(1, 3)).sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    session.boundary()
    if session._profiler._is_recording and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
"""


@contextlib.contextmanager
def ranks(script: str, agent: FakeAgent, directory: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start a script as all ranks of an agent, with the output in `<rank>.log`; end the ranks afterwards."""
    with contextlib.closing(ReservedPort()) as port, contextlib.ExitStack() as stack:
        started = []
        for line in agent.lines:
            environment = {
                **os.environ,
                "RANK": str(line.rank),
                "WORLD_SIZE": str(len(agent.lines)),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port.number),
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
                **agent.environment,
            }
            with (directory / f"{line.rank}.log").open("wb") as log:
                process = subprocess.Popen(
                    [sys.executable, "-c", script], env=environment, cwd=ROOT, stdout=log, stderr=log
                )
            stack.callback(process.wait)
            stack.callback(process.kill)
            started.append(process)
        yield started


@pytest.mark.long
def test_how_a_script_failed_is_seen_although_its_copier_was_at_work(tmp_path: Path) -> None:
    """A script exits while its copier thread often switches between torch and Python.

    The script keeps its exit code, and its snapshot is complete.
    """
    with FakeAgent(tmp_path, 1, commit_target=100) as agent, ranks(COPYING, agent, tmp_path) as (rank,):
        assert (rank.wait(), (tmp_path / "0.log").read_text()) == (3, "")
        agent.wait_for(lambda: bool(agent.of_kind(Captured)))


@pytest.mark.long
def test_how_a_script_failed_is_seen_although_its_slots_were_being_mapped(tmp_path: Path) -> None:
    with FakeAgent(tmp_path, 1, commit_target=100) as agent, ranks(MAPPING, agent, tmp_path) as (rank,):
        assert (rank.wait(), (tmp_path / "0.log").read_text()) == (3, "")


def test_a_script_that_is_interrupted_while_it_closes_ends_by_that(tmp_path: Path) -> None:
    """SIGINT arrives while a script waits in `close` for the copier, which runs inside torch.

    The signal ends the script.
    """
    with FakeAgent(tmp_path, 1, commit_target=100) as agent, ranks(INTERRUPTED, agent, tmp_path) as (rank,):
        assert rank.wait() == -signal.SIGINT, (tmp_path / "0.log").read_text()[-2000:]
        agent.wait_for(lambda: len(agent.of_kind(Captured)) > AUDITED_AT_START)


@pytest.mark.long
def test_the_last_step_of_a_script_that_failed_is_kept_when_it_was_to_be_compared_too(tmp_path: Path) -> None:
    with FakeAgent(tmp_path, 1, commit_target=100) as agent, ranks(AUDITED, agent, tmp_path) as (rank,):
        assert rank.wait() == 3, (tmp_path / "0.log").read_text()[-2000:]
        agent.wait_for(lambda: bool(agent.of_kind(Captured)))


@pytest.mark.long
def test_a_lost_peer_is_an_error_although_the_network_was_being_profiled(tmp_path: Path) -> None:
    with FakeAgent(tmp_path, 2, commit_target=100) as agent, ranks(PROFILED, agent, tmp_path) as (left, lost):
        assert lost.wait() == -signal.SIGKILL
        assert left.wait() == 1, (tmp_path / "0.log").read_text()[-2000:]
        assert "RuntimeError" in (tmp_path / "0.log").read_text()
