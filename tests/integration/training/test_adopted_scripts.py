"""The scripts of docs/adopting.md and docs/adopting-frameworks.md resume bit-identically.

A rehearsal finds what the original scripts lose.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from everstep.determinism import Source
from everstep.protocol.rehearsals import RehearsalVerdict, Rehearsed
from tests.integration.training import adopted_composer
from tests.integration.training.adopted_frameworks import ADOPTED
from tests.integration.training.fake_agent import FakeAgent
from tests.integration.training.faults import Training, check_equal
from tests.warm_parent import ROOT, Launch, WarmParent

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

WORLDS = {"nanogpt": 2, "imagenet": 2, "timm": 2, "composer": 2}
"""Ranks of the scripts that train with DDP. The other scripts have one rank."""
REHEARSAL_STEPS = 400


def started(parent: WarmParent, agent: FakeAgent, directory: Path, name: str, is_adopted: bool) -> Launch:
    return parent.fork(
        "tests.integration.training.adopted_frameworks:rehearse",
        name,
        str(directory),
        REHEARSAL_STEPS,
        is_adopted,
        world=WORLDS.get(name, 1),
        directory=directory,
        environment=agent.environment,
        result="result-{rank}.json",
    )


def rehearsed(parent: WarmParent, directory: Path, name: str, *, is_adopted: bool) -> list[Rehearsed]:
    with FakeAgent(directory, WORLDS.get(name, 1)) as agent:
        launch = started(parent, agent, directory, name, is_adopted)
        reports = agent.rehearse()
        launch.results()
        return reports


def test_the_callback_of_the_document_is_the_tested_one() -> None:
    page = (ROOT / "docs" / "adopting-frameworks.md").read_text()
    found = re.search(r"```python\n.*?(class Kept.*?)```", page, re.DOTALL)
    assert found is not None
    assert found[1] in Path(adopted_composer.__file__).read_text()


# An epoch has four steps. The scripts resume at the end of an epoch, and in the middle of the next one.
@pytest.mark.parametrize("step", [4, 6])
@pytest.mark.parametrize("name", ADOPTED)
def test_an_adopted_script_resumes_bit_identically(
    warm_parent: WarmParent, tmp_path: Path, name: str, step: int
) -> None:
    options = {"name": name}
    training = Training(warm_parent, tmp_path, "adopted_frameworks", WORLDS.get(name, 1), options, first=step)
    check_equal(training.resumed("kill_a_rank"), training.undisturbed())


@pytest.mark.parametrize("name", ADOPTED)
def test_an_adopted_script_is_proven(warm_parent: WarmParent, tmp_path: Path, name: str) -> None:
    reports = rehearsed(warm_parent, tmp_path, name, is_adopted=True)
    assert {report.verdict for report in reports} == {RehearsalVerdict.PROVEN}, [
        report.difference for report in reports
    ]


LOST = {
    "nanogpt": (Source.PREFETCH, "original_nanogpt.iter_num"),
    "dcgan": (Source.PREFETCH, "original_dcgan.i"),
    "ppo": (Source.OPTIMIZER_SETTING, "update.next_obs"),
    "language_model": (Source.UNKEPT_STATE, "original_language_model.i"),
    "diffusers": (Source.UNKEPT_STATE, "original_diffusers.this.ema_model.shadow_params.0"),
    "timm": (Source.PREFETCH, "train_one_epoch.num_updates"),
    "simulator": (Source.UNKEPT_STATE, "update.next_obs"),
}
"""The cause and a variable that the report about each original script must name."""


@pytest.mark.parametrize("name", LOST)
def test_the_original_script_differs(warm_parent: WarmParent, tmp_path: Path, name: str) -> None:
    for report in rehearsed(warm_parent, tmp_path, name, is_adopted=False):
        assert report.verdict is RehearsalVerdict.DIFFERS, report
        assert report.difference is not None
        assert report.difference.source == LOST[name][0]
        assert LOST[name][1] in report.difference.unkept, report


@pytest.mark.parametrize("name", ["imagenet", "composer"])
def test_the_original_script_with_a_scheduler_is_refused(warm_parent: WarmParent, tmp_path: Path, name: str) -> None:
    with FakeAgent(tmp_path, 2) as agent:
        launch = started(warm_parent, agent, tmp_path, name, False)
        assert launch.wait(until_one_fails=False) == [1, 1]
    assert "scheduler" in launch.log(0)
