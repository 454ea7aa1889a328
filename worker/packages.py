"""What a job's requirements.txt asks for, on this node: installed once, in a layer over the node's own packages.

    <state>/packages/<key>/                 a virtual environment that sees the node's packages, and has what they lack
    <state>/packages/<key>/installed.json   which modules it has
    <state>/packages/<key>.<nonce>.new      one that is being made; what is left of it is removed with the next
    <state>/packages/lock                   held while one is made; the kernel drops it when its holder dies

pip runs in the layer and sees the node's packages behind it: what is there already in the right version is not installed again, what is there in
another one is installed into the layer, which ranks see first, and the node's stays as it is. Ranks run under the node's own Python; the layer is in
their PYTHONPATH. So an editable install, which needs more than a path, is refused.

A layer is named by everything that it follows from, and gets its name when it is whole and on disk. A pip that outlives its agent writes to a
folder that nobody reads.

Where ranks have a user of their own pip runs as that user, too, and in a copy of the source where it may build there; what it has installed becomes
root's before it has a name.

Invariant: nothing of a job's code, which an installation may run, sees the node's AWS credentials, or runs as root where ranks do not.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import importlib.util
import logging
import os
import re
import secrets
import shutil
import site
import sys
import sysconfig
import venv
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

import msgspec

from worker.errors import RequirementsRefused
from worker.rank_environment import Packages
from worker.rank_files import last_lines
from worker.rank_user import RankUser, give, make_way, take
from worker.shim import processes

log = logging.getLogger(__name__)

INSTALL_SECONDS = 1800.0
MAX_LAYERS = 4
"""On a node; those that were not used for longest go."""
LAYERS_PART = 0.25
"""Of the file system, which all layers together may take, unless it is said in bytes."""
LAST_LINES_BYTES = 1200
_LOOK_SECONDS = 0.2
"""Between two looks at a lock that another agent of this node holds."""
_LOCAL = re.compile(r"^\s*(-r|-c|--requirement|--constraint|\.)|/|\.whl", re.MULTILINE)
"""What may lead to other files of the source; that a URL looks alike does no harm."""
_EDITABLE = re.compile(r"^\s*(-e|--editable)\b", re.MULTILINE)
_CONFINED = (
    "import ctypes, os, sys; libc = ctypes.CDLL(None); libc.prctl(1, 9); libc.prctl(38, 1, 0, 0, 0); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)
"""PR_SET_PDEATHSIG and PR_SET_NO_NEW_PRIVS, then the program itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What is to be installed."""

    source: Path
    """The unpacked source tree."""
    source_sha256: str
    requirements: str
    """Path below it."""
    environment: Mapping[str, str]
    """What pip sees: the node's without credentials, and the job's."""
    output: Path
    """Where pip's own words go."""


class _Installed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    modules: tuple[str, ...]


_installed = msgspec.json.Decoder(_Installed)


class PackageLayers:
    """The layers of one node. One owner: the agent.

    Args:
        state: the agent's directory.
        seconds: what one installation may take.
        limit_bytes: what all layers may take of the disk; None: `LAYERS_PART` of it.
        user: that ranks run as; None: this process's.
    """

    def __init__(self, state: Path, *, seconds: float = INSTALL_SECONDS, limit_bytes: int | None = None, user: RankUser | None = None) -> None:
        self._folder = state / "packages"
        self._seconds = seconds
        self._limit_bytes = limit_bytes
        self._user = user

    async def install(self, order: Order) -> Packages:
        """Have what a requirements file asks for on this node. Doing it again installs nothing.

        Args:
            order: what, from where, with which environment.

        Returns:
            Where ranks find it.

        Raises:
            RequirementsRefused: it cannot be installed; with pip's last lines.
        """
        try:
            make_way(self._folder, self._user)
            async with asyncio.timeout(self._seconds):
                layer = self._folder / await asyncio.to_thread(_key, order)
                if (packages := _found(layer)) is not None:
                    return packages
                async with self._alone():
                    if (packages := _found(layer)) is None:
                        packages = await self._make(layer, order)
                    return packages
        except TimeoutError:
            raise RequirementsRefused(f"{order.requirements} is not installed after {self._seconds:g} s{_words(order.output)}") from None
        except OSError as error:
            raise RequirementsRefused(f"{order.requirements} cannot be installed: {error}") from error

    @contextlib.asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        with (self._folder / "lock").open("a") as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    await asyncio.sleep(_LOOK_SECONDS)
            yield

    async def _make(self, layer: Path, order: Order) -> Packages:
        await asyncio.to_thread(self._make_room)
        scratch = layer.with_name(f"{layer.name}.{secrets.token_hex(4)}.new")
        log.info("installing %s", order.requirements)
        source = scratch.with_name(f"{scratch.stem}.source.new")
        try:
            await asyncio.to_thread(_make_environment, scratch, self._user)
            if self._user is not None and _LOCAL.search(read_requirements(order).decode(errors="replace")):
                await asyncio.to_thread(_copy, order.source, source, self._user)
                order = replace(order, source=source)
            await _pip(scratch, order, self._user)
            await asyncio.to_thread(self._bound, scratch, order)
            await asyncio.to_thread(_seal, scratch, layer, self._user)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        finally:
            shutil.rmtree(source, ignore_errors=True)
        packages = _found(layer)
        assert packages is not None, "it was sealed"
        return packages

    def _make_room(self) -> None:
        for leftover in self._folder.glob("*.new"):
            shutil.rmtree(leftover, ignore_errors=True)
        layers = self._layers()
        for layer in layers[: max(0, len(layers) - MAX_LAYERS + 1)]:
            shutil.rmtree(layer, ignore_errors=True)

    def _bound(self, scratch: Path, order: Order) -> None:
        """Let go of layers that there is no room for beside the new one, those that were used first first."""
        limit_bytes = self._limit_bytes
        if limit_bytes is None:
            disk = os.statvfs(self._folder)
            limit_bytes = int(LAYERS_PART * disk.f_blocks * disk.f_frsize)
        needed = _bytes_of(scratch)
        if needed > limit_bytes:
            raise RequirementsRefused(f"{order.requirements} takes {needed:,} bytes, and packages may take {limit_bytes:,} bytes of this node's disk")
        kept = {layer: _bytes_of(layer) for layer in self._layers()}
        for layer in list(kept):
            if sum(kept.values()) + needed <= limit_bytes:
                break
            shutil.rmtree(layer, ignore_errors=True)
            del kept[layer]

    def _layers(self) -> list[Path]:
        """Return the layers that have a name, the one that was not used for longest first."""
        found = (path for path in self._folder.iterdir() if path.is_dir() and path.suffix != ".new")
        return sorted(found, key=lambda path: path.stat().st_mtime)


def read_requirements(order: Order) -> bytes:
    """Return a requirements file.

    Args:
        order: that names it.

    Returns:
        Its content.

    Raises:
        RequirementsRefused: there is none, or it asks for what a layer cannot have.
    """
    path = (order.source / order.requirements).resolve()
    if not path.is_relative_to(order.source.resolve()) or not path.is_file():
        raise RequirementsRefused(f"{order.requirements!r} is not a file of the source tree")
    data = path.read_bytes()
    if _EDITABLE.search(data.decode(errors="replace")):
        raise RequirementsRefused(f"{order.requirements} has an editable install; name the folder without -e")
    if importlib.util.find_spec("pip") is None:
        raise RequirementsRefused(f"{order.requirements} cannot be installed: {sys.executable} has no pip")
    return data


def _key(order: Order) -> str:
    """Return a layer's name: a digest of all that it follows from."""
    data = read_requirements(order)
    node = sorted(f"{each.name}=={each.version}" for each in metadata.distributions())
    settings = sorted(f"{name}={value}" for name, value in order.environment.items() if name.startswith("PIP_"))
    source = [order.source_sha256] if _LOCAL.search(data.decode(errors="replace")) else []
    libc = os.confstr("CS_GNU_LIBC_VERSION") or "" if "CS_GNU_LIBC_VERSION" in os.confstr_names else ""
    facts = [sys.version, sys.prefix, sysconfig.get_platform(), libc, *node, *settings, *source]
    return hashlib.sha256(b"\0".join([data, *(fact.encode() for fact in facts)])).hexdigest()[:32]


def _make_environment(folder: Path, user: RankUser | None) -> None:
    """Make a virtual environment that sees this interpreter's packages behind its own, for this user to fill."""
    venv.EnvBuilder(symlinks=True).create(folder)
    lines = [f"import site; site.addsitedir({path!r})" for path in site.getsitepackages()]
    (_packages_of(folder) / "node.pth").write_text("\n".join(lines) + "\n")
    if user is not None:
        give(folder, user)


def _copy(source: Path, folder: Path, user: RankUser) -> None:
    """Copy a source tree for this user to build in."""
    shutil.copytree(source, folder)
    give(folder, user)


def _packages_of(folder: Path) -> Path:
    return Path(sysconfig.get_path("purelib", "venv", vars={"base": str(folder), "platbase": str(folder)}))


async def _pip(folder: Path, order: Order, user: RankUser | None) -> None:
    """Run pip to its end, or end it and all that it has started."""
    order.output.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    words = ["-m", "pip", "install", "--no-input", "--no-color", "--no-cache-dir", "--progress-bar=off", "--disable-pip-version-check"]
    with order.output.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            str(folder / "bin" / "python"),
            "-P",
            "-c",
            _CONFINED,
            "-P",
            *words,
            "-r",
            order.requirements,
            cwd=order.source,
            env=dict(order.environment),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            umask=0o022,
            **(user.options if user is not None else {}),
        )
        try:
            code = await process.wait()
        finally:
            if process.returncode is None:
                processes.kill_tree(process.pid)
                await process.wait()
    if code:
        how = f"ended with code {code}" if code > 0 else f"was ended by signal {-code}"
        raise RequirementsRefused(f"{order.requirements}: pip {how}{_words(order.output)}")


def _seal(scratch: Path, layer: Path, user: RankUser | None) -> None:
    """Give a layer its name: it is whole, and on disk."""
    if user is not None:
        take(scratch)
    packages = _packages_of(scratch)
    if not packages.resolve().is_relative_to(scratch.resolve()):
        raise RequirementsRefused("what was installed has put a link in the place of its own folder")
    (packages / "node.pth").unlink(missing_ok=True)
    (scratch / "installed.json").unlink(missing_ok=True)  # a package's own, or a link
    with (scratch / "installed.json").open("xb") as file:
        file.write(msgspec.json.encode(_Installed(modules=tuple(sorted(_modules(packages))))))
    os.sync()  # a package is many files, and a machine may lose its power before they are on disk
    shutil.rmtree(layer, ignore_errors=True)  # one that was not whole
    scratch.rename(layer)


def _modules(folder: Path) -> Iterable[str]:
    """Return the names that can be imported from a folder."""
    for path in folder.iterdir():
        name = path.name.partition(".")[0]
        if name.isidentifier() and name != "__pycache__" and (path.is_dir() or path.suffix in (".py", ".so")):
            yield name


def _found(layer: Path) -> Packages | None:
    """Return a layer that is whole, and note that it was used."""
    try:
        installed = _installed.decode((layer / "installed.json").read_bytes())
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    os.utime(layer)
    return Packages(path=str(_packages_of(layer)), modules=installed.modules) if installed.modules else Packages()


def _bytes_of(folder: Path) -> int:
    """Return what a tree takes of the disk; a file with two names in it counts twice."""
    return sum(os.lstat(name, dir_fd=at).st_blocks * 512 for _, _, files, at in os.fwalk(folder) for name in files)


def _words(output: Path) -> str:
    text = last_lines(output, LAST_LINES_BYTES).strip()
    return f"; its last lines: {text}" if text else ""
