"""Serves the dashboard over a simulated fleet, so that people can look at it.

    python -m tests.dashboard [--seed N] [--port N] [--recorded] [--pictures DIRECTORY]

Build the dashboard once with `make web`. The fleet's time passes in real time: jobs train, and one job waits, because
AWS has no capacity. With `--recorded`, the server shows incidents that were recorded from real runs, and time stands
still. Ctrl-C stops the server.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
import threading
from pathlib import Path

from tests.dashboard.pictures import take
from tests.dashboard.seeded import FINE_SECONDS, Story
from tests.dashboard.service import Replayed, Seeded, Served


async def _pass(story: Story) -> None:
    while True:
        await asyncio.sleep(FINE_SECONDS)
        await story.go(FINE_SECONDS, FINE_SECONDS)


def main() -> None:
    """Serve the dashboard until a person presses Ctrl-C."""
    arguments = argparse.ArgumentParser(
        prog="python -m tests.dashboard", description="The dashboard over the seeded world."
    )
    arguments.add_argument("--seed", type=int, default=7)
    arguments.add_argument("--port", type=int, default=0)
    arguments.add_argument("--recorded", action="store_true", help="the recorded incidents instead")
    arguments.add_argument("--still", action="store_true", help="time stands still")
    arguments.add_argument("--pictures", type=Path, metavar="DIRECTORY", help="write pictures there instead of serving")
    chosen = arguments.parse_args()
    with contextlib.ExitStack() as stack, contextlib.suppress(KeyboardInterrupt):
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="everstep-dashboard-")))
        if chosen.recorded or chosen.pictures is not None:
            replayed = stack.enter_context(
                Replayed(directory / "replayed", chosen.seed, chosen.port if chosen.recorded else 0)
            )
        if chosen.recorded:
            _invite(replayed)
            threading.Event().wait()
        sys.stderr.write("the fleet lives through its morning (about 30 s)\n")
        made = stack.enter_context(Seeded(directory / "seeded", chosen.seed, chosen.port))
        if chosen.pictures is not None:
            for path in take(made, replayed, chosen.pictures):
                sys.stdout.write(f"{path}\n")
            return
        _invite(made)
        if chosen.still:
            threading.Event().wait()
        made.run(_pass(made.story))


def _invite(served: Served) -> None:
    sys.stdout.write(f"{served.url}\nsign in with {served.admin_token}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
