"""A database with the recorded incidents under other names, times and numbers.

Its clock stands still at the end of the recordings.
"""

from __future__ import annotations

from pathlib import Path

from control_plane.db.session import Database
from control_plane.loop.agents import AgentRegistry
from tests.dashboard.recording import every, load
from tests.dashboard.shuffle import deal, shuffled
from tests.fakes.cloud import FakeOperator, MemoryObjectStore
from tests.sqlite import make_migrated


class Replay:
    """All recordings, each with its own fleet and job. No agent is connected, and no loop of the control plane runs.

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
        """Name of the replayed job of each story, by the story's name."""
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

    def close(self) -> None:
        self.database.close()
