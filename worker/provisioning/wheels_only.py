"""Runs pip without builds: `python -I wheels_only.py ARGUMENT …` installs only wheels.

A build runs code of the package: `setup.py`, or the backend that `pyproject.toml` names. `--only-binary :all:` does not
prevent every build: a requirements file may revoke the option, and pip builds paths, repositories and dependencies with
a URL anyway. All builds call one method of pip, which this program replaces.

Invariant: if pip lacks that method, nothing is installed. This file imports nothing from `worker`, because pip's user
runs it under `-I`.
"""

from __future__ import annotations

import importlib
import sys
from typing import NoReturn

CANNOT_CONFINE = 78
"""Exit code if this program cannot prevent builds with the installed version of pip (EX_CONFIG)."""


def main(arguments: list[str]) -> NoReturn:
    """Run pip in this process, with builds of packages disabled.

    Args:
        arguments: pip's arguments, the command first.

    Raises:
        SystemExit: always, with pip's exit code.
    """
    try:
        pip = importlib.import_module("pip._internal.cli.main").main
        sources = importlib.import_module("pip._internal.distributions.sdist").SourceDistribution
        refused = importlib.import_module("pip._internal.exceptions").InstallationError
        sources.prepare_distribution_metadata  # noqa: B018    # This raises AttributeError if pip lacks the method.
    except (ImportError, AttributeError) as error:
        sys.stderr.write(
            f"everstep: this pip cannot be kept from building packages ({error}); install another version on the node\n"
        )
        sys.exit(CANNOT_CONFINE)

    def refuse(distribution: object, *_: object, **__: object) -> NoReturn:
        name = getattr(distribution, "req", "a package")
        raise refused(
            f"{name} would have to be built here, and this node installs wheels only (everstep agent --allow-builds)"
        )

    sources.prepare_distribution_metadata = refuse
    sys.exit(pip(arguments))


if __name__ == "__main__":
    main(sys.argv[1:])
