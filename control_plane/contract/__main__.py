"""Writes everything that follows from the API's routes and models.

python -m control_plane.contract             writes it anew
python -m control_plane.contract --check     says what is stale, and exits with 1 if anything is
"""

from __future__ import annotations

import sys

from control_plane.contract.tree import ROOT, stale, write


def main(arguments: list[str]) -> int:
    """Write or check.

    Args:
        arguments: of the command line.

    Returns:
        The exit code.
    """
    if arguments == ["--check"]:
        found = stale(ROOT)
        for path in found:
            sys.stdout.write(f"{path} is stale: run python -m control_plane.contract\n")
        return 1 if found else 0
    write(ROOT)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
