"""The examples of the integrations run alone, under torchrun and under `accelerate launch`, unchanged."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
STEPS = 3
OUTPUTS = {
    "accelerate": "model.pt",
    "lightning": "model.pt",
    "torchtitan": f"checkpoint/step-{STEPS}/.metadata",
    "trainer": "model/model.safetensors",
}
"""A file that each example writes to its output directory at the end of training."""
LAUNCHERS = {
    "alone": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    "accelerate_launch": [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"],
}
CASES = [
    pytest.param(name, launcher, id=f"{name}-{launcher}")
    for name, launchers in {
        "accelerate": ["alone", "torchrun", "accelerate_launch"],
        "lightning": ["alone", "torchrun"],
        "torchtitan": ["torchrun"],
        "trainer": ["alone", "torchrun", "accelerate_launch"],
    }.items()
    for launcher in launchers
]


def start(name: str, launcher: str, directory: Path) -> subprocess.CompletedProcess[str]:
    shutil.copytree(EXAMPLES / name, directory, dirs_exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EVERSTEP")}
    return subprocess.run(
        [*LAUNCHERS[launcher], "train.py", "--steps", str(STEPS)],
        cwd=directory,
        env={**environment, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


@pytest.mark.long(keep=1)
@pytest.mark.parametrize(("name", "launcher"), CASES)
def test_an_example_runs_with_each_launcher(name: str, launcher: str, tmp_path: Path) -> None:
    ended = start(name, launcher, tmp_path)
    assert ended.returncode == 0, ended.stdout
    assert (tmp_path / "output" / OUTPUTS[name]).stat().st_size > 0


@pytest.mark.long
def test_torchtitan_needs_a_launcher_as_its_page_says(tmp_path: Path) -> None:
    ended = start("torchtitan", "alone", tmp_path)
    assert ended.returncode != 0
    assert "LOCAL_RANK must be set" in ended.stdout
