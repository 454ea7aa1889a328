"""Waits for a determinism check (`everstep jobs submit --check-determinism`) and shows its result (verdict)."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Final

from everstep.cli.commands import Shown
from everstep.cli.output import FAILED, Facts
from everstep.cli.progress import Progress
from everstep.cli.waiting import ended
from everstep.errors import ConfigurationError, NothingToDownload, WaitFailed
from everstep.protocol.plan import CHECK_VARIABLE

STEPS: Final = 8
"""Default of `--check-steps`: number of steps that a determinism check trains."""
VERDICT_POLL_SECONDS: Final = 1.0


def variables(steps: int | None, *, is_check: bool) -> dict[str, str]:
    """Return the environment variables that make a job a determinism check. Empty if the job is not a check.

    Args:
        steps: value of `--check-steps`; None: the default number of steps.
        is_check: value of `--check-determinism`.

    Returns:
        One variable, or none.

    Raises:
        ConfigurationError: the user passed `--check-steps` without `--check-determinism`.
    """
    if is_check:
        return {CHECK_VARIABLE: str(STEPS if steps is None else steps)}
    if steps is not None:
        raise ConfigurationError("--check-steps belongs to --check-determinism.")
    return {}


def verdict_of(service: Any, name: str) -> Shown:
    """Wait until a determinism check has ended. The exit code is 0 only for the result "deterministic".

    Args:
        service: botocore client of this service.
        name: job that `jobs submit` has submitted with the variables of a check.

    Returns:
        The result (verdict), with the report of each rank in its body.

    Raises:
        WaitFailed: the job failed or was stopped, or no rank wrote a report.
    """
    import msgspec  # Import here to keep `--help` fast.

    from everstep.determinism import REPORT, conclude, read_report

    with Progress(service, name) as progress:
        job = ended(service, name, show=progress.show, interval_seconds=VERDICT_POLL_SECONDS, timeout_seconds=None)
    logs = f"everstep jobs logs {name}"
    if job["TrainingJobStatus"] != "Completed":
        raise WaitFailed(f"{name} is {job['TrainingJobStatus']}: {job['Reason']}", hint=logs)
    with tempfile.TemporaryDirectory() as directory:
        try:
            service.download_outputs(TrainingJobName=name, Directory=directory)
        except NothingToDownload:
            hint = f"Call everstep.training.init() in the script, and make steps. {logs}"
            raise WaitFailed(f"{name} has no result, because no rank wrote a report.", hint=hint) from None
        paths = sorted(Path(directory).glob(f"rank=*/{REPORT}"))
        verdict = conclude([read_report(path.read_bytes()) for path in paths])
    result = "deterministic" if verdict.is_deterministic else verdict.source or "no result"
    return Shown(
        msgspec.to_builtins(verdict),
        Facts((("result", result), ("evidence", verdict.sentence), ("remedy", verdict.advice or None))),
        exit_code=0 if verdict.is_deterministic else FAILED,
    )
