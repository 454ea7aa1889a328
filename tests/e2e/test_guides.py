"""All blocks of docs/guides and of the README's script run, in the order of the text."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.jobs import Workplace
from tests.warm_parent import ROOT

GUIDES = [
    ROOT / "docs" / "guides" / f"{name}.md"
    for name in ("submitting", "coming-from", "following", "recovering", "memory", "checkpoints", "operating")
]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
BLOCK_SECONDS = 150


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """Yield the language and the text of each block of a page. A block in `text` quotes a message."""
    yield from (block for block in BLOCK.findall(page.read_text()) if block[0] != "text")


def run_shell(text: str, what: str) -> str:
    """Run a block in bash, and stop at the first command that fails."""
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text], capture_output=True, text=True, timeout=BLOCK_SECONDS, check=False
    )
    assert done.returncode == 0, f"{what}:\n{text}\n--- stdout\n{done.stdout}\n--- stderr\n{done.stderr}"
    return done.stdout


# the warning is expected, because DCP reads the checkpoint in one process
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_every_block_of_the_guides_runs(place: Workplace, reader: Path) -> None:
    told = []
    for page in GUIDES:
        names: dict[str, object] = {}
        for language, text in blocks(page):
            if language == "python":
                exec(compile(text, page.name, "exec"), names)
            else:
                assert language == "sh", f"{page.name}: a block in {language!r}"
                told.append(run_shell(text, page.name))
        if (client := names.get("client")) is not None:
            client.close()  # type: ignore[attr-defined]
    job = place.client.describe_training_job(TrainingJobName="first")
    assert (job["TrainingJobStatus"], job["IncidentCount"]) == ("Stopped", 2)
    assert (reader / "results" / "rank=0" / "model.pt").stat().st_size > 0
    assert any(re.search(r"\((\S*/)?fit\.py:\d+\)", said) for said in told), (
        f"what runs beside a rank sees the rank: {told}"
    )
    (incident,) = place.client.list_incidents(TrainingJobName="lean")["Incidents"]
    assert incident["RestoreSource"] == "parity"
    with pytest.raises(place.client.exceptions.ResourceNotFoundException):
        place.client.describe_training_job(TrainingJobName="second")


def test_the_readmes_own_script_survives_a_kill(place: Workplace, reader: Path) -> None:
    section = (ROOT / "README.md").read_text().partition("## Your own script")[2].partition("\n## ")[0]
    write, run = (text for _, text in BLOCK.findall(section))
    cluster, submit, strike, wait, results = (line.split(" && ") for line in run.splitlines()[1:])
    assert (cluster[0], results[1]) == ("everstep local up --nodes 2 --spares 1", "everstep local down"), (
        "the test has a cluster of its own"
    )
    assert strike[1] == "everstep local fault kill-rank 'job 0 rank 1'"
    for words in (write, *submit, strike[0]):
        run_shell(words, "README.md")
    node_ids = place.client.describe_training_job(TrainingJobName="fit")["NodeIds"]
    # The README's command acts on the cluster of `everstep local up`. The test kills the same rank in its own cluster.
    place.fault("kill-rank", node_ids[1], "--rank", 1)
    for words in (*wait, results[0]):
        run_shell(words, "README.md")
    job = place.client.describe_training_job(TrainingJobName="fit")
    assert (job["TrainingJobStatus"], job["IncidentCount"]) == ("Completed", 1)
    assert (reader / "results" / "rank=0" / "model.pt").stat().st_size > 0
