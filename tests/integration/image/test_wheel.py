"""The wheel contains the dashboard, the migrations and the image, and a server runs from it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from email.parser import HeaderParser
from pathlib import Path

import httpx
import pytest
from packaging.requirements import Requirement

from tests.integration.test_server_process import cloud, start, stop

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[3]
__all__ = ["cloud"]


PIP = ("-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (ROOT / "control_plane" / "static" / "index.html").is_file():
        pytest.skip("the dashboard is not built: run make web")
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel into a folder with pip, and return it. Dependencies come from the tests' environment."""
    folder = tmp_path_factory.mktemp("site")
    install = ["install", "--no-index", "--no-deps", "--target", str(folder), str(wheel)]
    subprocess.run([sys.executable, *PIP, *install], check=True)
    return folder


def test_the_command_and_the_image_are_installed(installed: Path) -> None:
    done = subprocess.run(
        [installed / "bin" / "everstep", "--version"],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(installed)},
        cwd=installed,
        capture_output=True,
        text=True,
        check=True,
    )
    assert re.search(r"\d+\.\d+\.\d+", done.stdout)
    source = ROOT / "infra" / "image"
    files = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    found = {str(path.relative_to(installed / "infra/image")) for path in (installed / "infra/image").rglob("*.*")}
    assert files - {"libexec/boot-gate", "libexec/instance-store"} <= found
    assert {"constraints.txt", "build.txt", "node.txt", "server.txt"} <= found


def test_the_constraints_pin_every_dependency_within_its_bounds(installed: Path) -> None:
    lines = (installed / "infra/image/constraints.txt").read_text().splitlines()
    pins = {found.name.lower(): found for found in map(Requirement, lines)}
    (information,) = installed.glob("everstep-*.dist-info")
    needed = [
        requirement
        for text in HeaderParser().parsestr((information / "METADATA").read_text()).get_all("Requires-Dist", [])
        for requirement in [Requirement(text)]
        if requirement.name != "everstep"
        and any(
            requirement.marker is None or requirement.marker.evaluate({"extra": extra})
            for extra in ("server", "postgres", "worker", "training")
        )
    ]
    assert {"torch", "fastapi", "psycopg", "websockets", "boto3"} <= {each.name for each in needed}
    for requirement in needed:
        (pin,) = pins[requirement.name.lower()].specifier
        assert pin.operator == "=="
        assert requirement.specifier.contains(pin.version), requirement


def test_a_server_of_the_wheel_migrates_and_serves_the_dashboard(
    installed: Path, tmp_path: Path, cloud: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(installed))
    (installed / "control_plane" / "static" / "favicon.svg").write_text("<svg>of the wheel</svg>")
    process, ready = start(tmp_path, cloud, "--migrate")
    try:
        plain = {"accept-encoding": "identity"}  # not the compressed icon, which is unchanged
        icon = httpx.get(f"{ready['url']}/favicon.svg", headers=plain, trust_env=False, timeout=30)
        assert icon.text == "<svg>of the wheel</svg>"
        page = httpx.get(f"{ready['url']}/jobs", trust_env=False, timeout=30)
        assert page.status_code == 200
        (asset,) = set(re.findall(r'src="(/assets/[^"]+\.js)"', page.text))
        assert httpx.get(f"{ready['url']}{asset}", trust_env=False, timeout=30).status_code == 200
    finally:
        assert stop(process) == 0


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_server_runs_in_a_fresh_environment_with_only_the_wheel_and_its_requirements(
    wheel: Path, installed: Path, tmp_path: Path, cloud: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip downloads the requirements from the package index, in the versions of the wheel's constraints."""
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    constraints = installed / "infra" / "image" / "constraints.txt"
    install = ["install", "--constraint", str(constraints), f"{wheel}[server]"]
    subprocess.run([str(environment / "bin" / "python"), *PIP, *install], check=True)
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
        monkeypatch.delenv(name, raising=False)
    everstep = str(environment / "bin" / "everstep")
    told = subprocess.run([everstep, "--help"], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert "server" in told.stdout
    refused = subprocess.run([everstep, "local", "up"], capture_output=True, text=True, cwd=tmp_path)
    assert (refused.returncode, "pip install 'everstep[local]'" in refused.stderr) == (2, True), refused
    process, ready = start(tmp_path, cloud, "--migrate", program=(everstep, "server"))
    try:
        assert httpx.get(f"{ready['url']}/v1/health", trust_env=False, timeout=30).json()["Status"] == "ok"
        assert "<title>" in httpx.get(f"{ready['url']}/jobs", trust_env=False, timeout=30).text
    finally:
        assert stop(process) == 0
