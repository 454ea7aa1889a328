"""Defines the paths of a rank's files on its node, and reads the last lines of a file.

    <state>/logs/<run>/gen=<g>/rank=<r>.stdout | .stderr
    <state>/outputs/<run>/gen=<g>/rank=<r>/
    <state>/sources/<run>/                     the tree of the job's source, in which the ranks work
    <state>/outputs/<run>/gen=<g>/source/      this tree, after the ranks have ended
    <state>/homes/<run>/                       only if ranks run as another user; deleted with the run's other files

Invariant: no other module builds these paths.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from everstep.protocol.ids import Generation, Rank, RunId
from worker.node.rank_user import RankUser, create_traversable_dir, make_own

LAST_LINES_BYTES = 4096


@dataclass(frozen=True, slots=True)
class RankFiles:
    """Paths of one rank's stdout, stderr and output folder in one generation."""

    state_dir: Path
    run: RunId
    generation: Generation
    rank: Rank

    @property
    def stdout(self) -> Path:
        """File of the rank's standard output."""
        return self._logs / f"rank={self.rank}.stdout"

    @property
    def stderr(self) -> Path:
        """File of the rank's standard error."""
        return self._logs / f"rank={self.rank}.stderr"

    @property
    def output_dir(self) -> Path:
        """Folder for the rank's output files, whose path the rank receives as EVERSTEP_OUTPUT_DIR."""
        return outputs_of(self.state_dir, self.run) / f"gen={self.generation}" / f"rank={self.rank}"

    @property
    def _logs(self) -> Path:
        return logs_of(self.state_dir, self.run) / f"gen={self.generation}"

    def make(self, user: RankUser | None = None) -> None:
        """Create the folders. Only the agent's user can read the streams; `user`, if given, owns the output folder."""
        self._logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in (self.state_dir / "outputs", outputs_of(self.state_dir, self.run), self.output_dir.parent):
            create_traversable_dir(folder, user)
        make_own(self.output_dir, user)


def logs_of(state_dir: Path, run: RunId) -> Path:
    """Return the folder of the streams of a run's ranks on this node."""
    return state_dir / "logs" / run


def outputs_of(state_dir: Path, run: RunId) -> Path:
    """Return the folder of the output files of a run's ranks on this node."""
    return state_dir / "outputs" / run


def source_of(state_dir: Path, run: RunId) -> Path:
    """Return the folder of the source tree in which a run's ranks work."""
    return state_dir / "sources" / run


def ended_source_of(state_dir: Path, run: RunId, generation: Generation) -> Path:
    """Return the folder to which the source tree is moved after the ranks have ended."""
    return outputs_of(state_dir, run) / f"gen={generation}" / "source"


def home_of(state_dir: Path, run: RunId) -> Path:
    """Return the home folder of a run's ranks, used if ranks run as another user than the agent."""
    return state_dir / "homes" / run


def make_home(state_dir: Path, run: RunId, user: RankUser) -> dict[str, str]:
    """Make the home folder of a run's ranks and return the variables that point to it (HOME, USER, …)."""
    home = home_of(state_dir, run)
    create_traversable_dir(home.parent, user)
    make_own(home, user)
    return user.identity(home)


def last_lines(path: Path, limit_bytes: int = LAST_LINES_BYTES) -> str:
    """Return the last lines of a UTF-8 file, at most `limit_bytes` (or the end of one line); empty without a file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            begin = max(0, size - limit_bytes)
            file.seek(max(0, begin - 1))
            data = file.read(size - file.tell())
    except FileNotFoundError:
        return ""
    if begin:
        cut = data.find(b"\n")
        data = data[cut + 1 :] if 0 <= cut < len(data) - 1 else data[1:]
    # A progress bar overwrites its line after each carriage return. The last state is what the user saw.
    rows = (row.rstrip() if "\r" in row else row for row in data.decode(errors="replace").split("\n"))
    text = "\n".join(row.rpartition("\r")[2] for row in rows)
    # Decoding may lengthen the text: a replacement character has three bytes and replaces one byte.
    while len(text.encode()) > limit_bytes:
        text = text[len(text) // 8 + 1 :]
    return text
