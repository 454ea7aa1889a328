"""A plain Debian root with the wheel and its constraints boots, runs a job, and runs the units of the image.

debootstrap makes the root, `infra/image/install.sh` installs the wheel, and systemd-nspawn boots the root with systemd.
`proof.sh` then runs inside. The test takes about ten minutes and needs root, a mirror of Debian and one of PyPI.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TOOLS = ("debootstrap", "systemd-nspawn")
PROOF = """
[Unit]
After=basic.target
[Service]
Type=oneshot
ExecStart=/bin/bash -c '/bin/bash /srv/proof.sh >/srv/proof.out 2>&1'
ExecStopPost=/bin/sh -c 'journalctl --no-pager >/srv/journal; systemctl poweroff --no-block'
TimeoutStartSec=infinity
"""

pytestmark = [
    pytest.mark.integration,
    pytest.mark.long,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(os.geteuid() != 0, reason="debootstrap needs root"),
    pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason=f"needs the Debian packages of {', '.join(TOOLS)}"),
]


def pip_settings() -> Iterator[str]:
    """Yield the options of systemd-nspawn with which pip in the root uses the package indexes of this machine."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    settings = dict(re.findall(r"^(?:global|:env:)\.([\w-]+)=(.*)$", listed.stdout, re.MULTILINE))
    for name, quoted in settings.items():
        value = " ".join(shlex.split(quoted))
        yield f"--setenv=PIP_{name.upper().replace('-', '_')}={value}"
        for path in {part.removeprefix("file://") for part in value.split() if part.startswith(("/", "file:///"))}:
            # The pages of a simple index may refer to files beside the index.
            yield f"--bind-ro={Path(path).parent if Path(path).name == 'simple' else path}"
    yield "--setenv=PIP_ROOT_USER_ACTION=ignore"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Create a minimal Debian with the wheel, installed as on a node and as on a server, and return its root.

    The installation also contains the local cloud, which `proof.sh` needs.
    """
    root = tmp_path / "root"
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path], cwd=ROOT, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    include = "--include=systemd,systemd-sysv,dbus,ca-certificates"
    subprocess.run(["debootstrap", "--variant=minbase", include, "bookworm", root], check=True)
    shutil.copy(wheel, root / "srv")
    subprocess.run([sys.executable, "-m", "zipfile", "-e", wheel, root / "srv" / "image"], check=True)
    install = "sh image/infra/image/install.sh"
    wheel_of_root = f"/srv/{wheel.name}"
    steps = [
        f"{install} node {wheel_of_root}",
        f"{install} server {wheel_of_root}",
        f"/opt/everstep/bin/pip install -q -c image/infra/image/constraints.txt '{wheel_of_root}[local]'",
    ]
    binds = [f"--bind-ro={path}" for path in ("/etc/resolv.conf", "/etc/apt/apt.conf.d", "/etc/ssl/certs")]
    options = ["-q", "-D", root, "--register=no", "--keep-unit", *binds, *pip_settings()]
    command = " && ".join(["cd /srv", *steps])
    subprocess.run(["systemd-nspawn", *options, "sh", "-c", command], check=True)
    return root


def test_a_plain_root_boots_and_runs_a_job_and_the_units(root: Path) -> None:
    (root / "srv" / "job").mkdir()
    shutil.copy(ROOT / "tests" / "e2e" / "scripts" / "elastic.py", root / "srv" / "job")
    shutil.copy(Path(__file__).with_name("proof.sh"), root / "srv")
    units = root / "etc" / "systemd" / "system"
    assert {path.name for path in (units / "multi-user.target.wants").glob("everstep-*")} == {
        "everstep-agent.service",
        "everstep-server.service",
        "everstep-storage.service",
    }
    assert all((root / "usr" / "bin" / program).exists() for program in ("psql", "pg_dump", "pg_restore"))
    for path in (units / "multi-user.target.wants").glob("everstep-*"):
        path.unlink()  # The proof starts the units itself, after it has written their settings.
    (units / "proof.service").write_text(PROOF)
    (units / "multi-user.target.wants" / "proof.service").symlink_to("/etc/systemd/system/proof.service")
    boot = ["systemd-nspawn", "-q", "-D", root, "--boot", "--register=no", "--keep-unit"]
    subprocess.run(boot, check=True, stdout=subprocess.DEVNULL)
    told = (root / "srv" / "proof.out").read_text()
    assert told.splitlines()[-1] == "proved", told[-4000:]
