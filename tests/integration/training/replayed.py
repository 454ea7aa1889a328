"""Runs a script as a rank whose rehearsals restart it, or run it again beside it.

In production, a process starts the next replay by an exec. Here its parent forks a process for each replay and hands it
the files in memory, so that no test waits for the imports.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from everstep.training.determinism import passes


def run(script: Callable[[], None], directory: Path, number: str = "") -> int:
    """Run the script until it ends, with as many restarts as its rehearsals make. Return its exit code.

    Args:
        script: function to run.
        directory: for the files with which the ranks find each other.
        number: part of these files' names.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for replay in itertools.count():
        ours, theirs = socket.socketpair()
        child = os.fork()
        if child == 0:
            ours.close()
            code = 1
            try:
                passes.restart = functools.partial(_hand_over, theirs)
                passes.beside = functools.partial(_beside, theirs)  # type: ignore[assignment]
                if world > 1:
                    store = f"file://{directory}/store-{os.environ['EVERSTEP_GENERATION']}-{number}{replay}"
                    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
                script()
                code = 0
            except SystemExit as end:
                code = int(end.code or 0)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        theirs.close()
        restart = None
        for place, request in enumerate(iter(functools.partial(_request, ours), None)):
            if request["is_restart"]:
                restart = request
            else:
                _run_beside(request, script, directory, f"{number}{replay}-{place}-", ours)
        ours.close()
        _, status = os.waitpid(child, 0)
        if restart is None:
            return os.waitstatus_to_exitcode(status)
        _take(restart)
    raise AssertionError


def _request(ours: socket.socket) -> dict[str, Any] | None:
    """Return the next request of the child, with the descriptors that came with it. None after the child's end."""
    data, received, _, _ = socket.recv_fds(ours, 1 << 20, 16)
    return json.loads(data) | {"received": received} if data else None


def _take(request: dict[str, Any]) -> None:
    """Set the variables of a request, and give the received descriptors the numbers of the sender."""
    os.environ |= request["variables"]
    received = request["received"]
    # Free the numbers first, because a received descriptor may have one of them.
    moved = [os.dup2(each, 500 + place) for place, each in enumerate(received)]
    for each in received:
        os.close(each)
    for each, wanted in zip(moved, request["numbers"], strict=True):
        os.dup2(each, wanted)
        os.close(each)


def _run_beside(
    request: dict[str, Any], script: Callable[[], None], directory: Path, number: str, ours: socket.socket
) -> None:
    """Run the script in a further process until the rank says so, or ends."""
    child = os.fork()
    os.setpgid(child, child)  # in both processes, because either may be first
    if child == 0:
        ours.close()
        _take(request)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os._exit(run(script, directory, number))
    for each in request["received"]:
        os.close(each)
    ours.recv(1)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)


def _sent(parent: socket.socket, variables: Mapping[str, str], kept: Iterable[Path], *, is_restart: bool) -> None:
    numbers = [int(path.name) for path in kept]
    sys.stdout.flush()
    sys.stderr.flush()
    message = json.dumps({"variables": dict(variables), "numbers": numbers, "is_restart": is_restart}).encode()
    socket.send_fds(parent, [message], numbers)


def _hand_over(parent: socket.socket, variables: Mapping[str, str], kept: Iterable[Path]) -> NoReturn:
    passes.end_children()
    _sent(parent, variables, kept, is_restart=True)
    os._exit(0)


@contextmanager
def _beside(parent: socket.socket, variables: Mapping[str, str], kept: Iterable[Path]) -> Generator[None]:
    _sent(parent, {**variables, **passes.new_rendezvous()}, kept, is_restart=False)
    try:
        yield
    finally:
        parent.send(b"e")
