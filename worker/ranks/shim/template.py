"""The template: a process that has imported the ranks' modules and forks itself into new ranks.

    shim                                   template
    (exec)
                        ◀─────             TemplateReady | TemplateFailed
    FORK + 4 fds        ─────▶             (a file with StartRank, stdout, stderr, gate)
                        ◀─────             Forked | ForkFailed

Only the fork reads the file with StartRank, which contains secrets. The template compiles nothing. It is ready after
3.5 s and has 362 MiB. A warm rank needs 33 ms to the first line of the script. The imports of a cold rank need 1.3 to
1.8 s of CPU (2 idle cores, torch 2.13, DeepSpeed 0.19.8). Invariant: the template has one thread and ends when the shim
ends.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from everstep.protocol import codec
from everstep.protocol.codec import Message
from worker.ranks.shim import launch, processes
from worker.ranks.shim.messages import StartRank
from worker.ranks.shim.preload import PreloadFailed, load_operator, preload

_PID = struct.Struct("<q")
_DESCRIPTOR_COUNT = 4
FORK = b"f"
"""Message with which the shim asks the template to fork one rank."""


class TemplateReady(Message, frozen=True):
    """Report that the imports are finished and ranks can be forked."""

    seconds: float
    resident_bytes: int
    modules: tuple[str, ...]


class TemplateFailed(Message, frozen=True):
    """Report that an import raised an exception. All ranks then start cold."""

    reason: str


class Forked(Message, frozen=True):
    """Answer to `FORK`: the new process exists, and waits until the shim lets it run."""

    pid: int


class ForkFailed(Message, frozen=True):
    """Answer to `FORK`: the kernel did not create a process."""

    reason: str


FromTemplate = TemplateReady | TemplateFailed | Forked | ForkFailed


def run_template(line: socket.socket, modules: Sequence[str]) -> NoReturn:
    """Import `modules`, then fork one rank for each request, until the shim closes the blocking socket.

    Always raises SystemExit: in the template, when the shim has ended; in a rank, when its script has ended.
    """
    processes.die_with_parent()
    processes.set_name("rank template")
    begun = time.monotonic()
    try:
        preload(modules)
    except Exception as error:  # An import may raise any exception, and the shim needs the reason.
        line.sendall(codec.frame(TemplateFailed(reason=f"{type(error).__name__}: {error}")))
        raise SystemExit(1) from error
    loaded = tuple(sorted({name.partition(".")[0] for name in sys.modules}))
    line.sendall(
        codec.frame(
            TemplateReady(
                seconds=time.monotonic() - begun, resident_bytes=processes.resident_bytes(os.getpid()), modules=loaded
            )
        )
    )
    start = _serve(line)
    if start is None:
        raise SystemExit(0)
    line.close()
    launch.become(start)


def _serve(line: socket.socket) -> StartRank | None:
    """Fork a rank for each request. Return its start message in each new rank, and None when the shim has ended."""
    while True:
        asked, descriptors, _, _ = socket.recv_fds(line, len(FORK), _DESCRIPTOR_COUNT)
        if not asked:
            return None
        _load_operator()
        try:
            pid = _fork_twice()
        except OSError as error:
            line.sendall(codec.frame(ForkFailed(reason=str(error))))
        else:
            if pid == 0:
                start_file, *rest = descriptors
                start = _read(start_file)
                launch.settle(start.user, *rest)
                return start
            line.sendall(codec.frame(Forked(pid=pid)))
        for descriptor in descriptors:
            os.close(descriptor)


def _load_operator() -> None:
    try:
        load_operator()
    except PreloadFailed:
        raise  # A half-loaded extension makes forks unsafe. The shim then starts a new template.
    except Exception as error:
        sys.stderr.write(f"DeepSpeed's operator is not loaded ahead: {type(error).__name__}: {error}\n")


def _fork_twice() -> int:
    """Fork a rank whose parent is the shim. Return 0 in the rank, its pid in the template. Raises OSError."""
    read, write = os.pipe()
    middle = os.fork()
    if middle == 0:
        try:
            pid = os.fork()
            if pid == 0:
                os.close(read)
                os.close(write)
                return 0
            os.write(write, _PID.pack(pid))
        except OSError as error:
            os.write(write, _PID.pack(-(error.errno or 1)))
        os._exit(0)
    os.close(write)
    answer = os.read(read, _PID.size)
    os.close(read)
    os.waitpid(middle, 0)
    (pid,) = _PID.unpack(answer) if answer else (-1,)
    if pid < 0:
        raise OSError(-pid, os.strerror(-pid))
    return int(pid)


def _read(file: int) -> StartRank:
    with os.fdopen(file, "rb") as stream:
        stream.seek(0)
        return codec.decode(stream.read(), StartRank)
