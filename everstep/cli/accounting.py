"""Time and money in words, the same for jobs, fleets and incidents."""

from __future__ import annotations

from everstep.cli.output import Json, counted, seconds


def dollars(usd: float) -> str:
    """Return an amount; of less than a dollar, four digits."""
    return f"${usd:,.2f}" if usd >= 1 else f"${usd:.4f}"


def hours(spent_seconds: float) -> str:
    """Return seconds as hours."""
    return f"{spent_seconds / 3600:,.2f}"


def job_time(shown: Json) -> str | None:
    """Return the seconds of a job, or of a fleet's jobs, by bucket."""
    return (
        ", ".join(f"{bucket} {seconds(spent)} s" for bucket, spent in shown["AccountingSeconds"].items() if spent)
        or None
    )


def ettr_words(shown: Json) -> str | None:
    """Return both ratios, and what each divides by."""
    without, with_queue = shown["Reliability"].get("EttrRatio"), shown["Reliability"].get("EttrWithQueueRatio")
    if without is None or with_queue is None:
        return None
    return f"{without:.3f} (training ÷ time with nodes), {with_queue:.3f} (training ÷ all time, queueing included)"


def incident_words(shown: Json) -> str:
    """Return how many incidents there were, how far apart, how long and how dear."""
    found = shown["Reliability"]
    told = [counted(shown["IncidentCount"], "incident")]
    if "MttfSeconds" in found:
        told.append(f"MTTF {seconds(found['MttfSeconds'])} s")
    if "MttrSeconds" in found:
        told.append(f"MTTR {seconds(found['MttrSeconds'])} s")
    if found["LostSteps"]:
        told.append(f"{counted(found['LostSteps'], 'step')} recomputed")
    if "IncidentCostUsd" in found:
        told.append(dollars(found["IncidentCostUsd"]))
    return ", ".join(told)
