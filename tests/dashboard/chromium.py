"""Finds the installed Chromium. Playwright's own build is a download that some networks block."""

from __future__ import annotations

import shutil

MISSING = "Chromium is missing; on Debian: apt-get install --no-install-recommends chromium"


class ChromiumMissing(Exception):
    """The PATH contains no Chromium. The message names the command that installs it."""


def find_chromium() -> str:
    """Return the path of Chromium or Chrome.

    Raises:
        ChromiumMissing: the PATH contains neither.
    """
    found = next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )
    if found is None:
        raise ChromiumMissing(MISSING)
    return found
