"""Runs the tests of the integrations with the newest versions of the frameworks: `make test-integrations-latest`.

    build/integrations-latest    a virtual environment with the newest frameworks. All other packages, torch included,
                                 come from the environment that runs this module.

`make test` runs the same tests with the pinned versions. All frameworks share the environment, so this module runs the
tests of all frameworks if at least one of them has a newer version. Otherwise it runs no test. The exit code is 1 if
the tests of a framework fail.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
TRAINING = "tests/integration/training"
DATA = "tests/unit/training/data"
SUITES = {
    "transformers": (
        (f"{TRAINING}/test_trainer.py", f"{TRAINING}/test_matrix.py"),
        "trainer and not lightning and not torchtitan",
    ),
    "accelerate": ((f"{TRAINING}/test_matrix.py", "tests/unit/training/test_accelerate_integration.py"), "accelerate"),
    "trl": ((f"{TRAINING}/test_trainer.py",), "trl"),
    "peft": ((f"{TRAINING}/test_trainer.py",), "adapters"),
    "lightning": ((f"{TRAINING}/test_lightning.py", f"{TRAINING}/test_matrix.py"), "lightning"),
    "torchtitan": ((f"{TRAINING}/test_torchtitan.py", f"{TRAINING}/test_matrix.py"), "torchtitan"),
    "datasets": ((f"{DATA}/test_streaming_datasets.py",), ""),
    "torchdata": ((f"{DATA}/test_stateful_datasets.py", f"{DATA}/test_held_states.py"), ""),
}
"""Test files of each framework, and the expression that selects tests in them."""


def pinned(lock: str) -> dict[str, str]:
    """Return the version of each package in a lock file, by the package's name."""
    entries = [Requirement(line.split(" \\")[0]) for line in lock.splitlines() if line[:1].isalnum()]
    return {entry.name: next(iter(entry.specifier)).version for entry in entries}


def table(tested: Mapping[str, str], newest: Mapping[str, str], results: Mapping[str, str]) -> list[str]:
    """Return a line for each framework: the tested version, the newest version, and the result of its tests."""
    rows = [("framework", "tested", "newest", "tests")]
    rows += [(name, tested.get(name, "-"), newest.get(name, "-"), result) for name, result in results.items()]
    return ["".join(cell.ljust(16) for cell in row).rstrip() for row in rows]


def make_environment(directory: Path) -> Path:
    """Create the environment, install the newest frameworks, and return its Python."""
    venv.create(directory, with_pip=True, clear=True, symlinks=True)
    python = directory / "bin/python"
    (packages,) = directory.glob("lib/python*/site-packages")
    own = sysconfig.get_paths()["purelib"]
    (packages / "everstep-tests.pth").write_text(f"import site; site.addsitedir({own!r})\n")
    constraint = directory / "constraint.txt"
    constraint.write_text(f"torch=={importlib.metadata.version('torch')}\n")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--upgrade"]
    subprocess.run([*pip, "--constraint", str(constraint), *SUITES], check=True)
    return python


def versions(python: Path) -> dict[str, str]:
    """Return the version of each framework in an environment."""
    code = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
    found: dict[str, str] = json.loads(subprocess.check_output([str(python), "-c", code, *SUITES]))
    return found


def run(python: Path, files: Sequence[str], selected: str) -> str:
    """Run the tests of one framework. Return `passed` or `failed`."""
    command = [str(python), "-m", "pytest", "-q", "-m", "not rest", "-k", selected, *files]
    return "failed" if subprocess.run(command, cwd=ROOT, check=False).returncode else "passed"


def main() -> int:
    python = make_environment(ROOT / "build/integrations-latest")
    tested, newest = pinned((ROOT / "requirements/development.txt").read_text()), versions(python)
    is_newer = any(newest[name] != tested[name] for name in SUITES)
    results = {name: run(python, *suite) if is_newer else "pinned" for name, suite in SUITES.items()}
    sys.stdout.write("\n".join([*table(tested, newest, results), ""]))
    return int("failed" in results.values())


if __name__ == "__main__":
    sys.exit(main())
