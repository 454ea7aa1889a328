"""Checks that a job's incidents and its time ledger give the same figures."""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise

from control_plane.core import accounting, incidents
from control_plane.core.observed.incidents import IncidentRecord
from control_plane.core.observed.jobs import JobRecord
from control_plane.core.observed.spans import Bucket

SAME_SECONDS = 1e-4
"""Largest difference between the ledger and the incidents, in seconds. The ledger rounds times to microseconds."""


def check_incidents(record: JobRecord, found: Collection[IncidentRecord]) -> None:
    """Assert that incidents do not overlap, and that each phase has the same seconds as its bucket of the ledger.

    Args:
        record: the job's record after a decision of the control plane.
        found: all incidents of the job, as the control plane stored them last.
    """
    for earlier, later in pairwise(sorted(found, key=lambda each: each.generation_before)):
        assert earlier.closed_at is not None, f"{earlier.id} is open when {later.id} begins"
        assert max(earlier.closed_at, earlier.failed_at) <= later.failed_at, f"{earlier.id} overlaps {later.id}"
    until = accounting.accounted_until(record)
    unaccounted = record.microseconds.get(Bucket.UNACCOUNTED, 0) / 1_000_000
    for phase in incidents.PHASES:
        shown = sum(incidents.phase_seconds(each, until)[f"{phase}_seconds"] for each in found)
        booked = record.microseconds.get(phase, 0) / 1_000_000
        # The launch after a pause counts as RESTORE, and no incident covers this launch.
        is_more = phase == Bucket.RESTORE and Bucket.PAUSED in record.microseconds and booked > shown
        if phase in (Bucket.DETECT, Bucket.REPLACE) and booked < shown:
            # No control plane was active for a part of this phase.
            unaccounted -= shown - booked
            assert unaccounted >= -SAME_SECONDS, f"{phase}: {booked} s by the job, {shown} s by its incidents"
            continue
        assert abs(booked - shown) < SAME_SECONDS or is_more, (
            f"{phase}: {booked} s by the job, {shown} s by its incidents"
        )
