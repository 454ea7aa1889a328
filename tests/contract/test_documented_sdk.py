"""The Python blocks of docs/sdk.md run unchanged, in order, against the real application.

The waiters of the blocks return at once, because no real job runs.
"""

from __future__ import annotations

import re
from pathlib import Path

import botocore.waiter
import pytest

from control_plane.db import jobs
from control_plane.db.leases import Leaser
from everstep import config
from tests.unit.control_plane.api.conftest import GROUP, Service
from tests.unit.control_plane.api.test_results import Job

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "sdk.md").read_text(), flags=re.DOTALL | re.MULTILINE)


class Running(Job):
    """The job that the examples of docs/sdk.md assume. Its database rows are those of a running job."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.leaser = Leaser("test", 3.0, lambda: 0.0)
        with service.database.read() as session:
            self.run = jobs.get(session, "gpt").run_id


@pytest.fixture
def service(tmp_path):
    with Service(tmp_path) as running:
        running.operator.create_group(GROUP, max_size=8)
        yield running


def test_every_block_of_the_documentation_runs(service, tmp_path, monkeypatch, capsys):
    client = service.client()
    client.create_fleet(FleetName="main", AutoScalingGroupName=GROUP)
    client.close()
    monkeypatch.setenv("EVERSTEP_ENDPOINT_URL", f"http://{service.address}")
    monkeypatch.setenv("EVERSTEP_TOKEN", service.admin_token)
    assert config.load().token == service.admin_token
    waited: list[str] = []
    monkeypatch.setattr(botocore.waiter.Waiter, "wait", lambda self, **_: waited.append(self.name))
    (tmp_path / "work" / "examples").mkdir(parents=True)
    (tmp_path / "work" / "examples" / "char_gpt").symlink_to(ROOT / "examples" / "char_gpt")
    monkeypatch.chdir(tmp_path / "work")
    names: dict[str, object] = {}
    for block in BLOCKS:
        if "list_incidents" in block:
            job = Running(service)
            job.launch(1)
            job.put("output", "gen=1/rank=0/model.bin", b"weights")
            job.open_incident("inc-0")
        exec(compile(block, "docs/sdk.md", "exec"), names)
    assert waited == ["TrainingJobRunning", "TrainingJobRecovered", "TrainingJobCompletedOrStopped"]
    assert Path("results/rank=0/model.bin").read_bytes() == b"weights"
    told = capsys.readouterr().out
    for words in (
        "InProgress Pending",
        "['gpt']",
        "instance_terminated a spare takes over None",
        "no training job named 'none'",
        "should be",
    ):
        assert words in told
    names["client"].close()  # type: ignore[attr-defined]
