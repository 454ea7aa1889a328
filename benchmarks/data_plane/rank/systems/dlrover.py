"""Adapter of DLRover's flash checkpoint, which copies the state into the memory of the rank's node. No master runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch.distributed as dist

from benchmarks.data_plane.rank.state import Meeting, State

SAVER = "from dlrover.trainer.torch.flash_checkpoint.engine import start_async_save; start_async_save()"


class DlroverFlash:
    """Adapter of DLRover's flash checkpoint; see `Adapter`. Its released version cannot restore from a peer.

    The saver is a separate process, as under `dlrover-run`, because one that the training process forks sometimes fails
    to start.
    """

    def __init__(self, state: State, meeting: Meeting, memory: Path) -> None:
        rank = str(meeting.rank)
        os.environ.update(
            TORCHELASTIC_RUN_ID=f"bench{os.getppid()}-{rank}",
            NODE_RANK=rank,
            GROUP_RANK=rank,
            GROUP_WORLD_SIZE="2",
            NODE_NUM="2",
        )
        self._saver = subprocess.Popen([sys.executable, "-c", SAVER])
        os.environ["ROLE_NAME"] = "dlrover-trainer"
        dist.init_process_group("gloo")
        from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

        self._state = state
        self._memory_only = StorageType.MEMORY
        self._checkpointer = DdpCheckpointer(
            str(memory), local_shard_num=1, global_shard_num=2, comm_backend="gloo", replica_count=0
        )

    def snapshot(self, step: int) -> None:
        self._checkpointer.save_checkpoint(step, self._state.tree(), storage_type=self._memory_only)

    def fence(self) -> None: ...

    def protect(self) -> None: ...

    def restore_local(self) -> None:
        tree = self._checkpointer.load_checkpoint()
        if not tree:
            raise RuntimeError("DLRover returns no checkpoint")
        self._state.load(tree)

    def close(self) -> None:
        self._checkpointer._engine._shm_handler.unlink()
        self._saver.kill()
        self._saver.wait()
