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

Invariant: `RankExited` follows `RankStarted` of the same rank. A client that connects later receives both facts in
`Ranks`.
"""

from __future__ import annotations

from enum import StrEnum

from everstep.protocol.codec import Message
from everstep.protocol.ids import Generation, Rank, RunId
from worker.node.rank_user import RankUser


class Preload(StrEnum):
    """State of the template, the process from which warm ranks are forked.

    - PENDING: the template still imports.
    - READY: the template can fork ranks (warm starts).
    - FAILED: `Ranks.preload_error` contains the reason.
    - NONE: the shim has no modules to preload.

    In all states except READY, ranks start cold: in a new interpreter that imports everything itself.
    """

    PENDING = "pending"
    READY = "ready"
    FAILED = "failed"
    NONE = "none"


RankKey = tuple[RunId, Generation, Rank]


class RankMessage(Message, frozen=True):
    """A message about one rank of one generation."""

    run: RunId
    generation: Generation
    rank: Rank

    @property
    def key(self) -> RankKey:
        """The rank, its generation and its run. Keys sort by run, generation and rank."""
        return self.run, self.generation, self.rank


class StartRank(RankMessage, frozen=True):
    """Request to run a Python script as one rank.

    All paths are absolute. The process has exactly the environment of the request and inherits no other variables.
    """

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
    """Names of the modules in `packages`.

    If the template process has imported one of these modules, the rank starts in a new interpreter instead of a fork.
    """
    user: RankUser | None = None
    """The user that the process runs as; None means the shim's user."""
    module: str = ""
    """Name under which the script runs, as with `python -m`, from the working directory; empty: it runs by its path."""


class StopRanks(Message, frozen=True):
    """Request to kill ranks of one run or of every run, up to a generation, with all processes that they started.

    If `run` is not None, the shim also refuses to start ranks of these generations of the run later.
    """

    run: RunId | None
    """Run whose ranks are killed. None means the ranks of every run."""
    generation: Generation


class ListRanks(Message, frozen=True):
    """Request for the records of all ranks and the state of the template, the process from which ranks are forked.

    The shim answers with `Ranks`.
    """


class ForgetRun(Message, frozen=True):
    """Request to drop the records of this run's ended ranks."""

    run: RunId


class Shutdown(Message, frozen=True):
    """Request to kill all ranks, record their exits, remove all files and cgroups, and end the shim."""


class RankEnd(Message, frozen=True):
    """The end of a rank's process: its exit code, its time, and whether the agent had requested it."""

    code: int
    """Exit code of the process, or minus the number of the signal that ended it."""
    at_seconds: float
    """Unix time in seconds at which the process ended."""
    stopped: bool
    """True if the agent had requested the end with `StopRanks` or `Shutdown` before the process ended."""
    text: str = ""
    """Explanation of an end that the shim did not observe itself; empty for an observed end."""


class RankRecord(RankMessage, frozen=True):
    """Record of one rank's process, also stored on disk."""

    pid: int
    start_ticks: int
    """Field 22 of /proc/PID/stat; together with the pid it identifies the process uniquely."""
    started_at_seconds: float
    """Unix time in seconds at which the process started."""
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
    """Answer to `StartRank`: the shim (the process that starts the node's ranks) did not start this rank."""

    reason: str
    is_stopped: bool = False
    """Whether the agent had requested the end of the rank."""


class RankExited(Message, frozen=True):
    """Report that a rank's process has ended.

    The record on disk is updated first, unless the disk refuses the write.
    """

    record: RankRecord


class Ranks(Message, frozen=True):
    """The full state of the shim, the process that starts the node's ranks.

    It contains the records of the ranks, and the state of the template process from which the shim forks ranks.
    """

    pid: int
    records: tuple[RankRecord, ...]
    remains_count: int
    """Number of processes below the shim that do not belong to a living rank.

    They are descendants of ended ranks, and ranks that are about to start.
    """
    preload: Preload
    preload_seconds: float = 0.0
    preload_bytes: int = 0
    """Resident memory of the template process in bytes."""
    preload_error: str = ""
    confinement: str = ""
    """Folder in which the cgroups of ranks are created; empty if ranks have no cgroups."""
    confinement_error: str = ""
    """Reason why ranks have no cgroup. Empty if ranks have cgroups."""
    limits_error: str = ""
    """Reason why the limits of the agent's options do not apply to ranks. Empty if they apply, or no limit is set."""


ToShim = StartRank | StopRanks | ListRanks | ForgetRun | Shutdown
FromShim = RankStarted | RankRefused | RankExited | Ranks
