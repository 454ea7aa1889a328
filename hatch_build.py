"""Keeps a wheel without the dashboard from being built: hatch runs this before it packs one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class DashboardHook(BuildHookInterface):
    """Refuses to build a wheel of a checkout in which `make web` has not run."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Check; called by hatch. An editable install has no files of its own, so it needs none."""
        index = Path(self.root) / "control_plane" / "static" / "index.html"
        if version != "editable" and not index.is_file():
            raise RuntimeError(f"{index} is missing: run `make web` first, the wheel carries the dashboard")
