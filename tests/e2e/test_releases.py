"""Two releases of one protocol version in one cluster: an earlier commit and the present one, in both directions.

`tests/earlier_release.py` installs the earlier commit. Each test updates one side while the job trains. Agents are
updated one after the other, so agents of both releases hold each other's copies meanwhile.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import pytest

import everstep
from infra.local_cloud.fault_kinds import KillAgent, KillControlPlane
from tests import earlier_release
from tests.e2e.conftest import workplace
from tests.e2e.jobs import SCRIPTS, Job, Shape, Workplace, assert_identical, assert_incident, wait_until
from tests.e2e.reference import References
from tests.earlier_release import EarlierRelease

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
STEPS = 60
ADAPTER = "ddp"
"""An adapter without DeepSpeed, whose operator each new environment would compile for minutes."""
PAIR = Shape(nodes=2)
PRESENT = everstep.__version__
EARLIER = earlier_release.VERSION


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> EarlierRelease:
    return earlier_release.install(tmp_path_factory.mktemp("earlier"))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the nodes' program `everstep` and the link `packages`.

    The link leads to the earlier release's packages if the server runs that release. To update agents, a test replaces
    the program. To update the server, it removes the link.
    """
    return tmp_path_factory.mktemp("installed")


@pytest.fixture(scope="module", params=["agents", "control plane"])
def side(request: pytest.FixtureRequest) -> str:
    """Return the side, agents or control plane, that runs the earlier release when the cluster starts, or "neither"."""
    return str(request.param)


@pytest.fixture(scope="module")
def place(
    request: pytest.FixtureRequest, references: References, earlier: EarlierRelease, installed: Path, side: str
) -> Iterator[Workplace]:
    """Start a cluster whose agents, or whose control plane, run the earlier release, or a cluster without it."""
    _install_agent(installed, earlier.programs if side == "agents" else Path(sys.executable).parent)
    packages = installed / "packages"
    packages.unlink(missing_ok=True)
    if side == "control plane":
        packages.symlink_to(earlier.packages)
    path = os.pathsep.join([str(installed), "/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin"])
    with workplace(
        request.session,
        references,
        nodes=2,
        spares=1,
        environment={"PATH": path},
        control_plane_environment={"PYTHONPATH": str(packages)},
    ) as own:
        yield own


def test_a_job_trains_through_the_update_of_either_side(
    place: Workplace, side: str, installed: Path, earlier: EarlierRelease
) -> None:
    before = {"agents": PRESENT, "control plane": PRESENT, side: EARLIER}
    assert versions(place) == before
    job = place.submit(
        "first", PAIR, entry_point="released.py", adapter=ADAPTER, holds=("1:6", "2:12", "2:20"), steps=STEPS
    )
    job.reference()
    job.wait_standing_committed("1:6", 5)
    assert imported(job) == {before["agents"]}
    job.kill_rank(1)
    job.wait_recovered(1)
    moment = job.wait_standing_committed("2:12", 11)
    ranks = [process.pid for process in place.rank_processes()]

    if side == "agents":
        _install_agent(installed, Path(sys.executable).parent)
        place.cluster.inject(KillAgent(target=job.node_of(0)))
        wait_until("both releases", lambda: versions(place)["agents"] == f"{EARLIER}, {PRESENT}")
        place.wait_all_connected(place.cluster.instances())
        job.let_go(moment)
        moment = job.wait_standing_committed("2:20", 18)
        for node in set(place.cluster.instances()) - {job.node_of(0)}:
            place.cluster.inject(KillAgent(target=node))
    else:
        job.let_go(moment)
        moment = job.wait_standing_committed("2:20", 18)
        (installed / "packages").unlink()
        place.cluster.inject(KillControlPlane())
    wait_until("the update", lambda: set(versions(place).values()) == {PRESENT}, lambda: versions(place))
    place.wait_all_connected(place.cluster.instances())

    # The updated agents adopt the ranks and the shim of the earlier release, and the ranks train on.
    assert [process.pid for process in place.rank_processes()] == ranks
    job.let_go(moment)
    committed = job.wait_committed(24)["CommittedStep"]
    job.terminate(job.node_of(1))
    job.wait_ended()
    first, second = job.incidents()
    assert_incident(first, cause="rank_exit", source="local", committed=5)
    assert_incident(second, cause="instance_terminated", source="peer", committed=committed)
    assert_identical(job)


@pytest.mark.parametrize("side", ["neither"], indirect=True)
def test_agents_run_ranks_that_import_the_earlier_release(
    place: Workplace, installed: Path, earlier: EarlierRelease, tmp_path: Path
) -> None:
    """Ranks import the earlier release, which the job's requirements name, and agents of this release restart them."""
    assert set(versions(place).values()) == {PRESENT}
    source = tmp_path / "source"
    shutil.copytree(SCRIPTS, source, ignore=shutil.ignore_patterns("__pycache__"))
    (source / "wheels").mkdir()
    shutil.copy(earlier.wheel, source / "wheels")
    (source / "requirements.txt").write_text(f"--no-index\n--find-links ./wheels\neverstep=={EARLIER}\n")
    wanted: Mapping[str, object] = {"Requirements": "requirements.txt"}
    job = place.submit(
        "mixed",
        PAIR,
        entry_point="released.py",
        source_dir=source,
        request=wanted,
        holds=("1:6",),
        adapter=ADAPTER,
        steps=20,
    )
    job.reference()
    job.wait_standing_committed("1:6", 5)
    assert imported(job) == {EARLIER}
    job.kill_rank(0)
    job.wait_ended()
    (incident,) = job.incidents()
    assert_incident(incident, cause="rank_exit", source="local", committed=5)
    assert_identical(job)


def versions(place: Workplace) -> dict[str, str]:
    """Return the release of the control plane and of the nodes' agents."""
    health = httpx.get(f"{place.cluster.endpoint_url}/v1/health", trust_env=False, timeout=30).json()
    agents = {node["AgentVersion"] for node in place.client.list_nodes(FleetName="local")["Nodes"]}
    return {"agents": ", ".join(sorted(agents)), "control plane": health["Version"]}


def imported(job: Job) -> set[str]:
    """Return the releases that the ranks of the first generation import."""
    lines = [line for rank in (0, 1) for line in job.log("stdout", 1, rank).splitlines()]
    return {line.split()[-1] for line in lines if "imports everstep" in line}


def _install_agent(folder: Path, programs: Path) -> None:
    """Replace the program `everstep` of the nodes, as an update in place does. Running agents keep their release."""
    draft = folder / "new"
    draft.write_text(f'#!/bin/sh\nexec {programs}/everstep "$@"\n')
    draft.chmod(0o755)
    draft.replace(folder / "everstep")
