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


def blocks() -> list[str]:
    """Return the page's Python blocks about trackers."""
    section = (ROOT / "docs" / "training.md").read_text().partition(SECTION)[2].partition("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


def launch(folder: Path, lines: str, first: int, last: int, **environment: str) -> None:
    """Run the page's lines for some steps, in a process of their own, without a network. The last line logs."""
    *init, log = lines.splitlines()
    program = "\n".join(
        [
            "import os, types",
            "session = types.SimpleNamespace(step=int(os.environ['FIRST']))",
            *init,
            "while session.step <= int(os.environ['LAST']):",
            "    loss = 1 / session.step",
            f"    {log}",
            "    session.step += 1",
        ]
    )
    environment = {**os.environ, **environment}
    environment |= {"EVERSTEP_RUN_ID": "run-of-the-job", "FIRST": str(first), "LAST": str(last)}
    subprocess.run([sys.executable, "-c", program], cwd=folder, env=environment, check=True, timeout=50)


def test_wandb_has_one_run(tmp_path: Path) -> None:
    options = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(tmp_path)}
    for first, last in ((1, 5), (4, 8)):
        launch(tmp_path, f"import wandb\n{blocks()[0]}", first, last, **options)
    runs = [path.name for path in (tmp_path / "wandb").glob("offline-run-*")]
    assert {re.sub(r"offline-run-\d+_\d+-", "", name) for name in runs} == {"run-of-the-job"}


def test_mlflow_has_one_run(tmp_path: Path) -> None:
    """The test installs MLflow from the package index, because no other test needs it."""
    install = ["uv", "pip", "install", "--quiet", "--target", str(tmp_path / "packages"), "mlflow-skinny==3.17.2"]
    subprocess.run([Path(sys.executable).parent / install[0], *install[1:]], check=True, cwd=tmp_path)
    options = {
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_TRACKING_URI": f"file:{tmp_path}/runs",
        "PYTHONPATH": str(tmp_path / "packages"),
    }
    for first, last in ((1, 5), (4, 8)):
        launch(tmp_path, f"import mlflow\n{blocks()[1]}", first, last, **options)
    (metric,) = (tmp_path / "runs").glob("*/*/metrics/loss")
    logged = [(int(step), float(value)) for _, value, step, *_ in map(str.split, metric.read_text().splitlines())]
    assert sorted(set(logged)) == [(step, 1 / step) for step in range(1, 9)]


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
