"""Describes the machine of a benchmark run by facts that affect the measurements, without the machine's name."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "deepspeed", "xxhash", "moto")
CODE = ("everstep", "control_plane", "worker", "infra", "benchmarks", "examples")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine at the start of the run."""

    processor: str
    cores: int
    memory_gib: float
    kernel: str
    python: str
    versions: dict[str, str]
    load_average: tuple[float, float, float]
    """1, 5 and 15 minutes before the run."""
    revision: str = ""
    """Git commit, with `+` for uncommitted changes; empty outside a checkout."""

    @classmethod
    def observe(cls) -> Machine:
        """Return the description of this machine in its current state."""
        return cls(
            processor=_processor(),
            cores=len(os.sched_getaffinity(0)),
            memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1024**3, 1),
            kernel=f"{platform.system()} {platform.release().partition('-')[0]}",
            python=platform.python_version(),
            versions={name: _version(name) for name in PACKAGES},
            load_average=os.getloadavg(),
            revision=_revision(),
        )

    def words(self, *packages: str) -> str:
        """Return the machine and versions of packages as text for a page."""
        versions = (f"{name} {self.versions[name]}" for name in packages)
        return ", ".join(
            [
                self.processor,
                f"{self.cores} cores",
                f"{self.memory_gib} GiB",
                self.kernel,
                f"Python {self.python}",
                *versions,
                *([f"Everstep at {self.revision}"] if self.revision else []),
            ]
        )

    @property
    def load(self) -> str:
        """Return the load average as text for a page."""
        return ", ".join(f"{value:.2f}" for value in self.load_average)


def _version(name: str) -> str:
    try:
        return version(name)
    # skip packages that are not installed, because not every benchmark needs every package
    except PackageNotFoundError:
        return "not installed"


def _revision() -> str:
    found = _git("rev-parse", "--short=12", "HEAD").stdout.strip()
    return f"{found}+" if found and _git("diff", "--quiet", "HEAD", "--", *CODE).returncode else found


def _git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
