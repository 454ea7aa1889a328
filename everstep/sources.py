"""Packs a source directory into an archive. Equal files give equal bytes, on any machine and at any time.

An archive leaves out, in this order:

- version control and caches (`LEFT_OUT`), always
- what the file `.everstepignore` at the top of the directory names, with patterns as in `.gitignore`
- what the `.gitignore` files of the directory name
- `output` at the top, where a script that runs without Everstep writes its results
- `.env` files, virtual environments, and runs of Weights & Biases

A pattern with `!` in `.everstepignore` includes what a later rule leaves out. Files in an excluded directory cannot be
included again. A file above `LARGE_BYTES` is packed only if such a pattern names it, because data and checkpoints are
rarely meant.

Invariant: an archive contains only regular files and directories. Any other file type raises an error with its name.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import stat
import tarfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

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
IGNORE_FILE: Final = ".everstepignore"
GIT_IGNORE_FILE: Final = ".gitignore"
LARGE_BYTES: Final = 64 * 1024 * 1024
"""Size above which a file is packed only if `.everstepignore` names it with `!`."""
_RUN_OF_WANDB: Final = re.compile(r"(offline-)?run-\d{8}_\d{6}-\w+")
_POSIX: Final = {
    "alnum": "0-9A-Za-z",
    "alpha": "A-Za-z",
    "blank": " \t",
    "digit": "0-9",
    "lower": "a-z",
    "punct": ":-@!-/[-`{-~",
    "space": " \t\n\r\f\v",
    "upper": "A-Z",
    "xdigit": "0-9A-Fa-f",
}
"""Character classes of git's patterns that pathspec lacks, as ranges."""
_CLASS: Final = re.compile(rf"\[:({'|'.join(_POSIX)}):\]")


class LeftOut(NamedTuple):
    """A file or directory that an archive does not contain."""

    path: str
    """Path relative to the source directory. A directory's path ends with `/`."""
    reason: str
    """Text for the user."""


class Listing(NamedTuple):
    """The content of an archive that `pack` would write."""

    files: tuple[tuple[str, int], ...]
    """Each file's relative path and size in bytes."""
    left_out: tuple[LeftOut, ...]
    """Without the entries that an archive never contains (`LEFT_OUT`)."""


def listing(directory: Path) -> Listing:
    """Return what `pack` would put into an archive.

    Args:
        directory: as for `pack`. Its ignore files decide.

    Returns:
        The files, and what is left out.

    Raises:
        SourceRefused: as for `pack`.
    """
    _check(directory)
    rules = _ignored(directory)
    files = [path for path in _members(directory, directory, rules) if path.is_file()]
    return Listing(
        tuple((path.relative_to(directory).as_posix(), path.stat().st_size) for path in files), tuple(rules.left_out)
    )


def pack(directory: Path, into: BinaryIO) -> str:
    """Write a directory as a gzipped tar.

    Args:
        directory: the directory to pack. Its content becomes the archive's top level.
        into: a binary file, written from its current position.

    Returns:
        The archive's SHA-256, hexadecimal, which is the source's id.

    Raises:
        SourceRefused: the path is not a directory, or the directory contains a link, a special file, a large file that
            `.everstepignore` does not name, or no file at all.
    """
    _check(directory)
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


def _check(directory: Path) -> None:
    if not directory.is_dir():
        raise SourceRefused(f"{directory} is not a directory.")


class _Rules:
    """The rules of a source directory, and what they excluded so far."""

    def __init__(self, top: Path) -> None:
        self.left_out: list[LeftOut] = []
        self._top = top
        self._own = _patterns(top / IGNORE_FILE)
        self._of_git: dict[Path, _Patterns] = {}

    def leave_out(self, path: Path, is_directory: bool) -> bool:
        """Return whether the archive leaves a path out. Directories must be passed before their content."""
        relative = path.relative_to(self._top)
        reason = self._reason(path, relative, is_directory)
        if reason is not None:
            self.left_out.append(LeftOut(f"{relative.as_posix()}{'/' if is_directory else ''}", reason))
        return reason is not None

    def is_named(self, path: Path) -> bool:
        """Return whether a pattern with `!` of `.everstepignore` includes a file."""
        return self._own.says(path.relative_to(self._top), is_directory=False)[0] is False

    def _reason(self, path: Path, relative: Path, is_directory: bool) -> str | None:
        is_out, pattern = self._own.says(relative, is_directory=is_directory)
        if is_out is not None:
            return f"{IGNORE_FILE}: {pattern}" if is_out else None
        # As in git, the file nearest to the path decides.
        for parent in relative.parents:
            place = self._top / parent
            if place not in self._of_git:
                self._of_git[place] = _patterns(place / GIT_IGNORE_FILE)
            is_out, pattern = self._of_git[place].says(relative.relative_to(parent), is_directory=is_directory)
            if is_out is not None:
                return f"{(parent / GIT_IGNORE_FILE).as_posix()}: {pattern}" if is_out else None
        if not is_directory:
            return "may contain secrets" if path.name == ".env" else None
        if relative == Path("output"):
            return "results of an earlier run"
        if (path / "pyvenv.cfg").is_file():
            return "virtual environment"
        if path.name == "wandb" and any(_RUN_OF_WANDB.fullmatch(entry.name) for entry in path.iterdir()):
            return "runs of Weights & Biases"
        return None


class _Patterns:
    """The patterns of one ignore file.

    git compares bytes: `?` is one byte of a character's UTF-8. The patterns and paths are therefore texts with one
    character per byte.
    """

    def __init__(self, rows: list[str]) -> None:
        from pathspec import GitIgnoreSpec  # Import here, because every command imports this module.

        self._rows = rows
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # a `[` within brackets, which git allows
            self._spec = GitIgnoreSpec.from_lines(
                _CLASS.sub(lambda found: _POSIX[found[1]], row).encode().decode("latin-1") for row in rows
            )

    def says(self, relative: Path, *, is_directory: bool) -> tuple[bool | None, str]:
        """Return whether the last matching pattern excludes a path, and this pattern. None: no pattern matches."""
        name = os.fsencode(relative.as_posix()).decode("latin-1")
        found = self._spec.check_file(f"{name}/" if is_directory else name)
        return found.include, "" if found.index is None else self._rows[found.index].strip()


def _patterns(file: Path) -> _Patterns:
    if not file.is_file() or file.is_symlink():
        return _Patterns([])
    try:
        rows = file.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise SourceRefused(f"{file} is not UTF-8.") from error
    for row in rows:
        try:
            _Patterns([row])
        except (ValueError, re.error) as error:
            raise SourceRefused(f"{file}: {row!r} is not a valid pattern: {error}.") from error
    return _Patterns(rows)


def _ignored(directory: Path) -> _Rules:
    return _Rules(directory)


def _members(directory: Path, top: Path, rules: _Rules) -> Iterator[Path]:
    for path in sorted(directory.iterdir(), key=lambda entry: entry.name):
        if path.name in LEFT_OUT or path.suffix == ".pyc":
            continue
        is_link = path.is_symlink()
        if rules.leave_out(path, path.is_dir() and not is_link):
            continue
        if is_link:
            raise SourceRefused(
                f"{path} is a link (to {path.readlink()}).",
                hint=f"Copy what it points to into the source directory, or name it in {IGNORE_FILE}.",
            )
        if path.is_dir():
            yield path
            yield from _members(path, top, rules)
        elif not path.is_file():
            raise SourceRefused(f"{path} is neither a file nor a directory.")
        elif (size := path.stat().st_size) > LARGE_BYTES and not rules.is_named(path):
            name = path.relative_to(top).as_posix()
            raise SourceRefused(
                f"{path} has {size // 2**20} MiB.",
                hint=f"Write /{name} into {IGNORE_FILE} to leave it out, or !/{name} to upload it. Better, make a data "
                "set an input of the job: --input name=s3://bucket/prefix.",
            )
        else:
            yield path


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
