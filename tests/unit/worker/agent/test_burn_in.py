"""The agent runs its burn-in in a child, whatever the child prints or does."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from everstep.protocol.agent_messages import BurnInOutcome, BurnInPartner, RunBurnIn
from everstep.protocol.ids import NodeId
from worker.agent.burn_in import MAX_OUTPUT_BYTES, BurnInRunner

TESTS = json.dumps([{"type": "BurnInTest", "name": "matmul", "outcome": "passed", "rate": 5}])


class Node:
    """A burn-in whose child is a Python program, and the signal of its results."""

    def __init__(self, folder: Path, program: str) -> None:
        self.done = asyncio.Event()
        self.folder = folder
        self.burn_in = BurnInRunner(folder, self.done.set, address="127.0.0.1", command=(sys.executable, "-c", program))

    async def result_of(self, number: int, level: int = 1) -> list[tuple[str, BurnInOutcome]]:
        self.done.clear()
        await self.burn_in.start(RunBurnIn(number=number, level=level))
        await self.done.wait()
        assert self.burn_in.result is not None
        assert (self.burn_in.result.number, self.burn_in.result.level) == (number, level)
        return [(test.name, test.outcome) for test in self.burn_in.result.tests]


async def test_the_tests_of_the_child_are_the_result(tmp_path: Path) -> None:
    node = Node(tmp_path, f"import sys; assert sys.argv[1:] == ['3', {str(tmp_path)!r}]; print({TESTS!r})")
    assert await node.result_of(4, level=3) == [("matmul", BurnInOutcome.PASSED)]


async def test_an_order_with_a_partner_passes_both_addresses_to_the_child(tmp_path: Path) -> None:
    node = Node(
        tmp_path, f"import sys; open(sys.argv[2] + '/arguments', 'w').write(' '.join(sys.argv)); print({TESTS!r})"
    )
    partner = BurnInPartner(node_id=NodeId("i-2"), address="10.0.0.2", port=20_001, place=1)
    await node.burn_in.start(RunBurnIn(number=5, level=3, partner=partner))
    await node.done.wait()
    assert (tmp_path / "arguments").read_text() == f"-c 3 {tmp_path} 127.0.0.1 10.0.0.2 20001 1"
    assert node.burn_in.result is not None
    assert [test.outcome for test in node.burn_in.result.tests] == [BurnInOutcome.PASSED]


async def test_a_repeated_order_runs_once(tmp_path: Path) -> None:
    node = Node(tmp_path, f"import os; os.open('ran', os.O_CREAT | os.O_EXCL); print({TESTS!r})")
    node.burn_in.command = (
        sys.executable,
        "-c",
        f"import os; os.chdir({str(tmp_path)!r}); " + node.burn_in.command[2],
    )
    first = asyncio.ensure_future(node.result_of(1))
    await asyncio.sleep(0)
    await node.burn_in.start(RunBurnIn(number=1, level=1))
    assert await first == [("matmul", BurnInOutcome.PASSED)]
    await node.burn_in.start(RunBurnIn(number=1, level=1))
    assert await node.result_of(2) == [("burn-in", BurnInOutcome.UNKNOWN)], "the program refuses a second run"


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


async def test_a_child_that_hangs_is_ended(tmp_path: Path) -> None:
    program = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: signal.pause()"
    node = Node(tmp_path, program)
    node.burn_in.limits_seconds, node.burn_in.end_seconds = {1: 0.2}, 0.2
    assert await node.result_of(1) == [("burn-in", BurnInOutcome.UNKNOWN)]


async def test_a_job_ends_the_child_and_no_result_follows(tmp_path: Path) -> None:
    ready, fifo = tmp_path / "ready", tmp_path / "fifo"
    os.mkfifo(fifo)
    program = f"import os, pathlib, signal; pathlib.Path({str(fifo)!r}).write_text(str(os.getpid())); signal.pause()"
    node = Node(ready, program)
    await node.burn_in.start(RunBurnIn(number=1, level=3))
    pid = int(await asyncio.to_thread(fifo.read_text))
    await node.burn_in.start(RunBurnIn(number=1, level=3))
    assert Path(f"/proc/{pid}").exists(), "a repeated order starts nothing"
    await node.burn_in.stop()
    assert not Path(f"/proc/{pid}").exists()
    assert node.burn_in.result is None
    assert not node.done.is_set()
    node.burn_in.command = (sys.executable, "-c", f"print({TESTS!r})")
    assert await node.result_of(1, level=3) == [("matmul", BurnInOutcome.PASSED)], "the order can run again"


async def test_a_missing_program_is_no_evidence(tmp_path: Path) -> None:
    node = Node(tmp_path, "")
    node.burn_in.command = (str(tmp_path / "missing"),)
    assert await node.result_of(1) == [("burn-in", BurnInOutcome.UNKNOWN)]
