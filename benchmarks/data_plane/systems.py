"""The compared systems and their virtual environments. Everstep never depends on these packages."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from benchmarks.errors import BenchmarkFailed

TORCH = "torch==2.13.0"
INSTALL_SECONDS = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A checkpoint system that is compared with Everstep."""

    name: str
    adapter: str
    """Module and class below the package `rank.systems`."""
    package: str
    """Package whose version the page shows."""
    requirements: tuple[str, ...] = ()
    """Packages in addition to torch. Empty: the system runs in Everstep's environment."""
    metrics: tuple[str, ...] = ("blocked", "tight_blocked", "restore_local", "memory")
    """Metrics that the benchmark can measure."""

    def python(self, environments: Path) -> Path:
        """Return the interpreter of the system's virtual environment."""
        return environments / self.package / "bin" / "python" if self.requirements else Path(sys.executable)

    def version(self, environments: Path) -> str:
        """Return `package`'s installed version."""
        if not self.requirements:
            return version(self.package)
        code = f"from importlib.metadata import version; print(version({self.package!r}))"
        return subprocess.run(
            [self.python(environments), "-c", code], check=True, capture_output=True, text=True
        ).stdout.strip()


PEERS = (
    System(
        name="lm-resiliency",
        adapter="lm_resiliency:LmResiliency",
        package="lm-resiliency",
        requirements=("lm-resiliency==0.2.0",),
        metrics=("blocked", "tight_blocked", "protect", "restore_local", "restore_peer", "memory"),
    ),
    System(
        name="DLRover flash checkpoint",
        adapter="dlrover:DlroverFlash",
        package="dlrover",
        requirements=("dlrover==0.6.1", "grpcio"),
    ),
    System(
        name="torchft in place",
        adapter="torchft:TorchftInPlace",
        package="torchft",
        requirements=("torchft==0.2.0",),
        metrics=("restore_peer",),
    ),
    System(
        name="torchft HTTP",
        adapter="torchft:TorchftHttp",
        package="torchft",
        requirements=("torchft==0.2.0",),
        metrics=("restore_peer",),
    ),
    System(name="DCP async, thread", adapter="dcp_async:DcpAsync", package="torch"),
    System(name="DCP async, process", adapter="dcp_async:DcpAsyncProcess", package="torch"),
    System(name="torch.save", adapter="torch_save:TorchSave", package="torch"),
    System(name="DeepSpeed save_checkpoint", adapter="deepspeed_save:DeepSpeedSave", package="deepspeed"),
)


def install(systems: tuple[System, ...], environments: Path, say: Callable[[str], None]) -> None:
    """Create missing virtual environments. Raises BenchmarkFailed with pip's last output lines if it failed."""
    for package, requirements in {
        system.package: system.requirements for system in systems if system.requirements
    }.items():
        home = environments / package
        done = home / ".installed"
        wanted = "\n".join((TORCH, *requirements))
        if done.exists() and done.read_text() == wanted:
            continue
        say(f"installing {' '.join(requirements)} into a separate virtual environment")
        python = str(home / "bin" / "python")
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", TORCH, "numpy", *requirements]
        for command in ([sys.executable, "-m", "venv", "--clear", str(home)], pip):
            ran = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
            if ran.returncode:
                raise BenchmarkFailed(f"{package} cannot be installed: {ran.stderr.strip()[-600:]}")
        done.write_text(wanted)
