"""Systemd accepts the units of an image, and the scripts of the image do what the units need."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.programs import MissingProgram

pytestmark = pytest.mark.integration

IMAGE = Path(__file__).parents[3] / "infra" / "image"
CLIENT_OF_UBUNTU = {"24.04": 16}
"""Version of the package postgresql-client, by release of Ubuntu."""
needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def verify(folder: Path, change: tuple[str, str] = ("", "")) -> str:
    """Return what systemd finds wrong in a copy of the units whose programs are stubs below `folder`.

    `change` is a text of the units and its replacement.
    """
    shutil.copytree(IMAGE / "units", folder / "units")
    for path in (folder / "units").rglob("*.*"):
        if path.is_file():
            text = path.read_text().replace(*change) if change[0] else path.read_text()
            for program in re.findall(r"=-?(/\S+)", text):
                if program.startswith(("/opt", "/usr")):
                    script(folder / program.lstrip("/"), "")
            path.write_text(re.sub(r"=(-?)(/(?:opt|usr)/)", rf"=\g<1>{folder}\2", text))
    units = sorted(str(path) for path in (folder / "units").iterdir() if path.suffix in (".service", ".slice"))
    environment = {**os.environ, "SYSTEMD_UNIT_PATH": f"{folder / 'units'}:"}
    done = subprocess.run(
        ["systemd-analyze", "verify", "--recursive-errors=no", *units], env=environment, capture_output=True, text=True
    )
    assert len(units) == 4
    return done.stdout + done.stderr


@needs_systemd
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    assert verify(tmp_path) == ""


@needs_systemd
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("WatchdogSec", "WatchdogSecs"), "Unknown key"),
        (("93%", "193%"), "Invalid memory limit"),
        (("OOMScoreAdjust=-900", "OOMScoreAdjust=-9000"), "OOM score"),
    ],
)
def test_systemd_finds_a_mistake_in_a_unit(tmp_path: Path, change: tuple[str, str], words: str) -> None:
    assert words in verify(tmp_path, change)


def run_script(name: str, folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", str(IMAGE / "libexec" / name), *arguments],
        env={"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", **environment},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    """Write programs that replace `mkfs.ext4`, `mount` and `mdadm`: they append their arguments to the file `calls`."""
    for name in ("mkfs.ext4", "mount"):
        script(tmp_path / "bin" / name, f'echo {name} "$@" >>{tmp_path}/calls')
    # The real mdadm neither assembles an active array nor finds a superblock on a new volume.
    script(
        tmp_path / "bin" / "mdadm",
        f'echo mdadm "$@" >>{tmp_path}/calls\n[ "$1" = --create ] || [ -e {tmp_path}/superblocks ]',
    )
    script(tmp_path / "bin" / "mountpoint", "exit 1")
    script(tmp_path / "bin" / "blkid", f"cat {tmp_path}/type")
    (tmp_path / "type").write_text("")
    (tmp_path / "by-id").mkdir()
    (tmp_path / "by-id" / "nvme-Amazon_Elastic_Block_Store_vol1").symlink_to("/dev/root")
    return tmp_path


def volumes(folder: Path, count: int) -> None:
    for number in range(count):
        name = f"nvme-Amazon_EC2_NVMe_Instance_Storage_AWS{number}"
        for suffix in ("", "_1", "-ns-1", "-part1"):
            (folder / "by-id" / f"{name}{suffix}").symlink_to(f"/dev/nvme{number}n1")


@pytest.mark.parametrize(
    ("count", "kind", "calls"),
    [
        (0, "", []),
        (1, "", ["mkfs.ext4 -q -m 5 -E lazy_itable_init=1,nodiscard /dev/nvme0n1", "mount {options} /dev/nvme0n1"]),
        (1, "ext4", ["mount {options} /dev/nvme0n1"]),
        (
            2,
            "",
            [
                "mdadm --examine /dev/nvme0n1",
                "mdadm --create {md} --run --force --homehost=any --level=0 --raid-devices=2 /dev/nvme0n1 /dev/nvme1n1",
                "mkfs.ext4 -q -m 5 -E lazy_itable_init=1,nodiscard {md}",
                "mount {options} {md}",
            ],
        ),
    ],
    ids=["none", "new", "after a reboot", "several"],
)
def test_the_instance_store_becomes_the_state_directory(storage: Path, count: int, kind: str, calls: list[str]) -> None:
    volumes(storage, count)
    (storage / "type").write_text(kind)
    done = run_script("instance-store", storage, str(storage / "state"), str(storage / "by-id"))
    assert done.returncode == 0, done.stderr
    found = (storage / "calls").read_text().splitlines() if (storage / "calls").exists() else []
    words = {"options": "-o noatime,nodev,nosuid", "md": "/dev/md/everstep"}
    wanted = [call.format(**words) for call in calls]
    assert found == [f"{call} {storage / 'state'}" if call.startswith("mount") else call for call in wanted]
    assert (storage / "state").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("active", "calls"),
    [
        pytest.param(["md127"], ["mount {options} /dev/md127"], id="udev has assembled it"),
        pytest.param(
            [],
            [
                "mdadm --examine /dev/nvme0n1",
                "mdadm --assemble {md} /dev/nvme0n1 /dev/nvme1n1",
                "mount {options} {md}",
            ],
            id="nobody has assembled it",
        ),
    ],
)
def test_an_array_is_mounted_again_after_a_reboot(storage: Path, active: list[str], calls: list[str]) -> None:
    volumes(storage, 2)
    (storage / "type").write_text("ext4")
    (storage / "superblocks").touch()
    for name, member in [("md126", "sda"), *((name, "nvme0n1") for name in active)]:
        (storage / "block" / name / "slaves" / member).mkdir(parents=True)
    folders = (str(storage / each) for each in ("state", "by-id", "block"))
    done = run_script("instance-store", storage, *folders)
    assert done.returncode == 0, done.stderr
    words = {"options": "-o noatime,nodev,nosuid", "md": "/dev/md/everstep"}
    wanted = [call.format(**words) for call in calls]
    found = (storage / "calls").read_text().splitlines()
    assert found == [f"{call} {storage / 'state'}" if call.startswith("mount") else call for call in wanted]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "use node or server"),
        (("laptop", "x.whl"), "the first argument is 'laptop'; use node or server"),
        (("node",), "'make wheel' builds one"),
        (("node", "none.whl"), "the wheel 'none.whl' does not exist"),
        (("node", str(IMAGE / "install.sh"), "--gpus"), "the third argument is '--gpus'; use --gpu or nothing"),
    ],
)
def test_wrong_arguments_of_the_installation_change_nothing(arguments: tuple[str, ...], words: str) -> None:
    done = subprocess.run(["sh", str(IMAGE / "install.sh"), *arguments], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("install.sh: ")
    assert words in done.stderr


def run_function(call: str, folder: Path, **variables: object) -> subprocess.CompletedProcess[str]:
    """Run one function of `install.sh`, which finds the programs in `folder / "bin"` before others."""
    text = (IMAGE / "install.sh").read_text()
    functions = re.findall(r"^\w+\(\) \{\n.*?^\}\n", text, re.MULTILINE | re.DOTALL)
    given = [f"{name}={shlex.quote(str(value))}\n" for name, value in variables.items()]
    environment = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "GNUPGHOME": str(folder)}
    script_ = "".join(["set -eu\n", *functions, *given, call])
    return subprocess.run(["sh", "-c", script_], env=environment, cwd=folder, capture_output=True, text=True)


@pytest.mark.security
@pytest.mark.parametrize(("role", "gpu"), [("node", ""), ("node", "--gpu"), ("server", "")])
def test_pip_checks_the_hash_of_each_package_except_the_cpu_build_of_torch(tmp_path: Path, role: str, gpu: str) -> None:
    script(tmp_path / "bin" / "python", 'mkdir -p "$3/bin" && cp "$0" "$3/bin" && cp "${0%/*}/pip" "$3/bin"')
    script(tmp_path / "bin" / "pip", 'echo "$@" >>calls; for last; do :; done; [ ! -f "$last" ] || cat "$last" >>read')
    for lock in ("build.txt", "node.txt", "server.txt"):
        shutil.copy(IMAGE.parents[1] / "requirements" / lock, tmp_path)
    values = {"role": role, "gpu": gpu, "here": tmp_path, "prefix": tmp_path / "prefix", "wheel": "everstep.whl"}
    done = run_function("install_wheel", tmp_path, python=tmp_path / "bin/python", PIP_EXTRA_INDEX_URL="", **values)
    assert done.returncode == 0, done.stderr
    build, locked, *torch, wheel = (tmp_path / "calls").read_text().splitlines()
    assert all("--require-hashes" in call and "--no-deps" in call for call in (build, locked))
    assert "--no-index" in wheel
    assert wheel.endswith(" everstep.whl")
    assert [call.split()[-1] for call in torch] == (["torch"] if (role, gpu) == ("node", "") else [])
    assert all("--no-deps" in call for call in torch)
    names = re.findall(r"^([a-z][\w.-]*)==", (tmp_path / "read").read_text(), re.MULTILINE)
    assert ("torch" in names, "triton" in names) == (bool(gpu), bool(gpu))
    assert {"websockets", "boto3"} <= set(names)
    assert ("deepspeed" in names, "psycopg" in names) == (role == "node", role == "server")


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    """Make two keys, and sign a file with the first. `curl` copies files of the test's folder. Return fingerprints."""
    if not all(map(shutil.which, ("gpg", "gpgv"))):
        raise MissingProgram("gpg and gpgv: on Debian apt-get install gpg gpgv")
    found = {}
    (tmp_path / "file").write_text("content")
    options = ["gpg", "--batch", "--quiet", "--homedir", str(tmp_path), "--passphrase", "", "--yes"]
    for name in ("ours", "other"):
        subprocess.run([*options, "--quick-generate-key", name, "ed25519", "sign"], check=True, capture_output=True)
        listed = subprocess.run([*options, "--with-colons", "-k", name], check=True, capture_output=True, text=True)
        found[name] = re.findall(r"^fpr:+(\w+):", listed.stdout, re.MULTILINE)[0]
        subprocess.run([*options, "-a", "-o", str(tmp_path / name), "--export", name], check=True)
        subprocess.run(
            [*options, "-u", name, "-o", str(tmp_path / f"{name}.sig"), "-b", str(tmp_path / "file")], check=True
        )
    subprocess.run(["gpgconf", "--homedir", str(tmp_path), "--kill", "all"], check=True)
    script(tmp_path / "bin" / "curl", 'cp "$4" "$3"')
    return found


@pytest.mark.security
def test_only_the_named_key_is_accepted(tmp_path: Path, keys: dict[str, str]) -> None:
    assert run_function(f"fetch_key ours key {keys['ours']}", tmp_path).returncode == 0
    assert "is not the key" in run_function(f"fetch_key other key {keys['ours']}", tmp_path).stderr
    (tmp_path / "both").write_text((tmp_path / "ours").read_text() + (tmp_path / "other").read_text())
    assert "is not the key" in run_function(f"fetch_key both key {keys['ours']}", tmp_path).stderr


@pytest.mark.security
def test_only_a_file_that_the_key_has_signed_is_accepted(tmp_path: Path, keys: dict[str, str]) -> None:
    shutil.copy(tmp_path / "ours.sig", tmp_path / "file.sig")
    assert run_function("fetch_signed file got ours", tmp_path).returncode == 0
    assert "is wrong" in run_function("fetch_signed file got other", tmp_path).stderr
    (tmp_path / "file").write_text("changed")
    assert "is wrong" in run_function("fetch_signed file got ours", tmp_path).stderr


@pytest.mark.security
def test_each_download_of_the_installation_is_verified() -> None:
    text = (IMAGE / "install.sh").read_text()
    assert len(re.findall(r"^ +curl ", text, re.MULTILINE)) == 3, "in fetch_key and fetch_signed only"
    assert "dpkg -i" not in text
    user_data = (IMAGE.parent / "terraform" / "user_data.sh.tftpl").read_text()
    copied, checked, used = map(user_data.index, ("aws s3 cp", "sha256sum --check", "python3 -m zipfile"))
    assert copied < checked < used


def test_the_image_of_a_server_contains_a_client_that_can_dump_its_database() -> None:
    """pg_dump refuses a server of a newer major version."""
    assert "deb_packages=postgresql-client\n" in (IMAGE / "install.sh").read_text()
    (release,) = re.findall(r"ubuntu-\w+-([\d.]+)-amd64", (IMAGE / "everstep.pkr.hcl").read_text())
    variables = (IMAGE.parent / "terraform" / "modules" / "database" / "variables.tf").read_text()
    (database,) = re.findall(r'"postgresql_version" \{[^}]*default\s*= "(\d+)"', variables)
    assert int(database) <= CLIENT_OF_UBUNTU[release]


@pytest.mark.skipif(shutil.which("terraform") is None, reason="terraform is not installed")
@pytest.mark.parametrize(("change", "code"), [(("", ""), 0), (("build {", "build {{"), 2)])
def test_the_template_of_the_ami_has_the_syntax_and_the_format_of_hcl(
    tmp_path: Path, change: tuple[str, str], code: int
) -> None:
    """Terraform's formatter accepts Packer's template, because both programs read HCL, and rejects a syntax error."""
    text = (IMAGE / "everstep.pkr.hcl").read_text()
    (tmp_path / "template.tf").write_text(text.replace(*change) if change[0] else text)
    done = subprocess.run(["terraform", "fmt", "-check", "-diff", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    assert "/infra/image/install.sh ${var.role} ${local.wheel}" in text


def test_the_template_of_the_ami_declares_and_uses_each_variable() -> None:
    text = (IMAGE / "everstep.pkr.hcl").read_text()
    assert set(re.findall(r'^variable "(\w+)"', text, re.MULTILINE)) == set(re.findall(r"\bvar\.(\w+)", text))
    (source,) = re.findall(r'^source "amazon-ebs" "this" \{\n(.*?)^\}', text, re.MULTILINE | re.DOTALL)
    settings = dict(re.findall(r"^  (\w+) += (.+)$", source, re.MULTILINE))
    passed = {
        "vpc_id": "var.vpc_id",
        "subnet_id": "var.subnet_id",
        "iam_instance_profile": "var.iam_instance_profile",
        "ssh_interface": "local.ssh_interface",
        "temporary_security_group_source_cidrs": "var.ssh_source_cidrs",
    }
    assert settings | passed == settings


@pytest.mark.security
@pytest.mark.skipif(shutil.which("terraform") is None, reason="terraform is not installed")
@pytest.mark.parametrize(
    ("variables", "interface"),
    [({}, '"session_manager"'), ({"TF_VAR_ssh_source_cidrs": '["203.0.113.7/32"]'}, "tostring(null)")],
)
def test_packer_opens_the_ssh_port_only_to_the_networks_of_a_variable(
    tmp_path: Path, variables: dict[str, str], interface: str
) -> None:
    """Terraform evaluates the variables and locals of Packer's template, because both programs read HCL."""
    text = (IMAGE / "everstep.pkr.hcl").read_text()
    blocks = re.findall(r"^(?:variable|locals) .*?^\}\n", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "template.tf").write_text("".join(blocks))
    required = {"TF_VAR_region": "eu-west-1", "TF_VAR_wheel": "a.whl", "CHECKPOINT_DISABLE": "1"}
    done = subprocess.run(
        ["terraform", "console"],
        input="local.ssh_interface",
        env={**os.environ, **required, **variables},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == interface, done.stderr
