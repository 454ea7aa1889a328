from __future__ import annotations

from itertools import product

import pytest

from control_plane.core import states
from control_plane.errors import InvalidTransition

MACHINES = {
    "job": (states.JobState, states.JobEvent, states.JOB_TRANSITIONS, states.JobState.QUEUED, states.ENDED_JOBS),
    "node": (
        states.NodeState,
        states.NodeEvent,
        states.NODE_TRANSITIONS,
        states.NodeState.JOINING,
        {states.NodeState.GONE},
    ),
    "incident": (
        states.IncidentState,
        states.IncidentEvent,
        states.INCIDENT_TRANSITIONS,
        states.IncidentState.REPLACING,
        {states.IncidentState.CLOSED},
    ),
}


@pytest.mark.parametrize("name", MACHINES)
def test_every_state_is_reachable_and_ends_have_no_exits(name: str) -> None:
    kinds, events, table, first, ends = MACHINES[name]
    reached = {first}
    while True:
        more = {after for (before, _), after in table.items() if before in reached} - reached
        if not more:
            break
        reached |= more
    assert reached == set(kinds)
    assert not {before for before, _ in table} & set(ends)
    assert {before for before, _ in table} == set(kinds) - set(ends)
    assert {event for _, event in table} == set(events)


@pytest.mark.parametrize("name", MACHINES)
def test_what_is_not_in_the_table_is_refused_with_the_story(name: str) -> None:
    kinds, events, table, _, _ = MACHINES[name]
    for state, event in product(kinds, events):
        if (state, event) in table:
            assert states.advance(table, "it", state, event) is table[state, event]
        else:
            with pytest.raises(InvalidTransition, match="once upon a time"):
                states.advance(table, "it", state, event, ("once upon a time",))


@pytest.mark.parametrize("name", MACHINES)
def test_every_state_is_defined_where_it_is_declared(name: str) -> None:
    kinds = MACHINES[name][0]
    for state in kinds:
        assert f"{state.name}" in (kinds.__doc__ or "")


def test_what_users_see_is_derived() -> None:
    job = states.JobState
    assert states.training_job_status(job.RUNNING) == "InProgress"
    assert states.training_job_status(job.RUNNING, is_stop_requested=True) == "Stopping"
    assert states.training_job_status(job.STOPPED, is_stop_requested=True) == "Stopped"
    assert states.secondary_status(job.QUEUED) == "Pending"
    assert states.secondary_status(job.LOADING) == "Downloading"
    assert states.secondary_status(job.LOADING, has_started=True) == "Downloading"
    assert states.secondary_status(job.LOADING, has_stepped=True) == "Restarting"
    assert states.secondary_status(job.RUNNING, has_started=True) == "Starting"
    assert states.secondary_status(job.RUNNING, has_stepped=True) == "Restarting"
    assert states.secondary_status(job.RUNNING, has_stepped=True, is_stepping=True) == "Training"
    assert states.secondary_status(job.QUEUED, has_started=True) == "Interrupted"
    assert states.secondary_status(job.RUNNING, is_stop_requested=True) == "Stopping"
    assert states.secondary_status(job.FAILED, is_stop_requested=True) == "Failed"
    assert {states.training_job_status(state) for state in job} == set(states.TrainingJobStatus)
