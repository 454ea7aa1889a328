"""Launches a transformers `Trainer` on two nodes: with Everstep, with other ways to save each step, or without saves.

Without Everstep, the script creates no session, so the agents are idle. The order of the systems rotates.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cluster_jobs import EVERY_STEP, SCRIPTS, Bench
from benchmarks.errors import BenchmarkFailed

NODES = 2
PLAIN, EVERSTEP, OWN_SAVES, LM_RESILIENCY = "plain", "everstep", "own_saves", "lm_resiliency"
SYSTEMS = (PLAIN, EVERSTEP, OWN_SAVES, LM_RESILIENCY)
LIBRARY = "lm-resiliency==0.2.0"
INSTALL_SECONDS = 120
PARTS = ("capture", "loop state", "data position", "wait for the copy")
"""Parts of Everstep's time in the training thread per step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLaunch:
    """Rank 0's measurements of one launch."""

    system: str
    step_seconds: tuple[float, ...]
    """Counted steps, from the end of the previous one, with the save."""
    part_seconds: dict[str, tuple[float, ...]]
    """Seconds by part, of each counted step; empty without Everstep."""
    snapshots_ratio: float
    """Snapshots ÷ counted steps; 0 without Everstep."""
    state_bytes: int
    """Parameters and moments on one rank."""


def installed_library(folder: Path) -> Path:
    """Install lm-resiliency into a folder, without its dependencies. Raises BenchmarkFailed if pip failed."""
    words = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    words += ["--target", str(folder), LIBRARY]
    done = subprocess.run(words, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
    if done.returncode:
        raise BenchmarkFailed(f"{LIBRARY} cannot be installed: {done.stderr.strip()[-600:]}")
    return folder


def measure(bench: Bench, *, rounds: int, steps: int, settle_steps: int) -> Iterator[TrainerLaunch]:
    """Launch every system once per round, and yield each launch. Raises BenchmarkFailed if one failed."""
    library = installed_library(bench.directory / "lm-resiliency")
    source = bench.directory / "trainer"
    source.mkdir()
    (source / "train.py").write_text((SCRIPTS / "trainer.py").read_text())
    for number in range(rounds):
        begin = number % len(SYSTEMS)
        for system in SYSTEMS[begin:] + SYSTEMS[:begin]:
            job = bench.submit(
                f"{system.replace('_', '-')}-{number + 1}",
                source,
                "train.py",
                nodes=NODES,
                copies=NODES,
                hyperparameters={"system": system, "steps": steps, "settle_steps": settle_steps},
                max_slowdown=EVERY_STEP,
                Environment={"BENCH_LIBRARY": str(library)},
            )
            job.completed()
            found = job.outputs("times.json")[0]
            bench.say(
                f"{system}, launch {number + 1}: {1000 * sum(found['steps']) / len(found['steps']):.1f} ms per step"
            )
            yield TrainerLaunch(
                system=system,
                step_seconds=tuple(found["steps"]),
                part_seconds={name: tuple(values) for name, values in found["parts"].items()},
                snapshots_ratio=found["snapshots"] / steps,
                state_bytes=found["state_bytes"],
            )
