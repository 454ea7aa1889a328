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


def fresh(wheel: Path, installed: Path, folder: Path, extra: str) -> Path:
    """Install the wheel with one extra into an environment of its own, from the package index. Return its `bin`."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    constraints = installed / "infra" / "image" / "constraints.txt"
    install = ["install", "--constraint", str(constraints), f"{wheel}[{extra}]" if extra else str(wheel)]
    subprocess.run([str(folder / "bin" / "python"), *PIP, *install], check=True)
    return folder / "bin"


def run(*words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, words)), capture_output=True, text=True, env={**os.environ, **environment})


@pytest.mark.long
@pytest.mark.timeout(900)
def test_client_server_and_worker_each_run_with_only_their_requirements(
    wheel: Path, installed: Path, tmp_path: Path, cloud: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip downloads the requirements from the package index, in the versions of the wheel's constraints."""
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
        monkeypatch.delenv(name, raising=False)
    server = fresh(wheel, installed, tmp_path / "server", "server") / "everstep"
    assert "server" in run(server, "--help").stdout
    refused = run(server, "local", "up")
    assert (refused.returncode, "pip install 'everstep[local]'" in refused.stderr) == (2, True), refused
    client = fresh(wheel, installed, tmp_path / "client", "")
    assert run(client / "python", "-c", "import fastapi").returncode == 1
    process, ready = start(tmp_path, cloud, "--migrate", program=(str(server), "server"))
    try:
        assert httpx.get(f"{ready['url']}/v1/health", trust_env=False, timeout=30).json()["Status"] == "ok"
        assert "<title>" in httpx.get(f"{ready['url']}/jobs", trust_env=False, timeout=30).text
        token = Path(ready["admin_token_path"]).read_text().strip()
        listed = run(client / "everstep", "jobs", "list", EVERSTEP_ENDPOINT_URL=ready["url"], EVERSTEP_TOKEN=token)
        assert (listed.returncode, listed.stderr.partition(".")[0]) == (0, "No training jobs"), listed
    finally:
        assert stop(process) == 0
    worker = fresh(wheel, installed, tmp_path / "worker", "worker") / "everstep"
    checked = run(worker, "doctor", "--node")
    assert "Traceback" not in checked.stderr, checked
    assert "memory" in checked.stdout, checked
    assert "--allow-builds" in run(worker, "agent", "--help").stdout
