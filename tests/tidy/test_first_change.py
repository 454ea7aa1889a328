"""The page `docs/contributing/first-change.md` works: its blocks apply, its commands pass, and its changes take effect.

Each part of the page runs in its own copy of the repository. A failure names the step of the page, the file, and the
lines that the file lacks.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sysconfig
import tempfile
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from infra.local_cloud.processes import identify, marked_with, wait_gone
from tests.tidy.test_references import tracked

ROOT = Path(__file__).parents[2]
PAGE = "docs/contributing/first-change.md"
BLOCK = re.compile(r"^```(diff|sh)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
COMMAND_SECONDS = 50
ENVIRONMENT = ".venv"
OF_THIS_RUN = ("EVERSTEP_", "PYTEST_", "PYTHON", "COV_")
"""Prefixes of this run's environment variables, which the commands of the page must not see."""


class Drift(AssertionError):
    """A step of the page does not fit the present code. The message names the step and the difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One block of docs/contributing/first-change.md, which changes files or runs commands."""

    title: str
    """The heading above the block."""
    kind: str
    """Language of the block: diff or sh."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hunk:
    """One changed place in one file. A diff block contains one or more hunks."""

    file: str
    place: str
    before: str
    after: str


def steps_of(part: str, page: str) -> list[Step]:
    """Return the blocks of one part of the page, in order."""
    (section,) = re.findall(rf"^## {re.escape(part)}\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE)
    return [
        Step(title=title, kind=kind, text=text)
        for title, body in re.findall(r"^### ([^\n]+)\n(.*?)(?=^### |\Z)", section, re.DOTALL | re.MULTILINE)
        for kind, text in BLOCK.findall(body)
    ]


def hunks(block: str) -> Iterator[Hunk]:
    """Yield the changed places of a diff block. A line `+++` names a file, and a line `@@` begins a place."""
    for of_file in re.split(r"^\+\+\+ ", block, flags=re.MULTILINE)[1:]:
        file, _, places = of_file.partition("\n")
        for one in re.split(r"^@@ ", places, flags=re.MULTILINE)[1:]:
            place, *lines = one.splitlines()
            before, after = (
                "".join(f"{line[1:]}\n" for line in lines if line[:1] not in skipped) for skipped in ("+", "-")
            )
            yield Hunk(file=file, place=place, before=before, after=after)


def apply(step: Step, root: Path) -> list[str]:
    """Change the files that a diff block names.

    Args:
        step: a diff block.
        root: folder of the copy.

    Returns:
        The changed files.

    Raises:
        Drift: the file does not contain the lines of the block exactly once.
    """
    changed = []
    for hunk in hunks(step.text):
        path = root / hunk.file
        text = path.read_text() if path.is_file() else ""
        count = text.count(f"\n{hunk.before}")
        if count != 1 or not hunk.before:
            raise Drift(
                f"{PAGE}, step {step.title!r}: {hunk.file} has these lines of {hunk.place!r} {count} times, "
                f"not once:\n{hunk.before}"
            )
        path.write_text(text.replace(f"\n{hunk.before}", f"\n{hunk.after}"))
        changed.append(hunk.file)
    return changed


def run(step: Step, root: Path, *, command_seconds: float = COMMAND_SECONDS) -> None:
    """Run the commands of a sh block in the copy, then end every process that they have left.

    The commands get a temporary folder of their own. Processes of the local cloud pass TMPDIR on, also daemons, so the
    folder's name identifies all of them.

    Args:
        step: a sh block.
        root: folder of the copy.
        command_seconds: time limit of each command.

    Raises:
        Drift: a command failed.
        TimeoutExpired: a command did not end within its time limit.
    """
    with tempfile.TemporaryDirectory(prefix="step-") as temporary:
        Path(temporary).chmod(0o1777)  # like /tmp: PostgreSQL runs as another user
        try:
            _run(step, root, temporary, command_seconds)
        finally:
            while left := marked_with("TMPDIR", temporary):
                for process in left:
                    process.send(signal.SIGKILL)
                wait_gone(left, timeout_seconds=5.0)


def _run(step: Step, root: Path, temporary: str, command_seconds: float) -> None:
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(OF_THIS_RUN)},
        "PATH": os.pathsep.join([str(root / ENVIRONMENT / "bin"), sysconfig.get_path("scripts"), os.environ["PATH"]]),
        "TMPDIR": temporary,
    }
    for command in step.text.splitlines():
        # A daemon would keep a pipe open, and the test would wait for its time limit.
        with Path(temporary, "output").open("w+") as output:
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=root,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=command_seconds,
                check=False,
            )
            if done.returncode:
                output.seek(0)
                raise Drift(f"{PAGE}, step {step.title!r}: {command!r} failed:\n{output.read()}")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a copy of the repository with a Python environment.

    Processes of the local cloud drop PYTHONPATH, so the environment itself must contain the path of the copy. The
    environment also contains this interpreter's packages, but not their `.pth` files, which name the original
    repository.
    """
    root = tmp_path / "checkout"
    for name in tracked():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, root / name)
    venv.create(root / ENVIRONMENT, symlinks=True)
    paths = {"base": str(root / ENVIRONMENT), "platbase": str(root / ENVIRONMENT)}
    packages = Path(sysconfig.get_path("purelib", vars=paths))
    (packages / "copy.pth").write_text(f"{root}\n{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    return root


def follow(part: str, root: Path) -> None:
    """Run all steps of one part of the page, and lint the changed Python files."""
    steps = steps_of(part, (ROOT / PAGE).read_text())
    assert {step.kind for step in steps} == {"diff", "sh"}
    changed = []
    for step in steps:
        if step.kind == "diff":
            changed += apply(step, root)
        else:
            run(step, root)
    sources = " ".join(sorted({name for name in changed if name.endswith(".py")}))
    for command in ("check", "format --check"):
        run(Step(title="the lines of all blocks", kind="sh", text=f"ruff {command} --quiet {sources}"), root)


@pytest.mark.timeout(170)
def test_the_field_of_the_page_is_in_the_contract(copy: Path) -> None:
    follow("An API field", copy)
    schemas = json.loads((copy / "docs/openapi.json").read_text())["components"]["schemas"]
    assert {"CreateTrainingJobRequest", "TrainingJob"} <= {
        name for name, schema in schemas.items() if "Description" in schema.get("properties", {})
    }
    assert "CreateTrainingJob | `Description`" in (copy / "docs/reference/field-coverage.md").read_text()


@pytest.mark.timeout(170)
def test_the_fault_of_the_page_strikes(copy: Path) -> None:
    follow("A fault kind", copy)


def test_a_line_that_has_changed_is_named_with_its_step(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("\nfirst = 1\nsecond = 2\n")
    step = Step(title="Change it", kind="diff", text="+++ module.py\n@@ the first\n first = 1\n+third = 3\n")
    assert apply(step, tmp_path) == ["module.py"]
    assert (tmp_path / "module.py").read_text() == "\nfirst = 1\nthird = 3\nsecond = 2\n"
    (tmp_path / "module.py").write_text("first = 0\n")
    with pytest.raises(Drift, match=r"step 'Change it': module.py has these lines of 'the first' 0 times"):
        apply(step, tmp_path)


@pytest.mark.parametrize(("end", "error"), [("exit 1", Drift), ("wait", subprocess.TimeoutExpired)])
def test_a_command_that_fails_or_hangs_leaves_no_process(tmp_path: Path, end: str, error: type[Exception]) -> None:
    """When a command fails or exceeds its time limit, `run` ends the daemon that the command has started.

    The daemon has only two environment variables, as daemons of the local cloud have few of them.
    """
    daemon = "env -i TMPDIR=$TMPDIR PATH=$PATH setsid sh -c 'echo $$ >pid; exec sleep 1000' &"
    text = f"{daemon} until [ -s pid ]; do :; done; {end}"
    with pytest.raises(error):
        run(Step(title="Start it", kind="sh", text=text), tmp_path, command_seconds=2.0)
    left = identify(int((tmp_path / "pid").read_text()))
    assert left is None or not left.is_alive
