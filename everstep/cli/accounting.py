"""Formats costs, durations and ETTR (effective training time ratio) for the jobs, fleets and incidents commands."""

from __future__ import annotations

from everstep.cli.output import Json, counted, seconds


def dollars(usd: float) -> str:
    """Return an amount of US dollars as text: two decimals from one dollar on, four decimals below."""
    return f"${usd:,.2f}" if usd >= 1 else f"${usd:.4f}"


def hours(spent_seconds: float) -> str:
    """Return a number of seconds as hours with two decimals."""
    return f"{spent_seconds / 3600:,.2f}"


def job_time(shown: Json) -> str | None:
    """Return, as text, the seconds that a job or fleet spent in each accounting bucket, such as `train`.

    The text omits buckets without time. Return None if all buckets are empty.
    """
    return (
        ", ".join(f"{bucket} {seconds(spent)} s" for bucket, spent in shown["AccountingSeconds"].items() if spent)
        or None
    )


def ettr_words(shown: Json) -> str | None:
    """Return two effective training time ratios (ETTR) as text.

    The first ratio divides the training time by the time in which the job had nodes. The second ratio divides it by all
    time, queueing included. Return None if the service reports no ratios.
    """
    without, with_queue = shown["Reliability"].get("EttrRatio"), shown["Reliability"].get("EttrWithQueueRatio")
    if without is None or with_queue is None:
        return None
    return f"{without:.3f} (training ÷ time with nodes), {with_queue:.3f} (training ÷ all time, queueing included)"


def incident_words(shown: Json) -> str:
    """Return the incidents of a job or a fleet in one line.

    The line contains the number of incidents, MTTF, MTTR, recomputed steps and cost, as far as the service reports
    them.
    """
    found = shown["Reliability"]
    parts = [counted(shown["IncidentCount"], "incident")]
    if "MttfSeconds" in found:
        parts.append(f"MTTF {seconds(found['MttfSeconds'])} s")
    if "MttrSeconds" in found:
        parts.append(f"MTTR {seconds(found['MttrSeconds'])} s")
    if found["LostSteps"]:
        parts.append(f"{counted(found['LostSteps'], 'step')} recomputed")
    if "IncidentCostUsd" in found:
        parts.append(dollars(found["IncidentCostUsd"]))
    return ", ".join(parts)
