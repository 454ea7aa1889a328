"""Writes all files that are generated from the API's routes and models.

python -m control_plane.contract             writes the files
python -m control_plane.contract --check     prints files that are out of date, and exits with 1 if there are any
"""

from __future__ import annotations

import sys

from control_plane.contract.tree import ROOT, stale, write


def main(arguments: list[str]) -> int:
    """Write or check the generated files, and return the exit code."""
    if arguments == ["--check"]:
        found = stale(ROOT)
        for path in found:
            sys.stdout.write(f"{path} is stale: run python -m control_plane.contract\n")
        return 1 if found else 0
    write(ROOT)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
