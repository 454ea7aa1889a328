"""Runs the unchanged `train.py` of its folder, and records every boundary and the blocked time of every snapshot.

A line of `$BENCH_TRACE/rank<r>` has generation, finished steps, monotonic seconds, and snapshots. A restarted rank
appends. After training, the rank writes the blocked times to `blocked.json`.
"""

from __future__ import annotations

import json
import os
import runpy
import time
from pathlib import Path

import everstep.training
from everstep.training.session import Control, TrainingSession

directory = Path(os.environ["BENCH_TRACE"])
rank, generation = os.environ["RANK"], os.environ.get("EVERSTEP_GENERATION", "0")
sessions: set[TrainingSession] = set()
boundary = TrainingSession.boundary

with (directory / f"rank{rank}").open("a", buffering=1) as trace:

    def traced_boundary(session: TrainingSession) -> Control:
        """Call the session's `boundary`, then write a line to the trace."""
        control = boundary(session)
        trace.write(f"{generation} {control.step} {time.monotonic():.6f} {len(session.blocked_seconds)}\n")
        sessions.add(session)
        return control

    TrainingSession.boundary = traced_boundary  # type: ignore[method-assign, assignment]
    runpy.run_path(str(Path(__file__).with_name("train.py")), run_name="__main__")

(session,) = sessions
(everstep.training.output_dir() / "blocked.json").write_text(json.dumps(list(session.blocked_seconds)))
