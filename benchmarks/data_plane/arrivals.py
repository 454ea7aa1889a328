"""Measures a restore from another node's memory into the model of a rank that already waits for its state.

    rank: model built, `init` ──▶ waits ──▶ copies verified chunks ──▶ `restore` returns
    owner's node:                 fetch begins ──▶ verified, chunk by chunk ──▶ notifies the rank

The measured time lasts from the start of the fetch until the rank's `restore` returns, by one clock.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.data_plane.launches import Talk, processes, tmpfs_folder

MNT_DETACH = 2
NODE, RANK = "benchmarks.data_plane.rank.node", "benchmarks.data_plane.rank.waiting"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """The durations of one restore."""

    fetch_seconds: float
    """Seconds until all bytes were verified in the memory of the rank's node."""
    model_seconds: float
    """Seconds until `restore` returned in the rank."""
    verified: bool


def run_arrivals(home: Path, *, state_mib: int, count: int) -> list[Arrival]:
    """Store a rank's state on two nodes, then restore it `count` times to a node that has lost it.

    Raises BenchmarkFailed with the path of the log if a process ended.
    """
    home.mkdir(parents=True)
    with tmpfs_folder() as memory:
        folders = {role: memory / role for role in ("owner", "holder")}
        commands = [[sys.executable, "-m", NODE, role, str(folder), str(state_mib)] for role, folder in folders.items()]
        commands.append([sys.executable, "-m", RANK, str(folders["owner"]), str(state_mib)])
        with processes(commands, home, {}, is_talking=True) as started:
            owner, holder, rank = talks = [Talk(process, home) for process in started]
            for talk in talks:
                talk.answer()
            owner.ask(["start"])
            return _drive(owner, holder, rank, count)


def _drive(owner: Talk, holder: Talk, rank: Talk, count: int) -> list[Arrival]:
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
