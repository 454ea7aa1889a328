"""The spans of a job's time: what the job did, and since when."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Bucket(StrEnum):
    """The categories of a job's time. The ledger adds each period of the job's life to one of them.

    - QUEUE: the job waits in the queue.
    - PROVISION: the job waits for its first nodes.
    - START: the job starts its ranks and has not completed its first step yet.
    - TRAIN: the ranks train, and have completed a new step since their start.
    - SHORTAGE: training time that is lost because the job trains on fewer nodes than it requested. With n of N nodes,
      n/N of the training time counts as TRAIN, and the rest as SHORTAGE.
    - STALL: the ranks have completed a new step, and the next step already takes longer than the hang limit.
    - REHEARSAL: the ranks repeat steps, to prove that a restart repeats them bit for bit.
    - DETECT, REPLACE, REWORK: an incident is open and in the phase of the same name.
    - RESTORE: an incident is open and in the phase of this name, or the job continues after a pause and its restarted
      ranks have not completed a new step yet.
    - STOPPING: the control plane has requested that all ranks stop at one agreed step.
    - PAUSED: the job has no nodes, because a job of higher priority received them or a person paused the job.
    - UNACCOUNTED: no control-plane server was working on the job, and the ranks did not train.
    """

    QUEUE = "queue"
    PROVISION = "provision"
    START = "start"
    TRAIN = "train"
    SHORTAGE = "shortage"
    STALL = "stall"
    REHEARSAL = "rehearsal"
    DETECT = "detect"
    REPLACE = "replace"
    RESTORE = "restore"
    REWORK = "rework"
    STOPPING = "stopping"
    PAUSED = "paused"
    UNACCOUNTED = "unaccounted"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpan:
    """A period of a job's life in one bucket. It ends where the next span begins, or at `accounted_until`."""

    start: int
    """Unix time in microseconds."""
    bucket: Bucket
    present: int = 1
    missing: int = 0
    """If `present` of `present + missing` nodes train, this share of the span counts as TRAIN, the rest as SHORTAGE."""
