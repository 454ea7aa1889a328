"""The mistakes of a first hour, each with the message that the job shows."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.jobs import ENDED, Workplace, wait_until


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """A script as a new user writes it, and parts of what its job then says."""

    script: str
    says: tuple[str, ...]
    status: str = "Failed"
    request: dict[str, Any] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)


PARSES = "import argparse; p = argparse.ArgumentParser(); p.add_argument('--lr', type=float); p.parse_args()"
MISTAKES = {
    "a typo": Mistake(script="def step(:\n", says=("SyntaxError: invalid syntax",)),
    "a package that no node has": Mistake(
        script="import not_installed\n",
        says=("ModuleNotFoundError: No module named 'not_installed'", "--requirements"),
    ),
    "a package without a wheel": Mistake(
        script="pass\n",
        files={"requirements.txt": "./vendored\n", "vendored/setup.py": "from setuptools import setup; setup()\n"},
        request={"Requirements": "requirements.txt"},
        says=("requirements.txt", "wheel"),
    ),
    "a conda environment": Mistake(
        script="pass\n",
        files={"environment.yaml": "name: gpt\ndependencies: [python=3.11]\n"},
        request={"Requirements": "environment.yaml"},
        status="Refused",
        says=("environment.yaml", "conda"),
    ),
    "an editable install that needs a build": Mistake(
        script="pass\n",
        files={"requirements.txt": "-e .\n", "setup.py": "from setuptools import setup; setup()\n"},
        request={"Requirements": "requirements.txt"},
        says=("this node installs wheels only", "pyproject.toml", "--allow-builds"),
    ),
    "a file that only the laptop has": Mistake(
        script="open('/home/ann/data/train.bin')\n",
        says=("FileNotFoundError: [Errno 2] No such file or directory: '/home/ann/data/train.bin'",),
    ),
    "an option that the script does not have": Mistake(
        script=PARSES, request={"Arguments": ["--learning-rate", "1"]}, says=("unrecognized arguments",)
    ),
    "an exception": Mistake(
        script="raise ValueError('shapes (3, 4) and (5,) differ')\n",
        says=("ValueError: shapes (3, 4) and (5,) differ", "rank 0", "code 1"),
    ),
    "an exit without a traceback": Mistake(
        script="print('no data found under data/', flush=True); raise SystemExit(3)\n",
        says=("no data found under data/", "code 3"),
    ),
    "a killed process": Mistake(
        script="import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n", says=("SIGKILL", "rank 0")
    ),
    "a script without init": Mistake(
        script="print('trained')\n", status="Completed", says=("nothing was kept", "everstep.training.init")
    ),
    "a learning rate that looks like an option": Mistake(
        script=PARSES, request={"HyperParameters": {"lr": "-1e-4"}}, status="Completed", says=()
    ),
    "results next to the script": Mistake(
        script="open('model.pt', 'w').write('weights')\n", status="Completed", says=("model.pt (NotKept)", "--keep")
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_gets_its_message(place: Workplace, tmp_path: Path, name: str) -> None:
    mistake = MISTAKES[name]
    for file, content in {**mistake.files, "train.py": mistake.script}.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(content)
    job = "-".join(name.split())
    request = {
        "TrainingJobName": job,
        "Source": place.client.upload_source(Directory=tmp_path),
        "EntryPoint": "train.py",
        "NodeCount": 1,
        **mistake.request,
    }
    try:
        place.client.create_training_job(**request)
    except place.client.exceptions.ValidationException as error:
        status, shown = "Refused", str(error)
    else:

        def described() -> dict[str, Any] | None:
            found: dict[str, Any] = place.client.describe_training_job(TrainingJobName=job)
            return found if found["TrainingJobStatus"] in ENDED else None

        ended = wait_until(f"the end of {job}", described)
        told = [event["Message"] for event in place.client.list_events(TrainingJobName=job)["Events"]]
        status, shown = ended["TrainingJobStatus"], "\n".join([ended["Reason"], *told])
    assert (status, [part for part in mistake.says if part not in shown]) == (mistake.status, []), shown
