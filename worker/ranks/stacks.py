"""Samples the stacks of this node's ranks: Python stacks from py-spy, CPU time and state from /proc.

py-spy reads a rank without stopping it (`--nonblocking`), the only mode that can read a stopped process. Invariant:
this module never signals a rank and never blocks the agent's loop. A rank that cannot be read is reported with the
reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import sysconfig
from collections.abc import Callable, Collection
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import msgspec

from everstep.protocol.agent_messages import RankStacks
from everstep.protocol.errors import UNDECODABLE
from everstep.protocol.ids import Rank
from everstep.protocol.limits import cut
from worker.core.stacks import MAIN_THREAD, Look, StackFrame, ThreadStack, compare, describe
from worker.ranks.shim import processes
from worker.ranks.shim.messages import RankRecord
from worker.tasks import end

log = logging.getLogger(__name__)
STACK_SAMPLE_SECONDS = 5.0
"""Maximum seconds for the sample of one rank: 40 ms (measured), longer if the rank's memory is in swap."""
SHOWN_SECONDS = 5.0
"""Seconds after the last request for which the agent's reports contain a sample."""
_AT_ONCE = 4
_ATTEMPTS = 3
"""Attempts per sample. A read fails if the running rank changes its memory while py-spy reads it."""
_UNBORN = "no process of it has been started yet: what ranks import is still being imported or compiled"
_MAX_BYTES = 4 * 1024 * 1024


class _Frame(msgspec.Struct):
    name: str
    filename: str
    short_filename: str | None = None
    line: int = 0


class _Thread(msgspec.Struct):
    pid: int
    os_thread_id: int | None = None
    thread_name: str | None = None
    frames: list[_Frame] = []

    @property
    def name(self) -> str:
        return MAIN_THREAD if self.os_thread_id == self.pid else self.thread_name or ""


_threads = msgspec.json.Decoder(list[_Thread])


class Unreadable(Exception):
    """Raised if the stacks of a process cannot be read. The text contains the reason."""


async def stacks_of(pid: int, *, limit_seconds: float = STACK_SAMPLE_SECONDS) -> str:
    """Return the Python stacks of a process as text. Raises Unreadable if py-spy is missing, fails, or is late."""
    # With Yama, the kernel may require CAP_SYS_PTRACE.
    program = find_py_spy()
    if program is None:
        raise Unreadable("py-spy is not installed")
    try:
        async with asyncio.timeout(limit_seconds):
            for attempt in range(_ATTEMPTS):
                try:
                    return await _look(program, pid)
                except Unreadable:
                    if attempt == _ATTEMPTS - 1:
                        raise
    except TimeoutError:
        raise Unreadable(f"py-spy did not finish within {limit_seconds:g} s") from None
    raise AssertionError("unreachable")


async def _look(program: str, pid: int) -> str:
    command = (program, "dump", "--json", "--nonblocking", "--pid", str(pid))
    spy = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert spy.stdout is not None
    assert spy.stderr is not None
    try:
        output, errors = await asyncio.gather(_whole(spy.stdout), _whole(spy.stderr))
        await spy.wait()
    finally:
        if spy.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                spy.kill()
            # `wait` also waits for the pipes, so close the transport, for which asyncio has no public method.
            spy._transport.close()  # type: ignore[attr-defined]
            await spy.wait()
    if spy.returncode != 0:
        raise Unreadable(_reason(errors.decode(errors="replace")))
    try:
        threads = _threads.decode(output)
    except UNDECODABLE as error:
        raise Unreadable(f"the output of py-spy is invalid: {error}") from error
    return describe(
        [
            ThreadStack(
                thread.name,
                tuple(
                    StackFrame(frame.name, frame.short_filename or frame.filename, frame.line)
                    for frame in thread.frames
                ),
            )
            for thread in threads
        ]
    )


async def _whole(stream: asyncio.StreamReader) -> bytes:
    """Read a stream to its end. Raise Unreadable after `_MAX_BYTES`: the rank decides how much py-spy writes."""
    found = bytearray()
    while chunk := await stream.read(1 << 16):
        found += chunk
        if len(found) > _MAX_BYTES:
            raise Unreadable(f"py-spy wrote more than {_MAX_BYTES:,} bytes")
    return bytes(found)


def _reason(errors: str) -> str:
    lines = [line.strip() for line in errors.partition("Stack backtrace")[0].splitlines() if line.strip()]
    return " ".join(lines)[:500] or "py-spy failed without a word"


def find_py_spy() -> str | None:
    """Return the path of the program py-spy, or None if it is not installed."""
    beside = Path(sysconfig.get_path("scripts"), "py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


@dataclass(eq=False, repr=False)
class StackWatch:
    """Samples the stacks of one generation's ranks. `unborn` returns its ranks here that have no process yet."""

    living: Callable[[], Collection[RankRecord]]
    _: KW_ONLY
    on_change: Callable[[], None]
    monotonic: Callable[[], float]
    gpu_percent: Callable[[Rank], float | None] = lambda _: None
    unborn: Callable[[], Collection[Rank]] = tuple

    def __post_init__(self) -> None:
        self._before: dict[int, Look] = {}
        """By pid: the first sample that showed the current stacks."""
        self._number = 0
        self._asked_at = float("-inf")
        self._taken: tuple[RankStacks, ...] = ()
        self._looking: asyncio.Task[None] | None = None

    def ask(self, number: int) -> None:
        """Start a sample, unless request `number` already started one or a sample is running."""
        self._asked_at = self.monotonic()
        if number > self._number and (self._looking is None or self._looking.done()):
            self._number = number
            self._looking = asyncio.create_task(self._take(number), name=f"look {number} at what ranks do")

    def shown(self) -> tuple[RankStacks, ...]:
        """Return the last complete sample; empty if it was not requested for `SHOWN_SECONDS`."""
        return self._taken if self.monotonic() - self._asked_at <= SHOWN_SECONDS else ()

    async def close(self) -> None:
        """Cancel the sample that is in progress, if any."""
        await end(self._looking)

    async def _take(self, number: int) -> None:
        gate = asyncio.Semaphore(_AT_ONCE)
        unborn = [
            RankStacks(rank=rank, number=number, text="", same_seconds=0.0, cpu_seconds=0.0, error=_UNBORN)
            for rank in self.unborn()
        ]
        taken = await asyncio.gather(*(self._one(record, number, gate) for record in self.living()))
        self._taken = tuple(sorted((*unborn, *taken), key=lambda each: each.rank))
        log.info("stack sample %d of the ranks: %s", number, "; ".join(_in_brief(each) for each in self._taken))
        self.on_change()

    async def _one(self, record: RankRecord, number: int, gate: asyncio.Semaphore) -> RankStacks:
        async with gate:
            text, error = "", ""
            try:
                text = await stacks_of(record.pid)
            except Unreadable as unreadable:
                error = cut(str(unreadable))
            used = await asyncio.to_thread(processes.tree_usage, record.pid)
        self._before[record.pid], same, cpu = compare(
            self._before.get(record.pid), Look(text, self.monotonic(), used.cpu_seconds)
        )
        return RankStacks(
            rank=record.rank,
            number=number,
            text=text,
            same_seconds=same,
            cpu_seconds=cpu,
            is_stopped=used.is_stopped,
            gpu_percent=self.gpu_percent(record.rank),
            error=error,
        )


def _in_brief(look: RankStacks) -> str:
    where = look.error or (look.text.splitlines()[1:2] or ["?"])[0].strip()
    return f"rank {look.rank} {'stopped ' if look.is_stopped else ''}at {where}, the same for {look.same_seconds:.0f} s"
