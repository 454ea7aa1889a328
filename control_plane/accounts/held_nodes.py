"""The advice for a held node: whether a person should terminate, release or first inspect the node, and why."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from control_plane.accounts.facts import fault_name
from control_plane.core.observed.causes import Reason
from control_plane.core.observed.fleets import Hold
from control_plane.core.remedies import hardware_fault


class HoldDecision(StrEnum):
    """The decision that Everstep recommends to a person about a held node, a node that the fleet keeps out of use.

    - TERMINATE: the hardware of the node is faulty, or the node does not answer.
    - RELEASE: a person asked for the hold, and nothing speaks against the node.
    - INSPECT: the stored facts do not decide. A person inspects the node, and then terminates or releases it.
    """

    TERMINATE = "Terminate"
    RELEASE = "Release"
    INSPECT = "Inspect"


@dataclass(frozen=True, slots=True)
class HoldAdvice:
    """Advice about a held node: what to do, why, and by which commands."""

    decision: HoldDecision
    words: str
    command: str
    further_commands: tuple[str, ...] = ()
    """Alternative commands after the inspection. Empty unless the decision is INSPECT."""


def advice(node_id: str, hold: Hold, reason: Reason, price_usd_per_hour: float | None = None) -> HoldAdvice:
    """Return the advice for a held node. Without a price, the sentence omits the cost."""
    release = f"everstep nodes release {node_id}"
    terminate = f"{release} --terminate"
    fault = hardware_fault(reason)
    cost = "" if price_usd_per_hour is None else f" It costs {hourly(price_usd_per_hour)} until you decide."
    if hold is Hold.UNREACHABLE:
        words = f"Terminate node {node_id}, which is still silent. If it answers, Everstep uses it again.{cost}"
        return HoldAdvice(HoldDecision.TERMINATE, words, terminate)
    if fault is not None:
        words = f"Terminate node {node_id}: it reported {fault_name(fault)}.{cost}"
        return HoldAdvice(HoldDecision.TERMINATE, words, terminate)
    if hold is Hold.PERSON:
        words = f"Release node {node_id} when its inspection is over. A person keeps it out of use.{cost}"
        return HoldAdvice(HoldDecision.RELEASE, words, release)
    why = "its reports are suspicious" if hold is Hold.DISTRUSTED else "it failed"
    words = (
        f"Inspect node {node_id}, which Everstep keeps out of use because {why}. "
        f"Terminate it if its hardware is faulty; otherwise release it. "
        f"The fleet keeps the node until you decide.{cost}"
    )
    return HoldAdvice(HoldDecision.INSPECT, words, f"everstep nodes describe {node_id}", (terminate, release))


def hourly(price_usd: float) -> str:
    """Return a price per hour as text: `$55.04 per hour`."""
    return f"${price_usd:,.2f} per hour"
