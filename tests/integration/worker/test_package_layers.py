"""Attacks of one job on packages that the node has installed for other jobs.

The attacks use what a job controls: its variables, its source tree and its packages.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec
import pytest

from everstep.protocol.ids import RunId
from tests.fakes.storage import MemoryAws, MemoryObjectStore
from tests.unit.worker.rank_plans import rank_plan
from tests.wheels import make_wheel
from worker.errors import LoadFailed
from worker.provisioning.supplies import Supplies
from worker.ranks.environment import Packages
from worker.ranks.shim import processes

pytestmark = [pytest.mark.integration, pytest.mark.security]
KEY = b"k" * 32
POISON = """
import atexit, sys
from pathlib import Path

def poison():
    for path in Path(sys.prefix).rglob("everstep_example.py"):
        path.write_text("VERSION = 'poisoned'")

if any("pip" in word or "pip_program" in word for word in sys.orig_argv):
    atexit.register(poison)
"""


class Node:
    """A node that installs packages of jobs."""

    def __init__(self, state: Path, **options: bool) -> None:
        self.state = state
        objects = MemoryObjectStore()
        self.supplies = Supplies(state, objects, MemoryAws(objects), now=lambda: 0.0, **options)

    def source(self, run: str, requirements: str) -> Path:
        """Make the source tree of a run."""
        folder = self.state / "sources" / run
        make_wheel(folder / "wheels", "everstep_example", "1.0")
        (folder / "requirements.txt").write_text(requirements)
        return folder

    async def gather(self, run: str, *, environment: dict[str, str] | None = None) -> Packages:
        """Install the requirements of a run."""
        plan = rank_plan(environment=environment)
        script = msgspec.structs.replace(plan.script, requirements="requirements.txt")
        plan = msgspec.structs.replace(plan, run=RunId(run), script=script)
        return (
            await self.supplies.gather(plan, KEY, plan.nodes[0], self.state / "sources" / run / "train.py")
        ).packages


OFFLINE = "--no-index\n--find-links ./wheels\n"
ATTACKER, VICTIM = "a" * 32, "b" * 32


async def test_the_variables_of_a_job_poison_no_layer(tmp_path: Path) -> None:
    node = Node(tmp_path)
    source = node.source(ATTACKER, f"{OFFLINE}everstep_example\n")
    (source / "sitecustomize.py").write_text(POISON)
    node.source(VICTIM, f"{OFFLINE}everstep_example\n")
    theirs = await node.gather(ATTACKER, environment={"PYTHONPATH": str(source)})
    ours = await node.gather(VICTIM)
    for layer in (theirs, ours):
        assert "poisoned" not in Path(layer.path, "everstep_example.py").read_text()
    assert ours.path != theirs.path


async def test_pip_options_in_a_jobs_variables_are_refused_not_ignored(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.source(ATTACKER, "everstep_example\n")
    with pytest.raises(LoadFailed, match=r"Environment.PIP_INDEX_URL: pip does not read the job's variables"):
        await node.gather(ATTACKER, environment={"PIP_INDEX_URL": "http://127.0.0.1:1"})
    node.source(ATTACKER, "--index-url http://127.0.0.1:1/${PIP_INDEX_URL}\neverstep_example\n")
    with pytest.raises(LoadFailed, match=r"requirements.txt names \$\{PIP_INDEX_URL\}"):
        await node.gather(ATTACKER)


@pytest.mark.parametrize(
    "requirement",
    ["./package", "--no-binary :all:\neverstep_built", "everstep_asks", "everstep_built==1.0"],
    ids=["path", "option", "dependency", "version"],
)
async def test_no_package_is_built_unless_the_agent_allows_it(tmp_path: Path, requirement: str) -> None:
    node = Node(tmp_path)
    source = node.source(ATTACKER, f"{OFFLINE}{requirement}\n")
    package(source / "package", tmp_path / "mark")
    archive = await archived(source / "package", source / "wheels" / "everstep_built-1.0.tar.gz")
    make_wheel(source / "wheels", "everstep_asks", "1.0", requires=f"everstep_built @ {archive.as_uri()}")
    with pytest.raises(LoadFailed, match="this node installs wheels only, and there is none of"):
        await node.gather(ATTACKER)
    assert not (tmp_path / "mark").exists(), "no code of the package has run"


async def test_nothing_that_a_build_has_started_outlives_it(tmp_path: Path) -> None:
    """The build of a package leaves a process in another session, whose parent has ended.

    This process ends together with the build.
    """
    node = Node(tmp_path, allows_builds=True)
    source = node.source(ATTACKER, "--no-index\n./package\n")
    mark = package(source / "package", tmp_path / "mark")
    assert (await node.gather(ATTACKER)).modules == ("everstep_built",)
    left = processes.find(int(mark.read_text()))
    assert left is None or left.is_zombie


def package(folder: Path, mark: Path) -> Path:
    """Write a package whose build starts a process and leaves it running. The process writes its pid to `mark`."""
    folder.mkdir()
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    (folder / "backend.py").write_text(BACKEND.replace("MARK", str(mark)))
    return mark


async def archived(folder: Path, archive: Path) -> Path:
    """Pack a source distribution, and return its path."""
    words = [
        "tar",
        "-czf",
        str(archive),
        "--transform",
        "s,^package,everstep_built-1.0,",
        "-C",
        str(folder.parent),
        folder.name,
    ]
    assert await (await asyncio.create_subprocess_exec(*words)).wait() == 0
    return archive


BACKEND = f"""
import subprocess, sys, zipfile
CODE = '''
import os, signal, sys
os.setsid()
if os.fork():
    os._exit(0)
with open(sys.argv[1] + ".new", "w") as file:
    file.write(str(os.getpid()))
os.rename(sys.argv[1] + ".new", sys.argv[1])
os.write(1, b"x")
os.close(1)
signal.pause()
'''
started = subprocess.Popen([{sys.executable!r}, "-c", CODE, "MARK"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
started.stdout.read(1)

def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    name, info = "everstep_built-1.0-py3-none-any.whl", "everstep_built-1.0.dist-info"
    with zipfile.ZipFile(wheel_directory + "/" + name, "w") as archive:
        archive.writestr("everstep_built.py", "")
        archive.writestr(info + "/METADATA", "Metadata-Version: 2.1\\nName: everstep_built\\nVersion: 1.0\\n")
        archive.writestr(info + "/WHEEL", "Wheel-Version: 1.0\\nGenerator: test\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        archive.writestr(info + "/RECORD", "")
    return name
"""
