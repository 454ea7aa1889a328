"""Waiting for the end of a job with somebody watching: through restarts of the control plane, and with a word at every look.

boto3's waiters give up at the first call that fails and say nothing meanwhile; for programs they are right.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final

from everstep.cli.output import Json
from everstep.errors import ServiceFailed, WaitTimedOut

ENDED: Final = frozenset({"Completed", "Stopped", "Failed"})
"""Values of `TrainingJobStatus` that nothing follows."""
UNANSWERED_SECONDS: Final = 60.0
"""How long a control plane may not answer: it may be restarting."""


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
    """Wait until a job has ended, however it did.

    Args:
        service: the client.
        name: of the job.
        show: called with every description, also the last.
        interval_seconds: between two looks.
        timeout_seconds: in all, or None.
        pause: waits for so many seconds.
        monotonic: seconds of a clock that never jumps.

    Returns:
        The job's last description.

    Raises:
        WaitTimedOut: the time is up.
        ServiceFailed: the service refuses to tell, or nobody has answered for a minute.
    """
    from everstep import failures  # with botocore, which no --help needs

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
