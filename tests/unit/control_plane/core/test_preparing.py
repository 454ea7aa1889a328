"""Tests how a job prepares its next generation (`core.job.preparing`)."""

from __future__ import annotations

from control_plane.core.job.preparing import prepare
from control_plane.core.states import JobState
from everstep.protocol.ids import Generation
from tests.unit.control_plane.core.test_job_view import NOW, ONE
from tests.unit.control_plane.core.test_roster import node, preparing, promised


def test_a_job_takes_the_number_after_the_highest_that_any_agent_reports() -> None:
    reported = preparing(node(ONE, promised(generation=Generation(5))), record={"asked": ((ONE, NOW),)})
    found = prepare(reported).record
    assert (found.state, found.issued_generation, found.asked) == (JobState.PREPARING, 6, ())
    assert prepare(preparing(node(ONE, promised()))).record.issued_generation == 2
