"""An agent or a rank kills or stops itself at a chosen point of a step or a recovery (a `Moment` of `fault_points`).

Each test arms moments: it chooses the process and the signal. Each armed moment fires exactly once: the process sends
itself the signal there. The result equals the undisturbed run bit for bit.

The cluster's processes load `fault_points`. In tests that kill a process, every shard has several chunks, so that the
first chunk is not the last. Deadlines are long, so that a killed agent restarts before any deadline expires.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from everstep.protocol.slot import HEADER_BYTES, SlotState, unpack_header
from infra.local_cloud.instance_init import memory_directory
from infra.local_cloud.processes import memory_of
from tests.e2e.conftest import workplace
from tests.e2e.fault_points.fault_points import VARIABLE, Moment, arm, fired
from tests.e2e.jobs import Job, Shape, Workplace, assert_identical, assert_incident, wait_until
from tests.e2e.reference import References

FAULT_POINTS = Path(__file__).parent / "fault_points"
SHAPE = Shape(nodes=2, ranks_per_node=2)
FIRST = "1:10"
"""The ranks wait after step 10 of generation 1, or soon after it, while the test arms a fault point.

By then, Everstep has finished the audited snapshots of the launch, and a step is committed. Everstep audits the first
three snapshots: it compares the copy with the live tensors, which delays the end of the snapshot.
"""
LEAST = 8
"""The lowest step that is committed when the test arms a fault point."""
STEPS, PACE_SECONDS, WIDTH = 50, 0.05, 680
"""Settings of the training script. WIDTH gives each rank 6 MB of parameters and optimizer state."""
LONG_STEPS, LONG_PACE_SECONDS = 200, 0.1
"""Steps, and seconds per step, of a run that lasts nearly twice as long as the detection of a stopped agent."""
DETECTION_SECONDS = 10.0


@pytest.fixture(scope="module")
def armed_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("armed")


@pytest.fixture(scope="module")
def place(request: pytest.FixtureRequest, references: References, armed_folder: Path) -> Iterator[Workplace]:
    """Start a cluster for this module. Its processes load the fault points."""
    environment = {"PYTHONPATH": str(FAULT_POINTS), VARIABLE: str(armed_folder)}
    size = {"nodes": SHAPE.nodes, "spares": 1}
    with workplace(
        request.session, references, **size, detection_seconds=DETECTION_SECONDS, environment=environment
    ) as own:
        yield own


@pytest.fixture
def waiting(place: Workplace, request: pytest.FixtureRequest) -> tuple[Job, str]:
    """Start a job with the test's name. Return it with the point, `generation:step`, at which its ranks wait."""
    return in_mid_training(place, request.node.name, SHAPE, steps=STEPS, pace_seconds=PACE_SECONDS, width=WIDTH)


def in_mid_training(place: Workplace, test: str, shape: Shape, **given: object) -> tuple[Job, str]:
    """Start a job, and wait until its ranks wait and `LEAST` or a later step is committed.

    Returns:
        The job, and the point `generation:step` at which its ranks wait.
    """
    name = test.removeprefix("test_").replace("_", "-").replace("[", "-").replace("]", "").replace(" ", "-")
    job = place.submit(name, shape, holds=(FIRST,), adapter="plain", **given)
    job.reference()
    return job, job.wait_standing_committed(FIRST, LEAST)


@pytest.fixture
def dies(armed_folder: Path) -> Iterator[Callable[..., Path]]:
    """Return a function that makes a process kill or stop itself when it reaches a chosen point of its work (a moment).

    After the test, the fixture checks that each chosen process has done this exactly once.
    """
    armed: list[Path] = []

    def add(moment: Moment, who: str, strike: signal.Signals = signal.SIGKILL) -> Path:
        armed.append(arm(armed_folder, moment, who, strike))
        return armed[-1]

    yield add
    for path in armed:
        assert not path.exists(), f"{path.name} never came"
        assert len(fired(path)) == 1
        for gone in path.parent.glob(f"{path.name} was *"):
            gone.unlink()


def wait_struck(armed: Path) -> int:
    """Wait until the chosen process has reached the point where it kills or stops itself. Return its pid."""
    (pid,) = wait_until(f"{armed.name}", lambda: fired(armed), lambda: "it never came")
    return pid


# -- during snapshots and commits -------------------------------------------------------------------------------------


def test_a_rank_dies_in_the_middle_of_a_capture(waiting: tuple[Job, str], dies: Callable[..., Path]) -> None:
    job, moment = waiting
    armed = dies(Moment.CAPTURE, "rank 2")
    job.let_go(moment)
    wait_struck(armed)
    job.wait_ended()
    (incident,) = job.incidents()
    assert_incident(incident, cause="rank_exit", source="local", committed=LEAST)
    assert_identical(job)


@pytest.mark.long(keep=3)
@pytest.mark.parametrize(
    "moment",
    [Moment.SEAL_OWN, Moment.SEAL_REPLICA, Moment.REPLICA_SENT, Moment.REPLICA_RECEIVED, Moment.VOTE, Moment.COMMIT],
    ids=str,
)
def test_an_agent_dies_while_steps_are_kept(
    place: Workplace, dies: Callable[..., Path], request: pytest.FixtureRequest, moment: Moment
) -> None:
    """An agent is killed at one point of a snapshot or commit, and its ranks continue to train.

    The new agent takes over the slots, the ranks and the agreement on steps. No incident opens.
    """
    job, first = in_mid_training(
        place, request.node.name, SHAPE, steps=2 * STEPS, pace_seconds=PACE_SECONDS, width=WIDTH
    )
    seen = job.describe()
    coordinator = seen["CoordinatorNodeId"]
    (member,) = set(seen["NodeIds"]) - {coordinator}
    node = coordinator if moment is Moment.COMMIT else member
    ranks, agent = place.rank_processes(), place.agent_pid(node)
    assert os.getsid(agent) == agent, "what it is given while ranks wait is given to nobody else"
    armed = dies(moment, node)
    job.let_go(first)
    assert wait_struck(armed) == agent
    boundary = job.describe()["Boundary"]
    place.wait_all_connected([node])
    job.wait_committed(min(boundary + 1, 2 * STEPS))
    assert place.rank_processes() == ranks
    assert job.wait_ended()["Generation"] == 1
    assert job.incidents() == []
    assert_identical(job)


def test_an_agent_stands_still_in_the_middle_of_a_snapshot(
    place: Workplace, dies: Callable[..., Path], request: pytest.FixtureRequest
) -> None:
    """An agent is stopped by a signal while it receives a shard.

    Its connections stay open but silent. The ranks continue to train, and no process is restarted.
    """
    job, first = in_mid_training(
        place, request.node.name, Shape(nodes=2), steps=LONG_STEPS, pace_seconds=LONG_PACE_SECONDS
    )
    seen = job.describe()
    (node,) = set(seen["NodeIds"]) - {seen["CoordinatorNodeId"]}
    other = 1 - seen["NodeIds"].index(node)
    ranks, agent = place.rank_processes(), place.agent_pid(node)
    armed = dies(Moment.REPLICA_RECEIVED, node, signal.SIGSTOP)
    job.let_go(first)
    try:
        assert wait_struck(armed) == agent
        wait_until(
            "the agent to stand still",
            lambda: Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[0] == "T",
        )
        assert SlotState.WRITING in states_on(node, other), (
            "a chunk of the other's shard has come, and it is neither verified nor sealed"
        )
        boundary = job.describe()["Boundary"]
        told = wait_until(
            "protection to be degraded", lambda: (seen := job.protection())["ProtectionState"] == "Degraded" and seen
        )
        assert node in told["Reason"]
        job.wait("ranks to train on", lambda seen: seen["Boundary"] >= boundary + 5)
        assert SlotState.WRITING in states_on(node, other)
    finally:
        os.kill(agent, signal.SIGCONT)
    wait_until("protection to be whole again", lambda: job.protection()["ProtectionState"] == "Protected")
    job.wait_committed(job.describe()["Boundary"] + 1)
    assert place.rank_processes() == ranks
    assert job.wait_ended()["Generation"] == 1
    assert job.incidents() == []
    assert_identical(job)


def states_on(node: str, rank: int) -> set[SlotState]:
    """Return the states in the headers of a rank's slots on a node."""
    files = memory_of(memory_directory(node)).items()
    paths = [path for name, path in files if f"/rank-{rank}.slot-" in name]
    return {unpack_header(path.read_bytes()[:HEADER_BYTES]).state for path in paths}


# -- during a recovery ------------------------------------------------------------------------------------------------


@pytest.mark.long(keep=3)
@pytest.mark.parametrize(
    "moment", [Moment.PROMISED, Moment.VERIFIED, Moment.LOADED, Moment.RUNNING, Moment.STARTED], ids=str
)
def test_an_agent_dies_while_ranks_are_restarted(
    place: Workplace, waiting: tuple[Job, str], dies: Callable[..., Path], moment: Moment
) -> None:
    """A rank is killed, and during the recovery the agent of the other node dies.

    The new agent finishes the recovery.
    """
    job, first = waiting
    node = job.node_of(0)
    agent = place.agent_pid(node)
    armed = dies(moment, node)
    job.let_go(first)
    job.kill_rank(3)
    assert wait_struck(armed) == agent
    assert job.wait_ended()["Generation"] == 2
    (incident,) = job.incidents()
    assert_incident(incident, cause="rank_exit", source="local", committed=LEAST)
    assert_identical(job)


@pytest.mark.parametrize("moment", [Moment.BASE_SENT, Moment.BASE_RECEIVED], ids=str)
def test_an_agent_dies_while_a_replacement_is_filled(
    place: Workplace, waiting: tuple[Job, str], dies: Callable[..., Path], moment: Moment
) -> None:
    job, first = waiting
    nodes = job.describe()["NodeIds"]
    (spare,) = place.cluster.instances().keys() - set(nodes)
    node = spare if moment is Moment.BASE_RECEIVED else nodes[0]
    agent = place.agent_pid(node)
    armed = dies(moment, node)
    job.let_go(first)
    job.terminate(nodes[1])
    assert wait_struck(armed) == agent
    job.wait_ended()
    assert job.describe()["NodeIds"] == [nodes[0], spare]
    (incident,) = job.incidents()
    assert_incident(incident, cause="instance_terminated", source="peer", committed=LEAST)
    assert_identical(job)
