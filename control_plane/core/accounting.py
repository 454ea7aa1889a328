"""Where a job's time goes (design §7, Accounting): every second belongs to exactly one bucket.

Invariant: after `charge(now)` the buckets add up to `now` minus the job's creation, whatever was charged before and however late.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum

from control_plane.core.observed import JobRecord
from control_plane.core.states import ENDED_JOBS, IncidentState, JobState


class Bucket(StrEnum):
    """What a second was spent on.

    QUEUE: waiting for its turn. PROVISION: waiting for its first nodes. START: the first launch. TRAIN: steps that count. STALL: running, but no
    boundary for a long time. DETECT, REPLACE, RESTORE, REWORK: the phases of incidents. STOPPING: an agreed stop. UNACCOUNTED: no control plane
    looked.
    """

    QUEUE = "queue"
    PROVISION = "provision"
    START = "start"
    TRAIN = "train"
    STALL = "stall"
    DETECT = "detect"
    REPLACE = "replace"
    RESTORE = "restore"
    REWORK = "rework"
    STOPPING = "stopping"
    UNACCOUNTED = "unaccounted"


_BY_STATE = {
    JobState.QUEUED: Bucket.QUEUE,
    JobState.ALLOCATING: Bucket.PROVISION,
    JobState.PREPARING: Bucket.START,
    JobState.LOADING: Bucket.START,
    JobState.STARTING: Bucket.START,
    JobState.RUNNING: Bucket.TRAIN,
    JobState.STOPPING: Bucket.STOPPING,
}
_BY_INCIDENT = {
    IncidentState.REPLACING: Bucket.REPLACE,
    IncidentState.RESTORING: Bucket.RESTORE,
    IncidentState.REWORKING: Bucket.REWORK,
}
_SURVIVES_A_GAP = frozenset({JobState.QUEUED, JobState.ALLOCATING, JobState.RUNNING})
"""States that last without a control plane; in any other one, nobody knows what a gap was spent on."""


def bucket(record: JobRecord, *, is_stalled: bool = False) -> Bucket:
    """Return the bucket of the present second.

    Args:
        record: the job as it is now; it has not ended.
        is_stalled: it runs, but no boundary was reported for longer than a boundary may take.

    Returns:
        The one bucket that is filling; an open incident names it before the state does, except while the job stops.
    """
    if record.incident is not None and record.state is not JobState.STOPPING:
        return _BY_INCIDENT.get(record.incident.state, Bucket.TRAIN)
    if is_stalled and record.state is JobState.RUNNING:
        return Bucket.STALL
    return _BY_STATE[record.state]


def charge(record: JobRecord, now: float, *, gap_seconds: float, is_stalled: bool = False) -> JobRecord:
    """Return the record with the time since the last charge added to the bucket that it is in.

    Called with the record as it was, before a pass changes its state.

    Args:
        record: as stored.
        now: Unix seconds; a clock that went back charges nothing.
        gap_seconds: passes are never further apart than this while a control plane works on the job.
        is_stalled: see `bucket`.

    Returns:
        The record, accounted until `now`; unchanged once the job has ended.
    """
    since = record.created_at if record.accounted_until is None else record.accounted_until
    passed = now - since
    if record.state in ENDED_JOBS or passed <= 0:
        return record
    into = bucket(record, is_stalled=is_stalled)
    if passed > gap_seconds and record.state not in _SURVIVES_A_GAP:
        into = Bucket.UNACCOUNTED
    return replace(record, seconds=_added(record.seconds, into, passed), accounted_until=now)


def recharge_detection(record: JobRecord, detect_seconds: float) -> JobRecord:
    """Return the record with the time between a failure and its detection moved out of training, where it was charged when nobody knew."""
    moved = min(detect_seconds, record.seconds.get(Bucket.TRAIN, 0.0))
    if moved <= 0:
        return record
    return replace(record, seconds=_added(_added(record.seconds, Bucket.TRAIN, -moved), Bucket.DETECT, moved))


def ettr_ratio(seconds: Mapping[str, float], now: float, started_at: float | None) -> float | None:
    """Return effective training time ÷ wall time since the first start, queueing excluded.

    Args:
        seconds: by bucket, charged up to `now`.
        now: Unix seconds; the end of the job once it has ended.
        started_at: first time that its ranks were started.

    Returns:
        0 to 1, or None before the first start.

    Source: Kokolis et al., HPCA'25 (arXiv 2410.21680).
    """
    if started_at is None or now <= started_at:
        return None
    return min(1.0, seconds.get(Bucket.TRAIN, 0.0) / (now - started_at))


def _added(seconds: Mapping[str, float], into: Bucket, amount: float) -> dict[str, float]:
    return {**seconds, into.value: seconds.get(into, 0.0) + amount}
