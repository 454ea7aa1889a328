"""Scripts that exhaust processes, memory or the disk, or kill other processes, end their own job only.

A rank of another job makes steps meanwhile, which equal those of an undisturbed run. On EC2 the other job would have
nodes of its own; here both jobs share one machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import signal
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
from worker.ranks.shim.records import RankRecords
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


STEPS_OF_ANOTHER_JOB = """
import hashlib, threading
from pathlib import Path
state, step = b"", 0
while not Path(__file__).with_name("stop").exists():
    step, state = step + 1, hashlib.sha256(state).digest()
    print(step, state.hex(), flush=True)
    threading.Event().wait(0.005)
"""
STEP_COUNT = 20
"""Steps that a job on the same node makes before the harmful script starts, and again after its end."""


class OtherJob:
    """A job of another user whose rank makes steps, each of which depends on all earlier steps."""

    def __init__(self, disk: Path, tmpfs: Path) -> None:
        self._state = disk / "other"
        self._source = disk / "other.py"
        self._source.write_text(STEPS_OF_ANOTHER_JOB)
        self._supervisor = Supervisor(
            state=self._state,
            socket=tmpfs / "other" / "shim.sock",
            address="127.0.0.1",
            is_warm=False,
            cgroup="",
            user=OTHER_JOB,
        )

    async def start(self) -> None:
        await self._supervisor.start()
        await start_ranks(self._supervisor, self._source, 1)
        await self.go_on()

    async def go_on(self) -> None:
        """Wait until the rank has made further steps, within the test's time limit."""
        wanted = len(self._steps()) + STEP_COUNT
        while len(self._steps()) < wanted:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    async def end(self) -> None:
        """Let the rank make further steps and end, and compare all steps with those of an undisturbed run."""
        await self.go_on()
        self._source.with_name("stop").touch()
        ended = await self._supervisor.next_exit(RUN, Generation(1), {})
        assert ended.end.code == 0
        state, undisturbed = b"", []
        for step in range(1, len(self._steps()) + 1):
            state = hashlib.sha256(state).digest()
            undisturbed.append(f"{step} {state.hex()}")
        assert self._steps() == undisturbed

    async def shut_down(self) -> None:
        await self._supervisor.shut_down()

    def _steps(self) -> list[str]:
        """Return the complete lines that the rank has printed."""
        file = RankFiles(self._state, RUN, Generation(1), Rank(0)).stdout
        return file.read_text().split("\n")[:-1] if file.exists() else []


async def start_ranks(supervisor: Supervisor, script: Path, count: int) -> None:
    plan = rank_plan(ranks_per_node=count)
    for rank in plan.nodes[0].ranks:
        await supervisor.start_rank(
            plan, plan.nodes[0], rank, script, agent_socket=script.with_name("ranks.sock"), supplied=Supplied()
        )


def run(
    script: str,
    check: Callable[[list[ExitedRank], Path], None],
    *,
    count: int = 1,
    launcher: tuple[str, ...] = (),
    disk_bytes: int | None = None,
) -> None:
    """Run a script in `count` ranks beside a job that makes steps. Then check the ranks' ends and the node.

    Args:
        script: the harmful script.
        check: receives the ranks' ends, and the folder above the state directory.
        count: number of ranks.
        launcher: first words of the command that starts the shim.
        disk_bytes: size of the instance store that contains the state directory; None: it is on the machine's disk.
    """

    async def body(disk: Path, tmpfs: Path) -> None:
        source = disk / "train.py"
        source.write_text(script)
        with instance_store(disk, disk_bytes) if disk_bytes else contextlib.nullcontext(disk) as place:
            supervisor = Supervisor(
                state=place / "state",
                socket=tmpfs / "node" / "shim.sock",
                address="127.0.0.1",
                is_warm=False,
                cgroup="",
                user=USER,
                launcher=launcher,
            )
            other = OtherJob(disk, tmpfs)
            async with contextlib.AsyncExitStack() as stack:
                stack.push_async_callback(other.shut_down)
                await other.start()
                stack.push_async_callback(supervisor.shut_down)
                await supervisor.start()
                await start_ranks(supervisor, source, count)
                ends: dict[Rank, ExitedRank] = {}
                while len(ends) < count:
                    found = await supervisor.next_exit(RUN, Generation(1), ends)
                    ends[found.rank] = found
                await other.go_on()
                await supervisor.prove_gone(RUN)
                check([ends[rank] for rank in sorted(ends)], place)
                await other.end()

    in_own_mounts(body, *PYTHON)


@contextmanager
def instance_store(disk: Path, size: int) -> Iterator[Path]:
    """Mount a file system with the reserve for root that `infra/image/libexec/instance-store` creates."""
    image, mounted = disk / "image", disk / "mounted"
    mounted.mkdir()
    with image.open("wb") as file:
        file.truncate(size)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "5", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(mounted)], check=True)
    mounted.chmod(0o711)
    try:
        yield mounted
    finally:
        subprocess.run(["umount", "--lazy", str(mounted)], check=True)


@contextmanager
def memory_limit(size: int) -> Iterator[tuple[str, ...]]:
    """Create a memory cgroup with a limit, like the slice of ranks. Yield the words that start a program in it."""
    own = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    v1, v2 = (Path(f"/sys/fs/cgroup{more}") for more in (f"/memory{own.get('memory', '')}", own.get("", "/")))
    is_v1 = (v1 / "memory.limit_in_bytes").exists()
    folder = (v1 if is_v1 else v2) / f"everstep-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / ("memory.limit_in_bytes" if is_v1 else "memory.max")).write_text(str(size))
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        pytest.skip(f"no memory cgroup can be made here: {error}")
    try:
        yield ("sh", "-c", f'echo $$ > {folder}/cgroup.procs; exec "$@"', "sh")
    finally:
        folder.rmdir()


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
        assert codes in ([-9, 0], [0, 0])  # the first rank may kill a rank that has just started
        denied = [RankFiles(disk / "state", RUN, Generation(1), Rank(rank)).stdout.read_text() for rank in (0, 1)]
        assert "denied\ndenied\n" in denied

    run(script, check, count=2)


def test_a_rank_is_the_first_victim_of_exhausted_memory() -> None:
    def check(ends: list[ExitedRank], disk: Path) -> None:
        stdout = RankFiles(disk / "state", RUN, Generation(1), Rank(0)).stdout.read_text()
        assert stdout == "500\n"

    run("print(open('/proc/self/oom_score_adj').read().strip(), flush=True)", check)


def test_a_rank_that_fills_the_memory_of_its_node_ends_alone() -> None:
    """The kernel kills only the rank, which fills the memory. The shim survives, and reports that memory ran out."""
    fill = """
import os, signal
if os.fork() == 0:
    signal.pause()
held = []
while True:
    held.append(bytearray(os.urandom(1 << 20)))
"""

    def check(ends: list[ExitedRank], disk: Path) -> None:
        (found,) = (end.describe(Step(3)) for end in ends)
        assert (found.exit_class, ends[0].end.code) == (ExitClass.OUT_OF_MEMORY, -signal.SIGKILL)
        assert found.memory is not None

    with memory_limit(256 << 20) as launcher:
        run(fill, check, launcher=launcher)


@pytest.mark.skipif(not os.path.exists("/dev/loop-control"), reason="no loop devices")
def test_a_rank_that_fills_the_instance_store_leaves_room_for_the_agent() -> None:
    """A rank fills the instance store, and the agent, which is root, can still write its files.

    `infra/image/libexec/instance-store` reserves 5 % of the file system for root.
    """
    fill = """
import os, sys
with open(os.path.join(os.environ["EVERSTEP_OUTPUT_DIR"], "file"), "wb", 0) as file:
    while True:
        file.write(bytes(1 << 12))
"""

    def check(ends: list[ExitedRank], disk: Path) -> None:
        (found,) = (end.describe(Step(3)) for end in ends)
        assert found.exit_class is ExitClass.ERROR
        # The rank's own streams are on the full disk, too, so only its file shows what it did.
        (filled,) = disk.rglob("rank=0/file")
        assert filled.stat().st_size > 40 << 20
        assert os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize < 1 << 20
        (disk / "state" / "promise").write_bytes(bytes(1 << 20))
        (record,) = RankRecords(disk / "state").read()
        assert record.end is not None

    run(fill, check, disk_bytes=64 << 20)
