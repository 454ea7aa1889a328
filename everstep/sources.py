"""A source directory as an archive: the same bytes for the same files, on any machine and at any time.

A file `.everstepignore` at its top says what else is left out, one pattern a line, as in a `.gitignore`: `*.log`
anywhere, `/data` at the top, `cache/` directories alone, `a/**/b`, `!keep.log` to take one back, `#` before a comment.
What is in a directory that is left out cannot be taken back. The directory `output` at the top is left out unless
`!/output` takes it back: a script that runs without Everstep writes its results there.

Invariant: an archive holds regular files and directories only; whatever else is in the directory is refused by name,
never followed or dropped.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from everstep.errors import SourceRefused

LEFT_OUT = frozenset(
    {
        ".git",
        ".hg",
        ".svn",
        "__pycache__",
        ".venv",
        ".everstep",
        ".mypy_cache",
        ".ruff_cache",
        ".pytest_cache",
        ".ipynb_checkpoints",
    }
)
"""Directories (and files) of these names are no part of a program."""
IGNORE_FILE = ".everstepignore"
OUTPUT = re.compile("output")
"""The default of EVERSTEP_OUTPUT_DIR, relative to the source directory.

Results of an earlier run are no part of the program.
"""


def pack(directory: Path, into: BinaryIO) -> str:
    """Write a directory as a gzipped tar.

    Args:
        directory: what to pack; its content comes to the archive's top.
        into: a binary file, written from its current position.

    Returns:
        The archive's SHA-256, hexadecimal: the source's id.

    Raises:
        SourceRefused: it is not a directory, holds a link or a special file, or no file at all.
    """
    if not directory.is_dir():
        raise SourceRefused(f"{directory} is not a directory.")
    target = _Digesting(into)
    file_count = 0
    # No name and no time in the gzip header, and none of the machine's users in the tar.
    with (
        gzip.GzipFile(filename="", mode="wb", fileobj=target, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for path in _members(directory, directory, _ignored(directory)):
            name = path.relative_to(directory).as_posix()
            entry = tarfile.TarInfo(name)
            if path.is_dir():
                entry.type, entry.mode = tarfile.DIRTYPE, 0o755
                archive.addfile(entry)
                continue
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                entry.size, entry.mode = status.st_size, 0o755 if status.st_mode & stat.S_IXUSR else 0o644
                archive.addfile(entry, file)
            file_count += 1
    if not file_count:
        raise SourceRefused(f"{directory} holds no file to run.")
    return target.digest.hexdigest()


Rule = tuple[re.Pattern[str], bool, bool]
"""What a pattern matches of a path, whether it is for directories alone, and whether it takes back."""


def _ignored(directory: Path) -> list[Rule]:
    found: list[Rule] = [(OUTPUT, True, False)]
    file = directory / IGNORE_FILE
    if not file.is_file() or file.is_symlink():
        return found
    try:
        rows = file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise SourceRefused(f"{file} is not UTF-8.") from error
    for row in rows:
        pattern = row.rstrip()
        if not pattern or pattern.startswith("#"):
            continue
        is_back = pattern.startswith("!")
        pattern = pattern.removeprefix("!")
        is_for_directories = pattern.endswith("/")
        pattern = pattern.removesuffix("/")
        is_at_top = "/" in pattern
        regex = "" if is_at_top else "(?:.*/)?"
        for part in re.split(r"(\*\*/|/\*\*$|\*|\?|\[[^\]/]+\])", pattern.removeprefix("/")):
            known = {"**/": "(?:.*/)?", "/**": "/.*", "*": "[^/]*", "?": "[^/]"}
            if part in known:
                regex += known[part]
            elif part.startswith("[") and part.endswith("]"):
                regex += f"[{'^' if part[1] in '!^' else ''}{re.escape(part[2:-1] if part[1] in '!^' else part[1:-1]).replace(chr(92) + '-', '-')}]"
            else:
                regex += re.escape(part)
        try:
            found.append((re.compile(regex), is_for_directories, is_back))
        except re.error as error:
            raise SourceRefused(f"{file}: {row!r} is not a pattern: {error}.") from error
    return found


def _is_ignored(name: str, is_directory: bool, rules: list[Rule]) -> bool:
    """Say whether the last pattern that matches leaves a path out."""
    for pattern, is_for_directories, is_back in reversed(rules):
        if (is_directory or not is_for_directories) and pattern.fullmatch(name):
            return not is_back
    return False


def _members(directory: Path, top: Path, rules: list[Rule]) -> Iterator[Path]:
    for path in sorted(directory.iterdir(), key=lambda entry: entry.name):
        if path.name in LEFT_OUT or path.suffix == ".pyc":
            continue
        if _is_ignored(path.relative_to(top).as_posix(), path.is_dir() and not path.is_symlink(), rules):
            continue
        if path.is_symlink():
            raise SourceRefused(
                f"{path} is a link (to {path.readlink()}).",
                hint=f"Copy what it points to into the source directory, or name it in {IGNORE_FILE}.",
            )
        if path.is_dir():
            yield path
            yield from _members(path, top, rules)
        elif path.is_file():
            yield path
        else:
            raise SourceRefused(f"{path} is neither a file nor a directory.")


class _Digesting:
    """A file that knows the digest of what was written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()
