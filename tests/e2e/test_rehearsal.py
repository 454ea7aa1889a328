"""A job proves its own resume while it trains, or names what a restart would lose."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.e2e.jobs import SHAPES, Workplace, wait_until

SCRIPT = """
import os
import time
import torch
import everstep.training

settings = everstep.training.hyperparameters(mean=False, logs=True)
torch.manual_seed(0)
torch.distributed.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters())
data = torch.utils.data.TensorDataset(torch.randn(64, 4))
loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=torch.utils.data.DistributedSampler(data))
session = everstep.training.init(model=model, optimizer=optimizer, data=loader)
mean = torch.zeros(())
for (batch,) in session.batches(until_step=1_000_000):
    loss = model(batch).square().mean()
    if settings.mean:
        mean = 0.9 * mean + 0.1 * loss.detach()
    optimizer.zero_grad()
    (loss * (1 + mean) if settings.mean else loss).backward()
    optimizer.step()
    if settings.logs:
        session.log(loss=loss)
    time.sleep(0.02)
session.close()
"""


def submit(name: str, *options: str) -> None:
    command = ["everstep", "jobs", "submit", "--source-dir", "code", "--entry-point", "fit.py", "--node-count", "2"]
    done = subprocess.run([*command, "--name", name, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def result_of(place: Workplace, name: str) -> dict[str, Any]:
    def result() -> dict[str, Any] | None:
        job = place.client.describe_training_job(TrainingJobName=name)
        assert job["TrainingJobStatus"] == "InProgress", job
        found: dict[str, Any] | None = job.get("RehearsalResult")
        return found

    def tell() -> object:
        return place.client.get_log_events(TrainingJobName=name, Rank=0)["Events"][-5:]

    return wait_until(f"{name} to rehearse", result, tell)  # type: ignore[no-any-return]


def test_a_job_proves_its_resume_and_another_names_what_it_would_lose(place: Workplace, reader: Path) -> None:
    (reader / "code").mkdir()
    (reader / "code" / "fit.py").write_text(SCRIPT)
    submit("proven")
    proven = result_of(place, "proven")
    assert proven["Verdict"] == "Proven", json.dumps(proven, default=str)
    boundary = proven["Step"] + proven["Steps"]
    wait_until(
        "steps after the rehearsal",
        lambda: place.client.describe_training_job(TrainingJobName="proven")["CommittedStep"] > boundary + 5,
    )
    job = place.client.describe_training_job(TrainingJobName="proven")
    assert (job["IncidentCount"], job["Generation"]) == (0, 1)
    place.client.stop_training_job(TrainingJobName="proven")

    submit("differs", "--hyperparameter", "mean=true")
    differs = result_of(place, "differs")
    assert differs["Verdict"] == "Differs", json.dumps(differs, default=str)
    assert any(name.endswith(".mean") for name in differs["Difference"]["Unkept"]), differs
    place.client.stop_training_job(TrainingJobName="differs")


def test_a_step_that_a_recovery_repeats_differently_is_named_although_the_script_logs_nothing(
    place: Workplace, tmp_path: Path
) -> None:
    """Both nodes and all copies of the state are lost, so only the control plane has digests of the steps before."""
    (tmp_path / "fit.py").write_text(SCRIPT)
    of_script = {"entry_point": "fit.py", "source_dir": tmp_path, "logs": False}
    for mean in (False, True):
        job = place.submit(f"mean-{mean}".lower(), SHAPES[2], **of_script, mean=mean)
        job.wait("a commit", lambda seen: seen["CommittedStep"] > 0)
        place.client.create_checkpoint(TrainingJobName=job.name)
        job.wait("a checkpoint", lambda _, job=job: job.protection().get("LastCheckpoint"))
        stored = job.protection()["LastCheckpoint"]["Step"]
        job.wait("later steps", lambda seen, stored=stored: seen["CommittedStep"] > stored + 20)
        job.terminate(*set[str]().union(*job.groups()))
        job.wait_recovered(1)
        found = [event for event in job.events() if event["Type"] == "RepeatedStepDiffers"]
        assert len(found) == mean, found
        assert all(event["Detail"]["Step"] > stored and event["Detail"]["Rank"] in (0, 1) for event in found), found
        place.client.stop_training_job(TrainingJobName=job.name)
