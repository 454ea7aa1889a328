"""The agent's interface to its ranks through the shim, the parent process of all ranks on the node.

A new agent process adopts the ranks of an earlier one. A rank that could not be started counts as exited. If the shim
dies, the supervisor kills its ranks, records their ends, and starts a new shim. Invariant: a rank counts as ended only
when its process has been reaped, or when no process with its pid and start ticks exists.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import xxhash

from everstep.protocol import codec
from everstep.protocol.agent_messages import ExitClass, MemoryEnd, RankExit
from everstep.protocol.codec import Message
from everstep.protocol.errors import ProtocolError
from everstep.protocol.ids import Generation, Rank, RunId, Step
from everstep.protocol.limits import MAX_LONG_TEXT_CHARACTERS, cut
from everstep.protocol.plan import GenerationPlan, PlanNode
from worker.core.memory_ends import (
    UNMEASURED,
    KillCounts,
    MemoryUse,
    end_of_killed,
    end_of_raised,
    logged_kill,
    lost_loaders,
)
from worker.core.task_limit import refused_task
from worker.errors import RanksNotGone, ShimUnavailable
from worker.node.health import memory
from worker.node.health.memory import ProcessMemory
from worker.node.network_cards import card_of
from worker.node.rank_user import (
    IN_MEMORY,
    RankUser,
    clear,
    clear_own_memory,
    create_traversable_dir,
    end_processes,
    user_of,
)
from worker.ranks import build_locks
from worker.ranks.environment import (
    RankPaths,
    Supplied,
    inherited_as,
    node_environment,
    rank_arguments,
    rank_environment,
    source_folder,
    with_packages,
)
from worker.ranks.files import LAST_LINES_BYTES, RankFiles, last_lines, make_home
from worker.ranks.shim import cgroups, processes
from worker.ranks.shim.messages import (
    ForgetRun,
    FromShim,
    ListRanks,
    Preload,
    RankEnd,
    RankExited,
    RankKey,
    RankRecord,
    RankRefused,
    Ranks,
    RankStarted,
    Shutdown,
    StartRank,
    StopRanks,
)
from worker.ranks.shim.preload import DEFAULT_MODULES, can_preload
from worker.ranks.shim.records import RECORD_RETRY_SECONDS, RankRecords
from worker.tasks import Signal, end

log = logging.getLogger(__name__)

_CRASHES = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP, signal.SIGSYS}
)
_ALL_GENERATIONS = Generation(2**31)
_NOT_STARTED = 127
_LISTEN_SECONDS = 20.0
"""Seconds to wait for a new shim, which usually listens after 0.1 s (measured)."""
GONE_SECONDS = 15.0
"""Seconds after which killed processes that still exist count as a failure. The control plane can set another time."""
_RECHECK_SECONDS = 0.05
"""Seconds between two checks whether killed processes still exist. The kernel sends no event when they end."""
_MEMORY_SAMPLE_SECONDS = 1.0
# After a kill, the kernel needs seconds to free hundreds of GiB before the rank ends.
_MEMORY_WINDOW_SAMPLES = 30
"""Number of stored memory samples of the node, one per second."""


@dataclass(frozen=True, slots=True)
class ExitedRank:
    """A rank that has ended, or that could not be started."""

    run: RunId
    generation: Generation
    rank: Rank
    end: RankEnd
    stderr: Path
    killed: MemoryEnd | None = None
    """Evidence that the kernel killed the rank or one of its DataLoader workers for lack of memory, or None."""
    use: MemoryUse = UNMEASURED
    """The rank's last sample, and the highest recent sample of the node."""
    stdout: Path | None = None

    @property
    def exit_class(self) -> ExitClass:
        """Class of the exit, from the exit code and the kernel's evidence."""
        return classify(self.end.code, is_stopped=self.end.stopped, is_out_of_memory=self.killed is not None)

    def describe(self, boundary: Step) -> RankExit:
        """Return this rank's exit as a message; `boundary` is -1 if the rank ended before its restore had returned."""
        text = last_lines(self.stderr)
        exit_class, memory_end = self.exit_class, None
        if exit_class is ExitClass.ERROR:
            memory_end = end_of_raised(text, self.use) or self.killed
        elif exit_class is ExitClass.OUT_OF_MEMORY:
            memory_end = self.killed
        refused = refused_task(text) if exit_class is ExitClass.ERROR else ""
        if "Traceback (" not in text and self.stdout is not None:
            # Without a traceback, the cause may be in the last lines of stdout.
            text = last_lines(self.stdout, LAST_LINES_BYTES // 2) + last_lines(self.stderr, LAST_LINES_BYTES // 2)
        return RankExit(
            exit_class=exit_class if memory_end is None else ExitClass.OUT_OF_MEMORY,
            code=self.end.code,
            at_seconds=self.end.at_seconds,
            boundary=boundary,
            last_lines=cut(
                "\n".join(part for part in (text.rstrip("\n"), self.end.text, refused) if part),
                MAX_LONG_TEXT_CHARACTERS,
            ),
            memory=memory_end,
        )


def classify(code: int, *, is_stopped: bool, is_out_of_memory: bool) -> ExitClass:
    """Return the class of an exit with `code`, or minus a signal's number, requested if `is_stopped`. Pure."""
    if code == 0:
        return ExitClass.SUCCESS
    if is_stopped:
        return ExitClass.HALTED
    if code > 0:
        return ExitClass.ERROR
    if -code in _CRASHES:
        return ExitClass.CRASHED
    return ExitClass.OUT_OF_MEMORY if -code == signal.SIGKILL and is_out_of_memory else ExitClass.KILLED


def scope_command(slice_name: str) -> tuple[str, ...]:
    """Return the first words of the command that starts the shim in a scope of its own within a systemd slice.

    The slice's limits then apply to the shim and all ranks, and a stop of the agent's unit does not end the scope.
    Source: systemd-run(1); systemd.resource-control(5); "Control Group APIs and Delegation" of systemd.
    """
    # Processes of an earlier shim may remain in its scope, so each scope has a unique name.
    unit = f"everstep-ranks-{secrets.token_hex(4)}.scope"
    options = ("--scope", "--quiet", "--collect", "--property=Delegate=yes", f"--slice={slice_name}", f"--unit={unit}")
    return ("systemd-run", *options, "--")


@dataclass(frozen=True, slots=True)
class MemoryPaths:
    """Paths of the kernel's files with memory statistics."""

    proc: Path = Path("/proc")
    cgroups: Path = Path("/sys/fs/cgroup")
    kernel_log: Path = Path("/dev/kmsg")


@dataclass(frozen=True, slots=True)
class _MemorySample:
    counts: KillCounts
    used_bytes: int
    total_bytes: int


class Supervisor:
    """The agent's interface to its ranks, used on the agent's event loop. `start` comes first and `close` last."""

    def __init__(
        self,
        *,
        state: Path,
        socket: Path,
        address: str,
        is_warm: bool = True,
        environment: Mapping[str, str] = os.environ,
        modules: tuple[str, ...] = DEFAULT_MODULES,
        gone_seconds: float = GONE_SECONDS,
        cgroup: str | None = None,
        user: RankUser | None = None,
        memory_paths: MemoryPaths = MemoryPaths(),
        launcher: Sequence[str] = (),
        limits: cgroups.JobLimits = cgroups.NO_LIMITS,
    ) -> None:
        """Create the supervisor; `start` connects to the shim.

        Args:
            state: folder of the ranks' records, streams and outputs; created if missing. It outlives the agent.
            socket: path of the shim's socket; its folder is created if missing.
            address: this node's address.
            is_warm: True if the shim runs a template; no effect without modules to preload.
            environment: the agent's own environment; `node_environment` selects the part that ranks inherit.
            modules: modules that the template imports.
            gone_seconds: seconds after which killed processes that still exist count as a failure.
            cgroup: the node's cgroup, unique on this machine; None derives it from `state`, empty means no cgroup.
            user: the Linux user or users that this node's ranks run as; None means the agent's own user.
            memory_paths: paths of the kernel's files with memory statistics.
            launcher: first words of a command that replaces itself with the shim by exec (`scope_command`).
            limits: limits for the ranks of one job together. A shim that runs already keeps the limits of its start.
        """
        self._launcher = tuple(launcher)
        self._limits = limits
        self._memory_paths = memory_paths
        self._state = state.absolute()
        self._socket = socket.absolute()
        self._is_warm = is_warm
        self._user = user
        self._modules = modules if is_warm and can_preload(modules) else ()
        self.gone_seconds = gone_seconds
        self._cgroup = (
            f"everstep-{os.getuid()}-{xxhash.xxh3_64_hexdigest(os.fsencode(self._state))}" if cgroup is None else cgroup
        )
        self._confinement: tuple[str, str, str] | None = None
        """The shim's last report on cgroups: (their folder, why they are unavailable, why limits do not apply)."""
        self.changed = Signal()
        """Notified at every change of the state of a rank or of the shim."""
        self.preload = Preload.PENDING
        self.on_shim: Callable[[], None] = lambda: None
        """Called in a thread after each connection to a shim, before the agent uses it. It may raise OSError."""
        self._inherited = node_environment(environment, card_of(address))
        self._disk = RankRecords(self._state)
        self._records: dict[RankKey, RankRecord] = {}
        self._asked: dict[RankKey, StartRank] = {}
        self._killed: dict[RankKey, MemoryEnd] = {}
        self._rank_memory: dict[RankKey, ProcessMemory] = {}
        self._samples: deque[_MemorySample] = deque(maxlen=_MEMORY_WINDOW_SAMPLES)
        self._ranks_process = "self"
        """Process whose cgroup limits the ranks' memory: the shim if a launcher starts it, otherwise this process."""
        self._remains_count = 0
        self._answer_count = 0
        self._writer: asyncio.StreamWriter | None = None
        self.shim_pid: int | None = None
        """The shim's pid while the shim is a child of this process; otherwise None."""
        self._tasks: list[asyncio.Task[None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closing = False

    async def start(self) -> None:
        """Connect to the node's shim, or start one, and read its state. Raises ShimUnavailable."""
        self._loop = asyncio.get_running_loop()
        for folder in (self._state, self._socket.parent):
            create_traversable_dir(folder, self._user)
        (self._state / "logs").mkdir(mode=0o700, exist_ok=True)
        reader = await self._connect()
        self._tasks = [
            asyncio.create_task(self._follow(reader), name="shim line"),
            asyncio.create_task(self._sample_memory(), name="memory samples"),
            asyncio.create_task(self._write_owed(), name="records of ended ranks"),
        ]
        await self.refresh()

    async def close(self) -> None:
        """Disconnect from the shim. The shim and the ranks continue, and the node's next agent process adopts them."""
        self._is_closing = True
        await end(*self._tasks)
        self._hang_up()

    async def shut_down(self) -> None:
        """End all ranks and the shim, then close. Raises ShimUnavailable if the shim does not end."""
        self._is_closing = True
        if self._writer is not None:
            self._send(Shutdown())
            try:
                async with asyncio.timeout(self.gone_seconds):
                    await asyncio.wait(self._tasks[:1])
            except TimeoutError:
                raise ShimUnavailable("the shim does not end") from None
        await self.close()

    @property
    def is_warm(self) -> bool:
        """True if new ranks can start immediately."""
        return self.preload in (Preload.READY, Preload.NONE)

    async def start_rank(
        self, plan: GenerationPlan, here: PlanNode, rank: Rank, entry: Path, *, agent_socket: Path, supplied: Supplied
    ) -> None:
        """Ask the shim to start one rank, unless asked before.

        `next_exit` reports a failure. Raises ShimUnavailable.
        """
        key = (plan.run, plan.generation, rank)
        if key in self._records or key in self._asked:
            return
        files = RankFiles(self._state, plan.run, plan.generation, rank)
        try:
            user = user_of(plan.run, self._state, self._user)
            files.make(user)
            identity = make_home(self._state, plan.run, user) if user is not None else {}
        except OSError as error:
            self.fail_rank(plan, rank, f"its folders cannot be made: {error}")
            return
        inherited = inherited_as(identity, self._inherited)
        paths = RankPaths(agent_socket=agent_socket.absolute(), output_dir=files.output_dir)
        start = StartRank(
            run=plan.run,
            generation=plan.generation,
            rank=rank,
            script=str(entry.absolute()),
            arguments=rank_arguments(plan.script),
            working_directory=str(source_folder(entry, plan.script.entry_point)),
            environment=with_packages(
                rank_environment(plan, here, rank, paths, inherited, supplied.environment), supplied.packages.path
            ),
            packages=supplied.packages.path,
            package_modules=supplied.packages.modules,
            stdout_path=str(files.stdout),
            stderr_path=str(files.stderr),
            warm=self._is_warm,
            user=user,
            module=plan.script.module,
        )
        await asyncio.to_thread(build_locks.remove_stale, start.environment, user)
        await self._connected()
        self._asked[key] = start
        self._send(start)

    def fail_rank(self, plan: GenerationPlan, rank: Rank, reason: str) -> None:
        """Record that a rank could not be started, as its exit, unless its start was requested."""
        key = (plan.run, plan.generation, rank)
        if key not in self._records and key not in self._asked:
            files = RankFiles(self._state, plan.run, plan.generation, rank)
            self._note_unstarted(key, str(files.stdout), str(files.stderr), f"the rank was not started: {reason}")
            self.changed.notify()

    @property
    def records(self) -> tuple[RankRecord, ...]:
        """Records of all ranks, sorted by run, generation and rank. The record of a living rank has no end."""
        return tuple(self._records[key] for key in sorted(self._records))

    async def next_exit(self, run: RunId, generation: Generation, seen: Collection[Rank]) -> ExitedRank:
        """Wait for a rank of this generation that has ended and is not in `seen`, and return it."""
        while True:
            version = self.changed.version
            for key, record in self._records.items():
                if key[:2] == (run, generation) and record.end is not None and record.rank not in seen:
                    return ExitedRank(
                        run,
                        generation,
                        record.rank,
                        record.end,
                        Path(record.stderr_path),
                        self._killed.get(key),
                        self._use_before(key),
                        Path(record.stdout_path),
                    )
            await self.changed.wait(version)

    def halt_now(self, run: RunId, generation: Generation) -> None:
        """Kill all ranks of this run up to `generation`, and have the shim refuse later starts. Return immediately."""
        self._send(StopRanks(run=run, generation=generation))

    def kill_rank(self, run: RunId, generation: Generation, rank: Rank) -> None:
        """Kill one rank's process to simulate a fault. No effect if the rank has ended."""
        record = self._records.get((run, generation, rank))
        if record is None or record.end is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(record.pid)
            try:
                # The kernel may have reused the pid before `pidfd_open`.
                if processes.is_alive(record.pid, record.start_ticks):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
            finally:
                os.close(handle)

    async def stop_all(self) -> None:
        """Kill every rank on this node. Return when all have ended, or after `gone_seconds`; then call `prove_gone`."""
        self._send(StopRanks(run=None, generation=_ALL_GENERATIONS))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.gone_seconds):
                await self._until_ended(None)

    async def prove_gone(self, run: RunId | None) -> None:
        """Wait until no process of the ranks of `run` (None: all runs) exists. Raises RanksNotGone.

        The caller must stop the ranks first, and the node must have no rank of another run. If ranks run as separate
        users, the method also kills these users' processes outside of cgroups, for example of pip. It removes their
        shared memory too, because a library with fixed names could not create it again.
        """
        try:
            async with asyncio.timeout(self.gone_seconds):
                await self._until_ended(run)
                await self._until_empty(run)
                while True:
                    await self.refresh()
                    if self._remains_count == 0:
                        break
                    await asyncio.sleep(_RECHECK_SECONDS)
        except (TimeoutError, ShimUnavailable) as error:
            living = {record.pid for record in self.records if record.end is None and run in (None, record.run)}
            left = {pid for path in self._cgroups_of(run) for pid in cgroups.pids(path)} - living
            raise RanksNotGone(
                f"{len(living)} ranks ({', '.join(map(str, sorted(living))) or 'none'}) and "
                f"{max(len(left), self._remains_count)} processes that "
                f"ranks left behind ({', '.join(map(str, sorted(left))) or 'not in a cgroup'}) still exist "
                f"after {self.gone_seconds} s"
            ) from error
        if left_behind := await asyncio.to_thread(end_processes, self._user, seconds=self.gone_seconds):
            raise RanksNotGone(f"processes remain after {self.gone_seconds} s: {left_behind}")
        if self._user is not None:
            await asyncio.to_thread(clear, self._user, IN_MEMORY)
        else:
            # An instance of a local cluster that has its own /dev/shm removes all files in it.
            await asyncio.to_thread(clear_own_memory, self._socket.parent)

    async def _until_empty(self, run: RunId | None) -> None:
        for path in self._cgroups_of(run):
            while cgroups.pids(path):
                cgroups.kill(path)
                await asyncio.sleep(_RECHECK_SECONDS)
            cgroups.remove(path)

    def _cgroups_of(self, run: RunId | None) -> list[str]:
        return sorted({record.cgroup for record in self.records if record.cgroup and run in (None, record.run)})

    def forget(self, run: RunId) -> None:
        """Drop the records of this run's ended ranks. May be called from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._forget, run)

    def _forget(self, run: RunId) -> None:
        self._send(ForgetRun(run=run))
        self._records = {
            key: record for key, record in self._records.items() if record.run != run or record.end is None
        }
        self._killed = {key: end_ for key, end_ in self._killed.items() if key in self._records}
        self._rank_memory = {key: found for key, found in self._rank_memory.items() if key in self._records}

    async def _until_ended(self, run: RunId | None) -> None:
        def is_meant(key: RankKey) -> bool:
            return run is None or key[0] == run

        while True:
            version = self.changed.version
            living = any(is_meant(key) for key, record in self._records.items() if record.end is None)
            if not living and not any(map(is_meant, self._asked)):
                return
            await self.changed.wait(version)

    def _send(self, message: Message) -> None:
        if self._writer is not None:
            self._writer.write(codec.frame(message))

    async def refresh(self) -> None:
        """Wait for the shim's answers to all earlier requests, and its records. Raises ShimUnavailable."""
        await self._connected()
        answer_count = self._answer_count
        self._send(ListRanks())
        while self._answer_count == answer_count:
            await self.changed.wait(self.changed.version, timeout_seconds=self.gone_seconds)
            if self._writer is None:
                raise ShimUnavailable("the shim ended during the request")

    async def _connected(self) -> None:
        try:
            async with asyncio.timeout(_LISTEN_SECONDS):
                while self._writer is None:
                    await self.changed.wait(self.changed.version)
        except TimeoutError:
            raise ShimUnavailable("no shim runs on this node") from None

    async def _connect(self) -> asyncio.StreamReader:
        """Connect to the shim, or kill the ranks of the last shim and start a new one."""
        reader = await self._dial()
        if reader is None:
            await self._bury()
            try:
                await self._launch()
                reader = await self._dial()
            finally:
                if (
                    reader is None
                    # End the new shim, because it did not answer. It could otherwise replace the socket of the next
                    # shim later.
                ):
                    await self._end_shim()
        if reader is None:
            raise ShimUnavailable("a shim was started and does not answer")
        try:
            await asyncio.to_thread(self.on_shim)
        except OSError as error:
            raise ShimUnavailable(f"the shim does not hand over the node's memory: {error}") from error
        return reader

    async def _dial(self) -> asyncio.StreamReader | None:
        directory = os.open(self._socket.parent, os.O_PATH | os.O_DIRECTORY)
        try:
            # A socket address has at most 107 bytes. The path may be longer, so use the descriptor of its folder.
            reader, self._writer = await asyncio.open_unix_connection(f"/proc/self/fd/{directory}/{self._socket.name}")
        except (FileNotFoundError, ConnectionError):
            return None
        finally:
            os.close(directory)
        return reader

    async def _launch(self) -> None:
        """Start a shim in a session of its own; return when it listens."""
        read, write = os.pipe()
        os.set_inheritable(write, True)
        command = [
            sys.executable,
            "-P",
            "-m",
            "worker.ranks.shim",
            "--socket",
            str(self._socket),
            "--state-dir",
            str(self._state),
        ]
        command += [
            "--cgroup",
            self._cgroup,
            "--ready-fd",
            str(write),
            *self._limit_words(),
            *(word for name in self._modules for word in ("--preload", name)),
        ]
        log_path = str(self._state / "logs" / "shim.log")
        try:
            command = [*self._launcher, *command]
            self.shim_pid = os.posix_spawnp(  # noqa: ASYNC221 — returns at once
                command[0],
                command,
                self._inherited,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 1, log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
                    (os.POSIX_SPAWN_DUP2, 1, 2),
                ],
                setsid=True,
            )
        except OSError as error:
            raise ShimUnavailable(f"the shim cannot be started: {error}") from error
        finally:
            os.close(write)
        loop = asyncio.get_running_loop()
        listens = asyncio.Event()
        loop.add_reader(read, listens.set)
        try:
            async with asyncio.timeout(_LISTEN_SECONDS):
                await listens.wait()
        except TimeoutError:
            raise ShimUnavailable(f"the shim does not listen after {_LISTEN_SECONDS} s; see {log_path}") from None
        finally:
            loop.remove_reader(read)
            os.close(read)

    def _limit_words(self) -> list[str]:
        given = {"--job-memory-bytes": self._limits.memory_bytes, "--job-task-count": self._limits.task_count}
        return [word for name, value in given.items() if value is not None for word in (name, str(value))]

    async def _follow(self, reader: asyncio.StreamReader) -> None:
        while True:
            try:
                while True:
                    length = codec.frame_length(await reader.readexactly(codec.LENGTH.size))
                    self._accept(codec.decode(await reader.readexactly(length), FromShim))  # type: ignore[arg-type]
            except (asyncio.IncompleteReadError, ConnectionError):
                log.log(logging.INFO if self._is_closing else logging.ERROR, "the shim is gone")
            except ProtocolError as error:
                log.error("the shim sent an invalid message: %s", error)
            self._hang_up()
            self.changed.notify()
            await self._reap_shim()
            if self._is_closing:
                return
            reader = await self._connect_again()
            self._send(ListRanks())
            self.changed.notify()

    async def _connect_again(self) -> asyncio.StreamReader:
        logged_error = ""
        while True:
            try:
                return await self._connect()
            except (ShimUnavailable, OSError) as error:
                if str(error) != logged_error:
                    logged_error = str(error)
                    log.error("no rank can be started until a new shim runs: %s", logged_error)
            await asyncio.sleep(RECORD_RETRY_SECONDS)

    def _accept(self, message: RankStarted | RankRefused | RankExited | Ranks) -> None:
        match message:
            case RankStarted(record=record):
                self._asked.pop(record.key, None)
                self._records[record.key] = record
            case RankRefused():
                self._note_refusal(message)
            case RankExited(record=record):
                self._note_exit(record)
            case Ranks():
                for record in message.records:
                    self._note_exit(record)
                self._remains_count = message.remains_count
                self._answer_count += 1
                if self._launcher:
                    self._ranks_process = str(message.pid)
                self._note_confinement(message)
                if message.preload is Preload.FAILED and self.preload is not Preload.FAILED:
                    log.warning("ranks start cold: %s", message.preload_error)
                self.preload = message.preload
        self.changed.notify()

    def _note_confinement(self, message: Ranks) -> None:
        confinement = (message.confinement, message.confinement_error, message.limits_error)
        if confinement == self._confinement:
            return
        self._confinement = confinement
        if message.confinement:
            log.info("ranks run in cgroups below %s", message.confinement)
        if message.confinement_error:
            log.warning(
                "ranks have no cgroup; their children are found by parent and session: %s",
                message.confinement_error,
            )
        if message.limits_error:
            log.warning("the limits of jobs (--job-memory-bytes, --job-tasks) do not apply: %s", message.limits_error)

    def _note_exit(self, record: RankRecord) -> None:
        key, end_ = record.key, record.end
        known = self._records.get(key)
        is_new = end_ is not None and (known is None or known.end is None)
        if is_new and end_ is not None and not end_.stopped and (killed := self._memory_end(record, end_.code)):
            self._killed[key] = killed
        self._records[key] = record

    def _note_refusal(self, refusal: RankRefused) -> None:
        start = self._asked.pop(refusal.key, None)
        if start is not None:
            log.warning("rank %s of generation %s is not started: %s", refusal.rank, refusal.generation, refusal.reason)
            words = f"the rank was not started: {refusal.reason}"
            self._note_unstarted(start.key, start.stdout_path, start.stderr_path, words, is_stopped=refusal.is_stopped)

    def _note_unstarted(
        self, key: RankKey, stdout_path: str, stderr_path: str, text: str, *, is_stopped: bool = False
    ) -> None:
        now = time.time()
        self._records[key] = RankRecord(
            run=key[0],
            generation=key[1],
            rank=key[2],
            pid=0,
            start_ticks=0,
            started_at_seconds=now,
            is_warm=False,
            stdout_path=stdout_path,
            stderr_path=stderr_path,
            end=RankEnd(code=_NOT_STARTED, at_seconds=now, stopped=is_stopped, text=text),
        )

    def _hang_up(self) -> None:
        self.preload = Preload.PENDING
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    async def _end_shim(self) -> None:
        if self.shim_pid is not None:
            os.kill(self.shim_pid, signal.SIGKILL)
            await self._reap_shim()

    async def _reap_shim(self) -> None:
        pid, self.shim_pid = self.shim_pid, None
        if pid is not None:
            await asyncio.to_thread(_wait_for_child, pid)

    async def _bury(self) -> None:
        """Kill the ranks of a dead shim, and write the records of their ends."""
        orphans = [record for record in self._disk.read() if record.end is None]
        for record in orphans:
            known = self._records.get(record.key)
            if known is not None and known.end is not None:
                # The dead shim has reported this end, but has not written it to disk.
                self._disk.write_end(known)
                continue
            await _kill(record)
            if record.cgroup:
                cgroups.kill(record.cgroup)
            end_ = RankEnd(
                code=-signal.SIGKILL,
                at_seconds=time.time(),
                stopped=False,
                text="its parent, the node's shim, had ended, so that its own exit could no longer be seen: it was "
                "killed",
            )
            ended = msgspec.structs.replace(record, end=end_)
            self._disk.write_end(ended)
            self._records[ended.key] = ended
        asked, self._asked = self._asked, {}
        for start in asked.values():
            if start.key not in self._records:
                self._note_unstarted(
                    start.key,
                    start.stdout_path,
                    start.stderr_path,
                    "the node's shim ended before the rank was started",
                )
        if orphans:
            log.error("killed %s ranks whose shim had ended", len(orphans))
        self.changed.notify()  # Wake the tasks that wait for the end of a rank.

    async def _write_owed(self) -> None:
        while True:
            await asyncio.sleep(RECORD_RETRY_SECONDS)
            self._disk.write_owed()

    def rank_memory(self, run: RunId, generation: Generation) -> dict[Rank, ProcessMemory]:
        """Return the newest memory sample of each living rank of a generation."""
        return {
            key[2]: found
            for key, found in self._rank_memory.items()
            if key[:2] == (run, generation) and (record := self._records.get(key)) is not None and record.end is None
        }

    async def _sample_memory(self) -> None:
        paths = self._memory_paths
        while True:
            # Skip a sample that fails, for example for lack of file descriptors. The next sample may succeed.
            with contextlib.suppress(OSError):
                facts = memory.memory_facts(paths.proc, paths.cgroups, self._ranks_process)
                counts = memory.kill_counts(paths.proc, paths.cgroups, self._ranks_process)
                self._samples.append(
                    _MemorySample(counts, facts.total_bytes - facts.available_bytes, facts.total_bytes)
                )
            for key, record in self._records.items():
                if record.end is None and (found := memory.process_memory(record.pid, paths.proc)) is not None:
                    self._rank_memory[key] = found
            await asyncio.sleep(_MEMORY_SAMPLE_SECONDS)

    def _memory_end(self, record: RankRecord, code: int) -> MemoryEnd | None:
        """Return the evidence that the kernel killed a rank or its DataLoader worker for lack of memory, or None."""
        loaders = lost_loaders(last_lines(Path(record.stderr_path))) if code > 0 else None
        if code != -signal.SIGKILL and loaders is None:
            return None
        paths = self._memory_paths
        before = self._samples[0].counts if self._samples else KillCounts()
        after = memory.kill_counts(paths.proc, paths.cgroups, self._ranks_process)
        own = memory.group_kill_count(Path(record.cgroup)) if record.cgroup else None
        if own is not None:  # Each generation has its own cgroup, whose kill counter starts at 0.
            before, after = replace(before, cgroup=0), replace(after, cgroup=own)
        began = record.start_ticks / os.sysconf("SC_CLK_TCK")
        log_text = memory.kernel_log(paths.kernel_log)
        pids = (record.pid,) if loaders is None else loaders.pids
        logged = next((found for pid in pids if (found := logged_kill(log_text, pid, began)) is not None), None)
        return end_of_killed(before, after, self._use_before(record.key), logged, loaders)

    def _use_before(self, key: RankKey) -> MemoryUse:
        found = self._rank_memory.get(key)
        fullest = max(self._samples, key=lambda sample: sample.used_bytes, default=None)
        return MemoryUse(
            rank_bytes=found.resident_bytes if found is not None else None,
            used_bytes=fullest.used_bytes if fullest is not None else None,
            total_bytes=fullest.total_bytes if fullest is not None else None,
        )


def _wait_for_child(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


async def _kill(record: RankRecord) -> None:
    """Kill a rank that is not a child of this process, with its descendants, and wait for its end."""
    if not processes.is_alive(record.pid, record.start_ticks):
        return
    try:
        handle = os.pidfd_open(record.pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    loop.add_reader(handle, gone.set)
    try:
        # The pid may have belonged to another process when `handle` was opened.
        if processes.is_alive(record.pid, record.start_ticks):
            await asyncio.to_thread(processes.kill_tree, record.pid)
            await gone.wait()
    finally:
        loop.remove_reader(handle)
        os.close(handle)
