"""Where a job's time goes (design §7, Accounting): every second belongs to exactly one bucket.

    created_at ── queue ── provision ── start ── train ── detect ── replace ── restore ── rework ── train ── … ── accounted until

Time is counted in whole microseconds, because floats do not add up. The ledger never goes back: while a clock stands behind `accounted_until`
nothing is charged, and a job that ends meanwhile ends where its ledger does.

Invariant: the buckets add up, to the microsecond, to the time between the job's creation and `accounted_until`, and that is its end once it has
ended; whoever charged, however late, and whatever the clock did.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum

from control_plane.core.observed import IncidentRecord, JobRecord
from control_plane.core.states import ENDED_JOBS, IncidentState, JobState


class Bucket(StrEnum):
    """What a second was spent on.

    QUEUE: waiting for its turn. PROVISION: waiting for its first nodes. START: a launch that no failure made necessary. TRAIN: steps that count.
    STALL: running, but no boundary for a long time. DETECT, REPLACE, RESTORE, REWORK: the phases of incidents. STOPPING: an agreed stop. PAUSED:
    without nodes since it gave them to a job of higher priority, or a person paused it. UNACCOUNTED: no control plane looked.
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
    PAUSED = "paused"
    UNACCOUNTED = "unaccounted"


_BY_STATE = {
    JobState.QUEUED: Bucket.QUEUE,
    JobState.ALLOCATING: Bucket.PROVISION,
    JobState.PREPARING: Bucket.START,
    JobState.LOADING: Bucket.START,
    JobState.STARTING: Bucket.START,
    JobState.RUNNING: Bucket.TRAIN,
    JobState.PAUSING: Bucket.STOPPING,
    JobState.STOPPING: Bucket.STOPPING,
}
_BY_INCIDENT = {
    IncidentState.REPLACING: Bucket.REPLACE,
    IncidentState.RESTORING: Bucket.RESTORE,
    IncidentState.REWORKING: Bucket.REWORK,
}
_SURVIVES_A_GAP = frozenset({JobState.QUEUED, JobState.ALLOCATING, JobState.RUNNING})
"""States that last without a control plane; in any other one, nobody knows what a gap was spent on."""
_WAITING = (Bucket.QUEUE, Bucket.PROVISION, Bucket.PAUSED)
"""Without nodes: the paper's queue time."""
_UP = (Bucket.TRAIN, Bucket.STALL)
"""Training, as far as anybody knew: time in which a failure can begin."""
_MICRO = 1_000_000
_MICROSECONDS_PER_HOUR = 3600 * _MICRO


def microseconds(seconds: float) -> int:
    """Return seconds in whole microseconds; of Unix times, the very microsecond that a `datetime` of them has."""
    return round(seconds * _MICRO)


def accounted_until(record: JobRecord) -> float:
    """Return the moment up to which the job's time is in its buckets: where its ledger stands."""
    return record.created_at if record.accounted_until is None else record.accounted_until


def bucket(record: JobRecord, *, is_stalled: bool = False) -> Bucket:
    """Return the bucket of the present second.

    Args:
        record: the job as it is now; it has not ended.
        is_stalled: it runs, but no boundary was reported for longer than a boundary may take.

    Returns:
        The one bucket that is filling; an open incident names it before the state does, except while the job stops or pauses.
    """
    if record.incident is not None and record.state not in (JobState.PAUSING, JobState.STOPPING):
        return _BY_INCIDENT.get(record.incident.state, Bucket.TRAIN)
    if is_stalled and record.state is JobState.RUNNING:
        return Bucket.STALL
    if record.pause_requested_at is not None and record.state is JobState.QUEUED:
        return Bucket.PAUSED
    if record.started_at is not None and record.state in (JobState.QUEUED, JobState.ALLOCATING):
        return Bucket.PAUSED
    return _BY_STATE[record.state]


def charge(record: JobRecord, now: float, *, gap_seconds: float, node_count: int = 0, is_stalled: bool = False) -> JobRecord:
    """Return the record with the time since the last charge added to the bucket that it is in, and to what its nodes have worked.

    Called with the record as it was, before a pass changes its state. A record whose number of nodes changes has to be stored.

    Args:
        record: as stored.
        now: Unix seconds; a clock that went back charges nothing.
        gap_seconds: passes are never further apart than this while a control plane works on the job.
        node_count: nodes that work for the job from now on: what it pays for.
        is_stalled: see `bucket`.

    Returns:
        The record, accounted until `now`, with the gap if there was one; unchanged once the job has ended.
    """
    until = microseconds(now)
    passed = until - microseconds(accounted_until(record))
    if record.state in ENDED_JOBS:
        return record
    if passed <= 0:
        return replace(record, node_count=node_count)
    into = bucket(record, is_stalled=is_stalled)
    is_gap = passed > microseconds(gap_seconds)
    if is_gap and record.state not in _SURVIVES_A_GAP:
        into = Bucket.UNACCOUNTED
    return replace(
        record,
        unwatched=(accounted_until(record), now) if is_gap else record.unwatched,
        microseconds=_added(record.microseconds, into, passed),
        node_microseconds=record.node_microseconds + passed * record.node_count,
        node_count=node_count,
        accounted_until=until / _MICRO,
    )


def recharge_detection(record: JobRecord, incident: IncidentRecord, *, known_at: float | None = None) -> JobRecord:
    """Return the record with the time between a failure and its detection moved to where it belongs.

    While nobody knew of the failure, it was charged to what seemed to go on: training, a launch, or the rework of the incident before.

    Args:
        record: charged up to the detection; its state and its incident are those before.
        incident: opened just now.
        known_at: Unix seconds: when the job was seen to stand still, from when on it was charged as stalled; None: when the incident was opened.

    Returns:
        The record with the same sum; no more is moved than was charged.
    """
    until = incident.opened_at if known_at is None else known_at
    return _moved(record, bucket(record), Bucket.DETECT, microseconds(until) - microseconds(incident.failed_at))


def recharge_unnoticed(record: JobRecord, amount: int) -> JobRecord:
    """Return the record with so many microseconds more of its training moved to detection: a failure turned out to be that much older.

    Args:
        record: its open incident is not yet past the detection's end.
        amount: microseconds; no more is moved than was charged.

    Returns:
        The record with the same sum.
    """
    return _moved(record, Bucket.TRAIN, Bucket.DETECT, amount)


def recharge_recovery(record: JobRecord, before: IncidentRecord, after: IncidentRecord, *, gap_seconds: float) -> JobRecord:
    """Return the record with the time between the end of a phase and the pass that heard of it moved to what had begun by then.

    Args:
        record: charged up to this pass.
        before: the incident as the pass found it.
        after: as it is now: some of its moments may lie before this pass.
        gap_seconds: as `charge` was given.

    Returns:
        The record with the same sum; no more is moved than was charged. As it is where nobody looked after the job when it was restored: that time
        was charged as unaccounted, which it stays.
    """
    if before.restored_at is None and after.restored_at is not None and accounted_until(record) - after.restored_at > gap_seconds:
        return record
    for was, into, known, ended_at in (
        (Bucket.RESTORE, Bucket.REWORK, before.restored_at, after.restored_at),
        (Bucket.REWORK, Bucket.TRAIN, before.closed_at, after.closed_at),
    ):
        if known is None and ended_at is not None:
            record = _moved(record, was, into, microseconds(accounted_until(record)) - microseconds(ended_at))
    return record


def _moved(record: JobRecord, was: Bucket, into: Bucket, amount: int) -> JobRecord:
    """Return the record with so many microseconds moved, no more than were charged; the sum stays."""
    moved = min(amount, record.microseconds.get(was, 0))
    return record if moved <= 0 else replace(record, microseconds=_added(_added(record.microseconds, was, -moved), into, moved))


def idle_node_microseconds(incident: IncidentRecord, record: JobRecord) -> int:
    """Return for how long nodes made no new step because of an incident, all of the job's nodes together.

    Args:
        incident: open, or closed in this pass.
        record: charged in this pass.

    Returns:
        Node-microseconds from the failure to the incident's end, or so far. A node that is lost counts until it is taken from the job, its
        replacement from when it is given to it.
    """
    end = accounted_until(record) if incident.closed_at is None else incident.closed_at
    beyond = max(0, microseconds(accounted_until(record)) - microseconds(end))
    return max(0, record.node_microseconds - incident.node_microseconds_before - beyond * record.node_count)


def idle_so_far(incident: IncidentRecord, record: JobRecord, now: float) -> int:
    """Return `idle_node_microseconds` of an open incident up to now, where the ledger stands a while back.

    Args:
        incident: open.
        record: as stored.
        now: Unix seconds; behind the ledger counts as where it stands.

    Returns:
        Node-microseconds; the nodes that worked for the job when the ledger was charged last count since then.
    """
    since = max(0, microseconds(now) - microseconds(accounted_until(record)))
    return idle_node_microseconds(incident, record) + since * record.node_count


def cost_usd(node_microseconds: int, price_usd_per_hour: float | None) -> float | None:
    """Return what nodes cost for a time, or None where the fleet's price is not known."""
    return None if price_usd_per_hour is None else node_microseconds * price_usd_per_hour / _MICROSECONDS_PER_HOUR


def ettr_ratio(spent: Mapping[str, int], *, is_queue_counted: bool = False) -> float | None:
    """Return effective training time ÷ wall time.

    Args:
        spent: microseconds by bucket, of one job or of several together.
        is_queue_counted: count the time without nodes (queue, provision, paused), as the source does; else wall time begins when the first
            gang of nodes is there and stands still while the job is paused.

    Returns:
        0 to 1, or None while there is nothing to divide by.

    Source: Kokolis et al., HPCA'25 (arXiv 2410.21680): R ÷ (R + U + Q), productive, unproductive and queue time.
    """
    wall = sum(spent.values()) - (0 if is_queue_counted else sum(spent.get(name, 0) for name in _WAITING))
    return spent.get(Bucket.TRAIN, 0) / wall if wall > 0 else None


def remaining_seconds(spent: Mapping[str, int], finished: int, target: int) -> float | None:
    """Return how long the steps that are left take at the mean pace of those that are finished.

    Time in training is the time in which steps were made for the first time: failures, waiting and steps done again slow no estimate down, and
    none that may still come is in it.

    Args:
        spent: microseconds by bucket, of one job.
        finished: steps, the highest number that any generation reached.
        target: steps finished when the script will be done.

    Returns:
        Seconds, 0 where the target is reached; None before there is a pace, or a target.
    """
    train = spent.get(Bucket.TRAIN, 0)
    if target <= 0 or finished <= 0 or train <= 0:
        return None
    return max(0, target - finished) * train / _MICRO / finished


def mean_seconds_to_failure(spent: Mapping[str, int], failure_count: int) -> float | None:
    """Return MTTF: the time in which a failure could begin (train, stall) ÷ failures; None before the first."""
    return sum(spent.get(name, 0) for name in _UP) / _MICRO / failure_count if failure_count else None


def _added(spent: Mapping[str, int], into: Bucket, amount: int) -> dict[str, int]:
    return {**spent, into.value: spent.get(into, 0) + amount}
