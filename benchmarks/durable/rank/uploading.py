"""Runs a rank that trains in blocks of steps. In a block, a system stores one checkpoint in S3 in the background.

    warm-up ─▶ block without a checkpoint ─▶ block with Everstep ─▶ block with DCP ─▶ … ─▶ the same blocks again

One launch contains all systems, because step times of separate launches differ by more than their effect: `floor` (no
session), `everstep` (the agents upload one snapshot), and `dcp` (`async_save` with a process as the writer). An upload
ends before the next block begins.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import everstep.training
from benchmarks.data_plane.rank.memory import own_tree
from benchmarks.data_plane.rank.state import pause
from benchmarks.durable.rank.dcp_s3 import S3Writer
from benchmarks.durable.rank.model import Training, freeze_imports
from benchmarks.durable.rank.node import STORED
from benchmarks.durable.rank.sizes import SETTLE_STEPS, ModelSize
from benchmarks.traces import whole_rows

WARM_UP_PERIODS = 1
"""Blocks of warm-up, in which the session audits its first snapshots and the agent allocates slots."""
STORE_SECONDS = 60.0
"""Seconds for the end of Everstep's upload after the counted steps."""
LOOK_SECONDS = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """JSON of the benchmark's main process."""

    size: ModelSize
    order: Sequence[str]
    """System of each block."""
    steps: int
    """Number of counted steps in each block."""


@dataclass(kw_only=True)
class Block:
    """One rank's measurements of one block. Times are seconds of the monotonic clock."""

    system: str
    saved_at: float = 0.0
    """End of the step that the checkpoint stores."""
    resumed_at: float = 0.0
    """Return of the call that begins the checkpoint."""
    stored_at: float = 0.0
    """Time at which this rank's part was stored."""
    ended_at: list[float] = field(default_factory=list)
    """End of each counted step."""
    waited: list[float] = field(default_factory=list)
    """Seconds of each counted step in which the training thread waited for a core, a lock or an event."""
    # A core that the hypervisor stops counts as running, so other virtual machines hardly change this time.
    save_seconds: float = 0.0
    """Blocked time of training. For Everstep, the median of the block's snapshots, with the wait for the copy."""
    state_bytes: int = 0
    """Bytes of this rank."""
    helper_seconds: float = 0.0
    """CPU time of this rank's node and child processes, from the checkpoint's step to the block's end."""


class Nothing:
    """The system `floor`, base class of the others."""

    def __init__(self, training: Training, settings: Settings) -> None:
        self._training = training
        self._settings = settings

    def train(self) -> None:
        self._training.forward_and_backward()
        self._training.step()

    def save(self, _: Block) -> float:
        """Do nothing. Subclasses begin to store the last step, and return the blocked seconds."""
        return 0.0

    def finish(self, _: Block) -> None:
        """Do nothing. Subclasses wait for the checkpoint, and delete it."""


class Everstep(Nothing):
    """The system `everstep`: a session with the default `MaxSlowdown`.

    `EverySteps` requests an upload of the last uncounted step, or of the next snapshot if the budget skips it.
    """

    def __init__(self, training: Training, settings: Settings) -> None:
        super().__init__(training, settings)
        self._session = everstep.training.init(model=training.model, optimizer=training.optimizer)
        self._session.restore()
        self._step = self._due = self._count = 0
        for _ in range(WARM_UP_PERIODS * period(settings) - SETTLE_STEPS):
            self.train()

    def train(self) -> None:
        super().train()
        self._step = self._session.boundary().step

    def save(self, _: Block) -> float:
        self._due, self._count = self._step, len(self._session.blocked_seconds)
        return 0.0

    def finish(self, block: Block) -> None:
        block.stored_at = self._stored_at()
        taken = self._session.blocked_seconds
        block.save_seconds = statistics.median(taken[min(self._count, len(taken) - 1) :])

    def _stored_at(self) -> float:
        path = Path(os.environ["EVERSTEP_AGENT_SOCKET"]).parent / STORED
        deadline = time.monotonic() + STORE_SECONDS
        while time.monotonic() < deadline:
            for step, at in whole_rows(path.read_text()) if path.exists() else ():
                if int(step) >= self._due:
                    return float(at)
            pause(LOOK_SECONDS)
        raise TimeoutError(f"no step since {self._due} was stored within {STORE_SECONDS:.0f} s")

    def close(self) -> None:
        self._session.close()


class Dcp(Nothing):
    """The system `dcp`, which sends one object per rank to S3."""

    def __init__(self, training: Training, settings: Settings) -> None:
        super().__init__(training, settings)
        model, optimizer = get_state_dict(training.model, training.optimizer)
        # The dict contains the live tensors, not copies of them.
        self._state: dict[str, Any] = {"model": model, "optimizer": optimizer}
        # Set all four options of DCP's staging, because their defaults raise assertions on a machine without a GPU.
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False
            )
        )
        self._count = 0
        self._pending: Future[Any] | None = None
        warm_up = Block(system="")
        self.save(warm_up)
        self.finish(warm_up)

    def save(self, block: Block) -> float:
        self._count += 1
        begun = time.perf_counter()
        found = dcp.async_save(
            self._state,
            storage_writer=S3Writer(f"dcp{self._count}"),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            async_stager=self._stager,
        )
        pending: Future[Any] = getattr(found, "upload_completion", found)
        taken = time.perf_counter() - begun

        def note(_: object) -> None:
            block.stored_at = time.monotonic()

        pending.add_done_callback(note)
        self._pending = pending
        return taken

    def finish(self, _: Block) -> None:
        assert self._pending is not None
        self._pending.result()
        dist.barrier()
        if dist.get_rank() == 0:
            S3Writer(f"dcp{self._count}").remove()

    def close(self) -> None:
        """Release the memory shared with DCP's process."""
        self._stager.close()


SYSTEMS: dict[str, Callable[[Training, Settings], Nothing]] = {
    "floor": Nothing,
    "everstep": Everstep,
    "dcp": Dcp,
}


def period(settings: Settings) -> int:
    """Return the number of steps in the turn of one system, and between two checkpoints of Everstep."""
    return SETTLE_STEPS + settings.steps


def helper_seconds() -> float:
    """Return the CPU seconds of this rank's node and child processes."""
    mine = os.getpid()
    pids = [int(os.environ["BENCH_NODE_PID"]), *(pid for pid in own_tree() if pid != mine)]
    # Field 14 of the file is the user time, field 15 the system time. Both include threads that have ended.
    stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(ticks) for stat in stats for ticks in stat[11:13]) / os.sysconf("SC_CLK_TCK")


def _waiting_seconds(work: Callable[[], None]) -> float:
    """Return the seconds in which this thread did not run during `work`."""
    begun, used = time.monotonic(), time.thread_time()
    work()
    return time.monotonic() - begun - (time.thread_time() - used)


def run(settings: Settings) -> list[Block]:
    """Train all blocks in order, and return the measurements of each."""
    training = Training(settings.size, seed=7)
    training.forward_and_backward()
    training.step()  # Creates the optimizer's state, which the systems store, too.
    systems = {name: SYSTEMS[name](training, settings) for name in dict.fromkeys(settings.order)}
    blocks = []
    for name in settings.order:
        system, block = systems[name], Block(system=name, state_bytes=training.state_bytes)
        for _ in range(SETTLE_STEPS):
            system.train()
        helpers = helper_seconds()
        block.saved_at = time.monotonic()
        block.save_seconds = system.save(block)
        block.resumed_at = time.monotonic()
        for _ in range(settings.steps):
            block.waited.append(_waiting_seconds(system.train))
            block.ended_at.append(time.monotonic())
        system.finish(block)
        block.helper_seconds = helper_seconds() - helpers
        dist.barrier()
        blocks.append(block)
    for system in systems.values():
        if isinstance(system, Everstep | Dcp):
            system.close()
    return blocks


def main(words: str) -> None:
    """Train all blocks, print the measurements as one line, and exit when stdin is closed."""
    freeze_imports()
    given = json.loads(words)
    settings = Settings(**{**given, "size": ModelSize(**given["size"])})
    dist.init_process_group("gloo")
    blocks = run(settings)
    print(json.dumps([asdict(block) for block in blocks]), flush=True)
    sys.stdin.read()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
