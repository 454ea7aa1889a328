"""Frameworks' own checkpoints: they begin a job, and Everstep's newer step replaces them. More steps go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from everstep.protocol.options import OptionsKept
from tests.integration.training import kills
from tests.integration.training.fake_agent import FakeAgent
from tests.integration.training.own_checkpoint_scripts import BEFORE, LR
from tests.warm_parent import WarmParent

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

SCRIPT = "own_checkpoint_scripts"


@pytest.mark.parametrize("kind", ["trainer", "lightning"])
def test_a_checkpoint_of_the_framework_begins_a_job_that_resumes_bit_for_bit(
    warm_parent: WarmParent, tmp_path: Path, kind: str
) -> None:
    options: dict[str, Any] = {"kind": kind, "home": str(tmp_path)}
    kills.launch(warm_parent, 1, tmp_path, 0, {**options, "makes": True, "resumes": False}, script=SCRIPT).results()
    kills.check(
        warm_parent, tmp_path, 1, commits=2, script=SCRIPT, compared=("step",), **options, resumes=resume_of(options)
    )


def resume_of(options: dict[str, Any]) -> str | bool:
    return f"{options['home']}/checkpoint-{BEFORE}" if options["kind"] == "trainer" else True


@pytest.mark.long(keep=1)
@pytest.mark.parametrize("kind", ["trainer", "lightning"])
def test_a_run_that_has_reached_its_limit_goes_on_with_a_larger_one(
    warm_parent: WarmParent, tmp_path: Path, kind: str
) -> None:
    options = {"kind": kind, "home": str(tmp_path), "resumes": False, "before": 0}
    with FakeAgent(tmp_path, 1, first=9, lead=1, commit_target=1) as first:
        (whole,) = kills.launch(warm_parent, 1, tmp_path, 9, options, first, SCRIPT).results()
        assert first.committed == 9
    for limit in (9, 12):
        slots = {0: first.sealed[0, 9]}
        with FakeAgent(tmp_path, 1, 2, base_step=9, base_slots=slots, commit_target=0) as second:
            (result,) = kills.launch(warm_parent, 1, tmp_path, limit, options, second, SCRIPT).results()
        assert (result["step"], result["digest"] == whole["digest"]) == (limit, limit == 9)


@pytest.mark.long(keep=2)
@pytest.mark.parametrize("from_script", [[], ["lr"]], ids=["kept", "from_script"])
@pytest.mark.parametrize("kind", ["trainer", "lightning"])
def test_another_learning_rate_is_reported_or_used(
    warm_parent: WarmParent, tmp_path: Path, kind: str, from_script: list[str]
) -> None:
    options: dict[str, Any] = {"kind": kind, "home": str(tmp_path), "resumes": False, "before": 0}
    with FakeAgent(tmp_path, 1, first=4, lead=1, commit_target=1) as first:
        kills.launch(warm_parent, 1, tmp_path, 5, options, first, SCRIPT).results()
    base = first.committed
    options |= {"lr": 5e-3, "from_script": from_script}
    with FakeAgent(tmp_path, 1, 2, base_step=base, base_slots={0: first.sealed[0, base]}, commit_target=0) as second:
        (result,) = kills.launch(warm_parent, 1, tmp_path, 8, options, second, SCRIPT).results()
    reports = [message.options for _, message in second.of_kind(OptionsKept)]  # type: ignore[attr-defined]
    if from_script:
        assert (result["lr"], reports) == (5e-3, [])
    else:
        assert result["lr"] == LR
        assert {(each.name, each.script, each.kept) for each in reports[0]} >= {("optimizer.lr", "0.005", "0.01")}
        assert all(each.name.endswith(".lr") for each in reports[0])
