"""The ledger of a job's time: every second counts in exactly one bucket (docs/design.md#accounting).

    created_at ── queue ── provision ── start ── train ── detect ── replace ── restore ── rework ── train ── …

After a start, training time begins with the first finished step, at the rank's own time stamp. While an incident is
open, its phase selects the bucket: `detect`, `replace`, `restore` or `rework`. The start after a pause also counts as
`restore`.

The ledger counts whole microseconds, because sums of floats are inexact. It contains all time up to `accounted_until`,
which never decreases. If the clock steps back behind `accounted_until`, the ledger adds no time until the clock has
caught up.

Invariant: the buckets add up, to the microsecond, to the time from the job's creation until `accounted_until`. Once the
job has ended, `accounted_until` is the job's end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from enum import StrEnum

from control_plane.core import incidents
from control_plane.core.observed.incidents import IncidentRecord
from control_plane.core.observed.jobs import JobRecord
from control_plane.core.states import ENDED_JOBS, IncidentState, JobState
from everstep.protocol.ids import FIRST_STEP


class Bucket(StrEnum):
    """The categories of a job's time. The ledger adds each period of the job's life to one of them.

    - QUEUE: the job waits in the queue.
    - PROVISION: the job waits for its first nodes.
    - START: the job starts its ranks and has not completed its first step yet.
    - TRAIN: the ranks train, and have completed a new step since their start.
    - SHORTAGE: training time that is lost because the job trains on fewer nodes than it requested. With n of N nodes,
      n/N of the training time counts as TRAIN, and the rest as SHORTAGE.
    - STALL: the ranks have completed a new step, and the next step already takes longer than the hang limit.
    - DETECT, REPLACE, REWORK: an incident is open and in the phase of the same name.
    - RESTORE: an incident is open and in the phase of this name, or the job continues after a pause and its restarted
      ranks have not completed a new step yet.
    - STOPPING: the control plane has requested that all ranks stop at one agreed step.
    - PAUSED: the job has no nodes, because a job of higher priority received them or a person paused the job.
    - UNACCOUNTED: no control-plane server was working on the job, and no incident covers this time.
    """

    QUEUE = "queue"
    PROVISION = "provision"
    START = "start"
    TRAIN = "train"
    SHORTAGE = "shortage"
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
    JobState.RUNNING: Bucket.TRAIN,
    JobState.PAUSING: Bucket.STOPPING,
    JobState.STOPPING: Bucket.STOPPING,
}
_LAUNCHING = (JobState.PREPARING, JobState.LOADING, JobState.STARTING)
_BY_INCIDENT = {
    IncidentState.REPLACING: Bucket.REPLACE,
    IncidentState.RESTORING: Bucket.RESTORE,
    IncidentState.REWORKING: Bucket.REWORK,
}
_PHASES = (Bucket.DETECT, Bucket.REPLACE, Bucket.RESTORE, Bucket.REWORK)
_SURVIVES_A_GAP = frozenset({JobState.QUEUED, JobState.ALLOCATING, JobState.RUNNING})
"""Job states that continue without a control plane. A period without a control plane counts in the state's bucket.

In other states, such a period counts as UNACCOUNTED, unless an incident is open.
"""
_SEEMED = (
    Bucket.TRAIN,
    Bucket.SHORTAGE,
    Bucket.STALL,
    Bucket.START,
    Bucket.STOPPING,
    Bucket.UNACCOUNTED,
    Bucket.PAUSED,
    Bucket.PROVISION,
    Bucket.QUEUE,
)
"""Buckets from which `follow` takes the time between a failure and its detection, in this order."""
_WAITING = (Bucket.QUEUE, Bucket.PROVISION, Bucket.PAUSED)
_UP = (Bucket.TRAIN, Bucket.SHORTAGE, Bucket.STALL)
"""Buckets from which the mean time to failure (MTTF) is computed."""
_MICRO = 1_000_000
_MICROSECONDS_PER_HOUR = 3600 * _MICRO


Members = tuple[int, int]
"""The size of a generation: its number of nodes, and the number of nodes that it lacks compared with NodeCount."""
WHOLE: Members = (1, 0)
"""The size of a generation that lacks no node: 1 present node, and 0 missing nodes.

Calculations use only the ratio of the two numbers, so 1 stands for any number of present nodes.
"""


def members_of(record: JobRecord) -> Members:
    """Return the number of nodes of the newest generation, and the number of nodes that it lacks for NodeCount."""
    return record.member_count, record.missing_count


def microseconds(seconds: float) -> int:
    """Convert seconds to whole microseconds, the unit of the ledger.

    For a Unix time, the result agrees with the microsecond of a `datetime` for the same time.
    """
    return round(seconds * _MICRO)


def accounted_until(record: JobRecord) -> float:
    """Return the Unix time up to which the job's ledger has assigned every second to a category (bucket)."""
    return record.created_at if record.accounted_until is None else record.accounted_until


def is_stepping(record: JobRecord) -> bool:
    """Return whether the newest generation has finished a step after the step that it restored."""
    return record.boundary > record.base_step


def bucket(record: JobRecord, *, is_stalled: bool = False) -> Bucket:
    """Return the bucket (category of time) that receives the time from now until the ledger's next update.

    Args:
        record: the current record of a job that has not ended.
        is_stalled: whether the job runs, but its ranks have finished no step for longer than the hang limit.

    Returns:
        The bucket. An open incident takes precedence over the job's state. From the start of ranks until their first
        new step, the bucket is START or RESTORE, even if the ranks are stalled.
    """
    if record.incident is not None:
        return _BY_INCIDENT.get(record.incident.state, Bucket.TRAIN)
    if record.state in _LAUNCHING or (record.state is JobState.RUNNING and not is_stepping(record)):
        return Bucket.START if record.max_boundary <= FIRST_STEP else Bucket.RESTORE
    if is_stalled and record.state is JobState.RUNNING:
        return Bucket.STALL
    if record.pause_requested_at is not None and record.state is JobState.QUEUED:
        return Bucket.PAUSED
    if record.started_at is not None and record.state in (JobState.QUEUED, JobState.ALLOCATING):
        return Bucket.PAUSED
    return _BY_STATE[record.state]


def charge(
    record: JobRecord, now: float, *, gap_seconds: float, node_count: int = 0, is_stalled: bool = False
) -> JobRecord:
    """Return a job's record, with the time since the last call added to the categories (buckets) of its ledger.

    The job loop calls this function before each decision about the job. The function adds the time to the bucket of the
    record's state. It also adds the time of each node to `node_microseconds`. If the number of nodes changes, the
    caller must store the returned record: the next call uses its number of nodes.

    Args:
        record: the record as the job loop has read it from the database.
        now: Unix seconds. If the clock went back, the function adds no time.
        gap_seconds: if more seconds than this pass between two calls, no control plane worked on the job in this time.
        node_count: the number of nodes that work for the job from now on.
        is_stalled: whether the job runs, but its ranks have finished no step for longer than the hang limit.

    Returns:
        The record, whose ledger includes all time until `now`. If more than `gap_seconds` have passed, the field
        `unwatched` contains the period without a control plane. Unchanged if the job has ended.
    """
    until = microseconds(now)
    passed = until - microseconds(accounted_until(record))
    if record.state in ENDED_JOBS:
        return record
    if passed <= 0:
        return replace(record, node_count=node_count)
    into = bucket(record, is_stalled=is_stalled)
    is_gap = passed > microseconds(gap_seconds)
    if is_gap and record.state not in _SURVIVES_A_GAP and record.incident is None:
        into = Bucket.UNACCOUNTED
    return replace(
        record,
        unwatched=(accounted_until(record), now) if is_gap else record.unwatched,
        microseconds=_added(record.microseconds, into, passed, members_of(record)),
        node_microseconds=record.node_microseconds + passed * record.node_count,
        node_count=node_count,
        accounted_until=until / _MICRO,
    )


def recharge_first_step(record: JobRecord, stepped_at: float) -> JobRecord:
    """Count the time since a generation's first new step as training (bucket TRAIN).

    Until the job loop observes this step, the ledger counts the time as START or RESTORE. The job loop calls this
    function when it first observes the step, before it updates `record.boundary`. No incident may be open.

    Args:
        record: the job's record. Its ledger already includes all time until now.
        stepped_at: Unix seconds at which a rank completed the step, by the rank's own time stamp.

    Returns:
        The record, with an unchanged sum of all buckets. Time without an active control plane stays in the bucket
        UNACCOUNTED.
    """
    since = stepped_at
    if record.unwatched is not None and record.state_since >= record.unwatched[1]:
        # A period without an active control plane stays UNACCOUNTED, even if the ranks trained during the period.
        since = max(since, record.unwatched[1])
    return _moved(record, bucket(record), Bucket.TRAIN, microseconds(accounted_until(record)) - microseconds(since))


def follow(
    record: JobRecord,
    before: IncidentRecord | None,
    after: Iterable[IncidentRecord],
    *,
    seemed: Bucket,
    stalled_since: float | None,
    members: Members = WHOLE,
) -> JobRecord:
    """Correct a job's ledger after the job loop opened, changed or closed incidents of the job.

    Before the decision, `charge` added the time to the bucket of the incident's earlier state, or of the job's state if
    no incident was open. That bucket is wrong for the time between a failure and its detection, and for the time since
    the end of a phase. It is also wrong if a second failure interrupts the recovery: the phases after the detection
    then start again, so all time since the detection counts as REPLACE.

    Args:
        record: the job's record. Its ledger already includes all time until now.
        before: the incident that was open before the decision, or None.
        after: the incident `before` as it is after the decision, and all incidents that the decision opened.
        seemed: the bucket to which `charge` added time since the failure, before the failure was detected.
        stalled_since: Unix seconds since when the ledger counts the job's time as STALL, or None if it is not stalled.
        members: numbers of present and missing nodes before the incidents (`members_of`). While nodes were missing,
            their fraction of the training time counts as SHORTAGE, and the rest as TRAIN.

    Returns:
        The record, with an unchanged sum of all buckets. The bucket of each phase has the time that the incidents spent
        in this phase. If the phases became longer, the function takes the difference first from STALL and SHORTAGE (at
        most the part of it that `charge` added there), then from `seemed`, then from the other buckets in the order of
        `_SEEMED`. If the phases became shorter, `seemed` receives the difference. No bucket becomes negative.
    """
    now = accounted_until(record)
    booked = {} if before is None else _phases(before, now)
    true: dict[Bucket, int] = {}
    for incident in after:
        for into, amount in _phases(incident, now).items():
            true[into] = true.get(into, 0) + amount
    spent = dict(record.microseconds)
    missing = 0
    for into in _PHASES:
        change = max(true.get(into, 0) - booked.get(into, 0), -spent.get(into, 0))
        if change:
            spent[into.value] = spent.get(into, 0) + change
            missing += change
    if missing < 0:
        return replace(record, microseconds=_added(spent, seemed, -missing, members))
    stalled = 0 if stalled_since is None else max(0, microseconds(now) - microseconds(stalled_since))
    booked_as_train = max(0, missing - min(stalled, spent.get(Bucket.STALL, 0))) if seemed is Bucket.TRAIN else 0
    shortage = booked_as_train - _trained(booked_as_train, members)
    for source, most in (
        (Bucket.STALL, stalled),
        (Bucket.SHORTAGE, shortage),
        (seemed, missing),
        *((each, missing) for each in _SEEMED),
    ):
        taken = min(missing, most, spent.get(source, 0))
        if taken > 0:
            spent[source.value] -= taken
            missing -= taken
    # The phases gained more time than the loop above could take from other buckets. Take the rest from the phases:
    # first from RESTORE, which also contains starts after a pause. The other phases lose time only if an incident's
    # failure time lies in an earlier incident or before the job's creation (`earliest_failure_at` excludes both).
    for into in (Bucket.RESTORE, *_PHASES) if missing else ():
        back = min(missing, spent.get(into, 0))
        if back > 0:
            spent[into.value] -= back
            missing -= back
    return replace(record, microseconds=spent)


def _phases(incident: IncidentRecord, now: float) -> dict[Bucket, int]:
    """Return the microseconds that an incident spent in each phase until now, by the bucket of the phase."""
    moments = [microseconds(at) for at in incidents.phase_moments(incident, now)]
    return {into: end - start for into, start, end in zip(_PHASES, moments, moments[1:], strict=False)}


def _moved(record: JobRecord, was: Bucket, into: Bucket, amount: int) -> JobRecord:
    """Return the record with up to `amount` microseconds moved from bucket `was` to bucket `into`."""
    moved = min(amount, record.microseconds.get(was, 0))
    return (
        record
        if moved <= 0
        else replace(
            record,
            microseconds=_added(_added(record.microseconds, was, -moved), into, moved, members_of(record)),
        )
    )


def idle_node_microseconds(incident: IncidentRecord, record: JobRecord) -> int:
    """Return how long the job's nodes were idle because of an incident, summed over the nodes.

    Args:
        incident: an open or newly closed incident.
        record: the job's record. Its ledger already includes all time until now.

    Returns:
        Node-microseconds from the failure to the incident's end, or until now. A lost node counts until the fleet
        removes the node from the job. A replacement counts from its assignment to the job.
    """
    end = accounted_until(record) if incident.closed_at is None else incident.closed_at
    beyond = max(0, microseconds(accounted_until(record)) - microseconds(end))
    return max(0, record.node_microseconds - incident.node_microseconds_before - beyond * record.node_count)


def idle_so_far(incident: IncidentRecord, record: JobRecord, now: float) -> int:
    """Return how long nodes have been idle because of an open incident, until `now`.

    Args:
        incident: an incident that is not closed.
        record: the job's record as stored. Its ledger includes all time until `accounted_until`.
        now: Unix seconds. A time before `accounted_until` counts as `accounted_until`.

    Returns:
        Node-microseconds. The time since `accounted_until` counts with the number of nodes in `record`.
    """
    since = max(0, microseconds(now) - microseconds(accounted_until(record)))
    return idle_node_microseconds(incident, record) + since * record.node_count


def cost_usd(node_microseconds: int, price_usd_per_hour: float | None) -> float | None:
    """Return the cost of node time in USD, or None if the fleet has no price."""
    return None if price_usd_per_hour is None else node_microseconds * price_usd_per_hour / _MICROSECONDS_PER_HOUR


def ettr_ratio(spent: Mapping[str, int], *, is_queue_counted: bool = False) -> float | None:
    """Return the effective training time ratio (ETTR): training time ÷ wall time.

    If n of N nodes train, n/N of the time counts as training (`Bucket.SHORTAGE` has the rest).

    Args:
        spent: microseconds by bucket, of one job or summed over several.
        is_queue_counted: whether wall time includes time without nodes (queue, provision, paused), as in the source
            below. If false, wall time starts when the job first has all its nodes, and excludes pauses.

    Returns:
        0 to 1, or None if the wall time is zero.

    Source: Kokolis et al., HPCA'25 (arXiv 2410.21680): ETTR = R ÷ (R + U + Q), with productive time R, unproductive
    time U and queue time Q.
    """
    wall = sum(spent.values()) - (0 if is_queue_counted else sum(spent.get(name, 0) for name in _WAITING))
    return spent.get(Bucket.TRAIN, 0) / wall if wall > 0 else None


def remaining_seconds(spent: Mapping[str, int], finished: int, target: int) -> float | None:
    """Return how long the remaining steps take at the job's mean pace.

    The pace counts only time in which the job completed steps for the first time. The estimate therefore ignores past
    and future failures, waits and repeated steps.

    Args:
        spent: microseconds by bucket, of one job.
        finished: the highest number of finished steps that any generation reached.
        target: the number of finished steps at which the script ends.

    Returns:
        Seconds, or 0 once the target is reached. None if the script declares no target or the job has completed no
        step.
    """
    train = spent.get(Bucket.TRAIN, 0)
    if target <= 0 or finished <= 0 or train <= 0:
        return None
    return max(0, target - finished) * train / _MICRO / finished


def mean_seconds_to_failure(spent: Mapping[str, int], failure_count: int) -> float | None:
    """Return the mean time to failure (MTTF): time in which ranks ran (TRAIN, SHORTAGE, STALL) ÷ number of failures.

    Return None before the first failure.
    """
    return sum(spent.get(name, 0) for name in _UP) / _MICRO / failure_count if failure_count else None


def _added(spent: Mapping[str, int], into: Bucket, amount: int, members: Members = WHOLE) -> dict[str, int]:
    """Return the buckets with `amount` microseconds added to bucket `into`.

    If a job trains on n of N requested nodes, TRAIN receives only n/N of its amount, and SHORTAGE the rest.
    """
    trained = _trained(amount, members) if into is Bucket.TRAIN else amount
    added = {**spent, into.value: spent.get(into, 0) + trained}
    if trained != amount:
        added[Bucket.SHORTAGE.value] = spent.get(Bucket.SHORTAGE, 0) + amount - trained
    return added


def _trained(amount: int, members: Members) -> int:
    """Return the part of a duration that counts as TRAIN: n/N of it if the job has n of N requested nodes.

    The result is rounded up to whole microseconds.
    """
    present, missing = members
    return amount if missing <= 0 else -(-amount * present // (present + missing))
