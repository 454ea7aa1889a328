"""The shim's event loop: starts ranks, reaps them and reports to every client.

The loop has one thread and never blocks for longer than one pass through /proc. Invariant: the shim opens a rank's gate
only after its record is written. A record without an end describes a process that is not reaped yet, or whose end is
not on disk yet.
"""

from __future__ import annotations

import fcntl
import logging
import os
import selectors
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from everstep.protocol import codec
from everstep.protocol.codec import Message
from everstep.protocol.errors import ProtocolError
from everstep.protocol.ids import Generation, RunId
from worker.node.state_directory import SHIM_LOCK
from worker.node.unix_socket import listen_private
from worker.ranks.shim import cgroups, launch, processes
from worker.ranks.shim.line import ShimLine
from worker.ranks.shim.messages import (
    ForgetRun,
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
    ToShim,
)
from worker.ranks.shim.records import RECORD_RETRY_SECONDS, RankRecords
from worker.ranks.shim.template import FORK, Forked, ForkFailed, FromTemplate, TemplateFailed, TemplateReady
from worker.shm.held_files import FILES_SOCKET, HeldFiles

PRELOAD_SECONDS = 30.0
"""Longest time for which ranks wait for the imports of the template. Usually these need 4 s."""
_CREDENTIALS = struct.Struct("3i")
_log = logging.getLogger("worker.ranks.shim")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShimOptions:
    """Options with which the shim is started."""

    socket_path: Path
    state_dir: Path
    modules: tuple[str, ...]
    """Modules that the template imports. If empty, every rank starts in a new interpreter."""
    ready: int | None = None
    """Pipe that the shim closes as soon as its socket listens; None without a pipe."""
    cgroup: str = ""
    """Name of this node's cgroup; if empty, ranks have no cgroup of their own."""
    limits: cgroups.JobLimits = cgroups.NO_LIMITS


@dataclass(slots=True)
class _Template:
    pid: int
    line: ShimLine
    begun: float
    """Start of the imports, in monotonic seconds."""
    state: Preload = Preload.PENDING
    seconds: float = 0.0
    resident_bytes: int = 0
    error: str = ""
    modules: frozenset[str] = frozenset()


@dataclass(slots=True)
class _Pending:
    start: StartRank
    client: ShimLine
    gate: int = -1
    """The shim's end of the pipe at which the new process waits; -1 until the fork is requested."""
    is_stopped: bool = False


@dataclass(slots=True)
class Shim:
    """The shim: `run` is its event loop, and the fields are its state."""

    options: ShimOptions
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _clients: set[ShimLine] = field(default_factory=set)
    _records: dict[RankKey, RankRecord] = field(default_factory=dict)
    _living: dict[int, RankKey] = field(default_factory=dict)
    _stopped: set[RankKey] = field(default_factory=set)
    _fences: dict[RunId, Generation] = field(default_factory=dict)
    """By run: the highest stopped generation. The shim starts no ranks of this or an earlier generation."""
    _waiting: list[_Pending] = field(default_factory=list)
    _forking: list[_Pending] = field(default_factory=list)
    """Start requests for which the template is forking, in the order in which it answers."""
    _remains: set[processes.RankProcess] = field(default_factory=set)
    _cgroups: cgroups.RankCgroups | None = None
    _confinement_error: str = ""
    _limits_error: str = ""
    _emptying: set[str] = field(default_factory=set)
    """Cgroups of generations without living ranks, whose processes the shim kills."""
    _template: _Template | None = None
    _is_ending: bool = False
    _files: HeldFiles = field(default_factory=HeldFiles)
    _environment: dict[str, str] = field(default_factory=processes.initial_environment)
    _disk: RankRecords = field(init=False)

    def __post_init__(self) -> None:
        self._disk = RankRecords(self.options.state_dir)

    def run(self) -> None:
        """Serve clients until `Shutdown` or SIGTERM, then end all processes. Raises SystemExit if another shim runs."""
        lock = self._lock()
        processes.become_subreaper()
        self._records = {record.key: record for record in self._disk.read() if record.end is not None}
        if self.options.cgroup:
            self._cgroups, words = cgroups.find(self.options.cgroup)
            self._confinement_error = words if self._cgroups is None else ""
        if self._cgroups is not None:
            self._limits_error = self._cgroups.impose(self.options.limits)
        elif self.options.limits != cgroups.NO_LIMITS:
            self._limits_error = self._confinement_error or "ranks have no cgroup"
        wake = self._watch_signals()
        self._start_template()
        listeners = self._listen()
        if self.options.ready is not None:
            os.close(self.options.ready)
        while not (self._is_ending and self._is_bare()):
            retry = RECORD_RETRY_SECONDS if self._disk.is_owing else None
            waits = [seconds for seconds in (retry, self._preload_seconds_left()) if seconds is not None]
            for key, events in self._selector.select(min(waits, default=None)):
                act: Callable[[int], None] = key.data
                act(events)
            self._fork_waiting()
            self._disk.write_owed()
        if self._cgroups is not None:
            self._cgroups.close()
        for path in (self.options.socket_path, self._files_path):
            path.unlink(missing_ok=True)
        self._selector.close()
        for end in (*listeners, wake, *(client.socket for client in self._clients)):
            end.close()
        os.close(lock)

    def _lock(self) -> int:
        lock = os.open(self.options.state_dir / SHIM_LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(f"another shim serves {self.options.state_dir}") from None
        return lock

    def _watch_signals(self) -> socket.socket:
        wake, write = socket.socketpair()
        wake.setblocking(False)
        write.setblocking(False)
        signal.set_wakeup_fd(write.detach(), warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, _wake_up)

        def woken(_: int) -> None:
            numbers = wake.recv(4096)
            if signal.SIGTERM in numbers or signal.SIGINT in numbers:
                self._end()
            self._reap()

        self._selector.register(wake, selectors.EVENT_READ, woken)
        return wake

    def _listen(self) -> tuple[socket.socket, socket.socket]:
        listener = listen_private(self.options.socket_path)
        self._selector.register(listener, selectors.EVENT_READ, lambda _: self._accept(listener))
        files = listen_private(self._files_path, socket.SOCK_SEQPACKET)
        self._selector.register(files, selectors.EVENT_READ, lambda _: self._accept_files(files))
        return listener, files

    @property
    def _files_path(self) -> Path:
        return self.options.socket_path.with_name(FILES_SOCKET)

    def _accept_files(self, listener: socket.socket) -> None:
        if (connection := _accepted(listener)) is not None:
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, lambda _: self._serve_files(connection))

    def _serve_files(self, connection: socket.socket) -> None:
        if not self._files.answer(connection):
            self._selector.unregister(connection)
            connection.close()

    def _accept(self, listener: socket.socket) -> None:
        connection = _accepted(listener)
        if connection is None:
            return
        client = ShimLine(connection)
        self._clients.add(client)
        self._selector.register(connection, selectors.EVENT_READ, lambda events: self._serve(client, events))

    def _serve(self, client: ShimLine, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._settle(client, client.flush())
        if not events & selectors.EVENT_READ or client not in self._clients:
            return
        try:
            frames = client.receive()
            for frame in frames or ():
                self._obey(client, codec.decode(frame, ToShim))  # type: ignore[arg-type]
        except ProtocolError as error:
            _log.warning("the connection of a client was closed: %s", error)
            frames = None
        if frames is None:
            self._drop(client)

    def _say(self, client: ShimLine, message: Message) -> None:
        if client in self._clients:
            self._settle(client, client.send(message))

    def _settle(self, client: ShimLine, is_sound: bool) -> None:
        if not is_sound:
            self._drop(client)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.has_unsent else 0)
        key = self._selector.get_key(client.socket)
        if key.events != events:
            self._selector.modify(client.socket, events, key.data)

    def _drop(self, client: ShimLine) -> None:
        if client not in self._clients:
            return
        self._clients.remove(client)
        self._selector.unregister(client.socket)
        client.socket.close()

    def _say_all(self, message: Message) -> None:
        for client in list(self._clients):
            self._say(client, message)

    def _obey(self, client: ShimLine, message: StartRank | StopRanks | ListRanks | ForgetRun | Shutdown) -> None:
        match message:
            case StartRank():
                self._start(client, message)
            case StopRanks():
                self._stop(message)
            case ListRanks():
                self._say(client, self._state())
            case ForgetRun(run=run):
                self._disk.forget(run)
                self._records = {
                    key: record for key, record in self._records.items() if record.run != run or record.end is None
                }
                self._fences.pop(run, None)
            case Shutdown():
                self._end()

    def _state(self) -> Ranks:
        self._reap()
        self._remains = {process for process in self._remains if processes.is_there(process.pid, process.start_ticks)}
        remains = {process.pid for process in self._remains} | self._strays()
        template = self._template
        return Ranks(
            pid=os.getpid(),
            records=tuple(self._records[key] for key in sorted(self._records)),
            remains_count=len(remains) + len(self._forking),
            preload=template.state if template else Preload.NONE,
            preload_seconds=template.seconds if template else 0.0,
            preload_bytes=template.resident_bytes if template else 0,
            preload_error=template.error if template else "",
            confinement=str(self._cgroups.folder) if self._cgroups is not None else "",
            confinement_error=self._confinement_error,
            limits_error=self._limits_error,
        )

    def _start(self, client: ShimLine, start: StartRank) -> None:
        if self._has_been_asked(client, start.key):
            return
        if self._is_ending:
            self._refuse(client, start, "the shim is ending")
            return
        if start.generation <= self._fences.get(start.run, -1):
            self._refuse(client, start, f"generation {start.generation} was stopped", is_stopped=True)
            return
        template = self._template
        late = launch.needs_cold_start(start.environment, self._environment) if start.warm else None
        if late is not None:
            _log.info(
                "rank %s of generation %s starts cold: %s takes effect only at the start of a process",
                start.rank,
                start.generation,
                late,
            )
        if start.warm and late is None and template is not None and template.state is not Preload.FAILED:
            self._waiting.append(_Pending(start, client))  # `run` asks for the fork.
        else:
            self._start_cold(client, start)

    def _has_been_asked(self, client: ShimLine, key: RankKey) -> bool:
        """Return whether a start of this rank was requested before. The answer then goes to `client`."""
        if (record := self._records.get(key)) is not None:
            self._say(client, RankStarted(record=record))
            return True
        for pending in (*self._waiting, *self._forking):
            if pending.start.key == key:
                pending.client = client
                return True
        return False

    def _refuse(self, client: ShimLine, start: StartRank, reason: str, *, is_stopped: bool = False) -> None:
        refused = RankRefused(
            run=start.run, generation=start.generation, rank=start.rank, reason=reason, is_stopped=is_stopped
        )
        self._say(client, refused)

    def _start_cold(self, client: ShimLine, start: StartRank, why: str = "") -> None:
        """Start a rank in a new interpreter. `why` is set if the job itself causes the cold start."""
        try:
            stdout, stderr = _open_output(start)
            if why:
                _log.info("rank %s of generation %s starts cold: %s", start.rank, start.generation, why)
                os.write(stderr, f"everstep: this rank starts cold: {why}\n".encode())
            theirs, ours = os.pipe()
            pid = os.fork()
        except OSError as error:
            self._refuse(client, start, str(error))
            return
        if pid == 0:
            try:
                os.close(ours)
                launch.settle(start.user, stdout, stderr, theirs)
                launch.execute(start)
            finally:
                os._exit(127)
        for descriptor in (stdout, stderr, theirs):
            os.close(descriptor)
        self._admit(_Pending(start, client, ours), pid, is_warm=False)

    def _fork_waiting(self) -> None:
        """Ask the template to fork the waiting ranks, once its imports are over or have taken `PRELOAD_SECONDS`."""
        template = self._template
        # Ranks wait for the imports, so that all launches of a job see the same modules.
        if self._preload_seconds_left() is not None:
            return
        waiting, self._waiting = self._waiting, []
        for pending in waiting:
            # The rank was stopped while a template process, which has ended since, was forking it.
            if pending.is_stopped:
                self._refuse(pending.client, pending.start, "it was stopped before it started", is_stopped=True)
                continue
            if template is None or template.state is not Preload.READY:
                self._start_cold(pending.client, pending.start)
                continue
            if clash := sorted(template.modules.intersection(pending.start.package_modules)):
                brought = ", ".join(clash[:5]) + (" …" if len(clash) > 5 else "")
                self._start_cold(
                    pending.client, pending.start, f"its requirements bring {brought}, and another version is preloaded"
                )
                continue
            try:
                stdout, stderr = _open_output(pending.start)
                start_file = _write_down(pending.start)
                theirs, pending.gate = os.pipe()
            except OSError as error:
                self._refuse(pending.client, pending.start, str(error))
                continue
            self._forking.append(pending)
            descriptors = [start_file, stdout, stderr, theirs]
            _send_blocking(template.line.socket, FORK, descriptors)
            for descriptor in descriptors:
                os.close(descriptor)

    def _preload_seconds_left(self) -> float | None:
        template = self._template
        if template is None or template.state is not Preload.PENDING or not self._waiting:
            return None
        left = template.begun + PRELOAD_SECONDS - time.monotonic()
        return left if left > 0 else None

    def _admit(self, pending: _Pending, pid: int, *, is_warm: bool) -> None:
        start, client, gate = pending.start, pending.client, pending.gate
        process = processes.find(pid)
        if process is None or pending.is_stopped or self._is_ending:
            os.close(gate)  # The new process waits at this pipe, and exits when the pipe closes.
            is_stopped = process is not None
            words = "it was stopped before it started" if is_stopped else "it ended at once"
            self._refuse(client, start, words, is_stopped=is_stopped)
            return
        record = RankRecord(
            cgroup=self._confine(start, pid),
            run=start.run,
            generation=start.generation,
            rank=start.rank,
            pid=pid,
            start_ticks=process.start_ticks,
            started_at_seconds=time.time(),
            is_warm=is_warm,
            stdout_path=start.stdout_path,
            stderr_path=start.stderr_path,
        )
        try:
            self._disk.write(record)
        except OSError as error:
            os.close(gate)
            self._let_empty(record.cgroup)
            self._refuse(client, start, f"its record cannot be written: {error}")
            return
        self._records[record.key] = record
        self._living[pid] = record.key
        try:
            os.write(gate, launch.GO)
        except BrokenPipeError:
            # The new process has ended. The shim reports its exit when it reaps the process.
            _log.info("rank %s ended at its gate", start.rank)
        os.close(gate)
        self._say(client, RankStarted(record=record))

    def _confine(self, start: StartRank, pid: int) -> str:
        """Move a new process into its generation's cgroup. Return the path, or "" without a cgroup."""
        if self._cgroups is None:
            return ""
        try:
            path = self._cgroups.join(start.run, start.generation, pid)
        except OSError as error:
            if not self._confinement_error:
                self._confinement_error = f"rank {start.rank} could not be put into a cgroup: {error.strerror}"
                _log.warning("%s", self._confinement_error)
            return ""
        self._emptying.discard(path)
        return path

    def _start_template(self) -> None:
        if not self.options.modules:
            return
        ours, theirs = socket.socketpair()
        theirs.set_inheritable(True)
        modules = [word for name in self.options.modules for word in ("--preload", name)]
        command = [
            sys.executable,
            "-u",
            "-P",
            "-m",
            "worker.ranks.shim",
            "--template-fd",
            str(theirs.fileno()),
            *modules,
        ]
        pid = os.fork()
        if pid == 0:
            try:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGPIPE, signal.SIG_DFL)
                os.execv(sys.executable, command)
            finally:
                os._exit(127)
        theirs.close()
        template = self._template = _Template(pid, ShimLine(ours), time.monotonic())
        self._selector.register(ours, selectors.EVENT_READ, lambda _: self._hear_template(template))

    def _hear_template(self, template: _Template) -> None:
        frames = template.line.receive()
        if frames is None:
            # The template process has closed the connection. `_reap` records its end later.
            self._hang_up(template)
        for frame in frames or ():
            match codec.decode(frame, FromTemplate):  # type: ignore[arg-type]
                case TemplateReady(seconds=seconds, resident_bytes=resident, modules=modules):
                    template.modules = frozenset(modules)
                    template.state, template.seconds, template.resident_bytes = Preload.READY, seconds, resident
                    _log.info(
                        "the template is ready for warm starts after %.1f s, with %d MiB", seconds, resident >> 20
                    )
                    self._say_all(self._state())
                case TemplateFailed(reason=reason):
                    template.state, template.error = Preload.FAILED, reason
                    _log.error("ranks start cold, because the template's imports failed: %s", reason)
                    self._say_all(self._state())
                case Forked(pid=pid):
                    pending = self._forking.pop(0)
                    self._admit(pending, pid, is_warm=True)
                case ForkFailed(reason=reason):
                    pending = self._forking.pop(0)
                    os.close(pending.gate)
                    self._refuse(pending.client, pending.start, f"the fork failed: {reason}")
        self._fork_waiting()

    def _hang_up(self, template: _Template) -> None:
        if template.line.socket.fileno() >= 0:
            self._selector.unregister(template.line.socket)
            template.line.socket.close()

    def _bury_template(self, template: _Template) -> None:
        self._hear_template(template)
        self._hang_up(template)
        lost, self._forking = self._forking, []
        for pending in lost:
            os.close(pending.gate)
        was_ready = template.state is Preload.READY
        template.state, template.error = Preload.FAILED, template.error or "the template's process was killed"
        self._waiting = [*lost, *self._waiting]
        self._fork_waiting()
        if was_ready and not self._is_ending:
            _log.warning("the template has ended; starting another")
            self._start_template()
        self._say_all(self._state())

    def _stop(self, stop: StopRanks) -> None:
        if stop.run is not None:
            self._fences[stop.run] = max(stop.generation, self._fences.get(stop.run, Generation(-1)))
        for pending in [pending for pending in self._waiting if _is_meant(stop, pending.start.key)]:
            self._waiting.remove(pending)
            self._refuse(pending.client, pending.start, "it was stopped before it started", is_stopped=True)
        for pending in self._forking:
            pending.is_stopped |= _is_meant(stop, pending.start.key)
        for pid, key in list(self._living.items()):
            if not _is_meant(stop, key):
                continue
            self._stopped.add(key)
            if self._records[key].cgroup:
                cgroups.kill(self._records[key].cgroup)
            self._remains |= processes.kill_tree(pid)

    def _end(self) -> None:
        self._is_ending = True
        waiting, self._waiting = self._waiting, []
        for pending in waiting:
            self._refuse(pending.client, pending.start, "the shim is ending")
        for pid, key in self._living.items():
            self._stopped.add(key)
            processes.kill_tree(pid)
        if self._template is not None:
            processes.send([self._template.pid], signal.SIGKILL)
        self._sweep()

    def _is_bare(self) -> bool:
        self._reap()
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return True
        return False

    def _reap(self) -> None:
        """Record the end of each child process that has ended, then kill the processes that it left behind."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                break
            if ended is None:
                break
            key = self._living.pop(ended.si_pid, None)
            if key is not None:
                self._record_end(key, ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status)
                # The rank is a zombie until it is reaped, so its pid cannot belong to another process yet.
                self._remains |= processes.kill_tree(ended.si_pid)
            os.waitpid(ended.si_pid, 0)
            if self._template is not None and ended.si_pid == self._template.pid:
                self._bury_template(self._template)
        self._sweep()

    def _record_end(self, key: RankKey, code: int) -> None:
        end = RankEnd(code=code, at_seconds=time.time(), stopped=key in self._stopped)
        record = self._records[key] = msgspec.structs.replace(self._records[key], end=end)
        self._stopped.discard(key)
        self._disk.write_end(record)
        self._say_all(RankExited(record=record))
        self._let_empty(record.cgroup)

    def _let_empty(self, path: str) -> None:
        if path and all(self._records[living].cgroup != path for living in self._living.values()):
            self._emptying.add(path)

    def _sweep(self) -> None:
        """Kill the processes that ended ranks left behind."""
        for path in list(self._emptying):
            cgroups.kill(path)
            if not cgroups.pids(path) and cgroups.remove(path):
                self._emptying.discard(path)
        for pid in self._strays():
            self._remains |= processes.kill_tree(pid)

    def _strays(self) -> set[int]:
        # While ranks run or start, such a child may belong to one of them.
        if self._living or self._forking:
            return set()
        return processes.children(os.getpid()) - ({self._template.pid} if self._template is not None else set())


def _wake_up(number: int, frame: object) -> None: ...


def _is_meant(stop: StopRanks, key: RankKey) -> bool:
    run, generation, _ = key
    return (stop.run is None or stop.run == run) and generation <= stop.generation


def _open_output(start: StartRank) -> tuple[int, int]:
    stdout = _open_stream(start.stdout_path, start)
    try:
        return stdout, _open_stream(start.stderr_path, start)
    except OSError:
        os.close(stdout)
        raise


def _open_stream(path: str, start: StartRank) -> int:
    """Open a rank's stdout or stderr, which a script may open for writing as /dev/stdout."""
    # The rank's user may not read the file, but may write to it.
    stream = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    if start.user is not None:
        os.fchown(stream, -1, start.user.gid)
        os.fchmod(stream, 0o620)
    return stream


def _write_down(start: StartRank) -> int:
    """Write the start message to an in-memory file. It has secrets, and later ranks inherit what the template reads."""
    file = os.memfd_create("start")
    with os.fdopen(os.dup(file), "wb") as written:
        written.write(codec.encode(start))
    return file


def _send_blocking(line: socket.socket, data: bytes, descriptors: list[int]) -> None:
    """Send a message to the template, which always reads. If it has ended, the message is dropped."""
    line.setblocking(True)
    try:
        line.sendall(data[socket.send_fds(line, [data], descriptors) :])
    except OSError:
        _log.warning("the template does not accept a message")
    finally:
        line.setblocking(False)


def _accepted(listener: socket.socket) -> socket.socket | None:
    try:
        connection, _ = listener.accept()
    except (BlockingIOError, ConnectionAbortedError):
        return None
    _, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if user == os.geteuid():
        return connection
    _log.warning("a connection of user %s was refused", user)
    connection.close()
    return None
