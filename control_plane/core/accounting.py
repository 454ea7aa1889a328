"""Where a job's time goes: every second belongs to exactly one bucket (docs/design.md#accounting).

    created_at ── queue ── provision ── start ── train ── detect ── replace ── restore ── rework ── train ── … ── accounted until

Time counts as training from the first new step of a launch on, by the ranks' own stamps. While an incident is open, the
ledger follows it: the buckets `detect`, `replace`, `restore` and `rework` hold the phases of the job's incidents, and
`restore` the launches after pauses too.

Time is counted in whole microseconds, because floats do not add up. The ledger never goes back: while a clock stands
behind `accounted_until` nothing is charged, and a job that ends meanwhile ends where its ledger does.

Invariant: the buckets add up, to the microsecond, to the time between the job's creation and `accounted_until`, and
that is its end once it has ended; whoever charged, however late, and whatever the clock did.
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
    """What a second was spent on.

    QUEUE: waiting for its turn. PROVISION: waiting for its first nodes. START: launches up to the first step of the
    job. TRAIN: steps that count. STALL: a launch that has made a step makes none for a long time. DETECT, REPLACE,
    REWORK: these phases of incidents. RESTORE: this phase of incidents, and launches after a pause up to their first
    new step. STOPPING: an agreed stop. PAUSED: without nodes since it gave them to a job of higher priority, or a
    person paused it. UNACCOUNTED: no control plane looked, and no incident tells what happened.
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
"""Of incidents, in their order."""
_SURVIVES_A_GAP = frozenset({JobState.QUEUED, JobState.ALLOCATING, JobState.RUNNING})
"""States that last without a control plane; in any other one, nobody knows what a gap was spent on unless an incident is open."""
_SEEMED = (
    Bucket.TRAIN,
    Bucket.STALL,
    Bucket.START,
    Bucket.STOPPING,
    Bucket.UNACCOUNTED,
    Bucket.PAUSED,
    Bucket.PROVISION,
    Bucket.QUEUE,
)
"""What seemed to go on while nobody knew of a failure, in the order in which the failure takes time back from them."""
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


def is_stepping(record: JobRecord) -> bool:
    """Return whether the newest generation has made a new step: its ranks stand beyond the step that they were started from."""
    return record.boundary > record.base_step


def bucket(record: JobRecord, *, is_stalled: bool = False) -> Bucket:
    """Return the bucket of the present second.

    Args:
        record: the job as it is now; it has not ended.
        is_stalled: it runs, but no boundary was reported for longer than a boundary may take.

    Returns:
        The one bucket that is filling; an open incident names it before the state does. A launch that has made no new
        step yet is neither training nor stalled.
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
    """Return the record with the time since the last charge added to the bucket that it is in, and to what its nodes have worked.

    Called with the record as it was, before a pass changes its state. A record whose number of nodes changes has to be
    stored.

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
    if is_gap and record.state not in _SURVIVES_A_GAP and record.incident is None:
        into = Bucket.UNACCOUNTED
    return replace(
        record,
        unwatched=(accounted_until(record), now) if is_gap else record.unwatched,
        microseconds=_added(record.microseconds, into, passed),
        node_microseconds=record.node_microseconds + passed * record.node_count,
        node_count=node_count,
        accounted_until=until / _MICRO,
    )


def recharge_first_step(record: JobRecord, stepped_at: float) -> JobRecord:
    """Return the record with the time since the first new step of a launch moved to training.

    Called in the pass that hears of that step, before the record's boundary says so, where no incident is open.

    Args:
        record: charged up to this pass.
        stepped_at: Unix seconds: when a rank made the step, by its own stamp.

    Returns:
        The record with the same sum. Time in which no control plane looked stays unaccounted.
    """
    since = stepped_at
    if record.unwatched is not None and record.state_since >= record.unwatched[1]:
        since = max(since, record.unwatched[1])  # the state before this one did not survive the gap
    return _moved(record, bucket(record), Bucket.TRAIN, microseconds(accounted_until(record)) - microseconds(since))


def follow(
    record: JobRecord,
    before: IncidentRecord | None,
    after: Iterable[IncidentRecord],
    *,
    seemed: Bucket,
    stalled_since: float | None,
) -> JobRecord:
    """Return the record with its ledger brought in line with what a pass has learned about incidents.

    Called at the end of a pass. `charge` has booked the incident as the pass found it, but a failure may be older than
    its detection, a phase may have ended before anybody heard of it, and a second failure makes the phases of the first
    attempt void.

    Args:
        record: charged up to this pass.
        before: the open incident as the pass found it.
        after: the same incident and those that the pass opened, as they are now.
        seemed: what the time was spent on as far as no incident is open.
        stalled_since: Unix seconds: since when the job was charged as stalled; None: it was not.

    Returns:
        The record with the same sum. Each phase has grown or shrunk as the incidents' moments say, and `seemed` has
        given or taken the difference. No more is taken than was charged.
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
        return replace(record, microseconds=_added(spent, seemed, -missing))
    stalled = 0 if stalled_since is None else max(0, microseconds(now) - microseconds(stalled_since))
    for source, most in ((Bucket.STALL, stalled), (seemed, missing), *((each, missing) for each in _SEEMED)):
        taken = min(missing, most, spent.get(source, 0))
        if taken > 0:
            spent[source.value] -= taken
            missing -= taken
    for into in _PHASES if missing else ():  # older than all that was charged
        back = min(missing, spent.get(into, 0))
        if back > 0:
            spent[into.value] -= back
            missing -= back
    return replace(record, microseconds=spent)


def _phases(incident: IncidentRecord, now: float) -> dict[Bucket, int]:
    """Return the microseconds of each phase of an incident up to now; they add up to the incident's length so far."""
    moments = [microseconds(at) for at in incidents.phase_moments(incident, now)]
    return {into: end - start for into, start, end in zip(_PHASES, moments, moments[1:], strict=False)}


def _moved(record: JobRecord, was: Bucket, into: Bucket, amount: int) -> JobRecord:
    """Return the record with so many microseconds moved, no more than were charged; the sum stays."""
    moved = min(amount, record.microseconds.get(was, 0))
    return (
        record
        if moved <= 0
        else replace(record, microseconds=_added(_added(record.microseconds, was, -moved), into, moved))
    )


def idle_node_microseconds(incident: IncidentRecord, record: JobRecord) -> int:
    """Return for how long nodes made no new step because of an incident, all of the job's nodes together.

    Args:
        incident: open, or closed in this pass.
        record: charged in this pass.

    Returns:
        Node-microseconds from the failure to the incident's end, or so far. A node that is lost counts until it is
        taken from the job, its replacement from when it is given to it.
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
        is_queue_counted: count the time without nodes (queue, provision, paused), as the source does; else wall time
            begins when the first gang of nodes is there and stands still while the job is paused.

    Returns:
        0 to 1, or None while there is nothing to divide by.

    Source: Kokolis et al., HPCA'25 (arXiv 2410.21680): R ÷ (R + U + Q), productive, unproductive and queue time.
    """
    wall = sum(spent.values()) - (0 if is_queue_counted else sum(spent.get(name, 0) for name in _WAITING))
    return spent.get(Bucket.TRAIN, 0) / wall if wall > 0 else None


def remaining_seconds(spent: Mapping[str, int], finished: int, target: int) -> float | None:
    """Return how long the steps that are left take at the mean pace of those that are finished.

    Time in training is the time in which steps were made for the first time: failures, waiting and steps done again
    slow no estimate down, and none that may still come is in it.

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
