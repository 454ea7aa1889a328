"""Programs that people run beside a rank of this node: without a shell, bounded in time and output.

    agent ──▶ python -P -s -m worker.ranks.contained_program CGROUP USER  PROGRAM ARGUMENT …   in the rank's cgroup, and gone with the agent
                                                      │ stdin: what was given; stdout, stderr: the first 256 KiB
                                                      └ ended with all that the program has started, in whichever session

Invariant: a command that was run is not run again. Nothing that a command has started outlives the command, where the
agent may end it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from everstep.protocol.agent_messages import MAX_COMMAND_OUTPUT_BYTES, CommandEnded, RunCommand
from everstep.protocol.ids import RunId
from worker.node.rank_user import RankUser
from worker.ranks import contained_program as beside
from worker.ranks.shim.messages import RankRecord
from worker.ranks.shim.processes import kill_tree
from worker.tasks import end

log = logging.getLogger(__name__)

MAX_AT_ONCE: Final = 4
MAX_KEPT: Final = 8
"""Answers that are kept for who asks again."""
END_SECONDS: Final = 5.0
"""For a command that was killed to be gone."""
_ENDED: Final = "the generation ended"
_READ_BYTES: Final = 64 * 1024


class RankCommands:
    """One per agent, which closes it with every generation."""

    def __init__(
        self,
        environment: Callable[[RunId], Mapping[str, str]],
        answer: Callable[[CommandEnded], None],
        user_of: Callable[[RunId], RankUser | None] = lambda _: None,
    ) -> None:
        """Nothing runs yet.

        Args:
            environment: what ranks of a run inherit from the node; no token is in it.
            answer: takes what came of a command.
            user_of: returns the user of a run's ranks; None: this process's.
        """
        self._environment = environment
        self._user_of = user_of
        self._answer = answer
        self._running: dict[str, asyncio.Task[None]] = {}
        self._answers: OrderedDict[str, CommandEnded] = OrderedDict()

    def take(self, command: RunCommand, rank: RankRecord | None) -> None:
        """Run a command, unless it runs already or was run: then it is answered again.

        Args:
            command: what.
            rank: the rank that it is about; None where it does not live here.
        """
        if command.command_id in self._running:
            return
        if (known := self._answers.get(command.command_id)) is not None:
            self._answer(known)
            return
        if rank is None:
            self._answer(
                CommandEnded(
                    command_id=command.command_id,
                    refusal=f"rank {command.rank} of generation {command.generation} does not run",
                )
            )
            return
        if len(self._running) >= MAX_AT_ONCE:
            self._answer(
                CommandEnded(command_id=command.command_id, refusal=f"{MAX_AT_ONCE} commands run on this node already")
            )
            return
        log.info("beside rank %d: %s", rank.rank, shlex.join(command.argv))
        task = asyncio.create_task(self._run(command, rank), name=f"command beside rank {rank.rank}")
        self._running[command.command_id] = task

    async def close(self) -> None:
        """End what runs; whoever waits is told."""
        await end(*self._running.values())
        for command_id in list(self._running):  # it was ended before it began
            self._done(CommandEnded(command_id=command_id, refusal=_ENDED))

    async def _run(self, command: RunCommand, rank: RankRecord) -> None:
        answer = CommandEnded(command_id=command.command_id, refusal=_ENDED)
        try:
            answer = await run_beside(command, rank, self._environment(command.run), self._user_of(command.run))
        except OSError as error:
            answer = CommandEnded(command_id=command.command_id, refusal=f"it could not be started: {error}")
        finally:
            self._done(answer)

    def _done(self, answer: CommandEnded) -> None:
        del self._running[answer.command_id]
        self._answers[answer.command_id] = answer
        while len(self._answers) > MAX_KEPT:
            self._answers.popitem(last=False)
        self._answer(answer)


def words_for(argv: Sequence[str], pid: int) -> list[str]:
    """Return a command's words for a rank: `{pid}` is its process, and py-spy without a process is about the rank."""
    words = [word.replace("{pid}", str(pid)) for word in argv]
    is_about_another = any(word in ("-p", "--pid", "--") or word.startswith("--pid=") for word in words)
    return [*words, "--pid", str(pid)] if words[0] == "py-spy" and len(words) > 1 and not is_about_another else words


async def run_beside(
    command: RunCommand, rank: RankRecord, environment: Mapping[str, str], user: RankUser | None = None
) -> CommandEnded:
    """Run a command beside a rank.

    Args:
        command: what.
        rank: the rank that it is about.
        environment: of the node; the rank's number and process are added.
        user: that it runs as; None: this process's.

    Returns:
        What it said, and how it ended.

    Raises:
        OSError: no process can be made.
    """
    own = {**environment, "RANK": str(rank.rank), "EVERSTEP_RANK_PID": str(rank.pid)}
    words = (rank.cgroup or beside.NONE, beside.written(user), *words_for(command.argv, rank.pid))
    process = await _started(
        [sys.executable, "-P", "-s", "-m", "worker.ranks.contained_program", *words],
        own,
        stdin=PIPE if command.stdin else DEVNULL,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    said: list[bytearray] = [bytearray(), bytearray()]
    is_timed_out = False
    try:
        async with asyncio.timeout(command.timeout_seconds):
            await asyncio.gather(
                _feed(process, command.stdin),
                _read(process.stdout, said[0]),
                _read(process.stderr, said[1]),
                process.wait(),
            )
    except TimeoutError:
        is_timed_out = True
    finally:
        await _end(process)
    code = process.returncode
    return CommandEnded(
        command_id=command.command_id,
        exit_code=None if is_timed_out or code is None else code if code >= 0 else 128 - code,
        stdout=bytes(said[0][:MAX_COMMAND_OUTPUT_BYTES]),
        stderr=bytes(said[1][:MAX_COMMAND_OUTPUT_BYTES]),
        is_cut=any(len(stream) > MAX_COMMAND_OUTPUT_BYTES for stream in said),
        is_timed_out=is_timed_out,
    )


async def _started(words: Sequence[str], environment: Mapping[str, str], stdin: int) -> Process:
    """Start a program in a process group of its own; one that is given up while it starts is ended with all that it has started by then."""
    options = {"stdin": stdin, "stdout": PIPE, "stderr": PIPE, "start_new_session": True}
    starting = asyncio.ensure_future(asyncio.create_subprocess_exec(*words, env=environment, **options))  # type: ignore[arg-type]
    try:
        return await asyncio.shield(starting)  # asyncio would end the program alone, and wait for its children
    except asyncio.CancelledError:
        with contextlib.suppress(OSError):
            await _end(await starting)
        raise


async def _feed(process: Process, data: bytes) -> None:
    """Give a command its stdin, and then the end of it; one that does not read it is none the worse."""
    if process.stdin is None:
        return
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        process.stdin.write(data)
        await process.stdin.drain()
    process.stdin.close()


async def _read(stream: asyncio.StreamReader, into: bytearray) -> None:
    """Read a stream to its end; of what is too much, one byte is kept, to tell that there was more."""
    while chunk := await stream.read(_READ_BYTES):
        into += chunk[: MAX_COMMAND_OUTPUT_BYTES + 1 - len(into)]


async def _end(process: Process) -> None:
    """End a command with all below it. What has got away from it may hold its pipes for ever: they are closed here.

    Where the agent is not root, what is another user's by now (`sudo`) cannot be ended, and is not waited for.
    """
    if process.returncode is None:
        await asyncio.to_thread(kill_tree, process.pid)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(PermissionError):  # it kills once more
        process._transport.close()  # type: ignore[attr-defined]  # `wait` waits for the pipes, too, and there is no other way to them
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(END_SECONDS):
            await process.wait()
