"""Each kind of state resumes bit-identically, is refused by name, or is found by a rehearsal."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from everstep.protocol.rehearsals import RehearsalVerdict
from tests.integration.training import kills
from tests.integration.training.fake_agent import FakeAgent
from tests.integration.training.faults import Training, check_equal
from tests.integration.training.resume_scenarios import SCENARIOS, Kind
from tests.warm_parent import WarmParent

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

FIRST, UNTIL = 8, 14
"""The captured step lies within the second epoch, and the run ends in the third one."""


def names(kind: Kind) -> list[str]:
    return [name for name, scenario in SCENARIOS.items() if scenario.kind is kind]


def training(parent: WarmParent, directory: Path, name: str) -> Training:
    world = SCENARIOS[name].world
    return Training(parent, directory, "resume_scenarios", world, {"name": name}, first=FIRST, until=UNTIL)


@pytest.mark.long(keep=5)
@pytest.mark.parametrize("name", names(Kind.RIGHT))
def test_a_killed_script_resumes_bit_identically(warm_parent: WarmParent, tmp_path: Path, name: str) -> None:
    if SCENARIOS[name].is_free:
        world, compared = SCENARIOS[name].world, ("draws", "kept")
        kills.check(warm_parent, tmp_path, world, commits=2, script="resume_scenarios", compared=compared, name=name)
    else:
        job = training(warm_parent, tmp_path, name)
        check_equal(job.resumed("kill_a_rank"), job.undisturbed())


@pytest.mark.long(keep=2)
@pytest.mark.parametrize("name", names(Kind.REFUSED))
def test_a_script_that_could_not_resume_is_refused_by_name(warm_parent: WarmParent, tmp_path: Path, name: str) -> None:
    refusals = training(warm_parent, tmp_path, name).refused()
    assert refusals
    assert all(SCENARIOS[name].told in refusal for refusal in refusals), refusals


@pytest.mark.long(keep=2)
@pytest.mark.parametrize("name", names(Kind.FOUND))
def test_a_rehearsal_finds_what_no_snapshot_contains(warm_parent: WarmParent, tmp_path: Path, name: str) -> None:
    with FakeAgent(tmp_path, 1) as agent:
        launch = warm_parent.fork(
            "tests.integration.training.resume_scenarios:rehearse",
            *(name, str(tmp_path), 400),
            world=1,
            directory=tmp_path,
            environment=agent.environment,
            result="result-{rank}.json",
        )
        (report,) = agent.rehearse()
        launch.results()
    assert report.verdict is RehearsalVerdict.DIFFERS, report
    assert report.difference is not None
    names = (*report.difference.names, *report.difference.unkept)
    assert any(SCENARIOS[name].told in variable for variable in names), report


def test_every_kind_of_answer_has_scenarios() -> None:
    assert set(Counter(scenario.kind for scenario in SCENARIOS.values())) == set(Kind)
