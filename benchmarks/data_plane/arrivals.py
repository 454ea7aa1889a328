"""From the peer's memory into the model of a rank that waits for it: fetch and restore begin at once, and the rank copies behind the fetch.

    rank: model built, `init` ──▶ waits ──▶ copies what is verified ──▶ `restore` returns
    owner's node:                 fetch begins ──▶ verified, chunk by chunk ──▶ says so

Invariant: the time runs from the fetch's beginning, the rank waiting, to the rank's return from `restore`, on a clock
that all processes share.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.data_plane.launches import processes, tmpfs_folder
from benchmarks.errors import BenchmarkFailed

MNT_DETACH = 2
NODE, RANK = "benchmarks.data_plane.rank.node", "benchmarks.data_plane.rank.waiting"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """The rank's state brought once."""

    fetch_seconds: float
    """Until all of it was in the own node's memory, verified."""
    model_seconds: float
    """Until the rank's `restore` had returned."""
    verified: bool


def run_arrivals(home: Path, *, state_mib: int, count: int) -> list[Arrival]:
    """Have a state kept on two nodes, and bring it back so many times to a node that has lost it.

    Args:
        home: folder for logs; made here.
        state_mib: of the rank.
        count: of restores.

    Returns:
        What was seen.

    Raises:
        BenchmarkFailed: a process ended; the message says where its log is.
    """
    home.mkdir(parents=True)
    with tmpfs_folder() as memory:
        folders = {role: memory / role for role in ("owner", "holder")}
        commands = [[sys.executable, "-m", NODE, role, str(folder), str(state_mib)] for role, folder in folders.items()]
        commands.append([sys.executable, "-m", RANK, str(folders["owner"]), str(state_mib)])
        try:
            with processes(commands, home, {}, is_talking=True) as started:
                owner, holder, rank = talks = [_Talk(process, home) for process in started]
                for talk in talks:
                    talk.answer()
                owner.ask(["start"])
                return _drive(owner, holder, rank, count)
        finally:
            for folder in folders.values():  # a node mounts a tmpfs of its own where it may
                ctypes.CDLL(None).umount2(os.fsencode(folder), MNT_DETACH)


def _drive(owner: _Talk, holder: _Talk, rank: _Talk, count: int) -> list[Arrival]:
    found: list[Arrival] = []
    for generation in range(1, count + 2):
        port = holder.ask(["open", generation])["port"]
        owner.ask(["open", generation, port])
        rank.say(generation)
        loaded = owner.ask(["load"])
        seen = rank.answer()
        owner.ask(["close"])
        if generation > 1:
            found.append(
                Arrival(
                    fetch_seconds=loaded["loaded"] - loaded["begun"],
                    model_seconds=seen["restored"] - loaded["begun"],
                    verified=seen["verified"],
                )
            )
    return found


class _Talk:
    """One process that answers lines."""

    def __init__(self, process: subprocess.Popen[bytes], home: Path) -> None:
        self._process = process
        self._home = home

    def say(self, words: object) -> None:
        """Send a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(words).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """Return the next answer."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BenchmarkFailed(f"a rank that waits for its state cannot be measured; see {self._home}")
        return json.loads(line)

    def ask(self, words: object) -> Any:
        """Send a line and return its answer."""
        self.say(words)
        return self.answer()
