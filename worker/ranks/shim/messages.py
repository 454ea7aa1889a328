"""Defines the messages between agent and shim, in `everstep.protocol.codec` frames on the shim's unix socket.

    agent                                  shim
    ListRanks           ─────▶
                        ◀─────             Ranks
    StartRank           ─────▶
                        ◀─────             RankStarted | RankRefused      as soon as the process runs
    StopRanks           ─────▶
                        ◀─────             RankExited                     for each rank, to every client, once
    ForgetRun           ─────▶                                            drops the records of ended ranks
    Shutdown            ─────▶                                            kills all ranks and ends the shim

Invariant: `RankExited` follows `RankStarted` of the same rank.
"""

from __future__ import annotations

from enum import StrEnum

from everstep.protocol.codec import Message
from everstep.protocol.ids import Generation, Rank, RunId
from worker.node.rank_user import RankUser


class Preload(StrEnum):
    """State of the template. Ranks start warm only in state READY."""

    # The template still imports.
    PENDING = "pending"
    READY = "ready"
    FAILED = "failed"
    # The shim has no modules to preload.
    NONE = "none"


RankKey = tuple[RunId, Generation, Rank]


class RankMessage(Message, frozen=True):
    """A message about one rank of one generation."""

    run: RunId
    generation: Generation
    rank: Rank

    @property
    def key(self) -> RankKey:
        """Run, generation and rank, in this order."""
        return self.run, self.generation, self.rank


class StartRank(RankMessage, frozen=True):
    """Request to run a Python script as one rank, with absolute paths and exactly this environment."""

    script: str
    arguments: tuple[str, ...]
    working_directory: str
    environment: dict[str, str]
    stdout_path: str
    stderr_path: str
    warm: bool = True
    packages: str = ""
    """Folder from which the rank imports before the interpreter's own packages; empty for no folder."""
    package_modules: tuple[str, ...] = ()
    """Names of the modules in `packages`. If the template has imported one of them, the rank starts cold."""
    user: RankUser | None = None
    """The user that the process runs as; None means the shim's user."""
    module: str = ""
    """Name under which the script runs, as with `python -m`, from the working directory; empty: it runs by its path."""


class StopRanks(Message, frozen=True):
    """Request to kill ranks of one run or of every run, up to a generation, with all their processes.

    If `run` is not None, the shim also refuses to start ranks of these generations of the run later.
    """

    run: RunId | None
    """None means the ranks of every run."""
    generation: Generation


class ListRanks(Message, frozen=True):
    """Request for `Ranks`."""


class ForgetRun(Message, frozen=True):
    """Request to drop the records of this run's ended ranks."""

    run: RunId


class Shutdown(Message, frozen=True):
    """Request to kill all ranks, record their exits, remove all files and cgroups, and end the shim."""


class RankEnd(Message, frozen=True):
    """The end of a rank's process."""

    code: int
    """Exit code of the process, or minus the number of the signal that ended it."""
    at_seconds: float
    """Unix time."""
    stopped: bool
    """True if the agent had requested the end before the process ended."""
    text: str = ""
    """Explanation of an end that the shim did not observe itself; otherwise empty."""


class RankRecord(RankMessage, frozen=True):
    """Record of one rank's process, also stored on disk."""

    pid: int
    start_ticks: int
    """Field 22 of /proc/PID/stat; together with the pid it identifies the process uniquely."""
    started_at_seconds: float
    """Unix time."""
    is_warm: bool
    stdout_path: str
    stderr_path: str
    end: RankEnd | None = None
    cgroup: str = ""
    """Path of the cgroup of the rank and all its descendants; empty if the rank has no cgroup."""


class RankStarted(Message, frozen=True):
    """Answer to `StartRank`: the process runs, and its record is on disk."""

    record: RankRecord


class RankRefused(RankMessage, frozen=True):
    """Answer to `StartRank`: the shim did not start this rank."""

    reason: str
    is_stopped: bool = False


class RankExited(Message, frozen=True):
    """Report that a rank's process has ended. Its record is on disk, unless the disk refuses the write."""

    record: RankRecord


class Ranks(Message, frozen=True):
    """The full state of the shim."""

    pid: int
    records: tuple[RankRecord, ...]
    remains_count: int
    """Number of processes below the shim that belong to no living rank: descendants of ended ranks, and new ranks."""
    preload: Preload
    preload_seconds: float = 0.0
    preload_bytes: int = 0
    preload_error: str = ""
    confinement: str = ""
    """Folder in which the cgroups of ranks are created; empty if ranks have no cgroups."""
    confinement_error: str = ""
    """Reason why ranks have no cgroup; empty if they have."""
    limits_error: str = ""
    """Reason why the limits of the agent's options do not apply to ranks. Empty if they apply, or no limit is set."""


ToShim = StartRank | StopRanks | ListRanks | ForgetRun | Shutdown
FromShim = RankStarted | RankRefused | RankExited | Ranks
