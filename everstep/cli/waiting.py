"""Waits for the end of a job, reports every poll to the user, and survives restarts of the control plane.

The command line does not use boto3's waiters, because they fail at the first failed call and report no progress.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final

from everstep.cli.output import Json
from everstep.errors import ServiceFailed, WaitTimedOut

ENDED: Final = frozenset({"Completed", "Stopped", "Failed"})
"""Final values of `TrainingJobStatus`."""
UNANSWERED_SECONDS: Final = 60.0
"""Seconds without an answer of the control plane after which waiting fails.

A restart of the control plane takes less than this time, so it does not end a wait.
"""


def ended(
    service: Any,
    name: str,
    *,
    show: Callable[[Json], None],
    interval_seconds: float,
    timeout_seconds: float | None,
    pause: Callable[[float], object] = threading.Event().wait,
    monotonic: Callable[[], float] = time.monotonic,
) -> Json:
    """Wait until a job has ended, in any final status.

    Args:
        service: botocore client of this service.
        name: job to wait for; it must exist.
        show: called with every description of the job, including the last.
        interval_seconds: time between two polls.
        timeout_seconds: limit for the whole wait; None: no limit.
        pause: sleeps for a number of seconds.
        monotonic: returns the seconds of a monotonic clock.

    Returns:
        The last description of the job.

    Raises:
        WaitTimedOut: the job has not ended within `timeout_seconds`.
        ServiceFailed: the service refuses the request or has not answered for a minute.
    """
    from everstep import failures  # Import here to keep `--help` fast.

    started_at = seen_at = monotonic()
    while True:
        try:
            with failures.translated():
                job: Json = service.describe_training_job(TrainingJobName=name)
                show(job)
        except ServiceFailed as error:
            if error.code != failures.UNAVAILABLE or monotonic() - seen_at >= UNANSWERED_SECONDS:
                raise
        else:
            seen_at = monotonic()
            if job["TrainingJobStatus"] in ENDED:
                return job
        if timeout_seconds is not None and monotonic() - started_at >= timeout_seconds:
            raise WaitTimedOut(f"The training job {name!r} has not ended within {timeout_seconds:g} s.")
        pause(interval_seconds)
