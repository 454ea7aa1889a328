"""A database with the recorded incidents under other names, times and numbers.

Its clock stands still at the end of the recordings.
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import select

from control_plane.core.states import NodeState
from control_plane.db.models import NodeRow
from control_plane.db.session import Database
from control_plane.loop.agents import AgentRegistry
from everstep.protocol.agent_messages import Hello
from everstep.protocol.ids import FleetName, NodeId
from tests.dashboard.recording import every, load
from tests.dashboard.shuffle import deal, shuffled
from tests.fakes.cloud import FakeOperator, MemoryObjectStore
from tests.sqlite import make_migrated

CONNECTED = (NodeState.ASSIGNED, NodeState.SPARE)
"""States of nodes whose agents are connected to a replayed control plane."""


class Replay:
    """All recordings, each with its own fleet and job. No loop of the control plane runs.

    The agents of nodes that work or wait for a job are connected, as they were when the incidents were recorded.

    Args:
        directory: folder for the database.
        seed: determines names, times and numbers.

    Raises:
        RecordingStale: a recording does not fit the tables. The message names the command that records it again.
    """

    def __init__(self, directory: Path, seed: int) -> None:
        recordings = every()
        dealt = deal(seed, len(recordings))
        self.now = dealt[0].ends_at
        self.jobs = {recording.story: each.job for recording, each in zip(recordings, dealt, strict=True)}
        """Name of the replayed job of each recorded incident, by the name of its story (`tests.dashboard.record`)."""
        self.operator = FakeOperator(now=self.now)
        self.objects = MemoryObjectStore(*(f"everstep-{each.fleet}" for each in dealt))
        self.registry = AgentRegistry()
        make_migrated(directory / "everstep.db")
        self.database = Database(f"sqlite:///{directory / 'everstep.db'}")
        load(
            (shuffled(recording, each) for recording, each in zip(recordings, dealt, strict=True)),
            self.database,
            self.objects,
        )
        self._connect_agents()

    def _connect_agents(self) -> None:
        with self.database.read() as session:
            rows = session.execute(
                select(NodeRow.id, NodeRow.fleet_name, NodeRow.address).where(NodeRow.state.in_(CONNECTED))
            )
            nodes = [(NodeId(row.id), FleetName(row.fleet_name), row.address) for row in rows]
        for node_id, fleet, address in nodes:
            hello = Hello(
                node_id=node_id,
                agent_id=f"agent of {node_id}",
                address=address,
                peer_port=4000,
                memory_bytes=1 << 30,
                version="1",
            )
            self.registry.accept(hello, fleet)

    def close(self) -> None:
        self.database.close()
