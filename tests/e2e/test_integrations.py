"""The documented script of an integration survives a killed rank and a terminated instance.

Its model equals the model of an undisturbed run byte for byte.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.jobs import Job, Shape, Workplace, assert_incident
from tests.e2e.test_guides import BLOCK, run_shell

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
WITH_PATHS = frozenset({".metadata", "training_args.bin"})
"""Files that differ between equal runs: metadata of torchtitan, and the arguments of a Trainer.

The first contains a path and a random number, the second the output directory.
"""


@pytest.mark.parametrize(
    ("name", "parameters", "models"),
    [
        pytest.param(
            "trainer", {"steps": "300", "batch_size": "16"}, ["rank=0/model/model.safetensors"], id="transformers"
        ),
        pytest.param("lightning", {"steps": "300", "batch_size": "2048"}, ["rank=0/model.pt"], id="lightning"),
        pytest.param(
            "torchtitan",
            {"steps": "150"},
            ["rank=0/checkpoint/step-150/__0_0.distcp", "rank=1/checkpoint/step-150/__1_0.distcp"],
            id="torchtitan",
        ),
    ],
)
def test_a_documented_script_loses_a_rank_and_an_instance(
    place: Workplace, name: str, parameters: dict[str, str], models: list[str]
) -> None:
    """A job loses a rank and an instance, and writes the same files as an undisturbed run.

    `models` are the paths of files that the job must write. The test compares all files that the job writes. Both
    faults happen within the first 100 steps, so that the job cannot end before them.
    """
    shape, example = Shape(nodes=2), EXAMPLES / name
    place.client.create_training_job(
        TrainingJobName=name,
        Source=place.client.upload_source(Directory=example),
        EntryPoint="train.py",
        HyperParameters=parameters,
        NodeCount=shape.nodes,
        Protection=shape.protection,
        Rehearsal={"Mode": "Off"},
    )
    job = Job(place, name, shape, parameters, place.directory)
    job.wait_committed(5)
    job.kill_rank(1)
    job.wait_recovered(1)
    committed = job.committed()
    job.terminate(job.node_of(0))
    job.wait_ended()
    killed, terminated = job.incidents()
    assert_incident(killed, cause="rank_exit", source="local", committed=5)
    assert_incident(terminated, cause="instance_terminated", source="peer", committed=committed)
    undisturbed = place.directory / "undisturbed" / name
    launch = place.references.start(example / "train.py", shape.world, undisturbed, parameters)
    assert launch.wait() == [0] * shape.world, launch.logs()
    outputs = place.directory / "outputs" / name
    place.client.download_outputs(TrainingJobName=name, Directory=outputs)
    found, expected = written(outputs), written(undisturbed)
    assert set(models) <= found.keys()
    assert found.keys() == expected.keys()
    assert [path for path in found if found[path] != expected[path]] == []


def written(directory: Path) -> dict[str, bytes]:
    """Return the files of all ranks, without files that contain paths of the run (`WITH_PATHS`)."""
    paths = (path for path in directory.glob("rank=*/**/*") if path.is_file() and path.name not in WITH_PATHS)
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths}


def test_the_documented_commands_break_a_job_and_compare_its_files(place: Workplace, reader: Path) -> None:
    """The commands of docs/integrations.md run accelerate's script twice, disturb the second job, and find equal files.

    A reader needs only an empty directory, this page, and docs/integrations/accelerate.md, which contains the script.
    """
    page = (ROOT / "docs/integrations/accelerate.md").read_text()
    (script,) = re.findall(r"^```python[^\n]*\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (reader / "train.py").write_text(script)
    section = (ROOT / "docs/integrations.md").read_text().partition("## Try a page")[2].partition("\n## ")[0]
    ((_, block),) = BLOCK.findall(section)
    up, *commands, down = block.splitlines()
    assert (up.split(" --")[0], down) == ("everstep local up", "everstep local down"), "the test has its own cluster"
    shown = [run_shell(command, "docs/integrations.md") for command in commands]
    assert shown[-1] == "equal files\n"
    assert (reader / "output/hurt/rank=0/model.pt").stat().st_size > 0
    incidents = place.client.list_incidents(TrainingJobName="hurt")["Incidents"]
    assert [each["RestoreSource"] for each in incidents] == ["local", "peer"]
