"""Program of one rank of a compared system: `python -m benchmarks.data_plane.rank.peer '<json of Launch>'`."""

from __future__ import annotations

import importlib
import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Parameters of the process of one rank."""

    adapter: str
    """Module and class below the package `systems`."""
    offers: list[str]
    rank: int
    state_mib: int
    repeats: dict[str, Any]
    meeting_port: int
    group_port: int
    """Port for the process group of the system's ranks."""
    memory: str
    """Folder on tmpfs, shared by both ranks."""
    dumps: str
    result: str

    def to_json(self) -> str:
        """Return the program's only argument."""
        return json.dumps(asdict(self))


def main(text: str) -> None:
    """Run the loop with the adapter of a `Launch` (JSON), and write the samples to its file."""
    launch = Launch(**json.loads(text))
    os.environ.update(
        RANK=str(launch.rank),
        WORLD_SIZE="2",
        LOCAL_RANK="0",
        LOCAL_WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(launch.group_port),
        GLOO_SOCKET_IFNAME="lo",
    )
    from benchmarks.data_plane.rank.loop import measure
    from benchmarks.data_plane.rank.repeats import Repeats
    from benchmarks.data_plane.rank.state import Meeting, State

    meeting = Meeting(launch.rank, launch.meeting_port)
    module, _, name = launch.adapter.partition(":")
    adapter = getattr(importlib.import_module(f"benchmarks.data_plane.rank.systems.{module}"), name)
    state = State(launch.state_mib, launch.rank)
    samples = measure(
        lambda *_: adapter(state, meeting, Path(launch.memory)),
        launch.offers,
        state,
        meeting,
        Repeats(**launch.repeats),
        Path(launch.dumps),
    )
    Path(launch.result).write_text(json.dumps(samples.as_dict()))
    meeting.leave()
    sys.stdout.flush()
    os._exit(0)  # exit without waiting for threads, because some systems' threads never end


if __name__ == "__main__":
    main(sys.argv[1])
