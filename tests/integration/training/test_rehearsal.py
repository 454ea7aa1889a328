"""A job rehearses its resume while it trains, and names the state that a restart would lose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from everstep.determinism import Source
from everstep.protocol.rank_messages import StopState
from everstep.protocol.rehearsals import RehearsalVerdict, Rehearsed
from everstep.training import rehearsal
from tests.integration.training import unkept_scripts
from tests.integration.training.fake_agent import FakeAgent
from tests.integration.training.unkept_scripts import STEPS, UNKEPT
from tests.warm_parent import Launch, WarmParent

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


BOTH = pytest.mark.parametrize("has_room", [True, False], ids=["beside", "exec"])
"""The replay runs in a child of the rank, or without memory for one in the rank itself."""


def started(
    parent: WarmParent, agent: FakeAgent, directory: Path, name: str, *, world: int = 1, has_room: bool = True
) -> Launch:
    return parent.fork(
        "tests.integration.training.unkept_scripts:run",
        name,
        str(directory),
        world=world,
        directory=directory,
        environment=agent.environment | ({} if has_room else {unkept_scripts.NO_ROOM: "1"}),
        result="result-{rank}.json",
    )


def rehearsed(
    parent: WarmParent, directory: Path, name: str, *, world: int = 1, has_room: bool = True
) -> tuple[list[Rehearsed], list[Any]]:
    """Run a script that rehearses once. Return each rank's report and result."""
    with FakeAgent(directory, world) as agent:
        launch = started(parent, agent, directory, name, world=world, has_room=has_room)
        reports = agent.rehearse()
        return reports, launch.results()


def undisturbed(parent: WarmParent, directory: Path, world: int, name: str = "plain") -> list[Any]:
    """Return the results of a run without a rehearsal."""
    own = directory / "undisturbed"
    own.mkdir()
    launch = parent.fork(
        "tests.integration.training.unkept_scripts:run",
        name,
        str(own),
        world=world,
        directory=own,
        environment={"EVERSTEP_GENERATION": "1"},
        result="result-{rank}.json",
    )
    return launch.results()


def test_a_withdrawn_rehearsal_changes_nothing(warm_parent: WarmParent, tmp_path: Path) -> None:
    with FakeAgent(tmp_path, 1) as agent:
        launch = started(warm_parent, agent, tmp_path, "plain")
        step = agent.announce_rehearsal()
        agent.wait_for(lambda: agent.rank_halves()[0].boundary == step)
        agent.say_rehearsal(step, StopState.NONE)
        (result,) = launch.results()
    assert len(result["losses"]) == STEPS
    assert agent.of_kind(Rehearsed) == []
    assert [result] == undisturbed(warm_parent, tmp_path, 1)


def test_a_rank_without_memory_for_its_state_says_so_and_trains_on(warm_parent: WarmParent, tmp_path: Path) -> None:
    (report,), (result,) = rehearsed(warm_parent, tmp_path, "no_memory")
    assert report.verdict is RehearsalVerdict.REFUSED
    assert "GiB" in report.message
    assert len(result["losses"]) == STEPS


@pytest.mark.parametrize("name", ["no_copy", "no_second_copy"])
def test_a_state_that_cannot_be_kept_ends_the_rehearsal_and_not_the_training(
    warm_parent: WarmParent, tmp_path: Path, name: str
) -> None:
    (report,), (result,) = rehearsed(warm_parent, tmp_path, name)
    assert (report.verdict, report.message) == (RehearsalVerdict.REFUSED, "OSError: no room")
    assert len(result["losses"]) == STEPS


def test_a_script_that_cannot_start_again_trains_on(warm_parent: WarmParent, tmp_path: Path) -> None:
    with FakeAgent(tmp_path, 1) as agent:
        launch = started(warm_parent, agent, tmp_path, "starts_once")
        (report,), (result,) = agent.rehearse(), launch.results()
    assert (report.verdict, report.message) == (RehearsalVerdict.REFUSED, rehearsal.ENDED_EARLY)
    assert "the script starts only once" in launch.log(0)
    assert len(result["losses"]) == STEPS


def test_a_replay_that_does_not_end_is_killed_and_the_rank_trains_on(warm_parent: WarmParent, tmp_path: Path) -> None:
    (report,), (result,) = rehearsed(warm_parent, tmp_path, "hangs_in_a_replay")
    assert report.verdict is RehearsalVerdict.REFUSED
    assert "within" in report.message
    assert len(result["losses"]) == STEPS


def test_without_memory_for_a_child_a_script_that_cannot_start_again_fails_with_its_own_error(
    warm_parent: WarmParent, tmp_path: Path
) -> None:
    with FakeAgent(tmp_path, 1) as agent:
        launch = started(warm_parent, agent, tmp_path, "starts_once", has_room=False)
        step = agent.announce_rehearsal()
        agent.confirm_rehearsal(step)
        assert launch.wait() == [1]
    assert "the script starts only once" in launch.log(0)


@BOTH
@pytest.mark.parametrize("world", [1, 2])
def test_a_script_that_ends_in_a_replay_differs_and_trains_on(
    warm_parent: WarmParent, tmp_path: Path, world: int, has_room: bool
) -> None:
    reports, results = rehearsed(warm_parent, tmp_path, "ends_in_a_replay", world=world, has_room=has_room)
    assert [report.verdict for report in reports] == [RehearsalVerdict.DIFFERS] * world, reports
    assert [(each.difference.step, each.difference.kind) for each in reports if each.difference] == [(4, "end")] * world
    first = 1 if has_room else reports[0].step + reports[0].steps + 1
    assert [min(map(int, result["losses"])) for result in results] == [first] * world


@BOTH
@pytest.mark.parametrize("world", [1, 2])
def test_a_job_that_repeats_its_steps_is_proven(
    warm_parent: WarmParent, tmp_path: Path, world: int, has_room: bool
) -> None:
    with FakeAgent(tmp_path, world) as agent:
        launch = started(warm_parent, agent, tmp_path, "plain", world=world, has_room=has_room)
        agent.wait_for(lambda: any(half.resume_revision for half in agent.rank_halves()))
        reports, results = agent.rehearse(), launch.results()
        revisions = [half.resume_revision for half in agent.rank_halves()]
    assert revisions == [1] * world, "the end of the first pass over the data, also through the rehearsal"
    assert [report.verdict for report in reports] == [RehearsalVerdict.PROVEN] * world, reports
    weights = [result["weights"] for result in undisturbed(warm_parent, tmp_path, world)]
    assert [result["weights"] for result in results] == weights


def test_a_job_rehearses_twice_and_its_result_stays_that_of_an_undisturbed_run(
    warm_parent: WarmParent, tmp_path: Path
) -> None:
    with FakeAgent(tmp_path, 2) as agent:
        launch = started(warm_parent, agent, tmp_path, "running_mean", world=2)
        verdicts = [report.verdict for _ in range(2) for report in agent.rehearse()]
        results = launch.results()
    assert verdicts == [RehearsalVerdict.DIFFERS] * 4
    assert results == undisturbed(warm_parent, tmp_path, 2, "running_mean")


NAMED = {
    "running_mean": "average",
    "scale_in_a_global": "SHARED.scale",
    "numpy_generator": "SHARED.numpy",
    "python_generator": "SHARED.python",
    "generator_in_a_closure": "generator",
    "averaged_weights": "teacher",
    "averaged_weights_beside": "average",
    "target_network": "count",
    "replay_buffer": "buffer",
    "queue_of_keys": "queue",
    "lookahead_weights": "slow",
    "counter_in_a_class": "Counted.count",
    "hidden_state": "hidden",
    "worst_value": "worst",
    "changed_after_some_steps": "count",
    "loss_scaler": "scaler.scale",
    "history_in_a_dict": "history.losses",
    "prefetched_draw": "inputs",
}
"""A part of the name of the variable that the report must name. Caches and iterators cannot be named."""


@pytest.mark.long(keep=6)
@BOTH
@pytest.mark.parametrize("name", [*UNKEPT, "prefetched_draw"])
def test_the_rehearsal_finds_state_that_a_restart_would_lose(
    warm_parent: WarmParent, tmp_path: Path, name: str, has_room: bool
) -> None:
    (report,), (result,) = rehearsed(warm_parent, tmp_path, name, has_room=has_room)
    assert report.verdict is RehearsalVerdict.DIFFERS, report
    assert report.difference is not None
    later = {"changed_after_some_steps": report.difference.step, "averaged_weights_beside": report.step + report.steps}
    assert report.difference.step == later.get(name, report.step + 1)
    if name in NAMED:
        assert any(NAMED[name] in variable for variable in report.difference.unkept), report.difference.unkept
    expected = Source.OPTIMIZER_SETTING if name == "loop_counter" else Source.UNKEPT_STATE
    assert report.difference.source == expected
    if has_room:
        assert [result] == undisturbed(warm_parent, tmp_path, 1, name)
    else:
        assert min(map(int, result["losses"])) == report.step + report.steps + 1  # it went on from its own state


CHANGED = {
    "ends_by_a_counter": "Loop.iter_num += 1",
    "best_value": "best = min(",
    "list_of_losses": "history.append(",
    "loop_counter": 'optimizer.param_groups[0]["lr"] = ',
    "prefetched_batch": "batch, following = following, ",
}
"""The beginning of the first line of the script that the report about a script must name."""


def code_of(report: Rehearsed) -> list[str]:
    """Return the lines of the script that the report names."""
    assert report.difference is not None
    source = Path(unkept_scripts.__file__).read_text().splitlines()
    assert {Path(each.file).name for each in report.difference.lines} == {"unkept_scripts.py"}
    return [source[each.line - 1].strip() for each in report.difference.lines]


@pytest.mark.parametrize("name", ["loop_counter", "prefetched_batch"])
def test_a_difference_names_the_line_that_sets_or_fetches_what_differs(
    warm_parent: WarmParent, tmp_path: Path, name: str
) -> None:
    (report,), _ = rehearsed(warm_parent, tmp_path, name)
    assert any(line.startswith(CHANGED[name]) for line in code_of(report)), code_of(report)


@BOTH
@pytest.mark.parametrize(
    ("name", "variable"),
    [("ends_by_a_counter", "Loop.iter_num"), ("best_value", "best"), ("list_of_losses", "history")],
)
def test_a_value_that_no_repeated_step_uses_is_not_proven(
    warm_parent: WarmParent, tmp_path: Path, name: str, variable: str, has_room: bool
) -> None:
    (report,), (result,) = rehearsed(warm_parent, tmp_path, name, has_room=has_room)
    assert report.verdict is RehearsalVerdict.UNPROVEN, report
    assert report.difference is not None
    assert report.difference.source == Source.UNKEPT_VALUE
    (named,) = report.difference.unkept
    assert variable in named
    assert named in report.message
    (line,) = code_of(report)
    assert line.startswith(CHANGED[name])
    assert f"{named} ({report.difference.lines[0].file}:{report.difference.lines[0].line})" in report.message
    first = 1 if has_room else report.step + 1
    assert min(map(int, result["losses"])) == first, "equal steps are not repeated from the kept state"


def test_times_and_values_that_follow_from_the_restored_step_are_proven(
    warm_parent: WarmParent, tmp_path: Path
) -> None:
    (report,), _ = rehearsed(warm_parent, tmp_path, "harmless")
    assert (report.verdict, report.difference, report.message) == (RehearsalVerdict.PROVEN, None, "")


def test_a_tensor_is_a_difference_where_a_plain_value_is_not_proven(warm_parent: WarmParent, tmp_path: Path) -> None:
    (report,), _ = rehearsed(warm_parent, tmp_path, "averaged_weights_beside")
    assert report.difference is not None
    assert (report.verdict, report.difference.source) == (RehearsalVerdict.DIFFERS, Source.UNKEPT_STATE)


def test_a_batch_that_the_script_fetches_before_the_boundary_is_named(warm_parent: WarmParent, tmp_path: Path) -> None:
    (report,), _ = rehearsed(warm_parent, tmp_path, "prefetched_batch")
    assert report.difference is not None
    assert (report.verdict, report.difference.source) == (RehearsalVerdict.DIFFERS, Source.PREFETCH)


def test_a_generator_of_the_script_is_the_cause_of_other_draws(warm_parent: WarmParent, tmp_path: Path) -> None:
    (report,), _ = rehearsed(warm_parent, tmp_path, "simulated_draws")
    assert report.difference is not None
    assert (report.verdict, report.difference.source) == (RehearsalVerdict.DIFFERS, Source.UNKEPT_STATE)
    assert "SHARED.numpy" in report.difference.unkept[0]


def test_a_computation_that_differs_in_every_run_is_no_unkept_state(warm_parent: WarmParent, tmp_path: Path) -> None:
    (report,), _ = rehearsed(warm_parent, tmp_path, "clock")
    assert report.verdict is RehearsalVerdict.UNSTABLE


def test_a_logged_time_is_no_difference(warm_parent: WarmParent, tmp_path: Path) -> None:
    (report,), _ = rehearsed(warm_parent, tmp_path, "logged_time")
    assert report.verdict is RehearsalVerdict.PROVEN


@BOTH
def test_one_rank_with_a_difference_returns_all_ranks_to_their_own_state(
    warm_parent: WarmParent, tmp_path: Path, has_room: bool
) -> None:
    reports, results = rehearsed(warm_parent, tmp_path, "generator_of_the_last_rank", world=2, has_room=has_room)
    assert {report.verdict for report in reports} == {RehearsalVerdict.DIFFERS}
    first = 1 if has_room else reports[0].step + reports[0].steps + 1
    assert [min(map(int, result["losses"])) for result in results] == [first] * 2
