"""A script that fails while a thread copies its state: in a process of its own, for it is how that ends that is looked at."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from everstep.protocol.rank_messages import Captured
from tests.integration.training.fake_agent import JOB, RUN, FakeAgent
from tests.warm_parent import ROOT

pytestmark = pytest.mark.integration

SCRIPT = """
import sys
import threading
import torch
import everstep.training
from everstep.training import copier

copies, copy_now = threading.Event(), copier.copy_now

def copy_often(these):
    if these.targets and threading.current_thread().name == "everstep-copier":  # nothing is left to copy beside training where it is audited
        copies.set()
        for _ in range(200):
            copy_now(these)
    copy_now(these)

copier.copy_now = copy_often
model = torch.nn.Linear(1000, 1000)
optimizer = torch.optim.AdamW(model.parameters())
session = everstep.training.init(model=model, optimizer=optimizer)
session.restore()
while not copies.is_set():
    model(torch.zeros(1, 1000)).sum().backward()
    optimizer.step()
    session.boundary()
sys.exit(3)
"""


def test_how_a_script_failed_is_seen_although_its_copier_was_at_work(tmp_path: Path) -> None:
    """The copier comes out of torch some hundred times after the interpreter has begun to end; what it copied is whole."""
    with FakeAgent(tmp_path, 1, commit_target=100) as agent:
        environment = {
            **os.environ,
            "RANK": "0",
            "WORLD_SIZE": "1",
            "OMP_NUM_THREADS": "1",
            "EVERSTEP_AGENT_SOCKET": str(agent.path),
            "EVERSTEP_JOB_NAME": JOB,
            "EVERSTEP_RUN_ID": RUN,
            "EVERSTEP_GENERATION": str(agent.generation),
        }
        done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
        assert (done.returncode, done.stderr) == (3, "")
        agent.wait_for(lambda: bool(agent.of_kind(Captured)))
