"""Kills all ranks of a framework's script, and resumes them in new processes.

The tests compare the results with the results of an undisturbed run. The ranks train freely until the kill, so the
number of lost steps depends on the machine. With the module `faults`, this number is fixed.
"""

from __future__ import annotations

import itertools
import signal
from pathlib import Path
from typing import Any

from tests.integration.training.fake_agent import FakeAgent
from tests.integration.training.faults import halves
from tests.integration.training.test_resume import differences
from tests.warm_parent import Launch, WarmParent

MORE_STEPS = 6
_numbers = itertools.count()


def launch(
    parent: WarmParent,
    world: int,
    directory: Path,
    until: int,
    options: dict[str, Any],
    agent: FakeAgent | None = None,
    script: str = "trainer_scripts",
) -> Launch:
    own = directory / f"launch-{next(_numbers)}"
    own.mkdir()
    environment = {"EVERSTEP_FINAL_ROUND_SECONDS": "20"} | (agent.environment if agent is not None else {})
    call = (f"tests.integration.training.{script}:run", str(own), {"until": until, "options": options})
    return parent.fork(*call, world=world, directory=own, environment=environment, result="result-{rank}.json")


def check(
    parent: WarmParent,
    directory: Path,
    world: int,
    *,
    commits: int,
    script: str = "trainer_scripts",
    compared: tuple[str, ...] = ("step", "epoch", "history", "draws"),
    epoch_steps: int = 0,
    **options: Any,
) -> None:
    """Kill all ranks after some commits, resume them, and compare with an undisturbed run.

    With `epoch_steps`, the compared runs do not end with an epoch of so many steps.
    """
    with FakeAgent(directory, world, first=3, lead=1, commit_target=commits) as first:
        ranks = launch(parent, world, directory, 1_000, options, first, script)
        try:
            assert first.reached.wait(120), f"{first.messages[-20:]}\n{ranks.logs()}"
        finally:
            ranks.kill()
            codes = ranks.wait(until_one_fails=False)
        assert codes == [-signal.SIGKILL] * world, "the kill found running ranks"
        finished = max(half.boundary for half in halves(first))
        assert finished >= first.committed >= commits, "training had passed the committed step"
    check_resumed(parent, directory, first, options, script, compared, epoch_steps)


def check_resumed(
    parent: WarmParent,
    directory: Path,
    first: FakeAgent,
    options: dict[str, Any],
    script: str = "trainer_scripts",
    compared: tuple[str, ...] = ("step", "epoch", "history", "draws"),
    epoch_steps: int = 0,
) -> None:
    """Resume the newest step that the first agent has committed, and compare with an undisturbed run."""
    world = len(first.lines)
    base = first.committed
    slots = {rank: first.sealed[rank, base] for rank in range(world)}
    until = base + MORE_STEPS
    until += bool(epoch_steps) and until % epoch_steps == 0
    with FakeAgent(directory, world, 2, base_step=base, base_slots=slots, commit_target=0) as second:
        resumed = launch(parent, world, directory, until, options, second, script).results()
    undisturbed = launch(parent, world, directory, until, options, script=script).results()
    for found, expected in zip(resumed, undisturbed, strict=True):
        assert (found["begun"], expected["begun"]) == (base, 0)
        for what in compared:
            assert found[what] == expected[what], what
        assert differences(found["digest"], expected["digest"]) == {}
