"""A user checks scripts for determinism on a cluster, with one command for each script.

A deterministic script passes the check. For a script whose collator adds random noise, the check names the collator.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.e2e.jobs import Workplace

SCRIPT = """
import os
import torch
import everstep.training

settings = everstep.training.hyperparameters(noise=False)
torch.manual_seed(0)
torch.distributed.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters())
data = torch.utils.data.TensorDataset(torch.randn(64, 4))


def collate(samples):
    batch = torch.stack([sample for (sample,) in samples])
    return batch + os.urandom(1)[0] if settings.noise else batch + torch.rand(1)


sampler = torch.utils.data.DistributedSampler(data)
loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler, collate_fn=collate)
session = everstep.training.init(model=model, optimizer=optimizer, data=loader)
for batch in session.batches(until_step=1_000_000):
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
session.close()
"""
NOISY_LINE = next(number for number, line in enumerate(SCRIPT.splitlines(), 1) if "urandom" in line)


def test_a_check_passes_a_deterministic_script_and_names_the_source_of_another(place: Workplace, reader: Path) -> None:
    (reader / "code").mkdir()
    (reader / "code" / "fit.py").write_text(SCRIPT)
    submit = ["everstep", "jobs", "submit", "--source-dir", "code", "--entry-point", "fit.py", "--node-count", "2"]
    check = [*submit, "--check-determinism", "--check-steps", "4", "--name"]
    same = subprocess.run([*check, "same"], capture_output=True, text=True, check=False)
    assert same.returncode == 0, same.stdout + same.stderr
    assert "Steps 2 to 4 are bit-identical after two restarts, on 2 ranks." in same.stdout

    options = ["--hyperparameter", "noise=true", "--output", "json"]
    noisy = subprocess.run([*check, "noisy", *options], capture_output=True, text=True, check=False)
    assert noisy.returncode == 1, noisy.stdout + noisy.stderr
    verdict = json.loads(noisy.stdout)
    assert (verdict["is_deterministic"], verdict["source"]) == (False, "collator")
    assert f"os.urandom at fit.py:{NOISY_LINE}" in verdict["sentence"]
    assert len(verdict["ranks"]) == 2

    job = place.client.describe_training_job(TrainingJobName="noisy")
    assert (job["TrainingJobStatus"], job["IncidentCount"]) == ("Completed", 0)
    assert job["Environment"] == {"EVERSTEP_CHECK_DETERMINISM": "4"}
    assert "Determinism check: collator. " in "".join(
        event["Message"] for event in place.client.get_log_events(TrainingJobName="noisy", Rank=0)["Events"]
    )
