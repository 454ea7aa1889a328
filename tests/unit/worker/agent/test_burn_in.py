"""The agent runs its burn-in in a child, whatever the child prints or does."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from everstep.protocol.agent_messages import BurnInOutcome, RunBurnIn
from worker.agent import burn_in
from worker.agent.burn_in import MAX_OUTPUT_BYTES, NodeBurnIn

TESTS = json.dumps([{"type": "BurnInTest", "name": "matmul", "outcome": "passed", "rate": 5}])


class Node:
    """A burn-in whose child is a Python program, and the signal of its results."""

    def __init__(self, folder: Path, program: str) -> None:
        self.done = asyncio.Event()
        self.folder = folder
        self.burn_in = NodeBurnIn(folder, self.done.set, command=(sys.executable, "-c", program))

    async def result_of(self, number: int, level: int = 1) -> list[tuple[str, BurnInOutcome]]:
        self.done.clear()
        await self.burn_in.start(RunBurnIn(number=number, level=level))
        await self.done.wait()
        assert self.burn_in.result is not None
        assert (self.burn_in.result.number, self.burn_in.result.level) == (number, level)
        return [(test.name, test.outcome) for test in self.burn_in.result.tests]


async def test_the_tests_of_the_child_are_the_result(tmp_path: Path) -> None:
    tested = Node(tmp_path, f"import sys; assert sys.argv[1:] == ['3', {str(tmp_path)!r}]; print({TESTS!r})")
    assert await tested.result_of(4, level=3) == [("matmul", BurnInOutcome.PASSED)]


async def test_a_repeated_order_runs_once(tmp_path: Path) -> None:
    tested = Node(tmp_path, f"import os; os.open('ran', os.O_CREAT | os.O_EXCL); print({TESTS!r})")
    tested.burn_in.command = (
        sys.executable,
        "-c",
        f"import os; os.chdir({str(tmp_path)!r}); " + tested.burn_in.command[2],
    )
    first = asyncio.ensure_future(tested.result_of(1))
    await asyncio.sleep(0)
    await tested.burn_in.start(RunBurnIn(number=1, level=1))
    assert await first == [("matmul", BurnInOutcome.PASSED)]
    await tested.burn_in.start(RunBurnIn(number=1, level=1))
    assert await tested.result_of(2) == [("burn-in", BurnInOutcome.UNKNOWN)], "the program refuses a second run"


@pytest.mark.parametrize(
    "program",
    [
        "",
        "print('{')",
        "print('[' * 50000)",
        f"print({TESTS!r} + ' ' * {MAX_OUTPUT_BYTES} + {TESTS!r})",
        "import sys\nwhile True: sys.stdout.write('[' * 65536)",
        """print('[{"type":"BurnInTest","name":"a b","outcome":"passed"}]')""",
        """print('[{"type":"BurnInTest","name":"a","outcome":"superb"}]')""",
        """print('[{"type":"BurnInTest","name":"a","outcome":"passed","rate":-1}]')""",
        "import os; os.kill(os.getpid(), 9)",
    ],
)
async def test_hostile_output_is_no_evidence(tmp_path: Path, program: str) -> None:
    assert await Node(tmp_path, program).result_of(1) == [("burn-in", BurnInOutcome.UNKNOWN)]


async def test_a_child_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(burn_in, "LIMIT_SECONDS", {1: 0.2})
    monkeypatch.setattr(burn_in, "END_SECONDS", 0.2)
    program = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: signal.pause()"
    assert await Node(tmp_path, program).result_of(1) == [("burn-in", BurnInOutcome.UNKNOWN)]


async def test_a_job_ends_the_child_and_no_result_follows(tmp_path: Path) -> None:
    ready, fifo = tmp_path / "ready", tmp_path / "fifo"
    os.mkfifo(fifo)
    program = f"import os, pathlib, signal; pathlib.Path({str(fifo)!r}).write_text(str(os.getpid())); signal.pause()"
    tested = Node(ready, program)
    await tested.burn_in.start(RunBurnIn(number=1, level=3))
    pid = int(await asyncio.to_thread(fifo.read_text))
    await tested.burn_in.stop()
    assert not Path(f"/proc/{pid}").exists()
    assert tested.burn_in.result is None
    assert not tested.done.is_set()
    tested.burn_in.command = (sys.executable, "-c", f"print({TESTS!r})")
    assert await tested.result_of(1, level=3) == [("matmul", BurnInOutcome.PASSED)], "the order can run again"


async def test_a_missing_program_is_no_evidence(tmp_path: Path) -> None:
    tested = Node(tmp_path, "")
    tested.burn_in.command = (str(tmp_path / "missing"),)
    assert await tested.result_of(1) == [("burn-in", BurnInOutcome.UNKNOWN)]
