"""Formats the progress of a training job for `jobs list`, `wait`, `top` and `describe`."""

from __future__ import annotations

from typing import Final

from everstep.cli.output import Json, duration, step

BAR_CELLS: Final = 20


def reached(job: Json) -> str:
    """Return the latest step, followed by the target step if the script has reported it: `4895/10000`."""
    target = job.get("TargetStep")
    return step(job["Boundary"]) if target is None else f"{max(0, job['Boundary'])}/{target}"


def remaining(job: Json) -> str | None:
    """Return the estimated remaining time as `duration` formats it; None where the service has no estimate."""
    seconds = job.get("EstimatedRemainingSeconds")
    return None if seconds is None else duration(seconds)


def bar(job: Json) -> str:
    """Return a progress bar followed by the percentage; empty if the script has not reported a target."""
    target = job.get("TargetStep")
    if target is None:
        return ""
    part = min(1.0, max(0, job["Boundary"]) / target)
    full = int(part * BAR_CELLS)
    return f"{'█' * full}{'░' * (BAR_CELLS - full)} {int(part * 100)} %"


def words(job: Json) -> str:
    """Return step, target, bar and remaining time in one line."""
    left = remaining(job)
    target = "" if job.get("TargetStep") is None else f" of {job['TargetStep']} {bar(job)}"
    return f"step {step(job['Boundary'])}{target}{'' if left is None else f', about {left} left'}"
