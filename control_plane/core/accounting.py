"""The ledger of a job's time: spans without gaps, each in exactly one bucket (docs/design.md#accounting).

    created_at ── queue ── provision ── start ── train ── detect ── replace ── restore ── rework ── train ── …

Spans before the end of the last incident are settled. A later report can move an open span to another bucket.

Invariant: the buckets are the sums of the spans. They add up, to the microsecond, to the time from the job's creation
until `accounted_until`, which never decreases. Once the job has ended, `accounted_until` is the job's end.
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
_SURVIVES_A_GAP = frozenset({JobState.QUEUED, JobState.ALLOCATING, JobState.RUNNING})
"""Job states that continue without a control plane. In other states, its absence counts as UNACCOUNTED."""
_WAITING = (Bucket.QUEUE, Bucket.PROVISION, Bucket.PAUSED)
_UP = (Bucket.TRAIN, Bucket.SHORTAGE, Bucket.STALL, Bucket.REHEARSAL)
MOST_SPANS = 64
# Whole microseconds, because sums of floats are inexact.
_MICRO = 1_000_000
_MICROSECONDS_PER_HOUR = 3600 * _MICRO


def microseconds(seconds: float) -> int:
    """Convert seconds to whole microseconds, as `datetime` rounds a Unix time."""
    return round(seconds * _MICRO)


def accounted_until(record: JobRecord) -> float:
    """Return the Unix time up to which the ledger has assigned all time to buckets."""
    return record.created_at if record.accounted_until is None else record.accounted_until


def is_stepping(record: JobRecord) -> bool:
    """Return whether the newest generation has finished a step after the step that it restored."""
    return record.boundary > record.base_step


def bucket(record: JobRecord, *, is_stalled: bool = False) -> Bucket:
    """Return the bucket of the time from now until the ledger's next update. `is_stalled`: by the hang limit."""
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
    """Return the record with the time since the last call in the bucket of the record's state.

    The job loop calls this function before each decision, and stores the record whenever `node_count` changes. Over
    `gap_seconds` without a call, no control plane was active: `unwatched` then contains this period.
    """
    until = microseconds(now)
    since = microseconds(accounted_until(record))
    passed = until - since
    if record.state in ENDED_JOBS:
        return record
    # If the clock went back, the ledger adds no time until the clock has caught up.
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
    """Count the time since a generation's first new step (Unix seconds) as training.

    The ledger must include all time until now, no incident may be open, and `record.boundary` must be the earlier one.
    """
    return _painted(record, stepped_at, accounted_until(record), Bucket.TRAIN, over=(bucket(record),))


def recharge_rehearsal(record: JobRecord, start: float, end: float) -> JobRecord:
    """Count the time from `start` to `end` (Unix seconds) as a rehearsal, and the time since then as training."""
    record = _painted(record, start, end, Bucket.REHEARSAL, over=(Bucket.TRAIN,))
    return _painted(record, end, accounted_until(record), Bucket.TRAIN, over=(Bucket.REHEARSAL,))


def follow(record: JobRecord, after: Iterable[IncidentRecord], *, resumed: Bucket) -> JobRecord:
    """Paint the phases of changed incidents over a job's ledger, which must include all time until now.

    `resumed` is the bucket of the time after a closed incident. DETECT and REPLACE become UNACCOUNTED while no control
    plane was active.
    """
    # `charge` used the bucket of the state before the decision. That bucket is wrong between a failure and its
    # detection, and since the end of a phase. A second failure also restarts the phases after the detection.
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
    """Return the record with at most `MOST_SPANS` spans, and the settled spans with their ends, oldest first."""
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
    """Return the record with the time from `start` to `end` (Unix seconds) in bucket `into` instead of `over`."""
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
    """Return the record with other unsettled spans. Equal neighbours become one."""
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
    """Return the microseconds of spans by bucket. TRAIN is rounded up, so that TRAIN and SHORTAGE add up exactly."""
    sums: dict[str, int] = {}
    for span, end in _with_ends(spans, until):
        length = end - span.start
        own = -(-length * span.present // (span.present + span.missing)) if span.missing > 0 else length
        sums[span.bucket.value] = sums.get(span.bucket, 0) + own
        if own != length:
            sums[Bucket.SHORTAGE.value] = sums.get(Bucket.SHORTAGE, 0) + length - own
    return sums


def idle_node_microseconds(incident: IncidentRecord, record: JobRecord) -> int:
    """Return node-microseconds from the failure to the incident's end, or until now.

    A lost node counts until the fleet removes it from the job. A replacement counts from its assignment to the job.
    """
    end = accounted_until(record) if incident.closed_at is None else incident.closed_at
    beyond = max(0, microseconds(accounted_until(record)) - microseconds(end))
    return max(0, record.node_microseconds - incident.node_microseconds_before - beyond * record.node_count)


def idle_so_far(incident: IncidentRecord, record: JobRecord, now: float) -> int:
    """Return node-microseconds of an open incident until `now` (Unix seconds)."""
    since = max(0, microseconds(now) - microseconds(accounted_until(record)))
    return idle_node_microseconds(incident, record) + since * record.node_count


def cost_usd(node_microseconds: int, price_usd_per_hour: float | None) -> float | None:
    """Return the cost of node time in USD, or None if the fleet has no price."""
    return None if price_usd_per_hour is None else node_microseconds * price_usd_per_hour / _MICROSECONDS_PER_HOUR


def ettr_ratio(spent: Mapping[str, int], *, is_queue_counted: bool = False) -> float | None:
    """Return the effective training time ratio (ETTR), 0 to 1, or None without wall time.

    `is_queue_counted`: wall time includes time without nodes, as in the source. Otherwise, wall time starts when the
    job first has all its nodes, and excludes pauses. If n of N nodes train, n/N of the time counts as training.

    Source: Kokolis et al., HPCA'25 (arXiv 2410.21680): ETTR = R ÷ (R + U + Q), with productive time R, unproductive
    time U and queue time Q.
    """
    wall = sum(spent.values()) - (0 if is_queue_counted else sum(spent.get(name, 0) for name in _WAITING))
    return spent.get(Bucket.TRAIN, 0) / wall if wall > 0 else None


def remaining_seconds(spent: Mapping[str, int], finished: int, target: int) -> float | None:
    """Return the seconds of the remaining steps at the job's mean pace, without failures, waits and repeated steps."""
    train = spent.get(Bucket.TRAIN, 0)
    if target <= 0 or finished <= 0 or train <= 0:
        return None
    return max(0, target - finished) * train / _MICRO / finished


def mean_seconds_to_failure(spent: Mapping[str, int], failure_count: int) -> float | None:
    """Return the mean time to failure (MTTF) in seconds, or None without a failure."""
    return sum(spent.get(name, 0) for name in _UP) / _MICRO / failure_count if failure_count else None
