"""Removes one safeguard from a control plane, to show that the rules of a bad day detect its absence.

Python imports this module at its start if PYTHONPATH contains this folder.

    BAD_DAY_WITHOUT   effect
    lease             every control-plane replica believes that it serves every fleet, and no write is rejected
    contract          the group keeps its settings, so AWS may replace unhealthy instances
    evidence          a node whose agent is silent counts as lost, despite advancing steps and AWS's answer
"""

from __future__ import annotations

import os
from typing import Any


def without_lease() -> None:
    from control_plane.db import leases

    leases.Leaser._stood_still = lambda *_: True  # type: ignore[method-assign]
    leases.guard = lambda *_: None


def without_contract() -> None:
    from control_plane.cloud import contract

    contract.changes = lambda _: ()


def without_evidence() -> None:
    from control_plane.core import evidence
    from control_plane.core.observed.facts import AgentSilent
    from control_plane.core.observed.nodes import InstanceCondition

    careful = evidence.judge

    def hasty(node: Any, *, timeouts: Any, **known: Any) -> evidence.NodeVerdict:
        if node.instance is InstanceCondition.ENDED or not evidence.is_silent(node, timeouts):
            return careful(node, timeouts=timeouts, **known)
        return evidence.NodeVerdict(
            node_id=node.node_id,
            disposition=evidence.NodeDisposition.GONE,
            evidence=AgentSilent(node_id=node.node_id, seconds=0.0),
        )

    evidence.judge = hasty
    evidence.is_fleet_blind = lambda *_: False


match os.environ.get("BAD_DAY_WITHOUT", ""):
    case "":
        pass
    case "lease":
        without_lease()
    case "contract":
        without_contract()
    case "evidence":
        without_evidence()
    case unknown:
        raise SystemExit(f"BAD_DAY_WITHOUT={unknown!r}: lease, contract or evidence")
