"""Formats the answer to a dry run as names and values, which `jobs submit` prints before it starts the job."""

from __future__ import annotations

from typing import Any

from everstep.cli.accounting import dollars
from everstep.cli.output import Json, counted, protection_words, size


def facts(plan: Json) -> list[tuple[str, Any]]:
    """Return names and values that describe how a job would run.

    A value is None if the service cannot determine it for this fleet yet.

    Args:
        plan: the service's answer to a dry run.

    Returns:
        Pairs for `output.Facts`.
    """
    ratio, cost, most = plan.get("ExpectedEttrRatio"), plan.get("CostUsdPerHour"), plan.get("MostCostUsd")
    return [
        ("fleet", plan["FleetName"]),
        (
            "ranks",
            f"{counted(plan['NodeCount'], 'node')} × {plan['RanksPerNode']} = {plan['WorldSize']}, "
            f"{protection_words(plan)}",
        ),
        *((("elastic", plan["Elasticity"]),) if plan.get("Elasticity") else ()),
        ("memory per node", _memory(plan)),
        (
            "memory survives",
            "; ".join(f"{odds['LostNodes']} lost: {odds['Probability']:.4%}" for odds in plan["RecoveryOdds"]),
        ),
        ("starts", "at once" if plan["CanStartNow"] else f"later; it waits for {plan.get('WaitsFor', 'its turn')}"),
        (
            "cost",
            ", ".join(
                words for words in (cost and f"{dollars(cost)} an hour", most and f"{dollars(most)} at most") if words
            )
            or None,
        ),
        (
            "expected ETTR",
            None
            if ratio is None
            else f"{ratio:.2%}: one failure per {_long(plan['ExpectedMttfSeconds'])}, recovered in "
            f"{_long(plan['ExpectedRecoverySeconds'])}",
        ),
    ]


def _memory(plan: Json) -> str:
    largest, copies = plan.get("LargestShardBytes"), plan.get("CopiesMemoryRatio")
    words = (
        f"{counted(plan['SlotsPerNode'], 'slot')}, each as large as a rank's state"
        if copies is None
        else f"{plan['MemoryRatio']:.2f} × the state of its ranks (two copies: {copies:.2f} ×)"
    )
    if largest is None:
        return words
    return f"{words}: at most {size(largest)}, each node has {size(plan['NodeMemoryBytes'])}"


def _long(value: float) -> str:
    for unit, length in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if value >= 2 * length:
            return f"{value / length:.1f} {unit}"
    return f"{value:.1f} seconds"
