"""Plant corruptions and count them: `python -m tests.corruption [--count 10000] [--seed N]`.

The exit code is 1 if a corruption was loaded.
"""

from __future__ import annotations

import argparse
import random
import sys
import time

from tests.corruption.run import planted


def main() -> int:
    """Plant the corruptions, and print the counts."""
    parser = argparse.ArgumentParser(prog="python -m tests.corruption", description=__doc__)
    parser.add_argument("--count", type=int, default=10_000, help="corruptions to plant")
    parser.add_argument("--seed", type=int, help="repeats a run [default: a fresh one, printed]")
    options = parser.parse_args()
    seed = random.randrange(2**32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    began = time.monotonic()

    def progress(done: int) -> None:
        if done % 1000 == 0:
            print(f"{time.monotonic() - began:6.1f} s  {done:,} of {options.count:,}", flush=True)

    counts = planted(options.count, seed, progress)
    print(counts.table())
    for line in counts.loaded:
        print(f"LOADED {line}")
    return 1 if counts.loaded else 0


if __name__ == "__main__":
    sys.exit(main())
