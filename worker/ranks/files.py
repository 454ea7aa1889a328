"""Where a rank's streams, its outputs and its home lie on its node, and the end of a stream.

    <state>/logs/<run>/gen=<g>/rank=<r>.stdout | .stderr
    <state>/outputs/<run>/gen=<g>/rank=<r>/
    <state>/homes/<run>/                       where ranks have another user than the agent: that user's, for as long as the run is here

Invariant: one place names these paths; whoever writes, reads, uploads or forgets them asks here.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from everstep.protocol.ids import Generation, Rank, RunId
from worker.node.rank_user import RankUser, make_own, make_way

LAST_LINES_BYTES = 4096


@dataclass(frozen=True, slots=True)
class RankFiles:
    """The files of one rank in one generation."""

    state_dir: Path
    run: RunId
    generation: Generation
    rank: Rank

    @property
    def stdout(self) -> Path:
        """What it printed."""
        return self._logs / f"rank={self.rank}.stdout"

    @property
    def stderr(self) -> Path:
        """What it complained of."""
        return self._logs / f"rank={self.rank}.stderr"

    @property
    def output_dir(self) -> Path:
        """Its EVERSTEP_OUTPUT_DIR."""
        return outputs_of(self.state_dir, self.run) / f"gen={self.generation}" / f"rank={self.rank}"

    @property
    def _logs(self) -> Path:
        return logs_of(self.state_dir, self.run) / f"gen={self.generation}"

    def make(self, user: RankUser | None = None) -> None:
        """Make the folders: streams this process's alone, outputs those of the ranks' user, where that is another."""
        self._logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in (self.state_dir / "outputs", outputs_of(self.state_dir, self.run), self.output_dir.parent):
            make_way(folder, user)
        make_own(self.output_dir, user)


def logs_of(state_dir: Path, run: RunId) -> Path:
    """Return the folder of all streams of a run."""
    return state_dir / "logs" / run


def outputs_of(state_dir: Path, run: RunId) -> Path:
    """Return the folder of all outputs of a run."""
    return state_dir / "outputs" / run


def home_of(state_dir: Path, run: RunId) -> Path:
    """Return the home of the ranks of a run, where their user is not the agent's."""
    return state_dir / "homes" / run


def make_home(state_dir: Path, run: RunId, user: RankUser) -> dict[str, str]:
    """Make the home of a run's ranks; returns the variables that lead to it.

    A run has its own: what a job leaves there no other reads or runs.
    """
    home = home_of(state_dir, run)
    make_way(home.parent, user)
    make_own(home, user)
    return user.identity(home)


def last_lines(path: Path, limit_bytes: int = LAST_LINES_BYTES) -> str:
    """Read the end of a text file. A file that is not there is empty.

    Args:
        path: UTF-8; other bytes are shown as replacement characters.
        limit_bytes: how much is returned at most, encoded.

    Returns:
        The last whole lines; of a single longer line its end.
    """
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
    text = data.decode(errors="replace")
    while len(text.encode()) > limit_bytes:  # replacement characters are longer than what they stand for
        text = text[len(text) // 8 + 1 :]
    return text
