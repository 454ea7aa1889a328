"""Packs a source directory into an archive. Equal files give equal bytes, on any machine and at any time.

A file `.everstepignore` at the top of the directory excludes more files, with one pattern per line as in `.gitignore`:

- `*.log` matches anywhere, `/data` only at the top, `cache/` only directories.
- `a/**/b` matches at any depth, `!keep.log` includes a file again, `#` begins a comment.

Files in an excluded directory cannot be included again. The directory `output` at the top is excluded unless `!/output`
includes it. A script that runs without Everstep writes its results there.

Invariant: an archive contains only regular files and directories. Any other file type raises an error with its name.
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
"""Names of files and directories that an archive never contains, such as caches and version control."""
IGNORE_FILE = ".everstepignore"
OUTPUT = re.compile("output")
"""The default of EVERSTEP_OUTPUT_DIR, relative to the source directory.

It is excluded because results of an earlier run are not part of the program.
"""


def pack(directory: Path, into: BinaryIO) -> str:
    """Write a directory as a gzipped tar.

    Args:
        directory: the directory to pack. Its content becomes the archive's top level.
        into: a binary file, written from its current position.

    Returns:
        The archive's SHA-256, hexadecimal, which is the source's id.

    Raises:
        SourceRefused: the path is not a directory, or the directory contains a link, a special file or no file at all.
    """
    if not directory.is_dir():
        raise SourceRefused(f"{directory} is not a directory.")
    target = _Digesting(into)
    file_count = 0
    # Equal files must give equal archives. The gzip header therefore contains no file name and no time, and the tar
    # contains no user names.
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
        raise SourceRefused(f"{directory} contains no file to run.")
    return target.digest.hexdigest()


Rule = tuple[re.Pattern[str], bool, bool]
"""One line of `.everstepignore`: its pattern, whether it matches only directories, and whether it begins with `!`."""


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
                is_negated = part[1] in "!^"
                characters = re.escape(part[2:-1] if is_negated else part[1:-1]).replace(chr(92) + "-", "-")
                regex += f"[{'^' if is_negated else ''}{characters}]"
            else:
                regex += re.escape(part)
        try:
            found.append((re.compile(regex), is_for_directories, is_back))
        except re.error as error:
            raise SourceRefused(f"{file}: {row!r} is not a valid pattern: {error}.") from error
    return found


def _is_ignored(name: str, is_directory: bool, rules: list[Rule]) -> bool:
    """Return whether the rules of an ignore file exclude a path. The last rule that matches the path decides."""
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
    """A writable file that also computes the SHA-256 of the data written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()
