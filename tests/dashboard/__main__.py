"""The dashboard over the seeded world, for people: `python -m tests.dashboard [--seed N] [--port N] [--pictures DIRECTORY]`.

It is built once, with `make web`.

Time passes in it as outside: jobs train, the shortage goes on. Ctrl-C ends it.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import threading
from pathlib import Path

from tests.dashboard.pictures import take
from tests.dashboard.seeded import FINE_SECONDS, Story
from tests.dashboard.service import seeded


async def _pass(story: Story) -> None:
    while True:
        await asyncio.sleep(FINE_SECONDS)
        await story.go(FINE_SECONDS, FINE_SECONDS)


def main() -> None:
    """Serve until Ctrl-C."""
    arguments = argparse.ArgumentParser(prog="python -m tests.dashboard", description="The dashboard over the seeded world.")
    arguments.add_argument("--seed", type=int, default=7)
    arguments.add_argument("--port", type=int, default=0)
    arguments.add_argument("--still", action="store_true", help="time stands still")
    arguments.add_argument("--pictures", type=Path, metavar="DIRECTORY", help="write pictures there instead of serving")
    chosen = arguments.parse_args()
    sys.stderr.write("the fleet lives through its morning (about 30 s)\n")
    made, end = seeded(chosen.seed, chosen.port)
    try:
        if chosen.pictures is not None:
            for path in take(made, chosen.pictures):
                sys.stdout.write(f"{path}\n")
            return
        sys.stdout.write(f"{made.url}\nsign in with {made.admin_token}\n")
        sys.stdout.flush()
        if chosen.still:
            threading.Event().wait()
        made.run(_pass(made.story))
    except KeyboardInterrupt:
        pass
    finally:
        end()


if __name__ == "__main__":
    main()
