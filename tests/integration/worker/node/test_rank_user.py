"""Real rank processes run as a user of their own.

The tests check what ranks can do, what the kernel denies them, and which files remain after a job.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from everstep.protocol.agent_messages import RunCommand
from everstep.protocol.codec import Message, frame
from everstep.protocol.ids import Generation, JobName, Rank, RunId
from everstep.protocol.plan import GenerationPlan, InputChannel, ObjectReference, SourceArchive
from everstep.protocol.rank_messages import RankHello, SlotsGranted
from everstep.protocol.slot import digest
from tests.fakes.storage import MemoryObjectStore
from tests.integration.worker.own_mounts import in_own_mounts, may_have_one
from tests.unit.worker.rank_plans import RUN, rank_plan
from tests.wheels import make_wheel
from worker.errors import InputRefused
from worker.logs.outputs import RankOutputs
from worker.node.rank_user import RankUser, _processes_of, clear, closed_to, create_traversable_dir, user_of
from worker.provisioning.inputs import InputCache
from worker.provisioning.packages import InstallationOrder, PackageLayers
from worker.provisioning.source import unpack
from worker.ranks.commands import run_beside
from worker.ranks.environment import Supplied
from worker.ranks.files import RankFiles, make_home
from worker.ranks.server import RankLine, RankServer
from worker.ranks.shim.messages import RankRecord
from worker.ranks.stacks import stacks_of
from worker.ranks.supervisor import Supervisor
from worker.shm.held_files import HeldFiles
from worker.shm.store import SlotStore
from worker.storage.aws import JobPrincipal

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not may_have_one(), reason="only root can run ranks as another user"),
]
USER = RankUser(61_234, 61_235, (61_236,), "ranks-of-a-test")
BUCKET = "bucket"
PYTHON = (Path(sys.base_prefix).resolve(), Path(__file__).resolve().parents[4], Path(sys.prefix).resolve())
"""Folders of Python and of the modules that it imports.

The tests open these folders to all users: otherwise, the ranks' user might not be able to enter a folder above them.
"""
LAYOUT = digest(b"layout")

LOOK = """
import errno, getpass, json, mmap, os, socket, sys, traceback

places = json.loads(os.environ["PLACES"])
found = {}

def attempt(name, work):
    try:
        found[name] = work() or "done"
    except OSError as error:
        found[name] = errno.errorcode[error.errno]

def write(path):
    with open(path, "r+b") as file:
        file.write(b"x")

def connect(path):
    line = socket.socket(socket.AF_UNIX)
    line.connect(path)
    return line

status = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
found["who"] = [*os.getresuid(), *os.getresgid(), *os.getgroups(), int(status["NoNewPrivs"]), int(status["CapPrm"], 16), int(status["CapEff"], 16)]
found["names"] = [getpass.getuser(), os.environ["HOME"]]
line = connect(os.environ["EVERSTEP_AGENT_SOCKET"])
line.sendall(bytes.fromhex(os.environ["GREETING"]))
data, files, _, _ = socket.recv_fds(line, 10_000, 4)
found["agent says"] = [len(files), "rank-0.slot-0" in data.decode(errors="replace")]
for name, file in zip(("own slot", "page"), files):
    attempt(name, lambda: mmap.mmap(file, 4096).write(b"x") and None)
    attempt("shrink " + name, lambda: os.ftruncate(file, 0))
    attempt("grow " + name, lambda: os.ftruncate(file, 1 << 62))
    attempt("shrink by path " + name, lambda: os.truncate(f"/proc/self/fd/{file}", 100))
    attempt("extend " + name, lambda: os.pwrite(file, b"x" * 100, os.fstat(file).st_size) and None)
    attempt("unlink " + name, lambda: os.unlink(f"/proc/self/fd/{file}"))
for number in range(3, 64):
    attempt("agent's files", lambda: os.open(f"/proc/{places['agent']}/fd/{number}", os.O_RDWR))
for name in ("promise", "source", "input"):
    attempt("write " + name, lambda: write(places[name]))
attempt("read promise", lambda: open(places["promise"]).read())
for name in ("source", "input"):
    attempt("read " + name, lambda: open(places[name]).read() and None)
for name in ("state", "slots"):
    attempt("list " + name, lambda: os.listdir(places[name]) and None)
for name in ("tree", "input"):
    attempt("replace " + name, lambda: os.rename(places[name], places[name] + ".mine"))
attempt("agent's environment", lambda: open(f"/proc/{places['agent']}/environ").read() and None)
attempt("agent's memory", lambda: open(f"/proc/{places['agent']}/mem").close())
attempt("parent's memory", lambda: open(f"/proc/{os.getppid()}/mem").close())
attempt("end the agent", lambda: os.kill(places["agent"], 0))
attempt("own descriptors", lambda: os.listdir("/proc/self/fd") and None)
attempt("become root", lambda: os.setuid(0))
attempt("shim", lambda: connect(places["shim"]).close())
attempt("shim's files", lambda: socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect(places["files"]))
attempt("again stdout", lambda: open("/dev/stdout", "a").write("twice\\n") and None)
attempt("again stdout to read", lambda: open("/dev/stdout").read())
out = os.environ["EVERSTEP_OUTPUT_DIR"]
attempt("output", lambda: open(out + "/model", "w").write("model") and None)
attempt("home", lambda: open(os.environ["HOME"] + "/cache", "w").write("x") and None)
os.symlink(places["promise"], out + "/leak")
print(json.dumps(found), flush=True)
"""
MAY = {
    "own slot": "done",
    "page": "done",
    "read source": "done",
    "write source": "done",
    "read input": "done",
    "own descriptors": "done",
    "again stdout": "done",
    "output": "done",
    "home": "done",
}
MAY_NOT = (
    *(
        f"{change} {name}"
        for name in ("own slot", "page")
        for change in ("shrink", "grow", "shrink by path", "extend", "unlink")
    ),
    "agent's files",
    "write promise",
    "write input",
    "read promise",
    "list state",
    "list slots",
    "replace tree",
    "replace input",
    "agent's environment",
    "agent's memory",
    "parent's memory",
    "end the agent",
    "become root",
    "shim",
    "shim's files",
    "again stdout to read",
)


class Listener:
    """Accepts the rank's connection, and sends the files of the rank."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def hello(self, hello: RankHello, line: RankLine) -> bool:
        line.send(SlotsGranted(layout_hash=LAYOUT, capacity_bytes=4096, paths=self._names))
        return True

    def message(self, rank: Rank, message: Message) -> None: ...

    def lost(self, rank: Rank, line: RankLine) -> None: ...


class Machine:
    """A node as its agent sets it up, with one rank of a job."""

    def __init__(self, disk: Path, tmpfs: Path, *, is_warm: bool) -> None:
        self.state, self.slots = disk / "state", tmpfs / "node"
        self.objects = MemoryObjectStore(BUCKET)
        self.supervisor = Supervisor(
            state=self.state,
            socket=self.slots / "shim.sock",
            address="127.0.0.1",
            is_warm=is_warm,
            environment={
                "PATH": os.environ["PATH"],
                "HOME": str(disk / "home"),
                "TORCH_EXTENSIONS_DIR": str(disk / "home" / "extensions"),
            },
            modules=("graphlib",),
            user=USER,
        )

    def plan(self, script: str) -> tuple[GenerationPlan, Path]:
        """Store the script and make a plan as `Member` does, with restrictive file modes in the archive.

        The umask is that of the local cloud.
        """
        data = script.encode()
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
            entry = tarfile.TarInfo("code/train.py")
            entry.size, entry.mode = len(data), 0o600
            tar.addfile(entry, io.BytesIO(data))
        archive = self.state / "sources" / f"{RUN}.tar.gz"
        archive.write_bytes(buffer.getvalue())
        plan = rank_plan(entry_point="code/train.py")
        place = ObjectReference(bucket=BUCKET, key="source")
        source = SourceArchive(object=place, sha256=hashlib.sha256(buffer.getvalue()).hexdigest(), bytes=1)
        plan = msgspec.structs.replace(plan, script=msgspec.structs.replace(plan.script, source=source))
        return plan, unpack(archive, plan.script, archive.with_name(RUN), threading.Event(), USER)

    def files(self) -> RankFiles:
        return RankFiles(self.state, RUN, Generation(1), Rank(0))

    async def rank(self, is_up: Path) -> RankRecord:
        """Wait until a rank opens and closes the FIFO `is_up`, and the shim has reported the rank.

        Return its record.
        """
        await asyncio.to_thread(is_up.read_text)
        seen = self.supervisor.changed.version
        while not self.supervisor.records:
            seen = await self.supervisor.changed.wait(seen)
        return self.supervisor.records[0]


@contextlib.asynccontextmanager
async def machine(disk: Path, tmpfs: Path, *, is_warm: bool = False) -> AsyncIterator[Machine]:
    mask = os.umask(0o077)
    made = Machine(disk, tmpfs, is_warm=is_warm)
    await made.supervisor.start()
    while is_warm and not made.supervisor.is_warm:
        await made.supervisor.changed.wait(made.supervisor.changed.version)
    (made.state / "sources").mkdir()
    create_traversable_dir(made.state / "sources", USER)
    (made.state / "promise").write_text("the generation's key")
    try:
        yield made
    finally:
        os.umask(mask)
        await made.supervisor.shut_down()


@pytest.mark.parametrize("is_warm", [False, True], ids=["cold", "warm"])
def test_a_rank_has_what_it_needs_and_nothing_else(is_warm: bool) -> None:
    async def body(disk: Path, tmpfs: Path) -> None:
        async with machine(disk, tmpfs, is_warm=is_warm) as made:
            store = SlotStore(HeldFiles(), memory_bytes=1 << 20)
            store.open_run(JobName("job"), RUN)
            for rank in (0, 1):
                await store.reserve(Rank(rank), capacity_bytes=4096, layout_hash=LAYOUT, slot_count=2)
            page = store.page(Rank(0), 1)
            server = RankServer(made.slots / "ranks.sock", store.files, USER)
            server.events = Listener(store.shards[Rank(0)][0].file.name, page.name)
            await server.start()
            made.objects.put_bytes(ObjectReference(bucket=BUCKET, key="set/a"), b"data")
            channels = (InputChannel(name="train", prefix=ObjectReference(bucket=BUCKET, key="set/")),)
            inputs = InputCache(made.state, 1 << 20, USER).fetch(
                made.objects, JobPrincipal(project="a", job="gpt", run=RUN), channels, threading.Event()
            )
            plan, entry = made.plan(LOOK)
            places = {
                "promise": str(made.state / "promise"),
                "source": str(entry),
                "tree": str(made.state / "sources" / RUN),
                "input": str(inputs["train"] / "a"),
                "state": str(made.state),
                "slots": str(made.slots),
                "shim": str(made.slots / "shim.sock"),
                "files": str(made.slots / "files.sock"),
                "agent": os.getpid(),
            }
            hello = RankHello(job=JobName("job"), run=RUN, generation=Generation(1), rank=Rank(0), pid=1)
            given = {"PLACES": json.dumps(places), "GREETING": frame(hello).hex()}
            here = plan.nodes[0]
            await made.supervisor.start_rank(
                plan, here, Rank(0), entry, agent_socket=server.path, supplied=Supplied(environment=given)
            )
            exited = await made.supervisor.next_exit(RUN, Generation(1), ())
            assert exited.end.code == 0, made.files().stderr.read_text()
            assert made.supervisor.records[0].is_warm is is_warm
            said, again = (
                made.files().stdout.read_text().splitlines()[-1],
                made.files().stdout.read_text().splitlines()[0],
            )
            found: dict[str, Any] = json.loads(said)
            assert again == "twice"
            assert found.pop("who") == [*[USER.uid] * 3, *[USER.gid] * 3, *USER.groups, 1, 0, 0]
            assert found.pop("names") == [USER.name, str(made.state / "homes" / RUN)]
            assert found.pop("agent says") == [2, True]
            assert {name: found.pop(name) for name in MAY} == MAY
            assert set(found) == set(MAY_NOT)
            assert set(found.values()) <= {"EACCES", "EPERM", "EFBIG"}, found
            await sent_is_the_ranks_alone(made, plan)
            await server.close()
            page.close()
            store.close()

    in_own_mounts(body, *PYTHON)


async def sent_is_the_ranks_alone(made: Machine, plan: GenerationPlan) -> None:
    """Check that the agent uploads only the rank's own files.

    It must upload neither the agent's promise, to which the rank made a link, nor another user's file.
    """
    folder = made.files().output_dir
    os.link(made.state / "promise", folder / "linked")
    told = await RankOutputs(made.state, made.objects, lambda _source: {}, USER).upload_all(plan, plan.nodes[0])
    assert [sentence.partition(" is not in S3: ")[::2] for _, sentence in told] == [
        ("output leak", "it is a link that leads out of the output folder"),
        ("jobs/job/output/gen=1/rank=0/linked", "[Errno 13] this is not a file of the rank in its output folder"),
    ]
    sent = {told.reference.key for told in made.objects.list(ObjectReference(bucket=BUCKET, key="jobs/job/output/"))}
    assert sent == {"jobs/job/output/gen=1/rank=0/model"}


def test_looks_at_a_rank_and_commands_beside_it_run_on() -> None:
    """The agent reads the stacks of a rank that a template process has forked, and runs a user's commands for it.

    The commands run in the rank's cgroup and as the rank's user. One of them, py-spy, reads the rank's stacks, too.

    A forked rank changes its user without an exec, so the kernel hides the process. The shim makes the process readable
    again.
    """

    async def body(disk: Path, tmpfs: Path) -> None:
        async with machine(disk, tmpfs, is_warm=True) as made:
            is_up = disk / "is-up"
            os.mkfifo(is_up)
            is_up.chmod(0o666)
            plan, entry = made.plan(
                "import os, signal\ndef stand():\n    open(os.environ['IS_UP'], 'w').close()\n    "
                "signal.pause()\nstand()\n"
            )
            supplied = Supplied(environment={"IS_UP": str(is_up)})
            await made.supervisor.start_rank(
                plan, plan.nodes[0], Rank(0), entry, agent_socket=made.slots / "s", supplied=supplied
            )
            rank = await made.rank(is_up)
            assert "stand" in await stacks_of(rank.pid), "as root"
            environment = {
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                **make_home(made.state, RUN, USER),
            }

            async def beside(*argv: str) -> bytes:
                command = RunCommand(
                    run=RUN, generation=Generation(1), command_id="c", rank=Rank(0), argv=argv, timeout_seconds=60.0
                )
                ended = await run_beside(command, rank, environment, USER)
                assert ended.exit_code == 0, ended.stderr
                return ended.stdout

            code = (
                "import os; print(os.getresuid(), os.getgroups(), os.environ['HOME'], "
                "open(f'/proc/{os.getpid()}/cgroup').read())"
            )
            said = (await beside(sys.executable, "-c", code)).decode()
            assert said.startswith(
                f"({USER.uid}, {USER.uid}, {USER.uid}) [{USER.groups[0]}] {made.state / 'homes' / RUN}"
            )
            assert not rank.cgroup or Path(rank.cgroup).name in said
            assert b"stand" in await beside("py-spy", "dump"), "as the rank's user"

    in_own_mounts(body, *PYTHON)


BACKEND = """
import base64, hashlib, os, zipfile

def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    found = {"uid": os.getuid(), "home": os.listdir(os.environ["HOME"]), "variables": sorted(os.environ)}
    for name, path in (("promise", "PROMISE"), ("source", "SOURCE")):
        try:
            open(path, "r+").close()
            found[name] = "open"
        except PermissionError:
            found[name] = "closed"
    open("built", "w").close()
    files = {"built_here.py": f"FOUND = {found!r}\\n", "built_here-1.dist-info/METADATA": "Metadata-Version: 2.1\\nName: built_here\\nVersion: 1\\n",
             "built_here-1.dist-info/WHEEL": "Wheel-Version: 1.0\\nGenerator: test\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"}
    files["built_here-1.dist-info/RECORD"] = "".join(f"{each},,\\n" for each in [*files, "built_here-1.dist-info/RECORD"])
    with zipfile.ZipFile(os.path.join(wheel_directory, "built_here-1-py3-none-any.whl"), "w") as archive:
        for each, text in files.items():
            archive.writestr(each, text)
    return "built_here-1-py3-none-any.whl"
"""


def identities(folder: Path) -> dict[Path, tuple[int, ...]]:
    """Return all attributes of files that a write, a chmod or a replacement would change. Access times are left out."""
    stats = {path: path.stat() for path in folder.rglob("*")}
    return {
        path: (each.st_ino, each.st_mode, each.st_uid, each.st_gid, each.st_size, each.st_mtime_ns, each.st_ctime_ns)
        for path, each in stats.items()
    }


def test_packages_are_built_by_the_ranks_user_and_belong_to_root() -> None:
    async def body(disk: Path, tmpfs: Path) -> None:
        state, source = disk / "state", disk / "state" / "sources"
        create_traversable_dir(state, USER)
        promise = state / "promise"
        promise.write_text("the generation's key")
        promise.chmod(0o600)
        make_wheel(source / "wheels", "everstep_example", "1.0")
        (source / "package").mkdir()
        (source / "package" / "pyproject.toml").write_text(
            '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        )
        requirements = source / "requirements.txt"
        (source / "package" / "backend.py").write_text(
            BACKEND.replace("PROMISE", str(promise)).replace("SOURCE", str(requirements))
        )
        requirements.write_text("--no-index\n--find-links ./wheels\neverstep_example\n./package\n")
        before = identities(source)
        order = InstallationOrder(
            project="a",
            source=source,
            source_sha256="aa",
            requirements=requirements.name,
            environment={"PATH": os.environ["PATH"], "EVERSTEP_JOIN_TOKEN": "hush", "AWS_SECRET_ACCESS_KEY": "hush"},
            output=state / "logs" / "stdout",
            user=USER,
        )
        found = await PackageLayers(state, user=USER, allows_builds=True).install(order)
        assert found.modules == ("built_here", "everstep_example")
        told: dict[str, Any] = {}
        exec(Path(found.path, "built_here.py").read_text(), told)
        assert not [name for name in told["FOUND"].pop("variables") if name.startswith(("EVERSTEP_", "AWS_"))]
        assert told["FOUND"] == {"uid": USER.uid, "home": [], "promise": "closed", "source": "closed"}
        assert identities(source) == before, "it was built in a copy"
        layer = next(path for path in (state / "packages").iterdir() if path.is_dir())
        assert [path.name for path in (state / "packages").iterdir() if path.is_dir()] == [layer.name]
        files = [path.lstat() for path in (layer, *layer.rglob("*")) if not path.is_symlink()]
        assert {(told.st_uid, told.st_gid, told.st_mode & 0o7022) for told in files} == {(0, 0, 0)}
        assert closed_to(USER, [Path(found.path), Path(found.path, "built_here.py")]) == ""

    in_own_mounts(body, *PYTHON)


def test_a_directory_that_ranks_cannot_read_is_refused() -> None:
    async def body(disk: Path, tmpfs: Path) -> None:
        data = disk / "data"
        data.mkdir(mode=0o755)
        channel = InputChannel(name="train", directory=str(data))
        cache = InputCache(disk / "state", user=USER)
        assert cache.fetch(
            MemoryObjectStore(), JobPrincipal(project="a", job="gpt", run=RUN), (channel,), threading.Event()
        ) == {"train": data}
        data.chmod(0o700)
        with pytest.raises(
            InputRefused,
            match=r"channel 'train': .*data: ranks run as ranks-of-a-test \(uid 61234\), who may not read",
        ):
            cache.fetch(
                MemoryObjectStore(), JobPrincipal(project="a", job="gpt", run=RUN), (channel,), threading.Event()
            )

    in_own_mounts(body, *PYTHON)


def test_what_is_closed_to_ranks_is_named() -> None:
    async def body(disk: Path, tmpfs: Path) -> None:
        closed = disk / "closed"
        (closed / "state").mkdir(parents=True)
        closed.chmod(0o700)
        assert closed_to(USER, [disk, Path(__file__)]) == ""
        assert closed_to(USER, [disk, closed / "state"]) == str(closed / "state")

    in_own_mounts(body, *PYTHON)


def test_what_a_job_has_left_for_the_next_is_removed_and_nothing_else() -> None:
    async def body(disk: Path, tmpfs: Path) -> None:
        outside = disk / "outside"
        outside.mkdir()
        (outside / "kept").touch()
        common = disk / "common"
        common.mkdir()
        for name in ("file", "folder", "roots"):
            (common / name).mkdir() if name == "folder" else (common / name).touch()
        (common / "folder" / "deep").touch()
        (common / "link").symlink_to(outside)
        (common / "folder" / "link").symlink_to(outside)
        for name in ("file", "folder", "link"):
            os.chown(common / name, USER.uid, USER.gid, follow_symlinks=False)
        clear(USER, (common, disk / "nowhere"))
        assert [path.name for path in common.iterdir()] == ["roots"]
        assert (outside / "kept").exists()

    in_own_mounts(body, *PYTHON)


LEFT = """
import os, signal, sys, threading
os.setsid()
if os.fork():
    os._exit(0)

def report():
    with open(sys.argv[1], "w") as file:
        file.write(str(os.getpid()))

if sys.argv[2] == "thread":  # the first thread ends, and the process looks as if it waited to be reaped
    import ctypes
    def stay():
        while open("/proc/self/stat").read().rpartition(")")[2].split()[0] != "Z":
            pass
        report()
        signal.pause()
    threading.Thread(target=stay).start()
    ctypes.CDLL(None).pthread_exit(None)
if sys.argv[2] == "fork":  # never has the same pid for long
    report()
    while True:
        if os.fork():
            os._exit(0)
report()
signal.pause()
"""


@pytest.mark.security
@pytest.mark.parametrize("how", ["session", "thread", "fork"])
def test_no_process_of_a_jobs_user_outlives_it(how: str) -> None:
    user = RankUser(61_251, 61_251)

    async def body(disk: Path, tmpfs: Path) -> None:
        supervisor = Supervisor(
            state=disk / "state",
            socket=tmpfs / "node" / "shim.sock",
            address="127.0.0.1",
            is_warm=False,
            cgroup="",
            user=user,
        )
        await supervisor.start()
        told = disk / "told"
        os.mkfifo(told)
        told.chmod(0o666)
        words = [sys.executable, "-I", "-S", "-c", LEFT, str(told), how]
        left = await asyncio.create_subprocess_exec(*words, **user.options)
        assert await asyncio.to_thread(told.read_text)
        await left.wait()
        assert how == "fork" or _processes_of(user)
        left_memory = Path("/dev/shm") / f"everstep-test-{os.getpid()}"
        left_memory.touch()
        os.chown(left_memory, user.uid, user.gid)
        await supervisor.prove_gone(RUN)
        assert not left_memory.exists()
        pids = [await asyncio.to_thread(_processes_of, user) for _ in range(20)]
        assert not any(pids)
        await supervisor.shut_down()

    in_own_mounts(body, *PYTHON)


@pytest.mark.security
def test_a_process_of_one_job_reads_nothing_of_anothers(tmp_path: Path) -> None:
    """A process left by job A cannot read secrets in the environment of job B's rank."""
    users = RankUser(61_252, 61_252, uid_count=2)
    one, other = (user_of(RunId(name), tmp_path, users) for name in ("a", "b"))
    assert one is not None
    assert other is not None
    secret = {"DB_PASSWORD": "of-team-b"}
    rank = subprocess.Popen(["/bin/cat"], env=secret, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **other.options)
    try:
        assert rank.stdin is not None
        assert rank.stdout is not None
        rank.stdin.write(b"x")
        rank.stdin.flush()
        rank.stdout.read(1)  # wait for output, which shows that the process runs with its new environment
        for user, found in ((other, b"DB_PASSWORD=of-team-b\0"), (one, b"")):
            done = subprocess.run(
                ["/bin/cat", f"/proc/{rank.pid}/environ"], capture_output=True, check=False, **user.options
            )
            assert done.stdout == found
    finally:
        rank.kill()
        rank.communicate()
