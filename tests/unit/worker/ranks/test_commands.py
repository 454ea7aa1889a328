"""Tests programs that a user runs beside a rank, with real processes.

The tests cover the environment of a program, and that none of its processes remains after its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from everstep.protocol.agent_messages import MAX_COMMAND_OUTPUT_BYTES, CommandEnded, RunCommand
from everstep.protocol.ids import Generation, Rank, RunId
from worker.ranks import commands as rank_commands
from worker.ranks.commands import RankCommands, words_for
from worker.ranks.shim import cgroups
from worker.ranks.shim.messages import RankRecord

RUN = RunId("r" * 32)


def command(*argv: str, name: str = "c", timeout_seconds: float = 30.0, stdin: bytes = b"") -> RunCommand:
    return RunCommand(
        run=RUN,
        generation=Generation(2),
        command_id=name,
        rank=Rank(5),
        argv=argv,
        timeout_seconds=timeout_seconds,
        stdin=stdin,
    )


def record(**changes: object) -> RankRecord:
    fields: dict = {
        "pid": 4711,
        "start_ticks": 1,
        "started_at_seconds": 0.0,
        "is_warm": False,
        "stdout_path": "",
        "stderr_path": "",
        **changes,
    }
    return RankRecord(run=RUN, generation=Generation(2), rank=Rank(5), **fields)


def python(code: str) -> tuple[str, ...]:
    return sys.executable, "-c", code


class Desk:
    """Sends commands to a node, and records their answers in order."""

    def __init__(self) -> None:
        self.answers: asyncio.Queue[CommandEnded] = asyncio.Queue()
        self.commands = RankCommands(lambda _: {"PATH": os.environ["PATH"]}, self.answers.put_nowait)

    async def run(self, asked: RunCommand, rank: RankRecord | None = None) -> CommandEnded:
        self.commands.take(asked, rank or record())
        return await self.answers.get()

    async def run_until_it_writes(self, pipe: Path, asked: RunCommand) -> CommandEnded:
        """Run a command, and let its time limit pass once the command has written to the named pipe `pipe`."""
        os.mkfifo(pipe)
        self.commands.take(asked, record())
        await asyncio.to_thread(pipe.read_bytes)
        advance_loop_time(asked.timeout_seconds)
        return await self.answers.get()


def advance_loop_time(seconds: float) -> None:
    """Move the clock of the running event loop forward."""
    loop = asyncio.get_running_loop()
    now = loop.time
    loop.time = lambda: now() + seconds  # type: ignore[method-assign]


@pytest.fixture
async def desk():
    made = Desk()
    yield made
    await made.commands.close()
    # Wait until asyncio's threads have ended. Otherwise they would call a closed loop during another test.
    for thread in threading.enumerate():
        if thread.name.startswith("asyncio-waitpid"):
            thread.join(timeout=10)
            assert not thread.is_alive(), "a process outlives its test"


async def test_it_sees_the_rank_and_nothing_of_the_agent(desk, monkeypatch) -> None:
    monkeypatch.setenv("EVERSTEP_JOIN_TOKEN", "hush")
    code = "import os, sys; print(sorted(os.environ)); print(sys.argv, file=sys.stderr); sys.exit(7)"
    ended = await desk.run(command(*python(code), "a; b", "$HOME"))
    assert ended.exit_code == 7
    assert {"EVERSTEP_RANK_PID", "RANK"} <= set(eval(ended.stdout)) <= {"EVERSTEP_RANK_PID", "RANK", "PATH", "LC_CTYPE"}
    assert ended.stderr == b"['-c', 'a; b', '$HOME']\n", "words are words: no shell reads them"
    ended = await desk.run(command("sh", "-c", "echo $RANK $EVERSTEP_RANK_PID", name="d"))
    assert ended.stdout == b"5 4711\n"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("py-spy", "dump"), ["py-spy", "dump", "--pid", "9"]),
        (("py-spy", "dump", "--pid", "1"), ["py-spy", "dump", "--pid", "1"]),
        (("py-spy", "dump", "-p", "{pid}"), ["py-spy", "dump", "-p", "9"]),
        (("py-spy", "record", "--", "python"), ["py-spy", "record", "--", "python"]),
        (("py-spy",), ["py-spy"]),
        (("cat", "/proc/{pid}/status"), ["cat", "/proc/9/status"]),
    ],
)
def test_words_name_the_ranks_process(argv, words) -> None:
    assert words_for(argv, 9) == words


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (("no-such-program",), 127, b"no-such-program: No such file or directory\n"),
        (("/etc/passwd",), 127, b"/etc/passwd: Permission denied\n"),
        (("sh", "-c", "kill -9 $$"), 137, b""),
    ],
)
async def test_it_ends_as_a_shell_would_say_it(desk, argv, code, words) -> None:
    ended = await desk.run(command(*argv))
    assert (ended.exit_code, ended.stderr) == (code, words)


async def test_it_reads_what_it_was_given_and_then_the_end(desk) -> None:
    given = os.urandom(200_000)
    ended = await desk.run(
        command(*python("import sys; sys.stdout.buffer.write(sys.stdin.buffer.read()[::-1])"), stdin=given)
    )
    assert (ended.exit_code, ended.stdout) == (0, given[::-1])
    ended = await desk.run(command("cat", name="d"))
    assert (ended.exit_code, ended.stdout) == (0, b""), "nothing was given: there is nothing to wait for"


@pytest.mark.parametrize("argv", [("true",), ("sh", "-c", "exec <&-; echo done")])
async def test_one_that_does_not_read_what_it_was_given_ends_all_the_same(desk, argv) -> None:
    ended = await desk.run(command(*argv, stdin=bytes(1_000_000)))
    assert (ended.exit_code, ended.is_timed_out) == (0, False)


async def test_one_that_neither_reads_nor_ends_is_ended_in_time(desk) -> None:
    ended = await desk.run(command("sleep", "1000", stdin=bytes(1_000_000), timeout_seconds=1.0))
    assert (ended.is_timed_out, ended.exit_code) == (True, None)


async def test_what_is_too_much_is_cut_and_the_program_still_ends(desk) -> None:
    ended = await desk.run(command(*python(f"print('x' * {10 * MAX_COMMAND_OUTPUT_BYTES})")))
    assert (ended.exit_code, ended.is_cut, len(ended.stdout)) == (0, True, MAX_COMMAND_OUTPUT_BYTES)
    ended = await desk.run(command(*python(f"print('x' * {MAX_COMMAND_OUTPUT_BYTES - 1})"), name="d"))
    assert (ended.is_cut, len(ended.stdout)) == (False, MAX_COMMAND_OUTPUT_BYTES)


async def test_what_takes_too_long_is_ended_with_what_it_has_started(desk, tmp_path) -> None:
    pipe = tmp_path / "pipe"
    ended = await desk.run_until_it_writes(pipe, command("sh", "-c", f"sleep 1000 & echo $!; echo > {pipe}; wait"))
    assert (ended.is_timed_out, ended.exit_code) == (True, None)
    await gone(int(ended.stdout))


@pytest.mark.parametrize(
    "code",
    [
        "setsid sleep 1000 & echo $!; echo > PIPE; wait",
        "setsid sh -c 'sleep 1000 & echo $!' & sleep 0; wait; echo > PIPE; sleep 1000",
    ],
)
async def test_what_has_left_its_session_holds_up_nobody(desk, tmp_path, code) -> None:
    pipe = tmp_path / "pipe"
    ended = await desk.run_until_it_writes(pipe, command("sh", "-c", code.replace("PIPE", str(pipe))))
    assert (ended.is_timed_out, ended.exit_code) == (True, None)
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(ended.stdout), signal.SIGKILL)
    await gone(int(ended.stdout))


def not_permitted(*_: object) -> None:
    raise PermissionError(errno.EPERM, "Operation not permitted")


async def test_another_users_process_in_its_group_changes_no_answer(desk, monkeypatch) -> None:
    """A command's process group contains a process of another user, such as `sudo`, and the agent is not root.

    The command's answer does not change. The agent searches for the processes in a thread, because the search would
    block its event loop for milliseconds.
    """
    real, threads = rank_commands.kill_tree, []

    def kill(root: int) -> object:
        threads.append(threading.current_thread())
        return real(root)

    monkeypatch.setattr(os, "killpg", not_permitted)
    monkeypatch.setattr(rank_commands, "kill_tree", kill)
    ended = await desk.run(command("sleep", "1000", timeout_seconds=1.0))
    assert (ended.is_timed_out, ended.exit_code, ended.refusal) == (True, None, "")
    assert threads
    assert threading.main_thread() not in threads


async def test_one_that_cannot_be_ended_is_answered_all_the_same(desk, tmp_path, monkeypatch) -> None:
    real, started = asyncio.create_subprocess_exec, []

    async def noted(*words: str, **options: object) -> asyncio.subprocess.Process:
        started.append(await real(*words, **options))
        return started[-1]

    loop, pipe = asyncio.get_running_loop(), tmp_path / "pipe"

    def not_permitted_while_time_passes(_: subprocess.Popen[bytes]) -> None:
        # this runs after the caller has begun to wait for the end of the process
        loop.call_soon(advance_loop_time, rank_commands.END_SECONDS)
        raise PermissionError

    monkeypatch.setattr(asyncio, "create_subprocess_exec", noted)
    with monkeypatch.context() as theirs:
        theirs.setattr(os, "killpg", not_permitted)
        # without privileges, `kill_tree` skips processes of other users
        theirs.setattr(rank_commands, "kill_tree", lambda _: frozenset())
        theirs.setattr(subprocess.Popen, "kill", not_permitted_while_time_passes)
        code = f"echo $$; echo > {pipe}; exec sleep 1000"
        ended = await desk.run_until_it_writes(pipe, command("sh", "-c", code))
    assert (ended.is_timed_out, ended.exit_code, ended.refusal) == (True, None, "")
    os.kill(int(ended.stdout), signal.SIGKILL)
    await gone(int(ended.stdout))
    # wait until the process has ended, because asyncio would otherwise call a closed loop during another test
    await started[0].wait()


async def test_no_code_in_the_ranks_home_runs_before_the_program_is_theirs(tmp_path, monkeypatch) -> None:
    """No code in the rank's home runs before the program.

    The test uses the machine's Python, which by default runs code of the user's site packages at its start. The Python
    of a virtual environment does not.
    """
    own, told = tmp_path / f".local/lib/python3.{sys.version_info.minor}/site-packages", tmp_path / "told"
    own.mkdir(parents=True)
    (own / "theirs.pth").write_text(f"import pathlib; pathlib.Path({str(told)!r}).touch()\n")
    monkeypatch.setattr(sys, "executable", sys._base_executable)
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = await rank_commands.run_beside(command("true"), record(), environment)
    assert (ended.exit_code, ended.stderr) == (0, b"")
    assert not told.exists()


async def test_it_ends_with_its_generation_and_whoever_waits_is_told(desk, tmp_path) -> None:
    fifo = tmp_path / "begun"
    os.mkfifo(fifo)
    desk.commands.take(command("sh", "-c", f"echo $$ > {fifo}; sleep 1000"), record())
    pid = int(await asyncio.to_thread(fifo.read_text))
    await desk.commands.close()
    assert (await desk.answers.get()).refusal == "the generation ended"
    await gone(pid)


async def test_one_that_is_given_up_while_it_starts_leaves_nothing(desk, tmp_path, monkeypatch) -> None:
    fifo, go_on, real = tmp_path / "begun", asyncio.Event(), asyncio.create_subprocess_exec
    os.mkfifo(fifo)

    async def slow(*words: str, **options: object) -> object:
        process = await real(*words, **options)
        await go_on.wait()
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", slow)
    desk.commands.take(command("sh", "-c", f"sleep 1000 & echo $! > {fifo}; wait"), record())
    pid = int(await asyncio.to_thread(fifo.read_text))
    closing = asyncio.ensure_future(desk.commands.close())
    await asyncio.sleep(0)
    go_on.set()
    await closing
    assert (await desk.answers.get()).refusal == "the generation ended"
    await gone(pid)


async def test_one_that_is_ended_before_it_began_is_answered_too(desk) -> None:
    desk.commands.take(command("true"), record())
    await desk.commands.close()
    assert (await desk.answers.get()).refusal == "the generation ended"
    assert desk.answers.empty()


async def gone(pid: int) -> None:
    """Wait until a process has disappeared or is a zombie."""
    while True:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (
            FileNotFoundError,
            ProcessLookupError,
        ):
            # the process may end before this function has read its file
            return
        if state == "Z":
            return
        await asyncio.sleep(0.01)


async def test_a_command_is_run_once_and_answered_as_often_as_it_is_asked_for(desk, tmp_path) -> None:
    count = tmp_path / "count"
    asked = command("sh", "-c", f"echo x >> {count}")
    desk.commands.take(asked, record())
    desk.commands.take(asked, record())  # send the same request again while the command runs
    first = await desk.answers.get()
    assert await desk.run(asked, record()) == first
    assert desk.answers.empty()
    assert count.read_text() == "x\n"


async def test_where_the_rank_does_not_live_nothing_is_run(desk) -> None:
    desk.commands.take(command("true"), None)
    assert (await desk.answers.get()).refusal == "rank 5 of generation 2 does not run"


async def test_a_node_runs_few_at_once(desk, tmp_path) -> None:
    fifos = [tmp_path / f"go-{number}" for number in range(rank_commands.MAX_AT_ONCE)]
    for number, fifo in enumerate(fifos):
        os.mkfifo(fifo)
        desk.commands.take(command("cat", str(fifo), name=f"cat-{number}"), record())
    desk.commands.take(command("true", name="d"), record())
    assert (await desk.answers.get()).refusal == f"{len(fifos)} commands run on this node already"
    for fifo in fifos:
        await asyncio.to_thread(fifo.write_text, "")
        assert (await desk.answers.get()).exit_code == 0


async def test_it_is_in_the_ranks_cgroup(desk) -> None:
    found, why = cgroups.find(f"everstep-test-{os.getpid()}")
    if found is None:
        pytest.fail(f"this test needs cgroups: {why}") if os.geteuid() == 0 and "cannot be written" not in why else None
        assert why
        return
    folder = found.folder / "gen"
    folder.mkdir()
    try:
        ended = await desk.run(command("cat", "/proc/self/cgroup"), record(cgroup=str(folder)))
        assert f"{folder.parent.name}/gen" in ended.stdout.decode()
    finally:
        folder.rmdir()
        found.close()
