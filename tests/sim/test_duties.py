"""A job's page, the list, the duties, the command line and the events say the same, in random stories."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from control_plane.core.duties import Urgency
from control_plane.loop.duty_watch import BEGAN, DutyWatch
from everstep.cli.jobs import _facts
from everstep.cli.progress import line_of
from tests.dashboard.answers import Answers
from tests.dashboard.random_story import tell
from tests.sim.world import World

STORIES = 6
PRESSING = (Urgency.NOW, Urgency.LATER)


def compare(world: World) -> None:
    """Let the duty watch of a running server store what changed, and check that it repeats nothing."""
    watch = DutyWatch(world.database, world.registry, lambda: world.now)
    watch.compare()
    assert watch.compare() == 0, "each duty is told once"


@pytest.fixture(scope="module")
def moments() -> list[tuple[int, Answers]]:
    seed = random.SystemRandom().randrange(1 << 31)
    return [(number, each.answers) for number in range(seed, seed + STORIES) for each in tell(number, compare)]


def jobs_of(answers: Answers) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield each job's entry in the list, with its description."""
    for listed in answers["GET /v1/training-jobs"]["TrainingJobSummaries"]:
        yield listed, answers[f"GET /v1/training-jobs/{listed['TrainingJobName']}"]


def test_the_page_and_the_list_of_a_job_state_the_same_duty(moments: list[tuple[int, Answers]]) -> None:
    for seed, answers in moments:
        for listed, described in jobs_of(answers):
            assert listed["Duty"] == described["Duty"], (seed, listed["TrainingJobName"])


def test_the_duties_are_those_jobs_and_fleets_that_need_a_person(moments: list[tuple[int, Answers]]) -> None:
    for seed, answers in moments:
        of_jobs = {listed["RunId"]: listed["Duty"] for listed, _ in jobs_of(answers)}
        of_fleets = {fleet["FleetName"]: fleet["Duty"] for fleet in answers["GET /v1/fleets"]["Fleets"]}
        shown = answers["GET /v1/duties"]["Duties"]
        found = {each.get("RunId", each["FleetName"]): each["Duty"] for each in shown}
        of_nodes = {name for name, duty in of_fleets.items() if duty["Kind"] == "HeldNodes"}
        fleet_of = {listed["RunId"]: listed["FleetName"] for listed, _ in jobs_of(answers)}
        expected = {
            key: duty
            for key, duty in (of_jobs | of_fleets).items()
            if duty["Urgency"] in PRESSING and not (duty["Kind"] == "HeldNodes" and fleet_of.get(key) in of_nodes)
        }
        assert found == expected, seed
        urgencies = [PRESSING.index(Urgency(each["Duty"]["Urgency"])) for each in shown]
        assert urgencies == sorted(urgencies), seed


def test_the_command_line_shows_the_sentence_of_the_duty(moments: list[tuple[int, Answers]]) -> None:
    for seed, answers in moments:
        for _, described in jobs_of(answers):
            duty = described["Duty"]
            facts = dict(_facts(_with_times(described)))
            assert facts["to do"] == duty["Sentence"], seed
            assert (duty["Sentence"] in line_of(described)) >= (duty["Urgency"] in PRESSING), seed


def test_the_last_event_about_a_duty_states_it(moments: list[tuple[int, Answers]]) -> None:
    for seed, answers in moments:
        told: dict[tuple[str | None, str], dict[str, Any]] = {}
        for event in reversed(answers["GET /v1/events"]["Events"]):
            if event["Type"] in ("DutyBegan", "DutyEnded"):
                told[event.get("TrainingJobName"), event["FleetName"]] = event
        for listed, _ in jobs_of(answers):
            event = told.get((listed["TrainingJobName"], listed["FleetName"]))
            is_pressing = listed["Duty"]["Urgency"] in PRESSING
            assert is_pressing == (event is not None and event["Type"] == BEGAN), (seed, listed["TrainingJobName"])
            if is_pressing and event is not None:
                assert event["Message"] == f"{listed['TrainingJobName']}: {listed['Duty']['Sentence']}", seed


def test_no_job_under_a_warning_has_nothing_to_do(moments: list[tuple[int, Answers]]) -> None:
    for seed, answers in moments:
        for listed, _ in jobs_of(answers):
            trains = listed["SecondaryStatus"] == "Training"
            is_weak = listed.get("ProtectionState") != "Protected" or not listed.get("SurvivesNodeLoss")
            if trains and is_weak and listed["Boundary"] > 3:
                assert listed["Duty"]["Urgency"] != "None", (seed, listed["TrainingJobName"])


def _with_times(described: dict[str, Any]) -> dict[str, Any]:
    """Return a job's description with the times of botocore in place of Unix seconds."""
    from botocore.utils import parse_timestamp

    def converted(value: Any, name: str = "") -> Any:
        if isinstance(value, dict):
            return {key: converted(each, key) for key, each in value.items()}
        if isinstance(value, list):
            return [converted(each) for each in value]
        return parse_timestamp(value) if name.endswith(("Time", "Since")) and isinstance(value, float) else value

    return dict(converted(json.loads(json.dumps(described))))
