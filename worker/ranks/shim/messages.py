"""What the agent and its shim say to each other, in `everstep.protocol.codec` frames on the shim's unix socket.

    agent                                  shim
    ListRanks           ─────▶
                        ◀─────             Ranks
    StartRank           ─────▶
                        ◀─────             RankStarted | RankRefused      as soon as the process is at work
    StopRanks           ─────▶
                        ◀─────             RankExited                     for each rank, to every client, once
    ForgetRun           ─────▶                                            drops the records of ended ranks
    Shutdown            ─────▶                                            kills what lives and ends the shim

Invariant: `RankExited` follows `RankStarted` of the same rank; a client that connects later learns both from `Ranks`.
"""

from __future__ import annotations

from enum import StrEnum

from everstep.protocol.codec import Message
from everstep.protocol.ids import Generation, Rank, RunId
from worker.node.rank_user import RankUser


class Preload(StrEnum):
    """How far the template is.

    PENDING: importing; warm starts are served cold meanwhile. READY: warm starts are forked from it. FAILED: warm
    starts are served cold; the reason is in `Ranks.preload_error`. NONE: there is nothing to preload; warm starts are
    served cold.
    """

    PENDING = "pending"
    READY = "ready"
    FAILED = "failed"
    NONE = "none"


class StartRank(Message, frozen=True):
    """Run a Python file as one rank.

    All paths are absolute; the environment is the whole environment of the process.
    """

    run: RunId
    generation: Generation
    rank: Rank
    script: str
    arguments: tuple[str, ...]
    working_directory: str
    environment: dict[str, str]
    stdout_path: str
    stderr_path: str
    warm: bool = True
    packages: str = ""
    """A folder that is imported from before the interpreter's own packages; empty: there is none."""
    package_modules: tuple[str, ...] = ()
    """What it has: a warm rank would already have loaded others of these names."""
    user: RankUser | None = None
    """Who it runs as; None: as the shim does."""


class StopRanks(Message, frozen=True):
    """Kill the living ranks of a run and all that descends from them, all generations up to `generation`.

    None of these starts any more.
    """

    run: RunId | None
    """None: of every run."""
    generation: Generation


class ListRanks(Message, frozen=True):
    """Tell everything; answered by `Ranks`."""


class ForgetRun(Message, frozen=True):
    """Drop the records of this run's ended ranks."""

    run: RunId


class Shutdown(Message, frozen=True):
    """Kill all ranks, record their exits, leave nothing, end."""


class RankEnd(Message, frozen=True):
    """How a rank's process ended."""

    code: int
    """Exit code, or minus the signal's number."""
    at_seconds: float
    """Unix time."""
    stopped: bool
    """A `StopRanks` or `Shutdown` had reached it."""
    text: str = ""
    """Set when nobody was there to see the exit: why it is known all the same."""


class RankRecord(Message, frozen=True):
    """One rank's process, as it is also on disk."""

    run: RunId
    generation: Generation
    rank: Rank
    pid: int
    start_ticks: int
    """Field 22 of /proc/PID/stat: with the pid it names one process for ever."""
    started_at_seconds: float
    """Unix time."""
    is_warm: bool
    stdout_path: str
    stderr_path: str
    end: RankEnd | None = None
    cgroup: str = ""
    """The cgroup that it and all that it starts are in; empty where the node has none."""


class RankStarted(Message, frozen=True):
    """Answer to `StartRank`: the process runs, and its record is on disk."""

    record: RankRecord


class RankRefused(Message, frozen=True):
    """Answer to `StartRank`: there is no such process."""

    run: RunId
    generation: Generation
    rank: Rank
    reason: str


class RankExited(Message, frozen=True):
    """A rank's process has ended; its record says how, and was on disk before this was said, if the disk took it."""

    record: RankRecord


class Ranks(Message, frozen=True):
    """The shim's whole state."""

    pid: int
    records: tuple[RankRecord, ...]
    remains_count: int
    """Processes that are not gone yet although no living rank's record stands for them: of ended ranks, or about to become ranks."""
    preload: Preload
    preload_seconds: float = 0.0
    preload_bytes: int = 0
    """Resident memory of the template."""
    preload_error: str = ""
    confinement: str = ""
    """Where the cgroups of ranks are made; empty where none can be."""
    confinement_error: str = ""
    """Why none can be."""


ToShim = StartRank | StopRanks | ListRanks | ForgetRun | Shutdown
FromShim = RankStarted | RankRefused | RankExited | Ranks
