"""A hook that hatch runs when it builds a wheel.

The hook stops the build if the dashboard is not built. It adds the files in `LOCKS` to the wheel, so that
`infra/image/install.sh` installs locked packages whose hashes pip checks, and `constraints.txt` for other extras.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

LOCKS = ("build.txt", "node.txt", "server.txt")
"""Locked packages with hashes: those that build others, those of a node, and those of a server."""


def constraints(root: Path) -> str:
    """Return the versions of all locked packages as constraints for pip, one per line.

    The constraints contain no hashes. With hashes, pip would demand one for every package, and a local wheel has none.
    """
    locked = (root / "requirements" / "development.txt").read_text()
    pins = re.findall(r"^([\w.-]+==[^\\\n]+?) *\\?$", locked, re.MULTILINE)
    torch = re.findall(r"^torch==.+$", (root / "requirements" / "torch.txt").read_text(), re.MULTILINE)
    return "\n".join([*pins, *torch, ""])


class WheelHook(BuildHookInterface):
    """Stops the build of a wheel if `make web` has not built the dashboard. Adds locks to the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Check that the dashboard is built, and add the locks to the wheel. hatch calls this method.

        An editable install needs no built files, because it contains no files of its own.
        """
        index = Path(self.root) / "control_plane" / "static" / "index.html"
        if version == "editable":
            return
        if not index.is_file():
            raise RuntimeError(f"{index} is missing: run `make web` first, the wheel carries the dashboard")
        written = Path(self.root) / "build" / "constraints.txt"
        written.parent.mkdir(exist_ok=True)
        written.write_text(constraints(Path(self.root)))
        build_data["force_include"][str(written)] = "infra/image/constraints.txt"
        for name in LOCKS:
            build_data["force_include"][str(Path(self.root) / "requirements" / name)] = f"infra/image/{name}"
