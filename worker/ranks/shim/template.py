"""The template: a process that has imported what ranks import, and is forked to make them.

    shim                                   template
    (exec)
                        ◀─────             TemplateReady | TemplateFailed
    FORK + 4 fds        ─────▶             (a file with StartRank, stdout, stderr, gate)
                        ◀─────             Forked | ForkFailed

It forks twice and lets the one in the middle end, so that the rank's parent is the shim. Nothing of the user's ever
runs in here, and nothing of a job is ever read in here: what a rank is to run, its secrets among it, its own process
reads; it would else be in the memory of all later ranks.

Nothing is compiled in here. DeepSpeed's operator is loaded before a fork, once ranks have built it.

Measured on 2 quiet cores, torch 2.13, DeepSpeed 0.19.8, file cache warm: ready after 3.5 s, 362 MiB resident. From
`StartRank` to the first line of the script 33 ms, 26 ms of it until `RankStarted`; cold, the imports alone cost 1.3-1.8
s of CPU per rank. A rank's own interpreter shutdown takes 0.24 s, warm as cold.

Invariant: single-threaded; ends when the shim ends.
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
"""Asks for a rank."""


class TemplateReady(Message, frozen=True):
    """The imports are done; ranks can be forked."""

    seconds: float
    resident_bytes: int
    modules: tuple[str, ...]
    """What is loaded, by the first part of its name."""


class TemplateFailed(Message, frozen=True):
    """An import raised; ranks start cold."""

    reason: str


class Forked(Message, frozen=True):
    """Answer to `FORK`: the process stands at its gate."""

    pid: int


class ForkFailed(Message, frozen=True):
    """Answer to `FORK`: the kernel gave no process."""

    reason: str


FromTemplate = TemplateReady | TemplateFailed | Forked | ForkFailed


def run_template(line: socket.socket, modules: Sequence[str]) -> NoReturn:
    """Import, then fork a rank for every request until the shim goes away.

    Args:
        line: the stream socket to the shim; blocking.
        modules: what to import.

    Raises:
        SystemExit: always; in the template when the shim is gone, in a rank when its script has ended.
    """
    processes.die_with_parent()
    processes.set_name("rank template")
    begun = time.monotonic()
    try:
        preload(modules)
    except Exception as error:  # whatever a library raises while it is imported, the shim has to know
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
    """Answer requests; return None when the shim is gone, and in each new rank what it is to run."""
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
                told, *rest = descriptors
                start = _read(told)
                launch.settle(start.user, *rest)
                return start
            line.sendall(codec.frame(Forked(pid=pid)))
        for descriptor in descriptors:
            os.close(descriptor)


def _load_operator() -> None:
    """Load DeepSpeed's operator if ranks have built it meanwhile; a rank that needs it and does not find it loads it itself."""
    try:
        load_operator()
    except PreloadFailed:
        raise  # forks of this process are unsound: it ends, and the shim starts another
    except Exception as error:
        sys.stderr.write(f"DeepSpeed's operator is not loaded ahead: {type(error).__name__}: {error}\n")


def _fork_twice() -> int:
    """Fork a rank that has the shim for a parent.

    Returns:
        0 in the rank; its pid in this process, once the one in the middle has ended.

    Raises:
        OSError: one of the forks failed.
    """
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
    """Read what this new process is to run."""
    with os.fdopen(file, "rb") as told:
        told.seek(0)
        return codec.decode(told.read(), StartRank)
