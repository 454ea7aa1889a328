"""`install.sh --gpu` runs to its end, below a folder, against stand-ins of apt and of the EFA installer.

The stand-ins in `gpu/` follow the documentation of AWS. They replace neither a GPU nor an EFA card.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.integration.image.test_units import IMAGE, keys, script

pytestmark = pytest.mark.integration
__all__ = ["keys"]

STAND_INS = Path(__file__).with_name("gpu")
SYSTEMS = {"debian12": ("debian", "12"), "ubuntu2404": ("ubuntu", "24.04")}
"""ID and version of a system in /etc/os-release, by its name in NVIDIA's repository."""
PYTHON = '[ "$1 $2" != "-m venv" ] || { mkdir -p "$3/bin" && cp "$0" "${0%/*}/pip" "$3/bin"; }'
LDCONFIG = '[ "$1" = -p ] && sed "s,^,ROOT," ROOT/etc/ld.so.conf.d/*.conf | xargs ls'
PIP = 'cd "${0%/*}"; printf "#!/bin/sh\\necho everstep 0.1.0\\n" >everstep; chmod +x everstep; ln -sf python3.13 python'


class Machine:
    """A folder that takes the place of the root directory of a Debian or Ubuntu, with `install.sh` in it."""

    def __init__(self, root: Path, keys: dict[str, str], distribution: str = "ubuntu2404") -> None:
        self.root, self.distribution = root, distribution
        apt = ("etc/apt/sources.list.d", "etc/apt/preferences.d", "usr/share/keyrings", "var/lib/apt")
        for folder in (*apt, "etc/systemd/system", "lib/modules"):
            (root / folder).mkdir(parents=True)
        system, version = SYSTEMS[distribution]
        (root / "etc/os-release").write_text(f'ID={system}\nVERSION_ID="{version}"\nPRETTY_NAME={system}\n')
        self.write_programs()
        self.image = root / "image"
        shutil.copytree(IMAGE, self.image)
        for lock in ("build.txt", "node.txt"):
            shutil.copy(IMAGE.parents[1] / "requirements" / lock, self.image)
        versions = (IMAGE / "versions.env").read_text()
        (self.image / "versions.env").write_text(re.sub(r"(?m)^(\w+_KEY)=.*", rf"\1={keys['ours']}", versions))
        self.publish(re.findall(r"(?m)^EFA_INSTALLER=(.+)", versions)[0])

    def write_programs(self) -> None:
        """Write the stand-ins of the programs that would change this machine, or that only a GPU node has."""
        bin_ = self.root / "bin"
        bin_.mkdir(exist_ok=True)
        for name in ("apt-get", "systemctl"):
            shutil.copy(STAND_INS / name, bin_)
        script(bin_ / "curl", f'cp "{self.root}/web/${{4#https://}}" "$3"')
        script(bin_ / "uname", '[ "$1" = -m ] && echo x86_64 || echo 6.8.0-1-aws')
        script(bin_ / "id", "echo 0")
        script(bin_ / "getent", "exit 2")
        script(bin_ / "useradd", "")
        script(bin_ / "modinfo", f'[ "$1 $3 $4" = "-k -F version" ] && cat "{self.root}/lib/modules/$2/$5"')
        script(bin_ / "ldconfig", LDCONFIG.replace("ROOT", str(self.root)))
        script(bin_ / "python3.13", PYTHON)
        script(bin_ / "pip", PIP)

    def publish(self, version: str) -> None:
        """Publish NVIDIA's key, AWS's key and the signed EFA installer at their documented addresses."""
        web = self.root / "web"
        nvidia = web / f"developer.download.nvidia.com/compute/cuda/repos/{self.distribution}/x86_64"
        aws = web / "efa-installer.amazonaws.com"
        nvidia.mkdir(parents=True)
        aws.mkdir()
        shutil.copy(self.root / "ours", nvidia / "3bf863cc.pub")
        shutil.copy(self.root / "ours", aws / "aws-efa-installer.key")
        installer = aws / f"aws-efa-installer-{version}.tar.gz"
        with tarfile.open(installer, "w:gz") as archive:
            archive.add(STAND_INS / "efa_installer.sh", "aws-efa-installer/efa_installer.sh")
        options = ["gpg", "--batch", "--quiet", "--homedir", str(self.root), "--passphrase", "", "-u", "ours"]
        subprocess.run([*options, "-o", f"{installer}.sig", "-b", str(installer)], check=True)
        subprocess.run(["gpgconf", "--homedir", str(self.root), "--kill", "all"], check=True)

    def install(self, options: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run `install.sh node WHEEL --gpu` with all paths below the root.

        `options` replaces the options of the EFA installer.
        """
        text = (IMAGE / "install.sh").read_text()
        if options is not None:
            text, count = re.subn(r"(?<=\./efa_installer\.sh )[^)]*", options, text)
            assert count == 1
        text = re.sub(r"(?<![\w.}/])(?=/(?:(?:etc|opt|run|usr)/|lib/modules))", str(self.root), text)
        (self.image / "install.sh").write_text(text)
        (self.root / "everstep.whl").write_bytes(b"a wheel")
        return subprocess.run(
            ["sh", str(self.image / "install.sh"), "node", str(self.root / "everstep.whl"), "--gpu"],
            env={
                "PATH": f"{self.root / 'bin'}:{os.environ['PATH']}",
                "GNUPGHOME": str(self.root),
                "ROOT": str(self.root),
                "DISTRIBUTION": self.distribution,
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )


@pytest.mark.parametrize("distribution", SYSTEMS)
def test_the_installation_of_a_gpu_node_ends_with_driver_efa_and_units(
    tmp_path: Path, keys: dict[str, str], distribution: str
) -> None:
    machine = Machine(tmp_path, keys, distribution)
    done = machine.install()
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "installed everstep 0.1.0 as a node"
    assert (tmp_path / "lib/modules/6.8.0-1-aws/updates/dkms/efa.ko").exists(), "EFA's kernel module"
    assert (tmp_path / "opt/amazon/efa/lib/libfabric.so.1").exists()
    assert (tmp_path / "opt/amazon/ofi-nccl/lib/libnccl-net.so").exists()
    assert not (tmp_path / "opt/amazon/openmpi").exists(), "one MPI only"
    assert set((tmp_path / "enabled").read_text().split()) == {
        "nvidia-persistenced.service",
        "nvidia-fabricmanager.service",
        "everstep-agent.service",
        "everstep-storage.service",
    }


def test_a_newer_kernel_without_the_driver_ends_the_installation(tmp_path: Path, keys: dict[str, str]) -> None:
    machine = Machine(tmp_path, keys)
    (tmp_path / "lib/modules/6.17.0-1019-aws").mkdir()
    done = machine.install()
    assert done.returncode != 0
    assert "kernel 6.17.0-1019-aws has no driver" in done.stderr


def test_a_plugin_that_the_dynamic_linker_does_not_find_ends_the_installation(
    tmp_path: Path, keys: dict[str, str]
) -> None:
    machine = Machine(tmp_path, keys)
    script(tmp_path / "bin" / "ldconfig", "")
    done = machine.install()
    assert done.returncode != 0
    assert "the dynamic linker does not find aws-ofi-nccl" in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("-y --minimal", "the EFA installer left no libfabric"),
        ("-y --minimal --mpi=openmpi5 --no-verify", "the EFA installer left no libfabric"),
        ("-y --mpi=openmpi5", "a ping test failed"),
        ("-y --mpi=none --no-verify", "unknown MPI none"),
        ("-y --skip-mpi --no-verify", "unrecognized option '--skip-mpi'"),
        ("--mpi=openmpi5 --no-verify", "no answer"),
    ],
)
def test_other_options_of_the_efa_installer_end_the_installation(
    tmp_path: Path, keys: dict[str, str], options: str, words: str
) -> None:
    done = Machine(tmp_path, keys).install(options)
    assert done.returncode != 0
    assert words in done.stderr
    assert not (tmp_path / "etc/systemd/system/everstep-agent.service").exists()
