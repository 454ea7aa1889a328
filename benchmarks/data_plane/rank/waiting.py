"""Program of a rank whose model is ready before its node receives the shard to restore.

For each generation number on stdin, it runs one session, and answers with one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import everstep.training
from benchmarks.data_plane.rank.everstep_job import CommitWatch
from benchmarks.data_plane.rank.node import JOB, RUN, SOCKET
from benchmarks.data_plane.rank.state import State
from everstep.training.session import TrainingSession

COMMIT_SECONDS = 1.0
"""Longest wait for a commit before the rank trains another step."""


def launch(state: State, dump: Path, generation: int) -> dict[str, object]:
    """Run one generation, and return when the state was restored, and whether it equals `dump`.

    Generation 1 trains until a step is committed, and writes its state to `dump`. Later ones restore it.
    """
    os.environ["EVERSTEP_GENERATION"] = str(generation)
    if generation > 1:
        state.spoil()
    session = everstep.training.init(model=state.module, optimizer=state.optimizer)
    base = session.restore()
    restored = time.monotonic()
    if base:
        verified = state.equals_dump(dump)
    else:
        _keep(session, state, CommitWatch(f"{RUN}/rank-0.word", generation))
        state.dump(dump)
        verified = True
    session.close()
    return {"restored": restored, "verified": verified}


def _keep(session: TrainingSession, state: State, watch: CommitWatch) -> None:
    """Train until a step is committed on both nodes."""
    # The first steps never are, because the agents allocate slots only after them.
    is_committed = False
    while not is_committed:
        state.advance()
        step = session.boundary().step
        watch.expect(step)
        session.fence()
        is_committed = watch.wait(step, COMMIT_SECONDS)


def main(owner: Path, mebibytes: int) -> None:
    """Run one session per generation number on stdin, until it is closed."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"EVERSTEP_AGENT_SOCKET": str(owner / SOCKET), "EVERSTEP_JOB_NAME": JOB, "EVERSTEP_RUN_ID": RUN}
    state = State(mebibytes, 0)
    print("{}", flush=True)
    for line in sys.stdin:
        print(json.dumps(launch(state, owner.with_name("dump"), int(line))), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
