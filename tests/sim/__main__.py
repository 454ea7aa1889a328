"""Plays stories from the command line: `make simulate`, `make simulate SEED=7`, `make simulate FAULTS=100000`.

It prints one line per failed story, shortened to what still fails, as the JSON of a golden story. `STORY` replays such
a line.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
from collections import Counter
from functools import partial

from tests.sim.simulation import Failed, play, shrunk, story_of
from tests.sim.story import Story, decode


def rule_of(error: Failed) -> str:
    """Return the last line of an error, which states the broken rule."""
    return str(error).strip().splitlines()[-1]


def failure(story: Story) -> str:
    """Play a story. Return the broken rule, or an empty string."""
    try:
        play(story)
    except Failed as error:
        return rule_of(error)
    return ""


def breaks(story: Story, rule: str) -> bool:
    """Return whether a story breaks this rule."""
    return failure(story) == rule


def main() -> int:
    """Play the stories that the arguments name. Return 1 if one of them failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seed", type=int, help="play this story only, and show the whole error")
    parser.add_argument("--story", help="play the story of this line of JSON")
    parser.add_argument("--faults", type=int, default=500, help="number of acts to play, from fresh seeds")
    parser.add_argument("--from-seed", type=int, help="first seed. Default: random")
    arguments = parser.parse_args()
    logging.lastResort = None
    if arguments.seed is not None or arguments.story is not None:
        play(decode(arguments.story) if arguments.story is not None else story_of(arguments.seed))
        print("no rule is broken")
        return 0
    first = random.SystemRandom().randrange(1 << 31) if arguments.from_seed is None else arguments.from_seed
    print(f"from seed {first}")
    seed, played, broken, begun = first, 0, 0, time.monotonic()
    kinds: Counter[str] = Counter()
    while played < arguments.faults:
        story = story_of(seed)
        played += len(story.acts)
        kinds.update(act.kind for act in story.acts)
        if rule := failure(story):
            broken += 1
            short = shrunk(story, partial(breaks, rule=rule))
            print(f"seed {seed}: {rule}\n  {short.encode()}", flush=True)
        seed += 1
        if sys.stderr.isatty():
            print(f"\r{played} acts, {broken} failed stories", end="", file=sys.stderr)
    seconds = time.monotonic() - begun
    print(f"{seed - first} stories with {played} acts of {len(kinds)} kinds in {seconds:.0f} s: {broken} failed")
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
