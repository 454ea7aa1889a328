"""Installs packages of a job's own source, such as `-e .`, on nodes that do not build packages.

A package with static metadata needs no build: pip installs the dependencies that its `pyproject.toml` lists, and the
agent copies its modules. No code of the package runs.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from worker.errors import RequirementsRefused
from worker.node.file_trees import remove_tree

MOST_FOLDERS = 16
MOST_LINES = 10_000
"""Largest number of requirements, with those that the packages of the source add."""
PARSE_SECONDS = 10.0
# A few kB of TOML can take gigabytes, and the agent cannot stop a thread.
_PARSER = """
import json, resource, sys, tomllib
resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))
resource.setrlimit(resource.RLIMIT_CPU, (5, 5))
content = sys.stdin.buffer.read((1 << 20) + 1)
assert len(content) <= 1 << 20
project = tomllib.loads(content.decode()).get("project")
optional = project.get("optional-dependencies", {})
lists = [project.get("dependencies", []), project.get("dynamic", []), *optional.values()]
assert all(isinstance(each, list) and all(isinstance(item, str) for item in each) for each in lists)
print(json.dumps({"dependencies": lists[0], "dynamic": lists[1], "optional-dependencies": optional}))
"""
"""Python program that prints the needed part of a `pyproject.toml`, in a process with limits."""
_EDITABLE = re.compile(r"[ \t]*(?:-e|--editable)(?:[ \t]+|=)(?P<rest>.*)")
_FILE = re.compile(
    r"[ \t]*(?P<option>-r|-c|-f|--requirement|--constraint|--find-links)(?:[ \t]+|=)(?P<path>[^\s#]+)[ \t]*(?:#.*)?"
)
_FOLDER = re.compile(r"[ \t]*(?P<path>\.{1,2}(?:/[^\s\[;#]*)?)(?:\[(?P<extras>[^\]]*)\])?[ \t]*(?:#.*)?")


class Expanded(NamedTuple):
    """A requirements file without editable installs."""

    text: str
    folders: tuple[Path, ...]
    """Packages of the source whose modules the caller copies, as absolute paths."""


def expand(source: Path, requirements: Path, text: str, *, is_built: bool) -> Expanded:
    """Replace packages of the source in a requirements file by their dependencies, and make its paths absolute.

    Paths in `text` are relative to the folder of `requirements`. Folders outside of `source` are left to pip, and so
    are all if pip may build packages (`is_built`).

    Raises RequirementsRefused if an editable install names a folder that only a build can install, or for more than
    `MOST_FOLDERS` folders or `MOST_LINES` requirements.
    """
    lines: list[str] = []
    projects: dict[Path, dict[str, Any] | None] = {}
    named_before: set[tuple[Path, str | None]] = set()
    for line in text.splitlines():
        editable = _EDITABLE.fullmatch(line)
        wanted = line if editable is None else editable["rest"].strip()
        if editable is not None and not wanted.startswith(".") and ":" not in wanted:
            # pip takes the target of -e for a folder, and without -e for a package of the index.
            wanted = f"./{wanted}"
        if (named := _FILE.fullmatch(line)) is not None and (requirements.parent / named["path"]).exists():
            lines.append(f"{named['option']} {requirements.parent / named['path']}")
        elif (found := _FOLDER.fullmatch(wanted)) is None:
            lines.append(wanted)
        else:
            folder = (source / found["path"]).resolve()
            if folder not in projects:
                if len(projects) == MOST_FOLDERS:
                    raise RequirementsRefused(f"{requirements.name} names more than {MOST_FOLDERS} folders")
                projects[folder] = None if is_built or not folder.is_relative_to(source.resolve()) else _static(folder)
            project = projects[folder]
            if project is None and editable is not None and not is_built:
                raise RequirementsRefused(
                    f"{requirements.name} names {wanted}, and this node installs wheels only. It copies a package that "
                    "has no setup.py, and whose pyproject.toml has a [project] table with static dependencies. Add the "
                    "table, or allow builds on the nodes (everstep agent --allow-builds)"
                )
            if project is None:
                lines.append(f"{folder}[{found['extras']}]" if found["extras"] else str(folder))
            elif (folder, found["extras"]) not in named_before:
                named_before.add((folder, found["extras"]))
                lines += _dependencies(project, found["extras"] or "")
                if len(lines) > MOST_LINES:
                    raise RequirementsRefused(f"{requirements.name} and its packages have over {MOST_LINES} lines")
    folders = tuple(folder for folder, project in projects.items() if project is not None)
    return Expanded("\n".join(lines) + "\n", folders)


def copy_modules(folders: Sequence[Path], into: Path) -> None:
    """Copy the modules of packages of the source into a layer's folder of packages, which the agent owns."""
    for folder in folders:
        for module in _modules(folder):
            target = into / module.name
            if target.is_symlink() or target.exists():
                remove_tree(target)
            if module.is_dir():
                shutil.copytree(module, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copyfile(module, target)


def _modules(folder: Path) -> Iterator[Path]:
    """Yield the modules of a package: those in `src`, or else each folder with an `__init__.py`."""
    if (inner := folder / "src").is_dir():
        yield from (each for each in sorted(inner.iterdir()) if each.is_dir() or each.suffix == ".py")
    else:
        yield from (each.parent for each in sorted(folder.glob("*/__init__.py")))


def _static(folder: Path) -> dict[str, Any] | None:
    """Return the `[project]` table of a package that needs no build, or None."""
    try:
        with (folder / "pyproject.toml").open("rb") as file:
            done = subprocess.run(
                [sys.executable, "-I", "-S", "-c", _PARSER],
                stdin=file,
                capture_output=True,
                check=False,
                timeout=PARSE_SECONDS,
            )
    except OSError:
        return None
    except subprocess.TimeoutExpired as error:
        raise RequirementsRefused(f"pyproject.toml is not read within {PARSE_SECONDS:g} s") from error
    if done.returncode != 0 or (folder / "setup.py").exists():
        return None
    project: dict[str, Any] = json.loads(done.stdout)
    dynamic = project.get("dynamic", ())
    return None if "dependencies" in dynamic or "optional-dependencies" in dynamic else project


def _dependencies(project: dict[str, Any], extras: str) -> list[str]:
    optional = project.get("optional-dependencies", {})
    chosen = dict.fromkeys(each.strip() for each in extras.split(",") if each.strip())
    groups = [project.get("dependencies", []), *(optional.get(each, []) for each in chosen)]
    return [str(each) for group in groups for each in group]
