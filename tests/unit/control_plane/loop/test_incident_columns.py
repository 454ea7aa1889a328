"""The phases of a stored incident add up to the time from failure to recovery."""

from __future__ import annotations

import pytest

from control_plane.core.incidents import Fault, moved, opened, with_faults
from control_plane.core.observed.facts import Recorded
from control_plane.core.observed.incidents import RestartsRanks
from control_plane.core.observed.nodes import Cause
from control_plane.core.states import IncidentEvent
from control_plane.loop.records import incident_update
from everstep.protocol.ids import Generation, RunId, Step


def test_phases_add_up_where_an_earlier_fault_is_found_later() -> None:
    first = Fault(cause=Cause.RANK_EXIT, evidence=Recorded(text="rank 0 ended"), at=100.0)
    incident = opened(RunId("0" * 32), Generation(1), (first,), decision=RestartsRanks(), reached=Step(3), now=101.0)
    incident = with_faults(
        incident, (Fault(cause=Cause.RANK_EXIT, evidence=Recorded(text="rank 1 ended before"), at=99.5),)
    )
    for event, at in (
        (IncidentEvent.NODES_THERE, 102.0),
        (IncidentEvent.TRAINING_AGAIN, 103.0),
        (IncidentEvent.CAUGHT_UP, 104.0),
    ):
        incident = moved(incident, event, at)
    stored = incident_update(incident, 104.0, None)
    phases = [stored[f"{phase}_seconds"] for phase in ("detect", "replace", "restore", "rework")]  # type: ignore[literal-required]
    assert sum(phases) == pytest.approx((stored["closed_at"] - stored["failed_at"]).total_seconds()) == 4.5
