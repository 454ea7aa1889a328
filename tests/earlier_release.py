"""Installs an earlier commit of Everstep in an environment of its own, in which an agent or a server then runs.

The environment contains only the earlier commit's wheel. All other packages come from the environment of the tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMMIT_VARIABLE = "EVERSTEP_EARLIER_COMMIT"
"""Environment variable with another earlier commit or a tag, for example the newest release."""
COMMIT = "0705e51e33522170f6df30b939debb2e6ce0dcfc"
"""A commit whose agents, ranks and servers the later commits promise to support.

No release has a tag yet. Earlier commits hand slots to ranks as paths, and know no rehearsals.
"""
VERSION = "0.0.9"
"""Version of the earlier commit's wheel, which distinguishes its processes from those of the tests' own version."""


@dataclass(frozen=True)
class EarlierRelease:
    """An installed earlier commit."""

    commit: str
    wheel: Path
    programs: Path
    """Folder with the environment's Python and `everstep`."""
    packages: Path
    """Folder that contains only the packages of the wheel."""


def install(folder: Path) -> EarlierRelease:
    """Build the wheel of the earlier commit and install it. Skip the test if the repository lacks the commit.

    Args:
        folder: an empty folder for the sources, the wheel and the environment.

    Returns:
        The installed release.
    """
    commit = os.environ.get(COMMIT_VARIABLE, COMMIT)
    found = subprocess.run(["git", "cat-file", "-e", f"{commit}^{{commit}}"], cwd=ROOT, capture_output=True)
    if found.returncode != 0:
        pytest.skip(f"this clone lacks the commit {commit}: fetch the whole history, or set {COMMIT_VARIABLE}")
    wheel = _build(commit, folder)
    environment = folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    packages = environment / "lib" / Path(sysconfig.get_path("purelib")).parent.name / "site-packages"
    (packages / "tests.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--quiet", "--disable-pip-version-check"]
    install = ["install", "--no-index", "--no-deps", "--no-warn-script-location", str(wheel)]
    subprocess.run([*pip, *install], check=True)
    return EarlierRelease(commit, wheel, environment / "bin", packages)


def _build(commit: str, folder: Path) -> Path:
    sources = folder / "sources"
    sources.mkdir()
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x"], cwd=sources, input=archive, check=True)
    for file, before in (("pyproject.toml", '\nversion = "'), ("everstep/__init__.py", '\n__version__ = "')):
        start, rest = (sources / file).read_text().split(before, 1)
        (sources / file).write_text(f'{start}{before}{VERSION}"{rest.split(chr(34), 1)[1]}')
    # The wheel's build requires a dashboard, which no test of the earlier release opens.
    (sources / "control_plane" / "static").mkdir(exist_ok=True)
    (sources / "control_plane" / "static" / "index.html").write_text("<title>Everstep</title>")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "wheels")]
    subprocess.run(build, cwd=sources, check=True, capture_output=True)
    (wheel,) = (folder / "wheels").glob("*.whl")
    return wheel
