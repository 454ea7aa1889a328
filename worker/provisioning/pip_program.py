"""Runs pip without builds, and without secrets in its output: `python -I pip_program.py [--allow-builds] ARGUMENT …`.

`--only-binary :all:` would not prevent every build: a requirements file may revoke it, and pip builds paths,
repositories and URLs anyway. All builds call one method of pip, which this program replaces.

Invariant: if pip lacks that method, nothing is installed. This file imports nothing from `worker`, because pip's user
runs it under `-I`.
"""

from __future__ import annotations

import importlib
import io
import re
import sys
from typing import NoReturn

CANNOT_CONFINE = 78
"""Exit code if this program cannot prevent builds with the installed version of pip (EX_CONFIG)."""
ALLOW_BUILDS = "--allow-builds"
_SECRET = re.compile(r"(?:(?<=://)[^\s/]+|[^\s/:@'\"]+:[^\s/:@]+)(?=@)|(?<=[?&])([\w.-]+=)[^\s&#'\"]+")
"""User and password before a host, and values of a URL's query, which may be a signature."""


def masked(text: str) -> str:
    """Return text with `****` in the place of passwords, tokens and signatures of URLs."""
    return _SECRET.sub(lambda found: f"{found[1] or ''}****", text)


class MaskedStream(io.TextIOWrapper):
    """Text stream that masks secrets. pip writes each line whole, so no secret is divided between two calls."""

    def write(self, text: str, /) -> int:
        """Write text without secrets, and return the length of `text`."""
        super().write(masked(text))
        return len(text)


def main(arguments: list[str]) -> NoReturn:
    """Run pip in this process, with masked output. Always raises SystemExit with pip's exit code.

    `arguments` are `ALLOW_BUILDS` if pip may build packages, then pip's arguments.
    """
    for name in ("stdout", "stderr"):
        setattr(sys, name, MaskedStream(getattr(sys, name).detach(), "utf-8", "backslashreplace", line_buffering=True))
    allows_builds = arguments[0] == ALLOW_BUILDS
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
        requirement = getattr(distribution, "req", "a package")
        raise refused(
            f"this node installs wheels only, and there is none of {getattr(requirement, 'req', None) or requirement}. "
            "Require another version, upload a wheel with the source, or allow builds on the nodes (everstep agent "
            "--allow-builds)"
        )

    if not allows_builds:
        sources.prepare_distribution_metadata = refuse
    sys.exit(pip(arguments[allows_builds:]))


if __name__ == "__main__":
    main(sys.argv[1:])
