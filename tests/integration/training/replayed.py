"""Runs a script as a rank whose rehearsals restart it.

In production, a process continues with the next replay by an exec. Here its parent forks a process for the next replay
and hands it the files in memory, so that no test waits for the imports.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from everstep.training.determinism import passes


def run(script: Callable[[], None], directory: Path) -> int:
    """Run the script until it ends, with as many restarts as its rehearsals make. Return its exit code."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    number = 0
    while True:
        ours, theirs = socket.socketpair()
        child = os.fork()
        if child == 0:
            ours.close()
            code = 1
            try:
                passes.restart = functools.partial(_hand_over, theirs)
                if world > 1:
                    store = f"file://{directory}/store-{os.environ['EVERSTEP_GENERATION']}-{number}"
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
        data, received, _, _ = socket.recv_fds(ours, 1 << 20, 16)
        ours.close()
        _, status = os.waitpid(child, 0)
        if not data:
            return os.waitstatus_to_exitcode(status)
        handed = json.loads(data)
        os.environ |= handed["variables"]
        number += 1
        # Free the numbers first, because a received descriptor may have one of them.
        moved = [os.dup2(each, 500 + place) for place, each in enumerate(received)]
        for each in received:
            os.close(each)
        for each, wanted in zip(moved, handed["numbers"], strict=True):
            os.dup2(each, wanted)
            os.close(each)


def _hand_over(parent: socket.socket, variables: Mapping[str, str], kept: Iterable[Path]) -> NoReturn:
    passes.end_children()
    numbers = [int(path.name) for path in kept]
    sys.stdout.flush()
    sys.stderr.flush()
    message = json.dumps({"variables": dict(variables), "numbers": numbers}).encode()
    socket.send_fds(parent, [message], numbers)
    os._exit(0)
