"""The browser of this machine: Playwright's own is a download that not every network lets through."""

from __future__ import annotations

import shutil

MISSING = "Chromium is missing; on Debian: apt-get install --no-install-recommends chromium"


class ChromiumMissing(Exception):
    """There is no Chromium on the PATH; the message has the command that installs it."""


def find_chromium() -> str:
    """Return the path of Chromium or of Chrome.

    Raises:
        ChromiumMissing: there is neither.
    """
    found = next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )
    if found is None:
        raise ChromiumMissing(MISSING)
    return found
