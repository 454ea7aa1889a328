"""The ledger of a job's time: spans without gaps, each in exactly one bucket (docs/design.md#accounting).

    created_at ── queue ── provision ── start ── train ── detect ── replace ── restore ── rework ── train ── …

After a start, training time begins with the first finished step, at the rank's own time stamp. While an incident is
open, its phase selects the bucket: `detect`, `replace`, `restore` or `rework`. The start after a pause also counts as
`restore`.

The ledger counts whole microseconds, because sums of floats are inexact. It contains all time up to `accounted_until`,
which never decreases. If the clock steps back behind `accounted_until`, the ledger adds no time until the clock has
caught up. A later report can show that a span had another bucket than it seemed to have: the ledger then paints the
bucket over that time. Spans before the end of the last incident are settled.

Invariant: the buckets are the sums of the spans. They add up, to the microsecond, to the time from the job's creation
until `accounted_until`. Once the job has ended, `accounted_until` is the job's end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from control_plane.core import incidents
from control_plane.core.observed.incidents import IncidentRecord
from control_plane.core.observed.jobs import JobRecord
from control_plane.core.observed.spans import Bucket, JobSpan
from control_plane.core.states import ENDED_JOBS, IncidentState, JobState
from everstep.protocol.ids import FIRST_STEP

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
_NEEDS_CONTROL_PLANE = (Bucket.DETECT, Bucket.REPLACE)
"""Phases in which only the control plane acts, so that its absence counts as UNACCOUNTED."""
_SURVIVES_A_GAP = frozenset({JobState.QUEUED, JobState.ALLOCATING, JobState.RUNNING})
"""Job states that continue without a control plane. A period without a control plane counts in the state's bucket.

In other states, such a period counts as UNACCOUNTED, unless an incident is open.
"""
_WAITING = (Bucket.QUEUE, Bucket.PROVISION, Bucket.PAUSED)
_UP = (Bucket.TRAIN, Bucket.SHORTAGE, Bucket.STALL, Bucket.REHEARSAL)
"""Buckets from which the mean time to failure (MTTF) is computed."""
MOST_SPANS = 64
"""Limit of the spans that a later report can still change."""
_MICRO = 1_000_000
_MICROSECONDS_PER_HOUR = 3600 * _MICRO


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
    if record.rehearsal.is_under_way and record.state is JobState.RUNNING:
        return Bucket.REHEARSAL
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
    since = microseconds(accounted_until(record))
    passed = until - since
    if record.state in ENDED_JOBS:
        return record
    if passed <= 0:
        return replace(record, node_count=node_count)
    into = bucket(record, is_stalled=is_stalled)
    is_gap = passed > microseconds(gap_seconds)
    is_idle = record.state not in _SURVIVES_A_GAP if record.incident is None else into in _NEEDS_CONTROL_PLANE
    if is_gap and is_idle:
        into = Bucket.UNACCOUNTED
    charged = _with_spans(record, (*record.spans, _span(record, since, into)), until)
    return replace(
        charged,
        unwatched=(accounted_until(record), now) if is_gap else record.unwatched,
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
        The record, with an unchanged sum of all buckets. Time without an active control plane stays UNACCOUNTED.
    """
    return _painted(record, stepped_at, accounted_until(record), Bucket.TRAIN, over=(bucket(record),))


def recharge_rehearsal(record: JobRecord, start: float, end: float) -> JobRecord:
    """Count the time from `start` to `end` (Unix seconds) as a rehearsal, and the time since then as training.

    Until the ranks report how long they did not train, the ledger counts whole passes of the job loop. Time in other
    buckets than TRAIN and REHEARSAL stays as it is.
    """
    record = _painted(record, start, end, Bucket.REHEARSAL, over=(Bucket.TRAIN,))
    return _painted(record, end, accounted_until(record), Bucket.TRAIN, over=(Bucket.REHEARSAL,))


def follow(record: JobRecord, after: Iterable[IncidentRecord], *, resumed: Bucket) -> JobRecord:
    """Paint the phases of incidents over a job's ledger, after the job loop opened, changed or closed the incidents.

    Before the decision, `charge` added the time to the bucket of the incident's earlier state, or of the job's state if
    no incident was open. That bucket is wrong for the time between a failure and its detection, and for the time since
    the end of a phase. It is also wrong if a second failure interrupts the recovery: the phases after the detection
    then start again, so all time since the detection counts as REPLACE.

    Args:
        record: the job's record. Its ledger already includes all time until now.
        after: the incidents as they are after the decision, oldest first.
        resumed: the bucket of the time after a closed incident.

    Returns:
        The record, with an unchanged sum of all buckets. The time of the phases DETECT and REPLACE in which no control
        plane was active stays UNACCOUNTED, or becomes so.
    """
    for incident in after:
        moments = incidents.phase_moments(incident, accounted_until(record))
        for into, start, end in zip(_PHASES, moments, moments[1:], strict=False):
            if into in _NEEDS_CONTROL_PLANE:
                since, until = record.unwatched or (end, end)
                record = _painted(record, start, end, into, over=set(Bucket) - {Bucket.UNACCOUNTED})
                record = _painted(record, max(start, since), min(end, until), Bucket.UNACCOUNTED)
            else:
                record = _painted(record, start, end, into)
        if incident.closed_at is not None:
            record = _painted(record, moments[-1], accounted_until(record), resumed, over=_PHASES)
    return record


def settle(record: JobRecord) -> tuple[JobRecord, tuple[tuple[JobSpan, int], ...]]:
    """Return the record without its settled spans, and these spans with their ends, oldest first.

    No report can change a span before the end of the last incident. More than `MOST_SPANS` spans are settled too.
    """
    horizon = microseconds(record.last_incident_ended_at or record.created_at)
    ends = [span.start for span in record.spans[1:]]
    count = max(sum(end <= horizon for end in ends), len(record.spans) - MOST_SPANS)
    settled = tuple(zip(record.spans, ends[:count], strict=False))
    return replace(record, spans=record.spans[len(settled) :]), settled


def open_spans(record: JobRecord) -> list[tuple[JobSpan, int]]:
    """Return the spans that a late report can still change, with their ends, oldest first."""
    return list(_with_ends(record.spans, microseconds(accounted_until(record))))


def _span(record: JobRecord, start: int, into: Bucket) -> JobSpan:
    present, missing = (record.member_count, record.missing_count) if into is Bucket.TRAIN else (1, 0)
    return JobSpan(start=start, bucket=into, present=present, missing=missing)


def _painted(
    record: JobRecord, start: float, end: float, into: Bucket, *, over: Collection[Bucket] = frozenset(Bucket)
) -> JobRecord:
    """Return the record with the time from `start` to `end` in bucket `into`, as far as its bucket is one of `over`.

    Both times are Unix seconds. Settled spans stay as they are.
    """
    until = microseconds(accounted_until(record))
    first, last = microseconds(start), min(microseconds(end), until)
    painted: list[JobSpan] = []
    for span, span_end in _with_ends(record.spans, until):
        begin, finish = max(span.start, first), min(span_end, last)
        if begin >= finish or span.bucket not in over or span.bucket is into:
            painted.append(span)
            continue
        if begin > span.start:
            painted.append(span)
        painted.append(_span(record, begin, into))
        if finish < span_end:
            painted.append(replace(span, start=finish))
    return _with_spans(record, painted, until)


def _with_spans(record: JobRecord, spans: Sequence[JobSpan], until: int) -> JobRecord:
    """Return the record with other unsettled spans, of which equal neighbours become one, and with their new sums."""
    pairs = zip((None, *spans), spans, strict=False)
    kept = [span for before, span in pairs if before is None or replace(span, start=before.start) != before]
    spent = dict(record.microseconds)
    old = _sums(record.spans, microseconds(accounted_until(record)))
    new = _sums(kept, until)
    for name in old.keys() | new.keys():
        spent[name] = spent.get(name, 0) + new.get(name, 0) - old.get(name, 0)
    return replace(record, spans=tuple(kept), microseconds=spent)


def _with_ends(spans: Sequence[JobSpan], until: int) -> Iterator[tuple[JobSpan, int]]:
    return zip(spans, (*(span.start for span in spans[1:]), until), strict=True) if spans else iter(())


def _sums(spans: Sequence[JobSpan], until: int) -> dict[str, int]:
    """Return the microseconds of spans by bucket.

    If n of N nodes train, n/N of the time counts as TRAIN, rounded up to whole microseconds, and the rest as SHORTAGE.
    """
    sums: dict[str, int] = {}
    for span, end in _with_ends(spans, until):
        length = end - span.start
        own = -(-length * span.present // (span.present + span.missing)) if span.missing > 0 else length
        sums[span.bucket.value] = sums.get(span.bucket, 0) + own
        if own != length:
            sums[Bucket.SHORTAGE.value] = sums.get(Bucket.SHORTAGE, 0) + length - own
    return sums


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
    """Return the mean time to failure (MTTF): time in which ranks ran ÷ number of failures.

    Return None before the first failure.
    """
    return sum(spent.get(name, 0) for name in _UP) / _MICRO / failure_count if failure_count else None
