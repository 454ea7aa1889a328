"""One run of an experiment tracker spans all launches of a job, as docs/training.md says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.warm_parent import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.long]
SECTION = "## One run in an experiment tracker"


def launch(folder: Path, lines: str, first: int, last: int) -> None:
    """Run the page's lines for some steps, in a process of their own, without a network."""
    init, *logs = lines.splitlines()
    program = "\n".join(
        [
            "import os, types",
            "session = types.SimpleNamespace(step=int(os.environ['FIRST']))",
            init,
            "while session.step <= int(os.environ['LAST']):",
            "    loss = 1 / session.step",
            *(f"    {line}" for line in logs),
            "    session.step += 1",
        ]
    )
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(folder)}
    environment |= {"EVERSTEP_RUN_ID": "run-of-the-job", "FIRST": str(first), "LAST": str(last)}
    subprocess.run([sys.executable, "-c", program], cwd=folder, env=environment, check=True, timeout=50)


def test_wandb_has_one_run(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "training.md").read_text().partition(SECTION)[2]
    found = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert found is not None
    for first, last in ((1, 5), (4, 8)):
        launch(tmp_path, f"import wandb; {found[1]}", first, last)
    runs = [path.name for path in (tmp_path / "wandb").glob("offline-run-*")]
    assert {re.sub(r"offline-run-\d+_\d+-", "", name) for name in runs} == {"run-of-the-job"}


def test_tensorboard_shows_each_step_once(tmp_path: Path) -> None:
    for first, last in ((1, 5), (4, 8)):
        launch(
            tmp_path,
            "from torch.utils.tensorboard import SummaryWriter; "
            "writer = SummaryWriter('log', purge_step=session.step)\n"
            "writer.add_scalar('loss', loss, session.step); writer.flush()",
            first,
            last,
        )
    events = EventAccumulator(str(tmp_path / "log"))
    events.Reload()
    assert [each.step for each in events.Scalars("loss")] == list(range(1, 9))
