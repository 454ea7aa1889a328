"""Packages of a requirements.txt, which the real pip installs from local wheels.

The agent installs each set of requirements once, into a folder (a layer) of its own. A failed installation leaves no
layer.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from tests.wheels import make_wheel
from worker.errors import RequirementsRefused
from worker.provisioning.packages import MAX_LAYERS, InstallationOrder, PackageLayers, _key
from worker.ranks.shim import processes

pytestmark = pytest.mark.integration
OFFLINE = "--no-index\n--find-links ./wheels\n"


@pytest.fixture
def order(tmp_path: Path) -> InstallationOrder:
    source = tmp_path / "source"
    make_wheel(source / "wheels", "everstep_example", "1.0")
    make_wheel(source / "wheels", "pluggy", "99.0")
    (source / "requirements.txt").write_text(f"{OFFLINE}everstep_example\nmsgspec\n")
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    output = tmp_path / "logs" / "rank=0.stdout"
    return InstallationOrder(
        project="a",
        source=source,
        source_sha256="aa",
        requirements="requirements.txt",
        environment=environment,
        output=output,
    )


def imported(path: str, expression: str) -> str:
    """Return the value of an expression in a process with this Python path, as in a rank."""
    done = subprocess.run(
        [sys.executable, "-c", f"print({expression})"],
        env={"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def leftovers(state: Path) -> list[str]:
    return [path.name for path in (state / "packages").glob("*.new")]


async def test_what_the_node_lacks_is_installed_once_and_what_it_has_is_not(
    tmp_path: Path, order: InstallationOrder
) -> None:
    layers = PackageLayers(tmp_path)
    found = await layers.install(order)
    assert found.modules == ("everstep_example",)
    assert imported(found.path, "__import__('everstep_example').VERSION") == "1.0"
    assert "Requirement already satisfied: msgspec" in order.output.read_text()
    said = order.output.read_text()
    assert await PackageLayers(tmp_path).install(order) == found
    assert order.output.read_text() == said, "pip was not asked again"
    assert leftovers(tmp_path) == []


async def test_another_version_is_seen_first_and_the_nodes_stays(tmp_path: Path, order: InstallationOrder) -> None:
    before = metadata.version("pluggy")
    (order.source / "requirements.txt").write_text(f"{OFFLINE}pluggy==99.0\n")
    found = await PackageLayers(tmp_path).install(order)
    assert found.modules == ("pluggy",)
    assert imported(found.path, "__import__('pluggy').VERSION") == "99.0"
    assert metadata.version("pluggy") == before
    assert imported("", "__import__('importlib.metadata').metadata.version('pluggy')") == before


async def test_a_node_that_has_everything_needs_no_layer(tmp_path: Path, order: InstallationOrder) -> None:
    (order.source / "requirements.txt").write_text("msgspec\n")
    found = await PackageLayers(tmp_path).install(order)
    assert (found.path, found.modules) == ("", ())


async def test_a_failure_has_pips_last_lines_and_leaves_nothing(tmp_path: Path, order: InstallationOrder) -> None:
    (order.source / "requirements.txt").write_text(f"{OFFLINE}everstep-none==7\n")
    with pytest.raises(RequirementsRefused, match=r"(?s)requirements.txt: pip ended with code 1: .*everstep-none==7"):
        await PackageLayers(tmp_path).install(order)
    assert "No matching distribution" in order.output.read_text()
    assert sorted(path.name for path in (tmp_path / "packages").iterdir()) == ["lock"]


@pytest.mark.security
@pytest.mark.parametrize("allows_builds", [False, True])
@pytest.mark.parametrize(
    "lines",
    [
        "--index-url http://ann:hush-1@127.0.0.1:1/simple\nnone\n",
        "none @ http://hush-1@127.0.0.1:1/none-1-py3-none-any.whl?X-Amz-Signature=hush-1\n",
        "none @@ http://ann:hush-1@127.0.0.1:1/none.whl\n",
        "--extra-index-url http://ann:hush-1@127.0.0.1:1/simple --none\n",
    ],
    ids=["index", "requirement", "malformed requirement", "malformed option"],
)
async def test_no_secret_of_a_url_is_printed_or_reported(
    tmp_path: Path, order: InstallationOrder, lines: str, allows_builds: bool
) -> None:
    (order.source / "requirements.txt").write_text(lines)
    environment = {**order.environment, "HTTP_PROXY": "ann:hush-2@none:1", "PIP_RETRIES": "0", "PIP_VERBOSE": "1"}
    layers = PackageLayers(tmp_path, allows_builds=allows_builds)
    with pytest.raises(RequirementsRefused) as refused:
        await layers.install(replace(order, environment=environment))
    said = order.output.read_text()
    assert "****" in said
    assert "hush" not in said + str(refused.value)


@pytest.mark.parametrize(
    ("text", "path", "words"),
    [
        ("-e .\n", "requirements.txt", r"names \., and this node installs wheels only"),
        # Time that grows with the square of the blank lines would exceed the limit of the test.
        pytest.param(f"{chr(10) * 250_000}-e .", "requirements.txt", "installs wheels only", id="blank lines"),
        pytest.param("x" * 300_000, "requirements.txt", "more than 262,144 bytes", id="large file"),
        ("x", "../requirements.txt", "is not a file of the source tree"),
        ("x", "none.txt", "is not a file of the source tree"),
    ],
)
async def test_what_a_layer_cannot_have_is_refused(
    tmp_path: Path, order: InstallationOrder, text: str, path: str, words: str
) -> None:
    (order.source / "requirements.txt").write_text(text)
    (tmp_path / "requirements.txt").touch()
    with pytest.raises(RequirementsRefused, match=words):
        await PackageLayers(tmp_path).install(replace(order, requirements=path))


PROJECT = """
[project]
name = "mine"
version = "1"
dependencies = ["everstep_example"]
optional-dependencies = {more = ["pluggy==99.0"]}
"""


@pytest.mark.parametrize("line", ["-e .", ".", "--editable=./", "-e .[more]  # mine"])
@pytest.mark.parametrize("layout", ["src/mine", "mine"])
async def test_a_package_of_the_source_is_copied_with_its_dependencies(
    tmp_path: Path, order: InstallationOrder, layout: str, line: str
) -> None:
    package = order.source / layout
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("VERSION = 'mine'")
    (package / "inner" / "data.txt").write_text("text")
    (order.source / "pyproject.toml").write_text(PROJECT)
    (order.source / "requirements.txt").write_text(f"{OFFLINE}{line}\n")
    found = await PackageLayers(tmp_path).install(order)
    assert found.modules == ("everstep_example", "mine", *(("pluggy",) if "more" in line else ()))
    assert imported(found.path, "__import__('mine').VERSION") == "mine"
    assert (Path(found.path) / "mine" / "inner" / "data.txt").read_text() == "text"


def test_a_layer_is_named_by_all_that_it_follows_from(order: InstallationOrder) -> None:
    keys = {_key(order)}
    keys.add(_key(replace(order, source_sha256="bb")))
    assert len(keys) == 2, "it reads other files of the source"
    keys.add(_key(replace(order, environment={**order.environment, "PIP_INDEX_URL": "http://127.0.0.1:1"})))
    assert len(keys) == 3
    keys.add(_key(replace(order, environment={**order.environment, "HTTPS_PROXY": "http://127.0.0.1:1"})))
    keys.add(_key(replace(order, project="b")))
    keys.add(_key(order, allows_builds=True))
    assert len(keys) == 6
    assert _key(replace(order, environment={**order.environment, "OTHER": "1"})) in keys, "pip does not see it"
    (order.source / "requirements.txt").write_text("everstep_example\n")
    keys.add(_key(order))
    assert len(keys) == 7
    assert _key(replace(order, source_sha256="bb")) in keys, "it reads no other file of the source"


async def test_only_the_newest_layers_stay(tmp_path: Path, order: InstallationOrder) -> None:
    layers = PackageLayers(tmp_path)
    first = await layers.install(order)
    for number in range(MAX_LAYERS - 1):
        (tmp_path / "packages" / f"other-{number}").mkdir()
        os.utime(tmp_path / "packages" / f"other-{number}", (number, number))
    (order.source / "requirements.txt").write_text(f"{OFFLINE}pluggy==99.0\n")
    await layers.install(order)
    assert Path(first.path).exists(), "it was used last"
    names = {path.name for path in (tmp_path / "packages").iterdir() if path.is_dir()}
    assert len(names) == MAX_LAYERS
    assert "other-0" not in names


async def test_layers_that_there_is_no_room_for_go_and_one_that_is_too_large_is_refused(
    tmp_path: Path, order: InstallationOrder
) -> None:
    first = Path((await PackageLayers(tmp_path).install(order)).path)
    room = sum(path.lstat().st_blocks * 512 for path in first.parents[2].rglob("*") if not path.is_dir()) * 3 // 2
    (order.source / "requirements.txt").write_text(f"{OFFLINE}pluggy==99.0\n")
    second = Path((await PackageLayers(tmp_path, limit_bytes=room).install(order)).path)
    assert second.exists()
    assert not first.exists(), "both have no room"
    (order.source / "requirements.txt").write_text(f"{OFFLINE}everstep_example\n")
    with pytest.raises(
        RequirementsRefused, match=r"needs [\d,]+ bytes, but packages may use only 4,096 bytes of this node's disk"
    ):
        await PackageLayers(tmp_path, limit_bytes=4096).install(order)
    assert second.exists(), "what is refused takes nobody's place"
    assert leftovers(tmp_path) == []


# -- processes that die during an installation


@pytest.fixture
async def silent_index(order: InstallationOrder) -> AsyncIterator[asyncio.Event]:
    """Run a package index that never answers. Yield an event that is set when pip waits for the index."""
    called = asyncio.Event()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        called.set()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    (order.source / "requirements.txt").write_text(f"--index-url http://127.0.0.1:{port}/simple\neverstep_example\n")
    yield called
    server.close()
    await server.wait_closed()


def pips() -> list[int]:
    """Return the pids of processes below this one that run pip."""
    return [
        pid
        for pid in processes.tree(os.getpid(), processes.snapshot())
        if b"pip_program.py\0install" in command_of(pid)
    ]


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


async def test_an_installation_that_nobody_waits_for_ends_with_all_that_it_started(
    tmp_path: Path, order: InstallationOrder, silent_index: asyncio.Event
) -> None:
    installing = asyncio.create_task(PackageLayers(tmp_path).install(order))
    await silent_index.wait()
    assert pips()
    installing.cancel()
    await asyncio.gather(installing, return_exceptions=True)
    assert installing.cancelled()
    assert pips() == []
    assert leftovers(tmp_path) == []


async def test_an_installation_has_a_limit(
    tmp_path: Path, order: InstallationOrder, silent_index: asyncio.Event
) -> None:
    with pytest.raises(RequirementsRefused, match=r"is not installed after 0\.01 s"):
        await PackageLayers(tmp_path, seconds=0.01).install(order)
    assert pips() == []


INSTALL = """
import asyncio, sys
from pathlib import Path
from worker.provisioning.packages import InstallationOrder, PackageLayers
state, source, output = map(Path, sys.argv[1:])
order = InstallationOrder(
    project="a", source=source, source_sha256="aa", requirements="requirements.txt", environment={}, output=output
)
asyncio.run(PackageLayers(state).install(order))
"""


async def test_an_agent_that_is_killed_keeps_no_lock_and_leaves_no_pip(
    tmp_path: Path, order: InstallationOrder, silent_index: asyncio.Event
) -> None:
    agent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", INSTALL, str(tmp_path), str(order.source), str(order.output)
    )
    await silent_index.wait()
    started = [process for process in map(processes.find, pips()) if process is not None]
    assert len(started) == 2, "pip, and what ends all that pip has started"
    assert len(leftovers(tmp_path)) == 2
    agent.send_signal(signal.SIGKILL)
    await agent.wait()
    # The kill signals were sent, and the processes may take a moment to end.
    while any(processes.is_alive(each.pid, each.start_ticks) for each in started):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    (order.source / "requirements.txt").write_text(f"{OFFLINE}everstep_example\n")
    found = await PackageLayers(tmp_path).install(order)
    assert found.modules == ("everstep_example",)
    assert leftovers(tmp_path) == []


async def test_two_agents_of_a_node_install_one_after_the_other(tmp_path: Path, order: InstallationOrder) -> None:
    found = await asyncio.gather(PackageLayers(tmp_path).install(order), PackageLayers(tmp_path).install(order))
    assert found[0] == found[1]
    assert order.output.read_text().count("Successfully installed") == 1
