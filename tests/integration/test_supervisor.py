"""The node's supervisor of ranks, with a real shim (the process that outlives agents) and real rank processes.

The tests cover starts, exits, kills, the takeover by a new agent, and the death of each process.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from everstep.protocol.agent_messages import ExitClass, MemoryEnd, MemoryKind, MemorySource
from everstep.protocol.ids import Generation, Rank, Step
from everstep.protocol.plan import GenerationPlan
from tests.unit.worker.rank_plans import RUN, rank_plan
from worker.errors import RanksNotGone
from worker.ranks.environment import Packages, Supplied
from worker.ranks.files import RankFiles
from worker.ranks.shim import cgroups, processes
from worker.ranks.shim.messages import Preload, RankRecord
from worker.ranks.shim.records import RankRecords
from worker.ranks.supervisor import ExitedRank, MemoryPaths, Supervisor

pytestmark = pytest.mark.integration

PRELOADED = ("graphlib",)
"""A small standard module that the template process has imported before it forks ranks.

No test script imports it, so only ranks that the template forked ("warm" ranks) have loaded it.
"""
NOTHING = Supplied()
LEAVE_A_CHILD = (
    "import os, signal\npid = os.fork()\nif pid == 0:\n    signal.pause()\nprint(pid, flush=True)\nos._exit(0)\n"
)
KERNEL = MemoryPaths()
WAIT_FOR_EVER = "import signal\nprint('up', flush=True)\nsignal.pause()\n"


class Bench:
    """A state folder and a script on which a test starts one supervisor after another."""

    def __init__(self, folder: Path, is_warm: bool, cgroup: str | None = None) -> None:
        self.state = folder / "state"
        self.source = folder / "source"
        self.source.mkdir()
        self.is_warm = is_warm
        self.cgroup = cgroup
        self.supervisor = self.make()

    def make(self, memory_paths: MemoryPaths = KERNEL) -> Supervisor:
        return Supervisor(
            state=self.state,
            socket=self.state / "shim.sock",
            address="127.0.0.1",
            is_warm=self.is_warm,
            cgroup=self.cgroup,
            environment={"PATH": os.environ["PATH"], "HOME": str(self.state)},
            modules=PRELOADED,
            memory_paths=memory_paths,
        )

    async def start(
        self,
        script: str,
        *,
        count: int = 1,
        generation: int = 1,
        supplied: Supplied = NOTHING,
        entry: Path | None = None,
        **options: object,
    ) -> GenerationPlan:
        """Start the ranks with a script, or with the file `entry` instead."""
        is_given, entry = entry is not None, entry or self.source / "train.py"
        # do not rewrite an unchanged script, because a rank of an earlier start may be reading it
        if not is_given and (not entry.exists() or entry.read_text() != script):
            entry.write_text(script)
        plan = rank_plan(ranks_per_node=count, generation=generation, **options)  # type: ignore[arg-type]
        for rank in plan.nodes[0].ranks:
            await self.supervisor.start_rank(
                plan,
                plan.nodes[0],
                rank,
                entry,
                agent_socket=self.state / "ranks.sock",
                supplied=supplied,
            )
        return plan

    async def warm(self) -> None:
        """Wait until the supervisor starts ranks warm: as forks of a template process that has imported modules."""
        # refresh the supervisor's state, which may still describe a template process that has died
        await self.supervisor.refresh()
        await self.until(lambda: self.supervisor.preload is Preload.READY)

    async def exit(self, rank: int = 0, generation: int = 1) -> ExitedRank:
        seen: set[Rank] = set()
        while (exited := await self.supervisor.next_exit(RUN, Generation(generation), seen)).rank != rank:
            seen.add(exited.rank)
        return exited

    def files(self, rank: int = 0, generation: int = 1) -> RankFiles:
        return RankFiles(self.state, RUN, Generation(generation), Rank(rank))

    async def until(self, condition: Callable[[], bool]) -> None:
        """Poll a condition for which no event exists, within the test's time limit."""
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    async def living(self, rank: int = 0, generation: int = 1) -> RankRecord:
        """Wait until the rank's script has printed that it runs, and return the rank's record."""
        await self.until(
            lambda: (
                self.files(rank, generation).stdout.exists() and "up" in self.files(rank, generation).stdout.read_text()
            )
        )

        # the record may appear later than the output, because the shim reports separately
        def found() -> list[RankRecord]:
            return [
                record for record in self.supervisor.records if (record.rank, record.generation) == (rank, generation)
            ]

        await self.until(lambda: bool(found()))
        return found()[0]

    def shim_pid(self) -> int:
        pid = self.supervisor.shim_pid
        assert pid is not None
        return pid


@pytest.fixture(params=[False, True], ids=["cold", "warm"])
async def bench(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path, request.param)
    await made.supervisor.start()
    if made.is_warm:
        await made.warm()
    yield made
    await made.supervisor.shut_down()
    assert not list(tmp_path.rglob("*.sock"))


@pytest.fixture
async def cold(tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path, is_warm=False)
    await made.supervisor.start()
    yield made
    await made.supervisor.shut_down()


async def test_what_a_rank_is_supplied_with_is_in_its_environment_and_on_no_disk(bench: Bench) -> None:
    await bench.start(
        "import os\nprint('up', len(os.environ['TOKEN']), flush=True)\nraise SystemExit(3)\n",
        supplied=Supplied(environment={"TOKEN": "hunter2"}),
    )
    told = (await bench.exit()).describe(Step(-1))
    assert bench.files().stdout.read_text() == "up 7\n"
    assert "hunter2" not in repr(told)
    written = [path for path in bench.state.rglob("*") if path.is_file()]
    assert any(path.suffix == ".json" for path in written), "the rank's record is among them"
    assert [path for path in written if b"hunter2" in path.read_bytes()] == []


async def test_what_a_rank_is_given_is_in_no_memory_that_later_ranks_inherit(tmp_path: Path) -> None:
    bench = Bench(tmp_path, is_warm=True)
    await bench.supervisor.start()
    try:
        await bench.warm()
        secret = secrets.token_hex(16)
        await bench.start("pass", supplied=Supplied(environment={"TOKEN": secret}))
        assert (await bench.exit()).end.code == 0
        (rank,) = bench.supervisor.records
        assert rank.is_warm
        (template,) = processes.children(bench.shim_pid()) - {rank.pid}
        memory = read_memory(template)
        assert memory.find(PRELOADED[0].encode()) >= 0
        assert memory.find(secret.encode()) < 0
    finally:
        await bench.supervisor.shut_down()


async def test_a_rank_waits_for_the_imports_so_that_all_launches_see_the_same_modules(tmp_path: Path) -> None:
    bench = Bench(tmp_path, is_warm=True)
    await bench.supervisor.start()
    try:
        assert not bench.supervisor.is_warm
        await bench.start("pass")
        assert (await bench.exit()).end.code == 0
        (rank,) = bench.supervisor.records
        assert rank.is_warm
    finally:
        await bench.supervisor.shut_down()


def read_memory(pid: int) -> bytes:
    """Return the content of all memory that a process can read and write."""
    ranges = [line.split()[:2] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    data = bytearray()
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for begin, end in (
            (int(place, 16) for place in where.split("-")) for where, rights in ranges if rights.startswith("rw")
        ):
            memory.seek(begin)
            data += memory.read(end - begin)
    return bytes(data)


@pytest.mark.parametrize("module", ["graphlib", "everstep_example"])
async def test_packages_of_a_job_are_seen_first_and_never_too_late(bench: Bench, tmp_path: Path, module: str) -> None:
    """A job's own version of a preloaded module makes its rank start cold, so that the rank imports the job's version.

    Other packages of the job do not prevent a warm start.
    """
    layer = tmp_path / "layer"
    layer.mkdir()
    (layer / f"{module}.py").write_text("VERSION = 'theirs'\n")
    script = f"""
import os, subprocess, sys
import {module}
print({module}.VERSION, flush=True)
print(sys.path[0] == os.path.dirname(os.path.abspath(sys.argv[0])), sys.path[1], flush=True)
subprocess.run([sys.executable, "-c", "import {module}; print({module}.VERSION)"], check=True)
"""
    await bench.start(script, supplied=Supplied(packages=Packages(path=str(layer), modules=(module,))))
    exited = await bench.exit()
    assert (exited.end.code, bench.files().stdout.read_text()) == (0, f"theirs\nTrue {layer}\ntheirs\n")
    is_late = bench.is_warm and module in PRELOADED
    (record,) = bench.supervisor.records
    assert record.is_warm is (bench.is_warm and not is_late)
    told = "everstep: this rank starts cold: its requirements bring graphlib, and another version is preloaded\n"
    assert bench.files().stderr.read_text() == (told if is_late else "")


async def test_a_rank_runs_the_script_as_python_would(bench: Bench) -> None:
    script = """
import json, os, signal, sys
import helper
facts = {
    "argv": sys.argv, "name": __name__, "file": __file__, "path": sys.path[0], "cwd": os.getcwd(), "spec": __spec__ is None,
    "rank": os.environ["RANK"], "local_size": "LOCAL_SIZE" in os.environ, "session": os.getsid(0) == os.getpid(), "helper": helper.__file__,
    "term": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "int": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "mask": [int(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, [])], "main": sys.modules["__main__"].__dict__ is globals(),
    "warm": "graphlib" in sys.modules, "worker": "worker" in sys.modules,
    "fds": sorted(int(f) for f in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{f}")),
}
print(json.dumps(facts))
"""
    (bench.source / "helper.py").write_text("")
    await bench.start(script, hyperparameters={"steps": "5"})
    exited = await bench.exit()
    assert exited.end.code == 0, bench.files().stderr.read_text()
    facts = json.loads(bench.files().stdout.read_text())
    entry = str(bench.source / "train.py")
    assert facts == {
        "argv": [entry, "--steps=5"],
        "name": "__main__",
        "file": entry,
        "path": str(bench.source),
        "cwd": str(bench.source),
        "spec": True,
        "rank": "0",
        "local_size": False,
        "session": True,
        "helper": str(bench.source / "helper.py"),
        "term": True,
        "int": True,
        "mask": [],
        "main": True,
        "warm": bench.is_warm,
        "worker": False,
        "fds": [0, 1, 2],
    }


def run_module(name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", name], cwd=folder, capture_output=True, text=True, check=False)


async def test_a_rank_runs_a_module_as_python_would(bench: Bench) -> None:
    """`python -m` itself prints the expected facts."""
    script = """
import json, os, sys
from . import helper
print(json.dumps([sys.argv, __name__, __file__, sys.path[0], os.getcwd(), __spec__.name, __package__, helper.__name__,
    sys.modules["__main__"].__dict__ is globals()]))
raise SystemExit(3)
"""
    package = bench.source / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "helper.py").write_text("")
    (package / "train.py").write_text(script)
    await bench.start("", entry=package / "train.py", module="package.train", entry_point="package/train.py")
    assert (await bench.exit()).end.code == 3, bench.files().stderr.read_text()
    python = run_module("package.train", bench.source)
    assert json.loads(bench.files().stdout.read_text()) == json.loads(python.stdout)


async def test_a_module_reports_an_exception_as_python_does(bench: Bench) -> None:
    (bench.source / "train.py").write_text("")
    await bench.start("def f():\n    raise ValueError('wrong')\nf()\n", module="train")
    assert (await bench.exit()).end.code == 1
    python = run_module("train", bench.source)
    assert bench.files().stderr.read_text() == python.stderr


class Kernel:
    """A folder with copies of the files in which the kernel counts kills for lack of memory.

    Tests set their contents.
    """

    def __init__(self, folder: Path) -> None:
        self.paths = MemoryPaths(folder / "proc", folder / "cgroup", folder / "kmsg")
        self._group = folder / "cgroup" / "memory" / "jobs"
        self._group.mkdir(parents=True)
        (folder / "proc" / "self").mkdir(parents=True)
        (folder / "proc" / "self" / "cgroup").write_text("4:memory:/jobs\n")
        (folder / "proc" / "meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 100 kB\n")

    def count(self, of_group: int, of_node: int) -> None:
        """Set the number of processes that the kernel killed for lack of memory, in the agent's cgroup and on
        the node.
        """
        (self._group / "memory.oom_control").write_text(f"oom_kill {of_group}\n")
        (self.paths.proc / "vmstat").write_text(f"oom_kill {of_node}\n")


@pytest.mark.parametrize("source", [MemorySource.KERNEL_LOG, MemorySource.CGROUP, MemorySource.NODE, None])
async def test_a_rank_that_the_kernel_killed_is_out_of_memory(tmp_path: Path, source: MemorySource | None) -> None:
    kernel = Kernel(tmp_path / "kernel")
    kernel.count(1, 3)
    bench = Bench(tmp_path, is_warm=False)
    bench.supervisor = bench.make(kernel.paths)
    await bench.supervisor.start()
    try:
        await bench.until(lambda: len(bench.supervisor._samples) > 0)
        await bench.start(WAIT_FOR_EVER)
        rank = await bench.living()
        (kernel.paths.proc / str(rank.pid)).mkdir()
        (kernel.paths.proc / str(rank.pid) / "status").write_text("VmRSS: 700 kB\nVmHWM: 800 kB\n")
        await bench.until(lambda: Rank(0) in bench.supervisor.rank_memory(RUN, Generation(1)))
        assert bench.supervisor.rank_memory(RUN, Generation(1))[Rank(0)].peak_bytes == 800 * 1024
        if source is MemorySource.KERNEL_LOG:
            line = (
                f"Out of memory: Killed process {rank.pid} (python) total-vm:9kB, anon-rss:900kB, file-rss:1kB, "
                "shmem-rss:0kB"
            )
            kernel.paths.kernel_log.write_text(f"3,1,{2**60},-;{line}\n")
        if source is not None:
            kernel.count(1 if source is MemorySource.NODE else 2, 4)
        os.kill(rank.pid, signal.SIGKILL)
        told = (await bench.exit()).describe(Step(3))
    finally:
        await bench.supervisor.shut_down()
    assert told.exit_class is (ExitClass.KILLED if source is None else ExitClass.OUT_OF_MEMORY)
    if source is None:
        assert told.memory is None
    else:
        resident = 901 if source is MemorySource.KERNEL_LOG else 700
        expected = MemoryEnd(
            source=source,
            kind=MemoryKind.HOST,
            rank_bytes=resident * 1024,
            used_bytes=900 * 1024,
            total_bytes=1000 * 1024,
        )
        assert told.memory == expected
    assert bench.supervisor.rank_memory(RUN, Generation(1)) == {}, "the rank has ended"


LOSES_A_LOADER = """
import os
from torch.utils.data import DataLoader, Dataset

class Kills(Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, index):
        os.kill(os.getpid(), 9)

list(DataLoader(Kills(), num_workers=1))
"""


@pytest.mark.parametrize("source", [MemorySource.CGROUP, MemorySource.NODE, None])
async def test_a_rank_whose_data_loader_worker_the_kernel_killed_is_out_of_memory(
    tmp_path: Path, source: MemorySource | None
) -> None:
    kernel = Kernel(tmp_path / "kernel")
    kernel.count(1, 3)
    bench = Bench(tmp_path, is_warm=False)
    bench.supervisor = bench.make(kernel.paths)
    await bench.supervisor.start()
    try:
        await bench.until(lambda: len(bench.supervisor._samples) > 0)
        if source is not None:
            kernel.count(1 if source is MemorySource.NODE else 2, 4)
        await bench.start(LOSES_A_LOADER)
        told = (await bench.exit()).describe(Step(3))
    finally:
        await bench.supervisor.shut_down()
    assert told.code == 1
    assert "DataLoader worker" in told.last_lines
    if source is None:
        assert (told.exit_class, told.memory) == (ExitClass.ERROR, None)
    else:
        assert told.exit_class is ExitClass.OUT_OF_MEMORY
        assert told.memory is not None
        assert (told.memory.source, told.memory.rank_bytes) == (source, None)
        assert told.memory.words.startswith("RuntimeError: DataLoader worker (pid")


@pytest.mark.parametrize(
    ("script", "code", "exit_class", "tail"),
    [
        ("", 0, ExitClass.SUCCESS, ""),
        ("import sys; sys.exit(7)", 7, ExitClass.ERROR, ""),
        ("import sys; sys.exit('no luck')", 1, ExitClass.ERROR, "no luck"),
        ("raise ValueError('broken')", 1, ExitClass.ERROR, "ValueError: broken"),
        ("def f(:\n", 1, ExitClass.ERROR, "SyntaxError"),
        ("import os; os.kill(os.getpid(), 9)", -9, ExitClass.KILLED, ""),
        ("import os; os.abort()", -6, ExitClass.CRASHED, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -15, ExitClass.KILLED, ""),
    ],
)
async def test_exits_are_told_as_they_were(
    bench: Bench, script: str, code: int, exit_class: ExitClass, tail: str
) -> None:
    await bench.start(script)
    told = (await bench.exit()).describe(Step(3))
    assert (told.code, told.exit_class, told.boundary) == (code, exit_class, 3)
    assert tail in told.last_lines
    assert "worker/shim" not in told.last_lines, "our own frames are no business of the user's"


async def test_a_script_ends_as_python_ends_it(bench: Bench) -> None:
    """The rank runs atexit functions, joins threads and flushes open files."""
    await bench.start(
        "import atexit, threading\n"
        "atexit.register(print, 'at exit')\n"
        "left_open = open('left-open', 'w'); left_open.write('flushed')\n"
        "threading.Thread(target=lambda: print('joined')).start()\n"
    )
    assert (await bench.exit()).end.code == 0
    assert set(bench.files().stdout.read_text().split("\n")) == {"joined", "at exit", ""}
    assert (bench.source / "left-open").read_text() == "flushed"


async def test_a_users_own_worker_module_is_imported(bench: Bench) -> None:
    (bench.source / "worker.py").write_text("name = 'mine'")
    await bench.start("import worker; print(worker.name)")
    assert (await bench.exit()).end.code == 0, bench.files().stderr.read_text()
    assert bench.files().stdout.read_text() == "mine\n"


async def test_a_missing_script_is_an_error_of_the_rank(bench: Bench) -> None:
    plan = rank_plan()
    await bench.supervisor.start_rank(
        plan, plan.nodes[0], Rank(0), bench.source / "train.py", agent_socket=bench.state / "s", supplied=NOTHING
    )
    told = (await bench.exit()).describe(Step(-1))
    assert told.code == 2
    assert "can't open file" in told.last_lines


async def test_warm_ranks_do_not_share_random_numbers(bench: Bench) -> None:
    await bench.start("import random; print(random.random())", count=2)
    assert [(await bench.exit(rank)).end.code for rank in (0, 1)] == [0, 0]
    assert bench.files(0).stdout.read_text() != bench.files(1).stdout.read_text()


async def test_a_variable_read_at_start_makes_the_start_cold(tmp_path: Path) -> None:
    bench = Bench(tmp_path, is_warm=True)
    await bench.supervisor.start()
    try:
        await bench.warm()
        await bench.start(
            "import sys; print(sys.flags.hash_randomization, 'graphlib' in sys.modules)",
            environment={"PYTHONHASHSEED": "0"},
        )
        await bench.exit()
        assert bench.files().stdout.read_text() == "0 False\n"
        assert bench.supervisor.preload in (Preload.PENDING, Preload.READY)
    finally:
        await bench.supervisor.shut_down()


async def test_a_halt_reaches_every_descendant(cold: Bench) -> None:
    """A halt of a rank also ends its child, its child in another session, and an orphaned grandchild."""
    script = """
import os, signal, sys
def child(setsid, orphan):
    read, write = os.pipe()
    if os.fork() == 0:
        if setsid: os.setsid()
        if orphan and os.fork(): os._exit(0)
        os.write(write, str(os.getpid()).encode() + b"\\n")
        signal.pause()
    return int(os.read(read, 20))
print([child(False, False), child(True, False), child(True, True)], flush=True)
print("up", flush=True)
signal.pause()
"""
    await cold.start(script)
    await cold.living()
    pids = json.loads(cold.files().stdout.read_text().splitlines()[0])
    starts = {pid: processes.find(pid) for pid in pids}
    assert all(starts.values())
    cold.supervisor.halt_now(RUN, Generation(1))
    exited = await cold.exit()
    assert (exited.end.code, exited.exit_class) == (-signal.SIGKILL, ExitClass.HALTED)
    await cold.supervisor.prove_gone(RUN)
    assert [processes.find(pid) for pid in pids] == [None, None, None]


async def test_what_a_rank_leaves_behind_is_ended_with_it(cold: Bench) -> None:
    await cold.start(LEAVE_A_CHILD)
    await cold.exit()
    await cold.supervisor.prove_gone(RUN)
    assert processes.find(int(cold.files().stdout.read_text())) is None


async def test_what_one_rank_leaves_behind_goes_while_others_live(cold: Bench) -> None:
    await cold.start(WAIT_FOR_EVER)
    survivor = await cold.living()
    await cold.start(LEAVE_A_CHILD, generation=2)
    await cold.exit(generation=2)
    left = int(cold.files(generation=2).stdout.read_text())
    await cold.until(lambda: processes.find(left) is None)
    assert processes.is_alive(survivor.pid, survivor.start_ticks)


async def test_nothing_of_a_halted_generation_starts_any_more(bench: Bench) -> None:
    bench.supervisor.halt_now(RUN, Generation(1))
    await bench.start("print('up')")
    exited = await bench.exit()
    assert exited.exit_class is ExitClass.HALTED
    assert not bench.files().stdout.exists()
    await bench.start("print('up')", generation=2)
    assert (await bench.exit(generation=2)).end.code == 0


async def test_ranks_that_still_live_are_not_proven_gone(cold: Bench) -> None:
    await cold.start(WAIT_FOR_EVER)
    record = await cold.living()
    cold.supervisor.gone_seconds = 0.2
    with pytest.raises(RanksNotGone, match=str(record.pid)):
        await cold.supervisor.prove_gone(RUN)
    cold.supervisor.gone_seconds = 5.0


async def test_another_agent_takes_over_ranks_and_the_exits_it_missed(bench: Bench) -> None:
    await bench.start(
        "import os, signal\nif os.environ['RANK'] == '0': signal.pause()\nprint('up', flush=True)\nsignal.pause()",
        count=2,
    )
    await bench.living(1)
    shim = bench.supervisor.shim_pid
    await bench.supervisor.close()
    records = {record.rank: record for record in bench.supervisor.records}
    os.kill(records[Rank(0)].pid, signal.SIGSEGV)
    await bench.until(lambda: not processes.is_alive(records[Rank(0)].pid, records[Rank(0)].start_ticks))
    bench.supervisor = bench.make()
    await bench.supervisor.start()
    bench.supervisor.shim_pid = shim  # in production, the agent is not the shim's parent
    assert (await bench.exit(0)).exit_class is ExitClass.CRASHED
    taken = next(record for record in bench.supervisor.records if record.rank == 1)
    assert taken == records[Rank(1)]
    await bench.start("", count=2)  # start the same ranks again, which has no effect
    os.kill(taken.pid, signal.SIGKILL)
    assert (await bench.exit(1)).exit_class is ExitClass.KILLED


async def test_a_start_that_the_agent_before_has_asked_for(bench: Bench) -> None:
    """Three agents in turn request the start of the same rank, and the shim starts it once.

    The first agent dies before the shim reports that the rank has started. The second agent repeats the request while
    the shim may still be starting the rank, and the third repeats it afterwards. The shim reports the same rank to
    both.
    """
    await bench.start(WAIT_FOR_EVER)
    for _ in range(2):
        await bench.supervisor.close()
        bench.supervisor = bench.make()
        await bench.supervisor.start()
        await bench.start(WAIT_FOR_EVER)
        await bench.until(lambda: bool(bench.supervisor.records))
        (record,) = bench.supervisor.records
        assert (await bench.living()) == record
        assert record.end is None
        await bench.until(lambda: bench.files().stdout.read_text().endswith("\n"))
        assert bench.files().stdout.read_text() == "up\n"


async def test_a_dead_shim_takes_no_rank_out_of_sight(bench: Bench) -> None:
    await bench.start(WAIT_FOR_EVER)
    record = await bench.living()
    first = bench.shim_pid()
    os.kill(first, signal.SIGKILL)
    told = (await bench.exit()).describe(Step(-1))
    assert (told.exit_class, told.code) == (ExitClass.KILLED, -signal.SIGKILL)
    assert "shim" in told.last_lines
    assert not processes.is_alive(record.pid, record.start_ticks)
    await bench.supervisor.prove_gone(RUN)
    await bench.start("print('again')", generation=2)
    assert (await bench.exit(generation=2)).end.code == 0
    assert bench.shim_pid() != first


async def test_another_shim_is_tried_until_there_is_one(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor retries until a shim starts.

    Until then, the node reports that it cannot start ranks warm, so that the control plane prefers other nodes.
    """
    spawn, refused = os.posix_spawnp, []

    def short_of_memory(*arguments: Any, **options: Any) -> int:
        refused.append(bench.supervisor.is_warm)
        if len(refused) < 2:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return spawn(*arguments, **options)

    monkeypatch.setattr(os, "posix_spawnp", short_of_memory)
    os.kill(bench.shim_pid(), signal.SIGKILL)
    await bench.until(lambda: len(refused) == 2)
    await bench.supervisor.refresh()
    assert refused == [False, False]
    await bench.start("print('again')")
    assert (await bench.exit()).end.code == 0


async def test_shims_that_die_at_once_leave_nothing_and_are_told_once(
    cold: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every shim ends while it starts, as with a full disk or when another shim holds the lock.

    No shim process remains, and the supervisor logs the failure only once.
    """
    spawn = os.posix_spawnp
    born: list[int] = []
    left: list[list[int]] = []

    def stillborn(path: str, *arguments: Any, **options: Any) -> int:
        left.append([pid for pid in born if processes.find(pid) is not None])
        born.append(spawn("/bin/false" if len(born) < 3 else path, *arguments, **options))
        return born[-1]

    monkeypatch.setattr(os, "posix_spawnp", stillborn)
    os.kill(cold.shim_pid(), signal.SIGKILL)
    await cold.until(lambda: len(born) == 4)
    await cold.supervisor.refresh()
    await cold.start("")
    assert (await cold.exit()).end.code == 0
    assert left == [[], [], [], []]
    assert caplog.text.count("was started and does not answer") == 1


async def test_an_agent_that_ends_while_its_shim_starts_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path, is_warm=False)
    stuck = tmp_path / "python"
    stuck.write_text("#!/bin/sh\nexec sleep 1000\n")
    stuck.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(stuck))
    starting = asyncio.create_task(bench.supervisor.start())
    await bench.until(lambda: bench.supervisor.shim_pid is not None)
    pid = bench.shim_pid()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert processes.find(pid) is None


LEAVE_A_DAEMON = """
import os, signal
read, write = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    os.write(write, str(os.getpid()).encode())
    signal.pause()
print(int(os.read(read, 20)), flush=True)
print("up", flush=True)
signal.pause()
"""
"""A script that leaves a grandchild in another session and then ends the grandchild's parent.

Only the cgroup still connects the grandchild to its rank.
"""


async def test_what_a_dead_shim_had_below_it_is_fenced_by_its_cgroup(cold: Bench) -> None:
    await cold.start(LEAVE_A_DAEMON)
    record = await cold.living()
    if not record.cgroup:
        pytest.skip("no cgroup can be made here")
    stray = int(cold.files().stdout.read_text().splitlines()[0])
    # Wait, because the grandchild's parent may not have ended yet.
    await cold.until(lambda: cgroups.pids(record.cgroup) == {record.pid, stray})
    assert cold.shim_pid() not in cgroups.pids(record.cgroup)
    os.kill(cold.shim_pid(), signal.SIGKILL)
    await cold.exit()
    await cold.supervisor.prove_gone(RUN)
    assert (found := processes.find(stray)) is None or found.is_zombie
    assert not Path(record.cgroup).exists()
    await cold.supervisor.shut_down()
    assert not Path(record.cgroup).parent.exists()


async def test_where_there_are_no_cgroups_children_are_found_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(tmp_path, is_warm=False, cgroup="no/such/parent")
    await bench.supervisor.start()
    try:
        assert "found by parent and session" in caplog.text
        await bench.start(LEAVE_A_DAEMON)
        record = await bench.living()
        assert record.cgroup == ""
        bench.supervisor.halt_now(RUN, Generation(1))
        await bench.supervisor.prove_gone(RUN)
        assert processes.find(int(bench.files().stdout.read_text().splitlines()[0])) is None
    finally:
        await bench.supervisor.shut_down()


async def test_limits_that_the_kernel_cannot_impose_are_said_and_ranks_run_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(tmp_path, is_warm=False, cgroup="no/such/parent")
    bench.supervisor = Supervisor(
        state=bench.state,
        socket=bench.state / "shim.sock",
        address="127.0.0.1",
        is_warm=False,
        cgroup=bench.cgroup,
        limits=cgroups.JobLimits(memory_bytes=1 << 30, task_count=100),
    )
    await bench.supervisor.start()
    try:
        assert "the limits of jobs (--job-memory-bytes, --job-tasks) do not apply: cgroup v" in caplog.text
        await bench.start("pass")
        assert (await bench.exit()).end.code == 0
    finally:
        await bench.supervisor.shut_down()


def break_record(bench: Bench, rank: int = 0) -> Path:
    """Make every attempt to write a rank's record fail. Return the folder whose presence causes the failure."""
    obstacle = bench.state / "ranks" / f"{RUN}.1.{rank}.new"
    obstacle.mkdir(parents=True)
    return obstacle


async def test_an_exit_that_the_disk_does_not_take_is_told_and_recorded_later(bench: Bench) -> None:
    await bench.start(WAIT_FOR_EVER, count=2)
    first, second = await bench.living(0), await bench.living(1)
    obstacle = break_record(bench)
    shim = bench.shim_pid()
    os.kill(first.pid, signal.SIGKILL)
    assert (await bench.exit()).end.code == -signal.SIGKILL
    bench.supervisor.halt_now(RUN, Generation(1))
    assert (await bench.exit(1)).end.stopped, "the shim has outlived it"
    assert (bench.shim_pid(), second.end) == (shim, None)
    obstacle.rmdir()
    on_disk = RankRecords(bench.state)
    await bench.until(lambda: all(record.end is not None for record in on_disk.read()))
    assert tuple(on_disk.read()) == bench.supervisor.records


async def test_what_a_dead_shim_owed_the_disk_is_known_to_the_agent(cold: Bench) -> None:
    await cold.start(WAIT_FOR_EVER, count=2)
    first, second = await cold.living(0), await cold.living(1)
    obstacles = [break_record(cold, 0), break_record(cold, 1)]
    os.kill(first.pid, signal.SIGTERM)
    assert (await cold.exit()).end.code == -signal.SIGTERM
    os.kill(cold.shim_pid(), signal.SIGKILL)
    assert (await cold.exit(1)).end.code == -signal.SIGKILL
    assert not processes.is_alive(second.pid, second.start_ticks)
    assert (await cold.exit()).end.code == -signal.SIGTERM, "its true end, and not its burial"
    for obstacle in obstacles:
        obstacle.rmdir()
    on_disk = RankRecords(cold.state)
    await cold.until(lambda: all(record.end is not None for record in on_disk.read()))
    assert tuple(on_disk.read()) == cold.supervisor.records


async def test_a_start_that_the_disk_does_not_take_is_refused(bench: Bench) -> None:
    obstacle = break_record(bench)
    plan = await bench.start("print('ran')\n", count=1)
    end = (await bench.exit()).end
    assert "cannot be written" in end.text
    assert not end.stopped
    assert bench.files().stdout.read_text() == ""
    await bench.supervisor.prove_gone(plan.run)
    obstacle.rmdir()
    await bench.start("print('ran')\n", generation=2)
    assert (await bench.exit(generation=2)).end.code == 0, "the shim has outlived it"


async def test_a_rank_whose_folders_cannot_be_made_is_one_that_was_not_started(cold: Bench) -> None:
    (cold.state / "outputs").touch()
    await cold.start("", count=2)
    told = (await cold.exit(1)).describe(Step(-1))
    assert told.exit_class is ExitClass.ERROR
    assert "the rank was not started: its folders cannot be made" in told.last_lines
    (cold.state / "outputs").unlink()
    await cold.start("", generation=2)
    assert (await cold.exit(generation=2)).end.code == 0


async def test_an_agent_that_finds_a_dead_shim_ends_its_ranks(cold: Bench) -> None:
    await cold.start(WAIT_FOR_EVER)
    record = await cold.living()
    pid = cold.shim_pid()
    await cold.supervisor.close()
    os.kill(pid, signal.SIGKILL)
    await asyncio.to_thread(os.waitpid, pid, 0)
    cold.supervisor = cold.make()
    await cold.supervisor.start()
    assert "shim" in (await cold.exit()).describe(Step(0)).last_lines
    assert not processes.is_alive(record.pid, record.start_ticks)


async def test_that_ranks_start_warm_now_is_told_without_being_asked(tmp_path: Path) -> None:
    bench = Bench(tmp_path, is_warm=True)
    await bench.supervisor.start()
    try:
        await bench.until(lambda: bench.supervisor.is_warm)
        assert bench.supervisor.preload is Preload.READY
    finally:
        await bench.supervisor.shut_down()


async def test_where_nothing_is_preloaded_ranks_start_as_fast_as_they_ever_will(cold: Bench) -> None:
    assert cold.supervisor.is_warm
    assert cold.supervisor.preload is Preload.NONE


async def test_a_dead_template_is_replaced(tmp_path: Path) -> None:
    bench = Bench(tmp_path, is_warm=True)
    await bench.supervisor.start()
    try:
        await bench.warm()
        await bench.start("import sys; print('graphlib' in sys.modules)")
        await bench.exit()
        (template,) = processes.children(bench.shim_pid()) - {record.pid for record in bench.supervisor.records}
        os.kill(template, signal.SIGKILL)
        # the shim reaps the template and starts another before it answers the next request
        await bench.until(lambda: template not in processes.children(bench.shim_pid()))
        await bench.warm()
        await bench.start("import sys; print('graphlib' in sys.modules)", generation=2)
        assert (await bench.exit(generation=2)).end.code == 0
        assert bench.files(generation=2).stdout.read_text() == "True\n"
    finally:
        await bench.supervisor.shut_down()


async def test_a_warm_start_that_was_stopped_is_none_when_the_template_dies(tmp_path: Path) -> None:
    """An agent stops a rank that the hanging template process has not forked yet. Then the template is killed.

    The shim never starts the stopped rank. It starts the rank of the next generation cold.
    """
    bench = Bench(tmp_path, is_warm=True)
    await bench.supervisor.start()
    try:
        await bench.until(lambda: bench.supervisor.preload is Preload.READY)
        (template,) = processes.children(bench.shim_pid())
        os.kill(template, signal.SIGSTOP)
        await bench.start("print('ran')\n")
        bench.supervisor.halt_now(RUN, Generation(1))
        await bench.start("print('ran')\n", generation=2)
        # wait for an answer of the shim, which proves that the shim has received every request
        await bench.supervisor.refresh()
        os.kill(template, signal.SIGKILL)
        end = (await bench.exit()).end
        assert (end.stopped, end.text) == (True, "the rank was not started: it was stopped before it started")
        assert (await bench.exit(generation=2)).end.code == 0
        assert not bench.files().stdout.exists() or bench.files().stdout.read_text() == ""
    finally:
        await bench.supervisor.shut_down()


def preloading(folder: Path, monkeypatch: pytest.MonkeyPatch, module: str) -> Bench:
    """Return a bench whose template process imports a module that the test wrote."""
    (folder / "modules").mkdir()
    (folder / "modules" / "everstep_strange.py").write_text(module)
    monkeypatch.syspath_prepend(str(folder / "modules"))
    bench = Bench(folder, is_warm=True)
    bench.supervisor = Supervisor(
        state=bench.state,
        socket=bench.state / "shim.sock",
        address="127.0.0.1",
        environment={"PATH": os.environ["PATH"], "PYTHONPATH": str(folder / "modules")},
        modules=("everstep_strange",),
    )
    return bench


async def test_a_failed_preload_is_told_and_ranks_start_cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = preloading(tmp_path, monkeypatch, "raise RuntimeError('no such library')")
    await bench.supervisor.start()
    try:
        await bench.start("print('up')")
        assert (await bench.exit()).end.code == 0
        # the shim reports the template's failure without a request
        await bench.until(lambda: bench.supervisor.preload is Preload.FAILED)
        assert not bench.supervisor.is_warm, "its ranks import first: a node where they do not is the better one"
    finally:
        await bench.supervisor.shut_down()


async def test_ranks_do_not_wait_for_a_template_that_still_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = preloading(tmp_path, monkeypatch, "import signal\nsignal.pause()")
    await bench.supervisor.start()
    try:
        await bench.start("print('up')")
        assert (await bench.exit()).end.code == 0
        assert [record.is_warm for record in bench.supervisor.records] == [False]
        assert bench.supervisor.preload is Preload.PENDING
    finally:
        await bench.supervisor.shut_down()


async def test_a_template_that_is_killed_while_it_imports_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = preloading(tmp_path, monkeypatch, "import signal\nsignal.pause()")
    await bench.supervisor.start()
    try:
        assert not bench.supervisor.is_warm
        (template,) = processes.children(bench.shim_pid())
        os.kill(template, signal.SIGKILL)
        await bench.until(lambda: bench.supervisor.preload is Preload.FAILED)
        assert not bench.supervisor.is_warm
    finally:
        await bench.supervisor.shut_down()


async def test_sigterm_ends_the_shim_and_everything_below(cold: Bench) -> None:
    await cold.start(WAIT_FOR_EVER, count=2)
    records = [await cold.living(0), await cold.living(1)]
    cold.supervisor._is_closing = True
    pid = cold.shim_pid()
    os.kill(pid, signal.SIGTERM)
    assert {(await cold.exit(rank)).exit_class for rank in (0, 1)} == {ExitClass.HALTED}
    await cold.until(lambda: processes.find(pid) is None)
    assert not any(processes.is_alive(record.pid, record.start_ticks) for record in records)


async def test_forgotten_runs_leave_no_records(cold: Bench) -> None:
    await cold.start("")
    await cold.exit()
    await asyncio.to_thread(cold.supervisor.forget, RUN)
    await cold.until(lambda: not cold.supervisor.records)
    await cold.supervisor.refresh()
    assert not cold.supervisor.records
    assert not list((cold.state / "ranks").iterdir())


async def test_stop_all_ends_ranks_of_every_run(cold: Bench) -> None:
    await cold.start(WAIT_FOR_EVER, count=2)
    await cold.living(1)
    await cold.supervisor.stop_all()
    assert all(record.end for record in cold.supervisor.records)
    await cold.supervisor.prove_gone(None)


async def test_a_malformed_client_is_dropped_and_the_shim_lives_on(cold: Bench) -> None:
    reader, writer = await asyncio.open_unix_connection(str(cold.state / "shim.sock"))
    writer.write(b"\0\0\0\4abcd")
    assert await reader.read() == b""
    writer.close()
    await writer.wait_closed()
    reader, writer = await asyncio.open_unix_connection(str(cold.state / "shim.sock"))
    writer.write(b"\xff" * 8)
    assert await reader.read() == b""
    writer.close()
    await writer.wait_closed()
    await cold.start("")
    assert (await cold.exit()).end.code == 0


async def test_a_drill_kills_one_rank_and_no_other(cold: Bench) -> None:
    await cold.start(WAIT_FOR_EVER, count=2)
    for rank in (0, 1):
        await cold.living(rank)
    cold.supervisor.kill_rank(RUN, Generation(2), Rank(1))  # generation 2 has no such rank, so no process is killed
    cold.supervisor.kill_rank(RUN, Generation(1), Rank(1))
    exited = await cold.exit(1)
    assert exited.exit_class is ExitClass.KILLED
    survivor = await cold.living(0)
    assert processes.is_alive(survivor.pid, survivor.start_ticks)
    cold.supervisor.kill_rank(RUN, Generation(1), Rank(1))  # the rank has already ended, so no process is killed
