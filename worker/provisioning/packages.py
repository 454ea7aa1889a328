"""Installs a job's requirements.txt in a layer: a folder of packages in addition to the node's own packages.

    <state>/packages/<key>/                  a virtual environment with the packages that the node lacks
    <state>/packages/<key>/installed.json    the modules in the layer; written last
    <state>/packages/<key>.<nonce>.new/      an unfinished layer; the next installation removes leftovers
    <state>/packages/<key>.<nonce>.work.new/ pip's home, temporary folder, working directory and settings
    <state>/packages/lock                    held during an installation; the kernel releases it at the process's end

pip installs a package into the layer only if the node lacks the required version. Ranks have the layer in their
PYTHONPATH before the node's packages. The key is a digest of everything that determines a layer, including the project.

pip runs isolated (`-I`), as the job's user if each job has one, in an environment that the agent creates. It installs
wheels only, unless the agent allows builds. It reads no file of the job except the requirements file and the files
that it names. Afterwards, the agent kills every process that pip leaves behind, and takes ownership of the files.

Invariant: code that an installation executes, such as a package's build script, never sees the node's AWS credentials.
The code runs as root only if ranks also run as root. No process of an installation outlives the installation.
"""

from __future__ import annotations

import asyncio
import configparser
import contextlib
import fcntl
import hashlib
import logging
import os
import re
import secrets
import shutil
import site
import sys
import sysconfig
import venv
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from importlib import metadata
from pathlib import Path

import msgspec

from worker.errors import RequirementsRefused
from worker.node.file_trees import folders_of, remove_tree
from worker.node.full_disks import full_disk_of
from worker.node.rank_user import RankUser, create_traversable_dir, end_processes, give, take
from worker.provisioning import pip_program
from worker.provisioning.own_packages import copy_modules, expand
from worker.ranks import contained_program as beside
from worker.ranks.environment import Packages
from worker.ranks.files import last_lines
from worker.ranks.shim import processes
from worker.tasks import finish

log = logging.getLogger(__name__)

INSTALL_SECONDS = 1800.0
MAX_REQUIREMENTS_BYTES = 256 * 1024
MAX_LAYERS = 4
"""Maximum number of layers on a node. The least recently used are deleted first."""
LAYERS_PART = 0.25
"""Fraction of the file system that all layers may use, if no limit in bytes is set."""
LAST_LINES_BYTES = 1200
END_SECONDS = 15.0
_LOCK_POLL_SECONDS = 0.2
"""Pause between two attempts to take the installation lock, which another agent process of this node may hold."""
_PASSED_ON = frozenset(
    {"PATH", "LD_LIBRARY_PATH", "LANG", "TZ", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"}
)
"""Variables of the agent's environment that pip receives, besides `LC_…` and proxy variables."""
_PROXIES = frozenset({"HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY"})
_SETTING = "PIP_"
_VARIABLE = re.compile(r"\$\{[A-Z0-9_]+\}")
_LOCAL = re.compile(r"^[ \t]*(-r|-c|-e|--requirement|--constraint|--editable|\.)|/|\.whl", re.MULTILINE)
"""Matches requirements that may name other files of the source archive. A false match only prevents sharing."""
_ERROR = "ERROR: "
_REQUIREMENTS = "requirements.txt"


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallationOrder:
    """A job's request to install the packages of its requirements file."""

    project: str
    """Only jobs of the same project share installed packages."""
    source: Path
    source_sha256: str
    requirements: str
    """Path of the requirements file relative to the source tree."""
    environment: Mapping[str, str] = field(repr=False)
    """The agent's environment, without variables of the job."""
    output: Path
    """File to which pip's output is appended."""
    user: RankUser | None = None
    """The job's user, which pip runs as; None means the agent's own user."""


class _Installed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    modules: tuple[str, ...]


_installed = msgspec.json.Decoder(_Installed)


@dataclass(eq=False, repr=False)
class PackageLayers:
    """Installs and stores layers on one node. `limit_bytes` is None for `LAYERS_PART` of the disk."""

    state: Path
    _: KW_ONLY
    seconds: float = INSTALL_SECONDS
    limit_bytes: int | None = None
    user: RankUser | None = None
    allows_builds: bool = False

    def __post_init__(self) -> None:
        self._folder = self.state.absolute() / "packages"

    async def install(self, order: InstallationOrder) -> Packages:
        """Install the packages of a requirements file, and return their layer. Idempotent.

        Raises RequirementsRefused, with pip's last lines, if the installation failed, and OSError if the disk is full.
        """
        try:
            create_traversable_dir(self._folder, self.user)
            async with asyncio.timeout(self.seconds):
                layer = self._folder / await asyncio.to_thread(_key, order, self.allows_builds)
                if (packages := _found(layer)) is not None:
                    return packages
                async with self._alone():
                    if (packages := _found(layer)) is None:
                        packages = await self._make(layer, order)
                    return packages
        except TimeoutError:
            raise RequirementsRefused(
                f"{order.requirements} is not installed after {self.seconds:g} s{_words(order.output)}"
            ) from None
        except OSError as error:
            if full_disk_of(error) is not None:
                raise
            raise RequirementsRefused(f"{order.requirements} cannot be installed: {error}") from error

    @contextlib.asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        with (self._folder / "lock").open("a") as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    await asyncio.sleep(_LOCK_POLL_SECONDS)
            yield

    async def _make(self, layer: Path, order: InstallationOrder) -> Packages:
        await asyncio.to_thread(self._make_room)
        scratch = layer.with_name(f"{layer.name}.{secrets.token_hex(4)}.new")
        log.info("installing %s", order.requirements)
        work = scratch.with_name(f"{scratch.stem}.work.new")
        try:
            await asyncio.to_thread(_make_environment, scratch, order.user)
            order, folders = await asyncio.to_thread(_make_workplace, work, order, is_built=self.allows_builds)
            try:
                await self._pip(scratch, work, order)
            finally:
                await finish(asyncio.to_thread(_end_users, order.user))
            await asyncio.to_thread(self._bound, [scratch, *folders], order)
            await asyncio.to_thread(_seal, scratch, layer, order.user, folders)
        except BaseException:
            remove_tree(scratch, ignore_errors=True)
            raise
        finally:
            remove_tree(work, ignore_errors=True)
        packages = _found(layer)
        assert packages is not None, "it was sealed"
        return packages

    async def _pip(self, folder: Path, work: Path, order: InstallationOrder) -> None:
        """Run pip to its end, or kill it on cancellation. On return, all processes that pip started have ended."""
        order.output.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        user = beside.CONFINED if order.user is None else beside.written(order.user)
        pip = [pip_program.__file__, *([pip_program.ALLOW_BUILDS] if self.allows_builds else [])]
        words = [
            "install",
            "--no-input",
            "--no-color",
            "--no-cache-dir",
            "--progress-bar=off",
            "--disable-pip-version-check",
        ]
        # If a package has no wheel, pip_program names it and refuses the build. With `--only-binary`, pip would not.
        words += [] if self.allows_builds else ["--prefer-binary"]
        with order.output.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-m", "worker.ranks.contained_program", beside.NONE, user),
                *(str(folder / "bin" / "python"), "-I", *pip, *words, "-r", str(work / _REQUIREMENTS)),
                cwd=order.source if _names_files(order) else work / "empty",
                env=_environment_in(work, order.environment),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                umask=0o022,
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

    def _make_room(self) -> None:
        for leftover in self._folder.glob("*.new"):
            remove_tree(leftover, ignore_errors=True)
        layers = self._layers()
        for layer in layers[: max(0, len(layers) - MAX_LAYERS + 1)]:
            remove_tree(layer, ignore_errors=True)

    def _bound(self, content: Sequence[Path], order: InstallationOrder) -> None:
        """Delete the least recently used layers until a layer with this content fits the limit."""
        limit_bytes = self.limit_bytes
        if limit_bytes is None:
            disk = os.statvfs(self._folder)
            limit_bytes = int(LAYERS_PART * disk.f_blocks * disk.f_frsize)
        needed = sum(map(_bytes_of, content))
        if needed > limit_bytes:
            raise RequirementsRefused(
                f"{order.requirements} needs {needed:,} bytes, but packages may use only {limit_bytes:,} bytes of "
                "this node's disk"
            )
        kept = {layer: _bytes_of(layer) for layer in self._layers()}
        for layer in list(kept):
            if sum(kept.values()) + needed <= limit_bytes:
                break
            remove_tree(layer, ignore_errors=True)
            del kept[layer]

    def _layers(self) -> list[Path]:
        """Return the finished layers, least recently used first."""
        found = (path for path in self._folder.iterdir() if path.is_dir() and path.suffix != ".new")
        return sorted(found, key=lambda path: path.stat().st_mtime)


def read_requirements(order: InstallationOrder) -> bytes:
    """Return the content of a job's requirements file, after a check that an installation supports its lines.

    Raises RequirementsRefused if the file does not exist, or requests something that a layer does not support.
    """
    path = (order.source / order.requirements).resolve()
    if not path.is_relative_to(order.source.resolve()) or not path.is_file():
        raise RequirementsRefused(f"{order.requirements!r} is not a file of the source tree")
    with path.open("rb") as file:
        data = file.read(MAX_REQUIREMENTS_BYTES + 1)
    if len(data) > MAX_REQUIREMENTS_BYTES:
        raise RequirementsRefused(f"{order.requirements} has more than {MAX_REQUIREMENTS_BYTES:,} bytes")
    text = data.decode(errors="replace")
    if variable := _VARIABLE.search(text):
        raise RequirementsRefused(
            f"{order.requirements} names {variable[0]}, but pip receives no variables of the job: write the value"
        )
    if not any(metadata.distributions(name="pip")):
        raise RequirementsRefused(f"{order.requirements} cannot be installed: {sys.executable} has no pip")
    return data


def _key(order: InstallationOrder, allows_builds: bool = False) -> str:
    data = read_requirements(order)
    libc = os.confstr("CS_GNU_LIBC_VERSION") or "" if "CS_GNU_LIBC_VERSION" in os.confstr_names else ""
    facts = {
        "project": order.project,
        "requirements": data.hex(),
        "source": order.source_sha256 if _names_files(order) else "",
        "python": [sys.version, sys.prefix, sysconfig.get_platform(), libc],
        "node": sorted(f"{each.name}=={each.version}" for each in metadata.distributions()),
        "environment": pip_environment(order.environment),
        "settings": pip_settings(order.environment),
        "builds": allows_builds,
    }
    return hashlib.sha256(msgspec.json.encode(facts, order="deterministic")).hexdigest()[:32]


def _make_environment(folder: Path, user: RankUser | None) -> None:
    venv.EnvBuilder(symlinks=True).create(folder)
    lines = [f"import site; site.addsitedir({path!r})" for path in site.getsitepackages()]
    (_packages_of(folder) / "node.pth").write_text("\n".join(lines) + "\n")
    if user is not None:
        give(folder, user)


def _make_workplace(
    work: Path, order: InstallationOrder, *, is_built: bool
) -> tuple[InstallationOrder, tuple[Path, ...]]:
    """Create pip's work folder: an empty home, a temporary folder, an empty working directory, settings, requirements.

    Return the installation, and the packages of the source that the agent copies. If pip may build packages from the
    job's source as another user, the installation names a copy of the source that this user owns.
    """
    for name in ("home", "temporary", "empty"):
        (work / name).mkdir(mode=0o700, parents=True)
    settings = configparser.RawConfigParser()
    settings["global"] = pip_settings(order.environment)
    with (work / "pip.conf").open("x") as file:
        settings.write(file)
    work.chmod(0o700)
    text = read_requirements(order).decode(errors="replace")
    if is_built and order.user is not None and _names_files(order):
        shutil.copytree(order.source, work / "source", symlinks=True)
        order = replace(order, source=work / "source")
    expanded = expand(order.source, order.source / order.requirements, text, is_built=is_built)
    (work / _REQUIREMENTS).write_text(expanded.text)
    if order.user is not None:
        give(work, order.user)
    return order, expanded.folders


def pip_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Select the agent's variables that pip needs to reach a package index, without secrets. Pure."""
    return {
        name: value
        for name, value in environment.items()
        if name in _PASSED_ON or name.startswith("LC_") or name.upper() in _PROXIES
    }


def pip_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the node's pip settings by option name: from PIP_CONFIG_FILE, overridden by PIP_… variables."""
    given = configparser.RawConfigParser()
    if path := environment.get("PIP_CONFIG_FILE"):
        given.read(path)
    of_file = {
        name: value
        for section in ("global", "install")
        if given.has_section(section)
        for name, value in given[section].items()
    }
    of_variables = {
        name.removeprefix(_SETTING).lower().replace("_", "-"): value
        for name, value in environment.items()
        if name.startswith(_SETTING) and name != "PIP_CONFIG_FILE"
    }
    # pip receives them in a file: a requirements file could insert a variable such as `${PIP_INDEX_URL}`, which may
    # contain a password, into another URL.
    return of_file | of_variables


def _environment_in(work: Path, environment: Mapping[str, str]) -> dict[str, str]:
    return pip_environment(environment) | {
        "HOME": str(work / "home"),
        "TMPDIR": str(work / "temporary"),
        "PIP_CONFIG_FILE": str(work / "pip.conf"),
    }


def _end_users(user: RankUser | None) -> None:
    """Kill the processes of the job's user that pip has left behind. No rank of this job runs on this node yet."""
    if left := end_processes(user, seconds=END_SECONDS):
        raise RequirementsRefused(f"processes of pip cannot be ended: {left}")


def _names_files(order: InstallationOrder) -> bool:
    return _LOCAL.search(read_requirements(order).decode(errors="replace")) is not None


def _packages_of(folder: Path) -> Path:
    return Path(sysconfig.get_path("purelib", "venv", vars={"base": str(folder), "platbase": str(folder)}))


def _seal(scratch: Path, layer: Path, user: RankUser | None, folders: Sequence[Path]) -> None:
    """Take ownership of a finished layer, write its index, flush the disk, and rename it."""
    if user is not None:
        take(scratch)
    packages = _packages_of(scratch)
    if not packages.resolve().is_relative_to(scratch.resolve()):
        raise RequirementsRefused("a package has replaced its installation folder by a link")
    if folders:
        copy_modules(folders, packages)
        if user is not None:
            take(packages)
    (packages / "node.pth").unlink(missing_ok=True)
    (scratch / "installed.json").unlink(missing_ok=True)  # A package may have installed this file.
    with (scratch / "installed.json").open("xb") as file:
        file.write(msgspec.json.encode(_Installed(modules=tuple(sorted(_modules(packages))))))
    os.sync()  # Flush all files of the packages before their folder receives its final name.
    remove_tree(layer, ignore_errors=True)  # Remove what a killed agent left of an older layer.
    scratch.rename(layer)


def _modules(folder: Path) -> Iterable[str]:
    for path in folder.iterdir():
        name = path.name.partition(".")[0]
        if name.isidentifier() and name != "__pycache__" and (path.is_dir() or path.suffix in (".py", ".so")):
            yield name


def _found(layer: Path) -> Packages | None:
    """Return a finished layer and mark it as used; None if it does not exist."""
    try:
        installed = _installed.decode((layer / "installed.json").read_bytes())
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    os.utime(layer)
    return Packages(path=str(_packages_of(layer)), modules=installed.modules) if installed.modules else Packages()


def _bytes_of(folder: Path) -> int:
    """Return the disk space in bytes of a folder's content. A file with two links in the folder counts twice."""
    return sum(os.lstat(name, dir_fd=at).st_blocks * 512 for at, _, files in folders_of(folder) for name in files)


def _words(output: Path) -> str:
    """Return what pip printed: its errors, or else its last lines."""
    lines = last_lines(output, LAST_LINES_BYTES).strip().splitlines()
    errors = [line.removeprefix(_ERROR) for line in lines if line.startswith(_ERROR)]
    text = "\n".join(errors or lines)
    return f": {text}" if text else ""
