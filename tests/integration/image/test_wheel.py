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


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed the wheel. The dependencies come from the environment of the tests."""
    if not (ROOT / "control_plane" / "static" / "index.html").is_file():
        pytest.skip("the dashboard is not built: run make web")
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input"]
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "dist")]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = (folder / "dist").glob("*.whl")
    install = ["install", "--no-index", "--no-deps", "--target", str(folder / "site"), str(wheel)]
    subprocess.run([*pip, *install], check=True)
    return folder / "site"


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
    assert "constraints.txt" in found


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
        plain = {"accept-encoding": "identity"}  # The wheel also has a compressed copy of the icon.
        icon = httpx.get(f"{ready['url']}/favicon.svg", headers=plain, trust_env=False, timeout=30)
        assert icon.text == "<svg>of the wheel</svg>"
        page = httpx.get(f"{ready['url']}/jobs", trust_env=False, timeout=30)
        assert page.status_code == 200
        (asset,) = set(re.findall(r'src="(/assets/[^"]+\.js)"', page.text))
        assert httpx.get(f"{ready['url']}{asset}", trust_env=False, timeout=30).status_code == 200
    finally:
        assert stop(process) == 0
