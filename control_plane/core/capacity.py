"""What to do and to say while instances do not come: in AWS's own words, with the time of the next try.

    Auto Scaling tries again by itself, ever more seldom; after long failure AWS suspends its launches (an administrative suspension)
    Everstep asks again 30 s after a failure, twice as long after each further one, at most 15 min; it lifts what AWS suspended, never what a user did

Invariant: pure; what is asked for again is what was asked for before, so that trying can never make a fleet larger.
Source: Amazon EC2 Auto Scaling User Guide, `Suspend and resume processes` (administrative suspension).
"""

from __future__ import annotations

from datetime import UTC, datetime

from control_plane.core.observed import GroupObserved

FIRST_RETRY_SECONDS = 30.0
LONGEST_RETRY_SECONDS = 900.0


def retry_at(group: GroupObserved) -> float | None:
    """Return when launches are asked for again, Unix seconds; None while none has failed."""
    return None if group.failed_at is None else group.failed_at + pause_seconds(len(group.launch_failures))


def pause_seconds(failure_count: int) -> float:
    """Return how long to wait after so many failures in a row before asking again."""
    return min(FIRST_RETRY_SECONDS * 2.0 ** max(0, min(failure_count, 10) - 1), LONGEST_RETRY_SECONDS)


def waiting_words(group: GroupObserved) -> str:
    """Return why instances do not come, in AWS's words, and what happens next; empty while nothing stands in the way.

    Without a running clock: the words change when something happens.
    """
    again = retry_at(group)
    when = f"; asked for again at {datetime.fromtimestamp(again, UTC):%H:%M:%S} UTC" if again is not None else ""
    if group.launch_suspension is not None:
        words = f"its group's Launch process is suspended ({group.launch_suspension or 'AWS gives no reason'})"
        if group.is_suspension_administrative:
            return f"{words}: AWS has suspended it after failures{'; lifted and ' + when.removeprefix('; ') if when else ' and it is lifted'}"
        return f"{words}: instances come when who suspended it resumes it"
    return f"{group.launch_failures[0].rstrip('.')}{when}" if group.launch_failures else ""
