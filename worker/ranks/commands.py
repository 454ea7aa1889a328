"""Runs users' commands next to a rank of this node, without a shell and with limits on time and output.

    agent ──▶ python -P -s -m worker.ranks.contained_program CGROUP USER PROGRAM ARGUMENT …
                │ runs in the rank's cgroup and dies with the agent
                │ stdin: the bytes of the request; stdout and stderr: the first 256 KiB of each go to the user
                └ at its end, all processes that the program started are killed, in any session

Invariant: no command runs twice. No process that a command started outlives the command, unless the agent lacks the
right to kill it.
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
from everstep.protocol.limits import cut
from worker.node.rank_user import RankUser
from worker.ranks import contained_program as beside
from worker.ranks.shim.messages import RankRecord
from worker.ranks.shim.processes import kill_tree
from worker.tasks import end

log = logging.getLogger(__name__)

MAX_AT_ONCE: Final = 4
MAX_KEPT: Final = 8
"""Number of finished commands whose results are kept for repeated requests."""
END_SECONDS: Final = 5.0
_ENDED: Final = "the generation ended"
_READ_BYTES: Final = 64 * 1024


class RankCommands:
    """Runs users' commands on this node, each in the cgroup and as the user of a rank."""

    def __init__(
        self,
        environment: Callable[[RunId], Mapping[str, str]],
        answer: Callable[[CommandEnded], None],
        user_of: Callable[[RunId], RankUser | None] = lambda _: None,
    ) -> None:
        """Create the object. `environment` returns a run's inherited variables, without tokens."""
        self._environment = environment
        self._user_of = user_of
        self._answer = answer
        self._running: dict[str, asyncio.Task[None]] = {}
        self._answers: OrderedDict[str, CommandEnded] = OrderedDict()

    def take(self, command: RunCommand, rank: RankRecord | None) -> None:
        """Start a command, or send the result of a finished one again. `rank` is None if it does not run here."""
        # A client may repeat its request with the same id, for example after a timeout.
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
        log.info("runs a command on the node of rank %d: %s", rank.rank, shlex.join(command.argv))
        task = asyncio.create_task(self._run(command, rank), name=f"command for rank {rank.rank}")
        self._running[command.command_id] = task

    async def close(self) -> None:
        """Kill all commands on this node, and report to each user that the command was ended."""
        await end(*self._running.values())
        # A task that was cancelled before it began to run has sent no answer for its command.
        for command_id in list(self._running):
            self._done(CommandEnded(command_id=command_id, refusal=_ENDED))

    async def _run(self, command: RunCommand, rank: RankRecord) -> None:
        answer = CommandEnded(command_id=command.command_id, refusal=_ENDED)
        try:
            answer = await run_beside(command, rank, self._environment(command.run), self._user_of(command.run))
        except OSError as error:
            answer = CommandEnded(command_id=command.command_id, refusal=cut(f"it could not be started: {error}"))
        finally:
            self._done(answer)

    def _done(self, answer: CommandEnded) -> None:
        del self._running[answer.command_id]
        self._answers[answer.command_id] = answer
        while len(self._answers) > MAX_KEPT:
            self._answers.popitem(last=False)
        self._answer(answer)


def words_for(argv: Sequence[str], pid: int) -> list[str]:
    """Return the command with each `{pid}` replaced by the rank's pid. py-spy without `--pid` receives it."""
    words = [word.replace("{pid}", str(pid)) for word in argv]
    is_about_another = any(word in ("-p", "--pid", "--") or word.startswith("--pid=") for word in words)
    return [*words, "--pid", str(pid)] if words[0] == "py-spy" and len(words) > 1 and not is_about_another else words


async def run_beside(
    command: RunCommand, rank: RankRecord, environment: Mapping[str, str], user: RankUser | None = None
) -> CommandEnded:
    """Run a command next to a rank; exit code None after a timeout. Raises OSError without a process."""
    own = {**environment, "RANK": str(rank.rank), "EVERSTEP_RANK_PID": str(rank.pid)}
    words = (rank.cgroup or beside.NONE, beside.written(user), *words_for(command.argv, rank.pid))
    process = await _started(
        [sys.executable, "-P", "-s", "-m", "worker.ranks.contained_program", *words],
        own,
        stdin=PIPE if command.stdin else DEVNULL,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    outputs: list[bytearray] = [bytearray(), bytearray()]
    is_timed_out = False
    try:
        async with asyncio.timeout(command.timeout_seconds):
            await asyncio.gather(
                _feed(process, command.stdin),
                _read(process.stdout, outputs[0]),
                _read(process.stderr, outputs[1]),
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
        stdout=bytes(outputs[0][:MAX_COMMAND_OUTPUT_BYTES]),
        stderr=bytes(outputs[1][:MAX_COMMAND_OUTPUT_BYTES]),
        is_cut=any(len(stream) > MAX_COMMAND_OUTPUT_BYTES for stream in outputs),
        is_timed_out=is_timed_out,
    )


async def _started(words: Sequence[str], environment: Mapping[str, str], stdin: int) -> Process:
    """Start the process of a command. Raises OSError if it cannot start."""
    options = {"stdin": stdin, "stdout": PIPE, "stderr": PIPE, "start_new_session": True}
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(*words, env=environment, **options)  # type: ignore[arg-type]
    )
    try:
        # Without the shield, asyncio would kill only the program on a cancellation, and then wait for its descendants.
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        with contextlib.suppress(OSError):
            await _end(await starting)
        raise


async def _feed(process: Process, data: bytes) -> None:
    if process.stdin is None:
        return
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        process.stdin.write(data)
        await process.stdin.drain()
    process.stdin.close()


async def _read(stream: asyncio.StreamReader, into: bytearray) -> None:
    while chunk := await stream.read(_READ_BYTES):
        # One byte beyond the limit shows the caller that the stream is longer.
        into += chunk[: MAX_COMMAND_OUTPUT_BYTES + 1 - len(into)]


async def _end(process: Process) -> None:
    """Kill a command and all its descendants, then close its pipes."""
    if process.returncode is None:
        await asyncio.to_thread(kill_tree, process.pid)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    # An agent without root rights cannot kill a process of another user (`sudo`), which could hold the pipes open.
    # `wait` also waits for the process's pipes, so close the transport, for which asyncio has no public method.
    with contextlib.suppress(PermissionError):
        process._transport.close()  # type: ignore[attr-defined]
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(END_SECONDS):
            await process.wait()
