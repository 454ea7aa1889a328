"""Runs the parts capture, restore and graph, each in a process of its own, with a time limit and a folder on tmpfs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.errors import BenchmarkFailed
from benchmarks.machine import ROOT

CAPTURE, RESTORE, GPT, GRAPH = "capture", "restore", "gpt", "graph"
PARTS = (CAPTURE, RESTORE, GRAPH, GPT)
MEMORY = Path("/dev/shm")
GIB = 1024**3
MIB = 1024**2
SLOTS: Mapping[str, float] = {CAPTURE: 2.0, RESTORE: 1.0, GRAPH: 2.2}
"""Bytes on tmpfs ÷ bytes of the state, by part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of the model, and numbers of steps and repetitions."""

    state_bytes: int = 8 * GIB
    rounds: int = 8
    graph_bytes: int = GIB
    replays: int = 10
    layers: int = 16
    width: int = 1024
    heads: int = 16
    context: int = 1024
    batch: int = 32
    accumulate: int = 8
    warm_up: int = 10
    order: str = "ABBA" * 4
    block_steps: int = 7
    verified_steps: int = 12
    part_seconds: float = 300.0

    @property
    def model_bytes(self) -> int:
        """Approximate, of parameters and Adam's moments."""
        blocks = self.layers * (12 * self.width**2 + 13 * self.width)
        return 12 * (blocks + (2 * 128 + self.context + 2) * self.width)


QUICK = Sizes(
    state_bytes=GIB,
    rounds=2,
    graph_bytes=256 * MIB,
    replays=2,
    layers=4,
    width=512,
    heads=8,
    warm_up=6,
    order="ABBA",
    block_steps=4,
    verified_steps=3,
)


def probe() -> dict[str, Any]:
    """Return name, driver and properties of the device. Raises BenchmarkFailed with the reason without one."""
    found = subprocess.run(
        [sys.executable, "-m", "benchmarks.device.rank.probe"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    if found.returncode:
        raise BenchmarkFailed(
            found.stderr.strip().splitlines()[-1]
            if found.stderr.strip()
            else f"the probe ended with {found.returncode}"
        )
    facts: dict[str, Any] = json.loads(found.stdout)
    return facts


def run_part(part: str, sizes: Sizes, home: Path, *, device: str, memory: Path = MEMORY) -> dict[str, Any]:
    """Run a part, and return what `rows.of_part` reads.

    `memory` is on tmpfs. `device` `cpu` tests the benchmark's own code. Raises BenchmarkFailed, with the last output
    and the log's path, if the part failed or `memory` is too small.
    """
    size, rounds = (sizes.graph_bytes, sizes.replays) if part == GRAPH else (sizes.state_bytes, sizes.rounds)
    needed, free = int(SLOTS[part] * size * 1.05) + 64 * MIB, shutil.disk_usage(memory).free
    if free < needed:
        raise BenchmarkFailed(
            f"{memory} has {free / GIB:.1f} GiB left and the part {part} needs {needed / GIB:.1f}: a larger tmpfs "
            "(as root: mount -o remount,size=…), or a smaller --gib"
        )
    home.mkdir(parents=True, exist_ok=True)
    log, result = home / f"{part}.log", home / f"{part}.json"
    result.unlink(missing_ok=True)
    with _folder(memory) as folder:
        options = {"--device": device, "--bytes": size, "--rounds": rounds, "--folder": folder, "--result": result}
        command = [
            sys.executable,
            "-m",
            "benchmarks.device.rank.part",
            part,
            *(str(word) for pair in options.items() for word in pair),
        ]
        with log.open("wb") as file:
            try:
                code = subprocess.run(
                    command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, timeout=sizes.part_seconds
                ).returncode
            except subprocess.TimeoutExpired as error:
                raise BenchmarkFailed(
                    f"the part {part} has not ended after {sizes.part_seconds:.0f} s; see {log}"
                ) from error
    if code or not result.exists():
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        raise BenchmarkFailed(
            f"the part {part} ended with {code}: {lines[-1].strip() if lines else 'no output'}; see {log}"
        )
    found: dict[str, Any] = json.loads(result.read_text())
    return found


@contextmanager
def _folder(memory: Path) -> Iterator[Path]:
    folder = memory / f"everstep-bench-device-{os.getpid()}"
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
