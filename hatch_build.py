"""A build hook that prevents wheels without the dashboard. hatch runs it before it builds a wheel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class DashboardHook(BuildHookInterface):
    """Stops the build of a wheel if `make web` has not run in the checkout."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Check for the built dashboard. hatch calls it.

        An editable install needs no built files, because it contains no files of its own.
        """
        index = Path(self.root) / "control_plane" / "static" / "index.html"
        if version != "editable" and not index.is_file():
            raise RuntimeError(f"{index} is missing: run `make web` first, the wheel carries the dashboard")
