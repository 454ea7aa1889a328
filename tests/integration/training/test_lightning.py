"""A Lightning `Trainer` is killed, and resumed in new processes.

Its weights, optimizer, schedule, counters, logged values and random draws equal those of an undisturbed run bit for
bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from everstep.protocol.rank_messages import RankHello, StopState
from tests.integration.training.fake_agent import FakeAgent
from tests.integration.training.kills import check, check_resumed, launch
from tests.warm_parent import WarmParent

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


def check_lightning(parent: WarmParent, directory: Path, world: int, *, commits: int, **options: Any) -> None:
    check(parent, directory, world, commits=commits, script="lightning_scripts", **options)


INSIDE, AT_THE_END, AFTER_THE_END = 2, 4, 5
"""Numbers of commits before the kill: the newest commit is inside, at the end of, or after the first epoch.

With one rank, an epoch has six steps in all these tests. The first committed step is step 3, and usually each later
step is committed. The newest commit before the kill is then step 4, 6 or 7.
"""


@pytest.mark.parametrize(
    "commits", [pytest.param(INSIDE, id="inside_an_epoch"), pytest.param(AT_THE_END, id="at_the_end_of_an_epoch")]
)
def test_one_process(warm_parent: WarmParent, tmp_path: Path, commits: int) -> None:
    check_lightning(warm_parent, tmp_path, 1, commits=commits, accumulate=4, validates=True)


def test_an_agreed_stop_ends_the_loop_inside_an_epoch(warm_parent: WarmParent, tmp_path: Path) -> None:
    stop, options = 4, {"accumulate": 4, "validates": True}

    def announce(agent: FakeAgent, _: int, message: object) -> None:
        if isinstance(message, RankHello):
            agent.announce_stop(stop, StopState.CONFIRMED)

    with FakeAgent(tmp_path, 1, first=stop, lead=1, on_message=announce) as agent:
        (stopped,) = launch(warm_parent, 1, tmp_path, 1_000, options, agent, "lightning_scripts").results()
        assert (stopped["begun"], stopped["step"], stopped["epoch"]) == (0, stop, 0)
        assert agent.committed == stop
    check_resumed(warm_parent, tmp_path, agent, options, "lightning_scripts")


@pytest.mark.long(keep=1)
@pytest.mark.parametrize("commits", [INSIDE, AT_THE_END, AFTER_THE_END])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"accumulate": 4, "workers": 2}, id="workers"),
        pytest.param({"accumulate": 4, "precision": "bf16-mixed"}, id="bf16"),
        pytest.param({"accumulate": 4, "precision": "16-mixed"}, id="fp16"),
        pytest.param({"limit": 6, "validates": True}, id="short_epochs"),
        pytest.param({"accumulate": 4, "limit": 21, "workers": 2}, id="short_epochs_with_workers"),
        pytest.param({"manual": True, "limit": 6}, id="manual_optimization"),
        pytest.param({"accumulate": 4, "averages": True, "validates": True}, id="averages"),
    ],
)
def test_options(warm_parent: WarmParent, tmp_path: Path, commits: int, options: dict[str, Any]) -> None:
    check_lightning(warm_parent, tmp_path, 1, commits=commits, **options)


@pytest.mark.long
def test_ddp(warm_parent: WarmParent, tmp_path: Path) -> None:
    options = {"kind": "ddp", "precision": "bf16-mixed", "accumulate": 4, "validates": True}
    check_lightning(warm_parent, tmp_path, 2, commits=INSIDE, **options)


@pytest.mark.long
@pytest.mark.parametrize("validates", [False, True], ids=["plain", "validates"])
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"kind": "ddp"}, id="ddp"),
        pytest.param({"kind": "fsdp"}, id="fsdp"),
        pytest.param({"kind": "zero", "stage": 2}, id="zero2"),
        pytest.param({"kind": "zero", "stage": 3}, id="zero3"),
    ],
)
def test_strategies(
    warm_parent: WarmParent,
    tmp_path: Path,
    options: dict[str, Any],
    precision: str,
    accumulate: int,
    validates: bool,
) -> None:
    # With two ranks, an epoch has 11 batches. With four batches per step, its last step has only three batches. With
    # DeepSpeed, this step also takes the first batch of the next epoch, so a run that ends with the epoch ends
    # inside of a step, whose state cannot be saved.
    options = {**options, "precision": precision, "accumulate": accumulate, "validates": validates}
    check_lightning(warm_parent, tmp_path, 2, commits=INSIDE, epoch_steps=3 if accumulate == 4 else 0, **options)


def test_a_model_checkpoint_keeps_its_best_scores_in_another_directory(warm_parent: WarmParent, tmp_path: Path) -> None:
    """Lightning's default directory has a new number in each launch."""
    options = {"validates": True, "saves": True}
    script = "lightning_scripts"
    with FakeAgent(tmp_path, 1, first=9, lead=1, commit_target=1) as first:
        launch(warm_parent, 1, tmp_path, 10, options, first, script).results()
    base = first.committed
    slots = {0: first.sealed[0, base]}
    with FakeAgent(tmp_path, 1, 2, base_step=base, base_slots=slots, commit_target=0) as second:
        (resumed,) = launch(warm_parent, 1, tmp_path, 20, options, second, script).results()
    (whole,) = launch(warm_parent, 1, tmp_path, 20, options, script=script).results()
    assert resumed["begun"] == base
    assert resumed["best"] == whole["best"]
    assert len(whole["best"]) == 2
