"""Scripts that exhaust processes or the disk, or kill other processes, end their own job only.

Memory: tests/integration/test_supervisor.py shows how the kernel's kills are recognised.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from everstep.protocol.agent_messages import ExitClass
from everstep.protocol.ids import Generation, Rank, Step
from tests.integration.worker.own_mounts import in_own_mounts, may_have_one
from tests.unit.worker.rank_plans import RUN, rank_plan
from worker.node.rank_user import RankUser
from worker.ranks.environment import Supplied
from worker.ranks.files import RankFiles
from worker.ranks.supervisor import ExitedRank, Supervisor

pytestmark = [
    pytest.mark.integration,
    pytest.mark.security,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not may_have_one(), reason="only root can run ranks as another user"),
]
PYTHON = (Path(sys.base_prefix).resolve(), Path(__file__).resolve().parents[4], Path(sys.prefix).resolve())
USER = RankUser(61_241, 61_241, max_tasks=40)
OTHER_JOB = RankUser(61_242, 61_242)


@contextmanager
def neighbour() -> Iterator[subprocess.Popen[bytes]]:
    """A process of another job. At the end of the context, this job may still start processes."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, **OTHER_JOB.options) as process:
        yield process
        subprocess.run(["true"], check=True, **OTHER_JOB.options)
        process.communicate(b"")


def run(script: str, check: Callable[[list[ExitedRank], Path], None], *, count: int = 1) -> None:
    """Run a script in `count` ranks beside a process of another job. Then check the ranks' ends and the node."""

    async def body(disk: Path, tmpfs: Path) -> None:
        source = disk / "train.py"
        source.write_text(script)
        supervisor = Supervisor(
            state=disk / "state",
            socket=tmpfs / "node" / "shim.sock",
            address="127.0.0.1",
            is_warm=False,
            cgroup="",
            user=USER,
        )
        await supervisor.start()
        with neighbour() as other:
            plan = rank_plan(ranks_per_node=count)
            for rank in plan.nodes[0].ranks:
                await supervisor.start_rank(
                    plan, plan.nodes[0], rank, source, agent_socket=disk / "ranks.sock", supplied=Supplied()
                )
            ends: dict[Rank, ExitedRank] = {}
            while len(ends) < count:
                found = await supervisor.next_exit(RUN, Generation(1), ends)
                ends[found.rank] = found
            await supervisor.prove_gone(RUN)
            assert other.poll() is None, "the process of another job runs on"
        check([ends[rank] for rank in sorted(ends)], disk)
        await supervisor.shut_down()

    in_own_mounts(body, *PYTHON)


FORKS = """
import os
read, write = os.pipe()
while True:
    if os.fork() == 0:
        os.close(write)
        os.read(read, 1)  # until the first process ends
        os._exit(0)
"""


def test_a_script_that_forks_without_end_reaches_the_limit_of_its_job() -> None:
    def check(ends: list[ExitedRank], disk: Path) -> None:
        (found,) = (end.describe(Step(3)) for end in ends)
        assert found.exit_class is ExitClass.ERROR
        assert "BlockingIOError" in found.last_lines
        assert "the kernel refused another process or thread" in found.last_lines

    run(FORKS, check)


def test_a_script_that_kills_every_process_reaches_its_own_job_only() -> None:
    script = """
import os, signal
for pid in (1, os.getppid()):
    try:
        os.kill(pid, signal.SIGKILL)
    except PermissionError:
        print("denied", flush=True)
os.kill(-1, signal.SIGKILL)
"""

    def check(ends: list[ExitedRank], disk: Path) -> None:
        codes = sorted(end.end.code for end in ends)
        assert codes in ([-9, 0], [0, 0])  # a rank that has not begun when the other one kills is killed
        denied = [RankFiles(disk / "state", RUN, Generation(1), Rank(rank)).stdout.read_text() for rank in (0, 1)]
        assert "denied\ndenied\n" in denied

    run(script, check, count=2)


def test_a_rank_is_the_first_victim_of_exhausted_memory() -> None:
    def check(ends: list[ExitedRank], disk: Path) -> None:
        stdout = RankFiles(disk / "state", RUN, Generation(1), Rank(0)).stdout.read_text()
        assert stdout == "500\n"

    run("print(open('/proc/self/oom_score_adj').read().strip(), flush=True)", check)


@pytest.mark.skipif(not os.path.exists("/dev/loop-control"), reason="no loop devices")
def test_a_rank_that_fills_the_instance_store_leaves_room_for_the_agent() -> None:
    """`infra/image/libexec/instance-store` reserves 5 % of the file system for root."""
    fill = "import sys\nwith open(sys.argv[1], 'wb', 0) as file:\n    while True: file.write(bytes(1 << 20))"

    def fill_and_write(image: Path, state: Path) -> None:
        with image.open("wb") as file:
            file.truncate(64 << 20)
        subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "5", str(image)], check=True)
        subprocess.run(["mount", "-o", "loop", str(image), str(state)], check=True)
        try:
            outputs = state / "outputs"
            outputs.mkdir()
            os.chown(outputs, USER.uid, USER.gid)
            words = [sys.executable, "-c", fill, str(outputs / "file")]
            done = subprocess.run(words, capture_output=True, text=True, cwd="/", **USER.options)
            assert "No space left on device" in done.stderr
            (state / "promise").write_bytes(bytes(1 << 20))
        finally:
            subprocess.run(["umount", str(state)], check=True)

    async def body(disk: Path, tmpfs: Path) -> None:
        (disk / "mounted").mkdir()
        fill_and_write(disk / "image", disk / "mounted")

    in_own_mounts(body, *PYTHON)
